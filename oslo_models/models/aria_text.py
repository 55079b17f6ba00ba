"""Aria, its text model: Llama with transposed and shared experts in each block."""

from transformers import AriaTextConfig
from transformers.models.aria import modeling_aria as hf

from oslo_models.layers.entries import ColumnParallel, Experts, Replicated, SummedModule
from oslo_models.modeling.blocks import gated_mlp
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.llama import LlamaParallel

_EXPERTS: dict[str, Replicated] = {"mlp.experts": Experts(transposed=True, shared="shared_experts")}
if hasattr(hf, "AriaGroupedExpertsGemm"):  # in transformers 5.17, experts route tokens themselves
    _EXPERTS = {
        "mlp.experts": SummedModule(),
        "mlp.experts.fc1.weight": ColumnParallel(parts=2, transposed=True),
        "mlp.experts.fc2.weight": ColumnParallel(dim=1),
    }


class AriaTextParallel(LlamaParallel):
    """Sharding plan of Aria's text model."""

    mlp = {"mlp.router": Replicated(), **_EXPERTS, **gated_mlp("mlp.shared_experts")}


class AriaTextModel(AriaTextParallel, hf.AriaTextModel):
    pass


class AriaTextForCausalLM(AriaTextParallel, hf.AriaTextForCausalLM):
    head_plan = LM_HEAD
