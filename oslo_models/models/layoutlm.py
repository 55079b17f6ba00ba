"""LayoutLM: BERT with embeddings of the position of each token on the page."""

from transformers import LayoutLMConfig
from transformers.models.layoutlm import modeling_layoutlm as hf

from oslo_models.modeling.heads import CLASSIFIER, QA_OUTPUTS
from oslo_models.models.bert import LM_HEAD, BertParallel


class LayoutLMParallel(BertParallel):
    """Sharding plan of the LayoutLM family."""

    added_embeddings = ("position", "x_position", "y_position", "h_position", "w_position", "token_type")


class LayoutLMModel(LayoutLMParallel, hf.LayoutLMModel):
    pass


class LayoutLMForMaskedLM(LayoutLMParallel, hf.LayoutLMForMaskedLM):
    head_plan = LM_HEAD


class LayoutLMForSequenceClassification(LayoutLMParallel, hf.LayoutLMForSequenceClassification):
    head_plan = CLASSIFIER


class LayoutLMForTokenClassification(LayoutLMParallel, hf.LayoutLMForTokenClassification):
    head_plan = CLASSIFIER


class LayoutLMForQuestionAnswering(LayoutLMParallel, hf.LayoutLMForQuestionAnswering):
    head_plan = QA_OUTPUTS
