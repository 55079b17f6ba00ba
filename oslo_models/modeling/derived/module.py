"""Shards modules that are not transformers models, by a derived plan."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor, nn

from oslo_models.distributed.mesh import ParallelMesh
from oslo_models.distributed.mpu import MPU
from oslo_models.distributed.sharded_tensor import Sharding, gather_shards, local_tensor, mark_parameter
from oslo_models.layers.full_weights import as_model_code
from oslo_models.layers.sharded_activation import gathered
from oslo_models.modeling.derived.derivation import DerivedPlan
from oslo_models.modeling.derived.report import ShardingReport
from oslo_models.modeling.derived.verification import shard_module
from oslo_models.modeling.training import TrainableModel
from oslo_models.sharding.layout import Layout


class DerivedModule(nn.Module):
    """The parallel base class of a sharded module. The second base is the module's original class.

    Attributes:
        derived_plan: the sharding plan.
        mesh: the parallel axes of the module.
        mpu: the mesh under Megatron's names.
        layouts: the layout of each parameter over the tp axis.
    """

    derived_plan: DerivedPlan
    mesh: ParallelMesh
    mpu: MPU
    stage = None
    layouts: dict[str, Layout]

    clip_grad_norm_ = TrainableModel.clip_grad_norm_
    _counted = TrainableModel._counted

    def _shard(self, mesh: ParallelMesh, blocks_per_stage: None = None) -> None:
        """Shard the full module in place: keep this rank's local shards."""
        self.mesh, self.mpu = mesh, MPU(mesh)
        self.layouts = shard_module(self, self.derived_plan, mesh)

    def _mark_parameters(self) -> None:
        """Mark parameters as shards."""
        for name, param in self.named_parameters():
            if self.mesh.tp.size > 1:
                mark_parameter(param, Sharding(name, self.layouts[name], self.mesh))

    def sharding_report(self) -> ShardingReport:
        """Return how each module is sharded, and why some modules are replicated."""
        return self.derived_plan.report

    def full_state_dict(self) -> dict[str, Tensor]:
        """Return the full module's state dict on every rank. This is a collective."""
        state = {}
        for name, tensor in self.state_dict().items():
            layout = self.layouts.get(name)
            own = local_tensor(tensor)
            state[name] = own.clone() if layout is None else gather_shards(self.mesh.tp, own, layout)
        return state


def derived_class(cls: type[Any], plan: DerivedPlan) -> Any:
    """Return the parallel class of a module class, with its plan."""

    @functools.wraps(cls.forward)
    def forward(module: Any, /, *args: Any, **kwargs: Any) -> Any:
        return gathered(cls.forward(module, *args, **kwargs))

    namespace = {"derived_plan": plan, "__module__": cls.__module__, "__doc__": cls.__doc__}
    namespace["forward"] = as_model_code(forward)
    return type(cls.__name__, (DerivedModule, cls), namespace)
