"""Configuration with the local values of one rank or pipeline stage."""

from __future__ import annotations

from typing import Any


class LocalConfig:
    """Configuration with overrides for one rank or stage. Other values are read from the full configuration."""

    def __init__(self, full: Any, **local: Any) -> None:
        self._full = full
        vars(self).update(local)

    def get_text_config(self, *args: Any, **kwargs: Any) -> Any:
        """Return the text configuration, with the local values if it is this one: caches read their layers in it."""
        text = self._full.get_text_config(*args, **kwargs)
        return self if text is self._full else text

    def __getattr__(self, name: str) -> Any:
        if name == "_full" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._full, name)
