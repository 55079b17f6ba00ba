"""Datasets for language models: tokenise, binarise, index, blend and sample, in Megatron's file format.

>>> from oslo_models.data import DatasetForCausalLM, DatasetPreprocessor
"""

from __future__ import annotations

from typing import Any

_MODULES = {
    "DatasetBlender": "oslo_models.data.blend",
    "DatasetForCausalLM": "oslo_models.data.causal_lm",
    "DatasetPreprocessor": "oslo_models.data.preprocess",
    "DistributedProxySampler": "oslo_models.data.sampling",
    "IndexedDataset": "oslo_models.data.indexed_dataset",
    "InfiniteDataLoader": "oslo_models.data.dataloader",
    "open_documents": "oslo_models.data.readers",
}


def __getattr__(name: str) -> Any:
    """Import classes lazily, since preprocessing needs no torch."""
    import importlib

    if name == "__all__":
        return __dir__()
    if name not in _MODULES:
        raise AttributeError(f"module 'oslo_models.data' has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(_MODULES)
