"""Settings of plain rows that `generate` has prepared, for later calls with equal arguments.

Preparing takes transformers as long as a forward of a small model, and the other rows of the batch wait for it. A call
of `generate` for one token of a GPT-2 with two layers of size 64 takes 1.47 ms, and 2.12 ms if it has to be prepared.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import cached_property
from typing import Any, NamedTuple

from torch import Tensor
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

MOST = 1024
"""Settings that are kept."""
_VALUES = (bool, int, float, str, type(None))
"""Types of arguments that are equal if their values are; others may have a state."""
_KNOWN_PACKAGES = ("oslo_models", "transformers", "torch", "builtins")
"""Whose classes prepare settings of what `Key` says, and nothing else."""


class Key(NamedTuple):
    """What the settings of a plain row depend on.

    Attributes:
        arguments: names, types and values.
    """

    length: int
    has_mask: bool
    arguments: tuple[tuple[str, str, Any], ...]


class PlainSettings:
    """Of greedy rows that have no processors and end by their length or by tokens.

    Such settings depend on the arguments, the number of tokens and the model's own generation configuration. A class of
    the application may have methods that make them depend on more: for those none are kept.

    Attributes:
        device: of the model, which takes long to ask for.
    """

    def __init__(self, model: Any) -> None:
        self._model, self.device = model, model.device
        self._defaults: dict[str, Any] = {}
        self._found: dict[Key, tuple[Any, tuple[int, ...]]] = {}
        self._applies = all(base.__module__.partition(".")[0] in _KNOWN_PACKAGES for base in type(model).__mro__)

    def forget(self) -> None:
        """Prepare all anew: the model may have changed."""
        self._found.clear()
        vars(self).pop("vocabulary", None)

    @cached_property
    def vocabulary(self) -> int:
        """How many tokens the model knows; transformers takes long to tell."""
        size: int = self._model.config.get_text_config(decoder=True).vocab_size
        return size

    def key(self, given: Mapping[str, Any]) -> Key | None:
        """What the settings of a row depend on; ``None`` if they may depend on more.

        Args:
            given: the arguments of `generate`, with ``input_ids`` [1, L].
        """
        self._follow_defaults()
        mask_BL = given.get("attention_mask")
        if not self._applies or not (mask_BL is None or bool(mask_BL.all())):
            return None
        others = [(name, value) for name, value in given.items() if name not in ("input_ids", "attention_mask")]
        if not all(type(value) in _VALUES for _, value in others):
            return None
        typed = sorted((name, type(value).__name__, value) for name, value in others)
        return Key(given["input_ids"].shape[1], mask_BL is not None, tuple(typed))

    def _follow_defaults(self) -> None:
        defaults = vars(self._model.generation_config)
        if defaults != self._defaults:
            self.forget()
            self._defaults = copy.deepcopy(defaults)  # lists in it may be changed in place

    def find(self, key: Key | None, prompt: list[int]) -> Any:
        """The settings of a former row for a prompt; ``None`` if there are none, or a mask has to be made of it."""
        settings, padding = self._found.get(key, (None, ())) if key is not None else (None, ())
        return None if any(token in prompt for token in padding) else settings

    def keep(self, key: Key | None, settings: Any) -> None:
        """Keep the settings of a row if it is a plain one; see `Row`."""
        processors, criteria, config, scored = settings
        if key is None or processors or config.do_sample or scored is not None:
            return
        if not all(type(each) in (MaxLengthCriteria, EosTokenCriteria) for each in criteria):
            return
        if len(self._found) >= MOST:
            self.forget()
        pad: Tensor | None = config._pad_token_tensor
        padding = () if key.has_mask or pad is None else tuple(pad.flatten().tolist())
        self._found[key] = settings, padding
