"""Load on a server with OpenAI's API: requests come at random, whether or not earlier ones have been answered.

Arrivals are a Poisson process, lengths of prompts and answers are drawn log-uniformly, answers are streamed. Reported
are tokens per second, the time from a request's arrival to its first token, the time of each further token, and errors.
The rate is given, not the number of clients: a server that cannot keep up shows it by times that grow, or by errors.
Raise --rate until the 99th percentile of the first token is no longer what you would accept.

examples:
  # a server that runs somewhere
  python -m benchmarks load --url http://127.0.0.1:8000 --rate 4 --requests 200

  # servers that it starts itself, with the same small model and the same requests (the seed is the same)
  python -m benchmarks load --serve oslo --rate 2
  python -m benchmarks load --serve transformers --rate 2      # `transformers serve --continuous-batching`
  python -m benchmarks load --serve oslo --checkpoint ./my-model --options "--tensor-parallel-size 2 --fuse"
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import http.client
import json
import math
import os
import random
import shlex
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks import serving
from benchmarks.free_port import free_port
from benchmarks.records import append, number, stamp

SERVERS = {"oslo": serving.ours_alone, "transformers": serving.continuous}


@dataclass
class Asked:
    """One request and its result.

    Attributes:
        at: Seconds from the start to its arrival.
        words: Words of the prompt.
        new: Tokens of the answer.
        moments: Seconds from its arrival to each piece of the answer.
        tokens: Tokens counted by the server, or else the number of pieces.
        error: Status or exception; empty if it was answered.
    """

    at: float
    words: list[str]
    new: int
    moments: list[float] = field(default_factory=list)
    tokens: int = 0
    error: str = ""


def draw(count: int, rate: float, prompt: tuple[int, int], new: tuple[int, int], seed: int) -> list[Asked]:
    """The requests of a run."""
    chance, at, asked = random.Random(seed), 0.0, []

    def length(bounds: tuple[int, int]) -> int:
        return round(math.exp(chance.uniform(math.log(bounds[0]), math.log(bounds[1]))))

    for _ in range(count):
        at += chance.expovariate(rate)
        asked.append(Asked(at, [chance.choice("abcde") for _ in range(length(prompt))], length(new)))
    return asked


class Target:
    """A server by its URL."""

    def __init__(self, url: str, model: str, key: str | None, timeout: float) -> None:
        parts = urlsplit(url)
        self._https, self._host, self._path = parts.scheme == "https", parts.netloc, parts.path.rstrip("/")
        self.model, self._timeout = model, timeout
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})

    def _request(self, method: str, path: str, body: Any = None) -> http.client.HTTPResponse:
        kind = http.client.HTTPSConnection if self._https else http.client.HTTPConnection
        connection = kind(self._host, timeout=self._timeout)
        base = "" if self._path.endswith("/v1") else "/v1"
        data = None if body is None else json.dumps(body).encode()
        connection.request(method, f"{self._path}{base}/{path}", data, self._headers)
        return connection.getresponse()

    def first_model(self) -> str:
        with self._request("GET", "models") as answer:
            return str(json.load(answer)["data"][0]["id"])

    def ask(self, asked: Asked, began: float) -> None:
        """Stream one answer. Its arrival was ``asked.at`` seconds after ``began``."""
        body = {"model": self.model, "messages": [{"role": "user", "content": " ".join(asked.words)}]}
        body |= {"max_tokens": asked.new, "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
        try:
            with self._request("POST", "chat/completions", body) as answer:
                if answer.status != 200:
                    asked.error = f"status {answer.status}"
                    return
                for line in answer:
                    if line.startswith(b"data: {"):
                        self._piece(asked, json.loads(line[6:]), time.monotonic() - began - asked.at)
        except (OSError, http.client.HTTPException, ValueError) as error:
            asked.error = type(error).__name__
        asked.error = asked.error or ("" if asked.moments else "no tokens")

    def _piece(self, asked: Asked, event: dict[str, Any], moment: float) -> None:
        if "error" in event:
            asked.error = "an error in the stream"
        if any(choice.get("delta", {}).get("content") for choice in event.get("choices") or ()):
            asked.moments.append(moment)
            asked.tokens += 1
        if event.get("usage"):
            asked.tokens = event["usage"].get("completion_tokens") or asked.tokens


def run(target: Target, requests: list[Asked]) -> float:
    """Make the requests when they are due. Return the total seconds."""
    began, threads = time.monotonic(), []
    for asked in requests:
        time.sleep(max(0.0, began + asked.at - time.monotonic()))
        threads.append(threading.Thread(target=target.ask, args=(asked, began), daemon=True))
        threads[-1].start()
    for thread in threads:
        thread.join()
    return time.monotonic() - began


def figures(requests: list[Asked], seconds: float) -> dict[str, tuple[float, str]]:
    """Return the measured values with their units."""
    answered = [asked for asked in requests if not asked.error]
    first = [asked.moments[0] * 1e3 for asked in answered]
    each = [(asked.moments[-1] - asked.moments[0]) / (asked.tokens - 1) * 1e3 for asked in answered if asked.tokens > 1]
    found = {
        "throughput": (sum(asked.tokens for asked in answered) / seconds, "tokens/s"),
        "requests answered": (len(answered) / seconds, "1/s"),
        "errors": (float(len(requests) - len(answered)), "requests"),
    }
    for name, values in (("first token", first), ("token", each)):
        found |= {f"{name}, p{percent}": (serving.percentile(values, percent), "ms") for percent in (50, 99)}
    return found


@contextlib.contextmanager
def started(kind: str, checkpoint: Path, options: str) -> Iterator[str]:
    """A server of this kind on a free port; its URL."""
    port = free_port()
    command = [sys.executable, *SERVERS[kind]("", checkpoint, port), *shlex.split(options)]
    with tempfile.NamedTemporaryFile("w", suffix=".log") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out)
        try:
            serving.wait_for(port, process, Path(out.name))
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def small_model(folder: Path) -> Path:
    """A Llama of 20 million parameters with random weights, and a tokenizer with a word for each token."""
    import torch
    import transformers

    torch.manual_seed(0)
    sizes = {"vocab_size": 8000, "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 8}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 6, "max_position_embeddings": 2048}
    ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}  # so that each answer has its full length
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads, **ids)).save_pretrained(folder)
    serving.add_tokenizer(folder)
    return folder


def _bounds(text: str) -> tuple[int, int]:
    least, _, most = text.partition(":")
    bounds = int(least), int(most or least)
    if not 1 <= bounds[0] <= bounds[1]:
        raise argparse.ArgumentTypeError(f"{text} is not MIN:MAX with 1 <= MIN <= MAX")
    return bounds


def _positive(text: str) -> float:
    if not float(text) > 0:
        raise argparse.ArgumentTypeError(f"{text} is not more than 0")
    return float(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks load", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add, where = parser.add_argument, parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--url", metavar="URL", help="of a server that runs, with or without /v1")
    where.add_argument("--serve", choices=sorted(SERVERS), help="start this server on this host")
    add("--model", metavar="NAME", help="that requests name (default: the first of /v1/models)")
    add("--api-key-file", metavar="FILE", type=Path, help="has the key of the server")
    add("--checkpoint", metavar="DIR", type=Path, help="for --serve (default: a small model with random weights)")
    add("--options", metavar="TEXT", default="", help="further options of the server that is started")
    add("--rate", metavar="R", type=_positive, default=2.0, help="requests per second, on average (default: 2)")
    add("--requests", metavar="N", type=int, default=100, help="how many (default: %(default)s)")
    lengths = "words of a prompt; a word is a token of the small model (default: 8:256)"
    add("--prompt", metavar="MIN:MAX", type=_bounds, default=(8, 256), help=lengths)
    add("--new", metavar="MIN:MAX", type=_bounds, default=(8, 64), help="tokens of an answer (default: 8:64)")
    add("--timeout", metavar="S", type=float, default=300.0, help="without any data (default: %(default)s)")
    add("--seed", metavar="N", type=int, default=0, help="of the requests (default: %(default)s)")
    add("--out", metavar="FILE", type=Path, help="append rows as CSV, in the format of benchmarks/results.csv")
    add("--name", metavar="TEXT", help="of the server in these rows (default: that of --serve, or the URL)")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the load. Return 1 if a request was not answered."""
    args = _parser().parse_args(argv)
    requests = draw(args.requests, args.rate, args.prompt, args.new, args.seed)
    key = args.api_key_file.read_text().split("\n")[0].strip() if args.api_key_file else None
    load = os.getloadavg()[0]
    with contextlib.ExitStack() as on:
        url = args.url
        if args.serve:
            checkpoint = args.checkpoint or small_model(Path(on.enter_context(tempfile.TemporaryDirectory())))
            url = on.enter_context(started(args.serve, checkpoint, args.options))
            args.model = args.model or str(checkpoint)
        target = Target(url, args.model or "", key, args.timeout)
        target.model = target.model or target.first_model()
        target.ask(Asked(0.0, ["a"], 2), time.monotonic())  # to warm up
        seconds = run(target, requests)
    return _report(args, requests, seconds, load)


def _report(args: argparse.Namespace, requests: list[Asked], seconds: float, load: float) -> int:
    found, peer = figures(requests, seconds), args.name or args.serve or args.url
    shape = f"rate {args.rate:g}/s, prompts {args.prompt[0]}:{args.prompt[1]}, new {args.new[0]}:{args.new[1]}"
    print(f"{peer}: {len(requests)} requests in {seconds:.0f} s, {shape}, load of the machine before {load:.1f}")
    for name, (value, unit) in found.items():
        print(f"  {name:20}{number(value):>8} {unit}")
    errors = collections.Counter(asked.error for asked in requests if asked.error)
    for error, count in errors.most_common():
        print(f"  {count} x {error}")
    words = [len(asked.words) for asked in requests]
    print(f"  prompts had {statistics.median(words):.0f} words in the middle, {max(words)} at most")
    if args.out is not None:
        row = {**stamp(), "case": f"load, {shape}", "peer": peer, "repeats": 1}
        values = [{"metric": name, "unit": unit, "value": number(value)} for name, (value, unit) in found.items()]
        append(args.out, [{**row, **each} for each in values])
    return int(bool(errors))


if __name__ == "__main__":
    sys.exit(main())
