"""LXMERT: BERT blocks for text and for image regions, followed by cross-modality blocks."""

from dataclasses import replace
from typing import Any

from transformers import LxmertConfig
from transformers.models.lxmert import modeling_lxmert as hf

from oslo_models.layers.entries import (
    ColumnParallel,
    Entries,
    LocalAttributes,
    Norm,
    Plan,
    Replicated,
    RowParallel,
    VocabParallel,
)
from oslo_models.modeling.blocks import QUERY_KEY_VALUE, heads_of, qkv
from oslo_models.models.bert import BertParallel

ANSWER: Entries = {
    "answer_head.logit_fc.0": Replicated(),
    "answer_head.logit_fc.2": Norm(),
    "answer_head.logit_fc.3": Replicated(),
}
OBJECTS: Entries = {
    "obj_predict_head.transform.dense": Replicated(),
    "obj_predict_head.transform.LayerNorm": Norm(),
    **{f"obj_predict_head.decoder_dict.{name}": Replicated() for name in ("obj", "attr", "feat")},
}
ATTENTIONS = {"visual_attention": "att", "lang_self_att": "self", "visn_self_att": "self"}


class LxmertParallel(BertParallel):
    """Sharding plan of the LXMERT family."""

    labels_of = {"prediction_logits": "labels"}

    @classmethod
    def plan(cls, config: Any) -> Plan:
        plan = super().plan(config)
        heads = heads_of(config)
        local = LocalAttributes({"head_size": heads.local_extent})
        (layer,) = plan.blocks.values()
        layer = {**layer, "attention.self": local}
        crossing: dict[str, Replicated] = {}
        for name, inner in ATTENTIONS.items():
            crossing |= {f"{name}.{inner}": local, **qkv(f"{name}.{inner}", heads, QUERY_KEY_VALUE)}
            crossing |= {f"{name}.output.dense": RowParallel(heads), f"{name}.output.LayerNorm": Norm()}
        for name in ("lang", "visn"):
            crossing |= {f"{name}_inter.dense": ColumnParallel(), f"{name}_output.dense": RowParallel()}
            crossing |= {f"{name}_output.LayerNorm": Norm()}
        visual = {f"encoder.visn_fc.{name}_fc": Replicated() for name in ("visn", "box")}
        norms = {f"encoder.visn_fc.{name}_layer_norm": Norm() for name in ("visn", "box")}
        return replace(
            plan,
            embed={**plan.embed, **visual, **norms},
            blocks={"encoder.layer": layer, "encoder.r_layers": layer, "encoder.x_layers": crossing},
            optional=(*plan.optional, *OBJECTS, *ANSWER),
        ).with_rules(
            single_stage_reason="its blocks process tokens and regions together, and stages exchange one sequence"
        )


class LxmertModel(LxmertParallel, hf.LxmertModel):
    pass


class LxmertForPreTraining(LxmertParallel, hf.LxmertForPreTraining):
    head_plan = {
        "cls.predictions.transform.dense": Replicated(),
        "cls.predictions.transform.LayerNorm": Norm(),
        "cls.predictions.decoder": VocabParallel(),
        "cls.predictions.bias": Replicated(),
        "cls.seq_relationship": Replicated(),
        **OBJECTS,
        **ANSWER,
    }


class LxmertForQuestionAnswering(LxmertParallel, hf.LxmertForQuestionAnswering):
    head_plan = ANSWER
