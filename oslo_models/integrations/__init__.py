"""transformers' Trainer, TRL's trainers and accelerate's Accelerator for models sharded over ranks.

>>> from oslo_models.integrations import Trainer, Seq2SeqTrainer, ParallelTrainerMixin, Accelerator
>>> from oslo_models.integrations import SFTTrainer, DPOTrainer, RewardTrainer, GRPOTrainer, RLOOTrainer
"""

from __future__ import annotations

from typing import Any

_MODULES = {
    "Accelerator": "oslo_models.integrations.accelerator",
    "DPOTrainer": "oslo_models.integrations.trl.trainers",
    "GRPOTrainer": "oslo_models.integrations.trl.trainers",
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
