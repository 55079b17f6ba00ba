"""Chooses the parallel sizes of a job for the devices at hand."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from oslo_models.planning.job import Job
from oslo_models.planning.memory import GIB, Estimate, describe, estimate_job

FREE = 0.08
"""The part of a device that a plan leaves free: the context of CUDA, NCCL's buffers and fragments of the allocator."""
_GROUP = re.compile(r"(?:(\d+)\s*x\s*)?(\d+(?:\.\d+)?)\s*(GiB|GB|G|MiB|MB|M)", re.IGNORECASE)


@dataclass(frozen=True)
class Devices:
    """Devices at hand.

    Attributes:
        count: the number of devices.
        bytes: the memory of the smallest device.
    """

    count: int
    bytes: int

    @property
    def usable(self) -> int:
        """Bytes of the smallest device that a plan may use."""
        return int(self.bytes * (1 - FREE))


def parse_devices(text: str) -> Devices:
    """Read devices such as ``"2x24GB"`` or ``"2x24GB,16GB"``. A GB is 2^30 bytes, as in the names of GPUs.

    Raises:
        ValueError: the text has another form.
    """
    sizes: list[int] = []
    for part in text.split(","):
        found = _GROUP.fullmatch(part.strip())
        count = int(found[1] or 1) if found else 0
        size = float(found[2]) if found else 0.0
        if not found or not 1 <= count <= 1024 or not size:
            raise ValueError(
                f"--devices {text!r} is not NUMBERxSIZE: write 2x24GB, or 24GB,16GB for devices of several sizes"
            )
        unit = GIB if found[3].upper().startswith("G") else 1 << 20
        sizes += [int(size * unit)] * count
    return Devices(len(sizes), min(sizes))


@dataclass(frozen=True)
class Choice:
    """Recommended sizes.

    Attributes:
        estimate: the memory with these sizes; with the largest sizes if none fit.
        fits: whether every rank fits.
        reason: the reason for these sizes, in one sentence.
        tried: the totals of the fullest ranks of all sizes that were tried, with their jobs.
        help: changes with which the job would fit, with the total of the fullest rank.
    """

    estimate: Estimate
    fits: bool
    reason: str
    tried: tuple[tuple[Job, int], ...]
    help: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        tried = [{**describe(job), "total": total} for job, total in self.tried]
        return {"fits": self.fits, "reason": self.reason, "tried": tried, "help": list(self.help)}


def choose_sizes(job: Job, devices: Devices) -> Choice:
    """Return the sizes that need the fewest devices for one replica. Further devices hold further replicas.

    Tensor parallelism comes before stages, which wait for each other.
    """
    tried: list[tuple[Job, int]] = []
    estimates = []
    for candidate in _candidates(job, devices.count):
        found = estimate_job(candidate)
        total = found.largest.total
        tried.append((candidate, total))
        estimates.append(found)
        if total <= devices.usable:
            return Choice(found, True, _reason(tried, devices), tuple(tried))
    if not estimates:
        raise ValueError(
            f"--devices: none of the sizes of {devices.count} devices fits the heads and blocks of {job.cls.__name__}: "
            "use fewer devices"
        )
    best = min(estimates, key=lambda each: each.largest.total)
    reason = (
        f"no sizes fit {devices.count} x {devices.bytes / GIB:g} GiB: the fullest rank of the best takes "
        f"{best.largest.total / GIB:.1f} of {devices.usable / GIB:.1f} usable GiB"
    )
    return Choice(best, False, reason, tuple(tried), tuple(_changes(best.job, devices)))


def _candidates(job: Job, count: int) -> Iterator[Job]:
    sizes = [(tp, pp) for tp in range(1, count + 1) for pp in range(1, count + 1) if count % (tp * pp) == 0]
    for tp, pp in sorted(sizes, key=lambda pair: (pair[0] * pair[1], pair[1])):
        replicas = count // (tp * pp) if job.trains else 1
        try:
            candidate = replace(job, tensor_parallel_size=tp, pipeline_parallel_size=pp, data_parallel_size=replicas)
        except ValueError:  # more ranks than heads, or stages that the model does not have
            continue
        try:
            _check_blocks(candidate)
        except ValueError:
            continue
        yield candidate


def _check_blocks(job: Job) -> None:
    """Raise ``ValueError`` if there are more stages than blocks."""
    blocks = getattr(job.config.get_text_config(), "num_hidden_layers", None)
    if isinstance(blocks, int) and not job.config.is_encoder_decoder and job.pipeline_parallel_size > blocks:
        raise ValueError(f"pipeline_parallel_size={job.pipeline_parallel_size} is more than {blocks} blocks")


def _reason(tried: list[tuple[Job, int]], devices: Devices) -> str:
    job, total = tried[-1]
    used = f"{total / GIB:.1f} of {devices.usable / GIB:.1f} usable GiB"
    sizes = job.tensor_parallel_size * job.pipeline_parallel_size
    text = f"the fullest rank takes {used}"
    if sizes == 1:
        text = f"the model fits on one device ({used})"
    elif tried[:-1]:
        before, missed = tried[-2]
        text += f", and {missed / GIB:.1f} GiB with {_sizes(before)}"
    return text + (f"; {job.data_parallel_size} replicas share the rows" if job.data_parallel_size > 1 else "")


def _sizes(job: Job) -> str:
    return f"tensor_parallel_size={job.tensor_parallel_size} and pipeline_parallel_size={job.pipeline_parallel_size}"


def _changes(job: Job, devices: Devices) -> Iterator[str]:
    """Yield changes of the batch or the task that fit, each with its total; or the memory that a device needs."""
    options: list[tuple[str, dict[str, Any]]] = []
    if job.trains:
        options.append(("--gradient-checkpointing", {"gradient_checkpointing": True}))
    if job.batch > 1:
        options.append(("--batch 1", {"batch": 1, "micro_batch_size": 1}))
    if job.task in ("full", "lora"):
        task = {"full": "lora", "lora": "qlora"}[job.task]
        options.append((f"--task {task} --gradient-checkpointing", {"task": task, "gradient_checkpointing": True}))
    for flag, change in options:
        total = estimate_job(replace(job, **change)).largest.total
        if total <= devices.usable:
            yield f"{flag} takes {total / GIB:.1f} GiB on the fullest rank"
            return
    needed = estimate_job(job).largest.total / (1 - FREE) / GIB
    yield f"devices of {needed:.0f} GiB, or more of them"
