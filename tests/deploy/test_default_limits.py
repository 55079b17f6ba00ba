"""Default size of the running batch: on CPUs, and on GPUs within their memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from oslo_models.deploy import options
from oslo_models.deploy.options import DeployOptions
from oslo_models.deploy.running_batch.admission import bytes_of_token, default_limits
from oslo_models.deploy.running_batch.limits import BatchLimits, columns
from oslo_models.deploy.running_batch.slot_cache import SlotCache
from oslo_models.deploy.running_batch.step_runner import StepRunner

from support import zoo

CONFIG = LlamaConfig(
    **{"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8},
    **{"max_position_embeddings": 8192, "dtype": torch.bfloat16},
)
GIB = 1 << 30


@pytest.mark.parametrize(
    ("gpus", "ranks", "layers", "given", "expected"),
    [
        (0, 1, 16, {}, (8, 4096, 256)),
        (1, 1, 16, {}, (64, 4096, 2048)),
        (1, 1, 32, {}, (32, 4096, 2048)),
        (2, 2, 32, {}, (64, 4096, 2048)),
        (1, 1, 320, {}, (8, 4096, 2048)),
        (1, 1, 32, {"max_batch_size": 100, "prefill_chunk_size": 3}, (100, 4096, 3)),
        (1, 1, 32, {"max_batch_length": 1024}, (64, 1024, 2048)),
        (0, 1, 16, {"max_batch_size": 5, "max_batch_length": 9000}, (5, 8192, 256)),
    ],
)
def test_limits(
    monkeypatch: pytest.MonkeyPatch,
    gpus: int,
    ranks: int,
    layers: int,
    given: dict[str, Any],
    expected: tuple[int, int, int],
) -> None:
    monkeypatch.setattr(options.torch.cuda, "device_count", lambda: gpus)
    config = LlamaConfig(**{**CONFIG.to_dict(), "num_hidden_layers": layers, "dtype": torch.bfloat16})
    assert DeployOptions(**given).limits(config, ranks) == BatchLimits(*expected)
    if gpus and not given and expected[0] > 8:
        rows, length, _ = expected
        size = bytes_of_token(config)
        assert size is not None and (rows + 1) * columns(length) * size <= ranks * 16 * GIB


def test_bytes_are_those_that_the_cache_has(pair: Any) -> None:
    model, _ = pair
    runner = StepRunner(model, BatchLimits(3, 100, 4))
    size = bytes_of_token(model.config)
    assert size is not None and size * (3 + 1) * columns(100) == runner.reserve()
    assert SlotCache(3, 100).most_columns == columns(100) == 164


@pytest.mark.parametrize(("variant", "rows"), [("gemma4_text", 64), ("mamba", 8), ("t5", 64), ("bert", 64)])
def test_every_model_has_limits(variant: str, rows: int) -> None:
    """Models with blocks that cache no keys get the smallest limits."""
    assert default_limits(zoo.config(variant), 100, 1).rows == rows
