"""Persimmon: GPT-NeoX with sequential blocks and norms of query and key heads."""

from typing import Any

from transformers import PersimmonConfig
from transformers.models.persimmon import modeling_persimmon as hf

from oslo_models.layers.entries import ColumnParallel, HeadNorm, LocalAttributes, Norm, Plan, RowParallel, VocabParallel
from oslo_models.modeling.base import ParallelModel
from oslo_models.modeling.blocks import heads_of
from oslo_models.modeling.heads import LM_HEAD, SCORE
from oslo_models.sharding.layout import EvenSplit


class PersimmonParallel(ParallelModel):
    """Sharding plan of the Persimmon family."""

    @classmethod
    def plan(cls, config: Any) -> Plan:
        heads = heads_of(config)
        norms = {f"self_attn.{side}_layernorm": HeadNorm() for side in "qk"} if config.qk_layernorm else {}
        block = {
            "input_layernorm": Norm(),
            "self_attn": LocalAttributes({"num_heads": heads.local_count}),
            "self_attn.query_key_value": ColumnParallel(EvenSplit(heads.count, 3 * heads.width)),
            **norms,
            "self_attn.dense": RowParallel(heads),
            "post_attention_layernorm": Norm(),
            "mlp.dense_h_to_4h": ColumnParallel(),
            "mlp.dense_4h_to_h": RowParallel(),
        }
        return Plan(
            embed={"embed_tokens": VocabParallel()},
            blocks={"layers": block},
            head={"final_layernorm": Norm()},
        )


class PersimmonModel(PersimmonParallel, hf.PersimmonModel):
    pass


class PersimmonForCausalLM(PersimmonParallel, hf.PersimmonForCausalLM):
    head_plan = LM_HEAD


class PersimmonForSequenceClassification(PersimmonParallel, hf.PersimmonForSequenceClassification):
    head_plan = SCORE


class PersimmonForTokenClassification(PersimmonParallel, hf.PersimmonForTokenClassification):
    head_plan = SCORE
