"""Modules that take the place of those of other pipeline stages."""

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

from oslo_models.layers.vocab_parallel import VocabParallelEmbedding


class Output(Enum):
    """What a placeholder returns.

    Attributes:
        ZEROS: zeros in the shapes of what the replaced module would return.
        ADDEND: such zeros of width one, to add to hidden states that may be wider than what was embedded.
        INPUT: its first argument.
    """

    ZEROS = auto()
    ADDEND = auto()
    INPUT = auto()


class Placeholder(nn.Module):
    """A module of another stage, as this stage sees it.

    It has the class, the attributes and the submodules of the module that it replaces. Its weights have the same
    shape, dtype and device, take no memory, are no parameters, and are left alone by initialization.

    Its output is, once, the hidden states that arrived for it; otherwise what `Output` says.
    """

    arrived: Tensor | None
    _output: Output
    _weights: list[str]
    _replaced: tuple[nn.Module]  # in a tuple, so that it is no submodule

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        arrived, self.arrived = self.arrived, None
        if arrived is not None:  # no leaf of the graph: its readers can share a copy of it, or work in place
            return arrived.clone()
        given = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
        if self._output is Output.INPUT:
            return given
        made = self._zeros(given, args, kwargs)
        return made[..., :1] if self._output is Output.ADDEND else made

    def _zeros(self, given: Tensor | None, args: Any, kwargs: Any) -> Any:
        """Zeros for each tensor that the replaced module returns; it runs on the meta device to find their shapes."""
        device = self._anchor.device if given is None else given.device
        module = self._replaced[0]
        if isinstance(module, nn.Embedding) and (
            isinstance(module, VocabParallelEmbedding) or type(module).forward is nn.Embedding.forward
        ):  # without the collectives of a sharded table
            assert given is not None
            return torch.zeros(*given.shape, module.embedding_dim, dtype=module.weight.dtype, device=device)
        args, kwargs = tree_map_only(Tensor, lambda x: x.detach().to("meta"), (args, kwargs))
        with torch.no_grad():
            made = module(*args, **kwargs)
        return tree_map_only(Tensor, lambda x: torch.zeros(x.shape, dtype=x.dtype, device=device), made)

    def reset_parameters(self) -> None:
        """There are none."""

    @property
    def _anchor(self) -> Tensor:
        return next((getattr(self, name) for name in self._weights), torch.empty(0))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Let the weights follow the model to another dtype or device."""
        super()._apply(fn, recurse)
        for name in self._weights:
            weight = getattr(self, name)
            like = fn(weight.new_zeros(()))
            setattr(self, name, without_memory(weight.shape, like.dtype, like.device))
            if like.dtype != weight.dtype:
                self._replaced[0].to(like.dtype)
        return self


def placeholder(module: nn.Module, device: torch.device, output: Output = Output.ZEROS) -> Placeholder:
    """What takes the place of ``module``, whose parameters it leaves as they are.

    Args:
        device: that of the stage; ``module`` may still be without memory.
        output: what it returns, unless hidden states have arrived for it.
    """
    made: Any = nn.Module.__new__(_placeholder_class(type_before_parametrizations(module)))
    own = {key: copy.copy(value) if isinstance(value, dict) else value for key, value in vars(module).items()}
    tensors: dict[str, Any] = {**module._parameters, **module._buffers}
    children = dict(module._modules)
    if is_parametrized(module):  # what its weights are computed from is not here, so they are plain ones
        computed: Any = children.pop("parametrizations")
        tensors |= {name: getattr(module, name) for name in computed}
    absent = {name: None for name, tensor in tensors.items() if tensor is None}
    vars(made).update(own, _parameters=absent, _buffers={}, _modules={}, arrived=None, _output=output)
    made._weights = [name for name in tensors if name not in absent]
    for name in made._weights:
        setattr(made, name, without_memory(tensors[name].shape, tensors[name].dtype, device))
    for name, child in children.items():
        made._modules[name] = None if child is None else placeholder(child, device)
    made._replaced = (_on_meta(module),)
    return made


def without_memory(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of zeros that shares one element, and that transformers does not initialize."""
    tensor = torch.zeros((), dtype=dtype, device=device).expand(shape)
    tensor._is_hf_initialized = True  # type: ignore[attr-defined]
    return tensor


def _on_meta(module: nn.Module) -> nn.Module:
    """A copy of a module without memory."""
    known = {id(tensor): tensor.detach().to("meta") for tensor in (*module.parameters(), *module.buffers())}
    for param in module.parameters():
        known[id(param)] = nn.Parameter(known[id(param)], requires_grad=False)
    return copy.deepcopy(module, known)


@cache
def _placeholder_class(cls: type[nn.Module]) -> type[nn.Module]:
    """Initialization goes by classes and by their names, so both stay."""
    return type(cls.__name__, (Placeholder, cls), {"__module__": cls.__module__})


class BoundaryDropout(nn.Dropout):
    """A dropout that a stack applies twice, at its entry and at its exit, of which a stage may have only one."""

    def __init__(self, p: float, at_entry: bool, at_exit: bool) -> None:
        super().__init__(p)
        self.applies = (at_entry, at_exit)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        applies = self.applies[self.calls % 2]
        self.calls += 1
        return super().forward(x) if applies else x
