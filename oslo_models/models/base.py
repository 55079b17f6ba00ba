"""`ParallelModel`: what a zoo class is beside its transformers class. Once for all architectures."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedConfig
from transformers.utils import ModelOutput

from oslo_models import checkpoint
from oslo_models.collectives import agree, all_reduce, gather_from, require_equal
from oslo_models.divide import divide, layouts_of
from oslo_models.init import SeededByName, initialize_computed
from oslo_models.inputs import InputCheck
from oslo_models.layers.deferred import DeferredLogits
from oslo_models.layers.vocab import VocabParallelLogits
from oslo_models.layout import Layout
from oslo_models.mesh import ParallelMesh, check_size
from oslo_models.models.fusing import FusableModel
from oslo_models.models.loading import Arguments, construct
from oslo_models.mpu import MPU
from oslo_models.overflow import share_overflow
from oslo_models.pipeline.cut import Stage, cut
from oslo_models.pipeline.engine import LABELS, Pipeline
from oslo_models.plan import Entries, Plan
from oslo_models.rng import synchronize
from oslo_models.watch import PATIENCE


class ParallelModel(FusableModel):
    """The half of a zoo class that is ours; the other half is the transformers class of the same name.

    An architecture states a `plan`, and each of its classes a `head`. Made by `from_pretrained_with_parallel` or
    `from_config_with_parallel`, an instance is this rank's part of the model; made in transformers' own ways it is the
    whole model, as there.

    Attributes:
        mesh: the axes of the model; ``None`` when made in transformers' own ways.
        mpu: the mesh under Megatron's names.
        layouts: the layout over the tp axis of every parameter that this rank holds.
        gather_logits: what to return for divided logits beside a loss: ``None`` as the constructors tell.
        loss_order: the arguments that are labels, in the order in which a forward computes their losses.
        shifts_labels: whether a causal language model's label is the token of the position after.
        has_loss_of_rows: whether the loss of a batch is a mean over its labels or rows, which micro-batches can share.
    """

    head: ClassVar[Entries] = {}
    mesh: ParallelMesh | None = None
    mpu: MPU | None = None
    gather_logits: bool | None = None
    loss_order: ClassVar[tuple[str, ...]] = LABELS
    shifts_labels: ClassVar[bool] = True
    has_loss_of_rows: ClassVar[bool] = True
    pipeline: Pipeline | None = None
    stage: Stage | None = None
    micro_batch_size: int = 1
    _init_seed: int | None = None
    check_inputs: InputCheck | None = None
    _generates = False

    @classmethod
    def plan(cls, config: PreTrainedConfig) -> Plan:
        """How the architecture divides."""
        raise TypeError(f"{cls.__name__} states no plan")

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if any(base.__module__.startswith("transformers.") for base in cls.__bases__):
            cls.forward = _resolving(cls.forward)
            if hasattr(cls, "generate"):
                cls.generate = _in_step(cls.generate)

    def __init__(
        self,
        config: PreTrainedConfig,
        *args: Any,
        mesh: ParallelMesh | None = None,
        init_seed: int | None = None,
        blocks_per_stage: Sequence[int] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(config, *args, **kwargs)
        self.layouts: dict[str, Layout] = {}
        if mesh is None:
            return
        self.mesh, self.mpu, self._init_seed = mesh, MPU(mesh), init_seed
        for param in self.parameters():  # some of XLNet's and DeBERTa's are float32, whatever is asked for
            param.data = param.data.to(torch.get_default_dtype())
        plan, prefix, head = self.plan(config), self._prefix(), type(self).head
        self.layouts = layouts_of(self, plan, prefix, head, mesh.tp.size)
        if mesh.tp.size > 1:
            divide(self, plan, prefix, head, mesh, self.layouts)
        if mesh.pp.size > 1:
            pp = mesh.pp
            self.stage = cut(self, plan, prefix, head, self.layouts, pp.rank, pp.size, blocks_per_stage)
            names = (name for name, _ in self.named_parameters(remove_duplicate=False))
            self.layouts = {name: self.layouts[self.stage.aliases.get(name, name)] for name in names}

    def start_pipeline(self) -> None:
        """Make what several stages share, once the model has its weights; a collective of all ranks."""
        if self.stage is not None:
            self.pipeline = Pipeline(self, self.stage, _on_stage(type(self).forward.__wrapped__))
            self.pipeline.spread_tied()

    def _prefix(self) -> str:
        """Where the base model that the plan speaks of sits in this one."""
        return f"{self.base_model_prefix}." if hasattr(self, self.base_model_prefix) else ""

    # Construction -----------------------------------------------------------------------------------------------------

    @classmethod
    def from_pretrained_with_parallel(
        cls,
        pretrained_model_name_or_path: str | Path,
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        micro_batch_size: int = 1,
        resize_token_embeddings: int | None = None,
        seed: int | None = None,
        deploy: bool | None = None,
        gather_logits: bool | None = None,
        timeout: float = PATIENCE,
        blocks_per_stage: Sequence[int] | None = None,
        check_inputs: bool | int | str = True,
        **kwargs: Any,
    ) -> Any:
        """Load this rank's part of a checkpoint. Every rank calls it with the same arguments.

        Args:
            pretrained_model_name_or_path: a name on the Hugging Face hub, or a directory that holds
                ``model.safetensors`` or ``pytorch_model.bin`` (in one or several files), or split files
                ``pytorch_model_tp=?_pp=?.bin`` written at any sizes: other sizes than asked for are resharded. A rank
                reads only its part.
            tensor_parallel_size: over how many ranks each layer is divided; 1 to the number of attention heads.
            pipeline_parallel_size: into how many stages the blocks are divided.
            micro_batch_size: rows of a batch per micro-batch under pipeline parallelism.
            resize_token_embeddings: the size that the vocabulary should have; new words start as the mean of the old.
            seed: given to all random generators before anything random happens.
            deploy: serve from a plain Python script. ``deployment`` is another name of it.
            gather_logits: with labels, gradients on and ``tensor_parallel_size > 1``, the loss is computed from divided
                logits and ``output.logits`` is ``None``. ``True`` returns full logits always, ``False`` never beside
                a loss.
            timeout: seconds that this rank waits for others in one collective of the model before it raises a
                `RankFailedError` that names those that died, stopped or stayed away. While models are constructed,
                loaded and saved, a rank that is alive is waited for longer, up to half an hour.
            blocks_per_stage: how many blocks each pipeline stage gets, ``[3, 5, 4]``; of an encoder-decoder, the blocks
                of the encoder come first and those of the decoder after them. By default blocks and head are divided by
                their numbers of parameters.
            check_inputs: compare the batches of the ranks that share a model, which have to be the same: in the first
                three calls and every hundredth (``True``), every n-th (an integer), ``"always"`` or never (``False``).
                A call of ``generate`` counts once.
            **kwargs: what transformers' ``from_pretrained`` takes (``dtype``, ``attn_implementation``, ``cache_dir``,
                ``revision``, ``token``, ``local_files_only``, ``ignore_mismatched_sizes``, ...) and attributes of the
                configuration (``pad_token_id``, ...).

        Returns:
            The model in evaluation mode, as transformers does.

        Raises:
            ValueError: an argument does not fit; on every rank, before anything is read.
            RuntimeError: several processes are needed and no launcher was used.
            OSError: no such checkpoint, or one that is damaged (``CheckpointError``, which names the file).
        """
        given = Arguments.of(locals())
        return construct(cls, "from_pretrained_with_parallel", pretrained_model_name_or_path, given, kwargs)

    @classmethod
    def from_config_with_parallel(
        cls,
        config: PreTrainedConfig,
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        micro_batch_size: int = 1,
        resize_token_embeddings: int | None = None,
        seed: int | None = None,
        deploy: bool | None = None,
        gather_logits: bool | None = None,
        timeout: float = PATIENCE,
        blocks_per_stage: Sequence[int] | None = None,
        check_inputs: bool | int | str = True,
        **kwargs: Any,
    ) -> Any:
        """Make this rank's part of a randomly initialised model. Every rank calls it with the same arguments.

        The same ``seed`` gives the same weights at all parallel sizes. ``config`` is not changed. Arguments and errors
        are those of `from_pretrained_with_parallel`; ``**kwargs``: ``dtype``, ``attn_implementation`` and attributes of
        the configuration.

        Returns:
            The model in training mode, as a transformers model made from a configuration is.
        """
        return construct(cls, "from_config_with_parallel", config, Arguments.of(locals()), kwargs)

    @classmethod
    def is_custom_code(cls) -> bool:
        """transformers' own code, as it is: otherwise it would skip initialisations that a parent module repeats."""
        return False

    def initialize_weights(self) -> None:
        """transformers' initialisation; of a parallel model, the same for all parallel sizes."""
        if self._init_seed is None or self.mesh is None:
            super().initialize_weights()
            return
        with SeededByName(self, self.layouts, self._init_seed, self.mesh.tp.rank):
            super().initialize_weights()
        initialize_computed(self, self._init_seed)

    def resize_token_embeddings(self, new_num_tokens: int | None = None, *args: Any, **kwargs: Any) -> Any:
        """transformers' method; refused once the vocabulary is divided."""
        if new_num_tokens is None or not self.is_model_parallelized():
            return super().resize_token_embeddings(new_num_tokens, *args, **kwargs)
        raise RuntimeError(
            f"the vocabulary is already divided over {self._size('tp')} ranks: pass "
            f"resize_token_embeddings={new_num_tokens} to from_pretrained_with_parallel or from_config_with_parallel"
        )

    # What is where ----------------------------------------------------------------------------------------------------

    def _at(self, phase: str, steps: int = 0) -> None:
        """Note what this process is about to do with the model; ``generate`` is one phase."""
        if self.mesh is not None and not self._generates:
            self.mesh.world.at(phase, steps)

    def _compare(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Compare the arguments of a call over the ranks that hold one copy of the model, from time to time."""
        if self.check_inputs is not None and self.mesh is not None:
            named = {f"argument {position}": value for position, value in enumerate(args)}
            self.check_inputs(self.mesh.model, {**named, **kwargs})

    def _size(self, axis: str) -> int:
        return 1 if self.mesh is None else getattr(self.mesh, axis).size

    def is_tensor_parallelized(self) -> bool:
        """Whether layers are divided over several ranks."""
        return self._size("tp") > 1

    def is_pipeline_parallelized(self) -> bool:
        """Whether blocks are divided over several stages."""
        return self._size("pp") > 1

    def is_data_parallelized(self) -> bool:
        """Whether there are several replicas."""
        return self._size("dp") > 1

    def is_model_parallelized(self) -> bool:
        """Whether this rank holds a part of the model only."""
        return self.is_tensor_parallelized() or self.is_pipeline_parallelized()

    def gpu_modules(self) -> nn.Module:
        """The module that holds what this rank computes: what DDP, FSDP and DeepSpeed should wrap."""
        return self

    def gpu_parameters(self) -> Iterator[nn.Parameter]:
        """The parameters on this rank: what an optimizer should get."""
        return self.gpu_modules().parameters()

    def set_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the rows of a batch per micro-batch (pipeline parallelism only)."""
        check_size("micro_batch_size", micro_batch_size)
        self.micro_batch_size = micro_batch_size

    # Training ---------------------------------------------------------------------------------------------------------

    def train_batch(self, **batch: Any) -> Tensor:
        """Forward and backward of a batch, in micro-batches where there are stages.

        Returns:
            The loss of the whole batch, without its graph, on every rank.
        """
        if self.pipeline is None:
            loss = self(**batch).loss
            loss.backward()
            return loss.detach()
        losses = []
        for output in self(**batch):
            output.loss.backward()
            losses.append(output.loss.detach())
        return torch.stack(losses).sum()

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all gradients so that their norm over the whole model is at most ``max_norm``; collective.

        Divided parameters count once each whole, replicated ones once, as in an undivided model. Gradients that FSDP2
        divides over replicas are included.

        Returns:
            The norm before clipping, the same on every rank that holds the model.
        """
        grads = {name: param.grad for name, param in self.named_parameters() if param.grad is not None}
        local = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads.values()]
        device = local[0].device if local else None
        norms = [torch.zeros((), dtype=torch.float64, device=device)]
        for part in (part for name, grad in grads.items() for part in self._counted(name, grad)):
            norms.append(torch.linalg.vector_norm(part, norm_type, dtype=torch.float64))
        highest = norm_type == float("inf")
        total = torch.stack(norms).amax() if highest else (torch.stack(norms) ** norm_type).sum()
        if self.mesh is not None:
            op = dist.ReduceOp.MAX if highest else dist.ReduceOp.SUM
            all_reduce(self.mesh.model, total, op=op)
            if any(isinstance(grad, DTensor) for grad in grads.values()):
                all_reduce(self.mesh.dp, total, op=op)
        norm = total if highest else total ** (1.0 / norm_type)
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for part in local:
            part.mul_(scale.to(part.dtype))
        return norm.to(local[0].dtype) if local else norm

    def mark_parameters(self) -> None:
        """Say on each parameter, by the attributes that DeepSpeed looks at, whether norms of gradients count it here.

        As in `clip_grad_norm_`, but only whole: of key-value heads that ranks share in part, it counts too many.
        """
        assert self.mesh is not None
        for name, param in self.named_parameters():
            counts = self.stage is None or self.stage.counts(name)
            param.ds_pipe_replicated = not counts
            param.model_parallel = counts and bool(self.layouts[name].owned(self.mesh.tp.rank))

    def _counted(self, name: str, grad: Tensor) -> list[Tensor]:
        """The parts of a gradient that this rank counts when norms are summed over all ranks: each element once."""
        if self.mesh is None:
            return [grad]
        if self.stage is not None and not self.stage.counts(name):
            return []
        layout, rank = self.layouts[name], self.mesh.tp.rank
        if isinstance(grad, DTensor):
            sharded = any(placement.is_shard() for placement in grad.placements)
            if sharded and not layout.overlaps:  # each replica has its own part, wholly counted or not at all
                return [grad.to_local()] if layout.owned(rank) else []
            grad = grad.full_tensor()
            if self.mesh.dp.rank:
                return []
        return [grad[here] for _, here in layout.owned(rank)]

    # Saving -----------------------------------------------------------------------------------------------------------

    def save_pretrained_with_parallel(
        self,
        save_directory: str | Path,
        save_config: bool = True,
        save_with_merging: bool = False,
        safe_serialization: bool | None = None,
        state_dict: Mapping[str, Tensor] | None = None,
        save_function: Any = None,
        **kwargs: Any,
    ) -> None:
        """Save the model; collective: every rank calls it, and it returns when all data are on the disk.

        What ``save_directory`` held before stays until everything is written, and is then replaced at once: a process
        killed, or a disk full, at any point leaves the old checkpoint or the new one. Other files in it stay.

        Args:
            save_config: write ``config.json`` and ``generation_config.json`` too.
            save_with_merging: write what transformers' own ``from_pretrained`` loads, instead of one file per rank,
                ``pytorch_model_tp=?_pp=?.bin``. ``save_with_merge`` is another name of it. Tensors are merged one at a
                time.
            safe_serialization: ``True``: safetensors; ``False``: ``.bin``; ``None``: ``.bin`` when split, and when
                merged as transformers does, safetensors.
            state_dict: this rank's tensors, if not those of ``self.state_dict()``.
            save_function: writes one ``.bin`` file, as ``torch.save`` does.
            **kwargs: ``max_shard_size`` and ``variant`` of merged files.

        Raises:
            ValueError: contradictory arguments, or ranks that were given different ones.
            OSError: the directory cannot be written (no permission, no space, a file in its place); on every rank, and
                the old checkpoint is intact.
        """
        merging = kwargs.pop("save_with_merge", save_with_merging)
        mesh = self.mesh or ParallelMesh()
        mesh.world.at(f"saving to {save_directory}")
        known = {"max_shard_size", "variant"}
        with agree(mesh.world, "checking arguments of save_pretrained_with_parallel"):
            if unknown := kwargs.keys() - known:
                raise ValueError(f"unknown arguments {sorted(unknown)}; beside the named ones: {sorted(known)}")
            if kwargs and not merging:
                raise ValueError(f"{sorted(kwargs)} are for save_with_merging=True; split files are one per rank")
        what = {"save_directory": str(save_directory), "save_with_merging": merging, "save_config": save_config}
        require_equal(mesh.world, {**what, "safe_serialization": safe_serialization, **kwargs}, "save arguments")
        aliases = {} if self.stage is None else self.stage.aliases
        given = self.state_dict() if state_dict is None else state_dict
        tensors = {aliases.get(name, name): tensor for name, tensor in given.items()}
        for name in self._keys_to_ignore_on_save or ():
            tensors.pop(name, None)
        known_layouts = {aliases.get(name, name): layout for name, layout in self.layouts.items()}
        layouts = {name: known_layouts.get(name, Layout(tuple(tensor.shape))) for name, tensor in tensors.items()}
        checkpoint.save_checkpoint(
            Path(save_directory),
            tensors,
            layouts,
            mesh,
            merging=merging,
            tied=dict(self.all_tied_weights_keys if self.stage is None else self.stage.tied),
            files=self._write_config if save_config else None,
            metadata={"model_type": self.config.model_type, "architectures": [type(self).__name__]},
            safe_serialization=safe_serialization,
            save_function=save_function,
            **kwargs,
        )
        mesh.world.at("after saving")

    def save_optimizer(self, optimizer: torch.optim.Optimizer, save_directory: str | Path, **state: Any) -> None:
        """Save what training needs beside the weights: the optimizer and the random states of all ranks; collective.

        The directory may be that of the model's checkpoint; then save the model first. As with the model, what was
        there stays until everything is written.

        Args:
            state: what else `load_optimizer` is to return: ``step=100``, ``scheduler=scheduler.state_dict()``; numbers,
                strings, tensors, and lists and dictionaries of them. Each rank gets its own back.

        Raises:
            ValueError: ``state`` holds what cannot be read back.
            OSError: the directory cannot be written.
        """
        mesh = self.mesh or ParallelMesh()
        mesh.world.at(f"saving the optimizer to {save_directory}")
        checkpoint.save_optimizer(save_directory, optimizer, mesh, state)
        mesh.world.at("after saving")

    def load_optimizer(self, optimizer: torch.optim.Optimizer, directory: str | Path) -> dict[str, Any]:
        """Go on where `save_optimizer` was called, with the same sizes; collective. The last call before training.

        Returns:
            The ``state`` that was saved.

        Raises:
            FileNotFoundError: there is no optimizer state.
            ValueError: it is of other parallel sizes, or of another optimizer.
            OSError: a file of it is damaged (``CheckpointError``, which names it).
        """
        mesh = self.mesh or ParallelMesh()
        mesh.world.at(f"loading the optimizer from {directory}")
        state = checkpoint.load_optimizer(directory, optimizer, mesh)
        mesh.world.at("after loading")
        return state

    def _write_config(self, directory: Path) -> None:
        whole = {} if self.stage is None else self.stage.config
        config = type(self.config).from_dict({**self.config.to_dict(), **whole})
        config.dtype, config.architectures = self.dtype, [type(self).__name__]
        config.save_pretrained(directory)
        if self.can_generate() and self.generation_config is not None:
            self.generation_config.save_pretrained(directory)

    def save_pretrained(self, *args: Any, **kwargs: Any) -> Any:
        """transformers' method; refused for a part of a model, of which it would write a broken checkpoint."""
        if self.is_model_parallelized():
            raise RuntimeError(
                "this rank holds a part of the model only: call save_pretrained_with_parallel(directory) on every "
                "rank, with save_with_merging=True for a checkpoint that transformers loads"
            )
        return super().save_pretrained(*args, **kwargs)

    # Outputs ----------------------------------------------------------------------------------------------------------

    def _resolve(self, output: ModelOutput) -> dict[str, Any]:
        """The fields of the output of a forward, what is divided replaced by what transformers would return."""
        loss = output.get("loss")
        if self.gather_logits is None:
            omit = loss is not None and loss.requires_grad
        else:
            omit = loss is not None and not self.gather_logits
        divided = self.is_tensor_parallelized() and self.plan(self.config).limit() is not None  # heads, that is
        fields = {}
        for name, value in output.items():
            if isinstance(value, (VocabParallelLogits, DeferredLogits)):
                value = None if omit else value.full()
            elif name.endswith("attentions") and value and divided:
                value = tree_map_only(Tensor, self._all_heads, tuple(value))
            fields[name] = value
        return fields

    def _all_heads(self, weights_BHQK: Tensor) -> Tensor:
        """Attention weights of all heads; ranks may hold different numbers of them."""
        assert self.mesh is not None
        tp = self.mesh.tp
        own = torch.tensor([weights_BHQK.shape[1]], device=weights_BHQK.device)
        return gather_from(tp, weights_BHQK, 1, gather_from(tp, own, 0, [1] * tp.size).tolist())


def _resolving(forward: Any) -> Any:
    """``forward`` with its divided outputs resolved. The signature stays: ``generate`` looks at it."""

    @functools.wraps(forward)
    def resolving(self: ParallelModel, *args: Any, **kwargs: Any) -> Any:
        if self.mesh is not None:
            args, kwargs = _on_device(self.mesh.device, args, kwargs)
            if not self._generates and not (self.pipeline and self.pipeline.runner.inside):
                self._compare(args, kwargs)
        if self.pipeline is not None:
            return self.pipeline(args, kwargs)
        looked_at = kwargs.get("labels") is not None or kwargs.get("output_attentions")
        if torch.compiler.is_compiling() and not torch.is_grad_enabled() and not looked_at:
            return forward(self, *args, **kwargs)  # decoding: heads give whole logits, and nothing else is to be done
        deferring = self.defer_logits()
        if not self.is_tensor_parallelized() and not deferring:
            return forward(self, *args, **kwargs)
        as_tuple = not (self.config.return_dict if kwargs.get("return_dict") is None else kwargs["return_dict"])
        if as_tuple:  # the names of the outputs tell what is divided
            kwargs["return_dict"] = True
        self._at("forward" if torch.is_grad_enabled() else "forward without gradients", steps=1)
        output = forward(self, *args, **kwargs)
        if not isinstance(output, ModelOutput):
            return output
        fields = self._resolve(output)
        self._at("after forward")
        _note_backward(fields.values(), self._at)
        if fields.get("loss") is not None and self.mesh is not None:
            share_overflow(fields["loss"], self.parameters, self.mesh.tp)
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


def _on_stage(forward: Any) -> Any:
    """``forward`` on a pipeline stage, with its divided outputs resolved."""

    @functools.wraps(forward)
    def on_stage(self: ParallelModel, **kwargs: Any) -> Any:
        if "return_dict" in kwargs or not self.config.return_dict:
            kwargs["return_dict"] = True  # the loop needs its loss by name
        self.defer_logits()
        output = forward(self, **kwargs)
        return type(output)(**self._resolve(output)) if isinstance(output, ModelOutput) else output

    return on_stage


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


def _in_step(generate: Any) -> Any:
    """``generate`` with the ranks of the tp axis drawing from the same random state, so that they sample alike."""

    @functools.wraps(generate)
    def in_step(
        self: ParallelModel, *args: Any, fused_no_repeat_ngram_blocking: bool | None = None, **kwargs: Any
    ) -> Any:
        self.fuse_ngram_blocking(fused_no_repeat_ngram_blocking)
        if self.mesh is None or self._generates:
            return generate(self, *args, **kwargs)
        self._at("generate", steps=1)
        synchronize(self.mesh.model, self.mesh.device)
        args, kwargs = _on_device(self.mesh.device, args, kwargs)
        self._compare(args, kwargs)
        self._generates = True
        try:
            if self.pipeline is not None and self.config.is_encoder_decoder and "encoder_outputs" not in kwargs:
                name, known = self.main_input_name, inspect.signature(self.get_encoder().forward).parameters
                prompt = args[0] if args else kwargs.get(name, kwargs.get("inputs"))
                given = {name: prompt, **{key: value for key, value in kwargs.items() if key in known}}
                kwargs["encoder_outputs"] = self.pipeline.encode({k: v for k, v in given.items() if v is not None})
            return generate(self, *args, **kwargs)
        finally:
            self._generates = False
            self._at("after generate")

    return in_step
