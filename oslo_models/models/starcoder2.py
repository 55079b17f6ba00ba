"""StarCoder2: Llama with layer norms and an MLP without a gate."""

from transformers import Starcoder2Config
from transformers.models.starcoder2 import modeling_starcoder2 as hf

from oslo_models.layers.entries import ColumnParallel, RowParallel
from oslo_models.modeling.heads import LM_HEAD, SCORE
from oslo_models.models.llama import LlamaParallel


class Starcoder2Parallel(LlamaParallel):
    """Sharding plan of the StarCoder2 family."""

    mlp = {"mlp.c_fc": ColumnParallel(), "mlp.c_proj": RowParallel()}


class Starcoder2Model(Starcoder2Parallel, hf.Starcoder2Model):
    pass


class Starcoder2ForCausalLM(Starcoder2Parallel, hf.Starcoder2ForCausalLM):
    head_plan = LM_HEAD


class Starcoder2ForSequenceClassification(Starcoder2Parallel, hf.Starcoder2ForSequenceClassification):
    head_plan = SCORE


class Starcoder2ForTokenClassification(Starcoder2Parallel, hf.Starcoder2ForTokenClassification):
    head_plan = SCORE
