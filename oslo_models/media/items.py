"""Assigns the images, videos and sounds of a batch to its rows. Pure functions of a batch and a configuration.

Images belong to rows in order. The placeholder tokens of a row are replaced by the features of its images, so the
number of placeholders tells how many images a row has. Sounds are ``input_features`` or ``input_values``,
``[sounds, ...]``, perhaps with a mask ``[sounds, frames]``. A long sound may have several entries. Batches hold images
in these layouts:

* by patch: ``pixel_values [patches of all images, ...]``, with ``image_grid_thw [images, 3]``;
* by image or by tile: ``pixel_values [images, channels, height, width]``, perhaps with ``image_sizes [images, 2]``;
* by image with its tiles: ``pixel_values [images, tiles, channels, height, width]``, padded to the most tiles of an
  image, with ``image_sizes [images, 2]``;
* by patch of Inkling, each with one token: ``pixel_values [patches of all images, frames, height, width, channels]``;
* by image with its patches: ``pixel_values [images, patches, values]``, padded to the most patches of an image, with
  ``image_position_ids [images, patches, 2]`` or ``spatial_shapes [images, 2]``;
* by row: ``pixel_values [rows, images, ...]``, padded to the most images of a row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any

import torch
from torch import Tensor

from oslo_models.media.sounds import tokens_of_sounds
from oslo_models.media.tiles import tokens_of_tiles


@dataclass(frozen=True)
class Kind:
    """Names of one kind of media, such as images.

    Attributes:
        name: noun for messages.
        modality: name in transformers, as in ``get_image_features``.
        values: argument with the pixels, the spectrograms or the waveforms.
        each: further arguments with one entry per item.
        pixels: arguments among them that only towers read.
        token: attributes of configurations with the id of the placeholder token.
        grid: argument with the patches of each item in time, height and width.
    """

    name: str
    modality: str
    values: str
    each: tuple[str, ...]
    token: tuple[str, ...]
    grid: str = ""
    pixels: tuple[str, ...] = ()

    @property
    def arguments(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.values, self.grid, *self.each)))


PIXEL_MASK = "pixel_attention_mask"
"""Argument that hides pixels or patches of images."""
KINDS = (
    Kind(
        "image",
        "image",
        "pixel_values",
        (
            *("image_sizes", "image_position_ids", "image_merge_sizes", "spatial_shapes", PIXEL_MASK, "pixel_mask"),
            "high_res_pixel_values",
        ),
        ("image_token_id", "image_token_index"),
        "image_grid_thw",
        ("high_res_pixel_values",),
    ),
    Kind(
        "video",
        "video",
        "pixel_values_videos",
        ("second_per_grid_ts", "video_sizes", "video_merge_sizes"),
        ("video_token_id", "video_token_index"),
        "video_grid_thw",
    ),
    Kind(
        "sound",
        "audio",
        "input_features",
        ("feature_attention_mask", "input_features_mask"),
        ("audio_token_id", "audio_token_index"),
    ),
    Kind("sound", "audio", "input_values", ("padding_mask",), ("audio_token_id", "audio_token_index")),
    Kind("sound", "audio", "audio_input_ids", ("audio_input_ids_mask",), ("audio_token_id",)),
)
PIXELS = tuple(name for kind in KINDS for name in (kind.values, *kind.pixels))
"""Arguments that only towers read: pixels, spectrograms and waveforms."""
IMAGE, SOUND = KINDS[0], KINDS[2]
IMAGES_OF_ROWS = "batch_num_images"
"""Argument with the number of images of each row."""


def divide_media(
    batch: Mapping[str, Any], rows: int, size: int, config: Any
) -> tuple[tuple[str, ...], list[dict[str, Any]]]:
    """Divide the media of a batch by its rows.

    Args:
        batch: arguments of a forward.
        rows: rows of the batch.
        size: rows of a part, a divisor of ``rows``.
        config: configuration of the model.

    Returns:
        The names of the divided arguments, and their values in each part. A part without items lacks the arguments.

    Raises:
        ValueError: the items do not fit the placeholder tokens, or it is unknown how to divide them. The message names
            the argument.
    """
    names: list[str] = []
    parts: list[dict[str, Any]] = [{} for _ in range(rows // size)]
    for kind in KINDS:
        if _is_by_row(kind, batch, config):
            given = [name for name in (kind.values, PIXEL_MASK) if batch.get(name) is not None]
            names += given
            for i, (part, count) in enumerate(zip(parts, _placeholders(kind, batch, config, size), strict=True)):
                if count:  # transformers refuses padding alone
                    part.update({name: batch[name][i * size : (i + 1) * size] for name in given})
            continue
        counts = items_of_rows(kind, batch, config)
        if counts is None:
            continue
        bounds = [sum(counts[: i * size]) for i in range(rows // size + 1)]
        given = [name for name in kind.arguments if batch.get(name) is not None]
        names += given
        for part, start, stop in zip(parts, bounds, bounds[1:], strict=False):
            if start < stop:
                part.update({name: _items(kind, name, batch, start, stop) for name in given})
    return tuple(names), parts


def items_of_rows(kind: Kind, batch: Mapping[str, Any], config: Any) -> list[int] | None:
    """Return the number of items of each row, or ``None`` if the batch has none of this kind, or holds them by row.

    Raises:
        ValueError: the items do not fit the placeholder tokens. The message names the argument.
    """
    values = batch.get(kind.values)
    if not isinstance(values, Tensor) or _is_by_row(kind, batch, config):
        return None
    placeholders = _placeholders(kind, batch, config)
    tokens = _tokens_of_items(kind, batch, config, sum(placeholders))
    counts, taken = [], 0
    for row, wanted in enumerate(placeholders):
        start = taken
        while wanted > 0 and taken < len(tokens):
            wanted -= tokens[taken]
            taken += 1
        if wanted:
            raise ValueError(_misfit(kind, values, placeholders, tokens, f"the tokens of row {row} end inside of one"))
        counts.append(taken - start)
    if taken < len(tokens):
        raise ValueError(_misfit(kind, values, placeholders, tokens, f"{len(tokens) - taken} are left over"))
    return counts


def images_of_rows(batch: Mapping[str, Any], config: Any) -> list[dict[str, Any]]:
    """Return the arguments with the images of each row, without padding images; empty for a row without images.

    Raises:
        ValueError: the images do not fit the placeholder tokens.
    """
    _, rows = divide_media(batch, len(batch["input_ids"]), 1, config)
    for row in rows:
        if row and _is_by_row(IMAGE, row, config):
            real = row[IMAGE.values][0].flatten(1).any(-1)  # as transformers counts padding images
            row |= {name: value[:, real] for name, value in row.items()}
    return rows


def places_of_images(ids_1L: Tensor, images: Mapping[str, Any], config: Any) -> list[list[int]]:
    """Return the positions of the placeholder tokens of each image in a row.

    Args:
        ids_1L: the tokens of the row, without padding.
        images: an entry of `images_of_rows`.

    Raises:
        ValueError: the images do not fit the placeholder tokens.
    """
    places = ids_1L[0].eq(placeholder(IMAGE, config)).nonzero().flatten().tolist()
    if _is_by_row(IMAGE, images, config):
        count = images[IMAGE.values].shape[1]
        tokens: Sequence[int] = [len(places) // max(count, 1)] * count
    else:
        tokens = _tokens_of_items(IMAGE, images, config, len(places))
    if sum(tokens) != len(places) or not all(tokens):
        problem = f"{sum(tokens)} are needed"
        raise ValueError(_misfit(IMAGE, images[IMAGE.values], [len(places)], tokens, problem))
    bounds = [0, *accumulate(tokens)]
    return [places[start:stop] for start, stop in zip(bounds, bounds[1:], strict=False)]


def take_images(images: Mapping[str, Any], start: int, stop: int) -> dict[str, Any]:
    """Return the arguments of the images ``start`` to ``stop`` of an entry of `images_of_rows`."""
    if _is_by_row(IMAGE, images):
        return {name: value[:, start:stop] for name, value in images.items()}
    return {name: _items(IMAGE, name, images, start, stop) for name in images}


def _is_by_row(kind: Kind, batch: Mapping[str, Any], config: Any = None) -> bool:
    values, tower = batch.get(kind.values), getattr(config, "vision_config", None)
    if kind.name != "image" or not isinstance(values, Tensor) or getattr(tower, "model_type", "") == "inkling_vision":
        return False  # a patch of Inkling has five dimensions
    return values.dim() == 5 and batch.get("image_sizes") is None


def placeholder(kind: Kind, config: Any) -> int:
    """Return the placeholder token of a kind.

    Raises:
        ValueError: the configuration has none.
    """
    found = next((value for name in kind.token if (value := getattr(config, name, None)) is not None), None)
    if found is None:
        raise ValueError(
            f"{kind.values}: the configuration has no {kind.token[0]}, so the rows of its {kind.name}s are unknown; "
            "leave it out, or use pipeline_parallel_size=1"
        )
    return int(found)


def _placeholders(kind: Kind, batch: Mapping[str, Any], config: Any, size: int = 1) -> list[int]:
    """Return the number of placeholder tokens in each group of ``size`` rows."""
    ids = batch.get("input_ids")
    if not isinstance(ids, Tensor):
        raise ValueError(
            f"{kind.values} without input_ids: the rows of its {kind.name}s are unknown. Pass input_ids, in which each "
            f"{kind.name} has its placeholder tokens"
        )
    is_placeholder = ids.eq(placeholder(kind, config))
    return list(is_placeholder.sum(-1).view(-1, size).sum(-1).tolist())


def _tokens_of_items(kind: Kind, batch: Mapping[str, Any], config: Any, placeholders: int) -> Sequence[int]:
    """Return the number of placeholder tokens of each item."""
    tower: Any = getattr(config, "vision_config", None)
    merged: Any = getattr(config, "spatial_merge_size", None) or getattr(tower, "spatial_merge_size", 1)
    values, grid, sizes = batch[kind.values], batch.get(kind.grid), batch.get("image_sizes")
    if grid is not None:
        patches = grid.prod(-1)
        if int(patches.sum()) != len(values):
            raise ValueError(
                f"{kind.values} has {len(values)} patches, and {kind.grid} counts {int(patches.sum())} in "
                f"{len(grid)} {kind.name}s"
            )
        return list(_tokens_of_grids(kind, grid, batch, config).tolist())
    mask = next((batch[name] for name in kind.each if batch.get(name) is not None), None)
    if kind.name == "sound" and mask is not None:
        if len(mask) != len(values):
            raise ValueError(f"{kind.values} has {len(values)} {kind.name}s, and their mask {len(mask)}")
        return tokens_of_sounds(mask, config)
    shapes = batch.get("spatial_shapes")
    if kind.name == "image" and isinstance(shapes, Tensor):
        return list((shapes // config.downsample_factor).prod(-1).tolist())
    places = batch.get("image_position_ids")
    if kind.name == "image" and isinstance(places, Tensor) and hasattr(tower, "pooling_kernel_size"):
        pooled = 1 if hasattr(tower, "mm_embed_dim") else tower.pooling_kernel_size  # without tower: before projection
        return list((places.ne(-1).all(-1).sum(-1) // pooled**2).tolist())
    if kind.name == "image" and sizes is not None and getattr(config, "image_grid_pinpoints", None):
        sizes = torch.as_tensor(sizes).tolist()
        if len(sizes) != len(values):
            raise ValueError(f"{kind.values} has {len(values)} images with their tiles, and image_sizes {len(sizes)}")
        own = batch.get(IMAGES_OF_ROWS)
        alone = [True] * len(sizes) if own is None else [count == 1 for count in own for _ in range(int(count))]
        return [tokens_of_tiles(size, config, one) for size, one in zip(sizes, alone, strict=True)]
    side = getattr(tower, "patch_size", 0) * merged or getattr(tower, "spatial_scale_factor", 0)  # Apertus 1.5
    if kind.name == "image" and sizes is not None and side:
        return list((torch.as_tensor(sizes) // side).prod(-1).tolist())
    if placeholders % len(values):
        raise ValueError(
            f"{kind.values} has {len(values)} {kind.name}s, and input_ids have {placeholders} placeholder tokens, "
            "which they cannot share evenly"
        )
    return [placeholders // len(values)] * len(values)


def _tokens_of_grids(kind: Kind, grid: Tensor, batch: Mapping[str, Any], config: Any) -> Tensor:
    """Return the number of placeholder tokens of each item that is held by patch."""
    tower: Any = getattr(config, "vision_config", None)
    merged: Any = getattr(config, "spatial_merge_size", None) or getattr(tower, "spatial_merge_size", None)
    merged = merged or getattr(tower, "merge_size", 1)  # Muse Glimmer
    if hasattr(tower, "max_image_size"):  # HunYuan has a token after each line of patches, and may have two around them
        lines, length = (grid[:, 1:] // merged).unbind(-1)
        return grid[:, 0] * lines * (length + 1) + 2 * hasattr(config, "im_newline_id")
    if getattr(tower, "model_type", "") == "inkling2_vision":  # counts squares of patches
        return grid.prod(-1)
    if area := getattr(tower, "merge_kernel_size", None):  # Kimi K2.5 takes the mean of all frames
        return grid[:, 1:].prod(-1) // prod(area)
    merged = batch.get(f"{kind.name}_merge_sizes", merged)  # VideoLLaMA 3
    return grid.prod(-1) // merged**2


def _misfit(kind: Kind, values: Tensor, placeholders: Sequence[int], tokens: Sequence[int], problem: str) -> str:
    return (
        f"{kind.values} of shape {tuple(values.shape)} does not fit input_ids: the {len(tokens)} {kind.name}s have "
        f"{list(tokens)} tokens, the rows have {list(placeholders)} placeholder tokens, and {problem}. Pass the "
        f"{kind.name}s in the order of the rows"
    )


def _items(kind: Kind, name: str, batch: Mapping[str, Any], start: int, stop: int) -> Any:
    """Return the entries of an argument for the items ``start`` to ``stop``."""
    grid = batch.get(kind.grid)
    if name == kind.values and grid is not None:
        patches = grid.prod(-1)
        start, stop = int(patches[:start].sum()), int(patches[:stop].sum())
    return batch[name][start:stop]
