"""A configuration as one rank or one stage sees it."""

from __future__ import annotations

from typing import Any


class LocalConfig:
    """A configuration with some values replaced by those of one rank or stage; the rest is read from the model's."""

    def __init__(self, full: Any, **local: Any) -> None:
        self._full = full
        vars(self).update(local)

    def __getattr__(self, name: str) -> Any:
        if name == "_full" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._full, name)
