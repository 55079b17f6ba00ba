"""The running batch: every call gets the tokens that it would get by itself, whatever its company."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from oslo_models import GPT2LMHeadModel, registry
from oslo_models.deploy import options as serving
from oslo_models.deploy.cancellation import CallCancelled, Cancellation
from oslo_models.deploy.running_batch import admission
from oslo_models.deploy.running_batch.limits import BatchLimits
from oslo_models.deploy.running_batch.plan_channel import SharedMemoryChannel
from oslo_models.deploy.running_batch.scheduler import Scheduler
from oslo_models.deploy.running_batch.step import Step

from support import deployment, running, zoo
from support.deployment import Collected, prompt
from support.pool import Pool

DECODERS = tuple(
    model_type
    for model_type in (*zoo.FOUNDING, *zoo.MORE)
    if model_type not in ("bert", "t5") and not zoo.config(model_type).is_encoder_decoder
)


# Without workers ------------------------------------------------------------------------------------------------------


def compare(pool: Pool, variant: str, folder: Path, seed: int, count: int = 12, **sizes: int) -> None:
    """The calls of a class in the batch, computed by ranks that schedule alike, against plain transformers."""
    name, given, expected = running.checked(variant, folder, seed, count)
    ranks = sizes.get("tensor_parallel_size", 1) * sizes.get("pipeline_parallel_size", 1)
    for differences in pool.run(ranks, running.differences, name, variant, folder, sizes, given, expected, seed):
        assert differences == []


@pytest.mark.parametrize("sizes", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
@pytest.mark.parametrize("variant", ["gpt2", "llama"])
def test_calls_get_their_own_tokens(pool: Pool, tmp_path: Path, seed: int, variant: str, sizes: dict[str, int]) -> None:
    compare(pool, variant, tmp_path, seed, **sizes)
