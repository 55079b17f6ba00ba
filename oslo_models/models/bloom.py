"""BLOOM: query, key and value of a head side by side, biases of ALiBi in place of positions."""

from typing import Any

from transformers.models.bloom import modeling_bloom as hf

from oslo_models.layout import Units
from oslo_models.models.base import ParallelModel
from oslo_models.models.family import DECODER, family
from oslo_models.plan import Column, Norm, Plan, Replicated, Row, Vocab

HEADS = {**DECODER, "ForTokenClassification": {"classifier": Replicated()}}


class BloomParallel(ParallelModel):
    """How every model of the BLOOM family divides."""

    @classmethod
    def plan(cls, config: Any) -> Plan:
        heads = Units(config.n_head, config.hidden_size // config.n_head)
        block = {
            "input_layernorm": Norm(),
            "self_attention.query_key_value": Column(Units(config.n_head, 3 * heads.width)),
            "self_attention.dense": Row(heads),
            "post_attention_layernorm": Norm(),
            "mlp.dense_h_to_4h": Column(),
            "mlp.dense_4h_to_h": Row(),
        }
        # What slow_but_exact adds up slice by slice, the ranks add up.
        slices = {f"{module}.pretraining_tp": lambda n, rank: 1 for module in ("self_attention", "mlp")}
        return Plan(
            embed={"word_embeddings": Vocab(), "word_embeddings_layernorm": Norm()},
            blocks={"h": block},
            head={"ln_f": Norm()},
            local={"self_attention.num_heads": heads.local_count, **slices},
            per_head={"self_attention.alibi": heads},
        )


globals().update(family(BloomParallel, hf, HEADS))
