"""Chooses the class that computes the steps of the running batch for a model."""

from __future__ import annotations

from typing import Any

from oslo_models.deploy.running_batch.encoder_decoders import EncoderDecoderRunner
from oslo_models.deploy.running_batch.prompt_sounds import reads_sounds
from oslo_models.deploy.running_batch.sound_runner import SoundRunner
from oslo_models.deploy.running_batch.step_runner import StepRunner
from oslo_models.pipeline.sharded_model import ShardedModel


def runner_of(model: ShardedModel, *args: Any, **kwargs: Any) -> StepRunner:
    """Return the runner of a model with the arguments of `StepRunner`."""
    if reads_sounds(model.config):
        return SoundRunner(model, *args, **kwargs)
    runner = EncoderDecoderRunner if model.config.is_encoder_decoder else StepRunner
    return runner(model, *args, **kwargs)
