"""RoBERTa: BERT with positions that skip padding."""

from transformers import RobertaConfig
from transformers.models.roberta import modeling_roberta as hf

from oslo_models.layers.entries import Entries, Norm, Replicated, VocabParallel
from oslo_models.modeling.heads import CLASSIFIER, DENSE_CLASSIFIER, QA_OUTPUTS
from oslo_models.models.bert import BertParallel

LM_HEAD: Entries = {
    "lm_head.dense": Replicated(),
    "lm_head.layer_norm": Norm(),
    "lm_head.decoder": VocabParallel(),
    "lm_head.bias": VocabParallel(),
}


class RobertaModel(BertParallel, hf.RobertaModel):
    pass


class RobertaForCausalLM(BertParallel, hf.RobertaForCausalLM):
    head_plan = LM_HEAD


class RobertaForMaskedLM(BertParallel, hf.RobertaForMaskedLM):
    head_plan = LM_HEAD


class RobertaForSequenceClassification(BertParallel, hf.RobertaForSequenceClassification):
    head_plan = DENSE_CLASSIFIER


class RobertaForMultipleChoice(BertParallel, hf.RobertaForMultipleChoice):
    head_plan = CLASSIFIER


class RobertaForTokenClassification(BertParallel, hf.RobertaForTokenClassification):
    head_plan = CLASSIFIER


class RobertaForQuestionAnswering(BertParallel, hf.RobertaForQuestionAnswering):
    head_plan = QA_OUTPUTS
