"""FlauBERT: XLM for French."""

from transformers import FlaubertConfig
from transformers.models.flaubert import modeling_flaubert as hf
from transformers.models.flaubert.modeling_flaubert import FlaubertPreTrainedModel

from oslo_models.layers.entries import Norm, Replicated, VocabParallel
from oslo_models.modeling.heads import CLASSIFIER, QA_OUTPUTS, SPAN_PREDICTION
from oslo_models.models.xlm import XLMParallel


class FlaubertParallel(XLMParallel):
    """Sharding plan of the FlauBERT family."""


class FlaubertModel(FlaubertParallel, hf.FlaubertModel):
    pass


class FlaubertWithLMHeadModel(FlaubertParallel, hf.FlaubertWithLMHeadModel):
    head_plan = {"pred_layer.proj": VocabParallel()}


class FlaubertForSequenceClassification(FlaubertParallel, hf.FlaubertForSequenceClassification):
    head_plan = {"sequence_summary.summary": Replicated()}


class FlaubertForMultipleChoice(FlaubertParallel, hf.FlaubertForMultipleChoice):
    head_plan = {"sequence_summary.summary": Replicated(), "logits_proj": Replicated()}


class FlaubertForTokenClassification(FlaubertParallel, hf.FlaubertForTokenClassification):
    head_plan = CLASSIFIER


class FlaubertForQuestionAnsweringSimple(FlaubertParallel, hf.FlaubertForQuestionAnsweringSimple):
    head_plan = QA_OUTPUTS


class FlaubertForQuestionAnswering(FlaubertParallel, hf.FlaubertForQuestionAnswering):
    head_plan = {f"qa_outputs.{name}": entry for name, entry in SPAN_PREDICTION.items()}
