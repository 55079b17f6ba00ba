"""Cohere ASR: the encoder of Parakeet, and a decoder with cross-attention and learned positions."""

from typing import Any, ClassVar

from transformers import CohereAsrConfig
from transformers.models.cohere_asr import modeling_cohere_asr as hf

from oslo_models.layers.entries import ColumnParallel, Entries, Norm, Plan, Replicated, RowParallel, VocabParallel
from oslo_models.modeling.base import ParallelModel
from oslo_models.models.llama import LlamaParallel
from oslo_models.models.parakeet_ctc import ParakeetEncoder


class CohereAsrParallel(ParallelModel):
    """Sharding plan of the Cohere ASR family, and base class for families with other positions.

    Attributes:
        tables: the modules before the blocks of the decoder, beside the embedding of tokens and its norm.
    """

    tables: ClassVar[Entries] = {"pos_emb": Replicated(), "proj": Replicated()}

    @staticmethod
    def decoder_of(config: Any) -> Any:
        """Return the configuration of the decoder."""
        return config

    @classmethod
    def plan(cls, config: Any) -> Plan:
        encoder, decoder = config.encoder_config, cls.decoder_of(config)
        if encoder.model_type != "parakeet_encoder":
            raise ValueError(f"encoder_config: {encoder.model_type!r} is not supported; use 'parakeet_encoder'")
        attention = LlamaParallel.attention(decoder, LlamaParallel.heads(decoder))
        block = {
            **attention,
            **{name.replace("self_attn", "encoder_attn"): entry for name, entry in attention.items()},
            "mlp.fc1": ColumnParallel(),
            "mlp.fc2": RowParallel(),
            **{f"{name}_layernorm": Norm() for name in ("input", "post_attention")},
            "final_layernorm": Norm(),
        }
        embed = {"embed_tokens": VocabParallel(), **cls.tables, "embedding_layernorm": Norm()}
        own = Plan(embed=embed, blocks={"layers": block}, head={"norm": Norm()})
        return ParakeetEncoder.plan(encoder).under("encoder.") | own.under("decoder.")


class CohereAsrModel(CohereAsrParallel, hf.CohereAsrModel):
    pass


class CohereAsrForConditionalGeneration(CohereAsrParallel, hf.CohereAsrForConditionalGeneration):
    head_plan = {"proj_out": VocabParallel()}
