"""``ZeroRedundancyOptimizer`` over the replicas of a model: steps as of one process, and resuming."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.optim import ZeroRedundancyOptimizer  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedConfig

from support import zoo
from support.pool import Pool
from support.reference import (
    ADAMW_EPS,
    TOLERANCE,
    full_parameters,
    parallel_model,
    reference_model,
    shard_differences,
    take_steps,
    train,
)

Batch = dict[str, Tensor]
STEPS = 4


def zero(model: Any, lr: float = 0.01) -> Any:
    group = model.mpu.get_data_parallel_group()
    return ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, process_group=group, lr=lr, eps=ADAMW_EPS)


def steps(model: Any, optimizer: Any, batches: list[Batch]) -> None:
    """Training steps of a replica, which takes its rows of each batch."""
    mpu, forward = model.mpu, DistributedDataParallel(model, process_group=model.mpu.get_data_parallel_group())
    rank, size = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
    own = [{name: value.chunk(size)[rank] for name, value in batch.items()} for batch in batches]
    take_steps(forward, optimizer, own)


def check_steps(
    config: PreTrainedConfig, weights: Any, batches: list[Batch], trained: dict[str, Tensor], tp: int, folder: str
) -> None:
    """Train, save in the middle and resume: parameters match one process, and resumed parameters are bitwise equal."""
    model = parallel_model("GPT2LMHeadModel", config, weights, tp)
    optimizer = zero(model)
    steps(model, optimizer, batches[: STEPS // 2])
    model.save_pretrained_with_parallel(folder)
    model.save_optimizer(optimizer, folder, step=STEPS // 2)
    steps(model, optimizer, batches[STEPS // 2 :])
    lines = shard_differences(model, "trained", full_parameters(model), trained, TOLERANCE)
    assert 0 < len(optimizer.optim.state) < len(optimizer.param_groups[0]["params"])
    resumed = parallel_model("GPT2LMHeadModel", config, weights, tp).from_parallelized(folder)
    optimizer = zero(resumed, lr=0.5)  # the saved rate counts
    with pytest.raises(ValueError, match="one of ZeroRedundancyOptimizer of AdamW, not of AdamW"):
        resumed.load_optimizer(torch.optim.AdamW(resumed.parameters()), folder)
    assert resumed.load_optimizer(optimizer, folder) == {"step": STEPS // 2}
    steps(resumed, optimizer, batches[STEPS // 2 :])
    for (name, own), other in zip(model.named_parameters(), resumed.parameters(), strict=True):
        if not torch.equal(own, other):
            lines.append(f"{name} after resuming: off by {(own - other).abs().max().item():.2e}")
    assert not lines, "\n".join(lines)


@pytest.mark.parametrize("tp", [1, 2], ids=["dp2", "tp2-dp2"])
def test_zero_redundancy_matches_one_process(pool: Pool, tp: int, tmp_path: Path, seed: int) -> None:
    config = zoo.config("gpt2")
    model = reference_model("GPT2LMHeadModel", config, seed)
    weights = full_parameters(model)
    generator = torch.Generator().manual_seed(seed)
    tokens = [torch.randint(config.vocab_size, (4, 7), generator=generator) for _ in range(STEPS)]
    batches = [{"input_ids": each, "labels": each} for each in tokens]
    train(model, batches, "AdamW")
    pool.run(2 * tp, check_steps, config, weights, batches, full_parameters(model), tp, str(tmp_path))
