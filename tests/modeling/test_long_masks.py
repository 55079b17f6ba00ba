"""Models whose attention runs by blocks match transformers, alone and with everything around a training loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import oslo_models
import oslo_models.integrations
from oslo_models.layers.blockwise_attention import BLOCKWISE

from support import pipelines, zoo
from support.generation import BEAMS, Tokens, generate_tokens, token_differences
from support.long_masks import short_blocks
from support.pool import Pool
from support.reference import (
    TOLERANCE,
    Step,
    differences,
    full_parameters,
    parallel_model,
    reference_model,
    reference_step,
    step_differences,
)
from support.trainers import arguments, differences_of_run, rank_trainer, reference_run, text_rows

PADDED, PACKED = "left padding", "packing"
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt2": {},
    "mistral": {"sliding_window": 5},
    "gemma3_text": {"sliding_window": 5},
    "llama4_text": {"attention_chunk_size": 6},
    "qwen3_moe": {},
    "bert": {},
    "gpt_neox": {},
    "opt": {},
}


def batch(name: str, config: Any, seed: int, kind: str, length: int = 19) -> dict[str, Any]:
    """Return rows of tokens with labels: with padding on the left, or several texts packed into each row."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, config.vocab_size, (3, length), generator=generator)
    if kind == PADDED:
        counts = [0, length - 2, int(torch.randint(1, length, (), generator=generator))]
        mask = torch.stack([torch.arange(length) >= count for count in counts]).long()
        return {"input_ids": ids, "attention_mask": mask, "labels": ids.where(mask == 1, -100)}
    cuts = sorted(torch.randperm(length - 1, generator=generator)[:2].add(1).tolist())
    positions = torch.cat([torch.arange(stop - start) for start, stop in zip([0, *cuts], [*cuts, length], strict=True)])
    return {"input_ids": ids, "position_ids": positions.expand(3, -1).contiguous(), "labels": ids, "use_cache": False}


CASES = [
    (model_type, kind)
    for model_type in FAMILIES
    for kind in (PADDED, PACKED)
    if (model_type, kind) not in (("bert", PACKED), ("opt", PACKED))
]


def step_of(model_type: str, kind: str, seed: int) -> Step:
    name, config = zoo.main_head(model_type), zoo.config(model_type, **FAMILIES[model_type])
    given = batch(name, config, seed, kind)
    return reference_step(name, config, seed, batch=given, attn_implementation="sdpa")


def check_step(step: Step, tp: int, fuse: bool = False, checkpointing: bool | None = None) -> None:
    """On every rank: outputs, loss and gradients are those of transformers, and each layer computed by blocks."""
    model = parallel_model(step.name, step.config, step.weights, tp, gather_logits=True)
    assert model.config._attn_implementation == BLOCKWISE
    if fuse:
        model.fuse()
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
    with short_blocks() as shapes:
        lines = step_differences(model, step)
    assert not lines, "\n".join(lines)
    assert shapes


@pytest.mark.stacks
@pytest.mark.parametrize(("model_type", "kind"), CASES)
def test_step_matches_transformers_on_two_ranks(pool: Pool, model_type: str, kind: str, seed: int) -> None:
    pool.run(2, check_step, step_of(model_type, kind, seed), 2)


@pytest.mark.parametrize(("fuse", "checkpointing"), [(True, None), (False, True), (False, False), (True, False)])
def test_step_fused_and_with_checkpointing(pool: Pool, fuse: bool, checkpointing: bool | None, seed: int) -> None:
    model_type = "mistral" if checkpointing is None else "gpt2"  # whose recomputation has no casts to float32
    pool.run(2, check_step, step_of(model_type, PADDED, seed), 2, fuse, checkpointing)


def check_zoo(step: Step) -> None:
    model = parallel_model(step.name, step.config, step.weights, 2, gather_logits=True)
    with short_blocks(2):
        lines = step_differences(model, step)
    assert not lines, "\n".join(lines)


@pytest.mark.drawn(27)
@pytest.mark.parametrize("model_type", list(zoo.MORE))
def test_main_class_of_any_type_matches_transformers(pool: Pool, model_type: str, seed: int) -> None:
    """Masks are right in types that slice, join or change them, too."""
    if reason := zoo.not_computed(model_type) or zoo.fault_of_release(model_type):
        pytest.skip(reason)
    name, config = zoo.main_head(model_type), zoo.config(model_type)
    pool.run(2, check_zoo, reference_step(name, config, seed))


def check_stages(given: pipelines.Case) -> None:
    model = pipelines.case_on_stages(given, 1, 2, micro_batch_size=2)
    with short_blocks() as shapes:
        loss = pipelines.run_micro_batches(model, given.batches[0][0])
    lines = differences("loss", loss, given.loss[0], TOLERANCE) if model.stage.is_last else []
    lines += pipelines.gradient_differences(model, given.gradients)
    assert not lines, "\n".join(lines)
    assert shapes


def test_two_stages_match_transformers(pool: Pool, seed: int) -> None:
    name, config = zoo.main_head("mistral"), zoo.config("mistral", sliding_window=5)
    rows = batch(name, config, seed, PADDED)
    rows = {key: torch.cat([value, value.flip(0)])[:4] for key, value in rows.items()}
    pool.run(2, check_stages, pipelines.case(name, config, seed, batches=[[rows]]))


def check_trainer(run: Any, args: dict[str, Any], rows: Any) -> None:
    trainer = rank_trainer(run, 2, 1, args, rows, oslo_models.integrations.Trainer)
    with short_blocks() as shapes:
        lines = differences_of_run(trainer, run)
    assert not lines, "\n".join(lines)
    assert shapes


def test_trainer_matches_transformers(pool: Pool, seed: int, tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")
    name, config = zoo.main_head("mistral"), zoo.config("mistral", sliding_window=5)
    rows = text_rows(config, seed, 20, length=13)
    run = reference_run(name, config, seed, rows, arguments(tmp_path), transformers.Trainer)
    pool.run(2, check_trainer, run, {"output_dir": tmp_path}, rows, env=True)


def check_modes(config: Any) -> None:
    cls = oslo_models.MistralForCausalLM
    model = cls.from_config_with_parallel(config, 1, dtype=torch.float64, seed=0)
    used = model.config
    assert used._attn_implementation == BLOCKWISE
    assert model.eval() is model and used._attn_implementation == "sdpa"
    model.train()
    assert used._attn_implementation == BLOCKWISE
    model.set_attn_implementation("sdpa")
    assert model.train().config._attn_implementation == "sdpa"
    model.set_attn_implementation(BLOCKWISE)
    assert model.eval().config._attn_implementation == BLOCKWISE
    for name in ("sdpa", "eager", BLOCKWISE):
        named = cls.from_config_with_parallel(config, 1, seed=0, attn_implementation=name)
        assert {named.train(mode).config._attn_implementation for mode in (True, False)} == {name}
    whole = cls.from_config_with_parallel(config, 1, seed=0).deparallelize()
    assert whole.config._attn_implementation == "sdpa" and whole.train().config._attn_implementation == "sdpa"


def test_the_mode_selects_attention_unless_it_is_named(pool: Pool) -> None:
    pool.run(1, check_modes, zoo.config("mistral"))


def check_refused(name: str, config: Any) -> None:
    cls: Any = getattr(oslo_models, name)
    model = cls.from_config_with_parallel(config, 2, seed=0)
    assert model.train().config._attn_implementation != BLOCKWISE
    message = f"attn_implementation='{BLOCKWISE}' is not available: .*Leave the argument out"
    with pytest.raises(ValueError, match=message):
        cls.from_config_with_parallel(config, 2, seed=0, attn_implementation=BLOCKWISE)


@pytest.mark.parametrize("model_type", ["falcon", "bloom"])
def test_types_with_their_own_attention_are_refused_by_name(pool: Pool, model_type: str) -> None:
    pool.run(2, check_refused, zoo.main_head(model_type), zoo.config(model_type))


def check_generation(name: str, config: Any, weights: Any, given: dict[str, Any], expected: Tokens) -> None:
    model = parallel_model(name, config, weights, 2, attn_implementation=BLOCKWISE)
    with short_blocks() as shapes:
        lines = token_differences(model, given, expected, BEAMS)
    assert not lines, "\n".join(lines)
    assert shapes and all(queries > 1 for _, _, queries, _ in shapes)


@pytest.mark.parametrize("model_type", ["mistral", "llama4_text"])
def test_generation_with_caches_gives_the_same_tokens(pool: Pool, model_type: str, seed: int) -> None:
    name, config = zoo.main_head(model_type), zoo.config(model_type, **FAMILIES[model_type])
    given = batch(name, config, seed, PADDED)
    del given["labels"]
    model = reference_model(name, config, seed)
    weights = full_parameters(model)
    pool.run(2, check_generation, name, config, weights, given, generate_tokens(model, given, BEAMS))


def check_compiled(step: Step, blocks: bool) -> None:
    """Compiled models make their masks as in transformers. Compiled blocks read a lazy mask."""
    model = parallel_model(step.name, step.config, step.weights, 1, gather_logits=True)
    for module in model.model.layers if blocks else [model]:
        module.compile(backend="eager")
    with short_blocks():
        lines = step_differences(model, step)
    assert not lines, "\n".join(lines)


@pytest.mark.parametrize("blocks", [False, True])
def test_compiled_models_match_transformers(pool: Pool, blocks: bool, seed: int) -> None:
    pool.run(1, check_compiled, step_of("mistral", PADDED, seed), blocks)
