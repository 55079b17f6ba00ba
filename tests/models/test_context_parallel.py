"""`context_parallel_size=` matches transformers: outputs, loss, gradients and trained parameters."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from oslo_models import registry
from oslo_models.layers import context_attention, context_parts
from oslo_models.layers.context_parts import ContextPart

from support import zoo
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
    parallel_model,
    reference_model,
    reference_step,
    shard_differences,
    step_differences,
    take_steps,
)

OPTIONS: dict[str, Any] = {"gather_logits": True}


@contextlib.contextmanager
def counting() -> Iterator[Counter[str]]:
    """Count exchanges of heads, gathers of tokens inside of blocks, and sums of gradients."""
    counts: Counter[str] = Counter()

    def counted(name: str, function: Any) -> Any:
        def call(*args: Any) -> Any:
            counts[name] += 1
            return function(*args)

        return call

    def full(part: ContextPart, why: str = "") -> Tensor:
        counts["gather"] += part.state.is_inside
        return gathered(part, why)

    gathered = ContextPart.full
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(context_attention, "exchange", counted("exchange", context_attention.exchange))
        patch.setattr(context_parts, "reduce_fresh", counted("sum", context_parts.reduce_fresh))
        patch.setattr(ContextPart, "full", full)
        yield counts


def context_model(step: Step, cp: int, tp: int = 1, **options: Any) -> Any:
    return parallel_model(step.name, step.config, step.weights, tp, context_parallel_size=cp, **OPTIONS | options)


def check_step(step: Step, cp: int, tp: int = 1, options: Mapping[str, Any] = OPTIONS, divides: bool = True) -> None:
    model = context_model(step, cp, tp, **options).train()
    for _ in range(2):
        torch.manual_seed(0)  # Wav2Vec2 samples its targets
        with counting() as counts:
            lines = step_differences(model, step)
        assert not lines, "\n".join(lines)
        assert bool(counts["sum"]) == divides, counts
        model.zero_grad()


def llama(**changes: Any) -> Any:
    return zoo.config("llama-untied", **changes)


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("variant", ["llama", "gpt2"])
def test_step_matches_transformers(pool: Pool, variant: str, n: int, seed: int) -> None:
    """Left padding; five and four tokens of a row on two ranks, three each on three."""
    pool.run(n, check_step, reference_step(zoo.lm_head(variant), zoo.config(variant), seed), n)


@pytest.mark.parametrize("variant", ["llama", "gpt2"])
def test_step_with_sharded_layers_matches_transformers(pool: Pool, variant: str, seed: int) -> None:
    pool.run(4, check_step, reference_step(zoo.lm_head(variant), zoo.config(variant), seed), 2, 2)


@pytest.mark.parametrize(
    ("heads", "key_heads", "n"),
    [
        (4, 1, 2),  # both ranks have the key head
        (4, 4, 3),  # two heads, one and one
        (6, 2, 3),  # two query heads and one of two key heads
        (4, 2, 3),  # query heads of both key heads on one rank
        (2, 1, 3),  # fewer heads than ranks: gathered keys
        (2, 2, 4),
    ],
)
@pytest.mark.parametrize("attention", ["sdpa", "eager", None])
def test_any_numbers_of_heads_match_transformers(
    pool: Pool, heads: int, key_heads: int, n: int, attention: str | None, seed: int
) -> None:
    config = llama(num_attention_heads=heads, num_key_value_heads=key_heads, head_dim=8)
    options = {} if attention is None else {"attn_implementation": attention}
    batch = zoo.batch("LlamaForCausalLM", config, seed)
    if attention == "sdpa" and seed % 2:  # attention without a mask
        batch["attention_mask"] = torch.ones_like(batch["attention_mask"])
    step = reference_step("LlamaForCausalLM", config, seed, batch=batch, **options)
    pool.run(n, check_step, step, n, 1, options)


@pytest.mark.parametrize(("n", "length"), [(2, 1), (2, 2), (2, 3), (3, 2), (3, 4)])
def test_short_rows_match_transformers(pool: Pool, n: int, length: int, seed: int) -> None:
    """Rows with fewer tokens than ranks stay whole."""
    config = llama()
    ids = zoo.batch("LlamaForCausalLM", config, seed)["input_ids"][:, :length].contiguous()
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    step = reference_step("LlamaForCausalLM", config, seed, batch=batch)
    pool.run(n, check_step, step, n, 1, OPTIONS, length >= n)


def packed(config: Any, seed: int) -> dict[str, Any]:
    """Return rows of three texts, whose positions restart."""
    ids = torch.randint(config.vocab_size, (2, 11), generator=torch.Generator().manual_seed(seed))
    positions = torch.cat([torch.arange(length) for length in (4, 2, 5)]).expand(2, -1).contiguous()
    return {"input_ids": ids, "labels": ids, "position_ids": positions, "use_cache": False}


@pytest.mark.parametrize("attention", ["sdpa", "eager", None])
def test_packed_texts_match_transformers(pool: Pool, attention: str | None, seed: int) -> None:
    options = {} if attention is None else {"attn_implementation": attention}
    step = reference_step("LlamaForCausalLM", llama(), seed, batch=packed(llama(), seed), **options)
    pool.run(2, check_step, step, 2, 1, options)


@pytest.mark.parametrize("length", [1100])
def test_lazy_masks_match_transformers(pool: Pool, length: int, seed: int) -> None:
    """Rows of more than 1,024 tokens have masks without memory."""
    config = zoo.config("mistral" if "mistral" in registry.CONTEXT_PARALLEL else "llama", max_position_embeddings=2048)
    ids = torch.randint(config.vocab_size, (2, length), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    mask[0, :300] = 0
    name = zoo.lm_head(config.model_type)
    step = reference_step(name, config, seed, batch={"input_ids": ids, "labels": ids, "attention_mask": mask})
    pool.run(2, check_step, step, 2)


# Training -------------------------------------------------------------------------------------------------------------


def check_training(name: str, config: Any, weights: Any, batches: Any, trained: Any, tp: int) -> None:
    model = parallel_model(name, config, weights, tp, context_parallel_size=2).train()
    losses = take_steps(model, make_optimizer("AdamW", model.parameters()), batches)
    assert model(**batches[0]).logits is None
    own = dict(model.named_parameters(remove_duplicate=False))
    lines = shard_differences(model, "parameter", own, trained[0], TOLERANCE)
    lines += differences("losses", torch.tensor(losses), torch.tensor(trained[1]), TOLERANCE)
    assert not lines, "\n".join(lines)


@pytest.mark.parametrize(("variant", "tp"), [("llama", 1), ("llama-untied", 2), ("gpt2", 1)])
def test_parameters_after_five_steps_match_transformers(pool: Pool, variant: str, tp: int, seed: int) -> None:
    """Tied and untied weights. Logits are not gathered beside a loss."""
    name, config = zoo.lm_head(variant), zoo.config(variant)
    model = reference_model(name, config, seed)
    weights = full_parameters(model)
    batches = [zoo.batch(name, config, seed + number) for number in range(5)]
    losses = take_steps(model, make_optimizer("AdamW", model.parameters()), batches)
    pool.run(2 * tp, check_training, name, config, weights, batches, (full_parameters(model), losses), tp)


def check_checkpointing(name: str, config: Any, weights: Any, batch: Any) -> None:
    """Loss, gradients and random states are equal with and without recomputation."""
    results = {}
    for mode in ("plain", "reentrant", "not reentrant"):
        model = parallel_model(name, config, weights, 1, torch.float32, context_parallel_size=2).train()
        if mode != "plain":
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": mode == "reentrant"})
        torch.manual_seed(5)
        with counting() as counts:
            loss = model(**batch).loss
            loss.backward()
        assert counts["sum"]
        gradients = {key: param.grad for key, param in model.named_parameters()}
        results[mode] = loss.detach(), gradients, torch.rand(3)
    (loss, gradients, drawn), lines = results.pop("plain"), []
    for mode, (own_loss, own_gradients, own_drawn) in results.items():
        tolerance = 1e-6 if mode == "reentrant" or config.is_encoder_decoder else 0
        lines += differences(f"{mode}: loss", own_loss, loss, 0)
        lines += differences(f"{mode}: next random numbers", own_drawn, drawn, 0)
        for key, gradient in gradients.items():
            lines += differences(f"{mode}: gradient of {key}", own_gradients[key], gradient, tolerance)
    assert not lines, "\n".join(lines)


@pytest.mark.parametrize("variant", [kind for kind in zoo.FOUNDING if kind in registry.CONTEXT_PARALLEL])
def test_step_with_checkpointing_equals_one_without(pool: Pool, variant: str, seed: int) -> None:
    name, config = zoo.lm_head(variant), zoo.config(variant, dropout=RATE, use_cache=False)
    weights = full_parameters(reference_model(name, config, seed, torch.float32))
    pool.run(2, check_checkpointing, name, config, weights, zoo.batch(name, config, seed, torch.float32))


def check_replicas(step: Step, batches: list[dict[str, Any]]) -> None:
    """Each replica has rows of its own, and DistributedDataParallel averages the gradients."""
    model = context_model(step, 2).train()
    with pytest.raises(ValueError, match="replicas are on ranks"):
        DistributedDataParallel(model)
    ddp = DistributedDataParallel(model, process_group=model.mpu.get_data_parallel_group())
    with lifted_casts(), counting() as counts:
        for rows in batches[2 * model.mpu.get_data_parallel_rank() :][:2]:
            last = rows is batches[2 * model.mpu.get_data_parallel_rank() + 1]
            with contextlib.nullcontext() if last else ddp.no_sync():
                (ddp(**rows).loss / 2).backward()
    assert counts["sum"]
    own = {name: param.grad for name, param in model.named_parameters(remove_duplicate=False)}
    average = model.mpu.get_data_parallel_world_size()
    assert average == 2
    lines = shard_differences(model, "gradient of", own, step.gradients, TOLERANCE)
    assert not lines, "\n".join(lines)


def test_replicas_match_transformers(pool: Pool, seed: int) -> None:
    """Gradients are averaged over replicas, not over the ranks that divide the tokens."""
    name, config = "LlamaForCausalLM", llama()
    rows = [zoo.batch(name, config, seed + number) for number in range(4)]
    model = reference_model(name, config, seed)
    weights = full_parameters(model)
    with lifted_casts():
        (sum(model(**each).loss for each in rows) / 4).backward()
    step = Step(name, config, {}, weights, {}, torch.zeros(()), full_gradients(model))
    pool.run(4, check_replicas, step, rows)
