"""Training on pipeline stages matches one process: losses, gradients and parameters on (tp, pp, dp) meshes."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers.modeling_layers import GradientCheckpointingLayer

from support import pipelines, zoo
from support.pipelines import (
    Case,
    case,
    gradient_differences,
    model_on_stages,
    run_micro_batches,
    stage_differences,
    stage_parameters,
)
from support.pool import Pool
from support.reference import TOLERANCE, differences


def test_every_architecture_has_blocks_for_four_stages() -> None:
    assert pipelines.DEPTH.keys() == set(zoo.FOUNDING)


# Without data parallelism ---------------------------------------------------------------------------------------------


@lru_cache(maxsize=64)
def reference(variant: str, name: str, seed: int) -> Case:
    return case(
        name, pipelines.config(variant), seed, optimizers=pipelines.STEPS if name == zoo.lm_head(variant) else ()
    )


def check_cases(cases: list[Case], tp: int, pp: int) -> None:
    """On every rank: losses, gradients and trained parameters of each case, with micro-batches of one and two rows."""
    lines = []
    for number, given in enumerate(cases):
        model = model_on_stages(given.name, given.config, given.weights, tp, pp)
        found = pipelines.case_differences(model, given, 1 + number % 2)
        lines += [f"{given.name}: {line}" for line in found]
    assert not lines, "\n".join(lines)


@pytest.mark.drawn(4)
@pytest.mark.parametrize(("tp", "pp"), [(1, 2), (3, 2)])
@pytest.mark.parametrize("variant", zoo.FOUNDING)
def test_train_step_of_language_model_matches_one_process(
    pool: Pool, variant: str, tp: int, pp: int, seed: int
) -> None:
    pool.run(tp * pp, check_cases, [reference(variant, zoo.lm_head(variant), seed)], tp, pp)


@pytest.mark.drawn(4)
@pytest.mark.parametrize(
    ("tp", "pp"),
    [(1, 4), (2, 2), *(pytest.param(tp, 2, marks=pytest.mark.zoo) for tp in (1, 3))],
)
@pytest.mark.parametrize("variant", zoo.FOUNDING)
def test_train_step_of_every_head_matches_one_process(pool: Pool, variant: str, tp: int, pp: int, seed: int) -> None:
    cases = [reference(variant, name, seed) for name in pipelines.heads_with_loss(variant)]
    pool.run(tp * pp, check_cases, cases, tp, pp)


VARIATIONS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    # problem types and batch arguments that the tests of every class do not cover
    "regression": [
        ("GPT2ForSequenceClassification", {"num_labels": 1}),
        ("T5ForSequenceClassification", {"num_labels": 1}),
    ],
    "several labels": [(f"{name}ForSequenceClassification", {"num_labels": 3}) for name in ("Bert", "GPT2", "T5")],
    "embeddings": [("GPT2LMHeadModel", {}), ("LlamaForCausalLM", {}), ("BertForMaskedLM", {})],
    "embeddings of T5": [("T5ForConditionalGeneration", {})],
    "decoder inputs": [("T5ForConditionalGeneration", {})],
    "decoder of another length": [("T5ForQuestionAnswering", {})],
    "number of items": [("GPT2LMHeadModel", {}), ("LlamaForCausalLM", {})],
    "positions": [("GPT2LMHeadModel", {}), ("LlamaForCausalLM", {}), ("GPTJForCausalLM", {})],
}


def varied(kind: str, name: str, changes: dict[str, Any], seed: int) -> Case:
    variant = next(key for key in zoo.FOUNDING if name in zoo.heads(key))
    config = pipelines.config(variant, **changes)
    batch = pipelines.batch(name, config, seed)
    generator = torch.Generator().manual_seed(seed)
    rows, length = batch["input_ids"].shape

    def embeddings() -> torch.Tensor:
        return torch.randn(rows, length, config.hidden_size, generator=generator, dtype=torch.float64)

    if kind == "regression":
        batch["labels"] = torch.randn(rows, generator=generator, dtype=torch.float64)
    elif kind == "several labels":
        batch["labels"] = torch.randint(0, 2, (rows, 3), generator=generator).double()
    elif kind.startswith("embeddings"):
        del batch["input_ids"]
        batch["inputs_embeds"] = embeddings()
        if kind.endswith("T5"):
            batch["decoder_inputs_embeds"] = embeddings()
    elif kind == "decoder inputs":
        batch["decoder_input_ids"] = torch.randint(0, config.vocab_size, (rows, length), generator=generator)
    elif kind == "decoder of another length":
        longer = torch.randint(3, config.vocab_size, (rows, length + 4), generator=generator)
        batch |= {"decoder_input_ids": longer, "decoder_attention_mask": torch.ones_like(longer)}
        batch["start_positions"][1:3] = torch.tensor([length + 1, length + 9])
    elif kind == "number of items":
        batch["num_items_in_batch"] = torch.tensor(17)
    elif kind == "positions":
        batch["position_ids"] = (batch["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    return case(name, config, seed, batches=[[batch]])


@pytest.mark.parametrize("kind", VARIATIONS)
def test_train_step_with_varied_configurations_matches_one_process(pool: Pool, kind: str, seed: int) -> None:
    cases = [varied(kind, name, changes, seed) for name, changes in VARIATIONS[kind]]
    pool.run(2, check_cases, cases, 1, 2)
    pool.run(4, check_cases, cases, 1, 4)


OTHERS = {
    "bert-untied": 2,
    "bert-decoder": 2,
    "gpt2-untied": 1,
    "gpt2-cross": 2,
    "gpt_neo-untied": 1,
    "gptj-tied": 2,
    "llama-untied": 1,
    "llama-one-kv": 2,
    "t5-gated-untied": 2,
}


@pytest.mark.parametrize("variant", OTHERS)
def test_train_step_of_other_variants_matches_one_process(pool: Pool, variant: str, seed: int) -> None:
    given = case(zoo.lm_head(variant), pipelines.config(variant), seed)
    pool.run(2 * OTHERS[variant], check_cases, [given], OTHERS[variant], 2)


# With data parallelism ------------------------------------------------------------------------------------------------


def with_ddp(model: Any) -> Any:
    return DistributedDataParallel(model.gpu_modules(), process_group=model.mpu.get_data_parallel_group())


def with_fsdp2(model: Any) -> Any:
    mesh = model.mesh.device_mesh["dp"]
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            fully_shard(module, mesh=mesh)
    return fully_shard(model, mesh=mesh)


WRAPPERS: dict[str, Callable[[Any], Any]] = {"DDP": with_ddp, "FSDP2": with_fsdp2}


def check_replicas(wrapper: str, given: Case, tp: int, pp: int) -> None:
    """On every rank: each replica trains on its batch, and all replicas train on the mean loss of all batches."""
    lines = pipelines.replica_differences(WRAPPERS[wrapper], given, tp, pp)
    assert not lines, "\n".join(lines)


@pytest.mark.drawn(4)
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("variant", zoo.FOUNDING)
def test_train_step_of_ddp_and_fsdp2_replicas_matches_one_process(
    pool: Pool, variant: str, wrapper: str, seed: int
) -> None:
    given = case(zoo.lm_head(variant), pipelines.config(variant), seed, 2, pipelines.STEPS)
    pool.run(4, check_replicas, wrapper, given, 1, 2)


@pytest.mark.parametrize("variant", ["gpt2", "t5"])
def test_train_step_over_tensor_pipeline_and_data_parallel_ranks(pool: Pool, variant: str, seed: int) -> None:
    given = case(zoo.lm_head(variant), pipelines.config(variant), seed, 2, pipelines.STEPS)
    pool.run(8, check_replicas, "DDP", given, 2, 2)


# Partitions by hand ---------------------------------------------------------------------------------------------------


def check_partition(given: Case, blocks: list[int], folder: Path) -> None:
    """Stages hold the given blocks, match one process, and load checkpoints of stages with other blocks."""
    model = model_on_stages(given.name, given.config, given.weights, 1, len(blocks), blocks_per_stage=blocks)
    assert [stop - start for start, stop in model.stage.ranges] == blocks
    found = differences("loss", run_micro_batches(model, given.batches[0][0]), given.loss[0], TOLERANCE)
    found += gradient_differences(model, given.gradients)
    model.save_pretrained_with_parallel(folder)
    turned = model.from_pretrained_with_parallel(folder, 1, len(blocks), blocks_per_stage=blocks[::-1])
    assert [stop - start for start, stop in turned.stage.ranges] == blocks[::-1]
    found += stage_differences(turned, "loaded:", stage_parameters(turned), given.weights, 0.0)
    assert not found, "\n".join(found)


@pytest.mark.parametrize(("variant", "blocks"), [("gpt2", [1, 3]), ("t5", [5, 2])])
def test_train_step_and_saving_with_blocks_per_stage(
    pool: Pool, variant: str, blocks: list[int], seed: int, tmp_path: Path
) -> None:
    """For T5, the first stage has four encoder blocks and one decoder block; after loading, it has two blocks."""
    pool.run(2, check_partition, reference(variant, zoo.lm_head(variant), seed), blocks, tmp_path / "saved")
