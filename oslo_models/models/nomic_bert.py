"""Nomic BERT: BERT with rotary positions and gated MLPs."""

from typing import Any, ClassVar

from transformers import NomicBertConfig
from transformers.models.nomic_bert import modeling_nomic_bert as hf

from oslo_models.layers.entries import Entries, Norm, Plan, Replicated, RowParallel, VocabParallel
from oslo_models.modeling.base import ParallelModel
from oslo_models.modeling.blocks import gated_mlp, qkv
from oslo_models.modeling.heads import CLASSIFIER
from oslo_models.sharding.layout import EvenSplit


class NomicBertParallel(ParallelModel):
    """Sharding plan of the Nomic BERT family, and base class for families with other MLPs.

    Attributes:
        mlp: the MLP of a block.
    """

    mlp: ClassVar[Entries] = gated_mlp("mlp")

    @classmethod
    def plan(cls, config: Any) -> Plan:
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        heads = EvenSplit(config.num_attention_heads, width)
        norms = {name: Norm() for name in ("post_attention_layernorm", "post_mlp_layernorm")}
        types = {"embeddings.token_type_embeddings": Replicated()}
        return Plan(
            embed={"embeddings.word_embeddings": VocabParallel(), **types, "embeddings.LayerNorm": Norm()},
            blocks={"layers": {**qkv("self_attn", heads), "self_attn.o_proj": RowParallel(heads), **cls.mlp, **norms}},
            head={"pooler.dense": Replicated()},
            optional=("pooler.dense", *types),
        ).with_rules(embedding_dropouts=("embeddings.dropout",))


class NomicBertModel(NomicBertParallel, hf.NomicBertModel):
    pass


class NomicBertForMaskedLM(NomicBertParallel, hf.NomicBertForMaskedLM):
    head_plan = {
        "cls.predictions.transform.dense": Replicated(),
        "cls.predictions.transform.layer_norm": Norm(),
        "cls.predictions.decoder": VocabParallel(),
        "cls.predictions.bias": VocabParallel(),
    }


class NomicBertForSequenceClassification(NomicBertParallel, hf.NomicBertForSequenceClassification):
    head_plan = CLASSIFIER


class NomicBertForTokenClassification(NomicBertParallel, hf.NomicBertForTokenClassification):
    head_plan = CLASSIFIER
