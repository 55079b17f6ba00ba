"""OPT: learned positions that count the padding out, embeddings that may be narrower than the blocks."""

from typing import Any

from transformers import OPTConfig
from transformers.models.opt import modeling_opt as hf

from oslo_models.modeling.base import ParallelModel
from oslo_models.modeling.heads import LM_HEAD, QA_OUTPUTS, SCORE
from oslo_models.sharding.layout import EvenSplit
from oslo_models.sharding.plan import ColumnParallel, Norm, Plan, Replicated, RowParallel, VocabParallel


class OPTParallel(ParallelModel):
    """How every model of the OPT family divides."""

    @classmethod
    def plan(cls, config: Any) -> Plan:
        heads = EvenSplit(config.num_attention_heads, config.hidden_size // config.num_attention_heads)
        block = {
            **{f"self_attn.{name}_proj": ColumnParallel(heads) for name in "qkv"},
            "self_attn.out_proj": RowParallel(heads),
            "self_attn_layer_norm": Norm(),
            "fc1": ColumnParallel(),
            "fc2": RowParallel(),
            "final_layer_norm": Norm(),
        }
        embed = {"embed_tokens": VocabParallel(), "embed_positions": Replicated(), "project_in": Replicated()}
        head = {"final_layer_norm": Norm(), "project_out": Replicated()}
        return Plan(
            embed={f"decoder.{name}": entry for name, entry in embed.items()},
            blocks={"decoder.layers": block},
            head={f"decoder.{name}": entry for name, entry in head.items()},
            local={"self_attn.num_heads": heads.local_count},
            optional=("decoder.project_in", "decoder.project_out", "final_layer_norm"),
        )


class OPTModel(OPTParallel, hf.OPTModel):
    pass


class OPTForCausalLM(OPTParallel, hf.OPTForCausalLM):
    head_plan = LM_HEAD


class OPTForSequenceClassification(OPTParallel, hf.OPTForSequenceClassification):
    head_plan = SCORE


class OPTForQuestionAnswering(OPTParallel, hf.OPTForQuestionAnswering):
    head_plan = QA_OUTPUTS
