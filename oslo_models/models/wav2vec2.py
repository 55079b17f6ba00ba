"""Wav2Vec2: an audio encoder. Its convolutions (features, positions) are replicated on every rank."""

from typing import Any, ClassVar

from transformers import Wav2Vec2Config
from transformers import initialization as init
from transformers.models.wav2vec2 import modeling_wav2vec2 as hf

from oslo_models.layers.entries import ColumnParallel, Entries, Norm, Plan, Replicated, RowParallel
from oslo_models.modeling.base import ParallelModel
from oslo_models.modeling.blocks import heads_of, qkv
from oslo_models.sharding.layout import EvenSplit
from oslo_models.sharding.pipeline_rules import InputPositions

WEIGHTED_SUM = "with use_weighted_layer_sum=True, its head needs the outputs of all blocks"
FEATURES = "feature_projection.layer_norm"
FRAMES: Entries = {"layer_weights": Replicated(), "classifier": Replicated()}
CLASSIFIER: Entries = {**FRAMES, "projector": Replicated()}
SPEAKERS: Entries = {
    **CLASSIFIER,
    "tdnn": Replicated(),
    "feature_extractor": Replicated(),
    "objective": Replicated(),
}


def audio_positions(config: Any) -> InputPositions:
    """Return the function that gives rows and positions after the convolutions over ``input_values``.

    A model around the encoder calls them ``inputs``.
    """

    def positions(batch: Any) -> tuple[int, int]:
        values = batch["inputs"] if batch.get("input_values") is None else batch["input_values"]
        rows, length = values.shape[0], values.shape[-1]
        for kernel, stride in zip(config.conv_kernel, config.conv_stride, strict=True):
            length = (length - kernel) // stride + 1
        return rows, length

    return positions


def encoder_block(heads: EvenSplit) -> Entries:
    """Return the plan of a block with attention, an MLP and two norms."""
    return {
        **qkv("attention", heads),
        "attention.out_proj": RowParallel(heads),
        "layer_norm": Norm(),
        "feed_forward.intermediate_dense": ColumnParallel(),
        "feed_forward.output_dense": RowParallel(),
        "final_layer_norm": Norm(),
    }


class Wav2Vec2Parallel(ParallelModel):
    """Sharding plan of the Wav2Vec2 family.

    Attributes:
        returns_features: whether the model also returns or uses the features before its blocks.
    """

    returns_features: ClassVar[bool] = False

    def _initialize_constructed(self) -> None:
        if hasattr(self, "layer_weights"):
            init.constant_(self.layer_weights, 1 / len(self.layer_weights))

    @classmethod
    def plan(cls, config: Any) -> Plan:
        block = {**encoder_block(heads_of(config)), "adapter_layer": Replicated()}
        is_stable = getattr(config, "do_stable_layer_norm", False)
        norm = {"encoder.layer_norm": Norm()}
        return Plan(
            embed={
                "feature_extractor": Replicated(),
                FEATURES: Norm(),
                "feature_projection.projection": Replicated(),
                "masked_spec_embed": Replicated(),
                "encoder.pos_conv_embed": Replicated(),
                **({} if is_stable else norm),
            },
            blocks={"encoder.layers": block},
            head={**(norm if is_stable else {}), "adapter": Replicated()},
            optional=("adapter_layer", "adapter", "masked_spec_embed", "layer_weights", FEATURES),
        ).with_rules(
            embedding_dropouts=("encoder.dropout",),
            input_positions={"encoder.layers": audio_positions(config)},
            early_outputs={FEATURES: config.conv_dim[-1]} if cls.returns_features else {},
            single_stage_reason=WEIGHTED_SUM
            if "layer_weights" in cls.head_plan and config.use_weighted_layer_sum
            else "",
        )


class Wav2Vec2Model(Wav2Vec2Parallel, hf.Wav2Vec2Model):
    returns_features = True


class Wav2Vec2ForPreTraining(Wav2Vec2Parallel, hf.Wav2Vec2ForPreTraining):
    head_plan = {"quantizer": Replicated(), "project_hid": Replicated(), "project_q": Replicated()}
    loss_inputs = ("sampled_negative_indices",)
    loss_is_mean = False
    returns_features = True


class Wav2Vec2ForCTC(Wav2Vec2Parallel, hf.Wav2Vec2ForCTC):
    head_plan = {"lm_head": Replicated()}


class Wav2Vec2ForSequenceClassification(Wav2Vec2Parallel, hf.Wav2Vec2ForSequenceClassification):
    head_plan = CLASSIFIER


class Wav2Vec2ForAudioFrameClassification(Wav2Vec2Parallel, hf.Wav2Vec2ForAudioFrameClassification):
    head_plan = FRAMES
    loss_is_mean = False


class Wav2Vec2ForXVector(Wav2Vec2Parallel, hf.Wav2Vec2ForXVector):
    head_plan = SPEAKERS
