"""Switch Transformers: T5 with an MLP chosen for each token, out of several, in some blocks."""

from typing import Any

from transformers import SwitchTransformersConfig
from transformers.models.switch_transformers import modeling_switch_transformers as hf
from transformers.models.switch_transformers.modeling_switch_transformers import SwitchTransformersPreTrainedModel

from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.t5 import T5Parallel
from oslo_models.sharding.expert_entries import SeparateExperts
from oslo_models.sharding.layout import ExpertWidth
from oslo_models.sharding.plan import ColumnParallel, Entries, Replicated, RowParallel


class SwitchTransformersParallel(T5Parallel):
    """Sharding plan of the Switch Transformers family.

    The capacity of an expert is for the tokens of a row, so micro-batches drop the same tokens as a full batch.
    """

    optional = ("mlp.router", "mlp.experts", ".wi", ".wo")  # a block has one MLP, or experts

    @classmethod
    def mlp(cls, config: Any, layer: str) -> Entries:
        mlp: dict[str, Replicated] = {
            **{f"{layer}.mlp.wi": ColumnParallel(), f"{layer}.mlp.wo": RowParallel()},
            **{f"{layer}.mlp.router": Replicated(), f"{layer}.mlp.experts": SeparateExperts()},
        }
        for number in range(config.num_experts):
            width = ExpertWidth(config.d_ff, expert=number, experts=config.num_experts)
            expert = f"{layer}.mlp.experts.expert_{number}"
            mlp |= {f"{expert}.wi": ColumnParallel(width), f"{expert}.wo": RowParallel(width)}
        return mlp


class SwitchTransformersModel(SwitchTransformersParallel, hf.SwitchTransformersModel):
    pass


class SwitchTransformersForConditionalGeneration(
    SwitchTransformersParallel, hf.SwitchTransformersForConditionalGeneration
):
    head_plan = LM_HEAD


class SwitchTransformersEncoderModel(SwitchTransformersParallel, hf.SwitchTransformersEncoderModel):
    stacks = ("encoder",)
