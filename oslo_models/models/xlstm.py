"""xLSTM: recurrences with a matrix as the memory of each head (mLSTM) in place of attention."""

from __future__ import annotations

from typing import Any

from transformers import xLSTMConfig
from transformers.models.xlstm import modeling_xlstm as hf

from oslo_models.layers.entries import ColumnParallel, LocalAttributes, Norm, Plan, RowParallel, VocabParallel
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.rwkv import RecurrentParallel, RecurrentState
from oslo_models.sharding.layout import EvenSplit


class xLSTMParallel(RecurrentParallel):  # noqa: N801  as transformers writes it
    """Sharding plan of the xLSTM family, with ``weight_mode="single"``: transformers cannot initialise the other mode.

    In a cache that ``generate`` returns, each rank has written its local heads only.
    """

    @classmethod
    def plan(cls, config: Any) -> Plan:
        heads = EvenSplit(config.num_heads)
        keys = EvenSplit(config.num_heads, int(config.hidden_size * config.qk_dim_factor) // config.num_heads)
        values = EvenSplit(config.num_heads, int(config.hidden_size * config.v_dim_factor) // config.num_heads)
        local = {"config.num_heads": heads.local_count, "v_dim": values.local_extent}
        projections = {"q": keys, "k": keys, "v": values, "ogate_preact": values}
        projections |= {"igate_preact": heads, "fgate_preact": heads}
        block = {
            "norm_mlstm": Norm(),
            "mlstm_layer": RecurrentState(local, heads=heads),
            **{f"mlstm_layer.{name}": ColumnParallel(split) for name, split in projections.items()},
            "mlstm_layer.multihead_norm": LocalAttributes({"num_heads": heads.local_count}),
            **{f"mlstm_layer.multihead_norm.{name}": ColumnParallel(values) for name in ("weight", "bias")},
            "mlstm_layer.out_proj": RowParallel(values),
            "norm_ffn": Norm(),
            "ffn.proj_up_gate": ColumnParallel(),
            "ffn.proj_up": ColumnParallel(),
            "ffn.proj_down": RowParallel(),
        }
        return Plan(
            embed={"embeddings": VocabParallel()},
            blocks={"blocks": block},
            head={"out_norm": Norm()},
            optional=("multihead_norm.bias",),
        )

    def _initialized_whole(self) -> list[str]:
        """Add the forget gates, with biases computed from the number of heads, and MLP outputs, scaled by the width."""
        computed = [name for name, _ in self.named_modules() if name.endswith(("fgate_preact", "proj_down"))]
        return [*super()._initialized_whole(), *computed]


class xLSTMModel(xLSTMParallel, hf.xLSTMModel):  # noqa: N801
    pass


class xLSTMForCausalLM(xLSTMParallel, hf.xLSTMForCausalLM):  # noqa: N801
    head_plan = LM_HEAD
