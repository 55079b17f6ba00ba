"""T5: encoder and decoder with relative position biases, kept per head in the first block of each stack."""

from __future__ import annotations

from typing import Any

from transformers.models.t5 import modeling_t5 as hf

from oslo_models.layout import Units
from oslo_models.models.base import ParallelModel
from oslo_models.models.family import family
from oslo_models.plan import Column, Entries, Norm, Plan, Replicated, Row, Vocab

HEADS: dict[str, Entries] = {
    "Model": {},
    "ForConditionalGeneration": {"lm_head": Vocab()},
    "EncoderModel": {},
    "ForSequenceClassification": {f"classification_head.{name}": Replicated() for name in ("dense", "out_proj")},
    "ForTokenClassification": {"classifier": Replicated()},
    "ForQuestionAnswering": {"qa_outputs": Replicated()},
}
ENCODER = {"stacks": ("encoder",)}


class T5Parallel(ParallelModel):
    """How every model of the T5 family divides."""

    stacks: tuple[str, ...] = ("encoder", "decoder")

    @classmethod
    def plan(cls, config: Any) -> Plan:
        heads = Units(config.num_heads, config.d_kv)
        bias = "layer.0.SelfAttention.relative_attention_bias"

        def attention(path: str) -> dict[str, Column]:
            return {f"{path}.{name}": Column(heads) for name in "qkv"} | {f"{path}.o": Row(heads)}

        def block(layers: int) -> dict[str, Replicated]:
            mlp = f"layer.{layers - 1}.DenseReluDense"
            wi = ("wi_0", "wi_1") if config.is_gated_act else ("wi",)
            entries: dict[str, Replicated] = {f"layer.{layer}.layer_norm": Norm() for layer in range(layers)}
            entries |= attention("layer.0.SelfAttention")
            entries |= {bias: Column(Units(config.num_heads), transposed=True)}  # [buckets, heads]
            return entries | {f"{mlp}.{name}": Column() for name in wi} | {f"{mlp}.wo": Row()}

        blocks = {"encoder": block(2), "decoder": block(3) | attention("layer.1.EncDecAttention")}
        return Plan(
            embed={"shared": Vocab(), **{f"{stack}.embed_tokens": Vocab() for stack in cls.stacks}},
            blocks={f"{stack}.block": blocks[stack] for stack in cls.stacks},
            head={f"{stack}.final_layer_norm": Norm() for stack in cls.stacks},
            local={f"layer.{path}.n_heads": heads.local_count for path in ("0.SelfAttention", "1.EncDecAttention")},
            optional=(bias,),
            dropout=[f"{stack}.dropout" for stack in cls.stacks],  # after the final norm too
            carried=(bias,),
        )


globals().update(family(T5Parallel, hf, HEADS, EncoderModel=ENCODER, ForTokenClassification=ENCODER))
