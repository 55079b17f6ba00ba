"""Parakeet CTC: Fast Conformer blocks on spectrograms. Convolutions and batch norms are replicated."""

from typing import Any, ClassVar

from transformers import ParakeetCTCConfig, ParakeetEncoderConfig
from transformers.models.parakeet import modeling_parakeet as hf

from oslo_models.layers.entries import (
    ColumnParallel,
    Entries,
    LocalAttributes,
    Norm,
    Plan,
    Replicated,
    RowParallel,
)
from oslo_models.modeling.base import ParallelModel
from oslo_models.modeling.blocks import qkv
from oslo_models.sharding.layout import EvenSplit


class ParakeetParallel(ParallelModel):
    """Sharding plan of the Parakeet family, and base class for families with other positions.

    Attributes:
        subsampler_name: the name of the module before the blocks.
        head: the modules of the encoder beside its blocks and the subsampling.
    """

    subsampler_name: ClassVar[str] = "subsampling"
    head: ClassVar[Entries] = {}

    @classmethod
    def positions(cls, heads: EvenSplit) -> Entries:
        """Return the entries of relative positions in an attention layer."""
        each = ColumnParallel(EvenSplit(heads.count))
        return {
            "self_attn": LocalAttributes({"config.num_attention_heads": heads.local_count}),
            "self_attn.relative_k_proj": ColumnParallel(heads),
            "self_attn.bias_u": each,
            "self_attn.bias_v": each,
        }

    @classmethod
    def plan(cls, config: Any) -> Plan:
        encoder = getattr(config, "encoder_config", config)
        count = encoder.num_attention_heads
        heads = EvenSplit(count, getattr(encoder, "head_dim", None) or encoder.hidden_size // count)
        block = {
            **qkv("self_attn", heads),
            "self_attn.o_proj": RowParallel(heads),
            **cls.positions(heads),
            "conv": Replicated(),
            **{f"feed_forward{number}.linear1": ColumnParallel() for number in (1, 2)},
            **{f"feed_forward{number}.linear2": RowParallel() for number in (1, 2)},
            **{f"norm_{name}": Norm() for name in ("feed_forward1", "self_att", "conv", "feed_forward2", "out")},
        }
        plan = Plan(embed={cls.subsampler_name: Replicated()}, blocks={"layers": block}, head=cls.head).with_rules(
            single_stage_reason="batch norms of its blocks take statistics over all rows of a batch"
        )
        return plan if encoder is config else plan.under("encoder.")


class ParakeetEncoder(ParakeetParallel, hf.ParakeetEncoder):
    pass


class ParakeetForCTC(ParakeetParallel, hf.ParakeetForCTC):
    head_plan = {"ctc_head": Replicated()}
