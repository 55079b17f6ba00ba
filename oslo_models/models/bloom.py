"""BLOOM: query, key and value of a head side by side, biases of ALiBi in place of positions."""

from typing import Any

from transformers import BloomConfig
from transformers.models.bloom import modeling_bloom as hf

from oslo_models.modeling.base import ParallelModel
from oslo_models.modeling.heads import CLASSIFIER, LM_HEAD, QA_OUTPUTS, SCORE
from oslo_models.sharding.layout import EvenSplit
from oslo_models.sharding.plan import ColumnParallel, Norm, Plan, RowParallel, VocabParallel


class BloomParallel(ParallelModel):
    """How every model of the BLOOM family divides."""

    @classmethod
    def plan(cls, config: Any) -> Plan:
        heads = EvenSplit(config.n_head, config.hidden_size // config.n_head)
        block = {
            "input_layernorm": Norm(),
            "self_attention.query_key_value": ColumnParallel(EvenSplit(config.n_head, 3 * heads.width)),
            "self_attention.dense": RowParallel(heads),
            "post_attention_layernorm": Norm(),
            "mlp.dense_h_to_4h": ColumnParallel(),
            "mlp.dense_4h_to_h": RowParallel(),
        }
        # What slow_but_exact adds up slice by slice, the ranks add up.
        slices = {f"{module}.pretraining_tp": lambda n, rank: 1 for module in ("self_attention", "mlp")}
        return Plan(
            embed={"word_embeddings": VocabParallel(), "word_embeddings_layernorm": Norm()},
            blocks={"h": block},
            head={"ln_f": Norm()},
            local={"self_attention.num_heads": heads.local_count, **slices},
            per_head={"self_attention.alibi": heads},
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
