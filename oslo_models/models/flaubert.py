"""FlauBERT: XLM for French."""

from transformers import FlaubertConfig
from transformers.models.flaubert import modeling_flaubert as hf

from oslo_models.layers.entries import Replicated, VocabParallel
from oslo_models.modeling.heads import CLASSIFIER, QA_OUTPUTS, SPAN_PREDICTION
from oslo_models.models.xlm import XLMParallel


class FlaubertModel(XLMParallel, hf.FlaubertModel):
    pass


class FlaubertWithLMHeadModel(XLMParallel, hf.FlaubertWithLMHeadModel):
    head_plan = {"pred_layer.proj": VocabParallel()}


class FlaubertForSequenceClassification(XLMParallel, hf.FlaubertForSequenceClassification):
    head_plan = {"sequence_summary.summary": Replicated()}


class FlaubertForMultipleChoice(XLMParallel, hf.FlaubertForMultipleChoice):
    head_plan = {"sequence_summary.summary": Replicated(), "logits_proj": Replicated()}


class FlaubertForTokenClassification(XLMParallel, hf.FlaubertForTokenClassification):
    head_plan = CLASSIFIER


class FlaubertForQuestionAnsweringSimple(XLMParallel, hf.FlaubertForQuestionAnsweringSimple):
    head_plan = QA_OUTPUTS


class FlaubertForQuestionAnswering(XLMParallel, hf.FlaubertForQuestionAnswering):
    head_plan = {f"qa_outputs.{name}": entry for name, entry in SPAN_PREDICTION.items()}
