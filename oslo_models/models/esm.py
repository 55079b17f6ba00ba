"""ESM: BERT for proteins, with pre-layer norms and rotary or learned positions."""

from dataclasses import replace
from typing import Any

from transformers import EsmConfig
from transformers.models.esm import modeling_esm as hf

from oslo_models.layers.entries import Norm, Plan, Replicated
from oslo_models.modeling.heads import CLASSIFIER
from oslo_models.models.bert import BertParallel
from oslo_models.models.roberta import LM_HEAD


class EsmParallel(BertParallel):
    """Sharding plan of the ESM family."""

    added_embeddings = ("position",)

    @classmethod
    def plan(cls, config: Any) -> Plan:
        plan = super().plan(config)
        (block,) = plan.blocks.values()
        block = {name.replace("output.LayerNorm", "LayerNorm"): entry for name, entry in block.items()}
        embed = {name: entry for name, entry in plan.embed.items() if name != "embeddings.LayerNorm"}
        optional = {"embeddings.position_embeddings": Replicated(), "embeddings.layer_norm": Norm()}
        return replace(
            plan,
            embed={**embed, **optional},
            blocks={"encoder.layer": block},
            head={"encoder.emb_layer_norm_after": Norm(), **plan.head, "contact_head": Replicated()},
            optional=(*plan.optional, *optional),
        ).with_rules(disabled_after_first_stage={"embeddings.token_dropout": False, "embeddings.attention_mask": None})


class EsmModel(EsmParallel, hf.EsmModel):
    pass


class EsmForMaskedLM(EsmParallel, hf.EsmForMaskedLM):
    head_plan = {**LM_HEAD, "lm_head.bias": Replicated()}  # added to logits of all ranks


class EsmForSequenceClassification(EsmParallel, hf.EsmForSequenceClassification):
    head_plan = CLASSIFIER


class EsmForTokenClassification(EsmParallel, hf.EsmForTokenClassification):
    head_plan = CLASSIFIER
