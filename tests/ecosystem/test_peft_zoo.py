"""LoRA on every architecture, in all linear layers and embeddings that ``peft`` can adapt."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from support import zoo
from support.adapters import (
    Run,
    check_files,
    check_merged,
    check_run,
    compare,
    loss_of,
    reference_run,
    start_from,
    trained_parameters,
)
from support.pool import Pool
from support.reference import (
    TOLERANCE,
    differences,
    full_parameters,
    loss_or_all_outputs,
    parallel_model,
    reference_model,
    take_step,
)

peft = pytest.importorskip("peft", reason="peft is not installed")

_OF_MAMBA = ("out_proj", "conv1d", "dt_proj")
REFUSED = dict.fromkeys(("mamba", "mamba2", "falcon_h1", "falcon_mamba", "nemotron_h"), _OF_MAMBA) | {
    "deepseek_v4": ("o_a_proj",),
    "jamba": ("mamba.dt_proj",),
    "llama4_text": ("router",),
    "phimoe": ("router",),
}
"""Name suffixes of layers without adapters, by model type."""
WITHOUT_ADAPTERS = {"pp_formulanet"}
"""Model types whose class in transformers peft cannot adapt: `get_input_embeddings` raises."""
FOUNDING = [*zoo.FOUNDING, "falcon", "bloom", "bart", "deberta-v2"]


def targets(model: Any) -> list[str]:
    """Return the full names of all linear layers and the token embedding; of two tied layers, only one.

    In models with stacked experts, ``peft`` reads MLP layer names as names of expert parameters.
    """
    tied = {name.rpartition(".")[0] for name in model.all_tied_weights_keys}
    found = {name for name, module in model.named_modules() if isinstance(module, (nn.Linear, Conv1D))}
    has_tokens = model.main_input_name == "input_ids" and not type(model).__name__.startswith(("Rag", "CLIP"))
    tokens = model.get_input_embeddings() if has_tokens else None
    # peft refuses some in state-space models; we refuse layers when a mixer reads their weight directly;
    # a router is a linear layer that returns a tuple; a projection of head groups has another shape
    found = {name for name in found if not name.endswith(REFUSED.get(model.config.model_type, ()))}
    found |= {name for name, module in model.named_modules() if module is tokens and isinstance(tokens, nn.Embedding)}
    return sorted(found - tied)


def step_of_rank(run: Run, tp: int, value: Tensor, gradients: dict[str, Tensor | None]) -> None:
    base = parallel_model(run.name, run.config, run.weights, tp).train()
    torch.manual_seed(run.seed)
    model: Any = peft.get_peft_model(base, copy.deepcopy(run.adapter))
    lines = compare(model, "initial", {n: p.detach() for n, p in trained_parameters(model).items()}, run.initial)
    start_from(model, run.start)
    _, own, _ = take_step(model, run.batches[0], loss_or_all_outputs)
    lines += differences("value", own, value, TOLERANCE)
    found = {name: param.grad for name, param in trained_parameters(model).items()}
    assert found.keys() == gradients.keys(), found.keys() ^ gradients.keys()
    assert {name for name, grad in found.items() if grad is None} == {n for n, g in gradients.items() if g is None}
    used = {name: grad for name, grad in found.items() if grad is not None}
    lines += compare(model, "gradient", used, {name: grad for name, grad in gradients.items() if grad is not None})
    assert not lines, "\n".join(lines[:10])


def check(pool: Pool, variant: str, tp: int, seed: int) -> None:
    name = zoo.main_head(variant)
    config = zoo.config_of(name, zoo.config(variant))
    base = reference_model(name, config, seed)
    adapter = peft.LoraConfig(r=2, target_modules=targets(base))
    weights = {**base.state_dict(), **full_parameters(base)}
    run = Run(name, config, adapter, seed, "SGD", weights, batches=[zoo.batch(name, config, seed)])
    torch.manual_seed(seed)
    model: Any = peft.get_peft_model(base, copy.deepcopy(adapter))
    params = trained_parameters(model)
    run.initial = {key: param.detach().clone() for key, param in params.items()}
    with torch.no_grad():
        for param in params.values():
            param += 0.1 * torch.randn_like(param)
    run.start = {key: param.detach().clone() for key, param in params.items()}
    _, value, _ = take_step(model, run.batches[0], loss_or_all_outputs)
    pool.run(tp, step_of_rank, run, tp, value.detach(), {key: param.grad for key, param in params.items()})


@pytest.mark.parametrize("variant", FOUNDING)
def test_lora_on_the_founding_architectures(pool: Pool, seed: int, variant: str) -> None:
    check(pool, variant, 2, seed)


@pytest.mark.zoo
@pytest.mark.parametrize("tp", [2, 3])
@pytest.mark.parametrize(
    "variant", [each for each in (*zoo.VARIANTS, *zoo.MORE, *zoo.ODD) if each not in WITHOUT_ADAPTERS]
)
def test_lora_on_every_architecture(pool: Pool, seed: int, variant: str, tp: int) -> None:
    check(pool, variant, tp, seed)


def adapt_what_the_mixer_uses(run: Run) -> None:
    base = parallel_model(run.name, run.config, run.weights, 2)
    with pytest.raises(ValueError, match="which uses its weight without calling the layer"):
        peft.get_peft_model(base, copy.deepcopy(run.adapter))


def test_layers_that_a_mixer_does_not_call_are_refused(pool: Pool, seed: int) -> None:
    name, config = zoo.main_head("jamba"), zoo.config("jamba")
    weights = reference_model(name, config, seed).state_dict()
    adapter = peft.LoraConfig(r=2, target_modules=["dt_proj"])
    pool.run(2, adapt_what_the_mixer_uses, Run(name, config, adapter, seed, "SGD", weights, batches=[]))


def adapt_inputs_of_several_ranks(run: Run) -> None:
    base = parallel_model(run.name, run.config, run.weights, 3)
    with pytest.raises(ValueError, match=r"DoRA does not work on .*o_b_proj, since several ranks hold some"):
        peft.get_peft_model(base, copy.deepcopy(run.adapter))


@pytest.mark.zoo
def test_adapters_of_layers_that_take_full_tensors_are_trained_saved_and_merged(
    pool: Pool, seed: int, tmp_path: Path
) -> None:
    adapter = peft.LoraConfig(task_type="CAUSAL_LM", r=3, target_modules=["input_mix_weight_down", "v_proj"])
    name, config = zoo.lm_head("qwen4_exp_text"), zoo.config("qwen4_exp_text")
    run = reference_run(name, config, adapter, seed, folder=tmp_path / "plain")
    pool.run(2, check_run, run, 2)
    pool.run(2, check_files, run, 2, 1, str(tmp_path / "plain"), str(tmp_path / "ours"))
    plain = peft.PeftModel.from_pretrained(reference_model(name, config, seed), tmp_path / "plain")
    pool.run(2, check_merged, run, 2, 1, loss_of(plain.eval().merge_and_unload(), run.batches[0]), {})


def adapt_what_takes_full_tensors(run: Run) -> None:
    base = parallel_model(run.name, run.config, run.weights, 2)
    with pytest.raises(ValueError, match=r"input_mix_weight_down is sharded, and takes and returns full tensors"):
        peft.get_peft_model(base, copy.deepcopy(run.adapter))


@pytest.mark.parametrize("kind", ["DoRA", "IA3"])
def test_adapters_of_layers_that_take_full_tensors_are_without_magnitudes(pool: Pool, seed: int, kind: str) -> None:
    targets = ["input_mix_weight_down"]
    adapter: Any = peft.LoraConfig(target_modules=targets, use_dora=True)
    if kind == "IA3":
        adapter = peft.IA3Config(target_modules=targets, feedforward_modules=targets)
    name, config = zoo.main_head("qwen4_exp_text"), zoo.config("qwen4_exp_text")
    weights = reference_model(name, config, seed).state_dict()
    pool.run(2, adapt_what_takes_full_tensors, Run(name, config, adapter, seed, "SGD", weights, batches=[]))


def test_magnitudes_over_inputs_that_several_ranks_have_are_refused(pool: Pool, seed: int) -> None:
    name, config = zoo.main_head("deepseek_v4"), zoo.config("deepseek_v4")
    weights = reference_model(name, config, seed).state_dict()
    adapter = peft.LoraConfig(r=2, target_modules=["o_b_proj"], use_dora=True)
    pool.run(3, adapt_inputs_of_several_ranks, Run(name, config, adapter, seed, "SGD", weights, batches=[]))
