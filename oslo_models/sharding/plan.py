"""The parallelization plan that each architecture states: how every module is sharded. Data only."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from oslo_models.sharding.layout import EvenSplit, Layout


@dataclass(frozen=True)
class Replicated:
    """A module that every rank holds in full, with all its submodules; all ranks compute the same."""

    def layout(self, leaf: str, shape: tuple[int, ...], n: int) -> Layout:
        """The layout of a parameter over ``n`` ranks.

        Args:
            leaf: the last part of the parameter's name, such as ``"weight"``.
            shape: its full shape.
        """
        return Layout(shape)

    def limit(self) -> int | None:
        """The largest number of ranks that the module can be sharded over; ``None`` if there is no limit."""
        return None


@dataclass(frozen=True)
class Norm(Replicated):
    """A normalization. Replicated; an entry of its own, so that sequence parallelism could shard it."""


@dataclass(frozen=True)
class HeadNorm(Norm):
    """A normalization of each attention head by itself, inside a sharded region.

    Args:
        split: how the rows of the weight are split among the heads. Without it all heads share the full weight, whose
            gradient is then summed over the ranks.
    """

    split: EvenSplit | None = None

    def layout(self, leaf: str, shape: tuple[int, ...], n: int) -> Layout:
        return Layout(shape) if self.split is None else Layout.divided(shape, 0, (self.split,), n)


@dataclass(frozen=True)
class WidthNorm(HeadNorm):
    """An RMS normalization over all features of a sharded activation: the mean square is taken over all ranks."""


@dataclass(frozen=True)
class HeadNorms(Norm):
    """A module with a list ``norms`` of one normalization per head; ranks hold all and apply those of their heads.

    Args:
        heads: how the heads are split.
    """

    heads: EvenSplit


@dataclass(frozen=True)
class ColumnParallel(Replicated):
    """A linear layer with sharded outputs: ``y_local = x @ W_local``. Its input is replicated.

    Args:
        splits: one for each matrix that the weight concatenates; without any, the output features are split evenly.
        parts: without splits, the number of equally large matrices that the weight concatenates.
        transposed: the weight is ``[in, out]`` (``Conv1D``) instead of ``[out, in]`` (``nn.Linear``).

    Source: Shoeybi et al., "Megatron-LM", 2019, section 3.
    """

    splits: tuple[EvenSplit, ...] = ()
    parts: int = 1
    transposed: bool = False

    def __init__(self, *splits: EvenSplit, parts: int = 1, transposed: bool = False) -> None:
        object.__setattr__(self, "splits", splits)
        object.__setattr__(self, "parts", parts)
        object.__setattr__(self, "transposed", transposed)

    def layout(self, leaf: str, shape: tuple[int, ...], n: int) -> Layout:
        return self._sharded(shape, len(shape) - 1 if self.transposed else 0, n)

    def limit(self) -> int | None:
        return min((split.limit() for split in self.splits), default=None)

    def _sharded(self, shape: tuple[int, ...], dim: int, n: int) -> Layout:
        return Layout.divided(shape, dim, self.splits or (EvenSplit(shape[dim] // self.parts),) * self.parts, n)


class RowParallel(ColumnParallel):
    """A linear layer with sharded inputs. Its partial outputs are summed over the ranks, then the bias is added.

    Args and source: as for ``ColumnParallel``.
    """

    def layout(self, leaf: str, shape: tuple[int, ...], n: int) -> Layout:
        return Layout(shape) if leaf == "bias" else self._sharded(shape, 0 if self.transposed else len(shape) - 1, n)


@dataclass(frozen=True)
class EinsumHeads(Replicated):
    """An attention whose weights are parameters ``[..., heads, width]`` of its own, applied with ``einsum``.

    Args:
        heads: how the heads are split; of width 1.
    """

    heads: EvenSplit

    def layout(self, leaf: str, shape: tuple[int, ...], n: int) -> Layout:
        return Layout.divided(shape, len(shape) - 2, (self.heads,), n)

    def limit(self) -> int | None:
        return self.heads.limit()


@dataclass(frozen=True)
class VocabParallel(Replicated):
    """An embedding, a language-model head or its bias, with the vocabulary sharded: one row per token."""

    def layout(self, leaf: str, shape: tuple[int, ...], n: int) -> Layout:
        return Layout.divided(shape, 0, (EvenSplit(shape[0]),), n)


@dataclass(frozen=True)
class ReplicatedEmbedding(Replicated):
    """A token embedding that every rank holds in full."""


@dataclass(frozen=True)
class GlobalMinMax(Replicated):
    """A module that takes the minimum and maximum of a sharded activation: they are taken over all ranks."""


Entries = Mapping[str, Replicated]
Positions = Callable[[Mapping[str, Any]], tuple[int, int]]
"""``arguments of a forward -> (rows, length)`` of the hidden states that it computes."""
LocalValue = Callable[[int, int], int]
"""``(number of ranks, rank) -> value`` of an attribute that counts local heads or local features."""


def entry_of(parameter: str, entries: Entries) -> str | None:
    """The entry of a parameter: under its own name, that of its module, or that of a replicated module around it."""
    module = parameter.rpartition(".")[0]
    for name in (parameter, module):
        if name in entries:
            return name
    while module := module.rpartition(".")[0]:
        if type(entries.get(module)) in (Replicated, HeadNorms):
            return module
    return None


@dataclass(frozen=True)
class Plan:
    """How one architecture is parallelized. Names are those of transformers' base model.

    Attributes:
        embed: the modules before the blocks.
        blocks: for each ``ModuleList`` of blocks (a stack), the modules of one block by their names inside it.
        head: the modules after the blocks.
        beside: modules outside the blocks that every pipeline stage needs.
        local: integer attributes of modules inside a block, or of their ``config``, that have to count local heads or
            features. Keys are names inside the block, prefixed with the stack where stacks have different numbers of
            heads; modules without the attribute are skipped.
        per_head: arguments of modules inside a block with one element per head, such as ALiBi biases, by name inside
            the block (``"attention.alibi"``). Shape ``[heads, ...]`` or ``[rows * heads, ...]``, with four
            dimensions ``[rows, heads, ...]``.
        neutral: attributes of the base model or its modules (``"decoder.dropout"``), or arguments of its modules, that
            change the embeddings, and the values that disable this on later pipeline stages.
        optional: names of entries whose modules exist only with some heads, configurations or blocks.
        dropout: the dropouts between the embeddings and the first block.
        carried: names of entries that only the first block has, and that the first block of every pipeline stage needs.
        whole_dropout: dropouts inside a sharded region, by name inside the block, whose input is replicated.
        one_stage: the reason why the blocks cannot be split into pipeline stages, if they cannot.
        one_rank: the reason why no layer can be sharded, if none can.
        widths: attentions that reshape their output to the full hidden size, and their heads; named as in ``local``.
        whole: names of attention weights among the outputs that are replicated; those of other attentions are sharded.
        positions: for each stack that embeds images or audio instead of tokens, the size of its hidden states.
        returned: modules before the blocks whose output the model returns too, with its width: it is sent on to the
            last pipeline stage.
    """

    embed: Entries
    blocks: Mapping[str, Entries]
    head: Entries
    beside: Entries = field(default_factory=dict)
    local: Mapping[str, LocalValue] = field(default_factory=dict)
    per_head: Mapping[str, EvenSplit] = field(default_factory=dict)
    neutral: Mapping[str, Any] = field(default_factory=dict)
    optional: Collection[str] = ()
    dropout: Collection[str] = ()
    carried: Collection[str] = ()
    whole_dropout: Collection[str] = ()
    one_stage: str = ""
    one_rank: str = ""
    widths: Mapping[str, EvenSplit] = field(default_factory=dict)
    whole: Collection[str] = ()
    positions: Mapping[str, Positions] = field(default_factory=dict)
    returned: Mapping[str, int] = field(default_factory=dict)

    def limit(self) -> int | None:
        """The largest tensor_parallel_size that every entry allows; ``None`` if there is no limit."""
        entries = [entry for stack in self.blocks.values() for entry in stack.values()]
        limits = [entry.limit() for entry in entries]
        return min((limit for limit in limits if limit is not None), default=None)

    def check_ranks(self, name: str, config: str, count: int) -> None:
        """Raise ``ValueError`` if the model ``name``, with a ``config``, cannot be sharded over ``count`` ranks."""
        limit, more = self.limit(), f"tensor_parallel_size={count} is more than"
        if count > 1 and self.one_rank:
            raise ValueError(f"{more} 1, all that {name} allows: {self.one_rank}")
        if limit is not None and count > limit:
            raise ValueError(f"{more} num_attention_heads={limit} of {config}; use 1 to {limit}")

    def under(self, prefix: str) -> Plan:
        """The same plan with ``prefix`` in front of the names of the base model's modules."""

        def inside(values: Mapping[str, Any]) -> dict[str, Any]:
            """Prefix names inside a block with the name of each stack."""
            stacks, own = self.blocks, values.items()
            return {f"{prefix}{stack}.{key.removeprefix(f'{stack}.')}": value for stack in stacks for key, value in own}

        renamed: dict[str, Any] = {name: inside(getattr(self, name)) for name in ("local", "per_head", "widths")}
        for name in ("embed", "blocks", "head", "beside", "neutral", "positions", "returned"):
            renamed[name] = {prefix + key: value for key, value in getattr(self, name).items()}
        return replace(self, **renamed, dropout=[prefix + key for key in self.dropout])

    def __or__(self, other: Plan) -> Plan:
        """The plan of a model that runs the blocks of this plan and then those of ``other``."""
        both: dict[str, Any] = {}
        for each in fields(self):
            one, two = getattr(self, each.name), getattr(other, each.name)
            if isinstance(one, Mapping):
                both[each.name] = {**one, **two}
            else:
                both[each.name] = one or two if isinstance(one, str) else (*one, *two)
        return Plan(**both)

    def check_stages(self, name: str, count: int) -> None:
        """Raise ``ValueError`` if the model ``name`` cannot be split into ``count`` pipeline stages at all."""
        if count > 1 and self.one_stage:
            raise ValueError(f"pipeline_parallel_size={count} is more than 1, all that {name} allows: {self.one_stage}")
