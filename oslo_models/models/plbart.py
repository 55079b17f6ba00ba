"""PLBART: BART for source code."""

from transformers import PLBartConfig
from transformers.models.plbart import modeling_plbart as hf
from transformers.models.plbart.modeling_plbart import PLBartPreTrainedModel

from oslo_models.modeling.heads import CLASSIFICATION_HEAD, LM_HEAD
from oslo_models.models.bart import BartParallel


class PLBartParallel(BartParallel):
    """Sharding plan of the PLBART family."""


class PLBartModel(PLBartParallel, hf.PLBartModel):
    pass


class PLBartForConditionalGeneration(PLBartParallel, hf.PLBartForConditionalGeneration):
    head_plan = LM_HEAD


class PLBartForCausalLM(PLBartParallel, hf.PLBartForCausalLM):
    head_plan = LM_HEAD
    stacks = ("decoder",)


class PLBartForSequenceClassification(PLBartParallel, hf.PLBartForSequenceClassification):
    head_plan = CLASSIFICATION_HEAD
