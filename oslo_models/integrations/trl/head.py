"""TRL's fused LM head for a sharded vocabulary.

TRL replaces the ``forward`` of a model: the new one multiplies the hidden states by ``lm_head.weight``. On a rank, this
weight has the rows of one vocabulary shard only. The ``forward`` here reads the same arguments and returns the same
fields, computed over the full vocabulary. Shapes: see the glossary.
"""

from __future__ import annotations

import functools
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func
from trl.trainer.utils import FusedCausalLMOutput

from oslo_models.distributed.autograd_collectives import copy_to, gather_from, scatter_to
from oslo_models.distributed.grad_overflow import propagate_overflow_after_backward
from oslo_models.distributed.mesh import Axis
from oslo_models.distributed.sharded_tensor import without_override
from oslo_models.layers.cross_entropy import VocabShard
from oslo_models.layers.invariant_sums import WithValue, log_probabilities
from oslo_models.layers.sharded_activation import ShardSpec
from oslo_models.layers.token_statistics import LogitScaling, TokenStatistics, token_statistics
from oslo_models.modeling.base import ParallelModel
from oslo_models.modeling.forward import call_base_model
from oslo_models.sharding.model_protocol import TransformersModel

IGNORED = -100


def use_sharded_head(module: Any, temperature: float = 1.0) -> None:
    """Make a parallel model compute TRL's fused LM head from shards, from parts of the tokens, or for exact rollouts.

    Models without that head do not change.

    Args:
        module: the model, with or without wrappers.
        temperature: TRL's divisor of the logits.
    """
    model = find_on_mesh(module)
    of_trl = None if model is None else vars(model).get("forward")
    if model is None or of_trl is None or hasattr(of_trl, "is_sharded"):
        return

    @functools.wraps(type(model).forward)  # `generate` reads the signature
    def forward(self: Any, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        if fused_lm_head and (vocabulary(self) is not None or self.has_exact_rollouts or _cp(self) is not None):
            return _fused_forward(self, args, temperature, **kwargs)
        return of_trl(*args, fused_lm_head=fused_lm_head, **kwargs)

    marked: Any = forward
    marked.is_sharded = True
    model.forward = MethodType(marked, model)


def find_on_mesh(module: Any) -> ParallelModel | None:
    """Return the first `ParallelModel` inside ``module`` with a mesh, also of one rank."""
    modules = module.modules() if isinstance(module, nn.Module) else ()
    return next((each for each in modules if isinstance(each, ParallelModel) and each.mesh is not None), None)


def vocabulary(model: TransformersModel) -> VocabShard | None:
    """Return this rank's vocabulary shard of the LM head; ``None`` if the head is not sharded."""
    head = model.get_output_embeddings()
    layout = getattr(head, "layouts", {}).get("weight")
    if layout is None or layout.dim is None or head.tp.size == 1:
        return None
    (local,) = layout.ranges[head.tp.rank]
    return VocabShard(head.tp, local, layout.shape[0])


def _cp(model: Any) -> Axis | None:
    """Return the axis whose ranks divide the tokens of each row, if any."""
    return model.mesh.cp if model.mesh is not None and model.mesh.cp.size > 1 else None


def _fused_forward(
    model: ParallelModel,
    args: tuple[Any, ...],
    temperature: float,
    labels: Tensor | None = None,
    shift_labels: Tensor | None = None,
    num_items_in_batch: Any = None,
    **kwargs: Any,
) -> FusedCausalLMOutput:
    """Compute TRL's fields for each token with a label. Other tokens get zeros."""
    kwargs["use_cache"] = False
    mask_BL = kwargs.get("attention_mask")
    if model.has_exact_rollouts and kwargs.get("position_ids") is None and mask_BL is not None:
        # TRL counts padding on the left; rotary angles of other positions round differently
        kwargs["position_ids"] = (mask_BL.long().cumsum(-1) - 1).clamp(min=0)
    if getattr(model.config.get_text_config(), "output_router_logits", False):
        kwargs.setdefault("output_router_logits", True)
    given = {**kwargs, "labels": labels} if shift_labels is None else {**kwargs, "shift_labels": shift_labels}
    model._compare(args, given)
    model._at("forward", steps=1)
    output = call_base_model(model, *args, **kwargs)
    hidden_BLD = output.last_hidden_state
    if shift_labels is None:
        if labels is None:
            raise ValueError("fused_lm_head=True needs labels or shift_labels")
        hidden_BLD, labels_BL = hidden_BLD[:, :-1], labels[:, 1:]
    else:
        labels_BL = shift_labels
    labels_BL = labels_BL.to(hidden_BLD.device)
    mask_BL = labels_BL != IGNORED
    scores = _score(model, hidden_BLD[mask_BL], labels_BL[mask_BL], temperature)
    if model.mesh is not None:
        propagate_overflow_after_backward(scores.log_probs, model.parameters, model.mesh.tp)
    fields = {
        name: score.new_zeros(mask_BL.shape).masked_scatter(mask_BL, score) for name, score in scores._asdict().items()
    }
    items = mask_BL.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
    loss = -fields["log_probs"].sum() / items
    if kwargs.get("output_router_logits"):
        fields["aux_loss"] = _router_loss(model, output.router_logits, kwargs.get("attention_mask"))
        loss = loss + model.config.get_text_config().router_aux_loss_coef * fields["aux_loss"]
    model._at("after forward")
    return FusedCausalLMOutput(loss=loss, label_mask=mask_BL, **fields)


def _router_loss(model: TransformersModel, router_logits: Any, mask_BL: Tensor | None) -> Tensor:
    """Compute the load-balancing loss of a mixture of experts as TRL does: by Mixtral's function, for all families."""
    text: Any = model.config.get_text_config()
    count = getattr(text, "num_experts", None) or text.num_local_experts
    loss: Tensor = load_balancing_loss_func(router_logits, count, text.num_experts_per_tok, mask_BL)
    return loss


def _score(model: Any, hidden_ND: Tensor, target_N: Tensor, temperature: float) -> TokenStatistics:
    head, shard = model.get_output_embeddings(), vocabulary(model)
    weight, bias, cp = head.weight, head.bias, _cp(model)
    if shard is None:
        shard = VocabShard(model.mesh.tp, (0, weight.shape[0]), weight.shape[0])
    scaling = logit_scaling(model.config, temperature)
    if cp is not None and len(target_N) >= cp.size:
        return _score_parts(cp, hidden_ND, (weight, bias), target_N, shard, scaling)
    with without_override():
        found = token_statistics(hidden_ND, weight, bias, target_N, shard, scaling)
    if not model.has_exact_rollouts:
        return found
    with torch.no_grad(), without_override():
        scores_NV = model._local_logits(hidden_ND).float() / temperature
        value_N = log_probabilities(scores_NV, target_N, shard.axis, shard.local[0])
    return found._replace(log_probs=WithValue.apply(found.log_probs, value_N))


def _score_parts(
    cp: Axis,
    hidden_ND: Tensor,
    head: tuple[Tensor, Tensor | None],
    target_N: Tensor,
    shard: VocabShard,
    scaling: LogitScaling,
) -> TokenStatistics:
    """Compute the statistics of this rank's part of the tokens, and gather them."""
    sizes = ShardSpec(0, len(target_N)).sizes(len(target_N), cp.size)
    start, size = sum(sizes[: cp.rank]), sizes[cp.rank]
    with without_override():
        weight, bias = (None if each is None else copy_to(cp, each) for each in head)
        assert weight is not None
        own = token_statistics(
            scatter_to(cp, hidden_ND, 0, sizes), weight, bias, target_N[start : start + size], shard, scaling
        )
        is_top1 = own.is_top1.to(own.mean_logits.dtype)
        gathered = [gather_from(cp, each, 0, sizes) for each in (*own[:-1], is_top1)]
    return TokenStatistics(*gathered)._replace(is_top1=gathered[-1].bool())


def logit_scaling(config: Any, temperature: float) -> LogitScaling:
    """Read an architecture's scaling of the logits from its configuration, as TRL does."""
    text = config.get_text_config()
    divisor = getattr(text, "logits_scaling", None)  # Granite
    factors = (getattr(text, name, None) for name in ("logit_scale", "output_multiplier", "lm_head_multiplier"))
    scale = next((factor for factor in factors if factor is not None), 1.0 if divisor is None else 1 / divisor)
    return LogitScaling(scale, getattr(text, "final_logit_softcapping", None), temperature)
