"""A planned job: the model, its sizes and its batch; and the step of one of its ranks on the meta device."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from oslo_models.checkpoint.quantized.weight import missing_library
from oslo_models.config.arguments import Arguments
from oslo_models.config.sources import checking
from oslo_models.distributed.mesh import ParallelMesh, check_size
from oslo_models.modeling.meta_device import meta_device
from oslo_models.modeling.training import enable_checkpointing
from oslo_models.pipeline.sharded_model import ShardedModel
from oslo_models.planning.fake_rank import fake_rank
from oslo_models.planning.meta_run import (
    COMMUNICATION,
    GRADIENTS,
    OPTIMIZER,
    WEIGHTS,
    CollectiveKind,
    MetaRun,
    OnDevice,
    UnknownValueError,
)
from oslo_models.planning.quantized_layers import quantize_frozen_layers
from oslo_models.planning.serving import serve
from oslo_models.sharding.layout import Layout
from oslo_models.sharding.pipeline_rules import ONE_F_ONE_B
from oslo_models.sharding.shares import share_ranges

TASKS = ("lora", "qlora", "full", "serve")
DEFAULT_LENGTH = 512


def positions(config: Any) -> int | None:
    """Return the number of positions of a model, or ``None`` if it has no limit."""
    text = config.get_text_config()
    limit = getattr(text, "max_position_embeddings", None) or getattr(text, "n_positions", None)
    return limit if isinstance(limit, int) and limit > 0 else None


@dataclass(frozen=True)
class Job:
    """A job to plan. See `oslo_models.estimate` for its attributes."""

    cls: Any
    config: Any
    task: str = "lora"
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    expert_parallel_size: int = 1
    batch: int = 1
    length: int = DEFAULT_LENGTH
    micro_batch_size: int = 1
    dtype: torch.dtype = torch.float32
    lora_rank: int = 16
    lora_targets: Any = "all-linear"
    gradient_checkpointing: bool = False
    device_type: str = "cuda"
    tensor_parallel_shares: Sequence[int] | None = None
    blocks_per_stage: Sequence[int] | None = None
    schedule: str = ONE_F_ONE_B
    sequence_parallel: bool = False
    context_parallel_size: int = 1

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise ValueError(f"task must be one of {', '.join(TASKS)}, got {self.task!r}")
        if self.device_type not in ("cuda", "cpu"):
            raise ValueError(f'device_type must be "cuda" or "cpu", got {self.device_type!r}')
        for name in ("data_parallel_size", "batch", "length", "lora_rank"):
            check_size(name, getattr(self, name))
        arguments = Arguments(
            tensor_parallel_size=self.tensor_parallel_size,
            pipeline_parallel_size=self.pipeline_parallel_size,
            micro_batch_size=self.micro_batch_size,
            expert_parallel_size=self.expert_parallel_size,
            tensor_parallel_shares=self.tensor_parallel_shares,
            blocks_per_stage=self.blocks_per_stage,
            schedule=self.schedule,
            sequence_parallel=self.sequence_parallel,
            context_parallel_size=self.context_parallel_size,
        )
        arguments.check({})
        arguments.check_config(self.cls, self.config)
        if (option := arguments.token_division) is not None and self.task in ("qlora", "serve"):
            raise ValueError(f"{option} cannot be used together with task={self.task!r}: leave one of them out")
        if self.batch % self.micro_batch_size:
            raise ValueError(f"batch={self.batch} is not a multiple of micro_batch_size={self.micro_batch_size}")
        if self.expert_parallel_size > self.tensor_parallel_size:
            raise ValueError(
                f"expert_parallel_size={self.expert_parallel_size} sends tokens to other ranks, and a plan cannot "
                f"know how many: use a divisor of tensor_parallel_size={self.tensor_parallel_size}"
            )
        if self.cls.main_input_name != "input_ids":
            raise ValueError(
                f"{self.cls.__name__} reads {self.cls.main_input_name}, and a plan has batches of tokens only: choose "
                "a model that reads input_ids"
            )
        limit = positions(self.config)
        if limit is not None and limit < self.length:
            raise ValueError(
                f"length={self.length} exceeds the positions of {self.cls.__name__}: use at most {limit}, or a "
                "configuration with more"
            )
        if self.task in ("lora", "qlora") and (reason := missing_library("peft")) is not None:
            raise ImportError(f"task={self.task!r} plans adapters of peft: {reason}")

    @property
    def world_size(self) -> int:
        return self.of_replica * self.data_parallel_size

    @property
    def of_replica(self) -> int:
        """The number of ranks of a replica."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.context_parallel_size

    @property
    def copies(self) -> int:
        """The number of ranks with the same weights."""
        return self.data_parallel_size * self.context_parallel_size

    @property
    def trains(self) -> bool:
        return self.task != "serve"

    def rank_at(self, stage: int, tp_rank: int) -> int:
        """Return the rank in the first replica with these coordinates. It has the first tokens of a row."""
        return stage * self.copies * self.tensor_parallel_size + tp_rank


@dataclass(frozen=True)
class RankRun:
    """Results of one rank's step.

    Attributes:
        stage, tp_rank: its coordinates.
        peak: bytes of each part of the memory at the moment of the highest total.
        modules: the blocks, embeddings and heads of the rank with their bytes, by name.
        parameters: the number of elements of its parameters.
        trainable: the number of trained elements.
        collectives: the number of collectives of each kind in one step; for a server, in a part of a prompt and a
            decoding step.
        groups: the sizes of its process groups, by axis.
        layouts: the layouts of all parameters of the model.
    """

    stage: int
    tp_rank: int
    peak: Counter[str]
    modules: dict[str, int]
    parameters: int
    trainable: int
    collectives: Counter[CollectiveKind]
    groups: dict[str, int]
    layouts: dict[str, Layout]

    @property
    def total(self) -> int:
        """The highest number of bytes."""
        return sum(self.peak.values())


def distinct_ranks(job: Job) -> Iterator[tuple[RankRun, list[int]]]:
    """Run one rank of each kind. Yield its results with all tensor-parallel ranks of its stage that equal it.

    Ranks of a stage are equal if all their shards have the same shapes.
    """
    kinds: dict[tuple[Any, ...], list[int]] = {}
    first = run_rank(job, 0, 0)
    for rank in range(job.tensor_parallel_size):
        shapes = tuple(layout.local_shape(rank) for layout in first.layouts.values())
        kinds.setdefault(shapes, []).append(rank)
    for stage in range(job.pipeline_parallel_size):
        for ranks in kinds.values():
            yield first if (stage, ranks[0]) == (0, 0) else run_rank(job, stage, ranks[0]), ranks


def run_rank(job: Job, stage: int, tp_rank: int) -> RankRun:
    """Construct a rank's part of the model on the meta device, and run a step of its task.

    Raises:
        ValueError: the shapes of the step depend on values.
    """
    sizes = job.tensor_parallel_size, job.pipeline_parallel_size, job.expert_parallel_size, job.tensor_parallel_shares
    rank = job.rank_at(stage, tp_rank)
    with fake_rank(rank, job.world_size, *sizes, job.context_parallel_size) as mesh, ExitStack() as stack:
        model = _construct(job, mesh)
        run = MetaRun(mesh, _vocabulary(job, mesh))
        stack.enter_context(OnDevice(job.device_type))
        stack.enter_context(run)
        with run.counting_as(WEIGHTS):
            model._mark_parameters()
            model._start_pipeline(are_random=True)
            layouts = dict(model.full_layouts)
            model = _adapt(job, model)
            tensors = [*model.parameters(), *model.buffers()]
            run.count(tensors, WEIGHTS)
        run.collectives.clear()
        run.reset_peak()
        try:
            peak = _train(job, model, run) if job.trains else serve(job, model, run)
        except UnknownValueError as error:
            raise ValueError(f"{job.cls.__name__} cannot be planned with this batch: {error}") from error
        groups = {axis.name: axis.size for axis in (mesh.world, *mesh.created_axes())}
        parameters = dict(model.named_parameters())
        found = RankRun(
            stage,
            tp_rank,
            peak,
            _modules(model),
            sum(param.numel() for param in parameters.values()),
            sum(param.numel() for param in parameters.values() if param.requires_grad),
            run.collectives,
            groups,
            layouts,
        )
        del model, tensors, parameters
    return found


def _construct(job: Job, mesh: ParallelMesh) -> Any:
    own = {"init_seed": 0, "blocks_per_stage": job.blocks_per_stage, "sequence_parallel": job.sequence_parallel}
    with meta_device(), checking(job.config.name_or_path or job.cls.__name__):
        model = job.cls._from_config(copy.deepcopy(job.config), dtype=job.dtype, mesh=mesh, **own)
    model.micro_batch_size, model.schedule = job.micro_batch_size, job.schedule
    return model.train(job.trains)


def _adapt(job: Job, model: Any) -> Any:
    """Add the adapters of the task, if any, and quantise the frozen layers for ``"qlora"``."""
    if job.task in ("lora", "qlora"):
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(r=job.lora_rank, lora_alpha=2 * job.lora_rank, target_modules=job.lora_targets)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # peft calls deprecated functions of transformers
            model = get_peft_model(model, config, low_cpu_mem_usage=True)
        if any(type(module).__name__ == "ParamWrapper" for module in model.modules()):
            raise ValueError(
                f"adapters of the stacked experts of {job.cls.__name__} cannot be planned: name other modules, such as "
                "--lora-targets q_proj,k_proj,v_proj,o_proj"
            )
    if job.task == "qlora":
        quantize_frozen_layers(model)
    if job.gradient_checkpointing and job.trains:
        if job.task != "full":
            model.enable_input_require_grads()
        again = partial(_contexts_of_checkpoint, job.device_type)
        enable_checkpointing(model, {"use_reentrant": False, "context_fn": again})
    return model


def _contexts_of_checkpoint(device_type: str) -> tuple[Any, Any]:
    """Return the contexts of a checkpointed block. torch leaves function modes in the backward pass."""
    return nullcontext(), OnDevice(device_type)


def _vocabulary(job: Job, mesh: ParallelMesh) -> set[int]:
    size = getattr(job.config.get_text_config(), "vocab_size", None)
    if size is None:
        return set()
    return {size, *(stop - start for start, stop in share_ranges(size, mesh.tp.size))}


def _batch(job: Job) -> dict[str, Tensor]:
    tokens = torch.zeros(job.batch, job.length, dtype=torch.long, device="meta")
    of_row = job.cls.__name__.endswith(("ForSequenceClassification", "ForMultipleChoice"))
    labels = tokens[:, 0] if of_row else tokens
    return {"input_ids": tokens, "labels": labels}


def _train(job: Job, model: ShardedModel, run: MetaRun) -> Counter[str]:
    """Run a forward and a backward pass and a step of AdamW. Return the peak of a later step."""
    trained = [param for param in model.parameters() if param.requires_grad]
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if base.pipeline is None:
        model(**_batch(job)).loss.backward()
    else:
        for output in model(**_batch(job)):
            output.loss.backward()
    run.count([param.grad for param in trained if param.grad is not None], GRADIENTS)
    peak = run.peak
    if job.data_parallel_size > 1:  # DistributedDataParallel copies gradients into its buckets
        buckets = sum(param.numel() * param.itemsize for param in trained)
        peak[COMMUNICATION] += buckets
        run.collectives[CollectiveKind("dp", job.data_parallel_size, "all-reduce of all buckets", buckets)] += 1
    optimizer = torch.optim.AdamW(trained, foreach=False) if trained else None
    if optimizer is not None:
        run.reset_peak()
        with run.counting_as(OPTIMIZER):
            optimizer.step()
        states = [each for state in optimizer.state.values() for each in state.values() if each.is_meta]
        peak[OPTIMIZER] += sum(state.numel() * state.itemsize for state in states)
    return max(peak, run.peak, key=lambda parts: sum(parts.values()))


def _modules(model: nn.Module) -> dict[str, int]:
    """Return the bytes of the parameters of each block and of each module outside of blocks."""
    sizes: Counter[str] = Counter()
    for name, param in model.named_parameters():
        parts = name.removeprefix("base_model.model.").split(".")
        numbers = [i for i, part in enumerate(parts) if part.isdecimal()]
        sizes[".".join(parts[: numbers[0] + 1] if numbers else parts[:-1])] += param.numel() * param.itemsize
    return dict(sizes)
