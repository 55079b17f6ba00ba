"""Helium: Llama with interleaved rotary positions."""

from transformers import HeliumConfig
from transformers.models.helium import modeling_helium as hf
from transformers.models.helium.modeling_helium import HeliumPreTrainedModel

from oslo_models.modeling.heads import LM_HEAD, SCORE
from oslo_models.models.llama import LlamaParallel


class HeliumParallel(LlamaParallel):
    """Sharding plan of the Helium family."""


class HeliumModel(HeliumParallel, hf.HeliumModel):
    pass


class HeliumForCausalLM(HeliumParallel, hf.HeliumForCausalLM):
    head_plan = LM_HEAD


class HeliumForSequenceClassification(HeliumParallel, hf.HeliumForSequenceClassification):
    head_plan = SCORE


class HeliumForTokenClassification(HeliumParallel, hf.HeliumForTokenClassification):
    head_plan = SCORE
