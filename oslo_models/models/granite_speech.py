"""Granite Speech: Conformer blocks on windows of frames, a Q-Former and Granite. The Q-Former is replicated."""

from typing import Any

from transformers import GraniteSpeechConfig, GraniteSpeechEncoderConfig
from transformers.models.granite_speech import modeling_granite_speech as hf

from oslo_models.layers.entries import (
    ColumnParallel,
    LocalAttributes,
    Norm,
    Plan,
    Replicated,
    RowParallel,
    SharedOutput,
)
from oslo_models.modeling.base import ParallelModel
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.llava import LlavaParallel
from oslo_models.sharding.layout import EvenSplit


class GraniteSpeechEncoderParallel(ParallelModel):
    """Sharding plan of the encoders of the family. Convolutions and batch norms are replicated on every rank."""

    @classmethod
    def plan(cls, config: Any) -> Plan:
        heads = EvenSplit(config.num_heads, config.dim_head)
        mlp = {"pre_norm": Norm(), "up_proj": ColumnParallel(), "down_proj": RowParallel()}
        block = {
            **{f"{name}.{each}": entry for name in ("ff1", "ff2") for each, entry in mlp.items()},
            "attn": LocalAttributes({"num_heads": heads.local_count}),
            "attn.pre_norm": Norm(),
            "attn.to_q": ColumnParallel(heads),
            "attn.to_kv": ColumnParallel(heads, heads),
            "attn.to_out": RowParallel(heads),
            "attn.rel_pos_emb": SharedOutput(),
            "conv": Replicated(),
            "post_norm": Norm(),
        }
        prediction = {"out": Replicated(), "out_mid": Replicated()}
        return Plan(embed={"input_linear": Replicated()}, blocks={"layers": block}, head=prediction).with_rules(
            single_stage_reason="it adds its prediction to the hidden states between two of its blocks"
        )


class GraniteSpeechCTCEncoder(GraniteSpeechEncoderParallel, hf.GraniteSpeechCTCEncoder):
    pass


class GraniteSpeechParallel(LlavaParallel):
    """Sharding plan of the Granite Speech family."""

    loss_is_mean = False  # batch norms of the encoder take statistics over the sounds of all rows
    towers = {"encoder": "encoder_config"}
    projectors = {"projector": Replicated()}
    classes = {"encoder": GraniteSpeechCTCEncoder}


class GraniteSpeechModel(GraniteSpeechParallel, hf.GraniteSpeechModel):
    pass


class GraniteSpeechForConditionalGeneration(GraniteSpeechParallel, hf.GraniteSpeechForConditionalGeneration):
    head_plan = LM_HEAD
