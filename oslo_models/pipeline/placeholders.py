"""Placeholders: modules without parameters that replace the modules of other pipeline stages."""

from __future__ import annotations

import copy
from collections.abc import Callable
from enum import Enum, auto
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized, type_before_parametrizations
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel

from oslo_models.layers.vocab_parallel import VocabParallelEmbedding


class OutputKind(Enum):
    """Output of a placeholder.

    Attributes:
        ZEROS: zeros with the shapes of the replaced module's output.
        ADDEND: zeros of width one, which can be added to hidden states of any width.
        INPUT: the first tensor argument.
    """

    ZEROS = auto()
    ADDEND = auto()
    INPUT = auto()


class Placeholder(nn.Module):
    """Replaces a module of another stage.

    It has the class, the attributes and the submodules of the replaced module. Its weights have the same shape, dtype
    and device, but take no memory, are not parameters, and are skipped by initialization.

    After ``arrived`` is set, the next call returns these hidden states. Other calls return the output of `OutputKind`.
    """

    arrived: Tensor | None
    _output: OutputKind
    _weights: list[str]
    _replaced: tuple[nn.Module]  # a tuple, so that it is not registered as a submodule

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        arrived, self.arrived = self.arrived, None
        if arrived is not None:
            return arrived.clone()  # not a leaf: `copy_to` caches a copy on it, and readers may modify it in place
        x = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
        if self._output is OutputKind.INPUT:
            return x
        zeros = self._zeros(x, args, kwargs)
        return zeros[..., :1] if self._output is OutputKind.ADDEND else zeros

    def _zeros(self, x: Tensor | None, args: Any, kwargs: Any) -> Any:
        """Return zeros for each output tensor of the replaced module. A run on the meta device gives the shapes."""
        device = self._any_weight.device if x is None else x.device
        module = self._replaced[0]
        if isinstance(module, nn.Embedding) and (
            isinstance(module, VocabParallelEmbedding) or type(module).forward is nn.Embedding.forward
        ):  # without the collectives of a sharded table
            assert x is not None
            return torch.zeros(*x.shape, module.embedding_dim, dtype=module.weight.dtype, device=device)
        args, kwargs = tree_map_only(
            Tensor, lambda t: torch.empty(t.shape, dtype=t.dtype, device="meta"), (args, kwargs)
        )  # of whole shapes, also for parts of tokens
        with torch.no_grad():
            output = module(*args, **kwargs)
        return tree_map_only(Tensor, lambda t: torch.zeros(t.shape, dtype=t.dtype, device=device), output)

    def reset_parameters(self) -> None:
        """Do nothing: there are no parameters."""

    @property
    def _any_weight(self) -> Tensor:
        return next((getattr(self, name) for name in self._weights), torch.empty(0))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Move the weights with the model to another dtype or device."""
        super()._apply(fn, recurse)
        for name in self._weights:
            weight = getattr(self, name)
            like = fn(weight.new_zeros(()))
            setattr(self, name, zeros_without_memory(weight.shape, like.dtype, like.device))
            if like.dtype != weight.dtype:
                self._replaced[0].to(like.dtype)
        return self


class Receiver(nn.Module):
    """Mixin of an embedding that the last stage has, too: it also returns the hidden states that have arrived.

    After ``arrived`` is set, the next call returns these hidden states. Other calls embed their tokens.
    """

    arrived: Tensor | None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        arrived, self.arrived = self.arrived, None
        return super().forward(*args, **kwargs) if arrived is None else arrived.clone()


def receiving(model: nn.Module, path: str) -> Receiver:
    """Make a module a `Receiver` in place, and return it."""
    module: Any = model.get_submodule(path)
    cls: Any = type(module)
    module.__class__, module.arrived = _receiving_class(cls), None
    found: Receiver = module
    return found


def make_placeholder(module: nn.Module, device: torch.device, output: OutputKind = OutputKind.ZEROS) -> Placeholder:
    """Create the placeholder of ``module``. ``module`` is not changed.

    Args:
        device: device of the stage. ``module`` may still be on the meta device.
        output: output kind of the placeholder when no hidden states have arrived.
    """
    result: Any = nn.Module.__new__(_placeholder_class(type_before_parametrizations(module)))
    attributes = {key: copy.copy(value) if isinstance(value, dict) else value for key, value in vars(module).items()}
    tensors: dict[str, Any] = {**module._parameters, **module._buffers}
    children = dict(module._modules)
    if is_parametrized(module):  # use plain weights, as the original parameters are on another stage
        computed: Any = children.pop("parametrizations")
        tensors |= {name: getattr(module, name) for name in computed}
    absent = {name: None for name, tensor in tensors.items() if tensor is None}
    vars(result).update(attributes, _parameters=absent, _buffers={}, _modules={}, arrived=None, _output=output)
    result._weights = [name for name in tensors if name not in absent]
    for name in result._weights:
        setattr(result, name, zeros_without_memory(tensors[name].shape, tensors[name].dtype, device))
    for name, child in children.items():
        result._modules[name] = None if child is None else make_placeholder(child, device)
    result._replaced = (_on_meta(module),)
    return result


def zeros_without_memory(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros expanded from a single element, marked so that transformers does not initialize them."""
    tensor = torch.zeros((), dtype=dtype, device=device).expand(shape)
    tensor._is_hf_initialized = True  # type: ignore[attr-defined]
    return tensor


def _on_meta(module: nn.Module) -> nn.Module:
    """Return a copy of a module on the meta device."""
    known = {id(tensor): tensor.detach().to("meta") for tensor in (*module.parameters(), *module.buffers())}
    for param in module.parameters():
        known[id(param)] = nn.Parameter(known[id(param)], requires_grad=False)
    return copy.deepcopy(module, known)


@cache
def _placeholder_class(cls: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass with the name of ``cls``: transformers' initialization checks classes and their names."""
    members: dict[str, Any] = {"__module__": cls.__module__}
    if issubclass(cls, PreTrainedModel):  # Qwen2-Audio reads the device of its encoder, which has no parameters here
        members["device"] = property(_device_of)
    return type(cls.__name__, (Placeholder, cls), members)


@cache
def _receiving_class(cls: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass with the name of ``cls``, as of placeholders."""
    return type(cls.__name__, (Receiver, cls), {"__module__": cls.__module__})


def _device_of(placeholder: nn.Module) -> torch.device:
    inside = (module for module in placeholder.modules() if isinstance(module, Placeholder))
    return next(getattr(module, name).device for module in inside for name in module._weights)


class BoundaryDropout(nn.Dropout):
    """Dropout that a stack applies at its entry and at its exit. A stage may contain only one of the two."""

    def __init__(self, p: float, at_entry: bool, at_exit: bool) -> None:
        super().__init__(p)
        self.applies = (at_entry, at_exit)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        applies = self.applies[self.calls % 2]
        self.calls += 1
        return super().forward(x) if applies else x
