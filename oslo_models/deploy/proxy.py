"""The model proxy that ``deploy=True`` returns. It has no weights and forwards its calls to workers."""

from __future__ import annotations

import copy
import inspect
import pickle
import random
import threading
import weakref
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields, replace
from functools import partial
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedConfig

from oslo_models.checkpoint.quantized import take_quantization
from oslo_models.config.arguments import Arguments, check_unused, is_timeout, of_class, parse_dtype
from oslo_models.config.sources import open_source, read_generation_config
from oslo_models.deploy.adapters import DeployedAdapters, call_adapters
from oslo_models.deploy.call_checks import check_prompt, positions_of
from oslo_models.deploy.cancellation import Cancellation
from oslo_models.deploy.engine import Engine
from oslo_models.deploy.generation_limits import check_generation
from oslo_models.deploy.options import OF_DEPLOYMENT, DeployOptions, executor_of, prepare
from oslo_models.deploy.remote_module import RemoteModule, deployed_class
from oslo_models.deploy.running_batch.admission import Admission
from oslo_models.deploy.torchrun_executor import is_launched, launched_rank, serve
from oslo_models.distributed.devices import visible_gpus


class Deployment(DeployedAdapters, RemoteModule):
    """A mixin before the class of a model that sends every call to the workers.

    ``generate`` and ``forward`` take the arguments of transformers, and in addition ``timeout`` and ``seed`` (of the
    random generators). After ``timeout`` seconds, the call is cancelled and raises ``TimeoutError``. Any number of
    threads may call. The model cannot be trained.
    """

    config: Any
    generation_config: Any

    def _begin(
        self,
        config: Any,
        generation_config: Any,
        engine: Engine,
        construct_locally: Any,
        make_skeleton: Any,
    ) -> None:
        nn.Module.__init__(self)  # type: ignore[arg-type]  # the model's class is a module
        self.config, self.generation_config = config, generation_config
        self._sent_config, self._config_changed = copy.deepcopy(generation_config), False
        self._engine, self._construct_locally = engine, construct_locally
        self._admission, self._positions = self._make_admission(), positions_of(config)
        self._make_skeleton, self.name_or_path = make_skeleton, config.name_or_path
        self._batch_bytes: dict[str, int] = {}
        self._fuse_calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self._adapter_calls, self._adapter_lock = [], threading.Lock()
        self.training = False
        self._finalizer = weakref.finalize(self, engine.close)
        engine.start()

    def _make_admission(self) -> Admission:
        forwards = [vars(base)["forward"] for base in type(self).__mro__ if "forward" in vars(base)]
        names = {name for each in forwards for name in inspect.signature(each).parameters}
        admission = Admission(self.config, self._engine.limits, "mm_encoder_outputs" in names)
        if self.config.is_encoder_decoder and "decoder_input_ids" not in names:  # the workers change the configuration
            admission.reason = f"{type(self).__name__} has no decoder, or no encoder, and its configuration has both"
        elif admission.reason is None and admission.sounds is not None and admission.sounds.by_windows:
            from oslo_models.deploy.windows import reason_against_windows

            admission.reason = reason_against_windows(type(self))
        return admission

    # Calls ------------------------------------------------------------------------------------------------------------

    def generate(
        self,
        inputs: Tensor | None = None,
        generation_config: Any = None,
        *,
        streamer: Any = None,
        timeout: float | None = None,
        seed: int | None = None,
        cancellation: Cancellation | None = None,
        tenant: int = 0,
        **kwargs: Any,
    ) -> Any:
        """As transformers' ``generate``. The tokens are on the CPU. ``cancellation`` ends it from another thread.

        ``adapter_names`` names the adapter of each row, see `DeployedAdapters`. ``tenant`` is a number: a call reuses
        the prefixes of calls with the same one only.


        Raises:
            CallCancelled: ``cancellation`` cancelled the call.
            TimeoutError: no answer within ``timeout`` seconds.
            EngineError: the workers died, hang or were closed.
            ValueError: an argument cannot be sent, is rejected by transformers, or overflows the logits; or the prompt
                has no tokens, more tokens than the model has positions, or a mask of another shape.
        """
        if inputs is not None:
            kwargs["inputs"] = inputs
        if generation_config is not None:
            kwargs["generation_config"] = generation_config
        _check_call(timeout, seed)
        if not (isinstance(tenant, Integral) and 0 <= int(tenant) < 2**63):
            raise ValueError(f"tenant must be an integer from 0 to 2**63 - 1, got {tenant!r:.40}")
        check_generation(kwargs, self.generation_config)
        check_prompt(kwargs, self._positions, lambda: self._skeleton)
        # always sent after a first change, so that the workers also learn when it is changed back
        self._config_changed = self._config_changed or not _are_equal(self.generation_config, self._sent_config)
        changed = self.generation_config if self._config_changed else None
        options = {"streamer": streamer, "timeout": timeout, "seed": seed, "generation_config": changed}
        options |= {"cancellation": cancellation, "tenant": tenant}
        options["joins"] = self._admission.joins(kwargs, self.generation_config, streamer is not None)
        options["gives_way"] = not options["joins"] and self._admission.reason is None
        if options["joins"] and self._admission.sounds is not None and self._admission.sounds.by_windows:
            return self._generate_by_windows(kwargs, options)
        if options["joins"]:
            kwargs, options["images"] = self._admission.separate_images(kwargs)
        return self._engine.call("generate", (), kwargs, **options)

    def _generate_by_windows(self, kwargs: dict[str, Any], options: dict[str, Any]) -> Any:
        """Run Whisper's `generate` here. Its windows join. Otherwise the workers compute the call by itself."""
        from oslo_models.deploy.windows import LeavesBatchError, generate_by_windows

        shared = {name: options[name] for name in ("timeout", "seed", "generation_config", "cancellation", "tenant")}
        own = (self.config, self.generation_config, self._admission)
        try:
            return generate_by_windows(self._engine.call, self.forward, *own, kwargs, shared)
        except LeavesBatchError:
            return self._engine.call("generate", (), kwargs, **{**options, "joins": False, "gives_way": True})

    def can_join(self, streams: bool = False, **kwargs: Any) -> bool:
        """Return whether a call of `generate` with these arguments can join the running batch.

        Other calls are computed one after another, and steps of the running batch run between their tokens.

        Args:
            streams: whether the call has a streamer.
        """
        return self._admission.joins(kwargs, self.generation_config, streams)

    def forward(self, *args: Any, timeout: float | None = None, seed: int | None = None, **kwargs: Any) -> Any:
        """As transformers' ``forward``, without gradients. Key-value caches stay on the workers."""
        _check_call(timeout, seed)
        return self._engine.call("forward", args, kwargs, timeout=timeout, seed=seed)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    def fuse(self, *args: Any, **kwargs: Any) -> Any:
        """As `ParallelModel.fuse`, in the workers. `restart` repeats it."""
        self._engine.call("fuse", args, kwargs)
        self._fuse_calls.append((args, kwargs))
        return self

    def unfuse(self) -> Any:
        """As `ParallelModel.unfuse`, in the workers."""
        self._engine.call("unfuse")
        self._fuse_calls.clear()
        return self

    def _call_method(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], timeout: Any = None, seed: Any = None
    ) -> Any:
        """Call a method of the model on all workers. Return full outputs on the CPU."""
        _check_call(timeout, seed)
        return self._engine.call("call_with_full_outputs", (name, args, kwargs), timeout=timeout, seed=seed)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise TypeError("a deployed model cannot be copied: any number of threads may call this one")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise pickle.PicklingError(
            "a deployed model cannot be pickled: its weights are in worker processes of this one. "
            "save_pretrained_with_parallel writes them, and the constructor deploys them elsewhere"
        )

    def fusion_report(self) -> Any:
        return self._engine.call("fusion_report")

    def save_pretrained_with_parallel(self, *args: Any, **kwargs: Any) -> None:
        """As `ParallelModel.save_pretrained_with_parallel`. Each worker writes its part."""
        self._engine.call("save_pretrained_with_parallel", args, kwargs)

    def save_parallelized(self, *args: Any, **kwargs: Any) -> None:
        """As `ParallelModel.save_parallelized`."""
        self._engine.call("save_parallelized", args, kwargs)

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """As `ParallelModel.save_pretrained`, which a sharded model rejects."""
        self._engine.call("save_pretrained", args, kwargs)

    # Lifecycle --------------------------------------------------------------------------------------------------------

    def health(self, timeout: float = 2.0) -> dict[str, Any]:
        """Check whether the workers are alive; see `Engine.health`."""
        return self._engine.health(timeout)

    def restart(self) -> None:
        """End the workers and start new ones. They load the model again, fuse it and load its adapters.

        Raises:
            Exception: a worker failed. Then there are no workers.
        """
        self._engine.restart(self._restore)

    def _restore(self) -> None:
        """Restore the state of the old workers in the restarted ones."""
        for args, kwargs in self._fuse_calls:
            self._engine.call("fuse", args, kwargs)
        self._repeat_adapter_calls()
        if self._batch_bytes:
            self.reserve_batch()

    def close(self) -> None:
        """End the workers. Afterwards, only `restart` is possible."""
        self._engine.close()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def memory_allocated(self) -> dict[str, int]:
        """Return the bytes of tensors by device; on CPU the resident memory of each worker."""
        return self._engine.memory("allocated")

    def memory_reserved(self) -> dict[str, int]:
        """Return the bytes reserved by the allocator, by device; on CPU the resident memory of each worker."""
        return self._engine.memory("reserved")

    memory_cached = memory_chached = memory_reserved  # misspelled so in parallelformers

    def reserve_batch(self) -> dict[str, int]:
        """Allocate the full memory of the running batch now. Otherwise it grows as needed.

        Returns:
            Its bytes by device; empty if calls of this model cannot join a batch.

        Raises:
            MemoryError: there is too little memory.
        """
        if self._admission.reason is None:
            self._batch_bytes = dict(self._engine.call("reserve_batch", gather=True))
        return self._batch_bytes

    def batch_graphs(self) -> dict[int, str]:
        """Return the number of CUDA graphs of the running batch, or why decoding is eager, by rank.

        Empty if calls of this model cannot join a batch.
        """
        return {} if self._admission.reason is not None else dict(self._engine.call("batch_graphs", gather=True))

    @property
    def reused_prompt_tokens(self) -> int:
        """The number of prompt tokens that the running batch took from prefixes of former calls."""
        return self._engine.reused_tokens

    @property
    def drafted_tokens(self) -> int:
        """The number of tokens that the running batch has drafted."""
        return self._engine.drafted_tokens

    @property
    def accepted_tokens(self) -> int:
        """The number of drafted tokens that became tokens of an answer."""
        return self._engine.accepted_tokens

    @property
    def batch_rows(self) -> int:
        """The maximum number of rows of the running batch; 1 if calls of this model cannot join."""
        return 1 if self._admission.reason is not None else self._engine.limits.rows

    def describe_batch(self) -> str:
        """Describe the limits of the running batch and its allocated memory, or why there is no running batch."""
        limits, reason = self._engine.limits, self._admission.reason
        reuse = "; prompts reuse former prefixes" if limits.reuse else ""
        drafts = f"; up to {limits.drafted} tokens of a row are drafted" if limits.drafted else ""
        if reason is not None:
            return f"calls are computed one after another: {reason}"
        memory = "".join(f", {size / 1e6:,.1f} MB on {device}" for device, size in self._batch_bytes.items())
        return f"a running batch of {limits.rows} rows of up to {limits.length} tokens{memory}{reuse}{drafts}"

    # As a module ------------------------------------------------------------------------------------------------------

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """End the workers, load the full model in this process, then call its ``to`` with the same arguments.

        Raises:
            RuntimeError: there is no such device, or this is one of several processes of a launcher.
        """
        if is_launched():
            raise RuntimeError(
                "the full model cannot be loaded in one of several processes; start the script without a launcher"
            )
        probe = nn.Module()
        probe.register_buffer("probe", torch.empty(0))
        try:
            probe.to(*args, **kwargs)  # raises for invalid arguments while the workers are still there
        except AssertionError as error:  # torch without CUDA
            raise RuntimeError(f"{error}: {visible_gpus()}; the workers go on") from None
        self.close()
        return self._make_full().to(*args, **kwargs)

    def _make_full(self) -> Any:
        """Make the full model in this process, after the workers have ended."""
        model = self._construct_locally()
        for arguments, options in self._fuse_calls:
            model.fuse(*arguments, **options)
        for method, of_method in self._adapter_calls:
            call_adapters(model, method, of_method)
        return model

    def cuda(self, device: Any = None) -> Any:
        """`to` the GPU."""
        return self.to(torch.device("cuda", device) if isinstance(device, int) else device or "cuda")

    def cpu(self) -> Any:
        """`to` the CPU."""
        return self.to("cpu")

    def __repr__(self) -> str:
        where = ", ".join(dict.fromkeys(self._engine.devices))
        return f"{type(self).__name__}(deployed on {self._engine.ranks} processes: {where})"


def _are_equal(config: Any, sent: Any) -> bool:
    """Return whether two generation configurations are equal.

    transformers' comparison writes both as JSON. This takes longer than the rest of a call in this process, so it runs
    only if the values seem to differ.
    """
    try:
        if vars(config) == vars(sent):
            return True
    except (TypeError, ValueError, RuntimeError):  # None, or tensors, which have no truth value
        pass
    return bool(config == sent)


def _check_call(timeout: Any, seed: Any) -> None:
    if timeout is not None and not is_timeout(timeout):
        raise ValueError(f"timeout must be a number of seconds greater than 0, got {timeout!r}")
    if seed is not None and not (isinstance(seed, Integral) and 0 <= int(seed) < 2**63):
        raise ValueError(f"seed must be an integer from 0 to 2**63 - 1, got {seed!r:.40}")


def deploy(
    cls: type[Any],
    constructor: str,
    source: Any,
    arguments: Arguments,
    kwargs: dict[str, Any],
    maker: Any = None,
) -> Any:
    """Start workers that construct the model, and return its proxy.

    Args:
        constructor: the name of the class method that the workers call with ``source`` and the arguments.
        maker: the class with the constructor, if not ``cls``.

    Raises:
        ValueError: an argument is invalid, or an argument or the class cannot be sent to the workers.
        EngineError: a worker died while loading.
        Exception: a worker failed to load. The exception is the worker's.
    """
    arguments.check(kwargs)
    kwargs = {key: value for key, value in kwargs.items() if key != "deployment"}
    serving = DeployOptions.taken_from(kwargs)
    ranks = arguments.tensor_parallel_size * arguments.pipeline_parallel_size
    serving.check()
    backend = serving.backend(ranks)
    prepare(backend, cls)
    if backend == "torchrun" and launched_rank() > 0:
        serve(serving.deploy_secret)
    if constructor == "from_config_with_parallel" and arguments.seed is None:  # the same weights after a restart
        arguments = replace(arguments, seed=random.SystemRandom().randrange(2**31))
    config, generation_config, options = _read_configs(cls, source, arguments, kwargs)
    kwargs |= {field.name: getattr(arguments, field.name) for field in fields(arguments)} | {"deploy": False}
    if cls.__module__ == "__main__":
        raise ValueError(
            f"{cls.__name__} is defined in the script itself; put it into a module that workers can import"
        )
    if maker is None and cls.made_from is not None:  # workers cannot import the class itself by name
        maker, kwargs["plan"] = cls.made_from, None
    maker = maker or cls
    try:
        make = pickle.dumps((maker, constructor, (source,), kwargs))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"{cls.__name__} cannot be deployed: an argument cannot be sent to workers: {error}"
        ) from error
    start_executor = executor_of(backend, arguments.pipeline_parallel_size, serving)
    leader = ranks - arguments.tensor_parallel_size  # the first rank of the last stage
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()  # workers on the same device need the memory that torch keeps
    limits = serving.limits(config, ranks, arguments.mtp_heads)
    engine = Engine(ranks, serving.threads(ranks), make, start_executor, limits, leader)
    model = object.__new__(deployed_class(Deployment, cls))
    local = _LocalConstructor(maker, constructor, source, kwargs)
    skeleton = partial(cls._from_config, copy.deepcopy(config), dtype=config.dtype, **options)
    model._begin(config, generation_config, engine, local, skeleton)
    if serving.verbose:
        _print_memory(engine, serving.verbose)
        with suppress(OSError):
            print(model.describe_batch(), flush=True)
    return model


def _read_configs(
    cls: type[Any], source: Any, arguments: Arguments, kwargs: Mapping[str, Any]
) -> tuple[PreTrainedConfig, GenerationConfig | None, dict[str, Any]]:
    """Check the arguments of a model that the workers will construct.

    Args:
        source: a configuration, or the name or directory of a checkpoint.

    Returns:
        Its configurations, and the arguments of the class's ``__init__``.
    """
    arguments.check(kwargs)
    options = {key: value for key, value in kwargs.items() if key != "quantization_config"}
    dtype = parse_dtype(options)
    if isinstance(source, PreTrainedConfig):
        config, generation_config = copy.deepcopy(source), None
    else:
        directory, _, config = open_source(cls, source, options)
        config.name_or_path = str(source)
        generation_config = read_generation_config(directory)
    check_unused(cls, config, options, OF_DEPLOYMENT)
    config.dtype = dtype or config.dtype
    arguments.check_config(cls, config)
    if arguments.resize_token_embeddings is not None:
        config.get_text_config().vocab_size = arguments.resize_token_embeddings
    take_quantization(config)
    if generation_config is None and cls.can_generate():
        generation_config = GenerationConfig.from_model_config(config)
    return config, generation_config, of_class(options)


class _LocalConstructor:
    """Constructs the full model in this process."""

    def __init__(self, maker: Any, constructor: str, source: Any, kwargs: dict[str, Any]) -> None:
        self._make, self._source = getattr(maker, constructor), source
        self._kwargs = {**kwargs, "tensor_parallel_size": 1, "pipeline_parallel_size": 1, "expert_parallel_size": 1}
        self._kwargs |= {"tensor_parallel_shares": None, "blocks_per_stage": None}

    def __call__(self) -> Any:
        return self._make(self._source, **self._kwargs).eval()


def _print_memory(engine: Engine, verbose: str | bool) -> None:
    with suppress(OSError):  # standard output is closed, or the disk is full
        if verbose == "detail":
            for device, summary in engine.memory("summary").items():
                print(f"{device}:\n{summary}", flush=True)
        else:
            for device, bytes_held in engine.memory("allocated").items():
                print(f"{device}: {bytes_held / 1e6:,.0f} MB", flush=True)
