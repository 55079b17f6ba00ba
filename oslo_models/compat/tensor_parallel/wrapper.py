"""`ThreadedModule`: the common base class of models that `tensor_parallel` returns."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from oslo_models.compat.tensor_parallel.autograd import run_on_threads
from oslo_models.compat.tensor_parallel.config import Config
from oslo_models.compat.tensor_parallel.rules import RuledModule
from oslo_models.distributed.thread_group import ThreadGroup
from oslo_models.modeling.derived.deriving import verify
from oslo_models.modeling.derived.report import ShardingReport
from oslo_models.sharding.layout import Layout


def move_part(part: Any, device: torch.device) -> Any:
    """Move the tensors of a part to the device, and return the part. Meta tensors are loaded later."""
    return part._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))


class ThreadedModule(nn.Module):
    """One module computed by several parts, each on its thread and device.

    Attributes:
        parts: the models of the ranks.
        threads: the thread group of the ranks.
        output_device: the device of the outputs.
        waits_for_call: whether the first call has to move the parts to their devices.
    """

    parts: nn.ModuleList
    threads: ThreadGroup
    output_device: torch.device
    waits_for_call: bool = False
    _untried: tuple[nn.Module, ...] = ()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward pass of the full model, with the same errors. One call allows one backward pass.

        Raises:
            ValueError: at the first call, for a derived plan that could not be verified before: a small random model
                computes different outputs with it.
        """
        if self._untried:
            part: Any = self.parts[0]
            given = {name: value for name, value in kwargs.items() if not isinstance(value, Cache)}  # filled by a call
            verify(self._untried[0], part.derived_plan, args, given, len(self.parts))
            self._untried = ()
        self._move_parts()
        return run_on_threads(self.parts, self.threads, self.output_device, *args, **kwargs)

    def _move_parts(self) -> None:
        """Move the parts to their devices, once."""
        if self.waits_for_call:
            for part, device in zip(self.parts, self.threads.devices, strict=True):
                move_part(part, device)
            self.waits_for_call = False

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the gradient norm as torch does, but count each parameter of the full model once.

        torch would count a replicated parameter once per rank.

        Returns:
            The norm before clipping.
        """
        parts: Any = self.parts
        return self.threads.run(lambda rank: parts[rank].clip_grad_norm_(max_norm, norm_type))[0].to(self.output_device)

    def sharding_report(self) -> ShardingReport:
        """Report how each tensor is sharded, or why it is not. Prints as a table."""
        part: Any = self.parts[0]
        report: ShardingReport = part.sharding_report()
        return report

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The device of each rank."""
        return self.threads.devices

    @property
    def tensor_parallel_config(self) -> dict[str, Layout] | Config:
        """Argument for `convert_state_dict`: the parameter layouts by full-model name, or the rules of the model."""
        part: Any = self.parts[0]
        return part.derived_plan.config if isinstance(part, RuledModule) else dict(part.layouts)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Implement ``to``, ``half`` and similar methods. Each part stays on its device."""
        moved = [device for device in set(self.threads.devices) if fn(torch.empty(0, device=device)).device != device]
        if moved:
            raise ValueError(
                f"the parts of this model stay on {[*map(str, self.threads.devices)]}, and inputs move there; for a "
                "full model on one device, load its state_dict() into a new model"
            )
        return super()._apply(fn, recurse)
