"""Streams of an HTTP server to several clients: tokens per second and per CPU second, and time to the first token."""

from __future__ import annotations

import base64
import contextlib
import io
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
from typing import Any, NamedTuple

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
_IMAGES = (*_ROWS, "--images")
_PAGES = ("--cb-num-blocks", "64", "--cb-max-batch-tokens", "512")
_ONE_THREAD = ("--threads-per-worker", "1")  # the second core is for the HTTP server, as documented
ours_alone = command("oslo", *_ROWS, *_ONE_THREAD)
ours_alone_fused = command("oslo", *_ROWS, *_ONE_THREAD, "--fuse")
ours = command("oslo", *_ROWS, "--tensor-parallel-size", "2")
ours_fused = command("oslo", *_ROWS, "--tensor-parallel-size", "2", "--fuse")
images_alone = command("oslo", *_IMAGES, *_ONE_THREAD)
images_by_weights = command("oslo", *_IMAGES, "--tensor-parallel-size", "2")
images_by_images = command("oslo", *_IMAGES, "--tensor-parallel-size", "2", "--tower-parallel", "images")
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
    chance = random.Random(0)
    prompts = [[_words(chance, prompt) for _ in range(requests)] for _ in range(clients)]
    values, found = _serve(peer, cls, checkpoint, prompts, interval, new)
    first = [each.first * 1e3 for mine in found for each in mine]
    return Result({**values, "first token": percentile(first, 50), "first token, p99": percentile(first, 99)})


def image_streams(
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
    """As `streams`, with ``clients`` whose chats have an image each, in turn with as many whose chats have none.

    Every image is another one, so no server can keep its features.
    """
    add_processor(checkpoint)
    chance = random.Random(0)

    def content(number: int) -> Any:
        text = _words(chance, prompt)
        return text if number % 2 else [{"type": "text", "text": text}, _image(chance)]

    contents = [[content(number) for _ in range(requests)] for number in range(2 * clients)]
    values, found = _serve(peer, cls, checkpoint, contents, interval, new)
    for name, chats in (("with an image", found[::2]), ("without images", found[1::2])):
        values[f"first token, {name}"] = percentile([each.first * 1e3 for mine in chats for each in mine], 50)
    return Result(values)


def _words(chance: random.Random, count: tuple[int, int]) -> str:
    return " ".join(chance.choices("abcde", k=chance.randint(*count)))


def _image(chance: random.Random) -> dict[str, Any]:
    """Return a part of a message with a random image, as a data URL."""
    from PIL import Image

    image, data = Image.frombytes("RGB", (8, 8), chance.randbytes(3 * 8 * 8)), io.BytesIO()
    image.resize((224, 224)).save(data, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(data.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def _serve(
    peer: Peer, cls: str, checkpoint: Path, contents: list[list[Any]], interval: float, new: int
) -> tuple[dict[str, float], list[list[Timed]]]:
    """Start the server of a peer and measure its answers to several clients.

    Args:
        contents: contents of the messages of each client.

    Returns:
        Tokens per second and per CPU second, and the answers to each client.
    """
    port = free_port()
    command = peer.load(cls, checkpoint, port=port)
    log = checkpoint / f"{peer.name}.log"
    with log.open("w") as out, subprocess.Popen([sys.executable, *command], stdout=out, stderr=out) as server:
        try:
            wait_for(port, server, log)
            ask = partial(ask_server, port, str(checkpoint), new)
            ask(contents[0][0])  # warm-up

            def client(number: int) -> list[Timed]:
                time.sleep(number * interval)
                return [ask(content) for content in contents[number]]

            began, used = time.monotonic(), _cpu_seconds(server.pid)
            with ThreadPoolExecutor(len(contents)) as threads:
                found = [*threads.map(client, range(len(contents)))]
            seconds, used = time.monotonic() - began, _cpu_seconds(server.pid) - used
        finally:
            server.terminate()
            threading.Timer(20.0, server.kill).start() if server.poll() is None else None
    tokens = sum(each.tokens for mine in found for each in mine)
    if tokens != (expected := new * sum(map(len, contents))):
        raise RuntimeError(f"{tokens} tokens came in place of {expected}")
    return {"serving": tokens / seconds, "serving, CPU": tokens / used}, found


class Timed(NamedTuple):
    """An answer: seconds to its first token, and its number of tokens."""

    first: float
    tokens: int


def percentile(values: list[float], percent: float) -> float:
    """Return the percentile of the values; NaN if there are none."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)] if ordered else math.nan


def ask_server(port: int, name: str, new: int, content: Any) -> Timed:
    """Stream an answer to a text or to parts of a message.

    Lines are parsed after the last line, to leave more CPU time to the server.
    """
    message = {"role": "user", "content": content}
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


def add_tokenizer(checkpoint: Path) -> Any:
    """Save a tokenizer with one word for each token beside the model. Return it."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoConfig, PreTrainedTokenizerFast

    size = AutoConfig.from_pretrained(checkpoint).get_text_config().vocab_size
    words = {"a": 0, "b": 1, "c": 2, "d": 3, "e": 4, **{f"w{i}": i for i in range(5, size)}}
    made = Tokenizer(models.WordLevel(words, unk_token="a"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, unk_token="a")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer.save_pretrained(checkpoint)
    return tokenizer


def add_processor(checkpoint: Path) -> None:
    """Save the processor of a LLaVA beside the model. Its last token stands for an image."""
    from tokenizers import AddedToken
    from transformers import AutoConfig, LlavaProcessor
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    tokenizer, config = add_tokenizer(checkpoint), AutoConfig.from_pretrained(checkpoint)
    token, side = f"w{config.image_token_id}", config.vision_config.image_size
    tokenizer.add_tokens([AddedToken(token, special=True)])
    part = f"{{{{ '{token}' if part.type == 'image' else part.text }}}} "
    parts = f"{{% for part in m.content %}}{part}{{% endfor %}}"
    text = "{% if m.content is string %}{{ m.content }}{% else %}" + parts + "{% endif %}"
    sizes = {"size": {"shortest_edge": side}, "crop_size": {"height": side, "width": side}}
    LlavaProcessor(
        CLIPImageProcessorPil(**sizes, do_convert_rgb=True),
        tokenizer,
        patch_size=config.vision_config.patch_size,
        vision_feature_select_strategy=config.vision_feature_select_strategy,
        chat_template="{% for m in messages %}" + text + "{% endfor %}",
        image_token=token,
        num_additional_image_tokens=1,
    ).save_pretrained(checkpoint)


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
