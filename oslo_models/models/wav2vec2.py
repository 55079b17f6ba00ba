"""Wav2Vec2: an encoder of sounds. Its convolutions, before the blocks and of positions, are whole on every rank."""

from typing import Any, ClassVar

from transformers import initialization as init
from transformers.models.wav2vec2 import modeling_wav2vec2 as hf

from oslo_models.layout import Units
from oslo_models.models.base import ParallelModel
from oslo_models.models.family import family
from oslo_models.plan import Column, Entries, Norm, Plan, Replicated, Row

SUM: Entries = {"layer_weights": Replicated()}
SUMMED = "with use_weighted_layer_sum=True, its head sums up what all blocks made"
FEATURES = "feature_projection.layer_norm"
HEADS: dict[str, Entries] = {
    "Model": {},
    "ForPreTraining": {name: Replicated() for name in ("quantizer", "project_hid", "project_q")},
    "ForCTC": {"lm_head": Replicated()},
    "ForSequenceClassification": {**SUM, "projector": Replicated(), "classifier": Replicated()},
    "ForAudioFrameClassification": {**SUM, "classifier": Replicated()},
    "ForXVector": {
        **SUM,
        **{name: Replicated() for name in ("projector", "tdnn", "feature_extractor", "classifier", "objective")},
    },
}
LOSSES: dict[str, dict[str, Any]] = {
    "Model": {"returns_features": True},
    "ForPreTraining": {
        "loss_inputs": ("sampled_negative_indices",),
        "has_loss_of_rows": False,
        "returns_features": True,
    },
    "ForAudioFrameClassification": {"has_loss_of_rows": False},
}


class Wav2Vec2Parallel(ParallelModel):
    """How every model of the Wav2Vec2 family divides.

    Attributes:
        returns_features: whether the model returns or needs, beside what its blocks make, the features before them.
    """

    returns_features: ClassVar[bool] = False

    def initialize_constructed(self) -> None:
        if hasattr(self, "layer_weights"):
            init.constant_(self.layer_weights, 1 / len(self.layer_weights))

    @classmethod
    def plan(cls, config: Any) -> Plan:
        heads = Units(config.num_attention_heads, config.hidden_size // config.num_attention_heads)
        block = {
            **{f"attention.{name}_proj": Column(heads) for name in "qkv"},
            "attention.out_proj": Row(heads),
            "layer_norm": Norm(),
            "feed_forward.intermediate_dense": Column(),
            "feed_forward.output_dense": Row(),
            "final_layer_norm": Norm(),
            "adapter_layer": Replicated(),
        }

        def positions(batch: Any) -> tuple[int, int]:
            rows, length = batch["input_values"].shape
            for kernel, stride in zip(config.conv_kernel, config.conv_stride, strict=True):
                length = (length - kernel) // stride + 1
            return rows, length

        norm = {"encoder.layer_norm": Norm()}
        return Plan(
            embed={
                "feature_extractor": Replicated(),
                FEATURES: Norm(),
                "feature_projection.projection": Replicated(),
                "masked_spec_embed": Replicated(),
                "encoder.pos_conv_embed": Replicated(),
                **({} if config.do_stable_layer_norm else norm),
            },
            blocks={"encoder.layers": block},
            head={**(norm if config.do_stable_layer_norm else {}), "adapter": Replicated()},
            optional=("adapter_layer", "adapter", "masked_spec_embed", "layer_weights", FEATURES),
            dropout=("encoder.dropout",),
            positions={"encoder.layers": positions},
            returned={FEATURES: config.conv_dim[-1]} if cls.returns_features else {},
            one_stage=SUMMED if "layer_weights" in cls.head and config.use_weighted_layer_sum else "",
        )


globals().update(family(Wav2Vec2Parallel, hf, HEADS, **LOSSES))
