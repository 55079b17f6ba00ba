"""LED: BART whose encoder attends to windows, and from some positions to all."""

from dataclasses import replace
from typing import Any

from transformers.models.led import modeling_led as hf

from oslo_models.layout import Units
from oslo_models.models.bart import HEADS, BartParallel
from oslo_models.models.family import family
from oslo_models.plan import Column, Plan, Row


class LEDParallel(BartParallel):
    """How every model of the LED family divides."""

    @classmethod
    def plan(cls, config: Any) -> Plan:
        plan = super().plan(config)
        encoder, decoder = plan.blocks.values()
        heads, own = (cls.heads(config, stack) for stack in cls.stacks)
        inner = "self_attn.longformer_self_attn"
        encoder = {
            **{
                f"{inner}.{name}{kind}": Column(heads) for name in ("query", "key", "value") for kind in ("", "_global")
            },
            "self_attn.output": Row(heads),
            **{name: entry for name, entry in encoder.items() if not name.startswith("self_attn.")},
        }
        widths = {f"encoder.layers.{inner}": heads}
        widths |= {f"decoder.layers.{name}": own for name in ("self_attn", "encoder_attn")}
        return replace(
            plan,
            blocks={"encoder.layers": encoder, "decoder.layers": decoder},
            local={f"{path}.num_heads": units.local_count for path, units in widths.items()},
            widths=widths,
        )


globals().update(family(LEDParallel, hf, HEADS))
