"""RWKV-4: linear recurrences over channels in place of attention, and an MLP with a replicated gate."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import RwkvConfig
from transformers.models.rwkv import modeling_rwkv as hf

from oslo_models.distributed.autograd_collectives import gather_from
from oslo_models.layers.entries import ColumnParallel, Norm, Plan, Replicated, RowParallel, VocabParallel
from oslo_models.layers.kinds import ShardedModule, ShardingContext, shards
from oslo_models.layers.local_attributes import LocalAttributes, set_local_attributes
from oslo_models.modeling.base import ParallelModel
from oslo_models.sharding.layout import EvenSplit


@dataclass(frozen=True)
class RecurrentState(LocalAttributes):
    """Recurrent mixer that takes its states as arguments: tensors ``[rows, heads, ...]`` with an entry for every head.

    The forward takes hidden states and a list of states or ``None``. It returns its output and the new states.

    Args:
        heads: the split of the heads or channels, of width 1.
        replicated: number of leading states that store hidden states and are replicated on every rank.
    """

    is_recurrent: ClassVar[bool] = True
    heads: EvenSplit = field(kw_only=True)
    replicated: int = 0


@shards(RecurrentState)
class RecurrentStateLayer(ShardedModule):
    """Mixin before a recurrent mixer. Passes the states of the local heads to the mixer.

    States keep transformers' shapes, with entries for all heads. A rank reads and computes the entries of its local
    heads.

    Attributes:
        heads: split of the heads, of width 1.
        replicated: number of leading states that every rank reads and writes in full.
        completes: whether to gather the entries of other ranks, too. `generate` does not read them.
    """

    heads: EvenSplit
    replicated: int
    completes = True

    def configure(self, entry: RecurrentState, context: ShardingContext) -> None:
        super().configure(entry, context)
        self.heads, self.replicated = entry.heads, entry.replicated
        set_local_attributes(self, entry.attributes, context.tp)

    def forward(self, hidden: Tensor, state: Sequence[Tensor] | None = None, **kwargs: Any) -> Any:
        if state is None:
            return super().forward(hidden, None, **kwargs)
        start, stop = self.heads.ranges(self.tp.size)[self.tp.rank]
        own = [*state[: self.replicated], *(each[:, start:stop] for each in state[self.replicated :])]
        output, new = super().forward(hidden, own, **kwargs)
        if new is not own:  # new tensors instead of in-place writes
            for before, after in zip(own, new, strict=True):
                before.copy_(after)
        if self.completes:
            self._gather(state[self.replicated :])
        return output, state

    @torch.no_grad()
    def _gather(self, states: Sequence[Tensor]) -> None:
        """Write the entries of the heads of other ranks."""
        ranges = self.heads.ranges(self.tp.size)
        start, stop = ranges[self.tp.rank]
        for each in states:
            full = gather_from(self.tp, each[:, start:stop].contiguous(), 1, [end - begin for begin, end in ranges])
            each[:, :start], each[:, stop:] = full[:, :start], full[:, stop:]


class RecurrentParallel(ParallelModel):
    """Model that returns the states of all heads on every rank, except within ``generate``."""

    @contextmanager
    def generating(self) -> Iterator[None]:
        layers = [] if self._generates else [each for each in self.modules() if isinstance(each, RecurrentStateLayer)]
        for layer in layers:
            layer.completes = False
        try:
            with super().generating():
                yield
        finally:
            for layer in layers:
                layer.completes = True


class RwkvParallel(RecurrentParallel):
    """Sharding plan of the RWKV family.

    In a state that ``generate`` returns, each rank has written its local channels only.

    Outside of training, transformers divides some weights by powers of two (``rescale_every``), until the next forward
    pass in training mode. Save the model before evaluation.
    """

    @classmethod
    def plan(cls, config: Any) -> Plan:
        mixes = [f"attention.time_mix_{name}" for name in ("key", "value", "receptance")]
        mixes += [f"feed_forward.time_mix_{name}" for name in ("key", "receptance")]
        of_channels = ("time_decay", "time_first", "key", "value", "receptance")
        block = {
            "pre_ln": Norm(),
            "ln1": Norm(),
            "attention": RecurrentState(heads=EvenSplit(config.attention_hidden_size), replicated=2),
            **{f"attention.{name}": ColumnParallel() for name in of_channels},
            "attention.output": RowParallel(),
            "ln2": Norm(),
            **dict.fromkeys(mixes, Replicated()),
            "feed_forward.key": ColumnParallel(),
            "feed_forward.receptance": Replicated(),
            "feed_forward.value": RowParallel(),
        }
        return Plan(
            embed={"embeddings": VocabParallel()},
            blocks={"blocks": block},
            head={"ln_out": Norm()},
            optional=("pre_ln",),  # only the first block has it
        ).with_rules(single_stage_reason="its blocks do what their numbers in the full model say, and share a state")

    def _initialized_whole(self) -> list[str]:
        """Initialize every matrix in full, because its rows are made orthogonal."""
        matrices = [name for name, module in self.named_modules() if isinstance(module, (nn.Linear, nn.Embedding))]
        return [*super()._initialized_whole(), *matrices]


class RwkvModel(RwkvParallel, hf.RwkvModel):
    pass


class RwkvForCausalLM(RwkvParallel, hf.RwkvForCausalLM):
    head_plan = {"head": VocabParallel()}
