"""XLM-RoBERTa: RoBERTa for a hundred languages."""

from transformers import XLMRobertaConfig
from transformers.models.xlm_roberta import modeling_xlm_roberta as hf
from transformers.models.xlm_roberta.modeling_xlm_roberta import XLMRobertaPreTrainedModel

from oslo_models.modeling.heads import CLASSIFIER, DENSE_CLASSIFIER, QA_OUTPUTS
from oslo_models.models.roberta import LM_HEAD, RobertaParallel


class XLMRobertaParallel(RobertaParallel):
    """Sharding plan of the XLM-RoBERTa family."""


class XLMRobertaModel(XLMRobertaParallel, hf.XLMRobertaModel):
    pass


class XLMRobertaForCausalLM(XLMRobertaParallel, hf.XLMRobertaForCausalLM):
    head_plan = LM_HEAD


class XLMRobertaForMaskedLM(XLMRobertaParallel, hf.XLMRobertaForMaskedLM):
    head_plan = LM_HEAD


class XLMRobertaForSequenceClassification(XLMRobertaParallel, hf.XLMRobertaForSequenceClassification):
    head_plan = DENSE_CLASSIFIER


class XLMRobertaForMultipleChoice(XLMRobertaParallel, hf.XLMRobertaForMultipleChoice):
    head_plan = CLASSIFIER


class XLMRobertaForTokenClassification(XLMRobertaParallel, hf.XLMRobertaForTokenClassification):
    head_plan = CLASSIFIER


class XLMRobertaForQuestionAnswering(XLMRobertaParallel, hf.XLMRobertaForQuestionAnswering):
    head_plan = QA_OUTPUTS
