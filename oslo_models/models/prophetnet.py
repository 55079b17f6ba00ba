"""ProphetNet: an encoder, and a decoder of several streams, whose attention to itself is whole on every rank.

There, transformers gives biases of positions to other heads than those that they were made for. Whole are also the
logits before a loss, which is one of all streams together.
"""

from typing import Any, ClassVar

from transformers import ProphetNetConfig
from transformers.models.prophetnet import modeling_prophetnet as hf

from oslo_models.modeling.base import ParallelModel
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.sharding.layout import EvenSplit
from oslo_models.sharding.plan import ColumnParallel, Norm, Plan, Replicated, RowParallel, VocabParallel


class ProphetNetParallel(ParallelModel):
    """How every model of the ProphetNet family divides.

    Attributes:
        stacks: what the model has of encoder and decoder, and how the names of their modules begin.
    """

    stacks: ClassVar[dict[str, str]] = {"encoder": "encoder.", "decoder": "decoder."}
    loss_needs_full_logits = True

    @classmethod
    def plan(cls, config: Any) -> Plan:
        embed: dict[str, Replicated] = {"word_embeddings": VocabParallel()} if all(cls.stacks.values()) else {}
        blocks, heads = {}, {}
        for stack, path in cls.stacks.items():
            embed |= {f"{path}word_embeddings": VocabParallel(), f"{path}position_embeddings": Replicated()}
            embed |= {f"{path}embeddings_layer_norm": Norm()}
            block: dict[str, Replicated] = {
                "feed_forward.intermediate": ColumnParallel(),
                "feed_forward.output": RowParallel(),
            }
            block |= {"self_attn_layer_norm": Norm(), "feed_forward_layer_norm": Norm()}
            divided = "self_attn" if stack == "encoder" else "cross_attn"
            if stack == "decoder":
                embed[f"{path}ngram_embeddings"] = Replicated()
                block["self_attn"] = Replicated()
            if stack == "encoder" or config.add_cross_attention:
                count = getattr(config, f"num_{stack}_attention_heads")
                own = heads[f"{path}layers.{divided}"] = EvenSplit(count, config.hidden_size // count)
                block |= {f"{divided}.{name}_proj": ColumnParallel(own) for name in ("query", "key", "value")}
                block |= {f"{divided}.out_proj": RowParallel(own), f"{divided}_layer_norm": Norm()}
            blocks[f"{path}layers"] = block
        side = "decoder_" if len(cls.stacks) > 1 else ""
        return Plan(
            embed=embed,
            blocks=blocks,
            head={},
            local={f"{path}.num_attn_heads": own.local_count for path, own in heads.items()},
            per_head={f"{path}.attention_mask": EvenSplit(own.count) for path, own in heads.items()},
            widths=heads,
            whole=(f"{side}attentions", f"{side}ngram_attentions") if "decoder" in cls.stacks else (),
            one_stage="its streams begin after the words are embedded, and its embedding of positions counts these too",
        )


class ProphetNetModel(ProphetNetParallel, hf.ProphetNetModel):
    pass


class ProphetNetEncoder(ProphetNetParallel, hf.ProphetNetEncoder):
    stacks = {"encoder": ""}


class ProphetNetDecoder(ProphetNetParallel, hf.ProphetNetDecoder):
    stacks = {"decoder": ""}


class ProphetNetForConditionalGeneration(ProphetNetParallel, hf.ProphetNetForConditionalGeneration):
    head_plan = LM_HEAD


class ProphetNetForCausalLM(ProphetNetParallel, hf.ProphetNetForCausalLM):
    head_plan = LM_HEAD
    stacks = {"decoder": "decoder."}
