"""Model types that transformers builds from the classes of another type, and the text models of multimodal types."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import CONFIG_MAPPING
from transformers.models.auto import modeling_auto

import oslo_models
from oslo_models import registry
from oslo_models.planning.model_source import find_model

from support import zoo
from support.float64 import lifted_casts
from support.pool import Pool
from support.reference import TOLERANCE, differences, reference_model

SIZES: dict[str, Any] = {
    **{"hidden_size": 24, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 4, "intermediate_size": 35},
    **{"num_hidden_layers": 2, "vocab_size": 61, "max_position_embeddings": 32},
}


def check(auto: str, name: str, saved: Path, batch: dict[str, Tensor], logits: Tensor, tokens: Tensor) -> None:
    for cls in (getattr(oslo_models, auto), registry.find(name)):
        options = {"gather_logits": True, "dtype": torch.float64}
        model = cls.from_pretrained_with_parallel(saved, tensor_parallel_size=2, **options).eval()
        with torch.no_grad(), lifted_casts():
            assert not differences("logits", model(**batch).logits, logits, TOLERANCE)
            assert torch.equal(model.generate(**batch, max_new_tokens=4, do_sample=False, pad_token_id=0), tokens)
    cls.from_config_with_parallel(model.config, tensor_parallel_size=2)
    model.save_pretrained_with_parallel(saved / "merged", save_with_merging=True)


@pytest.mark.parametrize("model_type", registry.SAME_CLASSES)
def test_model_matches_transformers_and_keeps_its_type(pool: Pool, tmp_path: Path, model_type: str, seed: int) -> None:
    torch.manual_seed(seed)
    same = registry.SAME_CLASSES[model_type]
    sees = same in zoo.WITH_IMAGES
    auto = "AutoModelForImageTextToText" if sees else "AutoModelForCausalLM"
    values = SIZES if same == "llama" else zoo.MORE[same] if sees else {**zoo.MORE[same], "vocab_size": 61}
    if f"{model_type}_vision" in CONFIG_MAPPING:
        values = {**values, "vision_config": {**values["vision_config"], "model_type": f"{model_type}_vision"}}
    config = CONFIG_MAPPING[model_type](**values)
    name = getattr(transformers, auto)._model_mapping[type(config)].__name__
    full = reference_model(name, config, seed).eval()
    assert same == type(full).config_class.model_type
    full.save_pretrained(tmp_path)
    batch = zoo.batch(name, zoo.config(same), seed) if sees else {"input_ids": torch.randint(3, 61, (2, 7))}
    batch.pop("labels", None)
    with torch.no_grad(), lifted_casts():
        logits = full(**batch).logits
        tokens = full.generate(**batch, max_new_tokens=4, do_sample=False, pad_token_id=0)
    pool.run(2, check, auto, name, tmp_path, batch, logits, tokens)
    merged = tmp_path / "merged"
    assert json.loads((merged / "config.json").read_text())["model_type"] == model_type
    again = getattr(transformers, auto).from_pretrained(merged, dtype=torch.float64).state_dict()
    assert all(torch.equal(again[name], weight) for name, weight in full.state_dict().items())


VISION: dict[str, Any] = {
    **{"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 4},
    **{"depth": 1, "num_heads": 2, "out_hidden_size": 8, "num_position_embeddings": 4, "image_size": 8},
    **{"vision_output_dim": 8, "projector_input_dim": 8, "projector_output_dim": 8},
}


def check_text(saved: Path, name: str, config: Any, ids: Tensor, logits: Tensor) -> None:
    auto: Any = oslo_models.AutoModelForCausalLM
    assert type(auto.from_config_with_parallel(config, tensor_parallel_size=2)).__name__ == name
    options = {"gather_logits": True, "dtype": torch.float64}
    model = auto.from_pretrained_with_parallel(saved, tensor_parallel_size=2, **options)
    assert type(model).__name__ == name
    with torch.no_grad(), lifted_casts():
        assert not differences("logits", model(ids).logits, logits, TOLERANCE)


def test_auto_class_finds_the_text_model_of_each_multimodal_type() -> None:
    """Those whose text model is in the zoo: transformers' auto class loads it alone."""
    of_text = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    found = {}
    for kind in registry.ARCHITECTURES:
        whole = kind.removesuffix("_text")
        if whole != kind and of_text.get(whole) in registry.names(kind):
            config = CONFIG_MAPPING[whole]()
            found[whole] = oslo_models.AutoModelForCausalLM.class_for(config).__name__
            if whole not in registry.ARCHITECTURES:  # else a plan is of the model with its tower
                assert find_model(config)[0].__name__ == found[whole]
    assert found.items() <= of_text.items()
    assert {"qwen3_5", "qwen3_5_moe", "llama4"} <= found.keys()


@pytest.mark.drawn(2)
@pytest.mark.parametrize("model_type", ["qwen3_5", "qwen3_5_moe", "llama4", "qwen4_exp"])
def test_the_text_model_of_a_multimodal_checkpoint(pool: Pool, tmp_path: Path, model_type: str, seed: int) -> None:
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {model_type}")
    torch.manual_seed(seed)
    tokens = {"vocab_size": 61, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    vision = {key: value for key, value in VISION.items() if hasattr(CONFIG_MAPPING[model_type]().vision_config, key)}
    config = CONFIG_MAPPING[model_type](text_config={**zoo.MORE[f"{model_type}_text"], **tokens}, vision_config=vision)
    multimodal = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float64)
    multimodal.save_pretrained(tmp_path)
    text = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64).eval()
    ids = torch.randint(3, 61, (2, 7))
    with torch.no_grad(), lifted_casts():
        logits = text(ids).logits
    pool.run(2, check_text, tmp_path, type(text).__name__, config, ids, logits)
