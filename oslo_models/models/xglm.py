"""XGLM: BART's decoder by itself, with positions of sines."""

from typing import Any

from transformers.models.xglm import modeling_xglm as hf

from oslo_models.layout import Units
from oslo_models.models.base import ParallelModel
from oslo_models.models.family import DECODER, family
from oslo_models.plan import Column, Norm, Plan, Replicated, Row, Vocab


class XGLMParallel(ParallelModel):
    """How every model of the XGLM family divides."""

    @classmethod
    def plan(cls, config: Any) -> Plan:
        heads = Units(config.attention_heads, config.d_model // config.attention_heads)
        block = {"fc1": Column(), "fc2": Row(), "final_layer_norm": Norm()}
        for attention in ("self_attn", "encoder_attn") if config.add_cross_attention else ("self_attn",):
            block |= {f"{attention}.{name}_proj": Column(heads) for name in "qkv"}
            block |= {f"{attention}.out_proj": Row(heads), f"{attention}_layer_norm": Norm()}
        numbers = {"num_heads": heads.local_count, "embed_dim": heads.local_extent}
        return Plan(
            embed={"embed_tokens": Vocab(), "embed_positions": Replicated()},
            blocks={"layers": block},
            head={"layer_norm": Norm()},
            local={f"{module}.{name}": n for module in ("self_attn", "encoder_attn") for name, n in numbers.items()},
            neutral={"dropout": 0.0},
        )


globals().update(family(XGLMParallel, hf, DECODER))
