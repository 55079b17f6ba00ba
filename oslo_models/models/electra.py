"""ELECTRA: BERT with embeddings that may be narrower than the blocks."""

from dataclasses import replace
from typing import Any

from transformers.models.electra import modeling_electra as hf

from oslo_models.models.bert import BertParallel
from oslo_models.models.family import family
from oslo_models.models.roberta import HEADS as ROBERTA
from oslo_models.plan import Entries, Norm, Plan, Replicated, Vocab

LM_HEAD: Entries = {
    "generator_predictions.LayerNorm": Norm(),
    "generator_predictions.dense": Replicated(),
    "generator_lm_head": Vocab(),
}
HEADS: dict[str, Entries] = {
    **ROBERTA,
    "ForCausalLM": LM_HEAD,
    "ForMaskedLM": LM_HEAD,
    "ForPreTraining": {f"discriminator_predictions.{name}": Replicated() for name in ("dense", "dense_prediction")},
    "ForMultipleChoice": {"sequence_summary.summary": Replicated(), "classifier": Replicated()},
}


class ElectraParallel(BertParallel):
    """How every model of the ELECTRA family divides."""

    @classmethod
    def plan(cls, config: Any) -> Plan:
        plan = super().plan(config)
        optional = (*plan.optional, "embeddings_project")
        return replace(plan, embed={**plan.embed, "embeddings_project": Replicated()}, head={}, optional=optional)


globals().update(family(ElectraParallel, hf, HEADS))
