"""Youtu-LLM: Llama with multi-head latent attention."""

from transformers import YoutuConfig
from transformers.models.youtu import modeling_youtu as hf

from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.deepseek_v2 import DeepseekV2Parallel
from oslo_models.models.llama import LlamaParallel


class YoutuParallel(DeepseekV2Parallel):
    """Sharding plan of the Youtu family."""

    mlp = {**LlamaParallel.mlp}


class YoutuModel(YoutuParallel, hf.YoutuModel):
    pass


class YoutuForCausalLM(YoutuParallel, hf.YoutuForCausalLM):
    head_plan = LM_HEAD
