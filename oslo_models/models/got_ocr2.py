"""GOT-OCR 2: SAM's encoder of windows of patches, a projector with convolutions, and Qwen2."""

from typing import Any

from transformers import GotOcr2Config
from transformers.models.got_ocr2 import modeling_got_ocr2 as hf

from oslo_models.layers.entries import ColumnParallel, LocalAttributes, Norm, Plan, Replicated, RowParallel
from oslo_models.modeling.base import ParallelModel
from oslo_models.modeling.blocks import heads_of
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.llava import LlavaParallel


class WindowsParallel(ParallelModel):
    """Sharding plan of encoders that attend to windows, with relative positions for rows and columns (SAM)."""

    @classmethod
    def plan(cls, config: Any) -> Plan:
        heads, positions = heads_of(config), ("rel_pos_h", "rel_pos_w")
        shared = positions if config.use_rel_pos else ()
        block = {
            "layer_norm1": Norm(),
            "attn": LocalAttributes({"num_attention_heads": heads.local_count}, shared=shared),
            **{f"attn.{name}": Replicated() for name in shared},
            "attn.qkv": ColumnParallel(heads, heads, heads),
            "attn.proj": RowParallel(heads),
            "layer_norm2": Norm(),
            "mlp.lin1": ColumnParallel(),
            "mlp.lin2": RowParallel(),
        }
        embed = {"patch_embed": Replicated(), **({"pos_embed": Replicated()} if config.use_abs_pos else {})}
        return Plan(embed=embed, blocks={"layers": block}, head={"neck": Replicated()}).with_rules(
            single_stage_reason="hidden states have the height and the width of the image"
        )


class GotOcr2Parallel(LlavaParallel):
    """Sharding plan of the GOT-OCR 2 family."""

    classes = {"vision_tower": WindowsParallel}


class GotOcr2Model(GotOcr2Parallel, hf.GotOcr2Model):
    pass


class GotOcr2ForConditionalGeneration(GotOcr2Parallel, hf.GotOcr2ForConditionalGeneration):
    head_plan = LM_HEAD
