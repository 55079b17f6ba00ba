"""RoBERTa: BERT with positions that skip padding."""

from transformers import RobertaConfig
from transformers.models.roberta import modeling_roberta as hf
from transformers.models.roberta.modeling_roberta import RobertaPreTrainedModel

from oslo_models.layers.entries import Entries, Norm, Replicated, VocabParallel
from oslo_models.modeling.heads import CLASSIFIER, DENSE_CLASSIFIER, QA_OUTPUTS
from oslo_models.models.bert import BertParallel

LM_HEAD: Entries = {
    "lm_head.dense": Replicated(),
    "lm_head.layer_norm": Norm(),
    "lm_head.decoder": VocabParallel(),
    "lm_head.bias": VocabParallel(),
}


class RobertaParallel(BertParallel):
    """Sharding plan of the RoBERTa family."""


class RobertaModel(RobertaParallel, hf.RobertaModel):
    pass


class RobertaForCausalLM(RobertaParallel, hf.RobertaForCausalLM):
    head_plan = LM_HEAD


class RobertaForMaskedLM(RobertaParallel, hf.RobertaForMaskedLM):
    head_plan = LM_HEAD


class RobertaForSequenceClassification(RobertaParallel, hf.RobertaForSequenceClassification):
    head_plan = DENSE_CLASSIFIER


class RobertaForMultipleChoice(RobertaParallel, hf.RobertaForMultipleChoice):
    head_plan = CLASSIFIER


class RobertaForTokenClassification(RobertaParallel, hf.RobertaForTokenClassification):
    head_plan = CLASSIFIER


class RobertaForQuestionAnswering(RobertaParallel, hf.RobertaForQuestionAnswering):
    head_plan = QA_OUTPUTS
