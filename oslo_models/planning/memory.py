"""`estimate`: the memory of each rank of a job, from a step on the meta device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from oslo_models.config.arguments import parse_dtype
from oslo_models.planning.job import DEFAULT_LENGTH, Job, RankRun, distinct_ranks, positions
from oslo_models.planning.meta_run import PARTS
from oslo_models.planning.model_source import find_model
from oslo_models.sharding.pipeline_rules import ONE_F_ONE_B

GIB = 1 << 30


@dataclass(frozen=True)
class RankMemory:
    """Memory of ranks that hold equal shards of one stage.

    Attributes:
        stage: their pipeline stage.
        tp_ranks: their tensor-parallel ranks.
        parts: bytes of each part at the moment of the highest total.
        total: the sum of ``parts``.
        modules: bytes of the weights of each block and of each module outside of blocks.
        parameters, trainable: numbers of elements.
    """

    stage: int
    tp_ranks: tuple[int, ...]
    parts: dict[str, int]
    total: int
    modules: dict[str, int]
    parameters: int
    trainable: int

    @property
    def name(self) -> str:
        """The coordinates, such as ``"stage 0, tp 0-3"``."""
        first, last = self.tp_ranks[0], self.tp_ranks[-1]
        return f"stage {self.stage}, tp {first}" + (f"-{last}" if last > first else "")


@dataclass(frozen=True)
class Estimate:
    """Memory of all ranks of a job. ``str()`` gives a table.

    Attributes:
        job: the model, its sizes and its batch.
        ranks: the memory of each kind of rank.
    """

    job: Job
    ranks: tuple[RankMemory, ...]

    @property
    def largest(self) -> RankMemory:
        """The rank with the highest total."""
        return max(self.ranks, key=lambda rank: rank.total)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, in bytes."""
        return {
            "model": self.job.cls.__name__,
            **describe(self.job),
            "ranks": [
                {
                    **{"stage": rank.stage, "tp_ranks": list(rank.tp_ranks), "total": rank.total, "parts": rank.parts},
                    **{"parameters": rank.parameters, "trainable": rank.trainable, "modules": rank.modules},
                }
                for rank in self.ranks
            ],
        }

    def __str__(self) -> str:
        shown = [part for part in PARTS if any(rank.parts[part] for rank in self.ranks)]
        unit, name = (GIB, "GiB") if self.largest.total >= GIB / 10 else (GIB / 1024, "MiB")
        rows = [(f"{name} of a rank", *shown, "total")]
        for rank in self.ranks:
            rows.append((rank.name, *(f"{rank.parts[part] / unit:.2f}" for part in shown), f"{rank.total / unit:.2f}"))
        return table(rows)


def describe(job: Job) -> dict[str, Any]:
    """Return the sizes and the batch of a job as plain data."""
    names = (
        *("task", "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "expert_parallel_size"),
        *("batch", "length", "micro_batch_size", "lora_rank", "gradient_checkpointing", "schedule"),
        *("sequence_parallel", "context_parallel_size"),
    )
    unequal = {
        name: list(value)
        for name in ("tensor_parallel_shares", "blocks_per_stage")
        if (value := getattr(job, name)) is not None
    }
    return {**{name: getattr(job, name) for name in names}, **unequal, "dtype": str(job.dtype).removeprefix("torch.")}


def table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as aligned columns; the first is on the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )


def estimate(
    model: Any,
    task: str = "lora",
    tensor_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    batch: int = 1,
    length: int | None = None,
    *,
    data_parallel_size: int = 1,
    expert_parallel_size: int = 1,
    micro_batch_size: int = 1,
    dtype: torch.dtype | str | None = None,
    lora_rank: int = 16,
    lora_targets: str | Sequence[str] = "all-linear",
    gradient_checkpointing: bool = False,
    device_type: str = "cuda",
    tensor_parallel_shares: Sequence[int] | None = None,
    blocks_per_stage: Sequence[int] | None = None,
    schedule: str = ONE_F_ONE_B,
    sequence_parallel: bool = False,
    context_parallel_size: int = 1,
) -> Estimate:
    """Return the memory of each rank of a job. Starts no process and reads no weights.

    One rank of each kind is constructed on the meta device, as the constructors do it, and runs a forward and a
    backward pass and a step of AdamW there. Every tensor counts with its real size while it is alive.

    Args:
        model: a model, a configuration, a name on the hub (only its configuration is downloaded), a directory, or a
            ``config.json`` file.
        task: ``"full"`` trains all weights, ``"lora"`` adapters of ``peft``, ``"qlora"`` adapters of linear layers with
            4-bit weights. ``"serve"`` holds the key-value cache of a running batch of ``batch`` rows of ``length``
            tokens, with spare columns as `oslo-models serve` reserves them, and computes prompts in parts of 2,048
            tokens (256 on CPUs).
        tensor_parallel_size, pipeline_parallel_size: as in the constructors, like ``expert_parallel_size`` and
            ``micro_batch_size``.
        batch: rows of each data-parallel replica.
        length: tokens of a row, by default 512, or the positions of a model with fewer. An encoder-decoder has as many
            in its decoder.
        data_parallel_size: replicas of ``DistributedDataParallel``. They shard nothing, and its buckets take memory.
        dtype: the dtype of the weights, by default as in the configuration.
        lora_rank: rank of the adapters.
        lora_targets: ``target_modules`` of ``peft.LoraConfig``.
        gradient_checkpointing: compute each block again in the backward pass.
        device_type: ``"cuda"`` or ``"cpu"``. Attention with dropout holds its scores on a CPU.
        tensor_parallel_shares, blocks_per_stage, schedule, sequence_parallel: as in the constructors, like
            ``context_parallel_size``.

    Returns:
        The bytes of each part at the moment of the highest total. The context of CUDA, NCCL's own buffers and the
        fragments of the allocator come on top.

    Raises:
        OSError: there is no such model.
        ValueError: an argument is invalid, the sizes do not fit the model, or the shapes of a step depend on values.
        RuntimeError: this process already belongs to a process group.
    """
    job = make_job(
        model,
        task=task,
        tensor_parallel_size=tensor_parallel_size,
        pipeline_parallel_size=pipeline_parallel_size,
        data_parallel_size=data_parallel_size,
        expert_parallel_size=expert_parallel_size,
        batch=batch,
        length=length,
        micro_batch_size=micro_batch_size,
        dtype=dtype,
        lora_rank=lora_rank,
        lora_targets=lora_targets,
        gradient_checkpointing=gradient_checkpointing,
        device_type=device_type,
        tensor_parallel_shares=tensor_parallel_shares,
        blocks_per_stage=blocks_per_stage,
        schedule=schedule,
        sequence_parallel=sequence_parallel,
        context_parallel_size=context_parallel_size,
    )
    return estimate_job(job)


def make_job(model: Any, dtype: torch.dtype | str | None = None, length: int | None = None, **options: Any) -> Job:
    """Return the job of a model; see `estimate`."""
    cls, config = find_model(model)
    if length is None:
        length = min(DEFAULT_LENGTH, positions(config) or DEFAULT_LENGTH)
    parsed = parse_dtype({"dtype": dtype}) or config.dtype or config.get_text_config().dtype or torch.float32
    return Job(cls, config, dtype=parsed, length=length, **options)


def estimate_job(job: Job) -> Estimate:
    """Return the memory of each rank of a job."""
    return Estimate(job, tuple(_memory(run, ranks) for run, ranks in distinct_ranks(job)))


def _memory(run: RankRun, tp_ranks: Sequence[int]) -> RankMemory:
    parts = {part: run.peak[part] for part in PARTS}
    return RankMemory(run.stage, tuple(tp_ranks), parts, run.total, run.modules, run.parameters, run.trainable)
