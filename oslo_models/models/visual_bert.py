"""VisualBERT: BERT that reads regions of an image after the words."""

from dataclasses import replace
from typing import Any

from transformers.models.visual_bert import modeling_visual_bert as hf

from oslo_models.models.bert import LM_HEAD, BertParallel
from oslo_models.models.family import family
from oslo_models.plan import Entries, Plan, Replicated

PRETRAINING: Entries = {**LM_HEAD, "cls.seq_relationship": Replicated()}
HEADS: dict[str, Entries] = {
    "Model": {},
    "ForPreTraining": PRETRAINING,
    "ForMultipleChoice": {"cls": Replicated()},
    "ForQuestionAnswering": {"cls": Replicated()},
    "ForVisualReasoning": {"cls": Replicated()},
    "ForRegionToPhraseAlignment": {
        **PRETRAINING,
        **{f"attention.{name}": Replicated() for name in ("query", "key", "value")},  # of one head
    },
}


class VisualBertParallel(BertParallel):
    """How every model of the VisualBERT family divides. Not with `bypass_transformer`."""

    tables = ("position", "token_type", "visual_position", "visual_token_type")

    @classmethod
    def plan(cls, config: Any) -> Plan:
        plan = super().plan(config)
        embed = {**plan.embed, "embeddings.visual_projection": Replicated()}
        return replace(plan, embed=embed, one_stage="the regions join the words after these are embedded")


globals().update(family(VisualBertParallel, hf, HEADS))
