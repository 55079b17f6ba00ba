"""Nemotron-H: blocks of one mixer each: Mamba-2, attention, an MLP or experts, without gates."""

from typing import Any

from transformers import NemotronHConfig
from transformers.models.nemotron_h import modeling_nemotron_h as hf

from oslo_models.layers.entries import (
    ColumnParallel,
    Entries,
    Experts,
    Norm,
    Plan,
    Replicated,
    RowParallel,
    VocabParallel,
)
from oslo_models.modeling.base import ParallelModel
from oslo_models.modeling.blocks import state_space
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.llama import LlamaParallel
from oslo_models.sharding.layout import GroupedHeads


class NemotronHParallel(ParallelModel):
    """Sharding plan of the Nemotron-H family."""

    mixture: Entries = {
        "mixer.gate": Replicated(),
        "mixer.fc1_latent_proj": Replicated(),
        "mixer.experts": Experts(),
        "mixer.fc2_latent_proj": Replicated(),
        "mixer.shared_experts.up_proj": ColumnParallel(),
        "mixer.shared_experts.down_proj": RowParallel(),
    }

    @classmethod
    def plan(cls, config: Any) -> Plan:
        query_heads = LlamaParallel.heads(config)
        attention = LlamaParallel.attention(config, query_heads)
        heads = GroupedHeads(config.mamba_num_heads, config.n_groups, config.mamba_head_dim)
        mixers: Entries = {
            **state_space("mixer", heads, config.ssm_state_size, {"num_key_value_groups": query_heads.local_ratio}),
            **{name.replace("self_attn.", "mixer."): entry for name, entry in attention.items() if "." in name},
            "mixer.up_proj": ColumnParallel(),
            "mixer.down_proj": RowParallel(),
            **cls.mixture,
        }
        return Plan(
            embed={"embeddings": VocabParallel()},
            blocks={"layers": {"norm": Norm(), **mixers}},
            head={"norm_f": Norm()},
            optional=tuple(mixers),
        )


class NemotronHModel(NemotronHParallel, hf.NemotronHModel):
    pass


class NemotronHForCausalLM(NemotronHParallel, hf.NemotronHForCausalLM):
    head_plan = LM_HEAD
