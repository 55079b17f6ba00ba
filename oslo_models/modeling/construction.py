"""Constructs this rank's part of a model from a checkpoint or a configuration."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch
from transformers import PreTrainedConfig
from transformers.utils import is_accelerate_available
from transformers.utils.logging import disable_progress_bar, enable_progress_bar, is_progress_bar_enabled

from oslo_models.checkpoint import CheckpointReader, pinned_buffers
from oslo_models.checkpoint.quantized import dequantizing_reader, take_quantization
from oslo_models.config.arguments import IGNORED, UNSUPPORTED, Arguments, check_unused, is_timeout, parse_dtype
from oslo_models.config.sources import copy_config, open_source, read_generation_config
from oslo_models.deploy import deploy
from oslo_models.deploy.options import OF_DEPLOYMENT
from oslo_models.distributed.input_check import InputCheck
from oslo_models.distributed.mesh import Axis, ParallelMesh, start_process_group, world_axis
from oslo_models.distributed.object_exchange import agree, broadcast_object, gather_objects, require_equal
from oslo_models.distributed.rng import kept_random_state, synchronize, synchronize_numpy
from oslo_models.distributed.watchdog import TIMEOUT
from oslo_models.media.division import IMAGES
from oslo_models.modeling.adapters.own_adapter import find_own_adapter
from oslo_models.modeling.attention_choice import AttentionChoice
from oslo_models.modeling.internals import ParallelModelInternals
from oslo_models.modeling.memory_check import bytes_on_rank, check_memory
from oslo_models.modeling.meta_device import allocate, meta_device, uninitialized_on_meta
from oslo_models.modeling.mtp_heads import check_stored, class_with_mtp_heads, takes_mtp_heads
from oslo_models.modeling.own_plan import class_with_divided_images, class_with_plan
from oslo_models.modeling.packing import check_combination, freeze_packed, packing_reader, quantizing_reader
from oslo_models.modeling.quantizing import quantize_linear_layers, skipped_modules
from oslo_models.modeling.weight_mapping import WeightMapping, open_with_mapping
from oslo_models.sharding.plan import Plan


def construct(cls: type[Any], method: str, source: Any, arguments: Arguments, kwargs: dict[str, Any]) -> Any:
    """Implement the constructors of `ParallelModel`. ``method`` is the name of the called constructor."""
    if isinstance(arguments.plan, Plan) or callable(arguments.plan):  # the checks report anything else
        cls = class_with_plan((cls,), arguments.plan)
    if arguments.deploy or kwargs.get("deployment"):
        return deploy(cls, method, source, arguments, kwargs)
    if arguments.tower_parallel == IMAGES:
        cls = class_with_divided_images(cls)  # type: ignore[arg-type]
    if arguments.mtp_heads is True and takes_mtp_heads(cls):  # else, the checks of all ranks report it
        cls = class_with_mtp_heads(cls)  # type: ignore[arg-type]
    timeout = (
        arguments.timeout if is_timeout(arguments.timeout) else TIMEOUT
    )  # the checks of all ranks report an invalid timeout
    start_process_group(timeout=timeout)
    world = world_axis(timeout)
    world.set_phase(f"construction of {cls.__name__}")
    make = _from_config if method == "from_config_with_parallel" else _from_pretrained
    model, info = make(cls, source, arguments, kwargs, world, f"{cls.__name__}.{method}")
    start(model, arguments, are_random=info is None, selects_attention=kwargs.get("attn_implementation") is None)
    if info is not None and (own_adapter := info.pop("own_adapter")) is not None:
        model.load_adapter(own_adapter)
    return (model, info) if kwargs.get("output_loading_info") else model


def start(
    model: ParallelModelInternals, arguments: Arguments, are_random: bool = False, selects_attention: bool = True
) -> None:
    """Finish construction after this rank's weights are loaded. This is a collective of all ranks.

    Args:
        are_random: whether each stage initialised its weights randomly.
        selects_attention: whether the mode, training or evaluation, selects the attention.
    """
    assert model.mesh is not None
    model.gather_logits = arguments.gather_logits
    if arguments.mtp_heads:
        model.start_mtp_heads(arguments.mtp_loss_weight)
    model.share_loss, model.share_logits = arguments.share_loss, arguments.share_logits
    if model.share_logits:
        model.gather_logits = True
    model.micro_batch_size, model.schedule = arguments.micro_batch_size, arguments.schedule
    model.check_inputs = InputCheck(arguments.check_inputs)
    for axis in (model.mesh.tp, model.mesh.cp):
        synchronize(axis, model.mesh.device)
        synchronize_numpy(axis)
    if selects_attention and model.mesh.device.type == "cpu":
        model._attention_choice = AttentionChoice(model)
        model._attention_choice.select(model.training)
    model._mark_parameters()
    model._start_pipeline(are_random)
    model.mesh.world.set_phase(f"after construction of {type(model).__name__}")


def _from_config(
    cls: type[Any],
    config: PreTrainedConfig,
    arguments: Arguments,
    kwargs: dict[str, Any],
    world: Axis,
    call: str,
) -> tuple[Any, None]:
    with agree(world, f"checking arguments of {call}"):
        arguments.check(kwargs)
        if kwargs.get("quantization_config") is not None:
            raise ValueError(
                "quantization_config is for from_pretrained_with_parallel; random weights stay as they are"
            )
        config = copy_config(cls, config)
        options = _options(kwargs)
        dtype = parse_dtype(options) or config.dtype
        for key in [key for key in options if hasattr(config, key)]:
            setattr(config, key, options.pop(key))
        check_unused(cls, config, options, OF_DEPLOYMENT)
        arguments.check_config(cls, config)
    mesh, init_seed = join(arguments, config, kwargs, call)
    own = {"init_seed": init_seed, "blocks_per_stage": arguments.blocks_per_stage}
    own["sequence_parallel"] = arguments.sequence_parallel
    with meta_device():
        model = cls._from_config(config, dtype=dtype, mesh=mesh, **own, **options)
    needed = sum(tensor.nbytes for tensor in {*model.parameters(), *model.buffers()})
    blocks = arguments.blocks_per_stage
    check_memory(cls.__name__, mesh, needed, lambda: WeightMapping(cls, config, options, mesh, blocks))
    allocate(model, mesh.device)
    for module in model.modules():
        module.__dict__.pop("_is_hf_initialized", None)
    model.init_weights()
    _move_random_state()
    return model, None


def _from_pretrained(
    cls: type[Any],
    name: str | Path,
    arguments: Arguments,
    kwargs: dict[str, Any],
    world: Axis,
    call: str,
) -> tuple[Any, dict[str, Any]]:
    """Load this rank's part of a checkpoint. Return the model and transformers' loading info."""
    options = _options(kwargs)
    on_the_fly = options.pop("quantization_config", None)
    ignore_mismatched_sizes = options.pop("ignore_mismatched_sizes", False)
    key_mapping = options.pop("key_mapping", None)
    for ignored in IGNORED:
        options.pop(ignored, None)
    with agree(world, f"checking arguments of {call}"):
        arguments.check(kwargs)
        dtype = parse_dtype(options)
        directory, variant, config = open_source(cls, name, options)
        check_unused(cls, config, options, OF_DEPLOYMENT)
        old_vocab = getattr(config.get_text_config(), "vocab_size", None)
        arguments.check_config(cls, config)
        own_adapter = find_own_adapter(config, name, arguments, kwargs)
        quantization = take_quantization(config)
        check_combination(quantization, on_the_fly, arguments.dequantize)
    mesh, init_seed = join(arguments, config, {**kwargs, "pretrained_model_name_or_path": str(name)}, call)
    source = open_with_mapping(
        cls,
        config,
        mesh,
        directory,
        options=options,
        blocks_per_stage=arguments.blocks_per_stage,
        variant=variant,
    )
    skipped: list[str] = []
    with ExitStack() as stack:
        # some models of transformers draw numbers in constructors, or for weights that others replace
        stack.enter_context(kept_random_state(mesh.device))
        mapping, reader = stack.enter_context(source)
        dtype = dtype or config.dtype
        if quantization is None and on_the_fly is None:
            needed = bytes_on_rank(mapping, mesh, dtype or _dtype_of(reader))
            check_memory(cls.__name__, mesh, needed, lambda: mapping)
        stack.enter_context(agree(world, f"reading {directory}"))
        if quantization is not None:
            plain = dequantizing_reader(reader, quantization, dtype, partial(mapping.is_transposed, key_mapping))
            reader = plain if arguments.dequantize else packing_reader(plain, mapping, key_mapping, quantization)
        if on_the_fly is not None:
            skipped = skipped_modules(mapping.model, on_the_fly)
        if as_read := type(on_the_fly).__name__ == "BitsAndBytesConfig":
            reader = quantizing_reader(reader, mapping, key_mapping, on_the_fly, skipped, dtype)
        slices = mapping.slices(
            reader,
            old_vocab=old_vocab,
            ignore_mismatched_sizes=ignore_mismatched_sizes,
            key_mapping=key_mapping,
        )
        if arguments.mtp_heads:
            check_stored(mapping, slices)
        devices = device_map(mesh.device)
        if devices is not None and quantization is None and on_the_fly is None:
            buffers = pinned_buffers(mesh.device)
            for part in slices.values():
                part.buffers = buffers
        if world.rank > 0 and is_progress_bar_enabled():  # only rank 0 shows a progress bar
            disable_progress_bar()
            stack.callback(enable_progress_bar)
        stack.enter_context(uninitialized_on_meta())
        model, info = cls.from_pretrained(
            None,
            config=config,
            state_dict=slices,
            dtype=dtype or _dtype_of(reader),
            device_map=devices,
            generation_config=read_generation_config(directory),
            output_loading_info=True,
            mesh=mesh,
            init_seed=init_seed,
            blocks_per_stage=arguments.blocks_per_stage,
            sequence_parallel=arguments.sequence_parallel,
            **options,
        )
        model.to(mesh.device)
    if any(gather_objects(mesh.world, bool(info["missing_keys"] or info["mismatched_keys"]))):
        _move_random_state()
    if on_the_fly is not None and not as_read:
        quantize_linear_layers(model, on_the_fly, skipped)
    freeze_packed(model)
    model.config.name_or_path = model.name_or_path = str(name)
    require_equal(mesh.tp, {"tied weights": sorted(model.all_tied_weights_keys)}, "checkpoints")
    return model, {**info, "own_adapter": own_adapter}


def device_map(device: torch.device) -> dict[str, torch.device] | None:
    """Return a device map for loading weights onto a GPU one by one, or ``None`` if accelerate is not installed."""
    return {"": device} if device.type != "cpu" and is_accelerate_available() else None


def _options(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return a constructor's further arguments, without arguments that only `Arguments.check` reads."""
    checked = ("deployment", "dequantize", *(name for names in UNSUPPORTED.values() for name in names))
    return {key: value for key, value in kwargs.items() if key not in checked}


def join(
    arguments: Arguments, config: PreTrainedConfig, kwargs: Mapping[str, Any], call: str
) -> tuple[ParallelMesh, int]:
    """Check that all ranks pass the same arguments. Return the mesh and the common seed of random weights."""
    own = {field.name: getattr(arguments, field.name) for field in fields(arguments)}
    own["plan"] = re.sub(" at 0x[0-9a-f]+", "", repr(arguments.plan))  # without function addresses
    attributes = {f"config.{key}": value for key, value in config.to_dict().items()}
    require_equal(world_axis(arguments.timeout), {**own, **kwargs, **attributes}, f"arguments of {call}")
    if arguments.resize_token_embeddings is not None:
        config.get_text_config().vocab_size = arguments.resize_token_embeddings
    mesh = ParallelMesh(
        arguments.tensor_parallel_size,
        arguments.pipeline_parallel_size,
        arguments.timeout,
        arguments.expert_parallel_size,
        arguments.tensor_parallel_shares,
        arguments.context_parallel_size,
    )
    if arguments.seed is not None:
        _set_seed(arguments.seed)
        return mesh, arguments.seed
    generator = torch.Generator()  # a copy: loading a complete checkpoint draws nothing
    generator.set_state(torch.get_rng_state())
    return mesh, broadcast_object(mesh.world, int(torch.randint(2**62, (), generator=generator)))


def _move_random_state() -> None:
    """Advance the random state after random weights, so that the next model gets other ones."""
    torch.randint(2**62, ())


def _set_seed(seed: int) -> None:
    """Set seeds like transformers' ``set_seed``, but without its import of ``peft``, which takes about a second."""
    random.seed(seed)
    numpy.random.seed(seed)
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:  # torch.manual_seed would record a call stack for each type of device that is not initialised yet
        torch.default_generator.manual_seed(seed)


def _dtype_of(reader: CheckpointReader) -> torch.dtype:
    """Return the first floating-point dtype in a checkpoint, or the default dtype."""
    floating = (info.dtype for info in reader.tensors.values() if info.dtype.is_floating_point)
    return next(floating, torch.get_default_dtype())
