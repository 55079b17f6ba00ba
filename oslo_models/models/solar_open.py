"""Solar Open: Llama with shared and routed experts."""

from transformers import SolarOpenConfig
from transformers.models.solar_open import modeling_solar_open as hf

from oslo_models.modeling.blocks import mixture_of_experts
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.llama import LlamaParallel


class SolarOpenParallel(LlamaParallel):
    """Sharding plan of the Solar Open family."""

    mlp = {**mixture_of_experts(shared="shared_experts")}


class SolarOpenModel(SolarOpenParallel, hf.SolarOpenModel):
    pass


class SolarOpenForCausalLM(SolarOpenParallel, hf.SolarOpenForCausalLM):
    head_plan = LM_HEAD
