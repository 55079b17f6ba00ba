"""Ministral 3: Mistral with queries that are scaled by their positions."""

from transformers import Ministral3Config
from transformers.models.ministral3 import modeling_ministral3 as hf
from transformers.models.ministral3.modeling_ministral3 import Ministral3PreTrainedModel

from oslo_models.modeling.heads import LM_HEAD, QA_OUTPUTS, SCORE
from oslo_models.models.llama import LlamaParallel


class Ministral3Parallel(LlamaParallel):
    """Sharding plan of the Ministral 3 family."""


class Ministral3Model(Ministral3Parallel, hf.Ministral3Model):
    pass


class Ministral3ForCausalLM(Ministral3Parallel, hf.Ministral3ForCausalLM):
    head_plan = LM_HEAD


class Ministral3ForSequenceClassification(Ministral3Parallel, hf.Ministral3ForSequenceClassification):
    head_plan = SCORE


class Ministral3ForTokenClassification(Ministral3Parallel, hf.Ministral3ForTokenClassification):
    head_plan = SCORE


class Ministral3ForQuestionAnswering(Ministral3Parallel, hf.Ministral3ForQuestionAnswering):
    head_plan = QA_OUTPUTS
