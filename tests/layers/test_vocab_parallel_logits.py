"""Vocabulary-parallel logits: cross entropy and other operations match full logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from oslo_kernels import logits as kernel
from oslo_models.distributed.mesh import ParallelMesh
from oslo_models.layers import cross_entropy
from oslo_models.layers.vocab_parallel import VocabParallelLogits
from oslo_models.sharding.layout import EvenSplit, Layout

from support import logits_operations
from support.logits_operations import LABELS, LOSSES, SHAPE, VOCAB, Loss
from support.pool import Pool
from support.reference import TOLERANCE, differences


def sharded(full: Tensor, tp: Any) -> tuple[Tensor, VocabParallelLogits]:
    """Return a leaf with this rank's part of ``full``, and its sharded logits."""
    words = Layout.sharded((VOCAB, 1), 0, (EvenSplit(VOCAB),), tp.size)
    ((start, stop),) = words.ranges[tp.rank]
    leaf = full[..., start:stop].clone().requires_grad_()
    return leaf, VocabParallelLogits.from_local(leaf * 1, tp, words)


def part_of(full: Tensor, logits: VocabParallelLogits) -> Tensor:
    ((start, stop),) = logits.vocab.ranges[logits.tp.rank]
    return full[..., start:stop]


def compare(what: str, full: Tensor, tp: Any, operation: Callable[[Tensor], Any], tolerance: float) -> list[str]:
    """Apply an operation to full and to sharded logits; return lines for differing results and gradients."""
    whole = full.clone().requires_grad_()
    leaf, logits = sharded(full, tp)
    expected, found = operation(whole * 1), operation(logits)
    if not isinstance(expected, Tensor):
        return [] if found == expected else [f"{what}: {found} instead of {expected}"]
    found = found.full() if isinstance(found, VocabParallelLogits) else found
    if type(found) is not Tensor:
        return [f"{what}: a {type(found).__name__}"]
    if expected.isnan().any():
        return [] if torch.equal(expected.isnan(), found.isnan()) else [f"{what}: {found} instead of {expected}"]
    if expected.dtype == torch.bool:
        return [] if torch.equal(expected, found) else [f"{what}: {found} instead of {expected}"]
    lines = differences(what, found.detach(), expected.detach(), tolerance)
    with torch.no_grad():
        alone = operation(VocabParallelLogits.from_local(part_of(full, logits).clone(), tp, logits.vocab))
    alone = alone.full() if isinstance(alone, VocabParallelLogits) else alone
    lines += differences(f"{what} without gradients", alone, expected.detach(), tolerance)
    if expected.requires_grad != found.requires_grad:
        return [*lines, f"{what}: requires_grad={found.requires_grad}"]
    if expected.requires_grad and not lines:
        weights = torch.arange(expected.numel(), dtype=expected.dtype).cos().view_as(expected)
        (expected * weights).sum().backward()
        (found * weights).sum().backward()
        lines += differences(f"gradient of {what}", leaf.grad, part_of(whole.grad, logits), tolerance)
    return lines


def passing(in_cpp: bool) -> Any:
    """Pass over logits of every size in C++, or of no size."""
    return mock.patch.object(cross_entropy, "MANY_LOGITS", 1 if in_cpp else 1 << 60)


def check_cross_entropy(n: int, seed: int, scale: float, in_cpp: bool) -> None:
    """On every rank: torch's losses and their gradients."""
    with passing(in_cpp), mock.patch.object(kernel, "statistics", wraps=kernel.statistics) as used:
        _check_cross_entropy(n, seed, scale)
    assert used.called is in_cpp


def _check_cross_entropy(n: int, seed: int, scale: float) -> None:
    tp = ParallelMesh(n).tp
    torch.manual_seed(seed)
    full = scale * torch.randn(15, VOCAB, dtype=torch.float64)
    target = torch.randint(VOCAB, (15,))
    lines = []
    for options in LOSSES:
        for name, change in LABELS.items():
            labels = change(target)

            def loss(logits: Tensor, labels: Tensor = labels, options: Loss = options) -> Tensor:
                return F.cross_entropy(logits[: len(labels)], labels, **options)

            if "ignore_index" not in options or not (labels == -100).any():
                lines += compare(f"{options}, labels: {name}", full, tp, loss, TOLERANCE)
    assert not lines, "\n".join(lines)


@pytest.mark.parametrize("scale", [1.0, 1000.0], ids=["usual", "of large logits"])
@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("in_cpp", [False, True])
def test_vocab_parallel_cross_entropy_matches_torch(pool: Pool, in_cpp: bool, n: int, scale: float, seed: int) -> None:
    pool.run(n, check_cross_entropy, n, seed, scale, in_cpp)


def check_half_precision(seed: int) -> None:
    """On each of two ranks: losses and gradients equal rounded float32 results."""
    tp = ParallelMesh(2).tp
    torch.manual_seed(seed)
    lines = []
    for dtype in (torch.bfloat16, torch.float16):
        full, target = torch.randn(15, VOCAB).to(dtype), torch.randint(VOCAB, (15,))
        for options in LOSSES[:-1]:
            whole = full.float().requires_grad_()
            expected = F.cross_entropy(whole, target, **options)
            leaf, logits = sharded(full, tp)
            found = F.cross_entropy(logits, target, **options)
            expected.sum().backward()
            found.sum().backward()
            gradient = part_of(whole.grad, logits)
            for what, own, exact in (("loss", found, expected), ("gradient", leaf.grad, gradient)):
                # a gradient is a difference of probabilities, each with float32's rounding
                allowed = torch.finfo(dtype).eps * exact.abs() + torch.finfo(torch.float32).eps
                off = (own.float() - exact).abs() > allowed
                if own.dtype != dtype or off.any():
                    lines.append(f"{what} in {dtype} with {options}: {own.dtype}, off in {int(off.sum())} places")
    assert not lines, "\n".join(lines)


def test_vocab_parallel_cross_entropy_in_half_precision(pool: Pool, seed: int) -> None:
    pool.run(2, check_half_precision, seed)


def lose(label: int, options: Loss) -> None:
    _, logits = sharded(torch.zeros(2, VOCAB), ParallelMesh(2).tp)
    with passing(True), pytest.raises(IndexError):
        F.cross_entropy(logits, torch.tensor([1, label]), **options)
    F.cross_entropy(logits, torch.tensor([1, label]), **options)


@pytest.mark.parametrize("options", [{}, {"reduction": "none"}, {"ignore_index": 3}, {"label_smoothing": 0.1}], ids=str)
@pytest.mark.parametrize("label", [-1, VOCAB, 10**6])
def test_vocab_parallel_cross_entropy_rejects_labels_outside_the_vocabulary(
    pool: Pool, label: int, options: Loss
) -> None:
    """All ranks raise the same error as torch."""
    with pytest.raises(IndexError):
        F.cross_entropy(torch.zeros(2, VOCAB), torch.tensor([1, label]), **options)
    pool.run(2, lose, label, options, expect=IndexError)


def check_operations(table: str, n: int, seed: int) -> None:
    """On every rank: each operation has the same result and gradient on sharded and on full logits."""
    tp = ParallelMesh(n).tp
    torch.manual_seed(seed)
    full = torch.randn(SHAPE, dtype=torch.float64)
    lines = []
    for name, operation in getattr(logits_operations, table).items():
        tolerance = 1e-6 if name == "float" else TOLERANCE
        try:
            lines += compare(name, full, tp, operation, tolerance)
        except Exception as error:  # noqa: BLE001
            lines.append(f"{name}: {type(error).__name__}: {error}")
    assert not lines, "\n".join(lines)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_operations_on_vocab_parallel_logits_match_full_logits(pool: Pool, n: int, seed: int) -> None:
    pool.run(n, check_operations, "OPERATIONS", n, seed)


def test_in_place_operations_on_vocab_parallel_logits_match_full_logits(pool: Pool, seed: int) -> None:
    pool.run(2, check_operations, "IN_PLACE", 2, seed)


def check_first_words() -> None:
    _, logits = sharded(torch.zeros(SHAPE), ParallelMesh(3).tp)
    assert isinstance(logits[..., :20], VocabParallelLogits) and logits[..., :20].shape[-1] == 20
    assert logits[..., :VOCAB].shape == logits.shape and isinstance(logits[..., :VOCAB], VocabParallelLogits)
    assert type(logits[..., :9]) is Tensor  # none of these are on the last rank


def test_the_first_words_stay_sharded_if_every_rank_has_some(pool: Pool) -> None:
    """Inkling's head has more rows than its vocabulary has words."""
    pool.run(3, check_first_words)
