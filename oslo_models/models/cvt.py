"""CvT: convolutions before the projections of attention. Blocks with few heads have replicated attention."""

from typing import Any

from transformers import CvtConfig
from transformers.models.cvt import modeling_cvt as hf

from oslo_models.layers.entries import ColumnParallel, Entries, LocalAttributes, Norm, Plan, Replicated, RowParallel
from oslo_models.modeling.base import ParallelModel
from oslo_models.modeling.heads import CLASSIFIER
from oslo_models.sharding.layout import EvenSplit


class CvtParallel(ParallelModel):
    """Sharding plan of the CvT family."""

    @staticmethod
    def attention(heads: EvenSplit) -> Entries:
        """Return the plan of an attention layer. The convolutions are replicated on every rank."""
        path, parts = "attention.attention", ("query", "key", "value")
        return {
            path: LocalAttributes({"num_heads": heads.local_count, "embed_dim": heads.local_extent}),
            **{f"{path}.convolution_projection_{part}": Replicated() for part in parts},
            **{f"{path}.projection_{part}": ColumnParallel(heads) for part in parts},
            "attention.output.dense": RowParallel(heads),
        }

    @classmethod
    def plan(cls, config: Any) -> Plan:
        embed: dict[str, Replicated] = {}
        blocks = {}
        for stage, (count, width) in enumerate(zip(config.num_heads, config.embed_dim, strict=False)):
            path, is_replicated = f"encoder.stages.{stage}", 2 * count < max(config.num_heads)
            tokens = ("cls_token",) if config.cls_token[stage] else ()
            embed |= {f"{path}.{name}": Replicated() for name in ("embedding", *tokens)}
            blocks[f"{path}.layers"] = {
                **{f"layernorm_{side}": Norm() for side in ("before", "after")},
                **({"attention": Replicated()} if is_replicated else cls.attention(EvenSplit(count, width // count))),
                **{"intermediate.dense": ColumnParallel(), "output.dense": RowParallel()},
            }
        return Plan(embed=embed, blocks=blocks, head={}).with_rules(
            single_stage_reason="images become smaller between its blocks"
        )


class CvtModel(CvtParallel, hf.CvtModel):
    pass


class CvtForImageClassification(CvtParallel, hf.CvtForImageClassification):
    head_plan = {"layernorm": Norm(), **CLASSIFIER}
