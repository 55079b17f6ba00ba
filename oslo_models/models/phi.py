"""Phi: attention and MLP side by side after one norm, rotary positions of a part of each head."""

from dataclasses import replace
from typing import Any

from transformers.models.phi import modeling_phi as hf

from oslo_models.layout import GroupedHeads
from oslo_models.models.family import DECODER, family
from oslo_models.models.llama import LlamaParallel
from oslo_models.plan import Column, Entries, HeadNorm, Norm, Plan, Row


class PhiParallel(LlamaParallel):
    """How every model of the Phi family divides."""

    norms = ("input_layernorm",)
    mlp = {"mlp.fc1": Column(), "mlp.fc2": Row()}

    @classmethod
    def attention(cls, config: Any, heads: GroupedHeads) -> Entries:
        entries = {name: entry for name, entry in super().attention(config, heads).items() if "o_proj" not in name}
        norms = {f"self_attn.{side}_layernorm": HeadNorm() for side in "qk"} if config.qk_layernorm else {}
        return {**entries, "self_attn.dense": Row(heads.query), **norms}

    @classmethod
    def plan(cls, config: Any) -> Plan:
        return replace(super().plan(config), head={"final_layernorm": Norm()}, dropout=("embed_dropout",))


globals().update(family(PhiParallel, hf, DECODER))
