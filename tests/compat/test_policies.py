"""parallelformers' ``custom_policies``: exact against one process, and refused where a policy does not fit."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf

import oslo_models
from oslo_models import AllReduceLinear, Layer
from oslo_models.compat.policy_plan import PlanOfPolicies
from oslo_models.sharding.plan import LocalAttributes

from support import zoo
from support.own_models import NoteAttention, NoteConfig, NoteForCausalLM
from support.own_policies import BertPolicy, BioGptPolicy, GPT2Policy, LouderPolicy, NotePolicy, linear

pytestmark = pytest.mark.usefixtures("forked")


def bert() -> Any:
    return hf.BertForMaskedLM(zoo.config("bert"))


def gpt2() -> Any:
    return hf.GPT2LMHeadModel(zoo.config("gpt2"))


def biogpt() -> Any:
    sizes = {"hidden_size": 24, "intermediate_size": 35, "num_hidden_layers": 2, "num_attention_heads": 6}
    return hf.BioGptForCausalLM(hf.BioGptConfig(**sizes, **zoo.TOKENS, max_position_embeddings=32))


def note() -> Any:
    return NoteForCausalLM(NoteConfig())


CASES: dict[str, tuple[Callable[[], Any], Any]] = {
    "bert": (bert, BertPolicy),
    "gpt2": (gpt2, GPT2Policy),
    "biogpt": (biogpt, BioGptPolicy),
    "own": (note, [NotePolicy]),
}


def random(make: Callable[[], Any], seed: int) -> tuple[Any, dict[str, Any]]:
    """Return a batch and a float64 model without weights of exactly zero or one."""
    torch.manual_seed(seed)
    model = make().double().eval()
    with torch.no_grad():
        for param in model.parameters():
            param += 0.1 * torch.randn_like(param)
    return model, {"input_ids": torch.randint(3, 101, (2, 7))}


@pytest.mark.parametrize("case", CASES)
def test_a_model_with_a_policy_answers_as_before(case: str, seed: int) -> None:
    make, policies = CASES[case]
    model, batch = random(make, seed)
    options = {} if case == "own" else {"output_attentions": True}
    if options:
        model.set_attn_implementation("eager")  # other implementations return no attention weights
    with torch.no_grad():
        expected = model(**batch, **options)
        tokens = model.generate(**batch, max_new_tokens=5, do_sample=False) if model.can_generate() else None
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    ranks = 3 if case == "gpt2" else 2
    assert oslo_models.parallelize(model, num_gpus=ranks, custom_policies=policies) is model
    try:
        found = model(**batch, **options)
        torch.testing.assert_close(found.logits, expected.logits, rtol=0, atol=1e-10)
        assert len(found.get("attentions") or ()) == (2 if options else 0)
        for own, other in zip(found.get("attentions") or (), expected.get("attentions") or (), strict=True):
            torch.testing.assert_close(own, other, rtol=0, atol=1e-7)  # transformers takes the softmax in float32
        if tokens is not None:
            assert torch.equal(model.generate(**batch, max_new_tokens=5, do_sample=False), tokens)
    finally:
        model.cpu()
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in weights.items())
    with torch.no_grad():
        torch.testing.assert_close(model(**batch).logits, expected.logits, rtol=0, atol=1e-10)


def test_replaced_methods_run_with_the_group_of_the_ranks(seed: int) -> None:
    model, batch = random(note, seed)
    louder = NoteForCausalLM(model.config).double().eval()
    louder.load_state_dict(model.state_dict())
    for block in louder.model.blocks:
        block.attention.out.weight.data *= 2
        block.attention.out.bias.data *= 2
    with torch.no_grad():
        expected = louder(**batch).logits
    with oslo_models.parallelize(model, num_gpus=2, custom_policies=LouderPolicy):
        torch.testing.assert_close(model(**batch).logits, expected, rtol=0, atol=1e-10)
    assert NoteAttention.forward.__qualname__ == "NoteAttention.forward"  # the application's class is unchanged


def test_the_plan_of_a_policy() -> None:
    """Heads are split as heads, modules that the policy does not name are replicated, values depend on the ranks."""
    plan = PlanOfPolicies(hf.GPT2LMHeadModel, (GPT2Policy,))
    made = pickle.loads(pickle.dumps(plan))(zoo.config("gpt2"))
    block = made.blocks["transformer.h"]
    assert [split.count for split in block["attn.c_attn"].splits] == [6, 6, 6]  # type: ignore[attr-defined]
    attention = block["attn"]
    assert isinstance(attention, LocalAttributes) and attention.attributes["num_heads"](3, 0) == 2
    assert type(block["ln_1"]).__name__ == "Replicated" == type(made.embed["transformer.wte"]).__name__
    assert made.max_ranks() == 6


def policy(base: Any, **changed: Any) -> Any:
    return type("Changed", (base,), {name: staticmethod(value) for name, value in changed.items()})


def other_layer() -> type:
    return torch.nn.Bilinear


REFUSED: dict[str, tuple[Any, str]] = {
    "ranks": (NotePolicy, r"num_gpus=4 does not divide the 6 heads of attention.q, .*; use 1, 2, 3, 6"),
    "object": (NotePolicy(), "custom_policies must be a class derived from oslo_models.Policy, or a list"),
    "another class": (hf.BertModel, "which has no replace_arguments, replace_modules"),
    "none": ([], "custom_policies is empty"),
    "absent blocks": (policy(NotePolicy, original_layer_class=other_layer), "is for Bilinear, which NoteForCausalLM"),
    "absent layer": (
        policy(NotePolicy, mlp_in=lambda: [linear("upp")]),
        r"mlp_in names upp.weight, which is not a tensor of a layer there; did you mean up.weight\?",
    ),
    "absent attribute": (
        policy(NotePolicy, replace_arguments=lambda config, n: {"attention.num_heads": 6 // n}),
        "replace_arguments names attention.num_heads, and NoteAttention has no such attribute.*heads",
    ),
    "heads of all ranks": (
        policy(NotePolicy, replace_arguments=lambda config, n: {"attention.heads": 6}),
        "replace_arguments gives attention.heads=6 for 2 ranks and 6 for one, which is not 2 times as many",
    ),
    "unknown sum": (
        policy(NotePolicy, mlp_out=lambda: [linear("down", replace=torch.nn.Linear)]),
        "is unknown; use one of AllReduceLinear, AllReduceConv1D",
    ),
    "no sum": (policy(LouderPolicy, attn_out=lambda: [linear("attention.out")]), "give AllReduceLinear or"),
    "reversed": (
        policy(NotePolicy, mlp_in=lambda: [linear("up", reversed=True)]),
        "up is a Linear: its Layer needs reversed=False",
    ),
    "fused": (policy(NotePolicy, mlp_in=lambda: [linear("up", n_fused=5)]), "n_fused=5 does not divide the 73"),
    "empty": (policy(NotePolicy, mlp_in=lambda: [Layer()]), "a Layer of mlp_in has neither weight nor bias"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_policies_that_do_not_fit_are_refused(case: str) -> None:
    given, message = REFUSED[case]
    model = note()
    with pytest.raises(ValueError, match=message):
        oslo_models.parallelize(model, num_gpus=4 if case == "ranks" else 2, custom_policies=given)
    assert type(model) is NoteForCausalLM and len(model.state_dict())


def test_a_policy_and_a_plan_are_one_too_many() -> None:
    plan = PlanOfPolicies(NoteForCausalLM, (NotePolicy,))
    with pytest.raises(ValueError, match="plan= and custom_policies= both say how"):
        oslo_models.parallelize(note(), num_gpus=2, custom_policies=NotePolicy, plan=plan)
    assert AllReduceLinear.__mro__[1] is torch.nn.Linear
