"""VaultGemma: Gemma 2 with norms before attention and MLP only."""

from transformers import VaultGemmaConfig
from transformers.models.vaultgemma import modeling_vaultgemma as hf

from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.llama import LlamaParallel


class VaultGemmaParallel(LlamaParallel):
    """How every model of the VaultGemma family divides."""

    norms = ("input_layernorm", "pre_feedforward_layernorm")


class VaultGemmaModel(VaultGemmaParallel, hf.VaultGemmaModel):
    pass


class VaultGemmaForCausalLM(VaultGemmaParallel, hf.VaultGemmaForCausalLM):
    head_plan = LM_HEAD
