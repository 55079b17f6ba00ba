"""XLNet: permutation language modelling with attention to relative positions."""

from typing import Any

from transformers import XLNetConfig
from transformers.models.xlnet import modeling_xlnet as hf
from transformers.models.xlnet.modeling_xlnet import XLNetPreTrainedModel

from oslo_models.modeling.base import ParallelModel
from oslo_models.modeling.heads import CLASSIFIER, QA_OUTPUTS, SPAN_PREDICTION
from oslo_models.sharding.layout import EvenSplit
from oslo_models.sharding.plan import (
    ColumnParallel,
    EinsumHeads,
    Entries,
    Norm,
    Plan,
    Replicated,
    RowParallel,
    VocabParallel,
)

SUMMARY: Entries = {"sequence_summary.summary": Replicated(), "logits_proj": Replicated()}


class XLNetParallel(ParallelModel):
    """Sharding plan of the XLNet family."""

    @classmethod
    def plan(cls, config: Any) -> Plan:
        block = {
            "rel_attn": EinsumHeads(EvenSplit(config.n_head)),
            "rel_attn.layer_norm": Norm(),
            "ff.layer_1": ColumnParallel(),
            "ff.layer_2": RowParallel(),
            "ff.layer_norm": Norm(),
        }
        return Plan(
            embed={"word_embedding": VocabParallel(), "mask_emb": Replicated()},
            blocks={"layer": block},
            head={},
            single_stage_reason="one dropout is applied to the embeddings, the positions and the last hidden state",
        )


class XLNetModel(XLNetParallel, hf.XLNetModel):
    pass


class XLNetLMHeadModel(XLNetParallel, hf.XLNetLMHeadModel):
    head_plan = {"lm_loss": VocabParallel()}


class XLNetForSequenceClassification(XLNetParallel, hf.XLNetForSequenceClassification):
    head_plan = SUMMARY


class XLNetForMultipleChoice(XLNetParallel, hf.XLNetForMultipleChoice):
    head_plan = SUMMARY


class XLNetForTokenClassification(XLNetParallel, hf.XLNetForTokenClassification):
    head_plan = CLASSIFIER


class XLNetForQuestionAnsweringSimple(XLNetParallel, hf.XLNetForQuestionAnsweringSimple):
    head_plan = QA_OUTPUTS


class XLNetForQuestionAnswering(XLNetParallel, hf.XLNetForQuestionAnswering):
    head_plan = SPAN_PREDICTION
