"""MobileBERT: BERT with narrow blocks between bottlenecks. Its vocabulary, of which the head adds a part, is whole."""

from dataclasses import replace
from typing import Any

from transformers.models.mobilebert import modeling_mobilebert as hf

from oslo_models.layout import Units
from oslo_models.models.bert import BertParallel
from oslo_models.models.family import family
from oslo_models.models.megatron_bert import HEADS as BERT
from oslo_models.plan import Column, Entries, Norm, Plan, Replicated, Row, Words

LM_HEAD: Entries = {
    "cls.predictions.transform.dense": Replicated(),
    "cls.predictions.transform.LayerNorm": Norm(),
    "cls.predictions.dense": Replicated(),
    "cls.predictions.decoder": Replicated(),
    "cls.predictions.bias": Replicated(),
}
HEADS = {**BERT, "ForPreTraining": {**LM_HEAD, "cls.seq_relationship": Replicated()}, "ForMaskedLM": LM_HEAD}
BOTTLENECKS = ("bottleneck.input", "bottleneck.attention", "output.bottleneck")


class MobileBertParallel(BertParallel):
    """How every model of the MobileBERT family divides."""

    @classmethod
    def plan(cls, config: Any) -> Plan:
        plan = super().plan(config)
        heads = Units(config.num_attention_heads, config.true_hidden_size // config.num_attention_heads)
        block: dict[str, Replicated] = {
            **{f"attention.self.{name}": Column(heads) for name in ("query", "key", "value")},
            "attention.output.dense": Row(heads),
            "attention.output.LayerNorm": Norm(),
        }
        for mlp in ("", *(f"ffn.{i}." for i in range(config.num_feedforward_networks - 1))):
            block |= {
                f"{mlp}intermediate.dense": Column(),
                f"{mlp}output.dense": Row(),
                f"{mlp}output.LayerNorm": Norm(),
            }
        for name in BOTTLENECKS:
            block |= {f"{name}.dense": Replicated(), f"{name}.LayerNorm": Norm()}
        words = {"embeddings.word_embeddings": Words(), "embeddings.embedding_transformation": Replicated()}
        return replace(
            plan,
            embed={**plan.embed, **words},
            blocks={"encoder.layer": block},
            local={},
            neutral={"embeddings.trigram_input": False},
            optional=("pooler.dense", *(f"{name}.{layer}" for name in BOTTLENECKS for layer in ("dense", "LayerNorm"))),
        )


globals().update(family(MobileBertParallel, hf, HEADS))
