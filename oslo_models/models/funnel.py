"""Funnel: blocks that shorten the sequence, a decoder that lengthens it again, attention to relative positions."""

from typing import Any

from transformers.models.funnel import modeling_funnel as hf

from oslo_models.layout import Units
from oslo_models.models.base import ParallelModel
from oslo_models.models.family import family
from oslo_models.plan import BareHeads, Column, Entries, Norm, Plan, Replicated, Row, Vocab

CLASSIFIER: Entries = {"classifier.linear_hidden": Replicated(), "classifier.linear_out": Replicated()}
HEADS: dict[str, Entries] = {
    "Model": {},
    "BaseModel": {},
    "ForPreTraining": {f"discriminator_predictions.{name}": Replicated() for name in ("dense", "dense_prediction")},
    "ForMaskedLM": {"lm_head": Vocab()},
    "ForSequenceClassification": CLASSIFIER,
    "ForMultipleChoice": CLASSIFIER,
    "ForTokenClassification": {"classifier": Replicated()},
    "ForQuestionAnswering": {"qa_outputs": Replicated()},
}
BASE = {"decodes": False}


class FunnelParallel(ParallelModel):
    """How every model of the Funnel family divides."""

    decodes: bool = True

    @classmethod
    def plan(cls, config: Any) -> Plan:
        heads, count = Units(config.n_head, config.d_head), Units(config.n_head)
        layer = {
            **{f"attention.{name}_head": Column(heads) for name in "qkv"},
            "attention": BareHeads(count),
            "attention.post_proj": Row(heads),
            "attention.layer_norm": Norm(),
            "ffn.linear_1": Column(),
            "ffn.linear_2": Row(),
            "ffn.layer_norm": Norm(),
        }
        indices = range(max(config.block_sizes))
        block = {f"{i}.{name}": entry for i in indices for name, entry in layer.items()}
        return Plan(
            embed={"embeddings.word_embeddings": Vocab(), "embeddings.layer_norm": Norm()},
            blocks={"encoder.blocks": block, **({"decoder.layers": layer} if cls.decodes else {})},
            head={},
            local={f"{i}attention.config.n_head": count.local_count for i in ("", *(f"{i}." for i in indices))},
            optional=[name for name in block if int(name.partition(".")[0]) >= min(config.block_sizes)],
            one_stage="the sequence shortens from block to block, and the decoder adds what the first block made",
        )


globals().update(
    family(FunnelParallel, hf, HEADS, BaseModel=BASE, ForSequenceClassification=BASE, ForMultipleChoice=BASE)
)
