"""Applies a plan to a model: shards its parameters and swaps the classes of its layers for parallel classes."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import cache, partial
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from oslo_models.distributed.mesh import Axis, ParallelMesh
from oslo_models.distributed.rng import ShardedRngStream
from oslo_models.layers.attention_width import LocalWidthModule
from oslo_models.layers.custom_layers import (
    ColumnParallelModule,
    GlobalMinMaxModule,
    GlobalMomentsModule,
    GroupMeansModule,
    OverlappingParametersModule,
    RowParallelModule,
    SharedOutputModule,
    SharedParametersModule,
    VocabParallelModule,
)
from oslo_models.layers.custom_layers import SummedModule as SummedModuleMixin
from oslo_models.layers.einsum_attention import EinsumHeadsModule
from oslo_models.layers.experts import ParallelDenseExperts, ParallelExperts
from oslo_models.layers.gathered import (
    DerivedLayer,
    GatheredColumnConv1D,
    GatheredColumnLinear,
    SlicedRowConv1D,
    SlicedRowLinear,
    call_by_itself,
)
from oslo_models.layers.gathered import GatheredConvolution as GatheredConvolutionModule
from oslo_models.layers.gathered import SummedEmbedding as SummedEmbeddingModule
from oslo_models.layers.linear import (
    ColumnParallelConv1D,
    ColumnParallelLinear,
    GroupRowParallelLinear,
    InnerKeyValueRowLinear,
    InnerRowParallelLinear,
    KeyValueParallelLinear,
    LatentLinear,
    RowParallelConv1D,
    RowParallelLinear,
)
from oslo_models.layers.multihead_attention import HeadParallelAttention
from oslo_models.layers.norm import GroupParallelNorm, HeadParallelNorm, HeadParallelNorms, WidthParallelNorm
from oslo_models.layers.routed_experts import (
    RoutedExpertsModule,
    SeparateExpertsModule,
    SomeExperts,
    StackedColumnModule,
    StackedRowModule,
)
from oslo_models.layers.shared_experts import SharedExpertsModule
from oslo_models.layers.short_convolution import ShortConvolutionModule
from oslo_models.layers.state_space import RecurrentStateModule, StateSpaceModule
from oslo_models.layers.vector_experts import VectorExpertsModule
from oslo_models.layers.vocab_parallel import VocabParallelEmbedding, VocabParallelHead
from oslo_models.modeling.quantizing import shard_of
from oslo_models.sharding.derived import (
    GatheredColumn,
    GatheredConvolution,
    HeadsRow,
    SlicedRow,
    SplitHeads,
    SummedEmbedding,
)
from oslo_models.sharding.expert_entries import (
    RoutedExperts,
    SeparateExperts,
    StackedColumnParallel,
    StackedRowParallel,
)
from oslo_models.sharding.layout import EvenSplit, Layout
from oslo_models.sharding.local_config import LocalConfig
from oslo_models.sharding.plan import (
    ColumnParallel,
    DenseExperts,
    EinsumHeads,
    Entries,
    Experts,
    GlobalMinMax,
    GlobalMoments,
    GroupMeans,
    GroupWidthNorm,
    HeadNorm,
    HeadNorms,
    InnerRowParallel,
    Latent,
    LocalModule,
    LocalValue,
    Plan,
    RecurrentState,
    Replicated,
    ReplicatedDropout,
    RowParallel,
    SharedOutput,
    ShortConvolution,
    StateSpace,
    SummedModule,
    VectorExperts,
    VocabParallel,
    WidthNorm,
    entry_of,
)

_CLASSES: dict[tuple[type, type], type[nn.Module]] = {
    (ColumnParallel, nn.Linear): ColumnParallelLinear,
    (ColumnParallel, Conv1D): ColumnParallelConv1D,
    (ColumnParallel, nn.Embedding): nn.Embedding,  # T5's relative bias: a rank holds the columns of its local heads
    (RowParallel, nn.Linear): RowParallelLinear,
    (RowParallel, Conv1D): RowParallelConv1D,
    (InnerRowParallel, nn.Linear): InnerRowParallelLinear,
    (VocabParallel, nn.Embedding): VocabParallelEmbedding,
    (VocabParallel, nn.Linear): VocabParallelHead,
    (HeadNorm, nn.Module): HeadParallelNorm,
    (HeadNorms, nn.Module): HeadParallelNorms,
    (WidthNorm, nn.Module): WidthParallelNorm,
    (GroupWidthNorm, nn.Module): GroupParallelNorm,
    (ShortConvolution, nn.Module): ShortConvolutionModule,
    (StateSpace, nn.Module): StateSpaceModule,
    (RecurrentState, nn.Module): RecurrentStateModule,
    (EinsumHeads, nn.Module): EinsumHeadsModule,
    (SummedModule, nn.Module): SummedModuleMixin,
    (RoutedExperts, nn.Module): RoutedExpertsModule,
    (SeparateExperts, nn.Module): SeparateExpertsModule,
    (StackedColumnParallel, nn.Module): StackedColumnModule,
    (StackedRowParallel, nn.Module): StackedRowModule,
    (Experts, nn.Module): ParallelExperts,
    (DenseExperts, nn.Module): ParallelDenseExperts,
    (VectorExperts, nn.Module): VectorExpertsModule,
    (GroupMeans, nn.Module): GroupMeansModule,
    (Latent, nn.Linear): LatentLinear,
    (SharedOutput, nn.Module): SharedOutputModule,
    # custom layers of an architecture
    (ColumnParallel, nn.Module): ColumnParallelModule,
    (RowParallel, nn.Module): RowParallelModule,
    (VocabParallel, nn.Module): VocabParallelModule,
    (GlobalMinMax, nn.Module): GlobalMinMaxModule,
    (GlobalMoments, nn.Module): GlobalMomentsModule,
    # derived plans
    (GatheredColumn, nn.Linear): GatheredColumnLinear,
    (GatheredColumn, Conv1D): GatheredColumnConv1D,
    (SlicedRow, nn.Linear): SlicedRowLinear,
    (SlicedRow, Conv1D): SlicedRowConv1D,
    (HeadsRow, nn.Linear): SlicedRowLinear,
    (SplitHeads, nn.MultiheadAttention): HeadParallelAttention,
    (GatheredConvolution, nn.modules.conv._ConvNd): GatheredConvolutionModule,
    (SummedEmbedding, nn.Embedding): SummedEmbeddingModule,
}

_OF_SEVERAL_RANKS: dict[type, type[nn.Module]] = {
    ColumnParallelLinear: KeyValueParallelLinear,
    InnerRowParallelLinear: InnerKeyValueRowLinear,
    RowParallelLinear: GroupRowParallelLinear,
}
"""The classes of layers with features that several ranks share."""


def plan_over(model: Any, mesh: ParallelMesh) -> Plan:
    """Return the plan of a model on a mesh. Expert parallelism divides the experts over the ranks."""
    plan: Plan = model.plan(model.config)
    return plan.with_experts_over(mesh.expert_parallel_size) if mesh.expert_parallel_size > 1 else plan


def layouts_of(model: nn.Module, plan: Plan, prefix: str, head: Entries, n: int) -> dict[str, Layout]:
    """Return the layout over ``n`` ranks of every parameter and sharded buffer of ``model``, which is still full.

    Modules that a subclass outside of this library adds to the model are replicated.

    Args:
        prefix: the path of the plan's base model in ``model``, such as ``"transformer."``, or ``""`` if ``model`` is
            the base model.
        head: the entries of the task head that ``model`` adds, by their full names.

    Raises:
        ValueError: no entry matches a parameter, or an entry matches nothing.
    """
    entries = _named_entries(model, plan, prefix, head)
    known = {key.partition(".")[0] for key in entries}
    layouts, used, unnamed = {}, set(), []
    for name, param in model.named_parameters(remove_duplicate=False):
        key = entry_of(name, entries)
        if key is not None:
            used.add(key)
            layouts[name] = entries[key].layout(name.rpartition(".")[2], tuple(param.shape), n)
        elif _is_of_user(type(model)) and name.partition(".")[0] not in known:
            layouts[name] = Layout(tuple(param.shape))
        else:
            unnamed.append(name)
    for name, buffer in model.named_buffers():
        if _shards_buffer(entries, name):
            used.add(name)
            layouts[name] = entries[name].layout(name.rpartition(".")[2], tuple(buffer.shape), n)
    optional = tuple(plan.optional)
    unused = [key for key in entries if key not in used and not key.endswith(optional)]
    unused = [key for key in unused if not _is_of_no_parameters(_find(model, key), entries[key])]
    if unnamed or unused:
        raise ValueError(
            f"the plan of {type(model).__name__} does not fit its parameters.\n"
            f"  parameters that no entry names: {unnamed or 'none'}\n  entries that name nothing: {unused or 'none'}"
        )
    return layouts


def _is_of_user(cls: type) -> bool:
    """Whether a user's subclass defines no plan. Its base is a class of this library or of `class_with_plan`."""
    return not (cls.__module__.startswith("oslo_models.") or "plan" in vars(cls))


def _is_of_no_parameters(found: nn.Module | nn.Parameter | None, entry: Replicated) -> bool:
    """Whether an entry that matches no parameter configures a module instead."""
    if not isinstance(found, nn.Module):
        return False
    return isinstance(entry, (LocalModule, GlobalMoments)) or next(found.parameters(), None) is None


def apply_plan(
    model: PreTrainedModel, plan: Plan, prefix: str, head: Entries, mesh: ParallelMesh, layouts: Mapping[str, Layout]
) -> None:
    """Shard ``model`` in place: keep this rank's part. The model may have weights or be on the meta device."""
    tp = mesh.tp
    stream = ShardedRngStream(tp, mesh.device) if _uses_dropout(model) else None
    for key, entry in _named_entries(model, plan, prefix, head).items():
        module = _find(model, key)
        if module is None or isinstance(module, nn.Parameter):
            continue
        if tp.size == 1 and not isinstance(entry, Experts):  # only experts are sharded: over replicas
            continue
        if isinstance(entry, StateSpace) and not hasattr(module, entry.convolution):
            _set_local_attributes(module, entry.attributes, tp)  # a mixer of another type with the same name
            continue
        shards = {leaf: layouts[f"{key}.{leaf}"] for leaf, _ in module.named_parameters(recurse=False)}
        if type(entry) in {kind for kind, _ in _CLASSES}:
            _swap_class(module, key, entry, shards, tp.rank)
            module.tp, module.stream, module.layouts = tp, stream, shards  # type: ignore[assignment]
        if isinstance(module, SomeExperts) and isinstance(entry, (RoutedExperts, StackedColumnParallel)):
            module.set_experts(entry.groups)
        if isinstance(module, DerivedLayer):
            module.entry = entry
            module.register_forward_pre_hook(call_by_itself)
        if isinstance(entry, (HeadNorms, GroupMeans)):
            module.heads = entry.heads  # type: ignore[assignment]
        if isinstance(entry, Experts):
            module.set_experts(shards, mesh)  # type: ignore[operator]
            _join_shared_experts(model.get_submodule(key.rpartition(".")[0]), entry, tp)
        elif isinstance(entry, GroupWidthNorm):
            module.set_groups(entry.groups)  # type: ignore[operator]
        elif isinstance(entry, ShortConvolution):
            module.convolution = entry.convolution  # type: ignore[assignment]
            if isinstance(entry, StateSpace):
                module.scales = entry.scales  # type: ignore[assignment]
            if getattr(entry, "scales", ""):
                module.scaled = layouts[f"{key}.in_proj.weight"]  # type: ignore[assignment]
            module.filters = {  # type: ignore[assignment]
                leaf: layouts[f"{key}.{entry.convolution}.{leaf}"]
                for leaf, _ in getattr(module, entry.convolution).named_parameters()
            }
            _set_local_attributes(module, entry.attributes, tp)
        elif isinstance(entry, RecurrentState):
            module.heads, module.replicated = entry.heads, entry.replicated  # type: ignore[assignment]
            _set_local_attributes(module, entry.attributes, tp)
        elif isinstance(entry, Latent):
            module.rotary = entry.rotary  # type: ignore[assignment]
        elif isinstance(entry, InnerRowParallel):
            module.outputs = entry.outputs  # type: ignore[assignment]
        elif isinstance(entry, EinsumHeads):
            _set_local_attributes(module, entry.attributes, tp)
        elif isinstance(entry, LocalModule):
            _localize(module, entry, shards, tp)
        elif isinstance(entry, ReplicatedDropout) and stream is not None:
            _draw_outside(stream, module)
    for name, layout in layouts.items():
        owner, _, leaf = name.rpartition(".")
        module = model.get_submodule(owner)
        full = getattr(module, leaf)
        if layout.dim is not None:
            local = shard_of(full.detach(), layout, mesh.rank_in(layout), name)
            is_parameter = isinstance(full, nn.Parameter)
            setattr(module, leaf, nn.Parameter(local, requires_grad=full.requires_grad) if is_parameter else local)
            set_local_sizes(module)
    if stream is not None:
        for block in (block for stack in plan.blocks for block in model.get_submodule(prefix + stack).children()):
            # After each block, even on errors, switch back to the replicated random stream.
            block.register_forward_hook(lambda *_: stream.leave(), always_call=True)


def expert_parameters(model: nn.Module, plan: Plan, prefix: str) -> set[str]:
    """Return the names of parameters that stack experts, in a model or a pipeline stage."""
    found = set()
    for key, entry in _named_entries(model, plan, prefix, {}).items():
        if isinstance(entry, Experts) and isinstance(module := _find(model, key), nn.Module):
            found |= {f"{key}.{leaf}" for leaf, _ in module.named_parameters(recurse=False)}
    return found


def modules_with_tensors_of_heads(model: nn.Module, plan: Plan, prefix: str) -> list[str]:
    """Return the names of `LocalModule` entries with parameters or sharded buffers, in a model or a pipeline stage."""
    entries = _named_entries(model, plan, prefix, {})
    modules = {key: _find(model, key) for key, entry in entries.items() if isinstance(entry, LocalModule)}
    return [
        key
        for key, module in modules.items()
        if isinstance(module, nn.Module)
        and (
            any(True for _ in module.parameters(recurse=False))
            or any(_shards_buffer(entries, f"{key}.{leaf}") for leaf, _ in module.named_buffers(recurse=False))
        )
    ]


def _shards_buffer(entries: Entries, name: str) -> bool:
    """Whether a buffer is sharded: it has an entry under its full name. Other buffers are replicated."""
    return isinstance(entries.get(name), ColumnParallel)


def _join_shared_experts(mixture: Any, entry: Experts, tp: Axis) -> None:
    """If a mixture has shared and routed experts, all-reduce the sum of their outputs once."""
    if entry.shared and getattr(mixture, entry.shared, None) is not None:
        mixture.__class__ = _joined(SharedExpertsModule, type(mixture))  # type: ignore[arg-type]
        mixture.tp, mixture.shared = tp, entry.shared


def _localize(module: Any, entry: LocalModule, shards: Mapping[str, Layout], tp: Axis) -> None:
    """Reduce a module's head counts in attributes, arguments and shapes to the local heads."""
    _set_local_attributes(module, entry.attributes, tp)
    for argument, heads in entry.per_head.items():  # before the width: its class hides the signature
        position = list(inspect.signature(module.forward).parameters).index(argument)
        module.register_forward_pre_hook(
            partial(_slice_per_head_arguments, argument, position, heads, tp), with_kwargs=True
        )
    if overlapping := {name: layout for name, layout in shards.items() if layout.overlaps}:
        module.__class__ = _joined(OverlappingParametersModule, type(module))  # type: ignore[arg-type]
        module.tp, module.overlapping = tp, overlapping
    if entry.shared:
        module.__class__ = _joined(SharedParametersModule, type(module))  # type: ignore[arg-type]
        module.tp, module.shared = tp, entry.shared
    if entry.width is not None:
        module.__class__ = _joined(LocalWidthModule, type(module))  # type: ignore[arg-type]
        module.widths = entry.width.extent(), entry.width.local_extent(tp.size, tp.rank)


def _set_local_attributes(module: Any, attributes: Mapping[str, LocalValue], tp: Axis) -> None:
    for path, value in attributes.items():
        owner, _, attribute = path.rpartition(".")
        if owner == "config":
            module.config = LocalConfig(module.config, **{attribute: value(tp.size, tp.rank)})
        elif hasattr(module, attribute):
            vars(module).setdefault("full_attributes", {})[attribute] = getattr(module, attribute)
            setattr(module, attribute, value(tp.size, tp.rank))


def _draw_outside(stream: ShardedRngStream, dropout: nn.Module) -> None:
    """Make a dropout between sharded layers draw from the replicated random stream."""
    dropout.register_forward_pre_hook(lambda *_: stream.leave())
    dropout.register_forward_hook(lambda module, *_: stream.enter() if module.training else None)


def _slice_per_head_arguments(
    name: str, position: int, heads: EvenSplit, tp: Axis, module: nn.Module, args: Any, kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Return a call's arguments, with one of them sliced to the local heads."""
    value = kwargs.get(name, args[position] if position < len(args) else None)
    if value is None:
        return args, kwargs
    start, stop = heads.unit_ranges(tp.size)[tp.rank]
    if value.dim() >= 4:  # [rows, heads or 1, queries, keys]
        own = value[:, start:stop] if value.shape[1] == heads.count else value
    else:
        own = value.unflatten(0, (-1, heads.count))[:, start:stop].flatten(0, 1)
    if name in kwargs:
        return args, {**kwargs, name: own}
    return (*args[:position], own, *args[position + 1 :]), kwargs


def _swap_class(module: nn.Module, key: str, entry: Replicated, layouts: dict[str, Layout], rank: int) -> None:
    """Change the class of ``module`` to the parallel class for its entry."""
    known = [kind for e, kind in _CLASSES if e is type(entry)]
    if type(entry) in (ColumnParallel, RowParallel, VocabParallel) and type(module).__module__.startswith("torch."):
        known.remove(nn.Module)  # torch's other layers (convolutions) compute other functions
    base = next((kind for kind in known if isinstance(module, kind)), None)
    if base is None:
        names = ", ".join(sorted(kind.__name__ for kind in known))
        raise ValueError(f"{key} is a {type(module).__name__}; {type(entry).__name__} knows {names}")
    new = _CLASSES[type(entry), base]
    if new in _OF_SEVERAL_RANKS and layouts["weight"].overlaps:
        new = _OF_SEVERAL_RANKS[new]
    module.__class__ = new if type(module) is base else _joined(new, type(module))  # type: ignore[arg-type]
    if "weight" not in layouts or layouts["weight"].dim is None:
        return
    if isinstance(module, (VocabParallelEmbedding, VocabParallelModule)) and module.padding_idx is not None:
        ((start, stop),) = layouts["weight"].ranges[rank]
        module.padding_idx = module.padding_idx - start if start <= module.padding_idx < stop else None


@cache
def _joined(new: type[nn.Module], old: type[nn.Module]) -> type[nn.Module]:
    """Return the parallel class of a custom layer class.

    The code of a custom embedding or LM head, such as a scale, wraps the parallel lookup or product. Other parallel
    classes wrap the custom class. The class keeps its name, since transformers initialises weights by class names.
    """
    bases = (old, new) if issubclass(new, (nn.Embedding, VocabParallelHead)) else (new, old)
    return type(old.__name__, bases, {"__module__": old.__module__})


def set_local_sizes(module: nn.Module) -> None:
    """Set the size attributes of a layer to the sizes of its local shard."""
    if isinstance(module, DerivedLayer):
        return
    if isinstance(module, nn.Linear):
        module.out_features, module.in_features = module.weight.shape
    elif isinstance(module, Conv1D):
        module.nx, module.nf = module.weight.shape
    elif isinstance(module, nn.Embedding):
        module.num_embeddings, module.embedding_dim = module.weight.shape


def entries_of_blocks(model: nn.Module, plan: Plan, prefix: str) -> dict[str, Replicated]:
    """Return the entries of all blocks of a model or pipeline stage, by their full names in ``model``.

    Args:
        plan: the full model's plan.
    """
    named: dict[str, Replicated] = {}
    for stack in plan.blocks:
        indices = [index for index, _ in model.get_submodule(prefix + stack).named_children()]
        for index, entries in plan.entries_of_blocks(stack, indices):
            named |= {f"{prefix}{stack}.{index}.{key}".removesuffix("."): entry for key, entry in entries.items()}
    return named


def _named_entries(model: nn.Module, plan: Plan, prefix: str, head: Entries) -> dict[str, Replicated]:
    """Return all entries of the plan, by their full names in ``model``."""
    named: dict[str, Replicated] = {prefix + key: entry for key, entry in plan.embed.items()}
    named |= entries_of_blocks(model, plan, prefix)
    named |= {prefix + key: entry for key, entry in (*plan.head.items(), *plan.on_every_stage.items())}
    return named | dict(head)


def _find(root: nn.Module, path: str) -> nn.Module | nn.Parameter | None:
    """Return the module or parameter at ``path`` under ``root``, or ``None``."""
    found: object = root
    for part in path.split(".") if path else ():
        found = getattr(found, part, None)
    return found if isinstance(found, (nn.Module, nn.Parameter)) else None


def _uses_dropout(model: PreTrainedModel) -> bool:
    """Whether a model or a nested model uses dropout. If not, random streams need no switching, which takes time."""
    configs = [module.config for module in model.modules() if isinstance(module, PreTrainedModel)]
    rates = [value for config in configs for key, value in vars(config).items() if "drop" in key]
    return any(isinstance(rate, (int, float)) and not isinstance(rate, bool) and rate > 0 for rate in rates)
