"""CANINE: BERT on groups of characters, between two blocks that read single characters."""

from dataclasses import replace
from typing import Any

from transformers import CanineConfig
from transformers.models.canine import modeling_canine as hf

from oslo_models.layers.entries import LocalAttributes, Plan, Replicated
from oslo_models.modeling.blocks import heads_of
from oslo_models.modeling.heads import CLASSIFIER, QA_OUTPUTS
from oslo_models.models.bert import BertParallel


class CanineParallel(BertParallel):
    """Sharding plan of the CANINE family."""

    @classmethod
    def plan(cls, config: Any) -> Plan:
        plan, heads = super().plan(config), heads_of(config)
        local = {"num_attention_heads": heads.local_count, "all_head_size": heads.local_extent}
        block = {**plan.blocks["encoder.layer"], "attention.self": LocalAttributes(local)}
        stacks = ("initial_char_encoder", "encoder", "final_char_encoder")
        return replace(
            plan,
            embed={"char_embeddings": Replicated()},
            blocks={f"{stack}.layer": block for stack in stacks},
            head={**plan.head, "chars_to_molecules": Replicated(), "projection": Replicated()},
        ).with_rules(
            embedding_dropouts=(),
            single_stage_reason="its last block reads the outputs of the first one and of the others",
        )


class CanineModel(CanineParallel, hf.CanineModel):
    pass


class CanineForSequenceClassification(CanineParallel, hf.CanineForSequenceClassification):
    head_plan = CLASSIFIER


class CanineForMultipleChoice(CanineParallel, hf.CanineForMultipleChoice):
    head_plan = CLASSIFIER


class CanineForTokenClassification(CanineParallel, hf.CanineForTokenClassification):
    head_plan = CLASSIFIER


class CanineForQuestionAnswering(CanineParallel, hf.CanineForQuestionAnswering):
    head_plan = QA_OUTPUTS
