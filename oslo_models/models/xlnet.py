"""XLNet: a decoder of words in any order."""

from typing import Any

from transformers.models.xlnet import modeling_xlnet as hf

from oslo_models.layout import Units
from oslo_models.models.base import ParallelModel
from oslo_models.models.family import family
from oslo_models.models.xlm import SQUAD
from oslo_models.plan import BareHeads, Column, Entries, Norm, Plan, Replicated, Row, Vocab

SUMMARY: Entries = {"sequence_summary.summary": Replicated(), "logits_proj": Replicated()}
HEADS: dict[str, Entries] = {
    "Model": {},
    "LMHeadModel": {"lm_loss": Vocab()},
    "ForSequenceClassification": SUMMARY,
    "ForMultipleChoice": SUMMARY,
    "ForTokenClassification": {"classifier": Replicated()},
    "ForQuestionAnsweringSimple": {"qa_outputs": Replicated()},
    "ForQuestionAnswering": {**{name: Replicated() for name in SQUAD}, "end_logits.LayerNorm": Norm()},
}


class XLNetParallel(ParallelModel):
    """How every model of the XLNet family divides."""

    @classmethod
    def plan(cls, config: Any) -> Plan:
        block = {
            "rel_attn": BareHeads(Units(config.n_head)),
            "rel_attn.layer_norm": Norm(),
            "ff.layer_1": Column(),
            "ff.layer_2": Row(),
            "ff.layer_norm": Norm(),
        }
        return Plan(
            embed={"word_embedding": Vocab(), "mask_emb": Replicated()},
            blocks={"layer": block},
            head={},
            one_stage="one dropout serves the embeddings, the positions and what the last block made",
        )


globals().update(family(XLNetParallel, hf, HEADS))
