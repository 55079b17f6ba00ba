"""T5: encoder-decoder with relative position biases, held by the first block of each stack."""

from __future__ import annotations

from typing import Any

from transformers import T5Config
from transformers.models.t5 import modeling_t5 as hf

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
from oslo_models.modeling.blocks import qkv
from oslo_models.modeling.heads import CLASSIFICATION_HEAD, CLASSIFIER, LM_HEAD, QA_OUTPUTS
from oslo_models.sharding.layout import EvenSplit


class T5Parallel(ParallelModel):
    """Sharding plan of the T5 family."""

    stacks: tuple[str, ...] = ("encoder", "decoder")
    optional: tuple[str, ...] = ()

    @classmethod
    def mlp(cls, config: Any, layer: str) -> Entries:
        """Return the plan entries of the MLP in the last layer of a block. ``layer`` is the name of this layer."""
        wi = ("wi_0", "wi_1") if config.is_gated_act else ("wi",)
        mlp = f"{layer}.DenseReluDense"
        return {**{f"{mlp}.{name}": ColumnParallel() for name in wi}, f"{mlp}.wo": RowParallel()}

    @classmethod
    def plan(cls, config: Any) -> Plan:
        heads = EvenSplit(config.num_heads, config.d_kv)
        bias = "layer.0.SelfAttention.relative_attention_bias"

        def attention(path: str) -> dict[str, Replicated]:
            local = LocalAttributes({"n_heads": heads.local_count})
            return {path: local, **qkv(path, heads, "qkv"), f"{path}.o": RowParallel(heads)}

        def block(layers: int) -> dict[str, Replicated]:
            entries: dict[str, Replicated] = {f"layer.{layer}.layer_norm": Norm() for layer in range(layers)}
            entries |= attention("layer.0.SelfAttention")
            entries |= {bias: ColumnParallel(EvenSplit(config.num_heads), transposed=True)}  # [buckets, heads]
            return entries | dict(cls.mlp(config, f"layer.{layers - 1}"))

        blocks = {"encoder": block(2), "decoder": block(3) | attention("layer.1.EncDecAttention")}
        return Plan(
            embed={"shared": VocabParallel(), **{f"{stack}.embed_tokens": VocabParallel() for stack in cls.stacks}},
            blocks={f"{stack}.block": blocks[stack] for stack in cls.stacks},
            head={f"{stack}.final_layer_norm": Norm() for stack in cls.stacks},
            optional=(bias, *cls.optional),
        ).with_rules(
            embedding_dropouts=[f"{stack}.dropout" for stack in cls.stacks],  # also applied after the final norm
            copied_from_first_block=(bias,),
        )


class T5Model(T5Parallel, hf.T5Model):
    pass


class T5ForConditionalGeneration(T5Parallel, hf.T5ForConditionalGeneration):
    head_plan = LM_HEAD


class T5EncoderModel(T5Parallel, hf.T5EncoderModel):
    stacks = ("encoder",)


class T5ForSequenceClassification(T5Parallel, hf.T5ForSequenceClassification):
    head_plan = CLASSIFICATION_HEAD


class T5ForTokenClassification(T5Parallel, hf.T5ForTokenClassification):
    head_plan = CLASSIFIER
    stacks = ("encoder",)


class T5ForQuestionAnswering(T5Parallel, hf.T5ForQuestionAnswering):
    head_plan = QA_OUTPUTS
