"""Gathers the weights of a deployed model from the workers, one tensor at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from oslo_models.pipeline.sharded_model import ShardedModel

if TYPE_CHECKING:
    from torch import Tensor

    from oslo_models.deploy.engine import Engine
    from oslo_models.sharding.layout import Layout

# torch is imported by the functions that need it: a worker must listen before it has imported torch.


class HeldTensor(NamedTuple):
    """A tensor of the full model that a worker holds in full or as a shard.

    Attributes:
        source: one name for all names of a tied weight.
        is_parameter: a parameter, not a buffer.
        is_saved: part of the ``state_dict``.
        bytes: of the full tensor.
    """

    source: str
    is_parameter: bool
    is_saved: bool
    bytes: int


def held_tensors(model: ShardedModel) -> dict[str, HeldTensor]:
    """In a worker: return the parameters and buffers of its part of the model, by their names in the full model."""
    params = dict(model.named_parameters(remove_duplicate=False))
    saved, found, first = model.state_dict().keys(), {}, dict[int, str]()
    copied = {} if model.stage is None else model.stage.full_names  # copies of modules that another stage holds
    for name, tensor in (params | dict(model.named_buffers(remove_duplicate=False))).items():
        if name in copied:
            continue
        layout = model.layouts.get(name)
        source = first.setdefault(id(tensor), name) if model.stage is None else model.stage.canonical_name(name)
        count = tensor.numel() if layout is None else prod(layout.shape)
        found[name] = HeldTensor(source, name in params, name in saved, count * tensor.element_size())
    return found


def held_part(model: ShardedModel, name: str) -> tuple[Layout | None, int, Tensor] | None:
    """In a worker: return its shard of a tensor, with the layout (``None``: replicated) and the rank in the layout.

    Returns:
        ``None`` if it holds no part of the tensor, or if another rank sends the same part.

    Raises:
        ValueError: the tensor is quantised.
    """
    import torch

    from oslo_models.distributed.sharded_tensor import local_tensor

    if name not in held_tensors(model):
        return None
    owner, _, leaf = name.rpartition(".")
    tensor = local_tensor(getattr(model.get_submodule(owner), leaf)).detach()
    layout = model.layouts.get(name)
    if type(tensor) is not torch.Tensor:
        raise ValueError(
            f"{name} is quantised ({type(tensor).__name__}) and cannot be gathered: deploy the model without "
            "quantization_config for its plain weights"
        )
    if layout is None or layout.dim is None:
        return (None, 0, tensor) if model.mesh.tp.rank == 0 else None
    return layout, model.mesh.tp.rank, tensor


class FullState:
    """In the application: the tensors of a deployed model.

    Args:
        engine: calls the workers.

    Attributes:
        tensors: the tensors of all workers, by their names in the full model.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.tensors: dict[str, HeldTensor] = {}
        for held in engine.call("held_tensors", gather=True):
            self.tensors |= {name: each for name, each in held.items() if name not in self.tensors}

    def bytes(self, with_buffers: bool = True) -> int:
        """Return the bytes of the full model. Tied weights count once."""
        once = {held.source: held for held in self.tensors.values() if held.is_parameter or with_buffers}
        return sum(held.bytes for held in once.values())

    def gather(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield full tensors in host memory. All names of a tied weight get the same object."""
        names = list(names)
        sources = [self.tensors[name].source for name in names]
        made: dict[str, Tensor] = {}
        for position, (name, source) in enumerate(zip(names, sources, strict=True)):
            tensor = made[source] if source in made else self._gather_one(name)
            if source in sources[position + 1 :]:
                made[source] = tensor
            yield name, tensor

    def _gather_one(self, name: str) -> Tensor:
        parts = [part for part in self._engine.call("held_part", (name,), gather=True) if part is not None]
        layout, _, full = parts[0]
        if layout is not None:
            full = full.new_empty(layout.shape)
            for _, rank, part in parts:
                layout.write_shard(full, part, rank)
        return full
