"""The command ``oslo-models serve``: loads models, listens, and ends within a bound."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import uvicorn
from transformers import AutoConfig, AutoTokenizer

from oslo_models import auto
from oslo_models.server.app import application
from oslo_models.server.connections import ConnectionLimits, protocol
from oslo_models.server.guard import access_log, log, require_sendable

KEY_VARIABLE = "OSLO_MODELS_API_KEY"
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


def read_api_key(args: argparse.Namespace, environment: Mapping[str, str] = os.environ) -> str | None:
    """The key from ``--api-key``, ``--api-key-file`` or the environment; ``None`` if none of them is given.

    Raises:
        ValueError: it is empty, or cannot be sent in a header.
        OSError: the file cannot be read.
    """
    if args.api_key_file is not None:
        key: str | None = Path(args.api_key_file).read_text().rstrip("\r\n")
    else:
        key = environment.get(KEY_VARIABLE) if args.api_key is None else args.api_key
    require_sendable(key)
    return key


def allowed_hosts(given: str | None, host: str) -> list[str] | None:
    """The names by which clients may call the server; ``None`` for any.

    By default any, except for a server on the loopback interface: a web page could have its own name resolve to
    127.0.0.1 and so use a server that only this host should reach.
    """
    if given is not None:
        names = [name.strip() for name in given.split(",") if name.strip()]
        return None if "*" in names else names
    return list(_LOOPBACK) if host in _LOOPBACK else None


def run(args: argparse.Namespace) -> None:
    """Serve until SIGTERM or Ctrl-C; requests that are running then get ``--drain-seconds`` to be answered.

    Args:
        args: the options of ``oslo-models serve``.

    Raises:
        OSError: the port is taken, or there is no such model.
        ValueError: an option is invalid.
    """
    key = read_api_key(args)
    with (
        socket.socket(socket.AF_INET6 if ":" in args.host else socket.AF_INET) as listener,
        contextlib.ExitStack() as on,
    ):
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((args.host, args.port))  # before the model is loaded, so that an error shows at once
        served = [(on.enter_context(_load(name, args)), _tokenizer(name, args), name) for name in args.models]
        (model, tokenizer, name), *others = served
        limits = {
            each: getattr(args, each)
            for each in ("max_queue_size", "max_length", "max_body_size", "pooling", "normalize")
        }
        hosts = allowed_hosts(args.allowed_hosts, args.host)
        app = application(model, tokenizer, name, others=others, api_key=key, allowed_hosts=hosts, **limits)
        _log_to_stderr(args.access_log)
        server = uvicorn.Server(_config(app, args))
        # uvicorn shuts down cleanly on SIGTERM and then raises it again, which would end the process as a failure
        signal.signal(signal.SIGTERM, lambda *_: setattr(server, "should_exit", True))
        listener.listen(2048)
        host, port = listener.getsockname()[:2]
        names = ", ".join(args.models)
        print(f"{names} at http://{f'[{host}]' if ':' in host else host}:{port}", flush=True)
        server.run(sockets=[listener])


def _config(app: Any, args: argparse.Namespace) -> uvicorn.Config:
    limits = ConnectionLimits(args.max_connections, args.header_seconds)
    return uvicorn.Config(
        app,
        http=protocol(limits),
        ws="none",
        log_level="error",  # its warnings come from what clients send
        access_log=False,
        server_header=False,
        proxy_headers=False,
        h11_max_incomplete_event_size=1 << 15,
        timeout_graceful_shutdown=args.drain_seconds,
    )


def _log_to_stderr(access: bool) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(message)s"))
    log.addHandler(handler)
    log.propagate = False
    access_log.setLevel(logging.INFO if access else logging.WARNING)


def _tokenizer(name: str, args: argparse.Namespace) -> Any:
    return AutoTokenizer.from_pretrained(args.tokenizer or name)


def _embeds(config: Any, task: str) -> bool:
    """Whether a model is for embeddings: by the class that saved it, unless ``task`` says it."""
    saved = (config.architectures or [""])[0]
    has_no_head = saved.endswith("Model") and not saved.endswith(("LMHeadModel", "DoubleHeadsModel"))
    return task == "embed" or (task == "auto" and (has_no_head or saved.endswith(("ForMaskedLM", "ForPreTraining"))))


def _load(name: str, args: argparse.Namespace) -> Any:
    """The deployed model."""
    config = AutoConfig.from_pretrained(name)
    kind: Any = auto.AutoModelForSeq2SeqLM if config.is_encoder_decoder else auto.AutoModelForCausalLM
    if _embeds(config, args.task):
        kind = auto.AutoModel
    names = ("tensor_parallel_size", "pipeline_parallel_size", "max_batch_size", "prefill_chunk_size", "dtype")
    options = {name: value for name in names if (value := getattr(args, name)) is not None}
    if (length := args.max_batch_length or args.max_length) is not None:
        options["max_batch_length"] = length
    model = kind.from_pretrained_with_parallel(name, deploy=True, **options)
    if args.fuse:
        model.fuse()
    if model.can_generate():
        model.reserve_batch()
        print(f"{name}: {model.describe_batch()}", file=sys.stderr, flush=True)
    return model
