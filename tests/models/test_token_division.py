"""Models whose tokens are divided, by `sequence_parallel` or `context_parallel_size`, train like transformers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from oslo_models import registry
from oslo_models.distributed.collectives import all_reduce
from oslo_models.modeling.training import enable_checkpointing

from support import zoo
from support.checkpointing import checkpoint_selectively
from support.drawn_steps import shortened
from support.dropout_masks import RATE
from support.float64 import lifted_casts
from support.pool import Pool
from support.reference import (
    TOLERANCE,
    Step,
    differences,
    full_gradients,
    full_parameters,
    make_optimizer,
    reference_model,
    reference_step,
    shard_differences,
    step_differences,
    take_steps,
)
from support.token_divisions import (
    CONTEXT,
    COPIES,
    REPLICAS,
    SEQUENCE,
    counting,
    divided_model,
    fully_sharded,
    is_divided,
    option_of,
    sizes_of,
)

pytestmark = pytest.mark.parametrize("division", [SEQUENCE, CONTEXT])
MIXERS = [
    pytest.param(kind, marks=() if kind == "qwen3_5_text" else pytest.mark.zoo)
    for kind in ("bamba", "falcon_h1", "lfm2", "mamba", "qwen3_5_text")
]
"""Types with a kind of mixer each, and without experts, whose sizes in float32 would not fit torch's products."""


def constructed(division: str, config: Any, **options: Any) -> Any:
    cls: Any = registry.find("LlamaForCausalLM")
    return cls.from_config_with_parallel(config, seed=0, **sizes_of(division, 2), **options)


def sharded_with(division: str) -> tuple[dict[str, Any], int]:
    """Return options beside the number of ranks that divide tokens, and the number of all ranks."""
    return ({"tensor_parallel_size": 2}, 4) if division == CONTEXT else ({"tensor_parallel_shares": [2, 1]}, 2)


# Training -------------------------------------------------------------------------------------------------------------


def check_step(division: str, step: Step, n: int, divides: bool = True) -> None:
    model = divided_model(division, step, n, gather_logits=True)
    with counting(division) as counts:
        lines = step_differences(model, step)
    assert not lines, "\n".join(lines)
    assert is_divided(counts) == divides, counts


@pytest.mark.parametrize(("n", "length"), [(2, 1), (2, 2), (2, 3), (3, 2), (3, 4)])
def test_short_rows_match_transformers(pool: Pool, division: str, n: int, length: int, seed: int) -> None:
    """Rows with fewer tokens than ranks stay whole."""
    config = zoo.config("llama-untied")
    batch = shortened(zoo.batch("LlamaForCausalLM", config, seed), length)
    batch = {"input_ids": batch["input_ids"], "attention_mask": torch.ones_like(batch["input_ids"])}
    step = reference_step("LlamaForCausalLM", config, seed, batch=batch)
    pool.run(n, check_step, division, step, n, length >= n)


@pytest.mark.stacks
@pytest.mark.parametrize("name", ["LlamaForCausalLM", "LlamaModel", "GPT2LMHeadModel", "BertModel"])
def test_outputs_of_blocks_are_whole(pool: Pool, division: str, name: str, seed: int) -> None:
    config = zoo.config({"L": "llama", "G": "gpt2", "B": "bert"}[name[0]])
    batch: dict[str, Any] = {**zoo.batch(name, config, seed), "output_hidden_states": True}
    pool.run(2, check_step, division, reference_step(name, config, seed, batch=batch), 2)


def check_training(division: str, step: Step, batches: Any, trained: Any, options: dict[str, Any]) -> None:
    model = divided_model(division, step, 2, **options)
    losses = take_steps(model, make_optimizer("AdamW", model.parameters()), batches)
    own = dict(model.named_parameters(remove_duplicate=False))
    lines = shard_differences(model, "parameter", own, trained[0], TOLERANCE)
    lines += differences("losses", torch.tensor(losses), torch.tensor(trained[1]), TOLERANCE)
    assert not lines, "\n".join(lines)


@pytest.mark.parametrize("variant", ["llama", "llama-untied", "gpt2", "bert", "t5", *MIXERS])
def test_parameters_after_five_steps_match_transformers(pool: Pool, division: str, variant: str, seed: int) -> None:
    """Tied and untied weights."""
    name, config = zoo.lm_head(variant), zoo.config(variant)
    model = reference_model(name, config, seed)
    step = Step(name, config, {}, full_parameters(model), {}, torch.zeros(()), {})
    batches = [zoo.batch(name, config, seed + number) for number in range(5)]
    losses = take_steps(model, make_optimizer("AdamW", model.parameters()), batches)
    pool.run(2, check_training, division, step, batches, (full_parameters(model), losses), {})


@pytest.mark.parametrize(
    "variant", ["llama-untied", *(pytest.param(kind, marks=pytest.mark.zoo) for kind in ("bamba", "lfm2", "mamba"))]
)
def test_parameters_with_sharded_layers_match_transformers(pool: Pool, division: str, variant: str, seed: int) -> None:
    """Context parallelism beside tensor parallelism. Unequal shares of sequence parallelism."""
    name, config = zoo.lm_head(variant), zoo.config(variant)
    model = reference_model(name, config, seed)
    step = Step(name, config, {}, full_parameters(model), {}, torch.zeros(()), {})
    batches = [zoo.batch(name, config, seed + number) for number in range(5)]
    losses = take_steps(model, make_optimizer("AdamW", model.parameters()), batches)
    options, ranks = sharded_with(division)
    pool.run(ranks, check_training, division, step, batches, (full_parameters(model), losses), options)


CHECKPOINTING: dict[str, Callable[[Any], object]] = {
    "plain": lambda model: None,
    "reentrant": lambda model: enable_checkpointing(model, {"use_reentrant": True}),
    "not reentrant": enable_checkpointing,
    "every other block": lambda model: enable_checkpointing(model, every_n_layers=2),
    "without products": lambda model: checkpoint_selectively(model, "products"),
    "without collectives": lambda model: checkpoint_selectively(model, "collectives"),
}


def check_checkpointing(division: str, step: Step, options: dict[str, Any]) -> None:
    """Loss, gradients and random states are equal with and without recomputation.

    In float32: the mode that lifts casts is not active while the backward pass recomputes.
    """
    results = {}
    for mode, checkpoint_blocks in CHECKPOINTING.items():
        model = divided_model(division, step, 2, torch.float32, **options)
        checkpoint_blocks(model)
        torch.manual_seed(5)
        with counting(division) as counts:
            loss = model(**step.batch).loss
            loss.backward()
        assert is_divided(counts)
        gradients = {key: param.grad for key, param in model.named_parameters()}
        results[mode] = loss.detach(), gradients, torch.rand(3)
    (loss, gradients, drawn), lines = results.pop("plain"), []
    for mode, (own_loss, own_gradients, own_drawn) in results.items():
        # A reentrant block sums the gradients of its readers separately, and so does each block that reads an encoder.
        tolerance = 1e-6 if mode == "reentrant" or step.config.is_encoder_decoder else 0
        lines += differences(f"{mode}: loss", own_loss, loss, 0)
        lines += differences(f"{mode}: next random numbers", own_drawn, drawn, 0)
        for key, gradient in gradients.items():
            lines += differences(f"{mode}: gradient of {key}", own_gradients[key], gradient, tolerance)
    assert not lines, "\n".join(lines)


@pytest.mark.stacks
@pytest.mark.parametrize("variant", [*zoo.FOUNDING, *MIXERS])
def test_step_with_checkpointing_equals_one_without(pool: Pool, division: str, variant: str, seed: int) -> None:
    name, config = zoo.lm_head(variant), zoo.config(variant, dropout=RATE, use_cache=False)
    weights = full_parameters(reference_model(name, config, seed, torch.float32))
    batch = zoo.batch(name, config, seed, torch.float32)
    pool.run(2, check_checkpointing, division, Step(name, config, batch, weights, {}, torch.zeros(()), {}), {})


@pytest.mark.parametrize(
    "variant", ["lfm2", *(pytest.param(kind, marks=pytest.mark.zoo) for kind in ("bamba", "mamba"))]
)
def test_sharded_step_with_checkpointing_equals_one_without(pool: Pool, division: str, variant: str, seed: int) -> None:
    """Mixers divided over the ranks of both axes, or over ranks with unequal shares. With dropout."""
    name, config = zoo.lm_head(variant), zoo.config(variant, dropout=RATE, use_cache=False)
    weights = full_parameters(reference_model(name, config, seed, torch.float32))
    batch = zoo.batch(name, config, seed, torch.float32)
    step = Step(name, config, batch, weights, {}, torch.zeros(()), {})
    options, ranks = sharded_with(division)
    pool.run(ranks, check_checkpointing, division, step, options)


# FSDP2 ----------------------------------------------------------------------------------------------------------------

LARGEST_NORM = 0.1


@dataclass
class Training:
    """Three steps of one process, and their results.

    Attributes:
        step: weights before training, and gradients of the first step.
        batches: batches of each step. Gradients are those of their mean loss.
        frozen: parameters with this in their names have no gradients.
    """

    step: Step
    batches: list[list[dict[str, Any]]]
    losses: list[Tensor]
    norms: list[Tensor]
    trained: dict[str, Tensor]
    frozen: str | None = None


def freeze(model: nn.Module, frozen: str | None) -> None:
    for name, param in model.named_parameters():
        param.requires_grad_(frozen is None or frozen not in name)


def reference_training(variant: str, seed: int, count: int = 4, frozen: str | None = None) -> Training:
    """Return steps of ``count`` batches each, with clipped gradients."""
    name, config = zoo.lm_head(variant), zoo.config(variant, use_cache=False)
    model = reference_model(name, config, seed)
    weights, gradients = full_parameters(model), dict[str, Any]()
    freeze(model, frozen)
    batches = [[zoo.batch(name, config, seed + 10 * step + part) for part in range(count)] for step in range(3)]
    optimizer, losses, norms = make_optimizer("AdamW", model.parameters()), [], []
    for each in batches:
        optimizer.zero_grad()
        with lifted_casts():
            loss = torch.stack([model(**batch).loss for batch in each]).mean()
            loss.backward()
        gradients = gradients or {
            key: grad if grad is None else grad.clone() for key, grad in full_gradients(model).items()
        }
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), LARGEST_NORM))
        optimizer.step()
        losses.append(loss.detach())
    step = Step(name, config, {}, weights, {}, torch.zeros(()), gradients)
    return Training(step, batches, losses, norms, full_parameters(model), frozen)


def check_fully_sharded(
    division: str, training: Training, over: str, n: int = 2, tp: int = 1, blocks: bool = True
) -> None:
    """Each replica has batches of its own, and accumulates their gradients before it communicates."""
    options = {"tensor_parallel_size": tp} if division == CONTEXT else {}
    model = divided_model(division, training.step, n, **options)
    freeze(model, training.frozen)
    wrapped = fully_sharded(model, over, blocks)
    lines = training_differences(division, model, wrapped, make_optimizer("AdamW", wrapped.parameters()), training)
    assert all(isinstance(param.data, DTensor) for param in model.parameters())
    assert not lines, "\n".join(lines)


def check_partitioned_optimizer(division: str, training: Training) -> None:
    """DDP, and an optimizer that updates some of the parameters on each replica."""
    model = divided_model(division, training.step, 2)
    group, optimizer = model.mpu.get_data_parallel_group(), make_optimizer("AdamW", model.parameters())
    options = {key: value for key, value in optimizer.param_groups[0].items() if key in ("lr", "eps")}
    zero = ZeroRedundancyOptimizer(model.parameters(), type(optimizer), process_group=group, **options)
    lines = training_differences(division, model, DistributedDataParallel(model, process_group=group), zero, training)
    assert 0 < len(zero.optim.param_groups[0]["params"]) < len([*model.parameters()])
    assert not lines, "\n".join(lines)


def training_differences(division: str, model: Any, wrapped: Any, optimizer: Any, training: Training) -> list[str]:
    """Train, and return a line for each difference from one process."""
    dp, lines = model.mesh.dp, list[str]()
    for number, batches in enumerate(training.batches):
        own, loss = batches[dp.rank :: dp.size], torch.zeros((), dtype=torch.float64)
        optimizer.zero_grad()
        for batch in own:
            with lifted_casts(), counting(division) as counts, accumulating(wrapped, batch is own[-1]):
                part = wrapped(**batch).loss / len(own)
                part.backward()
            assert is_divided(counts)
            loss += part.detach()
        if number == 0:
            gradients = {name: param.grad for name, param in model.named_parameters(remove_duplicate=False)}
            lines += shard_differences(model, "gradient of", gradients, training.step.gradients, TOLERANCE)
        norm = model.clip_grad_norm_(LARGEST_NORM)
        optimizer.step()
        lines += differences("loss", all_reduce(dp, loss) / dp.size, training.losses[number], TOLERANCE)
        lines += differences("norm", norm, training.norms[number], TOLERANCE)
    own_parameters = dict(model.named_parameters(remove_duplicate=False))
    return lines + shard_differences(model, "trained", own_parameters, training.trained, TOLERANCE)


def accumulating(wrapped: Any, is_last: bool) -> AbstractContextManager[Any]:
    """Context of a backward pass whose gradients are reduced over replicas after the last batch only."""
    if isinstance(wrapped, DistributedDataParallel):
        return nullcontext() if is_last else wrapped.no_sync()
    wrapped.set_requires_gradient_sync(is_last)
    return nullcontext()


@pytest.mark.parametrize("over", [REPLICAS, COPIES])
@pytest.mark.parametrize(
    "variant",
    [
        "llama",
        "llama-untied",
        *(pytest.param(each, marks=pytest.mark.zoo) for each in ("gpt2", "bert", "t5", "mixtral")),
    ],
)
def test_fully_sharded_training_matches_transformers(
    pool: Pool, division: str, variant: str, over: str, seed: int
) -> None:
    """Tied and untied weights, left padding, accumulated and clipped gradients."""
    pool.run(4, check_fully_sharded, division, reference_training(variant, seed), over)


@pytest.mark.parametrize("variant", ["llama", pytest.param("t5", marks=pytest.mark.zoo)])
def test_training_of_replicas_with_a_partitioned_optimizer_matches_transformers(
    pool: Pool, division: str, variant: str, seed: int
) -> None:
    pool.run(4, check_partitioned_optimizer, division, reference_training(variant, seed))


@pytest.mark.stacks
@pytest.mark.parametrize("n", [2, 3])
def test_weights_sharded_over_ranks_of_one_replica_match_transformers(
    pool: Pool, division: str, n: int, seed: int
) -> None:
    """Numbers of ranks that do not divide the rows of a weight."""
    pool.run(n, check_fully_sharded, division, reference_training("llama-untied", seed, 2), COPIES, n)


@pytest.mark.parametrize("over", [REPLICAS, COPIES])
@pytest.mark.parametrize("case", ["one group", "frozen embeddings", "frozen attention"])
def test_fully_sharded_training_in_other_ways_matches_transformers(
    pool: Pool, division: str, case: str, over: str, seed: int
) -> None:
    frozen = {"frozen embeddings": "embed", "frozen attention": "self_attn"}.get(case)
    training = reference_training("llama", seed, 4, frozen)
    pool.run(4, check_fully_sharded, division, training, over, 2, 1, case != "one group")


@pytest.mark.parametrize("over", [REPLICAS, COPIES])
@pytest.mark.parametrize("variant", ["llama", pytest.param("bamba", marks=pytest.mark.zoo)])
def test_fully_sharded_weights_of_sharded_layers_match_transformers(
    pool: Pool, division: str, variant: str, over: str, seed: int
) -> None:
    pool.run(4, check_fully_sharded, division, reference_training(variant, seed), over, 2, 2)


def check_fully_sharded_checkpointing(division: str, step: Step, over: str) -> None:
    """In float32: the mode that lifts casts is not active while the backward pass recomputes."""
    results = []
    for options in (None, {"use_reentrant": False}, {"use_reentrant": True}):
        model = fully_sharded(divided_model(division, step, 2, torch.float32), over)
        if options is not None:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
        torch.manual_seed(5)
        with counting(division) as counts:
            loss = model(**step.batch).loss
            loss.backward()
        assert is_divided(counts)
        gradients: dict[str, Any] = {name: param.grad.full_tensor() for name, param in model.named_parameters()}
        results.append({"loss": loss.detach(), **gradients})
    plain, *others = results
    lines = [line for own in others for name in plain for line in differences(name, own[name], plain[name], 1e-6)]
    assert not lines, "\n".join(lines)


@pytest.mark.parametrize("over", [REPLICAS, COPIES])
def test_fully_sharded_step_with_checkpointing_equals_one_without(
    pool: Pool, division: str, over: str, seed: int
) -> None:
    name, config = "LlamaForCausalLM", zoo.config("llama", use_cache=False)
    weights = full_parameters(reference_model(name, config, seed, torch.float32))
    batch = zoo.batch(name, config, seed, torch.float32)
    pool.run(
        4,
        check_fully_sharded_checkpointing,
        division,
        Step(name, config, batch, weights, {}, torch.zeros(()), {}),
        over,
    )


# Calls with whole hidden states ---------------------------------------------------------------------------------------


def generated(division: str, step: Step) -> Tensor:
    model = divided_model(division, step, 2).eval()
    with counting(division) as counts:
        ids, mask = step.batch["input_ids"], step.batch["attention_mask"]
        tokens: Tensor = model.generate(ids, attention_mask=mask, max_new_tokens=4)
        with torch.no_grad():
            assert model(**step.batch).logits is not None
    assert not is_divided(counts)
    return tokens


def test_calls_without_gradients_compute_whole_hidden_states(pool: Pool, division: str, seed: int) -> None:
    """Prompts of a few tokens."""
    name, config = "LlamaForCausalLM", zoo.config("llama")
    model = reference_model(name, config, seed).eval()
    batch = zoo.batch(name, config, seed)
    expected = model.generate(batch["input_ids"], attention_mask=batch["attention_mask"], max_new_tokens=4)
    step = Step(name, config, batch, full_parameters(model), {}, torch.zeros(()), {})
    for own in pool.run(2, generated, division, step):
        assert torch.equal(own, expected)


def check_compiled(division: str, config: Any, seed: int) -> None:
    results = []
    for divides in (False, True):
        sizes = {"tensor_parallel_size": 2} if division == SEQUENCE else {}
        model = parallel(config, **(sizes_of(division, 2) if divides else sizes))
        compiled = torch.compile(model, backend="aot_eager")
        with counting(division) as counts:
            loss = compiled(**zoo.batch("LlamaForCausalLM", config, seed)).loss
            loss.backward()
        assert not is_divided(counts)
        results.append([loss.detach(), *(param.grad for param in model.parameters())])
    lines = [line for own, whole in zip(*results, strict=True) for line in differences("value", own, whole, TOLERANCE)]
    assert not lines, "\n".join(lines)


def parallel(config: Any, **sizes: Any) -> Any:
    cls: Any = registry.find("LlamaForCausalLM")
    return cls.from_config_with_parallel(config, seed=0, dtype=torch.float64, **sizes)


@pytest.mark.zoo
def test_compiled_model_computes_whole_hidden_states(pool: Pool, division: str, seed: int) -> None:
    pool.run(2, check_compiled, division, zoo.config("llama-untied", num_hidden_layers=1, use_cache=False), seed)


# Refusals -------------------------------------------------------------------------------------------------------------


def refused_calls(division: str, config: Any) -> None:
    batch, option = zoo.batch("LlamaForCausalLM", config, 0, torch.float32), option_of(division, 2)
    with pytest.raises(ValueError, match=rf"fuse\(\) does not support {option}: leave"):
        constructed(division, config).fuse()
    with pytest.raises(ValueError, match=f"it was loaded with {option}; leave it out"):
        constructed(division, config).use_exact_rollouts()
    model = constructed(division, config)
    model.model.layers[0].compile()
    with pytest.raises(ValueError, match=rf"{option} cannot be used with torch\.compile of blocks"):
        model(**batch)
    with pytest.raises(ValueError, match=f"{option} cannot be used with DeepSpeed"):
        DeepSpeedEngine(constructed(division, config))


class DeepSpeedEngine:
    """Lists the parameters in its constructor, as DeepSpeed's class of this name does."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = list(model.named_parameters())


def test_unsupported_wrappers_are_refused(pool: Pool, division: str) -> None:
    pool.run(2, refused_calls, division, zoo.config("llama"))


def test_transformers_constructors_do_not_take_the_argument(division: str) -> None:
    cls: Any = registry.find("LlamaForCausalLM")
    with pytest.raises(TypeError, match=f"do not take {division}"):
        cls(zoo.config("llama"), **{division: sizes_of(division, 2)[division]})


def other_checkpointing(division: str, config: Any, reentrant: bool) -> None:
    model = constructed(division, config)
    for index, block in enumerate(model.model.layers):
        model.model.layers[index] = Checkpointed(block, reentrant)
    loss = model(**zoo.batch("LlamaForCausalLM", config, 0, torch.float32), use_cache=False).loss
    with pytest.raises(RuntimeError, match=f"{option_of(division, 2)}: .* is computed again in the backward pass"):
        loss.backward()


class Checkpointed(nn.Module):
    """Computes a block again in the backward pass, without the method of transformers."""

    def __init__(self, block: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.block, self.reentrant = block, reentrant

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        call = partial(self.block, **kwargs)
        return torch.utils.checkpoint.checkpoint(call, *args, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
def test_other_checkpointing_functions_raise(pool: Pool, division: str, reentrant: bool) -> None:
    pool.run(2, other_checkpointing, division, zoo.config("llama"), reentrant)
