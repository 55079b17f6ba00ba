"""DeBERTa: BERT with attention to relative positions. Not with `talking_head`, nor the head of `legacy=False`."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from transformers.models.deberta import modeling_deberta as hf

from oslo_models.layout import Units
from oslo_models.models.bert import LM_HEAD, BertParallel
from oslo_models.models.family import family
from oslo_models.plan import Column, Entries, Plan, Replicated

HEADS: dict[str, Entries] = {
    "Model": {},
    "ForMaskedLM": LM_HEAD,
    "ForSequenceClassification": {"pooler.dense": Replicated(), "classifier": Replicated()},
    "ForMultipleChoice": {"pooler.dense": Replicated(), "classifier": Replicated()},
    "ForTokenClassification": {"classifier": Replicated()},
    "ForQuestionAnswering": {"qa_outputs": Replicated()},
}


class DebertaParallel(BertParallel):
    """How every model of the DeBERTa families divides."""

    @classmethod
    def projections(cls, heads: Units) -> Mapping[str, Column]:
        """What is divided inside an attention."""
        fused = Column(Units(heads.count, 3 * heads.width))  # query, key and value of a head side by side
        return {"in_proj": fused, **dict.fromkeys(("q_bias", "v_bias", "pos_proj", "pos_q_proj"), Column(heads))}

    @classmethod
    def plan(cls, config: Any) -> Plan:
        plan = super().plan(config)
        heads = Units(config.num_attention_heads, config.hidden_size // config.num_attention_heads)
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


globals().update(family(DebertaParallel, hf, HEADS))
