"""The chapter "DeepSpeed Support" of OSLO's USAGE document (Apache-2.0) runs as printed; see `support.documents`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from support import pipelines
from support.documents import (
    BATCH_SIZE,
    needs_deepspeed,
    reference_training,
    run_block,
    steps_of,
    weight_differences,
    without_stages,
)
from support.pipelines import Weights
from support.pool import Pool

DEEPSPEED = """
import deepspeed
from oslo import GPT2LMHeadModel

# Prepare your deespeed config
ds_config: dict = ...

model = GPT2LMHeadModel.from_pretrained_with_parallel(
    pretrained_model_name_or_path="gpt2",
    tensor_parallel_size=2,
    pipeline_parallel_size=2,
)

engine, _, _, _ = deepspeed.initialize(
    model=model.gpu_modules(),
    model_parameters=model.gpu_parameters(),
    mpu=model.mpu,
    config=ds_config,
)
"""

DEEPSPEED_WITHOUT_PIPELINE = """
for sample in loader:
    # forward
    output = engine(
        input_ids=sample["input_ids"].cuda(),
        attention_mask=sample["attention_mask"].cuda(),
        labels=sample["labels"].cuda(),
    )
    # backward
    loss = output.loss
    engine.backward(loss)
    # step
    engine.step()
"""

DEEPSPEED_WITH_PIPELINE = """
for sample in loader:
    # forward
    for micro_output in engine(
        input_ids=sample["input_ids"].cuda(),
        attention_mask=sample["attention_mask"].cuda(),
        labels=sample["labels"].cuda(),
    ):
        # backward
        micro_loss = micro_output.loss
        engine.backward(micro_loss)
    # step
    engine.step()
"""


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    """Separate workers for this file: DeepSpeed keeps process groups, and their threads slow down later tests."""
    workers = Pool()
    yield workers
    workers.close()


DS_CONFIG = {
    "train_micro_batch_size_per_gpu": BATCH_SIZE,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "zero_optimization": {"stage": 1},
    "zero_allow_untested_optimizer": True,
    "gradient_clipping": 0.0,
}


def check_deepspeed(pipelined: bool, weights: Weights) -> None:
    pipelines.import_deepspeed()
    initialization, loop = DEEPSPEED, DEEPSPEED_WITH_PIPELINE
    if not pipelined:
        initialization, loop = without_stages(DEEPSPEED), DEEPSPEED_WITHOUT_PIPELINE
    made = run_block(initialization, given=DS_CONFIG)
    model = made["model"]
    steps = [batches[model.mpu.get_data_parallel_rank()] for batches in steps_of(1 if pipelined else 2)]
    run_block(loop, **{**made, "loader": steps})
    lines = weight_differences(model, weights, 2e-6)
    assert not lines, "\n".join(lines)


@pytest.mark.parametrize("pipelined", [False, True], ids=["without pipeline", "with pipeline"])
def test_deepspeed_chapter_runs_as_printed(pool: Pool, hub: Any, pipelined: bool) -> None:
    needs_deepspeed()
    model = hub(torch.float32).eval()
    _, _, weights = reference_training(model, torch.optim.SGD(model.parameters(), lr=0.1), 1 if pipelined else 2)
    pool.run(4, check_deepspeed, pipelined, weights, env=True)
