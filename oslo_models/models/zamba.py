"""Zamba: Mamba over heads; some blocks first run a Llama block with weights that they share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from transformers import ZambaConfig
from transformers.models.zamba import modeling_zamba as hf

from oslo_models.layers.entries import (
    ColumnParallel,
    Entries,
    Norm,
    Plan,
    Replicated,
    RowParallel,
    StateSpace,
    VocabParallel,
)
from oslo_models.modeling.base import ParallelModel
from oslo_models.modeling.blocks import gated_mlp
from oslo_models.modeling.heads import LM_HEAD, SCORE
from oslo_models.models.llama import LlamaParallel
from oslo_models.sharding.layout import EvenSplit


class ZambaParallel(ParallelModel):
    """Sharding plan of the Zamba family.

    Attributes:
        shared: the name in a block of the transformer layer that blocks share.
    """

    shared: ClassVar[str] = "shared_transf"

    @classmethod
    def mixer(cls, config: Any) -> Entries:
        """Return the plan entries of a mixer. Each head has separate projections to time steps, B and C."""
        count = config.n_mamba_heads
        heads, each = EvenSplit(count, config.mamba_expand * config.hidden_size // count), EvenSplit(count)
        of_heads = ("x_proj_weight", "dt_proj_weight", "dt_proj_bias", "A_log", "D")
        return {
            "mamba": StateSpace({"n_mamba_heads": each.local_count, "intermediate_size": heads.local_extent}),
            "mamba.in_proj": ColumnParallel(EvenSplit(count, 2 * heads.width)),  # inputs and gates alternate
            **{f"mamba.conv1d.{name}": ColumnParallel(heads) for name in ("weight", "bias")},
            **{f"mamba.{name}": ColumnParallel(each) for name in of_heads},
            "mamba.out_proj": RowParallel(heads),
        }

    @classmethod
    def transformer(cls, config: Any, uses: Sequence[int]) -> Entries:
        """Return the plan entries of the shared transformer layer.

        Args:
            uses: indices of the hybrid blocks with the same shared layer, including this block.
        """
        return {**LlamaParallel.attention(config, LlamaParallel.heads(config)), **gated_mlp("feed_forward")}

    @classmethod
    def plan(cls, config: Any) -> Plan:
        alone = {**cls.mixer(config), "input_layernorm": Norm()}
        hybrid = [number for number, kind in enumerate(config.layers_block_type) if kind == "hybrid"]
        count = getattr(config, "num_mem_blocks", 1)  # number of shared layers, used in turn
        overrides: list[Entries] = [alone] * len(config.layers_block_type)
        for use, number in enumerate(hybrid):
            norms = {"input_layernorm": Norm(), "pre_ff_layernorm": Norm()}
            both = {**norms, **cls.transformer(config, range(use % count, len(hybrid), count))}
            overrides[number] = {
                **{f"{cls.shared}.{name}": entry for name, entry in both.items()},
                **{f"mamba_decoder.{name}": entry for name, entry in alone.items()},
                "linear": Replicated(),
            }
        return Plan(
            embed={"embed_tokens": VocabParallel()},
            blocks={"layers": {}},
            block_overrides={"layers": overrides},
            head={"final_layernorm": Norm()},
            optional=("conv1d.bias",),
        ).with_rules(single_stage_reason="its blocks share an attention and an MLP, which read the embeddings")


class ZambaModel(ZambaParallel, hf.ZambaModel):
    pass


class ZambaForCausalLM(ZambaParallel, hf.ZambaForCausalLM):
    head_plan = LM_HEAD


class ZambaForSequenceClassification(ZambaParallel, hf.ZambaForSequenceClassification):
    head_plan = SCORE
