"""GPT, the first: GPT-2 with norms after the residuals and without a cache."""

from typing import Any

from transformers import initialization as init
from transformers.models.openai import modeling_openai as hf
from transformers.pytorch_utils import Conv1D

from oslo_models.layout import Units
from oslo_models.models.base import ParallelModel
from oslo_models.models.family import family
from oslo_models.plan import Column, Entries, Norm, Plan, Replicated, Row, Vocab

HEADS: dict[str, Entries] = {
    "Model": {},
    "LMHeadModel": {"lm_head": Vocab()},
    "DoubleHeadsModel": {"lm_head": Vocab(), "multiple_choice_head.summary": Replicated()},
    "ForSequenceClassification": {"score": Replicated()},
}


class OpenAIGPTParallel(ParallelModel):
    """How every model of the GPT family divides."""

    def initialize_constructed(self) -> None:
        for module in self.modules():
            if isinstance(module, Conv1D):
                init.normal_(module.weight, std=0.02)
                init.zeros_(module.bias)

    @classmethod
    def plan(cls, config: Any) -> Plan:
        heads = Units(config.n_head, config.n_embd // config.n_head)
        block = {
            "attn.c_attn": Column(heads, heads, heads, transposed=True),
            "attn.c_proj": Row(heads, transposed=True),
            "ln_1": Norm(),
            "mlp.c_fc": Column(transposed=True),
            "mlp.c_proj": Row(transposed=True),
            "ln_2": Norm(),
        }
        return Plan(
            embed={"tokens_embed": Vocab(), "positions_embed": Replicated()},
            blocks={"h": block},
            head={},
            local={"attn.split_size": heads.local_extent, "attn.n_head": heads.local_count},
            dropout=("drop",),
        )


globals().update(family(OpenAIGPTParallel, hf, HEADS))
