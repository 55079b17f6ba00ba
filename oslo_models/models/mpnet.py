"""MPNet: BERT with a bias of each head for the distance of two tokens, which all blocks share."""

from dataclasses import replace
from typing import Any

from transformers.models.mpnet import modeling_mpnet as hf

from oslo_models.layout import Units
from oslo_models.models.bert import BertParallel
from oslo_models.models.family import family
from oslo_models.models.roberta import HEADS
from oslo_models.plan import Column, Norm, Plan, Row


class MPNetParallel(BertParallel):
    """How every model of the MPNet family divides."""

    tables = ("position",)

    @classmethod
    def plan(cls, config: Any) -> Plan:
        plan, count = super().plan(config), config.num_attention_heads
        heads = Units(count, config.hidden_size // count)
        (block,) = plan.blocks.values()
        mlp = {name: entry for name, entry in block.items() if not name.startswith("attention.")}
        attention = {**{f"attention.attn.{name}": Column(heads) for name in "qkv"}, "attention.attn.o": Row(heads)}
        return replace(
            plan,
            blocks={"encoder.layer": {**attention, "attention.LayerNorm": Norm(), **mlp}},
            beside={"encoder.relative_attention_bias": Column(Units(count), transposed=True)},
            local={"attention.attn.all_head_size": heads.local_extent},
        )


globals().update(family(MPNetParallel, hf, HEADS))
