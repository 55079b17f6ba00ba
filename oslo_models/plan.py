"""What an architecture file states: which module is divided how. Data only; it knows nothing of ranks that talk."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from oslo_models.layout import Layout, Split, Units


@dataclass(frozen=True)
class Replicated:
    """Every rank holds the whole module and computes the same with it."""

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
class Column(Replicated):
    """Divide the outputs of a linear layer: ``y_local = x @ W_local``. Its input is whole on every rank.

    Args:
        splits: one rule per matrix that the weight holds side by side; none divides all outputs evenly, one by one.
        transposed: the weight is kept ``[in, out]`` (``Conv1D``) rather than ``[out, in]`` (``nn.Linear``).

    Source: Shoeybi et al., "Megatron-LM", 2019, section 3.
    """

    splits: tuple[Split, ...] = ()
    transposed: bool = False

    def __init__(self, *splits: Split, transposed: bool = False) -> None:
        object.__setattr__(self, "splits", splits)
        object.__setattr__(self, "transposed", transposed)

    def layout(self, leaf: str, shape: tuple[int, ...], n: int) -> Layout:
        dim = len(shape) - 1 if self.transposed else 0
        return Layout.divided(shape, dim, self.splits or (Units(shape[dim]),), n)

    def limit(self) -> int | None:
        return min((split.limit() for split in self.splits), default=None)


@dataclass(frozen=True)
class Row(Replicated):
    """Divide the inputs of a linear layer; its partial outputs are summed over the ranks, then the bias is added.

    Args and source: as for ``Column``.
    """

    split: Split | None = None
    transposed: bool = False

    def layout(self, leaf: str, shape: tuple[int, ...], n: int) -> Layout:
        if leaf == "bias":
            return Layout(shape)
        dim = 0 if self.transposed else len(shape) - 1
        return Layout.divided(shape, dim, (self.split or Units(shape[dim]),), n)

    def limit(self) -> int | None:
        return self.split.limit() if self.split else None


@dataclass(frozen=True)
class Vocab(Replicated):
    """Divide the rows of an embedding, of a language-model head or of its bias: one row per word of the vocabulary."""

    def layout(self, leaf: str, shape: tuple[int, ...], n: int) -> Layout:
        return Layout.divided(shape, 0, (Units(shape[0]),), n)


Entries = Mapping[str, Replicated]
LocalValue = Callable[[int, int], int]
"""``(number of ranks, rank) -> value`` of an attribute that counts local heads or local elements."""


@dataclass(frozen=True)
class Plan:
    """How one architecture divides. Names are those of transformers' base model.

    Attributes:
        embed: the modules before the blocks.
        blocks: for each stack of blocks (its ``ModuleList``), the modules of one block, by their name inside it.
        head: the modules after the blocks.
        local: integer attributes of modules inside a block that have to count what is local, by name inside the block.
        optional: names among the entries whose modules only some heads, configurations or blocks have.
        dropout: the dropouts between the embeddings and the first block.
        carried: names among the entries of a block that only the first block has, and that the first block of every
            pipeline stage needs.
    """

    embed: Entries
    blocks: Mapping[str, Entries]
    head: Entries
    local: Mapping[str, LocalValue] = field(default_factory=dict)
    optional: Collection[str] = ()
    dropout: Collection[str] = ()
    carried: Collection[str] = ()

    def limit(self) -> int | None:
        """The largest tensor_parallel_size that every entry allows; ``None``: any."""
        entries = [entry for stack in self.blocks.values() for entry in stack.values()]
        limits = [entry.limit() for entry in entries]
        return min((limit for limit in limits if limit is not None), default=None)
