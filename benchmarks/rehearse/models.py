"""The models of training and decoding, with random weights, by transformers and by `oslo_models`."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.rehearse.bench import Bench

_NONE = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
_LLAMA = {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, **_NONE}
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2-124m": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "n_positions": 4096, **_NONE},
    "llama-1b": {
        **_LLAMA,
        **{"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "tie_word_embeddings": True},
        "max_position_embeddings": 8192,
    },
    "llama-8b-width": {
        **_LLAMA,
        **{"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 4, "max_position_embeddings": 8192},
    },
    "llama-8b": {
        **_LLAMA,
        **{"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "max_position_embeddings": 8192},
    },
}
TINY: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 67},
    "llama": {
        **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4},
        **{"num_key_value_heads": 2, "vocab_size": 67},
    },
}


def config_of(bench: Bench, name: str) -> Any:
    """The configuration of a model; in a dry run, a tiny configuration of its architecture."""
    from transformers import GPT2Config, LlamaConfig

    kind = name.partition("-")[0]
    return (GPT2Config if kind == "gpt2" else LlamaConfig)(**{**CONFIGS[name], **bench.pick({}, TINY[kind])})


def build(bench: Bench, name: str, peer: str, config: Any) -> Any:
    """The model of a peer in bfloat16, on the device."""
    if peer.startswith("oslo_models"):
        import oslo_models

        cls = oslo_models.GPT2LMHeadModel if name.startswith("gpt2") else oslo_models.LlamaForCausalLM
        model = cls.from_config_with_parallel(config, dtype=torch.bfloat16, seed=0)
        return model.to(bench.device)
    from transformers import AutoModelForCausalLM

    with torch.device(bench.device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if peer == "Liger":
        from liger_kernel.transformers import _apply_liger_kernel_to_instance

        _apply_liger_kernel_to_instance(model=model)
    return model


def weights(model: Any) -> int:
    """Number of parameters in a token's products: all except embeddings that are only looked up."""
    head = model.get_output_embeddings().weight
    looked_up = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)} - {id(head)}
    return sum(param.numel() for param in model.parameters() if id(param) not in looked_up)
