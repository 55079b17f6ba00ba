"""LUKE: RoBERTa that reads entities beside words, and attends from either to either with a query of its own."""

from dataclasses import replace
from typing import Any

from transformers import initialization as init
from transformers.models.luke import modeling_luke as hf

from oslo_models.layout import Units
from oslo_models.models.bert import BertParallel
from oslo_models.models.family import family
from oslo_models.models.roberta import LM_HEAD
from oslo_models.plan import Column, Entries, Norm, Plan, Replicated, Vocab

ENTITIES: Entries = {
    "entity_predictions.transform.dense": Replicated(),
    "entity_predictions.transform.LayerNorm": Norm(),
    "entity_predictions.decoder": Vocab(),
    "entity_predictions.bias": Replicated(),
}
TASKS = ("Entity", "EntityPair", "EntitySpan", "Sequence", "Token")
HEADS: dict[str, Entries] = {
    "Model": {},
    "ForMaskedLM": {**LM_HEAD, **ENTITIES},
    **{f"For{task}Classification": {"classifier": Replicated()} for task in TASKS},
    "ForMultipleChoice": {"classifier": Replicated()},
    "ForQuestionAnswering": {"qa_outputs": Replicated()},
}
QUERIES = tuple(f"attention.self.{name}_query" for name in ("w2e", "e2w", "e2e"))


class LukeParallel(BertParallel):
    """How every model of the LUKE family divides."""

    labels_of = {"logits": "labels", "entity_logits": "entity_labels"}

    def initialize_constructed(self) -> None:
        if hasattr(self, "entity_predictions"):
            init.zeros_(self.entity_predictions.bias)

    @classmethod
    def plan(cls, config: Any) -> Plan:
        plan = super().plan(config)
        heads = Units(config.num_attention_heads, config.hidden_size // config.num_attention_heads)
        tables = {f"entity_embeddings.{name}_embeddings": Replicated() for name in ("position", "token_type")}
        (block,) = plan.blocks.values()
        return replace(
            plan,
            embed={
                **plan.embed,
                "entity_embeddings.entity_embeddings": Vocab(),
                "entity_embeddings.entity_embedding_dense": Replicated(),
                **tables,
                "entity_embeddings.LayerNorm": Norm(),
            },
            blocks={"encoder.layer": {**block, **dict.fromkeys(QUERIES, Column(heads))}},
            local={**plan.local, "attention.self.num_attention_heads": heads.local_count},
            optional=(*plan.optional, *QUERIES, "entity_embedding_dense"),
            one_stage="words and entities pass its blocks side by side, and stages hand on one sequence",
        )


globals().update(family(LukeParallel, hf, HEADS))
