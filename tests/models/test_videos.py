"""Models of text, images and videos: rows with different numbers of each, on ranks and pipeline stages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from oslo_models import registry
from oslo_models.media.items import KINDS, items_of_rows

from support import zoo
from support.generation import GREEDY, Tokens, generate_tokens, token_differences
from support.pipelines import loop_differences, model_on_stages
from support.pool import Pool
from support.reference import Step, parallel_model, reference_model, reference_step, step_differences
from support.videos import TYPES, batch_of, configured


def check(step: Step, tp: int, options: dict[str, Any]) -> None:
    model = parallel_model(step.name, step.config, step.weights, tp, gather_logits=True, **options)
    lines = step_differences(model, step, optional=("image_outputs.", "video_outputs.") if options else ())
    assert not lines, "\n".join(lines)


def check_on_stages(step: Step, tokens: Tokens, sizes: tuple[int, int]) -> None:
    tp, pp = sizes
    model = model_on_stages(step.name, step.config, step.weights, tp, pp, micro_batch_size=1)
    lines = loop_differences(model.train(), step) + token_differences(model, step.batch, tokens, GREEDY)
    assert not lines, "\n".join(lines)


@pytest.mark.drawn(2)
@pytest.mark.stacks
@pytest.mark.parametrize("model_type", TYPES)
def test_videos_beside_images_match_transformers(pool: Pool, model_type: str, seed: int) -> None:
    reason = zoo.fault_of_release(model_type) or zoo.not_computed(f"{model_type}-videos")
    if reason is not None:
        pytest.skip(reason)
    name, config = configured(model_type)
    batch = batch_of(model_type, name, config, seed)
    step = reference_step(name, config, seed, batch=batch)
    for options in ({}, {"tower_parallel": "images"})[: 1 + (model_type not in registry.NO_DIVIDED_IMAGES)]:
        pool.run(2, check, step, 2, options)
    tokens = generate_tokens(reference_model(name, config, seed), batch, GREEDY)
    for sizes in ((1, 2), (2, 2)):
        pool.run(sizes[0] * sizes[1], check_on_stages, step, tokens, sizes)


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "llava_onevision"])
def test_videos_belong_to_rows_in_order(model_type: str, seed: int) -> None:
    name, config = configured(model_type)
    batch = batch_of(model_type, name, config, seed)
    assert [items_of_rows(kind, batch, config) for kind in KINDS[:2]] == [[1, 0, 0], [1, 0, 2]]
    moved = {**batch, "input_ids": batch["input_ids"].clone()}
    moved["input_ids"][0, -1] = config.video_token_id
    with pytest.raises(ValueError, match="pixel_values_videos"):
        items_of_rows(KINDS[1], moved, config)


def refuse(name: str, config: Any, batch: dict[str, Tensor]) -> None:
    cls: Any = registry.find(name)
    model = cls.from_config_with_parallel(config, 1, 2, seed=0, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"pixel_values_videos has \d+ patches, and video_grid_thw counts"):
        model(**{**batch, "pixel_values_videos": batch["pixel_values_videos"][1:]})


def test_videos_that_do_not_fit_are_refused_on_every_rank(pool: Pool, seed: int) -> None:
    name, config = configured("qwen2_5_vl")
    pool.run(2, refuse, name, config, batch_of("qwen2_5_vl", name, config, seed))
