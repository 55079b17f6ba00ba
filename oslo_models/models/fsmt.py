"""FSMT: BART with positions of sines, two vocabularies, and its head inside the decoder."""

from dataclasses import replace
from typing import Any

from transformers import FSMTConfig
from transformers.models.fsmt import modeling_fsmt as hf

from oslo_models.models.bart import BartParallel
from oslo_models.sharding.plan import Plan, VocabParallel


class FSMTParallel(BartParallel):
    """How every model of the FSMT family divides."""

    before = ()
    neutral = {"dropout": 0.0, "embed_scale": 1.0}

    @classmethod
    def plan(cls, config: Any) -> Plan:
        plan = super().plan(config)
        widths = {
            f"{stack}.layers.{attention}": cls.heads(config, stack)
            for stack in cls.stacks
            for attention in ("self_attn", "encoder_attn")
        }
        local = {f"{path}.num_heads": heads.local_count for path, heads in widths.items()}
        return replace(plan, head={"decoder.output_projection": VocabParallel()}, local=local, widths=widths)


class FSMTModel(FSMTParallel, hf.FSMTModel):
    pass


class FSMTForConditionalGeneration(FSMTParallel, hf.FSMTForConditionalGeneration):
    pass
