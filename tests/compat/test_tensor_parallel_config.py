"""tensor_parallel's `Config`: rules shard a model of any class, which computes and trains as one process does."""

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
    """Transformer in plain torch, with its head tied to the embedding."""

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
    """User function without an action: interleave the rows over the ranks."""
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
        output_rules={
            r"\.out$": {0: "sum"},
            r"down$": {"0": "sum"},
            r"words$": {0: "gather -1"},
            r"^head$": {0: "sum"},
        },
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
    """Rules for a sharded BatchNorm with its buffers, and for a sum with the bias of rank 0 only."""
    return tp.Config(
        state_rules={
            r"^[01]\.(?!num)": "split 0",
            r"^3\.weight": Split(n, 1),
            r"^3\.bias": lambda tensor, rank: tensor * (rank == 0),
            r"^5": Split(n, 0),
        },
        input_rules={},
        output_rules={r"^3$": {0: "sum"}, r"^5$": {0: "gather"}},
        attr_rules={},
    )


def step(model: Any, inputs: tuple[Tensor, ...]) -> tuple[Any, list[Tensor | None]]:
    """Return outputs and input gradients after a step of Adam, which reveals a wrong scale of a stored parameter."""
    inputs = tuple(x.clone().requires_grad_(x.is_floating_point()) for x in inputs)
    optimizer = torch.optim.Adam(model.parameters(), 0.01, eps=1e-3)
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
    assert largest_difference(other.state_dict(), model.state_dict()) < TOLERANCE
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    assert other.clip_grad_norm_(0.1).item() == pytest.approx(norm.item(), abs=1e-8)


def test_a_plain_module_is_tried_at_its_first_call_and_saved_in_full(seed: int) -> None:
    model, inputs = mlp(seed)
    other: Any = tp.TensorParallel(copy.deepcopy(model), ["cpu"] * 3, tensor_parallel_config=mlp_rules(3))
    assert other._untried and [part[0].weight.shape[0] for part in other.parts] == [3, 3, 2]
    assert same(step(other, inputs), step(model, inputs)) and not other._untried
    other.eval(), model.eval()
    assert same(other(*inputs), model(*inputs))
    full = other.state_dict()
    assert largest_difference(full, model.state_dict()) < TOLERANCE
    empty: Any = tp.tensor_parallel(mlp(seed + 1)[0], ["cpu"] * 3, mlp_rules(3))
    converted = tp.convert_state_dict(full, empty.tensor_parallel_config, 3)
    assert converted["parts.2.0.weight"].shape == (2, 6) and converted["parts.2.1.running_mean"].shape == (2,)
    empty.load_state_dict(converted)
    assert largest_difference(empty.state_dict(), full) == 0
    assert "dimension 0" in str(empty.sharding_report())


@pytest.mark.parametrize("options", [{}, {"delay_init": True}, {"delay_init": True, "tensor_parallel_config": None}])
def test_a_module_without_weights_is_loaded_after_it_is_sharded(options: Any, seed: int) -> None:
    """With a derived plan, or with rules."""
    accelerate = pytest.importorskip("accelerate")
    model, inputs = mlp(seed)
    with accelerate.init_empty_weights():
        empty = mlp(seed)[0]
    options = {**options, **({"tensor_parallel_config": mlp_rules(2)} if len(options) == 2 else {})}
    other: Any = tp.tensor_parallel(empty, ["cpu"] * 2, **options)
    for name, value in tp.convert_state_dict(model.state_dict(), other.tensor_parallel_config, 2).items():
        accelerate.utils.set_module_tensor_to_device(other, name, "cpu", value=value)
    assert same(step(other, inputs), step(model, inputs)) and not other.waits_for_call


def gpt2(seed: int) -> Any:
    torch.manual_seed(seed)
    config = hf.GPT2Config(vocab_size=37, n_embd=24, n_layer=2, n_head=3, n_positions=16)
    return hf.GPT2LMHeadModel(config).double().eval()


def gpt2_rules(n: int) -> Any:
    size = partial(lambda value, rank, unit: unit * len(torch.arange(value // unit).tensor_split(n)[rank]), unit=8)
    return tp.Config(
        state_rules={
            r"c_attn\.weight$": SplitInGroupedChunks(n, 1, num_groups=3, chunk_size=8),
            r"c_attn\.bias$": SplitInGroupedChunks(n, 0, num_groups=3, chunk_size=8),
            r"attn\.c_proj\.weight$": SplitInChunks(n, 0, chunk_size=8),
            r"c_proj\.bias$": Scale(n),
            r"c_fc\.weight$": Split(n, 1),
            r"c_fc\.bias$": Split(n, 0),
            r"mlp\.c_proj\.weight$": Split(n, 0),
            r"wte\.weight$": Split(n, 1),
        },
        input_rules={r"lm_head$": {0: "split -1"}},
        output_rules={
            r"[0-9]\.attn$": {0: "sum"},
            r"mlp$": {0: "sum"},
            r"wte$": {0: "gather -1"},
            "lm_head": {0: "sum"},
        },
        attr_rules={r"[0-9]\.attn$": {"split_size": size, "embed_dim": size}},
    )


def test_a_model_of_transformers_generates_by_rules(seed: int, tmp_path: Any) -> None:
    model = gpt2(seed)
    other = tp.tensor_parallel(copy.deepcopy(model), ["cpu"] * 2, gpt2_rules(2))
    assert isinstance(other, tp.TensorParallelPreTrainedModel) and isinstance(other, hf.GPT2LMHeadModel)
    ids = torch.randint(3, 37, (2, 5))
    options = {"max_new_tokens": 4, "num_beams": 2, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(other.generate(ids, **options), model.generate(ids, **options))
    assert not other._untried and other.num_parameters() == model.num_parameters()
    assert same(other(input_ids=ids, labels=ids).loss, model(input_ids=ids, labels=ids).loss)
    other.save_pretrained(tmp_path)
    again = hf.GPT2LMHeadModel.from_pretrained(tmp_path, dtype=torch.float64)
    assert largest_difference(again.state_dict(), model.state_dict()) == 0


def rank_of_a_launcher(seed: int, n: int) -> tuple[Any, dict[str, Tensor]]:
    model, inputs = transformer(seed)
    model = tp.tensor_parallel(model, tensor_parallel_config=rules(n), distributed=True)
    result = step(model, inputs)
    return torch.utils._pytree.tree_map_only(Tensor, Tensor.detach, result), model.full_state_dict()


def test_ranks_of_a_launcher_follow_the_same_rules(pool: Pool, seed: int) -> None:
    model, inputs = transformer(seed)
    expected = step(model, inputs)
    for found, state in pool.run(2, rank_of_a_launcher, seed, 2):
        assert same(found, expected) and largest_difference(state, model.state_dict()) < TOLERANCE


def config_with(**rules: Any) -> Any:
    kinds = ["state_rules", "input_rules", "output_rules", "attr_rules"]
    return tp.Config(**{kind: rules.get(kind, {}) for kind in kinds})


@pytest.mark.parametrize(
    ("message", "given"),
    [
        (r"state_rules: .*; did you mean 0.weight", {"state_rules": {r"^0.wieght": Split(2, 0)}}),
        (r"output_rules: '7\$' matches the name of no module; there are", {"output_rules": {"7$": {0: "sum"}}}),
        ("'sums' of '0' is not an operation; did you mean sum", {"output_rules": {"0": {0: "sums"}}}),
        ("'sum' of '0' is not an operation; known are split DIM, scale", {"state_rules": {"0": "sum"}}),
        ("'split' of '0' needs 1 dimensions", {"input_rules": {"0": {0: "split"}}}),
        ("gives in_features 3, which is not a function", {"attr_rules": {"0": {"in_features": 3}}}),
        ("has no attribute 'heads'", {"attr_rules": {"0": {"heads": lambda value, rank: value}}}),
        ("is for 3 ranks, and the model is sharded over 2", {"state_rules": {"0": Split(3, 0)}}),
        ("does not divide dimension 0", {"state_rules": {r"0\.": SplitInChunks(2, 0, 3)}}),
        ("the buffer 1.running_mean does not return shards", {"state_rules": {"running_mean": Scale(2)}}),
        ("sharded over 2 ranks, differs", {"output_rules": {"5": {0: "sum"}}}),
        ("returns no 1, but", {"output_rules": {"5": {1: "sum"}}}),
        ("contradict for 0 of 5", {"output_rules": {"5": {0: "sum"}, "^5$": {"0": "scale"}}}),
    ],
)
def test_rules_that_do_not_fit_are_refused(message: str, given: Any) -> None:
    model, inputs = mlp(0)
    with pytest.raises(ValueError, match=message):
        tp.tensor_parallel(model, ["cpu"] * 2, config_with(**given), inputs=inputs)


def test_arguments_that_do_not_go_together_are_refused() -> None:
    model, config = mlp(0)[0], mlp_rules(2)
    for message, options in (
        ("must be a Config", {"tensor_parallel_config": {}}),
        ("pass one of them", {"tensor_parallel_config": config, "plan": "derive"}),
        ("do not go with tensor_parallel_config", {"tensor_parallel_config": config, "sharded": True}),
    ):
        with pytest.raises(ValueError, match=message):
            tp.tensor_parallel(model, ["cpu"] * 2, **options)
