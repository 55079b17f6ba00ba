"""BigBird: BERT with block-sparse attention, which is replicated because all heads share its random blocks."""

from dataclasses import replace
from typing import Any

from transformers import BigBirdConfig
from transformers.models.big_bird import modeling_big_bird as hf

from oslo_models.layers.entries import Norm, Plan, Replicated
from oslo_models.modeling.blocks import replicated_attention
from oslo_models.modeling.heads import CLASSIFIER, DENSE_CLASSIFIER
from oslo_models.models.bert import LM_HEAD, BertParallel


class BigBirdParallel(BertParallel):
    """Sharding plan of the BigBird family."""

    @classmethod
    def plan(cls, config: Any) -> Plan:
        plan = replace(
            super().plan(config),
            head={"pooler": Replicated()},
            optional=("pooler",),
        ).with_rules(disabled_after_first_stage={"embeddings.rescale_embeddings": False})
        if config.attention_type == "original_full":
            return plan
        reason = "with attention_type='block_sparse', it pads its input to full blocks"
        return replicated_attention(plan).with_rules(single_stage_reason=reason)


class BigBirdModel(BigBirdParallel, hf.BigBirdModel):
    pass


class BigBirdForCausalLM(BigBirdParallel, hf.BigBirdForCausalLM):
    head_plan = LM_HEAD


class BigBirdForMaskedLM(BigBirdParallel, hf.BigBirdForMaskedLM):
    head_plan = LM_HEAD


class BigBirdForSequenceClassification(BigBirdParallel, hf.BigBirdForSequenceClassification):
    head_plan = DENSE_CLASSIFIER


class BigBirdForMultipleChoice(BigBirdParallel, hf.BigBirdForMultipleChoice):
    head_plan = CLASSIFIER


class BigBirdForTokenClassification(BigBirdParallel, hf.BigBirdForTokenClassification):
    head_plan = CLASSIFIER


class BigBirdForQuestionAnswering(BigBirdParallel, hf.BigBirdForQuestionAnswering):
    head_plan = {
        "qa_classifier.intermediate.dense": Replicated(),
        "qa_classifier.output.dense": Replicated(),
        "qa_classifier.qa_outputs": Replicated(),
        "qa_classifier.output.LayerNorm": Norm(),
    }


class BigBirdForPreTraining(BigBirdParallel, hf.BigBirdForPreTraining):
    head_plan = {**LM_HEAD, "cls.seq_relationship": Replicated()}
