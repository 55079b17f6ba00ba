"""nanochat: Llama with norms without weights, also of query and key heads, and an MLP without a gate."""

from dataclasses import replace
from typing import Any

from transformers import NanoChatConfig
from transformers.models.nanochat import modeling_nanochat as hf

from oslo_models.layers.entries import ColumnParallel, Plan, RowParallel
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.llama import LlamaParallel


class NanoChatParallel(LlamaParallel):
    """Sharding plan of the nanochat family."""

    head_norms = ("self_attn.q_norm", "self_attn.k_norm")
    mlp = {"mlp.fc1": ColumnParallel(), "mlp.fc2": RowParallel()}

    @classmethod
    def plan(cls, config: Any) -> Plan:
        reason = "one norm is applied both before the first block and after the last one"
        return super().plan(config).with_rules(single_stage_reason=reason)


class NanoChatModel(NanoChatParallel, hf.NanoChatModel):
    pass


class NanoChatForCausalLM(NanoChatParallel, hf.NanoChatForCausalLM):
    head_plan = LM_HEAD
