"""Qwen3.5, its text model: Qwen3-Next with an MLP in place of experts, and separate projections of linear attention."""

from typing import ClassVar

from transformers import Qwen3_5TextConfig
from transformers.models.qwen3_5 import modeling_qwen3_5 as hf

from oslo_models.layers.entries import ColumnParallel, Entries
from oslo_models.modeling.heads import LM_HEAD, SCORE
from oslo_models.models.llama import LlamaParallel
from oslo_models.models.qwen3_next import Qwen3NextParallel
from oslo_models.sharding.layout import EvenSplit


class Qwen3_5Parallel(Qwen3NextParallel):
    """Sharding plan of the Qwen3.5 family."""

    mlp = {**LlamaParallel.mlp}
    optional: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def projections(cls, key: EvenSplit, value: EvenSplit, gate: EvenSplit) -> Entries:
        return {
            "linear_attn.in_proj_qkv": ColumnParallel(key, key, value),
            "linear_attn.in_proj_z": ColumnParallel(value),
            "linear_attn.in_proj_b": ColumnParallel(gate),
            "linear_attn.in_proj_a": ColumnParallel(gate),
        }


class Qwen3_5TextModel(Qwen3_5Parallel, hf.Qwen3_5TextModel):
    pass


class Qwen3_5ForCausalLM(Qwen3_5Parallel, hf.Qwen3_5ForCausalLM):
    head_plan = LM_HEAD


class Qwen3_5TextForSequenceClassification(Qwen3_5Parallel, hf.Qwen3_5TextForSequenceClassification):
    head_plan = SCORE
