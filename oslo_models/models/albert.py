"""ALBERT: BERT whose blocks share their weights, with embeddings that are narrower than the blocks."""

from dataclasses import replace
from typing import Any

from transformers.models.albert import modeling_albert as hf

from oslo_models.layout import Units
from oslo_models.models.bert import BertParallel
from oslo_models.models.family import family
from oslo_models.plan import Column, Entries, Norm, Plan, Replicated, Row, Vocab

LM_HEAD: Entries = {
    "predictions.dense": Replicated(),
    "predictions.LayerNorm": Norm(),
    "predictions.decoder": Vocab(),
    "predictions.bias": Vocab(),
}
CLASSIFIER: Entries = {"classifier": Replicated()}
HEADS: dict[str, Entries] = {
    "Model": {},
    "ForPreTraining": {**LM_HEAD, "sop_classifier.classifier": Replicated()},
    "ForMaskedLM": LM_HEAD,
    "ForSequenceClassification": CLASSIFIER,
    "ForMultipleChoice": CLASSIFIER,
    "ForTokenClassification": CLASSIFIER,
    "ForQuestionAnswering": {"qa_outputs": Replicated()},
}


class AlbertParallel(BertParallel):
    """How every model of the ALBERT family divides."""

    @classmethod
    def plan(cls, config: Any) -> Plan:
        plan = super().plan(config)
        heads = Units(config.num_attention_heads, config.hidden_size // config.num_attention_heads)
        layer = {
            **{f"attention.{name}": Column(heads) for name in ("query", "key", "value")},
            "attention.dense": Row(heads),
            "attention.LayerNorm": Norm(),
            "ffn": Column(),
            "ffn_output": Row(),
            "full_layer_layer_norm": Norm(),
        }
        block = {f"albert_layers.{i}.{name}": layer[name] for i in range(config.inner_group_num) for name in layer}
        return replace(
            plan,
            embed={**plan.embed, "encoder.embedding_hidden_mapping_in": Replicated()},
            blocks={"encoder.albert_layer_groups": block},
            head={"pooler": Replicated()},
            local={},
            optional=("pooler",),
            one_stage="its blocks share their weights, of which every stage would hold all",
        )


globals().update(family(AlbertParallel, hf, HEADS))
