"""Sharding plan of an architecture: one entry per sharded module. Data only, without communication."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from oslo_models.sharding.head_counts import attribute_of_heads
from oslo_models.sharding.layout import EvenSplit, GroupedHeads, Layout, even_ranges

LocalValue = Callable[[int, int], int]
"""``(number of ranks, rank) -> value`` of an attribute that counts local heads or elements."""


@dataclass(frozen=True)
class Replicated:
    """Replicated module. Every rank holds it in full, with its submodules, and computes the same output."""

    def layout(self, leaf: str, shape: tuple[int, ...], n: int) -> Layout:
        """Return the layout of the parameter ``leaf`` (its last name, such as ``"weight"``) over ``n`` ranks."""
        return Layout(shape)

    def max_ranks(self) -> int | None:
        """Return the largest number of ranks that the entry allows, or ``None`` for any number."""
        return None

    def over_experts(self, groups: int) -> Replicated:
        """Return a copy with experts divided over ``groups`` groups of ranks. Other entries return ``self``."""
        return self


@dataclass(frozen=True)
class Norm(Replicated):
    """Replicated norm. The separate entry allows sequence parallelism to shard it."""


@dataclass(frozen=True)
class HeadNorm(Norm):
    """Norm of each attention head by itself, applied to the local heads.

    Args:
        split: assigns the rows of the weight to heads. Without it, all heads share the full weight, and its gradient
            is all-reduced.
    """

    split: EvenSplit | None = None

    def layout(self, leaf: str, shape: tuple[int, ...], n: int) -> Layout:
        return Layout(shape) if self.split is None else Layout.sharded(shape, 0, (self.split,), n)


@dataclass(frozen=True)
class WidthNorm(HeadNorm):
    """RMS norm over a sharded dimension. The mean is taken over all ranks."""


@dataclass(frozen=True)
class HeadNorms(Norm):
    """List ``norms`` with one norm per head. Every rank holds all norms and applies them to its local heads.

    Args:
        heads: the split of the heads over the ranks.
    """

    heads: EvenSplit


@dataclass(frozen=True)
class GroupWidthNorm(HeadNorm):
    """RMS norm of each group of heads, with an optional gate on its input. See `StateSpace`.

    If several ranks hold parts of a group, the mean is taken over these ranks.

    Args:
        groups: the number of groups.
    """

    groups: int = 1


@dataclass(frozen=True)
class ColumnParallel(Replicated):
    """Shard the output features of a linear layer: ``y_local = x @ W_local``. The input is replicated.

    Args:
        splits: one split per matrix that the weight concatenates. Without splits, output features are split evenly.
        parts: number of matrices of equal size that the weight concatenates. Read only without splits.
        transposed: the weight is stored ``[in, out]`` (``Conv1D``) rather than ``[out, in]`` (``nn.Linear``).
        dim: sharded dimension of a bare parameter or a buffer.

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
    """Shard the input features of a linear layer. Partial outputs are all-reduced, then the bias is added.

    Args and source: as for ``ColumnParallel``.
    """

    def layout(self, leaf: str, shape: tuple[int, ...], n: int) -> Layout:
        return Layout(shape) if leaf == "bias" else self._sharded(shape, 0 if self.transposed else len(shape) - 1, n)


@dataclass(frozen=True)
class InnerRowParallel(RowParallel):
    """Row-parallel linear layer between sharded layers. Each rank uses the full output for its local computation.

    So the gradient of the output is all-reduced. A norm of the output is a `HeadNorm`.

    Args:
        splits: as for ``ColumnParallel``. Input features of replicated key-value heads count once.
        outputs: assigns output features to ranks. Each rank keeps its features of the sum. Without it, each rank keeps
            all features.
    """

    outputs: EvenSplit | None = None

    def __init__(self, *splits: EvenSplit, outputs: EvenSplit | None = None) -> None:
        super().__init__(*splits)
        object.__setattr__(self, "outputs", outputs)


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
            group is one rank, and the groups span several replicas.
        shared: name of the sibling gated MLP that adds its output to the routed output. Empty without shared experts.
        identities: number of further experts that return their input. Their rows in ``gate_up_proj`` are never read.
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
        return width.over_groups((*before, (start, shape[0])), share)  # include the unread rows of identity experts

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
    """Stacked gated experts that all compute every token. The router weights the tokens before (Llama 4).

    The input repeats the tokens of the batch for each expert, and no token is dispatched. So expert parallelism divides
    the experts over the ranks of one replica only.
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
    """Replicated projection to a latent for all heads and to the rotary part of a key that all heads share.

    Args:
        rotary: size of the rotary part, the last output features.

    Source: DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1 (multi-head latent attention).
    """

    rotary: int


@dataclass(frozen=True)
class GroupedHeadsProjection(Replicated):
    """Weight ``[groups * out, heads of a group * head_dim]`` that projects each group of heads by itself.

    A rank holds the rows of its groups. If several ranks share a group, each holds the columns of its local heads, and
    its outputs are partial sums. The next layer is row-parallel over the groups.

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
    """Replicated module with an all-reduced output gradient: each rank uses the output for its local heads."""


def _aligned(width: int, n: int) -> EvenSplit:
    """Return the split of an expert's width into units that grouped GEMMs can address, if there are enough units.

    ``torch._grouped_mm`` requires strides of 16 bytes: 8 elements of 2 bytes, or 4 elements of 4 bytes.
    """
    unit = next((unit for unit in (16, 8, 4) if width % unit == 0 and width // unit >= n), 1)
    return EvenSplit(width // unit, unit)


@dataclass(frozen=True)
class EinsumHeads(Replicated):
    """Attention with weight parameters ``[..., heads, head_dim]`` that its forward applies with ``einsum``.

    Args:
        heads: the split of the heads, of width 1.
        attributes: see `LocalModule`.
    """

    heads: EvenSplit
    attributes: Mapping[str, LocalValue] = field(default_factory=dict)

    def layout(self, leaf: str, shape: tuple[int, ...], n: int) -> Layout:
        return Layout.sharded(shape, len(shape) - 2, (self.heads,), n)

    def max_ranks(self) -> int | None:
        return self.heads.max_ranks()


@dataclass(frozen=True)
class VocabParallel(Replicated):
    """Shard the rows of an embedding, an LM head or its bias: one row per token of the vocabulary."""

    def layout(self, leaf: str, shape: tuple[int, ...], n: int) -> Layout:
        if shape[0] < n:
            raise ValueError(
                f"a vocabulary of {shape[0]} tokens cannot be sharded over tensor_parallel_size={n} ranks, as some of "
                f"them would have none: use at most {shape[0]}"
            )
        return Layout.sharded(shape, 0, (EvenSplit(shape[0]),), n)


@dataclass(frozen=True)
class ReplicatedEmbedding(Replicated):
    """Replicated token embedding."""


@dataclass(frozen=True)
class GlobalMinMax(Replicated):
    """Module that takes the minimum and maximum of a sharded activation. Both are all-reduced."""


@dataclass(frozen=True)
class GlobalMoments(Replicated):
    """Module that takes mean, standard deviation or sum of a sharded activation over the features of all ranks."""


@dataclass(frozen=True)
class ReplicatedDropout(Replicated):
    """Dropout with a replicated input between sharded layers. All ranks must draw the same mask."""


@dataclass(frozen=True)
class LocalModule(Replicated):
    """Module with attributes that count heads or elements. Each rank sets them to its local counts.

    The parameters of the module need separate entries.

    Args:
        attributes: integer attributes of the module, or of its ``config`` (``"config.num_heads"``). Attributes that the
            module lacks are ignored.
        per_head: arguments of the forward with an entry for each head, such as ALiBi biases. Shape ``[heads, ...]`` or
            ``[rows * heads, ...]``; with four dimensions ``[rows, heads, ...]``.
        width: the heads of an attention that reshapes their outputs to the hidden size.
        shared: direct parameters of the module that all heads share. Every rank holds them in full, and their gradients
            are all-reduced.
    """

    attributes: Mapping[str, LocalValue] = field(default_factory=dict)
    per_head: Mapping[str, EvenSplit] = field(default_factory=dict)
    width: EvenSplit | None = None
    shared: tuple[str, ...] = ()


@dataclass(frozen=True)
class SummedModule(LocalModule):
    """Module with a partial sum as output on each rank. Its sharded parameters have separate entries.

    Inputs are replicated, such as the hidden states and router weights of experts.
    """


@dataclass(frozen=True)
class GroupMeans(LocalModule):
    """Module that takes the mean over all query heads of each key-value head, across ranks.

    Args:
        heads: the split of the heads.
    """

    heads: GroupedHeads = field(kw_only=True)


@dataclass(frozen=True)
class VectorExperts(LocalModule):
    """Mixture of experts with one pair of vectors per expert and one feature between them. Ranks shard each vector.

    The vectors are rows of two embeddings ``down_embed`` and ``up_embed``, which have separate entries.

    Source: He, "Mixture of a Million Experts", 2024.
    """


@dataclass(frozen=True)
class ShortConvolution(LocalModule):
    """Module that reads the filters of its depthwise convolution and applies them to a sharded activation directly.

    Args:
        attributes: see `LocalModule`.
        convolution: name of the convolution. Its parameters have separate entries.
    """

    convolution: str = "conv1d"


@dataclass(frozen=True)
class StateSpace(ShortConvolution):
    """State-space mixer, sharded over its heads. Parameters of a group are replicated on the ranks with its heads.

    Args:
        attributes: see `LocalModule`.
        convolution: see `ShortConvolution`.
        scales: name of a buffer ``[..., features]`` that scales the outputs of ``in_proj``. Empty without this buffer.

    Source: Dao and Gu, "Transformers are SSMs", 2024, section 8.1 (tensor parallelism).
    """

    scales: str = ""


@dataclass(frozen=True)
class RecurrentState(LocalModule):
    """Recurrent mixer that takes its states as arguments: tensors ``[rows, heads, ...]`` with an entry for every head.

    The forward takes hidden states and a list of states or ``None``. It returns its output and the new states.

    Args:
        heads: the split of the heads or channels, of width 1.
        replicated: number of leading states that store hidden states and are replicated on every rank.
    """

    heads: EvenSplit = field(kw_only=True)
    replicated: int = 0


Entries = Mapping[str, Replicated]
InputPositions = Callable[[Mapping[str, Any]], tuple[int, int]]
"""``arguments of a forward -> (rows, positions)`` of the embedded hidden states."""


def entry_of(parameter: str, entries: Entries) -> str | None:
    """Return the name of the entry for a parameter: the parameter, its module, or a replicated module around it."""
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
    """How one architecture is sharded. Names are module paths in transformers' base model.

    Attributes:
        embed: the modules before the blocks.
        blocks: for each stack of blocks (its ``ModuleList``), the modules of one block by their name inside the block.
        head: the modules after the blocks.
        on_every_stage: modules outside the blocks that every pipeline stage needs.
        block_overrides: for each stack with heterogeneous blocks, the entries of each block by its number. They extend
            or replace the entries in ``blocks``.
        optional: names of entries for modules that only some task heads, configurations or blocks have.
        replicated_attentions: model outputs that hold the attention weights of all heads on every rank. Other attention
            weights are gathered.
        single_rank_reason: why no layer can be sharded. Empty if layers can be sharded.
        embedding_dropouts: the dropouts between the embeddings and the first block.
        disabled_after_first_stage: attributes or arguments that make the base model change the embedded tokens, with
            the values that disable the change. Attributes may belong to a submodule (``"decoder.dropout"``) or to the
            configuration (``"config.mup_enabled"``).
        copied_from_first_block: names of entries that only the first block of a stack has. The first block of every
            pipeline stage needs a copy of these modules.
        input_positions: for each stack that embeds images or audio, the size of the embedded input.
        early_outputs: modules before the blocks that compute a further output of the model, with its width. The output
            is sent to the last pipeline stage.
        continued_blocks: for each stack, the numbers of blocks that read further outputs of the previous block beside
            the hidden states. No pipeline stage begins with such a block.
        outputs_per_block: modules among ``on_every_stage`` that output a tuple with an entry per block, with the stack
            of these blocks. A stage reads the entries of its local blocks.
        cache_layers_per_block: number of key-value cache layers that each block fills, one per attention.
        keeps_layer_numbers: whether blocks keep their numbers on every pipeline stage. Their cache creates a layer when
            its block uses it, and counts the positions in the first layer.
        single_stage_reason: why the blocks cannot be split into pipeline stages. Empty if they can be split.
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
        """Return the plan with expert parallelism: ``groups`` groups of ranks share the experts."""

        def over(entries: Entries) -> Entries:
            return {name: entry.over_experts(groups) for name, entry in entries.items()}

        blocks = {stack: over(entries) for stack, entries in self.blocks.items()}
        overrides = {stack: [*map(over, each)] for stack, each in self.block_overrides.items()}
        return replace(self, blocks=blocks, block_overrides=overrides)

    def entries_of_blocks(self, stack: str, indices: Sequence[str]) -> Iterator[tuple[str, Entries]]:
        """Yield the number and the entries of some blocks of ``stack``. Call it on the plan of the full model.

        Args:
            indices: the block numbers in the full model, as strings.
        """
        overrides = self.block_overrides.get(stack)
        for index in indices:
            yield index, self.blocks[stack] if overrides is None else {**self.blocks[stack], **overrides[int(index)]}

    def kinds_of_blocks(self) -> list[Entries]:
        """Return the entries of each kind of block."""
        return [
            kind
            for stack, entries in self.blocks.items()
            for kind in [{**entries, **own} for own in self.block_overrides.get(stack, ())] or [{**entries}]
        ]

    def expert_entries(self, stack: str) -> dict[str, Experts]:
        """Return the entries of the experts inside a block of ``stack``, if it has any."""
        kinds = [self.blocks[stack], *self.block_overrides.get(stack, ())]
        return {name: entry for kind in kinds for name, entry in kind.items() if isinstance(entry, Experts)}

    def has_experts(self) -> bool:
        """Return whether some blocks have a mixture of experts."""
        entries = [entry for kind in self.kinds_of_blocks() for entry in kind.values()]
        return any(entry.over_experts(2) is not entry for entry in entries)

    def max_ranks(self) -> int | None:
        """Return the largest tensor_parallel_size that every entry allows, or ``None`` for any size."""
        limits = [entry.max_ranks() for entries in self.kinds_of_blocks() for entry in entries.values()]
        return min((limit for limit in limits if limit is not None), default=None)

    def check_ranks(self, name: str, config: Any, count: int) -> None:
        """Raise ``ValueError`` if the model ``name`` with this ``config`` cannot be sharded over ``count`` ranks."""
        limit, more = self.max_ranks(), f"tensor_parallel_size={count} is more than"
        if count > 1 and self.single_rank_reason:
            raise ValueError(f"{more} 1, all that {name} allows: {self.single_rank_reason}")
        if limit is not None and count > limit:
            allowed = f"1 to {limit}" if limit > 1 else "1"
            raise ValueError(f"{more} {self._limiting_heads(config, limit)} of {type(config).__name__}; use {allowed}")

    def _limiting_heads(self, config: Any, limit: int) -> str:
        """Describe the heads that allow at most ``limit`` ranks, for a message.

        An ``A_log`` parameter identifies state-space and linear-attention layers.
        """
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
        """Return the plan of a model that nests the base model under ``prefix``."""
        by_name = ["embed", "blocks", "head", "on_every_stage", "block_overrides"]
        by_name += ["disabled_after_first_stage", "input_positions", "early_outputs", "continued_blocks"]
        renamed: dict[str, Any] = {
            name: {prefix + key: value for key, value in getattr(self, name).items()} for name in by_name
        }
        renamed["outputs_per_block"] = {prefix + key: prefix + of for key, of in self.outputs_per_block.items()}
        return replace(self, **renamed, embedding_dropouts=[prefix + key for key in self.embedding_dropouts])

    def inside(self, prefix: str) -> tuple[Plan, Entries]:
        """Invert `under`: return the plan of the base model, and the entries of modules outside of it."""
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
        """Return the plan of a model that runs the blocks of this plan and then the blocks of ``other``."""
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
