"""PVT v2: PVT with overlapping patches and a convolution in each MLP."""

from typing import Any

from transformers import PvtV2Config
from transformers.models.pvt_v2 import modeling_pvt_v2 as hf

from oslo_models.layers.entries import ColumnParallel, Entries, LocalAttributes, Norm, Replicated
from oslo_models.modeling.heads import CLASSIFIER
from oslo_models.models.pvt import PvtParallel
from oslo_models.sharding.layout import EvenSplit


class PvtV2Parallel(PvtParallel):
    """Sharding plan of the PVT v2 family."""

    attention = ("attention", "attention.proj")
    reduction = ("attention.spatial_reduction", "attention.layer_norm")
    blocks = "encoder.layers.{}.blocks"

    @classmethod
    def mlp(cls, width: int) -> Entries:
        return {
            **super().mlp(width),
            "mlp.dwconv.dwconv": LocalAttributes({"groups": EvenSplit(width).local_count}),  # one filter per channel
            "mlp.dwconv.dwconv.weight": ColumnParallel(),
            "mlp.dwconv.dwconv.bias": ColumnParallel(),
        }

    @classmethod
    def modules_around(cls, config: Any) -> tuple[Entries, Entries]:
        stages = [f"encoder.layers.{stage}" for stage in range(len(config.depths))]
        norms = {f"{stage}.layer_norm": Norm() for stage in stages}
        return {f"{stage}.patch_embedding": Replicated() for stage in stages}, norms


class PvtV2Model(PvtV2Parallel, hf.PvtV2Model):
    pass


class PvtV2ForImageClassification(PvtV2Parallel, hf.PvtV2ForImageClassification):
    head_plan = CLASSIFIER
