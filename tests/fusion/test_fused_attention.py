"""Attention layers under `fuse`: every form matches transformers, and no other model changes."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama
from transformers.models.t5 import modeling_t5

from oslo_models import registry
from oslo_models.cache_argument import generation_name
from oslo_models.fusion import apex, attention, full_norms, known_layers, norms, rotary_attention
from oslo_models.fusion.rules import fusion_candidates
from oslo_models.fusion.swap import Fusion
from oslo_models.layers import norm as norm_layers

from support import zoo
from support.float64 import lifted_casts
from support.fusion import LOGITS, fusion_reference
from support.pool import Pool
from support.reference import (
    TOLERANCE,
    Step,
    differences,
    parallel_model,
    reference_step,
    step_differences,
    tensors,
)

pytestmark = pytest.mark.drawn(56, of="file")

OF_TEXT = {"aria": "aria_text", "gemma3": "gemma3_text", "qwen3_omni_moe": "qwen3_omni_moe_thinker"}
ROTARY = sorted(
    model_type
    for layers in known_layers.ROTARY_ATTENTIONS.values()
    for layer in layers
    if (model_type := OF_TEXT.get(layer.split(".")[0], layer.split(".")[0])) not in registry.NEWER
)
NEEDS_POSITIONS = ("qwen3_omni_moe_thinker", "voxtral_realtime")
"""Types whose forward in transformers cannot go on from a cache without positions, or without sounds."""
ENCODERS = ("eurobert", "t5gemma")
"""Types without a lone decoder. Their losses and gradients are compared in `test_fusion`."""
CHANGES: dict[str, dict[str, Any]] = {  # options of forwards that are missing in the zoo's configurations
    "gemma2": {"attn_logit_softcapping": 2.0},
    "phi": {"qk_layernorm": False, "partial_rotary_factor": 1.0},
    "qwen3": {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 0},
    "stablelm": {"qk_layernorm": True, "partial_rotary_factor": 0.7},
}
EAGER = ("albert", "bart", "bert", "clip", "cohere", "distilbert", "gpt2", "gpt_bigcode", "mt5", "opt", "pegasus")
"""Architectures without Llama's positions, with and without cross attention and biases."""


def swapped(model: Any, backend: str = "triton") -> Any:
    """Replace the modules that are replaced on a GPU; on the CPU, their operations run in plain torch."""
    model._fusion = Fusion(backend)
    model._fusion.apply(model, fusion_candidates(model, backend), None)
    return model


def spied(module: Any, name: str) -> Any:
    return mock.patch.object(module, name, wraps=getattr(module, name))


def outputs(model: Any, batch: dict[str, Tensor], **more: Any) -> list[tuple[str, Tensor]]:
    with lifted_casts(), torch.no_grad():
        return list(tensors(model(**batch, **more)))


def inputs_of(model: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    given = {key: batch[key] for key in ("input_ids", "attention_mask") if key in batch}
    return given | ({"decoder_input_ids": given["input_ids"]} if model.config.is_encoder_decoder else {})


def decoded(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Return the logits of the last tokens, computed with a cache of the earlier tokens."""
    ids, mask = batch["input_ids"], batch["attention_mask"]
    given: dict[str, Any] = {"use_cache": True}
    if model.config.model_type == "granite4_vision":  # makes no cache by itself
        given[generation_name()] = DynamicCache(config=model.config)
    with lifted_casts(), torch.no_grad():
        cache = model(input_ids=ids[:, :-2], attention_mask=mask[:, :-2], **given)[generation_name()]
        return model(input_ids=ids[:, -2:], attention_mask=mask, **{generation_name(): cache}).logits


def attended(model: Any, batch: dict[str, Tensor]) -> list[tuple[str, Tensor]]:
    with lifted_casts(), torch.no_grad():
        found = list(tensors(model(**batch, output_attentions=True)))
    assert any("attentions" in name for name, _ in found)
    return found


def check_rotary(step: Step, n: int) -> None:
    """On every rank, compare loss, gradients, eager attention weights and cached decoding with transformers."""
    model = swapped(parallel_model(step.name, step.config, step.weights, n))
    with (
        spied(rotary_attention, "rotary") as rotary,
        spied(norms, "normed_rotary") as normed,
        spied(full_norms, "full_norm_rotary") as full,
    ):
        lines = step_differences(model, step, without=LOGITS)
    layers = [m for m in model.modules() if isinstance(m, rotary_attention.FusedLlamaAttention)]
    if getattr(layers[0], "full_norms", None) is not None:
        assert full.called and not rotary.called
    elif isinstance(layers[0], rotary_attention.FusedQwen3Attention):
        assert normed.called and not rotary.called
    else:
        assert rotary.called or layers[0].rotary_ndims % 2
    model = parallel_model(step.name, step.config, step.weights, n, attn_implementation="eager").eval()
    batch = {key: step.batch[key] for key in ("input_ids", "attention_mask")}
    expected, tokens = attended(model, batch), decoded(model, batch)
    saved = model.config.to_dict()
    swapped(model)
    with spied(attention, "masked_softmax") as softmax:
        found = attended(model, batch)
    lines += differences("decoded", decoded(model, batch), tokens, TOLERANCE)
    assert softmax.call_count
    for own, plain in zip(found, expected, strict=True):
        lines += differences(own[0], own[1], plain[1], TOLERANCE)
    assert model.config.to_dict() == saved and model.config._attn_implementation == "eager"
    assert not lines, "\n".join(lines)


@pytest.mark.stacks
@pytest.mark.parametrize("variant", [variant for variant in ROTARY if variant not in NEEDS_POSITIONS + ENCODERS])
def test_rotary_attention_matches_transformers(variant: str, seed: int) -> None:
    check_rotary(fusion_reference(variant, zoo.lm_head(variant), seed), 1)


# Gemma 2 and VaultGemma have eager attention only
@pytest.mark.parametrize(
    "variant", [variant for variant in ROTARY if variant not in ("gemma2", "vaultgemma", *ENCODERS)]
)
def test_rotary_attention_passes_the_same_arguments_on(variant: str) -> None:
    """Arguments include windows, scales and dropout, which only some attention functions use, and output dropout."""
    name, config = zoo.lm_head(variant), zoo.config(variant, dropout=0.3)
    if hasattr(config, "qformer_config"):
        config.qformer_config.hidden_dropout_prob = 0.0  # fused residuals draw other masks
    options = {"seed": 1, "dtype": torch.float64, "attn_implementation": "sdpa"}
    model = registry.find(name).from_config_with_parallel(config, **options).train()
    batch, found = zoo.batch(name, config, 1), []
    unused = {"use_cache", "output_attentions"}  # StableLM's forward drops them
    for fuse in (False, True):
        if fuse:
            swapped(model)
        given: list[dict[str, Any]] = []
        sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]

        def noting(*args: Any, given: Any = given, sdpa: Any = sdpa, **kwargs: Any) -> Any:
            own = {key: value for key, value in kwargs.items() if key not in unused}
            given.append({key: value for key, value in own.items() if not isinstance(value, Tensor)})
            return sdpa(*args, **kwargs)

        torch.manual_seed(1)
        with mock.patch.dict(ALL_ATTENTION_FUNCTIONS._global_mapping, sdpa=noting), lifted_casts():
            found.append((model(**batch).loss.detach(), given))
    assert found[0][1] and found[0][1] == found[1][1]
    assert not differences("loss", found[1][0], found[0][0], TOLERANCE)


@pytest.mark.parametrize("variant", CHANGES)
def test_options_of_rotary_attention_match_transformers(variant: str, seed: int) -> None:
    check_rotary(reference_step(zoo.lm_head(variant), zoo.config(variant, **CHANGES[variant]), seed), 1)


@pytest.mark.parametrize("variant", ["gemma2", "olmo2", "phi", "qwen3"])
def test_rotary_attention_of_local_heads_matches_transformers(pool: Pool, variant: str, seed: int) -> None:
    pool.run(2, check_rotary, fusion_reference(variant, zoo.lm_head(variant), seed), 2)


@pytest.mark.parametrize("variant", EAGER)
def test_weights_of_eager_attention_match_transformers(variant: str, seed: int) -> None:
    name = zoo.main_head(variant)
    step = fusion_reference(variant, name, seed)
    model = parallel_model(name, step.config, step.weights, 1, attn_implementation="eager").eval()
    batch = {key: value for key, value in step.batch.items() if "label" not in key}
    if model.config.is_encoder_decoder:
        batch["decoder_input_ids"] = batch["input_ids"]
    expected = attended(model, batch)
    with spied(attention, "masked_softmax") as softmax:
        found = attended(swapped(model), batch)
    assert softmax.call_count >= sum(isinstance(m, attention.FusedEagerAttention) for m in model.modules()) > 0
    lines = [d for a, b in zip(found, expected, strict=True) for d in differences(*a, b[1], TOLERANCE)]
    assert not lines, "\n".join(lines)
    again = attended(model.unfuse(), batch)
    assert all(torch.equal(a[1], b[1]) for a, b in zip(again, expected, strict=True))


def llama(**options: Any) -> tuple[Any, dict[str, Tensor]]:
    name, config = "LlamaForCausalLM", zoo.config("llama")
    model = registry.find(name).from_config_with_parallel(config, seed=1, dtype=torch.float64, **options)
    return model, zoo.batch(name, config, 1)


def test_rows_that_the_rotary_kernel_does_not_support(seed: int) -> None:
    """Torch computes odd widths, and tables with gradients."""
    generator = torch.Generator().manual_seed(seed)
    for width, learned in ((5, False), (4, True)):
        x = torch.randn(2, 3, 7, width, generator=generator, dtype=torch.float64)
        cos, sin = (torch.randn(1, 7, width, generator=generator, dtype=torch.float64) for _ in range(2))
        cos.requires_grad_(learned)
        expected = modeling_llama.apply_rotary_pos_emb(x, -x, cos, sin)
        with spied(rotary_attention, "rotary") as rotary:
            assert all(map(torch.equal, rotary_attention.rotate(x, -x, cos, sin), expected))
        assert not rotary.called


def test_norms_of_heads_with_hooks_run_by_themselves(seed: int) -> None:
    """A hook sees the output of the norm, before the rotary positions."""
    name, config = zoo.lm_head("qwen3"), zoo.config("qwen3", num_hidden_layers=1)
    model = registry.find(name).from_config_with_parallel(config, seed=seed, dtype=torch.float64)
    batch = inputs_of(model, zoo.batch(name, config, seed))
    norm, seen = model.model.layers[0].self_attn.k_norm, []

    def note(module: Any, args: Any, output: Tensor) -> Tensor:
        seen.append(output)
        return 3 * output

    hook = norm.register_forward_hook(note)
    expected = outputs(model, batch)
    with spied(norms, "normed_rotary") as both:
        both_outputs = zip(outputs(swapped(model), batch), expected, strict=True)
        lines = [line for own, plain in both_outputs for line in differences(*own, plain[1], TOLERANCE)]
        assert not both.called and len(seen) == 2 and not lines, lines
        hook.remove()
        outputs(model, batch)
        assert both.called


def test_masks_of_integers_take_torch(seed: int) -> None:
    """The kernel adds floating-point masks only."""
    scores = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    mask = torch.ones(2, 1, 4, 5, dtype=torch.bool).tril()
    with spied(attention, "masked_softmax") as softmax:
        found = attention.FusedEagerAttention().softmax(scores, mask, 0.5)
    assert not softmax.called and torch.equal(found, (scores * 0.5 + mask).softmax(-1))


def test_the_fused_function_is_for_fused_layers_only() -> None:
    model, batch = llama()
    model.set_attn_implementation(attention.FUSED_EAGER)
    with pytest.raises(ValueError, match=r"cannot be used by LlamaAttention: fuse\(\) selects it"):
        model(**batch)
    other, _ = llama(attn_implementation="eager")
    swapped(other)
    plain, _ = llama(attn_implementation="eager")
    with spied(attention, "masked_softmax") as softmax:
        plain(**batch)
        assert not softmax.called
        other(**batch)
        assert softmax.called


def test_implementation_chosen_after_fusing() -> None:
    model, batch = llama()
    swapped(model)
    with spied(attention, "masked_softmax") as softmax, lifted_casts(), torch.no_grad():
        model(**batch)
        assert not softmax.called
        model.set_attn_implementation("eager")
        found = model(**batch).loss
        assert softmax.called
        assert not differences("loss", found, model.unfuse()(**batch).loss, TOLERANCE)


@pytest.mark.parametrize("variant", ["gpt2", "llama"])
def test_compiled_attention_uses_plain_expressions(variant: str) -> None:
    name, config = zoo.lm_head(variant), zoo.config(variant, num_hidden_layers=1)
    options = {"seed": 1, "dtype": torch.float64, "attn_implementation": "eager"}
    model = registry.find(name).from_config_with_parallel(config, **options).eval()
    ids = zoo.batch(name, config, 1)["input_ids"]
    expected = model(ids).logits
    swapped(model)
    torch._dynamo.reset()
    with spied(attention, "masked_softmax") as softmax, spied(rotary_attention, "rotary") as rotary:
        found = torch.compile(model, backend="eager")(ids).logits
    assert not softmax.called and not rotary.called
    assert not differences("logits", found.detach(), expected.detach(), TOLERANCE)


def test_unfused_modules_are_reported() -> None:
    upcasting = registry.find("GPT2LMHeadModel").from_config_with_parallel(
        zoo.config("gpt2", reorder_and_upcast_attn=True), seed=1, attn_implementation="eager"
    )
    falcon = registry.find("FalconForCausalLM").from_config_with_parallel(zoo.config("falcon"), seed=1)
    for model, says in ((upcasting, "left unfused: reorder_and_upcast_attn"), (falcon, "left unfused: rotary")):
        (row,) = [row for row in swapped(model).fusion_report() if row.operation == "attention"]
        assert not row.fused and says in row.reason


def test_apex_takes_torch_where_its_kernel_does_not_fit(seed: int) -> None:
    """T5's mask includes a position bias; apex's kernel would treat it as hidden keys."""
    name, config = "T5ForConditionalGeneration", zoo.config("t5")
    model = registry.find(name).from_config_with_parallel(config, seed=1, dtype=torch.bfloat16)
    model.set_attn_implementation("eager")
    batch = zoo.batch(name, config, seed, torch.bfloat16)
    expected = model(**batch).loss
    assert any(isinstance(m, apex.ApexEagerAttention) for m in swapped(model, "apex").modules())
    with mock.patch.multiple(apex.ApexRMSNorm, forward=modeling_t5.T5LayerNorm.forward):
        assert abs(model(**batch).loss - expected) < 0.02 * abs(expected)


def check_full_norms(step: Step, n: int, counts: tuple[int, int]) -> None:
    """On every rank, compare the step with transformers, and count the all-reduces of fused and unfused norms."""
    model = swapped(parallel_model(step.name, step.config, step.weights, n))
    with spied(full_norms, "reduce_fresh") as sums, spied(norm_layers, "reduce_from") as unfused:
        lines = step_differences(model, step, without=LOGITS)
    assert not lines, "\n".join(lines)
    assert (sums.call_count, unfused.call_count) == counts


@pytest.mark.parametrize(("heads", "counts"), [(2, (4, 0)), (1, (0, 4))], ids=["own heads", "shared heads"])
def test_norms_over_all_heads_of_ranks(pool: Pool, heads: int, counts: tuple[int, int], seed: int) -> None:
    """Two layers: with one key head for two ranks, the norms run unfused, with two all-reduces per layer."""
    config = zoo.config("olmo2", num_hidden_layers=2, num_key_value_heads=heads)
    step = reference_step(zoo.lm_head("olmo2"), config, seed)
    pool.run(2, check_full_norms, step, 2, counts)


def test_attention_norms_with_hooks_run_by_themselves(seed: int) -> None:
    name, config = zoo.lm_head("olmo2"), zoo.config("olmo2", num_hidden_layers=1)
    model = registry.find(name).from_config_with_parallel(config, seed=seed, dtype=torch.float64)
    batch = inputs_of(model, zoo.batch(name, config, seed))
    hook = model.model.layers[0].self_attn.k_norm.register_forward_hook(lambda module, args, output: 3 * output)
    expected = outputs(model, batch)
    with spied(full_norms, "full_norm_rotary") as both:
        both_outputs = zip(outputs(swapped(model), batch), expected, strict=True)
        lines = [line for own, plain in both_outputs for line in differences(*own, plain[1], TOLERANCE)]
        assert not both.called and not lines, lines
        hook.remove()
        outputs(model, batch)
        assert both.called
