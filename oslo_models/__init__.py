"""A model zoo of pre-parallelized Hugging Face classes: transformers' classes, sharded, under their own names.

>>> from oslo_models import GPT2LMHeadModel
>>> model = GPT2LMHeadModel.from_pretrained_with_parallel("gpt2", tensor_parallel_size=2)
"""

from __future__ import annotations

import dis
import sys
from typing import Any

from oslo_models._version import __version__
from oslo_models.importing import without_collections
from oslo_models.installed import check_versions
from oslo_models.registry import ARCHITECTURES, did_you_mean, find, names

check_versions()

_OWN = {
    "AllReduceConv1D": "oslo_models.compat.policies",
    "AllReduceLinear": "oslo_models.compat.policies",
    "CheckpointError": "oslo_models.checkpoint",
    "DatasetBlender": "oslo_models.data.blend",
    "DatasetForCausalLM": "oslo_models.data.causal_lm",
    "DatasetPreprocessor": "oslo_models.data.preprocess",
    "DistributedProxySampler": "oslo_models.data.sampling",
    "InfiniteDataLoader": "oslo_models.data.dataloader",
    "Layer": "oslo_models.compat.policies",
    "MPU": "oslo_models.distributed.mpu",
    "ParallelMesh": "oslo_models.distributed.mesh",
    "ParallelModel": "oslo_models.modeling.base",
    "Policy": "oslo_models.compat.policies",
    "RankFailedError": "oslo_models.distributed.watchdog",
    "estimate": "oslo_models.planning.memory",
    "initialize": "oslo_models.compat.oslo2",
    "parallel_class": "oslo_models.modeling.parallel_class",
    "parallelize": "oslo_models.compat.parallelformers",
    "Config": "oslo_models.compat.tensor_parallel.config",
    "TensorParallel": "oslo_models.compat.tensor_parallel.api",
    "TensorParallelPreTrainedModel": "oslo_models.compat.tensor_parallel.api",
    "convert_state_dict": "oslo_models.compat.tensor_parallel.state",
    "infer_sharded_device_map": "oslo_models.compat.tensor_parallel.state",
    "save_tensor_parallel": "oslo_models.compat.tensor_parallel.state",
    "tensor_parallel": "oslo_models.compat.tensor_parallel.api",
}


def __getattr__(name: str) -> Any:
    """Import a class on first access, since the zoo is large and torch is slow to import."""
    if name == "__all__":
        return __dir__()
    if name.startswith("_"):
        raise AttributeError(f"module 'oslo_models' has no attribute {name!r}")
    try:
        with without_collections():
            value = _import(name)
    except AttributeError as error:
        if name not in _OWN and _is_from_import(sys._getframe(1)):
            raise ImportError(str(error), name=__name__) from None
        raise
    globals()[name] = value
    return value


def _import(name: str) -> Any:
    import importlib

    if name in _OWN:
        return getattr(importlib.import_module(_OWN[name]), name)
    return _auto_class(name) if name.startswith("Auto") else find(name, others=_OWN)


def _auto_class(name: str) -> Any:
    from oslo_models import auto

    if name not in vars(auto):
        known = [each for each in vars(auto) if each.startswith("AutoModel")]
        raise AttributeError(f"oslo_models has no {name}{did_you_mean(name, known) or ';'} auto classes: {known}")
    return getattr(auto, name)


def _is_from_import(frame: Any) -> bool:
    """Return whether a frame executes ``from ... import``, which replaces the message of an ``AttributeError``."""
    return dis.opname[frame.f_code.co_code[frame.f_lasti]] == "IMPORT_FROM"


def __dir__() -> list[str]:
    from oslo_models import auto

    autos = [name for name in vars(auto) if name.startswith("AutoModel")]
    zoo = [name for model_type in ARCHITECTURES for name in names(model_type)]
    return sorted({"__version__", *_OWN, *autos, *zoo})
