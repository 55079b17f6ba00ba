"""GPT-2: fused, transposed query-key-value projections, and a head tied to the embedding."""

from __future__ import annotations

from transformers import GPT2Config
from transformers.models.gpt2 import modeling_gpt2 as hf
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP, GPT2Attention, GPT2Block

from oslo_models.layout import Units
from oslo_models.models.base import ParallelModel
from oslo_models.plan import Column, Norm, Plan, Replicated, Row, Vocab


class GPT2Parallel(ParallelModel):
    """How every model of the GPT-2 family divides."""

    @classmethod
    def plan(cls, config: GPT2Config) -> Plan:
        heads = Units(config.n_head, config.n_embd // config.n_head)
        block = {
            "ln_1": Norm(),
            "attn.c_attn": Column(heads, heads, heads, transposed=True),  # query, key and value side by side
            "attn.c_proj": Row(heads, transposed=True),
            "ln_2": Norm(),
            "mlp.c_fc": Column(transposed=True),
            "mlp.c_proj": Row(transposed=True),
        }
        local = {"attn.split_size": heads.local_extent, "attn.num_heads": heads.local_count}
        if config.add_cross_attention:
            block |= {
                "ln_cross_attn": Norm(),
                "crossattention.q_attn": Column(heads, transposed=True),
                "crossattention.c_attn": Column(heads, heads, transposed=True),
                "crossattention.c_proj": Row(heads, transposed=True),
            }
            local |= {"crossattention.split_size": heads.local_extent, "crossattention.num_heads": heads.local_count}
        return Plan(
            embed={"wte": Vocab(), "wpe": Replicated()},
            blocks={"h": block},
            head={"ln_f": Norm()},
            local=local,
            dropout=("drop",),
        )


class GPT2Model(GPT2Parallel, hf.GPT2Model):
    pass


class GPT2LMHeadModel(GPT2Parallel, hf.GPT2LMHeadModel):
    head = {"lm_head": Vocab()}


class GPT2DoubleHeadsModel(GPT2Parallel, hf.GPT2DoubleHeadsModel):
    head = {"lm_head": Vocab(), "multiple_choice_head.summary": Replicated()}


class GPT2ForSequenceClassification(GPT2Parallel, hf.GPT2ForSequenceClassification):
    head = {"score": Replicated()}


class GPT2ForTokenClassification(GPT2Parallel, hf.GPT2ForTokenClassification):
    head = {"classifier": Replicated()}


class GPT2ForQuestionAnswering(GPT2Parallel, hf.GPT2ForQuestionAnswering):
    head = {"qa_outputs": Replicated()}
