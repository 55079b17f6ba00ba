"""BART: encoder-decoder with learned positions and post-layer norms."""

from typing import Any, ClassVar

from transformers import BartConfig
from transformers.models.bart import modeling_bart as hf

from oslo_models.layers.entries import Norm, Plan, Replicated, VocabParallel
from oslo_models.modeling.base import ParallelModel
from oslo_models.modeling.blocks import bart_block
from oslo_models.modeling.heads import CLASSIFICATION_HEAD, LM_HEAD, QA_OUTPUTS
from oslo_models.sharding.layout import EvenSplit


class BartParallel(ParallelModel):
    """Sharding plan of the BART family, and base class for families with other norms or positions.

    Attributes:
        stacks: the stacks of the model: encoder, decoder or both.
        embedding_norms: norms of a stack before its blocks.
        final_norms: norms of a stack after its blocks.
        embedding_changes: `PipelineRules.disabled_after_first_stage` of each stack.
    """

    stacks: tuple[str, ...] = ("encoder", "decoder")
    embedding_norms: ClassVar[tuple[str, ...]] = ("layernorm_embedding",)
    final_norms: ClassVar[tuple[str, ...]] = ()
    embedding_changes: ClassVar[dict[str, float]] = {"dropout": 0.0}

    @classmethod
    def block(cls, heads: EvenSplit, *attentions: str) -> dict[str, Replicated]:
        """Return the plan entries of a block with these attention layers."""
        return bart_block(heads, *attentions)

    @staticmethod
    def heads(config: Any, stack: str) -> EvenSplit:
        """Return the attention heads of the encoder or the decoder."""
        count = getattr(config, f"{stack}_attention_heads")
        return EvenSplit(count, config.d_model // count)

    @classmethod
    def plan(cls, config: Any) -> Plan:
        attentions = {"encoder": ("self_attn",), "decoder": ("self_attn", "encoder_attn")}
        embedding = {
            "embed_tokens": VocabParallel(),
            "embed_positions": Replicated(),
            **{name: Norm() for name in cls.embedding_norms},
        }
        return Plan(
            embed={
                **({"shared": VocabParallel()} if len(cls.stacks) > 1 else {}),
                **{f"{stack}.{name}": entry for stack in cls.stacks for name, entry in embedding.items()},
            },
            blocks={f"{stack}.layers": cls.block(cls.heads(config, stack), *attentions[stack]) for stack in cls.stacks},
            head={f"{stack}.{name}": Norm() for stack in cls.stacks for name in cls.final_norms},
            optional=("shared",),
        ).with_rules(
            disabled_after_first_stage={
                f"{stack}.{name}": value for stack in cls.stacks for name, value in cls.embedding_changes.items()
            }
        )


class BartModel(BartParallel, hf.BartModel):
    pass


class BartForConditionalGeneration(BartParallel, hf.BartForConditionalGeneration):
    head_plan = LM_HEAD


class BartForCausalLM(BartParallel, hf.BartForCausalLM):
    head_plan = LM_HEAD
    stacks = ("decoder",)


class BartForSequenceClassification(BartParallel, hf.BartForSequenceClassification):
    head_plan = CLASSIFICATION_HEAD


class BartForQuestionAnswering(BartParallel, hf.BartForQuestionAnswering):
    head_plan = QA_OUTPUTS
