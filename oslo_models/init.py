"""Random weights that do not depend on how a model is divided: every parameter has its own seed, made from its name."""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized
from torch.utils._python_dispatch import TorchDispatchMode

from oslo_models.layout import Layout
from oslo_models.rng import default_generator, mix


class SeededByName(TorchDispatchMode):
    """While active, a random in-place operation on a parameter fills it as the full tensor of its name would be filled.

    The full tensor is made, filled from ``(seed, name)`` and cut; one at a time. Which parameters a rank holds, and in
    which order they are initialised, changes nothing.
    """

    def __init__(self, model: nn.Module, layouts: Mapping[str, Layout], seed: int, rank: int) -> None:
        super().__init__()
        self._params = {
            id(param): (name, layouts.get(name, Layout(tuple(param.shape)))) for name, param in model.named_parameters()
        }
        self._seed, self._rank = seed, rank

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        target: Any = args[0] if args else None
        if torch.Tag.nondeterministic_seeded not in func.tags or id(target) not in self._params:
            return func(*args, **kwargs)
        name, layout = self._params[id(target)]
        generator = default_generator(target.device)
        before = generator.get_state()
        try:
            generator.manual_seed(mix(self._seed, name))
            full = torch.empty(layout.shape, dtype=target.dtype, device=target.device)
            func(full, *args[1:], **kwargs)
        finally:
            generator.set_state(before)
        return target.copy_(layout.shard(full, self._rank))


@torch.no_grad()
def initialize_computed(model: nn.Module, seed: int) -> None:
    """Fill what the weight of a layer is computed from (``weight_norm``) as torch does when it makes the layer.

    transformers fills the weight itself, which changes nothing.
    """
    for name, module in model.named_modules():
        if not isinstance(module, nn.modules.conv._ConvNd) or not is_parametrized(module, "weight"):
            continue
        computed: Any = module.parametrizations
        origin = next(iter(computed["weight"].parameters(recurse=False)), None)
        if origin is None or getattr(origin, "_is_hf_initialized", False):  # of another stage; loaded
            continue
        generator = torch.Generator(origin.device).manual_seed(mix(seed, f"{name}.weight"))
        weight = torch.empty_like(module.weight)
        module.weight = nn.init.kaiming_uniform_(weight, a=sqrt(5), generator=generator)
