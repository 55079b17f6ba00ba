"""Streams of an HTTP server to several clients: tokens per second, and seconds to the first token."""

from __future__ import annotations

import json
import socket
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.definitions import Peer, Result

START = 120.0
"""Seconds that a server may take until it answers."""


def ours(cls: str, checkpoint: Path, port: int) -> list[str]:
    """The command of this library's server."""
    return ["-m", "oslo_models", "serve", str(checkpoint), "--port", str(port), "--tensor-parallel-size", "2"]


def ours_alone(cls: str, checkpoint: Path, port: int) -> list[str]:
    """The same on one worker."""
    return ["-m", "oslo_models", "serve", str(checkpoint), "--port", str(port)]


def continuous(cls: str, checkpoint: Path, port: int) -> list[str]:
    """The command of transformers' server with its continuous batching."""
    cli = "from transformers.cli.transformers import main; main()"
    options = ("--continuous-batching", "--device", "cpu", "--cb-num-blocks", "64", "--cb-max-batch-tokens", "512")
    return ["-c", cli, "serve", str(checkpoint), "--port", str(port), *options]


def streams(peer: Peer, cls: str, checkpoint: Path, tiny: Path, *, clients: int, interval: float, new: int) -> Result:
    """``clients`` streams of ``new`` tokens each, which begin ``interval`` seconds one after the other."""
    _add_tokenizer(checkpoint)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = peer.load(cls, checkpoint, port=port)
    log = checkpoint / f"{peer.name}.log"
    with log.open("w") as out, subprocess.Popen([sys.executable, *command], stdout=out, stderr=out) as server:
        try:
            _wait(port, server, log)
            ask = _asker(port, str(checkpoint), new)
            ask(0.0)  # warm-up
            began = time.monotonic()
            with ThreadPoolExecutor(clients) as threads:
                found = list(threads.map(ask, [i * interval for i in range(clients)]))
            seconds = time.monotonic() - began
        finally:
            server.terminate()
            threading.Timer(20.0, server.kill).start() if server.poll() is None else None
    first = [each[0] for each in found]
    values = {"serving": sum(each[1] for each in found) / seconds}
    values |= {"first token": statistics.median(first) * 1e3, "last first token": max(first) * 1e3}
    return Result(values)


def _asker(port: int, name: str, new: int) -> Callable[[float], tuple[float, int]]:
    """A function that waits, streams an answer, and returns the seconds to its first token and how many it has."""

    def ask(wait: float) -> tuple[float, int]:
        time.sleep(wait)
        message = {"role": "user", "content": f"a b c d {'e ' * (1 + int(4 * wait))}"}
        body = {"model": name, "messages": [message], "stream": True, "max_tokens": new, "temperature": 0}
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        began, first, pieces = time.monotonic(), 0.0, 0
        with urllib.request.urlopen(request, timeout=600) as answer:
            for line in answer:
                if line.startswith(b"data: {") and _content(line):
                    pieces += 1
                    first = first or time.monotonic() - began
        return first, pieces

    return ask


def _content(line: bytes) -> Any:
    event = json.loads(line[len(b"data: ") :])
    if "error" in event:
        raise RuntimeError(f"the server answered {event}")
    return any(choice.get("delta", {}).get("content") for choice in event.get("choices", []))


def _wait(port: int, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START
    while time.monotonic() < deadline and server.poll() is None:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
            return
        except OSError:
            time.sleep(0.2)
    raise RuntimeError(f"the server did not start:\n{log.read_text()[-3000:]}")


def _add_tokenizer(checkpoint: Path) -> None:
    """Save a tokenizer with one word for each token beside the model."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoConfig, PreTrainedTokenizerFast

    size = AutoConfig.from_pretrained(checkpoint).vocab_size
    words = {"a": 0, "b": 1, "c": 2, "d": 3, "e": 4, **{f"w{i}": i for i in range(5, size)}}
    made = Tokenizer(models.WordLevel(words, unk_token="a"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, unk_token="a")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer.save_pretrained(checkpoint)
