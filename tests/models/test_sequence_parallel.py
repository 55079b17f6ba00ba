"""`sequence_parallel=True` matches transformers: outputs, loss, gradients and trained parameters."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from oslo_models import registry

from support import pipelines, zoo
from support.drawn_steps import drawn_step
from support.dropout_masks import RATE
from support.float64 import lifted_casts
from support.pipelines import loop_differences
from support.pool import Pool
from support.reference import (
    TOLERANCE,
    Step,
    differences,
    full_gradients,
    full_parameters,
    own_part,
    parallel_model,
    reference_model,
    reference_step,
    saved_step,
    shard_differences,
    step_differences,
)
from support.token_counts import counting

TYPES = [kind for kind in registry.ARCHITECTURES if kind not in registry.NO_SEQUENCE_PARALLEL]
OPTIONS: dict[str, Any] = {"sequence_parallel": True, "gather_logits": True}


def check_step(step: Step, n: int, divides: bool = True, options: Mapping[str, Any] = OPTIONS) -> None:
    model = parallel_model(step.name, step.config, step.weights, n, **{**OPTIONS, **options}).train()
    for _ in range(2):
        torch.manual_seed(0)  # Wav2Vec2 samples its targets
        with counting() as counts:
            lines = step_differences(model, step)
        assert not lines, "\n".join(lines)
        assert bool(counts["reduce_scatter"]) == divides, counts
        model.zero_grad()


@pytest.mark.drawn(54)
@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("model_type", TYPES)
def test_drawn_configuration_matches_transformers(pool: Pool, model_type: str, n: int, seed: int) -> None:
    """Left padding; five and four tokens of a row on two ranks, three each or three, three and two on three."""
    name = zoo.main_head(model_type)
    step, options, text = drawn_step(name, model_type, seed + n, n, None if n == 2 or seed % 2 else 8)
    try:
        pool.run(n, check_step, step, n, True, options)
    except Exception as error:
        raise AssertionError(text) from error


def check_class(pool: Pool, name: str, model_type: str, n: int, seed: int) -> None:
    step, options, text = drawn_step(name, model_type, seed, n, None)
    try:
        pool.run(n, check_step, step, n, True, options)
    except Exception as error:
        raise AssertionError(text) from error


@pytest.mark.drawn(27)
@pytest.mark.parametrize("model_type", TYPES)
def test_drawn_class_matches_transformers(pool: Pool, model_type: str, seed: int) -> None:
    draw = random.Random(f"{model_type} {seed}")
    names = sorted(registry.model_classes(model_type).keys() - registry.NO_SEQUENCE_PARALLEL.keys())
    check_class(pool, draw.choice(names), model_type, draw.choice((2, 3)), seed)


@pytest.mark.drawn(4)
@pytest.mark.parametrize("name", [name for kind in zoo.FOUNDING for name in registry.model_classes(kind)])
def test_every_class_of_the_founding_types_matches_transformers(pool: Pool, name: str, seed: int) -> None:
    check_class(pool, name, next(kind for kind in zoo.FOUNDING if name in registry.model_classes(kind)), 2, seed)


@pytest.mark.parametrize(
    "model_type",
    [
        "llama",
        *(pytest.param(kind, marks=pytest.mark.zoo) for kind in ("bert", "gemma2", "gpt2", "mixtral", "mpt", "t5")),
    ],
)
def test_four_ranks_match_transformers(pool: Pool, model_type: str, seed: int) -> None:
    """Three, two, two and two tokens of a row."""
    name = zoo.main_head(model_type)
    check_class(pool, name, model_type, 4, seed)


def test_unequal_shares_divide_tokens_too(pool: Pool, seed: int) -> None:
    step = reference_step("LlamaForCausalLM", zoo.config("llama-untied"), seed)
    pool.run(3, check_step, step, 3, True, {"tensor_parallel_shares": [3, 1, 2]})


# Training -------------------------------------------------------------------------------------------------------------


def check_bfloat16(steps: list[Step], autocasts: bool) -> None:
    """Compare the errors of several draws together: the error of one varies by a fifth."""
    errors = [bfloat16_errors(step, autocasts) for step in steps]
    whole, divided = (sum(each) for each in zip(*errors, strict=True))
    assert 0 < divided <= 1.1 * whole, errors


def bfloat16_errors(step: Step, autocasts: bool) -> list[float]:
    """The sums of two ranks are rounded alike, so the loss is equal. Norms sum gradients in another order."""
    losses, errors = [], []
    for divides in (False, True):
        dtype = torch.float32 if autocasts else torch.bfloat16
        model = parallel_model(step.name, step.config, step.weights, 2, dtype, sequence_parallel=divides).train()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocasts), counting() as counts:
            loss = model(**step.batch).loss
        loss.backward()
        assert bool(counts["reduce_scatter"]) == divides
        losses.append(loss.detach())
        gradients = {name: param.grad for name, param in model.named_parameters()}
        rights = {name: own_part(model, name, step.gradients[name]) for name in gradients}  # type: ignore[arg-type]
        errors.append(sum(float((gradients[name] - right).square().sum()) for name, right in rights.items()) ** 0.5)
    assert torch.equal(*losses)
    return errors


@pytest.mark.parametrize("autocasts", [False, True], ids=["weights", "autocast"])
@pytest.mark.parametrize("variant", ["llama-untied", "gpt2"])
def test_step_in_bfloat16_is_as_exact_as_with_whole_hidden_states(
    pool: Pool, variant: str, autocasts: bool, seed: int
) -> None:
    """The gradients of both differ from float64 alike."""
    name, config = zoo.lm_head(variant), zoo.config(variant)
    pool.run(2, check_bfloat16, [reference_step(name, config, seed + draw) for draw in range(8)], autocasts)


def check_replicas(step: Step, batches: list[dict[str, Any]]) -> None:
    """Each replica has rows of its own, and DistributedDataParallel averages the gradients."""
    model = parallel_model(step.name, step.config, step.weights, 2, **OPTIONS).train()
    ddp = DistributedDataParallel(model, process_group=model.mpu.get_data_parallel_group())
    with lifted_casts(), counting() as counts:
        ddp(**batches[model.mpu.get_data_parallel_rank()]).loss.backward()
    assert counts["reduce_scatter"]
    own = {name: param.grad for name, param in model.named_parameters(remove_duplicate=False)}
    lines = shard_differences(model, "gradient of", own, step.gradients, TOLERANCE)
    assert not lines, "\n".join(lines)


@pytest.mark.parametrize("variant", ["llama-untied", "t5"])
def test_replicas_match_transformers(pool: Pool, variant: str, seed: int) -> None:
    name, config = zoo.lm_head(variant), zoo.config(variant)
    batch = zoo.batch(name, config, seed)
    rows = [{key: value[:1] for key, value in batch.items()}, {key: value[1:2] for key, value in batch.items()}]
    model = reference_model(name, config, seed)
    weights = full_parameters(model)
    with lifted_casts():
        (sum(model(**each).loss for each in rows) / 2).backward()
    step = Step(name, config, {}, weights, {}, torch.zeros(()), full_gradients(model))
    pool.run(4, check_replicas, step, rows)


def check_stages(step: Step, folder: Path) -> None:
    cls: Any = registry.find(step.name)
    model = cls.from_pretrained_with_parallel(folder, 2, 2, 2, **OPTIONS).train()
    lines = loop_differences(model, step)
    assert not lines, "\n".join(lines)


@pytest.mark.parametrize("variant", ["llama", "gpt2", "t5"])
def test_step_on_pipeline_stages_matches_transformers(pool: Pool, variant: str, tmp_path: Path, seed: int) -> None:
    name, config = zoo.lm_head(variant), pipelines.config(variant)
    step = saved_step(name, config, seed, pipelines.batch(name, config, seed), tmp_path)
    pool.run(4, check_stages, step, tmp_path)


def check_dropout(name: str, config: Any, weights: Any, batch: Any, seed: int) -> None:
    """Masks of whole hidden states are drawn from the common stream, and each rank keeps those of its tokens."""
    results = []
    for divides in (False, True):
        model = parallel_model(name, config, weights, 2, sequence_parallel=divides).train()
        torch.manual_seed(seed)
        with lifted_casts():
            loss = model(**batch).loss
        loss.backward()
        state = torch.get_rng_state()
        results.append((loss.detach(), state, {key: param.grad for key, param in model.named_parameters()}))
    (loss, state, grads), (own_loss, own_state, own_grads) = results
    lines = differences("loss", own_loss, loss, TOLERANCE)
    for key, grad in grads.items():
        lines += differences(f"gradient of {key}", own_grads[key], grad, TOLERANCE)
    assert not lines, "\n".join(lines)
    assert torch.equal(own_state, state)


@pytest.mark.parametrize("variant", ["gpt2", "bert", "t5"])
def test_step_with_dropout_equals_whole_hidden_states(pool: Pool, variant: str, seed: int) -> None:
    name, config = zoo.lm_head(variant), zoo.config(variant, dropout=RATE)
    weights, batch = full_parameters(reference_model(name, config, seed)), zoo.batch(name, config, seed)
    pool.run(2, check_dropout, name, config, weights, batch, seed)


def check_second_derivatives(name: str, config: Any, weights: Any, batch: Any) -> None:
    values = []
    for divides in (False, True):
        model = parallel_model(name, config, weights, 2, sequence_parallel=divides).train()
        parameters = list(model.parameters())
        grads = torch.autograd.grad(model(**batch).loss, parameters, create_graph=True)
        penalty = sum((grad.square().sum() for grad in grads), start=torch.zeros(()))
        values.append([penalty.detach(), *torch.autograd.grad(penalty, parameters, allow_unused=True)])
    lines = [line for own, whole in zip(*values, strict=True) for line in differences("second", own, whole, TOLERANCE)]
    assert not lines, "\n".join(lines)


def test_second_derivatives_equal_whole_hidden_states(pool: Pool, seed: int) -> None:
    name, config = "LlamaForCausalLM", zoo.config("llama-untied", attn_implementation="eager")
    weights, batch = full_parameters(reference_model(name, config, seed)), zoo.batch(name, config, seed)
    batch["attention_mask"] = torch.ones_like(batch["attention_mask"])  # rows without keys have no second derivative
    pool.run(2, check_second_derivatives, name, config, weights, batch)


# Communication and memory ---------------------------------------------------------------------------------------------


def count_step(config: Any, seed: int) -> list[Counter[str]]:
    cls: Any = registry.find("LlamaForCausalLM")
    model = cls.from_config_with_parallel(config, 2, seed=seed, sequence_parallel=True, check_inputs=False)
    batch = zoo.batch("LlamaForCausalLM", config, seed, torch.float32)
    for _ in range(2):
        with counting() as forward:
            loss = model(**batch).loss
        with counting() as backward:
            loss.backward()
    return [forward, backward]


def test_step_makes_two_gathers_and_two_reduce_scatters_per_block(pool: Pool, seed: int) -> None:
    """One more gather in the forward pass for the head. The backward pass gathers again beside weight gradients.

    In the backward pass, the entry of the first block gathers the gradient of the embeddings.
    """
    config = zoo.config("llama-untied")
    blocks = config.num_hidden_layers
    for forward, backward in pool.run(2, count_step, config, seed):
        assert forward == {"all_gather": 2 * blocks + 1, "reduce_scatter": 2 * blocks}
        assert backward == {"all_gather": 4 * blocks + 2, "reduce_scatter": 2 * blocks + 1}


# Refusals -------------------------------------------------------------------------------------------------------------


def construct(name: str, config: Any, sizes: tuple[int, ...], options: dict[str, Any]) -> None:
    cls: Any = registry.find(name)
    cls.from_config_with_parallel(config, *sizes, sequence_parallel=options.pop("sequence_parallel", True), **options)


@pytest.mark.parametrize(
    ("variant", "sizes", "options", "message"),
    [
        ("llama", (1,), {}, "tensor_parallel_size is 1"),
        ("llama", (2,), {"sequence_parallel": "yes"}, "must be True or False, got 'yes'"),
        ("llama", (2,), {"deploy": True}, "together with deploy=True"),
        ("llama", (1, 2), {"schedule": "zb-h1"}, "tensor_parallel_size is 1"),
        ("gemma3n_text", (2,), {}, "does not support Gemma3nForCausalLM: its blocks read several hidden states; leave"),
        ("deepseek_v4", (2,), {}, "does not support DeepseekV4ForCausalLM: its blocks read several hidden states"),
        ("qwen3_vl", (2,), {}, "does not support Qwen3VLVisionModel: its hidden states have no dimension of rows"),
        ("llama", (2,), {"plan": "derive"}, "together with plan"),
    ],
)
def test_unsupported_arguments_are_refused(
    pool: Pool, variant: str, sizes: tuple[int, ...], options: dict[str, Any], message: str
) -> None:
    name = "Qwen3VLVisionModel" if variant == "qwen3_vl" else zoo.lm_head(variant)
    config = zoo.config_of(name, zoo.config(variant))
    for error in pool.run(2, construct, name, config, sizes, dict(options), expect=ValueError):
        assert message in str(error)


def refused_calls(config: Any) -> None:
    cls: Any = registry.find("LlamaForCausalLM")
    batch = zoo.batch("LlamaForCausalLM", config, 0, torch.float32)

    def make() -> Any:
        return cls.from_config_with_parallel(config, 2, seed=0, sequence_parallel=True)

    model = make()
    model.schedule = "zb-h1"
    with pytest.raises(ValueError, match="cannot be used with schedule='zb-h1'"):
        model(**batch)


def test_unsupported_wrappers_are_refused(pool: Pool) -> None:
    pool.run(2, refused_calls, zoo.config("llama"))
