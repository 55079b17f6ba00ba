"""CodeGen: GPT-J with query, value and key in one matrix of four parts, as it was trained on four chips."""

from typing import Any

from transformers import CodeGenConfig
from transformers.models.codegen import modeling_codegen as hf

from oslo_models.layers.entries import ColumnParallel, LocalAttributes, Norm, Plan, RowParallel, VocabParallel
from oslo_models.modeling.base import ParallelModel
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.sharding.layout import EvenSplit


class CodeGenParallel(ParallelModel):
    """Sharding plan of the CodeGen family."""

    @classmethod
    def attention_groups(cls, config: Any) -> int:
        return 4

    @classmethod
    def plan(cls, config: Any) -> Plan:
        width = config.n_embd // config.n_head
        heads = EvenSplit(config.n_head // 4, width)  # of each of the four parts
        counted = {
            "num_attention_heads": lambda n, rank: 4 * heads.local_count(n, rank),
            "embed_dim": lambda n, rank: 4 * heads.local_count(n, rank) * width,  # read since transformers 5.24
        }
        block = {
            "ln_1": Norm(),
            "attn": LocalAttributes(counted),
            "attn.qkv_proj": ColumnParallel(*[heads] * 12),
            "attn.out_proj": RowParallel(*[heads] * 4),
            "mlp.fc_in": ColumnParallel(),
            "mlp.fc_out": RowParallel(),
        }
        return Plan(
            embed={"wte": VocabParallel()},
            blocks={"h": block},
            head={"ln_f": Norm()},
        ).with_rules(embedding_dropouts=("drop",))


class CodeGenModel(CodeGenParallel, hf.CodeGenModel):
    pass


class CodeGenForCausalLM(CodeGenParallel, hf.CodeGenForCausalLM):
    head_plan = LM_HEAD
