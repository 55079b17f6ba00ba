"""Multi-token prediction (MTP) heads: blocks behind the decoder that predict the tokens after the next one.

The head of depth ``k`` joins the hidden state of a token with the embedding of the token ``k`` places later. Its block
and the language-model head predict the token after that one. Training adds the losses of the heads; generation drafts
tokens with them. Source: DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 2.2.

In most models, a head reads the hidden states of the head before it, and the first head reads the normed states of the
decoder. In MiMo-V2, every head reads the decoder's states before the final norm (SGLang's multi-layer EAGLE worker and
its MiMo-V2 models, with code of Xiaomi).

transformers leaves the heads of a checkpoint out. `class_with_mtp_heads` adds them to a model class, with the names of
published checkpoints, so that the plan of the decoder shards them, and checkpoints are read and saved as they are.

Legend:
    B: rows.
    L: positions.
    D: hidden size.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers.core_model_loading import WeightRenaming
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from oslo_models.cache_argument import NAMES, cache_name
from oslo_models.distributed.sharded_tensor import without_override
from oslo_models.fusion.lazy_logits import LazyLogits
from oslo_models.layers.entries import Entries, Norm, Replicated
from oslo_models.layers.sharded_activation import gathered
from oslo_models.layers.vocab_parallel import VocabParallelLogits
from oslo_models.modeling.forward import within_model
from oslo_models.registry import MTP_HEADS, count_mtp_heads, model_type_of
from oslo_models.sharding.plan import Plan


class _Head(NamedTuple):
    """The modules of one head. ``norm`` belongs before the language-model head."""

    embedding_norm: nn.Module
    hidden_norm: nn.Module
    projection: nn.Module
    block: nn.Module
    norm: nn.Module


@dataclass(frozen=True)
class _Names:
    """Names of the modules of heads in published checkpoints.

    Attributes:
        stack: path of the list of blocks.
        follows: whether the blocks of the decoder come first in this list.
        inside: whether each block has the other modules of its head inside. Otherwise they are beside the list, and all
            heads share them.
        reads_normed: whether a head reads normed hidden states, of the head before it. Otherwise every head reads the
            hidden states of the decoder before its norm.
        attention: kind of attention in the blocks.
        mlp: kind of MLP in the blocks, as in ``mlp_layer_types``.
        renamed: names of modules inside a block in checkpoints, with their names in transformers' block.
    """

    stack: str
    follows: bool
    inside: bool
    embedding_norm: str
    hidden_norm: str
    projection: str
    norm: str
    reads_normed: bool = True
    attention: str = "full_attention"
    mlp: str = "sparse"
    renamed: Mapping[str, str] = field(default_factory=dict)

    def block(self, depth: int, config: Any) -> str:
        """Return the path of the block of a head."""
        return f"{self.stack}.{depth + config.num_hidden_layers * self.follows}"

    def around(self, depth: int, config: Any) -> dict[str, str]:
        """Return the paths of the other modules of a head, by their names in `_Head`."""
        prefix = self.block(depth, config) if self.inside else self.stack.rpartition(".")[0]
        names = ("embedding_norm", "hidden_norm", "projection", "norm")
        return {name: f"{prefix}.{getattr(self, name)}" for name in names}

    def block_entries(self, cls: Any, config: Any) -> Entries:
        """Return the entries of a block that is not in a list of the plan.

        Raises:
            ValueError: no block of the decoder has the attention of the heads.
        """
        plan = cls.plan(config)
        if (overrides := plan.block_overrides.get("layers")) is None:
            return dict(plan.blocks["layers"])
        if self.attention not in config.layer_types:
            raise ValueError(
                f"mtp_heads=True needs the layout of {self.attention}, which the heads have, and layer_types of the "
                f"configuration has {', '.join(sorted({*config.layer_types}))} only: leave mtp_heads out"
            )
        return {**plan.blocks["layers"], **overrides[config.layer_types.index(self.attention)]}

    def renamings(self) -> list[WeightRenaming]:
        """Return the renamings of weights from checkpoints to the model."""
        path = re.escape(self.stack) + r"\.(\d+)\."
        return [WeightRenaming(path + old, rf"{self.stack}.\1.{new}") for old, new in self.renamed.items()]


_FOLLOWING = _Names("model.layers", True, True, "enorm", "hnorm", "eh_proj", "shared_head.norm")
_BESIDE = _Names("mtp.layers", False, False, "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
_OF_MIMO = _Names(
    *("model.mtp.layers", False, True, "enorm", "hnorm", "eh_proj", "final_layernorm"),
    reads_normed=False,
    attention="sliding_attention",
    mlp="dense",
    renamed={"pre_mlp_layernorm": "post_attention_layernorm"},
)
_NAMES: Mapping[str, _Names] = {
    **dict.fromkeys(("glm4_moe", "glm4_moe_lite", "deepseek_v3"), _FOLLOWING),
    "deepseek_v32": replace(_FOLLOWING, attention="indexed_attention"),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), _BESIDE),
    "mimo_v2_flash": _OF_MIMO,
}
_COPIES = r"layers\.\d+\.(embed_tokens|shared_head\.head)\.weight$"
"""Copies of the embedding and the language-model head in published heads. The model shares its own with them."""


_IGNORED = -100
"""Label of positions without a loss."""


class MtpHeads:
    """The part of a parallel class that has MTP heads. The next base is the class of the decoder.

    `start_mtp_heads` sets ``mtp_loss_weight``, the weight of the heads' mean loss in the loss of a training step.
    """

    @classmethod
    def plan(cls: Any, config: Any) -> Plan:
        """Return the plan of the decoder. The last stage has the heads, and embeds their tokens."""
        following = {"layers": count_mtp_heads(cls, config)} if _names_of(cls).follows else {}
        plan: Plan = super().plan(config)  # type: ignore[misc]
        return plan.with_rules(kept_on_last_stage=tuple(plan.embed), blocks_of_head=following)

    @classmethod
    def head_entries(cls: Any, config: Any) -> Entries:
        names, entries = _names_of(cls), dict[str, Replicated]()
        for depth in range(count_mtp_heads(cls, config)):
            around = names.around(depth, config)
            entries |= {path: Replicated() if name == "projection" else Norm() for name, path in around.items()}
            if not names.follows:  # else, the plan of the decoder has entries for all blocks in its list
                block = names.block_entries(cls, config)
                entries |= {f"{names.block(depth, config)}.{name}": entry for name, entry in block.items()}
        return {**super().head_entries(config), **entries}  # type: ignore[misc]

    def _add_modules(self: Any) -> None:
        names, config, norm = _names_of(type(self)), self.config, self.base_model.norm
        block_class, size = type(self.base_model.layers[-1]), config.hidden_size
        if not names.follows:
            _set_module(self, names.stack, nn.ModuleList())
        for depth in range(count := count_mtp_heads(type(self), config)):
            with _with_further_blocks(config, names, count):
                self.get_submodule(names.stack).append(block_class(config, config.num_hidden_layers + depth))
            for name, path in names.around(depth, config).items():
                made = nn.Linear(2 * size, size, bias=False) if name == "projection" else _like(norm, size)
                _set_module(self, path, made)

    def _shard(self: Any, *args: Any, **kwargs: Any) -> None:
        super()._shard(*args, **kwargs)  # type: ignore[misc]
        names = _names_of(type(self))
        if self.stage is not None and self.stage.is_last and not names.follows:
            for depth in range(count_mtp_heads(type(self), self.config)):  # a cache has layers of local blocks only
                self.mtp_head(depth).block.self_attn.layer_idx -= self.stage.stacks[-1].blocks_before

    def _forward_of_stage(self) -> Callable[..., Any]:
        return _with_loss_of_stage(type(self).forward.__wrapped__.__wrapped__)  # type: ignore[attr-defined]

    def start_mtp_heads(self: Any, loss_weight: float) -> None:
        """Set the weight of the heads' loss. Freeze them if it is 0."""
        self.mtp_loss_weight = loss_weight
        if not loss_weight:
            for name in self.mtp_names():
                self.get_parameter_or_buffer(name).requires_grad_(False)

    def mtp_names(self: Any) -> list[str]:
        """Return the names of all parameters and buffers of the heads."""
        names, inside = _names_of(type(self)), tuple[str, ...]()
        for depth in range(count_mtp_heads(type(self), self.config)):
            paths = names.block(depth, self.config), *names.around(depth, self.config).values()
            inside += tuple(f"{path}." for path in paths)
        return [name for name in self.state_dict() if name.startswith(inside)]

    def own_renamings(self) -> list[WeightRenaming]:
        """Return the renamings of weights from checkpoints to the model that transformers does not know."""
        return _names_of(type(self)).renamings()

    def mtp_head(self: Any, depth: int) -> _Head:
        """Return the modules of a head."""
        names = _names_of(type(self))
        around = {name: self.get_submodule(path) for name, path in names.around(depth, self.config).items()}
        return _Head(block=self.get_submodule(names.block(depth, self.config)), **around)

    def mtp_hidden_states(
        self: Any,
        ids_BL: Tensor,
        hidden_BLD: Tensor,
        positions_BL: Tensor,
        mask_BL: Tensor | None,
        cache: Any = None,
        depth: int = 0,
    ) -> Tensor:
        """Return the hidden states [B, L, D] of a head. They are normed if heads read normed states.

        Args:
            ids_BL: the tokens whose embeddings the head joins with the hidden states.
            hidden_BLD: of the former head or of the decoder, normed or not as the heads read them.
            positions_BL: of the tokens.
            mask_BL: of all tokens, including tokens in the cache; ``None`` if all are read.
            cache: with the keys and values of earlier tokens, in the layer of the head's block.

        Raises:
            ValueError: FSDP2 shards the block of the head apart, and its other modules are inside.
        """
        head, base, names = self.mtp_head(depth), self.base_model, _names_of(type(self))
        if names.inside and isinstance(head.block, FSDPModule):  # it gathers their weights for the block's forward only
            raise ValueError(
                f"fully_shard of {names.block(depth, self.config)} does not work: the block has the other modules of "
                "an MTP head inside, which run before and after it. Leave it out, and wrap the model around it"
            )
        embedded_BLD = self.get_input_embeddings()(ids_BL)
        joined = torch.cat((head.embedding_norm(embedded_BLD), head.hidden_norm(hidden_BLD)), -1)
        x = head.projection(joined)
        layer: Any = head.block
        given = {cache_name(create_causal_mask): cache, "layer_idx": layer.self_attn.layer_idx}
        is_windowed = names.attention == "sliding_attention"
        if names.attention == "indexed_attention":  # the indexer reads the mask, too
            given["allow_is_causal_skip"] = False
        create_mask = create_sliding_window_causal_mask if is_windowed else create_causal_mask
        mask = create_mask(
            config=self.config, inputs_embeds=x, attention_mask=mask_BL, position_ids=positions_BL, **given
        )
        by_kind = {"layer_type": names.attention} if hasattr(base.rotary_emb, f"{names.attention}_inv_freq") else {}
        # rotations of time, height and width have the positions of tokens
        has_planes = hasattr(base.rotary_emb, "mrope_section")
        planes = positions_BL[None].expand(3, -1, -1) if has_planes else positions_BL
        options = {cache_name(type(layer).forward): cache, "use_cache": cache is not None}
        x = layer(
            x,
            attention_mask=mask,
            position_ids=positions_BL,
            position_embeddings=base.rotary_emb(x, position_ids=planes, **by_kind),
            **options,
        )
        x = x[0] if isinstance(x, tuple) else x
        normed: Tensor = head.norm(x) if names.reads_normed else x
        return normed

    def mtp_logits(self: Any, hidden: Tensor, depth: int = 0) -> Any:
        """Return the logits after hidden states [..., D] of a head, as `mtp_hidden_states` returns them."""
        normed = hidden if _names_of(type(self)).reads_normed else self.mtp_head(depth).norm(hidden)
        return self.get_output_embeddings()(normed)

    def mtp_items(self: Any, given: Any) -> Tensor:
        """Return the number of labels by which the loss of each head is divided, [heads].

        Args:
            given: arguments of the forward, by their names.

        Raises:
            ValueError: the rows are packed, or are no tokens.
        """
        ids_BL = given.get("input_ids")
        for name in ("inputs_embeds", "position_ids", *NAMES):
            if given.get(name) is not None:
                raise ValueError(
                    f"{name} is not supported with mtp_loss_weight={self.mtp_loss_weight}: the heads read whole rows "
                    "of input_ids, with an attention_mask for padding. Set mtp_loss_weight=0"
                )
        depths = range(min(count_mtp_heads(type(self), self.config), ids_BL.shape[1] - 2))
        if (items := given.get("num_items_in_batch")) is not None:
            return torch.as_tensor(items, device=ids_BL.device).expand(len(depths))
        counts = [(_labels_of_head(given, depth)[:, 1:] != _IGNORED).sum().clamp(min=1) for depth in depths]
        return torch.stack(counts) if counts else ids_BL.new_zeros(0)

    def mtp_loss(self: Any, given: Any, hidden_BLD: Tensor, items: Tensor) -> Tensor:
        """Return the mean loss of the heads.

        Args:
            given: arguments of the forward, by their names.
            hidden_BLD: of the decoder, as the heads read them.
            items: of `mtp_items`, for the whole batch if these arguments are a micro-batch.
        """
        ids_BL, mask_BL = given.get("input_ids"), given.get("attention_mask")
        positions_BL = torch.arange(ids_BL.shape[1], device=ids_BL.device)[None]
        losses = []
        for depth, count in enumerate(items):
            ahead = depth + 1
            mask_BT = None if mask_BL is None else mask_BL[:, ahead:] * mask_BL[:, :-ahead]
            read_BTD = hidden_BLD[:, : ids_BL.shape[1] - ahead]
            made_BTD = self.mtp_hidden_states(
                ids_BL[:, ahead:], read_BTD, positions_BL[:, ahead:], mask_BT, depth=depth
            )
            hidden_BLD = made_BTD if _names_of(type(self)).reads_normed else hidden_BLD
            losses.append(
                self.loss_function(
                    logits=self.mtp_logits(made_BTD, depth),
                    labels=_labels_of_head(given, depth),
                    vocab_size=self.config.vocab_size,
                    num_items_in_batch=count,
                )
            )
        return torch.stack(losses).mean() if losses else hidden_BLD.new_zeros(())

    def mtp_step(self: Any, *args: Any) -> Tensor:
        """Return `mtp_hidden_states` of the first head, for generation."""
        own_layers = nullcontext() if self.stage is None else self.stage.reading_own_layers(self)
        with within_model(self), own_layers, self._invariant_functions():
            found: Tensor = gathered(self.mtp_hidden_states(*args))
        return found

    def mtp_tokens(self: Any, hidden_BD: Tensor) -> list[int]:
        """Return the most probable tokens after hidden states of a head, equal on all ranks."""
        with within_model(self), self._invariant_functions():
            logits_BV: Any = self.mtp_logits(hidden_BD)
        full: Any = logits_BV.full() if isinstance(logits_BV, VocabParallelLogits | LazyLogits) else logits_BV
        tokens: list[int] = full.argmax(-1).tolist()
        return tokens

    @contextmanager
    def seeing_hidden_states(self: Any) -> Iterator[list[Tensor]]:
        """Context that appends the hidden states of each forward of the decoder to a list, as the heads read them."""
        seen: list[Tensor] = []
        if _names_of(type(self)).reads_normed:
            handle = self.base_model.register_forward_hook(lambda module, args, output: seen.append(output[0]))
        else:
            handle = self.base_model.norm.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
        try:
            yield seen
        finally:
            handle.remove()


def _with_loss(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the forward of a parallel class: add the weighted loss of the heads to the loss of a training step."""
    names = [*inspect.signature(forward).parameters][1:]

    @functools.wraps(forward)
    def with_mtp_loss(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        weight = getattr(self, "mtp_loss_weight", 0)
        if not (weight and self.training and given.get("labels") is not None) or "mtp_items" in given:
            return forward(self, *args, **kwargs)
        items = self.mtp_items(given)
        if self.pipeline is not None:  # the last stage adds the loss to that of each micro-batch
            return forward(self, *args, **kwargs, mtp_items=items)
        with self.seeing_hidden_states() as seen:
            output = forward(self, *args, **kwargs)
        device = seen[-1].device
        given = {name: each.to(device) if isinstance(each, Tensor) else each for name, each in given.items()}
        with within_model(self, kwargs), self._invariant_functions():
            added = weight * self.mtp_loss(given, seen[-1], items.to(device))
        if isinstance(output, tuple):
            return output[0] + added, *output[1:]
        output.loss = output.loss + added
        return output

    return with_mtp_loss


def _with_loss_of_stage(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the forward of a stage: add the weighted loss of the heads to the loss of a micro-batch."""

    @functools.wraps(forward)
    def with_loss_of_stage(self: Any, **given: Any) -> Any:
        items = given.pop("mtp_items", None)
        if not self.stage.is_last or given.get("labels") is None:
            return forward(self, **given)
        if items is None:
            output, weight = forward(self, **given), self.get_input_embeddings().weight
            if self.mesh.dp.size > 1 and not isinstance(weight, DTensor):
                with without_override():  # DDP waits for the gradient of the embedding, which frozen heads do not read
                    output.loss = output.loss + 0.0 * weight.flatten()[:1].sum()
            return output
        with self.seeing_hidden_states() as seen:
            output = forward(self, **given)
        output.loss = output.loss + self.mtp_loss_weight * self.mtp_loss(given, seen[-1], items)
        return output

    return with_loss_of_stage


def _labels_of_head(given: Any, depth: int) -> Tensor:
    """Return the labels [B, L - depth - 1] of a head. Labels of positions that read padding are ignored."""
    ahead, mask_BL = depth + 1, given.get("attention_mask")
    labels_BT: Tensor = given["labels"][:, ahead:]
    if mask_BL is None:
        return labels_BT
    mask_BT = mask_BL[:, ahead:] * mask_BL[:, :-ahead]
    return torch.where(F.pad(mask_BT, (1, -1)) == 0, _IGNORED, labels_BT)


def _like(norm: nn.Module, size: int) -> nn.Module:
    """Return a new norm of the class and with the epsilon of another one."""
    made: Any = type(norm)(size)
    for name in ("eps", "variance_epsilon"):
        if hasattr(norm, name):
            setattr(made, name, getattr(norm, name))
    return made


def _set_module(model: nn.Module, path: str, module: nn.Module) -> None:
    """Add a module at a path. Create the modules around it."""
    owner, *names = model, *path.split(".")
    for name in names[:-1]:
        if not hasattr(owner, name):
            owner.add_module(name, nn.Module())
        owner = getattr(owner, name)
    owner.add_module(names[-1], module)


def _names_of(cls: type[Any]) -> _Names:
    return _NAMES[model_type_of(cls) or ""]


@contextmanager
def _with_further_blocks(config: Any, names: _Names, count: int) -> Iterator[None]:
    """Context in which ``count`` blocks after the last one are created with the kinds of the heads' blocks."""
    former = dict[str, Any]()
    for name, kind in (("layer_types", names.attention), ("mlp_layer_types", names.mlp)):
        if (kinds := getattr(config, name, None)) is not None:
            former[name] = kinds
            setattr(config, name, [*kinds, *[kind] * count])
    if (step := getattr(config, "decoder_sparse_step", None)) is not None:
        former["decoder_sparse_step"], config.decoder_sparse_step = step, 1
    try:
        yield
    finally:
        for name, value in former.items():
            setattr(config, name, value)


def takes_mtp_heads(cls: type[Any]) -> bool:
    """Return whether a class of the zoo can have heads."""
    return cls.made_from is None and model_type_of(cls) in MTP_HEADS


@functools.cache
def class_with_mtp_heads(cls: type[Any]) -> Any:
    """Return a parallel class with MTP heads."""
    ignored = [*(cls._keys_to_ignore_on_load_unexpected or ()), _COPIES]
    namespace = {"__module__": cls.__module__, "__doc__": cls.__doc__, "_keys_to_ignore_on_load_unexpected": ignored}
    return type(cls.__name__, (MtpHeads, cls), {**namespace, "forward": _with_loss(cls.forward)})


def check_stored(mapping: Any, stored: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` if a checkpoint lacks weights of the heads.

    Args:
        mapping: the `WeightMapping` of the model.
        stored: the tensors of the checkpoint, by their names on this rank.
    """
    heads = {*mapping.model.mtp_names()}
    if missing := [name for own, name in mapping.names.items() if name in heads and own not in stored]:
        raise ValueError(
            f"mtp_heads=True needs the weights of the heads, and the checkpoint has no {missing[0]}"
            f"{f' and {len(missing) - 1} others' * (len(missing) > 1)}: leave mtp_heads out, or load a checkpoint that "
            "was published or saved with them"
        )
