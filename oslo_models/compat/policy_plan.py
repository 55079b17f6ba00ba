"""Turns parallelformers' policies into a plan."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.pytorch_utils import Conv1D

from oslo_models.layers.entries import ColumnParallel, LocalAttributes, Plan, Replicated, RowParallel
from oslo_models.registry import did_you_mean
from oslo_models.sharding.entry import entry_of
from oslo_models.sharding.layout import EvenSplit
from oslo_models.sharding.model_protocol import TransformersModel

_REPLACEMENTS = ("AllReduceLinear", "AllReduceConv1D")
_METHODS = ("replace_arguments", "replace_modules", "attn_qkv", "attn_out", "mlp_in", "mlp_out", "original_layer_class")
_HEADS = re.compile(r"(^|_)n?_?(num_)?(attention_)?heads?$")
"""Names of attributes that count heads: ``num_heads``, ``n_head``, ``num_attention_heads``; not ``head_dim``."""


def policies_of(given: Any) -> tuple[type[Any], ...]:
    """Return the policy classes in ``custom_policies``: one class, or several in a list.

    Raises:
        ValueError: the argument has other values than policy classes.
    """
    found = tuple(given) if isinstance(given, (list, tuple)) else (given,)
    for policy in found:
        missing = [name for name in _METHODS if not callable(getattr(policy, name, None))]
        if not isinstance(policy, type) or missing:
            raise ValueError(
                f"custom_policies must be a class derived from oslo_models.Policy, or a list of such classes, got "
                f"{policy!r:.100}" + (f", which has no {', '.join(missing)}" if isinstance(policy, type) else "")
            )
    if not found:
        raise ValueError("custom_policies is empty; leave it out for the plan of the zoo")
    return found


@dataclass(frozen=True)
class PlanOfPolicies:
    """Maps a configuration to a plan built from policies. Embeddings, norms and task heads stay replicated.

    Attributes:
        cls: the class of the model.
        policies: policy classes, each for one class of blocks.
    """

    cls: type[Any]
    policies: tuple[type[Any], ...]
    _made: dict[str, Plan] = field(default_factory=dict, compare=False, repr=False)

    def __reduce__(self) -> Any:
        return type(self), (self.cls, self.policies)

    def __call__(self, config: PreTrainedConfig) -> Plan:
        key = config.to_json_string(use_diff=False)
        if key not in self._made:
            with torch.device("meta"):
                model = self.cls._from_config(copy.deepcopy(config))
            self._made[key] = self._plan(model)
        return self._made[key]

    def _plan(self, model: TransformersModel) -> Plan:
        blocks: dict[str, dict[str, Replicated]] = {}
        found = set()
        for name, module in model.named_modules():
            for policy in self.policies:
                if type(module) is policy.original_layer_class():
                    found.add(policy)
                    blocks[name] = dict(_Block(policy, module, model.config).entries())
        for policy in set(self.policies) - found:
            layer = policy.original_layer_class()
            known = {type(module).__name__: None for module in model.modules()}
            hint = did_you_mean(layer.__name__, known) or f"; it has {', '.join(known)}"
            raise ValueError(f"{policy.__name__} is for {layer.__name__}, which {self.cls.__name__} lacks{hint}")
        stacks, alone = _stacks(model, blocks)
        return Plan(
            embed=alone | dict(_replicated(model, alone, tuple(f"{name}." for name in blocks))),
            blocks=stacks,
            head={},
            optional=sorted({key for stack in stacks.values() for key in stack if key}),
        ).with_rules(single_stage_reason="policies of parallelformers do not say how its blocks are split into stages")

    def check_ranks(self, config: PreTrainedConfig, count: int) -> None:
        """Raise ``ValueError`` unless the heads divide evenly over the ranks, as the values of a policy presume."""
        plan = self(config)
        for stack in plan.blocks.values():
            for name, entry in stack.items():
                for split in entry.splits if isinstance(entry, ColumnParallel) else ():
                    if split.count % count:
                        divisors = ", ".join(str(n) for n in range(1, split.count + 1) if split.count % n == 0)
                        raise ValueError(
                            f"num_gpus={count} does not divide the {split.count} heads of {name}, as the policy "
                            f"requires; use {divisors}"
                        )
        for policy in self.policies:
            local, full = policy.replace_arguments(config, count), policy.replace_arguments(config, 1)
            for key, value in full.items():
                if (
                    isinstance(value, int)
                    and local[key] * count != value
                    and (_counts_heads(key) or local[key] != value)
                ):
                    raise ValueError(
                        f"{policy.__name__}: replace_arguments gives {key}={local[key]} for {count} ranks and "
                        f"{value} for one, which is not {count} times as many"
                    )


class _Block:
    """One block of a model, and the policy for it."""

    def __init__(self, policy: type[Any], block: nn.Module, config: PreTrainedConfig) -> None:
        self.policy, self.block, self.config = policy, block, config
        self.full = {_path(key): value for key, value in policy.replace_arguments(config, 1).items()}
        self.name = f"{policy.__name__} for {type(block).__name__}"

    def entries(self) -> Iterator[tuple[str, Replicated]]:
        """Yield the plan entries for the modules that the policy names, by name inside the block."""
        layers: set[str] = set()
        for group, kind, is_attention in (
            ("attn_qkv", ColumnParallel, True),
            ("attn_out", RowParallel, True),
            ("mlp_in", ColumnParallel, False),
            ("mlp_out", RowParallel, False),
        ):
            for layer in getattr(self.policy, group)():
                path, module = self._find(group, layer)
                if module is None:
                    continue
                if kind is RowParallel:
                    self._check_replacement(group, path, layer)
                layers.add(path)
                yield path, self._entry(kind, path, module, layer, is_attention)
        owners: dict[str, dict[str, Any]] = {}
        for key in self.full:
            owner, _, attribute = key.rpartition(".")
            if owner not in layers and self._has(owner, attribute):  # sharded layers set their own sizes
                owners.setdefault(owner, {})[attribute] = partial(_local_value, self.policy, self.config, key)
        for owner, attributes in owners.items():
            yield owner, LocalAttributes(attributes)

    def _find(self, group: str, layer: Any) -> tuple[str, nn.Module | None]:
        name = layer.weight or layer.bias
        if not name:
            raise ValueError(f"{self.name}: a Layer of {group} has neither weight nor bias")
        path = _path(name).rpartition(".")[0]
        try:
            module = self.block.get_submodule(path)
        except AttributeError:
            module = None
        if not path or module is None or getattr(module, "weight", None) is None:
            if layer.ignore_checker:
                return path, None
            names = [name for name, _ in self.block.named_parameters()]
            hint = did_you_mean(_path(name), names) or f"; its parameters: {', '.join(names)}"
            raise ValueError(f"{self.name}: {group} names {name}, which is not a tensor of a layer there{hint}")
        return path, module

    def _entry(self, kind: Any, path: str, module: Any, layer: Any, is_attention: bool) -> Replicated:
        is_reversed = isinstance(module, Conv1D)
        if isinstance(module, (nn.Linear, Conv1D)) and bool(layer.reversed) != is_reversed:
            raise ValueError(
                f"{self.name}: {path} is a {type(module).__name__}: its Layer needs reversed={is_reversed}"
            )
        transposed, parts = bool(layer.reversed), layer.n_fused or 1
        sharded = 0 if (kind is RowParallel) != transposed else -1
        size = module.weight.shape[-1 if sharded == 0 else 0]
        if size % parts:
            raise ValueError(f"{self.name}: n_fused={parts} does not divide the {size} features of {path}")
        if not is_attention:
            return kind(parts=parts, transposed=transposed)
        return kind(*[self._heads(path, size // parts)] * parts, transposed=transposed)

    def _heads(self, path: str, size: int) -> EvenSplit:
        """Return the head split of an attention layer, from the policy's replaced values or else the configuration."""
        owners = [path.rpartition(".")[0], *{key.rpartition(".")[0]: None for key in self.full}]
        counts = [
            self.full[key]
            for owner in owners
            for key in self.full
            if key.rpartition(".")[0] == owner and _counts_heads(key)
        ]
        counts += [getattr(self.config, name, None) for name in ("num_attention_heads", "num_heads", "n_head")]
        counts.append(getattr(self.config, "num_key_value_heads", None))
        for count in counts:
            if isinstance(count, int) and count > 0 and size % count == 0:
                return EvenSplit(count, size // count)
        raise ValueError(
            f"{self.name}: how many heads the {size} features of {path} belong to is unknown: return it from "
            "replace_arguments, as num_heads of the attention"
        )

    def _check_replacement(self, group: str, path: str, layer: Any) -> None:
        replacement = layer.replace
        if replacement is None:
            if self.policy.replace_modules():
                raise ValueError(
                    f"{self.name}: {group} gives no replace= for {path}, so replace_modules would have to sum its "
                    "outputs; give AllReduceLinear or AllReduceConv1D, and leave the sum to it"
                )
        elif getattr(replacement, "__name__", None) not in _REPLACEMENTS:
            raise ValueError(
                f"{self.name}: replace={replacement!r} of {path} is unknown; use one of {', '.join(_REPLACEMENTS)}"
            )

    def _has(self, owner: str, attribute: str) -> bool:
        """Return whether the block has the module. Raise ``ValueError`` if the module lacks the attribute."""
        try:
            module = self.block.get_submodule(owner)
        except AttributeError:
            return False
        if not hasattr(module, attribute):
            counts = [key for key, value in vars(module).items() if isinstance(value, int) and key != "training"]
            hint = did_you_mean(attribute, counts) or f"; its numbers: {', '.join(counts) or 'none'}"
            raise ValueError(
                f"{self.name}: replace_arguments names {owner}.{attribute}, and {type(module).__name__} has no such "
                f"attribute in this version of transformers{hint}"
            )
        return True


def _counts_heads(key: str) -> bool:
    return _HEADS.search(key.rpartition(".")[2]) is not None


def _path(name: str) -> str:
    """Convert a path to torch's notation: ``layer[0].dense`` becomes ``layer.0.dense``."""
    return re.sub(r"\[(\d+)\]", r".\1", name)


def _local_value(policy: type[Any], config: Any, key: str, n: int, rank: int) -> Any:
    """Return the value of an attribute on one of ``n`` ranks."""
    values = {_path(name): value for name, value in policy.replace_arguments(config, n).items()}
    return values[key]


def _stacks(
    model: TransformersModel, blocks: dict[str, dict[str, Replicated]]
) -> tuple[dict[str, dict[str, Replicated]], dict[str, Replicated]]:
    """Return the entries for each ``ModuleList`` of blocks, and the entries for single blocks.

    Entries of a ``ModuleList`` have names inside a block; entries of single blocks have full names.
    """
    stacks: dict[str, dict[str, Replicated]] = {}
    alone: dict[str, Replicated] = {}
    for name, entries in blocks.items():
        parent = name.rpartition(".")[0]
        siblings = [f"{parent}.{child}" for child, _ in model.get_submodule(parent).named_children()]
        own = entries | {
            key.removeprefix(f"{name}."): entry for key, entry in _replicated(model.get_submodule(name), entries)
        }
        if isinstance(model.get_submodule(parent), nn.ModuleList) and all(each in blocks for each in siblings):
            stacks[parent] = {**stacks.get(parent, {}), **own}
        else:
            alone |= {f"{name}.{key}".removesuffix("."): entry for key, entry in own.items()}
    return stacks, alone


def _replicated(
    model: TransformersModel, entries: dict[str, Replicated], without: tuple[str, ...] = ()
) -> Iterator[tuple[str, Replicated]]:
    """Yield replicated entries for modules with parameters that no policy names.

    Args:
        without: name prefixes to leave out.
    """
    for name, _ in model.named_parameters(remove_duplicate=False):
        if not (without and name.startswith(without)) and entry_of(name, entries) is None:
            owner = name.rpartition(".")[0]
            yield name if owner in entries or not owner else owner, Replicated()


def replace_methods(model: nn.Module, policies: Iterable[type[Any]]) -> list[nn.Module]:
    """Give modules the methods of the classes in `Policy.replace_modules`, each through a new subclass.

    Returns:
        The changed modules. The caller sets their ``mp_group`` to the tensor-parallel process group.
    """
    changed = []
    for policy in policies:
        replacements = policy.replace_modules()
        for module in model.modules():
            replacement = replacements.get(type(module).__qualname__)
            if replacement is not None:
                own = {key: value for key, value in vars(replacement).items() if hasattr(type(module), key)}
                own = {key: value for key, value in own.items() if key not in ("__dict__", "__weakref__", "__init__")}
                module.__class__ = type(type(module).__name__, (type(module),), own)
                changed.append(module)
    return changed
