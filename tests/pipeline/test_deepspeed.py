"""Training under a DeepSpeed engine matches training without it: losses, norms, parameters, every ZeRO stage.

DeepSpeed clips gradients to a norm of 1 by default, so each case also tests that its norm
counts sharded, replicated and tied parameters once.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedConfig

from oslo_models import registry
from oslo_models.distributed.callers import object_under_construction
from oslo_models.distributed.mesh import ParallelMesh

from support import pipelines, zoo
from support.long_masks import by_blocks
from support.pipelines import Batch
from support.pool import Pool
from support.reference import differences

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason='needs DeepSpeed: pip install "oslo-models[deepspeed]"'
)

TOLERANCE = 2e-6
"""Tolerance in float32, the dtype of ZeRO's parameters. ZeRO sums over replicas in another order than DDP."""
STEPS, ROWS = 3, 4
SGD = {"zero_allow_untested_optimizer": True}
ADAMW = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01, "torch_adam": True}}}


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    """Separate workers for this file: DeepSpeed keeps process groups, and their threads slow down later tests."""
    workers = Pool()
    yield workers
    workers.close()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def make(name: str, config: PreTrainedConfig, tp: int, pp: int) -> Any:
    cls: Any = registry.find(name)
    return cls.from_config_with_parallel(config, tensor_parallel_size=tp, pipeline_parallel_size=pp, seed=1)


def with_engine(model: Any, config: dict[str, Any]) -> Any:
    """Make an engine as documented."""
    deepspeed = pipelines.import_deepspeed()
    engine, *_ = deepspeed.initialize(
        model=model.gpu_modules(),
        model_parameters=model.gpu_parameters(),
        optimizer=None if "optimizer" in config else sgd,
        mpu=model.mpu,
        config={"train_micro_batch_size_per_gpu": ROWS, **SGD, **config},
    )
    return engine


class Listed(nn.Linear):
    """Layer that notes the engine under construction whenever its parameters are listed."""

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        vars(self).setdefault("engines", []).append(object_under_construction("DeepSpeedEngine"))
        return super().named_parameters(*args, **kwargs)


def recognised_engine() -> None:
    ParallelMesh(2)  # starts the process group
    layer = Listed(2, 2)
    options = {"train_micro_batch_size_per_gpu": 1}
    engine, *_ = pipelines.import_deepspeed().initialize(model=layer, config=options)
    assert engine in layer.engines


@pytest.mark.stacks
def test_engine_is_recognised_while_it_lists_a_module(pool: Pool) -> None:
    pool.run(2, recognised_engine, env=True)


def engine_step(engine: Any, batches: list[Batch]) -> list[Tensor]:
    """Run the documented loop. Gradients of several batches accumulate."""
    losses = []
    for batch in batches:
        outputs = engine(**batch)
        if engine.module.is_pipeline_parallelized():
            losses.append([])
            for micro_output in outputs:
                losses[-1].append(micro_output.loss)
                engine.backward(micro_output.loss)
        else:
            losses.append([outputs.loss])
            engine.backward(outputs.loss)
        engine.step()
    return [torch.stack(parts).detach().sum() for parts in losses]


def plain_step(model: Any, wrapped: Any, optimizer: Any, batches: list[Batch], clip: float) -> tuple[list[Tensor], Any]:
    """The same without DeepSpeed."""
    losses = []
    optimizer.zero_grad()
    for batch in batches:
        outputs = wrapped(**batch)
        losses.append([])
        for output in outputs if model.is_pipeline_parallelized() else [outputs]:
            losses[-1].append(output.loss)
            (output.loss / len(batches)).backward()
    norm = model.clip_grad_norm_(clip or float("inf"))
    optimizer.step()
    return [torch.stack(parts).detach().sum() for parts in losses], norm


def own_batches(model: Any, batches: list[Batch]) -> list[Batch]:
    dp = model.mesh.dp
    return [{key: value[dp.rank :: dp.size].contiguous() for key, value in batch.items()} for batch in batches]


def check_training(
    name: str,
    config: PreTrainedConfig,
    tp: int,
    pp: int,
    settings: dict[str, Any],
    batches: list[Batch],
    blocks: bool = False,
) -> None:
    """Compare an engine with plain torch. With ``blocks``, attention under the engine runs by blocks."""
    clip = settings.get("gradient_clipping", 1.0)
    accumulated = settings.get("gradient_accumulation_steps", 1)
    plain, model = make(name, config, tp, pp), make(name, config, tp, pp)
    wrapped: Any = plain.gpu_modules()
    if plain.is_data_parallelized():
        wrapped = DistributedDataParallel(wrapped, process_group=plain.mpu.get_data_parallel_group())
    parameters = list(plain.gpu_parameters())
    adamw = "optimizer" in settings
    optimizer = torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.01) if adamw else sgd(parameters)
    engine = with_engine(model, settings)
    lines = []
    for step in range(STEPS):
        given = own_batches(plain, batches[step * accumulated : (step + 1) * accumulated])
        expected, norm = plain_step(plain, wrapped, optimizer, given, clip)
        found = by_blocks(engine_step, engine, given) if blocks else engine_step(engine, given)
        for own, loss in zip(found, expected, strict=True):
            lines += differences(f"loss of step {step}", own, loss, TOLERANCE)
        if engine.zero_optimization():  # otherwise the engine does not tell
            own_norm = torch.as_tensor(engine.get_global_grad_norm(), dtype=norm.dtype)
            lines += differences(f"norm of step {step}", own_norm, norm, TOLERANCE * (1 + norm.item()))
    own = {key: full_tensor(param) for key, param in model.named_parameters()}
    for key, param in plain.named_parameters():
        # Adam divides by gradients, which may be as small as their rounding errors.
        lines += differences(key, own[key], param.detach(), 100 * TOLERANCE if adamw else TOLERANCE)
    assert not lines, "\n".join(lines)


def full_tensor(param: Any) -> Tensor:
    if not hasattr(param, "ds_id"):
        return param.detach()
    import deepspeed

    with deepspeed.zero.GatheredParameters(param):  # ZeRO stage 3
        return param.detach().clone()


def zero(stage: int, **settings: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage}, **settings}


CASES: dict[str, tuple[str, int, int, int, dict[str, Any]]] = {
    # variant, tp, pp, processes, settings
    "no ZeRO, tp=2 dp=2": ("gpt2", 2, 1, 4, zero(0)),
    "ZeRO 1, tp=2 dp=2": ("llama", 2, 1, 4, zero(1)),
    "ZeRO 2, tp=2 dp=2": ("gpt2", 2, 1, 4, zero(2)),
    "ZeRO 2, T5": ("t5", 2, 1, 4, zero(2, **ADAMW)),
    "ZeRO 3, tp=2 dp=2": ("gpt2-untied", 2, 1, 4, zero(3, gradient_clipping=0.5)),
    "no ZeRO, pp=2 dp=2": ("gpt2", 1, 2, 4, zero(0)),
    "ZeRO 1, pp=2": ("gpt2", 1, 2, 2, zero(1)),
    "ZeRO 1, pp=2 dp=2": ("gpt2", 1, 2, 4, zero(1)),
    "ZeRO 1, pp=2 dp=2, T5": ("t5", 1, 2, 4, zero(1)),
    "ZeRO 1, tp=2 pp=2": ("llama", 2, 2, 4, zero(1, **ADAMW)),
    "ZeRO 1, pp=2, no clipping": ("bert", 1, 2, 2, zero(1, gradient_clipping=0.0)),
    "ZeRO 1, pp=2, two batches a step": ("gpt2", 1, 2, 4, zero(1, gradient_accumulation_steps=2)),
    "no ZeRO, pp=2, two batches a step": ("gpt2", 1, 2, 2, zero(0, gradient_accumulation_steps=2)),
    "ZeRO 1, pp=2, the caller accumulates": ("gpt2", 1, 2, 4, zero(1, managed_gradient_accumulation=False)),
}


@pytest.mark.drawn(3)
@pytest.mark.parametrize("case", CASES)
def test_deepspeed_engine_trains_as_without_it(pool: Pool, case: str, seed: int) -> None:
    variant, tp, pp, processes, settings = CASES[case]
    name, config = zoo.lm_head(variant), zoo.config(variant)
    count = STEPS * settings.get("gradient_accumulation_steps", 1)
    batches = [pipelines.batch(name, config, seed + step, 2 * ROWS, torch.float32) for step in range(count)]
    pool.run(processes, check_training, name, config, tp, pp, settings, batches, env=True)


def test_attention_by_blocks_under_an_engine(pool: Pool, seed: int) -> None:
    name, config = zoo.lm_head("llama"), zoo.config("llama")
    batches = [pipelines.batch(name, config, seed + step, 2 * ROWS, torch.float32) for step in range(STEPS)]
    pool.run(4, check_training, name, config, 2, 1, zero(2), batches, True, env=True)


def call_engine(settings: dict[str, Any], config: PreTrainedConfig, batch: Batch) -> None:
    engine_step(with_engine(make("GPT2LMHeadModel", config, 1, 2), settings), [batch])


REFUSED = {
    "ZeRO stage 2": (zero(2), '"stage": 1'),
    "ZeRO stage 3": (zero(3), '"stage": 1'),
    "overlap_comm": ({"zero_optimization": {"stage": 1, "overlap_comm": True}}, '"overlap_comm": false'),
    "grad_accum_dtype": (zero(1, bf16={"enabled": True}, data_types={"grad_accum_dtype": "fp32"}), "data_types"),
    "wall_clock_breakdown": (zero(1, wall_clock_breakdown=True), "false"),
}


@pytest.mark.parametrize("setting", REFUSED)
def test_deepspeed_settings_unsupported_on_stages_are_rejected(pool: Pool, setting: str) -> None:
    settings, way_out = REFUSED[setting]
    config = zoo.config("gpt2")
    batch = pipelines.batch("GPT2LMHeadModel", config, 0, ROWS, torch.float32)
    for error in pool.run(2, call_engine, settings, config, batch, env=True, expect=ValueError):
        assert setting in str(error) and way_out in str(error)


def check_after_a_break(config: PreTrainedConfig, batch: Batch) -> None:
    """After an abandoned loop, the next batch raises an error; the batch after it trains."""
    engine = with_engine(make("GPT2LMHeadModel", config, 1, 2), zero(1))
    (before,) = engine_step(engine, [batch])
    for micro_output in engine(**batch):
        engine.backward(micro_output.loss)
        break
    with pytest.raises(RuntimeError, match="left before its end"):
        engine(**batch)
    engine.zero_grad()
    (after,) = engine_step(engine, [batch])
    (last,) = engine_step(engine, [batch])
    assert last < after < before


def test_deepspeed_engine_after_leaving_the_micro_batch_loop(pool: Pool) -> None:
    config = zoo.config("gpt2")
    batch = pipelines.batch("GPT2LMHeadModel", config, 0, ROWS, torch.float32)
    pool.run(2, check_after_a_break, config, batch, env=True)


def check_checkpoint(config: PreTrainedConfig, tp: int, pp: int, batches: list[Batch], folder: Path) -> None:
    """Save and load DeepSpeed's checkpoint, with a file for each rank of the model, and ours."""
    engine = with_engine(make("GPT2LMHeadModel", config, tp, pp), zero(1, **ADAMW))
    own = own_batches(engine.module, batches)
    engine_step(engine, own[:1])
    engine.save_checkpoint(folder)
    expected = engine_step(engine, own[1:])
    again = with_engine(make("GPT2LMHeadModel", config, tp, pp), zero(1, **ADAMW))
    again.load_checkpoint(folder)
    found = engine_step(again, own[1:])
    assert found == expected
    engine.module.save_pretrained_with_parallel(folder / "weights")
    cls: Any = registry.find("GPT2LMHeadModel")
    loaded = cls.from_pretrained_with_parallel(folder / "weights", tp, pp)
    for (name, param), trained in zip(loaded.named_parameters(), engine.module.parameters(), strict=True):
        assert torch.equal(param, trained), name


def test_deepspeed_checkpoint_restores_training(pool: Pool, tmp_path: Path, seed: int) -> None:
    config = zoo.config("gpt2")
    batches = [pipelines.batch("GPT2LMHeadModel", config, seed + step, 2 * ROWS, torch.float32) for step in range(3)]
    for tp, pp in ((2, 1), (1, 2)):
        pool.run(4, check_checkpoint, config, tp, pp, batches, tmp_path / f"{tp} {pp}", env=True)


def check_schedule(config: PreTrainedConfig, batch: Batch) -> None:
    model = make("GPT2LMHeadModel", config, 1, 2)
    model.schedule = "zb-h1"
    engine = with_engine(model, {})
    with pytest.raises(ValueError, match='schedule="zb-h1" cannot be used with DeepSpeed: its engine reduces'):
        engine(**batch)


def test_zero_bubble_schedule_is_refused(pool: Pool, seed: int) -> None:
    config = pipelines.config("gpt2")
    batch = pipelines.batch("GPT2LMHeadModel", config, seed, dtype=torch.float32)
    pool.run(2, check_schedule, config, batch, env=True)
