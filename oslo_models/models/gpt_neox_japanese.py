"""GPT-NeoX Japanese: GPT-NeoX with sequential blocks. Only the attention of the last block has a bias."""

from dataclasses import replace
from typing import Any

from transformers import GPTNeoXJapaneseConfig
from transformers.models.gpt_neox_japanese import modeling_gpt_neox_japanese as hf

from oslo_models.layers.entries import LocalAttributes, Plan, Replicated, VocabParallel
from oslo_models.modeling.blocks import heads_of
from oslo_models.models.gpt_neox import GPTNeoXParallel


class GPTNeoXJapaneseParallel(GPTNeoXParallel):
    """Sharding plan of the GPT-NeoX Japanese family."""

    @classmethod
    def plan(cls, config: Any) -> Plan:
        plan = super().plan(config)
        attention = {
            "attention": LocalAttributes({"num_attention_heads": heads_of(config).local_count}),
            "attention.dense_bias": Replicated(),
        }
        blocks = {"layers": {**plan.blocks["layers"], **attention}}
        return replace(plan, blocks=blocks, optional=("attention.dense_bias",)).with_rules(embedding_dropouts=())


class GPTNeoXJapaneseModel(GPTNeoXJapaneseParallel, hf.GPTNeoXJapaneseModel):
    pass


class GPTNeoXJapaneseForCausalLM(GPTNeoXJapaneseParallel, hf.GPTNeoXJapaneseForCausalLM):
    head_plan = {"embed_out": VocabParallel()}
