"""Models whose tokens are divided, by `sequence_parallel` or `context_parallel_size`, train like transformers."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from oslo_models import registry

from support import zoo
from support.drawn_steps import shortened
from support.dropout_masks import RATE
from support.pool import Pool
from support.reference import (
    TOLERANCE,
    Step,
    differences,
    full_parameters,
    make_optimizer,
    reference_model,
    reference_step,
    shard_differences,
    step_differences,
    take_steps,
)
from support.token_divisions import CONTEXT, SEQUENCE, counting, divided_model, is_divided, option_of, sizes_of

pytestmark = pytest.mark.parametrize("division", [SEQUENCE, CONTEXT])
MIXERS = [
    pytest.param(kind, marks=() if kind == "qwen3_5_text" else pytest.mark.zoo)
    for kind in ("bamba", "falcon_h1", "lfm2", "mamba", "qwen3_5_text")
]
"""Types with a kind of mixer each, and without experts, whose sizes in float32 would not fit torch's products."""


def constructed(division: str, config: Any, **options: Any) -> Any:
    cls: Any = registry.find("LlamaForCausalLM")
    return cls.from_config_with_parallel(config, seed=0, **sizes_of(division, 2), **options)


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


def test_parameters_with_sharded_layers_match_transformers(pool: Pool, division: str, seed: int) -> None:
    """Context parallelism beside tensor parallelism. Unequal shares of sequence parallelism."""
    name, config = "LlamaForCausalLM", zoo.config("llama-untied")
    model = reference_model(name, config, seed)
    step = Step(name, config, {}, full_parameters(model), {}, torch.zeros(()), {})
    batches = [zoo.batch(name, config, seed + number) for number in range(5)]
    losses = take_steps(model, make_optimizer("AdamW", model.parameters()), batches)
    options = {"tensor_parallel_size": 2} if division == CONTEXT else {"tensor_parallel_shares": [2, 1]}
    ranks = 4 if division == CONTEXT else 2
    pool.run(ranks, check_training, division, step, batches, (full_parameters(model), losses), options)


def check_checkpointing(division: str, step: Step) -> None:
    """Loss, gradients and random states are equal with and without recomputation.

    In float32: the mode that lifts casts is not active while the backward pass recomputes.
    """
    results = {}
    for mode in ("plain", "reentrant", "not reentrant"):
        model = divided_model(division, step, 2, torch.float32)
        if mode != "plain":
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": mode == "reentrant"})
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
    pool.run(2, check_checkpointing, division, Step(name, config, batch, weights, {}, torch.zeros(()), {}))


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
    model = constructed(division, config)
    fully_shard(model, mesh=model.mesh.device_mesh["dp"])
    with pytest.raises(ValueError, match=f"{option} cannot be used with FSDP2"):
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
