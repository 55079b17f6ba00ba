"""UMT5: mT5 with relative position biases in every block."""

from dataclasses import replace
from typing import Any

from transformers.models.umt5 import modeling_umt5 as hf

from oslo_models.models.family import family
from oslo_models.models.t5 import ENCODER, HEADS, T5Parallel
from oslo_models.plan import Plan


class UMT5Parallel(T5Parallel):
    """How every model of the UMT5 family divides."""

    @classmethod
    def plan(cls, config: Any) -> Plan:
        return replace(super().plan(config), carried=())


globals().update(family(UMT5Parallel, hf, HEADS, EncoderModel=ENCODER, ForTokenClassification=ENCODER))
