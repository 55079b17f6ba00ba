"""Voxtral Realtime: a causal encoder of sounds, whose outputs are added to tokens, and Mistral with scaled MLPs."""

from dataclasses import replace
from typing import Any

from transformers import VoxtralRealtimeConfig, VoxtralRealtimeEncoderConfig
from transformers.models.voxtral_realtime import modeling_voxtral_realtime as hf

from oslo_models.layers.entries import Entries, Plan, Replicated
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.llama import LlamaParallel
from oslo_models.models.voxtral import VoxtralParallel
from oslo_models.sharding.layout import GroupedHeads


class VoxtralRealtimeEncoder(LlamaParallel, hf.VoxtralRealtimeEncoder):
    norms = ("self_attn_layer_norm", "final_layer_norm")

    @classmethod
    def plan(cls, config: Any) -> Plan:
        return replace(super().plan(config), embed={"embedder": Replicated()}).with_rules(
            input_positions={"layers": lambda batch: (len(x := batch["input_features"]), x.shape[-1] // 2)}
        )


class VoxtralRealtimeTextParallel(LlamaParallel):
    """Sharding plan of the decoder."""

    @classmethod
    def attention(cls, config: Any, heads: GroupedHeads) -> Entries:
        delays = {f"ada_rms_norm.linear{number}": Replicated() for number in (1, 2)}
        return {**super().attention(config, heads), **delays}


class VoxtralRealtimeParallel(VoxtralParallel):
    """Sharding plan of the Voxtral Realtime family."""

    classes = {"language_model": VoxtralRealtimeTextParallel, "audio_tower": VoxtralRealtimeEncoder}

    @classmethod
    def plan(cls, config: Any) -> Plan:
        return super().plan(config).with_rules(single_stage_reason="each of its tokens reads a part of the sound")


class VoxtralRealtimeModel(VoxtralRealtimeParallel, hf.VoxtralRealtimeModel):
    pass


class VoxtralRealtimeForConditionalGeneration(VoxtralRealtimeParallel, hf.VoxtralRealtimeForConditionalGeneration):
    head_plan = LM_HEAD
