"""Mixtures of experts over the tp axis. Ranks shard the width of every expert, or divide the experts among them.

If experts are divided over ranks with different tokens, of several replicas or of the cp axis, an all-to-all dispatches
the tokens to the ranks of their experts, and another returns the outputs.

Sources: Shoeybi et al., "Megatron-LM", 2019, section 3, applied to each expert (sharded width); Lepikhin et al.,
"GShard", 2020 (experts on different ranks).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from torch.nn import Module

from oslo_models.distributed.autograd_collectives import average_grad, copy_to, exchange, reduce_from
from oslo_models.distributed.callers import ignored_by_fully_shard, refuse_fsdp1
from oslo_models.distributed.collectives import all_to_all
from oslo_models.distributed.mesh import ParallelMesh
from oslo_models.distributed.sharded_tensor import without_override
from oslo_models.layers.function_overrides import override_attributes
from oslo_models.layers.kinds import ShardedModule, ShardingContext, become, shards
from oslo_models.layers.replicated_grads import SumReplicatedGrad
from oslo_models.layers.shared_experts import SharedExpertsModule
from oslo_models.sharding.entry import Replicated
from oslo_models.sharding.layout import EvenSplit, Layout, even_ranges


@dataclass(frozen=True)
class Experts(Replicated):
    """Stacked gated experts. A rank holds a slice of every expert's width or, under expert parallelism, full experts.

    Parameters are ``gate_up_proj [experts, 2 * width, hidden]`` and ``down_proj [experts, hidden, width]``, optionally
    with ``gate_up_proj_bias`` and ``down_proj_bias``. Experts without gates have ``up_proj [experts, width, hidden]``.

    Args:
        transposed: the last two dimensions of the projections are exchanged.
        interleaved: rows of gate and up projection alternate.
        groups: number of groups of consecutive ranks over which the experts are divided (expert parallelism). The ranks
            of a group share the width of its experts. If there are more groups than tensor-parallel ranks, each
            group is one rank, and the groups span ranks that divide tokens, or several replicas.
        shared: name of the sibling gated MLP that adds its output to the routed output. Empty without shared experts.
        identities: number of further experts that return their input. Their rows in ``gate_up_proj`` are never read.
    """

    stacks_experts: ClassVar[bool] = True
    transposed: bool = False
    interleaved: bool = False
    groups: int = 1
    shared: str = ""
    identities: int = 0

    def layout(self, leaf: str, shape: tuple[int, ...], n: int) -> Layout:
        count = shape[0] - (self.identities if leaf == "gate_up_proj" else 0)
        if self.groups > count:
            raise ValueError(f"expert_parallel_size={self.groups} is more than {count}, the number of experts")
        if self.groups == 1:
            return self._over_width(leaf, shape, n)
        n = max(n, self.groups)
        share = n // self.groups  # ranks of a group
        width = self._over_width(leaf, shape, share)
        *before, (start, _) = even_ranges(count, self.groups)
        return width.over_groups((*before, (start, shape[0])), share)  # include the unread rows of identity experts

    def over_experts(self, groups: int) -> Replicated:
        return replace(self, groups=groups)

    def _over_width(self, leaf: str, shape: tuple[int, ...], n: int) -> Layout:
        if leaf == "down_proj_bias":
            return Layout(shape)
        if leaf == "down_proj":
            dim = 1 if self.transposed else 2
            return Layout.sharded(shape, dim, (aligned(shape[dim], n),), n)
        dim = 2 if self.transposed and leaf == "gate_up_proj" else 1
        if leaf == "up_proj":
            return Layout.sharded(shape, 1, (aligned(shape[1], n),), n)
        width = aligned(shape[dim] // 2, n)
        splits = (EvenSplit(width.count, 2 * width.width),) if self.interleaved else (width, width)
        return Layout.sharded(shape, dim, splits, n)


def aligned(width: int, n: int) -> EvenSplit:
    """Return the split of an expert's width into units that grouped GEMMs can address, if there are enough units.

    ``torch._grouped_mm`` requires strides of 16 bytes: 8 elements of 2 bytes, or 4 elements of 4 bytes.
    """
    unit = next((unit for unit in (16, 8, 4) if width % unit == 0 and width // unit >= n), 1)
    return EvenSplit(width // unit, unit)


@functools.cache
def _loop_knows_others(cls: type) -> bool:
    """Return whether the expert loop of a class skips the id after the last expert.

    The loops of gpt-oss and Nemotron-H do not, nor do most loops of transformers 5.17. ``False`` is correct for every
    loop, but slower: the loop then computes a local expert with weight zero in place of remote experts.
    """
    forwards = (vars(each)["forward"] for each in cls.__mro__ if "forward" in vars(each))
    try:
        source = next(inspect.getsource(inspect.unwrap(each)) for each in forwards if _is_of_model(each))
    except (OSError, StopIteration):  # no source code, or a user-defined class
        return False
    return "num_experts + 1" in source and "== self.num_experts:" in source


def _selected(values: Tensor, flags: Tensor, count: int) -> Tensor:
    """Return the values with true flags, ``[count]``. The host does not wait for their number, as in ``nonzero``."""
    places = torch.where(flags, flags.cumsum(0) - 1, count)
    return values.new_empty(count + 1).scatter_(0, places, values)[:count]


def _is_of_model(forward: Any) -> bool:
    return not forward.__module__.startswith("oslo_models.")


@shards(Experts)
class ParallelExperts(ShardedModule):
    """Local shard of the experts. Runs transformers' forward.

    The router is replicated, so all ranks route the same tokens to the same experts. The outputs of a rank are partial
    sums over the width or over the experts. The gradients of hidden states and router weights are partial sums, too.

    Attributes:
        mesh: mesh of the model.
        starts: number of the first expert on each rank of ``mesh.experts``.
        first: number of the first expert on this rank.
        over_ranks: whether this rank holds only some of the experts.
        loop_knows_others: whether transformers' loop over experts skips the id after the last expert.
        sharers: number of ranks that share the width of the local experts.
        counts_identities: whether this rank adds the output of identity experts, which every rank could compute.
        returns_partial_sums: whether the caller all-reduces the output, together with others (`SharedExpertsModule`).
    """

    mesh: ParallelMesh
    starts: list[int]
    first: int
    over_ranks: bool
    loop_knows_others: bool
    sharers: int
    counts_identities: bool
    returns_partial_sums = False
    _starts: Tensor | None = None
    num_experts: int
    num_routed_experts: int
    total_experts: int
    zero_expert_num: int
    config: Any

    def configure(self, entry: Experts, context: ShardingContext) -> None:
        super().configure(entry, context)
        self.set_experts(context.shards, context.mesh)
        mixture: Any = context.parent
        if entry.shared and getattr(mixture, entry.shared, None) is not None:
            become(mixture, SharedExpertsModule)
            mixture.tp, mixture.shared = context.tp, entry.shared

    def set_experts(self, layouts: Mapping[str, Layout], mesh: ParallelMesh) -> None:
        """Set the local experts. Call it after ``tp`` is set and before the parameters are sharded.

        Args:
            layouts: layouts of the parameters.
            mesh: mesh of the model.

        Raises:
            ValueError: on every rank, if grouped GEMMs cannot address the shards of some rank.
        """
        self.mesh = mesh
        self._check_strides(layouts)
        layout = layouts["down_proj"]
        rank = mesh.rank_in(layout)
        self.starts = [layout.first_of(other) for other in range(mesh.experts.size)]
        self._starts = None
        self.first, self.sharers = self.starts[rank], self.starts.count(self.starts[rank])
        self.over_ranks = self.sharers < mesh.experts.size
        self.loop_knows_others = _loop_knows_others(cast(Any, type(self)))
        last = mesh.experts.size - 1  # `_exchanged` sends the tokens of identity experts there
        self.counts_identities = rank == last if mesh.has_experts_over_replicas else self.tp.rank == 0
        if self.over_ranks:
            self.num_experts = layout.local_shape(rank)[0]
            if hasattr(self, "zero_expert_num"):
                self.num_routed_experts = self.num_experts
                self.total_experts = self.num_experts + max(1, self.zero_expert_num)
            self._is_expert_parallel = True  # transformers' flag: expert ids may belong to other ranks

    def _check_strides(self, layouts: Mapping[str, Layout]) -> None:
        """Check that rows are multiples of 16 bytes, as ``torch._grouped_mm`` requires. It does not support float64."""
        dtype = self._parameters["down_proj"].dtype  # type: ignore[union-attr]
        if not hasattr(self, "config"):  # the only implementation is a loop
            return
        if self.config._experts_implementation != "grouped_mm" or dtype == torch.float64:
            return
        for name, layout in layouts.items():
            if name.endswith("_bias"):
                continue
            unit = 16 // dtype.itemsize
            rows = [layout.local_shape(rank)[-1] for rank in range(self.mesh.experts.size)]
            odd = [row % unit != 0 for row in rows]
            if any(odd) and not (all(odd) and layout.shape[-1] % unit):  # else all ranks raise torch's error
                raise ValueError(
                    f"tensor_parallel_size={self.tp.size} shards the experts' {name} {layout.shape} to rows of {rows} "
                    f"elements, and grouped products take multiples of {unit} in {dtype}: use fewer ranks, "
                    'expert_parallel_size, or experts_implementation="eager"'
                )

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, *args: Any) -> Tensor:
        """Return the weighted sum of the outputs of each token's experts.

        Args:
            hidden_states: ``[tokens, hidden]``, replicated.
            top_k_index: the experts of each token, ``[tokens, k]``.
            top_k_weights: the router weights, ``[tokens, k]``.

        Returns:
            ``[tokens, hidden]``, replicated.
        """
        with without_override():
            hidden_states = self.enter_region(hidden_states)
            weights = copy_to(self.tp, top_k_weights)
            if not self.mesh.has_experts_over_replicas:
                top_k_index, weights = self._own(top_k_index, weights)
            # Experts have no dropout, so the region ends before the product, as `leave_region` requires.
            hidden_states = self.leave_region(hidden_states)
            with self._own_share_of_bias(), self._averaged_over_replicas():
                compute = self._exchanged if self.mesh.has_experts_over_replicas else self.compute
                output = compute(hidden_states, top_k_index, weights, *args)
                return output if self.returns_partial_sums else reduce_from(self.tp, output)

    def compute(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, *args: Any) -> Tensor:
        """Run transformers' forward with the local experts. Returns partial sums without remote experts."""
        output: Tensor = super().forward(hidden_states, top_k_index, top_k_weights, *args)
        return output

    def named_parameters(self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True) -> Iterator[Any]:
        """As of any module.

        Raises:
            ValueError: called by ``fully_shard``, which would treat different experts as copies.
        """
        ignored = ignored_by_fully_shard() if self.mesh.has_experts_over_replicas else None
        own = [param for param in self._parameters.values() if param is not None]
        if ignored is not None and not all(param in ignored for param in own):
            raise ValueError(
                "fully_shard would treat the experts of these replicas as copies, and "
                f"expert_parallel_size={self.mesh.expert_parallel_size} gives each of them some experts: leave "
                "them out by fully_shard(..., ignored_params=set(model.expert_parameters())); backward averages "
                "their gradients"
            )
        return super().named_parameters(prefix, recurse, remove_duplicate)

    def named_modules(
        self, memo: set[Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Module]]:
        """As of any module.

        Raises:
            ValueError: called by the constructor of a ``FullyShardedDataParallel``.
        """
        if not torch.compiler.is_compiling() and self.mesh.is_sharded:
            refuse_fsdp1(f"this {type(self).__name__}")
        return super().named_modules(memo, prefix, remove_duplicate)

    def _exchanged(self, hidden_states: Tensor, index: Tensor, weights: Tensor, *args: Any) -> Tensor:
        """Dispatch this rank's share of the tokens to the ranks of their experts, and return the outputs.

        The outputs of other tokens are zero. A token is sent once to each rank with some of its experts. That rank
        returns the sum of their outputs.
        """
        axis = self.mesh.experts
        start, stop = even_ranges(len(hidden_states), self.tp.size)[self.tp.rank]
        owners = torch.bucketize(index[start:stop], self._starts_on(index.device), right=True) - 1
        is_for = torch.zeros(stop - start, axis.size, dtype=torch.bool, device=index.device)
        is_for.scatter_(1, owners, True)
        counts, ones = is_for.sum(0), [1] * axis.size
        # On a GPU the host waits only here: products and messages need sizes.
        sent, received = torch.stack((counts, all_to_all(axis, counts, ones, ones))).tolist()
        numbers = torch.arange(start, stop, device=index.device).repeat(axis.size)
        tokens = _selected(numbers, is_for.T.flatten(), sum(sent))  # in the order of the ranks
        theirs = all_to_all(axis, index[tokens], sent, received)
        x, their_weights = exchange(axis, (hidden_states[tokens], weights[tokens]), sent, received)
        theirs, their_weights = self._own(theirs, their_weights)
        if not len(x):  # no token arrived: compute a dummy token of weight zero, so that the experts have gradients
            x, their_weights = (torch.cat((each, each.new_zeros(1, each.shape[1]))) for each in (x, their_weights))
            theirs = theirs.new_zeros(1, theirs.shape[1])
        computed = self.compute(x, theirs, their_weights, *args)[: sum(received)]
        (returned,) = exchange(axis, (computed,), received, sent)
        return returned.new_zeros(hidden_states.shape).index_add(0, tokens, returned)

    def _starts_on(self, device: torch.device) -> Tensor:
        """Return `starts` as a tensor. The host would wait for a new one in each call."""
        if self._starts is None or self._starts.device != device:
            self._starts = torch.tensor(self.starts, device=device)
        return self._starts

    @contextmanager
    def _averaged_over_replicas(self) -> Iterator[None]:
        """Average the gradients of experts over the replicas within the block, as for the mean of their losses.

        The exchange of tokens already sums over its ranks. This adds the sum over the ranks with the same experts.
        Ranks of the cp axis have tokens of the same loss, so they do not count in the average.
        """
        names = [*self.layouts] if self.mesh.has_experts_over_replicas and torch.is_grad_enabled() else []
        adapted = getattr(self, "parametrizations", {})  # adapters add to the parameter when it is read
        owners = [(adapted[name], "original") if name in adapted else (self, name) for name in names]
        for owner, name in owners:
            param = getattr(owner, name)
            vars(owner)[name] = average_grad(self.mesh.expert_replicas, param, self.mesh.dp.size)
        try:
            yield
        finally:
            for owner, name in owners:
                vars(owner).pop(name, None)

    def _own(self, index: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Return the choices of experts that this rank computes, renumbered to local ids.

        Other choices get weight zero. The ids of identity experts (LongCat-Flash) follow the ids of all experts with
        parameters. Their local ids follow the local experts.
        """
        count = self.layouts["down_proj"].shape[0]
        is_identity = index >= count if getattr(self, "zero_expert_num", 0) else None
        if is_identity is not None and not self.counts_identities:
            weights = weights.masked_fill(is_identity, 0)
        if not self.over_ranks:
            return index, weights
        is_own = (index >= self.first) & (index < self.first + self.num_experts)
        is_loop = not hasattr(self, "config") or self.config._experts_implementation == "eager"
        knows_others = not is_loop or self.loop_knows_others
        # A loop over no expert would skip the backward pass and its all-reduces, for which other ranks wait.
        other = self.num_experts if knows_others and not (is_loop and not bool(is_own.any())) else 0
        local = torch.where(is_own, index - self.first, other)
        if is_identity is not None:
            local = torch.where(is_identity, index - count + self.num_experts, local)
            is_own |= is_identity
        return local, weights.masked_fill(~is_own, 0)

    @contextmanager
    def _own_share_of_bias(self) -> Iterator[None]:
        """Replace the replicated output bias by this rank's share of it, since the sum over ranks includes it."""
        # Read the attribute: `_parameters` may hold a shard of the bias.
        bias = None if self.sharers == 1 else getattr(self, "down_proj_bias", None)
        own = {}
        if bias is not None:
            layout = self.layouts["down_proj_bias"]
            shared = copy_to(self.tp, bias) if layout.dim is None else SumReplicatedGrad.apply(bias, self.tp, layout)
            own["down_proj_bias"] = shared / self.sharers
        with override_attributes(self, own):
            yield
