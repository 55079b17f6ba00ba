"""ModernBERT: rotary positions, gated MLPs, pre-layer norms, sliding-window attention in most blocks."""

from typing import Any

from transformers import ModernBertConfig
from transformers.models.modernbert import modeling_modernbert as hf

from oslo_models.layers.entries import ColumnParallel, Norm, Plan, Replicated, RowParallel, VocabParallel
from oslo_models.modeling.base import ParallelModel
from oslo_models.modeling.blocks import heads_of


class ModernBertParallel(ParallelModel):
    """Sharding plan of the ModernBERT family."""

    @classmethod
    def plan(cls, config: Any) -> Plan:
        heads = heads_of(config)
        block = {
            "attn_norm": Norm(),
            "attn.Wqkv": ColumnParallel(heads, heads, heads),
            "attn.Wo": RowParallel(heads),
            "mlp_norm": Norm(),
            "mlp.Wi": ColumnParallel(parts=2),
            "mlp.Wo": RowParallel(),
        }
        return Plan(
            embed={"embeddings.tok_embeddings": VocabParallel(), "embeddings.norm": Norm()},
            blocks={"layers": block},
            head={"final_norm": Norm()},
        ).with_rules(embedding_dropouts=("embeddings.drop",))


class ModernBertModel(ModernBertParallel, hf.ModernBertModel):
    pass


class ModernBertForMaskedLM(ModernBertParallel, hf.ModernBertForMaskedLM):
    head_plan = {"head.dense": Replicated(), "head.norm": Norm(), "decoder": VocabParallel()}


class ModernBertForSequenceClassification(ModernBertParallel, hf.ModernBertForSequenceClassification):
    head_plan = {"head.dense": Replicated(), "head.norm": Norm(), "classifier": Replicated()}


class ModernBertForMultipleChoice(ModernBertParallel, hf.ModernBertForMultipleChoice):
    head_plan = {"head.dense": Replicated(), "head.norm": Norm(), "classifier": Replicated()}


class ModernBertForTokenClassification(ModernBertParallel, hf.ModernBertForTokenClassification):
    head_plan = {"head.dense": Replicated(), "head.norm": Norm(), "classifier": Replicated()}


class ModernBertForQuestionAnswering(ModernBertParallel, hf.ModernBertForQuestionAnswering):
    head_plan = {"head.dense": Replicated(), "head.norm": Norm(), "classifier": Replicated()}
