"""Streams of an HTTP server to several clients: tokens per second and per CPU second, and time to the first token."""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

from benchmarks.definitions import Peer, Result
from benchmarks.free_port import free_port

START = 120.0
"""Seconds that a server may take until it answers."""


def command(kind: str, *options: str) -> Callable[..., list[str]]:
    """The command of a server, as arguments of python: of this library, or of transformers."""

    def made(cls: str, checkpoint: Path, port: int) -> list[str]:
        return [*_PROGRAMS[kind], "serve", str(checkpoint), "--port", str(port), *options]

    return made


_PROGRAMS = {
    "oslo": ("-m", "oslo_models"),
    "transformers": ("-c", "from transformers.cli.transformers import main; main()"),
}
_ROWS = ("--max-batch-size", "32", "--max-batch-length", "512", "--no-access-log")
_PAGES = ("--cb-num-blocks", "64", "--cb-max-batch-tokens", "512")
_ONE_THREAD = ("--threads-per-worker", "1")  # the second core is for the HTTP server, as documented
ours_alone = command("oslo", *_ROWS, *_ONE_THREAD)
ours_alone_fused = command("oslo", *_ROWS, *_ONE_THREAD, "--fuse")
ours = command("oslo", *_ROWS, "--tensor-parallel-size", "2")
ours_fused = command("oslo", *_ROWS, "--tensor-parallel-size", "2", "--fuse")
one_by_one = command("oslo", *_ROWS, *_ONE_THREAD, "--max-batch-size", "1")
continuous = command("transformers", "--continuous-batching", "--device", "cpu", *_PAGES)
plain = command("transformers", "--device", "cpu")


def streams(
    peer: Peer,
    cls: str,
    checkpoint: Path,
    tiny: Path,
    *,
    clients: int,
    interval: float,
    requests: int,
    prompt: tuple[int, int],
    new: int,
) -> Result:
    """``clients`` begin ``interval`` seconds one after the other; each streams ``requests`` answers, one by one.

    CPU seconds count all processes of the server, between the first request and the last token.

    Args:
        prompt: Bounds of a prompt's length, in tokens.
        new: Tokens of each answer.
    """
    add_tokenizer(checkpoint)
    port = free_port()
    command = peer.load(cls, checkpoint, port=port)
    log = checkpoint / f"{peer.name}.log"
    chance = random.Random(0)

    def words() -> str:
        return " ".join(chance.choices("abcde", k=chance.randint(*prompt)))

    prompts = [[words() for _ in range(requests)] for _ in range(clients)]
    with log.open("w") as out, subprocess.Popen([sys.executable, *command], stdout=out, stderr=out) as server:
        try:
            wait_for(port, server, log)
            ask = partial(ask_server, port, str(checkpoint), new)
            ask("a b c d e")  # warm-up

            def client(number: int) -> list[Timed]:
                time.sleep(number * interval)
                return [ask(text) for text in prompts[number]]

            began, used = time.monotonic(), _cpu_seconds(server.pid)
            with ThreadPoolExecutor(clients) as threads:
                found = [each for mine in threads.map(client, range(clients)) for each in mine]
            seconds, used = time.monotonic() - began, _cpu_seconds(server.pid) - used
        finally:
            server.terminate()
            threading.Timer(20.0, server.kill).start() if server.poll() is None else None
    first, tokens = [each.first * 1e3 for each in found], sum(each.tokens for each in found)
    if tokens != clients * requests * new:
        raise RuntimeError(f"{tokens} tokens came in place of {clients * requests * new}")
    values = {"serving": tokens / seconds, "serving, CPU": tokens / used}
    return Result({**values, "first token": percentile(first, 50), "first token, p99": percentile(first, 99)})


class Timed(NamedTuple):
    """An answer: seconds to its first token, and its number of tokens."""

    first: float
    tokens: int


def percentile(values: list[float], percent: float) -> float:
    """Return the percentile of the values; NaN if there are none."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)] if ordered else math.nan


def ask_server(port: int, name: str, new: int, prompt: str) -> Timed:
    """Stream an answer. Lines are parsed after the last line, to leave more CPU time to the server."""
    message = {"role": "user", "content": prompt}
    body = {"model": name, "messages": [message], "stream": True, "max_tokens": new, "temperature": 0}
    url, headers = f"http://127.0.0.1:{port}/v1/chat/completions", {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    began = time.monotonic()
    with urllib.request.urlopen(request, timeout=600) as answer:
        lines = [(time.monotonic() - began, line) for line in answer if line.startswith(b"data: {")]
    pieces = [(when, text) for when, line in lines if (text := _content(line))]
    return Timed(pieces[0][0], sum(len(text.split()) for _, text in pieces))


def _cpu_seconds(pid: int) -> float:
    """CPU seconds of a process and its descendants, user and system, including children that have ended."""
    ticks, children = {}, dict[int, list[int]]()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            fields = stat.read_text().rpartition(")")[2].split()
            children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
            ticks[int(stat.parent.name)] = sum(map(int, fields[11:15]))
    found, left = 0, [pid]
    while left:
        found += ticks.get(each := left.pop(), 0)
        left += children.get(each, [])
    return found / os.sysconf("SC_CLK_TCK")


def _content(line: bytes) -> str:
    event = json.loads(line[len(b"data: ") :])
    if "error" in event:
        raise RuntimeError(f"the server answered {event}")
    return "".join(choice.get("delta", {}).get("content") or "" for choice in event.get("choices", []))


def wait_for(port: int, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START
    while time.monotonic() < deadline and server.poll() is None:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
            return
        except OSError:
            time.sleep(0.2)
    raise RuntimeError(f"the server did not start:\n{log.read_text()[-3000:]}")


def add_tokenizer(checkpoint: Path) -> None:
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


def agreement(peer: Peer, cls: str, checkpoint: Path, tiny: Path, *, rows: int, timed: int) -> Result:
    """Half the round trip of a step with a token per row, encoding included; then the same by gloo's broadcast.

    Returns the median of ``timed`` round trips.
    """
    import torch.distributed as dist

    from oslo_models.deploy.running_batch.plan_channel import BroadcastChannel, PlanChannel, SharedMemoryChannel
    from oslo_models.deploy.running_batch.step import Step
    from oslo_models.distributed.mesh import ParallelMesh

    axis, rank = ParallelMesh(peer.processes).tp, int(os.environ["RANK"])
    folder = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(folder)
    step = Step(1, tokens=list(range(rows)))

    def median(there: PlanChannel, back: PlanChannel) -> float:
        times = []
        for _ in range(timed + 10):  # the first ten are warm-up
            began = time.perf_counter()
            for leader, channel in enumerate((there, back)):
                channel.publish(step) if rank == leader else channel.receive()
            times.append(time.perf_counter() - began)
        return statistics.median(times[10:]) / 2 * 1e6

    try:
        shared = [SharedMemoryChannel(Path(folder[0], str(leader)), rank, leader, 2, 4096) for leader in (0, 1)]
        gloo = [BroadcastChannel(axis, leader) for leader in (0, 1)]
        found, reference = median(shared[0], shared[1]), median(gloo[0], gloo[1])
    finally:
        dist.barrier()
        shutil.rmtree(folder[0], ignore_errors=True)
    return Result({"agreement": found}, [], {"gloo": {"agreement": reference}})
