"""`num_parameters` of a sharded model counts the full model, on every rank."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn
from transformers import PreTrainedConfig

from oslo_models import registry

from support import zoo
from support.pool import Pool
from support.reference import reference_model

Counts = list[int]
TRAINABLE, INNER = {"only_trainable": True}, {"exclude_embeddings": True}
OPTIONS: tuple[dict[str, bool], ...] = ({}, INNER, TRAINABLE, {**TRAINABLE, **INNER})


def freeze(model: Any) -> Any:
    """Freeze every norm and the input embeddings, as users do."""
    for module in (model.get_input_embeddings(), *(m for m in model.modules() if "Norm" in type(m).__name__)):
        module.requires_grad_(False)
    return model


def count(model: nn.Module) -> Counts:
    return [model.num_parameters(**options) for options in OPTIONS]  # type: ignore[operator]


def count_sharded(name: str, config: PreTrainedConfig, sizes: dict[str, int]) -> tuple[Counts, int]:
    cls: Any = registry.find(name)
    model = cls.from_config_with_parallel(config, seed=0, **sizes)
    local = sum(param.numel() for param in model.parameters())
    assert model.get_memory_footprint(return_buffers=False) == local * model.dtype.itemsize
    if model.stage is None:
        return count(freeze(model)), local
    with pytest.raises(ValueError, match="a pipeline stage does not know which parameters other stages train"):
        model.num_parameters(only_trainable=True)
    return [model.num_parameters(**options) for options in OPTIONS[:2]], local


VARIANTS = [*zoo.FOUNDING, "gpt2-untied", "llama-one-kv", "bart"]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("sizes", [(2, 1), (1, 2), (2, 2)], ids=lambda sizes: f"tp{sizes[0]}-pp{sizes[1]}")
def test_num_parameters_equals_the_full_model(pool: Pool, variant: str, sizes: tuple[int, int], seed: int) -> None:
    name, config = zoo.lm_head(variant), zoo.config(variant)
    model = reference_model(name, config, seed)
    whole, frozen = count(model)[:2], count(freeze(model))
    assert frozen[2] < frozen[0] == whole[0] and frozen[1] < frozen[0]
    given = dict(zip(("tensor_parallel_size", "pipeline_parallel_size"), sizes, strict=True))
    found = pool.run(sizes[0] * sizes[1], count_sharded, name, config, given)
    for counts, local in found:
        assert counts == (frozen if sizes[1] == 1 else whole)
        assert local < whole[0]
