"""A model that does not fit is refused before anything is allocated, with the sizes that fit."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from oslo_models import LlamaForCausalLM
from oslo_models.distributed.mesh import Axis, ParallelMesh
from oslo_models.modeling import memory_check
from oslo_models.modeling.weight_mapping import WeightMapping

from support.pool import Pool

CONFIG = LlamaConfig(
    **{"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 4, "tie_word_embeddings": False},
)


def _bytes_of(tp: int) -> int:
    mapping = WeightMapping(LlamaForCausalLM, CONFIG, {}, ParallelMesh())
    return memory_check._bytes(mapping, mapping.layouts_over(tp), torch.float32, lambda _: 0)


def test_bytes_equal_the_model() -> None:
    model = LlamaForCausalLM.from_config_with_parallel(CONFIG)
    assert _bytes_of(1) == sum(param.nbytes for param in model.parameters())
    mapping = WeightMapping(LlamaForCausalLM, CONFIG, {}, ParallelMesh())
    assert memory_check.bytes_on_rank(mapping, ParallelMesh(), torch.float32) == _bytes_of(1)


@pytest.mark.parametrize("tp", [2, 3, 4])
def test_the_message_names_the_smallest_size_that_fits(tp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    free = _bytes_of(tp)
    monkeypatch.setattr(memory_check, "free_memory", lambda device: free)
    axis = Axis.alone("world")
    mesh: Any = SimpleNamespace(device=torch.device("cuda", 0), world=axis, tp=axis, pp=axis)
    mapping = WeightMapping(LlamaForCausalLM, CONFIG, {}, ParallelMesh())
    memory_check.check_memory("Llama", mesh, free, lambda: mapping)
    with pytest.raises(MemoryError, match=rf"rank 0 of Llama take .* cuda:0 .* use tensor_parallel_size={tp} \("):
        memory_check.check_memory("Llama", mesh, _bytes_of(1), lambda: mapping)


def test_without_a_size_that_fits_stages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_check, "free_memory", lambda device: 10)
    axis = Axis.alone("world")
    mesh: Any = SimpleNamespace(device=torch.device("cuda", 0), world=axis, tp=axis, pp=axis)
    mapping = WeightMapping(LlamaForCausalLM, CONFIG, {}, ParallelMesh())
    with pytest.raises(MemoryError, match="use pipeline_parallel_size=2 or more, or load fewer bits"):
        memory_check.check_memory("Llama", mesh, 20, lambda: mapping)


def _refused(folder: Path) -> None:
    """The ranks of a host share its memory: each part would fit alone."""
    LlamaForCausalLM.from_pretrained_with_parallel(folder, 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_check, "free_memory", lambda device: 40_000)
        for make, source in (("from_pretrained", folder), ("from_config", CONFIG)):
            with pytest.raises(MemoryError, match=r"with the other ranks there.*use further machines"):
                getattr(LlamaForCausalLM, f"{make}_with_parallel")(source, 2)


def test_every_rank_refuses(pool: Pool, tmp_path: Path) -> None:
    LlamaForCausalLM.from_config_with_parallel(CONFIG, seed=0).save_pretrained(tmp_path)
    pool.run(2, _refused, tmp_path)
