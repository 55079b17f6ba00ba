"""Llama: grouped-query attention, gated MLP, RMS norms, rotary positions."""

from __future__ import annotations

from transformers import LlamaConfig
from transformers.models.llama import modeling_llama as hf
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer, LlamaMLP

from oslo_models.layout import GroupedHeads
from oslo_models.models.base import ParallelModel
from oslo_models.plan import Column, Norm, Plan, Replicated, Row, Vocab


class LlamaParallel(ParallelModel):
    """How every model of the Llama family divides."""

    @classmethod
    def plan(cls, config: LlamaConfig) -> Plan:
        heads = GroupedHeads(config.num_attention_heads, config.num_key_value_heads, config.head_dim)
        block = {
            "input_layernorm": Norm(),
            "self_attn.q_proj": Column(heads.query),
            "self_attn.k_proj": Column(heads.key_value),
            "self_attn.v_proj": Column(heads.key_value),
            "self_attn.o_proj": Row(heads.query),
            "post_attention_layernorm": Norm(),
            "mlp.gate_proj": Column(),
            "mlp.up_proj": Column(),
            "mlp.down_proj": Row(),
        }
        return Plan(
            embed={"embed_tokens": Vocab()},
            blocks={"layers": block},
            head={"norm": Norm()},
            local={"self_attn.num_key_value_groups": heads.local_ratio},
        )


class LlamaModel(LlamaParallel, hf.LlamaModel):
    pass


class LlamaForCausalLM(LlamaParallel, hf.LlamaForCausalLM):
    head = {"lm_head": Vocab()}


class LlamaForSequenceClassification(LlamaParallel, hf.LlamaForSequenceClassification):
    head = {"score": Replicated()}


class LlamaForTokenClassification(LlamaParallel, hf.LlamaForTokenClassification):
    head = {"score": Replicated()}


class LlamaForQuestionAnswering(LlamaParallel, hf.LlamaForQuestionAnswering):
    head = {"qa_outputs": Replicated()}
