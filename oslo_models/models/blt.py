"""Byte Latent Transformer: encoder and decoder of bytes around a transformer of patches, all with Llama's blocks.

A patcher, another small decoder, determines the start of each patch. Projections between bytes and patches are
replicated. So are the patcher's embedding and head, because all ranks need its entropies. The hashed embeddings are
sharded over their rows.
"""

from __future__ import annotations

from typing import Any

from transformers import BltConfig
from transformers.models.blt import modeling_blt as hf

from oslo_models.layers.entries import Entries, Norm, Plan, Replicated, VocabParallel
from oslo_models.modeling.base import ParallelModel
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.llama import LlamaParallel
from oslo_models.sharding.layout import GroupedHeads


class BltParallel(ParallelModel):
    """Sharding plan of the Byte Latent Transformer family."""

    @staticmethod
    def attention(part: Any) -> Entries:
        """Return the plan entries of an attention layer, by name inside it."""
        width = part.hidden_size // part.num_attention_heads
        entries = LlamaParallel.attention(part, GroupedHeads(part.num_attention_heads, part.num_key_value_heads, width))
        return {name.removeprefix("self_attn").removeprefix("."): entry for name, entry in entries.items()}

    @classmethod
    def block(cls, part: Any) -> Entries:
        """Return the plan entries of a block in one of the submodels."""
        attention = {f"self_attn.{name}".rstrip("."): entry for name, entry in cls.attention(part).items()}
        return {**attention, **LlamaParallel.mlp, **{name: Norm() for name in LlamaParallel.norms}}

    @classmethod
    def cross_attention(cls, part: Any) -> Entries:
        """Return the plan entries of cross-attention between bytes and patches."""
        return {**cls.attention(part), "q_norm": Norm(), "k_norm": Norm()}

    @classmethod
    def plan(cls, config: Any) -> Plan:
        encoder, decoder, patcher = config.encoder_config, config.decoder_config, config.patcher_config
        blocks = {
            "local_encoder.layers": cls.block(encoder),
            "local_encoder.cross_attn_layers": cls.cross_attention(encoder),
            "global_transformer.layers": cls.block(config.global_config),
            "local_decoder.layers": cls.block(decoder),
            "local_decoder.cross_attn_layers": cls.cross_attention(decoder),
        }
        embed: dict[str, Replicated] = {
            "local_encoder.embed_tokens": VocabParallel(),
            "encoder_hash_tok_embedding": VocabParallel(),
            "local_encoder.patch_embedding_projection": Replicated(),
            "global_transformer.token_embedding_projection": Replicated(),
            "local_decoder.patch_embedding_projection": Replicated(),
        }
        if config.patch_in_forward:
            blocks["patcher.layers"] = cls.block(patcher)
            embed |= {"patcher.embed_tokens": Replicated(), "patcher.lm_head": Replicated(), "patcher.norm": Norm()}
        return Plan(
            embed=embed,
            blocks=blocks,
            head={"local_decoder.norm": Norm()},
            optional=("global_transformer.token_embedding_projection",),
        ).with_rules(single_stage_reason="bytes, patches and the patcher each go through separate blocks")

    def _initialized_whole(self) -> list[str]:
        """Add the MLPs: transformers scales their initial weights by the width of the full MLP."""
        mlps = [name for name, module in self.named_modules() if isinstance(module, hf.BltMLP)]
        return [*super()._initialized_whole(), *mlps]


class BltModel(BltParallel, hf.BltModel):
    pass


class BltForCausalLM(BltParallel, hf.BltForCausalLM):
    head_plan = LM_HEAD
