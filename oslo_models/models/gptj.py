"""GPT-J: rotary positions, parallel attention and MLP after one norm, and an untied head with a bias."""

from __future__ import annotations

from transformers import GPTJConfig
from transformers.models.gptj import modeling_gptj as hf
from transformers.models.gptj.modeling_gptj import GPTJMLP, GPTJAttention, GPTJBlock

from oslo_models.layers.entries import ColumnParallel, LocalAttributes, Norm, Plan, RowParallel, VocabParallel
from oslo_models.modeling.base import ParallelModel
from oslo_models.modeling.blocks import heads_of, qkv
from oslo_models.modeling.heads import LM_HEAD, QA_OUTPUTS, SCORE


class GPTJParallel(ParallelModel):
    """Sharding plan of the GPT-J family."""

    @classmethod
    def plan(cls, config: GPTJConfig) -> Plan:
        heads = heads_of(config)
        block = {
            "ln_1": Norm(),
            "attn": LocalAttributes({"num_attention_heads": heads.local_count}),
            **qkv("attn", heads),
            "attn.out_proj": RowParallel(heads),
            "mlp.fc_in": ColumnParallel(),
            "mlp.fc_out": RowParallel(),
        }
        return Plan(
            embed={"wte": VocabParallel()},
            blocks={"h": block},
            head={"ln_f": Norm()},
        ).with_rules(embedding_dropouts=("drop",))


class GPTJModel(GPTJParallel, hf.GPTJModel):
    pass


class GPTJForCausalLM(GPTJParallel, hf.GPTJForCausalLM):
    head_plan = LM_HEAD


class GPTJForSequenceClassification(GPTJParallel, hf.GPTJForSequenceClassification):
    head_plan = SCORE


class GPTJForQuestionAnswering(GPTJParallel, hf.GPTJForQuestionAnswering):
    head_plan = QA_OUTPUTS
