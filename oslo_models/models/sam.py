"""SAM: an encoder of windows of patches, and blocks that read prompts. Encoders of prompts and heads are replicated."""

from collections.abc import Collection, Mapping
from typing import Any

from transformers import SamConfig, SamMaskDecoderConfig, SamPromptEncoderConfig, SamVisionConfig
from transformers.models.sam import modeling_sam as hf

from oslo_models.layers.entries import ColumnParallel, Entries, LocalAttributes, Norm, Plan, Replicated, RowParallel
from oslo_models.modeling.base import ParallelModel
from oslo_models.modeling.blocks import qkv
from oslo_models.models.got_ocr2 import WindowsParallel
from oslo_models.sharding.layout import EvenSplit

DECODER = "mask_decoder.transformer"


class SamParallel(ParallelModel):
    """Sharding plan of the SAM family."""

    @staticmethod
    def attention(name: str, config: Any, rate: int) -> Entries:
        """Return the entries of an attention whose heads are narrower than the hidden states by ``rate``."""
        heads = EvenSplit(config.num_attention_heads, config.hidden_size // rate // config.num_attention_heads)
        local = LocalAttributes({"num_attention_heads": heads.local_count})
        return {name: local, **qkv(name, heads), f"{name}.out_proj": RowParallel(heads)}

    @classmethod
    def decoder(cls, config: Any) -> Plan:
        """Return the plan of the decoder of masks, with the encoder of prompts."""
        rate = config.attention_downsample_rate
        block = {
            **cls.attention("self_attn", config, 1),
            **cls.attention("cross_attn_token_to_image", config, rate),
            **cls.attention("cross_attn_image_to_token", config, rate),
            "mlp.lin1": ColumnParallel(),
            "mlp.lin2": RowParallel(),
            **{f"layer_norm{number}": Norm() for number in (1, 2, 3, 4)},
        }
        final = cls.attention(f"{DECODER}.final_attn_token_to_image", config, rate)
        prompts = ("shared_image_embedding", "prompt_encoder", "mask_decoder")
        return Plan(
            embed={}, blocks={f"{DECODER}.layers": block}, head={**dict.fromkeys(prompts, Replicated()), **final}
        )

    @classmethod
    def plan(cls, config: Any) -> Plan:
        vision = WindowsParallel.plan(getattr(config, "vision_config", config)).under("vision_encoder.")
        return vision | cls.decoder(config.mask_decoder_config) if hasattr(config, "mask_decoder_config") else vision

    @classmethod
    def joined_attentions(cls, config: Any) -> Mapping[str, int]:
        heads = getattr(config, "vision_config", config).num_attention_heads
        return {"attentions": heads, "vision_attentions": heads}

    @classmethod
    def replicated_attentions(cls, config: Any) -> Collection[str]:
        return ("mask_decoder_attentions",)


class SamModel(SamParallel, hf.SamModel):
    pass


class SamVisionModel(SamParallel, hf.SamVisionModel):
    pass
