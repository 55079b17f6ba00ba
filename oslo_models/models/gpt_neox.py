"""GPT-NeoX: query, key and value of a head side by side, attention and MLP side by side or in turn."""

from typing import Any

from transformers.models.gpt_neox import modeling_gpt_neox as hf

from oslo_models.layout import Units
from oslo_models.models.base import ParallelModel
from oslo_models.models.family import DECODER, family
from oslo_models.plan import Column, Norm, Plan, Replicated, Row, Vocab

HEADS = {**DECODER, "ForTokenClassification": {"classifier": Replicated()}}


class GPTNeoXParallel(ParallelModel):
    """How every model of the GPT-NeoX family divides."""

    @classmethod
    def plan(cls, config: Any) -> Plan:
        heads = config.num_attention_heads
        block = {
            "input_layernorm": Norm(),
            "attention.query_key_value": Column(Units(heads, 3 * config.hidden_size // heads)),
            "attention.dense": Row(Units(heads, config.hidden_size // heads)),
            "post_attention_layernorm": Norm(),
            "mlp.dense_h_to_4h": Column(),
            "mlp.dense_4h_to_h": Row(),
        }
        return Plan(
            embed={"embed_in": Vocab()},
            blocks={"layers": block},
            head={"final_layer_norm": Norm()},
            dropout=("emb_dropout",),
        )


globals().update(family(GPTNeoXParallel, hf, HEADS))
