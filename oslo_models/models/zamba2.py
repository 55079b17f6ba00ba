"""Zamba 2: Zamba with Mamba-2 mixers, and adapters for each use of the weights that blocks share."""

from collections.abc import Sequence
from typing import Any

from transformers import Zamba2Config
from transformers.models.zamba2 import modeling_zamba2 as hf

from oslo_models.layers.entries import ColumnParallel, Entries, Replicated, RowParallel
from oslo_models.modeling.blocks import state_space
from oslo_models.modeling.heads import LM_HEAD, SCORE
from oslo_models.models.llama import LlamaParallel
from oslo_models.models.zamba import ZambaParallel
from oslo_models.sharding.layout import GroupedHeads


class Zamba2Parallel(ZambaParallel):
    """Sharding plan of the Zamba 2 family."""

    shared = "shared_transformer"

    @classmethod
    def mixer(cls, config: Any) -> Entries:
        heads = GroupedHeads(config.n_mamba_heads, config.mamba_ngroups, config.mamba_headdim)
        return state_space("mamba", heads, config.mamba_d_state)

    @classmethod
    def transformer(cls, config: Any, uses: Sequence[int]) -> Entries:
        heads = LlamaParallel.heads(config)
        adapted = {"feed_forward.gate_up_proj": ColumnParallel(parts=2)}
        if config.use_shared_attention_adapter:
            adapted |= {f"self_attn.linear_{name}": ColumnParallel(heads.query) for name in "qkv"}
        return {
            **LlamaParallel.attention(config, heads),
            "feed_forward.gate_up_proj": adapted["feed_forward.gate_up_proj"],
            "feed_forward.down_proj": RowParallel(),
            **{f"{name}_adapter_list.{use}.0": Replicated() for name in adapted for use in uses},
            **{f"{name}_adapter_list.{use}.1": entry for name, entry in adapted.items() for use in uses},
        }


class Zamba2Model(Zamba2Parallel, hf.Zamba2Model):
    pass


class Zamba2ForCausalLM(Zamba2Parallel, hf.Zamba2ForCausalLM):
    head_plan = LM_HEAD


class Zamba2ForSequenceClassification(Zamba2Parallel, hf.Zamba2ForSequenceClassification):
    head_plan = SCORE
