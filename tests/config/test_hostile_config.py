"""The ``config.json`` of a stranger takes no time, no memory and no code before it is refused by name."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers import CONFIG_MAPPING

import oslo_models
from oslo_models import registry
from oslo_models.auto import AutoModelForCausalLM
from oslo_models.config import sources
from oslo_models.config.sources import auto_config, read_raw

SIZES: dict[str, Any] = {
    **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "architectures": ["LlamaForCausalLM"]},
}
READERS: list[Callable[[str], Any]] = [
    oslo_models.LlamaForCausalLM.from_pretrained_with_parallel,
    AutoModelForCausalLM.from_pretrained_with_parallel,
    auto_config,
    lambda name: oslo_models.estimate(name, task="full"),
]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000"),
        ({"text_config": {"depths": [2, 10**9]}}, "depths=1000000000"),
        ({"num_labels": 10**9}, "num_labels=1000000000"),
        ({"attn_implementation": "evil/kernel"}, "run code"),
        ({"_attn_implementation": {"text_config": "evil/kernel:f"}}, "run code"),
        ({"model_type": ["llama"]}, "no names"),
        ({"architectures": "LlamaForCausalLM"}, "no names"),
        ({"num_attention_heads": 0}, "describes no model"),
        ({"rms_norm_eps": "x"}, "describes no model"),
        ('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", "describes no model"),
        ("[]", "describes no model"),
    ],
)
def test_absurd_configurations_are_refused_by_name(tmp_path: Path, changes: Any, message: str) -> None:
    transformers.LlamaConfig(**SIZES).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(changes if isinstance(changes, str) else json.dumps({**json.loads(file.read_text()), **changes}))
    for read in READERS:
        began = time.process_time()
        with pytest.raises(ValueError, match=message) as caught:
            read(str(tmp_path))
        assert str(tmp_path) in str(caught.value) and len(str(caught.value)) < 1000
        assert time.process_time() - began < 5.0


def test_default_configurations_of_all_types_are_within_the_limits(tmp_path: Path) -> None:
    for model_type in registry.ARCHITECTURES:
        (tmp_path / "config.json").write_text(CONFIG_MAPPING[model_type]().to_json_string())
        assert read_raw(tmp_path)["model_type"] == model_type


def test_large_configuration_files_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers.LlamaConfig(**SIZES).save_pretrained(tmp_path)
    monkeypatch.setattr(sources, "MOST_BYTES", 100)
    with pytest.raises(ValueError, match="configurations have at most"):
        auto_config(tmp_path)


def test_models_that_cannot_be_constructed_are_named(tmp_path: Path) -> None:
    transformers.LlamaConfig(**SIZES).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "hidden_act": "os.system", "pad_token_id": -500}))
    for read in (READERS[0], READERS[3]):
        with pytest.raises(ValueError, match="describes no model"):
            read(str(tmp_path))
    file.write_text(json.dumps({**json.loads(file.read_text()), "architectures": ["GPT2LMHeadModel"]}))
    with pytest.raises(ValueError, match="config must be a GPT2Config"):
        READERS[3](str(tmp_path))
