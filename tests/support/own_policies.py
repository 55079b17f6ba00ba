"""Policies as the document of parallelformers describes them, for architectures inside and outside of the zoo."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor
from transformers.models.bert.modeling_bert import BertLayer
from transformers.models.biogpt.modeling_biogpt import BioGptDecoderLayer
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

from oslo_models import AllReduceConv1D, AllReduceLinear, Layer, Policy

from support.own_models import NoteAttention, NoteBlock


def linear(name: str, **more: Any) -> Layer:
    return Layer(weight=f"{name}.weight", bias=f"{name}.bias", **more)


class BertPolicy(Policy):
    @staticmethod
    def replace_arguments(config: Any, world_size: int) -> dict[str, Any]:
        return {
            "attention.self.num_attention_heads": config.num_attention_heads // world_size,
            "attention.self.all_head_size": config.hidden_size // world_size,
            "crossattention.self.num_attention_heads": config.num_attention_heads // world_size,
        }

    @staticmethod
    def attn_qkv() -> list[Layer]:
        maybe = [linear(f"crossattention.self.{name}", ignore_checker=True) for name in ("query", "key", "value")]
        return [*(linear(f"attention.self.{name}") for name in ("query", "key", "value")), *maybe]

    @staticmethod
    def attn_out() -> list[Layer]:
        return [linear("attention.output.dense", replace=AllReduceLinear)]

    @staticmethod
    def mlp_in() -> list[Layer]:
        return [linear("intermediate.dense")]

    @staticmethod
    def mlp_out() -> list[Layer]:
        return [linear("output.dense", replace=AllReduceLinear)]

    @staticmethod
    def original_layer_class() -> type:
        return BertLayer


class GPT2Policy(Policy):
    @staticmethod
    def replace_arguments(config: Any, world_size: int) -> dict[str, Any]:
        return {
            "attn.embed_dim": config.hidden_size // world_size,
            "attn.split_size": config.hidden_size // world_size,
            "attn.num_heads": config.num_attention_heads // world_size,
        }

    @staticmethod
    def attn_qkv() -> list[Layer]:
        return [linear("attn.c_attn", n_fused=3, reversed=True)]

    @staticmethod
    def attn_out() -> list[Layer]:
        return [linear("attn.c_proj", replace=AllReduceConv1D, reversed=True)]

    @staticmethod
    def mlp_in() -> list[Layer]:
        return [linear("mlp.c_fc", reversed=True)]

    @staticmethod
    def mlp_out() -> list[Layer]:
        return [linear("mlp.c_proj", replace=AllReduceConv1D, reversed=True)]

    @staticmethod
    def original_layer_class() -> type:
        return GPT2Block


class BioGptPolicy(Policy):
    @staticmethod
    def replace_arguments(config: Any, world_size: int) -> dict[str, Any]:
        return {
            "self_attn.embed_dim": config.hidden_size // world_size,
            "self_attn.num_heads": config.num_attention_heads // world_size,
        }

    @staticmethod
    def attn_qkv() -> list[Layer]:
        return [linear(f"self_attn.{name}_proj") for name in "qkv"]

    @staticmethod
    def attn_out() -> list[Layer]:
        return [linear("self_attn.out_proj", replace=AllReduceLinear)]

    @staticmethod
    def mlp_in() -> list[Layer]:
        return [linear("fc1")]

    @staticmethod
    def mlp_out() -> list[Layer]:
        return [linear("fc2", replace=AllReduceLinear)]

    @staticmethod
    def original_layer_class() -> type:
        return BioGptDecoderLayer


class NotePolicy(Policy):
    @staticmethod
    def replace_arguments(config: Any, world_size: int) -> dict[str, Any]:
        return {"attention.heads": config.num_heads // world_size}

    @staticmethod
    def attn_qkv() -> list[Layer]:
        return [linear(f"attention.{name}") for name in "qkv"]

    @staticmethod
    def attn_out() -> list[Layer]:
        return [linear("attention.out", replace=AllReduceLinear)]

    @staticmethod
    def mlp_in() -> list[Layer]:
        return [linear("up")]

    @staticmethod
    def mlp_out() -> list[Layer]:
        return [linear("down", replace=AllReduceLinear)]

    @staticmethod
    def original_layer_class() -> type:
        return NoteBlock


class LouderAttention(NoteAttention):
    """Adds the mean over all ranks of the output, which is the same on each: twice the output."""

    mp_group: Any = None

    def forward(self, x_BLD: Tensor) -> Tensor:
        own = NoteAttention.forward(self, x_BLD)
        total = own.clone()
        dist.all_reduce(total, group=self.mp_group)
        return own + total / dist.get_world_size(self.mp_group)


class LouderPolicy(NotePolicy):
    @staticmethod
    def replace_modules() -> dict[str, type]:
        return {"NoteAttention": LouderAttention}
