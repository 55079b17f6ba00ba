"""T5: encoder and decoder with relative position biases, kept per head in the first block of each stack."""

from __future__ import annotations

from transformers import T5Config
from transformers.models.t5 import modeling_t5 as hf

from oslo_models.layout import Units
from oslo_models.models.base import ParallelModel
from oslo_models.plan import Column, Norm, Plan, Replicated, Row, Vocab


class T5Parallel(ParallelModel):
    """How every model of the T5 family divides."""

    stacks: tuple[str, ...] = ("encoder", "decoder")

    @classmethod
    def plan(cls, config: T5Config) -> Plan:
        heads = Units(config.num_heads, config.d_kv)
        bias = "layer.0.SelfAttention.relative_attention_bias"

        def attention(path: str) -> dict[str, Replicated]:
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


class T5Model(T5Parallel, hf.T5Model):
    pass


class T5ForConditionalGeneration(T5Parallel, hf.T5ForConditionalGeneration):
    head = {"lm_head": Vocab()}


class T5EncoderModel(T5Parallel, hf.T5EncoderModel):
    stacks = ("encoder",)


class T5ForSequenceClassification(T5Parallel, hf.T5ForSequenceClassification):
    head = {"classification_head.dense": Replicated(), "classification_head.out_proj": Replicated()}


class T5ForTokenClassification(T5Parallel, hf.T5ForTokenClassification):
    stacks = ("encoder",)
    head = {"classifier": Replicated()}


class T5ForQuestionAnswering(T5Parallel, hf.T5ForQuestionAnswering):
    head = {"qa_outputs": Replicated()}
