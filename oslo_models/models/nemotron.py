"""Nemotron: Llama with an MLP without a gate."""

from transformers import NemotronConfig
from transformers.models.nemotron import modeling_nemotron as hf

from oslo_models.layers.entries import ColumnParallel, RowParallel
from oslo_models.modeling.heads import LM_HEAD, QA_OUTPUTS, SCORE
from oslo_models.models.llama import LlamaParallel


class NemotronParallel(LlamaParallel):
    """Sharding plan of the Nemotron family."""

    mlp = {"mlp.up_proj": ColumnParallel(), "mlp.down_proj": RowParallel()}


class NemotronModel(NemotronParallel, hf.NemotronModel):
    pass


class NemotronForCausalLM(NemotronParallel, hf.NemotronForCausalLM):
    head_plan = LM_HEAD


class NemotronForSequenceClassification(NemotronParallel, hf.NemotronForSequenceClassification):
    head_plan = SCORE


class NemotronForTokenClassification(NemotronParallel, hf.NemotronForTokenClassification):
    head_plan = SCORE


class NemotronForQuestionAnswering(NemotronParallel, hf.NemotronForQuestionAnswering):
    head_plan = QA_OUTPUTS
