"""Applies a plan to a model: shards its parameters and swaps the classes of its layers for parallel classes."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from oslo_models.distributed.mesh import ParallelMesh
from oslo_models.distributed.rng import ShardedRngStream
from oslo_models.layers.gathered import DerivedLayer
from oslo_models.layers.kinds import ShardingContext, shard_module
from oslo_models.layers.linear import ColumnParallel
from oslo_models.layers.local_attributes import LocalAttributes
from oslo_models.modeling.quantizing import shard_of
from oslo_models.pipeline.sharded_model import ShardedModel
from oslo_models.sharding.layout import Layout
from oslo_models.sharding.plan import Entries, Plan, Replicated, entry_of


def plan_over(model: ShardedModel, mesh: ParallelMesh) -> Plan:
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
    entries = named_entries(model, plan, prefix, head)
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
        if buffer.dim() and (key := _entry_of_buffer(entries, name)) is not None:
            used.add(key)
            layouts[name] = entries[key].layout(name.rpartition(".")[2], tuple(buffer.shape), n)
    optional = tuple(name for part in plan.with_towers() for name in part.optional)
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
    return not entry.has_parameters or next(found.parameters(), None) is None


def apply_plan(
    model: PreTrainedModel, plan: Plan, prefix: str, head: Entries, mesh: ParallelMesh, layouts: Mapping[str, Layout]
) -> None:
    """Shard ``model`` in place: keep this rank's part. The model may have weights or be on the meta device."""
    stream = ShardedRngStream(mesh.tp, mesh.device) if uses_dropout(model) else None
    for key, entry in named_entries(model, plan, prefix, head).items():
        module = _find(model, key)
        if module is None or isinstance(module, nn.Parameter):
            continue
        if mesh.tp.size == 1 and not entry.stacks_experts:  # only experts are sharded: over replicas
            continue
        shards = {leaf: layouts[f"{key}.{leaf}"] for leaf, _ in module.named_parameters(recurse=False)}
        shard_module(module, entry, ShardingContext(key, model, mesh, stream, shards, layouts))
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
        stacks = [prefix + stack for part in plan.with_towers() for stack in part.blocks]
        for block in (block for stack in stacks for block in model.get_submodule(stack).children()):
            # After each block, even on errors, switch back to the replicated random stream.
            block.register_forward_hook(lambda *_: stream.leave(), always_call=True)


def expert_parameters(model: nn.Module, plan: Plan, prefix: str, head: Entries) -> set[str]:
    """Return the names of parameters that stack experts, in a model or a pipeline stage."""
    found = set()
    for key, entry in named_entries(model, plan, prefix, head).items():
        if entry.stacks_experts and isinstance(module := _find(model, key), nn.Module):
            found |= {f"{key}.{leaf}" for leaf, _ in module.named_parameters(recurse=False)}
    return found


def modules_with_tensors_of_heads(model: nn.Module, plan: Plan, prefix: str) -> list[str]:
    """Return the names of `LocalAttributes` entries with parameters or sharded buffers, in a model or stage."""
    entries = named_entries(model, plan, prefix, {})
    modules = {key: _find(model, key) for key, entry in entries.items() if isinstance(entry, LocalAttributes)}
    return [
        key
        for key, module in modules.items()
        if isinstance(module, nn.Module)
        and (
            any(True for _ in module.parameters(recurse=False))
            or any(_entry_of_buffer(entries, f"{key}.{leaf}") for leaf, _ in module.named_buffers(recurse=False))
        )
    ]


def _entry_of_buffer(entries: Entries, name: str) -> str | None:
    """Return the name of the entry that shards a buffer: its own, or that of its module. Others are replicated."""
    module = name.rpartition(".")[0]
    if isinstance(entries.get(name), ColumnParallel):
        return name
    entry = entries.get(module)
    return module if isinstance(entry, ColumnParallel) and entry.channels else None


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
    elif isinstance(module, nn.Conv2d):
        module.out_channels, module.in_channels = len(module.weight), module.weight.shape[1] * module.groups
    elif isinstance(module, nn.BatchNorm2d):
        module.num_features = len(module.weight)


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


def named_entries(model: nn.Module, plan: Plan, prefix: str, head: Entries) -> dict[str, Replicated]:
    """Return all entries of the plan and its towers, by their full names in ``model``."""
    named: dict[str, Replicated] = {}
    for part in plan.with_towers():
        named |= {prefix + key: entry for key, entry in part.embed.items()}
        named |= entries_of_blocks(model, part, prefix)
        named |= {prefix + key: entry for key, entry in (*part.head.items(), *part.pipeline.on_every_stage.items())}
    return named | dict(head)


def _find(root: nn.Module, path: str) -> nn.Module | nn.Parameter | None:
    """Return the module or parameter at ``path`` under ``root``, or ``None``."""
    found: object = root
    for part in path.split(".") if path else ():
        found = getattr(found, part, None)
    return found if isinstance(found, (nn.Module, nn.Parameter)) else None


def uses_dropout(model: PreTrainedModel) -> bool:
    """Whether a model or a nested model uses dropout. If not, random streams need no switching, which takes time."""
    configs = [module.config for module in model.modules() if isinstance(module, PreTrainedModel)]
    rates = [value for config in configs for key, value in vars(config).items() if "drop" in key]
    return any(isinstance(rate, (int, float)) and not isinstance(rate, bool) and rate > 0 for rate in rates)
