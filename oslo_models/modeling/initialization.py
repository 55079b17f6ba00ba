"""Draws random weights independently of the parallel sizes: each parameter has a seed derived from its name."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from functools import partial
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from oslo_models.distributed.rng import default_generator, stable_hash
from oslo_models.sharding.layout import Layout
from oslo_models.sharding.model_protocol import TransformersModel


class SeededByName(TorchDispatchMode):
    """While active, a random in-place operation on a parameter fills it with its shard of the full random tensor.

    The full tensor is filled from ``(seed, name)`` and sharded, one parameter at a time. The values therefore depend
    neither on the rank's set of parameters nor on the order of initialisation. Later draws in the parameter's shape
    belong to it too: ``trunc_normal_`` redraws until no element is out of bounds. Stacked experts are drawn one by one.

    Loaded parameters do not change. transformers' initialisation functions skip them, but its plain arithmetic does
    not: with ``rescale_prenorm_residual``, its Mamba models divide a weight each time it is loaded.

    Args:
        rank_in: returns this process's index among the ranks of a layout.
        stacks: the names of parameters that stack experts.
        root: maps a parameter name to the full model's name, or to the source parameter's name if it is tied.
    """

    def __init__(
        self,
        model: nn.Module,
        layouts: Mapping[str, Layout],
        seed: int,
        rank_in: Callable[[Layout], int],
        root: Callable[[str], str],
        stacks: Collection[str] = (),
    ) -> None:
        super().__init__()
        named = list(model.named_parameters())
        self._params = {
            id(param): (root(name), layouts.get(name) or Layout(tuple(param.shape))) for name, param in named
        }
        self._stacks = {id(param) for name, param in named if name in stacks}
        self._seed, self._rank_in = seed, rank_in
        self._latest: tuple[str, Layout] | None = None
        self._shape: torch.Size | None = None
        self._redraws = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        target: Any = args[0] if args else None
        if func._schema.is_mutable and getattr(target, "_is_hf_initialized", False):
            return target
        if torch.Tag.nondeterministic_seeded not in func.tags or not func._schema.is_mutable:
            return func(*args, **kwargs)
        if id(target) in self._params:
            self._latest, self._shape, self._redraws = self._params[id(target)], target.shape, 0
        elif self._latest is not None and target.shape == self._shape:
            self._redraws += 1
        else:
            return func(*args, **kwargs)
        name, layout = self._latest
        name += f" redrawn {self._redraws}" if self._redraws else ""
        fill = partial(func, **kwargs)
        if id(target) not in self._stacks:
            return self._fill(target, name, layout, fill, args[1:])
        first, own = layout.first_of(self._rank_in(layout)), Layout(layout.shape[1:])
        if layout.dim:
            own = Layout(layout.shape[1:], layout.dim - 1, layout.ranges)
        for index, expert in enumerate(target.unbind(), first):
            self._fill(expert, f"{name} {index}", own, fill, args[1:])
        return target

    def _fill(self, target: Tensor, name: str, layout: Layout, fill: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Fill ``target`` with this rank's shard of the full tensor. The seed derives from ``name``."""
        generator = default_generator(target.device)
        before = generator.get_state()
        try:
            generator.manual_seed(stable_hash(self._seed, name))
            full = torch.empty(layout.shape, dtype=target.dtype, device=target.device)
            fill(full, *args)
        finally:
            generator.set_state(before)
        return target.copy_(layout.shard(full, self._rank_in(layout)))


_BY_FANS = {
    *("SiglipAttention", "SiglipMLP", "Siglip2Attention", "Siglip2MLP"),
    *("Wav2Vec2BertSelfAttention", "Wav2Vec2ConformerSelfAttention"),
    *("DeformableDetrMultiscaleDeformableAttention", "RTDetrMultiscaleDeformableAttention"),
    *("RTDetrV2MultiscaleDeformableAttention", "GroundingDinoMultiscaleDeformableAttention"),
    *("GroundingDinoBiMultiHeadAttention", "MMGroundingDinoMultiscaleDeformableAttention"),
    "MMGroundingDinoBiMultiHeadAttention",
}
"""Layers whose weights some architectures draw by the numbers of inputs and outputs."""


def modules_initialized_by_fans(model: nn.Module) -> list[str]:
    """Return the names of modules with random weights whose scale depends on their full size."""
    named = model.named_modules()
    return [name for name, module in named if type(module).__name__ in _BY_FANS or _is_sharded_convolution(module)]


def _is_sharded_convolution(module: nn.Module) -> bool:
    return isinstance(module, nn.Conv2d) and hasattr(module, "layouts")


@torch.no_grad()
def initialize_whole(
    model: TransformersModel,
    name: str,
    layouts: Mapping[str, Layout],
    seed: int,
    rank_in: Callable[[Layout], int],
    root: Callable[[str], str],
) -> None:
    """Initialise a module with weights that transformers computes from its sizes, such as a state-space mixer.

    transformers' code sees full sizes, parameters and buffers. This function then shards each tensor that was written.

    Args:
        name: the module's name.
        layouts: the model's layouts.
        seed: the model's seed.
        rank_in: see `SeededByName`.
        root: see `SeededByName`. The first parameter's name determines the random numbers.
    """
    module = model.get_submodule(name)
    buffers = {leaf: buffer for leaf, buffer in module.named_buffers() if f"{name}.{leaf}" in layouts}
    params: dict[str, Tensor] = {**dict(module.named_parameters()), **buffers}
    own = {leaf: layouts.get(f"{name}.{leaf}", Layout(tuple(param.shape))) for leaf, param in params.items()}
    full = {leaf: _full_like(param, own[leaf]) for leaf, param in params.items()}
    computed = {leaf for leaf, _ in module.named_buffers(recurse=False)} - module.state_dict().keys()
    if all(param.is_meta for param in full.values()) and not computed:
        return
    full_attributes = vars(module).get("full_attributes", {})
    local_attributes = {key: getattr(module, key) for key in full_attributes}
    first, param = next(iter(params.items()))
    # some code draws on the CPU even if the model is on a GPU
    generators = [default_generator(device) for device in {torch.device("cpu"), param.device}]
    before = [generator.get_state() for generator in generators]
    try:
        _set(module, full, full_attributes)
        of_names = SeededByName(module, {}, seed, rank_in, lambda leaf: root(f"{name}.{leaf}"))
        for generator in generators:
            generator.manual_seed(stable_hash(seed, root(f"{name}.{first}")))
        with of_names if _is_sharded_convolution(module) else nullcontext():  # as on one rank
            _initializer(model, name)._init_weights(module)
    finally:
        for generator, state in zip(generators, before, strict=True):
            generator.set_state(state)
        _set(module, params, local_attributes)
    for leaf, param in params.items():
        if full[leaf]._version and not full[leaf].is_meta:  # written, and not loaded
            param.copy_(own[leaf].shard(full[leaf].detach(), rank_in(own[leaf])))


def _initializer(model: TransformersModel, name: str) -> Any:
    """Return the innermost model around a module. transformers initialises the module by this model's configuration."""
    parts = name.split(".")[:-1]
    around = [model.get_submodule(".".join(parts[:depth])) for depth in range(len(parts) + 1)]
    return next(each for each in reversed(around) if isinstance(each, PreTrainedModel))


def _full_like(param: Tensor, layout: Layout) -> Tensor:
    """Return an empty full-size parameter or buffer. It is on the meta device if the local tensor was loaded."""
    is_loaded = getattr(param, "_is_hf_initialized", False)
    device = torch.device("meta") if is_loaded else param.device
    full = torch.empty(layout.shape, dtype=param.dtype, device=device)
    full = nn.Parameter(full) if isinstance(param, nn.Parameter) else full
    full._is_hf_initialized = is_loaded  # type: ignore[attr-defined]
    return full


def _set(module: nn.Module, params: Mapping[str, Tensor], attributes: Mapping[str, Any]) -> None:
    for name, param in params.items():
        owner, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(owner), leaf, param)
    for key, value in attributes.items():
        setattr(module, key, value)


@torch.no_grad()
def initialize_computed(model: nn.Module, seed: int) -> None:
    """Initialise the source tensors of a computed weight (``weight_norm``), as torch's constructor does.

    transformers initialises the computed weight, which has no effect.
    """
    for name, module in model.named_modules():
        if not isinstance(module, nn.modules.conv._ConvNd) or not is_parametrized(module, "weight"):
            continue
        computed: Any = module.parametrizations
        origin = next(iter(computed["weight"].parameters(recurse=False)), None)
        if origin is None or getattr(origin, "_is_hf_initialized", False):  # on another stage, or loaded
            continue
        generator = torch.Generator(origin.device).manual_seed(stable_hash(seed, f"{name}.weight"))
        weight = torch.empty_like(module.weight)
        module.weight = nn.init.kaiming_uniform_(weight, a=sqrt(5), generator=generator)
