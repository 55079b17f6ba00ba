"""Pix2Struct: an encoder of patches with their rows and columns, and T5's decoder."""

from typing import Any

from transformers import Pix2StructConfig, Pix2StructVisionConfig
from transformers.models.pix2struct import modeling_pix2struct as hf

from oslo_models.layers.entries import (
    ColumnParallel,
    Entries,
    LocalAttributes,
    Norm,
    Plan,
    Replicated,
    RowParallel,
    VocabParallel,
)
from oslo_models.modeling.base import ParallelModel
from oslo_models.modeling.blocks import QUERY_KEY_VALUE, qkv
from oslo_models.sharding.layout import EvenSplit


def _attention(path: str, heads: EvenSplit) -> Entries:
    local = LocalAttributes({"n_heads": heads.local_count})
    return {path: local, **qkv(path, heads, QUERY_KEY_VALUE), f"{path}.output": RowParallel(heads)}


def _mlp(path: str) -> Entries:
    return {**{f"{path}.{name}": ColumnParallel() for name in ("wi_0", "wi_1")}, f"{path}.wo": RowParallel()}


class Pix2StructVisionParallel(ParallelModel):
    """Sharding plan of the encoder."""

    @staticmethod
    def heads(config: Any) -> EvenSplit:
        """Return the attention heads."""
        return EvenSplit(config.num_attention_heads, config.d_kv)

    @classmethod
    def plan(cls, config: Any) -> Plan:
        heads = cls.heads(config)
        norms = {f"pre_{name}_layer_norm": Norm() for name in ("attention", "mlp")}
        block = {**_attention("attention", heads), **_mlp("mlp"), **norms}
        return Plan(
            embed={"embeddings": Replicated()}, blocks={"encoder.layer": block}, head={"layernorm": Norm()}
        ).with_rules(input_positions={"encoder.layer": lambda batch: tuple(batch["flattened_patches"].shape[:2])})


class Pix2StructVisionModel(Pix2StructVisionParallel, hf.Pix2StructVisionModel):
    pass


class Pix2StructTextParallel(ParallelModel):
    """Sharding plan of the decoder."""

    @classmethod
    def plan(cls, config: Any) -> Plan:
        heads = EvenSplit(config.num_heads, config.d_kv)
        own, crossed = "self_attention", "encoder_decoder_attention"
        bias = f"{own}.attention.relative_attention_bias"
        block = {
            **{f"{layer}.layer_norm": Norm() for layer in (own, crossed, "mlp")},
            **_attention(f"{own}.attention", heads),
            bias: ColumnParallel(EvenSplit(config.num_heads), transposed=True),  # [buckets, heads]
            **_attention(f"{crossed}.attention", heads),
            **_mlp("mlp.DenseReluDense"),
        }
        return Plan(
            embed={"embed_tokens": VocabParallel()},
            blocks={"layer": block},
            head={"final_layer_norm": Norm(), "lm_head": VocabParallel()},
            optional=(bias,),
        ).with_rules(single_stage_reason="its decoder has the head inside")


class Pix2StructForConditionalGeneration(ParallelModel, hf.Pix2StructForConditionalGeneration):
    @classmethod
    def plan(cls, config: Any) -> Plan:
        encoder = Pix2StructVisionModel.plan(config.vision_config).under("encoder.")
        return encoder | Pix2StructTextParallel.plan(config.text_config).under("decoder.")
