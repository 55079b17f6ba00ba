"""Switch Transformers: T5 with an MLP chosen for each token, out of several, in some blocks."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import SwitchTransformersConfig
from transformers.models.switch_transformers import modeling_switch_transformers as hf

from oslo_models.layers.entries import ColumnParallel, Entries, Replicated, RowParallel
from oslo_models.layers.kinds import shards
from oslo_models.layers.linear import ColumnParallelLinear, RowParallelLinear
from oslo_models.layers.summed import SummedLayer, SummedModule
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.t5 import T5Parallel
from oslo_models.sharding.layout import ExpertWidth


class SeparateExperts(SummedModule):
    """Container of one MLP per expert. Its forward takes hidden states and the outputs of a router.

    The outputs of all MLPs are all-reduced together. The first layer of each MLP is a `ColumnParallel`, the last layer
    a `RowParallel` without bias. Both have an `ExpertWidth`, so a rank stores no elements of remote experts.
    """


@shards(SeparateExperts)
class SeparateExpertsLayer(SummedLayer):
    """Container of one MLP per expert. All-reduces the partial outputs together, and the input gradients together.

    All ranks visit the experts with tokens in the same order, including remote experts. Remote experts add zeros, and
    output dropouts draw the same masks on all ranks.
    """

    def forward(self, hidden_states: Tensor, *args: Any) -> Any:
        layers = self._layers()
        if not layers:
            return super(SummedLayer, self).forward(hidden_states, *args)
        self._set_joint(layers, True)
        try:
            return super().forward(hidden_states, *args)
        finally:
            self._set_joint(layers, False)

    @staticmethod
    def _set_joint(layers: list[Any], joint: bool) -> None:
        for layer in layers:
            if isinstance(layer, ColumnParallelLinear):
                layer.sums_no_gradients = joint
            else:
                layer.returns_partial_sums = joint

    def _layers(self) -> list[Any]:
        """Return the layers with a joint all-reduce, or none if some layer needs a separate all-reduce.

        Layers with adapters, hooks or another weight format need full outputs.
        """
        found: list[Any] = []
        for expert in self.children():
            layers = [layer for layer in expert.children() if any(True for _ in layer.parameters())]
            known = all(type(layer) in (ColumnParallelLinear, RowParallelLinear) for layer in layers)
            if not known or any(each._forward_hooks for each in (expert, *layers)):
                return []
            found += layers
        return found


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
