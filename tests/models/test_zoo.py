"""Every model type matches transformers: its main class on two tensor-parallel ranks and on two pipeline stages.

Other classes, other sizes and beams have the mark ``zoo``; `make test-zoo` runs them.
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

from oslo_models import IBertModel, auto, registry
from oslo_models.cli import main as cli
from oslo_models.cli import support_table as support
from oslo_models.distributed.sharded_tensor import local_tensor
from oslo_models.layers.entries import HeadNorm
from oslo_models.modeling.apply_plan import layouts_of
from oslo_models.models.deepseek_v2 import Latent

from support import ROOT, pipelines, zoo
from support.float64 import lifted_casts
from support.generation import BEAMS, GREEDY, Tokens, depend_on_rounding, generate_tokens, token_differences
from support.pipelines import loop_differences
from support.pool import Pool
from support.random_states import states_after
from support.reference import (
    TOLERANCE,
    Step,
    differences,
    full_parameters,
    own_part,
    parallel_model,
    reference_model,
    reference_step,
    saved_step,
    step_differences,
)


def loaded_without_draws(load: Callable[[], Any]) -> Any:
    """Load a complete checkpoint. Check that the next random numbers of a script are those without loading."""
    model, after = states_after(load)
    assert after == states_after(lambda: None)[1]
    return model


def check_sharded(
    step: Step, tokens: Tokens, ways: dict[str, dict[str, int]], source: Path, target: Path, tp: int
) -> None:
    """Load from transformers' file; check the step and the tokens; save a sharded checkpoint."""
    cls: Any = registry.find(step.name)
    model = loaded_without_draws(partial(cls.from_pretrained_with_parallel, source, tp, gather_logits=True)).train()
    model.save_pretrained_with_parallel(target)
    lines = step_differences(model, step) + token_differences(model, step.batch, tokens, ways)
    own = model.state_dict()
    for name, full in step.buffers.items():
        lines += differences(name, local_tensor(own[name]), own_part(model, name, full), TOLERANCE)
    assert not lines, "\n".join(lines)


def check_stages(
    step: Step, tokens: Tokens, ways: dict[str, dict[str, int]], source: Path, target: Path, pp: int
) -> None:
    """Load the sharded checkpoint; check two micro-batches' loss and gradients, and tokens; save a merged one."""
    cls: Any = registry.find(step.name)
    if cls.plan(step.config).pipeline.single_stage_reason:
        with pytest.raises(ValueError, match="pipeline_parallel_size=2 is more than 1"):
            cls.from_pretrained_with_parallel(source, 1, pp)
        pp = 1
    size = 2 if cls.loss_is_mean else pipelines.ROWS
    load = partial(cls.from_pretrained_with_parallel, source, 1, pp, micro_batch_size=size)
    model = loaded_without_draws(load).train()
    model.save_pretrained_with_parallel(target, save_with_merging=True)
    lines = [] if pp == 1 else loop_differences(model, step) + token_differences(model, step.batch, tokens, ways)
    assert not lines, "\n".join(lines)


def check_both(step: Step, tokens: Tokens, ways: dict[str, dict[str, int]], folder: Path, n: int) -> None:
    """Run both checks in one process group."""
    check_sharded(step, tokens, ways, folder / "whole", folder / "split", n)
    check_stages(step, tokens, ways, folder / "split", folder / "merged", n)


def check_type(
    pool: Pool, folder: Path, variant: str, seed: int, tp: int, pp: int, ways: dict[str, dict[str, int]]
) -> None:
    name, config = zoo.main_head(variant), zoo.config(variant)
    make_batch = (
        zoo.batch if variant.startswith("rag") else pipelines.batch
    )  # no micro-batches, and several rows for one
    generates = hasattr(zoo.original(name), "generate") and not name.endswith("ForCTC")  # takes other arguments
    for own_seed in range(seed, seed + 8):
        step = saved_step(name, config, own_seed, make_batch(name, config, own_seed), folder / "whole")
        tokens = generate_tokens(reference_model(name, config, own_seed), step.batch, ways) if generates else {}
        if not depend_on_rounding(name, config, own_seed, step.batch, tokens, ways):
            break
    else:
        pytest.fail(f"in eight draws, the blocks of keys that {name} chooses depend on rounding")
    if tp == pp:
        pool.run(tp, check_both, step, tokens, ways, folder, tp)
    else:
        pool.run(tp, check_sharded, step, tokens, ways, folder / "whole", folder / "split", tp)
        pool.run(pp, check_stages, step, tokens, ways, folder / "split", folder / "merged", pp)
    assert (folder / "merged/model.safetensors").read_bytes() == (folder / "whole/model.safetensors").read_bytes()
    assert (folder / "merged/config.json").read_bytes() == (folder / "whole/config.json").read_bytes()


@pytest.mark.drawn(45)
@pytest.mark.stacks
@pytest.mark.parametrize("model_type", zoo.cases([*zoo.MORE, *zoo.ODD]))
def test_main_class_matches_transformers_on_two_ranks_and_two_stages(
    pool: Pool, tmp_path: Path, model_type: str, seed: int
) -> None:
    if (reason := zoo.fault_of_release(model_type)) is not None:
        pytest.skip(reason)
    check_type(pool, tmp_path, model_type, seed, 2, 2, GREEDY)


@pytest.mark.zoo
@pytest.mark.parametrize("model_type", [*zoo.MORE, *zoo.ODD])
def test_main_class_matches_transformers_on_three_ranks_with_beams(
    pool: Pool, tmp_path: Path, model_type: str, seed: int
) -> None:
    check_type(pool, tmp_path, model_type, seed, 3, 2, GREEDY if model_type in zoo.WITHOUT_BEAMS else BEAMS)


def initial_differences(name: str, config: PreTrainedConfig, seed: int) -> list[str]:
    """Return lines for computed values that differ from transformers, and for random values that were not drawn."""
    cls: Any = registry.find(name)
    own = cls.from_config_with_parallel(config, seed=seed, dtype=torch.float64)
    originals = []
    for each in (seed, seed + 1):
        torch.manual_seed(each)
        originals.append(zoo.original(name)._from_config(config, dtype=torch.float64))
    tensors = [{**full_parameters(model), **dict(model.named_buffers())} for model in (own, *originals)]
    lines = []
    for key, found in tensors[0].items():
        first, second = (each[key].double() for each in tensors[1:])
        if torch.equal(first, second):
            lines += differences(key, found.double(), first, 1e-6)  # some are computed in the default dtype
        elif not found.isfinite().all() or (found.numel() > 4 and not 0.1 < found.std() / first.std() < 10):
            lines.append(f"{key}: not drawn")
    return lines


def check_initial(name: str, config: PreTrainedConfig, full: dict[str, Tensor], seed: int, tp: int, pp: int) -> None:
    cls: Any = registry.find(name)
    plan = cls.plan(config)
    if plan.pipeline.single_stage_reason if pp > 1 else plan.single_rank_reason or (plan.max_ranks() or tp) < tp:
        return
    model = cls.from_config_with_parallel(config, tp, pp, seed=seed, dtype=torch.float64)
    lines = []
    sharded = [(name, buffer) for name, buffer in model.named_buffers() if name in model.layouts]
    for own_name, param in [*model.named_parameters(), *sharded]:
        canonical = model.stage.full_names.get(own_name, own_name) if model.stage is not None else own_name
        layout = model.layouts[own_name]
        expected = layout.shard(full[canonical], model.mesh.rank_in(layout))
        lines += differences(own_name, param.detach(), expected, 0)
    assert not lines, "\n".join(lines)


@pytest.mark.parametrize(
    "variant",
    [
        each if each in ("mamba2", "minimax", "qwen3_next") else pytest.param(each, marks=pytest.mark.zoo)
        for each in [*zoo.FOUNDING, *zoo.MORE, *zoo.ODD]
    ],
)
def test_initial_weights_do_not_depend_on_the_parallel_sizes(pool: Pool, variant: str, seed: int) -> None:
    """Values that transformers does not draw (time steps, slopes, ones) match it."""
    lines = []
    for name in [zoo.main_head(variant)] if variant in zoo.ODD else zoo.heads(variant):
        config = zoo.config_of(name, zoo.config(variant))
        lines += [f"{name}: {line}" for line in initial_differences(name, config, seed)]
    assert not lines, "\n".join(lines)
    name, config = zoo.main_head(variant), zoo.config(variant)
    cls: Any = registry.find(name)
    whole = cls.from_config_with_parallel(config, seed=seed, dtype=torch.float64)
    full = {**dict(whole.named_buffers()), **full_parameters(whole)}
    for tp, pp in ((2, 1), (1, 2)):
        pool.run(2, check_initial, name, config, full, seed, tp, pp)


def test_weights_of_a_model_in_a_model_are_drawn_by_its_own_configuration(seed: int) -> None:
    """The standard deviation of MLP weights follows the inner model's width, as in transformers' class."""
    config = zoo.config("blt")
    config.global_config.hidden_size = config.decoder_config.hidden_size_global = 120
    config.global_config.encoder_cross_output_size, own = 48, registry.find("BltForCausalLM")
    drawn = own.from_config_with_parallel(config, seed=seed)  # type: ignore[attr-defined]
    weights = [layer.mlp.gate_proj.weight for layer in drawn.model.global_transformer.layers]
    assert abs(torch.cat(weights).std().item() * 120**0.5 - 1) < 0.05  # by the decoder's width: over 2


def check_heads(steps: list[Step], folder: Path) -> None:
    lines = []
    for step in steps:
        cls: Any = registry.find(step.name)
        model = cls.from_pretrained_with_parallel(folder / step.name, 2, gather_logits=True).train()
        torch.manual_seed(0)  # Wav2Vec2 samples its targets
        lines += [f"{step.name}: {line}" for line in step_differences(model, step)]
    assert not lines, "\n".join(lines)


def test_electra_pretraining_loss_over_masked_positions_matches_on_stages(
    pool: Pool, tmp_path: Path, seed: int
) -> None:
    name, config = "ElectraForPreTraining", zoo.config("electra")
    batch = pipelines.batch(name, config, seed)
    batch["labels"] = (batch["labels"] > 50).double()
    step = saved_step(name, config, seed, batch, tmp_path / "whole")
    pool.run(2, check_stages, step, {}, {}, tmp_path / "whole", tmp_path / "merged", 2)


@pytest.mark.parametrize(
    ("model_type", "name", "changes"),
    [("bart", "BartForCausalLM", {}), ("hubert", "HubertForCTC", {"ctc_loss_reduction": "mean"})],
)
def test_losses_with_their_own_denominator_match_on_stages(
    pool: Pool, tmp_path: Path, seed: int, model_type: str, name: str, changes: dict[str, Any]
) -> None:
    config = zoo.config(model_type, **changes)
    step = saved_step(name, config, seed, pipelines.batch(name, config, seed), tmp_path / "whole")
    pool.run(2, check_stages, step, {}, {}, tmp_path / "whole", tmp_path / "merged", 2)


@pytest.mark.zoo
@pytest.mark.parametrize(
    "name",
    [
        *("DetrForObjectDetection", "DetrForSegmentation", "YolosForObjectDetection"),
        *("TableTransformerForObjectDetection", "ConditionalDetrForObjectDetection", "ConditionalDetrForSegmentation"),
        *("DeformableDetrForObjectDetection", "RTDetrForObjectDetection", "RTDetrV2ForObjectDetection"),
        *("GroundingDinoForObjectDetection", "MMGroundingDinoForObjectDetection"),
    ],
)
def test_losses_of_matched_objects_match_transformers(pool: Pool, tmp_path: Path, seed: int, name: str) -> None:
    pytest.importorskip("scipy")  # transformers' matching uses it
    model_type = next(kind for kind in registry.ARCHITECTURES if name in registry.model_classes(kind))
    config = zoo.config(model_type, **({"auxiliary_loss": True} if "Detr" in name else {}))
    batch, generator = zoo.batch(name, config, seed), torch.Generator().manual_seed(seed)
    batch["labels"] = [  # type: ignore[assignment]
        {
            "class_labels": torch.randint(2, (count,), generator=generator),
            "boxes": torch.rand(count, 4, generator=generator, dtype=torch.float64),
            "masks": torch.randint(2, (count, 64, 64), generator=generator).double(),
        }
        for count in (2, 1, 3)
    ]
    step = saved_step(name, config, seed, batch, tmp_path / name)
    assert "loss" in step.outputs
    pool.run(2, check_heads, [step], tmp_path)


def masks_while_training(name: str, config: PreTrainedConfig, batch: dict[str, Any]) -> list[Tensor]:
    np.random.seed(dist.get_rank())
    cls: Any = registry.find(name)
    model = cls.from_config_with_parallel(config, 2, seed=0)
    return pipelines.gather_from_all_ranks(model(**batch).last_hidden_state.detach())


@pytest.mark.parametrize("model_type", ["wav2vec2", "wavlm", "wav2vec2-conformer"])
def test_specaugment_masks_and_dropped_blocks_are_equal_on_all_ranks(pool: Pool, seed: int, model_type: str) -> None:
    name = zoo.base(model_type)
    masks = {"apply_spec_augment": True, "mask_time_prob": 0.5, "mask_time_length": 2}
    config = zoo.config(model_type, **masks, layerdrop=0.5)
    batch = zoo.batch(name, config, seed, torch.float32)
    for first, second in pool.run(2, masks_while_training, name, config, batch):
        assert torch.equal(first, second)


def slopes_with_dropout(config: PreTrainedConfig, batch: dict[str, Any]) -> Any:
    """Return a directional derivative by gradient and by finite differences, and the outputs of every rank."""
    cls: Any = registry.find("ReformerModel")
    model = cls.from_config_with_parallel(config, 2, seed=0, dtype=torch.float64)
    weight, ways = model.embeddings.position_embeddings.embedding.weight, []

    def value(step: float) -> Tensor:
        torch.manual_seed(1)  # the same masks again
        with torch.no_grad():
            weight[:, ::2] += step
        with lifted_casts():
            ways.append(model(**batch).last_hidden_state)
        return (ways[-1] ** 3).sum()

    value(0.0).backward()  # type: ignore[no-untyped-call]
    difference = value(1e-7) - value(-2e-7)
    return weight.grad[:, ::2].sum().item(), difference.item() / 2e-7, pipelines.gather_from_all_ranks(ways[0].detach())


def test_reformer_dropout_masks_are_equal_in_its_reversible_backward_pass(pool: Pool, seed: int) -> None:
    config = zoo.config("reformer", dropout=0.3, hash_seed=None)
    batch = zoo.batch("ReformerModel", config, seed)
    for slope, difference, (first, second) in pool.run(2, slopes_with_dropout, config, batch):
        assert torch.equal(first, second)
        assert slope == pytest.approx(difference, rel=1e-4)


def test_quantized_ibert_allows_one_rank_only() -> None:
    config = zoo.config("ibert", quant_mode=True)
    plan = IBertModel.plan(config)
    plan.check_ranks("IBertModel", config, 1)
    with pytest.raises(ValueError, match="tensor_parallel_size=2 is more than 1, all that IBertModel allows"):
        plan.check_ranks("IBertModel", config, 2)


OPTIONS: dict[str, dict[str, Any]] = {
    "wavlm": {"do_stable_layer_norm": True, "feat_extract_norm": "layer"},
    "swinv2": {"num_heads": [4, 3]},
    "laguna": {"num_attention_heads_per_layer": [4, 6], "gating": "per-element"},
    "gemma3n_text": {"intermediate_size": [35, 31, 17, 35]},
    "mvp": {"use_prompt": True, "prompt_length": 5, "prompt_mid_dim": 11},
}
"""Options that change the local shard of each block."""


def check_options(step: Step, tp: int) -> None:
    model = parallel_model(step.name, step.config, step.weights, tp, gather_logits=True, attn_implementation="eager")
    lines = step_differences(model, step)
    assert not lines, "\n".join(lines)


@pytest.mark.stacks
@pytest.mark.parametrize("model_type", OPTIONS)
def test_options_of_a_type_match_transformers_on_ranks(pool: Pool, model_type: str, seed: int) -> None:
    name, config = zoo.main_head(model_type), zoo.config(model_type, **OPTIONS[model_type])
    batch = {**zoo.batch(name, config, seed), "output_attentions": True}
    step = reference_step(name, config, seed, batch=batch, attn_implementation="eager")
    for tp in (2, 3):
        pool.run(tp, check_options, step, tp)


def test_minimax_m3_with_other_numbers_of_index_heads_allows_one_rank_only() -> None:
    config = zoo.config("minimax_m3_vl_text", index_n_heads=3)
    cls: Any = registry.find("MiniMaxM3VLForCausalLM")
    with pytest.raises(ValueError, match="is more than 1, all that MiniMaxM3VLForCausalLM allows: index_n_heads=3 is "):
        cls.plan(config).check_ranks(cls.__name__, config, 2)


def check_shared_choices(given: pipelines.Case, expected: tuple[tuple[int, int], ...]) -> None:
    model = pipelines.case_on_stages(given, 1, 2, micro_batch_size=2)
    assert model.stage.ranges == expected
    assert abs(pipelines.run_micro_batches(model, given.batches[0][0]) - given.loss[0]) < 1e-10
    lines = pipelines.gradient_differences(model, given.gradients)
    assert not lines, "\n".join(lines)
    message = r"blocks_per_stage=\[1, 3\]: a stage would begin with block 1.* begin with some of the blocks \[0, 3\]"
    with pytest.raises(ValueError, match=message):
        pipelines.case_on_stages(given, 1, 2, blocks_per_stage=[1, 3])


@pytest.mark.stacks
def test_stages_of_glm_5_begin_with_blocks_that_choose_their_positions(pool: Pool, seed: int) -> None:
    changes = {"num_hidden_layers": 4, "mlp_layer_types": 4 * ["dense"]}
    config = zoo.config("glm_moe_dsa", indexer_types=["full", "shared", "shared", "full"], **changes)
    given = pipelines.case("GlmMoeDsaForCausalLM", config, seed)
    pool.run(2, check_shared_choices, given, ((0, 3), (3, 4)))


def test_glm_5_has_as_many_stages_as_blocks_that_choose_their_positions(pool: Pool) -> None:
    config = zoo.config("glm_moe_dsa", indexer_types=["full", "shared"])
    pool.run(2, refuse_more_stages_than_choices, config)


def refuse_more_stages_than_choices(config: PreTrainedConfig) -> None:
    cls: Any = registry.find("GlmMoeDsaForCausalLM")
    with pytest.raises(
        ValueError, match=r"pipeline_parallel_size=2: a stage of Glm.* can only begin with block 0, since .*; use 1$"
    ):
        cls.from_config_with_parallel(config, pipeline_parallel_size=2)


@pytest.mark.parametrize("name", ["Wav2Vec2ForSequenceClassification", "WhisperForAudioClassification"])
def test_weighted_layer_sum_allows_one_stage_only(name: str) -> None:
    cls: Any = registry.find(name)
    config = zoo.config(cls.config_class.model_type, use_weighted_layer_sum=True)
    with pytest.raises(ValueError, match=f"is more than 1, all that {name} allows: with use_weighted_layer_sum=True"):
        cls.from_config_with_parallel(config, pipeline_parallel_size=2)


@pytest.mark.parametrize("name", ["CLIPTextModel", "CLIPVisionModelWithProjection"])
def test_clip_towers_load_from_a_full_clip_checkpoint(tmp_path: Path, seed: int, name: str) -> None:
    reference_model("CLIPModel", zoo.config("clip"), seed).save_pretrained(tmp_path)
    cls: Any = registry.find(name)
    expected = zoo.original(name).from_pretrained(tmp_path).state_dict()
    own = cls.from_pretrained_with_parallel(tmp_path).state_dict()
    assert own.keys() == expected.keys() and all(torch.equal(own[key], expected[key]) for key in own)


def test_fused_luke_returns_the_logits_that_have_no_labels(tmp_path: Path, seed: int) -> None:
    name, config = "LukeForMaskedLM", zoo.config("luke")
    batch, right = zoo.batch(name, config, seed), reference_model(name, config, seed)
    right.save_pretrained(tmp_path)
    cls: Any = registry.find(name)
    model = cls.from_pretrained_with_parallel(tmp_path).fuse()
    both = model(**batch)
    assert both.logits is both.entity_logits is None
    for labels, logits, other in (("labels", "logits", "entity_logits"), ("entity_labels", "entity_logits", "logits")):
        given = {key: value for key, value in batch.items() if key != labels}
        output = model(**given)
        torch.testing.assert_close(output[logits], right(**given)[logits])
        assert other not in output


def test_every_model_type_has_a_test_configuration() -> None:
    assert set(zoo.FOUNDING) | zoo.MORE.keys() == registry.ARCHITECTURES.keys()


@pytest.mark.parametrize("model_type", registry.ARCHITECTURES)
def test_registry_lists_every_class_of_transformers(model_type: str) -> None:
    names = set(registry.model_classes(model_type))
    modeling = sys.modules[zoo.original(min(names)).__module__]
    theirs = {name for name in modeling.__all__ if inspect.isclass(cls := getattr(modeling, name)) and _is_model(cls)}
    assert names <= theirs
    assert theirs - names <= zoo.LEFT_OUT.get(model_type, set()), theirs - names


@pytest.mark.parametrize(
    "task",
    [
        *("ImageClassification", "VideoClassification", "SemanticSegmentation", "ObjectDetection"),
        *("ZeroShotObjectDetection", "UniversalSegmentation", "MaskGeneration"),
        *("AudioClassification", "AudioFrameClassification", "AudioXVector", "CTC", "SpeechSeq2Seq", "TextToWaveform"),
    ],
)
def test_auto_classes_of_images_and_sounds_find_the_classes_of_the_zoo(task: str) -> None:
    cls: Any = getattr(auto, f"AutoModelFor{task}")
    names = getattr(modeling_auto, cls.mapping)
    kinds = [kind for kind in registry.ARCHITECTURES if names.get(kind) in registry.names(kind)]
    assert kinds and all(cls.class_for(zoo.config(kind)) is registry.find(names[kind]) for kind in kinds)


def test_newer_model_types_are_left_out_and_named_in_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Build the tables as with an older transformers."""
    import oslo_models
    from oslo_models.auto import AutoModelForCausalLM

    assert set(registry.ARCHITECTURES) == {kind for kind in registry._ALL if kind in CONFIG_MAPPING}
    monkeypatch.setattr(registry, "INSTALLED", (5, 19))
    monkeypatch.setattr(registry, "NEWER", {"bailing_hybrid": "BailingHybrid"})
    known = {kind: prefix for kind, prefix in registry._ALL.items() if kind != "bailing_hybrid"}
    monkeypatch.setattr(registry, "ARCHITECTURES", known)
    needed = "bailing_hybrid needs transformers 5.20 or newer, and "
    with pytest.raises(AttributeError, match=f"oslo_models cannot import BailingHybridForCausalLM: {needed}"):
        registry.find("BailingHybridForCausalLM")
    assert registry.needed_release("llama") == ""
    config = types.SimpleNamespace(model_type="bailing_hybrid", get_text_config=lambda: config)
    with pytest.raises(ValueError, match=f"AutoModelForCausalLM: {needed}"):
        AutoModelForCausalLM.class_for(config)
    with pytest.raises(ValueError, match=needed):
        cli._list(argparse.Namespace(model_types=["llama", "bailing_hybrid"]))
    monkeypatch.setattr(registry, "ARCHITECTURES", dict.fromkeys(["llama"], "Llama"))
    monkeypatch.setattr(oslo_models, "ARCHITECTURES", registry.ARCHITECTURES)
    assert "LlamaModel" in dir(oslo_models) and not {name for name in dir(oslo_models) if name.startswith("Bailing")}


OWN_BASES = ("DeepseekOcr2TextModel", "GraniteDoclingTextModel", "InternVLVisionModel", "QianfanOCRVisionModel")
"""Parts of composite models with a base class of their own."""


def test_base_classes_of_transformers_are_exported() -> None:
    """``isinstance(model, GPT2PreTrainedModel)``, for every architecture with such a class."""
    without = []
    for model_type in registry.ARCHITECTURES:
        name = next((name for name in registry.names(model_type) if name.endswith("PreTrainedModel")), None)
        if name is None:
            without.append(model_type)
            continue
        base: Any = registry.find(name)
        classes = {**registry.model_classes(model_type)}
        for name_of_part in OWN_BASES:
            classes.pop(name_of_part, None)
        assert all(issubclass(cls, base) for cls in classes.values())
        assert name not in registry.model_classes(model_type)
    expected = ["encoder-decoder", "minimax_m3_vl", "qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"]
    expected += ["speech-encoder-decoder", "vision-encoder-decoder"]
    assert without == [model_type for model_type in expected if model_type in registry.ARCHITECTURES]


def test_names_that_oslo_1_exported_are_there() -> None:
    import oslo_models

    kinds = {
        "GPT2": ("Model", "LMHeadModel", "DoubleHeadsModel", "ForSequenceClassification", "ForTokenClassification"),
        "GPTNeo": ("Model", "ForCausalLM", "ForSequenceClassification"),
        "GPTJ": ("Model", "ForCausalLM", "ForSequenceClassification"),
    }
    layers = {"GPT2": ("Attention", "MLP", "Block"), "GPTNeo": ("SelfAttention", "MLP"), "GPTJ": ("Attention", "MLP")}
    for prefix, heads in kinds.items():
        for kind in (*heads, *layers[prefix], "Config", "PreTrainedModel"):
            assert getattr(oslo_models, f"{prefix}{kind}").__name__ == f"{prefix}{kind}"
    with pytest.raises(ImportError, match="oslo_models has no GPT2LayerPolicy"):
        from oslo_models import GPT2LayerPolicy  # noqa: F401


def _is_model(cls: type) -> bool:
    return issubclass(cls, PreTrainedModel) and "pretrained" not in cls.__name__.lower()


@pytest.mark.skipif(registry.INSTALLED < (5, 24), reason="the table is of the newest release")
def test_documentation_has_the_current_support_table() -> None:
    """`make table` writes it."""
    text = (ROOT / "docs/models.md").read_text()
    assert support.update_table(text) == text


SHARDED_BY_TRANSFORMERS = [
    model_type for model_type in registry.ARCHITECTURES if CONFIG_MAPPING[model_type].base_model_tp_plan
]
"""Model types with a tensor-parallel plan in transformers."""


@pytest.mark.parametrize("model_type", SHARDED_BY_TRANSFORMERS)
def test_plan_shards_every_module_that_the_plan_of_transformers_shards(model_type: str) -> None:
    name = (zoo.lm_heads(model_type) or zoo.heads(model_type))[0]
    config = zoo.config_of(name, zoo.config(model_type))
    with torch.device("meta"):
        model: Any = registry.find(name)._from_config(config)  # type: ignore[attr-defined]
    plan, prefix = model.plan(config), model._prefix()
    layouts = layouts_of(model, plan, prefix, type(model).head_plan, 2)
    assert type(config).base_model_tp_plan
    for pattern, style in type(config).base_model_tp_plan.items():
        if pattern.startswith(("vision_adapter", "vision_projection")):  # Muse Glimmer's projector is replicated
            continue
        if style in ("local_params", "moe_identity_expert"):  # without parameters, or with separate plan lines for them
            continue
        weights = re.compile(re.escape(prefix + pattern).replace(r"\*", r"\d+") + r"(\.weight|\.\w+_proj)?")
        matches = [name for name in layouts if weights.fullmatch(name)]
        assert matches or pattern.endswith(tuple(plan.optional)), pattern
        entries = [entry for kind in plan.kinds_of_blocks() for entry in kind.items()]
        if style == "replicated_with_grad_allreduce":
            assert any(isinstance(entry, HeadNorm) and pattern.endswith(key) for key, entry in entries), pattern
        elif style == "mla_kv_a_proj":  # replicated, with the gradient of the rotary key summed
            assert any(isinstance(entry, Latent) for _, entry in entries), pattern
        else:
            assert not [name for name in matches if layouts[name].dim is None], (pattern, style)
