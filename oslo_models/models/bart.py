"""BART: encoder and decoder with learned positions, norms after the residuals."""

from typing import Any, ClassVar

from transformers import BartConfig
from transformers.models.bart import modeling_bart as hf

from oslo_models.modeling.base import ParallelModel
from oslo_models.modeling.heads import CLASSIFICATION_HEAD, LM_HEAD, QA_OUTPUTS
from oslo_models.sharding.layout import EvenSplit
from oslo_models.sharding.plan import ColumnParallel, Norm, Plan, Replicated, RowParallel, VocabParallel


class BartParallel(ParallelModel):
    """How every model of the BART family divides, and those of the families that differ from it by norms.

    Attributes:
        stacks: what the model has of encoder and decoder.
        before: norms of a stack before its blocks.
        after: norms of a stack after its blocks.
        neutral: see `Plan`; of each stack.
    """

    stacks: tuple[str, ...] = ("encoder", "decoder")
    before: ClassVar[tuple[str, ...]] = ("layernorm_embedding",)
    after: ClassVar[tuple[str, ...]] = ()
    neutral: ClassVar[dict[str, float]] = {"dropout": 0.0}

    @classmethod
    def block(cls, heads: EvenSplit, *attentions: str) -> dict[str, Replicated]:
        """The layers of a block with these attentions."""
        block = {"fc1": ColumnParallel(), "fc2": RowParallel(), "final_layer_norm": Norm()}
        for name in attentions:
            block |= {f"{name}.{side}_proj": ColumnParallel(heads) for side in "qkv"}
            block |= {f"{name}.out_proj": RowParallel(heads), f"{name}_layer_norm": Norm()}
        return block

    @staticmethod
    def heads(config: Any, stack: str) -> EvenSplit:
        """The heads of an attention of the encoder or the decoder."""
        count = getattr(config, f"{stack}_attention_heads")
        return EvenSplit(count, config.d_model // count)

    @classmethod
    def plan(cls, config: Any) -> Plan:
        blocks = {
            "encoder": cls.block(cls.heads(config, "encoder"), "self_attn"),
            "decoder": cls.block(cls.heads(config, "decoder"), "self_attn", "encoder_attn"),
        }
        before = {
            "embed_tokens": VocabParallel(),
            "embed_positions": Replicated(),
            **{name: Norm() for name in cls.before},
        }
        return Plan(
            embed={
                **({"shared": VocabParallel()} if len(cls.stacks) > 1 else {}),
                **{f"{stack}.{name}": entry for stack in cls.stacks for name, entry in before.items()},
            },
            blocks={f"{stack}.layers": blocks[stack] for stack in cls.stacks},
            head={f"{stack}.{name}": Norm() for stack in cls.stacks for name in cls.after},
            optional=("shared",),
            neutral={f"{stack}.{name}": value for stack in cls.stacks for name, value in cls.neutral.items()},
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
