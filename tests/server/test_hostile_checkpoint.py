"""Adapters, defaults of generation and embedding settings of strangers are refused by name before they take long."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("peft", reason="peft is not installed")

import peft

from oslo_models.modeling.adapters.saved_config import is_slow, read_adapter_config
from oslo_models.server.embedding_config import read_embedding_config
from oslo_models.server.generation_defaults import GenerationDefaults

SLOW = r"(([a-z._0-9])+.?)+[A-Z]$"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_modules": "(.*.*)*x"}, "target_modules=.*may take long"),
        ({"exclude_modules": SLOW}, "exclude_modules=.*may take long"),
        ({"rank_pattern": {SLOW: 4}}, "rank_pattern=.*may take long"),
        ({"alpha_pattern": {SLOW: 4}}, "alpha_pattern=.*may take long"),
        ({"layers_pattern": SLOW, "layers_to_transform": [0]}, "layers_pattern=.*may take long"),
        ({"target_modules": ".*" * 9}, "may take long"),
        ({"target_modules": "a" * 3000}, "may take long"),
        ({"init_lora_weights": "pissa_niter_999999999"}, "would take long"),
        ({"peft_type": "EVIL"}, "is of no adapter"),
        ("[]", "is of no adapter"),
        ("[" * 100_000, "is of no adapter"),
    ],
)
def test_adapters_that_may_take_long_are_refused(tmp_path: Path, changes: Any, message: str) -> None:
    peft.LoraConfig(r=2, target_modules=["q_proj"]).save_pretrained(tmp_path)
    file = tmp_path / "adapter_config.json"
    file.write_text(changes if isinstance(changes, str) else json.dumps({**json.loads(file.read_text()), **changes}))
    began = time.process_time()
    with pytest.raises(ValueError, match=message) as caught:
        read_adapter_config(str(tmp_path))
    assert len(str(caught.value)) < 1000 and time.process_time() - began < 5.0


def test_an_adapter_that_is_a_pipe_is_refused(tmp_path: Path) -> None:
    peft.LoraConfig(r=2, target_modules=["q_proj"]).save_pretrained(tmp_path)
    os.mkfifo(tmp_path / "adapter_model.bin")
    with pytest.raises(ValueError, match=r"adapter_model\.bin is not a file"):
        read_adapter_config(str(tmp_path))


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        *(
            (pattern, False)
            for pattern in ("q_proj", r".*\.(q|v)_proj", r"model\.layers\.[0-9]+\.mlp\..*_proj$", "(a)+")
        ),
        (r".*?(?:language|text).*?(?:self_attn|mlp).*?(?:q_proj|v_proj).*?", False),
        *((r"(?:(?!vision).)*q_proj", False), (r"\(a+\)+", False), ("[(a+)]+", False)),
        *((pattern, True) for pattern in ("(a+)+", "(.|.)*", "((a*)b)*", "(?:a{1,})+", "([)]*)*", "(a|(b))+c")),
    ],
)
def test_expressions_with_repeated_repeats_are_slow(pattern: str, expected: bool) -> None:
    assert is_slow(pattern) is expected


@pytest.mark.parametrize(
    "values",
    [
        *({"num_beams": 10**6}, {"num_beams": "x"}, {"stop_strings": 5}, {"stop_strings": [5]}),
        {"prefill_chunk_size": 3, "use_cache": False},
    ],
)
def test_defaults_that_requests_may_not_have_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"generation_config has {next(iter(values))}="):
        GenerationDefaults(SimpleNamespace(**values))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"modules.json": [{"type": "x.Pooling", "path": "../../etc"}]}, "leads out of the checkpoint"),
        ({"modules.json": [{"type": "x.Pooling", "path": "/etc"}]}, "leads out of the checkpoint"),
        ({"modules.json": ["x"]}, "describes no model"),
        ({"1_Pooling/config.json": [1]}, "describes no model"),
        ({"1_Pooling/config.json": {}, "sentence_bert_config.json": {"max_seq_length": -5}}, "max_seq_length=-5"),
        ({"modules.json": None}, "describes no model"),
    ],
)
def test_embedding_settings_are_checked(tmp_path: Path, files: dict[str, Any], message: str) -> None:
    (tmp_path / "1_Pooling").mkdir()
    for name, content in files.items():
        (tmp_path / name).write_text("[" * 100_000 if content is None else json.dumps(content))
    with pytest.raises(ValueError, match=message):
        read_embedding_config(str(tmp_path))
