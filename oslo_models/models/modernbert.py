"""ModernBERT: rotary positions, gated MLPs, norms before attention and MLP, blocks that attend to a window."""

from typing import Any

from transformers.models.modernbert import modeling_modernbert as hf

from oslo_models.layout import Units
from oslo_models.models.base import ParallelModel
from oslo_models.models.family import family
from oslo_models.plan import Column, Entries, Norm, Plan, Replicated, Row, Vocab

HEAD: Entries = {"head.dense": Replicated(), "head.norm": Norm()}
HEADS: dict[str, Entries] = {
    "Model": {},
    "ForMaskedLM": {**HEAD, "decoder": Vocab()},
    "ForSequenceClassification": {**HEAD, "classifier": Replicated()},
    "ForMultipleChoice": {**HEAD, "classifier": Replicated()},
    "ForTokenClassification": {**HEAD, "classifier": Replicated()},
    "ForQuestionAnswering": {**HEAD, "classifier": Replicated()},
}


class ModernBertParallel(ParallelModel):
    """How every model of the ModernBERT family divides."""

    @classmethod
    def plan(cls, config: Any) -> Plan:
        heads = Units(config.num_attention_heads, config.hidden_size // config.num_attention_heads)
        block = {
            "attn_norm": Norm(),
            "attn.Wqkv": Column(heads, heads, heads),
            "attn.Wo": Row(heads),
            "mlp_norm": Norm(),
            "mlp.Wi": Column(parts=2),
            "mlp.Wo": Row(),
        }
        return Plan(
            embed={"embeddings.tok_embeddings": Vocab(), "embeddings.norm": Norm()},
            blocks={"layers": block},
            head={"final_norm": Norm()},
            dropout=("embeddings.drop",),
        )


globals().update(family(ModernBertParallel, hf, HEADS))
