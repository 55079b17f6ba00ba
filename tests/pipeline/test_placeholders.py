"""Placeholders for modules of other stages: their attributes and outputs, and every class that needs them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import type_before_parametrizations
from transformers import PreTrainedConfig
from transformers import initialization as init

from oslo_models import registry
from oslo_models.pipeline.placeholders import OutputKind, Placeholder, make_placeholder

from support import pipelines, zoo
from support.float64 import lifted_casts
from support.pool import Pool
from support.reference import (
    TOLERANCE,
    Step,
    differences,
    full_gradients,
    full_parameters,
    reference_model,
    saved_step,
    tensors,
)

CPU = torch.device("cpu")


# One placeholder ------------------------------------------------------------------------------------------------------


class Table(nn.Module):
    """Looks up positions in a buffer, as sinusoidal embeddings do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weights", torch.ones(7, 4, dtype=torch.float64), persistent=False)
        self.inner = nn.Sequential(nn.Linear(4, 6, dtype=torch.float64), nn.LayerNorm(6, dtype=torch.float64))

    def forward(self, mask: Tensor, past: int = 0) -> tuple[Tensor, dict[str, Tensor]]:
        positions = mask.cumsum(-1) - 1 + past
        return self.inner(self.weights[positions]), {"positions": positions}


@pytest.mark.parametrize(
    "module",
    [
        nn.Embedding(9, 4, padding_idx=1),
        nn.Linear(4, 6, bias=False, dtype=torch.bfloat16),
        nn.LayerNorm(5, eps=1e-3),
        nn.Conv1d(2, 4, 3, groups=2),
        nn.utils.parametrizations.weight_norm(nn.Conv1d(2, 4, 3), dim=2),
        nn.BatchNorm1d(3),
        Table(),
    ],
    ids=lambda module: type(module).__name__,
)
def test_placeholder_has_type_and_attributes_of_its_module(module: nn.Module) -> None:
    made = make_placeholder(module, CPU)
    assert isinstance(made, Placeholder) and not list(made.parameters()) and not made.state_dict()
    attributes = ("embedding_dim", "num_embeddings", "padding_idx", "in_features", "out_features", "normalized_shape")
    for (name, own), (_, part) in zip(made.named_modules(), module.named_modules(), strict=False):
        for attribute in (*attributes, "eps", "training", "groups", "kernel_size"):
            assert getattr(own, attribute, None) == getattr(part, attribute, None), (name, attribute)
        for leaf in ("weight", "bias", "weights", "running_mean", "num_batches_tracked"):
            there, expected = getattr(own, leaf, None), getattr(part, leaf, None)
            assert (there is None) == (expected is None), (name, leaf)
            if there is not None and expected is not None:
                assert (there.shape, there.dtype, there.device) == (expected.shape, expected.dtype, expected.device)
                assert there.untyped_storage().nbytes() == there.element_size()
    kind = type_before_parametrizations(module)
    assert isinstance(made, kind) and type(made).__name__ == kind.__name__


def test_placeholder_is_skipped_by_initialization() -> None:
    made: Any = make_placeholder(nn.Linear(3, 4), CPU)
    with torch.no_grad(), init.guard_torch_init_functions():
        init.normal_(made.weight)
        nn.init.ones_(made.bias)
        made.reset_parameters()
    assert not made.weight.any() and not made.bias.any()


def test_placeholder_follows_dtype_and_device_of_the_model() -> None:
    model = nn.Sequential(make_placeholder(nn.Embedding(9, 4), CPU), nn.Linear(4, 4))
    model.to(torch.float16)
    table: Any = model[0]
    assert table.weight.dtype == torch.float16 and table.weight.shape == (9, 4)
    assert table(torch.zeros(2, 3, dtype=torch.long)).dtype == torch.float16
    with torch.device("meta"):
        late = nn.Sequential(make_placeholder(nn.Embedding(9, 4), CPU))
    table = late.to_empty(device=CPU)[0]
    assert table.weight.device == CPU and not table.weight.any()


def test_placeholder_returns_zeros_its_input_or_the_received_tensor() -> None:
    table: Any = make_placeholder(Table(), CPU)
    mask = torch.ones(2, 5, dtype=torch.long)
    values, more = table(mask, past=1)
    assert values.shape == (2, 5, 6) and values.dtype == torch.float64 and not values.any()
    assert more["positions"].shape == (2, 5) and more["positions"].dtype == torch.long
    arrived = torch.randn(2, 5, 6)
    table.arrived = arrived
    assert torch.equal(table(mask), arrived) and isinstance(table(mask), tuple)  # once
    added = make_placeholder(nn.Embedding(9, 4), CPU, OutputKind.ADDEND)
    assert added(mask).shape == (2, 5, 1)
    norm = make_placeholder(nn.LayerNorm(6), CPU, OutputKind.INPUT)
    assert norm(arrived) is arrived
    assert torch.equal(copy.deepcopy(norm)(arrived), arrived)


# Stages ---------------------------------------------------------------------------------------------------------------

CONFIGURED: list[tuple[str, str, dict[str, Any]]] = [
    ("clip", "CLIPTextModel", {}),
    ("clip", "CLIPTextModelWithProjection", {}),
    ("clip", "CLIPForImageClassification", {}),
    ("clip", "CLIPModel", {}),
    ("distilbert", "DistilBertForMaskedLM", {"sinusoidal_pos_embds": True}),
    ("big_bird", "BigBirdForQuestionAnswering", {}),
    ("wav2vec2", "Wav2Vec2Model", {}),
    ("wav2vec2", "Wav2Vec2Model", {"do_stable_layer_norm": True, "feat_extract_norm": "layer", "add_adapter": True}),
    ("hubert", "HubertModel", {"feat_proj_layer_norm": False}),
    ("openai-gpt", "OpenAIGPTDoubleHeadsModel", {}),
    ("modernbert", "ModernBertForMaskedLM", {}),
    ("deberta", "DebertaForTokenClassification", {}),
]


def check_configured(step: Step, folder: Path, tp: int, blocks: list[int] | None) -> dict[str, Tensor]:
    """Load transformers' file; check parameters, loss and gradients, or outputs; save one file; reinitialise."""
    cls: Any = registry.find(step.name)
    size = 2 if cls.loss_is_mean else pipelines.ROWS
    options: dict[str, Any] = {"blocks_per_stage": blocks}
    model = cls.from_pretrained_with_parallel(folder / "whole", tp, 2, micro_batch_size=size, **options).train()
    lines = pipelines.stage_differences(model, "weight", pipelines.stage_parameters(model), step.weights, 0.0)
    model.save_pretrained_with_parallel(folder / "merged", save_with_merging=True)
    lines += pipelines.loop_differences(model, step)
    anew = cls.from_config_with_parallel(step.config, tp, 2, dtype=torch.float64, seed=1, **options)
    alone = cls.from_config_with_parallel(step.config, dtype=torch.float64, seed=1)
    expected = dict(alone.named_parameters(remove_duplicate=False))
    lines += pipelines.stage_differences(anew, "initial", pipelines.stage_parameters(anew), expected, 0.0)
    assert not lines, "\n".join(lines)
    return expected


def check_step(pool: Pool, step: Step, folder: Path, tp: int, blocks: list[int] | None = None) -> None:
    pool.run(2 * tp, check_configured, step, folder, tp, blocks)
    for file in ("model.safetensors", "config.json"):
        assert (folder / "merged" / file).read_bytes() == (folder / "whole" / file).read_bytes()


@pytest.mark.drawn(8)
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(("variant", "name", "changes"), CONFIGURED)
def test_stages_match_one_process_with_configured_classes(
    pool: Pool, tmp_path: Path, seed: int, variant: str, name: str, changes: dict[str, Any], tp: int
) -> None:
    config = zoo.config_of(name, zoo.config(variant, **changes))
    batch = pipelines.batch(name, config, seed)
    check_step(pool, saved_step(name, config, seed, batch, tmp_path / "whole"), tmp_path, tp)


@pytest.mark.parametrize(
    ("variant", "name", "option", "blocks"),
    [
        ("wav2vec2", "Wav2Vec2ForCTC", "layerdrop", [1, 1]),
        ("hubert", "HubertForCTC", "layerdrop", [1, 1]),
        ("whisper", "WhisperForConditionalGeneration", "encoder_layerdrop", [1, 3]),
        ("speech_to_text", "Speech2TextForConditionalGeneration", "encoder_layerdrop", [1, 3]),
    ],
)
def test_layerdrop_keeps_received_hidden_states(
    pool: Pool, tmp_path: Path, seed: int, variant: str, name: str, option: str, blocks: list[int]
) -> None:
    config = zoo.config(variant, **{option: 1.0})
    step = saved_step(name, config, seed, pipelines.batch(name, config, seed), tmp_path / "whole")
    check_step(pool, step, tmp_path, 1, blocks)


def reseed(module: nn.Module, args: Any) -> None:
    """Reseed in a hook of the quantizer: before it, a stage draws fewer numbers than one process with all blocks."""
    torch.manual_seed(0)


def check_features(
    config: PreTrainedConfig, weights: dict[str, Tensor], batch: dict[str, Any], full: dict[str, Any], tp: int
) -> None:
    """Check the loss of a training step; gradients also reach the first stage through the features."""
    model = pipelines.model_on_stages("Wav2Vec2ForPreTraining", config, weights, tp, 2, micro_batch_size=pipelines.ROWS)
    model.quantizer.register_forward_pre_hook(reseed)
    loss = pipelines.run_micro_batches(model.train(), batch)
    lines = pipelines.gradient_differences(model, full["gradients"])
    assert (loss - full["loss"]).abs() < TOLERANCE and not lines, "\n".join(lines)


@pytest.mark.parametrize("tp", [1, 2])
def test_wav2vec2_pretraining_sends_features_to_the_last_stage(pool: Pool, seed: int, tp: int) -> None:
    name, config = "Wav2Vec2ForPreTraining", zoo.config("wav2vec2", num_hidden_layers=4)
    model, batch = reference_model(name, config, seed), pipelines.batch(name, config, seed)
    weights = full_parameters(model)
    model.quantizer.register_forward_pre_hook(reseed)
    with lifted_casts():
        loss = model(**batch).loss
        loss.backward()
    gradients = full_gradients(model)
    extractor = "wav2vec2.feature_extractor.conv_layers.0.conv.weight"
    assert gradients[extractor] is not None and gradients[extractor].any()
    pool.run(2 * tp, check_features, config, weights, batch, {"loss": loss.detach(), "gradients": gradients}, tp)


def check_outputs(
    name: str,
    config: PreTrainedConfig,
    folder: Path,
    batch: dict[str, Any],
    expected: dict[str, Tensor],
    blocks: list[int] | None,
) -> set[str]:
    """On the last stage: check the returned outputs, and return the names of missing outputs."""
    cls: Any = registry.find(name)
    options: dict[str, Any] = {"attn_implementation": "eager", "blocks_per_stage": blocks}
    model = cls.from_pretrained_with_parallel(folder, 1, 2, micro_batch_size=pipelines.ROWS, **options)
    with torch.no_grad(), lifted_casts():
        (output,) = model(**batch)
    if not model.stage.is_last:
        return set()
    own = dict(tensors(output))
    lines = [line for path in own for line in differences(path, own[path], expected[path], TOLERANCE)]
    assert not lines, "\n".join(lines)
    return expected.keys() - own.keys()


BOTH = ["attentions.0", "hidden_states.0"]
ENCODED = [f"encoder_{kind}.{i}" for kind, count in (("attentions", 2), ("hidden_states", 3)) for i in range(count)]


@pytest.mark.parametrize(
    ("variant", "name", "blocks", "hidden_states", "absent"),
    [
        ("gpt2", "GPT2LMHeadModel", None, True, BOTH),
        ("gpt2", "GPT2DoubleHeadsModel", None, [0, -1], BOTH),
        ("gpt2", "GPT2Model", None, -1, ["attentions.0"]),
        ("ctrl", "CTRLModel", None, True, BOTH),
        ("wav2vec2", "Wav2Vec2Model", None, True, BOTH),
        ("vit", "ViTModel", None, True, BOTH),
        ("bart", "BartModel", [2, 2], True, ENCODED),
        ("bart", "BartModel", [1, 3], True, [f"encoder_{each}" for each in BOTH]),
        ("t5", "T5Model", [3, 1], True, [*ENCODED, *(f"decoder_{each}" for each in BOTH), "cross_attentions.0"]),
        ("clip", "CLIPModel", [1, 3], True, [f"vision_model_output.{each}" for each in BOTH]),
        ("clip", "CLIPTextModelWithProjection", None, True, BOTH),
    ],
)
def test_outputs_of_other_stages_are_none(
    pool: Pool,
    tmp_path: Path,
    seed: int,
    variant: str,
    name: str,
    blocks: list[int] | None,
    hidden_states: Any,
    absent: list[str],
) -> None:
    """Hidden states and attentions keep the positions of the full model; other stages leave ``None``."""
    config = zoo.config_of(name, zoo.config(variant))
    batch = {key: value for key, value in pipelines.batch(name, config, seed).items() if "label" not in key}
    batch.pop("return_loss", None)
    batch |= {"output_hidden_states": hidden_states, "output_attentions": True}
    model = reference_model(name, config, seed, attn_implementation="eager").eval()
    model.save_pretrained(tmp_path)
    with torch.no_grad(), lifted_casts():
        expected = dict(tensors(model(**batch)))
    assert pool.run(2, check_outputs, name, config, tmp_path, batch, expected, blocks)[1] == set(absent)


UNINITIALIZED: list[tuple[str, str, dict[str, Any]]] = [
    ("clip", "CLIPModel", {}),
    ("longformer", "LongformerForMaskedLM", {}),
    ("luke", "LukeForMaskedLM", {}),
    ("openai-gpt", "OpenAIGPTLMHeadModel", {}),
    ("reformer", "ReformerModelWithLMHead", {}),
    ("wav2vec2", "Wav2Vec2ForSequenceClassification", {"use_weighted_layer_sum": True}),
    ("whisper", "WhisperForAudioClassification", {"use_weighted_layer_sum": True}),
]


def check_initialized(name: str, config: PreTrainedConfig, constants: dict[str, float]) -> None:
    """Fill memory with NaN before its use: no parameter keeps a NaN, and constants have their values."""
    cls: Any = registry.find(name)
    torch.use_deterministic_algorithms(True)
    try:
        model = cls.from_config_with_parallel(config, seed=0)
    finally:
        torch.use_deterministic_algorithms(False)
    own = dict(model.named_parameters())
    assert not [key for key, param in own.items() if param.isnan().any()]
    assert not [key for key, value in constants.items() if not torch.equal(own[key], torch.full_like(own[key], value))]


@pytest.mark.parametrize(("variant", "name", "changes"), UNINITIALIZED)
def test_from_config_initializes_every_parameter(pool: Pool, variant: str, name: str, changes: dict[str, Any]) -> None:
    config = zoo.config_of(name, zoo.config(variant, **changes))
    made = zoo.original(name)._from_config(config)
    constants = {
        key: param.flatten()[0].item()
        for key, param in made.named_parameters()
        if len(set(param.flatten().tolist())) == 1
    }
    pool.run(1, check_initialized, name, config, constants)
