"""DeBERTa-v2 and v3: DeBERTa with buckets of positions and a convolution. Not with the head of `legacy=False`."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from transformers.models.deberta_v2 import modeling_deberta_v2 as hf

from oslo_models.layout import Units
from oslo_models.models.deberta import HEADS, DebertaParallel
from oslo_models.models.family import family
from oslo_models.plan import Column, Norm, Plan, Replicated


class DebertaV2Parallel(DebertaParallel):
    """How every model of the DeBERTa-v2 family divides."""

    @classmethod
    def projections(cls, heads: Units) -> Mapping[str, Column]:
        names = ("query_proj", "key_proj", "value_proj", "pos_key_proj", "pos_query_proj")
        return dict.fromkeys(names, Column(heads))

    @classmethod
    def plan(cls, config: Any) -> Plan:
        plan = super().plan(config)
        convolution = {"encoder.conv.conv": Replicated(), "encoder.conv.LayerNorm": Norm()}  # after the first block
        return replace(
            plan,
            embed={**plan.embed, **convolution},
            beside={**plan.beside, "encoder.LayerNorm": Norm()},
            neutral={**plan.neutral, "encoder.conv": None},
            optional=(*plan.optional, *convolution, "encoder.LayerNorm"),
        )


globals().update(family(DebertaV2Parallel, hf, HEADS))
