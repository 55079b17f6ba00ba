"""GLM-5: DeepSeek-V3.2 with blocks that may reuse the positions of an earlier block, in the same stage."""

from dataclasses import replace
from typing import Any

from transformers import GlmMoeDsaConfig
from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa as hf

from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.deepseek_v32 import DeepseekV32Parallel
from oslo_models.sharding.plan import Plan


class GlmMoeDsaParallel(DeepseekV32Parallel):
    """Sharding plan of the GLM-5 family."""

    optional = (*DeepseekV32Parallel.optional, "self_attn.indexer")

    @classmethod
    def plan(cls, config: Any) -> Plan:
        shared = [block for block, kind in enumerate(config.indexer_types) if kind == "shared"]
        return super().plan(config).with_rules(continued_blocks={"layers": shared})


class GlmMoeDsaModel(GlmMoeDsaParallel, hf.GlmMoeDsaModel):
    pass


class GlmMoeDsaForCausalLM(GlmMoeDsaParallel, hf.GlmMoeDsaForCausalLM):
    head_plan = LM_HEAD
