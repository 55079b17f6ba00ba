"""The comparison of a sharded model with one process accepts correct models and names errors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers as hf

import oslo_models
from oslo_models.sharding.plan import ColumnParallel, LocalAttributes, Norm, Plan, Replicated, VocabParallel
from oslo_models.testing import assert_same_as_one_process

from support import zoo
from support.own_models import NoteConfig, NoteForCausalLM, NoteModel, plan_of_base, plan_of_lm


@pytest.fixture
def batch(seed: int) -> dict[str, Any]:
    ids = torch.randint(3, 101, (2, 7), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_right_plan_passes(batch: dict[str, Any], ranks: int) -> None:
    model = NoteForCausalLM(NoteConfig())
    assert_same_as_one_process(model, batch, plan_of_lm, ranks)
    assert_same_as_one_process(NoteModel(NoteConfig()), {"input_ids": batch["input_ids"]}, plan_of_base, ranks)
    assert model.dtype == torch.float32 and all(param.grad is None for param in model.parameters())


def test_the_zoo_needs_no_plan(batch: dict[str, Any]) -> None:
    assert_same_as_one_process(hf.GPT2LMHeadModel(zoo.config("gpt2")), batch, tensor_parallel_size=3)


def changed(**entries: Any) -> Plan:
    plan = plan_of_lm(NoteConfig())
    block = {**plan.blocks["model.blocks"], **{name.replace("__", "."): entry for name, entry in entries.items()}}
    return replace(plan, blocks={"model.blocks": block})


WRONG = {
    "heads are not local": changed(attention=LocalAttributes({})),
    "two matrices in one": changed(up=ColumnParallel(), attention__k=Replicated(), attention=LocalAttributes({})),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_plan_is_named(case: str, batch: dict[str, Any]) -> None:
    with pytest.raises((AssertionError, RuntimeError)) as raised:
        assert_same_as_one_process(NoteForCausalLM(NoteConfig()), batch, WRONG[case])
    if case == "heads are not local":
        assert "NoteForCausalLM over 2 ranks differs from the full model:\n  output loss: 0." in str(raised.value)
        assert "gradient of model.blocks.0.attention.q.weight on rank 1" in str(raised.value)


def test_a_gradient_that_is_not_summed_is_named(batch: dict[str, Any]) -> None:
    """Declare the norm of local heads as replicated: only its gradient is wrong."""
    config = zoo.config("qwen3")
    plan = oslo_models.Qwen3ForCausalLM.plan(config).under("model.")
    plan = replace(plan, head={**plan.head, "lm_head": VocabParallel()})
    block = {**plan.blocks["model.layers"], "self_attn.q_norm": Norm()}
    model = hf.Qwen3ForCausalLM(config)
    assert_same_as_one_process(model, batch, plan)
    with pytest.raises(AssertionError, match=r"gradient of model.layers.0.self_attn.q_norm.weight") as raised:
        assert_same_as_one_process(model, batch, replace(plan, blocks={"model.layers": block}))
    assert all("q_norm" in line for line in str(raised.value).splitlines()[1:])
