"""Rows with different LoRA adapters in one forward.

Each adapter's low-rank product takes the rows of that adapter only. All ranks compute the adapters in one order,
because the products of sharded layers communicate. ``peft`` has the same feature (``adapter_names``), but computes the
adapters in the order of a set, which differs between processes.

Source: Chen et al., "Punica: Multi-Tenant LoRA Serving", 2023.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from peft.tuners import lora
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, nn

from oslo_models.layers.vocab_parallel import VocabParallelHead

BASE = "__base__"
"""``peft``'s name for rows without an adapter."""
_WAY_OUT = "Call set_adapter, and compute the rows of one adapter at a time"


def _reason_against(model: nn.Module) -> str | None:
    """Return why the rows of a batch cannot have different adapters; ``None`` if they can."""
    for path, module in model.named_modules():
        if isinstance(module, AuxiliaryTrainingWrapper):
            return f"{path} is a copy of a whole layer (modules_to_save)"
        if isinstance(module, BaseTunerLayer) and (reason := _reason_of_layer(path, module)):
            return f"{path} {reason}"
    return None


def _reason_of_layer(path: str, layer: Any) -> str | None:
    if not isinstance(layer, lora.Linear):
        return f"is a {type(layer).__name__}, and only LoRA of linear layers takes the rows of a batch"
    if isinstance(layer.get_base_layer(), VocabParallelHead):
        return "is a head with a sharded vocabulary"
    if "experts" in path.split("."):
        return "gets the tokens of all rows in another order"
    if layer.lora_magnitude_vector or getattr(layer, "lora_variant", None):
        return "has a variant of LoRA, such as DoRA"
    if layer.merged:
        return "has a merged adapter"
    return None


def rows_of_adapters(names: Sequence[str]) -> dict[str, list[int]]:
    """Return the rows of each adapter, in the order of the rows. Rows without an adapter are left out."""
    rows: dict[str, list[int]] = {}
    for row, name in enumerate(names):
        if name != BASE:
            rows.setdefault(name, []).append(row)
    return rows


class RowAdapters:
    """Computes the rows of a batch with different adapters.

    Args:
        model: the model of this rank.

    Attributes:
        names: ``None`` for the active adapters, `BASE`, and the names of all adapters. Equal on all ranks.
        reason: why the rows of a batch cannot have different adapters; ``None`` if they can.
    """

    def __init__(self, model: Any) -> None:
        self.names: list[str | None] = [None, BASE, *(model._peft_config or ())]
        self.reason = _reason_against(model)
        self._layers: list[Any] = [each for each in model.modules() if isinstance(each, lora.Linear)]
        self._device = model.device

    @contextmanager
    def selected(self, names: Sequence[str | None], length: int | None = None) -> Iterator[None]:
        """Compute with an adapter for each row within the block.

        Args:
            names: the adapter of each row; ``None`` for the active adapters of the model. If all are equal, the inputs
                of layers may have any shape.
            length: number of positions of each row.
        """
        active = self._active()
        rows: dict[str, list[int]] = {}
        for row, name in enumerate(names):
            for each in active if name is None else (name,):
                rows.setdefault(each, []).append(row)
        rows.pop(BASE, None)
        whole = all(len(own) == len(names) for own in rows.values())
        found = {name: None if whole else torch.tensor(own, device=self._device) for name, own in rows.items()}
        forward = partial(_forward, found, None if whole else (len(names), length))
        with ExitStack() as stack:
            for layer in self._layers:
                vars(layer)["forward"] = partial(forward, layer)
                stack.callback(vars(layer).pop, "forward")
            yield

    def _active(self) -> Sequence[str]:
        if not self._layers or self._layers[0].disable_adapters:
            return ()
        names: Sequence[str] = self._layers[0].active_adapters
        return names


def _forward(
    rows: Mapping[str, Tensor | None], shape: tuple[int, int | None] | None, layer: Any, x: Tensor, **kwargs: Any
) -> Tensor:
    """Return a layer's output for rows of different adapters.

    Args:
        rows: indices of each adapter's rows; ``None``: all of them.
        shape: number of rows and of their positions; ``None`` if all rows have the same adapters.
    """
    if shape is not None and not (x.dim() > 2 and x.shape[0] == shape[0]):
        if x.dim() != 2 or x.shape[0] != shape[0] * (shape[1] or 0):  # the tokens of all rows, one after another
            raise RuntimeError(
                f"a layer with adapters got an input of shape {tuple(x.shape)} for {shape[0]} rows of {shape[1]} "
                f"positions, so it cannot tell the rows apart. {_WAY_OUT}"
            )
        flat: Tensor = _forward(rows, shape, layer, x.unflatten(0, shape), **kwargs)
        return flat.flatten(0, 1)
    return add_adapters(layer, rows, x, layer.base_layer(x, **kwargs))


def add_adapters(layer: Any, rows: Mapping[str, Any], x: Tensor, output: Tensor) -> Tensor:
    """Return the output of an adapted layer with the low-rank product of each adapter added to its rows.

    Args:
        rows: indices of each adapter's rows in the first dimension of ``x``; ``None``: all of them.
        output: of the base layer.
    """
    for name, own in rows.items():
        if name not in layer.lora_A:
            continue
        down, up = layer.lora_A[name], layer.lora_B[name]
        part, before = (x, output) if own is None else (x[own], output[own])
        product = up(down(part.to(down.weight.dtype))) * layer.scaling[name]
        added = (before + product).to(output.dtype)
        output = added if own is None else output.index_copy(0, torch.as_tensor(own, device=x.device), added)
    return output


class MixesRows(nn.Module):
    """Mixin for LoRA on sharded linear layers: computes the adapters of ``adapter_names`` in one order on all ranks.

    It precedes ``peft``'s class.
    """

    def forward(self, x: Tensor, *args: Any, adapter_names: Sequence[str] | None = None, **kwargs: Any) -> Any:
        if adapter_names is None:
            return super().forward(x, *args, **kwargs)
        if (reason := _reason_of_layer("", self)) is not None:
            raise ValueError(f"adapter_names={list(adapter_names)!r}: a layer with adapters {reason}. {_WAY_OUT}")
        if len(adapter_names) != len(x):
            raise ValueError(f"adapter_names has {len(adapter_names)} names for a layer input of {len(x)} rows")
        layer: Any = self
        return add_adapters(self, rows_of_adapters(adapter_names), x, layer.base_layer(x, *args, **kwargs))
