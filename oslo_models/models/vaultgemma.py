"""VaultGemma: Gemma 2 with pre-layer norms only."""

from transformers import VaultGemmaConfig
from transformers.models.vaultgemma import modeling_vaultgemma as hf

from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.llama import LlamaParallel


class VaultGemmaParallel(LlamaParallel):
    """Sharding plan of the VaultGemma family."""

    norms = ("input_layernorm", "pre_feedforward_layernorm")


class VaultGemmaModel(VaultGemmaParallel, hf.VaultGemmaModel):
    pass


class VaultGemmaForCausalLM(VaultGemmaParallel, hf.VaultGemmaForCausalLM):
    head_plan = LM_HEAD
