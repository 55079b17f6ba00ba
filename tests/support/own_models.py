"""An architecture defined outside of this package, like in user code, and plans for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput

from oslo_models import ParallelModel
from oslo_models.sharding.layout import EvenSplit
from oslo_models.sharding.plan import (
    ColumnParallel,
    LocalAttributes,
    Norm,
    Plan,
    Replicated,
    RowParallel,
    VocabParallel,
)


class NoteConfig(PreTrainedConfig):
    model_type = "note"

    def __init__(
        self,
        vocab_size: int = 101,
        hidden_size: int = 24,
        num_layers: int = 2,
        num_heads: int = 6,
        length: int = 32,
        **kwargs: Any,
    ) -> None:
        self.vocab_size, self.hidden_size, self.num_layers = vocab_size, hidden_size, num_layers
        self.num_heads, self.length = num_heads, length
        self.num_hidden_layers = num_layers
        super().__init__(**kwargs)


class NoteAttention(nn.Module):
    def __init__(self, config: NoteConfig) -> None:
        super().__init__()
        self.heads, width = config.num_heads, config.hidden_size
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x_BLD: Tensor) -> Tensor:
        query, key, value = (
            projection(x_BLD).unflatten(-1, (self.heads, -1)).transpose(1, 2) for projection in (self.q, self.k, self.v)
        )
        return self.out(F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2))


class NoteBlock(nn.Module):
    def __init__(self, config: NoteConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = NoteAttention(config)
        self.up, self.down = nn.Linear(width, 3 * width + 1), nn.Linear(3 * width + 1, width)

    def forward(self, x_BLD: Tensor) -> Tensor:
        x_BLD = x_BLD + self.attention(self.before(x_BLD))
        return x_BLD + self.down(F.gelu(self.up(self.between(x_BLD))))


class NotePreTrainedModel(PreTrainedModel):
    config_class = NoteConfig
    base_model_prefix = "model"


class NoteModel(NotePreTrainedModel):
    def __init__(self, config: NoteConfig) -> None:
        super().__init__(config)
        self.tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.positions = nn.Embedding(config.length, config.hidden_size)
        self.blocks = nn.ModuleList(NoteBlock(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.hidden_size)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.tokens

    def forward(self, input_ids: Tensor, **kwargs: Any) -> BaseModelOutput:
        x_BLD = self.tokens(input_ids) + self.positions(torch.arange(input_ids.shape[1], device=input_ids.device))
        for block in self.blocks:
            x_BLD = block(x_BLD)
        return BaseModelOutput(last_hidden_state=self.norm(x_BLD))


class NoteForCausalLM(NotePreTrainedModel, GenerationMixin):
    _tied_weights_keys = {"lm_head.weight": "model.tokens.weight"}

    def __init__(self, config: NoteConfig) -> None:
        super().__init__(config)
        self.model = NoteModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def prepare_inputs_for_generation(self, input_ids: Tensor, **kwargs: Any) -> dict[str, Any]:
        return {"input_ids": input_ids}

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **kwargs: Any) -> CausalLMOutput:
        logits = self.lm_head(self.model(input_ids).last_hidden_state)
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return CausalLMOutput(loss=loss, logits=logits)


def plan_of_base(config: NoteConfig) -> Plan:
    """Return the plan with the names of the base model."""
    heads = EvenSplit(config.num_heads, config.hidden_size // config.num_heads)
    return Plan(
        embed={"tokens": VocabParallel(), "positions": Replicated()},
        blocks={
            "blocks": {
                "before": Norm(),
                "attention": LocalAttributes({"heads": heads.local_count}),
                **{f"attention.{name}": ColumnParallel(heads) for name in ("q", "k", "v")},
                "attention.out": RowParallel(heads),
                "between": Norm(),
                "up": ColumnParallel(),
                "down": RowParallel(),
            }
        },
        head={"norm": Norm()},
    )


def plan_of_lm(config: NoteConfig) -> Plan:
    """Return the plan with the names of the language model."""
    plan = plan_of_base(config).under("model.")
    return replace(plan, head={**plan.head, "lm_head": VocabParallel()})


class NoteParallel(ParallelModel):
    @classmethod
    def plan(cls, config: Any) -> Plan:
        return plan_of_base(config)


class ParallelNoteModel(NoteParallel, NoteModel):
    pass


class ParallelNoteForCausalLM(NoteParallel, NoteForCausalLM):
    head_plan = {"lm_head": VocabParallel()}


class FlatNoteForCausalLM(NoteModel, GenerationMixin):
    """A language model without a base model inside."""

    def __init__(self, config: NoteConfig) -> None:
        super().__init__(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **kwargs: Any) -> CausalLMOutput:
        logits = self.lm_head(super().forward(input_ids).last_hidden_state)
        loss = None if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return CausalLMOutput(loss=loss, logits=logits)
