"""Dropout under tensor parallelism, exactly: every mask that the ranks drew is replayed in one process.

Masks of replicated activations have to be the same on all ranks, those of divided ones independent.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
import zoo
from float64 import lifted_casts
from pool import Pool
from reference import TOLERANCE, differ, full_gradients, full_parameters, parallel, whole
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedConfig

from oslo_models import registry
from oslo_models.modeling.apply_plan import _uses_dropout
from oslo_models.sharding.layout import Layout

RATE = 0.3
Weights = dict[str, Tensor]
Batch = dict[str, Tensor]
Gradients = Mapping[str, Tensor | None]


class _Dropouts(TorchFunctionMode):
    """Hands every call of ``F.dropout`` that may drop something to `drop`."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not F.dropout:
            assert "dropout" not in func.__name__ or func in (torch.dropout, F.dropout), func
            return func(*args, **kwargs)
        x, p, training, inplace = self._bind(*args, **kwargs)
        assert not inplace
        return self.drop(x, p) if training and p else x

    @staticmethod
    def _bind(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> tuple[Any, ...]:
        return x, p, training, inplace

    def drop(self, x: Tensor, p: float) -> Tensor:
        raise NotImplementedError


class Recorder(_Dropouts):
    """Dropout as it is, with the factors noted that each call multiplies its input with."""

    def __init__(self) -> None:
        super().__init__()
        self.masks: list[Tensor] = []

    def drop(self, x: Tensor, p: float) -> Tensor:
        state = torch.get_rng_state()
        mask = F.dropout(torch.ones_like(x), p)
        torch.set_rng_state(state)
        dropped = F.dropout(x, p)
        assert torch.allclose(dropped, x * mask, rtol=1e-15, atol=0)
        self.masks.append(mask.detach())
        return dropped


class Replay(_Dropouts):
    """Multiplies with given factors instead of drawing any."""

    def __init__(self, masks: Sequence[Tensor]) -> None:
        super().__init__()
        self.masks: Iterator[Tensor] = iter(masks)

    def drop(self, x: Tensor, p: float) -> Tensor:
        mask = next(self.masks)
        assert mask.shape == x.shape
        return x * mask


def step_with_recorded_masks(
    name: str, config: PreTrainedConfig, weights: Weights, batch: Batch, n: int, seed: int
) -> tuple[Tensor, Gradients, list[Tensor], dict[str, Layout]]:
    """A step of this rank: loss, gradients, masks in the order of their calls, and how the parameters are divided."""
    model = parallel(name, config, weights, n, attn_implementation="eager")
    torch.manual_seed(seed)
    with lifted_casts(), Recorder() as recorder:
        loss = model(**batch).loss
    loss.backward()
    return loss.detach(), full_gradients(model), recorder.masks, model.layouts


def join(masks: Sequence[Tensor], whole_shape: Sequence[int]) -> tuple[Tensor, bool]:
    """The mask of the whole activation from those of the ranks, and whether it was divided."""
    first = masks[0]
    if tuple(first.shape) == tuple(whole_shape):
        assert all(torch.equal(first, mask) for mask in masks), "a replicated activation, and masks differ"
        return first, False
    (dim,) = (dim for dim, size in enumerate(whole_shape) if first.shape[dim] != size)
    return torch.cat(list(masks), dim), True


class Shapes(_Dropouts):
    """Notes the shapes of what is dropped, and drops nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def drop(self, x: Tensor, p: float) -> Tensor:
        self.shapes.append(tuple(x.shape))
        return x


def check_dropout(pool: Pool, name: str, variant: str, n: int, seed: int) -> None:
    """Loss and gradients with the ranks' masks are those of one process with the same masks."""
    config = zoo.config(variant, dropout=RATE)
    model = whole(name, config, seed, attn_implementation="eager")
    weights, batch = full_parameters(model), zoo.batch(name, config, seed)
    arguments = (name, config, weights, batch, n, seed)
    losses, gradients, masks, layouts = zip(*pool.run(n, step_with_recorded_masks, *arguments), strict=True)
    with lifted_casts(), Shapes() as calls:
        model(**batch)
    assert calls.shapes
    assert {len(calls.shapes)} == {len(own) for own in masks}
    joined = [join(of_ranks, shape) for of_ranks, shape in zip(zip(*masks, strict=True), calls.shapes, strict=True)]
    with lifted_casts(), Replay([mask for mask, _ in joined]):
        loss = model(**batch).loss
    loss.backward()
    lines = []
    for rank in range(n):
        lines += differ(f"loss of rank {rank}", losses[rank], loss.detach(), TOLERANCE)
        for key, gradient in full_gradients(model).items():
            expected = None if gradient is None else layouts[rank][key].shard(gradient, rank)
            lines += differ(f"gradient of {key} on rank {rank}", gradients[rank][key], expected, TOLERANCE)
    assert not lines, "\n".join(lines)
    check_masks([mask for mask, divided in joined if divided], [mask for mask, divided in joined if not divided], masks)


def check_masks(divided: list[Tensor], replicated: list[Tensor], of_ranks: Sequence[list[Tensor]]) -> None:
    """No two masks are the same, ranks do not drop the same, and about as much is dropped as should be."""
    assert divided
    for masks in of_ranks:
        large = [mask for mask in masks if mask.numel() > 100]
        for one, other in itertools.combinations(large, 2):
            assert one.shape != other.shape or not torch.equal(one, other)
    for masks in zip(*of_ranks, strict=True):
        a, b = masks[:2]
        if a.shape == b.shape and a.numel() > 50 and not any(torch.equal(a, mask) for mask in replicated):
            agreement = ((a == 0) == (b == 0)).double().mean().item()  # 0.58 when independent
            assert agreement < 0.95, "ranks drop the same of a divided activation"
    for kind in filter(None, (divided, replicated)):
        dropped = torch.cat([(mask == 0).flatten() for mask in kind]).double()
        assert abs(dropped.mean().item() - RATE) < 6 * (RATE / len(dropped)) ** 0.5


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("variant", zoo.FOUNDING)
def test_dropout(pool: Pool, variant: str, n: int, seed: int) -> None:
    check_dropout(pool, zoo.lm_head(variant), variant, n, seed)


@pytest.mark.parametrize("variant", ["bert-decoder", "gpt2-cross", "t5-gated-untied", "llama-one-kv"])
def test_dropout_of_other_configurations(pool: Pool, variant: str, seed: int) -> None:
    check_dropout(pool, zoo.lm_head(variant), variant, 2, seed)


@pytest.mark.parametrize(
    ("variant", "name"),
    [
        *(
            ("gpt2", "GPT2DoubleHeadsModel"),
            ("bert", "BertForSequenceClassification"),
            ("t5", "T5ForTokenClassification"),
        ),
        *(("deberta", "DebertaForQuestionAnswering"), ("xlnet", "XLNetLMHeadModel")),  # amid regions, and bare heads
    ],
)
def test_dropout_in_heads(pool: Pool, variant: str, name: str, seed: int) -> None:
    check_dropout(pool, name, variant, 2, seed)


class _Interruption(Exception):
    pass


def interrupt(*_: Any) -> None:
    raise _Interruption


def check_interruption(name: str, config: PreTrainedConfig, weights: Weights, batch: Batch, seed: int) -> None:
    """Wherever a forward is left by an exception, the common stream goes on as common, and the model works on."""
    model = parallel(name, config, weights, 2, torch.float32, attn_implementation="eager")
    torch.manual_seed(seed)
    undisturbed = model(**batch).loss
    drawn = []
    inner = [module for module in model.modules() if not list(module.children())]
    for index, module in enumerate(inner):
        for register in (module.register_forward_pre_hook, module.register_forward_hook):
            handle = register(interrupt)
            torch.manual_seed(seed + index)
            try:
                model(**batch)
            except _Interruption:
                drawn.append(torch.rand(2))
            finally:
                handle.remove()
    assert len(drawn) > len(inner)  # most modules are called once, and interrupted before and after
    torch.manual_seed(seed)
    assert torch.equal(model(**batch).loss, undisturbed)
    mine = torch.stack(drawn)
    everyone = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(everyone, mine)
    apart = (everyone[0] != everyone[1]).any(1).nonzero().flatten().tolist()
    assert not apart, f"after {len(apart)} of {len(drawn)} interruptions the ranks draw differently"


@pytest.mark.parametrize("variant", ["gpt2", "bert", "t5", "llama"])
def test_an_exception_amid_a_forward(pool: Pool, variant: str, seed: int) -> None:
    name, config = zoo.lm_head(variant), zoo.config(variant, dropout=RATE)
    weights = full_parameters(whole(name, config, seed, torch.float32))
    pool.run(2, check_interruption, name, config, weights, zoo.batch(name, config, seed, torch.float32), seed)


def draws_of_evaluation(name: str, config: PreTrainedConfig, batch: Batch, seed: int) -> None:
    """In evaluation nothing is drawn; without any dropout nothing is drawn in training either."""
    cls: Any = registry.find(name)
    for rate, training in ((RATE, False), (0.0, True)):
        for key in [key for key in config.to_dict() if "pdrop" in key]:
            setattr(config, key, rate)
        model = cls.from_config_with_parallel(config, tensor_parallel_size=2, seed=seed).train(training)
        before = torch.get_rng_state()
        model(**batch)
        assert torch.equal(torch.get_rng_state(), before), (rate, training)


def test_nothing_is_drawn_without_need(pool: Pool, seed: int) -> None:
    config = zoo.config("gpt2")
    pool.run(2, draws_of_evaluation, "GPT2LMHeadModel", config, zoo.batch("GPT2LMHeadModel", config, seed), seed)


def losses_with_dropout(config: PreTrainedConfig, batch: Batch, seed: int) -> list[float]:
    cls: Any = registry.find("GPT2LMHeadModel")
    model = cls.from_config_with_parallel(config, tensor_parallel_size=2, seed=seed)
    losses = []
    for again in (seed, seed, seed + 1):
        torch.manual_seed(again)
        losses += [model(**batch).loss.item() for _ in range(2)]
    return losses


def test_masks_follow_the_seed(pool: Pool, seed: int) -> None:
    """The same seed draws the same masks, the next forward and another seed draw others."""
    config = zoo.config("gpt2", dropout=RATE)
    batch = zoo.batch("GPT2LMHeadModel", config, seed)
    losses, other = pool.run(2, losses_with_dropout, config, batch, seed)
    assert losses == other
    assert losses[:2] == losses[2:4]
    assert len(set(losses)) == 4


@pytest.mark.parametrize("rate", [0.0, RATE])
def test_dropouts_of_the_models_in_a_model_are_known(rate: float) -> None:
    with torch.device("meta"):
        model = transformers.EncoderDecoderModel(zoo.config("encoder-decoder", rate))
    assert _uses_dropout(model) == (rate > 0)
