"""Plan entries that the blocks of many architectures share."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from oslo_models.layers.entries import (
    ColumnParallel,
    Entries,
    Experts,
    GroupWidthNorm,
    HeadNorm,
    InnerRowParallel,
    LocalAttributes,
    LocalValue,
    Norm,
    Plan,
    Replicated,
    RowParallel,
    StateSpace,
)
from oslo_models.sharding.layout import EvenSplit, GroupedHeads

QUERY_KEY_VALUE = ("query", "key", "value")
_SEVERAL_STREAMS = "hidden states have several streams, which become one after the last block"
"""Why blocks with several streams (hyper-connections) cannot be split into pipeline stages."""


def heads_of(config: Any) -> EvenSplit:
    """Return the attention heads of a configuration. Together they have the width of the hidden states."""
    return EvenSplit(config.num_attention_heads, config.hidden_size // config.num_attention_heads)


def qkv(
    attention: str, heads: EvenSplit, names: Collection[str] = ("q_proj", "k_proj", "v_proj")
) -> dict[str, ColumnParallel]:
    """Return entries of separate query, key and value projections, with equal numbers of key-value and query heads.

    Args:
        attention: the name of the attention module inside the block.
        heads: the attention heads.
        names: the names of the projections inside the attention module.
    """
    return {f"{attention}.{name}": ColumnParallel(heads) for name in names}


def gated_mlp(mlp: str, fused: bool = False) -> Entries:
    """Return the entries of a gated MLP, by its name inside the block.

    Args:
        fused: whether gate and up projection share one matrix, ``gate_up_proj``.
    """
    if fused:
        return {f"{mlp}.gate_up_proj": ColumnParallel(parts=2), f"{mlp}.down_proj": RowParallel()}
    return {
        f"{mlp}.gate_proj": ColumnParallel(),
        f"{mlp}.up_proj": ColumnParallel(),
        f"{mlp}.down_proj": RowParallel(),
    }


def bart_block(heads: EvenSplit, *attentions: str) -> dict[str, Replicated]:
    """Return the entries of a block with BART's names: attentions and an MLP of two layers, each with a norm.

    Args:
        heads: the heads of each attention module.
        attentions: the names of the attention modules inside the block.
    """
    block: dict[str, Replicated] = {"fc1": ColumnParallel(), "fc2": RowParallel(), "final_layer_norm": Norm()}
    for name in attentions:
        block |= qkv(name, heads)
        block |= {f"{name}.out_proj": RowParallel(heads), f"{name}_layer_norm": Norm()}
    return block


def nested_attention_block(heads: EvenSplit) -> dict[str, Replicated]:
    """Return the entries of a block of images with BERT's names: norms before attention and MLP."""
    return {
        "layernorm_before": Norm(),
        "attention.attention": LocalAttributes(
            {"num_attention_heads": heads.local_count, "all_head_size": heads.local_extent}
        ),
        **qkv("attention.attention", heads, QUERY_KEY_VALUE),
        "attention.output.dense": RowParallel(heads),
        "layernorm_after": Norm(),
        "intermediate.dense": ColumnParallel(),
        "output.dense": RowParallel(),
    }


def attention_sinks(heads: GroupedHeads) -> ColumnParallel:
    """Return the entry of attention sinks: one learned logit per query head in the softmax over the keys."""
    return ColumnParallel(replace(heads, head_dim=1).query)


def mixture_of_experts(mlp: str = "mlp", router: str = "gate", shared: str = "", fused: bool = False) -> Entries:
    """Return the entries of a replicated router, stacked experts and optional shared experts.

    Args:
        mlp: the name of the mixture inside the block.
        router: the name of the router inside the mixture.
        shared: the name of the shared experts inside the mixture. Their output is added to the routed experts' output.
        fused: whether gate and up projection of the shared experts share one matrix.
    """
    routed: Entries = {f"{mlp}.{router}": Replicated(), f"{mlp}.experts": Experts(shared=shared)}
    return {**routed, **gated_mlp(f"{mlp}.{shared}", fused)} if shared else routed


def state_space(
    mixer: str, heads: GroupedHeads, state: int, attributes: Mapping[str, LocalValue] | None = None
) -> Entries:
    """Return the entries of a Mamba-2 mixer.

    One projection computes gate, input, B, C and time steps. The heads of a group share B and C.

    Args:
        mixer: the name of the mixer inside the block.
        heads: the heads, with the groups in place of key-value heads.
        state: the width of B and C.
        attributes: further local attributes, for mixers of other types with the same name.
    """
    shared, scalar = replace(heads, head_dim=state).key_value, replace(heads, head_dim=1).query
    parts = (heads.query, shared, shared)
    local: dict[str, LocalValue] = {
        "num_heads": heads.query.local_count,
        "n_groups": shared.local_count,
        "intermediate_size": heads.query.local_extent,
        "conv_dim": lambda n, rank: sum(part.local_extent(n, rank) for part in parts),
    }
    return {
        mixer: StateSpace({**local, **(attributes or {})}),
        f"{mixer}.in_proj": ColumnParallel(heads.query, *parts, scalar),
        f"{mixer}.conv1d.weight": ColumnParallel(*parts),  # one filter per channel
        f"{mixer}.conv1d.bias": ColumnParallel(*parts),
        **{f"{mixer}.{name}": ColumnParallel(scalar) for name in ("A_log", "D", "dt_bias")},
        f"{mixer}.norm": GroupWidthNorm(heads.query, heads.kv_heads),
        f"{mixer}.out_proj": RowParallel(heads.query),
    }


def selective_scan(mixer: str, normed: bool = False) -> Entries:
    """Return the entries of a Mamba mixer with sharded channels.

    All channels share the time steps, B and C, and contribute to them.

    Args:
        mixer: the name of the mixer inside the block.
        normed: whether the mixer normalises time steps, B and C.
    """
    norms = {f"{mixer}.{name}_layernorm": HeadNorm() for name in ("dt", "b", "c")} if normed else {}
    of_channels = ("conv1d.weight", "conv1d.bias", "dt_proj.weight", "dt_proj.bias", "A_log", "D")
    return {
        mixer: StateSpace(),
        f"{mixer}.in_proj": ColumnParallel(parts=2),
        **{f"{mixer}.{name}": ColumnParallel() for name in of_channels},
        f"{mixer}.x_proj": InnerRowParallel(),
        **norms,
        f"{mixer}.out_proj": RowParallel(),
    }


def replicated_attention(plan: Plan, additional: Collection[str] = ()) -> Plan:
    """Return a BERT-like plan with the attention of each block replicated on every rank.

    Args:
        additional: further attention modules besides query, key and value.
    """
    (stack, block), *_ = plan.blocks.items()
    entries = {
        name: Replicated() if "attention." in name and not isinstance(entry, Norm) else entry
        for name, entry in block.items()
        if not isinstance(entry, LocalAttributes)
    }
    for name in block:
        if name.endswith(".self.query"):
            entries |= {f"{name.removesuffix('query')}{other}": Replicated() for other in additional}
    return replace(plan, blocks={stack: entries})


def of_several_streams(plan: Plan, head: Entries) -> Plan:
    """Return the plan of a model with several streams of hidden states (hyper-connections).

    Args:
        head: the entries of the modules that merge the streams after the last block.
    """
    return replace(plan, head=head).with_rules(single_stage_reason=_SEVERAL_STREAMS)
