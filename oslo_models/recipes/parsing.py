"""Parses a recipe and its flags with the parser of TRL into the dataclasses of TRL and transformers."""

from __future__ import annotations

import os
import re
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from oslo_models.recipes.keys import ParallelArguments, dataclasses_of
from oslo_models.recipes.values import check_value, hints_of
from oslo_models.registry import did_you_mean

OWN_PROCESSES = "leave it out: this command starts its processes itself; devices: N gives their number"
OTHER_KEYS = dict.fromkeys(
    ("accelerate_config", "config_file", "num_processes", "num_machines", "machine_rank", "main_process_port"),
    OWN_PROCESSES,
)
"""Keys of `accelerate launch` that recipes do not take, each with advice."""
MOST_BYTES, MOST_VALUES = 1 << 18, 10_000
"""Limits of a recipe."""


@dataclass
class Recipe:
    """A parsed recipe.

    Attributes:
        task: the command: ``sft``, ``dpo``, ``grpo`` or ``pretrain``.
        values: the given keys, from the file and from flags.
        namespace: all keys with their values.
        script: keys of the dataset (`PretrainArguments` for ``pretrain``).
        training: the training arguments.
        model: the model and the adapter.
        mixture: the list of datasets; ``None`` for ``pretrain``.
    """

    task: str
    values: dict[str, Any]
    namespace: Namespace
    parallel: ParallelArguments
    script: Any = None
    training: Any = None
    model: Any = None
    mixture: Any = field(default=None)


def parse(task: str, argv: Sequence[str]) -> Recipe:
    """Parse the arguments of a command: a file, and flags that override its keys. Creates no training arguments.

    Raises:
        ValueError: a key is unknown or has a value of another type.
        OSError: the recipe cannot be read.
        ImportError: TRL is not installed.
    """
    dataclass_types = dataclasses_of(task)
    path, flags = _split(argv)
    config = {} if path is None else read_recipe(path)
    parser = _make_parser(dataclass_types)
    actions = {action.dest: action for action in parser._actions}
    hints = hints_of(dataclass_types)
    _set_environment(config.pop("env", {}))
    for key, value in config.items():
        check_key(task, key, actions)
        if key == "resume_from_checkpoint" and isinstance(value, bool):
            config[key] = str(value).lower()
            continue
        check_value(key, value, hints[key], actions[key].choices)
        if isinstance(value, str) and actions[key].nargs == "+" and not key.startswith("lora_"):
            config[key] = [value]  # peft reads a word or a pattern itself
    defaults = vars(parser.parse_args([]))
    parser.set_defaults_with_config(**config)
    namespace, unknown = parser.parse_known_args(list(flags))
    if unknown:
        if unknown[0].startswith("--"):
            check_key(task, unknown[0].removeprefix("--").partition("=")[0].replace("-", "_"), actions)
        raise ValueError(f"{unknown[0]}: it belongs to no key; write oslo-models {task} RECIPE.yaml --key value")
    given = {key: value for key, value in vars(namespace).items() if key in config or value != defaults[key]}
    if "use_cpu" not in given and not _has_accelerator():
        namespace.use_cpu = True  # TRL would ask for the flag
    names = ParallelArguments.__dataclass_fields__
    parallel = ParallelArguments(**{name: getattr(namespace, name) for name in names})
    return Recipe(task, given, namespace, parallel)


def build(recipe: Recipe, for_checks: bool = False) -> Recipe:
    """Create the dataclasses of TRL and transformers in place. Return the recipe.

    Args:
        for_checks: use no GPU. Otherwise the process that starts the ranks would hold GPU memory.

    Raises:
        ValueError: TRL or transformers refuses a value.
    """
    values = vars(recipe.namespace) | ({"use_cpu": True} if for_checks else {})
    parser = _make_parser(dataclasses_of(recipe.task))
    try:
        made = parser.parse_dict(values)
    except (TypeError, ImportError) as error:
        raise ValueError(f"the recipe does not fit: {error}") from error
    recipe.script, recipe.training, recipe.model = made[:3]
    recipe.mixture = made[3] if recipe.task != "pretrain" else None
    return recipe


def read_recipe(path: Path) -> dict[str, Any]:
    """Read the mapping of a YAML file.

    Raises:
        ValueError: the file is not YAML, or not a mapping.
        OSError: the file cannot be read.
    """
    import yaml

    if not path.is_file():
        raise FileNotFoundError(f"recipe {path}: there is no such file")
    if (size := path.stat().st_size) > MOST_BYTES:
        raise ValueError(f"recipe {path}: it has {size} bytes, and recipes have at most {MOST_BYTES}")
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
        _count(config, MOST_VALUES)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else f"it is not YAML: {error}"
        raise ValueError(f"recipe {path}: {reason}; write one `key: value` a line") from error
    if not isinstance(config, dict):
        raise ValueError(f"recipe {path}: it holds no keys; write one `key: value` a line")
    if other := [key for key in config if not isinstance(key, str)]:
        raise ValueError(f"recipe {path}: {other[0]!r} is no name of a key; write one `key: value` a line")
    return config


def _count(value: Any, most: int) -> int:
    """Return how many of ``most`` values remain. Names of values (``*name``) may stand for any number of values.

    Raises:
        ValueError: there are more.
    """
    if most <= 0:
        raise ValueError(f"names such as *name stand for more than {MOST_VALUES} values")
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        most = _count(item, most - 1)
    return most


def check_key(task: str, key: str, known: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` for an unknown key. The message names the nearest known key."""
    if key in OTHER_KEYS:
        raise ValueError(f"{key}: {OTHER_KEYS[key]}")
    if key not in known or key == "help":
        hint = did_you_mean(key, known) or f"; `trl {task} --help` lists the keys of TRL"
        raise ValueError(f"{key}: oslo-models {task} has no such key{hint}")


def _split(argv: Sequence[str]) -> tuple[Path | None, list[str]]:
    """Return the path of the recipe, given first or by ``--config``, and the flags."""
    rest = list(argv)
    if rest and not rest[0].startswith("-"):
        return Path(rest[0]), rest[1:]
    for index, argument in enumerate(rest):
        if argument == "--config":
            if index + 1 == len(rest):
                raise ValueError("--config: it has no value; give the path of a recipe")
            return Path(rest[index + 1]), rest[:index] + rest[index + 2 :]
        if argument.startswith("--config="):
            return Path(argument.removeprefix("--config=")), rest[:index] + rest[index + 1 :]
    return None, rest


def _make_parser(dataclass_types: Sequence[Any]) -> Any:
    """Return TRL's parser. It raises ``ValueError`` where the original prints its usage and exits."""
    from trl import TrlParser

    class Parser(TrlParser):
        def error(self, message: str) -> NoReturn:
            match = re.fullmatch(r"argument --(\w+)\S*: (?:invalid \w+ value: (.*)|(.*))", message, re.DOTALL)
            if match is None:
                raise ValueError(message)
            key, value, other = match.groups()
            hints = hints_of(dataclass_types)
            if value is not None and key in hints:
                check_value(key, value.strip("'\""), hints[key], None)
            raise ValueError(f"{key}: {other or message}")

    return Parser(dataclass_types, allow_abbrev=False, add_help=False)


def _set_environment(variables: Any) -> None:
    """Set the environment variables of the recipe, as TRL's parser does."""
    if not isinstance(variables, dict):
        raise ValueError(f"env: {variables!r} is no mapping; give names and values of environment variables")
    os.environ.update({str(name): str(value) for name, value in variables.items()})


def _has_accelerator() -> bool:
    import torch

    return torch.cuda.is_available()
