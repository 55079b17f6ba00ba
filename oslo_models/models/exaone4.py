"""EXAONE 4: Llama with post-layer norms, and query and key norms for each head."""

from transformers import Exaone4Config
from transformers.models.exaone4 import modeling_exaone4 as hf

from oslo_models.modeling.heads import LM_HEAD, QA_OUTPUTS, SCORE
from oslo_models.models.llama import LlamaParallel


class Exaone4Parallel(LlamaParallel):
    """Sharding plan of the EXAONE 4 family."""

    norms = ("post_attention_layernorm", "post_feedforward_layernorm")
    head_norms = ("self_attn.q_norm", "self_attn.k_norm")


class Exaone4Model(Exaone4Parallel, hf.Exaone4Model):
    pass


class Exaone4ForCausalLM(Exaone4Parallel, hf.Exaone4ForCausalLM):
    head_plan = LM_HEAD


class Exaone4ForSequenceClassification(Exaone4Parallel, hf.Exaone4ForSequenceClassification):
    head_plan = SCORE


class Exaone4ForTokenClassification(Exaone4Parallel, hf.Exaone4ForTokenClassification):
    head_plan = SCORE


class Exaone4ForQuestionAnswering(Exaone4Parallel, hf.Exaone4ForQuestionAnswering):
    head_plan = QA_OUTPUTS
