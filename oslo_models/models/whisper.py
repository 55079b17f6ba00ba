"""Whisper: BART with a convolutional audio front end, replicated on every rank."""

from dataclasses import replace
from typing import Any, ClassVar

from transformers import WhisperConfig
from transformers.models.whisper import modeling_whisper as hf

from oslo_models.layers.entries import LocalAttributes, Norm, Plan, Replicated, VocabParallel
from oslo_models.modeling.base import ParallelModel
from oslo_models.modeling.blocks import heads_of
from oslo_models.models.bart import BartParallel
from oslo_models.models.wav2vec2 import WEIGHTED_SUM
from oslo_models.pipeline.window_encoding import WindowEncoding
from oslo_models.sharding.layout import EvenSplit


class WhisperParallel(BartParallel):
    """Sharding plan of the Whisper family.

    Attributes:
        audio_layers: the modules of the encoder that embed the audio.
    """

    embedding_norms = ()
    final_norms = ("layer_norm",)
    audio_layers: ClassVar[tuple[str, ...]] = ("conv1", "conv2", "embed_positions")

    @staticmethod
    def positions(config: Any, batch: Any) -> tuple[int, int]:
        """Return the number of rows and positions of a batch in the encoder."""
        rows, _, frames = batch["input_features"].shape
        return rows, (frames + 1) // 2

    @classmethod
    def block(cls, heads: EvenSplit, *attentions: str) -> dict[str, Replicated]:
        local = LocalAttributes({"num_heads": heads.local_count})
        return super().block(heads, *attentions) | dict.fromkeys(attentions, local)

    @classmethod
    def plan(cls, config: Any) -> Plan:
        plan = super().plan(config)
        audio = {f"encoder.{name}": Replicated() for name in cls.audio_layers if "encoder" in cls.stacks}
        tokens = {name: entry for name, entry in plan.embed.items() if name.startswith("decoder.")}
        positions = {"encoder.layers": lambda batch: cls.positions(config, batch)}
        optional = (*plan.optional, "layer_weights")
        summed = WEIGHTED_SUM if "layer_weights" in cls.head_plan and config.use_weighted_layer_sum else ""
        plan = replace(plan, embed={**audio, **tokens}, optional=optional)
        return plan.with_rules(input_positions=positions, single_stage_reason=summed)


class WhisperEncoderParallel(ParallelModel):
    """Sharding plan of other encoders of sounds with the blocks of Whisper.

    Attributes:
        audio_layers: the modules that embed the audio.
        final_norm: the norm after the blocks.
        projectors: the modules after this norm.
        reason: see `PipelineRules.single_stage_reason`.
    """

    audio_layers: ClassVar[tuple[str, ...]] = WhisperParallel.audio_layers
    final_norm: ClassVar[str] = "layer_norm"
    projectors: ClassVar[tuple[str, ...]] = ()
    reason: ClassVar[str] = "none of its modules outputs the embedded audio"

    @classmethod
    def plan(cls, config: Any) -> Plan:
        return Plan(
            embed=dict.fromkeys(cls.audio_layers, Replicated()),
            blocks={"layers": WhisperParallel.block(heads_of(config), "self_attn")},
            head={cls.final_norm: Norm(), **dict.fromkeys(cls.projectors, Replicated())},
        ).with_rules(single_stage_reason=cls.reason)


class WhisperModel(WhisperParallel, hf.WhisperModel):
    pass


class WhisperForConditionalGeneration(WhisperParallel, hf.WhisperForConditionalGeneration, WindowEncoding):
    head_plan = {"proj_out": VocabParallel()}


class WhisperForCausalLM(WhisperParallel, hf.WhisperForCausalLM):
    head_plan = {"proj_out": VocabParallel()}
    stacks = ("decoder",)


class WhisperForAudioClassification(WhisperParallel, hf.WhisperForAudioClassification):
    head_plan = {"layer_weights": Replicated(), "projector": Replicated(), "classifier": Replicated()}
    stacks = ("encoder",)
