"""Gemma 2: Llama with four norms per block, soft caps on scores and logits, sliding windows in every other block."""

from typing import ClassVar

from transformers import Gemma2Config
from transformers.models.gemma2 import modeling_gemma2 as hf

from oslo_models.modeling.heads import LM_HEAD, SCORE
from oslo_models.models.llama import LlamaParallel


class Gemma2Parallel(LlamaParallel):
    """Sharding plan of the Gemma 2 family."""

    norms: ClassVar[tuple[str, ...]] = (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    )


class Gemma2Model(Gemma2Parallel, hf.Gemma2Model):
    pass


class Gemma2ForCausalLM(Gemma2Parallel, hf.Gemma2ForCausalLM):
    head_plan = LM_HEAD


class Gemma2ForSequenceClassification(Gemma2Parallel, hf.Gemma2ForSequenceClassification):
    head_plan = SCORE


class Gemma2ForTokenClassification(Gemma2Parallel, hf.Gemma2ForTokenClassification):
    head_plan = SCORE
