"""Counts the tokens of images that models divide into tiles of the tower's size."""

from __future__ import annotations

from fractions import Fraction
from math import sqrt
from typing import Any

import torch


def tokens_of_tiles(size: tuple[int, int], config: Any, is_alone: bool) -> int:
    """Return the number of placeholder tokens of an image: of its thumbnail, and of its lines of patches.

    The lines have as many patches as the image has without its padding, and a token at the end.

    Args:
        size: height and width of the image in pixels.
        config: configuration of the model, with ``image_grid_pinpoints``.
        is_alone: whether the image is divided. LLaVA-OneVision shrinks the images of a row with several.

    Source: ``pack_image_features`` in transformers, which works on features.
    """
    from transformers.models.llava_next.modeling_llava_next import get_anyres_image_grid_shape, unpad_image

    tower = config.vision_config
    side = int(tower.image_size // tower.patch_size * Fraction(getattr(config, "downsample_rate", None) or 1))
    if not is_alone:
        return side * side + 1
    rows, columns = get_anyres_image_grid_shape(size, config.image_grid_pinpoints, tower.image_size)
    lines, length = unpad_image(torch.empty(1, rows * side, columns * side), size).shape[1:]
    if (kind := getattr(config, "vision_aspect_ratio", None)) is not None:
        excess = sqrt(lines * length / (int(kind.removeprefix("anyres_max_")) * side * side))
        if excess > 1.1:
            lines, length = int(lines // excess), int(length // excess)
    return int(side * side + lines * (length + 1))
