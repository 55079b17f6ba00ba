"""RAG: a question encoder and a generator, both of this table; `set_retriever` gives each rank its retriever."""

from collections.abc import Collection
from typing import Any

from transformers import RagConfig
from transformers.models.rag import modeling_rag as hf

from oslo_models.auto import AutoModel, AutoModelForSeq2SeqLM
from oslo_models.modeling.base import ParallelModel
from oslo_models.modeling.composite import plan_of_part, replicated_in_part
from oslo_models.sharding.plan import Plan

ENCODED = {"attentions": "question_enc_attentions"}
GENERATED = {
    "encoder_attentions": "generator_enc_attentions",
    "decoder_attentions": "generator_dec_attentions",
    "cross_attentions": "generator_cross_attentions",
}


class RagParallel(ParallelModel):
    """Sharding plan of the RAG family: the plans of its question encoder and its generator."""

    loss_needs_full_logits = True

    @classmethod
    def plan(cls, config: Any) -> Plan:
        question_encoder, generator = cls._parts(config)
        plan = plan_of_part("question_encoder", question_encoder, config.question_encoder)
        plan |= plan_of_part("generator", generator, config.generator)
        return plan.with_rules(
            single_stage_reason=plan.pipeline.single_stage_reason
            or "documents are retrieved between its parts, and their scores enter the loss"
        )

    @classmethod
    def replicated_attentions(cls, config: Any) -> Collection[str]:
        question_encoder, generator = cls._parts(config)
        encoded = replicated_in_part(question_encoder, config.question_encoder, ENCODED)
        return [*encoded, *replicated_in_part(generator, config.generator, GENERATED)]

    @staticmethod
    def _parts(config: Any) -> tuple[type[ParallelModel], type[ParallelModel]]:
        return AutoModel.class_for(config.question_encoder), AutoModelForSeq2SeqLM.class_for(config.generator)


class RagModel(RagParallel, hf.RagModel):
    pass


class RagSequenceForGeneration(RagParallel, hf.RagSequenceForGeneration):
    pass


class RagTokenForGeneration(RagParallel, hf.RagTokenForGeneration):
    pass
