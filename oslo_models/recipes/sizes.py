"""Chooses and checks the parallel sizes of a recipe and the number of its processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from oslo_models.config.arguments import Arguments
from oslo_models.recipes.keys import ParallelArguments


@dataclass(frozen=True)
class Sizes:
    """Parallel sizes, the processes on each machine and the machines. Shares and blocks are empty by default.

    Attributes:
        sequence_parallel: whether the ranks of a layer divide the tokens of hidden states, too.
        context: ranks that divide the tokens of each row.
    """

    tensor: int
    pipeline: int
    expert: int
    devices: int
    nnodes: int
    shares: tuple[int, ...] = ()
    blocks: tuple[int, ...] = ()
    sequence_parallel: bool = False
    context: int = 1

    @property
    def replicas(self) -> int:
        """Number of replicas of the model."""
        return self.devices * self.nnodes // (self.tensor * self.pipeline * self.context)

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of the constructors."""
        sizes = {
            "tensor_parallel_size": self.tensor,
            "pipeline_parallel_size": self.pipeline,
            "expert_parallel_size": self.expert,
            "sequence_parallel": self.sequence_parallel,
            "context_parallel_size": self.context,
        }
        unequal = {"tensor_parallel_shares": self.shares, "blocks_per_stage": self.blocks}
        return {**sizes, **{name: list(value) for name, value in unequal.items() if value}}


def choose_sizes(given: ParallelArguments, cls: Any, config: Any, gpus: int) -> Sizes:
    """Return the sizes of a recipe. Missing sizes follow from the devices and the limits of the model.

    Args:
        cls: the class of the model.
        gpus: GPUs of this machine.

    Raises:
        ValueError: the sizes do not fit the model or the processes.
    """
    counts = ("tensor_parallel_size", "pipeline_parallel_size", "expert_parallel_size", "context_parallel_size")
    for name in (*counts, "devices", "nnodes"):
        if (value := getattr(given, name)) is not None and value < 1:
            raise ValueError(f"{name}={value}: it counts processes; give an integer of at least 1")
    nnodes, pipeline, context = given.nnodes, given.pipeline_parallel_size, given.context_parallel_size
    shares, blocks = tuple(given.tensor_parallel_shares or ()), tuple(given.blocks_per_stage or ())
    wanted = given.tensor_parallel_size or len(shares)
    devices = given.devices or _default_devices((wanted or 1) * pipeline * context, nnodes, gpus)
    if gpus and devices > gpus:
        raise ValueError(
            f"devices={devices}: this machine has {gpus} GPUs; give at most {gpus}, and a tensor_parallel_size of at "
            f"most {gpus * nnodes}"
        )
    tensor = wanted or _choose_tensor_parallel_size(cls, config, devices * nnodes // (pipeline * context) or 1)
    if devices * nnodes % (tensor * pipeline * context):
        beside = f"pipeline_parallel_size={pipeline}"
        beside += f" and context_parallel_size={context}" if context > 1 else ""
        raise ValueError(
            f"tensor_parallel_size={tensor}: with {beside} it does not divide "
            f"the {devices * nnodes} processes of devices={devices} and nnodes={nnodes}; set devices to a multiple of "
            f"{tensor * pipeline * context}"
        )
    sizes = Sizes(
        tensor, pipeline, given.expert_parallel_size, devices, nnodes, shares, blocks, given.sequence_parallel, context
    )
    check_sizes(sizes, cls, config)
    return sizes


def _default_devices(least: int, nnodes: int, gpus: int) -> int:
    """Return all GPUs of this machine that whole replicas of ``least`` ranks can use; on CPUs, one replica."""
    if gpus and nnodes > 1:
        return gpus
    return max(gpus // least, 1) * least if gpus else -(-least // nnodes)


def _choose_tensor_parallel_size(cls: Any, config: Any, processes: int) -> int:
    """Return the largest divisor of the processes over which the layers can be sharded.

    A planner that knows the memory of the devices belongs here.
    """
    plan = cls.plan(config)
    limit = 1 if plan.single_rank_reason else plan.max_ranks() or processes
    return max(size for size in range(1, processes + 1) if processes % size == 0 and size <= limit)


def check_sizes(sizes: Sizes, cls: Any, config: Any) -> None:
    """Raise ``ValueError`` if the model cannot be divided into these sizes."""
    arguments = Arguments(**sizes.arguments)
    arguments.check({})
    arguments.check_config(cls, config)
