"""RWKV-4: linear recurrences over channels in place of attention, and an MLP with a replicated gate."""

from typing import Any

from torch import nn
from transformers import RwkvConfig
from transformers.models.rwkv import modeling_rwkv as hf
from transformers.models.rwkv.modeling_rwkv import RwkvPreTrainedModel

from oslo_models.modeling.base import ParallelModel
from oslo_models.sharding.layout import EvenSplit
from oslo_models.sharding.plan import ColumnParallel, Norm, Plan, RecurrentState, Replicated, RowParallel, VocabParallel


class RwkvParallel(ParallelModel):
    """Sharding plan of the RWKV family.

    In a state that the model returns, each rank has written its local channels only. Outside of training, transformers
    divides some weights by powers of two (``rescale_every``), until the next forward pass in training mode. Save the
    model before evaluation.
    """

    @classmethod
    def plan(cls, config: Any) -> Plan:
        mixes = [f"attention.time_mix_{name}" for name in ("key", "value", "receptance")]
        mixes += [f"feed_forward.time_mix_{name}" for name in ("key", "receptance")]
        of_channels = ("time_decay", "time_first", "key", "value", "receptance")
        block = {
            "pre_ln": Norm(),
            "ln1": Norm(),
            "attention": RecurrentState(heads=EvenSplit(config.attention_hidden_size), replicated=2),
            **{f"attention.{name}": ColumnParallel() for name in of_channels},
            "attention.output": RowParallel(),
            "ln2": Norm(),
            **dict.fromkeys(mixes, Replicated()),
            "feed_forward.key": ColumnParallel(),
            "feed_forward.receptance": Replicated(),
            "feed_forward.value": RowParallel(),
        }
        return Plan(
            embed={"embeddings": VocabParallel()},
            blocks={"blocks": block},
            head={"ln_out": Norm()},
            optional=("pre_ln",),  # only the first block has it
            single_stage_reason="its blocks do what their numbers in the full model say, and share a state",
        )

    def _initialized_whole(self) -> list[str]:
        """Initialize every matrix in full, because its rows are made orthogonal."""
        matrices = [name for name, module in self.named_modules() if isinstance(module, (nn.Linear, nn.Embedding))]
        return [*super()._initialized_whole(), *matrices]


class RwkvModel(RwkvParallel, hf.RwkvModel):
    pass


class RwkvForCausalLM(RwkvParallel, hf.RwkvForCausalLM):
    head_plan = {"head": VocabParallel()}
