"""OLMo: Llama with norms without weights."""

from transformers import OlmoConfig
from transformers.models.olmo import modeling_olmo as hf
from transformers.models.olmo.modeling_olmo import OlmoPreTrainedModel

from oslo_models.modeling.heads import LM_HEAD, SCORE
from oslo_models.models.llama import LlamaParallel


class OlmoParallel(LlamaParallel):
    """Sharding plan of the OLMo family."""


class OlmoModel(OlmoParallel, hf.OlmoModel):
    pass


class OlmoForCausalLM(OlmoParallel, hf.OlmoForCausalLM):
    head_plan = LM_HEAD


class OlmoForSequenceClassification(OlmoParallel, hf.OlmoForSequenceClassification):
    head_plan = SCORE
