"""XLM-RoBERTa: RoBERTa for a hundred languages."""

from transformers import XLMRobertaConfig
from transformers.models.xlm_roberta import modeling_xlm_roberta as hf

from oslo_models.modeling.heads import CLASSIFIER, DENSE_CLASSIFIER, QA_OUTPUTS
from oslo_models.models.bert import BertParallel
from oslo_models.models.roberta import LM_HEAD


class XLMRobertaModel(BertParallel, hf.XLMRobertaModel):
    pass


class XLMRobertaForCausalLM(BertParallel, hf.XLMRobertaForCausalLM):
    head_plan = LM_HEAD


class XLMRobertaForMaskedLM(BertParallel, hf.XLMRobertaForMaskedLM):
    head_plan = LM_HEAD


class XLMRobertaForSequenceClassification(BertParallel, hf.XLMRobertaForSequenceClassification):
    head_plan = DENSE_CLASSIFIER


class XLMRobertaForMultipleChoice(BertParallel, hf.XLMRobertaForMultipleChoice):
    head_plan = CLASSIFIER


class XLMRobertaForTokenClassification(BertParallel, hf.XLMRobertaForTokenClassification):
    head_plan = CLASSIFIER


class XLMRobertaForQuestionAnswering(BertParallel, hf.XLMRobertaForQuestionAnswering):
    head_plan = QA_OUTPUTS
