"""VaultGemma: Gemma 2 with norms before attention and MLP only."""

from transformers.models.vaultgemma import modeling_vaultgemma as hf

from oslo_models.models.family import DECODER, family
from oslo_models.models.llama import LlamaParallel


class VaultGemmaParallel(LlamaParallel):
    """How every model of the VaultGemma family divides."""

    norms = ("input_layernorm", "pre_feedforward_layernorm")


globals().update(family(VaultGemmaParallel, hf, DECODER))
