"""ProphetNet: an encoder, and a decoder with several prediction streams and replicated self-attention.

In this self-attention, transformers applies position biases to different heads than it computed them for. The logits
are gathered before the loss, because the loss covers all streams together.
"""

from collections.abc import Collection
from typing import Any, ClassVar

from transformers import ProphetNetConfig
from transformers.models.prophetnet import modeling_prophetnet as hf

from oslo_models.layers.entries import (
    ColumnParallel,
    LocalAttributes,
    Norm,
    Plan,
    Replicated,
    RowParallel,
    VocabParallel,
)
from oslo_models.modeling.base import ParallelModel
from oslo_models.modeling.blocks import qkv
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.sharding.layout import EvenSplit


class ProphetNetParallel(ParallelModel):
    """Sharding plan of the ProphetNet family.

    Attributes:
        stacks: the stacks of the model, with the prefixes of their module names.
    """

    stacks: ClassVar[dict[str, str]] = {"encoder": "encoder.", "decoder": "decoder."}
    loss_needs_full_logits = True

    @classmethod
    def plan(cls, config: Any) -> Plan:
        embed: dict[str, Replicated] = {"word_embeddings": VocabParallel()} if all(cls.stacks.values()) else {}
        blocks = {}
        for stack, path in cls.stacks.items():
            embed |= {f"{path}word_embeddings": VocabParallel(), f"{path}position_embeddings": Replicated()}
            embed |= {f"{path}embeddings_layer_norm": Norm()}
            block: dict[str, Replicated] = {
                "feed_forward.intermediate": ColumnParallel(),
                "feed_forward.output": RowParallel(),
            }
            block |= {"self_attn_layer_norm": Norm(), "feed_forward_layer_norm": Norm()}
            sharded = "self_attn" if stack == "encoder" else "cross_attn"
            if stack == "decoder":
                embed[f"{path}ngram_embeddings"] = Replicated()
                block["self_attn"] = Replicated()
            if stack == "encoder" or config.add_cross_attention:
                count = getattr(config, f"num_{stack}_attention_heads")
                heads = EvenSplit(count, config.hidden_size // count)
                block |= {
                    sharded: LocalAttributes(
                        {"num_attn_heads": heads.local_count}, per_head={"attention_mask": heads}, width=heads
                    ),
                    **qkv(sharded, heads, ("query_proj", "key_proj", "value_proj")),
                    f"{sharded}.out_proj": RowParallel(heads),
                    f"{sharded}_layer_norm": Norm(),
                }
            blocks[f"{path}layers"] = block
        return Plan(embed=embed, blocks=blocks, head={}).with_rules(
            single_stage_reason="its position embedding also reads the token ids, and its streams start after it"
        )

    @classmethod
    def replicated_attentions(cls, config: Any) -> Collection[str]:
        side = "decoder_" if len(cls.stacks) > 1 else ""
        return (f"{side}attentions", f"{side}ngram_attentions") if "decoder" in cls.stacks else ()


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
