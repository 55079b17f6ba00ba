"""Dropout under tensor parallelism is exact: one process replays all masks of the ranks.

Masks of replicated activations are equal on all ranks; masks of sharded activations are independent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from transformers import PreTrainedConfig

from oslo_models import registry
from oslo_models.modeling.apply_plan import uses_dropout
from oslo_models.sharding.layout import Layout

from support import zoo
from support.dropout_masks import RATE, Recorder, Replay, Shapes, check_masks, join_masks
from support.float64 import lifted_casts
from support.pool import Pool
from support.reference import TOLERANCE, differences, full_gradients, full_parameters, parallel_model, reference_model

Weights = dict[str, Tensor]
Batch = dict[str, Tensor]
Gradients = Mapping[str, Tensor | None]


def step_with_recorded_masks(
    name: str, config: PreTrainedConfig, weights: Weights, batch: Batch, n: int, seed: int
) -> tuple[Tensor, Gradients, list[Tensor], dict[str, Layout]]:
    """Run a step on this rank; return loss, gradients, masks in call order, and parameter layouts."""
    model = parallel_model(name, config, weights, n, attn_implementation="eager")
    torch.manual_seed(seed)
    with lifted_casts(), Recorder() as recorder:
        loss = model(**batch).loss
    loss.backward()
    return loss.detach(), full_gradients(model), recorder.masks, model.layouts


def check_dropout(pool: Pool, name: str, variant: str, n: int, seed: int) -> None:
    """Loss and gradients with the ranks' masks match one process with the same masks."""
    config = zoo.config(variant, dropout=RATE)
    model = reference_model(name, config, seed, attn_implementation="eager")
    weights, batch = full_parameters(model), zoo.batch(name, config, seed)
    arguments = (name, config, weights, batch, n, seed)
    losses, gradients, masks, layouts = zip(*pool.run(n, step_with_recorded_masks, *arguments), strict=True)
    with lifted_casts(), Shapes() as calls:
        model(**batch)
    assert calls.shapes
    assert {len(calls.shapes)} == {len(own) for own in masks}
    joined = [
        join_masks(of_ranks, shape) for of_ranks, shape in zip(zip(*masks, strict=True), calls.shapes, strict=True)
    ]
    with lifted_casts(), Replay([mask for mask, _ in joined]):
        loss = model(**batch).loss
    loss.backward()
    lines = []
    for rank in range(n):
        lines += differences(f"loss of rank {rank}", losses[rank], loss.detach(), TOLERANCE)
        for key, gradient in full_gradients(model).items():
            expected = None if gradient is None else layouts[rank][key].shard(gradient, rank)
            lines += differences(f"gradient of {key} on rank {rank}", gradients[rank][key], expected, TOLERANCE)
    assert not lines, "\n".join(lines)
    check_masks([mask for mask, sharded in joined if sharded], [mask for mask, sharded in joined if not sharded], masks)


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("variant", zoo.FOUNDING)
def test_step_with_dropout_matches_a_replay_of_its_masks(pool: Pool, variant: str, n: int, seed: int) -> None:
    check_dropout(pool, zoo.lm_head(variant), variant, n, seed)


@pytest.mark.parametrize("variant", ["bert-decoder", "gpt2-cross", "t5-gated-untied", "llama-one-kv"])
def test_step_with_dropout_of_other_variants_matches_a_replay_of_its_masks(pool: Pool, variant: str, seed: int) -> None:
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
        ("doge", "DogeForCausalLM"),  # after a sum amid a region
    ],
)
def test_step_with_dropout_in_heads_matches_a_replay_of_its_masks(
    pool: Pool, variant: str, name: str, seed: int
) -> None:
    check_dropout(pool, name, variant, 2, seed)


class _Interruption(Exception):
    pass


def interrupt(*_: Any) -> None:
    raise _Interruption


def check_interruption(name: str, config: PreTrainedConfig, weights: Weights, batch: Batch, seed: int) -> None:
    """After an exception anywhere in a forward, ranks keep equal shared random streams, and the model works."""
    model = parallel_model(name, config, weights, 2, torch.float32, attn_implementation="eager")
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
def test_dropout_streams_recover_from_an_exception_in_forward(pool: Pool, variant: str, seed: int) -> None:
    name, config = zoo.lm_head(variant), zoo.config(variant, dropout=RATE)
    weights = full_parameters(reference_model(name, config, seed, torch.float32))
    pool.run(2, check_interruption, name, config, weights, zoo.batch(name, config, seed, torch.float32), seed)


def draws_of_evaluation(name: str, config: PreTrainedConfig, batch: Batch, seed: int) -> None:
    """Evaluation draws no random numbers; neither does training without dropout."""
    cls: Any = registry.find(name)
    for rate, training in ((RATE, False), (0.0, True)):
        for key in [key for key in config.to_dict() if "pdrop" in key]:
            setattr(config, key, rate)
        model = cls.from_config_with_parallel(config, tensor_parallel_size=2, seed=seed).train(training)
        before = torch.get_rng_state()
        model(**batch)
        assert torch.equal(torch.get_rng_state(), before), (rate, training)


def test_evaluation_leaves_the_rng_untouched(pool: Pool, seed: int) -> None:
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


def test_dropout_masks_are_determined_by_the_seed(pool: Pool, seed: int) -> None:
    """The same seed draws the same masks; the next forward and another seed draw different masks."""
    config = zoo.config("gpt2", dropout=RATE)
    batch = zoo.batch("GPT2LMHeadModel", config, seed)
    losses, other = pool.run(2, losses_with_dropout, config, batch, seed)
    assert losses == other
    assert losses[:2] == losses[2:4]
    assert len(set(losses)) == 4


@pytest.mark.parametrize("rate", [0.0, RATE])
def test_dropouts_of_composite_models_are_found(rate: float) -> None:
    with torch.device("meta"):
        model = transformers.EncoderDecoderModel(zoo.config("encoder-decoder", rate))
    assert uses_dropout(model) == (rate > 0)
