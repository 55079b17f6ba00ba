"""PLBART: BART for source code."""

from transformers import PLBartConfig
from transformers.models.plbart import modeling_plbart as hf

from oslo_models.modeling.heads import CLASSIFICATION_HEAD, LM_HEAD
from oslo_models.models.bart import BartParallel


class PLBartModel(BartParallel, hf.PLBartModel):
    pass


class PLBartForConditionalGeneration(BartParallel, hf.PLBartForConditionalGeneration):
    head_plan = LM_HEAD


class PLBartForCausalLM(BartParallel, hf.PLBartForCausalLM):
    head_plan = LM_HEAD
    stacks = ("decoder",)


class PLBartForSequenceClassification(BartParallel, hf.PLBartForSequenceClassification):
    head_plan = CLASSIFICATION_HEAD
