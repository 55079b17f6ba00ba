"""Models of text and images: composed plans, and batches whose rows have different numbers of images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedConfig

from oslo_models import AutoModelForImageTextToText, AutoModelForMultimodalLM, registry

from support import zoo
from support.float64 import lifted_casts
from support.generation import GREEDY, Tokens, generate_tokens, token_differences
from support.pipelines import loop_differences, model_on_stages
from support.pool import Pool
from support.reference import (
    TOLERANCE,
    Step,
    differences,
    parallel_model,
    reference_model,
    reference_step,
    step_differences,
)


def check_batches(steps: list[Step], tp: int) -> None:
    lines = []
    for step in steps:
        model = parallel_model(step.name, step.config, step.weights, tp, gather_logits=True)
        lines += step_differences(model, step)
    assert not lines, "\n".join(lines)


@pytest.mark.drawn(5)
@pytest.mark.parametrize("model_type", zoo.WITH_IMAGES)
def test_text_alone_and_images_in_other_rows_match_transformers(pool: Pool, model_type: str, seed: int) -> None:
    if (reason := zoo.fault_of_release(model_type)) is not None:
        pytest.skip(reason)
    name, config = zoo.main_head(model_type), zoo.config(model_type)
    batch = zoo.batch(name, config, seed)
    backwards = {key: value.flip(0) for key, value in batch.items()}  # rows with 2, 0 and 1 images
    batches = (zoo.text_only(config, batch), backwards)
    steps = [reference_step(name, config, seed, batch=each) for each in batches]
    for tp in (2, 3):
        pool.run(tp, check_batches, steps, tp)


ONE_STAGE = (
    *("deepseek_ocr2", "emu3", "florence2", "granite4_vision", "hunyuan_vl", "hy_v4_vl", "inkling2", "inkling2_loop"),
    *("minicpm_ocr", "minicpmv4_6", "minicpmv4_7", "mllama", "molmo2", "qwen4_exp", "step3p7"),
)
"""Types that are not split into stages."""


def twice(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a batch with its rows twice: micro-batches of two rows then have 1, 3 and 2 images."""
    return {key: torch.cat((value, value)) for key, value in batch.items()}


def check_on_stages(step: Step, tokens: Tokens, alone: Step, sizes: tuple[int, int]) -> None:
    tp, pp = sizes
    model = model_on_stages(step.name, step.config, step.weights, tp, pp, micro_batch_size=2)
    towers = tuple(f"model.{name}." for name in type(model).plan(step.config).modules_of_towers())
    assert (model.stage.index == 0) == any(name.startswith(towers) for name, _ in model.named_parameters())
    lines = loop_differences(model.train(), step) + token_differences(model, step.batch, tokens, GREEDY)
    model.zero_grad()
    lines += loop_differences(model.train(), alone)
    assert not lines, "\n".join(lines)


@pytest.mark.drawn(4)
@pytest.mark.stacks
@pytest.mark.parametrize("model_type", [each for each in zoo.WITH_IMAGES if each not in ONE_STAGE])
def test_micro_batches_with_images_of_their_rows_match_transformers(pool: Pool, model_type: str, seed: int) -> None:
    if (reason := zoo.fault_of_release(model_type)) is not None:
        pytest.skip(reason)
    name, config = zoo.main_head(model_type), zoo.config(model_type)
    batch = twice(zoo.batch(name, config, seed))
    step, alone = (reference_step(name, config, seed, batch=each) for each in (batch, zoo.text_only(config, batch)))
    tokens = generate_tokens(reference_model(name, config, seed), batch, GREEDY)
    for sizes in ((1, 2), (2, 2)):
        pool.run(sizes[0] * sizes[1], check_on_stages, step, tokens, alone, sizes)


def check_refusals(name: str, config: PreTrainedConfig, batch: dict[str, Tensor]) -> None:
    cls: Any = registry.find(name)
    with pytest.raises(ValueError, match="a stage would begin with block 1 of Qwen3VLForConditionalGeneration"):
        cls.from_config_with_parallel(config, 1, 2, blocks_per_stage=[1, config.text_config.num_hidden_layers - 1])
    model = cls.from_config_with_parallel(config, 1, 2, seed=0, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"pixel_values has \d+ patches, and image_grid_thw counts"):
        model(**{**batch, "pixel_values": batch["pixel_values"][1:]})
    fewer = {"pixel_values": batch["pixel_values"][:16], "image_grid_thw": batch["image_grid_thw"][:1]}
    with pytest.raises(ValueError, match="does not fit input_ids: the 1 images have"):
        model(**{**batch, **fewer})
    prompt = {key: value for key, value in batch.items() if key != "labels"}
    wrong = prompt["pixel_values"][:, 1:]  # the tower fails, on the first stage
    with pytest.raises(RuntimeError) as caught:
        model.generate(**{**prompt, "pixel_values": wrong}, max_new_tokens=2)
    assert (model.stage.index == 0) != ("another stage" in str(caught.value))
    assert model.generate(**prompt, max_new_tokens=2).shape[1] == prompt["input_ids"].shape[1] + 2


def test_images_that_stages_cannot_compute_are_refused_on_every_rank(pool: Pool, seed: int) -> None:
    name, config = "Qwen3VLForConditionalGeneration", zoo.config("qwen3_vl")
    config.text_config.num_hidden_layers, config.vision_config.deepstack_visual_indexes = 4, [0, 1]
    pool.run(2, check_refusals, name, config, zoo.batch(name, config, seed))


def test_ranks_are_limited_by_the_heads_of_the_tower() -> None:
    config = zoo.config("llava")  # 6 heads in the decoder
    cls: Any = registry.find("LlavaForConditionalGeneration")
    plan = cls.plan(config)
    assert plan.max_ranks() == 3
    message = r"tensor_parallel_size=4 is more than vision_config.num_attention_heads=3 of LlavaConfig; use 1 to 3"
    with pytest.raises(ValueError, match=message):
        plan.check_ranks(cls.__name__, config, 4)


@pytest.mark.parametrize(
    ("part", "model_type", "message"),
    [
        ("vision_config", "dinat", "AutoModel has no class for 'dinat'"),
        ("text_config", "jetmoe", "JetMoeModel is not supported as a part of .*, since it has attention_groups"),
        ("text_config", "mamba", "MambaModel is not supported .* since it has attention with all heads"),
    ],
)
def test_other_towers_and_decoders_are_refused_by_name(part: str, model_type: str, message: str) -> None:
    config = zoo.config("llava", **{part: {**zoo.MORE.get(model_type, {}), "model_type": model_type}})
    cls: Any = registry.find("LlavaForConditionalGeneration")
    with pytest.raises(ValueError, match=message):
        cls.plan(config)


def as_on_the_hub(name: str) -> str:
    """Return the name of a weight in checkpoints of older releases."""
    name = name.replace("model.language_model.", "language_model.model.")
    return name.replace("model.vision_tower.", "vision_tower.vision_model.").replace("model.multi_modal", "multi_modal")


def load(config: PreTrainedConfig, folder: Path, batch: dict[str, Tensor], logits: Tensor) -> None:
    auto = AutoModelForImageTextToText
    assert auto.class_for(config) is AutoModelForMultimodalLM.class_for(config)
    model = auto.from_pretrained_with_parallel(folder, 2, resize_token_embeddings=107)
    assert model.config.text_config.vocab_size == 107
    with torch.no_grad(), lifted_casts():
        own = model(**batch).logits
    mean = logits.mean(-1, keepdim=True).expand(*logits.shape[:-1], 6)  # new tokens have the mean of the weights
    assert not differences("logits", own, torch.cat((logits, mean), -1), TOLERANCE)
    assert type(auto.from_config_with_parallel(config, 2)) is type(model)


def test_auto_class_loads_and_resizes_a_model_of_text_and_images(pool: Pool, tmp_path: Path, seed: int) -> None:
    name, config = "LlavaForConditionalGeneration", zoo.config("llava")
    full = reference_model(name, config, seed).eval()
    full.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({as_on_the_hub(key): tensor for key, tensor in load_file(file).items()}, file, {"format": "pt"})
    batch = {key: value for key, value in zoo.batch(name, config, seed).items() if key != "labels"}
    with torch.no_grad(), lifted_casts():
        logits = full(**batch).logits
    pool.run(2, load, config, tmp_path, batch, logits)


def load_transposed(name: str, folder: Path, batch: dict[str, Tensor], logits: Tensor) -> None:
    cls: Any = registry.find(name)
    model = cls.from_pretrained_with_parallel(folder, 2, gather_logits=True)
    with torch.no_grad(), lifted_casts():
        assert not differences("logits", model(**batch).logits, logits, TOLERANCE)


def test_experts_that_the_checkpoint_stores_transposed_are_read(pool: Pool, tmp_path: Path, seed: int) -> None:
    """Checkpoints on the hub have ``[experts, in, out]``. transformers transposes where shapes differ."""
    name, config = "Qwen3VLMoeForConditionalGeneration", zoo.config("qwen3_vl_moe")
    full = reference_model(name, config, seed).eval()
    full.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    stacks = [key for key in tensors if ".experts." in key]
    assert len(stacks) == 2 * config.text_config.num_hidden_layers
    save_file({**tensors, **{key: tensors[key].mT.contiguous() for key in stacks}}, file, {"format": "pt"})
    batch = {key: value for key, value in zoo.batch(name, config, seed).items() if key != "labels"}
    with torch.no_grad(), lifted_casts():
        logits = full(**batch).logits
    pool.run(2, load_transposed, name, tmp_path, batch, logits)
