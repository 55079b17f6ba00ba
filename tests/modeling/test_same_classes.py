"""Model types that transformers builds from the classes of another type."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import CONFIG_MAPPING

import oslo_models
from oslo_models import registry

from support import zoo
from support.float64 import lifted_casts
from support.pool import Pool
from support.reference import TOLERANCE, differences, reference_model

SIZES: dict[str, Any] = {
    **{"hidden_size": 24, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 4, "intermediate_size": 35},
    **{"num_hidden_layers": 2, "vocab_size": 61, "max_position_embeddings": 32},
}


def check(name: str, saved: Path, ids: Tensor, logits: Tensor, tokens: Tensor) -> None:
    for auto in (True, False):
        cls: Any = oslo_models.AutoModelForCausalLM if auto else registry.find(name)
        options = {"gather_logits": True, "dtype": torch.float64}
        model = cls.from_pretrained_with_parallel(saved, tensor_parallel_size=2, **options).eval()
        with torch.no_grad(), lifted_casts():
            assert not differences("logits", model(ids).logits, logits, TOLERANCE)
            assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0), tokens)
    cls.from_config_with_parallel(model.config, tensor_parallel_size=2)
    model.save_pretrained_with_parallel(saved / "merged", save_with_merging=True)


@pytest.mark.parametrize("model_type", registry.SAME_CLASSES)
def test_model_matches_transformers_and_keeps_its_type(pool: Pool, tmp_path: Path, model_type: str, seed: int) -> None:
    torch.manual_seed(seed)
    same = registry.SAME_CLASSES[model_type]
    config = CONFIG_MAPPING[model_type](**SIZES if same == "llama" else {**zoo.MORE[same], "vocab_size": 61})
    name = transformers.AutoModelForCausalLM._model_mapping[type(config)].__name__
    full = reference_model(name, config, seed).eval()
    assert same == type(full).config_class.model_type
    full.save_pretrained(tmp_path)
    ids = torch.randint(3, 61, (2, 7))
    with torch.no_grad(), lifted_casts():
        logits = full(ids).logits
        tokens = full.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
    pool.run(2, check, name, tmp_path, ids, logits, tokens)
    merged = tmp_path / "merged"
    assert json.loads((merged / "config.json").read_text())["model_type"] == model_type
    again = transformers.AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float64).state_dict()
    assert all(torch.equal(again[name], weight) for name, weight in full.state_dict().items())
