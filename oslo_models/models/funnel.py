"""Funnel: blocks that pool the sequence, a decoder that upsamples it, attention to relative positions."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import FunnelConfig
from transformers.models.funnel import modeling_funnel as hf

from oslo_models.layers.entries import ColumnParallel, Entries, Norm, Plan, Replicated, RowParallel, VocabParallel
from oslo_models.modeling.base import ParallelModel
from oslo_models.modeling.blocks import qkv
from oslo_models.modeling.heads import LM_HEAD, QA_OUTPUTS
from oslo_models.models.xlnet import EinsumHeads
from oslo_models.sharding.layout import EvenSplit

CLASSIFIER: Entries = {"classifier.linear_hidden": Replicated(), "classifier.linear_out": Replicated()}


class FunnelParallel(ParallelModel):
    """Sharding plan of the Funnel family."""

    decodes: bool = True

    def _initialized_whole(self) -> list[str]:
        """Return all linear layers: their standard deviation depends on the full shape."""
        return [name for name, module in self.named_modules() if isinstance(module, nn.Linear)]

    @classmethod
    def plan(cls, config: Any) -> Plan:
        heads, count = EvenSplit(config.n_head, config.d_head), EvenSplit(config.n_head)
        layer = {
            **qkv("attention", heads, ("q_head", "k_head", "v_head")),
            "attention": EinsumHeads(count, {"config.n_head": count.local_count}),
            "attention.post_proj": RowParallel(heads),
            "attention.layer_norm": Norm(),
            "ffn.linear_1": ColumnParallel(),
            "ffn.linear_2": RowParallel(),
            "ffn.layer_norm": Norm(),
        }
        block = {f"{i}.{name}": entry for i in range(max(config.block_sizes)) for name, entry in layer.items()}
        return Plan(
            embed={"embeddings.word_embeddings": VocabParallel(), "embeddings.layer_norm": Norm()},
            blocks={"encoder.blocks": block, **({"decoder.layers": layer} if cls.decodes else {})},
            head={},
            optional=[name for name in block if int(name.partition(".")[0]) >= min(config.block_sizes)],
        ).with_rules(
            single_stage_reason="the sequence is pooled between blocks, and the decoder adds the output of the first"
        )


class FunnelModel(FunnelParallel, hf.FunnelModel):
    pass


class FunnelBaseModel(FunnelParallel, hf.FunnelBaseModel):
    decodes = False


class FunnelForPreTraining(FunnelParallel, hf.FunnelForPreTraining):
    head_plan = {
        "discriminator_predictions.dense": Replicated(),
        "discriminator_predictions.dense_prediction": Replicated(),
    }


class FunnelForMaskedLM(FunnelParallel, hf.FunnelForMaskedLM):
    head_plan = LM_HEAD


class FunnelForSequenceClassification(FunnelParallel, hf.FunnelForSequenceClassification):
    head_plan = CLASSIFIER
    decodes = False


class FunnelForMultipleChoice(FunnelParallel, hf.FunnelForMultipleChoice):
    head_plan = CLASSIFIER
    decodes = False


class FunnelForTokenClassification(FunnelParallel, hf.FunnelForTokenClassification):
    head_plan = {"classifier": Replicated()}


class FunnelForQuestionAnswering(FunnelParallel, hf.FunnelForQuestionAnswering):
    head_plan = QA_OUTPUTS
