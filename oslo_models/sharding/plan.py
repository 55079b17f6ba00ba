"""The sharding plan of an architecture: how each of its modules is sharded. Data only, without communication."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from oslo_models.sharding.head_counts import attribute_of_heads
from oslo_models.sharding.layout import EvenSplit, GroupedHeads, Layout, even_ranges

LocalValue = Callable[[int, int], int]
"""``(number of ranks, rank) -> value`` of an attribute that counts the heads or elements of one rank."""


@dataclass(frozen=True)
class Replicated:
    """Every rank holds the full module, including its submodules, and computes the same with it."""

    def layout(self, leaf: str, shape: tuple[int, ...], n: int) -> Layout:
        """The layout over ``n`` ranks of the parameter ``leaf`` (its last name, such as ``"weight"``)."""
        return Layout(shape)

    def max_ranks(self) -> int | None:
        """The largest number of ranks that the entry allows; ``None``: any."""
        return None

    def over_experts(self, groups: int) -> Replicated:
        """The entry with experts divided over so many groups of ranks; itself if it is of no experts."""
        return self


@dataclass(frozen=True)
class Norm(Replicated):
    """A normalisation, replicated. A separate entry, so that sequence parallelism can shard it."""


@dataclass(frozen=True)
class HeadNorm(Norm):
    """A normalisation of each attention head by itself, applied to the heads of this rank.

    Args:
        split: which rows of the weight belong to which heads; without it, all heads share the full weight, and its
            gradient is summed over the ranks.
    """

    split: EvenSplit | None = None

    def layout(self, leaf: str, shape: tuple[int, ...], n: int) -> Layout:
        return Layout(shape) if self.split is None else Layout.sharded(shape, 0, (self.split,), n)


@dataclass(frozen=True)
class WidthNorm(HeadNorm):
    """A root-mean-square normalisation over a sharded dimension: the mean is taken over all ranks."""


@dataclass(frozen=True)
class HeadNorms(Norm):
    """A list ``norms`` with one normalisation per head. Every rank holds all of them and applies those of its heads.

    Args:
        heads: how the heads are split over the ranks.
    """

    heads: EvenSplit


@dataclass(frozen=True)
class GroupWidthNorm(HeadNorm):
    """A root-mean-square normalisation of each group of heads, whose input may be gated: see `StateSpace`.

    Where a group is on several ranks, the mean is taken over these.

    Args:
        groups: the number of groups.
    """

    groups: int = 1


@dataclass(frozen=True)
class ColumnParallel(Replicated):
    """Shard the outputs of a linear layer: ``y_local = x @ W_local``. Its input is replicated.

    Args:
        splits: one split per matrix that the weight concatenates; without any, the output features are split evenly.
        parts: without splits, how many matrices of equal size the weight concatenates.
        transposed: the weight is stored ``[in, out]`` (``Conv1D``) rather than ``[out, in]`` (``nn.Linear``).
        dim: of a bare parameter or a buffer, the dimension that is sharded.

    Source: Shoeybi et al., "Megatron-LM", 2019, section 3.
    """

    splits: tuple[EvenSplit, ...] = ()
    parts: int = 1
    transposed: bool = False
    dim: int = 0

    def __init__(self, *splits: EvenSplit, parts: int = 1, transposed: bool = False, dim: int = 0) -> None:
        object.__setattr__(self, "splits", splits)
        object.__setattr__(self, "parts", parts)
        object.__setattr__(self, "transposed", transposed)
        object.__setattr__(self, "dim", dim)

    def layout(self, leaf: str, shape: tuple[int, ...], n: int) -> Layout:
        return self._sharded(shape, len(shape) - 1 if self.transposed else self.dim, n)

    def max_ranks(self) -> int | None:
        return min((split.max_ranks() for split in self.splits), default=None)

    def over_experts(self, groups: int) -> Replicated:
        splits = [split.over_experts(groups) for split in self.splits]
        if all(new is old for new, old in zip(splits, self.splits, strict=True)):
            return self
        return type(self)(*splits, parts=self.parts, transposed=self.transposed, dim=self.dim)

    def _sharded(self, shape: tuple[int, ...], dim: int, n: int) -> Layout:
        return Layout.sharded(shape, dim, self.splits or (EvenSplit(shape[dim] // self.parts),) * self.parts, n)


class RowParallel(ColumnParallel):
    """Shard the inputs of a linear layer; its partial outputs are all-reduced, then the bias is added.

    Args and source: as for ``ColumnParallel``.
    """

    def layout(self, leaf: str, shape: tuple[int, ...], n: int) -> Layout:
        return Layout(shape) if leaf == "bias" else self._sharded(shape, 0 if self.transposed else len(shape) - 1, n)


@dataclass(frozen=True)
class InnerRowParallel(RowParallel):
    """A row-parallel layer between sharded ones: each rank uses the full output for its own part of what follows.

    So the gradient of the output is summed over the ranks. Norms of it are a `HeadNorm`.

    Args:
        splits: as for ``ColumnParallel``. Inputs that several ranks hold (of key-value heads) count once.
        outputs: which outputs belong to which rank, that keeps its own of the sum; without it, each keeps all.
    """

    outputs: EvenSplit | None = None

    def __init__(self, *splits: EvenSplit, outputs: EvenSplit | None = None) -> None:
        super().__init__(*splits)
        object.__setattr__(self, "outputs", outputs)


@dataclass(frozen=True)
class Experts(Replicated):
    """Stacked gated experts: a rank holds a slice of the width of every expert or, under expert parallelism, full ones.

    Their parameters are ``gate_up_proj [experts, 2 * width, hidden]`` and ``down_proj [experts, hidden, width]``, and
    may be ``gate_up_proj_bias`` and ``down_proj_bias``. Those without gates have ``up_proj [experts, width, hidden]``.

    Args:
        transposed: the last two dimensions of the projections are exchanged.
        interleaved: rows of gate and up projection alternate.
        groups: over how many groups of consecutive ranks the experts are divided (expert parallelism). The ranks of
            a group share the width of its experts. More groups than ranks are over as many ranks of several replicas.
        shared: the name beside them of a gated MLP whose output is added to theirs, if there is one.
        identities: how many further experts return their input. They have rows in ``gate_up_proj`` that nothing reads.
    """

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
        return width.over_groups((*before, (start, shape[0])), share)  # with the rows that nothing reads

    def over_experts(self, groups: int) -> Replicated:
        return replace(self, groups=groups)

    def _over_width(self, leaf: str, shape: tuple[int, ...], n: int) -> Layout:
        if leaf == "down_proj_bias":
            return Layout(shape)
        if leaf == "down_proj":
            dim = 1 if self.transposed else 2
            return Layout.sharded(shape, dim, (_aligned(shape[dim], n),), n)
        dim = 2 if self.transposed and leaf == "gate_up_proj" else 1
        if leaf == "up_proj":
            return Layout.sharded(shape, 1, (_aligned(shape[1], n),), n)
        width = _aligned(shape[dim] // 2, n)
        splits = (EvenSplit(width.count, 2 * width.width),) if self.interleaved else (width, width)
        return Layout.sharded(shape, dim, splits, n)


@dataclass(frozen=True)
class DenseExperts(Experts):
    """Stacked gated experts that all compute every token, weighted by the router before (Llama 4).

    Their input has the tokens of a batch once for each expert. So no token is sent to an expert, and expert parallelism
    divides them over the ranks of one replica only.
    """

    def layout(self, leaf: str, shape: tuple[int, ...], n: int) -> Layout:
        if self.groups > n:
            raise ValueError(
                f"expert_parallel_size={self.groups} sends tokens to the experts of other replicas, and each of these "
                f"experts computes every token: use at most tensor_parallel_size={n}"
            )
        return super().layout(leaf, shape, n)


@dataclass(frozen=True)
class Latent(Replicated):
    """A replicated projection to a latent for all heads, and to the rotary part of a key that all heads share.

    Args:
        rotary: the number of its last outputs that are the rotary part.

    Source: DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1 (multi-head latent attention).
    """

    rotary: int


@dataclass(frozen=True)
class GroupedHeadsProjection(Replicated):
    """The weight ``[groups * out, heads of a group * head_dim]`` that projects each group of heads by itself.

    A rank has the rows of its groups. Where it has some of the heads of one group, it has the columns of these, and its
    outputs are partial sums: the layer after it is row-parallel over the groups.

    Args:
        heads: the heads, with groups in place of key-value heads.
    """

    heads: GroupedHeads

    def layout(self, leaf: str, shape: tuple[int, ...], n: int) -> Layout:
        heads = self.heads
        rows = Layout.sharded(shape, 0, (replace(heads, head_dim=shape[0] // heads.kv_heads).key_value,), n)
        if n <= heads.kv_heads:
            return rows
        width, own = heads.head_dim, heads.head_ranges(n)
        firsts = [group * heads.group for _, (group, _) in own]
        columns = [((a - first) * width, (b - first) * width) for first, ((a, b), _) in zip(firsts, own, strict=True)]
        return Layout(shape, 1, tuple((range_,) for range_ in columns), first_ranges=rows.ranges)

    def max_ranks(self) -> int | None:
        return self.heads.query_heads


@dataclass(frozen=True)
class SharedOutput(Replicated):
    """A replicated module whose output the ranks use for different heads: its gradient is summed over the ranks."""


def _aligned(width: int, n: int) -> EvenSplit:
    """The split of the width of an expert in units that grouped products can address, if there are enough of them.

    ``torch._grouped_mm`` wants strides of 16 bytes: 8 elements of two bytes, 4 of four.
    """
    unit = next((unit for unit in (16, 8, 4) if width % unit == 0 and width // unit >= n), 1)
    return EvenSplit(width // unit, unit)


@dataclass(frozen=True)
class EinsumHeads(Replicated):
    """An attention whose weights are parameters ``[..., heads, head_dim]`` of its own, applied by ``einsum``.

    Args:
        heads: its heads, of width 1.
        attributes: as of `LocalModule`.
    """

    heads: EvenSplit
    attributes: Mapping[str, LocalValue] = field(default_factory=dict)

    def layout(self, leaf: str, shape: tuple[int, ...], n: int) -> Layout:
        return Layout.sharded(shape, len(shape) - 2, (self.heads,), n)

    def max_ranks(self) -> int | None:
        return self.heads.max_ranks()


@dataclass(frozen=True)
class VocabParallel(Replicated):
    """Shard the rows of an embedding, of a language-model head or of its bias: one row per token of the vocabulary."""

    def layout(self, leaf: str, shape: tuple[int, ...], n: int) -> Layout:
        if shape[0] < n:
            raise ValueError(
                f"a vocabulary of {shape[0]} tokens cannot be sharded over tensor_parallel_size={n} ranks, as some of "
                f"them would have none: use at most {shape[0]}"
            )
        return Layout.sharded(shape, 0, (EvenSplit(shape[0]),), n)


@dataclass(frozen=True)
class ReplicatedEmbedding(Replicated):
    """A replicated token embedding."""


@dataclass(frozen=True)
class GlobalMinMax(Replicated):
    """A module that takes the minimum and maximum of a sharded activation, which are reduced over the ranks."""


@dataclass(frozen=True)
class GlobalMoments(Replicated):
    """A module that takes mean and standard deviation of a sharded activation, over the features of all ranks."""


@dataclass(frozen=True)
class ReplicatedDropout(Replicated):
    """A dropout between sharded layers whose input is replicated: all ranks have to draw the same mask."""


@dataclass(frozen=True)
class LocalModule(Replicated):
    """A module whose code counts heads or elements: on each rank, it has to count those of that rank.

    Its parameters need entries of their own.

    Args:
        attributes: integer attributes of the module, or of its ``config`` (``"config.num_heads"``). Those that the
            module lacks are ignored.
        per_head: arguments of its forward that have an entry for each head, such as ALiBi biases. Shape
            ``[heads, ...]`` or ``[rows * heads, ...]``, with four dimensions ``[rows, heads, ...]``.
        width: the heads of an attention that reshapes their outputs to the hidden size.
        shared: parameters of the module itself that its heads share: every rank holds them in full, and their
            gradients are summed over the ranks.
    """

    attributes: Mapping[str, LocalValue] = field(default_factory=dict)
    per_head: Mapping[str, EvenSplit] = field(default_factory=dict)
    width: EvenSplit | None = None
    shared: tuple[str, ...] = ()


@dataclass(frozen=True)
class SummedModule(LocalModule):
    """A module with sharded parameters, of entries of their own, whose output is a partial sum on each rank.

    Its inputs are replicated, such as the hidden states and router weights of experts.
    """


@dataclass(frozen=True)
class GroupMeans(LocalModule):
    """A module that takes means over the query heads of each key-value head: of all of them, whatever rank they are on.

    Args:
        heads: its heads.
    """

    heads: GroupedHeads = field(kw_only=True)


@dataclass(frozen=True)
class VectorExperts(LocalModule):
    """A mixture whose experts are pairs of vectors, with one feature between them: a rank has a part of each vector.

    The vectors are rows of two embeddings ``down_embed`` and ``up_embed``, which have entries of their own.

    Source: He, "Mixture of a Million Experts", 2024.
    """


@dataclass(frozen=True)
class ShortConvolution(LocalModule):
    """A module that applies the filters of a depthwise convolution inside it by itself, to a sharded activation.

    Args:
        attributes: as of `LocalModule`.
        convolution: the name of the convolution, whose parameters have entries of their own.
    """

    convolution: str = "conv1d"


@dataclass(frozen=True)
class StateSpace(ShortConvolution):
    """A state-space mixer, over its heads. What a group of heads shares is on every rank that has some of them.

    Args:
        attributes: as of `LocalModule`.
        convolution: as of `ShortConvolution`.
        scales: the name of a buffer ``[..., features]`` that scales the outputs of its ``in_proj``, if there is one.

    Source: Dao and Gu, "Transformers are SSMs", 2024, section 8.1 (tensor parallelism).
    """

    scales: str = ""


@dataclass(frozen=True)
class RecurrentState(LocalModule):
    """A recurrent mixer that is called with its states, tensors ``[rows, heads, ...]`` with an entry for every head.

    Its forward takes hidden states and a list of states or ``None``, and returns its output and the new states.

    Args:
        heads: its heads, or channels, of width 1.
        replicated: how many of the first states are of hidden states, and the same on every rank.
    """

    heads: EvenSplit = field(kw_only=True)
    replicated: int = 0


Entries = Mapping[str, Replicated]
InputPositions = Callable[[Mapping[str, Any]], tuple[int, int]]
"""``arguments of a forward -> (rows, positions)`` of the hidden states that they are embedded into."""


def entry_of(parameter: str, entries: Entries) -> str | None:
    """The name of the entry for a parameter: its own, that of its module, or of a replicated module around it."""
    module = parameter.rpartition(".")[0]
    for name in (parameter, module):
        if name in entries and not isinstance(entries[name], LocalModule):
            return name
    while module := module.rpartition(".")[0]:
        if type(entries.get(module)) in (Replicated, SharedOutput, HeadNorms):
            return module
    return None


@dataclass(frozen=True)
class Plan:
    """How one architecture is sharded. Module names are those of transformers' base model.

    Attributes:
        embed: the modules before the blocks.
        blocks: for each stack of blocks (its ``ModuleList``), the modules of one block, by their name inside it.
        head: the modules after the blocks.
        on_every_stage: modules outside the blocks that every pipeline stage needs.
        block_overrides: for each stack whose blocks differ, the entries of each block, by its number, beside or
            in place of those in ``blocks``.
        optional: names among the entries whose modules only some heads, configurations or blocks have.
        replicated_attentions: the outputs of the model that are attention weights of all heads on every rank; other
            attention weights are gathered.
        single_rank_reason: why no layer can be sharded, if none can.
        embedding_dropouts: the dropouts between the embeddings and the first block.
        disabled_after_first_stage: attributes by which the base model (or, ``"decoder.dropout"``, a module of it, or
            ``"config.mup_enabled"``, its configuration)
            changes the embedded tokens, or arguments by which it has them changed, with the values that disable this.
        copied_from_first_block: names among the entries of a block that only the first block has, and of which the
            first block of every pipeline stage needs a copy.
        input_positions: for each stack that embeds images or audio, the size that these have when embedded.
        early_outputs: modules before the blocks whose output the model returns too, with the width of it: it is sent
            to the last pipeline stage.
        continued_blocks: for each stack, the numbers of blocks that read what the block before them has computed beside
            the hidden states: no pipeline stage begins with one.
        outputs_per_block: modules among ``on_every_stage`` that output a tuple with an entry per block, with the stack
            of these blocks: a stage reads the entries of its own blocks.
        cache_layers_per_block: how many layers of a key-value cache each block fills: one for each of its attentions.
        keeps_layer_numbers: whether blocks keep their numbers on every pipeline stage: their cache makes a layer when
            its block uses it, and counts the positions in the first one.
        single_stage_reason: why the blocks cannot be split into pipeline stages, if they cannot.
    """

    embed: Entries
    blocks: Mapping[str, Entries]
    head: Entries
    on_every_stage: Entries = field(default_factory=dict)
    block_overrides: Mapping[str, Sequence[Entries]] = field(default_factory=dict)
    optional: Collection[str] = ()
    # tensor parallelism
    replicated_attentions: Collection[str] = ()
    single_rank_reason: str = ""
    # pipeline parallelism
    embedding_dropouts: Collection[str] = ()
    disabled_after_first_stage: Mapping[str, Any] = field(default_factory=dict)
    copied_from_first_block: Collection[str] = ()
    input_positions: Mapping[str, InputPositions] = field(default_factory=dict)
    early_outputs: Mapping[str, int] = field(default_factory=dict)
    continued_blocks: Mapping[str, Collection[int]] = field(default_factory=dict)
    outputs_per_block: Mapping[str, str] = field(default_factory=dict)
    cache_layers_per_block: int = 1
    keeps_layer_numbers: bool = False
    single_stage_reason: str = ""

    def with_experts_over(self, groups: int) -> Plan:
        """The plan with expert parallelism: each of so many groups of ranks holds some of the experts."""

        def over(entries: Entries) -> Entries:
            return {name: entry.over_experts(groups) for name, entry in entries.items()}

        blocks = {stack: over(entries) for stack, entries in self.blocks.items()}
        overrides = {stack: [*map(over, each)] for stack, each in self.block_overrides.items()}
        return replace(self, blocks=blocks, block_overrides=overrides)

    def entries_of_blocks(self, stack: str, indices: Sequence[str]) -> Iterator[tuple[str, Entries]]:
        """The entries of some blocks of ``stack``.

        Args:
            indices: their numbers as strings, as in the full model, whose plan this has to be.
        """
        overrides = self.block_overrides.get(stack)
        for index in indices:
            yield index, self.blocks[stack] if overrides is None else {**self.blocks[stack], **overrides[int(index)]}

    def kinds_of_blocks(self) -> list[Entries]:
        """The entries of each kind of block."""
        return [
            kind
            for stack, entries in self.blocks.items()
            for kind in [{**entries, **own} for own in self.block_overrides.get(stack, ())] or [{**entries}]
        ]

    def expert_entries(self, stack: str) -> dict[str, Experts]:
        """The entries of the experts inside a block of ``stack``, if it has any."""
        kinds = [self.blocks[stack], *self.block_overrides.get(stack, ())]
        return {name: entry for kind in kinds for name, entry in kind.items() if isinstance(entry, Experts)}

    def has_experts(self) -> bool:
        """Whether some blocks have a mixture of experts."""
        entries = [entry for kind in self.kinds_of_blocks() for entry in kind.values()]
        return any(entry.over_experts(2) is not entry for entry in entries)

    def max_ranks(self) -> int | None:
        """The largest tensor_parallel_size that every entry allows; ``None``: any."""
        limits = [entry.max_ranks() for entries in self.kinds_of_blocks() for entry in entries.values()]
        return min((limit for limit in limits if limit is not None), default=None)

    def check_ranks(self, name: str, config: Any, count: int) -> None:
        """Raise ``ValueError`` if the model ``name``, with a ``config``, cannot be sharded over ``count`` ranks."""
        limit, more = self.max_ranks(), f"tensor_parallel_size={count} is more than"
        if count > 1 and self.single_rank_reason:
            raise ValueError(f"{more} 1, all that {name} allows: {self.single_rank_reason}")
        if limit is not None and count > limit:
            allowed = f"1 to {limit}" if limit > 1 else "1"
            raise ValueError(f"{more} {self._limiting_heads(config, limit)} of {type(config).__name__}; use {allowed}")

    def _limiting_heads(self, config: Any, limit: int) -> str:
        """Which heads allow at most ``limit`` ranks. State-space and linear-attention layers have an ``A_log``."""
        modules = {
            (name.split(".")[0], f"{name.split('.')[0]}.A_log" in entries)
            for entries in self.kinds_of_blocks()
            for name, entry in entries.items()
            if entry.max_ranks() == limit
        }
        named = " and ".join(sorted({module for module, _ in modules}))
        if modules and all(is_recurrent for _, is_recurrent in modules):
            return f"the {limit} heads of each {named}"
        if attribute := attribute_of_heads(config, limit):
            return f"{attribute}={limit}"
        return f"the {limit} indivisible group{'s' * (limit > 1)} of heads of each {named}"

    def check_stages(self, name: str, count: int) -> None:
        """Raise ``ValueError`` if the model ``name`` cannot be split into ``count`` pipeline stages at all."""
        if count > 1 and self.single_stage_reason:
            raise ValueError(
                f"pipeline_parallel_size={count} is more than 1, all that {name} allows: {self.single_stage_reason}"
            )

    def under(self, prefix: str) -> Plan:
        """The plan of a model in which the names of the base model's modules begin with ``prefix``."""
        by_name = ["embed", "blocks", "head", "on_every_stage", "block_overrides"]
        by_name += ["disabled_after_first_stage", "input_positions", "early_outputs", "continued_blocks"]
        renamed: dict[str, Any] = {
            name: {prefix + key: value for key, value in getattr(self, name).items()} for name in by_name
        }
        renamed["outputs_per_block"] = {prefix + key: prefix + of for key, of in self.outputs_per_block.items()}
        return replace(self, **renamed, embedding_dropouts=[prefix + key for key in self.embedding_dropouts])

    def inside(self, prefix: str) -> tuple[Plan, Entries]:
        """The inverse of `under`: the plan of the base model, and the entries of modules outside of it."""
        outside: dict[str, Replicated] = {}
        renamed: dict[str, Any] = {}
        for each in ("embed", "blocks", "head", "on_every_stage"):
            entries = getattr(self, each)
            renamed[each] = {
                key.removeprefix(prefix): entry for key, entry in entries.items() if key.startswith(prefix)
            }
            if each != "blocks":
                outside |= {key: entry for key, entry in entries.items() if not key.startswith(prefix)}
        by_name = ("disabled_after_first_stage", "input_positions", "early_outputs", "block_overrides")
        for each in (*by_name, "continued_blocks"):
            renamed[each] = {key.removeprefix(prefix): value for key, value in getattr(self, each).items()}
        per_block = self.outputs_per_block.items()
        renamed["outputs_per_block"] = {key.removeprefix(prefix): of.removeprefix(prefix) for key, of in per_block}
        dropouts = tuple(key.removeprefix(prefix) for key in self.embedding_dropouts)
        return replace(self, **renamed, embedding_dropouts=dropouts), outside

    def __or__(self, other: Plan) -> Plan:
        """The plan of a model that runs the blocks of this plan and then those of another."""
        both: dict[str, Any] = {}
        for each in fields(self):
            one, two = getattr(self, each.name), getattr(other, each.name)
            if isinstance(one, Mapping):
                both[each.name] = {**one, **two}
            elif isinstance(one, int):
                both[each.name] = max(one, two)
            else:
                both[each.name] = one or two if isinstance(one, str) else (*one, *two)
        return Plan(**both)
