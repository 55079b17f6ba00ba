"""`Pipeline`: calls of a model that is split into pipeline stages, in training and in generation."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers.modeling_outputs import CausalLMOutputWithPast, MoEModelOutput
from transformers.utils import ModelOutput

from oslo_models.cache_argument import name_in_model, update_cache
from oslo_models.distributed.collectives import broadcast, receive, send
from oslo_models.distributed.mesh import Axis
from oslo_models.distributed.object_exchange import gather_objects
from oslo_models.media.items import KINDS, PIXELS, divide_media
from oslo_models.pipeline.batch_rows import count_rows, divide_rows
from oslo_models.pipeline.deepspeed import DeepSpeedAdapter
from oslo_models.pipeline.micro_batch_loss import GlobalMeanLoss, asks_for_loss, computes_loss
from oslo_models.pipeline.schedule import Schedule
from oslo_models.pipeline.sharded_model import ShardedModel
from oslo_models.pipeline.shared_outputs import SharedOutputs
from oslo_models.pipeline.stage import Stack, Stage, hidden_size
from oslo_models.pipeline.stage_runner import OtherStageError, StageRunner
from oslo_models.pipeline.ties import untie_different
from oslo_models.sharding.pipeline_rules import SCHEDULES, ZERO_BUBBLE


class Pipeline:
    """Pipeline of one model, from the view of one stage.

    Args:
        model: local stage of the model.
        stage: description of the stage.
        forward: forward of the model class, with outputs resolved.
    """

    def __init__(self, model: ShardedModel, stage: Stage, forward: Callable[..., Any]) -> None:
        self.model, self.stage, self.mesh = model, stage, model.mesh
        self.runner = StageRunner(model, stage, forward)
        self._signature = inspect.signature(forward)
        self._keeps_logits = False
        self._open_loop: Schedule | None = None
        self._axes: dict[tuple[int, ...], Axis] = {}
        self._shared_axes = self._find_axes()

    def _find_axes(self) -> dict[str, Axis]:
        """Create the axis of the stages that hold each shared parameter. All ranks take part in each creation."""
        found = {}
        for name, stages in sorted(self.stage.shared_parameters.items()):
            if stages not in self._axes:
                self._axes[stages] = self.mesh.stages(stages)
            found[name] = self._axes[stages]
        return found

    def tied_parameters(self) -> list[tuple[nn.Parameter, Axis]]:
        """Return each local parameter that is tied across stages, with the axis of its stages.

        Every call looks up the parameters, since FSDP replaces them.
        """
        parameters = {self.stage.canonical_name(name): param for name, param in self.model.named_parameters()}
        # loading may have unfrozen parameters that were constructed frozen
        trained = {name for name, param in parameters.items() if param.requires_grad or name not in self.stage.frozen}
        return [(parameters[name], axis) for name, axis in self._shared_axes.items() if name in trained]

    def has_doubtful_ties(self) -> bool:
        """Return whether ``tie_word_embeddings`` was changed since construction, so that ties are in doubt."""
        says = getattr(self.model.config, "tie_word_embeddings", None)
        return bool(self.stage.tied_names) and says != self.stage.ties_words

    def update_ties(self) -> None:
        """Detect which weights are still tied, and correct the configuration. A collective of all ranks.

        An adapter may bring a separate head. ``peft`` compares the head with the embedding when it merges adapters. One
        of them is on another stage, so ``peft`` always sets ``tie_word_embeddings=False``. Only the values show the
        truth.
        """
        model, stage = self.model, self.stage
        if not stage.tied_names:
            return
        if untie_different(stage, dict(model.named_parameters(remove_duplicate=False)), self.mesh):
            stage.is_untied, stage.ties_words = True, stage.ties_words and False
            self._shared_axes = self._find_axes()
            model._mark_parameters()
        if stage.ties_words not in (None, getattr(model.config, "tie_word_embeddings", None)):
            model.config.tie_word_embeddings = stage.ties_words

    @torch.no_grad()
    def broadcast_tied(self) -> None:
        """Broadcast randomly initialized tied weights from the first stage that holds them. A collective."""
        for param, axis in self.tied_parameters():
            broadcast(axis, param.data)

    @torch.no_grad()
    def check_tied(self) -> None:
        """Check that tied weights have the same values on all stages that hold them. A collective.

        Raises:
            ValueError: on every rank, if they differ. A checkpoint may have different values under the names of tied
                weights. transformers then unties them, but pipeline stages sum their gradients and cannot untie them.
        """
        names = {id(param): name for name, param in self.model.named_parameters()}
        differing: list[str] = []
        for param, axis in self.tied_parameters():
            first = broadcast(axis, param.data.clone())
            if not bool(((first == param.data) | first.isnan()).all()):
                name = names[id(param)]
                differing.append(self.stage.full_names.get(name, name))
        found = sorted({name for each in gather_objects(self.mesh.model, differing) for name in each})
        if found:
            raise ValueError(
                f"{found} of {type(self.model).__name__} is tied to weights of another stage, and the checkpoint "
                "has other values for them: set tie_word_embeddings=False in its configuration, or load it with "
                "pipeline_parallel_size=1, where transformers unties them"
            )

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return a loop over micro-batches.

        A call within ``generate`` returns one output. A call within the loop runs one micro-batch.
        """
        if self.runner.is_running:
            return self.runner.forward(kwargs)
        bound = self._signature.bind(self.model, *args, **kwargs).arguments
        batch = {**bound, **bound.get("kwargs", {})}
        batch.pop("self"), batch.pop("kwargs", None)
        if self.model._generates:
            self._end_open_loop("generate")
            return self._generation_step(self.without_pixels(batch))
        if self.runner.abandoned:
            self.runner.abandoned = False
            raise RuntimeError(
                "the loop over the micro-batches of the last batch was left before its end, so its gradients are "
                "incomplete: set them to zero and continue with another batch"
            )
        self.mesh.world.set_phase(f"beginning of the loop over micro-batches, stage {self.stage.index}", steps=1)
        deepspeed = DeepSpeedAdapter.find(self.model)
        micro_batches = self._micro_batches(batch)
        self.runner.check(micro_batches[0])
        name, loss = type(self.model).__name__, None
        has_loss = asks_for_loss(batch, self.model.loss_inputs) and computes_loss(self.model)
        if has_loss and torch.is_grad_enabled():
            check_schedule(self.model, deepspeed is not None)
        if has_loss and len(micro_batches) > 1:
            if not self.model.loss_is_mean:
                raise ValueError(
                    f"the loss of {name} depends on the whole batch, so micro-batches cannot compute it: "
                    f"call model.set_micro_batch_size({self.model.micro_batch_size * len(micro_batches)})"
                )
            loss = GlobalMeanLoss(batch, name)
        shares = (self.model.share_loss and has_loss) or self.model.share_logits
        shared = SharedOutputs(self.mesh, self.model.share_logits) if shares else None
        return self._loop(micro_batches, has_loss, loss, deepspeed, shared)

    def _loop(
        self,
        micro_batches: list[dict[str, Any]],
        has_loss: bool,
        loss: GlobalMeanLoss | None,
        deepspeed: DeepSpeedAdapter | None,
        shared: SharedOutputs | None,
    ) -> Iterator[Any]:
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # the model call has gathered parameters, and each micro-batch gathers them again
        self._end_open_loop("a second loop over micro-batches")
        defers = self.model.schedule == ZERO_BUBBLE
        schedule = Schedule(self, micro_batches, has_loss, loss, deepspeed, shared, defers)
        self._open_loop = schedule
        try:
            yield from schedule
        finally:
            if self._open_loop is schedule:
                self._open_loop = None

    def _end_open_loop(self, what: str) -> None:
        """Raise ``RuntimeError`` if a loop of this model is open, since the messages of both would get mixed up.

        End the open loop before, so that no stage waits for another stage.
        """
        if self._open_loop is not None:
            schedule, self._open_loop = self._open_loop, None
            schedule.leave()
            self.runner.abandoned = False  # this error reports it
            raise RuntimeError(
                f"{what} was started within a loop over the micro-batches of this {type(self.model).__name__}. Both "
                "have been left: set the gradients to zero, and run one after the other. For a loss of two batches, "
                "concatenate them"
            )

    def _micro_batches(self, batch: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Split the arguments that have rows, and pass all other arguments to each micro-batch.

        Raises:
            ValueError: the batch has no rows, the micro-batch size does not divide the number of rows, an argument
                cannot be divided, or it is unknown whether it can.
        """
        rows = count_rows(batch, self.model.main_input_name)
        size = self.model.micro_batch_size
        if rows is None or rows == 0:
            raise ValueError(f"the batch has no rows: pass {self.model.main_input_name} of shape [rows, ...]")
        if rows % size:
            raise ValueError(
                f"a batch of {rows} rows cannot be divided into micro-batches of micro_batch_size={size}; change one "
                "of them (model.set_micro_batch_size)"
            )

        if not self.stage.towers:
            return divide_rows(batch, rows, size)
        if batch.get("mm_encoder_outputs") is not None:
            raise ValueError("mm_encoder_outputs cannot be divided into micro-batches: pass the pixels")
        names, media = divide_media(batch, rows, size, self.model.config)
        parts = divide_rows({name: value for name, value in batch.items() if name not in names}, rows, size)
        return [self.without_pixels({**part, **own}) for part, own in zip(parts, media, strict=True)]

    def without_pixels(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return arguments without those that only towers read, on a stage without towers."""
        absent = PIXELS if self.stage.towers and self.stage.index else ()
        return {name: value for name, value in batch.items() if name not in absent}

    # Generation -------------------------------------------------------------------------------------------------------

    @contextmanager
    def keeping_logits(self) -> Iterator[None]:
        """Keep the logits of generation steps on the last stage within the block. Other stages get [rows, 0, vocab].

        A stage does not wait for later stages, and does not learn whether they have raised. All stages must enter the
        block for the same steps.
        """
        self._keeps_logits = True
        try:
            yield
        finally:
            self._keeps_logits = False

    @torch.no_grad()
    def encode(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], failure: Exception | None = None
    ) -> MoEModelOutput:
        """Run the encoder on the arguments of ``generate``. Returns its output on every stage.

        Args:
            failure: why this stage cannot take part. Then every stage raises.
        """
        self._end_open_loop("generate")
        encoder = self.model.get_encoder()
        # as in transformers: the encoder of SpeechEncoderDecoder has another name for its input than the model
        name = getattr(encoder, "main_input_name", self.model.main_input_name)
        accepted = inspect.signature(encoder.forward).parameters
        prompt = args[0] if args else kwargs.get(name, kwargs.get("inputs"))
        arguments = {name: prompt, **{key: value for key, value in kwargs.items() if key in accepted}}
        batch = {key: value for key, value in arguments.items() if value is not None}
        stack = self.stage.stacks[0]
        hidden = torch.empty(self.runner.shape(batch, 0), dtype=self.model.dtype, device=self.mesh.device)
        result = None
        if stack.is_local:
            arrived, former = self._receive_hidden(stack, hidden)
            failure = failure or former
            if failure is None:
                result, failure = _catch(lambda: self.runner.run_stack(0, batch, arrived))
            self._send_hidden(stack, hidden if result is None else result, failure)
        hidden = self._broadcast_from(hidden if result is None else result, stack.last, failure)
        return MoEModelOutput(last_hidden_state=hidden)

    @torch.no_grad()
    def encode_media(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Run the towers on the arguments of ``generate``, if transformers runs them before the first step.

        Returns:
            The arguments, on the first stage with features in place of pixels. transformers removes the arguments that
            it no longer needs.

        Raises:
            Exception: on every stage, if a tower raises.
        """
        base, encoded, failure = self.model.base_model, {}, None
        runs_before = getattr(self.model, "_supports_mm_encoder_outputs", None)
        # transformers encodes sounds in the first step
        given = [kind for kind in KINDS if kind.modality != "audio" and kwargs.get(kind.values) is not None]
        if not self.stage.towers or not given or runs_before is None or not runs_before():
            return self.without_pixels(kwargs)
        if self.stage.index == 0:
            for kind in given:
                encode = getattr(base, f"get_{kind.modality}_features")
                accepted = inspect.signature(encode).parameters
                own = {name: value for name, value in kwargs.items() if name in accepted}
                if failure is None:
                    encoded[kind.modality], failure = _catch(partial(encode, **own, return_dict=True))
        self._broadcast_from(torch.zeros(1, dtype=self.model.dtype, device=self.mesh.device), 0, failure)
        encoded_pixels = [name for kind in given for name in (kind.values, *kind.pixels)]
        rest = {name: value for name, value in self.without_pixels(kwargs).items() if name not in encoded_pixels}
        return {**rest, "mm_encoder_outputs": encoded} if encoded else rest

    @torch.no_grad()
    def _generation_step(self, batch: dict[str, Any]) -> ModelOutput:
        """Run one forward of generation. Returns the logits of the last positions on every stage.

        `keeping_logits` keeps them on the last stage. The cache stays on the stage of its blocks.
        """
        if "output_router_logits" in self._signature.parameters:
            batch["output_router_logits"] = False  # router logits only matter for the loss
        if self.model.config.is_encoder_decoder and batch.get("encoder_outputs") is None:
            # a forward beside those of the loop, such as Whisper's for the language of a sound
            batch["encoder_outputs"] = self.encode((), batch)
        number = len(self.stage.stacks) - 1
        stack = self.stage.stacks[number]
        requested = batch.get("logits_to_keep")
        cache = name_in_model(type(self.model).forward, batch)
        past, failure = None if cache is None else batch.get(cache), None
        rows, length, width = self.runner.shape(batch, number)
        # A forward without this argument returns all logits. Assisted decoding reads the logits of all its candidates.
        keep = requested if isinstance(requested, int) and requested > 0 else length
        logits = torch.empty(
            rows, min(keep, length), _count_words(self.model.config), dtype=self.model.dtype, device=self.mesh.device
        )
        if stack.is_local:
            hidden = torch.empty(rows, length, width, dtype=self.model.dtype, device=self.mesh.device)
            arrived, failure = self._receive_hidden(stack, hidden)
            result: Any = None
            if failure is None:
                result, failure = _catch(lambda: self.runner(batch, {} if arrived is None else {number: arrived}))
            outcome: tuple[dict[int, Tensor], Any] = result or ({number: hidden}, None)
            outgoing, output = outcome
            past = output.get(cache) if cache is not None and hasattr(output, "get") else past
            if failure is None:
                self._count_positions(past, rows, length)
            if outgoing:
                self._send_hidden(stack, outgoing[number], failure)
            if self.stage.is_last and output is not None:
                logits = output.logits[:, -keep:]
        if not self._keeps_logits:
            shared = self._broadcast_from(logits, self.stage.count - 1, failure)
        elif failure is not None:
            raise failure
        else:
            shared = logits.to(self.model.dtype) if self.stage.is_last else logits[:, :0]
        if cache is None:
            return CausalLMOutputWithPast(logits=shared)
        kind = CausalLMOutputWithPast if hasattr(CausalLMOutputWithPast, cache) else ModelOutput
        return kind(**{"logits": shared, cache: past})

    @torch.no_grad()
    def skip_generation_step(self, rows: int, length: int) -> None:
        """Take part in a `keeping_logits` step that this stage cannot compute. Later stages raise."""
        stack = self.stage.stacks[-1]
        if stack.is_local:
            width = hidden_size(self.model, stack.blocks)
            hidden = torch.zeros(rows, length, width, dtype=self.model.dtype, device=self.mesh.device)
            self._receive_hidden(stack, hidden)
            self._send_hidden(stack, hidden, OtherStageError("a stage has skipped a step"))

    def _count_positions(self, cache: Any, rows: int, length: int) -> None:
        """Record the length in the stage's cache by unread keys of width one, if the blocks do not record it."""
        if self.stage.counting_layer is not None and cache is not None:
            unread = torch.zeros(rows, 1, length, 1, dtype=self.model.dtype, device=self.mesh.device)
            update_cache(cache, unread, unread, self.stage.counting_layer, {})

    # Sent tensors have an additional element that flags a failure. Then all stages raise, and no stage waits.

    def _receive_hidden(self, stack: Stack, hidden: Tensor) -> tuple[Tensor | None, Exception | None]:
        """Receive the hidden states of the previous stage, shaped like ``hidden``, or ``None`` at the stack's start."""
        if self.stage.index == stack.first:
            return None, None
        return _split_failure(receive(self.mesh.pp, _append_failure(hidden, None), self.stage.index - 1), hidden)

    def _send_hidden(self, stack: Stack, hidden: Tensor, failure: Exception | None) -> None:
        """Send hidden states to the next stage, unless the stack ends here."""
        if self.stage.index < stack.last:
            send(self.mesh.pp, _append_failure(hidden.to(self.model.dtype), failure), self.stage.index + 1)

    def _broadcast_from(self, x: Tensor, src: int, failure: Exception | None) -> Tensor:
        """Broadcast the tensor of stage ``src`` to every stage.

        Raises:
            Exception: ``failure``, if this stage has raised.
            OtherStageError: another stage has raised.
        """
        x = x.to(self.model.dtype)  # autocast may have changed the dtype
        shared, others = _split_failure(broadcast(self.mesh.pp, _append_failure(x, failure), src=src), x)
        if failure is not None:
            raise failure
        if others is not None:
            raise others
        return shared


def check_schedule(model: ShardedModel, has_deepspeed: bool) -> None:
    """Check that a model can train with its schedule.

    Raises:
        ValueError: the schedule is unknown, or a wrapper or checkpointing does not allow to defer weight gradients.
    """
    if model.schedule not in SCHEDULES:
        raise ValueError(f"schedule must be one of {', '.join(map(repr, SCHEDULES))}, got {model.schedule!r}")
    if model.schedule != ZERO_BUBBLE:
        return
    modules = list(model.modules())
    reasons = {
        "DeepSpeed": has_deepspeed and "its engine reduces gradients in the backward pass",
        "FSDP2": any(isinstance(module, FSDPModule) for module in modules)
        and "it frees weights and reduces their gradients in the backward pass of each block",
        "gradient checkpointing": model.training
        and any(getattr(module, "gradient_checkpointing", False) for module in modules)
        and "the input of each linear layer, which a deferred weight gradient needs, is computed again",
        "torch.compile": any(getattr(module, "_compiled_call_impl", None) is not None for module in modules)
        and "compiled code computes weight gradients in its backward pass",
    }
    for name, reason in reasons.items():
        if reason:
            raise ValueError(
                f'schedule="zb-h1" cannot be used with {name}: {reason}; set model.schedule = "1f1b" on every rank, or '
                f"leave {name} out"
            )


def _count_words(config: Any) -> int:
    """Return the number of tokens that have logits.

    A padded head (Inkling) has more rows. A pruned head (Apertus 1.5) has fewer rows than the embedding, and that of
    ImageGPT lacks the token of the start.
    """
    text = config.get_text_config(decoder=True)  # PaliGemma has another number beside it
    vocab: int = getattr(text, "vocab_size", None) or config.vocab_size
    vocab -= text.model_type == "imagegpt"
    return min(vocab, *(getattr(text, name, None) or vocab for name in ("unpadded_vocab_size", "output_vocab_size")))


def _catch(run: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """Return the result of ``run``, and its exception if it raises one."""
    try:
        return run(), None
    except Exception as error:  # noqa: BLE001  raised later, when the other stages know of it
        return None, error


def _append_failure(x: Tensor, failure: Exception | None) -> Tensor:
    """Flatten ``x`` and append a failure flag."""
    return torch.cat((x.flatten(), x.new_full((1,), float(failure is not None))))


def _split_failure(marked: Tensor, like: Tensor) -> tuple[Tensor, Exception | None]:
    """Undo `_append_failure` for a tensor with the shape of ``like``."""
    failed = OtherStageError("another stage of the pipeline raised while it generated") if marked[-1] else None
    return marked[:-1].view(like.shape), failed
