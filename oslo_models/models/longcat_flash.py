"""LongCat-Flash: blocks of two latent attentions and two MLPs, with experts; some experts return their input."""

from typing import Any

from transformers import LongcatFlashConfig
from transformers.models.longcat_flash import modeling_longcat_flash as hf

from oslo_models.layers.entries import Experts, Norm, Plan, Replicated, VocabParallel
from oslo_models.modeling.base import ParallelModel
from oslo_models.modeling.blocks import gated_mlp
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.deepseek_v2 import DeepseekV2Parallel
from oslo_models.models.llama import LlamaParallel


class LongcatFlashParallel(ParallelModel):
    """Sharding plan of the LongCat-Flash family."""

    @classmethod
    def plan(cls, config: Any) -> Plan:
        attention = DeepseekV2Parallel.attention(config, LlamaParallel.heads(config))
        block: dict[str, Replicated] = {
            "mlp.router": Replicated(),
            "mlp.experts": Experts(identities=config.zero_expert_num or 0),
        }
        for half in ("0", "1"):
            block |= {
                name.replace("self_attn", f"self_attn.{half}", 1): entry
                for name, entry in attention.items()
                if name != "self_attn.q_proj"  # queries are of low rank
            }
            block |= dict(gated_mlp(f"mlps.{half}"))
            block |= {f"{norm}.{half}": Norm() for norm in ("input_layernorm", "post_attention_layernorm")}
        return Plan(
            embed={"embed_tokens": VocabParallel()},
            blocks={"layers": block},
            head={"norm": Norm()},
        ).with_rules(cache_layers_per_block=2)  # one per attention layer


class LongcatFlashModel(LongcatFlashParallel, hf.LongcatFlashModel):
    pass


class LongcatFlashForCausalLM(LongcatFlashParallel, hf.LongcatFlashForCausalLM):
    head_plan = LM_HEAD
