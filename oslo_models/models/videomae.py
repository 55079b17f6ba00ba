"""VideoMAE: ViT for videos, with patches of several frames. The decoder for pretraining is replicated on every rank."""

from collections.abc import Mapping
from math import prod
from typing import Any

from transformers import VideoMAEConfig
from transformers.models.videomae import modeling_videomae as hf

from oslo_models.layers.entries import Norm, Plan, Replicated
from oslo_models.modeling.base import ParallelModel
from oslo_models.modeling.blocks import heads_of, nested_attention_block
from oslo_models.modeling.heads import CLASSIFIER


class VideoMAEParallel(ParallelModel):
    """Sharding plan of the VideoMAE family."""

    @classmethod
    def plan(cls, config: Any) -> Plan:
        def positions(batch: Mapping[str, Any]) -> tuple[int, int]:
            rows, frames, _, *sizes = batch["pixel_values"].shape
            patches = frames // config.tubelet_size * prod(size // config.patch_size for size in sizes)
            masked = batch.get("bool_masked_pos")
            return rows, patches if masked is None else patches - int(masked[0].sum())

        return Plan(
            embed={"embeddings": Replicated()},
            blocks={"encoder.layer": nested_attention_block(heads_of(config))},
            head={"layernorm": Norm()},
            optional=("layernorm", "fc_norm"),
        ).with_rules(input_positions={"encoder.layer": positions})


class VideoMAEModel(VideoMAEParallel, hf.VideoMAEModel):
    pass


class VideoMAEForPreTraining(VideoMAEParallel, hf.VideoMAEForPreTraining):
    head_plan = dict.fromkeys(("encoder_to_decoder", "mask_token", "decoder"), Replicated())
    loss_inputs = ("bool_masked_pos",)
    zeros = ("mask_token",)
    loss_is_mean = False


class VideoMAEForVideoClassification(VideoMAEParallel, hf.VideoMAEForVideoClassification):
    head_plan = {**CLASSIFIER, "fc_norm": Norm()}
