"""OmniASR CTC: an audio encoder like Wav2Vec2, with norms before attention and MLP; convolutions are replicated."""

from typing import Any

from transformers import OmniASRCTCConfig
from transformers.models.omniasr_ctc import modeling_omniasr_ctc as hf
from transformers.models.omniasr_ctc.modeling_omniasr_ctc import OmniASRCTCPreTrainedModel

from oslo_models.layers.entries import Norm, Plan, Replicated
from oslo_models.modeling.base import ParallelModel
from oslo_models.modeling.blocks import heads_of
from oslo_models.models.wav2vec2 import audio_positions, encoder_block


def encoder_plan(config: Any) -> Plan:
    """Return the plan of the encoder of audio."""
    return Plan(
        embed={"subsampling": Replicated(), "encode_positions": Replicated()},
        blocks={"layers": encoder_block(heads_of(config))},
        head={"layer_norm": Norm()},
    ).with_rules(input_positions={"layers": audio_positions(config)})


class OmniASRParallel(ParallelModel):
    """Sharding plan of the OmniASR CTC family."""

    @classmethod
    def plan(cls, config: Any) -> Plan:
        return encoder_plan(config.audio_config).under("audio_tower.")


class OmniASRCTCModel(OmniASRParallel, hf.OmniASRCTCModel):
    pass


class OmniASRForCTC(OmniASRParallel, hf.OmniASRForCTC):
    head_plan = {"ctc_head": Replicated()}
