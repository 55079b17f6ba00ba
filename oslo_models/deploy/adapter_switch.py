"""Switches the adapters of a model for one call, outside of the running batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from oslo_models.deploy.running_batch.row_adapters import ModelAdapters


class AdapterSwitch:
    """Switches the adapters of a deployed model for a call: by name, or the one that its checkpoint carries.

    The adapter of a checkpoint is on for calls with sounds, and off for other calls; see
    `modeling.adapters.own_adapter`.

    Args:
        model: the model of this rank.
    """

    def __init__(self, model: Any) -> None:
        config = getattr(model, "config", None)
        self._model = model
        self._has_own_adapter = getattr(config, "has_lora_adapter", False) and model._hf_peft_config_loaded
        self._adapters, self._selected = ModelAdapters(model), ExitStack()
        self._switch(False, ())

    def _switch(self, has_sounds: bool, numbers: Sequence[int]) -> None:
        self._current = has_sounds, numbers
        self._selected.close()
        self._selected.enter_context(self._adapters.selected(numbers))
        if self._has_own_adapter:
            (self._model.enable_adapters if has_sounds else self._model.disable_adapters)()

    @contextmanager
    def _switched(self, has_sounds: bool, numbers: Sequence[int]) -> Iterator[None]:
        before = self._current
        self._switch(has_sounds, numbers)
        try:
            yield
        finally:
            self._switch(*before)

    @contextmanager
    def of_call(self, arguments: Mapping[str, Any], names: Any = None) -> Iterator[None]:
        """Switch the adapter for a call with these arguments, and back behind it.

        Args:
            names: the adapter of each row, see `ModelAdapters.numbers`.

        Raises:
            ValueError: the rows have different adapters, or the names are refused.
        """
        self._adapters.forget()
        numbers = self._adapters.numbers(names, len(names) if isinstance(names, Sequence) else 1)
        if len({*numbers}) > 1:
            raise ValueError(
                f"adapter_names={names!r} has several adapters, and this call cannot join the running batch, which "
                "computes them together: call generate for the rows of each adapter"
            )
        with self._switched(arguments.get("input_features") is not None, numbers[:1]):
            yield

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Switch the adapters off within a call, for a step of other rows."""
        with self._switched(False, ()):
            yield
