"""Deformable DETR: DETR whose heads sample features. Its backbone is replicated on every rank. Its loss needs scipy."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor
from transformers import DeformableDetrConfig
from transformers.models.deformable_detr import modeling_deformable_detr as hf

from oslo_models.distributed.autograd_collectives import copy_to
from oslo_models.layers.entries import ColumnParallel, Entries, LocalAttributes, Replicated, RowParallel
from oslo_models.layers.kinds import ShardedModule, ShardingContext, shards
from oslo_models.layers.local_attributes import set_local_attributes
from oslo_models.models.detr import DetrParallel
from oslo_models.sharding.layout import EvenSplit


@dataclass(frozen=True)
class SamplingHeads(LocalAttributes):
    """Attention that samples features around reference points. Each rank has the offsets and weights of its heads."""


@shards(SamplingHeads)
class SamplingHeadsModule(ShardedModule):
    """Attention with local heads. The gradient of the reference points, which all heads read, is all-reduced."""

    def configure(self, entry: SamplingHeads, context: ShardingContext) -> None:
        super().configure(entry, context)
        set_local_attributes(self, entry.attributes, context.tp)

    def forward(self, *args: Any, reference_points: Tensor, **kwargs: Any) -> Any:
        return super().forward(*args, reference_points=copy_to(self.tp, reference_points), **kwargs)


def sampling_attention(name: str, heads: EvenSplit, samples: int) -> Entries:
    """Return the entries of an attention module.

    Args:
        samples: sampling points of each head.
    """
    return {
        name: SamplingHeads({"n_heads": heads.local_count, "d_model": heads.local_extent}),
        f"{name}.sampling_offsets": ColumnParallel(replace(heads, width=2 * samples)),
        f"{name}.attention_weights": ColumnParallel(replace(heads, width=samples)),
        f"{name}.value_proj": ColumnParallel(heads),
        f"{name}.output_proj": RowParallel(heads),
    }


class DeformableDetrParallel(DetrParallel):
    """Sharding plan of the Deformable DETR family.

    Attributes:
        sampling: the attention that samples in a block of each stack.
    """

    images: ClassVar[tuple[str, ...]] = (
        *("backbone", "position_embedding", "input_proj", "level_embed", "query_position_embeddings"),
    )
    after: ClassVar[Entries] = dict.fromkeys(
        (
            *("enc_output", "enc_output_norm", "pos_trans", "pos_trans_norm", "reference_points"),
            *("decoder.class_embed", "decoder.bbox_embed"),
        ),
        Replicated(),
    )
    optional = (*after, "query_position_embeddings")
    sampling: ClassVar[dict[str, str]] = {"encoder": "self_attn", "decoder": "encoder_attn"}

    @classmethod
    def attention(cls, config: Any, stack: str, name: str) -> Entries:
        if cls.sampling.get(stack) != name:
            return super().attention(config, stack, name)
        levels = getattr(config, "decoder_n_levels", config.num_feature_levels)
        return sampling_attention(name, cls.heads(config, stack), levels * getattr(config, f"{stack}_n_points"))


class DeformableDetrModel(DeformableDetrParallel, hf.DeformableDetrModel):
    pass


class DeformableDetrForObjectDetection(DeformableDetrParallel, hf.DeformableDetrForObjectDetection):
    head_plan = {"class_embed": Replicated(), "bbox_embed": Replicated()}
