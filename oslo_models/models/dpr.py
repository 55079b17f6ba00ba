"""DPR: BERT as a question encoder, a passage encoder and a reader."""

from dataclasses import replace
from typing import Any, ClassVar

from transformers import DPRConfig
from transformers.models.dpr import modeling_dpr as hf

from oslo_models.models.bert import BertParallel
from oslo_models.sharding.plan import Plan, Replicated


class DPRParallel(BertParallel):
    """Sharding plan of the DPR family."""

    base_path: ClassVar[str]

    @classmethod
    def plan(cls, config: Any) -> Plan:
        return replace(super().plan(config), optional=("pooler.dense", "encode_proj"))

    def _prefix(self) -> str:
        return f"{self.base_path}.bert_model."


class DPRContextEncoder(DPRParallel, hf.DPRContextEncoder):
    head_plan = {"ctx_encoder.encode_proj": Replicated()}
    base_path = "ctx_encoder"


class DPRQuestionEncoder(DPRParallel, hf.DPRQuestionEncoder):
    head_plan = {"question_encoder.encode_proj": Replicated()}
    base_path = "question_encoder"


class DPRReader(DPRParallel, hf.DPRReader):
    head_plan = {
        "span_predictor.encoder.encode_proj": Replicated(),
        "span_predictor.qa_outputs": Replicated(),
        "span_predictor.qa_classifier": Replicated(),
    }
    base_path = "span_predictor.encoder"
