"""GPT-2: query, key and value in one transposed matrix, and a head tied to the embedding."""

from __future__ import annotations

from transformers import GPT2Config
from transformers.models.gpt2 import modeling_gpt2 as hf
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP, GPT2Attention, GPT2Block

from oslo_models.layers.entries import (
    ColumnParallel,
    LocalAttributes,
    Norm,
    Plan,
    Replicated,
    RowParallel,
    VocabParallel,
)
from oslo_models.modeling.base import ParallelModel
from oslo_models.modeling.blocks import heads_of
from oslo_models.modeling.heads import CLASSIFIER, LM_HEAD, QA_OUTPUTS, SCORE


class GPT2Parallel(ParallelModel):
    """Sharding plan of the GPT-2 family."""

    @classmethod
    def plan(cls, config: GPT2Config) -> Plan:
        heads = heads_of(config)
        local = LocalAttributes({"split_size": heads.local_extent, "num_heads": heads.local_count})
        block = {
            "ln_1": Norm(),
            "attn": local,
            "attn.c_attn": ColumnParallel(heads, heads, heads, transposed=True),  # query, key and value concatenated
            "attn.c_proj": RowParallel(heads, transposed=True),
            "ln_2": Norm(),
            "mlp.c_fc": ColumnParallel(transposed=True),
            "mlp.c_proj": RowParallel(transposed=True),
        }
        if config.add_cross_attention:
            block |= {
                "ln_cross_attn": Norm(),
                "crossattention": local,
                "crossattention.q_attn": ColumnParallel(heads, transposed=True),
                "crossattention.c_attn": ColumnParallel(heads, heads, transposed=True),
                "crossattention.c_proj": RowParallel(heads, transposed=True),
            }
        return Plan(
            embed={"wte": VocabParallel(), "wpe": Replicated()},
            blocks={"h": block},
            head={"ln_f": Norm()},
        ).with_rules(embedding_dropouts=("drop",))


class GPT2Model(GPT2Parallel, hf.GPT2Model):
    pass


class GPT2LMHeadModel(GPT2Parallel, hf.GPT2LMHeadModel):
    head_plan = LM_HEAD


class GPT2DoubleHeadsModel(GPT2Parallel, hf.GPT2DoubleHeadsModel):
    head_plan = {"lm_head": VocabParallel(), "multiple_choice_head.summary": Replicated()}


class GPT2ForSequenceClassification(GPT2Parallel, hf.GPT2ForSequenceClassification):
    head_plan = SCORE


class GPT2ForTokenClassification(GPT2Parallel, hf.GPT2ForTokenClassification):
    head_plan = CLASSIFIER


class GPT2ForQuestionAnswering(GPT2Parallel, hf.GPT2ForQuestionAnswering):
    head_plan = QA_OUTPUTS
