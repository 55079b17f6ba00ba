"""Chooses the parallel sizes of a job for the devices at hand."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from oslo_models.planning.job import Job
from oslo_models.planning.memory import GIB, Estimate, RankMemory, describe, estimate_job
from oslo_models.sharding.shares import apportion

FREE = 0.08
"""The part of a device that a plan leaves free: the context of CUDA, NCCL's buffers and fragments of the allocator."""
_LARGEST_SHARE = 16
_MOST_MOVES = 12
"""Estimates of blocks per stage. Each takes a second or more for a large model."""
UNEQUAL = ("tensor_parallel_shares", "blocks_per_stage")
_GROUP = re.compile(r"(?:(\d+)\s*x\s*)?(\d+(?:\.\d+)?)\s*(GiB|GB|G|MiB|MB|M)", re.IGNORECASE)


@dataclass(frozen=True)
class Devices:
    """Devices at hand.

    Attributes:
        sizes: the memory of each device in bytes, in the order of the ranks.
    """

    sizes: tuple[int, ...]

    @property
    def count(self) -> int:
        """The number of devices."""
        return len(self.sizes)

    @property
    def bytes(self) -> int:
        """The memory of the smallest device."""
        return min(self.sizes)

    @property
    def are_equal(self) -> bool:
        """Whether all devices have the same memory."""
        return len(set(self.sizes)) == 1

    def limit(self, job: Job, rank: RankMemory) -> int:
        """Return the bytes that a plan may use on the smallest device of these ranks and their copies."""
        copies = range(job.copies)
        return min(self.limit_at(job, rank.stage, copy, tp_rank) for copy in copies for tp_rank in rank.tp_ranks)

    def limit_at(self, job: Job, stage: int, copy: int, tp_rank: int) -> int:
        """Return the bytes that a plan may use on the device of one rank; of the smallest device if it has none."""
        number = (stage * job.copies + copy) * job.tensor_parallel_size + tp_rank
        return int((self.sizes[number] if number < self.count else self.bytes) * (1 - FREE))

    def fullest(self, found: Estimate) -> tuple[RankMemory, int]:
        """Return the rank that uses the largest part of its device, and the limit of this device."""
        limits = [(rank, self.limit(found.job, rank)) for rank in found.ranks]
        return max(limits, key=lambda pair: pair[0].total / pair[1])

    def fits(self, found: Estimate) -> bool:
        """Return whether every rank fits on its device."""
        rank, limit = self.fullest(found)
        return rank.total <= limit

    def __str__(self) -> str:
        groups = [(len([*same]), size) for size, same in groupby(self.sizes)]
        return ", ".join(f"{count} x {size / GIB:g} GiB" for count, size in groups)


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
    return Devices(tuple(sizes))


@dataclass(frozen=True)
class Choice:
    """Recommended sizes.

    Attributes:
        estimate: the memory with these sizes; with the largest sizes if none fit.
        fits: whether every rank fits.
        reason: the reason for these sizes, in one sentence.
        tried: the totals of the fullest ranks of all sizes that were tried, with their jobs.
        help: changes with which the job would fit, with the total of the fullest rank.
        keys: the first change as keys of a recipe.
    """

    estimate: Estimate
    fits: bool
    reason: str
    tried: tuple[tuple[Job, int], ...]
    help: tuple[str, ...] = ()
    keys: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        tried = [{**describe(job), "total": total} for job, total in self.tried]
        return {"fits": self.fits, "reason": self.reason, "tried": tried, "help": list(self.help)}


def choose_sizes(job: Job, devices: Devices, stages: bool = True) -> Choice:
    """Return the sizes that need the fewest devices for one replica. Further devices hold further replicas.

    Tensor parallelism comes before stages, which wait for each other. On unequal devices, shares and blocks in the
    ratio of their memory follow if equal parts do not fit.

    Args:
        stages: whether to try several pipeline stages.
    """
    tried: list[tuple[Job, int]] = []
    estimates = []
    for candidate in _candidates(job, devices.count, stages):
        for found in _estimates(candidate, devices):
            tried.append((found.job, found.largest.total))
            estimates.append(found)
            if devices.fits(found):
                return Choice(found, True, _reason(found, tried, devices), tuple(tried))
    if not estimates:
        if job.sequence_parallel and devices.count == 1:
            raise ValueError(f"sequence_parallel=True divides tokens over ranks, and --devices has one: {devices}")
        if devices.count % job.context_parallel_size:
            raise ValueError(
                f"context_parallel_size={job.context_parallel_size} does not divide --devices, which has "
                f"{devices.count} devices: use a multiple"
            )
        raise ValueError(
            f"--devices: none of the sizes of {devices.count} devices fits the heads and blocks of {job.cls.__name__}: "
            "use fewer devices"
        )
    best = min(estimates, key=lambda each: _load(each, devices))
    rank, limit = devices.fullest(best)
    reason = (
        f"no sizes fit {devices}: the fullest rank of the best takes {rank.total / GIB:.1f} of {limit / GIB:.1f} "
        "usable GiB"
    )
    helped, keys = _change(best.job, devices)
    return Choice(best, False, reason, tuple(tried), (helped,), keys)


def _load(found: Estimate, devices: Devices) -> float:
    """Return the part of its device that the fullest rank takes."""
    rank, limit = devices.fullest(found)
    return rank.total / limit


def _estimates(job: Job, devices: Devices) -> Iterator[Estimate]:
    """Yield the memory with equal parts, then with parts by the memory of the devices."""
    found = estimate_job(job)
    yield found
    if devices.are_equal or job.tensor_parallel_size * job.pipeline_parallel_size == 1:
        return
    limits = _limits(job, devices)
    has_shares = job.expert_parallel_size == job.context_parallel_size == 1
    if has_shares and (shares := _ratio(limits)) is not None:
        even = max(rank.total for rank in found.ranks)
        found = estimate_job(replace(job, tensor_parallel_shares=shares))
        yield found
        if devices.fits(found):
            return
        again = _ratio(_divisible(limits, even, found))
        if again not in (None, shares):
            found = estimate_job(replace(job, tensor_parallel_shares=again))
            yield found
    if job.pipeline_parallel_size > 1:
        yield from _with_moved_blocks(found, devices)


def _limits(job: Job, devices: Devices) -> list[float]:
    """Return the bytes that a plan may use on the smallest device of each tensor-parallel rank."""
    stages, copies = range(job.pipeline_parallel_size), range(job.copies)
    return [
        min(devices.limit_at(job, stage, copy, rank) for stage in stages for copy in copies)
        for rank in range(job.tensor_parallel_size)
    ]


def _divisible(limits: Sequence[float], even: int, found: Estimate) -> list[float]:
    """Return the memory of each rank without the part that every rank holds in full, such as hidden states.

    Two estimates give this part: with equal shares, and with the shares of ``found``.
    """
    shares = found.job.tensor_parallel_shares or ()
    largest = max(range(len(shares)), key=shares.__getitem__)
    total = max(rank.total for rank in found.ranks if largest in rank.tp_ranks)
    part, equal = shares[largest] / sum(shares), 1 / len(shares)
    fixed = (even * part - total * equal) / (part - equal)
    return [max(limit - fixed, 1.0) for limit in limits]


def _ratio(sizes: Sequence[float]) -> list[int] | None:
    """Return sizes as a ratio of small integers, within 3 % of each; ``None`` if they are equal."""
    largest = max(sizes)
    for whole in range(1, _LARGEST_SHARE + 1):
        shares = [max(round(whole * size / largest), 1) for size in sizes]
        if all(abs(share * largest / whole / size - 1) <= 0.03 for share, size in zip(shares, sizes, strict=True)):
            break
    return shares if len(set(shares)) > 1 else None


def _with_moved_blocks(found: Estimate, devices: Devices) -> Iterator[Estimate]:
    """Yield estimates with blocks by the memory of each stage: one block at a time moves from the fullest stage."""
    job = found.job
    blocks = getattr(job.config.get_text_config(), "num_hidden_layers", None)
    if not isinstance(blocks, int) or job.config.is_encoder_decoder:
        return
    stages = range(job.pipeline_parallel_size)
    memory = [
        sum(devices.limit(job, rank) * len(rank.tp_ranks) for rank in found.ranks if rank.stage == stage)
        for stage in stages
    ]
    seen: set[tuple[int, ...]] = set()
    own = apportion(blocks, memory)
    while tuple(own) not in seen and len(seen) < _MOST_MOVES:
        seen.add(tuple(own))
        found = estimate_job(replace(job, blocks_per_stage=[*own]))
        yield found
        loads = [
            max(rank.total / devices.limit(job, rank) for rank in found.ranks if rank.stage == stage)
            for stage in stages
        ]
        fullest = max((stage for stage in stages if own[stage] > 1), key=loads.__getitem__, default=0)
        emptiest = min(stages, key=loads.__getitem__)
        if fullest == emptiest:
            return
        own[fullest] -= 1
        own[emptiest] += 1


def _candidates(job: Job, count: int, stages: bool) -> Iterator[Job]:
    most, context = count if stages else 1, job.context_parallel_size
    sizes = [(tp, pp) for tp in range(1, count + 1) for pp in range(1, most + 1) if count % (tp * pp * context) == 0]
    for tp, pp in sorted(sizes, key=lambda pair: (pair[0] * pair[1], pair[1])):
        replicas = count // (tp * pp * context) if job.trains else 1
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


def _reason(found: Estimate, tried: Sequence[tuple[Job, int]], devices: Devices) -> str:
    job = found.job
    rank, limit = devices.fullest(found)
    used = f"{rank.total / GIB:.1f} of {limit / GIB:.1f} usable GiB"
    text = f"the fullest rank takes {used}"
    if job.of_replica == 1:
        text = f"the model fits on one device ({used})"
    elif tried[:-1]:
        before, missed = tried[-2]
        text += f", and {missed / GIB:.1f} GiB with {sizes_of(before)}"
    return text + (f"; {job.data_parallel_size} replicas share the rows" if job.data_parallel_size > 1 else "")


def sizes_of(job: Job) -> str:
    """Return the parallel sizes as text."""
    sizes = [f"tensor_parallel_size={job.tensor_parallel_size}", f"pipeline_parallel_size={job.pipeline_parallel_size}"]
    unequal = [f"{name}={list(getattr(job, name))}" for name in UNEQUAL if getattr(job, name) is not None]
    flags = ["sequence_parallel=True"] if job.sequence_parallel else []
    flags += [f"context_parallel_size={job.context_parallel_size}"] if job.context_parallel_size > 1 else []
    *first, last = sizes + unequal + flags
    return f"{', '.join(first)} and {last}"


def _change(job: Job, devices: Devices) -> tuple[str, str]:
    """Return a change of the batch or the task that fits, with its total, and as keys of a recipe.

    Without one, return the memory that a device needs.
    """
    options: list[tuple[str, str, dict[str, Any]]] = []
    checkpointing = "gradient_checkpointing: true"
    if job.trains and not job.gradient_checkpointing:
        options.append(("--gradient-checkpointing", checkpointing, {"gradient_checkpointing": True}))
    if job.batch > 1:
        options.append(("--batch 1", "per_device_train_batch_size: 1", {"batch": 1, "micro_batch_size": 1}))
    if job.task in ("full", "lora"):
        task = {"full": "lora", "lora": "qlora"}[job.task]
        keys = {"lora": "use_peft: true", "qlora": "load_in_4bit: true"}[task]
        flags = f"--task {task} --gradient-checkpointing"
        options.append((flags, f"{keys} and {checkpointing}", {"task": task, "gradient_checkpointing": True}))
    for flag, keys, change in options:
        found = estimate_job(replace(job, **change))
        if devices.fits(found):
            return f"{flag} takes {found.largest.total / GIB:.1f} GiB on the fullest rank", keys
    needed = estimate_job(job).largest.total / (1 - FREE) / GIB
    return f"devices of {needed:.0f} GiB, or more of them", ""
