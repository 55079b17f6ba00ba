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
        self._names: list[str | None] = []
        self._reason: str | None = None
        self._rows: Any = None

    def _find(self) -> None:
        if self._rows is not None:
            return
        from oslo_models.modeling.adapters.rows import BASE, RowAdapters, reason_against_rows

        self._names = [None, BASE, *self._model.peft_config]
        self._reason, self._rows = reason_against_rows(self._model), RowAdapters(self._model)

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
        self._find()
        if wrong := [name for name in names if name is None or name not in self._names]:
            raise ValueError(
                f"adapter_names has {wrong[0]!r}; the adapters of this model are {self._names[2:]}, and "
                f"{self._names[1]!r} is the model without adapters"
            )
        if self._reason is not None:
            raise ValueError(
                f"adapter_names={names!r}: rows cannot have different adapters, because {self._reason}. Leave it out, "
                "and call set_adapter"
            )
        return [self._names.index(name) for name in names]

    def selected(self, numbers: Sequence[int], length: int | None = None) -> AbstractContextManager[None]:
        """Return a context in which row ``i`` of a batch is computed with the adapter ``numbers[i]``.

        Args:
            length: number of positions of each row; needed if the numbers differ.
        """
        if not any(numbers):
            return nullcontext()
        self._find()
        context: AbstractContextManager[None] = self._rows.selected([self._names[each] for each in numbers], length)
        return context
