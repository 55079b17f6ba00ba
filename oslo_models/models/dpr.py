"""DPR: BERT as an encoder of questions and of passages, and as a reader of these."""

from dataclasses import replace
from typing import Any, ClassVar

from transformers.models.dpr import modeling_dpr as hf

from oslo_models.models.bert import BertParallel
from oslo_models.models.family import family
from oslo_models.plan import Entries, Plan, Replicated

WHERE = {"ContextEncoder": "ctx_encoder", "QuestionEncoder": "question_encoder", "Reader": "span_predictor.encoder"}
HEADS: dict[str, Entries] = {name: {f"{where}.encode_proj": Replicated()} for name, where in WHERE.items()}
HEADS["Reader"] = {
    **HEADS["Reader"],
    **{f"span_predictor.{name}": Replicated() for name in ("qa_outputs", "qa_classifier")},
}


class DPRParallel(BertParallel):
    """How every model of the DPR family divides."""

    where: ClassVar[str]

    @classmethod
    def plan(cls, config: Any) -> Plan:
        return replace(super().plan(config), optional=("pooler.dense", "encode_proj"))

    def _prefix(self) -> str:
        return f"{self.where}.bert_model."


globals().update(family(DPRParallel, hf, HEADS, **{name: {"where": where} for name, where in WHERE.items()}))
