"""DeBERTa: BERT with attention to relative positions. Not with `talking_head`, nor the head of `legacy=False`."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from transformers import DebertaConfig
from transformers.models.deberta import modeling_deberta as hf

from oslo_models.modeling.heads import CLASSIFIER, QA_OUTPUTS
from oslo_models.models.bert import LM_HEAD, BertParallel
from oslo_models.sharding.layout import EvenSplit
from oslo_models.sharding.plan import ColumnParallel, Plan, Replicated


class DebertaParallel(BertParallel):
    """How every model of the DeBERTa families divides."""

    @classmethod
    def projections(cls, heads: EvenSplit) -> Mapping[str, ColumnParallel]:
        """What is divided inside an attention."""
        fused = ColumnParallel(EvenSplit(heads.count, 3 * heads.width))  # query, key and value of a head side by side
        return {
            "in_proj": fused,
            **dict.fromkeys(("q_bias", "v_bias", "pos_proj", "pos_q_proj"), ColumnParallel(heads)),
        }

    @classmethod
    def plan(cls, config: Any) -> Plan:
        plan = super().plan(config)
        heads = EvenSplit(config.num_attention_heads, config.hidden_size // config.num_attention_heads)
        (block,) = plan.blocks.values()
        rest = {name: entry for name, entry in block.items() if not name.startswith("attention.self.")}
        own = {f"attention.self.{name}": entry for name, entry in cls.projections(heads).items()}
        tables = ("position_embeddings", "token_type_embeddings", "embed_proj", "rel_embeddings")
        return replace(
            plan,
            embed={**plan.embed, "embeddings.embed_proj": Replicated()},
            blocks={"encoder.layer": {**own, **rest}},
            head={},
            beside={"encoder.rel_embeddings": Replicated()},
            local={"attention.self.num_attention_heads": heads.local_count},
            neutral={"embeddings.mask": None},
            optional=(*tables, *(name for name in own if ".pos_" in name)),
            whole_dropout=("attention.self.pos_dropout",),
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
