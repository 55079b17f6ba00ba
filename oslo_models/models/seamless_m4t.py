"""SeamlessM4T: encoders of text and of speech, a decoder of text, and units of speech. Convolutions are replicated."""

from types import SimpleNamespace
from typing import Any, ClassVar

from transformers import SeamlessM4TConfig
from transformers.models.seamless_m4t import modeling_seamless_m4t as hf

from oslo_models.layers.entries import ColumnParallel, Entries, Norm, Plan, Replicated, RowParallel, VocabParallel
from oslo_models.modeling.base import ParallelModel
from oslo_models.modeling.blocks import qkv
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.wav2vec2_bert import RELATIVE, conformer_block, half_mlp
from oslo_models.sharding.layout import EvenSplit

TEXT, SPEECH, DECODER, UNITS = "text_encoder", "speech_encoder", "text_decoder", "t2u_model"


class SeamlessM4TParallel(ParallelModel):
    """Sharding plan of the SeamlessM4T family.

    Attributes:
        parts: the encoders and decoders of the model.
    """

    head_plan = LM_HEAD
    parts: ClassVar[tuple[str, ...]] = (TEXT, SPEECH, DECODER, UNITS)

    @classmethod
    def heads(cls, config: Any, stack: str) -> EvenSplit:
        """Return the attention heads of a stack, by the prefix of their number."""
        count = getattr(config, f"{stack}_attention_heads")
        return EvenSplit(count, config.hidden_size // count)

    @classmethod
    def block(cls, config: Any, stack: str) -> Entries:
        """Return the plan of a block of text or of units."""
        block: dict[str, Replicated] = {"ffn.fc1": ColumnParallel(), "ffn.fc2": RowParallel(), "ffn_layer_norm": Norm()}
        for name in ("self_attn", "cross_attention") if stack.endswith("decoder") else ("self_attn",):
            heads = cls.heads(config, stack)
            block |= {**qkv(name, heads), f"{name}.out_proj": RowParallel(heads), f"{name}_layer_norm": Norm()}
        return block

    @classmethod
    def speech_heads(cls, heads: EvenSplit) -> Entries:
        """Return the entries of attributes that count the heads of attention over speech."""
        return {}

    @classmethod
    def speech(cls, config: Any) -> Plan:
        """Return the plan of the encoder of speech."""
        heads = cls.heads(config, "speech_encoder")
        own = SimpleNamespace(num_attention_heads=heads.count, hidden_size=config.hidden_size)
        convolutions = ("residual_layer_norm", "residual_conv", "self_attn_conv")
        adapter = {
            **dict.fromkeys(convolutions, Replicated()),
            "self_attn_layer_norm": Norm(),
            **qkv("self_attn", heads, ("linear_q", "linear_k", "linear_v")),
            "self_attn.linear_out": RowParallel(heads),
            **cls.speech_heads(heads),
            **half_mlp("ffn"),
        }
        around = ("feature_projection", "encoder.layer_norm", "inner_layer_norm")
        between = {
            "intermediate_ffn.intermediate_dense": ColumnParallel(),
            "intermediate_ffn.output_dense": RowParallel(),
        }
        block = {**conformer_block(own), **cls.speech_heads(heads)}
        blocks = {"encoder.layers": block, **({"adapter.layers": adapter} if config.add_adapter else {})}
        return Plan(
            embed={}, blocks=blocks, head={**dict.fromkeys(around, Replicated()), **between}, optional=RELATIVE
        ).under(f"{SPEECH}.")

    @classmethod
    def units(cls, config: Any) -> Plan:
        """Return the plan of the model from text to units of speech."""
        blocks = {f"model.{stack}.layers": cls.block(config, f"t2u_{stack}") for stack in ("encoder", "decoder")}
        return Plan(embed={}, blocks=blocks, head={}).under(f"{UNITS}.")

    @classmethod
    def plan(cls, config: Any) -> Plan:
        texts = [part for part in cls.parts if part in (TEXT, DECODER)]
        plan = Plan(
            embed={"shared": VocabParallel(), **{f"{part}.embed_tokens": VocabParallel() for part in texts}},
            blocks={f"{part}.layers": cls.block(config, part.removeprefix("text_")) for part in texts},
            head={f"{part}.layer_norm": Norm() for part in texts},
        )
        if SPEECH in cls.parts:
            plan |= cls.speech(config)
        if UNITS in cls.parts:  # with the table and the head of units, which are few, and the vocoder
            plan |= cls.units(config) | Plan(embed={}, blocks={}, head=dict.fromkeys((UNITS, "vocoder"), Replicated()))
        return plan.with_rules(single_stage_reason="it has no base model without a head")


class SeamlessM4TModel(SeamlessM4TParallel, hf.SeamlessM4TModel):
    pass


class SeamlessM4TForTextToText(SeamlessM4TParallel, hf.SeamlessM4TForTextToText):
    parts = (TEXT, DECODER)


class SeamlessM4TForSpeechToText(SeamlessM4TParallel, hf.SeamlessM4TForSpeechToText):
    parts = (SPEECH, DECODER)


class SeamlessM4TForTextToSpeech(SeamlessM4TParallel, hf.SeamlessM4TForTextToSpeech):
    parts = (TEXT, DECODER, UNITS)


class SeamlessM4TForSpeechToSpeech(SeamlessM4TParallel, hf.SeamlessM4TForSpeechToSpeech):
    parts = (SPEECH, DECODER, UNITS)
