"""Bytes that a block saves for its backward pass, with sequence parallelism and without."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.instruments import saved_in_second_block
from oslo_models import registry

from support import zoo
from support.pool import Pool


def saved_bytes(config: Any, n: int, divides: bool) -> int:
    cls: Any = registry.find("LlamaModel")
    model = cls.from_config_with_parallel(config, n, seed=0, sequence_parallel=divides, check_inputs=False)
    ids = torch.arange(256).view(2, 128) % config.vocab_size

    def compute() -> None:
        model(input_ids=ids, use_cache=False).last_hidden_state.sum().backward()

    compute()  # the first step finds the layers that read the same tensor
    return saved_in_second_block(model.layers, compute)


def compare_saved_bytes(config: Any, n: int) -> float:
    return saved_bytes(config, n, True) / saved_bytes(config, n, False)


@pytest.mark.parametrize(("n", "least", "most"), [(2, 0.7, 0.8), (4, 0.45, 0.56)])
def test_block_saves_less_than_with_tensor_parallelism_alone(pool: Pool, n: int, least: float, most: float) -> None:
    """Korthikanti et al., 2022: ``34 / n`` in place of ``10 + 24 / n``."""
    config = zoo.config(
        "llama-untied",
        hidden_size=256,
        intermediate_size=682,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=32,
        num_hidden_layers=3,
        max_position_embeddings=128,
    )
    for share in pool.run(n, compare_saved_bytes, config, n):
        assert least < share <= most
