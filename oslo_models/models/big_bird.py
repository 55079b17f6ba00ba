"""BigBird: BERT that attends to windows and to blocks drawn for all heads together, with which attention is whole."""

from dataclasses import replace
from typing import Any

from transformers import BigBirdConfig
from transformers.models.big_bird import modeling_big_bird as hf

from oslo_models.modeling.family import replicated_attention
from oslo_models.modeling.heads import CLASSIFIER, DENSE_CLASSIFIER
from oslo_models.models.bert import LM_HEAD, BertParallel
from oslo_models.sharding.plan import Norm, Plan, Replicated, VocabParallel


class BigBirdParallel(BertParallel):
    """How every model of the BigBird family divides."""

    @classmethod
    def plan(cls, config: Any) -> Plan:
        neutral = {"embeddings.rescale_embeddings": False}
        plan = replace(super().plan(config), head={"pooler": Replicated()}, neutral=neutral, optional=("pooler",))
        if config.attention_type == "original_full":
            return plan
        reason = "with attention_type='block_sparse', it lengthens its input to whole blocks"
        return replace(replicated_attention(plan), one_stage=reason)


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
    head_plan = {
        "cls.predictions.transform.dense": Replicated(),
        "cls.predictions.transform.LayerNorm": Norm(),
        "cls.predictions.decoder": VocabParallel(),
        "cls.predictions.bias": VocabParallel(),
        "cls.seq_relationship": Replicated(),
    }
