"""tensor_parallel's `Config`: rules of the user shard a model of any class, which computes and trains as one process."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn

import oslo_models as tp
from oslo_models.compat.tensor_parallel.state_actions import Scale, Split, SplitInChunks, SplitInGroupedChunks

from support.pool import Pool
from support.reference import TOLERANCE, all_outputs

WIDTH, HEADS, WORDS = 10, 5, 7


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.heads = nn.LayerNorm(WIDTH), HEADS
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 13), nn.Linear(13, WIDTH)

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))

    def forward(self, x: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
        x = x + scale * self.attend(x)
        return {"hidden": x + self.down(F.gelu(self.up(x)))}


class Transformer(nn.Module):
    """Written by hand; its head is tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)
        self.head.weight = self.words.weight
        self.register_buffer("slopes", torch.arange(1.0, 1.0 + WIDTH))

    def forward(self, ids: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        x = self.words(ids) * F.pad(self.slopes, (0, WIDTH - len(self.slopes))).sum()
        x = x if bias is None else x + bias
        for block in self.blocks:
            x = block(x, scale=0.5)["hidden"]
        return self.head(x), x


def halves(tensor: Tensor, rank: int, n: int) -> Tensor:
    """A function of the user, which is no action: rows of the ranks in turn."""
    return tensor[rank::n]


def rules(n: int) -> Any:
    heads = {"chunk_size": WIDTH // HEADS}
    return tp.Config(
        state_rules={
            r"qkv\.(weight|bias)$": SplitInGroupedChunks(n, 0, num_groups=3, **heads),
            r"\.out\.weight$": SplitInChunks(n, 1, **heads),
            r"\.(out|down)\.bias$": Scale(n),
            r"\.up\.": partial(halves, n=n),
            r"\.down\.weight$": (lambda tensor, rank: tensor[:, rank::n], None),
            r"words\.weight$": "split 1",
            r"^head\.bias$": lambda tensor, rank: tensor / n,
        },
        input_rules={r"^head$": {0: Split(n, -1)}},
        output_rules={r"\.out$": {0: "sum"}, r"down$": {"0": "sum"}, r"words$": {0: "gather -1"}, r"^head$": {0: "sum"}},
        attr_rules={
            r"blocks\.\d$": {"heads": lambda heads, rank: len(torch.arange(heads).tensor_split(n)[rank])},
        },
    )


def transformer(seed: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(seed)
    return Transformer().double(), (torch.randint(WORDS, (3, 4)), torch.randn(3, 4, WIDTH).double())


def mlp(seed: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(seed)
    layers = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4), nn.LayerNorm(4), nn.Linear(4, 5)
    return nn.Sequential(*layers).double(), (torch.randn(5, 6).double(),)


def mlp_rules(n: int) -> Any:
    return tp.Config(
        state_rules={r"^0\.": "split 0", r"^1\.(?!num)": Split(n, 0), r"^3\.weight": Split(n, 1), r"^5": Split(n, 0)},
        input_rules={},
        output_rules={r"^3$": {0: lambda x, rank: x * n}, r"^4$": {0: "scale"}, r"^5$": {0: "gather"}},
        attr_rules={},
    )


def plain_mlp_rules(n: int) -> Any:
    """The sum of a layer whose inputs are split, and its bias on rank 0 only."""
    given = mlp_rules(n)
    state = {r"^3\.bias": lambda tensor, rank: tensor * (rank == 0), **given.state_rules}
    return tp.Config(state, {r"^5$": {0: "scale"}}, {r"^3$": {0: "sum"}, r"^5$": {0: finish}}, {})


def finish(x: Tensor, rank: int) -> Tensor:
    return x


def step(model: Any, inputs: tuple[Tensor, ...]) -> tuple[Any, list[Tensor | None]]:
    """Outputs and the gradients of inputs, after a step of Adam, which hides no wrong scale of a stored parameter."""
    inputs = tuple(x.clone().requires_grad_(x.is_floating_point()) for x in inputs)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    output = model(*inputs)
    all_outputs(output).backward()
    optimizer.step()
    return output, [x.grad for x in inputs]


def largest_difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max((one[key].double() - other[key].double()).abs().max().item() for key in one)


def same(one: Any, other: Any) -> bool:
    pairs = zip(torch.utils._pytree.tree_leaves(one), torch.utils._pytree.tree_leaves(other), strict=True)
    return all(a is b is None or torch.allclose(a, b, rtol=0, atol=TOLERANCE) for a, b in pairs)


@pytest.mark.parametrize("n", [2, 3])
def test_a_transformer_written_by_hand_trains_as_on_one_process(n: int, seed: int) -> None:
    model, inputs = transformer(seed)
    config = rules(n)
    other = tp.tensor_parallel(copy.deepcopy(model), ["cpu"] * n, config, inputs=inputs)
    assert other.tensor_parallel_config is config and isinstance(other, (tp.TensorParallel, Transformer))
    assert [part.blocks[0].qkv.weight.shape[0] for part in other.parts] == [18, 12] if n == 2 else [12, 12, 6]
    for _ in range(2):
        assert same(step(other, inputs), step(model, inputs))
    assert largest_difference(other.state_dict(), model.state_dict()) < 1e-8  # Adam enlarges rounding
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    assert other.clip_grad_norm_(0.1).item() == pytest.approx(norm.item(), abs=1e-8)
