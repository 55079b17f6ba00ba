"""Reads the configuration of a saved adapter, after checks of what would take long or never end."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from peft import PeftConfig

MOST_REPEATS, LONGEST_PATTERN = 8, 2000
"""Limits of ``*``, ``+`` and ``{n,}`` in an expression for the names of modules, and of its characters."""
_FILES = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")
_TOKENS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{\d*,\d*\}|[()*+|]", re.DOTALL)


def read_adapter_config(source: str) -> Any:
    """Read the configuration of an adapter from a directory or the hub.

    Raises:
        ValueError: the configuration is of no adapter, or has expressions that may take long.
        OSError: there is no such file.
    """
    for name in _FILES if Path(source).is_dir() else ():
        if (path := Path(source, name)).exists() and not path.is_file():
            raise ValueError(f"{path} is not a file")
    try:
        config: Any = PeftConfig.from_pretrained(source)
    except (TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"{source}: its adapter_config.json is of no adapter ({error!r:.200})") from error
    for key, pattern in _patterns(config):
        if len(pattern) > LONGEST_PATTERN or is_slow(pattern):
            raise ValueError(f"{source}: {key}={pattern!r:.80} in its adapter_config.json may take long; name modules")
    steps = re.fullmatch(r"pissa_niter_(\d+)", str(getattr(config, "init_lora_weights", "")))
    if steps and int(steps[1][:9]) > 1000:
        raise ValueError(f"{source}: init_lora_weights={steps[0]:.80} in its adapter_config.json would take long")
    return config


def _patterns(config: Any) -> Iterator[tuple[str, str]]:
    """Yield the regular expressions of a configuration with their keys."""
    for key in ("target_modules", "exclude_modules", "layers_pattern", "rank_pattern", "alpha_pattern"):
        value = getattr(config, key, None) or ()
        for pattern in [value] if isinstance(value, str) else value:
            yield key, str(pattern)


def is_slow(pattern: str) -> bool:
    """Return whether an expression has many repeats, or repeats a group with repeats or alternatives.

    Matching such an expression may take exponential time.
    """
    groups, closed, count = [False], (0, False), 0
    for match in _TOKENS.finditer(pattern):
        token = match[0]
        if token == "(":
            groups.append(False)
        elif token == ")" and len(groups) > 1:
            closed = match.end(), groups.pop()
            groups[-1] |= closed[1]
        elif token == "|":
            groups[-1] = True
        elif token[0] in "*+{":
            if closed == (match.start(), True):
                return True
            groups[-1], count = True, count + 1
    return count > MOST_REPEATS
