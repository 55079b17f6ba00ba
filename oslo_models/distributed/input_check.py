"""Detects different batches on the ranks of one model replica, since these would give wrong results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
_PIECE = 1 << 18
"""Bytes hashed at a time. The temporary memory is about three times as much, and fits the cache of a CPU core."""
_STEP, _FACTOR = -0x61C8864680B583EB, 0x2545F4914F6CDD1D
"""Odd numbers with bits like random ones: those of splitmix64 (as a signed number) and xorshift64*."""


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
    """Return shape, dtype and a checksum of all bytes and their order."""
    x = x.detach()
    checksum = torch.zeros((), dtype=torch.int64, device=x.device)
    for piece in _pieces(x):
        checksum.mul_(_FACTOR).add_(_checksum(piece))
    return f"{list(x.shape)} of {str(x.dtype).removeprefix('torch.')}, checksum {checksum.item() % 2**64:016x}"


def _pieces(x: Tensor) -> Iterator[Tensor]:
    """Split a tensor into views of at most `_PIECE` bytes. They depend on its shape, and not on its strides."""
    if x.numel() * x.element_size() <= _PIECE:
        yield x
    elif (row := x[0].numel() * x.element_size()) > _PIECE:
        for part in x:
            yield from _pieces(part)
    else:
        yield from x.split(_PIECE // row)


def _checksum(piece: Tensor) -> Tensor:
    """Return the sum of a hash of each word of 8 bytes and its position. The hash maps different words differently."""
    words = torch.zeros(-(-piece.numel() * piece.element_size() // 16) * 2, dtype=torch.int64, device=piece.device)
    words.view(piece.dtype)[: piece.numel()].view(piece.shape).copy_(piece)  # reads any strides, and pads with zeros
    words.add_(torch.arange(len(words), device=piece.device), alpha=_STEP)
    halves = words.view(torch.int32).view(-1, 2)
    for _ in range(2):  # after one round, the signs of two numbers could cancel out
        words.mul_(_FACTOR)
        halves[:, 0].bitwise_xor_(halves[:, 1])
    return words.sum()


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
        "batches to all ranks: use the classes of this library, `from oslo_models.integrations import Trainer, "
        "Accelerator`, and put `ParallelTrainerMixin` from there in front of the bases of a Trainer of your own"
    )
