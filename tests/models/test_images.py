"""Models of text and images: composed plans, and batches whose rows have different numbers of images."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedConfig

from oslo_models import AutoModelForImageTextToText, AutoModelForMultimodalLM, initialize, registry
from oslo_models.config.arguments import Arguments
from oslo_models.layers import divided_tower
from oslo_models.layers.divided_tower import DividedTowerModule

from support import zoo
from support.dropout_masks import RATE
from support.float64 import lifted_casts
from support.generation import GREEDY, Tokens, generate_tokens, token_differences
from support.pipelines import loop_differences, model_on_stages
from support.pool import Pool
from support.reference import (
    TOLERANCE,
    Step,
    differences,
    full_gradients,
    full_parameters,
    loss_or_all_outputs,
    parallel_model,
    reference_model,
    reference_step,
    shard_differences,
    step_differences,
    take_step,
    train,
)

DIVIDED: dict[str, Any] = {"tower_parallel": "images"}
UNREAD = tuple(f"{kind}_outputs." for kind in ("image", "video", "vision"))
"""Outputs of towers. The features that the decoder does not read are left out with divided images."""


def ways(model_type: str) -> list[dict[str, Any]]:
    """Return the options of towers that a type supports."""
    return [{}] if model_type in registry.NO_DIVIDED_IMAGES else [{}, DIVIDED]


def check_batches(steps: list[Step], tp: int, options: dict[str, Any]) -> None:
    lines = []
    for step in steps:
        model = parallel_model(step.name, step.config, step.weights, tp, gather_logits=True, **options)
        calls = require_whole_towers(model) if options else Counter()
        lines += step_differences(model, step, optional=UNREAD if options else ())
        assert bool(calls) == (bool(options) and "pixel_values" in step.batch)
    assert not lines, "\n".join(lines)


def require_whole_towers(model: Any) -> Counter[str]:
    """Check that every rank has whole towers. Return counts of their calls."""
    towers = {name: module for name, module in model.named_modules() if isinstance(module, DividedTowerModule)}
    inside = [name for name in model.layouts if name.startswith(tuple(f"{tower}." for tower in towers))]
    assert inside and all(model.layouts[name].dim is None for name in inside)
    calls: Counter[str] = Counter()
    for name, tower in towers.items():
        tower.register_forward_hook(lambda *_, name=name: calls.update([name]))
    return calls


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
        for options in ways(model_type):
            pool.run(tp, check_batches, steps, tp, options)


ONE_STAGE = (
    *("deepseek_ocr2", "emu3", "florence2", "granite4_vision", "hunyuan_vl", "hy_v4_vl", "inkling2", "inkling2_loop"),
    *("minicpm_ocr", "minicpmv4_6", "minicpmv4_7", "mllama", "molmo2", "qwen4_exp", "step3p7"),
)
"""Types that are not split into stages."""


def twice(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a batch with its rows twice: micro-batches of two rows then have 1, 3 and 2 images."""
    return {key: torch.cat((value, value)) for key, value in batch.items()}


def check_on_stages(step: Step, tokens: Tokens, alone: Step, sizes: tuple[int, int], options: dict[str, Any]) -> None:
    tp, pp = sizes
    model = model_on_stages(step.name, step.config, step.weights, tp, pp, micro_batch_size=2, **options)
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
    for sizes, options in (((1, 2), {}), *(((2, 2), options) for options in ways(model_type))):
        pool.run(sizes[0] * sizes[1], check_on_stages, step, tokens, alone, sizes, options)


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


# tower_parallel="images" ----------------------------------------------------------------------------------------------


def check_in_place(step: Step) -> None:
    torch.manual_seed(0)
    model = zoo.original(step.name)._from_config(step.config, dtype=torch.float64)
    model.load_state_dict(step.weights)
    sizes = {"tensor_parallel_size": 2, "gather_logits": True, **DIVIDED}
    initialize(model.train(), {"model_parallelism": sizes})
    calls = require_whole_towers(model)
    lines = step_differences(model, step, optional=UNREAD)
    assert calls and not lines, "\n".join(lines)
    assert type(model.deparallelize()) is zoo.original(step.name)
    assert not any(isinstance(module, DividedTowerModule) for module in model.modules())


def test_initialized_model_divides_images(pool: Pool, seed: int) -> None:
    name, config, batch = rows_of_images("llava", (2, 0, 1), seed)
    pool.run(2, check_in_place, reference_step(name, config, seed, batch=batch))


SEVERAL = ("llava", "qwen2_5_vl", "gemma4")
"""Types with images of one size, of several sizes by patch, and of several sizes with padding."""


def rows_of_images(model_type: str, counts: Sequence[int], seed: int) -> tuple[str, Any, dict[str, Tensor]]:
    """Return a class, its configuration, and rows with these numbers of images."""
    name, config = zoo.main_head(model_type), zoo.config(model_type)
    config.text_config.max_position_embeddings = 64
    if model_type == "gemma4":
        config.vision_config.position_embedding_size = 6
    generator = torch.Generator().manual_seed(seed)
    known, tower, images = zoo.parameters_of_forward(name), config.vision_config, sum(counts)
    ids = torch.randint(3, 90, (len(counts), 40), generator=generator)
    lines = [1 + image % 3 for image in range(images)]
    tokens = iter([4] * images if model_type == "llava" else [2 * line for line in lines])
    for row, count in enumerate(counts):
        start = 4
        for each in islice(tokens, count):
            ids[row, start : start + each] = config.image_token_id
            start += each + 1
    is_image = ids == config.image_token_id
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.masked_fill(is_image, -100)}
    if "mm_token_type_ids" in known:
        given["mm_token_type_ids"] = is_image.long()
    if not images:
        return name, config, given
    if "image_grid_thw" in known:
        given["image_grid_thw"] = torch.tensor([[1, 2 * line, 4] for line in lines])
        shape = (8 * sum(lines), 3 * tower.temporal_patch_size * tower.patch_size**2)
    elif "image_position_ids" in known:  # padded to the most patches
        places = torch.full((images, 6, 4, 2), -1)
        for image, line in enumerate(lines):
            places[image, : 2 * line] = (
                torch.cartesian_prod(torch.arange(2 * line), torch.arange(4)).flip(-1).view(2 * line, 4, 2)
            )
        given["image_position_ids"] = places.flatten(1, 2)
        shape = (images, 24, 48)
    else:
        shape = (images, 3, tower.image_size, tower.image_size)
    return name, config, {**given, "pixel_values": torch.rand(shape, generator=generator, dtype=torch.float64)}


COUNTS = ((3, 0, 2), (0, 1, 0), (0, 0, 0), (2, 0, 3))


def check_training(
    step: Step, batches: list[dict[str, Tensor]], losses: list[float], trained: dict[str, Tensor], tp: int, more: Any
) -> None:
    model = parallel_model(step.name, step.config, step.weights, tp, gather_logits=True, **DIVIDED, **more)
    lines = step_differences(model, step, optional=UNREAD)
    model.zero_grad()
    own = train(model, batches, "AdamW")
    assert all(abs(loss - right) <= TOLERANCE for loss, right in zip(own, losses, strict=True)), (own, losses)
    lines += shard_differences(model, "trained", full_parameters(model), trained, TOLERANCE)  # type: ignore[arg-type]
    assert not lines, "\n".join(lines)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("model_type", SEVERAL)
def test_ranks_that_divide_images_train_like_transformers(pool: Pool, model_type: str, seed: int) -> None:
    """Five images, fewer images than ranks, no image, and five other ones."""
    found = [rows_of_images(model_type, counts, seed + number) for number, counts in enumerate(COUNTS)]
    (name, config, _), batches = found[0], [batch for _, _, batch in found]
    step, model = reference_step(name, config, seed, batch=batches[0]), reference_model(name, config, seed)
    losses = train(model, batches, "AdamW")
    for tp, more in ((2, {}), (3, {}), (2, {"sequence_parallel": True}), (2, {"context_parallel_size": 2})):
        ranks = tp * more.get("context_parallel_size", 1)
        if "context_parallel_size" not in more or model_type in registry.CONTEXT_PARALLEL:
            pool.run(ranks, check_training, step, batches, losses, full_parameters(model), tp, more)


def check_divided_replicas(step: Step, batches: list[dict[str, Tensor]]) -> None:
    """Each replica has rows of its own, one of them without images."""
    model = parallel_model(step.name, step.config, step.weights, 2, **DIVIDED)
    group, rank = model.mpu.get_data_parallel_group(), model.mpu.get_data_parallel_rank()
    ddp = DistributedDataParallel(model, process_group=group, find_unused_parameters=True)
    with lifted_casts():
        ddp(**batches[rank]).loss.backward()
    own = {name: param.grad for name, param in model.named_parameters(remove_duplicate=False)}
    lines = shard_differences(model, "gradient of", own, step.gradients, TOLERANCE)
    assert not lines, "\n".join(lines)


@pytest.mark.parametrize("model_type", ["llava", "qwen2_5_vl"])
def test_replicas_with_divided_images_match_transformers(pool: Pool, model_type: str, seed: int) -> None:
    found = [rows_of_images(model_type, counts, seed) for counts in ((3, 1), (0, 0))]
    (name, config, _), batches = found[0], [batch for _, _, batch in found]
    model = reference_model(name, config, seed)
    weights = full_parameters(model)
    with lifted_casts():
        (sum(model(**each).loss for each in batches) / 2).backward()
    step = Step(name, config, {}, weights, {}, torch.zeros(()), full_gradients(model))
    pool.run(4, check_divided_replicas, step, batches)


def without_towers(model: Any) -> Any:
    for name, param in model.named_parameters():
        param.requires_grad_("vision_tower" not in name and "visual" not in name)
    return model


def check_frozen(step: Step) -> None:
    model = without_towers(parallel_model(step.name, step.config, step.weights, 2, gather_logits=True, **DIVIDED))
    lines = step_differences(model, step, optional=UNREAD)
    assert not lines, "\n".join(lines)


@pytest.mark.parametrize("model_type", SEVERAL)
def test_frozen_towers_with_divided_images_match_transformers(pool: Pool, model_type: str, seed: int) -> None:
    name, config, batch = rows_of_images(model_type, (2, 0, 1), seed)
    model = reference_model(name, config, seed)
    weights = {**model.state_dict(), **full_parameters(model)}
    outputs, value, inputs = take_step(without_towers(model), batch, loss_or_all_outputs)
    step = Step(name, config, batch, weights, outputs, value, full_gradients(model), inputs)
    pool.run(2, check_frozen, step)


def check_recomputed(name: str, config: PreTrainedConfig, batch: dict[str, Tensor]) -> None:
    cls: Any = registry.find(name)
    gradients = []
    for recomputes in (False, True):
        model = cls.from_config_with_parallel(config, 2, seed=0, dtype=torch.float64, **DIVIDED)
        if recomputes:
            model.gradient_checkpointing_enable()
        model(**batch).loss.backward()
        gradients.append({key: param.grad for key, param in model.named_parameters()})
    alone = cls.from_config_with_parallel(config, seed=0, dtype=torch.float64)
    own = {key: param for key, param in model.named_parameters() if model.layouts[key].dim is None}
    assert all(torch.equal(own[key], param) for key, param in alone.named_parameters() if key in own)
    lines = [line for key, grad in gradients[0].items() for line in differences(key, gradients[1][key], grad, 0.0)]
    assert not lines, "\n".join(lines)


@pytest.mark.parametrize("model_type", ["llava", "qwen2_5_vl"])
def test_blocks_of_divided_towers_are_computed_again(pool: Pool, model_type: str, seed: int) -> None:
    pool.run(2, check_recomputed, *rows_of_images(model_type, (2, 0, 1), seed))


@pytest.mark.parametrize("model_type", SEVERAL)
def test_lora_of_towers_with_divided_images_trains_as_on_one_process(pool: Pool, model_type: str, seed: int) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    from support.adapters import check_run, reference_run

    modules = r".*(q_proj|v_proj|qkv|fc1|linear)$" if model_type != "gemma4" else r".*(language_model.*v_proj|linear)$"
    name, config, _ = rows_of_images(model_type, (1,), seed)
    config.vision_feature_layer = -1  # every adapter has a gradient
    run = reference_run(name, config, peft.LoraConfig(r=3, target_modules=modules), seed)
    pool.run(2, check_run, run, 2, 1, DIVIDED)


def check_compiled(name: str, config: PreTrainedConfig, batch: dict[str, Tensor]) -> None:
    cls: Any = registry.find(name)
    model = cls.from_config_with_parallel(config, 2, seed=0, dtype=torch.float32, **DIVIDED)
    floats = {key: value.float() if value.is_floating_point() else value for key, value in batch.items()}
    weight = dict(model.named_parameters())["model.vision_tower.embeddings.patch_embedding.weight"]
    gradients = []
    for call in (model, torch.compile(model, backend="aot_eager")):
        model.zero_grad()
        call(**floats).loss.backward()
        gradients.append(weight.grad.clone())
    assert gradients[0].any()
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)


@pytest.mark.zoo
def test_compiled_model_divides_images(pool: Pool, seed: int) -> None:
    pool.run(2, check_compiled, *rows_of_images("llava", (2, 0, 1), seed))


def save_divided(name: str, folder: Path, split: Path, whole: Path) -> None:
    cls: Any = registry.find(name)
    model = cls.from_pretrained_with_parallel(folder, 3, **DIVIDED)
    model.save_pretrained_with_parallel(split)
    model.save_pretrained_with_parallel(whole, save_with_merging=True)


def load_divided(name: str, folders: list[Path], batch: dict[str, Tensor], logits: Tensor) -> None:
    cls: Any = registry.find(name)
    for folder in folders:
        for options in ({}, DIVIDED):
            model = cls.from_pretrained_with_parallel(folder, 2, resize_token_embeddings=107, **options)
            with torch.no_grad(), lifted_casts():
                own = model(**batch).logits[..., : logits.shape[-1]]
            assert not differences(f"logits of {folder.name}, {options}", own, logits, TOLERANCE)
        fused = cls.from_pretrained_with_parallel(folder, 2, **DIVIDED).fuse()
        with torch.no_grad(), lifted_casts():
            assert not differences("fused", fused(**batch).logits, logits, TOLERANCE)


@pytest.mark.parametrize("model_type", SEVERAL)
def test_whole_towers_are_saved_and_read_by_either_way(pool: Pool, tmp_path: Path, model_type: str, seed: int) -> None:
    name, config, batch = rows_of_images(model_type, (2, 0, 1), seed)
    del batch["labels"]
    full = reference_model(name, config, seed).eval()
    full.save_pretrained(tmp_path / "full")
    with torch.no_grad(), lifted_casts():
        logits = full(**batch).logits
    folders = [tmp_path / each for each in ("full", "split", "whole")]
    pool.run(3, save_divided, name, *folders)
    again = zoo.original(name).from_pretrained(folders[2], dtype=torch.float64)
    assert not [key for key, value in full.state_dict().items() if not torch.equal(value, again.state_dict()[key])]
    pool.run(2, load_divided, name, folders, batch, logits)


def check_dropout(name: str, config: PreTrainedConfig, batch: dict[str, Tensor]) -> None:
    """The masks of a rank's images differ from those of other ranks, and the decoder draws common ones."""
    cls: Any = registry.find(name)
    model = cls.from_config_with_parallel(config, 2, seed=0, dtype=torch.float64, **DIVIDED)
    tower: Any = next(module for module in model.modules() if isinstance(module, DividedTowerModule))
    pixels = batch["pixel_values"]
    same = pixels[:1].expand_as(pixels)
    features = tower(same).last_hidden_state
    assert len({float(each.sum()) for each in features}) == len(features)
    loss = model(**batch).loss
    gathered: list[Any] = [None, None]
    torch.distributed.all_gather_object(gathered, (loss.item(), torch.get_rng_state().sum().item()))
    assert gathered[0] == gathered[1]


def test_dropout_of_divided_images_has_masks_of_its_own(pool: Pool, seed: int) -> None:
    name, config, batch = rows_of_images("llava", (3,), seed)
    config.vision_config.attention_dropout = config.text_config.attention_dropout = RATE
    pool.run(2, check_dropout, name, config, batch)


def check_work(name: str, config: PreTrainedConfig, batch: dict[str, Tensor]) -> None:
    """Ranks have equal numbers of patches. Blocks of the tower send nothing, and gradients one message a block."""
    cls: Any = registry.find(name)
    model = cls.from_config_with_parallel(config, 2, seed=0, dtype=torch.float64, **DIVIDED)
    tower: Any = next(module for module in model.modules() if isinstance(module, DividedTowerModule))
    patches, sent = [], Counter[str]()
    tower.patch_embed.register_forward_hook(lambda _, args, __: patches.append(len(args[0])))
    right = divided_tower.reduce_from
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(divided_tower, "reduce_from", lambda *args: sent.update(["sum"]) or right(*args))
        features = tower(batch["pixel_values"], grid_thw=batch["image_grid_thw"]).pooler_output
        assert not sent
        features.square().sum().backward()
    outside = sum(not name.startswith("blocks.") for name, _ in tower.named_parameters())
    assert 0 < sent["sum"] <= len(tower.blocks) + outside
    assert patches == [24]


def test_images_are_divided_by_their_patches(pool: Pool, seed: int) -> None:
    name, config, batch = rows_of_images("qwen2_5_vl", (3,), seed)  # 8, 16 and 24 patches
    pool.run(2, check_work, name, config, batch)


def refuse_divided(name: str, config: PreTrainedConfig, batch: dict[str, Tensor]) -> None:
    cls: Any = registry.find(name)
    model = parallel_model(name, config, {**cls._from_config(config).state_dict()}, 2, **DIVIDED)
    grids = batch["image_grid_thw"].clone()
    grids[-1, 1:] = torch.tensor([3, 8])  # of another shape than the merger needs, on the last rank
    with pytest.raises((RuntimeError, ValueError)):
        model.base_model.get_image_features(batch["pixel_values"], grids)
    model.gradient_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(ValueError, match="cannot be used with reentrant checkpointing"):
        model(**batch)
    model.gradient_checkpointing_disable()
    assert model(**batch).loss.isfinite()
    fully_shard(model.base_model.visual.blocks[0], mesh=model.mesh.device_mesh["dp"])
    with pytest.raises(ValueError, match=r"cannot be used with fully_shard of a .*Block inside of a tower"):
        model(**batch)


def test_refusals_of_divided_images_on_every_rank(pool: Pool, seed: int) -> None:
    name, config, batch = rows_of_images("qwen2_5_vl", (3,), seed)
    pool.run(2, refuse_divided, name, config, batch)


@pytest.mark.parametrize(
    ("model_type", "options", "message"),
    [
        ("llava", {"tower_parallel": "rows"}, 'tower_parallel must be "weights" or "images", got \'rows\''),
        ("llava", {"tensor_parallel_size": 1}, "tensor_parallel_size is 1"),
        ("llama", {}, "does not support LlamaForCausalLM: it has no tower of images"),
        ("voxtral", {}, "does not support Voxtral.*: it has no tower of images"),
        ("llava", {"plan": "derive"}, "cannot be used together with plan"),
        *(
            (kind, {}, f"does not support .*: {re.escape(why)}")
            for kind, why in registry.NO_DIVIDED_IMAGES.items()
            if kind in zoo.WITH_IMAGES
        ),
    ],
)
def test_models_and_options_that_cannot_divide_images_are_refused(
    model_type: str, options: dict[str, Any], message: str
) -> None:
    cls: Any = registry.find(zoo.main_head(model_type))
    arguments = Arguments(**{"tensor_parallel_size": 2, **DIVIDED, **options})
    with pytest.raises(ValueError, match=message):
        arguments.check({})
        arguments.check_config(cls, zoo.config(model_type))
