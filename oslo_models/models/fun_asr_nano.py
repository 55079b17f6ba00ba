"""Fun-ASR-Nano: an encoder of sounds with convolutions over values (SAN-M), an adaptor and Qwen3."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import FunAsrNanoConfig, FunAsrNanoEncoderConfig
from transformers.models.fun_asr_nano import modeling_fun_asr_nano as hf

from oslo_models.distributed.autograd_collectives import gather_from
from oslo_models.layers.entries import ColumnParallel, Norm, Plan, Replicated, RowParallel
from oslo_models.layers.kinds import ShardedModule, ShardingContext, shards
from oslo_models.modeling.base import ParallelModel
from oslo_models.modeling.blocks import heads_of, qkv
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.voxtral import VoxtralParallel
from oslo_models.models.whisper import WhisperEncoderParallel
from oslo_models.sharding.layout import EvenSplit


@dataclass(frozen=True)
class GatheredValues(Replicated):
    """Replicated module that reads the values of all heads.

    Args:
        heads: the heads.
    """

    heads: EvenSplit

    def covers_submodules(self) -> bool:
        return True


@shards(GatheredValues)
class GatheredValuesLayer(ShardedModule):
    """Module behind a gather of the values of all heads. Its output is added to hidden states."""

    heads: EvenSplit

    def configure(self, entry: GatheredValues, context: ShardingContext) -> None:
        super().configure(entry, context)
        self.heads = entry.heads

    def forward(self, values: Tensor, *args: Any, **kwargs: Any) -> Any:
        sizes = [self.heads.local_extent(self.tp.size, rank) for rank in range(self.tp.size)]
        return super().forward(gather_from(self.tp, values, values.dim() - 1, sizes), *args, **kwargs)


class FunAsrNanoEncoder(ParallelModel, hf.FunAsrNanoEncoder):
    @classmethod
    def plan(cls, config: Any) -> Plan:
        heads = heads_of(config)
        block = {
            **qkv("self_attn", heads),
            "self_attn.o_proj": RowParallel(heads),
            "self_attn.fsmn": GatheredValues(heads),
            "mlp.fc1": ColumnParallel(),
            "mlp.fc2": RowParallel(),
            **{f"{name}_layernorm": Norm() for name in ("input", "post_attention")},
            "final_layernorm": Norm(),
        }
        return Plan(embed={}, blocks={"layers": block}, head={}, optional=("final_layernorm",)).with_rules(
            single_stage_reason=WhisperEncoderParallel.reason
        )


class FunAsrNanoModel(VoxtralParallel, hf.FunAsrNanoModel):
    pass


class FunAsrNanoForConditionalGeneration(VoxtralParallel, hf.FunAsrNanoForConditionalGeneration):
    head_plan = LM_HEAD
