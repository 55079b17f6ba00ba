"""``deploy=True``: worker processes hold the model, and a plain Python script calls it like a local model."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oslo_models.deploy.errors import EngineError
    from oslo_models.deploy.proxy import Deployment, deploy

__all__ = ["Deployment", "EngineError", "deploy"]


def __getattr__(name: str) -> Any:
    """Import on first use: a worker must notice the end of its application before it has imported torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "errors" if name == "EngineError" else "proxy"
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)
