"""Megatron-BERT: BERT with norms before attention and MLP."""

from dataclasses import replace
from typing import Any

from transformers.models.megatron_bert import modeling_megatron_bert as hf

from oslo_models.models.bert import LM_HEAD, BertParallel
from oslo_models.models.family import family
from oslo_models.plan import Entries, Norm, Plan, Replicated

CLASSIFIER: Entries = {"classifier": Replicated()}
HEADS: dict[str, Entries] = {
    "Model": {},
    "ForPreTraining": {**LM_HEAD, "cls.seq_relationship": Replicated()},
    "ForCausalLM": LM_HEAD,
    "ForMaskedLM": LM_HEAD,
    "ForNextSentencePrediction": {"cls.seq_relationship": Replicated()},
    "ForSequenceClassification": CLASSIFIER,
    "ForMultipleChoice": CLASSIFIER,
    "ForTokenClassification": CLASSIFIER,
    "ForQuestionAnswering": {"qa_outputs": Replicated()},
}


class MegatronBertParallel(BertParallel):
    """How every model of the Megatron-BERT family divides."""

    @classmethod
    def plan(cls, config: Any) -> Plan:
        plan = super().plan(config)
        (block,) = plan.blocks.values()
        norms = {name.replace("output.LayerNorm", "ln") for name in block if name.endswith("LayerNorm")}
        layers = {name: entry for name, entry in block.items() if not name.endswith("LayerNorm")}
        embed = {name: entry for name, entry in plan.embed.items() if not name.endswith("LayerNorm")}
        blocks = {"encoder.layer": {**layers, **{name: Norm() for name in norms}}}
        return replace(plan, embed=embed, blocks=blocks, head={"encoder.ln": Norm(), **plan.head})


globals().update(family(MegatronBertParallel, hf, HEADS))
