"""Switch Transformers: T5 with an MLP chosen for each token, out of several, in some blocks."""

from typing import Any

from transformers import SwitchTransformersConfig
from transformers.models.switch_transformers import modeling_switch_transformers as hf
from transformers.models.switch_transformers.modeling_switch_transformers import SwitchTransformersPreTrainedModel

from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.t5 import T5Parallel
from oslo_models.sharding.plan import ColumnParallel, Entries, Replicated, RowParallel


class SwitchTransformersParallel(T5Parallel):
    """Sharding plan of the Switch Transformers family.

    The capacity of an expert is for the tokens of a row, so micro-batches lose the tokens that a full batch loses.
    """

    optional = ("mlp.router", ".wi", ".wo")  # a block has one MLP, or experts

    @classmethod
    def mlp(cls, config: Any, layer: str) -> Entries:
        mlps = [f"{layer}.mlp", *(f"{layer}.mlp.experts.expert_{number}" for number in range(config.num_experts))]
        return {
            f"{layer}.mlp.router": Replicated(),
            **{f"{mlp}.wi": ColumnParallel() for mlp in mlps},
            **{f"{mlp}.wo": RowParallel() for mlp in mlps},
        }


class SwitchTransformersModel(SwitchTransformersParallel, hf.SwitchTransformersModel):
    pass


class SwitchTransformersForConditionalGeneration(
    SwitchTransformersParallel, hf.SwitchTransformersForConditionalGeneration
):
    head_plan = LM_HEAD


class SwitchTransformersEncoderModel(SwitchTransformersParallel, hf.SwitchTransformersEncoderModel):
    stacks = ("encoder",)
