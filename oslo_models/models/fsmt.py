"""FSMT: BART with sinusoidal positions, two vocabularies and the head inside the decoder."""

from dataclasses import replace
from typing import Any

from transformers import FSMTConfig
from transformers.models.fsmt import modeling_fsmt as hf
from transformers.models.fsmt.modeling_fsmt import PretrainedFSMTModel

from oslo_models.layers.entries import LocalAttributes, Plan, Replicated, VocabParallel
from oslo_models.models.bart import BartParallel
from oslo_models.sharding.layout import EvenSplit

FSMTPreTrainedModel = PretrainedFSMTModel


class FSMTParallel(BartParallel):
    """Sharding plan of the FSMT family."""

    embedding_norms = ()
    embedding_changes = {"dropout": 0.0, "embed_scale": 1.0}

    @classmethod
    def block(cls, heads: EvenSplit, *attentions: str) -> dict[str, Replicated]:
        local = LocalAttributes({"num_heads": heads.local_count}, width=heads)
        return super().block(heads, *attentions) | dict.fromkeys(attentions, local)

    @classmethod
    def plan(cls, config: Any) -> Plan:
        return replace(super().plan(config), head={"decoder.output_projection": VocabParallel()})


class FSMTModel(FSMTParallel, hf.FSMTModel):
    pass


class FSMTForConditionalGeneration(FSMTParallel, hf.FSMTForConditionalGeneration):
    pass
