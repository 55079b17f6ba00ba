"""Apertus: Llama with query and key norms for each head, and an MLP without a gate, with learnt activation (xIELU)."""

from transformers import ApertusConfig
from transformers import initialization as init
from transformers.activations import XIELUActivation
from transformers.models.apertus import modeling_apertus as hf

from oslo_models.layers.entries import ColumnParallel, HeadNorm, RowParallel
from oslo_models.modeling.heads import LM_HEAD, SCORE
from oslo_models.models.llama import LlamaParallel


class ApertusBlocksParallel(LlamaParallel):
    """Sharding plan of decoders with the blocks of Apertus."""

    norms = ("attention_layernorm", "feedforward_layernorm")
    head_norms = ("self_attn.q_norm", "self_attn.k_norm")
    mlp = {
        "mlp.up_proj": ColumnParallel(),
        # Two scalars, applied by all ranks to their features. As for a head norm, gradients are all-reduced.
        "mlp.act_fn": HeadNorm(),
        "mlp.down_proj": RowParallel(),
    }


class ApertusParallel(ApertusBlocksParallel):
    """Sharding plan of the Apertus family."""

    def _initialize_constructed(self) -> None:
        for module in self.modules():
            if isinstance(module, XIELUActivation):
                constructed = XIELUActivation(dtype=self.config.dtype).state_dict()
                for name, tensor in module.state_dict(keep_vars=True).items():
                    init.copy_(tensor, constructed[name])


class ApertusModel(ApertusParallel, hf.ApertusModel):
    pass


class ApertusForCausalLM(ApertusParallel, hf.ApertusForCausalLM):
    head_plan = LM_HEAD


class ApertusForTokenClassification(ApertusParallel, hf.ApertusForTokenClassification):
    head_plan = SCORE
