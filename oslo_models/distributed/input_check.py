"""Detects different batches on the ranks of one model replica, since these would give wrong results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from oslo_models.distributed.collectives import all_reduce
from oslo_models.distributed.mesh import Axis
from oslo_models.distributed.object_exchange import gather_objects
from oslo_models.distributed.rng import stable_hash

FIRST_CALLS, EVERY = 3, 100
_PRIME = 2**31 - 1


@dataclass
class InputCheck:
    """Compares checksums of the input tensors of a call across the ranks of an axis, in one small all-reduce.

    Attributes:
        when: the calls to check: ``True`` for the first three and every hundredth, a number ``n`` for every ``n``-th,
            ``"always"`` for all, ``False`` for none.
        calls: the number of calls so far.
    """

    when: bool | int | str
    calls: int = 0

    def is_due(self) -> bool:
        """Count a call and return whether to check it."""
        self.calls += 1
        if isinstance(self.when, bool):
            return self.when and (self.calls <= FIRST_CALLS or self.calls % EVERY == 0)
        return self.when == "always" or (isinstance(self.when, int) and (self.calls - 1) % self.when == 0)

    def __call__(self, axis: Axis, arguments: Mapping[str, Any]) -> None:
        """Raise ``ValueError`` on every rank of the axis, naming the tensors and ranks, if the tensors differ."""
        if axis.size == 1 or torch.compiler.is_compiling() or not self.is_due():
            return
        tensors = {name: value for name, value in sorted(arguments.items()) if isinstance(value, Tensor)}
        fingerprints = {name: _fingerprint(x) for name, x in tensors.items()}
        local = stable_hash(*(f"{name} {text}" for name, text in fingerprints.items()))
        device = next((x.device for x in tensors.values()), torch.device("cpu"))
        highest, lowest = all_reduce(axis, torch.tensor([local, -local], device=device), dist.ReduceOp.MAX).tolist()
        if highest != -lowest:
            raise ValueError(_difference(axis, gather_objects(axis, fingerprints)))


def _fingerprint(x: Tensor) -> str:
    """Return shape, dtype and a checksum of two sums over the bytes. One sum depends on their order."""
    flat = x.detach().contiguous().reshape(-1)
    integers = flat.view(torch.uint8) if flat.is_floating_point() or flat.is_complex() else flat
    numbers = integers.to(torch.int64)
    weights = torch.arange(1, numbers.numel() + 1, device=x.device).mul_(48_271).remainder_(_PRIME)
    ordered, total = int((numbers * weights).sum()), int(numbers.sum())
    return f"{list(x.shape)} of {str(x.dtype).removeprefix('torch.')}, checksum {(ordered * 31 + total) % _PRIME:08x}"


def _difference(axis: Axis, fingerprints: list[dict[str, str]]) -> str:
    lines = []
    for name in sorted({name for given in fingerprints for name in given}):
        holders: dict[str, list[int]] = {}
        for rank, given in zip(axis.ranks, fingerprints, strict=True):
            holders.setdefault(given.get(name, "nothing"), []).append(rank)
        if len(holders) > 1:
            lines.append(f"  {name}: " + "; ".join(f"ranks {ranks} have {text}" for text, ranks in holders.items()))
    return (
        "ranks that share one model were given different batches:\n" + "\n".join(lines) + "\nGive all ranks of a "
        "tensor-parallel group and all pipeline stages the same batch: "
        "DistributedSampler(dataset, num_replicas=model.mpu.get_data_parallel_world_size(), "
        "rank=model.mpu.get_data_parallel_rank()), with the same seed. transformers' Trainer and accelerate deal "
        "batches to all ranks: use those of this library, `from oslo_models.integrations import Trainer, Accelerator`, "
        "and put `ParallelTrainerMixin` from there in front of the bases of a Trainer of your own"
    )
