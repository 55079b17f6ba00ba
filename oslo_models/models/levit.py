"""LeViT: attention with biases of positions, and batch norms behind linear layers. Its first convolutions are whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import LevitConfig
from transformers import initialization as init
from transformers.models.levit import modeling_levit as hf

from oslo_models.layers.entries import (
    ColumnParallel,
    Entries,
    LocalAttributes,
    LocalChannels,
    Plan,
    Replicated,
    RowParallel,
)
from oslo_models.modeling.base import ParallelModel
from oslo_models.modeling.heads import CLASSIFIER
from oslo_models.models.resnet import SMALLER
from oslo_models.sharding.layout import EvenSplit


class LevitParallel(ParallelModel):
    """Sharding plan of the LeViT family."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        given = config.down_ops
        config.down_ops = [*given]  # the constructor of transformers appends to it
        super().__init__(config, *args, **kwargs)
        config.down_ops = given

    def _initialize_constructed(self) -> None:
        for name, parameter in self.named_parameters():
            if name.endswith("attention_biases"):
                init.zeros_(parameter)

    @staticmethod
    def between(first: str, last: str, *splits: EvenSplit) -> Entries:
        """Return the entries of two linear layers, each with its batch norm."""
        return {
            f"{first}.linear": ColumnParallel(*splits),
            f"{first}.batch_norm": LocalChannels(*splits),
            f"{last}.linear": RowParallel(),
            f"{last}.batch_norm": Replicated(),
        }

    @classmethod
    def attention(cls, name: str, projections: dict[str, int], heads: int, width: int) -> Entries:
        """Return the plan of an attention layer.

        Args:
            projections: the width per head of each projection.
            width: the width of the values of a head.
        """
        values = EvenSplit(heads, width)
        entries: dict[str, Replicated] = {
            name.rstrip("."): LocalAttributes(
                {"num_attention_heads": values.local_count, "out_dim_projection": values.local_extent}
            ),
            f"{name}attention_biases": ColumnParallel(EvenSplit(heads)),
        }
        for projection, each in projections.items():
            entries |= cls.between(f"{name}{projection}", f"{name}projection", EvenSplit(heads, each))
        return {**entries, f"{name}projection.linear": RowParallel(values)}

    @classmethod
    def layers_of(cls, config: Any, stage: int, smaller: Sequence[Any]) -> list[Entries]:
        """Return the entries of each layer of a stage, as transformers builds it.

        Args:
            smaller: the sizes of the attention that shrinks the image behind the stage, or ``[""]``.
        """
        key, ratio = config.key_dim[stage], config.attention_ratio[stage]
        attention = cls.attention(
            "module.", {"queries_keys_values": (2 + ratio) * key}, config.num_attention_heads[stage], ratio * key
        )
        mlp = cls.between("module.linear_up", "module.linear_down")
        layers = [attention, *[mlp] * (config.mlp_ratio[stage] > 0)] * config.depths[stage]
        if smaller[0] == "Subsample":
            _, key, heads, ratio, widening, _ = smaller
            layers.append(cls.attention("", {"keys_values": (1 + ratio) * key, "queries": key}, heads, ratio * key))
            layers += [mlp] * (widening > 0)
        return layers

    @classmethod
    def plan(cls, config: Any) -> Plan:
        smaller = [*config.down_ops, [""]]
        stages = {
            f"encoder.stages.{stage}.layers": cls.layers_of(config, stage, smaller[stage])
            for stage in range(len(config.depths))
        }
        return Plan(
            embed={"patch_embeddings": Replicated()},
            blocks={stage: {} for stage in stages},
            head={},
            block_overrides=stages,
        ).with_rules(single_stage_reason=SMALLER)


class LevitModel(LevitParallel, hf.LevitModel):
    pass


class LevitForImageClassification(LevitParallel, hf.LevitForImageClassification):
    head_plan = CLASSIFIER


class LevitForImageClassificationWithTeacher(LevitParallel, hf.LevitForImageClassificationWithTeacher):
    head_plan = {**CLASSIFIER, "classifier_distill": Replicated()}
