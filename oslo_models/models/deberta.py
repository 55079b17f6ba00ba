"""DeBERTa: BERT with disentangled attention. Without `talking_head` and the head of `legacy=False`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from transformers import DebertaConfig
from transformers.models.deberta import modeling_deberta as hf

from oslo_models.layers.entries import ColumnParallel, LocalAttributes, Plan, Replicated
from oslo_models.layers.kinds import ShardingContext, shards
from oslo_models.modeling.blocks import heads_of
from oslo_models.modeling.heads import CLASSIFIER, QA_OUTPUTS
from oslo_models.models.bert import LM_HEAD, BertParallel
from oslo_models.sharding.layout import EvenSplit


@dataclass(frozen=True)
class ReplicatedDropout(Replicated):
    """Dropout with a replicated input between sharded layers. All ranks must draw the same mask."""


@shards(ReplicatedDropout)
def draw_outside(module: nn.Module, entry: ReplicatedDropout, context: ShardingContext) -> None:
    """Make a dropout between sharded layers draw from the replicated random stream."""
    stream = context.stream
    if stream is None:
        return
    module.register_forward_pre_hook(lambda *_: stream.leave())
    module.register_forward_hook(lambda module, *_: stream.enter() if module.training else None)


class DebertaParallel(BertParallel):
    """Sharding plan of the DeBERTa families."""

    casts_float32 = True

    @classmethod
    def projections(cls, heads: EvenSplit) -> Mapping[str, ColumnParallel]:
        """Return the plan entries of the sharded projections of an attention layer."""
        fused = ColumnParallel(
            EvenSplit(heads.count, 3 * heads.width)
        )  # query, key and value of each head are adjacent
        return {
            "in_proj": fused,
            **dict.fromkeys(("q_bias", "v_bias", "pos_proj", "pos_q_proj"), ColumnParallel(heads)),
        }

    @classmethod
    def plan(cls, config: Any) -> Plan:
        plan = super().plan(config)
        heads = heads_of(config)
        (block,) = plan.blocks.values()
        rest = {name: entry for name, entry in block.items() if not name.startswith("attention.self.")}
        own: dict[str, Replicated] = {f"attention.self.{name}": entry for name, entry in cls.projections(heads).items()}
        local = {
            "attention.self": LocalAttributes({"num_attention_heads": heads.local_count}),
            "attention.self.pos_dropout": ReplicatedDropout(),
        }
        tables = ("position_embeddings", "token_type_embeddings", "embed_proj", "rel_embeddings")
        return replace(
            plan,
            embed={**plan.embed, "embeddings.embed_proj": Replicated()},
            blocks={"encoder.layer": {**own, **rest, **local}},
            head={},
            optional=(*tables, *(name for name in (*own, *local) if ".pos_" in name)),
        ).with_rules(
            on_every_stage={"encoder.rel_embeddings": Replicated()},
            disabled_after_first_stage={"embeddings.mask": None},
        )


class DebertaModel(DebertaParallel, hf.DebertaModel):
    pass


class DebertaForMaskedLM(DebertaParallel, hf.DebertaForMaskedLM):
    head_plan = LM_HEAD


class DebertaForSequenceClassification(DebertaParallel, hf.DebertaForSequenceClassification):
    head_plan = {"pooler.dense": Replicated(), "classifier": Replicated()}


class DebertaForTokenClassification(DebertaParallel, hf.DebertaForTokenClassification):
    head_plan = CLASSIFIER


class DebertaForQuestionAnswering(DebertaParallel, hf.DebertaForQuestionAnswering):
    head_plan = QA_OUTPUTS
