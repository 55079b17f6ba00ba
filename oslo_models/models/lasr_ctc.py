"""LASR CTC: Parakeet CTC with rotary positions. Convolutions and batch norms are replicated."""

from transformers import LasrCTCConfig, LasrEncoderConfig
from transformers.models.lasr import modeling_lasr as hf

from oslo_models.layers.entries import Entries, Norm, Replicated
from oslo_models.models.parakeet_ctc import ParakeetParallel
from oslo_models.sharding.layout import EvenSplit


class LasrParallel(ParakeetParallel):
    """Sharding plan of the LASR family."""

    subsampler_name = "subsampler"
    head = {"out_norm": Norm()}

    @classmethod
    def positions(cls, heads: EvenSplit) -> Entries:
        return {}


class LasrEncoder(LasrParallel, hf.LasrEncoder):
    pass


class LasrForCTC(LasrParallel, hf.LasrForCTC):
    head_plan = {"ctc_head": Replicated()}
