"""Finds the options of a configuration that change how models are divided, by plans of many configurations."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, Literal, get_args, get_origin

from transformers import PreTrainedConfig
from transformers.configuration_utils import ALLOWED_LAYER_TYPES

from oslo_models import registry
from oslo_models.sharding.plan import Plan

HEADS = {
    *("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads"),
    *("num_encoder_attention_heads", "num_decoder_attention_heads", "attention_heads"),
}
"""Numbers of attention heads, which limit the ranks of every model that shards heads."""
_OTHERS = re.compile(
    r"token_id|dropout|initializer|eps$|label|vocab_size|dtype|model_type|architectures|version|_name_or_path|num_hidden_layers"
)
"""Options without influence on plans, and numbers of blocks."""
_READ_BY_CONSTRUCTORS = re.compile(r"""kwargs\.(?:get|pop)\(\s*["'](\w+)["']""")


Pair = tuple[Any, str, Any, Any]
"""A configuration, the name and another value of an option, and the configuration with this value."""


@dataclass(frozen=True)
class Division:
    """How a plan divides a model.

    Attributes:
        one_rank, one_stage: the reason why it cannot be divided over ranks or stages, or ``""``.
        has_experts: whether there are experts to divide.
        ranks: the largest tensor-parallel size, or ``None`` for any.
        continued: the number of blocks that no stage begins with.
    """

    one_rank: str
    one_stage: str
    has_experts: bool
    ranks: int | None
    continued: int

    @classmethod
    def of(cls, plan: Plan) -> Division:
        rules = plan.pipeline
        continued = sum(len(blocks) for blocks in rules.continued_blocks.values())
        return cls(plan.single_rank_reason, rules.single_stage_reason, plan.has_experts(), plan.max_ranks(), continued)


@dataclass(frozen=True)
class Effect:
    """What an option changes.

    Attributes:
        option: the name, with a dot after the name of a nested configuration.
        value: a value that has the effect. ``None`` for limits, which depend on the number.
        kind: ``"one rank"``, ``"one stage"``, ``"stages"``, ``"experts"``, ``"no experts"``, ``"limits ranks"`` or
            ``"limits stages"``.
        reason: the reason of the plan.
    """

    option: str
    value: Any
    kind: str
    reason: str = ""


class _Reads:
    """Configuration that records the attributes a plan reads."""

    def __init__(self, config: Any) -> None:
        self._config, self.names = config, set[str]()

    def __getattr__(self, name: str) -> Any:
        self.names.add(name)
        return getattr(self._config, name)


def effects(classes: Mapping[str, Any]) -> dict[Effect, list[str]]:
    """Return the effects of all options of a type, each with the names of the classes that it is about.

    Args:
        classes: the classes of the type by name. They share a class of configurations.
    """
    config_class = next(iter(classes.values())).config_class
    reads = _Reads(config_class())
    for cls in classes.values():
        _answer(cls, reads)
    found: dict[tuple[str, str], tuple[Any, str, set[str]]] = {}
    _find(found, classes, _pairs(config_class, reads.names))
    for option, kind in [*found]:
        if kind == "stages":  # other options may forbid stages again
            _find(found, classes, _pairs_from(config_class, {option: found[option, kind][0]}, reads.names))
    made = {
        Effect(option, None if kind.startswith("limits") else value, kind, reason): [
            *filter(names.__contains__, classes)
        ]
        for (option, kind), (value, reason, names) in sorted(found.items(), key=lambda item: item[0])
    }
    return {
        effect: names
        for effect, names in made.items()
        if effect.kind != "limits ranks" or effect.option.rpartition(".")[2] not in HEADS
    }


def _find(
    found: dict[tuple[str, str], tuple[Any, str, set[str]]], classes: Mapping[str, Any], pairs: Iterable[Pair]
) -> None:
    """Add to ``found``, by option and kind of effect, the value, the reason and the classes."""
    answers: dict[str, Division | None] = {}
    last = None
    for base, option, value, changed in pairs:
        if base is not last:
            last, answers = base, {name: _answer(cls, base) for name, cls in classes.items()}
        for name, cls in classes.items():
            before, after = answers[name], _answer(cls, changed)
            for kind, reason in _kinds(before, after) if before is not None and after is not None else ():
                found.setdefault((option, kind), (value, reason, set()))[2].add(name)


def _answer(cls: Any, config: Any) -> Division | None:
    """Return how the plan of a class divides a model, or ``None`` if no model has this configuration."""
    try:
        return Division.of(cls.plan(config))
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, ZeroDivisionError):
        return None


def _kinds(before: Division, after: Division) -> Iterator[tuple[str, str]]:
    """Yield the kinds of effects between two divisions, with reasons."""
    if after.one_rank and not before.one_rank:
        yield "one rank", after.one_rank
    if after.one_stage and not before.one_stage:
        yield "one stage", after.one_stage
    if before.one_stage and not after.one_stage:
        yield "stages", ""
    if before.has_experts != after.has_experts:
        yield "experts" if after.has_experts else "no experts", ""
    if before.ranks is not None and after.ranks is not None and 0 < after.ranks < before.ranks:
        yield "limits ranks", ""
    if after.continued > before.continued and not after.one_stage:
        yield "limits stages", ""


def _pairs(kind: type[PreTrainedConfig], read: AbstractSet[str]) -> Iterator[Pair]:
    """Yield pairs of configurations that differ in one option.

    All options are tried from the default. Options that plans read are also tried from configurations whose blocks are
    of another kind.
    """
    base = kind()
    yield from _pairs_from(kind, {}, read)
    for name, value in _options(base):
        if name in read and _is_list(value, str):
            for each in _other_values(kind, name, value):
                yield from _pairs_from(kind, {name: each}, read)
    for name, part in vars(base).items():
        if isinstance(part, PreTrainedConfig) and (plain := _made(type(part), {})) is not None:
            start = _with_part(base, name, plain)
            for option, value in _options(plain):
                for other in _other_values(type(part), option, value):
                    if (own := _made(type(part), {option: other})) is not None:
                        yield start, f"{name}.{option}", other, _with_part(start, name, own)


def _pairs_from(kind: type[PreTrainedConfig], given: Mapping[str, Any], read: AbstractSet[str]) -> Iterator[Pair]:
    """Yield pairs that start with these values. Pairs that are equal for the plans are left out."""
    start = _made(kind, given)
    for name, value in _options(start) if start is not None else ():
        if name in given or (given and name not in read):
            continue
        for other in _other_values(kind, name, value):
            changed = _made(kind, {**given, name: other})
            if changed is not None and any(_value(start, each) != _value(changed, each) for each in read):
                yield start, name, other, changed


def _value(config: Any, name: str) -> Any:
    """Return the value of an option. Parts are dictionaries, since configurations may refuse to be compared."""
    value = getattr(config, name, None)
    return value.to_dict() if isinstance(value, PreTrainedConfig) else value


def _with_part(config: Any, name: str, part: Any) -> Any:
    changed = copy.copy(config)
    setattr(changed, name, part)
    return changed


def _made(kind: type[PreTrainedConfig], values: Mapping[str, Any]) -> Any:
    """Construct a configuration. Return ``None`` if its class refuses the values."""
    try:
        return kind(**copy.deepcopy(dict(values)))
    except Exception:  # noqa: BLE001  configurations check values in their own ways
        return None


def _options(config: PreTrainedConfig) -> list[tuple[str, Any]]:
    """Return the options of a configuration with their values; ``None`` for options that only its constructor knows."""
    kind: Any = type(config)
    known = {name: value for name, value in vars(config).items() if not name.startswith("_")}
    return [(name, value) for name, value in ({**_hidden(kind), **known}).items() if not _OTHERS.search(name)]


@cache
def _hidden(kind: type[PreTrainedConfig]) -> dict[str, None]:
    source = "".join(
        inspect.getsource(each) for each in kind.__mro__ if each.__module__.startswith("transformers.models.")
    )
    return dict.fromkeys(_READ_BY_CONSTRUCTORS.findall(source))


def _other_values(kind: Any, name: str, value: Any) -> Sequence[Any]:
    """Return other values of an option: a flag, sizes, strings that its type lists, lists of other kinds or sizes."""
    if isinstance(value, bool):
        return (not value,)
    if isinstance(value, int):
        return [each for each in dict.fromkeys((value + 1, value // 2, 1, 0)) if each != value]
    if value is None:
        return (True, 1, 2)
    if _is_list(value, int):
        return [[*value[:-1], 1], [max(each // 2, 1) for each in value]]
    if _is_list(value, str):
        return [[value[0], *[each] * (len(value) - 1)] for each in _kinds_of_blocks(kind)] + [
            [each] * len(value) for each in _kinds_of_blocks(kind) if each in value
        ]
    hint = next((_hints(base)[name] for base in kind.__mro__ if name in _hints(base)), None)
    strings = get_args(hint) if get_origin(hint) is Literal else ()
    return tuple(each for each in strings if each != value)


def _is_list(value: Any, kind: type) -> bool:
    return isinstance(value, list) and bool(value) and all(type(each) is kind for each in value)


@cache
def _kinds_of_blocks(kind: type[PreTrainedConfig]) -> tuple[str, ...]:
    """Return the kinds of blocks that the code of a type names."""
    modules = (kind.__module__, kind.__module__.replace(".configuration_", ".modeling_"))
    source = "".join(inspect.getsource(import_module(module)) for module in modules)
    return tuple(each for each in _all_kinds_of_blocks() if f'"{each}"' in source)


@cache
def _all_kinds_of_blocks() -> tuple[str, ...]:
    """Return the kinds of blocks that transformers knows, and those in the defaults of all types."""
    found = {*ALLOWED_LAYER_TYPES}
    for model_type in registry.ARCHITECTURES:
        cls: Any = next(iter(registry.model_classes(model_type).values()))
        config = cls.config_class()
        found.update(each for _, value in _options(config) if _is_list(value, str) for each in value)
    return tuple(sorted(found))


def _hints(cls: type) -> Mapping[str, Any]:
    return vars(cls).get("__annotations__", {})
