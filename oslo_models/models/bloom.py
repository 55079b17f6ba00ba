"""BLOOM: ALiBi, with the query, key and value of each head adjacent in one matrix."""

from typing import Any

from transformers import BloomConfig
from transformers.models.bloom import modeling_bloom as hf

from oslo_models.layers.entries import ColumnParallel, LocalAttributes, Norm, Plan, RowParallel, VocabParallel
from oslo_models.modeling.base import ParallelModel
from oslo_models.modeling.blocks import heads_of
from oslo_models.modeling.heads import CLASSIFIER, LM_HEAD, QA_OUTPUTS, SCORE
from oslo_models.sharding.layout import EvenSplit


class BloomParallel(ParallelModel):
    """Sharding plan of the BLOOM family."""

    @classmethod
    def plan(cls, config: Any) -> Plan:
        heads = heads_of(config)
        # With slow_but_exact, BLOOM sums the products of slices in order. Here, the ranks are the slices.
        local = {"num_heads": heads.local_count, "pretraining_tp": lambda n, rank: 1}
        block = {
            "self_attention": LocalAttributes(local, per_head={"alibi": heads}),
            "mlp": LocalAttributes({"pretraining_tp": lambda n, rank: 1}),
            "input_layernorm": Norm(),
            "self_attention.query_key_value": ColumnParallel(EvenSplit(config.n_head, 3 * heads.width)),
            "self_attention.dense": RowParallel(heads),
            "post_attention_layernorm": Norm(),
            "mlp.dense_h_to_4h": ColumnParallel(),
            "mlp.dense_4h_to_h": RowParallel(),
        }
        return Plan(
            embed={"word_embeddings": VocabParallel(), "word_embeddings_layernorm": Norm()},
            blocks={"h": block},
            head={"ln_f": Norm()},
        )


class BloomModel(BloomParallel, hf.BloomModel):
    pass


class BloomForCausalLM(BloomParallel, hf.BloomForCausalLM):
    head_plan = LM_HEAD


class BloomForSequenceClassification(BloomParallel, hf.BloomForSequenceClassification):
    head_plan = SCORE


class BloomForTokenClassification(BloomParallel, hf.BloomForTokenClassification):
    head_plan = CLASSIFIER


class BloomForQuestionAnswering(BloomParallel, hf.BloomForQuestionAnswering):
    head_plan = QA_OUTPUTS
