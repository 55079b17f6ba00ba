"""Token statistics from sharded heads match statistics of full logits, and TRL's kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from oslo_models.distributed.mesh import ParallelMesh
from oslo_models.layers import token_statistics
from oslo_models.layers.cross_entropy import VocabShard
from oslo_models.layers.token_statistics import LogitScaling, TokenStatistics

from support.pool import Pool
from support.reference import TOLERANCE, differences

VOCAB, HIDDEN, ROWS = 23, 6, 11
SCALINGS = {
    "plain": LogitScaling(),
    "scaled": LogitScaling(scale=0.3, temperature=0.7),
    "bounded": LogitScaling(scale=1.5, softcap=2.0, temperature=1.3),
}


def inputs(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    hidden, weight, bias = (
        torch.randn(*shape, generator=draw, dtype=torch.float64)
        for shape in ((ROWS, HIDDEN), (VOCAB, HIDDEN), (VOCAB,))
    )
    target = torch.randint(VOCAB, (ROWS,), generator=draw)
    bias[1:] = bias[0]  # hidden states of zeros: all tokens are the most likely ones
    hidden[:2], target[:2] = 0, torch.tensor([0, VOCAB - 1])
    return hidden, weight, bias, target


def expected(hidden: Tensor, weight: Tensor, bias: Tensor, target: Tensor, scaling: LogitScaling) -> TokenStatistics:
    logits = scaling.apply(hidden @ weight.T + bias)
    log_probs = logits.log_softmax(-1)
    return TokenStatistics(
        log_probs.gather(-1, target[:, None])[:, 0],
        -(log_probs.exp() * log_probs).sum(-1),
        log_probs.exp().square().sum(-1).log(),
        logits.mean(-1),
        logits.argmax(-1) == target,
    )


def compare(seed: int, scaling: LogitScaling, chunk_bytes: int) -> None:
    """On each rank: values, and gradients of both differentiable fields."""
    tp = ParallelMesh(torch.distributed.get_world_size()).tp
    bounds = [VOCAB * i // tp.size for i in range(tp.size + 1)]
    start, stop = bounds[tp.rank], bounds[tp.rank + 1]
    *parameters, target = inputs(seed)
    whole = [x.clone().requires_grad_() for x in parameters]
    hidden, weight, bias = parameters
    own = [x.clone().requires_grad_() for x in (hidden, weight[start:stop], bias[start:stop])]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_statistics, "CHUNK_BYTES", chunk_bytes)
        shard = VocabShard(tp, (start, stop), VOCAB)
        found = token_statistics.token_statistics(own[0], own[1], own[2], target, shard, scaling)
        full = expected(whole[0], whole[1], whole[2], target, scaling)
        weights = torch.arange(1.0, ROWS + 1, dtype=torch.float64)
        for scores in (full, found):
            (scores.log_probs * weights.cos() + scores.entropy * weights.sin()).sum().backward()
    lines = [
        line
        for name, value in found._asdict().items()
        for line in differences(name, value.detach().double(), getattr(full, name).detach().double(), TOLERANCE)
    ]
    gradients: list[Any] = [whole[0].grad, whole[1].grad[start:stop], whole[2].grad[start:stop]]  # type: ignore[index]
    for name, x, grad in zip(("hidden", "weight", "bias"), own, gradients, strict=True):
        lines += differences(f"gradient of {name}", x.grad, grad, TOLERANCE)
    assert not lines, "\n".join(lines)


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize(("ranks", "chunk_bytes"), [(2, 1 << 20), (3, 300)])
def test_statistics_of_shards(pool: Pool, seed: int, scaling: str, ranks: int, chunk_bytes: int) -> None:
    pool.run(ranks, compare, seed, SCALINGS[scaling], chunk_bytes)


def refuse_targets() -> None:
    tp = ParallelMesh(2).tp
    hidden, weight, bias, target = inputs(0)
    target[3] = VOCAB
    half = VOCAB // 2
    with pytest.raises(IndexError, match="not in"):
        shard = VocabShard(tp, (0, half), VOCAB)
        token_statistics.token_statistics(hidden, weight[:half], bias[:half], target, shard)


def test_targets_outside_of_the_vocabulary(pool: Pool) -> None:
    pool.run(2, refuse_targets)


def test_as_the_kernel_of_trl(seed: int) -> None:
    """TRL's kernel sums in float32; the tests of TRL's trainers replace it."""
    pytest.importorskip("trl", reason="compares with TRL's kernel")
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction

    hidden, weight, bias, target = inputs(seed)
    scaling = SCALINGS["bounded"]
    names = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
    found = ChunkedLogProbFunction.apply(
        hidden.float(), weight.float(), bias.float(), target, scaling.temperature, 5, scaling.softcap, 1.5, names
    )
    for name, of_trl, own in zip(
        TokenStatistics._fields, found, expected(hidden, weight, bias, target, scaling), strict=True
    ):
        lines = differences(name, of_trl.double()[2:], own.double()[2:], 1e-4)
        assert not lines, lines
