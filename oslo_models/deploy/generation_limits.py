"""Rejects settings of `generate` that overflow the logits before they reach a worker. On a GPU they would end it.

Logits are float32. A scale beyond this range turns them into infinities or NaN, which cannot be sampled.
`torch.multinomial` raises on a CPU. On a GPU it fails a device-side assertion, and the process cannot use the device
any more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

LEAST, MOST = 1e-9, 1e9
"""The range of a scale, unless it is 0: logits multiplied by all of `SCALES` stay within the range of float32."""
LEAST_BIAS = -3.4e38
SCALES = ("temperature", "repetition_penalty", "encoder_repetition_penalty", "guidance_scale")
FINITE = ("top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff", "length_penalty")


def is_scale(value: float) -> bool:
    """Return whether a value can scale logits. False for NaN. True for 0, which transformers accepts or rejects."""
    return value == 0 or LEAST <= abs(value) <= MOST


def is_bias(value: float) -> bool:
    """Return whether a value can be added to a logit. ``-inf``, which forbids a token, is allowed."""
    return value == -math.inf or LEAST_BIAS <= value <= MOST


def settings_of(given: Mapping[str, Any], defaults: Any) -> Callable[[str], Any]:
    """Return a function that looks up a setting of `generate` by name; ``None`` if the setting is not set.

    Args:
        given: the arguments of the call.
        defaults: the generation configuration for settings that the arguments leave out.
    """
    sources = [given, *(getattr(config, "__dict__", {}) for config in (given.get("generation_config"), defaults))]

    def setting(name: str) -> Any:
        for source in sources:
            if (value := source.get(name)) is not None:
                return value
        return None

    return setting


def check_generation(given: Mapping[str, Any], defaults: Any) -> None:
    """Raise ``ValueError`` for settings of `generate` that turn logits into infinities or NaN.

    Args:
        given, defaults: as for `settings_of`.
    """
    setting = settings_of(given, defaults)
    for name in SCALES:
        if isinstance(value := setting(name), (int, float)) and not is_scale(value):
            raise ValueError(f"{name}={value!r:.40} is out of the range of float32 logits: use {LEAST:g} to {MOST:g}")
    for name in FINITE:
        if isinstance(value := setting(name), float) and not math.isfinite(value):
            raise ValueError(f"{name}={value!r} is not finite: use a number")
    bias = setting("sequence_bias")
    for value in bias.values() if isinstance(bias, Mapping) else _seconds(bias):
        if isinstance(value, (int, float)) and not is_bias(value):
            raise ValueError(
                f"sequence_bias has {value!r:.40}, which is out of the range of float32 logits: use at most {MOST:g}; "
                "-inf forbids a token"
            )


def _seconds(pairs: Any) -> list[Any]:
    """Return the second element of each pair. transformers rejects anything else."""
    pairs = pairs if isinstance(pairs, (list, tuple)) else ()
    return [pair[1] for pair in pairs if isinstance(pair, (list, tuple)) and len(pair) == 2]
