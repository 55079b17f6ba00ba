"""LUKE: RoBERTa with entities beside tokens, and a separate query projection for each pair of the two."""

from dataclasses import replace
from typing import Any

from transformers import LukeConfig
from transformers.models.luke import modeling_luke as hf

from oslo_models.layers.entries import ColumnParallel, LocalAttributes, Norm, Plan, Replicated, VocabParallel
from oslo_models.modeling.blocks import heads_of
from oslo_models.modeling.heads import CLASSIFIER, QA_OUTPUTS
from oslo_models.models.bert import BertParallel

QUERIES = tuple(f"attention.self.{name}_query" for name in ("w2e", "e2w", "e2e"))


class LukeParallel(BertParallel):
    """Sharding plan of the LUKE family."""

    labels_of = {"logits": "labels", "entity_logits": "entity_labels"}
    zeros = ("entity_predictions.bias",)

    @classmethod
    def plan(cls, config: Any) -> Plan:
        plan = super().plan(config)
        heads = heads_of(config)
        tables = {f"entity_embeddings.{name}_embeddings": Replicated() for name in ("position", "token_type")}
        (block,) = plan.blocks.values()
        return replace(
            plan,
            embed={
                **plan.embed,
                "entity_embeddings.entity_embeddings": VocabParallel(),
                "entity_embeddings.entity_embedding_dense": Replicated(),
                **tables,
                "entity_embeddings.LayerNorm": Norm(),
            },
            blocks={
                "encoder.layer": {
                    **block,
                    "attention.self": LocalAttributes(
                        {"all_head_size": heads.local_extent, "num_attention_heads": heads.local_count}
                    ),
                    **dict.fromkeys(QUERIES, ColumnParallel(heads)),
                }
            },
            optional=(*plan.optional, *QUERIES, "entity_embedding_dense"),
        ).with_rules(
            single_stage_reason="its blocks process tokens and entities together, and stages exchange one sequence"
        )


class LukeModel(LukeParallel, hf.LukeModel):
    pass


class LukeForMaskedLM(LukeParallel, hf.LukeForMaskedLM):
    head_plan = {
        "lm_head.dense": Replicated(),
        "lm_head.layer_norm": Norm(),
        "lm_head.decoder": VocabParallel(),
        "lm_head.bias": VocabParallel(),
        "entity_predictions.transform.dense": Replicated(),
        "entity_predictions.transform.LayerNorm": Norm(),
        "entity_predictions.decoder": VocabParallel(),
        "entity_predictions.bias": Replicated(),
    }


class LukeForEntityClassification(LukeParallel, hf.LukeForEntityClassification):
    head_plan = CLASSIFIER


class LukeForEntityPairClassification(LukeParallel, hf.LukeForEntityPairClassification):
    head_plan = CLASSIFIER


class LukeForEntitySpanClassification(LukeParallel, hf.LukeForEntitySpanClassification):
    head_plan = CLASSIFIER


class LukeForSequenceClassification(LukeParallel, hf.LukeForSequenceClassification):
    head_plan = CLASSIFIER


class LukeForTokenClassification(LukeParallel, hf.LukeForTokenClassification):
    head_plan = CLASSIFIER


class LukeForMultipleChoice(LukeParallel, hf.LukeForMultipleChoice):
    head_plan = CLASSIFIER


class LukeForQuestionAnswering(LukeParallel, hf.LukeForQuestionAnswering):
    head_plan = QA_OUTPUTS
