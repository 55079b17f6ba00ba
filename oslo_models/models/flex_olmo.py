"""FlexOlmo: OLMo 2 with a mixture of experts in each block."""

from transformers import FlexOlmoConfig
from transformers.models.flex_olmo import modeling_flex_olmo as hf

from oslo_models.modeling.blocks import mixture_of_experts
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.olmo2 import Olmo2Parallel


class FlexOlmoParallel(Olmo2Parallel):
    """Sharding plan of the FlexOlmo family."""

    mlp = mixture_of_experts()


class FlexOlmoModel(FlexOlmoParallel, hf.FlexOlmoModel):
    pass


class FlexOlmoForCausalLM(FlexOlmoParallel, hf.FlexOlmoForCausalLM):
    head_plan = LM_HEAD
