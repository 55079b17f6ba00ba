"""GPT, the first: GPT-2 with post-layer norms and without a cache."""

from typing import Any

from transformers import OpenAIGPTConfig
from transformers import initialization as init
from transformers.models.openai import modeling_openai as hf
from transformers.pytorch_utils import Conv1D

from oslo_models.layers.entries import (
    ColumnParallel,
    LocalAttributes,
    Norm,
    Plan,
    Replicated,
    RowParallel,
    VocabParallel,
)
from oslo_models.modeling.base import ParallelModel
from oslo_models.modeling.blocks import heads_of
from oslo_models.modeling.heads import LM_HEAD, SCORE


class OpenAIGPTParallel(ParallelModel):
    """Sharding plan of the GPT family."""

    def _initialize_constructed(self) -> None:
        for module in self.modules():
            if isinstance(module, Conv1D):
                init.normal_(module.weight, std=0.02)
                init.zeros_(module.bias)

    @classmethod
    def plan(cls, config: Any) -> Plan:
        heads = heads_of(config)
        block = {
            "attn": LocalAttributes({"split_size": heads.local_extent, "n_head": heads.local_count}),
            "attn.c_attn": ColumnParallel(heads, heads, heads, transposed=True),
            "attn.c_proj": RowParallel(heads, transposed=True),
            "ln_1": Norm(),
            "mlp.c_fc": ColumnParallel(transposed=True),
            "mlp.c_proj": RowParallel(transposed=True),
            "ln_2": Norm(),
        }
        return Plan(
            embed={"tokens_embed": VocabParallel(), "positions_embed": Replicated()},
            blocks={"h": block},
            head={},
        ).with_rules(embedding_dropouts=("drop",))


class OpenAIGPTModel(OpenAIGPTParallel, hf.OpenAIGPTModel):
    pass


class OpenAIGPTLMHeadModel(OpenAIGPTParallel, hf.OpenAIGPTLMHeadModel):
    head_plan = LM_HEAD


class OpenAIGPTDoubleHeadsModel(OpenAIGPTParallel, hf.OpenAIGPTDoubleHeadsModel):
    head_plan = {"lm_head": VocabParallel(), "multiple_choice_head.summary": Replicated()}


class OpenAIGPTForSequenceClassification(OpenAIGPTParallel, hf.OpenAIGPTForSequenceClassification):
    head_plan = SCORE
