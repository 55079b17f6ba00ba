"""OLMo 2: Llama with post-layer norms, and query and key norms over all heads."""

from typing import Any, ClassVar

from transformers import Olmo2Config
from transformers.models.olmo2 import modeling_olmo2 as hf

from oslo_models.layers.entries import Entries, WidthNorm
from oslo_models.modeling.heads import LM_HEAD, SCORE
from oslo_models.models.llama import LlamaParallel
from oslo_models.sharding.layout import GroupedHeads


class Olmo2Parallel(LlamaParallel):
    """Sharding plan of the OLMo 2 family."""

    norms: ClassVar[tuple[str, ...]] = ("post_attention_layernorm", "post_feedforward_layernorm")

    @classmethod
    def attention(cls, config: Any, heads: GroupedHeads) -> Entries:
        norms = {"self_attn.q_norm": WidthNorm(heads.query), "self_attn.k_norm": WidthNorm(heads.key_value)}
        return {**super().attention(config, heads), **norms}


class Olmo2Model(Olmo2Parallel, hf.Olmo2Model):
    pass


class Olmo2ForCausalLM(Olmo2Parallel, hf.Olmo2ForCausalLM):
    head_plan = LM_HEAD


class Olmo2ForSequenceClassification(Olmo2Parallel, hf.Olmo2ForSequenceClassification):
    head_plan = SCORE
