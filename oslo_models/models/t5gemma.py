"""T5Gemma: an encoder and a decoder of Gemma 2's blocks, each with its own sizes; or the encoder alone."""

from typing import Any

from transformers import T5GemmaConfig
from transformers.models.t5gemma import modeling_t5gemma as hf

from oslo_models.layers.entries import Entries, Norm, Plan, VocabParallel
from oslo_models.modeling.heads import SCORE
from oslo_models.models.llama import LlamaParallel


class UnscaledWidth(int):
    """Hidden size with 1 as its root. transformers scales embedded tokens by this root."""

    def __pow__(self, *_: Any) -> Any:
        return 1.0


class T5GemmaParallel(LlamaParallel):
    """Sharding plan of the T5Gemma family."""

    @classmethod
    def block(cls, config: Any, *attentions: str) -> Entries:
        """Return the plan entries of a block with these attention layers."""
        own = cls.attention(config, cls.heads(config))
        layers = {key.replace("self_attn", name): entry for name in attentions for key, entry in own.items()}
        parts = (*attentions, "feedforward")
        return {**layers, **cls.mlp, **{f"{at}_{part}_layernorm": Norm() for part in parts for at in ("pre", "post")}}

    @classmethod
    def plan(cls, config: Any) -> Plan:
        stacks = {"encoder": ("self_attn",), "decoder": ("self_attn", "cross_attn")}
        parts = {name: getattr(config, name) for name in list(stacks)[: 1 + config.is_encoder_decoder]}
        return Plan(
            embed={f"{name}.embed_tokens": VocabParallel() for name in parts},
            blocks={f"{name}.layers": cls.block(part, *stacks[name]) for name, part in parts.items()},
            head={f"{name}.norm": Norm() for name in parts},
        ).with_rules(
            embedding_dropouts=[f"{name}.dropout" for name in parts],  # also applied after the final norm
            disabled_after_first_stage={
                f"{name}.config.hidden_size": UnscaledWidth(part.hidden_size) for name, part in parts.items()
            },
        )


class T5GemmaModel(T5GemmaParallel, hf.T5GemmaModel):
    pass


class T5GemmaEncoderModel(T5GemmaParallel, hf.T5GemmaEncoderModel):
    pass


class T5GemmaForConditionalGeneration(T5GemmaParallel, hf.T5GemmaForConditionalGeneration):
    head_plan = {"lm_head.out_proj": VocabParallel()}


class T5GemmaForSequenceClassification(T5GemmaParallel, hf.T5GemmaForSequenceClassification):
    head_plan = SCORE


class T5GemmaForTokenClassification(T5GemmaParallel, hf.T5GemmaForTokenClassification):
    head_plan = SCORE
