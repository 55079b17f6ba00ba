"""Llama 3.2 Vision: Llama with further blocks that read the features of images from an encoder of tiles."""

from dataclasses import replace
from typing import Any

from transformers import MllamaConfig, MllamaTextConfig, MllamaVisionConfig
from transformers.models.mllama import modeling_mllama as hf

from oslo_models.layers.entries import ColumnParallel, HeadNorm, LocalAttributes, Norm, Plan, Replicated, RowParallel
from oslo_models.modeling.base import ParallelModel
from oslo_models.modeling.blocks import heads_of, qkv
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.llama import LlamaParallel
from oslo_models.models.llava import LlavaParallel


class MllamaVisionModel(ParallelModel, hf.MllamaVisionModel):
    @classmethod
    def plan(cls, config: Any) -> Plan:
        heads = heads_of(config)
        gates = {"gate_attn": Replicated(), "gate_ffn": Replicated()}
        block = {
            "input_layernorm": Norm(),
            "self_attn": LocalAttributes({"num_heads": heads.local_count}),
            **qkv("self_attn", heads),
            "self_attn.o_proj": RowParallel(heads),
            "post_attention_layernorm": Norm(),
            "mlp.fc1": ColumnParallel(),
            "mlp.fc2": RowParallel(),
            **gates,
        }
        tables = ("patch_embedding", "class_embedding", "gated_positional_embedding", "pre_tile_positional_embedding")
        return Plan(
            embed={**dict.fromkeys(tables, Replicated()), "layernorm_pre": Norm()},
            blocks={"transformer.layers": block, "global_transformer.layers": block},
            head={"layernorm_post": Norm(), "post_tile_positional_embedding": Replicated()},
            optional=(*gates,),
        ).with_rules(single_stage_reason="it returns the outputs of several blocks")


class MllamaTextParallel(LlamaParallel):
    """Sharding plan of the text models."""

    @classmethod
    def plan(cls, config: Any) -> Plan:
        plan, attention = super().plan(config), cls.attention(config, cls.heads(config))
        (block,) = plan.blocks.values()
        crossed = {
            **{name.replace("self_attn", "cross_attn"): entry for name, entry in attention.items()},
            **{"cross_attn.q_norm": HeadNorm(), "cross_attn.k_norm": HeadNorm()},
            **{"cross_attn_attn_gate": Replicated(), "cross_attn_mlp_gate": Replicated()},
        }
        return replace(plan, blocks={"layers": {**block, **crossed}}, optional=(*attention, *crossed)).with_rules(
            single_stage_reason="some blocks, by their number, read the features of images"
        )


class MllamaTextModel(MllamaTextParallel, hf.MllamaTextModel):
    pass


class MllamaForCausalLM(MllamaTextParallel, hf.MllamaForCausalLM):
    base_model_prefix = "model"  # the prefix in transformers' class names a part of the model around it
    head_plan = LM_HEAD


class MllamaParallel(LlavaParallel):
    """Sharding plan of the models of text and images."""

    towers = {"vision_model": "vision_config"}
    classes = {"vision_model": MllamaVisionModel, "language_model": MllamaTextModel}


class MllamaModel(MllamaParallel, hf.MllamaModel):
    pass


class MllamaForConditionalGeneration(MllamaParallel, hf.MllamaForConditionalGeneration):
    head_plan = LM_HEAD
