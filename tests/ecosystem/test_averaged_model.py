"""``torch.optim.swa_utils.AveragedModel`` copies the model and averages sharded weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import PreTrainedConfig

from support import zoo
from support.float64 import lifted_casts
from support.pool import Pool
from support.reference import (
    TOLERANCE,
    differences,
    full_parameters,
    make_optimizer,
    parallel_model,
    reference_model,
    shard_differences,
    take_steps,
)

KINDS: dict[str, Any] = {"mean": None, "exponential": get_ema_multi_avg_fn(0.8)}


def averaged(model: Any, batches: list[dict[str, Any]], kind: str) -> tuple[Any, torch.Tensor]:
    """Return the averaged model after training steps, and its loss."""
    average = AveragedModel(model, multi_avg_fn=KINDS[kind])
    optimizer = make_optimizer("AdamW", model.parameters())
    take_steps(model, optimizer, batches, lambda: average.update_parameters(model))
    with lifted_casts():
        return average, average(**batches[0]).loss.detach()


def check(
    name: str, config: PreTrainedConfig, weights: Any, batches: list[dict[str, Any]], kind: str, expected: Any
) -> None:
    expected, loss = expected
    average, own_loss = averaged(parallel_model(name, config, weights, 2), batches, kind)
    own = dict(average.module.named_parameters(remove_duplicate=False))
    lines = shard_differences(average.module, kind, own, expected, TOLERANCE)
    lines += differences("loss", own_loss, loss, TOLERANCE)
    assert not lines, "\n".join(lines)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("variant", ["gpt2", "llama"])
def test_averaged_weights_equal_one_process(pool: Pool, variant: str, kind: str, seed: int) -> None:
    name, config = zoo.lm_head(variant), zoo.config(variant)
    model = reference_model(name, config, seed)
    weights, batches = full_parameters(model), [zoo.batch(name, config, seed + i) for i in range(3)]
    average, loss = averaged(model, batches, kind)
    trained = full_parameters(average.module)
    assert not torch.equal(trained["lm_head.weight"], full_parameters(model)["lm_head.weight"])
    pool.run(2, check, name, config, weights, batches, kind, (trained, loss))
