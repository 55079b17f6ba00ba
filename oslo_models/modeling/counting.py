"""`CountableModel`: the number of parameters of the full model, of which a rank holds a part."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from torch import nn
from transformers import PreTrainedModel

from oslo_models.distributed.mesh import ParallelMesh
from oslo_models.pipeline.stage import Stage
from oslo_models.sharding.layout import Layout


class CountableModel(PreTrainedModel):
    """Adds `num_parameters` of the full model to a sharded one.

    Attributes:
        full_layouts: the layouts of all parameters of the full model, of which a stage holds some.
        full_embeddings: the names of those that are weights of embeddings.
    """

    mesh: ParallelMesh | None = None
    stage: Stage | None = None
    layouts: dict[str, Layout]
    full_layouts: Mapping[str, Layout]
    full_embeddings: frozenset[str]

    def _note_full_parameters(self, layouts: Mapping[str, Layout]) -> None:
        """Keep what `num_parameters` needs to know of the full model, which this one still is."""
        embeddings = (name for name, module in self.named_modules() if isinstance(module, nn.Embedding))
        self.full_embeddings = frozenset(f"{name}.weight" for name in embeddings)
        buffers = dict(self.named_buffers())
        self.full_layouts = {name: layout for name, layout in layouts.items() if name not in buffers}

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """The number of parameters of the full model, the same on every rank; without communication.

        Tied weights count once. For those that this rank holds: ``sum(p.numel() for p in model.parameters())``.
        `get_memory_footprint` is about this rank.

        Args:
            only_trainable: leave out frozen parameters.
            exclude_embeddings: leave out the weights of embeddings.

        Raises:
            ValueError: ``only_trainable`` of one of several pipeline stages, which does not know what others train.
        """
        if self.mesh is None:
            return super().num_parameters(only_trainable, exclude_embeddings)
        excluded = self.full_embeddings if exclude_embeddings else frozenset()
        if self.stage is None:
            return sum(
                prod(self.layouts[name].shape) if name in self.layouts else param.numel()
                for name, param in self.named_parameters()
                if name not in excluded and (param.requires_grad or not only_trainable)
            )
        if only_trainable:
            raise ValueError(
                "only_trainable=True: a pipeline stage does not know which parameters other stages train. Sum "
                "sum(p.numel() for p in model.parameters() if p.requires_grad) over the stages"
            )
        return sum(prod(self.full_layouts[name].shape) for name in self._untied_names() if name not in excluded)

    def _untied_names(self) -> list[str]:
        """The names in the full model of all parameters, each tied weight under the first of its names."""
        tied = {} if self.stage is None else self.stage.tied_names
        first: dict[str, str] = {}
        for name in self.full_layouts:
            first.setdefault(tied.get(name, name), name)
        return list(first.values())

    def get_memory_footprint(self, return_buffers: bool = True) -> int:
        """transformers' method: the bytes of what this rank holds."""
        return super().get_memory_footprint(return_buffers)
