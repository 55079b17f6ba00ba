"""Parameters that transformers creates in float32 stay in float32 in 16-bit models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from oslo_models import registry

from support import zoo
from support.pool import Pool


def dtypes(model: Any) -> dict[str, torch.dtype]:
    return {name: param.dtype for name, param in model.named_parameters()}


def check_dtypes(model_type: str, name: str) -> None:
    """Compare both constructors with transformers."""
    dtype, class_name = getattr(torch, name), zoo.main_head(model_type)
    cls: Any = registry.find(class_name)
    full = getattr(transformers, class_name)._from_config(zoo.config(model_type), dtype=dtype)
    assert all(found in (dtype, torch.float32) for found in dtypes(full).values())
    expected = dict.fromkeys(dtypes(full), dtype) if cls.casts_float32 else dtypes(full)
    assert dtypes(cls.from_config_with_parallel(zoo.config(model_type), dtype=dtype)) == expected


def check_loaded_dtypes(model_type: str, folder: str) -> None:
    class_name = zoo.main_head(model_type)
    full = getattr(transformers, class_name)._from_config(zoo.config(model_type), dtype=torch.bfloat16)
    full.save_pretrained(folder)
    expected = dtypes(getattr(transformers, class_name).from_pretrained(folder, dtype=torch.bfloat16))
    cls: Any = registry.find(class_name)
    model = cls.from_pretrained_with_parallel(folder, dtype=torch.bfloat16)
    assert dtypes(model) == expected and torch.float32 in expected.values()


@pytest.mark.drawn(28)
@pytest.mark.parametrize("model_type", list(registry.ARCHITECTURES))
def test_parameters_have_the_types_of_transformers(pool: Pool, model_type: str, seed: int) -> None:
    pool.run(1, check_dtypes, model_type, ("bfloat16", "float16")[seed % 2])


@pytest.mark.parametrize("model_type", ["deepseek_v3", "hunyuan_v1_moe", "zamba"])
def test_loaded_parameters_have_the_types_of_transformers(pool: Pool, model_type: str, tmp_path: Path) -> None:
    pool.run(1, check_loaded_dtypes, model_type, str(tmp_path))


@pytest.mark.parametrize("model_type", ["deberta", "xlnet"])
def test_16_bit_models_run(pool: Pool, model_type: str, seed: int) -> None:
    """transformers' own models raise, since they mix float32 parameters with 16-bit hidden states."""
    pool.run(1, check_runs, model_type, seed)


def check_runs(model_type: str, seed: int) -> None:
    cls: Any = registry.find(zoo.main_head(model_type))
    model = cls.from_config_with_parallel(zoo.config(model_type), dtype=torch.bfloat16)
    assert model(**zoo.batch(cls.__name__, model.config, seed)).logits.dtype == torch.bfloat16
