"""`ParallelModel`: what a zoo class is beside its transformers class. Once for all architectures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from transformers import PreTrainedConfig

from oslo_models.config.arguments import Arguments
from oslo_models.distributed.input_check import InputCheck
from oslo_models.distributed.mesh import ParallelMesh
from oslo_models.distributed.mpu import MPU
from oslo_models.distributed.watchdog import TIMEOUT
from oslo_models.modeling.apply_plan import apply_plan, layouts_of
from oslo_models.modeling.construction import construct
from oslo_models.modeling.forward import with_full_outputs, with_full_stage_outputs, with_synchronized_rng
from oslo_models.modeling.fusing import FusableModel
from oslo_models.modeling.initialization import SeededByName, initialize_computed
from oslo_models.modeling.parallelized import ParallelizedModel
from oslo_models.modeling.training import TrainableModel
from oslo_models.pipeline.pipeline import Pipeline
from oslo_models.pipeline.split import cut
from oslo_models.sharding.layout import Layout
from oslo_models.sharding.plan import Entries, Plan


class ParallelModel(FusableModel, TrainableModel, ParallelizedModel):
    """The half of a zoo class that is ours; the other half is the transformers class of the same name.

    An architecture states a `plan`, and each of its classes a `head`. Made by `from_pretrained_with_parallel` or
    `from_config_with_parallel`, an instance is this rank's part of the model; made in transformers' own ways it is the
    whole model, as there.

    Attributes:
        mesh: the axes of the model; ``None`` when made in transformers' own ways.
        mpu: the mesh under Megatron's names.
        layouts: the layout over the tp axis of every parameter that this rank holds.
        gather_logits: what to return for divided logits beside a loss: ``None`` as the constructors tell.
        loss_inputs: arguments that ask for a loss beside those that are called labels.
        labels_of: of models with several logits, the argument with the labels for each.
        loss_of_whole_logits: whether a loss is computed in a way that needs the logits of all words.
        has_loss_of_rows: whether the loss of a batch is a mean over its labels or rows, which micro-batches can share.
    """

    head_plan: ClassVar[Entries] = {}
    mesh: ParallelMesh | None = None
    mpu: MPU | None = None
    gather_logits: bool | None = None
    loss_inputs: ClassVar[tuple[str, ...]] = ()
    labels_of: ClassVar[Mapping[str, str]] = {}
    loss_needs_full_logits: ClassVar[bool] = False
    loss_is_mean: ClassVar[bool] = True
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
            cls.forward = with_full_outputs(cls.forward)
            if hasattr(cls, "generate"):
                cls.generate = with_synchronized_rng(cls.generate)

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
        self._init_seed = init_seed
        for param in self.parameters():  # some of XLNet's and DeBERTa's are float32, whatever is asked for
            param.data = param.data.to(torch.get_default_dtype())
        self.shard_(mesh, blocks_per_stage)

    def shard_(self, mesh: ParallelMesh, blocks_per_stage: Sequence[int] | None) -> None:
        """Turn the whole model, with weights or on the meta device, into this rank's part of it."""
        self.mesh, self.mpu = mesh, MPU(mesh)
        plan, prefix, head = self.plan(self.config), self._prefix(), type(self).head_plan
        self.layouts = layouts_of(self, plan, prefix, head, mesh.tp.size)
        if mesh.tp.size > 1:
            apply_plan(self, plan, prefix, head, mesh, self.layouts)
        if mesh.pp.size > 1:
            pp = mesh.pp
            self.stage = cut(self, plan, prefix, head, self.layouts, pp.rank, pp.size, blocks_per_stage, mesh.device)
            names = (name for name, _ in self.named_parameters(remove_duplicate=False))
            self.layouts = {name: self.layouts[self.stage.aliases.get(name, name)] for name in names}

    def start_pipeline(self, are_random: bool) -> None:
        """Make what several stages share, once the model has its weights; a collective of all ranks.

        Args:
            are_random: whether the weights were drawn, by each stage for what it holds, and not read.
        """
        if self.stage is not None:
            self.pipeline = Pipeline(self, self.stage, with_full_stage_outputs(type(self).forward.__wrapped__))
            self.pipeline.spread_tied() if are_random else self.pipeline.check_tied()

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
        timeout: float = TIMEOUT,
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
        timeout: float = TIMEOUT,
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
        tied = self.all_tied_weights_keys
        root = self.stage.root if self.stage is not None else lambda name: tied.get(name, name)
        with SeededByName(self, self.layouts, self._init_seed, self.mesh.tp.rank, root):
            super().initialize_weights()
            self.initialize_constructed()
        initialize_computed(self, self._init_seed)

    def initialize_constructed(self) -> None:
        """Initialize the parameters that transformers fills in constructors only, which run without memory here."""

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
