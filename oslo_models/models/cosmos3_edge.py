"""Cosmos 3 Edge: an encoder of image patches, a projector, and Llama with plain MLPs and positions of Qwen2-VL."""

from transformers import Cosmos3EdgeConfig, Cosmos3EdgeTextConfig, Cosmos3EdgeVisionConfig
from transformers.models.cosmos3_edge import modeling_cosmos3_edge as hf

from oslo_models.layers.entries import ColumnParallel, Norm, Replicated, RowParallel
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.llama import LlamaParallel
from oslo_models.models.llava import LlavaParallel
from oslo_models.models.video_llama_3 import PackedPatchesParallel


class Cosmos3EdgeVisionModel(PackedPatchesParallel, hf.Cosmos3EdgeVisionModel):
    head_plan = {"post_layernorm": Norm()}


class Cosmos3EdgeTextModel(LlamaParallel, hf.Cosmos3EdgeTextModel):
    mlp = {"mlp.fc1": ColumnParallel(), "mlp.fc2": RowParallel()}


class Cosmos3EdgeParallel(LlavaParallel):
    """Sharding plan of the Cosmos 3 Edge family."""

    towers = {"visual": "vision_config"}
    projectors = {"projector": Replicated()}
    classes = {"visual": Cosmos3EdgeVisionModel, "language_model": Cosmos3EdgeTextModel}


class Cosmos3EdgeModel(Cosmos3EdgeParallel, hf.Cosmos3EdgeModel):
    pass


class Cosmos3EdgeForConditionalGeneration(Cosmos3EdgeParallel, hf.Cosmos3EdgeForConditionalGeneration):
    head_plan = LM_HEAD
