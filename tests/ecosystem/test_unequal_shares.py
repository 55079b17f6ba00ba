"""``tensor_parallel_shares`` together with ``fuse()``, ``torch.compile`` and LoRA: results match one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from support import adapters, zoo
from support.pool import Pool
from support.reference import TOLERANCE, Step, parallel_model, reference_step, step_differences

SHARES = [3, 2, 1]


def check_step(step: Step, compiled: bool) -> None:
    """On every rank, compare a training step of a fused or compiled model with one process."""
    options = {"gather_logits": True, "tensor_parallel_shares": SHARES}
    model = parallel_model(step.name, step.config, step.weights, len(SHARES), **options)
    if compiled:
        torch._dynamo.reset()
        model.compile(backend="aot_eager")
    else:
        model.fuse()
    lines = step_differences(model, step)
    assert not lines, "\n".join(lines)


def check_adapter(run: adapters.Run, fused: bool) -> None:
    """On every rank, compare the training of an adapter with one process."""
    from peft import get_peft_model

    base = adapters.parallel_base(run, len(SHARES), tensor_parallel_shares=SHARES)
    model: Any = get_peft_model(base.fuse() if fused else base, copy.deepcopy(run.adapter))
    adapters.start_from(model, run.start)
    losses, gradients, trained = adapters.train(model, run.batches, run.optimizer)
    lines = [
        f"loss {own} instead of {expected}"
        for own, expected in zip(losses, run.losses, strict=True)
        if not abs(own - expected) <= TOLERANCE
    ]
    for i, step in enumerate(adapters.STEPS):
        lines += adapters.compare(model, f"gradient {step}", gradients[i], run.gradients[i])
        lines += adapters.compare(model, f"trained {step}", trained[i], run.trained[i])
    assert not lines, "\n".join(lines[:12])


@pytest.mark.parametrize("way", ["fused", pytest.param("compiled", marks=pytest.mark.zoo), "LoRA", "fused, LoRA"])
def test_shares_with_other_features_match_one_process(pool: Pool, way: str, seed: int) -> None:
    variant = "gpt2-12-heads" if way == "LoRA" else "llama"
    name, config = zoo.lm_head(variant), zoo.config(variant)
    if "LoRA" not in way:
        pool.run(len(SHARES), check_step, reference_step(name, config, seed, torch.float64), way == "compiled")
        return
    from peft import LoraConfig

    lora = LoraConfig(task_type="CAUSAL_LM", r=3, target_modules="all-linear", lora_dropout=0.0)
    pool.run(len(SHARES), check_adapter, adapters.reference_run(name, config, lora, seed), "fused" in way)
