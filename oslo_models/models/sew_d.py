"""SEW-D: SEW with the disentangled attention of DeBERTa."""

from dataclasses import replace
from typing import Any

from transformers import SEWDConfig
from transformers import initialization as init
from transformers.models.sew_d import modeling_sew_d as hf

from oslo_models.layers.entries import Norm, Plan, Replicated
from oslo_models.models.deberta_v2 import DebertaV2Parallel
from oslo_models.models.sew import SEWParallel
from oslo_models.models.wav2vec2 import CLASSIFIER


class SEWDParallel(SEWParallel):
    """Sharding plan of the SEW-D family."""

    base_model_prefix = "sew_d"  # older releases of transformers name no attribute

    def _initialize_constructed(self) -> None:
        super()._initialize_constructed()
        if (drawn := getattr(self.base_model, "masked_spec_embed", None)) is not None:
            init.uniform_(drawn)

    @classmethod
    def plan(cls, config: Any) -> Plan:
        plan, deberta = super().plan(config), DebertaV2Parallel.plan(config)
        (block,) = deberta.blocks.values()
        tables = {
            "encoder.encoder.rel_embeddings": Replicated(),
            "encoder.encoder.LayerNorm": Norm(),
            "encoder.encoder.conv": Replicated(),
        }
        embed = {name: entry for name, entry in plan.embed.items() if name != "encoder.layer_norm"}
        return replace(
            plan,
            embed={**embed, **tables},
            blocks={"encoder.encoder.layer": block},
            optional=(*plan.optional, *tables, *(name for name in deberta.optional if ".pos_" in name)),
        )


class SEWDModel(SEWDParallel, hf.SEWDModel):
    pass


class SEWDForCTC(SEWDParallel, hf.SEWDForCTC):
    head_plan = {"lm_head": Replicated()}


class SEWDForSequenceClassification(SEWDParallel, hf.SEWDForSequenceClassification):
    head_plan = CLASSIFIER
