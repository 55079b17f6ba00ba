"""Arcee: Llama with an MLP without a gate."""

from transformers import ArceeConfig
from transformers.models.arcee import modeling_arcee as hf

from oslo_models.layers.entries import ColumnParallel, RowParallel
from oslo_models.modeling.heads import LM_HEAD, QA_OUTPUTS, SCORE
from oslo_models.models.llama import LlamaParallel


class ArceeParallel(LlamaParallel):
    """Sharding plan of the Arcee family."""

    mlp = {"mlp.up_proj": ColumnParallel(), "mlp.down_proj": RowParallel()}


class ArceeModel(ArceeParallel, hf.ArceeModel):
    pass


class ArceeForCausalLM(ArceeParallel, hf.ArceeForCausalLM):
    head_plan = LM_HEAD


class ArceeForSequenceClassification(ArceeParallel, hf.ArceeForSequenceClassification):
    head_plan = SCORE


class ArceeForTokenClassification(ArceeParallel, hf.ArceeForTokenClassification):
    head_plan = SCORE


class ArceeForQuestionAnswering(ArceeParallel, hf.ArceeForQuestionAnswering):
    head_plan = QA_OUTPUTS
