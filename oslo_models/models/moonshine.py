"""Moonshine: an encoder and a decoder with rotary positions on raw audio. Its convolutions are replicated."""

from typing import Any

from transformers import MoonshineConfig
from transformers.models.moonshine import modeling_moonshine as hf

from oslo_models.layers.entries import (
    ColumnParallel,
    LocalAttributes,
    Norm,
    Plan,
    Replicated,
    RowParallel,
    VocabParallel,
)
from oslo_models.modeling.base import ParallelModel
from oslo_models.modeling.blocks import qkv
from oslo_models.sharding.layout import EvenSplit


class MoonshineParallel(ParallelModel):
    """Sharding plan of the Moonshine family."""

    @classmethod
    def plan(cls, config: Any) -> Plan:
        # transformers builds the decoder with the heads of the encoder, and as many key-value heads
        count = config.encoder_num_attention_heads
        heads = EvenSplit(count, getattr(config, "head_dim", None) or config.hidden_size // count)
        block = {
            "mlp.fc1": ColumnParallel(),
            "mlp.fc2": RowParallel(),
            "input_layernorm": Norm(),
            "post_attention_layernorm": Norm(),
        }
        attentions = {
            name: {
                name: LocalAttributes({"config.num_key_value_heads": heads.local_count}),
                **qkv(name, heads),
                f"{name}.o_proj": RowParallel(heads),
            }
            for name in ("self_attn", "encoder_attn")
        }
        gated = {"mlp.fc1": ColumnParallel(parts=2), "final_layernorm": Norm()}
        convolutions = ("conv1", "conv2", "conv3", "groupnorm")
        return Plan(
            embed={
                **{f"encoder.{name}": Replicated() for name in convolutions},
                "decoder.embed_tokens": VocabParallel(),
            },
            blocks={
                "encoder.layers": {**block, **attentions["self_attn"]},
                "decoder.layers": {**block, **attentions["self_attn"], **attentions["encoder_attn"], **gated},
            },
            head={"encoder.layer_norm": Norm(), "decoder.norm": Norm()},
        ).with_rules(single_stage_reason="the decoder reads a mask that the encoder returns")


class MoonshineModel(MoonshineParallel, hf.MoonshineModel):
    pass


class MoonshineForConditionalGeneration(MoonshineParallel, hf.MoonshineForConditionalGeneration):
    head_plan = {"proj_out": VocabParallel()}
