"""GLM: Llama with gate and up projection in one matrix."""

from transformers import GlmConfig
from transformers.models.glm import modeling_glm as hf

from oslo_models.modeling.blocks import gated_mlp
from oslo_models.modeling.heads import LM_HEAD, SCORE
from oslo_models.models.llama import LlamaParallel


class GlmParallel(LlamaParallel):
    """Sharding plan of the GLM family."""

    mlp = gated_mlp("mlp", fused=True)


class GlmModel(GlmParallel, hf.GlmModel):
    pass


class GlmForCausalLM(GlmParallel, hf.GlmForCausalLM):
    head_plan = LM_HEAD


class GlmForSequenceClassification(GlmParallel, hf.GlmForSequenceClassification):
    head_plan = SCORE


class GlmForTokenClassification(GlmParallel, hf.GlmForTokenClassification):
    head_plan = SCORE
