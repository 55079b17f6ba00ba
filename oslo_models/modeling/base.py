"""`ParallelModel`: the parallel base class of all model classes, next to their transformers class."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers import initialization as init
from typing_extensions import Self

from oslo_models.config.arguments import Arguments, refuse_parallel
from oslo_models.contracts import require
from oslo_models.distributed.input_check import InputCheck
from oslo_models.distributed.mesh import ParallelMesh
from oslo_models.distributed.mpu import MPU
from oslo_models.distributed.watchdog import TIMEOUT
from oslo_models.modeling.adapters.adaptable import AdaptableModel
from oslo_models.modeling.apply_plan import (
    apply_plan,
    expert_parameters,
    layouts_of,
    modules_with_tensors_of_heads,
    plan_over,
)
from oslo_models.modeling.attention_choice import check_attention, check_attention_of_class
from oslo_models.modeling.attention_outputs import AttentionOutputs
from oslo_models.modeling.batch_generation import BatchGeneratingModel
from oslo_models.modeling.construction import construct
from oslo_models.modeling.context_parallel import divide_context
from oslo_models.modeling.counting import CountableModel
from oslo_models.modeling.derived.report import ShardingReport, report_of_layouts
from oslo_models.modeling.exact_rollouts import ExactRollouts
from oslo_models.modeling.forward import (
    call_with_full_outputs,
    with_full_outputs,
    with_full_stage_outputs,
    with_synchronized_rng,
)
from oslo_models.modeling.full_state import take_part
from oslo_models.modeling.fusing import FusableModel
from oslo_models.modeling.initialization import (
    SeededByName,
    initialize_computed,
    initialize_whole,
    modules_initialized_by_fans,
)
from oslo_models.modeling.original_class import original_class
from oslo_models.modeling.parallelized import ParallelizedModel
from oslo_models.modeling.replaced_layers import ShardedLayers
from oslo_models.modeling.sequence_parallel import divide_tokens
from oslo_models.modeling.training import TrainableModel
from oslo_models.pipeline.pipeline import Pipeline
from oslo_models.pipeline.split import split_stage
from oslo_models.sharding.layout import Layout
from oslo_models.sharding.plan import Entries, Plan


class ParallelModel(
    AdaptableModel, BatchGeneratingModel, ExactRollouts, FusableModel, TrainableModel, ParallelizedModel, CountableModel
):
    """The parallel base class of a model class. The second base is the transformers class of the same name.

    An architecture defines a `plan`, and each of its classes defines a `head_plan`. The constructors
    `from_pretrained_with_parallel` and `from_config_with_parallel` return this rank's part of the model. transformers'
    own constructors return the full model.

    Attributes:
        head_plan: the entries of the task head that the class adds to the base model, by their full names.
        casts_float32: whether 16-bit models cannot run with the parameters that transformers creates in float32.
        zeros: parameters that transformers sets to zero only in constructors, which run on the meta device here.
        made_from: the arguments of a class with a user's plan; see `own_plan`.
        mesh: the parallel axes of the model, or ``None`` if transformers' own methods constructed it.
        mpu: the mesh under Megatron's names. ``base_model`` has it too.
        layouts: the layouts over the tp axis of this rank's parameters and sharded buffers.
        gather_logits: whether to gather sharded logits next to a loss; see `from_pretrained_with_parallel`.
        share_loss, share_logits: whether all stages get the loss and the logits of each micro-batch. Change them on
            every rank.
        schedule: the schedule of pipeline stages, ``"1f1b"`` or ``"zb-h1"``. Change it on every rank.
        loss_inputs: arguments that request a loss, in addition to labels and answer positions.
        labels_of: for models with several logits, the argument with the labels of each.
        loss_needs_full_logits: whether the loss is computed from the logits of the full vocabulary.
        loss_is_mean: whether the loss is a mean over labels or rows, which can be split into micro-batches.
        check_inputs: compares the inputs of the ranks. ``None`` disables the comparison.
        sharded_layers: detects replaced sharded layers. ``None`` without tensor parallelism.
        attention_outputs: gathers attention weights. ``None`` if every rank has all heads.
        token_division: divides the tokens over tensor-parallel or context-parallel ranks. ``None`` without sequence or
            context parallelism.
    """

    head_plan: ClassVar[Entries] = {}
    casts_float32: ClassVar[bool] = False
    zeros: ClassVar[Sequence[str]] = ()
    made_from: Any = None
    mesh: ParallelMesh | Any = None  # Any in place of None: constructors set it, so callers need not check
    mpu: MPU | Any = None
    gather_logits: bool | None = None
    share_loss: bool = False
    share_logits: bool = False
    schedule: str = "1f1b"
    loss_inputs: ClassVar[tuple[str, ...]] = ()
    labels_of: ClassVar[Mapping[str, str]] = {}
    loss_needs_full_logits: ClassVar[bool] = False
    loss_is_mean: ClassVar[bool] = True
    generate: Any  # type checkers reject transformers' own, whose protocol for ``self`` no model satisfies
    _init_seed: int | None = None
    check_inputs: InputCheck | None = None
    sharded_layers: ShardedLayers | None = None
    attention_outputs: AttentionOutputs | None = None
    _generates = False

    @classmethod
    def plan(cls, config: PreTrainedConfig) -> Plan:
        """Return the sharding plan of the architecture."""
        raise TypeError(f"{cls.__name__} has no plan")

    @classmethod
    def head_entries(cls, config: PreTrainedConfig) -> Entries:
        """Return the entries of the task head that the class adds to the base model: `head_plan`."""
        return cls.head_plan

    @classmethod
    def attention_groups(cls, config: PreTrainedConfig) -> int:
        """Return the number of groups in which attention weights list the heads.

        Each rank has some heads of every group: of each of CodeGen's four parts, or JetMoE's first query heads of all
        key-value heads, then the second ones, and so on. With 1, the heads are in the order of the ranks.
        """
        return 1

    @classmethod
    def replicated_attentions(cls, config: PreTrainedConfig) -> Collection[str]:
        """Return the names of the outputs with attention weights of all heads on every rank. Others are gathered."""
        return ()

    @classmethod
    def joined_attentions(cls, config: PreTrainedConfig) -> Mapping[str, int]:
        """Return the names of the outputs with attention weights ``[rows * heads, ...]``, and all their heads."""
        return {}

    @classmethod
    def attention_dims(cls, config: PreTrainedConfig) -> Mapping[str, int]:
        """Return the dimension of the heads in outputs with attention weights, if it is not the third from the end."""
        return {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if any(issubclass(base, PreTrainedModel) and not issubclass(base, ParallelModel) for base in cls.__bases__):
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
        sequence_parallel: bool = False,
        **kwargs: Any,
    ) -> None:
        own = {"blocks_per_stage": blocks_per_stage is not None, "sequence_parallel": sequence_parallel}
        misplaced = {name for name, is_given in own.items() if mesh is None and is_given}
        refuse_parallel(type(self), misplaced | kwargs.keys())
        check_attention_of_class(type(self), config)
        super().__init__(config, *args, **kwargs)
        self._add_modules()
        self.layouts: dict[str, Layout] = {}
        if mesh is None:
            return
        check_attention(self)
        self._init_seed = init_seed
        self._cast_parameters(torch.get_default_dtype())
        self._shard(mesh, blocks_per_stage, sequence_parallel)

    def _add_modules(self) -> None:
        """Add modules that the transformers class lacks."""

    def _cast_parameters(self, dtype: torch.dtype) -> None:
        """Cast parameters that transformers creates in float32 for every dtype. 16-bit models keep most of them."""
        for param in self.parameters():
            if param.dtype != dtype and (self.casts_float32 or dtype.itemsize > param.dtype.itemsize):
                param.data = param.data.to(dtype)

    def _shard(
        self, mesh: ParallelMesh, blocks_per_stage: Sequence[int] | None, sequence_parallel: bool = False
    ) -> None:
        """Shard the full model in place. It may have weights or be on the meta device."""
        if mesh.is_sharded:
            require("layers", "pipeline", "modeling.base", "modeling.apply_plan")
        self.mesh, self.mpu = mesh, MPU(mesh)
        self.base_model.mpu = self.mpu
        plan, prefix, head = plan_over(self, mesh), self._prefix(), self.head_entries(self.config)
        self.layouts = layouts_of(self, plan, prefix, head, mesh.tp.size)
        self._note_full_parameters(self.layouts)
        if mesh.tp.size > 1 or mesh.has_experts_over_replicas:
            apply_plan(self, plan, prefix, head, mesh, self.layouts)
        if sequence_parallel:
            self.token_division = divide_tokens(self, plan, prefix, head, mesh)
        if mesh.cp.size > 1:
            self.token_division = divide_context(self, plan, prefix, head, mesh)
        if mesh.pp.size > 1:
            pp = mesh.pp
            self.stage = split_stage(
                self, plan, prefix, head, self.layouts, pp.rank, pp.size, blocks_per_stage, mesh.device
            )
            tensors = (*self.named_parameters(remove_duplicate=False), *self.named_buffers())
            full_names = {name: self.stage.full_names.get(name, name) for name, _ in tensors}
            self.layouts = {name: self.layouts[full] for name, full in full_names.items() if full in self.layouts}
        self.register_load_state_dict_pre_hook(take_part)
        self.sharded_layers = ShardedLayers(self) if mesh.tp.size > 1 else None
        if mesh.tp.size > 1 and plan.max_ranks() is not None:
            self.attention_outputs = AttentionOutputs(self, mesh.tp)

    def _start_pipeline(self, are_random: bool) -> None:
        """Create the pipeline after the weights are loaded. This is a collective of all ranks.

        Args:
            are_random: whether each stage initialised its weights randomly. Tied weights are then broadcast.
        """
        if self.stage is not None:
            self.pipeline = Pipeline(self, self.stage, with_full_stage_outputs(self._forward_of_stage()))
            self.pipeline.broadcast_tied() if are_random else self.pipeline.check_tied()

    def _forward_of_stage(self) -> Callable[..., Any]:
        """Return the forward of a stage, with sharded outputs: transformers' forward."""
        forward: Callable[..., Any] = type(self).forward.__wrapped__
        return forward

    def _prefix(self) -> str:
        """Return the path prefix of the plan's base model in this model."""
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
        dequantize: bool = False,
        share_loss: bool = False,
        share_logits: bool = False,
        expert_parallel_size: int = 1,
        plan: Plan | Callable[[Any], Plan] | None = None,
        tensor_parallel_shares: Sequence[int] | None = None,
        schedule: str = "1f1b",
        sequence_parallel: bool = False,
        context_parallel_size: int = 1,
        tower_parallel: str = "weights",
        mtp_heads: bool = False,
        mtp_loss_weight: float = 0.0,
        **kwargs: Any,
    ) -> Self:
        """Load this rank's part of a checkpoint. Call this on every rank with the same arguments.

        Args:
            pretrained_model_name_or_path: a name on the Hugging Face hub, or a directory that holds
                ``model.safetensors`` or ``pytorch_model.bin`` (in one or several files), or split files
                ``pytorch_model_tp=?_pp=?.bin``. Split files of other parallel sizes are resharded. A rank reads only
                its part.
            tensor_parallel_size: the number of ranks over which each layer is sharded, up to the number of attention
                heads.
            pipeline_parallel_size: the number of pipeline stages into which the blocks are split.
            micro_batch_size: the number of rows per micro-batch under pipeline parallelism.
            resize_token_embeddings: the new vocabulary size. New embeddings start as the mean of the old embeddings.
            seed: set in all random generators before the first draw.
            deploy: serve the model from a plain Python script. ``deployment`` is an alias.
            gather_logits: with labels, gradients on and ``tensor_parallel_size > 1``, the loss is computed from sharded
                logits and ``output.logits`` is ``None``. ``True`` always returns full logits, ``False`` never returns
                logits next to a loss.
            timeout: the seconds that this rank waits in one collective of the model. It then raises a `RankFailedError`
                that names the ranks that died, hang or never arrived. During construction, loading and saving, it
                waits up to half an hour for a rank that is alive.
            blocks_per_stage: the number of blocks of each pipeline stage, such as ``[3, 5, 4]``. In an encoder-decoder,
                the encoder blocks come before the decoder blocks. By default, stages have about equal numbers of
                parameters. For mixtures of experts, the parameters that are active per token count.
            check_inputs: when to compare the batches of ranks that share a model, which have to be equal: in the first
                three calls and every hundredth (``True``), in every n-th (an integer), ``"always"``, or never
                (``False``). A call of ``generate`` counts once.
            dequantize: load a quantised checkpoint as plain weights in ``dtype``. Each rank dequantises its part.
                Otherwise its weights stay quantised. The guide on quantisation lists the formats. Ignored if the
                checkpoint is not quantised.
            share_loss: under pipeline parallelism, send the loss of each micro-batch to all stages. Otherwise it is
                ``nan`` on other stages until the loop ends.
            share_logits: send the loss and the logits to all stages. Otherwise the logits are ``None`` before the last
                stage. The logits are then computed next to a loss, as with ``gather_logits=True``.
            expert_parallel_size: in a mixture of experts, the number of groups of tensor-parallel ranks that divide the
                experts. It divides ``tensor_parallel_size``. The ranks of a group share the width of its experts. A
                multiple of ``tensor_parallel_size`` divides the experts over the ranks of several data-parallel
                replicas, which then have to call the model equally often.
            plan: the sharding plan, in place of this class's plan: a `Plan`, or a function from a configuration to a
                plan; see `oslo_models.parallel_class`.
            tensor_parallel_shares: the part of each layer on each tensor-parallel rank as a ratio, such as
                ``[2, 1, 1]``, for devices of different memory. Heads with their key-value heads, the width of MLPs and
                experts, and the vocabulary are divided in this ratio, rounded to whole heads and features. By default,
                the parts are equal.
            schedule: the schedule of pipeline stages in training. ``"1f1b"``: one forward, one backward. ``"zb-h1"``
                computes the weight gradients of linear layers where stages would otherwise be idle (Qi et al., "Zero
                Bubble Pipeline Parallelism", 2023). Gradients are equal bit for bit. The guide on schedules compares
                them.
            sequence_parallel: divide the tokens of hidden states over the tensor-parallel ranks between the sharded
                layers of a block, in calls with gradients (Korthikanti et al., "Reducing Activation Recomputation in
                Large Transformer Models", 2022). The guide on long sequences lists the model types.
            context_parallel_size: the number of ranks that divide the tokens of each row, in calls with gradients and
                in long prompts. Attention exchanges heads between them (Jacobs et al., "DeepSpeed Ulysses", 2023). All
                of them get the whole batch. The guide on long sequences lists the model types.
            tower_parallel: what the tensor-parallel ranks divide in towers that encode images: ``"weights"``, as in
                other layers, or ``"images"``. Each rank then holds whole towers and encodes some of the images. The
                guide on text and images compares them, and lists the model types.
            mtp_heads: load the checkpoint's heads for multi-token prediction too, which transformers leaves out. They
                draft tokens in the running batch, and are saved with the model. The guide on generation lists the
                model types.
            mtp_loss_weight: in training mode, add this share of the heads' loss to the loss (DeepSeek-AI, "DeepSeek-V3
                Technical Report", 2024, section 2.2). With 0, the heads are frozen.
            **kwargs: arguments of transformers' ``from_pretrained`` (``dtype``, ``attn_implementation``,
                ``quantization_config=TorchAoConfig(...)`` or ``BitsAndBytesConfig(...)``, ``cache_dir``, ``revision``,
                ``token``, ``local_files_only``, ``ignore_mismatched_sizes``, ...) and attributes of the configuration
                (``pad_token_id``, ...). Without ``attn_implementation``, models that use torch's attention train with
                ``"oslo_models_blockwise"`` on a CPU; see the guide on long sequences.

        Returns:
            The model in evaluation mode, as in transformers.

        Raises:
            ValueError: an argument is invalid. Raised on every rank before any file is read.
            RuntimeError: several processes are needed, and no launcher started them.
            OSError: the checkpoint does not exist or is damaged (``CheckpointError``, which names the file).
        """
        given = Arguments(
            tensor_parallel_size=tensor_parallel_size,
            pipeline_parallel_size=pipeline_parallel_size,
            micro_batch_size=micro_batch_size,
            resize_token_embeddings=resize_token_embeddings,
            seed=seed,
            deploy=deploy,
            gather_logits=gather_logits,
            timeout=timeout,
            blocks_per_stage=blocks_per_stage,
            check_inputs=check_inputs,
            dequantize=dequantize,
            share_loss=share_loss,
            share_logits=share_logits,
            expert_parallel_size=expert_parallel_size,
            plan=plan,
            tensor_parallel_shares=tensor_parallel_shares,
            schedule=schedule,
            sequence_parallel=sequence_parallel,
            context_parallel_size=context_parallel_size,
            tower_parallel=tower_parallel,
            mtp_heads=mtp_heads,
            mtp_loss_weight=mtp_loss_weight,
        )
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
        share_loss: bool = False,
        share_logits: bool = False,
        expert_parallel_size: int = 1,
        plan: Plan | Callable[[Any], Plan] | None = None,
        tensor_parallel_shares: Sequence[int] | None = None,
        schedule: str = "1f1b",
        sequence_parallel: bool = False,
        context_parallel_size: int = 1,
        tower_parallel: str = "weights",
        mtp_heads: bool = False,
        mtp_loss_weight: float = 0.0,
        **kwargs: Any,
    ) -> Self:
        """Construct this rank's part of a randomly initialised model. Call this on every rank with the same arguments.

        The same ``seed`` gives the same weights at all parallel sizes. ``config`` is not changed. See
        `from_pretrained_with_parallel` for arguments and errors. ``**kwargs`` are ``dtype``, ``attn_implementation``
        and attributes of the configuration.

        Returns:
            The model in training mode, like a transformers model constructed from a configuration.
        """
        given = Arguments(
            tensor_parallel_size=tensor_parallel_size,
            pipeline_parallel_size=pipeline_parallel_size,
            micro_batch_size=micro_batch_size,
            resize_token_embeddings=resize_token_embeddings,
            seed=seed,
            deploy=deploy,
            gather_logits=gather_logits,
            timeout=timeout,
            blocks_per_stage=blocks_per_stage,
            check_inputs=check_inputs,
            share_loss=share_loss,
            share_logits=share_logits,
            expert_parallel_size=expert_parallel_size,
            plan=plan,
            tensor_parallel_shares=tensor_parallel_shares,
            schedule=schedule,
            sequence_parallel=sequence_parallel,
            context_parallel_size=context_parallel_size,
            tower_parallel=tower_parallel,
            mtp_heads=mtp_heads,
            mtp_loss_weight=mtp_loss_weight,
        )
        return construct(cls, "from_config_with_parallel", config, given, kwargs)

    @classmethod
    def is_custom_code(cls) -> bool:
        """Return false, as for transformers' own classes: transformers skips some initialisation for custom code."""
        return False

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        """Ask the transformers class, since transformers searches the source file of the class for specific code."""
        can_set: bool = original_class(cls)._can_set_experts_implementation()
        return can_set

    def initialize_weights(self) -> None:
        """Initialise weights like transformers. A parallel model gets the same values at all parallel sizes."""
        if self._init_seed is None or self.mesh is None:
            super().initialize_weights()
            return
        tied = self.all_tied_weights_keys
        root = self.stage.canonical_name if self.stage is not None else lambda name: tied.get(name, name)
        stacks = expert_parameters(self, self.plan(self.config), self._prefix(), self.head_entries(self.config))
        whole = self._initialized_whole()
        for name in whole:
            self.get_submodule(name)._is_hf_initialized = True  # type: ignore[assignment]
        with SeededByName(self, self.layouts, self._init_seed, self.mesh.rank_in, root, stacks):
            super().initialize_weights()
            self._initialize_constructed()
        for name in whole:
            initialize_whole(self, name, self.layouts, self._init_seed, self.mesh.rank_in, root)
        initialize_computed(self, self._init_seed)

    def _initialized_whole(self) -> list[str]:
        """Return the names of modules with weights that transformers computes from sizes of the full module."""
        of_heads = modules_with_tensors_of_heads(self, self.plan(self.config), self._prefix())
        return [*of_heads, *modules_initialized_by_fans(self)]

    def _initialize_constructed(self) -> None:
        """Initialise parameters that transformers fills only in constructors."""
        parameters = dict(self.named_parameters())
        for name in parameters.keys() & self.zeros:
            init.zeros_(parameters[name])

    def resize_token_embeddings(self, new_num_tokens: int | None = None, *args: Any, **kwargs: Any) -> Any:
        """Resize embeddings like transformers. Raise ``RuntimeError`` if the vocabulary is sharded already."""
        if new_num_tokens is None or not self.is_model_parallelized():
            return super().resize_token_embeddings(new_num_tokens, *args, **kwargs)
        ranks = self._size("tp")
        held = f"sharded over {ranks} ranks" if ranks > 1 else f"on {self._size('pp')} pipeline stages"
        raise RuntimeError(
            f"the vocabulary is already {held}: pass "
            f"resize_token_embeddings={new_num_tokens} to from_pretrained_with_parallel or from_config_with_parallel"
        )

    def call_with_full_outputs(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a method other than ``forward`` on every rank and gather its sharded outputs, for deployed models."""
        return call_with_full_outputs(self, name, args, kwargs)

    def sharding_report(self) -> ShardingReport:
        """Report how each module is sharded. Derived plans give reasons for replication. ``print`` shows a table."""
        derived: Any = self.plan(self.config)
        report = getattr(derived, "report", None)
        return report_of_layouts(self, self.layouts) if report is None else report

    # Parallel state --------------------------------------------------------------------------------------------------

    def _at(self, phase: str, steps: int = 0) -> None:
        """Report this rank's phase for the diagnosis of failures. ``generate`` is one phase."""
        if self.mesh is not None and not self._generates and not torch.compiler.is_compiling():
            self.mesh.world.set_phase(phase, steps)

    @contextmanager
    def generating(self) -> Iterator[None]:
        """Mark forward calls within the block as generation steps. Their arguments are not compared over the ranks."""
        if self._generates:
            yield
            return
        self._at("generate")
        self._generates = True
        try:
            yield
        finally:
            self._generates = False
            self._at("after generate")

    def _compare(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Compare a call's arguments over the ranks of one replica, if ``check_inputs`` selects this call."""
        if self.check_inputs is not None and self.mesh is not None:
            named = {f"argument {position}": value for position, value in enumerate(args)}
            self.check_inputs(self.mesh.model, {**named, **kwargs})

    def _size(self, axis: str) -> int:
        return 1 if self.mesh is None else getattr(self.mesh, axis).size

    def is_tensor_parallelized(self) -> bool:
        """Whether layers are sharded over several ranks."""
        return self._size("tp") > 1

    def is_pipeline_parallelized(self) -> bool:
        """Whether blocks are split over several stages."""
        return self._size("pp") > 1

    def is_data_parallelized(self) -> bool:
        """Whether there are several replicas."""
        return self._size("dp") > 1

    def is_model_parallelized(self) -> bool:
        """Whether this rank holds only a part of the model."""
        return self.mesh is not None and self.mesh.is_sharded
