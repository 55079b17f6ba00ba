"""BioGPT: OPT with scaled embeddings."""

from typing import Any

from transformers import BioGptConfig
from transformers.models.biogpt import modeling_biogpt as hf

from oslo_models.layers.entries import LocalAttributes, Norm, Plan, Replicated, VocabParallel
from oslo_models.modeling.base import ParallelModel
from oslo_models.modeling.blocks import bart_block, heads_of
from oslo_models.modeling.heads import CLASSIFIER, SCORE


class BioGptParallel(ParallelModel):
    """Sharding plan of the BioGPT family."""

    @classmethod
    def plan(cls, config: Any) -> Plan:
        heads = heads_of(config)
        block = {"self_attn": LocalAttributes({"num_heads": heads.local_count}), **bart_block(heads, "self_attn")}
        return Plan(
            embed={"embed_tokens": VocabParallel(), "embed_positions": Replicated()},
            blocks={"layers": block},
            head={"layer_norm": Norm()},
        ).with_rules(disabled_after_first_stage={"dropout": 0.0})


class BioGptModel(BioGptParallel, hf.BioGptModel):
    pass


class BioGptForCausalLM(BioGptParallel, hf.BioGptForCausalLM):
    head_plan = {"output_projection": VocabParallel()}


class BioGptForSequenceClassification(BioGptParallel, hf.BioGptForSequenceClassification):
    head_plan = SCORE


class BioGptForTokenClassification(BioGptParallel, hf.BioGptForTokenClassification):
    head_plan = CLASSIFIER
