"""Importing a model must not import optional libraries, since the application and every worker pay for it."""

from __future__ import annotations

import subprocess
import sys

SLOW = ("peft", "trl", "torchao", "transformers.trainer", "transformers.trainer_utils", "fastapi")


def test_importing_a_model_imports_no_optional_library() -> None:
    """Neither does the construction of a model with a seed."""
    code = f"""
import sys
from oslo_models import LlamaForCausalLM
config = LlamaForCausalLM.config_class(
    hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=8
)
LlamaForCausalLM.from_config_with_parallel(config, seed=0)
print(*(name for name in {SLOW} if name in sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=600)
    assert done.stdout.split() == []
