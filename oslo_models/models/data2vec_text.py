"""Data2Vec for text: RoBERTa."""

from transformers import Data2VecTextConfig
from transformers.models.data2vec import modeling_data2vec_text as hf

from oslo_models.modeling.heads import CLASSIFIER, DENSE_CLASSIFIER, QA_OUTPUTS
from oslo_models.models.bert import BertParallel
from oslo_models.models.roberta import LM_HEAD


class Data2VecTextParallel(BertParallel):
    """Sharding plan of the family of Data2Vec for text."""

    zeros = ("lm_head.bias",)


class Data2VecTextModel(Data2VecTextParallel, hf.Data2VecTextModel):
    pass


class Data2VecTextForCausalLM(Data2VecTextParallel, hf.Data2VecTextForCausalLM):
    head_plan = LM_HEAD


class Data2VecTextForMaskedLM(Data2VecTextParallel, hf.Data2VecTextForMaskedLM):
    head_plan = LM_HEAD


class Data2VecTextForSequenceClassification(Data2VecTextParallel, hf.Data2VecTextForSequenceClassification):
    head_plan = DENSE_CLASSIFIER


class Data2VecTextForMultipleChoice(Data2VecTextParallel, hf.Data2VecTextForMultipleChoice):
    head_plan = CLASSIFIER


class Data2VecTextForTokenClassification(Data2VecTextParallel, hf.Data2VecTextForTokenClassification):
    head_plan = CLASSIFIER


class Data2VecTextForQuestionAnswering(Data2VecTextParallel, hf.Data2VecTextForQuestionAnswering):
    head_plan = QA_OUTPUTS
