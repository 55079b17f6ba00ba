"""OPT: learned positions that skip padding, optionally factorised embeddings."""

from typing import Any

from transformers import OPTConfig
from transformers.models.opt import modeling_opt as hf

from oslo_models.layers.entries import LocalAttributes, Norm, Plan, Replicated, VocabParallel
from oslo_models.modeling.base import ParallelModel
from oslo_models.modeling.blocks import bart_block, heads_of
from oslo_models.modeling.heads import LM_HEAD, QA_OUTPUTS, SCORE


class OPTParallel(ParallelModel):
    """Sharding plan of the OPT family."""

    @classmethod
    def plan(cls, config: Any) -> Plan:
        heads = heads_of(config)
        block = {"self_attn": LocalAttributes({"num_heads": heads.local_count}), **bart_block(heads, "self_attn")}
        embed = {"embed_tokens": VocabParallel(), "embed_positions": Replicated(), "project_in": Replicated()}
        head = {"final_layer_norm": Norm(), "project_out": Replicated()}
        return Plan(
            embed={f"decoder.{name}": entry for name, entry in embed.items()},
            blocks={"decoder.layers": block},
            head={f"decoder.{name}": entry for name, entry in head.items()},
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
