"""A.X-K1: DeepSeek-V3 with a norm of the summed outputs of shared and routed experts."""

from transformers import AXK1Config
from transformers.models.axk1 import modeling_axk1 as hf

from oslo_models.modeling.blocks import gated_mlp, mixture_of_experts
from oslo_models.modeling.heads import LM_HEAD, SCORE
from oslo_models.models.deepseek_v2 import DeepseekV2Parallel
from oslo_models.models.llama import LlamaParallel
from oslo_models.sharding.plan import Norm


class AXK1Parallel(DeepseekV2Parallel):
    """Sharding plan of the A.X-K1 family."""

    mlp = {
        **LlamaParallel.mlp,
        **mixture_of_experts(),
        **gated_mlp("mlp.shared_experts"),  # summed by itself, before the norm
        "mlp.post_mlp_layernorm": Norm(),
    }
    optional = (*mlp, "self_attn.q_proj")


class AXK1Model(AXK1Parallel, hf.AXK1Model):
    pass


class AXK1ForCausalLM(AXK1Parallel, hf.AXK1ForCausalLM):
    head_plan = LM_HEAD


class AXK1ForSequenceClassification(AXK1Parallel, hf.AXK1ForSequenceClassification):
    head_plan = SCORE


class AXK1ForTokenClassification(AXK1Parallel, hf.AXK1ForTokenClassification):
    head_plan = SCORE
