"""Whisper: BART whose encoder hears. The convolutions that embed the sound are whole on every rank."""

from dataclasses import replace
from typing import Any, ClassVar

from transformers import WhisperConfig
from transformers.models.whisper import modeling_whisper as hf

from oslo_models.models.bart import BartParallel
from oslo_models.models.wav2vec2 import SUMMED
from oslo_models.sharding.plan import Plan, Replicated, VocabParallel


class WhisperParallel(BartParallel):
    """How every model of the Whisper family divides.

    Attributes:
        ears: the modules of the encoder that embed.
    """

    before = ()
    after = ("layer_norm",)
    ears: ClassVar[tuple[str, ...]] = ("conv1", "conv2", "embed_positions")

    @staticmethod
    def positions(config: Any, batch: Any) -> tuple[int, int]:
        """How many rows and positions of the encoder a batch leads to."""
        rows, _, frames = batch["input_features"].shape
        return rows, (frames + 1) // 2

    @classmethod
    def plan(cls, config: Any) -> Plan:
        plan = super().plan(config)
        ears = {f"encoder.{name}": Replicated() for name in cls.ears if "encoder" in cls.stacks}
        words = {name: entry for name, entry in plan.embed.items() if name.startswith("decoder.")}
        local = {
            f"{stack}.layers.{attention}.num_heads": cls.heads(config, stack).local_count
            for stack in cls.stacks
            for attention in ("self_attn", "encoder_attn")
        }
        positions = {"encoder.layers": lambda batch: cls.positions(config, batch)}
        optional = (*plan.optional, "layer_weights")
        summed = SUMMED if "layer_weights" in cls.head_plan and config.use_weighted_layer_sum else ""
        return replace(
            plan, embed={**ears, **words}, local=local, positions=positions, optional=optional, one_stage=summed
        )


class WhisperModel(WhisperParallel, hf.WhisperModel):
    pass


class WhisperForConditionalGeneration(WhisperParallel, hf.WhisperForConditionalGeneration):
    head_plan = {"proj_out": VocabParallel()}


class WhisperForCausalLM(WhisperParallel, hf.WhisperForCausalLM):
    head_plan = {"proj_out": VocabParallel()}
    stacks = ("decoder",)


class WhisperForAudioClassification(WhisperParallel, hf.WhisperForAudioClassification):
    head_plan = {"layer_weights": Replicated(), "projector": Replicated(), "classifier": Replicated()}
    stacks = ("encoder",)
