"""GLM-4: Llama with pre- and post-layer norms, and gate and up projection in one matrix."""

from transformers import Glm4Config
from transformers.models.glm4 import modeling_glm4 as hf

from oslo_models.modeling.blocks import gated_mlp
from oslo_models.modeling.heads import LM_HEAD, SCORE
from oslo_models.models.llama import LlamaParallel


class Glm4Parallel(LlamaParallel):
    """Sharding plan of the GLM-4 family."""

    norms = ("input_layernorm", "post_attention_layernorm", "post_self_attn_layernorm", "post_mlp_layernorm")
    mlp = gated_mlp("mlp", fused=True)


class Glm4Model(Glm4Parallel, hf.Glm4Model):
    pass


class Glm4ForCausalLM(Glm4Parallel, hf.Glm4ForCausalLM):
    head_plan = LM_HEAD


class Glm4ForSequenceClassification(Glm4Parallel, hf.Glm4ForSequenceClassification):
    head_plan = SCORE


class Glm4ForTokenClassification(Glm4Parallel, hf.Glm4ForTokenClassification):
    head_plan = SCORE
