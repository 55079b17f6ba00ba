"""The command ``oslo-models serve``: loads models, serves requests, and ends within a bounded time."""

from __future__ import annotations

import argparse
import contextlib
import gc
import logging
import os
import resource
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from transformers import AutoProcessor, AutoTokenizer

from oslo_models import auto
from oslo_models.checkpoint import current_folder
from oslo_models.config.sources import auto_config
from oslo_models.deploy.forking import start_fork_server
from oslo_models.deploy.process_executor import worker_environment
from oslo_models.deploy.torchrun_executor import is_launched, launched_rank
from oslo_models.server.adapters import check_adapters, load_adapters, parse_adapters
from oslo_models.server.app import application
from oslo_models.server.connections import ConnectionLimits, protocol
from oslo_models.server.embedding_config import read_embedding_config
from oslo_models.server.guard import ApiKeys, access_log, log
from oslo_models.server.lifecycle import Lifecycle
from oslo_models.server.log_writer import log_to_stderr
from oslo_models.server.metrics import Metrics
from oslo_models.server.signals import RELOAD, Orders
from oslo_models.server.sounds import HEARING, missing_package
from oslo_models.server.supervisor import RestartPolicy, Supervisor
from oslo_models.server.transcriber import CTC, TRANSCRIBING

KEY_VARIABLE = "OSLO_MODELS_API_KEY"
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_BACKLOG = 64
"""Number of connections accepted in one batch, before the connection limit is checked."""
_OTHER_FILES = 128 + _BACKLOG
"""File descriptors for files, workers, and accepted connections that are not counted yet."""
_LAST_ANSWERS = 5.0
"""Seconds after the drain to answer cancelled requests."""


def read_api_keys(args: argparse.Namespace, environment: Mapping[str, str] = os.environ) -> ApiKeys | None:
    """Return the keys from ``--api-key``, the environment or ``--api-key-file``; ``None`` without any of them.

    Raises:
        ValueError: the file has no key, or a key is empty or cannot be sent in a header.
        OSError: the file cannot be read.
    """
    if args.api_key_file is not None:
        return ApiKeys(_lines(args.api_key_file))
    key = environment.get(KEY_VARIABLE) if args.api_key is None else args.api_key
    return None if key is None else ApiKeys([key])


def _lines(file: str) -> list[str]:
    return [line for line in Path(file).read_text().splitlines() if line.strip()]


def allowed_hosts(given: str | None, host: str) -> list[str] | None:
    """Return the host names that clients may use for the server; ``None`` for any name.

    By default, any name is allowed, except on the loopback interface. There, a web page could let its own name resolve
    to 127.0.0.1, and so reach a server that is meant for this host only (DNS rebinding).
    """
    if given is not None:
        names = [name.strip() for name in given.split(",") if name.strip()]
        return None if "*" in names else names
    return list(_LOOPBACK) if host in _LOOPBACK else None


def listen(host: str, port: int) -> socket.socket:
    """Listen on a port. Connections send small answers at once, where the kernel would wait for the client's ACK.

    asyncio sets this option only for connections that it has bound itself.

    Raises:
        OSError: the port is taken.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.bind((host, port))
        listener.listen(2048)
    except BaseException:
        listener.close()
        raise
    return listener


def run(args: argparse.Namespace) -> None:
    """Serve until SIGTERM or Ctrl-C. Running requests then have ``--drain-seconds`` to finish.

    Args:
        args: the options of ``oslo-models serve``.

    Raises:
        OSError: the port is taken, or the model does not exist.
        ValueError: an option is invalid.
        SystemExit: with code 1 if workers died more often than allowed, and with 128 + the signal's number for a signal
            during loading.
    """
    keys = read_api_keys(args)
    secret = None if args.deploy_secret_file is None else Path(args.deploy_secret_file).read_text().strip()
    adapters = parse_adapters(args.adapter, args.models)
    if len(set(args.models)) < len(args.models):
        raise ValueError(f"a model is named twice: {', '.join(args.models)}")
    if adapters:
        config = _config_of(args.models[0])
        check_adapters(_kind(config, args).class_for(config), config, adapters)
    if is_launched() and launched_rank() > 0:
        _load(args.models[0], args, secret)  # does not return: see `torchrun_executor`
    if not is_launched():
        start_fork_server(worker_environment(0))  # before any threads start: it takes longer with them
    with (
        listen(args.host, args.port) as listener,  # before the model is loaded, so that an error shows at once
        contextlib.ExitStack() as on,
    ):
        metrics = Metrics()
        on.enter_context(log_to_stderr(partial(metrics.count, "dropped_log_lines_total"), log))
        access_log.setLevel(logging.INFO if args.access_log else logging.WARNING)
        args.max_connections = affordable_connections(args.max_connections)
        host, port = listener.getsockname()[:2]
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        print(f"listening on {url}, loading {', '.join(args.models)}", file=sys.stderr, flush=True)
        orders = on.enter_context(Orders(args.api_key_file is not None))
        lifecycle = Lifecycle()
        server = on.enter_context(_listening(lifecycle, args, listener, orders))
        tokenizers = [_tokenizer(name, args) for name in args.models]  # before the models, which load more slowly
        served = [
            (on.enter_context(_load(name, args, secret)), tokenizer, name)
            for name, tokenizer in zip(args.models, tokenizers, strict=True)
        ]
        (model, tokenizer, name), *others = served
        loaded = load_adapters(model, adapters)
        limits = {
            each: getattr(args, each)
            for each in ("max_queue_size", "max_length", "max_body_size", "pooling", "normalize", "batch_only")
        }
        media = ("max_images", "max_image_pixels", "max_sounds", "max_sound_seconds")
        limits |= {each: getattr(args, each) for each in media}
        hosts = allowed_hosts(args.allowed_hosts, args.host)
        origins = [name.strip() for name in (args.allowed_origins or "").split(",") if name.strip()]
        limits |= {"adapters": loaded, "api_key": keys, "allowed_hosts": hosts, "metrics": metrics}
        limits["allowed_origins"] = origins
        lifecycle.application = application(model, tokenizer, name, others=others, **limits)
        gc.collect()
        gc.freeze()  # a full collection delays all threads: it would visit every object of torch and transformers
        supervisor = Supervisor(
            {name: model for model, _, name in served},
            RestartPolicy(args.restart_workers, args.restart_window),
            lambda name: metrics.count("worker_restarts_total", model=name),
            orders.give_up,
        )
        on.callback(supervisor.stop)
        with contextlib.suppress(OSError):  # stdout may be a pipe without a reader
            print(f"{', '.join(args.models)} at {url}", flush=True)
        while (order := orders.next()) == RELOAD:
            _reload(keys, args)
        supervisor.stop()  # from here on, dead workers are not restarted
        lifecycle.draining = server.should_exit = True
        orders.wait_for_server(args.drain_seconds + _LAST_ANSWERS)
        if order is not None:
            print(f"oslo-models serve: {order}", file=sys.stderr)
    if order is not None:
        raise SystemExit(1)


def _reload(keys: ApiKeys | None, args: argparse.Namespace) -> None:
    """Read the key file again. On failure, keep the old keys."""
    assert keys is not None
    try:
        keys.replace(_lines(args.api_key_file))
    except (OSError, ValueError) as error:
        log.error("the keys were not replaced: %s", error)
    else:
        log.warning("the keys were replaced by the keys in %s", args.api_key_file)


def _config(app: Any, args: argparse.Namespace) -> uvicorn.Config:
    limits = ConnectionLimits(args.max_connections, args.header_seconds)
    return uvicorn.Config(
        app,
        http=protocol(limits),
        ws="none",
        lifespan="off",
        log_level="error",  # uvicorn's warnings are about malformed input from clients
        access_log=False,
        server_header=False,
        proxy_headers=False,
        h11_max_incomplete_event_size=1 << 15,
        backlog=_BACKLOG,
        timeout_graceful_shutdown=args.drain_seconds,
    )


@contextlib.contextmanager
def _listening(app: Any, args: argparse.Namespace, listener: socket.socket, orders: Orders) -> Iterator[uvicorn.Server]:
    """Run a server in a new thread, so that the main thread can load models and handle signals."""
    server = uvicorn.Server(_config(app, args))

    def serve() -> None:
        try:
            server.run(sockets=[listener])
        finally:
            orders.server_ended()

    thread = threading.Thread(target=serve, daemon=True, name="oslo-http")
    thread.start()
    try:
        yield server
    finally:
        server.should_exit = server.force_exit = True
        thread.join(5.0)


def affordable_connections(wanted: int) -> int:
    """Raise the limit of file descriptors, if needed and allowed. Return the number of connections within the limit.

    Warn if this is less than ``wanted``: beyond the limit, the server could not accept any connection.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    found = max(8, soft - _OTHER_FILES)
    log.warning("--max-connections is %s and not %s, as the limit of open files (ulimit -n) is %s", found, wanted, soft)
    return found


def _config_of(name: str) -> Any:
    return auto_config(current_folder(name, "config.json") if Path(name).is_dir() else name)


def _tokenizer(name: str, args: argparse.Namespace) -> Any:
    """Return the tokenizer of a model, or its processor if it is served with images or sounds."""
    tokenizer, config = AutoTokenizer.from_pretrained(args.tokenizer or name), _config_of(name)
    has_processor = _sees(config, args) or _hears(config, args) or _transcribes(config, args)
    return AutoProcessor.from_pretrained(args.tokenizer or name) if has_processor else tokenizer


def _sees(config: Any, args: argparse.Namespace) -> bool:
    """Return whether a model is served with images: with ``--images``, or if it has no other class."""
    if args.images is not None or _embeds(config, args) or config.is_encoder_decoder:
        return bool(args.images)
    return not _has_class(auto.AutoModelForCausalLM, config) and _has_class(auto.AutoModelForImageTextToText, config)


def _hears(config: Any, args: argparse.Namespace) -> bool:
    """Return whether chats of a model take sounds: with ``--sounds``, or if it has no other class.

    Raises:
        ValueError: ``--sounds`` is given for a type without sounds in chats, or without a package that it needs.
    """
    if _embeds(config, args) or _transcribes(config, args) or args.sounds is False:
        return False
    if config.model_type not in HEARING:
        if args.sounds:
            raise ValueError(
                f"--sounds: chats of {config.model_type!r} take no sounds, only chats of {', '.join(HEARING)}"
            )
        return False
    if package := missing_package(config.model_type):
        if args.sounds:
            raise ValueError(
                f"--sounds: the processor of {config.model_type!r} needs the package {package}: "
                f"pip install 'oslo-models[speech]', or leave out --sounds to serve texts"
            )
        return False
    return bool(args.sounds) or not _has_class(auto.AutoModelForCausalLM, config)


def _transcribes(config: Any, args: argparse.Namespace) -> bool:
    """Return whether a model transcribes sounds, by its type and the class that saved it."""
    if config.model_type not in TRANSCRIBING or args.task == "embed":
        return False
    saved = (config.architectures or [""])[0]
    return bool(saved.endswith("ForCTC") if config.model_type in CTC else saved.endswith("ForConditionalGeneration"))


def _has_class(kind: Any, config: Any) -> bool:
    try:
        kind.class_for(config)
    except ValueError:
        return False
    return True


def _embeds(config: Any, args: argparse.Namespace) -> bool:
    """Return whether a model is for embeddings, from ``--task``, or else from its files or the class that saved it."""
    task = args.task
    if task != "generate" and read_embedding_config(config.name_or_path, args.pooling) is not None:
        return True
    saved = (config.architectures or [""])[0]
    has_no_head = saved.endswith("Model") and not saved.endswith(("LMHeadModel", "DoubleHeadsModel"))
    return task == "embed" or (task == "auto" and (has_no_head or saved.endswith(("ForMaskedLM", "ForPreTraining"))))


def _kind(config: Any, args: argparse.Namespace) -> Any:
    """Return the auto class for a model."""
    if _transcribes(config, args):
        return auto.AutoModelForCTC if config.model_type in CTC else auto.AutoModelForSpeechSeq2Seq
    if _embeds(config, args):
        return auto.AutoModel
    if _sees(config, args):
        return auto.AutoModelForImageTextToText
    if _hears(config, args):
        named = _has_class(auto.AutoModelForMultimodalLM, config)
        return auto.AutoModelForMultimodalLM if named else auto.AutoModelForSeq2SeqLM
    return auto.AutoModelForSeq2SeqLM if config.is_encoder_decoder else auto.AutoModelForCausalLM


def _load(name: str, args: argparse.Namespace, secret: str | None) -> Any:
    """Load and deploy a model."""
    config = _config_of(name)
    kind = _kind(config, args)
    names: tuple[str, ...] = ("tensor_parallel_size", "pipeline_parallel_size", "max_batch_size", "prefill_chunk_size")
    names += ("tensor_parallel_shares", "blocks_per_stage", "reuse_prefixes", "threads_per_worker", "dtype")
    names += ("tower_parallel",)
    names += () if _embeds(config, args) else ("speculative_tokens", "speculative_model", "mtp_heads")
    options = {name: value for name in names if (value := getattr(args, name)) is not None}
    if (length := args.max_batch_length or args.max_length) is not None:
        options["max_batch_length"] = length
    if secret is not None:
        options["deploy_secret"] = secret
    model = kind.from_pretrained_with_parallel(name, deploy=True, **options)
    if args.fuse:
        model.fuse()
    if model.can_generate():
        if args.reserve:
            model.reserve_batch()
        print(f"{name}: {model.describe_batch()}", file=sys.stderr, flush=True)
    return model
