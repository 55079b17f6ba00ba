"""What happens around transformers' ``forward`` and ``generate`` of a divided model."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from transformers.utils import ModelOutput

from oslo_models.distributed.collectives import gather_from
from oslo_models.distributed.grad_overflow import share_overflow
from oslo_models.distributed.mesh import Axis
from oslo_models.distributed.rng import synchronize
from oslo_models.fusion.lazy_logits import LazyLogits
from oslo_models.layers.vocab_parallel import VocabParallelLogits
from oslo_models.pipeline.stage import Stage

if TYPE_CHECKING:
    from oslo_models.modeling.base import ParallelModel


def with_full_outputs(forward: Any) -> Any:
    """``forward`` with its divided outputs resolved. The signature stays: ``generate`` looks at it."""

    @functools.wraps(forward)
    def resolving(model: ParallelModel, /, *args: Any, **kwargs: Any) -> Any:
        if model.mesh is not None:
            args, kwargs = _on_device(model.mesh.device, args, kwargs)
            if not model._generates and not (model.pipeline and model.pipeline.runner.inside):
                model._compare(args, kwargs)
        if model.pipeline is not None:
            return model.pipeline(args, kwargs)
        looked_at = kwargs.get("labels") is not None or kwargs.get("output_attentions")
        if torch.compiler.is_compiling() and not torch.is_grad_enabled() and not looked_at:
            return forward(model, *args, **kwargs)  # decoding: heads give whole logits, and nothing else is to be done
        deferring = model.use_lazy_logits()
        if not model.is_tensor_parallelized() and not deferring:
            return forward(model, *args, **kwargs)
        as_tuple = not (model.config.return_dict if kwargs.get("return_dict") is None else kwargs["return_dict"])
        if as_tuple:  # the names of the outputs tell what is divided
            kwargs["return_dict"] = True
        model._at("forward" if torch.is_grad_enabled() else "forward without gradients", steps=1)
        output = forward(model, *args, **kwargs)
        if not isinstance(output, ModelOutput):
            return output
        fields = _resolve(model, output, kwargs)
        model._at("after forward")
        _note_backward(fields.values(), model._at)
        if fields.get("loss") is not None and model.mesh is not None:
            share_overflow(fields["loss"], model.parameters, model.mesh.tp)
        # A tuple keeps the place of logits that are left out: what comes after them is found where it always is.
        return tuple(fields.values()) if as_tuple else type(output)(**fields)

    return resolving


def _note_backward(outputs: Iterable[Any], at: Callable[[str], None]) -> None:
    """Let the phase be the backward pass while there is one, of the first of these that has a graph."""

    def when_it_begins(grad: Tensor) -> None:
        at("backward")
        torch.autograd.Variable._execution_engine.queue_callback(lambda: at("after backward"))

    for output in outputs:
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(when_it_begins)
            return


def with_full_stage_outputs(forward: Any) -> Any:
    """``forward`` on a pipeline stage, with its divided outputs resolved."""

    @functools.wraps(forward)
    def resolving(model: ParallelModel, /, **kwargs: Any) -> Any:
        if "return_dict" in kwargs or not model.config.return_dict:
            kwargs["return_dict"] = True  # the loop needs its loss by name
        wanted = kwargs.get("output_hidden_states")
        if not isinstance(wanted, bool) and wanted is not None:  # some of them, by their numbers in the full model
            kwargs["output_hidden_states"] = True
        model.use_lazy_logits()
        output = forward(model, **kwargs)
        if not isinstance(output, ModelOutput):
            return output
        fields, stage = _resolve(model, output, kwargs), model.stage
        assert stage is not None
        return type(output)(**{name: _of_all_blocks(stage, name, value, wanted) for name, value in fields.items()})

    return resolving


def _of_all_blocks(stage: Stage, name: str, value: Any, wanted: bool | int | list[int] | None) -> Any:
    """A field of the last stage's output, with ``None`` in the places of blocks that other stages have.

    Args:
        wanted: which hidden states were asked for, if not all: the others are ``None``, too.
    """
    side = name.partition("_")[0]
    stack = stage.stacks[0 if side in ("encoder", "vision") else -1]
    if isinstance(value, ModelOutput):  # of one of several stacks
        own = Stage(stage.index, stage.count, [stack], stage.ranges)
        return type(value)(**{inner: _of_all_blocks(own, inner, each, wanted) for inner, each in value.items()})
    if not isinstance(value, tuple) or not name.endswith(("hidden_states", "attentions")):
        return value
    if not stack.here:
        return None
    full = (*[None] * stack.before, *value)
    if isinstance(wanted, bool) or wanted is None or name.endswith("attentions"):
        return full
    chosen = {i % len(full) for i in ([wanted] if isinstance(wanted, int) else wanted) if -len(full) <= i < len(full)}
    return tuple(each if i in chosen else None for i, each in enumerate(full))


def _on_device(device: torch.device, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The arguments of a call with their tensors on the model's device; a batch without rows is refused."""

    def moved(name: str, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if value.dim() > 0 and value.shape[0] == 0:
            raise ValueError(f"the batch is empty: {name} has shape {tuple(value.shape)}")
        return value if value.device == device else value.to(device)

    return (
        tuple(moved(f"argument {position}", value) for position, value in enumerate(args)),
        {name: moved(name, value) for name, value in kwargs.items()},
    )


def with_synchronized_rng(generate: Any) -> Any:
    """``generate`` with the ranks of the tp axis drawing from the same random state, so that they sample alike."""

    @functools.wraps(generate)
    def generating(
        model: ParallelModel, /, *args: Any, fused_no_repeat_ngram_blocking: bool | None = None, **kwargs: Any
    ) -> Any:
        model.fuse_ngram_blocking(fused_no_repeat_ngram_blocking)
        if model.mesh is None or model._generates:
            return generate(model, *args, **kwargs)
        model._at("generate", steps=1)
        synchronize(model.mesh.model, model.mesh.device)
        args, kwargs = _on_device(model.mesh.device, args, kwargs)
        model._compare(args, kwargs)
        model._generates = True
        try:
            if model.pipeline is not None and model.config.is_encoder_decoder and "encoder_outputs" not in kwargs:
                kwargs["encoder_outputs"] = model.pipeline.encode(args, kwargs)
            return generate(model, *args, **kwargs)
        finally:
            model._generates = False
            model._at("after generate")

    return generating


def _resolve(model: ParallelModel, output: ModelOutput, given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the output of a forward that was ``given`` these arguments, as transformers would return them."""
    loss = output.get("loss")
    omit = loss is not None and (loss.requires_grad if model.gather_logits is None else not model.gather_logits)
    plan = model.plan(model.config)
    replicated = output.keys() if plan.limit() is None else plan.replicated_attentions
    fields = {}
    for name, value in output.items():
        if isinstance(value, (VocabParallelLogits, LazyLogits)):
            labels = model.labels_of.get(name)  # without them, there was no loss that these logits spared
            value = None if omit and (labels is None or given.get(labels) is not None) else value.full()
        elif name.endswith("attentions") and value and model.mesh is not None and name not in replicated:
            value = tree_map_only(Tensor, partial(_all_heads, model.mesh.tp), tuple(value))
        fields[name] = value
    return fields


def _all_heads(tp: Axis, weights_BHQK: Tensor) -> Tensor:
    """Attention weights of all heads; ranks may hold different numbers of them."""
    if tp.size == 1:
        return weights_BHQK
    own = torch.tensor([weights_BHQK.shape[1]], device=weights_BHQK.device)
    return gather_from(tp, weights_BHQK, 1, gather_from(tp, own, 0, [1] * tp.size).tolist())
