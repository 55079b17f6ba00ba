"""CamemBERT: RoBERTa for French."""

from transformers import CamembertConfig
from transformers.models.camembert import modeling_camembert as hf
from transformers.models.camembert.modeling_camembert import CamembertPreTrainedModel

from oslo_models.modeling.heads import CLASSIFIER, DENSE_CLASSIFIER, QA_OUTPUTS
from oslo_models.models.roberta import LM_HEAD, RobertaParallel


class CamembertParallel(RobertaParallel):
    """Sharding plan of the CamemBERT family."""


class CamembertModel(CamembertParallel, hf.CamembertModel):
    pass


class CamembertForCausalLM(CamembertParallel, hf.CamembertForCausalLM):
    head_plan = LM_HEAD


class CamembertForMaskedLM(CamembertParallel, hf.CamembertForMaskedLM):
    head_plan = LM_HEAD


class CamembertForSequenceClassification(CamembertParallel, hf.CamembertForSequenceClassification):
    head_plan = DENSE_CLASSIFIER


class CamembertForMultipleChoice(CamembertParallel, hf.CamembertForMultipleChoice):
    head_plan = CLASSIFIER


class CamembertForTokenClassification(CamembertParallel, hf.CamembertForTokenClassification):
    head_plan = CLASSIFIER


class CamembertForQuestionAnswering(CamembertParallel, hf.CamembertForQuestionAnswering):
    head_plan = QA_OUTPUTS
