"""LED: BART with sliding-window and global attention in the encoder."""

from dataclasses import replace
from typing import Any

from transformers import LEDConfig
from transformers.models.led import modeling_led as hf

from oslo_models.layers.entries import ColumnParallel, LocalAttributes, Plan, RowParallel
from oslo_models.modeling.heads import LM_HEAD, QA_OUTPUTS
from oslo_models.models.bart import BartParallel


class LEDParallel(BartParallel):
    """Sharding plan of the LED family."""

    @classmethod
    def plan(cls, config: Any) -> Plan:
        plan = super().plan(config)
        encoder, decoder = plan.blocks.values()
        heads, own = (cls.heads(config, stack) for stack in cls.stacks)
        inner = "self_attn.longformer_self_attn"
        encoder = {
            inner: LocalAttributes({"num_heads": heads.local_count}, width=heads),
            **{
                f"{inner}.{name}{kind}": ColumnParallel(heads)
                for name in ("query", "key", "value")
                for kind in ("", "_global")
            },
            "self_attn.output": RowParallel(heads),
            **{name: entry for name, entry in encoder.items() if not name.startswith("self_attn.")},
        }
        local = LocalAttributes({"num_heads": own.local_count}, width=own)
        decoder = {**decoder, "self_attn": local, "encoder_attn": local}
        return replace(plan, blocks={"encoder.layers": encoder, "decoder.layers": decoder})


class LEDModel(LEDParallel, hf.LEDModel):
    pass


class LEDForConditionalGeneration(LEDParallel, hf.LEDForConditionalGeneration):
    head_plan = LM_HEAD


class LEDForQuestionAnswering(LEDParallel, hf.LEDForQuestionAnswering):
    head_plan = QA_OUTPUTS
