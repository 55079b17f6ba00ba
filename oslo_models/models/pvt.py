"""PVT: attention to shortened sequences of patches. Blocks with few heads have replicated attention."""

from typing import Any, ClassVar

from transformers import PvtConfig
from transformers.models.pvt import modeling_pvt as hf

from oslo_models.layers.entries import ColumnParallel, Entries, LocalAttributes, Norm, Plan, Replicated, RowParallel
from oslo_models.modeling.base import ParallelModel
from oslo_models.modeling.blocks import QUERY_KEY_VALUE, qkv
from oslo_models.modeling.heads import CLASSIFIER
from oslo_models.sharding.layout import EvenSplit


class PvtParallel(ParallelModel):
    """Sharding plan of the PVT family.

    Attributes:
        attention: the attention, and its output projection.
        reduction: the modules that shorten the sequence of keys.
        blocks: the blocks of a stage, by its number.
    """

    attention: ClassVar[tuple[str, str]] = ("attention.self", "attention.output.dense")
    reduction: ClassVar[tuple[str, ...]] = ("attention.self.sequence_reduction", "attention.self.layer_norm")
    blocks: ClassVar[str] = "encoder.block.{}"

    @classmethod
    def mlp(cls, width: int) -> Entries:
        """Return the plan of an MLP of this width."""
        return {"mlp.dense1": ColumnParallel(), "mlp.dense2": RowParallel()}

    @classmethod
    def modules_around(cls, config: Any) -> tuple[Entries, Entries]:
        """Return the plans of the modules before and after the blocks."""
        return {"encoder.patch_embeddings": Replicated()}, {"encoder.layer_norm": Norm()}

    @classmethod
    def plan(cls, config: Any) -> Plan:
        blocks, (path, output) = {}, cls.attention
        for stage, (count, width) in enumerate(zip(config.num_attention_heads, config.hidden_sizes, strict=False)):
            heads = EvenSplit(count, width // count)
            local = {"num_attention_heads": heads.local_count, "all_head_size": heads.local_extent}
            attention: Entries = {
                path: LocalAttributes(local, width=heads),
                **qkv(path, heads, QUERY_KEY_VALUE),
                **dict.fromkeys(cls.reduction, Replicated()),
                output: RowParallel(heads),
            }
            if 2 * count < max(config.num_attention_heads):
                attention = {"attention": Replicated()}
            norms = {"layer_norm_1": Norm(), "layer_norm_2": Norm()}
            blocks[cls.blocks.format(stage)] = {**norms, **attention, **cls.mlp(int(width * config.mlp_ratios[stage]))}
        embed, head = cls.modules_around(config)
        return Plan(embed=embed, blocks=blocks, head=head, optional=cls.reduction).with_rules(
            single_stage_reason="images become smaller between its blocks"
        )


class PvtModel(PvtParallel, hf.PvtModel):
    pass


class PvtForImageClassification(PvtParallel, hf.PvtForImageClassification):
    head_plan = CLASSIFIER
