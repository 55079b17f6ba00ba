"""OLMo 3: OLMo 2 with sliding-window attention in some blocks."""

from transformers import Olmo3Config
from transformers.models.olmo3 import modeling_olmo3 as hf

from oslo_models.modeling.heads import LM_HEAD, SCORE
from oslo_models.models.olmo2 import Olmo2Parallel


class Olmo3Model(Olmo2Parallel, hf.Olmo3Model):
    pass


class Olmo3ForCausalLM(Olmo2Parallel, hf.Olmo3ForCausalLM):
    head_plan = LM_HEAD


class Olmo3ForSequenceClassification(Olmo2Parallel, hf.Olmo3ForSequenceClassification):
    head_plan = SCORE
