"""`Pipeline`: what a call of a model does when the model is divided into stages."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutputWithPast

from oslo_models.distributed.collectives import broadcast, receive, send
from oslo_models.distributed.mesh import Axis
from oslo_models.distributed.object_exchange import gather_objects
from oslo_models.pipeline.deepspeed import Engine
from oslo_models.pipeline.micro_batch_loss import GlobalMeanLoss, asks_for_loss
from oslo_models.pipeline.schedule import Schedule
from oslo_models.pipeline.stage import Stack, Stage
from oslo_models.pipeline.stage_runner import OtherStageError, StageRunner


class Pipeline:
    """The pipeline of one model, on one stage.

    Args:
        model: this stage's part.
        stage: which part that is.
        forward: transformers' forward of the model's class, its outputs resolved.
    """

    def __init__(self, model: Any, stage: Stage, forward: Callable[..., Any]) -> None:
        self.model, self.stage, self.mesh = model, stage, model.mesh
        self.runner = StageRunner(model, stage, forward)
        self._signature = inspect.signature(forward)
        # Every rank makes every group.
        self._shared = {name: self.mesh.stages(stages) for name, stages in sorted(stage.shared.items())}

    def tied(self) -> list[tuple[nn.Parameter, Axis]]:
        """Each parameter here that other stages hold too, as it is now (FSDP replaces parameters), and those stages."""
        parameters = {self.stage.root(name): param for name, param in self.model.named_parameters()}
        here = parameters.keys() - self.stage.fixed
        return [(parameters[name], axis) for name, axis in self._shared.items() if name in here]

    @torch.no_grad()
    def spread_tied(self) -> None:
        """Give random weights that several stages hold the values of the first of them; a collective of all stages."""
        for param, axis in self.tied():
            broadcast(axis, param.data)

    @torch.no_grad()
    def check_tied(self) -> None:
        """Make sure that what several stages hold has the same values on all of them; a collective of all stages.

        Raises:
            ValueError: it has not, on every rank. A checkpoint may hold other values under each name of tied weights;
                transformers then unties them in one process, which stages that share a gradient cannot.
        """
        names = {id(param): name for name, param in self.model.named_parameters()}
        differing = []
        for param, axis in self.tied():
            first = broadcast(axis, param.data.clone())
            if not bool(((first == param.data) | first.isnan()).all()):
                name = names[id(param)]
                differing.append(self.stage.aliases.get(name, name))
        found = sorted({name for each in gather_objects(self.mesh.model, differing) for name in each})
        if found:
            raise ValueError(
                f"{found} of {type(self.model).__name__} is tied to weights of another stage, and the checkpoint "
                "has other values for them: set tie_word_embeddings=False in its configuration, or load it with "
                "pipeline_parallel_size=1, where transformers unties them"
            )

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A loop over micro-batches; inside ``generate``, one output; inside either, the forward of the stage."""
        if self.runner.inside:
            return self.runner.forward(kwargs)
        bound = self._signature.bind(self.model, *args, **kwargs).arguments
        batch = {**bound, **bound.get("kwargs", {})}
        batch.pop("self"), batch.pop("kwargs", None)
        if self.model._generates:
            return self._step(batch)
        if self.runner.abandoned:
            self.runner.abandoned = False
            raise RuntimeError(
                "the loop over the micro-batches of the last batch was left before its end, so its gradients are of no "
                "use: set them to zero and go on with another batch"
            )
        if "use_cache" in self._signature.parameters:
            batch.setdefault("use_cache", False)  # nobody could use one of this stage's blocks alone
        self.mesh.world.at(f"beginning of the loop over micro-batches, stage {self.stage.index}", steps=1)
        engine = Engine.around(self.model)
        micro_batches = self._micro_batches(batch)
        name, loss = type(self.model).__name__, None
        has_loss = asks_for_loss(batch, self.model.loss_inputs)
        if has_loss and len(micro_batches) > 1:
            if not self.model.loss_is_mean:
                raise ValueError(
                    f"the loss of {name} is one of the whole batch, which micro-batches cannot share: "
                    f"call model.set_micro_batch_size({self.model.micro_batch_size * len(micro_batches)})"
                )
            loss = GlobalMeanLoss(batch, name)
        return self._loop(micro_batches, has_loss, loss, engine)

    def _loop(
        self, micro_batches: list[dict[str, Any]], has_loss: bool, loss: GlobalMeanLoss | None, engine: Engine | None
    ) -> Iterator[Any]:
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # the call of the model gathered parameters; those for each micro-batch will again
        yield from Schedule(self.runner, self.tied(), micro_batches, has_loss, loss, engine)

    def _micro_batches(self, batch: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Cut everything that has a row per row of the batch; the rest goes to every micro-batch."""
        rows = next((x.shape[0] for x in batch.values() if isinstance(x, Tensor) and x.dim() > 1), None)
        size = self.model.micro_batch_size
        if rows is None or rows == 0:
            raise ValueError(f"the batch has no rows: pass {self.model.main_input_name} of shape [rows, ...]")
        if rows % size:
            raise ValueError(
                f"a batch of {rows} rows cannot be divided into micro-batches of micro_batch_size={size}; change one "
                "of them (model.set_micro_batch_size)"
            )

        def part(x: Any, i: int) -> Any:
            cut = isinstance(x, Tensor) and x.dim() > 0 and x.shape[0] == rows
            # Not a view: some models write into what they are given.
            return x[i * size : (i + 1) * size].clone() if cut else x

        return [{name: part(x, i) for name, x in batch.items()} for i in range(rows // size)]

    # Generation -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def encode(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> BaseModelOutput:
        """What the encoder makes of the arguments of ``generate``, on every stage."""
        name, known = self.model.main_input_name, inspect.signature(self.model.get_encoder().forward).parameters
        prompt = args[0] if args else kwargs.get(name, kwargs.get("inputs"))
        given = {name: prompt, **{key: value for key, value in kwargs.items() if key in known}}
        batch = {key: value for key, value in given.items() if value is not None}
        stack = self.stage.stacks[0]
        hidden = torch.empty(self.runner.shape(batch, 0), dtype=self.model.dtype, device=self.mesh.device)
        made, failure = None, None
        if stack.here:
            arrived, failure = self._relay_in(stack, hidden)
            if failure is None:
                made, failure = _attempt(lambda: self.runner.run_stack(0, batch, arrived))
            self._relay_out(stack, hidden if made is None else made, failure)
        hidden = self._share(hidden if made is None else made, stack.last, failure)
        return BaseModelOutput(last_hidden_state=hidden)

    @torch.no_grad()
    def _step(self, batch: dict[str, Any]) -> CausalLMOutputWithPast:
        """The logits of the last positions, on every stage; caches stay where the blocks are."""
        number = len(self.stage.stacks) - 1
        stack = self.stage.stacks[number]
        wanted = batch.get("logits_to_keep")
        keep = wanted if isinstance(wanted, int) and wanted > 0 else 1
        past, failure = batch.get("past_key_values"), None
        rows, length, width = self.runner.shape(batch, number)
        config = self.model.config
        vocab = getattr(config, "vocab_size", None) or config.get_text_config(decoder=True).vocab_size
        logits = torch.empty(rows, min(keep, length), vocab, dtype=self.model.dtype, device=self.mesh.device)
        if stack.here:
            hidden = torch.empty(rows, length, width, dtype=self.model.dtype, device=self.mesh.device)
            arrived, failure = self._relay_in(stack, hidden)
            made: Any = None
            if failure is None:
                made, failure = _attempt(lambda: self.runner(batch, {} if arrived is None else {number: arrived}))
            done: tuple[dict[int, Tensor], Any] = made or ({number: hidden}, None)
            leaving, output = done
            past = output.get("past_key_values") if hasattr(output, "get") else past
            if leaving:
                self._relay_out(stack, leaving[number], failure)
            if self.stage.is_last and output is not None:
                logits = output.logits[:, -keep:]
        return CausalLMOutputWithPast(logits=self._share(logits, self.stage.count - 1, failure), past_key_values=past)

    # Behind what travels comes one more number: whether a stage has raised. Then all do, and nobody waits in vain.

    def _relay_in(self, stack: Stack, hidden: Tensor) -> tuple[Tensor | None, Exception | None]:
        """What arrives from the stage before, shaped as ``hidden``; nothing where the stack begins."""
        if self.stage.index == stack.first:
            return None, None
        return _unmarked(receive(self.mesh.pp, _marked(hidden, None), self.stage.index - 1), hidden)

    def _relay_out(self, stack: Stack, hidden: Tensor, failure: Exception | None) -> None:
        if self.stage.index < stack.last:
            send(self.mesh.pp, _marked(hidden.to(self.model.dtype), failure), self.stage.index + 1)

    def _share(self, x: Tensor, src: int, failure: Exception | None) -> Tensor:
        """What stage ``src`` has, on every stage.

        Raises:
            Exception: ``failure``, what this stage has raised.
            OtherStageError: another has.
        """
        x = x.to(self.model.dtype)  # autocast may have made it another
        shared, others = _unmarked(broadcast(self.mesh.pp, _marked(x, failure), src=src), x)
        if failure is not None:
            raise failure
        if others is not None:
            raise others
        return shared


def _attempt(run: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """What ``run`` returns, or what it raises."""
    try:
        return run(), None
    except Exception as error:  # noqa: BLE001  it is raised once the other stages know
        return None, error


def _marked(x: Tensor, failure: Exception | None) -> Tensor:
    return torch.cat((x.flatten(), x.new_full((1,), float(failure is not None))))


def _unmarked(marked: Tensor, like: Tensor) -> tuple[Tensor, Exception | None]:
    failed = OtherStageError("another stage of the pipeline raised while it generated") if marked[-1] else None
    return marked[:-1].view(like.shape), failed
