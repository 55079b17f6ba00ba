"""Rejects invalid calls in the caller's process. On a GPU, an index out of range would end the workers.

Legend:
    B: rows.
    L: tokens.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

from torch import Tensor

from oslo_models import cache_argument
from oslo_models.sharding.model_protocol import TransformersModel

SCRIPT = "__main__"
_OTHER_INPUTS = ("inputs_embeds", *cache_argument.NAMES, "encoder_outputs")
"""With one of these inputs, token ids may be missing, and a mask may be longer than the token ids."""
_MOST_OFFSET = 8
"""Maximum extra rows of a position table beyond the configuration. OPT's and BART's tables have two."""
_OF_POSITIONS = re.compile("pos(?!t)|wpe")


def positions_of(config: Any) -> int | None:
    """Return the decoder's number of positions in the configuration of a model."""
    positions: int | None = getattr(
        config.get_text_config(decoder=not config.is_encoder_decoder), "max_position_embeddings", None
    )
    return positions


def check_prompt(given: Mapping[str, Any], positions: int | None, skeleton: Callable[[], Any]) -> None:
    """Raise ``ValueError`` for empty prompts, prompts longer than the model's positions, and masks of another shape.

    Args:
        given: the arguments of `generate`.
        positions: from `positions_of`.
        skeleton: makes the model without weights. Called only for prompts that are too long.
    """
    name = "inputs" if given.get("input_ids") is None else "input_ids"
    ids_BL, mask = given.get(name), given.get("attention_mask")
    if not isinstance(ids_BL, Tensor) or ids_BL.is_floating_point() or ids_BL.dim() != 2:
        return
    if any(given.get(other) is not None for other in _OTHER_INPUTS):
        return
    shape = tuple(ids_BL.shape)
    if 0 in shape:
        what = "prompts" if shape[0] == 0 else "tokens"
        raise ValueError(
            f"{name} has no {what}: its shape is {shape}. Pass at least one token for each prompt; to generate without "
            "a prompt, pass the beginning-of-text token, tokenizer.bos_token_id"
        )
    if isinstance(mask, Tensor) and mask.dim() == 2 and tuple(mask.shape) != shape:
        raise ValueError(
            f"attention_mask has shape {tuple(mask.shape)}, and {name} has {shape}: they have to be equal, with 1 for "
            "each token and 0 for padding. Without padding, leave the mask out"
        )
    if positions and shape[1] > positions and _has_table(skeleton(), positions):
        raise ValueError(
            f"{name} has {shape[1]} tokens, and the model has {positions} positions (max_position_embeddings): "
            "shorten the prompt, such as by the tokenizer's truncation=True, "
            f"max_length={positions}, less the tokens to be generated"
        )


def _has_table(model: TransformersModel, positions: int) -> bool:
    """Return whether the model has a position table of this size. Rotary and relative positions have no limit."""
    return any(
        _OF_POSITIONS.search(f"{name}.{leaf}")
        and value.dim() > 1
        and 0 <= max(value.shape[:-1]) - positions <= _MOST_OFFSET
        for name, module in model.named_modules()
        if not hasattr(module, "make_weights") and not hasattr(module, "make_weight")  # a table that grows
        for leaf, value in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    )


def check_importable(method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` for arguments with classes or functions of the script itself.

    Pickle finds them here in ``__main__``, but ``__main__`` is another module in the workers.
    """
    for name, value in (*((f"argument {index}", each) for index, each in enumerate(args)), *kwargs.items()):
        names = _of_script(value)
        if names:
            raise ValueError(
                f"{name} of {method} cannot be sent to the workers: it holds {', '.join(names)} of the script itself "
                f"({SCRIPT}), which workers cannot import. Move it into a module, such as a file beside the script"
            )


def _of_script(value: Any) -> list[str]:
    found: dict[str, None] = {}

    class Recorder(pickle.Pickler):
        def reducer_override(self, each: Any) -> Any:
            if isinstance(each, (type, FunctionType)) and each.__module__ == SCRIPT:
                found[each.__qualname__] = None
            return NotImplemented

    Recorder(io.BytesIO(), pickle.HIGHEST_PROTOCOL).dump(value)
    return list(found)
