"""Whisper: BART whose encoder hears. The convolutions that embed the sound are whole on every rank."""

from dataclasses import replace
from typing import Any, ClassVar

from transformers.models.whisper import modeling_whisper as hf

from oslo_models.models.bart import DECODER, BartParallel
from oslo_models.models.family import family
from oslo_models.models.wav2vec2 import SUMMED
from oslo_models.plan import Entries, Plan, Replicated, Vocab

HEADS: dict[str, Entries] = {
    "Model": {},
    "ForConditionalGeneration": {"proj_out": Vocab()},
    "ForCausalLM": {"proj_out": Vocab()},
    "ForAudioClassification": {name: Replicated() for name in ("layer_weights", "projector", "classifier")},
}
ENCODER = {"stacks": ("encoder",)}


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
        summed = SUMMED if "layer_weights" in cls.head and config.use_weighted_layer_sum else ""
        return replace(
            plan, embed={**ears, **words}, local=local, positions=positions, optional=optional, one_stage=summed
        )


globals().update(family(WhisperParallel, hf, HEADS, ForCausalLM=DECODER, ForAudioClassification=ENCODER))
