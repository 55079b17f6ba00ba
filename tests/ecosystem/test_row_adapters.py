"""Rows with different LoRA adapters in one step: each has the tokens and log-probabilities of plain ``peft`` alone."""

from __future__ import annotations

import copy
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import oslo_models
from oslo_models.deploy.running_batch.admission import reason_against_drafts

from support import zoo
from support.float64 import lifted_casts
from support.mutants import Edit, MutantPool
from support.pipelines import model_on_stages
from support.pool import Pool, WorkerError
from support.reference import TOLERANCE, full_parameters, reference_model
from support.running import encoder_decoder, short_parts

peft = pytest.importorskip("peft", reason="peft is not installed")

BASE = "__base__"
NAMES = ("first", "second", "third")
NEW = 8
NO_TOKEN = 10**6
LENGTHS: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}
TARGETS: dict[str, tuple[Any, Any]] = {
    "llama": ("all-linear", ["q_proj", "down_proj"]),
    "llama-one-kv": (["k_proj", "v_proj", "o_proj"], ["gate_proj", "down_proj"]),
    "gpt2": (["c_attn", "c_proj"], ["c_fc"]),
    "mixtral": (["q_proj", "o_proj", "v_proj"], ["k_proj"]),
    "qwen2_moe": (r".*(shared_expert\.(up|down)_proj|q_proj|shared_expert_gate)", ["o_proj"]),
    "deepseek_v2": (["kv_a_proj_with_mqa", "kv_b_proj", "o_proj"], ["q_b_proj", "q_a_proj"]),
    "mamba2": (["in_proj"], ["in_proj"]),
    "falcon_h1": (["in_proj", "o_proj", "q_proj"], ["down_proj"]),
    "t5": (["q", "v", "wo"], ["k", "o"]),
}
"""Layers of the first and the third adapter, and of the second one."""


def written(variant: str, seed: int, folder: Path) -> tuple[Any, tuple[Any, ...]]:
    """Save three adapters of a model. Return the ``PeftModel`` of one process, and arguments for the model of ranks."""
    name, config = encoder_decoder(variant) or zoo.lm_head(variant), zoo.config(variant)
    full: Any = reference_model(name, config, seed).eval()
    weights = full_parameters(full)
    targets = TARGETS[variant]
    adapted: Any = None
    for number, adapter in enumerate(NAMES):
        torch.manual_seed(seed + number)
        options = {"r": 2 + number, "lora_alpha": 20, "target_modules": targets[number % 2]}
        made = peft.LoraConfig(init_lora_weights=False, task_type="CAUSAL_LM", **options)
        if adapted is None:
            adapted = peft.get_peft_model(full, made, adapter_name=adapter)
        else:
            adapted.add_adapter(adapter, made)
    adapted.save_pretrained(folder)
    return adapted.eval(), (name, config, weights)


def drawn_rows(vocabulary: int, seed: int) -> tuple[list[list[int]], list[str]]:
    """Return prompts, and the adapter of each one. Some prompts are equal, with different adapters."""
    draw = random.Random(seed)
    prompts = [[draw.randrange(3, vocabulary) for _ in range(draw.randint(2, 9))] for _ in range(5)]
    prompts += [[*prompts[0]], [*prompts[1], 4], [*prompts[0]]]
    names = [*NAMES, BASE, *draw.choices((*NAMES, BASE), k=4)]
    names[5] = "second" if names[0] != "second" else "third"
    return prompts, names


def alone(adapted: Any, prompt: list[int], name: str, **options: Any) -> list[int]:
    """Return the tokens that one process adds to a prompt."""
    options = {**LENGTHS, **options}
    ids_BL = torch.tensor([prompt])
    with lifted_casts(), torch.no_grad():
        if name == BASE:
            with adapted.disable_adapter():
                found = adapted.generate(input_ids=ids_BL, attention_mask=torch.ones_like(ids_BL), **options)
        else:
            adapted.set_adapter(name)
            found = adapted.generate(input_ids=ids_BL, attention_mask=torch.ones_like(ids_BL), **options)
    return found[0, 1 if adapted.config.is_encoder_decoder else len(prompt) :].tolist()


def end_token(rows: list[list[int]]) -> int:
    """Return a drawn token that ends some rows early and leaves as many different rows as any."""
    tokens = sorted({token for row in rows for token in row[:-1]})
    return max(tokens, key=lambda token: len({tuple(row[: [*row, token].index(token)]) for row in rows}))


def expectations(adapted: Any, rows: tuple[Any, Any]) -> tuple[dict[str, Any], list[list[int]]]:
    """Return options of `generate` with an end token that some rows draw, and the tokens of each row."""
    first = [alone(adapted, *each, eos_token_id=NO_TOKEN, pad_token_id=0) for each in zip(*rows, strict=True)]
    options = {**LENGTHS, "eos_token_id": end_token(first), "pad_token_id": 0}
    expected = [alone(adapted, *each, **options) for each in zip(*rows, strict=True)]
    assert len({*map(tuple, expected)}) > 2 and len({*map(len, expected)}) > 1
    return options, expected


def loaded(given: tuple[Any, ...], folder: Path, tp: int, pp: int) -> Any:
    model = model_on_stages(*given, tp, pp).eval()
    for name in NAMES:
        model.load_adapter(str(folder / name), adapter_name=name)
    return model.eval()


def check_rows(given: tuple[Any, ...], folder: Path, tp: int, pp: int, rows: tuple[Any, Any], wanted: Any) -> None:
    model, (prompts, names), (options, expected) = loaded(given, folder, tp, pp), rows, wanted
    for most in (1, 3, None):
        with lifted_casts():
            found = model.generate_batch(prompts, adapter_names=names, max_batch_size=most, **options)
        assert [each.generated_tokens for each in found.values()] == expected, most
    drafted = None if reason_against_drafts(model.config, 64) else 3
    with short_parts(), lifted_casts():
        found = model.generate_batch(prompts, adapter_names=names, speculative_tokens=drafted, **options)
    assert [each.generated_tokens for each in found.values()] == expected
    assert not any("forward" in vars(module) for module in model.modules())
    keeps = SimpleNamespace(return_logprobs=True)
    with lifted_casts():
        found = model.generate_batch(prompts, None, keeps, adapter_names=names, **options)
        for number, (prompt, name) in enumerate(zip(prompts, names, strict=True)):
            if name == BASE:
                model.disable_adapters()
            else:
                model.enable_adapters()
                model.set_adapter(name)
            (one,) = model.generate_batch([prompt], None, keeps, **options).values()
            (other,) = (each for index, each in enumerate(found.values()) if index == number)
            assert one.generated_tokens == other.generated_tokens
            logprobs = [torch.tensor(each.logprobs, dtype=torch.float64) for each in (one, other)]
            assert (logprobs[0] - logprobs[1]).abs().max() <= TOLERANCE  # float32 numbers of float64 logits


@pytest.mark.drawn(8)
@pytest.mark.parametrize("variant", TARGETS)
@pytest.mark.parametrize(("tp", "pp"), [(2, 1), pytest.param(3, 1, marks=pytest.mark.zoo), (1, 2)])
def test_rows_of_generate_batch(pool: Pool, seed: int, tmp_path: Path, variant: str, tp: int, pp: int) -> None:
    adapted, given = written(variant, seed, tmp_path)
    rows = drawn_rows(given[1].get_text_config().vocab_size, seed)
    pool.run(tp * pp, check_rows, given, tmp_path, tp, pp, rows, expectations(adapted, rows))


def check_active(given: tuple[Any, ...], folder: Path, prompts: list[list[int]], expected: list[list[int]]) -> None:
    """Rows without a name beside rows with one: one name is of the active adapter."""
    model = loaded(given, folder, 2, 1)
    model.set_adapter("second")
    names = ["first", *["second"] * (len(prompts) - 1)]
    with lifted_casts():
        found = model.generate_batch(prompts, adapter_names=names, **LENGTHS)
        plain = model.generate_batch(prompts[1:], **LENGTHS)
    assert [each.generated_tokens for each in found.values()] == expected
    assert [each.generated_tokens for each in plain.values()] == expected[1:]
    for wrong, message in (
        (["first"], "a name for each of the"),
        ("first", "a name for each of the"),
        (["none"] * len(prompts), r"has 'none'; the adapters of this model are \['first', 'second', 'third'\]"),
    ):
        with pytest.raises(ValueError, match=message):
            model.generate_batch(prompts, adapter_names=wrong, **LENGTHS)


def test_active_adapters_and_wrong_names(pool: Pool, seed: int, tmp_path: Path) -> None:
    adapted, given = written("llama", seed, tmp_path)
    prompts, _ = drawn_rows(given[1].vocab_size, seed)
    expected = [alone(adapted, prompt, "second" if number else "first") for number, prompt in enumerate(prompts)]
    pool.run(2, check_active, given, tmp_path, prompts, expected)


def check_peft_model(
    given: tuple[Any, ...], folder: Path, batch: dict[str, Tensor], names: list[str], want: Any
) -> None:
    model = peft.PeftModel.from_pretrained(model_on_stages(*given, 2, 1), folder / "first", adapter_name="first")
    for name in NAMES[1:]:
        model.load_adapter(folder / name, adapter_name=name)
    with lifted_casts(), torch.no_grad():
        found = model.eval().generate(**batch, adapter_names=names, **LENGTHS)
        beams = model.generate(**batch, adapter_names=names, **LENGTHS, num_beams=2)
    assert torch.equal(found, want[0]) and torch.equal(beams, want[1])


@pytest.mark.drawn(3)
@pytest.mark.parametrize("variant", ["llama", "gpt2", "deepseek_v2"])
def test_rows_of_a_peft_model(pool: Pool, seed: int, tmp_path: Path, variant: str) -> None:
    """Sets of names have another order in each process: the ranks agree on one."""
    adapted, given = written(variant, seed, tmp_path)
    prompts, names = drawn_rows(given[1].vocab_size, seed)
    longest = max(map(len, prompts))
    ids_BL = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    batch = {"input_ids": ids_BL, "attention_mask": (ids_BL != 0).long()}
    with lifted_casts(), torch.no_grad():
        want = [adapted.generate(**batch, adapter_names=names, **LENGTHS, **more) for more in ({}, {"num_beams": 2})]
    pool.run(2, check_peft_model, given, tmp_path, batch, names, want)


def check_refusals(config: Any, adapter: Any, message: str) -> None:
    model: Any = oslo_models.AutoModelForCausalLM.from_config_with_parallel(config, 2)
    with pytest.raises(ValueError, match="the model has no adapters: call load_adapter before"):
        model.generate_batch([[3, 4]], adapter_names=["default"], **LENGTHS)
    peft.inject_adapter_in_model(adapter, model)
    with pytest.raises(ValueError, match=message):
        model.generate_batch([[3, 4]], adapter_names=["default"], **LENGTHS)


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "DoRA": ("llama", {"target_modules": ["q_proj"], "use_dora": True}, r"q_proj has a variant of LoRA, such as DoRA"),
    "embedding": ("llama", {"target_modules": ["embed_tokens"]}, r"embed_tokens is a \w*Embedding"),
    "experts": (
        "mixtral",
        {"target_modules": [], "target_parameters": ["mlp.experts.down_proj"]},
        r"experts is a \w*ParamWrapper",
    ),
    "modules_to_save": ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["up_proj"]}, r"modules_to_save"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_adapters_that_rows_cannot_have(pool: Pool, kind: str) -> None:
    variant, options, message = REFUSED[kind]
    pool.run(2, check_refusals, zoo.config(variant), peft.LoraConfig(r=2, **options), message)


@pytest.mark.drawn(2)
@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
def test_calls_of_a_deployed_model(forked: None, seed: int, tmp_path: Path, tp: int, pp: int) -> None:
    """Calls with different adapters and lengths run at once. Prompts are equal, so a reused prefix would be seen."""
    adapted, given = written("llama", seed, tmp_path)
    with adapted.disable_adapter():
        base = copy.deepcopy(adapted).unload()
    base.save_pretrained(tmp_path / "base")
    prompts, names = drawn_rows(given[1].vocab_size, seed)
    prompts[:4] = [[5, 6, 7, 8, 9, 10, 11, 12, 13, 14]] * 4
    expected = [alone(adapted, *each) for each in zip(prompts, names, strict=True)]
    options = {"tensor_parallel_size": tp, "pipeline_parallel_size": pp, "dtype": torch.float64, "deploy": True}
    with oslo_models.LlamaForCausalLM.from_pretrained_with_parallel(tmp_path / "base", **options) as model:
        for name in NAMES:
            model.load_adapter(tmp_path / name, name)
        assert model.reason_against_adapter_names() is None
        model.set_adapter("first")

        def ask(prompt: list[int], name: str | None, **more: Any) -> list[int]:
            ids_BL = torch.tensor([prompt])
            given = {} if name is None else {"adapter_names": [name]}
            assert model.can_join(input_ids=ids_BL, **given, **LENGTHS) or more
            return model.generate(input_ids=ids_BL, **given, **LENGTHS, **more)[0, len(prompt) :].tolist()

        for _ in range(2):  # the second time with former rows
            with ThreadPoolExecutor(len(prompts)) as clients:
                asked = [None if name == "first" else name for name in names]
                assert list(clients.map(ask, prompts, asked)) == expected
        with ThreadPoolExecutor(len(prompts)) as clients:  # calls that cannot join, beside the others
            single = list(zip(prompts, names, strict=True))[:3]
            alone_too = [clients.submit(ask, *each, cache_implementation="dynamic") for each in single]
            assert list(clients.map(ask, prompts, names)) == expected
            assert [each.result() for each in alone_too] == expected[:3]
        ids_BL = torch.tensor(prompts[:4])
        found = model.generate(input_ids=ids_BL, adapter_names=names[:4], **LENGTHS)
        padded = [[*tokens, *[0] * (NEW - len(tokens))] for tokens in expected[:4]]
        assert found[:, ids_BL.shape[1] :].tolist() == padded
        with pytest.raises(ValueError, match="has several adapters, and this call cannot join"):
            model.generate(input_ids=ids_BL, adapter_names=names[:4], **LENGTHS, num_beams=2)
        with pytest.raises(ValueError, match="adapter_names has 'none'"):
            model.generate(input_ids=ids_BL[:1], adapter_names=["none"], **LENGTHS)
        model.delete_adapter("second")
        with pytest.raises(ValueError, match="adapter_names has 'second'"):
            model.generate(input_ids=ids_BL[:1], adapter_names=["second"], **LENGTHS)
        assert ask(prompts[2], "third") == alone(adapted, prompts[2], "third")


MUTANTS = {
    "an adapter that stays in its slot": Edit(
        "deploy.running_batch.step_runner:StepRunner.free",
        "self.numbers[slot], self._by_slot[slot] = self.numbers[-1], self._by_slot[-1]",
        "self.numbers[slot] = self.numbers[-1]",
    ),
    "products of other rows": Edit("modeling.adapters.rows:add_adapters", "output[own])", "output[own.flip(0)])"),
}


@pytest.mark.drawn(1)
@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_caught(pool: Pool, seed: int, tmp_path: Path, name: str) -> None:
    adapted, given = written("llama", seed, tmp_path)
    rows = drawn_rows(given[1].vocab_size, seed)
    wanted = expectations(adapted, rows)
    pool.run(2, check_rows, given, tmp_path, 2, 1, rows, wanted)
    with pytest.raises(WorkerError, match="AssertionError"):
        MutantPool(pool, MUTANTS[name]).run(2, check_rows, given, tmp_path, 2, 1, rows, wanted)
