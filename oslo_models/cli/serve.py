"""The options of ``oslo-models serve``."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any

DESCRIPTION = """\
Load models over several processes and serve them:
  POST /v1/completions, /v1/chat/completions   as in OpenAI's API, also streamed
  POST /v1/responses                           OpenAI's newer format of chats
  POST /v1/embeddings                          of encoders
  POST /v1/audio/transcriptions, /v1/audio/translations   of models of speech; a form with a file
  POST /tokenize, /detokenize
  GET  /v1/models
  GET  /metrics                                counts and times, for Prometheus
  GET  /generate_text/TEXT                     as in OSLO's documents
  GET  /health                                 200 if all workers answer, else 503
  GET  /health/live, /health/ready             for the probes of Kubernetes
SIGTERM: the running requests are answered, for --drain-seconds at most; a second one ends the server at once.
SIGHUP: --api-key-file is read again.
Workers that die are started again, --restart-workers times within --restart-window seconds; then it exits with 1.
Needs: pip install "oslo-models[serve]"

examples:
  oslo-models serve gpt2 --tensor-parallel-size 2
  oslo-models serve ./checkpoint --host 0.0.0.0 --port 80 --api-key-file key
  curl http://127.0.0.1:8000/generate_text/Messi"""


def add_arguments(command: argparse.ArgumentParser, size: Callable[[str], int]) -> None:
    """Add the options, except the parallel sizes.

    Args:
        size: parses an integer of at least 1.
    """
    add = command.add_argument
    add("models", metavar="MODEL", nargs="+", help="a directory, or a name on the hub")
    adapter = "a LoRA adapter that peft has saved, for requests with `model` NAME; can be given several times"
    add("--adapter", metavar="NAME=PATH", action="append", default=[], help=adapter)
    add("--fuse", action="store_true", help="replace modules by fused ones where they are faster")
    add("--dtype", metavar="TYPE", help="of the weights, such as bfloat16 (default: as saved)")
    add("--tokenizer", metavar="NAME", help="a directory, or a name on the hub (default: MODEL)")
    tasks = "task of the models: generate text or embed it (default: by the class that saved the checkpoint)"
    add("--task", choices=("auto", "generate", "embed"), default="auto", help=tasks)
    vectors = "vectors of texts: mean or maximum over tokens, or first or last token (default: as the "
    vectors += "checkpoint states it, or mean)"
    add("--pooling", choices=("mean", "cls", "last", "max"), help=vectors)
    add("--no-normalize", dest="normalize", action="store_false", help="do not scale vectors of texts to length 1")
    add("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 for all interfaces (default: %(default)s)")
    add("--port", type=_port, default=8000, help="port to listen on; 0 for any free one (default: %(default)s)")
    _add_access(command)
    sizes: dict[str, Any] = {"metavar": "N", "type": size}
    rows = "answers that are computed together; their memory is allocated at the start (default: 8; on GPUs 64, or as "
    add("--max-batch-size", **sizes, help=rows + "many as fit into 16 GiB)")
    row = "tokens of such an answer with its prompt; longer ones are computed by themselves (default: "
    add("--max-batch-length", **sizes, help=row + "--max-length, or 4096)")
    chunk = "tokens of a prompt that are computed between two tokens of the other answers (default: 256; on GPUs 2048)"
    add("--prefill-chunk-size", **sizes, help=chunk)
    alone = "refuse requests that cannot join the others: beams, and answers beyond --max-batch-length"
    add("--batch-only", action="store_true", help=alone)
    threads = "torch's threads in each worker on CPUs; a core beside them for the server makes many streams faster"
    anew = "compute every prompt from its first token, also where it begins as one that was computed before"
    add("--threads-per-worker", **sizes, help=threads)
    grows = (
        "let the memory of the answers grow and shrink with them, so that long and short ones share it; it can run out"
    )
    add("--no-reserve", dest="reserve", action="store_false", help=grows)
    add("--no-prefix-reuse", dest="reuse_prefixes", action="store_false", help=anew)
    drafts = "tokens that are drafted for each answer and checked in one step: they followed its newest tokens before "
    drafts += "(default: none; 4 with --speculative-model, 1 with --mtp-heads)"
    add("--speculative-tokens", **sizes, help=drafts)
    small = "a small model of the same vocabulary that drafts these tokens: a directory, or a name on the hub"
    add("--speculative-model", metavar="MODEL", help=small)
    heads = "load the heads of the model for multi-token prediction, which draft these tokens"
    add("--mtp-heads", action="store_true", help=heads)
    calls = "calls that run or wait; beyond it, status 429 (default: %(default)s)"
    add("--max-queue-size", **sizes, default=64, help=calls)
    add("--max-length", **sizes, help="tokens of a prompt and its answer (default: the limit of the model)")
    body = "bytes of a request; beyond it, status 413 (default: 1 MiB; 20 MiB with images or sounds)"
    add("--max-body-size", **sizes, help=body)
    seeing = "load the model with its tower, and accept images as data URLs in chats (default: only if the zoo has no "
    seeing += "text model of its type)"
    add("--images", action=argparse.BooleanOptionalAction, help=seeing)
    divided = "divide the weights of the tower over tensor-parallel ranks, or the images (default: weights)"
    add("--tower-parallel", choices=("weights", "images"), help=divided)
    add("--max-images", **sizes, default=8, help="images in a request (default: %(default)s)")
    pixels = "pixels of an image, checked before it is decoded (default: %(default)s)"
    add("--max-image-pixels", **sizes, default=50_000_000, help=pixels)
    hearing = "load the model with its encoder of sounds, and accept sounds in base64 in chats; requests with sounds "
    hearing += "are computed one after the other (default: only if the zoo has no text model of its type)"
    add("--sounds", action=argparse.BooleanOptionalAction, help=hearing)
    add("--max-sounds", **sizes, default=4, help="sounds in a request (default: %(default)s)")
    length = "seconds of all sounds of a request, checked before they are decoded (default: %(default)s)"
    add("--max-sound-seconds", metavar="S", type=_seconds, default=1200.0, help=length)
    open_at_once = "connections; beyond it, the longest idle one is closed (default: %(default)s)"
    add("--max-connections", **sizes, default=1000, help=open_at_once)
    headers = "seconds for the headers of a request (default: %(default)s)"
    add("--header-seconds", metavar="S", type=_seconds, default=15.0, help=headers)
    drain = "seconds that running requests get after SIGTERM (default: %(default)s)"
    add("--drain-seconds", metavar="S", type=_count, default=60, help=drain)
    restarts = "how often the workers of a model may die and be started again; beyond it, exit (default: %(default)s)"
    add("--restart-workers", metavar="N", type=_count, default=3, help=restarts)
    within = "seconds in which --restart-workers are counted (default: %(default)s)"
    add("--restart-window", metavar="S", type=_seconds, default=600.0, help=within)
    secret = "has the secret by which the hosts of `torchrun` know each other"
    add("--deploy-secret-file", metavar="FILE", help=secret)


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port: 0 to 65535")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return seconds


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least 0")
    return int(text)


def _add_access(command: argparse.ArgumentParser) -> None:
    keys = command.add_mutually_exclusive_group()
    keys.add_argument("--api-key-file", metavar="FILE", help="file with one key a line; clients need one of them")
    keys.add_argument(
        "--api-key",
        metavar="KEY",
        help="the key itself, which other users of this host see in `ps` (default: that in the environment variable "
        "OSLO_MODELS_API_KEY, or none)",
    )
    command.add_argument(
        "--allowed-hosts",
        metavar="NAMES",
        help="names by which clients may call the server, separated by commas; * for all (default: all; for a "
        "server on a loopback address, the names of the loopback address)",
    )
    command.add_argument(
        "--allowed-origins",
        metavar="ORIGINS",
        help="web pages that browsers may call the server from, such as https://chat.example, separated by commas; * "
        "for all (default: none)",
    )
    command.add_argument(
        "--no-access-log",
        dest="access_log",
        action="store_false",
        help="do not log requests (they are logged with id, client, route, status and time, without their texts)",
    )
