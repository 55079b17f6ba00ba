"""Unmerged adapters of a deployed model, against plain ``peft`` on one process."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import oslo_models
from oslo_models.deploy import EngineError

from support import deployment, zoo
from support.float64 import lifted_casts
from support.pool import Pool
from support.reference import TOLERANCE, reference_model

peft = pytest.importorskip("peft", reason="peft is not installed")

STEPS: list[tuple[str, tuple[Any, ...]]] = [
    ("set_adapter", ("first",)),
    ("disable_adapters", ()),
    ("enable_adapters", ()),
    ("set_adapter", (["first", "second"],)),
    ("delete_adapter", ("first",)),
    ("set_adapter", ("second",)),
]


def answers(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        return model.generate(**batch, max_new_tokens=8, do_sample=False), model(**batch).logits


def write(folder: Path, seed: int) -> Any:
    """Save a model and two adapters; return the model without adapters."""
    full: Any = reference_model("GPT2LMHeadModel", zoo.config("gpt2"), seed).eval()
    full.save_pretrained(folder / "base")
    for number, (name, targets) in enumerate({"first": ["c_attn", "c_fc"], "second": ["c_proj"]}.items()):
        torch.manual_seed(seed + number)
        config = peft.LoraConfig(r=3, lora_alpha=40, target_modules=targets, init_lora_weights=False)
        peft.get_peft_model(copy.deepcopy(full), config).save_pretrained(folder / name)
    return full


def restart_with(model: Any, before_adapters: Callable[[], object]) -> None:
    """Restart, with a call between the start of the new workers and the loading of their adapters."""
    repeat = model._repeat_adapter_calls

    def restore() -> None:
        before_adapters()
        repeat()

    model._repeat_adapter_calls = restore
    try:
        model.restart()
    finally:
        del model._repeat_adapter_calls


def restart_refuses_calls_before_its_adapters_are_there(model: Any, batch: dict[str, Tensor]) -> None:
    refused: list[bool] = []

    def call_from_another_thread() -> None:
        with ThreadPoolExecutor(1) as other:
            error = other.submit(answers, model, batch).exception()
            assert isinstance(error, EngineError) and "it is being restarted" in str(error), error
            assert not other.submit(model.health).result()["healthy"]
        refused.append(True)

    restart_with(model, call_from_another_thread)
    assert refused and model.health()["healthy"]


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), pytest.param(1, 2, marks=pytest.mark.zoo)])
def test_deployed_model_computes_with_its_active_adapters(
    forked: None, tmp_path: Path, seed: int, tp: int, pp: int
) -> None:
    full, batch = write(tmp_path, seed), deployment.prompt(seed)
    options = {"tensor_parallel_size": tp, "pipeline_parallel_size": pp, "dtype": torch.float64, "deploy": True}
    with oslo_models.GPT2LMHeadModel.from_pretrained_with_parallel(tmp_path / "base", **options) as model:

        def compare() -> tuple[Tensor, Tensor]:
            found = []
            for own, expected in zip(answers(model, batch), answers(full, batch), strict=True):
                assert own.shape == expected.shape and (own - expected).abs().max() <= TOLERANCE
                found.append(expected)
            return found[0], found[1]

        seen = [compare()[1]]
        for name in ("first", "second"):
            model.load_adapter(tmp_path / name, name)
            full.load_adapter(str(tmp_path / name), adapter_name=name)
            seen.append(compare()[1])
        shutil.rmtree(tmp_path / "first")  # new workers do not load again what will be deleted
        for method, arguments in STEPS:
            for each in (model, full):
                getattr(each, method)(*arguments)
            seen.append(compare()[1])
        assert all((a - b).abs().max() > 1e-3 for a, b in zip(seen[:5], seen[1:6], strict=True))
        assert model.active_adapters() == ["second"]
        with pytest.raises(ValueError, match="there is an adapter 'second' already"):
            model.load_adapter(tmp_path / "second", "second")
        with pytest.raises(ValueError, match="Adapter with name none not found"):
            model.set_adapter("none")
        compare()
        restart_refuses_calls_before_its_adapters_are_there(model, batch)
        compare()
        with pytest.raises(OSError, match="gone"):
            restart_with(model, lambda: (_ for _ in ()).throw(OSError("gone")))
        assert "could not be restored" in model.health()["reason"] and not model.health()["ranks"]
        model.restart()
        compare()
        local = model.cpu()
        for own, expected in zip(answers(local, batch), answers(full, batch), strict=True):
            assert (own - expected).abs().max() <= TOLERANCE


def write_with_own_adapter(folder: Path, seed: int) -> tuple[Any, dict[str, Tensor], dict[str, Tensor]]:
    """Save a Granite Speech with its LoRA adapter. Return transformers' model, and prompts with and without sounds."""
    name = "GraniteSpeechForConditionalGeneration"
    config = zoo.config("granite_speech", has_lora_adapter=True)
    full: Any = reference_model(name, config, seed).eval()
    full.save_pretrained(folder)
    torch.manual_seed(seed)
    targets = r".*language_model.*\.(q_proj|down_proj)"
    adapter = peft.LoraConfig(r=3, lora_alpha=40, target_modules=targets, init_lora_weights=False)
    peft.get_peft_model(copy.deepcopy(full), adapter).save_pretrained(folder)
    full.load_adapter(str(folder))
    batch = zoo.batch(name, config, seed)
    prompt = {key: value for key, value in batch.items() if key != "labels"}
    return full, prompt, zoo.text_only(config, prompt)


GREEDY = {"max_new_tokens": 12, "do_sample": False}


def check_own_adapter(folder: Path, prompts: list[dict[str, Tensor]], tokens: list[Tensor], logits: Tensor) -> None:
    cls = oslo_models.GraniteSpeechForConditionalGeneration
    with pytest.raises(ValueError, match=r"pipeline_parallel_size=2: .* has a LoRA adapter"):
        cls.from_pretrained_with_parallel(folder, 1, 2)
    model = cls.from_pretrained_with_parallel(folder, 2, dtype=torch.float64).eval()
    with lifted_casts(), torch.no_grad():
        assert (model(**prompts[0]).logits - logits).abs().max() <= TOLERANCE
        for prompt, expected in zip(prompts, tokens, strict=True):
            assert torch.equal(model.generate(**prompt, **GREEDY), expected)


def test_adapter_of_a_checkpoint_is_on_for_sounds(pool: Pool, forked: None, tmp_path: Path, seed: int) -> None:
    """A deployed model computes texts without it, also in the running batch beside a call with sounds."""
    full, heard, text = write_with_own_adapter(tmp_path, seed)
    with lifted_casts(), torch.no_grad():
        logits = [full(**heard).logits]
        full.disable_adapters()
        logits.append(full(**heard).logits)
        tokens = [full.generate(**each, **GREEDY) for each in (heard, text)]
    assert (logits[0] - logits[1]).abs().max() > 1e-3
    pool.run(2, check_own_adapter, tmp_path, [heard, text], tokens, logits[0])
    options = {"tensor_parallel_size": 2, "dtype": torch.float64, "deploy": True}
    cls = oslo_models.GraniteSpeechForConditionalGeneration
    with cls.from_pretrained_with_parallel(tmp_path, **options) as model, ThreadPoolExecutor(4) as others:
        calls = [others.submit(model.generate, **each, **GREEDY) for each in (heard, text, heard, text)]
        for call, expected in zip(calls, tokens * 2, strict=True):
            assert torch.equal(call.result(), expected)
