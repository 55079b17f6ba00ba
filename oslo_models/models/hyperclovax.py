"""HyperCLOVA X: Granite with optional norms after attention and MLP."""

from transformers import HyperCLOVAXConfig
from transformers.models.hyperclovax import modeling_hyperclovax as hf

from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.granite import GraniteParallel


class HyperCLOVAXParallel(GraniteParallel):
    """Sharding plan of the HyperCLOVA X family."""

    norms = (*GraniteParallel.norms, "post_norm1", "post_norm2")


class HyperCLOVAXModel(HyperCLOVAXParallel, hf.HyperCLOVAXModel):
    pass


class HyperCLOVAXForCausalLM(HyperCLOVAXParallel, hf.HyperCLOVAXForCausalLM):
    head_plan = LM_HEAD
