"""DistilBERT: BERT with half of the blocks and other names."""

from typing import Any

from transformers.models.distilbert import modeling_distilbert as hf

from oslo_models.layout import Units
from oslo_models.models.base import ParallelModel
from oslo_models.models.family import family
from oslo_models.plan import Column, Entries, Norm, Plan, Replicated, Row, Vocab

CLASSIFIER: Entries = {"pre_classifier": Replicated(), "classifier": Replicated()}
HEADS: dict[str, Entries] = {
    "Model": {},
    "ForMaskedLM": {"vocab_transform": Replicated(), "vocab_layer_norm": Norm(), "vocab_projector": Vocab()},
    "ForSequenceClassification": CLASSIFIER,
    "ForMultipleChoice": CLASSIFIER,
    "ForTokenClassification": {"classifier": Replicated()},
    "ForQuestionAnswering": {"qa_outputs": Replicated()},
}


class DistilBertParallel(ParallelModel):
    """How every model of the DistilBERT family divides."""

    @classmethod
    def plan(cls, config: Any) -> Plan:
        heads = Units(config.n_heads, config.dim // config.n_heads)
        block = {
            **{f"attention.{name}_lin": Column(heads) for name in "qkv"},
            "attention.out_lin": Row(heads),
            "sa_layer_norm": Norm(),
            "ffn.lin1": Column(),
            "ffn.lin2": Row(),
            "output_layer_norm": Norm(),
        }
        tables = {"embeddings.word_embeddings": Vocab(), "embeddings.position_embeddings": Replicated()}
        return Plan(
            embed={**tables, "embeddings.LayerNorm": Norm()},
            blocks={"transformer.layer": block},
            head={},
            dropout=("embeddings.dropout",),
        )


globals().update(family(DistilBertParallel, hf, HEADS))
