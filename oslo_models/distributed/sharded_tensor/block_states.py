"""Refuses optimizers of bitsandbytes and torchao that quantise the states of a shard in blocks.

A block has one scale. The blocks of a shard hold other elements than the blocks of the full parameter, so the updates
would differ from one process. These libraries call no function of torch that a shard could refuse.
"""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from oslo_models.distributed.sharded_tensor.tensors import Shard


def _quantizes_in_blocks(optimizer: Optimizer) -> bool:
    """Return whether an optimizer of these libraries keeps states of 4 or 8 bits."""
    libraries = {cls.__module__.partition(".")[0] for cls in type(optimizer).__mro__}
    if "bitsandbytes" in libraries:
        return bool(getattr(getattr(optimizer, "args", None), "optim_bits", 32) == 8)
    return "torchao" in libraries and getattr(optimizer, "block_size", float("inf")) != float("inf")


def _check_step(optimizer: Optimizer, *_: Any) -> None:
    if not _quantizes_in_blocks(optimizer):
        return
    parameters = (param for group in optimizer.param_groups for param in group["params"])
    part = next((param for param in parameters if isinstance(param, Shard) and param.sharding.is_part), None)
    if part is not None:
        raise RuntimeError(
            f"{type(optimizer).__name__} quantises the states of a shard ({part.sharding}) in other blocks than on one "
            "process and would make other updates. Use torch.optim.AdamW: the states have the dtype of the weights, "
            "two bytes in bfloat16. Or give the optimizer full tensors: model.matrix_optimizer(cls, parameters, "
            "**options)"
        )


register_optimizer_step_pre_hook(_check_step)
