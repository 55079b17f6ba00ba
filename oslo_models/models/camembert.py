"""CamemBERT: RoBERTa for French."""

from transformers import CamembertConfig
from transformers.models.camembert import modeling_camembert as hf

from oslo_models.modeling.heads import CLASSIFIER, DENSE_CLASSIFIER, QA_OUTPUTS
from oslo_models.models.bert import BertParallel
from oslo_models.models.roberta import LM_HEAD


class CamembertModel(BertParallel, hf.CamembertModel):
    pass


class CamembertForCausalLM(BertParallel, hf.CamembertForCausalLM):
    head_plan = LM_HEAD


class CamembertForMaskedLM(BertParallel, hf.CamembertForMaskedLM):
    head_plan = LM_HEAD


class CamembertForSequenceClassification(BertParallel, hf.CamembertForSequenceClassification):
    head_plan = DENSE_CLASSIFIER


class CamembertForMultipleChoice(BertParallel, hf.CamembertForMultipleChoice):
    head_plan = CLASSIFIER


class CamembertForTokenClassification(BertParallel, hf.CamembertForTokenClassification):
    head_plan = CLASSIFIER


class CamembertForQuestionAnswering(BertParallel, hf.CamembertForQuestionAnswering):
    head_plan = QA_OUTPUTS
