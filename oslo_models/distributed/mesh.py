"""Device mesh: the axes (pp, dp, cp, tp), their ranks and their process groups. No other file creates groups.

Ranks are ordered as in Megatron: neighbouring ranks share a tensor-parallel group, then come the ranks that divide the
tokens of a sequence, then the data-parallel replicas, and the pipeline stages are farthest apart:
``rank = ((pp_rank * dp_size + dp_rank) * cp_size + cp_rank) * tp_size + tp_rank``.
"""

from __future__ import annotations

import atexit
import math
import os
import pickle
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _get_default_timeout, _set_pg_timeout
from torch.distributed.rendezvous import rendezvous

from oslo_models.distributed.connecting import connect, is_lazy, meet
from oslo_models.distributed.device_collectives import DEVICE_TIMEOUT, MARGIN
from oslo_models.distributed.store_barrier import SLOW_TIMEOUT, store_barrier
from oslo_models.distributed.thread_group import ThreadGroup
from oslo_models.distributed.watchdog import TIMEOUT, Watchdog, waiting, watchdog_of_world
from oslo_models.sharding.layout import Layout
from oslo_models.sharding.shares import NestedRanks, rank_count, shares_of

NOT_PICKLABLE = (
    "a parallel model cannot be pickled: its process groups exist on these ranks only. Instead of the model, save its "
    "weights: model.save_pretrained_with_parallel(directory), or torch.save(model.state_dict(), path) with another "
    "path on each rank; copy.deepcopy(model) copies it"
)


_numbers = count()
_set_timeout: Any = getattr(dist, "set_timeout", _set_pg_timeout)
"""Public since torch 2.14. The former name warns there."""


@dataclass(frozen=True, eq=False)
class Axis:
    """Axis of the mesh for this process: the ranks that differ only in this coordinate.

    Attributes:
        name: ``"tp"``, ``"cp"``, ``"dp"``, ``"pp"``, ``"model"`` (pp, cp and tp together), ``"weights"`` (pp and tp
            together) or ``"world"``.
        rank: the position of this process on the axis.
        ranks: the global ranks on the axis, in order.
        size: the number of ranks, as `WeightedRanks` if they have shares, and as `NestedRanks` of two axes. Other axes
            made from this one have a plain number.
        group: their process group; ``None`` when no process group is running.
        timeout: seconds to wait for the other ranks in one collective.
        watchdog: tracks the status of the other ranks; ``None`` without a process group.
        threads: replaces the process group if the ranks are threads of this process.
        symmetric_memory: the `SymmetricMemory` for small sums in compiled code; ``None`` to use NCCL.
        number: identifies the axis in compiled graphs. The same script gives the same numbers, so another process finds
            its graphs in Inductor's cache.
    """

    name: str
    rank: int
    ranks: tuple[int, ...]
    group: dist.ProcessGroup | None
    timeout: float = TIMEOUT
    watchdog: Watchdog | None = None
    threads: ThreadGroup | None = None
    size: int = field(init=False)  # read in every collective; a property would be measurably slower
    symmetric_memory: Any = field(init=False, default=None, compare=False, repr=False)
    number: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", len(self.ranks))
        object.__setattr__(self, "number", next(_numbers))

    @classmethod
    def alone(cls, name: str) -> Axis:
        """Return an axis with only this process."""
        return cls(name, 0, (0,), None)

    def __deepcopy__(self, memo: dict[int, Any]) -> Axis:
        return self  # a process group cannot be copied, and a copied model is on the same ranks

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.group is None:
            return super().__reduce_ex__(protocol)
        raise pickle.PicklingError(NOT_PICKLABLE)

    def set_phase(self, phase: str, steps: int = 0) -> None:
        """Record the current activity of this process, for the error of other ranks if it fails.

        Args:
            steps: the number of training steps to add to the step count.
        """
        if self.watchdog is not None:
            self.watchdog.step += steps
            self.watchdog.set_phase(phase)

    @property
    def shares(self) -> tuple[int, ...]:
        """The part of each layer on each rank; empty if the parts are equal."""
        return shares_of(self.size)

    @property
    def failed(self) -> bool:
        """Whether a rank has failed. No later collective can succeed."""
        return self.watchdog is not None and self.watchdog.error is not None


def world_axis(timeout: float = TIMEOUT) -> Axis:
    """Return an axis of all processes of the job; only this process without a process group."""
    if not dist.is_initialized():
        return Axis.alone("world")
    is_watched = dist.get_world_size() > 1 and dist.get_backend() != "fake"  # fake ranks cannot fail
    watchdog = watchdog_of_world(timeout) if is_watched else None
    ranks = tuple(range(dist.get_world_size()))
    return Axis("world", dist.get_rank(), ranks, dist.group.WORLD, timeout, watchdog)


class ParallelMesh:
    """Device mesh of one model.

    Attributes:
        tp, cp, dp, pp: the four axes. Ranks that differ only in cp hold the same weights and the same batch, and divide
            the tokens of its rows.
        world: all ranks.
        model: the ranks of one data-parallel replica. They get the same batch.
        weights: the ranks that hold one copy of the weights. Equal to ``model`` without context parallelism.
        pp_back: the pp axis with a second process group, for gradients sent to earlier stages: with NCCL, the two
            directions could deadlock in one group.
        expert_parallel_size: the number of ranks, or of groups of tp ranks, that divide the experts.
        experts: the ranks over which experts are sharded: the tp axis or, if ``expert_parallel_size`` is a multiple of
            its size, as many successive ranks of a stage. These are the ranks of the cp axis, then of several replicas.
        expert_replicas: the ranks with the same experts as this rank: the dp axis or, with experts over more than the
            tp axis, every rank of the dp and cp axes that has them.
        device: the device of this rank.
        destroyed: whether `destroy` was called.
        device_mesh: torch's mesh with dimensions ``("pp", "dp", "tp")``, for FSDP2 and others; ``None`` without a
            process group. With context parallelism the dimensions are ``("pp", "dp", "cp", "tp")``. Torch deprecates
            slices of flattened dimensions, so the dp and cp axes together are a separate mesh, `dp_cp_mesh`.
    """

    def __init__(
        self,
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        timeout: float = TIMEOUT,
        expert_parallel_size: int = 1,
        tensor_parallel_shares: Sequence[int] | None = None,
        context_parallel_size: int = 1,
    ) -> None:
        """Start a process group if the launcher asks for one and none exists yet, and create the axes.

        Args:
            timeout: seconds to wait for other ranks in one collective; see `RankFailedError`.
            expert_parallel_size: the number of parts into which experts are divided. A divisor of the tp size divides
                them over groups of tp ranks, a multiple of it over the ranks that divide tokens and over replicas.
            tensor_parallel_shares: the share of each layer that each tp rank holds, as a ratio. Equal by default.
            context_parallel_size: the number of ranks that divide the tokens of a sequence.

        Raises:
            ValueError: the sizes do not fit the number of processes.
            RuntimeError: more than one process is needed and no launcher was used.
        """
        check_size("tensor_parallel_size", tensor_parallel_size)
        check_size("pipeline_parallel_size", pipeline_parallel_size)
        check_size("context_parallel_size", context_parallel_size)
        tp, pp, cp = tensor_parallel_size, pipeline_parallel_size, context_parallel_size
        sizes = f"tensor_parallel_size={tp} x pipeline_parallel_size={pp}"
        sizes += f" x context_parallel_size={cp}" if cp > 1 else ""
        needed = tp * pp * cp
        self.expert_parallel_size = expert_parallel_size
        self.device = start_process_group(needed, timeout)
        self._created: list[Axis] = []
        self._alone: Axis | None = None
        self._dp_cp_mesh: DeviceMesh | None = None
        self._tp_cp: Axis | None = None
        self.destroyed = False
        self.world = world_axis(timeout)
        world_size = self.world.size
        if needed > world_size:
            raise ValueError(
                f"{sizes} needs {needed} processes, but the world "
                f"size is {world_size}: start the script with `torchrun --nproc-per-node={needed}`"
            )
        if world_size % needed:
            raise ValueError(
                f"the world size {world_size} is not a multiple of {sizes} = {needed}: {world_size % needed} processes "
                f"would be left over; start {world_size // needed * needed} or {(world_size // needed + 1) * needed} "
                "processes"
            )
        dp = world_size // needed
        holders = _holders_of_experts(tp, cp, dp, expert_parallel_size)
        self.cp = Axis.alone("cp")
        if not dist.is_initialized():
            self.device_mesh: DeviceMesh | None = None
            self.pp, self.dp, self.tp, self.model = (Axis.alone(name) for name in ("pp", "dp", "tp", "model"))
            self.pp_back, self.experts, self.expert_replicas, self.weights = self.pp, self.tp, self.dp, self.model
            return
        if world_size > 1 and is_lazy(self.device):
            meet(self.world, "the first collective (world)")
            connect(self.world, self.device)
        names = ("pp", "dp", "cp", "tp") if cp > 1 else ("pp", "dp", "tp")
        ranks = torch.arange(world_size).view([{"pp": pp, "dp": dp, "cp": cp, "tp": tp}[name] for name in names])
        # Create the groups here instead of in torch's mesh for two reasons. They get our timeout, except for the dp
        # groups of DDP and FSDP. And none of them is the world's group, in which messages of two models would mix.
        axes = {
            name: self._new_axis(name, list(ranks.movedim(dim, -1).flatten(0, -2)), own_timeout=name != "dp")
            for dim, name in enumerate(names)
        }
        self.pp, self.dp, self.tp, self.cp = (axes.get(name, self.cp) for name in ("pp", "dp", "tp", "cp"))
        object.__setattr__(self.tp, "size", rank_count(tp, tensor_parallel_shares))
        groups = [axis.group for axis in axes.values() if axis.group is not None]
        self.device_mesh = DeviceMesh.from_group(groups, self.device.type, mesh=ranks, mesh_dim_names=names)
        self.pp_back = self.stages(tuple(range(pp)), "pp_back") if pp > 1 else self.pp
        self.model = self._joint_axis("model", self.tp, self.pp, self.cp)
        self.weights = self._joint_axis("weights", self.tp, self.pp) if cp > 1 else self.model
        self.experts, self.expert_replicas = self.tp, self.dp
        if holders > 1:
            grouped = ranks.view(pp, dp * cp // holders, holders, tp)
            self.experts = self._new_axis("ep", list(grouped.flatten(2).flatten(0, 1)))
            same = grouped.movedim(1, -1).flatten(0, 2)
            self.expert_replicas = self._new_axis("expert dp", list(same))
        atexit.register(_drop_groups, weakref.ref(self))

    @classmethod
    def of_thread(cls, threads: ThreadGroup, rank: int) -> ParallelMesh:
        """Return the mesh of a rank that is a thread of this process. Only its tp axis has more than one rank."""
        mesh = cls.__new__(cls)
        mesh.device, mesh.device_mesh, mesh._created, mesh.destroyed = threads.devices[rank], None, [], False
        mesh._dp_cp_mesh = None
        mesh.tp = mesh.model = mesh.weights = mesh.world = Axis(
            "tp", rank, tuple(range(threads.size)), None, threads=threads
        )
        mesh.dp, mesh.pp, mesh.cp = (Axis.alone(name) for name in ("dp", "pp", "cp"))
        mesh.pp_back, mesh.expert_parallel_size = mesh.pp, 1
        mesh.experts, mesh.expert_replicas = mesh.tp, mesh.dp
        return mesh

    @property
    def is_sharded(self) -> bool:
        """Whether a rank holds only a part of the model."""
        return self.weights.size > 1 or self.has_experts_over_replicas

    @property
    def dp_cp_mesh(self) -> DeviceMesh:
        """Torch's mesh of the ranks with the same weights, for FSDP2: the dp and cp axes as one dimension.

        The first access is a collective of all ranks, since it may create a process group.

        Raises:
            ValueError: no process group is running.
        """
        if self._dp_cp_mesh is None:
            if self.device_mesh is None:
                raise ValueError("dp_cp_mesh needs several processes: start the script with `torchrun`")
            group = self._joint_axis("dp_cp", self.dp, self.cp).group
            assert group is not None
            self._dp_cp_mesh = DeviceMesh.from_group(group, self.device.type, mesh_dim_names=("dp_cp",))
        return self._dp_cp_mesh

    @property
    def tp_cp(self) -> Axis:
        """The ranks that hold the shards of a layer, if the ranks of the cp axis divide each tensor-parallel shard.

        The first access is a collective of all ranks, since it may create a process group.
        """
        if self.tp.size == 1:
            return self.cp
        if self._tp_cp is None:
            if self.pp.size == 1:
                self._created.append(replace(self.model, name="tp_cp"))
            else:
                self._joint_axis("tp_cp", self.tp, self.cp)
            self._tp_cp = self._created[-1]
            object.__setattr__(self._tp_cp, "size", NestedRanks(self.tp.size, self.cp.size))
        return self._tp_cp

    @property
    def has_experts_over_replicas(self) -> bool:
        """Whether a copy of the other weights holds only some of the experts.

        Other copies belong to other replicas, or to ranks that divide the tokens of this one.
        """
        return self.experts.size > self.tp.size

    @property
    def copy_rank(self) -> int:
        """The position of this rank among the copies of the weights: of all replicas and their cp ranks."""
        return self.dp.rank * self.cp.size + self.cp.rank

    def rank_in(self, layout: Layout) -> int:
        """Return the position of this process among the ranks of a layout: the tp axis or the expert ranks."""
        return self.experts.rank if self.is_over_replicas(layout) else self.tp.rank

    def is_over_replicas(self, layout: Layout) -> bool:
        """Return whether a layout shards its tensor over more ranks than the tp axis."""
        return layout.dim is not None and len(layout.ranges) > self.tp.size

    def _joint_axis(self, name: str, *axes: Axis) -> Axis:
        """Return the axis of several axes together. Create a new group only if none of them has exactly its ranks."""
        for axis in axes:
            if axis.size == math.prod(each.size for each in axes):
                return replace(axis, name=name)
        assert self.device_mesh is not None
        ranks, names = self.device_mesh.mesh, list(self.device_mesh.mesh_dim_names or ())
        joined = [dim for dim, axis_name in enumerate(names) if getattr(self, axis_name) in axes]
        grouped = ranks.movedim(joined, list(range(-len(joined), 0))).flatten(-len(joined)).flatten(0, -2)
        return self._new_axis(name, list(grouped), own_timeout=self.dp not in axes)

    def destroy(self) -> None:
        """Destroy the groups created by this mesh. A process group of the user stays. Every rank has to call it."""
        self.device_mesh, self._dp_cp_mesh, self.destroyed = None, None, True
        groups = dict.fromkeys(axis.group for axis in self._created if axis.group is not None)
        for axis in (*self._created, self.model, self.weights):
            object.__setattr__(axis, "group", None)
        for group in groups:
            dist.destroy_process_group(group)
        self._created.clear()
        self._alone = None

    def created_axes(self) -> tuple[Axis, ...]:
        """Return the axes whose process groups this mesh has created."""
        return tuple(self._created)

    def stages(self, stages: tuple[int, ...], name: str = "stages") -> Axis:
        """Create an axis of some pipeline stages. Every rank of the world has to call it.

        On the ranks of other stages the axis has no ranks.
        """
        assert self.device_mesh is not None
        groups = self.device_mesh.mesh[list(stages)].flatten(1).T
        return self._new_axis(name, list(groups))

    def _new_axis(self, name: str, groups: list[torch.Tensor], own_timeout: bool = True) -> Axis:
        """Create a process group for each group of ranks. Return the axis of this rank. Every rank has to call it.

        Args:
            own_timeout: whether collectives have the timeout of the mesh; otherwise torch's default.
        """
        timeout = timedelta(seconds=_group_timeout(self.world.timeout))
        axis = replace(self.world, name=name, rank=-1, ranks=(), group=None)
        is_alone = len(groups) == self.world.size
        connects = not is_alone and is_lazy(self.device)
        if connects:
            meet(self.world, f"the creation of process groups ({name})")
        if is_alone and self._alone is not None:  # all axes with only this rank share one group
            axis, groups = replace(self._alone, name=name), []
        for group_ranks in groups:
            ranks = group_ranks.tolist()
            with waiting(self.world, f"the creation of a process group ({name})"):
                group: Any = dist.new_group(ranks, timeout=timeout)
            if self.world.rank in ranks:
                if not own_timeout:  # for collectives only; ranks connect within the timeout of the mesh
                    _set_timeout(_get_default_timeout(dist.get_backend(group)), group)
                axis = replace(axis, rank=ranks.index(self.world.rank), ranks=tuple(ranks), group=group)
        self._created.append(axis)
        if connects:
            connect(axis, self.device, messages=name.startswith("pp"))
        if is_alone:
            self._alone = axis
        return axis

    def __deepcopy__(self, memo: dict[int, Any]) -> ParallelMesh:
        return self

    def __repr__(self) -> str:
        axes = (self.pp, self.dp, *([self.cp] if self.cp.size > 1 else []), self.tp)
        sizes = ", ".join(f"{axis.name}={axis.rank}/{axis.size}" for axis in axes)
        return f"ParallelMesh({sizes}, device={self.device})"


def _holders_of_experts(tp: int, cp: int, dp: int, expert_parallel_size: int) -> int:
    """Return the number of copies of the other weights that divide the experts.

    Raises:
        ValueError: the number of copies, ``cp * dp``, is not a multiple of it.
    """
    holders, copies = max(expert_parallel_size // tp, 1), cp * dp
    if copies % holders:
        context = f" and context_parallel_size={cp}" if cp > 1 else ""
        found = f"{cp} x {dp} = {copies} of them" if cp > 1 else f"{dp} replicas"
        raise ValueError(
            f"expert_parallel_size={expert_parallel_size} divides the experts over groups of {holders} replicas of "
            f"tensor_parallel_size={tp}{context}, and there are {found}: use a divisor of {copies} times {tp}, or "
            "start more processes"
        )
    return holders


def check_size(name: str, value: object, least: int = 1, source: str = "") -> None:
    """Raise ``ValueError`` unless ``value`` is an integer of at least ``least`` (a bool is not).

    Args:
        source: the origin of ``least``, for the message: ``"vocab_size="``.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be an integer of at least {source}{least}, got {value!r}")


def start_process_group(needed: int = 1, timeout: float = TIMEOUT) -> torch.device:
    """Start ``torch.distributed`` from the launcher's environment variables, unless it is running. Return the device.

    The backend is NCCL on CUDA (and gloo for tensors on the CPU), gloo elsewhere. A single process needs no group. The
    device is GPU ``LOCAL_RANK`` if a launcher sets this variable, otherwise the GPU chosen by
    ``torch.cuda.set_device``. It is the CPU if a group without NCCL is running.

    Args:
        needed: the required number of processes.
        timeout: seconds to wait for a rank that dies or stops publishing its status while the ranks connect.

    Raises:
        RankFailedError: a rank failed while the ranks connected.
        RuntimeError: more than one process is needed, and there is neither a launcher nor a running group.
    """
    launched = dist.is_torchelastic_launched() or {"RANK", "WORLD_SIZE"} <= os.environ.keys()
    # A group started without a named backend has `get_backend() == "undefined"`, but may use NCCL.
    cuda = torch.cuda.is_available() and not (dist.is_initialized() and "cuda:nccl" not in dist.get_backend_config())
    if cuda and (launched or dist.is_initialized()) and "LOCAL_RANK" in os.environ:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    if dist.is_initialized():
        return device
    if launched:
        _init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout)
    elif needed > 1:
        raise RuntimeError(
            f"{needed} processes are needed and this one was started alone: start the script with "
            f"`torchrun --nproc-per-node={needed} your_script.py`, or pass deploy=True to serve from plain Python"
        )
    return device


def _init_process_group(backend: str, timeout: float) -> None:
    """Wait for all ranks at the store, then connect. torch would wait half an hour for a rank that dies meanwhile."""
    store, rank, world_size = _store()
    atexit.register(_end_process_group)
    if world_size == 1:
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
        return
    watchdog, what = Watchdog(store, rank, world_size), "the start of the process group"
    watchdog.limit_interval(timeout)
    watchdog.set_phase(what)
    axis = Axis("world", rank, tuple(range(world_size)), None, timeout, watchdog)
    with waiting(axis, what):
        store_barrier(watchdog, axis, what, first_status_timeout=SLOW_TIMEOUT)
        connect_timeout = timedelta(seconds=timeout)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=connect_timeout)
    _set_timeout(_get_default_timeout(dist.Backend(backend)))
    watchdog_of_world(timeout, watchdog)


def _store() -> tuple[Any, int, int]:
    """Return the launcher's store, the rank and the world size.

    After a restart by torchrun, keys get a prefix with the attempt number. The launcher keeps one store for all
    attempts, with the addresses of dead processes (https://github.com/pytorch/pytorch/issues/135712). Attempts are
    counted per node, so this works only on one node. On several nodes, set ``TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1``.
    """
    env = os.environ
    store, rank, world_size = next(rendezvous("env://"))
    attempt, one_node = env.get("TORCHELASTIC_RESTART_COUNT", "0"), env.get("LOCAL_WORLD_SIZE") == env["WORLD_SIZE"]
    is_retry = attempt != "0" and one_node and env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return PrefixStore(f"attempt {attempt}" if is_retry else "default_pg", store), rank, world_size


def _group_timeout(timeout: float) -> float:
    """Return the timeout of a new process group. NCCL's watchdog ends the process, so its timeout exceeds ours."""
    is_nccl = "nccl" in dist.get_backend_config()
    return max(timeout, DEVICE_TIMEOUT) + MARGIN if is_nccl else timeout


def _drop_groups(ref: weakref.ref[ParallelMesh]) -> None:
    """Drop the groups at exit. gloo's threads abort the interpreter if a group is freed last."""
    mesh = ref()
    if mesh is not None:
        mesh.device_mesh = mesh._dp_cp_mesh = None
        for axis in (mesh.model, mesh.weights, mesh.world, *mesh._created):
            object.__setattr__(axis, "group", None)


def _end_process_group() -> None:
    """Destroy the process group at exit if this module started it."""
    if dist.is_initialized():
        dist.destroy_process_group()
