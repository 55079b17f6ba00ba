"""Batches of text, images and videos."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from oslo_models.media.items import KINDS, divide_media

from support import zoo

BY_PATCH = (
    *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "exaone4_5"),
    *("hyperclovax_vision_v2", "kimi_k25", "lfm3_vl", "minimax_m3_vl"),
)
BY_IMAGE = {"llava_next_video": (10, 2), "llava_onevision": (10, 3), "video_llava": (4, 10)}
"""Types with tokens of tiles or frames: the tokens of an image, and of a video of two frames."""
TYPES = tuple(kind for kind in (*BY_PATCH, *BY_IMAGE) if kind in zoo.MORE)
ITEMS = (("image", "video"), (), ("video", "video"))
"""Kinds of the items of each row."""


def batch_of(model_type: str, name: str, config: Any, seed: int) -> dict[str, Tensor]:
    """Return a batch whose rows have the items of `ITEMS`, with frames of 4 tokens and one to two frames a video."""
    generator = torch.Generator().manual_seed(seed)
    length = 40
    ids = torch.randint(3, 90, (len(ITEMS), length), generator=generator)
    mask, types = torch.ones_like(ids), torch.zeros_like(ids)
    mask[2, :3] = 0  # without images, transformers counts positions from the padding on
    token = {"image": config.image_token_id, "video": config.video_token_id}
    frames: dict[str, list[int]] = {"image": [], "video": []}
    for row, kinds in enumerate(ITEMS):
        at = 4
        for kind in kinds:
            count = 1 if kind == "image" else 2 - len(frames[kind]) % 2
            frames[kind].append(count)
            if model_type in BY_IMAGE:
                sizes = [BY_IMAGE[model_type][kind == "video"]]
            else:  # models from Qwen3-VL on have the time between frames
                sizes = [4] * count if model_type.startswith("qwen3") else [4 * count]
            if model_type == "kimi_k25":  # takes the mean of the frames
                sizes = [4]
            for size in sizes:
                ids[row, at : at + size], types[row, at : at + size] = token[kind], 1 + (kind == "video")
                at += size + 1
    labels = ids.masked_fill((types > 0) | (mask == 0), -100)
    given = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    if model_type in BY_IMAGE:
        tiles = (5,) if hasattr(config, "image_grid_pinpoints") else ()
        images = torch.randn(1, *tiles, 3, 16, 16, generator=generator, dtype=torch.float64)
        videos = torch.randn(3, 2, 3, 16, 16, generator=generator, dtype=torch.float64)
        given |= {"image_sizes": torch.tensor([[16, 16]])} if tiles else {}
        return {**given, "pixel_values": images, "pixel_values_videos": videos}
    tower = config.vision_config
    side = tower.patch_size
    shape = (3, side, side) if model_type == "kimi_k25" else (3 * tower.temporal_patch_size * side**2,)
    for kind, values, grid in (
        ("image", "pixel_values", "image_grid_thw"),
        ("video", "pixel_values_videos", "video_grid_thw"),
    ):
        given[grid] = torch.tensor([[count, 4, 4] for count in frames[kind]])
        given[values] = torch.randn(16 * sum(frames[kind]), *shape, generator=generator, dtype=torch.float64)
    known = zoo.parameters_of_forward(name)
    return {**given, "mm_token_type_ids": types} if "mm_token_type_ids" in known else given


def configured(model_type: str) -> tuple[str, Any]:
    name, config = zoo.main_head(model_type), zoo.config(model_type)
    config.text_config.max_position_embeddings = 64
    config.video_token_id = 96
    return name, config


def rows_of(batch: dict[str, Tensor], config: Any) -> list[dict[str, Tensor]]:
    """Return the rows of a batch, each with its own images and videos."""
    names, parts = divide_media(batch, len(ITEMS), 1, config)
    text = {name: value for name, value in batch.items() if name not in names}
    return [{**{name: value[row] for name, value in text.items()}, **part} for row, part in enumerate(parts)]


def collate(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Join rows. Their images and videos are concatenated."""
    media = [name for kind in KINDS for name in kind.arguments]
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0] if name not in media}
    given = {name: [row[name] for row in rows if name in row] for name in media}
    return {**batch, **{name: torch.cat(values) for name, values in given.items() if values}}
