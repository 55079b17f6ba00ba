"""Switches the adapter that a checkpoint carries for one kind of input: see `modeling.adapters.own_adapter`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any


class AdapterSwitch:
    """Switches the adapter that a deployed model carries: on for calls with sounds, and off for other calls.

    Args:
        model: the model of this rank.
    """

    def __init__(self, model: Any) -> None:
        config = getattr(model, "config", None)
        self._model, self._is_on = model, False
        self._has_adapter = getattr(config, "has_lora_adapter", False) and model._hf_peft_config_loaded
        self._switch(False)

    def _switch(self, is_on: bool) -> None:
        if self._has_adapter:
            self._is_on = is_on
            (self._model.enable_adapters if is_on else self._model.disable_adapters)()

    @contextmanager
    def of_call(self, arguments: Mapping[str, Any]) -> Iterator[None]:
        """Switch the adapter for a call with these arguments, and off behind it."""
        self._switch(arguments.get("input_features") is not None)
        try:
            yield
        finally:
            self._switch(False)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Switch the adapter off within a call, for a step of other rows."""
        before = self._is_on
        self._switch(False)
        try:
            yield
        finally:
            self._switch(before)
