"""DeepSeek-V3.2: DeepSeek-V3 with sparse attention; an indexer chooses positions for all heads together."""

from typing import Any

from transformers import DeepseekV32Config
from transformers.models.deepseek_v32 import modeling_deepseek_v32 as hf

from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.deepseek_v2 import DeepseekV2Parallel
from oslo_models.sharding.layout import GroupedHeads
from oslo_models.sharding.plan import Entries, Replicated


class DeepseekV32Parallel(DeepseekV2Parallel):
    """Sharding plan of the DeepSeek-V3.2 family."""

    @classmethod
    def attention(cls, config: Any, heads: GroupedHeads) -> Entries:
        return {**super().attention(config, heads), "self_attn.indexer": Replicated()}


class DeepseekV32Model(DeepseekV32Parallel, hf.DeepseekV32Model):
    pass


class DeepseekV32ForCausalLM(DeepseekV32Parallel, hf.DeepseekV32ForCausalLM):
    head_plan = LM_HEAD
