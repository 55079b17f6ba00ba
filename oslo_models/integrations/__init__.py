"""transformers' Trainer, TRL's trainers and accelerate's Accelerator for models sharded over ranks.

>>> from oslo_models.integrations import Trainer, Seq2SeqTrainer, ParallelTrainerMixin, Accelerator
>>> from oslo_models.integrations import SFTTrainer, DPOTrainer, KTOTrainer, RewardTrainer, GRPOTrainer, RLOOTrainer
>>> from oslo_models.integrations import DistillationTrainer, GKDTrainer, OnlineDPOTrainer, ORPOTrainer, CPOTrainer
"""

from __future__ import annotations

from typing import Any

_MODULES = {
    "Accelerator": "oslo_models.integrations.accelerator",
    "CPOTrainer": "oslo_models.integrations.trl.experimental",
    "DPOTrainer": "oslo_models.integrations.trl.trainers",
    "DistillationTrainer": "oslo_models.integrations.trl.distillation",
    "GKDTrainer": "oslo_models.integrations.trl.experimental",
    "GRPOTrainer": "oslo_models.integrations.trl.trainers",
    "KTOTrainer": "oslo_models.integrations.trl.kto",
    "ORPOTrainer": "oslo_models.integrations.trl.experimental",
    "OnlineDPOTrainer": "oslo_models.integrations.trl.experimental",
    "ParallelTrainerMixin": "oslo_models.integrations.trainer",
    "RLOOTrainer": "oslo_models.integrations.trl.trainers",
    "RewardTrainer": "oslo_models.integrations.trl.trainers",
    "SFTTrainer": "oslo_models.integrations.trl.trainers",
    "Seq2SeqTrainer": "oslo_models.integrations.trainer",
    "Trainer": "oslo_models.integrations.trainer",
}
__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    """Import a class on first access: accelerate is optional."""
    import importlib

    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def trainers_of_trl() -> list[str]:
    """Return the names of TRL's trainers for sharded models."""
    return [name for name, module in _MODULES.items() if ".trl." in module]
