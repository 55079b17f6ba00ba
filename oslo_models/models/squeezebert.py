"""SqueezeBERT: BERT with grouped convolutions in place of linear layers: blocks are whole on every rank."""

from dataclasses import replace
from typing import Any

from transformers.models.squeezebert import modeling_squeezebert as hf

from oslo_models.models.bert import LM_HEAD, BertParallel
from oslo_models.models.family import family
from oslo_models.plan import Entries, Norm, Plan, Replicated

CLASSIFIER: Entries = {"classifier": Replicated()}
HEADS: dict[str, Entries] = {
    "Model": {},
    "ForMaskedLM": LM_HEAD,
    "ForSequenceClassification": CLASSIFIER,
    "ForMultipleChoice": CLASSIFIER,
    "ForTokenClassification": CLASSIFIER,
    "ForQuestionAnswering": {"qa_outputs": Replicated()},
}
LAYERS = ("attention.query", "attention.key", "attention.value")


class SqueezeBertParallel(BertParallel):
    """How every model of the SqueezeBERT family divides: over its vocabulary.

    A group of a convolution reads its own part of what the layer before made, and heads lie across the groups.
    """

    @classmethod
    def plan(cls, config: Any) -> Plan:
        convolutions = (*LAYERS, "post_attention.conv1d", "intermediate.conv1d", "output.conv1d")
        block: Entries = {
            **{name: Replicated() for name in convolutions},
            "post_attention.layernorm": Norm(),
            "output.layernorm": Norm(),
        }
        return replace(super().plan(config), blocks={"encoder.layers": block}, local={})


globals().update(family(SqueezeBertParallel, hf, HEADS))
