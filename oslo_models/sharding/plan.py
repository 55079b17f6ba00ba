"""What an architecture file states: which module is divided how. Data only; it knows nothing of ranks that talk."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from oslo_models.sharding.layout import EvenSplit, Layout


@dataclass(frozen=True)
class Replicated:
    """Every rank holds the whole module, with all that is in it, and computes the same with it."""

    def layout(self, leaf: str, shape: tuple[int, ...], n: int) -> Layout:
        """The layout over ``n`` ranks of the parameter ``leaf`` (its last name, such as ``"weight"``)."""
        return Layout(shape)

    def limit(self) -> int | None:
        """The largest number of ranks that the entry allows; ``None``: any."""
        return None


@dataclass(frozen=True)
class Norm(Replicated):
    """A normalisation. Replicated today; an entry of its own, so that sequence parallelism can divide it."""


@dataclass(frozen=True)
class HeadNorm(Norm):
    """A normalisation inside a divided region, of what a rank holds there: of each of its heads by itself.

    Args:
        split: which rows of the weight go with which heads; without it, all heads share the whole weight, and its
            gradient is summed over the ranks.
    """

    split: EvenSplit | None = None

    def layout(self, leaf: str, shape: tuple[int, ...], n: int) -> Layout:
        return Layout(shape) if self.split is None else Layout.divided(shape, 0, (self.split,), n)


@dataclass(frozen=True)
class WidthNorm(HeadNorm):
    """A root-mean-square normalisation over a width that is divided: the mean is taken over the ranks."""


@dataclass(frozen=True)
class HeadNorms(Norm):
    """A list ``norms`` of a normalisation for each head, all of which every rank holds, though it applies its own.

    Args:
        heads: which rank has which heads.
    """

    heads: EvenSplit


@dataclass(frozen=True)
class ColumnParallel(Replicated):
    """Divide the outputs of a linear layer: ``y_local = x @ W_local``. Its input is whole on every rank.

    Args:
        splits: one rule per matrix that the weight holds side by side; none divides all outputs evenly, one by one.
        parts: without splits, how many matrices of one size the weight holds side by side.
        transposed: the weight is kept ``[in, out]`` (``Conv1D``) rather than ``[out, in]`` (``nn.Linear``).

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
        return self._divided(shape, len(shape) - 1 if self.transposed else 0, n)

    def limit(self) -> int | None:
        return min((split.limit() for split in self.splits), default=None)

    def _divided(self, shape: tuple[int, ...], dim: int, n: int) -> Layout:
        return Layout.divided(shape, dim, self.splits or (EvenSplit(shape[dim] // self.parts),) * self.parts, n)


class RowParallel(ColumnParallel):
    """Divide the inputs of a linear layer; its partial outputs are summed over the ranks, then the bias is added.

    Args and source: as for ``ColumnParallel``.
    """

    def layout(self, leaf: str, shape: tuple[int, ...], n: int) -> Layout:
        return Layout(shape) if leaf == "bias" else self._divided(shape, 0 if self.transposed else len(shape) - 1, n)


@dataclass(frozen=True)
class EinsumHeads(Replicated):
    """An attention that keeps bare tensors ``[..., heads, width]`` and applies them by ``einsum``.

    Args:
        heads: its heads, of width 1.
    """

    heads: EvenSplit

    def layout(self, leaf: str, shape: tuple[int, ...], n: int) -> Layout:
        return Layout.divided(shape, len(shape) - 2, (self.heads,), n)

    def limit(self) -> int | None:
        return self.heads.limit()


@dataclass(frozen=True)
class VocabParallel(Replicated):
    """Divide the rows of an embedding, of a language-model head or of its bias: one row per word of the vocabulary."""

    def layout(self, leaf: str, shape: tuple[int, ...], n: int) -> Layout:
        return Layout.divided(shape, 0, (EvenSplit(shape[0]),), n)


@dataclass(frozen=True)
class ReplicatedEmbedding(Replicated):
    """The embedding of the words, where it is whole on every rank."""


@dataclass(frozen=True)
class GlobalMinMax(Replicated):
    """A module that looks for the smallest and largest element of a divided activation: they are those of all ranks."""


Entries = Mapping[str, Replicated]
Positions = Callable[[Mapping[str, Any]], tuple[int, int]]
"""``arguments of a forward -> (rows, positions)`` of the hidden states that they lead to."""
LocalValue = Callable[[int, int], int]
"""``(number of ranks, rank) -> value`` of an attribute that counts local heads or local elements."""


def entry_of(parameter: str, entries: Entries) -> str | None:
    """The name of the entry that a parameter belongs to: its own, its module's, or a replicated one around that."""
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
    """How one architecture divides. Names are those of transformers' base model.

    Attributes:
        embed: the modules before the blocks.
        blocks: for each stack of blocks (its ``ModuleList``), the modules of one block, by their name inside it.
        head: the modules after the blocks.
        beside: modules that are neither before nor after the blocks, and that every pipeline stage needs.
        local: integer attributes of modules inside a block, or of their ``config``, that have to count what is local,
            by name inside the block, with the name of the stack before it where stacks have different numbers of heads;
            modules that lack them are left alone.
        per_head: arguments of modules inside a block that speak of each head, such as the biases of ALiBi, by name
            inside the block (``"attention.alibi"``). Shape ``[heads, ...]`` or ``[rows * heads, ...]``, with four
            dimensions ``[rows, heads, ...]``.
        neutral: attributes by which the base model (or, ``"decoder.dropout"``, a module of it) changes the embedded
            tokens, or arguments by which it has them changed, and the values with which it would not.
        optional: names among the entries whose modules only some heads, configurations or blocks have.
        dropout: the dropouts between the embeddings and the first block.
        carried: names among the entries of a block that only the first block has, and that the first block of every
            pipeline stage needs.
        whole_dropout: dropouts amid a divided region, by name inside the block, whose input is whole on every rank.
        one_stage: why the blocks cannot be divided into pipeline stages, if they cannot.
        one_rank: why no layer can be divided over ranks, if none can.
        widths: attentions that give what their heads made the width of what they were given, and their heads; named as
            in ``local``.
        whole: attention weights among the outputs that every rank has of all heads, where those of other attentions are
            divided.
        positions: for each stack that embeds something else than words (an image, a sound), how large that becomes.
        returned: modules before the blocks whose output is among those of the model, too, with its width: it travels to
            the last pipeline stage.
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
        """The largest tensor_parallel_size that every entry allows; ``None``: any."""
        entries = [entry for stack in self.blocks.values() for entry in stack.values()]
        limits = [entry.limit() for entry in entries]
        return min((limit for limit in limits if limit is not None), default=None)

    def check_ranks(self, name: str, config: str, count: int) -> None:
        """Raise ``ValueError`` if the model ``name``, with a ``config``, cannot be divided over ``count`` ranks."""
        limit, more = self.limit(), f"tensor_parallel_size={count} is more than"
        if count > 1 and self.one_rank:
            raise ValueError(f"{more} 1, all that {name} allows: {self.one_rank}")
        if limit is not None and count > limit:
            raise ValueError(f"{more} num_attention_heads={limit} of {config}; use 1 to {limit}")

    def under(self, prefix: str) -> Plan:
        """The plan of a model in which the names of the base model's modules begin with ``prefix``."""

        def inside(values: Mapping[str, Any]) -> dict[str, Any]:
            """Of names inside a block, with the name of each stack before them."""
            stacks, own = self.blocks, values.items()
            return {f"{prefix}{stack}.{key.removeprefix(f'{stack}.')}": value for stack in stacks for key, value in own}

        renamed: dict[str, Any] = {name: inside(getattr(self, name)) for name in ("local", "per_head", "widths")}
        for name in ("embed", "blocks", "head", "beside", "neutral", "positions", "returned"):
            renamed[name] = {prefix + key: value for key, value in getattr(self, name).items()}
        return replace(self, **renamed, dropout=[prefix + key for key in self.dropout])

    def __or__(self, other: Plan) -> Plan:
        """The plan of a model that runs the blocks of this plan and then those of another."""
        both: dict[str, Any] = {}
        for each in fields(self):
            one, two = getattr(self, each.name), getattr(other, each.name)
            if isinstance(one, Mapping):
                both[each.name] = {**one, **two}
            else:
                both[each.name] = one or two if isinstance(one, str) else (*one, *two)
        return Plan(**both)

    def check_stages(self, name: str, count: int) -> None:
        """Raise ``ValueError`` if the model ``name`` cannot be divided into ``count`` pipeline stages at all."""
        if count > 1 and self.one_stage:
            raise ValueError(f"pipeline_parallel_size={count} is more than 1, all that {name} allows: {self.one_stage}")
