"""The adapters of rows, as numbers that steps carry: 0 for the active adapters of the model, 1 for no adapter."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any


class ModelAdapters:
    """The adapters of the model of one rank.

    Args:
        model: with or without adapters. They may change; see `forget`.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self.forget()

    def forget(self) -> None:
        """Look for the adapters again at the next use, because they may have changed."""
        self._found: Any = None

    @property
    def _rows(self) -> Any:
        """The `RowAdapters` of the model."""
        if self._found is None:
            self._found = self._model.row_adapters()
        return self._found

    def numbers(self, names: Any, count: int) -> list[int]:
        """Return the numbers of the adapters of ``count`` rows. They are equal on all ranks.

        Args:
            names: an adapter of each row; ``"__base__"`` for none. ``None``: the active adapters for all rows.

        Raises:
            ValueError: there is another number of names, the model has no such adapter, or one of its adapters is not
                plain LoRA of linear layers.
        """
        if names is None:
            return [0] * count
        if isinstance(names, str) or not isinstance(names, Sequence) or len(names) != count:
            raise ValueError(f"adapter_names={names!r} must be a list with a name for each of the {count} rows")
        if getattr(self._model, "_peft_config", None) is None:
            raise ValueError(f"adapter_names={names!r}, but the model has no adapters: call load_adapter before")
        known, reason = self._rows.names, self._rows.reason
        if wrong := [name for name in names if name is None or name not in known]:
            raise ValueError(
                f"adapter_names has {wrong[0]!r}; the adapters of this model are {known[2:]}, and {known[1]!r} is the "
                "model without adapters"
            )
        if reason is not None:
            raise ValueError(
                f"adapter_names={names!r}: rows cannot have different adapters, because {reason}. Leave it out, and "
                "call set_adapter"
            )
        return [known.index(name) for name in names]

    def selected(self, numbers: Sequence[int], length: int | None = None) -> AbstractContextManager[None]:
        """Return a context in which row ``i`` of a batch is computed with the adapter ``numbers[i]``.

        Args:
            length: number of positions of each row; needed if the numbers differ.
        """
        if not any(numbers):
            return nullcontext()
        names = [self._rows.names[each] for each in numbers]
        context: AbstractContextManager[None] = self._rows.selected(names, length)
        return context
