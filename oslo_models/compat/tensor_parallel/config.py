"""tensor_parallel's `Config`: a user-defined sharding strategy, as rules for tensor and module names."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from oslo_models.compat.tensor_parallel.state_actions import Action, layout_of, resolved
from oslo_models.registry import did_you_mean
from oslo_models.sharding.layout import Layout

StateRules = Mapping[Any, Any]
ModuleRules = Mapping[Any, Mapping[int | str, Any]]

_OPERATIONS = {"sum": 0, "gather": 1, "split": 1, "scale": 0}
"""Number of dimensions after each operation."""
_STATE = ("split", "scale")


@dataclass
class Config:
    """A sharding strategy: maps regular expressions for tensor and module names to actions.

    Args:
        state_rules: parameters and buffers; the first matching expression decides. An action of `state_actions`, or a
            function ``(tensor, rank) -> shard``. Tensors without a rule are replicated on all ranks.
        input_rules: for modules, ``{argument: operation}``; an argument is a position or a name. An operation is
            ``"sum"`` or ``"gather DIM"`` over the ranks, ``"split DIM"`` for the local shard, ``"scale"`` to divide by
            the number of ranks, an action, or a function ``(value, rank) -> value`` of one rank.
        output_rules: likewise for module outputs, by position or key; ``0`` is a single output tensor.
        attr_rules: for modules, ``{attribute: function}``, with ``(value, rank) -> value``.

    Raises:
        ValueError: an operation is unknown.
    """

    state_rules: StateRules
    input_rules: ModuleRules
    output_rules: ModuleRules
    attr_rules: ModuleRules

    def __post_init__(self) -> None:
        for rules, allowed in (("state_rules", _STATE), *((f"{kind}_rules", _OPERATIONS) for kind in _KINDS[:2])):
            for pattern, action in getattr(self, rules).items():
                for each in (action,) if rules == "state_rules" else action.values():
                    _check(rules, pattern, each, allowed)
        for pattern, actions in self.attr_rules.items():
            for name, action in actions.items():
                if not callable(action):
                    raise ValueError(f"attr_rules: {pattern!r} gives {name} {action!r}, which is not a function")
        for rules in ("state_rules", "input_rules", "output_rules", "attr_rules"):
            setattr(self, rules, {re.compile(pattern): action for pattern, action in getattr(self, rules).items()})

    def check_names(self, tensors: Collection[str], modules: Collection[str]) -> None:
        """Raise ``ValueError`` if a rule finds no name."""
        for rules in ("state_rules", *(f"{kind}_rules" for kind in _KINDS)):
            names = tensors if rules == "state_rules" else modules
            for pattern in getattr(self, rules):
                if not any(pattern.search(name) for name in names):
                    kind = "parameter or buffer" if rules == "state_rules" else "module"
                    plain = re.sub(r"\.\*|[\\^$]|\.\+|\[0-9\]", "", pattern.pattern).strip(".")
                    near = did_you_mean(plain, names) or did_you_mean(plain, _ends(plain, names))
                    hint = near or f"; there are {', '.join([*names][:8])}, ..."
                    raise ValueError(f"{rules}: {pattern.pattern!r} matches the name of no {kind}{hint}")

    def layouts(self, tensors: Mapping[str, Tensor], n: int) -> dict[str, tuple[Layout, Any]]:
        """Return the layout of each tensor over ``n`` ranks, and the action that runs at each use, if any.

        Tensors that share memory get the rule of any of their names.

        Raises:
            ValueError: an action does not fit.
        """
        groups: dict[Any, list[str]] = {}
        for name, tensor in tensors.items():
            groups.setdefault((tensor.data_ptr() or id(tensor), tensor.shape), []).append(name)
        found: dict[str, tuple[Layout, Any]] = {}
        for names in groups.values():
            rules = [pattern for name in names for pattern in self.state_rules if pattern.search(name)][:1]
            placed: tuple[Layout, Any] = Layout(tuple(tensors[names[0]].shape)), None
            if rules:
                action = resolved(self.state_rules[rules[0]], n)
                layout = layout_of(action, tensors[names[0]], n)
                placed = (placed[0], action) if layout is None else (layout, None)
            found |= dict.fromkeys(names, placed)
        return found

    def actions(self, kind: str, name: str) -> dict[int | str, Any]:
        """Return the actions for the ``"input"``, ``"output"`` or ``"attr"`` of a module.

        Raises:
            ValueError: rules contradict each other.
        """
        found: dict[int | str, Any] = {}
        for pattern, actions in getattr(self, f"{kind}_rules").items():
            for key, action in actions.items() if pattern.search(name) else ():
                key = int(key) if isinstance(key, str) and key.strip().isdigit() else key
                if found.setdefault(key, action) != action:
                    raise ValueError(f"{kind}_rules contradict for {key!r} of {name}: {found[key]!r} and {action!r}")
        return found


_KINDS = ("input", "output", "attr")


def _ends(plain: str, names: Iterable[str]) -> list[str]:
    """Cut each name to its last components, to the depth of ``plain``."""
    return [".".join(name.split(".")[-1 - plain.count(".") :]) for name in names]


def _check(rules: str, pattern: Any, action: Action, allowed: Iterable[str]) -> None:
    action = action[0] if isinstance(action, tuple) and len(action) == 2 else action
    if callable(action):
        return
    words = action.split() if isinstance(action, str) else []
    numbers = [word for word in words[1:] if re.fullmatch(r"-?\d+", word)]
    if not words or words[0] not in allowed:
        known = [f"{name} DIM" if _OPERATIONS[name] else name for name in allowed]
        hint = did_you_mean(words[0], allowed) if words else ""
        raise ValueError(
            f"{rules}: {action!r} of {pattern!r} is not an operation{hint}; known are {', '.join(known)}, actions and "
            "functions"
        )
    if len(numbers) != len(words) - 1 or (len(numbers) != _OPERATIONS[words[0]] and words != ["gather"]):
        raise ValueError(f"{rules}: {action!r} of {pattern!r} needs {_OPERATIONS[words[0]]} dimensions")
