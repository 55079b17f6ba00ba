"""Mixtral: Mistral with a mixture of experts in each block."""

from transformers import MixtralConfig
from transformers.models.mixtral import modeling_mixtral as hf

from oslo_models.modeling.blocks import mixture_of_experts
from oslo_models.modeling.heads import LM_HEAD, QA_OUTPUTS, SCORE
from oslo_models.models.llama import LlamaParallel


class MixtralParallel(LlamaParallel):
    """Sharding plan of the Mixtral family."""

    mlp = mixture_of_experts()


class MixtralModel(MixtralParallel, hf.MixtralModel):
    pass


class MixtralForCausalLM(MixtralParallel, hf.MixtralForCausalLM):
    head_plan = LM_HEAD


class MixtralForSequenceClassification(MixtralParallel, hf.MixtralForSequenceClassification):
    head_plan = SCORE


class MixtralForTokenClassification(MixtralParallel, hf.MixtralForTokenClassification):
    head_plan = SCORE


class MixtralForQuestionAnswering(MixtralParallel, hf.MixtralForQuestionAnswering):
    head_plan = QA_OUTPUTS
