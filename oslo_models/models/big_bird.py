"""BigBird: BERT that attends to windows and to blocks drawn for all heads together, with which attention is whole."""

from dataclasses import replace
from typing import Any

from transformers.models.big_bird import modeling_big_bird as hf

from oslo_models.models.bert import LM_HEAD, BertParallel
from oslo_models.models.family import family, whole_attention
from oslo_models.models.roberta import HEADS as ROBERTA
from oslo_models.plan import Entries, Norm, Plan, Replicated

QA: Entries = {f"qa_classifier.{name}": Replicated() for name in ("intermediate.dense", "output.dense", "qa_outputs")}
HEADS: dict[str, Entries] = {
    **ROBERTA,
    "ForPreTraining": {**LM_HEAD, "cls.seq_relationship": Replicated()},
    "ForCausalLM": LM_HEAD,
    "ForMaskedLM": LM_HEAD,
    "ForQuestionAnswering": {**QA, "qa_classifier.output.LayerNorm": Norm()},
}


class BigBirdParallel(BertParallel):
    """How every model of the BigBird family divides."""

    @classmethod
    def plan(cls, config: Any) -> Plan:
        neutral = {"embeddings.rescale_embeddings": False}
        plan = replace(super().plan(config), head={"pooler": Replicated()}, neutral=neutral, optional=("pooler",))
        if config.attention_type == "original_full":
            return plan
        reason = "with attention_type='block_sparse', it lengthens its input to whole blocks"
        return replace(whole_attention(plan), one_stage=reason)


globals().update(family(BigBirdParallel, hf, HEADS))
