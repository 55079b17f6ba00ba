"""From arguments and a checkpoint or a configuration to this rank's part of a model."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import snapshot_download
from torch import Tensor
from transformers import GenerationConfig, PreTrainedConfig, set_seed
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.utils.logging import disable_progress_bar, enable_progress_bar, is_progress_bar_enabled

from oslo_models import checkpoint
from oslo_models.collectives import agree, broadcast_object, require_equal
from oslo_models.divide import layouts_of
from oslo_models.inputs import InputCheck
from oslo_models.layout import Layout, Units
from oslo_models.mesh import Axis, ParallelMesh, check_size, start_process_group, world_axis
from oslo_models.rng import synchronize, synchronize_numpy
from oslo_models.watch import PATIENCE

if TYPE_CHECKING:
    from oslo_models.models.base import ParallelModel

HUB_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "revision", "token")
REFUSED = {
    **dict.fromkeys(
        ("device_map", "tp_plan", "tp_size", "tp_mesh", "device_mesh", "distributed_config", "max_memory"),
        "places the weights in transformers' own way; sizes here are tensor_parallel_size and pipeline_parallel_size",
    ),
    **dict.fromkeys(
        ("quantization_config", "load_in_8bit", "load_in_4bit", "gguf_file"), "quantised weights cannot be divided yet"
    ),
    **dict.fromkeys(
        ("state_dict", "from_tf", "from_flax", "offload_folder"),
        "is not supported; weights are read from the checkpoint",
    ),
}


@dataclass(frozen=True)
class Arguments:
    """The arguments that are ours, as the constructors got them."""

    tensor_parallel_size: int
    pipeline_parallel_size: int
    micro_batch_size: int
    resize_token_embeddings: int | None
    seed: int | None
    deploy: bool | None
    gather_logits: bool | None
    timeout: float
    blocks_per_stage: Sequence[int] | None
    check_inputs: bool | int | str

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Arguments:
        """Those among the local variables of a constructor."""
        return cls(**{field.name: given[field.name] for field in fields(cls)})

    @property
    def patience(self) -> float:
        """The timeout, or the default one if it will turn out to be none."""
        return self.timeout if _is_timeout(self.timeout) else PATIENCE

    def check(self, kwargs: Mapping[str, Any]) -> None:
        """Raise ``ValueError`` for what can be seen to be wrong without a configuration."""
        for name in ("tensor_parallel_size", "pipeline_parallel_size", "micro_batch_size"):
            check_size(name, getattr(self, name))
        for name in ("deploy", "gather_logits"):
            if not isinstance(getattr(self, name), (bool, type(None))):
                raise ValueError(f"{name} must be True, False or None, got {getattr(self, name)!r}")
        if not _is_timeout(self.timeout):
            raise ValueError(f"timeout must be a number of seconds greater than 0, got {self.timeout!r}")
        when = self.check_inputs
        if not isinstance(when, bool) and when != "always" and not (isinstance(when, int) and when > 0):
            raise ValueError(f'check_inputs must be True, False, "always" or an integer of at least 1, got {when!r}')
        blocks = self.blocks_per_stage
        if blocks is not None:
            if not isinstance(blocks, (list, tuple)):
                raise ValueError(f"blocks_per_stage must be a list of integers, got {blocks!r}")
            for number in blocks:
                check_size("each of blocks_per_stage", number)
        if self.seed is not None and (isinstance(self.seed, bool) or not isinstance(self.seed, int) or self.seed < 0):
            raise ValueError(f"seed must be an integer of at least 0, got {self.seed!r}")
        for name in REFUSED.keys() & {key for key, value in kwargs.items() if value is not None and value is not False}:
            raise ValueError(f"{name}={kwargs[name]!r} {REFUSED[name]}")
        deployment = kwargs.get("deployment")
        if None not in (self.deploy, deployment) and self.deploy != deployment:
            raise ValueError(f"deploy={self.deploy} and deployment={deployment} are the same argument; pass one")

    def check_config(self, cls: type[ParallelModel], config: PreTrainedConfig) -> None:
        """Raise ``ValueError`` for what does not fit the model."""
        name, tp, plan = type(config).__name__, self.tensor_parallel_size, cls.plan(config)
        limit = plan.limit()
        plan.check_stages(cls.__name__, self.pipeline_parallel_size)
        if limit is not None and tp > limit:
            raise ValueError(
                f"tensor_parallel_size={tp} is more than num_attention_heads={limit} of {name}; use 1 to {limit}"
            )
        if getattr(config, "quantization_config", None) is not None:
            raise ValueError(
                "the checkpoint is quantised (config.quantization_config); quantised weights cannot be divided"
            )
        vocab, size = getattr(config, "vocab_size", None), self.resize_token_embeddings
        if size is None:
            return
        if vocab is None:
            raise ValueError(f"resize_token_embeddings={size} was passed, and a {name} has no vocab_size; leave it out")
        if isinstance(size, bool) or not isinstance(size, int) or size < vocab:
            raise ValueError(f"resize_token_embeddings must be an integer of at least vocab_size={vocab}, got {size!r}")


def _is_timeout(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < 1e8


def parse_dtype(kwargs: dict[str, Any]) -> torch.dtype | None:
    """Take ``dtype`` and ``torch_dtype`` out of ``kwargs``; ``None`` for "as saved"."""
    given = {key: kwargs.pop(key) for key in ("dtype", "torch_dtype") if kwargs.get(key) is not None}
    parsed = set()
    for key, value in given.items():
        dtype = getattr(torch, value, None) if isinstance(value, str) else value
        if value != "auto" and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ValueError(f'{key} must be a floating torch.dtype, its name or "auto", got {value!r}')
        parsed.add(None if value == "auto" else dtype)
    if len(parsed) > 1:
        raise ValueError(f"dtype={given['dtype']!r} and torch_dtype={given['torch_dtype']!r} differ; pass dtype only")
    return parsed.pop() if parsed else None


def construct(cls: type[ParallelModel], method: str, source: Any, arguments: Arguments, kwargs: dict[str, Any]) -> Any:
    """What the constructors of `ParallelModel` do; ``method`` is the name of the one that was called."""
    if arguments.deploy or kwargs.get("deployment"):
        from oslo_models.deploy import deploy

        return deploy(cls, method, source, arguments, kwargs)
    start_process_group()
    world = world_axis(arguments.patience)
    world.at(f"construction of {cls.__name__}")
    make = _from_config if method == "from_config_with_parallel" else _from_pretrained
    model, info = make(cls, source, arguments, kwargs, world, f"{cls.__name__}.{method}")
    assert model.mesh is not None
    model.gather_logits = arguments.gather_logits
    model.micro_batch_size = arguments.micro_batch_size
    model.check_inputs = InputCheck(arguments.check_inputs)
    synchronize(model.mesh.tp, model.mesh.device)
    synchronize_numpy(model.mesh.tp)
    model.mark_parameters()
    model.start_pipeline()
    model.mesh.world.at(f"after construction of {cls.__name__}")
    return (model, info) if kwargs.get("output_loading_info") else model


def _from_config(
    cls: type[ParallelModel],
    config: PreTrainedConfig,
    arguments: Arguments,
    kwargs: dict[str, Any],
    world: Axis,
    call: str,
) -> tuple[ParallelModel, None]:
    with agree(world, f"checking arguments of {call}"):
        arguments.check(kwargs)
        if not isinstance(config, cls.config_class):
            raise ValueError(f"config must be a {cls.config_class.__name__} for {cls.__name__}, got {config!r:.200}")
        config = copy.deepcopy(config)
        options = {key: value for key, value in kwargs.items() if key != "deployment"}
        dtype = parse_dtype(options) or config.dtype
        for key in [key for key in options if hasattr(config, key)]:
            setattr(config, key, options.pop(key))
        arguments.check_config(cls, config)
    mesh, init_seed = _join(arguments, config, kwargs, call)
    own = {"init_seed": init_seed, "blocks_per_stage": arguments.blocks_per_stage}
    with torch.device("meta"):
        model = cls._from_config(config, dtype=dtype, mesh=mesh, **own, **options)
    model.to_empty(device=mesh.device)
    for module in model.modules():
        module.__dict__.pop("_is_hf_initialized", None)
    model.init_weights()
    return model, None


def _from_pretrained(
    cls: type[ParallelModel],
    name: str | Path,
    arguments: Arguments,
    kwargs: dict[str, Any],
    world: Axis,
    call: str,
) -> tuple[ParallelModel, dict[str, Any]]:
    options = {key: value for key, value in kwargs.items() if key != "deployment"}
    hub = {key: options.pop(key) for key in HUB_ARGUMENTS if key in options}
    variant, subfolder = options.pop("variant", None), options.pop("subfolder", "")
    ignore_mismatched_sizes = options.pop("ignore_mismatched_sizes", False)
    for fixed in ("low_cpu_mem_usage", "weights_only", "use_safetensors", "output_loading_info"):  # always so here
        options.pop(fixed, None)
    with agree(world, f"checking arguments of {call}"):
        arguments.check(kwargs)
        dtype = parse_dtype(options)
        directory = find_checkpoint(name, variant, hub) / subfolder
        config = read_config(cls, directory, options)
        old_vocab = getattr(config, "vocab_size", None)
        arguments.check_config(cls, config)
    mesh, init_seed = _join(arguments, config, {**kwargs, "pretrained_model_name_or_path": str(name)}, call)
    with agree(world, f"opening {directory}"):
        key_mapping = options.pop("key_mapping", None)
        template = Template(cls, config, options, mesh, arguments.blocks_per_stage)
        reader = checkpoint.open_checkpoint(
            directory,
            variant=variant,
            fallback_layout=template.layout_of_old_files,
            owner_stage=template.stage_of_old_files,
        )
    try:
        checkpoint.verify_checkpoint(reader, world)
        with agree(world, f"reading {directory}"):
            slices = template.slices(reader, old_vocab, ignore_mismatched_sizes, key_mapping)
            with _one_progress_bar(world):
                result = cls.from_pretrained(
                    None,
                    config=config,
                    state_dict=slices,
                    dtype=dtype or config.dtype or _dtype_of(reader),
                    device_map={"": mesh.device} if mesh.device.type == "cuda" else None,
                    generation_config=read_generation_config(directory),
                    output_loading_info=True,
                    mesh=mesh,
                    init_seed=init_seed,
                    blocks_per_stage=arguments.blocks_per_stage,
                    **options,
                )
    finally:
        reader.close()
    model, info = result
    model.config.name_or_path = model.name_or_path = str(name)
    require_equal(mesh.tp, {"tied weights": sorted(model.all_tied_weights_keys)}, "checkpoints")
    return model, info


def _join(
    arguments: Arguments, config: PreTrainedConfig, kwargs: Mapping[str, Any], call: str
) -> tuple[ParallelMesh, int]:
    """Make the mesh, once it is sure that all ranks want the same; and the seed of random weights, equal everywhere."""
    own = {field.name: getattr(arguments, field.name) for field in fields(arguments)}
    attributes = {f"config.{key}": value for key, value in config.to_dict().items()}
    require_equal(world_axis(arguments.timeout), {**own, **kwargs, **attributes}, f"arguments of {call}")
    if arguments.resize_token_embeddings is not None:
        config.vocab_size = arguments.resize_token_embeddings
    mesh = ParallelMesh(arguments.tensor_parallel_size, arguments.pipeline_parallel_size, arguments.timeout)
    if arguments.seed is not None:
        set_seed(arguments.seed)
        return mesh, arguments.seed
    return mesh, broadcast_object(mesh.world, int(torch.randint(2**62, ())))


def find_checkpoint(name: str | Path, variant: str | None, hub: dict[str, Any]) -> Path:
    """The directory of a checkpoint: ``name`` itself, or where the hub's files are after a download.

    Raises:
        OSError: there is no such directory, and no such name on the hub.
    """
    directory = Path(name)
    if directory.is_dir():
        checkpoint.finish_interrupted_save(directory)
        return directory
    if directory.exists():
        raise OSError(f"{name} is a file; pass the directory that holds it, with its config.json")
    if directory.is_absolute() or str(name).startswith((".", "~")) or str(name).count("/") > 1:
        raise OSError(f"there is no directory {name}")
    suffix = f".{variant}" if variant else ""
    weights = [f"model{suffix}*.safetensors*", f"pytorch_model{suffix}*.bin*"]
    for patterns in ([weights[0], "pytorch_model_tp*"], [weights[1]]):
        try:
            found = Path(snapshot_download(str(name), allow_patterns=["*.json", *patterns], **hub))
        except Exception as error:
            raise OSError(f"{name} is neither a directory nor a model that the hub gives: {error}") from error
        if any(any(found.glob(pattern)) for pattern in patterns):
            return found
    raise OSError(f"{name} on the hub holds no weights in a format that is read here (safetensors or .bin)")


def read_config(cls: type[ParallelModel], directory: Path, options: dict[str, Any]) -> PreTrainedConfig:
    """The configuration, with those of ``options`` that it knows taken over."""
    config = options.pop("config", None)
    if config is not None:
        if not isinstance(config, cls.config_class):
            raise ValueError(f"config must be a {cls.config_class.__name__} for {cls.__name__}, got {config!r:.200}")
        return copy.deepcopy(config)
    if not (directory / "config.json").is_file():
        raise OSError(f"{directory} holds no config.json")
    raw, _ = PreTrainedConfig.get_config_dict(directory)
    wanted, found = cls.config_class.model_type, raw.get("model_type", cls.config_class.model_type)
    if found != wanted:
        saved = ", ".join(raw.get("architectures") or ["one of its own classes"])
        raise ValueError(f"{directory} is a {found} checkpoint and {cls.__name__} is for {wanted}; use {saved}")
    config, unused = cls.config_class.from_pretrained(directory, return_unused_kwargs=True, **options)
    options.clear()
    options.update(unused)
    return config


@contextmanager
def _one_progress_bar(world: Axis) -> Iterator[None]:
    """Let transformers show the progress of one rank only."""
    hide = world.rank > 0 and is_progress_bar_enabled()
    if hide:
        disable_progress_bar()
    try:
        yield
    finally:
        if hide:
            enable_progress_bar()


def read_generation_config(directory: Path) -> GenerationConfig | None:
    try:
        return GenerationConfig.from_pretrained(directory)
    except OSError:
        return None


def _dtype_of(reader: checkpoint.CheckpointReader) -> torch.dtype:
    floating = (info.dtype for info in reader.tensors.values() if info.dtype.is_floating_point)
    return next(floating, torch.get_default_dtype())


class Template:
    """The whole model and this rank's part, both without memory: which tensor becomes which parameter, and how."""

    def __init__(
        self,
        cls: type[ParallelModel],
        config: PreTrainedConfig,
        options: dict[str, Any],
        mesh: ParallelMesh,
        blocks_per_stage: Sequence[int] | None = None,
    ) -> None:
        options = {**options, "dtype": config.dtype}
        own = {**options, "mesh": mesh, "blocks_per_stage": blocks_per_stage}
        with torch.device("meta"):
            self.model = cls._from_config(copy.deepcopy(config), **options)
            part = self.model if mesh.pp.size == 1 else cls._from_config(copy.deepcopy(config), **own)
        model = self.model
        self.state = model.state_dict()
        self.rank = mesh.tp.rank
        self.layouts = layouts_of(model, model.plan(model.config), model._prefix(), cls.head, mesh.tp.size)
        aliases = {} if part.stage is None else part.stage.aliases
        self.names = {name: aliases.get(name, name) for name in part.state_dict()}

    def target_names(self, sources: Iterable[str], key_mapping: dict[str, str] | None) -> Iterator[tuple[str, str]]:
        """Pairs of a name in the checkpoint and the name of the parameter that it is read into."""
        mapping = get_model_conversion_mapping(self.model, key_mapping)
        renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        for source in sources:
            prefix = self.model.base_model_prefix
            target, pattern = rename_source_key(source, renamings, converters, prefix, self.state)
            if pattern is not None and source not in self.state:
                raise ValueError(f"{source} would have to be converted into {target}, which is not supported yet")
            if target not in self.state and source in self.state:
                target = source
            yield source, target

    def slices(
        self,
        reader: checkpoint.CheckpointReader,
        old_vocab: int | None,
        ignore_mismatched_sizes: bool,
        key_mapping: dict[str, str] | None,
    ) -> dict[str, Any]:
        """This rank's part of every tensor that it needs, to be read when transformers' loader asks for it.

        Names that the model does not know are among them, so that the loader can report them.

        Raises:
            ValueError: shapes in the checkpoint are not those of the model.
        """
        targets = list(self.target_names(reader.tensors, key_mapping))
        slices: dict[str, Any] = {
            source: reader.slice(source, Layout(reader.tensors[source].shape), 0)
            for source, target in targets
            if target not in self.state
        }
        found = {target: source for source, target in targets}
        tied, mismatched = self.model.all_tied_weights_keys, []
        new_vocab = getattr(self.model.config, "vocab_size", None)
        for local, name in self.names.items():
            root = tied.get(name, name)
            if name not in found and root in self.names:
                continue  # tied to what is loaded, or missing
            # On a stage without the parameter that this one is tied to, any of its names will do.
            names = (name, root, *(other for other, source in tied.items() if source == root))
            source = next((found[other] for other in names if other in found), None)
            if source is None:
                continue
            shape = reader.tensors[source].shape
            layout = self.layouts.get(name, Layout(tuple(self.state[name].shape)))
            if shape == layout.shape:
                slices[local] = reader.slice(source, layout, self.rank)
            elif (old_vocab, *layout.shape[1:]) == shape and layout.shape[0] == new_vocab and layout.dim == 0:
                slices[local] = GrownSlice(reader, source, layout, self.rank)
            elif (*layout.shape[:-1], old_vocab) == shape and layout.shape[-1] == new_vocab and layout.dim is None:
                slices[local] = LengthenedSlice(reader, source, layout, self.rank)
            else:
                mismatched.append(f"{name}: {shape} in the checkpoint, {layout.shape} in the model")
        if mismatched and not ignore_mismatched_sizes:
            raise ValueError(
                "shapes differ; pass ignore_mismatched_sizes=True to initialise these anew:\n  "
                + "\n  ".join(mismatched)
            )
        return slices

    def layout_of_old_files(self, name: str, local_shapes: list[tuple[int, ...]]) -> Layout:
        """How files without a manifest, whose shapes are ``local_shapes``, divide the tensor ``name``."""
        target = next(target for _, target in self.target_names([name], None))
        full = self.layouts.get(target)
        if full is None or full.dim is None or all(shape == full.shape for shape in local_shapes):
            return Layout(local_shapes[0])
        parts = len(full.ranges[0])
        edges = [0]
        for shape in local_shapes:
            edges.append(edges[-1] + shape[full.dim] // parts)
        ranges = [
            tuple((part * edges[-1] + start, part * edges[-1] + stop) for part in range(parts))
            for start, stop in zip(edges[:-1], edges[1:], strict=True)
        ]
        first = local_shapes[0]
        shape = (*first[: full.dim], edges[-1] * parts, *first[full.dim + 1 :])
        return Layout(shape, full.dim, tuple(ranges))

    def stage_of_old_files(self, name: str, pp: int) -> int:
        """The stage of ``pp`` on which files of OSLO 1.x, which hold all layers on every stage, hold the live ``name``.

        There, each stage had the same number of blocks, and the last one what was left over as well.
        """
        target = next(target for _, target in self.target_names([name], None))
        plan, prefix = self.model.plan(self.model.config), self.model._prefix()
        for stack in plan.blocks:
            if target.startswith(f"{prefix}{stack}."):
                block = int(target.removeprefix(f"{prefix}{stack}.").partition(".")[0])
                blocks = len(self.model.get_submodule(prefix + stack))
                return min(block // max(blocks // pp, 1), pp - 1)
        return 0 if target.rpartition(".")[0].removeprefix(prefix) in plan.embed else pp - 1


class GrownSlice(checkpoint.LazySlice):
    """A part of a vocabulary that has grown since it was saved; new words are the mean of the old ones.

    Source: Hewitt, "Initializing New Word Embeddings for Pretrained Language Models", 2021.
    """

    def read(self) -> Tensor:
        shape = self.reader.tensors[self.name].shape
        clipped = tuple(tuple((min(a, shape[0]), min(b, shape[0])) for a, b in own) for own in self.layout.ranges)
        old = self.reader.read(self.name, Layout(shape, 0, clipped), self.rank)
        new = self.shape[0] - old.shape[0]
        if not new:
            return old
        chunks = Layout.divided(shape, 0, (Units(shape[0]),), min(shape[0], 64))
        total = torch.stack(
            [self.reader.read(self.name, chunks, chunk).double().sum(0) for chunk in range(len(chunks.ranges))]
        ).sum(0)
        return torch.cat((old, (total / shape[0]).to(old.dtype).expand(new, *shape[1:])))


class LengthenedSlice(checkpoint.LazySlice):
    """What is added to the logits of a vocabulary that has grown since it was saved; nothing is for new words."""

    def read(self) -> Tensor:
        old = self.reader.read(self.name, Layout(self.reader.tensors[self.name].shape), 0)
        return torch.nn.functional.pad(old, (0, self.shape[-1] - old.shape[-1]))
