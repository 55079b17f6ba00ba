"""The adapters of a deployed model: transformers' methods, run by the workers."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from oslo_models.sharding.model_protocol import TransformersModel

_Call = tuple[str, tuple[Any, ...]]
_OVERRIDING = (("set_adapter",), ("enable_adapters", "disable_adapters"))
"""Methods that override their earlier calls, so a restart repeats only the last call."""


class DeployedAdapters:
    """A mixin of deployed models. Adapters stay unmerged. ``restart`` loads them again.

    A call of ``generate`` uses the adapters that are active when it begins, or the ones that its argument
    ``adapter_names`` gives its rows, as in ``peft``; ``"__base__"`` is the model without adapters. The running batch
    computes rows with different adapters in one step.
    """

    _engine: Any
    _adapter_calls: list[_Call]
    _adapter_lock: threading.Lock

    def load_adapter(self, peft_model_id: str | Path, adapter_name: str = "default") -> None:
        """Load an adapter that ``peft`` has saved, and activate it.

        Args:
            peft_model_id: its directory, readable by the workers, or its name on the hub.
            adapter_name: its name for `set_adapter`.

        Raises:
            ValueError: the name is taken, or sharded models do not support this kind of adapter.
        """
        source = Path(peft_model_id)
        self._change_adapters("load_adapter", str(source.resolve() if source.is_dir() else peft_model_id), adapter_name)

    def set_adapter(self, adapter_name: str | list[str]) -> None:
        """Activate one or several adapters. Raise ``ValueError`` if there is no adapter of the name."""
        self._change_adapters("set_adapter", adapter_name)

    def disable_adapters(self) -> None:
        """Compute without adapters, until `enable_adapters` is called."""
        self._change_adapters("disable_adapters")

    def enable_adapters(self) -> None:
        """Compute with the active adapters again."""
        self._change_adapters("enable_adapters")

    def delete_adapter(self, adapter_names: str | list[str]) -> None:
        """Delete adapters from the memory of the workers."""
        self._change_adapters("delete_adapter", adapter_names)

    def active_adapters(self) -> list[str]:
        """Return the names of the active adapters. Raise ``ValueError`` if none was loaded."""
        names: list[str] = self._engine.call("adapters", ("active_adapters", ()))
        return names

    def reason_against_adapter_names(self) -> str | None:
        """Return why calls cannot name the adapters of their rows; ``None`` if they can."""
        reason: str | None = self._engine.call("reason_against_adapter_names")
        return reason

    def _change_adapters(self, method: str, *args: Any) -> None:
        replaced = next((group for group in _OVERRIDING if method in group), ())
        with self._adapter_lock:  # so that a concurrent restart repeats the call too
            self._engine.call("adapters", (method, args))
            kept = [call for call in self._adapter_calls if call[0] not in replaced]
            self._adapter_calls = _without(args[0], kept) if method == "delete_adapter" else [*kept, (method, args)]

    def _repeat_adapter_calls(self) -> None:
        """Restore the adapters in restarted workers."""
        with self._adapter_lock:
            for method, args in self._adapter_calls:
                self._engine.call("adapters", (method, args))


def _without(deleted: str | list[str], calls: list[_Call]) -> list[_Call]:
    """Return calls that restore the adapters without the deleted ones. Files of deleted adapters may be missing."""
    names = _names(deleted)
    loads = [call for call in calls if call[0] == "load_adapter" and call[1][1] not in names]
    if not loads:
        return []
    switches = [call for call in calls if call[0] in ("enable_adapters", "disable_adapters")]
    last = next(args[-1] for method, args in reversed(calls) if method in ("load_adapter", "set_adapter"))
    active = [name for name in _names(last) if name not in names] or _names(loads[0][1][1])  # as peft chooses
    return [*loads, ("set_adapter", (active,)), *switches]


def _names(names: str | list[str]) -> list[str]:
    return [names] if isinstance(names, str) else list(names)


def call_adapters(model: TransformersModel, method: str, args: tuple[Any, ...]) -> Any:
    """Call one of these methods on a rank's model, or on a full model. A collective of all ranks."""
    result = getattr(model, method)(*args)
    model.eval()
    return result if method == "active_adapters" else None
