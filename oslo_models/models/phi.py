"""Phi: parallel attention and MLP after one norm, partial rotary positions."""

from dataclasses import replace
from typing import Any

from transformers import PhiConfig
from transformers.models.phi import modeling_phi as hf

from oslo_models.layers.entries import ColumnParallel, Entries, HeadNorm, Norm, Plan, RowParallel
from oslo_models.modeling.heads import LM_HEAD, SCORE
from oslo_models.models.llama import LlamaParallel
from oslo_models.sharding.layout import GroupedHeads


class PhiParallel(LlamaParallel):
    """Sharding plan of the Phi family."""

    norms = ("input_layernorm",)
    mlp = {"mlp.fc1": ColumnParallel(), "mlp.fc2": RowParallel()}

    @classmethod
    def attention(cls, config: Any, heads: GroupedHeads) -> Entries:
        entries = {name: entry for name, entry in super().attention(config, heads).items() if "o_proj" not in name}
        norms = {f"self_attn.{side}_layernorm": HeadNorm() for side in "qk"} if config.qk_layernorm else {}
        return {**entries, "self_attn.dense": RowParallel(heads.query), **norms}

    @classmethod
    def plan(cls, config: Any) -> Plan:
        return replace(super().plan(config), head={"final_layernorm": Norm()}).with_rules(
            embedding_dropouts=("embed_dropout",)
        )


class PhiModel(PhiParallel, hf.PhiModel):
    pass


class PhiForCausalLM(PhiParallel, hf.PhiForCausalLM):
    head_plan = LM_HEAD


class PhiForSequenceClassification(PhiParallel, hf.PhiForSequenceClassification):
    head_plan = SCORE


class PhiForTokenClassification(PhiParallel, hf.PhiForTokenClassification):
    head_plan = SCORE
