"""The suite can fail: the named test catches each mutant of the library."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.overrides import BaseTorchFunctionMode
from transformers.generation.utils import DeferredStopCheck
from transformers.integrations import moe

from oslo_models.distributed import autograd_collectives, collectives, mesh, symmetric_memory
from oslo_models.distributed.rng import ShardedRngStream
from oslo_models.distributed.sharded_tensor import without_override
from oslo_models.fusion import norms
from oslo_models.layers import (
    blockwise_attention,
    channels,
    context_attention,
    context_mixers,
    context_parts,
    context_rules,
    cross_entropy,
    deferred_gradients,
    divided_tower,
    linear,
    local_attributes,
    local_experts,
    norm,
    overlap,
    replicated_grads,
    sharded_activation,
    state_space,
    summed,
    token_division,
    token_parts,
    token_region,
)
from oslo_models.layers import vocab_parallel as vocab
from oslo_models.media import items
from oslo_models.modeling import base, training
from oslo_models.modeling import forward as calls
from oslo_models.modeling import initialization as init
from oslo_models.modeling import token_division as modeling_division
from oslo_models.models import (
    convnextv2,
    dbrx,
    deformable_detr,
    doge,
    gemma3n_text,
    gpt2,
    granite_speech,
    minimax,
    poolformer,
    switch_transformers,
    wavlm,
    zaya,
)
from oslo_models.pipeline import pipeline, placeholders, schedule
from oslo_models.pipeline import stage as stages
from oslo_models.pipeline.micro_batch_loss import GlobalMeanLoss, loss_object
from oslo_models.sharding.layout import EvenSplit
from oslo_models.sharding.plan import ColumnParallel, Plan, Replicated

from support.mutants import Edit, MutantPool, Patch, is_in_run, load_test, with_mutant
from support.pool import Pool, WorkerError


def row_without_sum(patch: Patch) -> None:
    patch.setattr(linear, "reduce_from", lambda axis, x: x)


def column_without_sum_of_gradients(patch: Patch) -> None:
    patch.setattr(linear, "copy_to", lambda axis, x: x)


def head_without_sum_of_gradients(patch: Patch) -> None:
    patch.setattr(vocab, "copy_to", lambda axis, x: x)


def query_key_value_cut_as_one_matrix(patch: Patch) -> None:
    right = gpt2.GPT2Parallel.plan.__func__

    def plan(cls: Any, config: Any) -> Plan:
        made: Plan = right(cls, config)
        heads = EvenSplit(3 * config.n_head, config.n_embd // config.n_head)
        made.blocks["h"]["attn.c_attn"] = ColumnParallel(heads, transposed=True)  # type: ignore[index]
        return made

    patch.setattr(gpt2.GPT2Parallel, "plan", classmethod(plan))


def bias_before_the_sum(patch: Patch) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        if self.stream is not None:
            self.stream.leave()
        with without_override():
            return autograd_collectives.reduce_from(self.tp, F.linear(x, self.weight, self.bias))

    patch.setattr(linear.RowParallelLinear, "forward", forward)


def key_values_without_sum_over_copies(patch: Patch) -> None:
    class Identity:
        @staticmethod
        def apply(param: Tensor, *_: Any) -> Tensor:
            return param

    patch.setattr(replicated_grads, "SumReplicatedGrad", Identity)


def gathered_gradient_summed(patch: Patch) -> None:
    right = autograd_collectives._GatherFrom.backward

    def backward(ctx: Any, grad: Tensor) -> Any:
        dist.all_reduce(grad := grad.clone())
        return right(ctx, grad)

    patch.setattr(autograd_collectives._GatherFrom, "backward", staticmethod(backward))


def cross_entropy_without_common_maximum(patch: Patch) -> None:
    def reduce_fresh(axis: Any, x: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
        return x if op == dist.ReduceOp.MAX else collectives.reduce_fresh(axis, x, op)

    patch.setattr(cross_entropy, "reduce_fresh", reduce_fresh)


def sums_of_own_maxima(patch: Patch) -> None:
    Edit("layers.cross_entropy:VocabShard.combined", "(own_max_N - max_N).exp()", "1.0")(patch)


def unknown_labels_are_elsewhere(patch: Patch) -> None:
    patch.setattr(cross_entropy.VocabShard, "check", lambda shard, target_N: None)


def gathered_logits_in_the_loss(patch: Patch) -> None:
    patch.delitem(vocab._HANDLERS, F.cross_entropy)


def a_copy_for_each_reader(patch: Patch) -> None:
    patch.setattr(linear, "copy_to", lambda axis, x: autograd_collectives._CopyTo.apply(x, axis))


def same_masks_on_sharded_activations(patch: Patch) -> None:
    patch.setattr(ShardedRngStream, "enter", lambda self: None)


def own_masks_on_replicated_activations(patch: Patch) -> None:
    patch.setattr(ShardedRngStream, "leave", lambda self: None)


def a_stream_left_open_by_exceptions(patch: Patch) -> None:
    right = torch.nn.Module.register_forward_hook

    def register_forward_hook(self: Any, hook: Any, *, always_call: bool = False, **kwargs: Any) -> Any:
        return right(self, hook, always_call=False, **kwargs)

    patch.setattr(torch.nn.Module, "register_forward_hook", register_forward_hook)


def norm_counts_copies(patch: Patch) -> None:
    def counted(self: Any, name: str, grad: Any) -> list[Tensor]:
        return [grad.to_local() if isinstance(grad, DTensor) else grad]

    patch.setattr(base.ParallelModel, "_counted", counted)


def overflow_kept_to_oneself(patch: Patch) -> None:
    patch.setattr(calls, "propagate_overflow_after_backward", lambda *_: None)


def every_rank_samples_for_itself(patch: Patch) -> None:
    patch.setattr(calls, "synchronize", lambda *_: None)


def weights_drawn_in_parts(patch: Patch) -> None:
    def dispatch(self: Any, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))

    patch.setattr(init.SeededByName, "__torch_dispatch__", dispatch)


def mean_of_each_micro_batch(patch: Patch) -> None:
    patch.setattr(GlobalMeanLoss, "__torch_function__", BaseTorchFunctionMode.__torch_function__)


def loss_that_forgets_its_scale(patch: Patch) -> None:
    patch.setattr(schedule, "loss_object", lambda value, run: loss_object(value, lambda grad: run(grad / grad.abs())))


def tied_gradients_of_one_stage(patch: Patch) -> None:
    patch.setattr(schedule.Schedule, "_sum_over_stages", staticmethod(lambda param, axis: None))


def after_start(patch: Patch, change: Callable[[Any], None]) -> None:
    """Change every loop over micro-batches after its construction."""
    right = schedule.Schedule.__init__

    def start(self: Any, *args: Any) -> None:
        right(self, *args)
        change(self)

    patch.setattr(schedule.Schedule, "__init__", start)


def gradients_received_when_needed(patch: Patch) -> None:
    patch.setattr(schedule.Schedule, "_start_outputs_and_grads", lambda *_: None)


def replicas_that_average_each_micro_batch(patch: Patch) -> None:
    after_start(patch, lambda loop: setattr(loop, "_bypass_ddp", None))


def one_micro_batch_more(patch: Patch) -> None:
    after_start(patch, lambda loop: setattr(loop, "num_warmup", min(loop.num_micro_batches, loop.num_warmup + 1)))


def one_micro_batch_after_another(patch: Patch) -> None:
    after_start(patch, lambda loop: setattr(loop, "num_warmup", 0))


def deferred_gradient_dropped(patch: Patch) -> None:
    right = deferred_gradients.MicroBatchGradients.compute

    def compute(self: Any, accumulate: Any) -> None:
        self._products.popleft()
        right(self, accumulate)

    patch.setattr(deferred_gradients.MicroBatchGradients, "compute", compute)


def deferred_gradients_twice(patch: Patch) -> None:
    right = deferred_gradients.MicroBatchGradients.compute

    def compute(self: Any, accumulate: Any) -> None:
        right(self, lambda weight, grad: [accumulate(weight, grad), accumulate(weight, grad)])

    patch.setattr(deferred_gradients.MicroBatchGradients, "compute", compute)


def deferred_gradients_after_the_step(patch: Patch) -> None:
    """The last micro-batch is left to the next loop."""
    right, left = deferred_gradients.DeferredGradients.compute, []

    def compute(self: Any, keep: int = 0) -> None:
        if not keep:
            self._due.extendleft(left)
            left[:] = [self._due.pop()]
        right(self, keep)

    patch.setattr(deferred_gradients.DeferredGradients, "compute", compute)


def weight_gradients_at_once(patch: Patch) -> None:
    right = deferred_gradients.DeferredGradients.compute
    patch.setattr(deferred_gradients.DeferredGradients, "compute", lambda self, keep=0: right(self, 0))


def weight_gradients_all_at_the_end(patch: Patch) -> None:
    right = deferred_gradients.DeferredGradients.compute
    patch.setattr(deferred_gradients.DeferredGradients, "compute", lambda self, keep=0: None if keep else right(self))


def replicas_that_reduce_too_early(patch: Patch) -> None:
    patch.setattr(schedule.Schedule, "_accumulate", lambda self, i, param, grad: schedule._add_gradient(param, grad))


def norm_counts_tied_copies(patch: Patch) -> None:
    patch.setattr(stages.Stage, "is_first_holder", lambda self, name: True)


def dropout_at_both_ends(patch: Patch) -> None:
    patch.setattr(placeholders.BoundaryDropout, "forward", torch.nn.Dropout.forward)


def experts_without_sum_of_the_gradients_of_their_weights(patch: Patch) -> None:
    patch.setattr(dbrx, "copy_to", lambda axis, x: x)


def rows_of_the_first_experts_on_every_rank(patch: Patch) -> None:
    right = local_experts.LocalExperts.own_sizes
    patch.setattr(local_experts.LocalExperts, "own_sizes", lambda self, sizes: (0, right(self, sizes)[1]))


def experts_summed_one_by_one_and_together(patch: Patch) -> None:
    patch.setattr(switch_transformers.SeparateExpertsLayer, "_set_joint", staticmethod(lambda layers, joint: None))


def norms_of_parts_without_sum_of_gradients(patch: Patch) -> None:
    patch.setattr(token_parts, "copy_to", lambda axis, x: x)


def norms_of_parts_with_gradients_summed_twice(patch: Patch) -> None:
    right = autograd_collectives.copy_to
    patch.setattr(token_parts, "copy_to", lambda axis, x: right(axis, right(axis, x)))


def own_tokens_in_place_of_others(patch: Patch) -> None:
    def gather(axis: Any, x: Tensor, dim: int, sizes: Any) -> Tensor:
        return torch.cat([x] * axis.size, dim).narrow(dim, 0, sum(sizes))

    patch.setattr(token_region, "all_gather", gather)


def parts_of_own_products(patch: Patch) -> None:
    patch.setattr(token_parts, "reduce_scatter_from", autograd_collectives.scatter_to)


def parts_of_own_gradients(patch: Patch) -> None:
    patch.setattr(token_region, "reduce_scatter_from", autograd_collectives.scatter_to)


def blocks_computed_again_without_a_check(patch: Patch) -> None:
    patch.setattr(token_division.TokenDivision, "_require_recomputation", lambda self, block: None)


def dropout_masks_of_local_tokens(patch: Patch) -> None:
    def dropout(func: Any, args: Any, kwargs: Any) -> Any:
        return args[0].with_local(func(args[0].local(), *args[1:], **kwargs))

    patch.setitem(sharded_activation.RULES, F.dropout, dropout)


def context_gradients_not_summed(patch: Patch) -> None:
    """Each rank keeps the gradients of its own tokens."""
    right = context_parts.reduce_fresh
    patch.setattr(context_parts, "reduce_fresh", lambda axis, x: x if x.numel() > 1 else right(axis, x))


def context_gradients_summed_twice(patch: Patch) -> None:
    right = context_parts.reduce_fresh
    patch.setattr(context_parts, "reduce_fresh", lambda axis, x: right(axis, right(axis, x)))


def parts_averaged_by_fsdp(patch: Patch) -> None:
    """The mean of the parts over the ranks that divide tokens, in place of their sum."""
    Edit("layers.context_parts:_SummedParameters.backward", "* ctx.axis.size", "")(patch)


def parts_summed_before_fsdp(patch: Patch) -> None:
    """Sums of all parts, multiplied by the number of ranks too."""
    part = "(_flat(grads[index], *ctx.kinds[index]) *"
    summed = part.replace("(_flat", "(reduce_fresh(ctx.axis, _flat").replace(") *", ")) *")
    Edit("layers.context_parts:_SummedParameters.backward", part, summed)(patch)


def sums_of_gradients_that_fsdp_sums(patch: Patch) -> None:
    """All blocks sum their gradients, as without FSDP2."""
    patch.setattr(modeling_division, "fully_sharded_parameters", lambda module: ())


def norms_of_shards_of_one_context_rank(patch: Patch) -> None:
    right = training._axes_of_fsdp
    patch.setattr(training, "_axes_of_fsdp", lambda mesh, grad: right(mesh, grad)[:1])


def gradients_of_gathered_keys_not_returned(patch: Patch) -> None:
    """Each rank keeps its own slice of its gradient, without the parts of other ranks' queries."""
    patch.setattr(context_parts, "gather_to", autograd_collectives.gather_from)


def gradients_of_exchanged_heads_not_returned(patch: Patch) -> None:
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, None, None, *(grad.new_zeros(sum(ctx.sent), *grad.shape[1:]) for grad in grads)

    patch.setattr(autograd_collectives._Exchange, "backward", staticmethod(backward))


def local_tokens_in_place_of_all(patch: Patch) -> None:
    """Attention of each rank's own tokens for all heads, as without an exchange."""

    def local(axis: Any, pieces: Any, shapes: Any) -> Any:
        own = [[piece.new_zeros(shape) for piece, shape in zip(pieces[0], each, strict=True)] for each in shapes]
        own[axis.rank] = [piece.view(shape) for piece, shape in zip(pieces[axis.rank], shapes[axis.rank], strict=True)]
        return own

    patch.setattr(context_attention, "_exchanged", local)


def outputs_of_a_block_counted_on_each_rank(patch: Patch) -> None:
    """Gradients of whole tensors that leave a block are not divided."""
    patch.setattr(context_parts.ContextParts, "_outer", lambda self, x: x)


def loss_of_local_tokens(patch: Patch) -> None:
    patch.setattr(context_rules, "reduce_from", lambda axis, x: x)


def gradients_of_the_head_of_local_tokens(patch: Patch) -> None:
    patch.setattr(context_parts.ContextPart, "copy_of", lambda self, x: x)


def equal_dropout_on_all_tokens(patch: Patch) -> None:
    """All ranks draw from the common stream."""
    patch.setattr(context_parts.ContextParts, "random_stream", lambda self: nullcontext())


def norms_of_all_ranks_of_a_batch(patch: Patch) -> None:
    """Weights count once for each rank that divides tokens."""
    right = mesh.ParallelMesh.__init__

    def construct(self: Any, *args: Any, **kwargs: Any) -> None:
        right(self, *args, **kwargs)
        self.weights = self.model

    patch.setattr(mesh.ParallelMesh, "__init__", construct)


def _cache_of_a_prompt(patch: Patch, change: Callable[[Tensor, Any], Tensor]) -> None:
    def full(part: Any, why: str = "") -> Tensor:
        return change(right(part, why), part) if why == "cache" else right(part, why)

    right = context_parts.ContextPart.full
    patch.setattr(context_parts.ContextPart, "full", full)


def cache_without_the_last_tokens_of_a_prompt(patch: Patch) -> None:
    """The keys and values of the last rank are missing in the cache."""

    def zeroed(x: Tensor, part: Any) -> Tensor:
        last = part.sizes()[-1]
        x.narrow(part.spec.dim, x.shape[part.spec.dim] - last, last).zero_()
        return x

    _cache_of_a_prompt(patch, zeroed)


def cache_in_the_order_of_other_ranks(patch: Patch) -> None:
    _cache_of_a_prompt(patch, lambda x, part: x.roll(part.sizes()[-1], part.spec.dim))


def last_token_of_the_first_rank(patch: Patch) -> None:
    """The head reads the last of the tokens of the first rank, in place of the last token of the prompt."""

    def some(x: Any, index: Any) -> Any:
        if not x.state.is_inside and index[x.spec.dim] == slice(-1, None):
            last = x.sizes()[0]
            index = (*index[: x.spec.dim], slice(last - 1, last), *index[x.spec.dim + 1 :])
        return right(x, index)

    right = context_rules._some_tokens
    patch.setattr(context_rules, "_some_tokens", some)


def position_of_local_tokens(patch: Patch) -> None:
    """Each rank takes the first positions, as if its tokens began the row."""

    def slice_of(self: Any, x: Tensor, dim: int) -> Tensor:
        sizes = self.spec.sizes(x.shape[dim], self.tp.size)
        if self.spec.parts > 1:
            return right(self, x, dim)
        return x.narrow(dim, 0, sizes[self.tp.rank])

    right = context_parts.ContextPart.slice_of
    patch.setattr(context_parts.ContextPart, "slice_of", slice_of)


def gradients_summed_twice_between_stages(patch: Patch) -> None:
    """The gradients of the hidden states that a stage has received are counted on two ranks."""
    right = context_parts.ContextParts.part
    patch.setattr(context_parts.ContextParts, "part", lambda self, x, length: right(self, 2 * x - x.detach(), length))


def tokens_of_a_neighbour_on_the_next_stage(patch: Patch) -> None:
    """The first rank sends the last tokens of a row, and the last rank the first."""

    def own_tokens(self: Any, hidden: Tensor) -> Tensor:
        whole, count = sharded_activation.gathered(hidden), self.count(hidden.shape[1])
        return whole.narrow(1, 0 if self.axis.rank else whole.shape[1] - count, count).contiguous()

    patch.setattr(context_parts.ContextParts, "own_tokens", own_tokens)


def gradients_of_shared_weights_of_mixers_summed_twice(patch: Patch) -> None:
    """The norm of all heads sums its gradients, and so does the block."""
    patch.setattr(context_mixers.SliceLayout, "of", staticmethod(lambda layout, n: layout))


def rows_of_other_heads_in_the_backward_pass(patch: Patch) -> None:
    """The slice of a weight is made again in another order."""
    right = context_mixers.WeightSource
    patch.setattr(context_mixers, "WeightSource", lambda whole, shard: right(whole.flip(0), shard))


def gradients_of_shared_weights_of_mixers_of_one_shard(patch: Patch) -> None:
    """Tensor-parallel ranks apply one norm to different heads."""
    patch.setattr(context_mixers.MixerDivision, "_is_shared", lambda self, path: False)


def gradients_of_inputs_of_mixers_of_one_shard(patch: Patch) -> None:
    """Hidden states get the gradients of the heads of one tensor-parallel rank."""
    patch.setattr(context_mixers.MixerDivision, "entered", lambda self, hidden: hidden)


def outputs_of_mixers_of_one_shard(patch: Patch) -> None:
    """The output projection adds up the products of the ranks that divide tokens only."""
    patch.setattr(context_parts, "reduce_from", lambda axis, x: x)


CONTEXT_PARALLEL = (
    context_gradients_not_summed,
    context_gradients_summed_twice,
    gradients_of_exchanged_heads_not_returned,
    local_tokens_in_place_of_all,
    loss_of_local_tokens,
    gradients_of_the_head_of_local_tokens,
)

SEQUENCE_PARALLEL = (
    norms_of_parts_without_sum_of_gradients,
    norms_of_parts_with_gradients_summed_twice,
    own_tokens_in_place_of_others,
    parts_of_own_products,
    parts_of_own_gradients,
)


Caught = tuple[Callable[[Patch], None], str, dict[str, Any]]
STAGES = {"tp": 1, "pp": 4}
STEP = {"forward": 1.0, "backward": 2.0, "number": 4, "share_loss": False}


def head_norms_without_sum_of_gradients(patch: Patch) -> None:
    patch.setattr(norms, "own_weight", lambda norm: norm.weight)


def sum_of_gradients_after_the_products(patch: Patch) -> None:
    right = overlap.start_all_reduce
    patch.setattr(overlap, "start_all_reduce", lambda axis, x: SimpleNamespace(wait=lambda: right(axis, x).wait()))


def weight_gradients_of_one_layout(patch: Patch) -> None:
    right = overlap._weight_gradient

    def gradient(grad: Tensor, x: Tensor, transposed: bool) -> Tensor:
        return right(grad, x, False).reshape(x.shape[-1], -1)

    patch.setattr(overlap, "_weight_gradient", gradient)


def layers_that_share_no_sum(patch: Patch) -> None:
    def add(self: Any, layer: Any) -> None:
        if not self._known:
            self._known[id(layer)] = weakref.ref(layer)

    patch.setattr(overlap.Siblings, "add", add)


def norms_of_heads_without_their_hooks(patch: Patch) -> None:
    patch.setattr(norms, "is_plain", lambda norm, width, device: True)


def a_token_too_many(patch: Patch) -> None:
    patch.setattr(DeferredStopCheck, "finish", lambda self: 0)


def symmetric_memory_unchecked(patch: Patch) -> None:
    patch.setattr(symmetric_memory, "_sums_that_are_wrong", lambda axis, memory, device: [])


def symmetric_memory_for_sums_of_any_size(patch: Patch) -> None:
    patch.setattr(symmetric_memory.SymmetricMemory, "takes", lambda self, x: x.dtype in self.dtypes)


def moments_of_own_features(patch: Patch) -> None:
    cls = gemma3n_text.GlobalMomentsLayer
    patch.setattr(cls, "forward", lambda self, *args: super(cls, self).forward(*args))


def values_of_all_ranks_without_sum_of_gradients(patch: Patch) -> None:
    for module in (gemma3n_text, summed, zaya):
        patch.setattr(module, "copy_to", lambda axis, x: x)


class Reversed(EvenSplit):
    """Split that gives the first units to the last rank."""

    def unit_ranges(self, n: int) -> tuple[tuple[int, int], ...]:
        return super().unit_ranges(n)[::-1]


def decays_of_other_heads(patch: Patch) -> None:
    right = minimax.MiniMaxParallel.lightning_attention.__func__

    def lightning_attention(cls: Any, each: EvenSplit, heads: EvenSplit) -> Any:
        return right(cls, Reversed(each.count), heads)

    patch.setattr(minimax.MiniMaxParallel, "lightning_attention", classmethod(lightning_attention))


def gates_read_other_heads(patch: Patch) -> None:
    right = wavlm.GatedAttention
    patch.setattr(wavlm, "GatedAttention", lambda heads: right(Reversed(heads.count, heads.width)))


def hidden_states_without_sum_of_gradients(patch: Patch) -> None:
    patch.setattr(wavlm, "copy_to", lambda axis, x: x)


def distances_without_sum_of_gradients(patch: Patch) -> None:
    patch.setattr(granite_speech, "SharedOutput", Replicated)


def a_sound_in_the_place_of_its_neighbour(patch: Patch) -> None:
    right = items._items

    def of_items(kind: items.Kind, name: str, *args: Any) -> Any:
        value = right(kind, name, *args)
        return value.flip(0) if name == items.SOUND.values else value

    patch.setattr(items, "_items", of_items)


def norms_of_own_channels(patch: Patch) -> None:
    patch.setattr(convnextv2, "reduce_from", lambda axis, x: x)


def means_of_own_features(patch: Patch) -> None:
    patch.setattr(norm, "reduce_from", lambda axis, x: axis.size * x)


def means_without_sum_of_gradients(patch: Patch) -> None:
    patch.setattr(norm, "copy_to", lambda axis, x: x)


def points_without_sum_of_gradients(patch: Patch) -> None:
    patch.setattr(deformable_detr, "copy_to", lambda axis, x: x)


def samples_of_other_heads(patch: Patch) -> None:
    right = deformable_detr.sampling_attention

    def sampling_attention(name: str, heads: EvenSplit, samples: int) -> Any:
        entries = right(name, heads, samples)
        reversed_heads = Reversed(heads.count, heads.width)
        return {**entries, f"{name}.value_proj": deformable_detr.ColumnParallel(reversed_heads)}

    patch.setattr(deformable_detr, "sampling_attention", sampling_attention)


def channels_without_sum(patch: Patch) -> None:
    patch.setattr(channels, "reduce_from", lambda axis, x: x)


def towers_without_sum_of_gradients(patch: Patch) -> None:
    patch.setattr(divided_tower, "reduce_from", lambda axis, x: x)


def images_in_the_order_of_other_ranks(patch: Patch) -> None:
    def gather_from(axis: Any, x: Tensor, dim: int, sizes: Any) -> Tensor:
        parts = autograd_collectives.gather_from(axis, x, dim, sizes).split(sizes, dim)
        return torch.cat(parts[::-1], dim)

    patch.setattr(divided_tower, "gather_from", gather_from)


def images_without_sum_of_gradients(patch: Patch) -> None:
    patch.setattr(poolformer, "copy_to", lambda axis, x: x)


def convolutions_drawn_by_their_local_sizes(patch: Patch) -> None:
    patch.setattr(init, "_is_sharded_convolution", lambda module: False)


def buffers_computed_from_local_heads(patch: Patch) -> None:
    patch.setattr(base.ParallelModel, "_initialized_whole", lambda self: [])


def blocks_numbered_on_each_stage(patch: Patch) -> None:
    right = minimax.MiniMaxParallel.plan.__func__
    patch.setattr(
        minimax.MiniMaxParallel,
        "plan",
        classmethod(lambda cls, config: right(cls, config).with_rules(keeps_layer_numbers=False)),
    )


def positions_uncounted_without_the_first_block(patch: Patch) -> None:
    patch.setattr(pipeline.Pipeline, "_count_positions", lambda *_: None)


def buffers_saved_as_if_whole(patch: Patch) -> None:
    patch.setattr(training, "mark_buffer", lambda module, leaf, sharding: None)


BLOCKWISE_BACKWARD = "layers.blockwise_attention:_BlockwiseAttention.backward"
SHARED_OUTPUT = "layers.summed:SharedOutputLayer.forward"


def gradient_of_a_shared_key_of_each_rank(patch: Patch) -> None:
    Edit(SHARED_OUTPUT, "copy_to(self.tp, output)", "output")(patch)


def gradient_of_compressed_keys_of_each_rank(patch: Patch) -> None:
    Edit(SHARED_OUTPUT, "copy_to(self.tp, each) if isinstance(each, Tensor) else each", "each")(patch)


def weights_of_a_group_without_sum_over_its_ranks(patch: Patch) -> None:
    patch.setattr(linear.GroupRowParallelLinear, "forward", linear.RowParallelLinear.forward)


def bias_of_experts_on_every_rank(patch: Patch) -> None:
    patch.setattr(linear.RowParallelLinear, "_share_of_bias", lambda self: self.bias)


def inner_outputs_without_sum_of_gradients(patch: Patch) -> None:
    patch.setattr(linear.SharesOutput, "share", lambda self, output: output)


def inner_outputs_without_their_region(patch: Patch) -> None:
    def share(self: Any, output: Tensor) -> Tensor:
        output = super(linear.InnerRowParallelLinear, self).share(output)
        return output[..., slice(*self.outputs.ranges(self.tp.size)[self.tp.rank])]

    patch.setattr(linear.InnerRowParallelLinear, "share", share)


def key_values_count_on_all_their_ranks(patch: Patch) -> None:
    patch.setattr(linear.KeyValueRowLinear, "forward", linear.RowParallelLinear.forward)


def parameters_of_all_heads_without_sum_of_gradients(patch: Patch) -> None:
    cls = local_attributes.SharedParametersModule
    patch.setattr(cls, "forward", lambda self, *args, **kwargs: super(cls, self).forward(*args, **kwargs))


def parameters_of_heads_without_sum_over_copies(patch: Patch) -> None:
    cls = local_attributes.OverlappingParametersModule
    patch.setattr(cls, "forward", lambda self, *args, **kwargs: super(cls, self).forward(*args, **kwargs))


def embeddings_scaled_on_each_stage(patch: Patch) -> None:
    Edit("models.t5gemma:UnscaledWidth.__pow__", "return 1.0", "return int(self) ** 0.5")(patch)


def group_means_of_own_heads(patch: Patch) -> None:
    cls = zaya.GroupMeansLayer
    patch.setattr(cls, "forward", lambda self, *args: super(cls, self).forward(*args))


def weights_of_vectors_without_sum_of_gradients(patch: Patch) -> None:
    patch.setattr(doge, "copy_to", lambda axis, x: x)


def weights_of_streams_from_own_inputs(patch: Patch) -> None:
    full = "reduce_from(self.tp, self.product(x, self.weight, None))"
    Edit("layers.gathered:_SlicedRow.forward", full, "self.product(x, self.weight, None)")(patch)


def parts_in_another_order(patch: Patch) -> None:
    Edit("modeling.conversions:concatenated_parts", "int(named[part])", "-int(named[part])")(patch)


def alternating_rows_swapped(patch: Patch) -> None:
    Edit("checkpoint.converted:_EverySecond.copy", "self.dim + 1, self.first", "self.dim + 1, 1 - self.first")(patch)


def experts_in_reverse_order(patch: Patch) -> None:
    own = "Piece(piece, *divmod(place, parts))"
    Edit("modeling.conversions:expert_pieces", own, "Piece(piece, (size - 1 - place) // parts, place % parts)")(patch)


def filters_without_sum_over_copies(patch: Patch) -> None:
    patch.setattr(state_space, "SumReplicatedGrad", SimpleNamespace(apply=lambda param, *args: param))


def weights_of_shared_experts_without_sum_of_gradients(patch: Patch) -> None:
    patch.setattr(summed.SummedLayer, "_shared", lambda self, x: x)


def shared_experts_summed_by_themselves_and_with_routed_ones(patch: Patch) -> None:
    patch.setattr(summed.SummedLayer, "returns_partial_sums", property(lambda self: False, lambda *args: None))


def last_words_for_the_first(patch: Patch) -> None:
    Edit(
        "layers.vocab_parallel:VocabParallelLogits._of_words",
        "[..., : local_words(self.tp, vocab)]",
        "[..., -local_words(self.tp, vocab) :]",
    )(patch)


def projections_read_one_after_the_other(patch: Patch) -> None:
    Edit("checkpoint.converted:_Interleaved.copy", "[:, part::2]", "[:, : stop - start]")(patch)


def filters_of_tokens_without_sum_over_copies(patch: Patch) -> None:
    patch.setattr(linear.KeyValueParallelLinear, "forward", linear.ColumnParallelLinear.forward)


def mask_rows_off_by_one(patch: Patch) -> None:
    Edit("layers.lazy_mask:MaskRule.part", "self.offsets[0] + queries.start", "self.offsets[0] + queries.start + 1")(
        patch
    )


def padding_of_the_first_row(patch: Patch) -> None:
    Edit("layers.lazy_mask:MaskRule.part", "self.padding[rows]", "self.padding[: rows.stop - rows.start]")(patch)


def gradient_of_a_shared_key_of_its_first_head(patch: Patch) -> None:
    Edit(BLOCKWISE_BACKWARD, "parts[1].sum(0, dtype=wide)", "parts[1][0]")(patch)


def parts_of_keys_without_weights(patch: Patch) -> None:
    patch.setattr(blockwise_attention, "_computes_as_assumed", lambda: True)
    Edit("layers.blockwise_attention:_merged", "(own - logsum).exp()", "torch.ones_like(own)")(patch)


def changes_of_a_lazy_mask_lost(patch: Patch) -> None:
    changes = "value.rule.changed |= may_change"
    Edit("layers.lazy_mask:LazyMask.__torch_dispatch__", changes, "pass")(patch)


def experts_in_a_loop(patch: Patch) -> None:
    patch.setattr(moe, "_can_use_grouped_mm", lambda *args: False)


def checksums_without_positions(patch: Patch) -> None:
    Edit("distributed.input_check:_checksum", ", alpha=_STEP", ", alpha=0")(patch)


def checksums_of_one_round(patch: Patch) -> None:
    Edit("distributed.input_check:_checksum", "range(2)", "range(1)")(patch)


def untried_layers_sharded(patch: Patch) -> None:
    Edit("modeling.derived.derivation:_entry", "key not in findings.called", "False")(patch)


def shards_read_by_untried_code(patch: Patch) -> None:
    Edit("layers.full_weights:is_model_code", 'getattr(_thread, "is_running", False)', "False")(patch)


def limits_of_ranks_ignored(patch: Patch) -> None:
    Edit("sharding.plan:Plan.max_ranks", "min((limit for limit in limits if limit is not None), default=None)", "None")(
        patch
    )


def documents_of_a_row_separated_by_stages_only(patch: Patch) -> None:
    call = "model.use_lazy_logits()"
    Edit("modeling.forward:with_full_stage_outputs", call, f'kwargs.setdefault("use_cache", False); {call}')(patch)


def seconds_of_sounds_unchecked(patch: Patch) -> None:
    Edit("server.sounds:SoundReader.open_parts", "seconds > self._limits.seconds", "False")(patch)


def windows_of_models_unchecked(patch: Patch) -> None:
    Edit("server.sounds:SoundReader.open", "(self._limits.seconds, self._longest)", "(self._limits.seconds,)")(patch)


def sounds_decoded_one_by_one(patch: Patch) -> None:
    old = "opened.append((self.open("
    Edit("server.sounds:SoundReader.open_parts", old, f"opened and opened[0][0].decode(); {old}")(patch)


def sounds_in_another_order(patch: Patch) -> None:
    Edit(
        "server.media_chats:MediaChats._read_sounds", "for sound, place in opened", "for sound, place in opened[::-1]"
    )(patch)


def sounds_of_the_first_channel(patch: Patch) -> None:
    Edit("server.sound_files:_wav_samples", ".mean(1)", "[:, 0]")(patch)


def sounds_at_their_own_rate(patch: Patch) -> None:
    Edit("server.resampling:resample", "if rate == wanted:", "if True:")(patch)


def placeholders_of_clients(patch: Patch) -> None:
    Edit("server.media_chats:MediaChats._shown", 'self.plain(part["text"])', 'part["text"]')(patch)


MUTANTS: dict[str, list[Caught]] = {
    "server/test_server_sounds.py": [
        (seconds_of_sounds_unchecked, "test_limits_are_checked_before_any_sound_is_decoded", {"case": "sum"}),
        (windows_of_models_unchecked, "test_limits_are_checked_before_any_sound_is_decoded", {"case": "length"}),
        (sounds_decoded_one_by_one, "test_limits_are_checked_before_any_sound_is_decoded", {"case": "second"}),
        (sounds_in_another_order, "test_several_sounds_keep_their_order", {}),
        (
            sounds_of_the_first_channel,
            "test_rates_and_channels_are_converted_for_the_model",
            {"rate": 44100, "channels": 2},
        ),
        (
            sounds_at_their_own_rate,
            "test_rates_and_channels_are_converted_for_the_model",
            {"rate": 8000, "channels": 1},
        ),
        (placeholders_of_clients, "test_placeholders_in_the_text_of_a_client_are_text", {}),
    ],
    "compat/test_any_model.py": [
        (
            untried_layers_sharded,
            "test_weights_that_untried_code_reads_are_full",
            {"way": 0, "is_tried": True},
        ),
        (
            shards_read_by_untried_code,
            "test_weights_that_untried_code_reads_are_full",
            {"way": 4, "is_tried": False},
        ),
    ],
    "distributed/test_input_check.py": [
        (checksums_without_positions, "test_checksums_tell_apart_orders_and_pairs_of_signs", {}),
        (checksums_of_one_round, "test_checksums_tell_apart_orders_and_pairs_of_signs", {}),
    ],
    "models/test_option_effects.py": [
        (limits_of_ranks_ignored, "test_options_of_the_table_make_the_constructor_refuse_sizes", {}),
    ],
    "pipeline/test_same_call.py": [
        (
            documents_of_a_row_separated_by_stages_only,
            "test_packed_rows_have_one_loss_at_all_sizes",
            {"variant": "llama", "tp": 1, "pp": 2},
        ),
    ],
    "distributed/test_symmetric_memory.py": [
        (symmetric_memory_unchecked, "test_memory_that_is_missing_or_sums_wrongly_is_refused_on_all_ranks", {}),
        (symmetric_memory_for_sums_of_any_size, "test_small_sums_of_compiled_code_go_through_the_memory", {"n": 2}),
    ],
    "fusion/test_fused_attention.py": [
        (
            head_norms_without_sum_of_gradients,
            "test_rotary_attention_of_local_heads_matches_transformers",
            {"variant": "qwen3"},
        ),
        (norms_of_heads_without_their_hooks, "test_norms_of_heads_with_hooks_run_by_themselves", {}),
    ],
    "fusion/test_late_stops.py": [(a_token_too_many, "test_tokens_are_the_same_and_nothing_waits", {})],
    "layers/test_blockwise_attention.py": [
        *[
            (mutant, "test_attention_by_blocks_matches_torch", {"name": name})
            for mutant, name in (
                (mask_rows_off_by_one, "window"),
                (padding_of_the_first_row, "left padding"),
                (gradient_of_a_shared_key_of_its_first_head, "packing"),
                (parts_of_keys_without_weights, "right padding"),
            )
        ],
        (changes_of_a_lazy_mask_lost, "test_operations_on_a_lazy_mask_compute_with_the_whole_mask", {}),
    ],
    "layers/test_gradient_overlap.py": [
        (
            sum_of_gradients_after_the_products,
            "test_sums_of_gradients_overlap_the_weights_products",
            {"variant": "gpt2"},
        ),
        (weight_gradients_of_one_layout, "test_sums_of_gradients_overlap_the_weights_products", {"variant": "gpt2"}),
        (layers_that_share_no_sum, "test_sums_of_gradients_overlap_the_weights_products", {"variant": "llama"}),
    ],
    "models/test_expert_modules.py": [
        (
            experts_without_sum_of_the_gradients_of_their_weights,
            "test_steps_and_tokens_match_one_process",
            {"model_type": "dbrx", "sizes": (2, 2)},
        ),
        (
            rows_of_the_first_experts_on_every_rank,
            "test_steps_and_tokens_match_one_process",
            {"model_type": "jetmoe", "sizes": (2, 2)},
        ),
        (
            experts_summed_one_by_one_and_together,
            "test_steps_and_tokens_match_one_process",
            {"model_type": "switch_transformers", "sizes": (2, 2)},
        ),
        (
            bias_of_experts_on_every_rank,
            "test_steps_and_tokens_match_one_process",
            {"model_type": "nllb-moe", "sizes": (2, 2)},
        ),
    ],
    "models/test_mixture_of_experts.py": [
        (
            projections_read_one_after_the_other,
            "test_experts_with_alternating_projections_are_saved_as_by_transformers",
            {"sizes": (2, 1)},
        ),
        (experts_in_a_loop, "test_products_of_experts_are_grouped", {"expert_parallel_size": 2}),
    ],
    "modeling/test_sharded_parameters.py": [
        (buffers_saved_as_if_whole, "test_sharded_buffers_are_shards_in_state_dictionaries_only", {}),
    ],
    "models/test_context_parallel.py": [
        *[
            (mutant, "test_step_matches_transformers", {"variant": "llama", "n": 2})
            for mutant in (*CONTEXT_PARALLEL, position_of_local_tokens)
        ],
        (gradients_of_gathered_keys_not_returned, "test_step_matches_transformers", {"variant": "gpt_neo", "n": 2}),
        (outputs_of_a_block_counted_on_each_rank, "test_step_matches_transformers", {"variant": "t5", "n": 2}),
        (
            equal_dropout_on_all_tokens,
            "test_dropout_drops_other_elements_of_the_tokens_of_each_rank",
            {"variant": "gpt2"},
        ),
        *[
            (mutant, "test_step_matches_transformers", {"variant": variant, "n": 2})
            for mutant, variant in (
                (gradients_of_shared_weights_of_mixers_summed_twice, "qwen3_next"),
                (rows_of_other_heads_in_the_backward_pass, "qwen3_5_text"),
            )
        ],
        *[
            (
                mutant,
                "test_heads_of_mixers_divided_twice_match_transformers",
                {"variant": variant, "heads": heads, "sizes": (2, 2)},
            )
            for mutant, variant, heads in (
                (gradients_of_shared_weights_of_mixers_of_one_shard, "qwen3_5_text", "rules"),
                (gradients_of_inputs_of_mixers_of_one_shard, "bamba", "two groups"),
                (outputs_of_mixers_of_one_shard, "bamba", "two groups"),
            )
        ],
        (norms_of_all_ranks_of_a_batch, "test_gradient_norms_count_each_weight_once", {"tp": 1}),
        (sums_of_gradients_that_fsdp_sums, "test_blocks_sharded_over_context_send_their_gradients_once", {}),
        *[
            (mutant, "test_steps_on_stages_match_transformers", {"variant": "llama-untied", "sizes": {}})
            for mutant in (gradients_summed_twice_between_stages, tokens_of_a_neighbour_on_the_next_stage)
        ],
        *[
            (mutant, "test_ways_to_generate_match_transformers", {"variant": "llama-untied", "tp": 1})
            for mutant in (
                cache_without_the_last_tokens_of_a_prompt,
                cache_in_the_order_of_other_ranks,
                last_token_of_the_first_rank,
            )
        ],
    ],
    "models/test_sequence_parallel.py": [
        *[
            (mutant, "test_drawn_configuration_matches_transformers", {"model_type": "llama", "n": 2})
            for mutant in SEQUENCE_PARALLEL
        ],
        (dropout_masks_of_local_tokens, "test_step_with_dropout_equals_whole_hidden_states", {"variant": "gpt2"}),
    ],
    "models/test_token_division.py": [
        *[
            (
                blocks_computed_again_without_a_check,
                "test_other_checkpointing_functions_raise",
                {"division": division, "reentrant": False},
            )
            for division in ("sequence_parallel", "context_parallel_size")
        ],
        *[
            (
                mutant,
                "test_fully_sharded_training_matches_transformers",
                {"division": "context_parallel_size", "variant": "llama-untied", "over": "copies"},
            )
            for mutant in (
                parts_averaged_by_fsdp,
                parts_summed_before_fsdp,
                norms_of_shards_of_one_context_rank,
            )
        ],
    ],
    "models/test_images.py": [
        (mutant, "test_ranks_that_divide_images_train_like_transformers", {"model_type": "llava"})
        for mutant in (towers_without_sum_of_gradients, images_in_the_order_of_other_ranks)
    ],
    "models/test_sounds.py": [
        (mutant, "test_sounds_in_any_rows_match_transformers", {"model_type": model_type})
        for mutant, model_type in (
            (distances_without_sum_of_gradients, "granite_speech"),
            (a_sound_in_the_place_of_its_neighbour, "qwen2_audio"),
        )
    ],
    "models/test_zoo.py": [
        (
            decays_of_other_heads,
            "test_main_class_matches_transformers_on_two_ranks_and_two_stages",
            {"model_type": "minimax"},
        ),
        *[
            (mutant, "test_main_class_matches_transformers_on_two_ranks_and_two_stages", {"model_type": model_type})
            for mutant, model_type in (
                (gates_read_other_heads, "wavlm"),
                (hidden_states_without_sum_of_gradients, "wavlm"),
                (norms_of_own_channels, "convnextv2"),
                (channels_without_sum, "mobilevit"),
                (points_without_sum_of_gradients, "deformable_detr"),
                (images_without_sum_of_gradients, "poolformer"),
                (parameters_of_all_heads_without_sum_of_gradients, "got_ocr2"),
                (embeddings_scaled_on_each_stage, "t5gemma"),
                (means_of_own_features, "kosmos-2"),
                (means_without_sum_of_gradients, "kosmos-2"),
            )
        ],
        (
            buffers_computed_from_local_heads,
            "test_initial_weights_do_not_depend_on_the_parallel_sizes",
            {"variant": "minimax"},
        ),
        (
            convolutions_drawn_by_their_local_sizes,
            "test_initial_weights_do_not_depend_on_the_parallel_sizes",
            {"variant": "resnet"},
        ),
        (
            blocks_numbered_on_each_stage,
            "test_initial_weights_do_not_depend_on_the_parallel_sizes",
            {"variant": "minimax"},
        ),
        *[
            (mutant, "test_main_class_matches_transformers_on_two_ranks_and_two_stages", {"model_type": "gemma3n_text"})
            for mutant in (moments_of_own_features, values_of_all_ranks_without_sum_of_gradients)
        ],
        *[
            (mutant, "test_main_class_matches_transformers_on_two_ranks_and_two_stages", {"model_type": model_type})
            for mutant, model_type in (
                (inner_outputs_without_sum_of_gradients, "doge"),
                (weights_of_vectors_without_sum_of_gradients, "doge-experts"),
                (values_of_all_ranks_without_sum_of_gradients, "inkling_text"),
                (weights_of_shared_experts_without_sum_of_gradients, "inkling_text"),
                (shared_experts_summed_by_themselves_and_with_routed_ones, "inkling_text"),
                (alternating_rows_swapped, "inkling_mm_model"),
                (experts_in_reverse_order, "ernie4_5_vl_moe"),
                (parts_in_another_order, "step3p7"),
            )
        ],
        *[
            (
                mutant,
                "test_main_class_matches_transformers_on_two_ranks_and_two_stages",
                {"model_type": "qwen4_exp_text"},
            )
            for mutant in (weights_of_streams_from_own_inputs, parts_in_another_order)
        ],
        *[
            (mutant, "test_main_class_matches_transformers_on_three_ranks_with_beams", {"model_type": model_type})
            for mutant, model_type in (
                (samples_of_other_heads, "deformable_detr"),
                (key_values_count_on_all_their_ranks, "doge"),
                (parameters_of_heads_without_sum_over_copies, "doge"),
                (group_means_of_own_heads, "zaya"),
                (filters_without_sum_over_copies, "inkling_text"),
                (parameters_of_heads_without_sum_over_copies, "inkling2_text"),
                (filters_of_tokens_without_sum_over_copies, "inkling2_text"),
                (values_of_all_ranks_without_sum_of_gradients, "zaya"),
            )
        ],
        *[
            (mutant, "test_main_class_matches_transformers_on_two_ranks_and_two_stages", {"model_type": "deepseek_v4"})
            for mutant in (gradient_of_a_shared_key_of_each_rank, gradient_of_compressed_keys_of_each_rank)
        ],
        (
            weights_of_a_group_without_sum_over_its_ranks,
            "test_main_class_matches_transformers_on_three_ranks_with_beams",
            {"model_type": "deepseek_v4"},
        ),
    ],
    "models/test_parity.py": [
        (row_without_sum, "test_step_of_every_head_matches_transformers", {"variant": "gpt2", "n": 2}),
        (column_without_sum_of_gradients, "test_step_of_every_head_matches_transformers", {"variant": "gptj", "n": 2}),
        (
            head_without_sum_of_gradients,
            "test_parameters_after_training_match_transformers",
            {"variant": "gpt_neo", "n": 2},
        ),
        (
            query_key_value_cut_as_one_matrix,
            "test_step_of_every_head_matches_transformers",
            {"variant": "gpt2", "n": 2},
        ),
        (bias_before_the_sum, "test_step_of_every_head_matches_transformers", {"variant": "bert", "n": 2}),
        (
            key_values_without_sum_over_copies,
            "test_step_of_every_head_matches_transformers",
            {"variant": "llama", "n": 3},
        ),
        (
            weights_drawn_in_parts,
            "test_from_config_seed_gives_the_same_weights_at_every_tensor_parallel_size",
            {"variant": "gpt2"},
        ),
    ],
    "modeling/test_outputs.py": [
        (gathered_gradient_summed, "test_gathered_logits_are_differentiable", {"variant": "t5"}),
        (
            every_rank_samples_for_itself,
            "test_generate_with_left_padding_matches_transformers",
            {"variant": "gpt2", "n": 2},
        ),
    ],
    "layers/test_vocab_parallel_logits.py": [
        (last_words_for_the_first, "test_operations_on_vocab_parallel_logits_match_full_logits", {"n": 2}),
        (
            cross_entropy_without_common_maximum,
            "test_vocab_parallel_cross_entropy_matches_torch",
            {"n": 2, "scale": 1.0, "in_cpp": False},
        ),
        (
            sums_of_own_maxima,
            "test_vocab_parallel_cross_entropy_matches_torch",
            {"n": 2, "scale": 1.0, "in_cpp": True},
        ),
        (
            unknown_labels_are_elsewhere,
            "test_vocab_parallel_cross_entropy_rejects_labels_outside_the_vocabulary",
            {"label": -1, "options": {}},
        ),
    ],
    "distributed/test_collectives.py": [
        (
            gathered_logits_in_the_loss,
            "test_training_step_makes_two_all_reduces_per_block",
            {"variant": "gpt2", "n": 2},
        ),
        (
            a_copy_for_each_reader,
            "test_training_step_makes_two_all_reduces_per_block",
            {"variant": "llama-untied", "n": 2},
        ),
    ],
    "layers/test_dropout.py": [
        (
            inner_outputs_without_their_region,
            "test_step_with_dropout_in_heads_matches_a_replay_of_its_masks",
            {"variant": "doge", "name": "DogeForCausalLM"},
        ),
        (
            same_masks_on_sharded_activations,
            "test_step_with_dropout_matches_a_replay_of_its_masks",
            {"variant": "gpt2", "n": 2},
        ),
        (
            own_masks_on_replicated_activations,
            "test_step_with_dropout_matches_a_replay_of_its_masks",
            {"variant": "bert", "n": 2},
        ),
        (
            a_stream_left_open_by_exceptions,
            "test_dropout_streams_recover_from_an_exception_in_forward",
            {"variant": "gpt2"},
        ),
    ],
    "modeling/test_training.py": [
        (norm_counts_copies, "test_clip_grad_norm_matches_one_process", {"variant": "llama", "n": 3}),
        (
            norm_counts_copies,
            "test_training_under_ddp_and_fsdp2_matches_one_process",
            {"variant": "llama-one-kv", "wrapper": "FSDP2"},
        ),
        (
            overflow_kept_to_oneself,
            "test_grad_scaler_skips_a_step_on_all_ranks_after_an_overflow_on_one",
            {"n": 2, "wrapper": "alone"},
        ),
    ],
    "pipeline/test_pipeline.py": [
        (
            mean_of_each_micro_batch,
            "test_train_step_of_language_model_matches_one_process",
            {"variant": "gptj", "tp": 1, "pp": 2},
        ),
        (
            tied_gradients_of_one_stage,
            "test_train_step_of_language_model_matches_one_process",
            {"variant": "gpt2", "tp": 1, "pp": 2},
        ),
        (
            replicas_that_average_each_micro_batch,
            "test_train_step_of_ddp_and_fsdp2_replicas_matches_one_process",
            {"variant": "gpt2", "wrapper": "DDP"},
        ),
    ],
    "pipeline/test_pipeline_generation.py": [
        (
            positions_uncounted_without_the_first_block,
            "test_stages_count_positions_as_the_first_block_of_all_does",
            {"kinds": ["full_attention", "linear_attention", "full_attention"], "pp": 3},
        ),
    ],
    "pipeline/test_schedule.py": [
        (
            loss_that_forgets_its_scale,
            "test_micro_batch_loop_with_scaled_losses_accumulation_and_a_copied_model",
            {"variant": "gpt2", "tp": 1, "pp": 2},
        ),
        (
            one_micro_batch_more,
            "test_messages_between_stages_and_activations_in_flight_are_bounded",
            {"variant": "gpt2", **STAGES, "size": 1},
        ),
        (norm_counts_tied_copies, "test_clip_grad_norm_over_stages_matches_one_process", {"variant": "gpt2", **STAGES}),
        (
            gradients_received_when_needed,
            "test_receives_start_before_the_computation_that_they_overlap_with",
            {"pp": 2},
        ),
    ],
    "pipeline/test_overlap.py": [
        (one_micro_batch_after_another, "test_pipeline_step_takes_the_ideal_time_on_logical_clocks", STEP),
    ],
    "pipeline/test_zero_bubble.py": [
        (deferred_gradient_dropped, "test_weight_gradients_follow_the_sends_of_input_gradients", {"pp": 2}),
        (deferred_gradients_twice, "test_weight_gradients_follow_the_sends_of_input_gradients", {"pp": 2}),
        (deferred_gradients_after_the_step, "test_weight_gradients_follow_the_sends_of_input_gradients", {"pp": 2}),
        (weight_gradients_at_once, "test_weight_gradients_follow_the_sends_of_input_gradients", {"pp": 3}),
        (weight_gradients_all_at_the_end, "test_weight_gradients_follow_the_sends_of_input_gradients", {"pp": 3}),
        (replicas_that_reduce_too_early, "test_ddp_reduces_once_after_the_last_micro_batch", {}),
        (one_micro_batch_more, "test_weight_gradients_follow_the_sends_of_input_gradients", {"pp": 3}),
    ],
    "pipeline/test_schedule_precision.py": [
        (dropout_at_both_ends, "test_each_dropout_runs_on_exactly_one_stage", {"variant": "t5", "pp": 2}),
    ],
}
"""By test file: the mutant, the test that catches it, and the test's arguments."""


@pytest.mark.drawn(11)
@pytest.mark.parametrize(
    ("file", "make", "name", "arguments"),
    [(file, *caught) for file, rows in MUTANTS.items() for caught in rows],
    ids=[f"{make.__name__}-{name}" for rows in MUTANTS.values() for make, name, _ in rows],
)
def test_mutant_is_caught(
    request: pytest.FixtureRequest,
    pool: Pool,
    file: str,
    make: Callable[[Patch], None],
    name: str,
    arguments: dict[str, Any],
    tmp_path_factory: pytest.TempPathFactory,
    seed: int,
) -> None:
    """The test passes (here, or as a case of this run), and with the mutant it fails by an assertion."""
    test = load_test(file, name)
    is_shown = is_in_run(request, file, name, arguments)
    parameters = inspect.signature(test).parameters
    if "seed" in parameters:
        arguments = {**arguments, "seed": seed}

    def folder() -> dict[str, Path]:
        return {"tmp_path": tmp_path_factory.mktemp("mutant")} if "tmp_path" in parameters else {}

    if "pool" not in parameters:
        if not is_shown:
            test(**arguments)
        with pytest.raises(AssertionError):
            with_mutant(make, partial(test, **arguments))
        return
    if not is_shown:
        test(pool, **arguments, **folder())
    with pytest.raises((AssertionError, WorkerError)) as caught:
        test(MutantPool(pool, make), **arguments, **folder())
    if isinstance(caught.value, WorkerError):
        failures = list(caught.value.failures.values())
        assert all("AssertionError" in failure for failure in failures), failures
