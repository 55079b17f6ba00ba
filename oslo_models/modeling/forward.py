"""Wraps transformers' ``forward`` and ``generate`` of a parallel model."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from enum import Enum, auto
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils._pytree import tree_map_only
from transformers.utils import ModelOutput

from oslo_models.cache_argument import NAMES, has_cache
from oslo_models.distributed.grad_overflow import propagate_overflow_after_backward
from oslo_models.distributed.rng import synchronize
from oslo_models.distributed.stopping import user_errors
from oslo_models.fusion.decoding import with_own_code
from oslo_models.fusion.lazy_logits import LazyLogits
from oslo_models.layers.context_parts import ContextPart, ContextParts
from oslo_models.layers.divided_tower import PendingOutput
from oslo_models.layers.sharded_activation import gathered
from oslo_models.layers.vocab_parallel import ShardedLogits, VocabParallelLogits
from oslo_models.modeling.context_parallel import check_attention_implementation, divides_prompts
from oslo_models.modeling.internals import ParallelModelInternals
from oslo_models.modeling.token_division import check_wrappers
from oslo_models.pipeline.stage import Stage
from oslo_models.pipeline.window_encoding import WindowEncoding


class ForwardMode(Enum):
    """The execution path of a parallel model's ``forward``."""

    DIRECT = auto()
    """transformers' forward. The model is not sharded, or compiled decoding uses LM heads that return full logits."""
    PIPELINE = auto()
    """All pipeline stages compute the batch in micro-batches."""
    GATHERED = auto()
    """transformers' forward, followed by a gather of sharded or lazy outputs."""


def with_full_outputs(forward: Any) -> Any:
    """Wrap ``forward`` to gather its sharded outputs. The signature stays, since ``generate`` inspects it."""

    def full_forward(model: ParallelModelInternals, /, *args: Any, **kwargs: Any) -> Any:
        if model._peft_config is not None:
            model.adopt_adapters()
        if model.mesh is not None:
            if model.sharded_layers is not None:
                model.sharded_layers.check(model)
            _refuse_transforms(model)
            if torch.is_grad_enabled() and not torch.compiler.is_compiling():
                _check_division(model)
            args, kwargs = _on_device(model.mesh.device, args, kwargs)
            if not model._generates and not (model.pipeline and model.pipeline.runner.is_running):
                model._compare(args, kwargs)
        run = _run if torch.compiler.is_compiling() else _run_eagerly
        return run(forward, model, args, kwargs)

    own = with_own_code(full_forward, forward.__qualname__)  # compile each class separately
    return functools.update_wrapper(own, forward)


def _run(forward: Any, model: ParallelModelInternals, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    mode = _forward_mode(model, kwargs)
    if mode is ForwardMode.PIPELINE:
        return model.pipeline(args, kwargs)
    if mode is ForwardMode.DIRECT:
        with model._invariant_functions():
            return forward(model, *args, **kwargs)
    return _gathered_forward(forward, model, args, kwargs)


def _run_eagerly(forward: Any, model: ParallelModelInternals, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the forward. Release the caches that ``generate`` keeps before a training step, and if memory runs out.

    The backward of a training step may run out of memory too, where nothing catches the error.
    """
    if model.training and torch.is_grad_enabled() and not model._generates:
        model._release_caches()
    try:
        return _run(forward, model, args, kwargs)
    except torch.OutOfMemoryError:
        model._release_caches()
        raise


def _refuse_transforms(model: ParallelModelInternals) -> None:
    """Raise ``RuntimeError`` inside ``torch.func`` transforms and forward-mode differentiation."""
    if torch.compiler.is_compiling() or not model.is_model_parallelized():
        return
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        raise RuntimeError(
            f"transforms of torch.func (grad, vmap, jvp, ...) and forward-mode differentiation do not reach the other "
            f"ranks of a {type(model).__name__} that is sharded: use loss.backward() or torch.autograd.grad (their "
            "gradients of every order are exact), or one process"
        )


def _forward_mode(model: ParallelModelInternals, kwargs: Mapping[str, Any]) -> ForwardMode:
    """Return the mode of a call with these arguments, and tell LM heads whether their logits may be lazy."""
    if model.pipeline is not None:
        return ForwardMode.PIPELINE
    gathers = kwargs.get("labels") is not None or kwargs.get("output_attentions")
    if torch.compiler.is_compiling() and not torch.is_grad_enabled() and not gathers:
        return ForwardMode.DIRECT
    lazy = model.use_lazy_logits()
    is_divided = model.is_tensor_parallelized() or model.token_division is not None
    return ForwardMode.GATHERED if lazy or is_divided else ForwardMode.DIRECT


WITHOUT_WEIGHTS = ("prepare_inputs_for_generation", "prepare_decoder_input_ids_from_labels")
"""Methods of transformers models that read only their arguments and the configuration."""


def call_with_full_outputs(
    model: ParallelModelInternals, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call another method of the model, such as ``get_text_features``, and gather its sharded outputs.

    Raises:
        ValueError: there are several pipeline stages, which only ``forward`` and ``generate`` support.
        TypeError: the method returns modules or a generator, which cannot leave this process.
    """
    if model.is_pipeline_parallelized() and name not in WITHOUT_WEIGHTS:
        raise ValueError(
            f"{name} cannot run on {model._size('pp')} pipeline stages, which support only forward calls and generate: "
            "use pipeline_parallel_size=1, and tensor_parallel_size for the memory"
        )
    args, kwargs = _on_device(model.mesh.device, args, kwargs)
    model._at(name, steps=1)
    if torch.is_grad_enabled():
        _check_division(model)
    with within_model(model):
        output: Any = gathered(getattr(model, name)(*args, **kwargs))
        if isinstance(output, PendingOutput):
            output = output.gathered()
    model._at(f"after {name}")
    if isinstance(output, ModelOutput):
        return type(output)(**_gather_fields(model, output, kwargs))
    if isinstance(output, (nn.Module, Iterator, Coroutine)) and output is not model:
        raise TypeError(
            f"{name} returns a {type(output).__name__}, which cannot be sent to the application; call cpu() to load "
            "the full model there"
        )
    return tree_map_only(ShardedLogits, lambda logits: logits.full(), output)


def _gathered_forward(
    forward: Any, model: ParallelModelInternals, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    as_tuple = not (model.config.return_dict if kwargs.get("return_dict") is None else kwargs["return_dict"])
    if as_tuple:  # output names tell which outputs are sharded
        kwargs["return_dict"] = True
    model._at("forward" if torch.is_grad_enabled() else "forward without gradients", steps=1)
    with within_model(model, kwargs), model._invariant_functions():
        output = forward(model, *args, **kwargs)
        if isinstance(model.token_division, ContextParts) and isinstance(output, ModelOutput):
            output = _without_parts(model, output, kwargs)
        output = gathered(output)
    if not isinstance(output, ModelOutput):
        return output
    fields = _gather_fields(model, output, kwargs)
    model._at("after forward")
    if not torch.compiler.is_compiling():  # a hook on a tensor inside the graph would break it
        _note_backward(fields.values(), model._at)
    if fields.get("loss") is not None and model.mesh is not None:
        propagate_overflow_after_backward(fields["loss"], model.parameters, model.mesh.tp)
    # In a tuple, omitted logits stay as None, so that the outputs after them keep their positions.
    return tuple(fields.values()) if as_tuple else type(output)(**fields)


def _without_parts(model: ParallelModelInternals, output: ModelOutput, given: Mapping[str, Any]) -> ModelOutput:
    """Omit outputs of divided tokens that are not gathered: logits next to a loss, and caches of local tokens."""
    loss, changed = output.get("loss"), dict[str, Any]()
    omit_logits = loss is not None and (loss.requires_grad if model.gather_logits is None else not model.gather_logits)
    vocab = getattr(model.config.get_text_config(), "vocab_size", None)
    for name, value in output.items():
        is_part = isinstance(value, ContextPart)
        if name in NAMES and torch.is_grad_enabled() and not given.get("use_cache"):
            changed[name] = None
        if omit_logits and is_part and name.endswith("logits") and value.shape[-1] == vocab:
            changed[name] = None
    return type(output)(**{**output, **changed}) if changed else output


def _check_division(model: ParallelModelInternals) -> None:
    division = model.token_division
    if division is not None:
        check_wrappers(model, division)
    if isinstance(division, ContextParts):
        check_attention_implementation(model, division)


def _note_backward(outputs: Iterable[Any], at: Callable[[str], None]) -> None:
    """Report the backward pass as a phase of the rank, by a hook on the first output that requires a gradient."""

    def on_backward(grad: Tensor) -> None:
        at("backward")
        torch.autograd.Variable._execution_engine.queue_callback(lambda: at("after backward"))

    for output in outputs:
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(on_backward)
            return


def within_model(model: ParallelModelInternals, given: Mapping[str, Any] = MappingProxyType({})) -> Any:
    """Return a context in which modules return local results: attention weights of local heads, parts of tokens.

    Args:
        given: keyword arguments of the call. A call with a cache does not divide tokens between cp ranks, except for
            a long prompt.
    """
    outputs = nullcontext() if model.attention_outputs is None else model.attention_outputs.within_model()
    division = model.token_division
    if division is None:
        return outputs
    if not isinstance(division, ContextParts):
        return _within_both(outputs, division.within_model())
    if torch.is_grad_enabled() and has_cache(given):
        return outputs
    caches = [given[name] for name in NAMES if given.get(name) is not None]
    may_divide = functools.cache(partial(divides_prompts, model, division, caches))
    return _within_both(outputs, division.within_model(may_divide))


@contextmanager
def _within_both(outer: Any, inner: Any) -> Iterator[None]:
    with outer, inner:
        yield


def call_base_model(model: ParallelModelInternals, *args: Any, **kwargs: Any) -> Any:
    """Call the base model of a task model whose forward is replaced. Hidden states are divided and gathered."""
    if torch.is_grad_enabled():
        _check_division(model)
    with within_model(model, kwargs):
        return gathered(model.base_model(*args, **kwargs))


def with_full_stage_outputs(forward: Any) -> Any:
    """Wrap ``forward`` of a pipeline stage to gather its sharded outputs."""

    @functools.wraps(forward)
    def stage_forward(model: ParallelModelInternals, /, **kwargs: Any) -> Any:
        if "return_dict" in kwargs or not model.config.return_dict:
            kwargs["return_dict"] = True  # the pipeline needs the loss by name
        wanted = kwargs.get("output_hidden_states")
        if not isinstance(wanted, bool) and wanted is not None:  # indices of some hidden states in the full model
            kwargs["output_hidden_states"] = True
        model.use_lazy_logits()
        stage = model.stage
        assert stage is not None
        with within_model(model, kwargs), stage.reading_own_layers(model), model._invariant_functions():
            output = forward(model, **kwargs)
            if isinstance(model.token_division, ContextParts) and isinstance(output, ModelOutput):
                output = _without_parts(model, output, kwargs)
            output = gathered(output)
        if not isinstance(output, ModelOutput):
            return output
        fields = _gather_fields(model, output, kwargs)
        if not model._generates and not kwargs.get("use_cache"):
            fields = {name: value for name, value in fields.items() if name not in NAMES}  # caches of local blocks only
        return type(output)(**{name: _of_all_blocks(stage, name, value, wanted) for name, value in fields.items()})

    return stage_forward


def _of_all_blocks(stage: Stage, name: str, value: Any, wanted: bool | int | list[int] | None) -> Any:
    """Return a field of the last stage's output, with ``None`` at the indices of blocks on other stages.

    Args:
        wanted: the indices of the requested hidden states, if not all. The others are ``None`` too.
    """
    side = name.partition("_")[0]
    stack = stage.stacks[0 if side in ("encoder", "vision") else -1]
    if isinstance(value, ModelOutput):  # the output of one of several stacks
        stage_of_stack = Stage(stage.index, stage.count, [stack], stage.ranges)
        return type(value)(
            **{inner: _of_all_blocks(stage_of_stack, inner, each, wanted) for inner, each in value.items()}
        )
    if not isinstance(value, tuple) or not name.endswith(("hidden_states", "attentions")):
        return value
    if not stack.is_local:
        return None
    if name.endswith("hidden_states") and len(value) == 1:  # T5Gemma returns the last ones if none are requested
        return value
    counts_attentions = name.endswith("attentions") and not name.endswith("cross_attentions")
    full = (*[None] * (stack.attentions_before if counts_attentions else stack.blocks_before), *value)
    if isinstance(wanted, bool) or wanted is None or name.endswith("attentions"):
        return full
    chosen = {i % len(full) for i in ([wanted] if isinstance(wanted, int) else wanted) if -len(full) <= i < len(full)}
    return tuple(each if i in chosen else None for i, each in enumerate(full))


def _on_device(device: torch.device, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Move a call's tensors to the model's device. Raise ``ValueError`` for an empty batch."""

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
    """Wrap ``generate`` to synchronise random states, so that all ranks sample the same tokens.

    If user code raises on one rank, such as a streamer, the call raises on all ranks of the model. If memory runs out,
    the caches that earlier calls left are released.
    """
    parameters = list(inspect.signature(generate).parameters.values())[1:]
    names = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]

    @functools.wraps(generate)
    def synchronized_generate(
        model: ParallelModelInternals, /, *args: Any, fused_no_repeat_ngram_blocking: bool | None = None, **kwargs: Any
    ) -> Any:
        model.fuse_ngram_blocking(fused_no_repeat_ngram_blocking)
        try:
            return run(model, args, kwargs)
        except torch.OutOfMemoryError:
            model._release_caches()
            raise

    def run(model: ParallelModelInternals, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if model.mesh is None or model._generates:
            return generate(model, *args, **kwargs)
        if model.mesh.has_experts_over_replicas and kwargs.get("synced_gpus") is None:
            kwargs["synced_gpus"] = True  # finished replicas still compute the experts for other replicas' tokens
        args, kwargs = args[len(names) :], {**dict(zip(names, args, strict=False)), **kwargs}
        if model.is_pipeline_parallelized():
            _refuse_outputs_of_blocks(model, kwargs)
        model._at("generate", steps=1)
        synchronize(model.mesh.model, model.mesh.device)
        args, kwargs = _on_device(model.mesh.device, args, kwargs)
        model._compare(args, kwargs)
        errors, streamer = user_errors(model.mesh.model, model.mesh.device, kwargs)
        if streamer is not None:
            kwargs["streamer"] = streamer
        with model.generating():
            encodes = model.config.is_encoder_decoder and not isinstance(model, WindowEncoding)
            if model.pipeline is not None and encodes and "encoder_outputs" not in kwargs:
                kwargs["encoder_outputs"] = model.pipeline.encode(args, kwargs)
            if model.pipeline is not None:
                kwargs = model.pipeline.encode_media(kwargs)
            model._user_errors = errors
            try:
                output = generate(model, *args, **kwargs)
            finally:
                model._user_errors = None
        if errors is not None:  # the streamer may have raised at its last token
            errors.vote(torch.zeros(0, device=model.mesh.device))
        return output

    return synchronized_generate


def _refuse_outputs_of_blocks(model: ParallelModelInternals, kwargs: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` if ``generate`` should return outputs of blocks on other stages."""

    def value(name: str) -> Any:
        configs = (kwargs.get("generation_config"), model.generation_config)
        values = (kwargs.get(name), *(getattr(config, name, None) for config in configs))
        return next((each for each in values if each is not None), None)

    wanted = [name for name in ("output_attentions", "output_hidden_states") if value(name)]
    if wanted and value("return_dict_in_generate"):
        raise ValueError(
            f"generate cannot return {' and '.join(wanted)} on pipeline stages, which run their own blocks only: "
            "call the model on the generated sequences, or use pipeline_parallel_size=1"
        )


def _gather_fields(model: ParallelModelInternals, output: ModelOutput, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a forward's output fields like transformers, with gathered logits and attention weights."""
    loss = output.get("loss")
    omit_logits = loss is not None and (loss.requires_grad if model.gather_logits is None else not model.gather_logits)
    fields = {}
    for name, value in output.items():
        if isinstance(value, (VocabParallelLogits, LazyLogits)):
            labels = model.labels_of.get(name)  # without labels, no loss was computed from these logits
            value = None if omit_logits and (labels is None or given.get(labels) is not None) else value.full()
        elif model.attention_outputs is not None:
            value = model.attention_outputs.full(name, value, given)
        fields[name] = value
    return fields
