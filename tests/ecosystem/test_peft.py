"""PEFT's adapters on sharded models, against plain ``peft`` on one process."""

from __future__ import annotations

from typing import Any

import pytest

from support import zoo
from support.adapters import check_run, reference_run
from support.pool import Pool

peft = pytest.importorskip("peft", reason="peft is not installed")

LORA: dict[str, dict[str, Any]] = {
    "all linear": {"target_modules": "all-linear", "r": 3},
}


@pytest.mark.parametrize("options", LORA)
@pytest.mark.parametrize("variant", ["llama", "gpt2", "llama-one-kv"])
@pytest.mark.parametrize("tp", [2, 3])
def test_lora_trains_as_on_one_process(pool: Pool, seed: int, tp: int, variant: str, options: str) -> None:
    config = peft.LoraConfig(task_type="CAUSAL_LM", **LORA[options])
    run = reference_run(zoo.lm_head(variant), zoo.config(variant), config, seed)
    pool.run(tp, check_run, run, tp)
