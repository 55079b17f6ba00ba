"""RoFormer: BERT with rotary positions, and embeddings that may be narrower than the blocks."""

from dataclasses import replace
from typing import Any

from transformers.models.roformer import modeling_roformer as hf

from oslo_models.models.bert import LM_HEAD
from oslo_models.models.electra import HEADS as ELECTRA
from oslo_models.models.electra import ElectraParallel
from oslo_models.models.family import family
from oslo_models.plan import Plan, Replicated


class RoFormerParallel(ElectraParallel):
    """How every model of the RoFormer family divides."""

    tables = ("token_type",)

    @classmethod
    def plan(cls, config: Any) -> Plan:
        return replace(super().plan(config), beside={"encoder.embed_positions": Replicated()})


globals().update(family(RoFormerParallel, hf, {**ELECTRA, "ForCausalLM": LM_HEAD, "ForMaskedLM": LM_HEAD}))
