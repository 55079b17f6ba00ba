"""XLM: an encoder with language embeddings; its blocks are stored in four lists. Without `asm`."""

from typing import Any

from transformers import XLMConfig
from transformers.models.xlm import modeling_xlm as hf

from oslo_models.layers.entries import (
    ColumnParallel,
    LocalAttributes,
    Norm,
    Plan,
    Replicated,
    RowParallel,
    VocabParallel,
)
from oslo_models.modeling.base import ParallelModel
from oslo_models.modeling.blocks import heads_of
from oslo_models.modeling.heads import CLASSIFIER, QA_OUTPUTS, SPAN_PREDICTION


class XLMParallel(ParallelModel):
    """Sharding plan of the XLM families."""

    @classmethod
    def plan(cls, config: Any) -> Plan:
        heads = heads_of(config)
        return Plan(
            embed={
                "embeddings": VocabParallel(),
                "position_embeddings": Replicated(),
                "lang_embeddings": Replicated(),
                "layer_norm_emb": Norm(),
            },
            blocks={
                "attentions": {
                    "": LocalAttributes({"n_heads": heads.local_count}),
                    **{f"{name}_lin": ColumnParallel(heads) for name in "qkv"},
                    "out_lin": RowParallel(heads),
                },
                "layer_norm1": {"": Norm()},
                "ffns": {"lin1": ColumnParallel(), "lin2": RowParallel()},
                "layer_norm2": {"": Norm()},
            },
            head={},
            optional=("lang_embeddings",),
        ).with_rules(
            single_stage_reason="its embeddings and blocks share a dropout rate, which could not be disabled for one"
        )


class XLMModel(XLMParallel, hf.XLMModel):
    pass


class XLMWithLMHeadModel(XLMParallel, hf.XLMWithLMHeadModel):
    head_plan = {"pred_layer.proj": VocabParallel()}


class XLMForSequenceClassification(XLMParallel, hf.XLMForSequenceClassification):
    head_plan = {"sequence_summary.summary": Replicated()}


class XLMForMultipleChoice(XLMParallel, hf.XLMForMultipleChoice):
    head_plan = {"sequence_summary.summary": Replicated(), "logits_proj": Replicated()}


class XLMForTokenClassification(XLMParallel, hf.XLMForTokenClassification):
    head_plan = CLASSIFIER


class XLMForQuestionAnsweringSimple(XLMParallel, hf.XLMForQuestionAnsweringSimple):
    head_plan = QA_OUTPUTS


class XLMForQuestionAnswering(XLMParallel, hf.XLMForQuestionAnswering):
    head_plan = {f"qa_outputs.{name}": entry for name, entry in SPAN_PREDICTION.items()}
