"""`CountableModel`: counts the parameters of the full model on a rank that holds shards."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from torch import nn
from transformers import PreTrainedModel

from oslo_models.distributed.mesh import ParallelMesh
from oslo_models.pipeline.stage import Stage
from oslo_models.sharding.layout import Layout


class CountableModel(PreTrainedModel):
    """Makes `num_parameters` of a sharded model count the full model.

    Attributes:
        full_layouts: the layouts of all parameters of the full model, including other pipeline stages.
        full_embeddings: the names of embedding weights in the full model.
    """

    mesh: ParallelMesh | None = None
    stage: Stage | None = None
    layouts: dict[str, Layout]
    full_layouts: Mapping[str, Layout]
    full_embeddings: frozenset[str]

    def _note_full_parameters(self, layouts: Mapping[str, Layout]) -> None:
        """Record the full model's layouts and embeddings for `num_parameters`, before the model is sharded."""
        embeddings = (name for name, module in self.named_modules() if isinstance(module, nn.Embedding))
        self.full_embeddings = frozenset(f"{name}.weight" for name in embeddings)
        buffers = dict(self.named_buffers())
        self.full_layouts = {name: layout for name, layout in layouts.items() if name not in buffers}

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """Return the number of parameters of the full model. The result is the same on every rank.

        This needs no communication. Tied weights count once. To count this rank's parameters, use
        ``sum(p.numel() for p in model.parameters())``. `get_memory_footprint` also measures this rank only.

        Args:
            only_trainable: leave out frozen parameters.
            exclude_embeddings: leave out the weights of embeddings.

        Raises:
            ValueError: ``only_trainable`` on a pipeline stage, which does not know the trainable parameters of others.
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
        """Return all parameter names of the full model, with tied weights under their first name."""
        tied = {} if self.stage is None else self.stage.tied_names
        first: dict[str, str] = {}
        for name in self.full_layouts:
            first.setdefault(tied.get(name, name), name)
        return list(first.values())

    def get_memory_footprint(self, return_buffers: bool = True) -> int:
        """Return the size in bytes of this rank's parameters and buffers, as computed by transformers."""
        return super().get_memory_footprint(return_buffers)
