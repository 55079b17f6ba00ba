"""XLM: an encoder with embeddings of languages, whose parts of blocks are kept in four lists. Not with `asm`."""

from typing import Any

from transformers.models.xlm import modeling_xlm as hf

from oslo_models.layout import Units
from oslo_models.models.base import ParallelModel
from oslo_models.models.family import family
from oslo_models.plan import Column, Entries, Norm, Plan, Replicated, Row, Vocab

SQUAD = ("start_logits.dense", *(f"{name}.dense_{i}" for name in ("end_logits", "answer_class") for i in (0, 1)))
HEADS: dict[str, Entries] = {
    "Model": {},
    "WithLMHeadModel": {"pred_layer.proj": Vocab()},
    "ForSequenceClassification": {"sequence_summary.summary": Replicated()},
    "ForMultipleChoice": {"sequence_summary.summary": Replicated(), "logits_proj": Replicated()},
    "ForTokenClassification": {"classifier": Replicated()},
    "ForQuestionAnsweringSimple": {"qa_outputs": Replicated()},
    "ForQuestionAnswering": {
        **{f"qa_outputs.{name}": Replicated() for name in SQUAD},
        "qa_outputs.end_logits.LayerNorm": Norm(),
    },
}


class XLMParallel(ParallelModel):
    """How every model of the XLM families divides."""

    @classmethod
    def plan(cls, config: Any) -> Plan:
        heads = Units(config.n_heads, config.emb_dim // config.n_heads)
        return Plan(
            embed={
                "embeddings": Vocab(),
                "position_embeddings": Replicated(),
                "lang_embeddings": Replicated(),
                "layer_norm_emb": Norm(),
            },
            blocks={
                "attentions": {**{f"{name}_lin": Column(heads) for name in "qkv"}, "out_lin": Row(heads)},
                "layer_norm1": {"": Norm()},
                "ffns": {"lin1": Column(), "lin2": Row()},
                "layer_norm2": {"": Norm()},
            },
            head={},
            local={"n_heads": heads.local_count},
            optional=("lang_embeddings",),
            one_stage="the dropout after its embeddings is that of its blocks, which a later stage could not leave out",
        )


globals().update(family(XLMParallel, hf, HEADS))
