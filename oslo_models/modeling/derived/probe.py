"""Small random models of the same structure as a model, and inputs for them."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedConfig, PreTrainedModel

from oslo_models.modeling.derived.derivation import Call, kind_of, templates
from oslo_models.sharding.layer_lists import shorten

_DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers")
_WIDTHS = ("hidden", "intermediate", "embd", "d_model", "ffn", "inner", "d_ff", "d_kv", "head_dim")
_HEADS = ("num_attention_heads", "n_head", "num_heads", "encoder_attention_heads", "decoder_attention_heads")
_HEAD_DIM = 8
_BLOCKS, _VOCABULARY, _PARAMETERS = 2, 128, 4_000_000
"""The sizes of a probe: blocks per stack, vocabulary size, and the parameter count above which layers get narrower."""
_MOST_PARAMETERS = 48_000_000
_INCOMPATIBLE = (ValueError, RuntimeError, AssertionError, ZeroDivisionError)
"""Errors of models with sizes that do not fit."""


class CannotProbeError(ValueError):
    """The model cannot be tested without inputs from the user."""


def small_model(cls: type[Any], config: PreTrainedConfig) -> PreTrainedModel:
    """Return a random model with few blocks and a small vocabulary, and narrow layers if ``config`` has wide layers.

    Raises:
        CannotProbeError: the smallest such model is large.
    """
    shallow = copy.deepcopy(config)
    for each in _configs(shallow):
        _cut(each)
    found: list[tuple[int, PreTrainedConfig]] = []  # a vocabulary with tokens of images at its end stays large
    for divisor in (1, 4, 16, 64):
        narrow = copy.deepcopy(shallow)
        for each in _configs(narrow):
            _narrow(each, divisor)
        try:
            with torch.device("meta"):
                count = sum(param.numel() for param in cls._from_config(copy.deepcopy(narrow)).parameters())
        except _INCOMPATIBLE:
            continue
        found.append((count, narrow))
        if count <= _PARAMETERS:
            break
    for count, narrow in sorted(found, key=itemgetter(0)):
        if count > _MOST_PARAMETERS:
            raise CannotProbeError(
                f"the smallest {cls.__name__} that could be constructed to try its plan has {count:,} "
                "parameters: pass a configuration with fewer or narrower layers, or plan="
            )
        try:
            return _randomized(_made(cls, narrow))
        except _INCOMPATIBLE:
            continue
    return _randomized(_made(cls, shallow))


def _made(cls: type[Any], config: PreTrainedConfig) -> Any:
    """Construct a full model in float32 from a configuration. For a parallel class, this shards nothing."""
    return cls._from_config(copy.deepcopy(config), dtype=torch.float32)


def copy_of_model(model: nn.Module) -> nn.Module:
    """Return a random model with the structure and sizes of ``model``, which may be on the meta device.

    Buffers on the meta device have no values, so the model is then constructed from its configuration.

    Raises:
        ValueError: buffers are on the meta device, and the configuration does not construct this model.
    """
    if without_values := [name for name, buffer in model.named_buffers() if buffer.is_meta]:
        made = _made(type(model), model.config) if isinstance(model, PreTrainedModel) else None
        if made is None or _shapes(made) != _shapes(model):
            raise ValueError(
                f"{without_values[0]} of this {type(model).__name__} is a buffer on the meta device, so it has no "
                "values to try a plan with: construct the model on the CPU"
            )
        return _randomized(made)
    empty: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        made = (
            torch.empty_like(tensor, device="cpu") if tensor.is_meta or tensor.requires_grad else tensor.cpu().clone()
        )
        empty[id(tensor)] = nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made
    return _randomized(copy.deepcopy(model, empty))


def _shapes(model: nn.Module) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in (*model.named_parameters(), *model.named_buffers())}


def same_structure(one: nn.Module, other: nn.Module) -> bool:
    """Whether two models have the same modules, except for sizes and the number of blocks."""

    def structure(model: nn.Module) -> set[tuple[str, str, tuple[str, ...]]]:
        keys = templates(model)
        return {(keys[name], *kind_of(module)) for name, module in model.named_modules() if name}

    return structure(one) == structure(other)


@torch.no_grad()
def _randomized(model: nn.Module) -> Any:
    """Convert a model to float64, disable dropout and randomise all parameters: zeros and ones would hide mistakes.

    Experts are computed one by one, since ``grouped_mm`` has no float64.
    """
    model.double()
    for name, param in model.named_parameters():
        noise = torch.randn_like(param)
        if param.dim() > 1:
            param.copy_(noise / (param.numel() / param.shape[0]) ** 0.5)
        else:
            param.copy_(0.2 * noise + (0.0 if name.endswith("bias") else 1.0))
    for module in model.modules():
        for key, value in vars(module).items():
            if "drop" in key and isinstance(value, float):
                setattr(module, key, 0.0)
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        config = getattr(module, "config", None)
        for each in _configs(config) if isinstance(config, PreTrainedConfig) else ():
            for key, value in vars(each).items():
                if "drop" in key and isinstance(value, float):
                    setattr(each, key, 0.0)
            if hasattr(each, "_experts_implementation_internal"):
                each._experts_implementation_internal = "eager"
    return model


def _configs(config: PreTrainedConfig) -> list[PreTrainedConfig]:
    """Return a configuration and all nested configurations."""
    inner = [value for value in vars(config).values() if isinstance(value, PreTrainedConfig)]
    return [config, *(each for value in inner for each in _configs(value))]


def _cut(config: Any) -> None:
    """Reduce the number of blocks, keeping all block types, and the vocabulary size."""
    shorten(config, _DEPTHS, _BLOCKS)
    special = [
        value
        for key, value in vars(config).items()
        if key.endswith(("_token_id", "_token_index")) and isinstance(value, (int, list))
    ]
    ids = [number for value in special for number in (value if isinstance(value, list) else [value])]
    for name in ("vocab_size", "n_vocab"):
        if isinstance(size := getattr(config, name, None), int):
            setattr(config, name, min(size, max(_VOCABULARY, *(number + 1 for number in ids), 0)))


def _narrow(config: Any, divisor: int) -> None:
    """Divide layer widths by ``divisor``. Keep the number of heads, and at least `_HEAD_DIM` features per head."""
    heads = next((getattr(config, key) for key in _HEADS if isinstance(getattr(config, key, None), int)), 1)
    for key, value in list(vars(config).items()):
        if not any(part in key for part in _WIDTHS) or not isinstance(value, int) or isinstance(value, bool):
            continue
        if key in _DEPTHS or value % divisor or divisor == 1:
            continue
        least = _HEAD_DIM if key in ("head_dim", "d_kv") else heads * _HEAD_DIM
        setattr(config, key, min(value, max(value // divisor, least)))


# Inputs ---------------------------------------------------------------------------------------------------------------


def calls_with(inputs: Any) -> list[Call]:
    """Return calls with the user's inputs, and with random inputs of another batch size.

    Args:
        inputs: a tensor, a tuple of positional arguments, or a dictionary of keyword arguments.
    """
    if isinstance(inputs, Mapping):
        return calls_of((), inputs)
    return calls_of(tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,), {})


def calls_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Call]:
    """Return the calls of `calls_with` for positional and keyword arguments."""
    args, kwargs = _random(args, dict(kwargs))
    tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
    found: list[Call] = [partial(_call, args, kwargs)]
    if tensors and len({each.shape[:1] for each in tensors}) == 1 and tensors[0].dim() > 0:

        def more(x: Tensor) -> Tensor:
            return torch.cat((x, x.flip(0)))[: x.shape[0] + 1]

        found.append(partial(_call, *(tree_map_only(Tensor, more, each) for each in (args, kwargs))))
    return found


def _random(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with random values in floating-point tensors.

    Zeros stay zeros, since models recognise padding by them, such as missing images of a row. A tensor of zeros only is
    taken for a shape.
    """

    def random(x: Tensor) -> Tensor:
        x = x.detach().cpu()
        if not x.is_floating_point():
            return x
        drawn = torch.randn(x.shape, dtype=torch.float64)
        return drawn.masked_fill(x == 0, 0.0) if x.any() else drawn

    made: Any = tree_map_only(Tensor, random, (args, kwargs))
    return made


def _call(args: Sequence[Any], kwargs: Mapping[str, Any], model: nn.Module) -> Any:
    own: Any = tree_map_only(Tensor, Tensor.clone, (tuple(args), dict(kwargs)))
    return model(*own[0], **own[1])


def calls_of_transformers(model: PreTrainedModel) -> list[Call]:
    """Return calls of a transformers model, with inputs that fit its configuration."""
    main = model.main_input_name
    config: Any = model.config
    if main == "pixel_values":
        size = getattr(config, "image_size", 32)
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        shape = (2, getattr(config, "num_channels", 3), height, width)
        return calls_with({main: torch.randn(shape)})
    if main == "input_values":
        return calls_with({main: torch.randn(2, 800)})
    vocab = getattr(config.get_text_config(), "vocab_size", 2)
    found = []
    for rows, length in ((2, 8), (3, 5)):
        ids = torch.randint(min(3, vocab - 1), vocab, (rows, length))
        inputs = {"input_ids": ids}
        if config.is_encoder_decoder:
            inputs["decoder_input_ids"] = ids.flip(1)
        found += calls_with(inputs)[:1]
        mask = torch.ones_like(ids)
        mask[0, length - 2 :] = 0
        found += calls_with({**inputs, "attention_mask": mask})[:1]
    return found
