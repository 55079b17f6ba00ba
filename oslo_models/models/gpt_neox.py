"""GPT-NeoX: rotary positions, parallel or sequential attention and MLP, query, key and value of each head adjacent."""

from typing import Any

from transformers import GPTNeoXConfig
from transformers.models.gpt_neox import modeling_gpt_neox as hf

from oslo_models.layers.entries import ColumnParallel, Norm, Plan, RowParallel, VocabParallel
from oslo_models.modeling.base import ParallelModel
from oslo_models.modeling.heads import CLASSIFIER, LM_HEAD, QA_OUTPUTS, SCORE
from oslo_models.sharding.layout import EvenSplit


class GPTNeoXParallel(ParallelModel):
    """Sharding plan of the GPT-NeoX family."""

    @classmethod
    def plan(cls, config: Any) -> Plan:
        heads = config.num_attention_heads
        block = {
            "input_layernorm": Norm(),
            "attention.query_key_value": ColumnParallel(EvenSplit(heads, 3 * config.hidden_size // heads)),
            "attention.dense": RowParallel(EvenSplit(heads, config.hidden_size // heads)),
            "post_attention_layernorm": Norm(),
            "mlp.dense_h_to_4h": ColumnParallel(),
            "mlp.dense_4h_to_h": RowParallel(),
        }
        return Plan(
            embed={"embed_in": VocabParallel()},
            blocks={"layers": block},
            head={"final_layer_norm": Norm()},
        ).with_rules(embedding_dropouts=("emb_dropout",))


class GPTNeoXModel(GPTNeoXParallel, hf.GPTNeoXModel):
    pass


class GPTNeoXForCausalLM(GPTNeoXParallel, hf.GPTNeoXForCausalLM):
    head_plan = LM_HEAD


class GPTNeoXForSequenceClassification(GPTNeoXParallel, hf.GPTNeoXForSequenceClassification):
    head_plan = SCORE


class GPTNeoXForTokenClassification(GPTNeoXParallel, hf.GPTNeoXForTokenClassification):
    head_plan = CLASSIFIER


class GPTNeoXForQuestionAnswering(GPTNeoXParallel, hf.GPTNeoXForQuestionAnswering):
    head_plan = QA_OUTPUTS
