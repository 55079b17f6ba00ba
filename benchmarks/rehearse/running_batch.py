"""The running batch: tokens per second of a deployed model, its CUDA graphs, and the tokens of calls by themselves."""

from __future__ import annotations

import queue
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import oslo_models
from benchmarks import serving
from benchmarks.free_port import free_port
from benchmarks.rehearse.bench import Bench
from benchmarks.rehearse.models import build, config_of
from oslo_models.deploy.messages import Failure, Reply, Request
from oslo_models.deploy.running_batch import step_runner
from oslo_models.deploy.running_batch.limits import BatchLimits
from oslo_models.deploy.running_batch.loop import Messages, RunningBatch
from oslo_models.deploy.running_batch.plan_channel import NoFollowers
from oslo_models.deploy.running_batch.static_step import run_eagerly

_SAMPLED = {"do_sample": True, "temperature": 0.8, "top_k": 50, "top_p": 0.9}


def speeds(bench: Bench) -> None:
    """Tokens per second of calls from several threads in one running batch."""
    config = config_of(bench, "llama-1b")
    new, length = bench.pick((64, 128), (3, 4))
    counts = bench.pick((1, 8, 32, 64), (1, 2))
    options = {"min_new_tokens": new, "max_new_tokens": new, "do_sample": False, "pad_token_id": 0}
    proxy = oslo_models.LlamaForCausalLM.from_config_with_parallel(
        config, dtype=torch.bfloat16, seed=0, deploy=True, max_batch_size=counts[-1]
    )
    with proxy, ThreadPoolExecutor(counts[-1]) as threads:
        prompts = [torch.randint(config.vocab_size, (1, length)) for _ in range(counts[-1])]

        def calls(count: int, more: dict[str, Any]) -> None:
            list(threads.map(lambda ids: proxy.generate(ids, **{**options, **more}), prompts[:count]))

        for kind in ("", ", sampling", ", fused"):
            peer, more = f"oslo_models deployed{kind}", _SAMPLED if kind == ", sampling" else {}
            with bench.attempt(peer):
                if kind == ", fused":
                    proxy.fuse()
                calls(counts[-1], more)
                bench.ready()
                for count in counts:
                    calls(count, more)  # captures
                    seconds = min(bench.timer.wall(lambda count=count, more=more: calls(count, more), 3))
                    bench.row(peer, f"{count} calls at once", count * new / seconds, "tokens/s")
                _graphs(bench, peer, proxy.batch_graphs()[0])


def served(bench: Bench) -> None:
    """Tokens per second of an HTTP server whose clients stream chat answers, and milliseconds to the first token."""
    with bench.attempt("oslo_models served"), tempfile.TemporaryDirectory() as folder:
        model = build(bench, "llama-1b", "oslo_models", config_of(bench, "llama-1b"))
        model.save_pretrained_with_parallel(folder, save_with_merging=True)
        del model
        if not bench.dry:
            torch.cuda.empty_cache()
        serving.add_tokenizer(Path(folder))
        counts, new, words = bench.pick((1, 8, 32), (1, 2)), bench.pick(128, 4), bench.pick(100, 3)
        with _server(folder, counts[-1]) as port, ThreadPoolExecutor(counts[-1]) as threads:

            def answers(count: int) -> list[serving.Timed]:
                prompt = " ".join(["a b c d e"] * (words // 5 + 1))
                return list(threads.map(lambda _: serving.ask_server(port, folder, new, prompt), range(count)))

            answers(counts[-1])  # captures
            bench.ready()
            for count in counts:
                began = time.perf_counter()
                found = answers(count)
                seconds = time.perf_counter() - began
                bench.check(f"tokens of {count} clients", sum(each.tokens for each in found), count * new)
                bench.row("oslo_models served", f"{count} clients at once", count * new / seconds, "tokens/s")
                first = statistics.median(each.first for each in found)
                bench.row("oslo_models served", f"{count} clients at once, first token", 1e3 * first, "ms")


@contextmanager
def _server(folder: str, rows: int) -> Iterator[int]:
    port, log = free_port(), Path(folder, "server.log")
    options = ["--port", str(port), "--max-batch-size", str(rows), "--no-access-log"]
    command = [sys.executable, "-m", "oslo_models", "serve", folder, *options]
    with log.open("w") as out, subprocess.Popen(command, stdout=out, stderr=out) as server:
        try:
            serving.wait_for(port, server, log)
            yield port
        finally:
            server.terminate()
            with suppress(subprocess.TimeoutExpired):
                server.wait(20.0)
            server.kill()


def _graphs(bench: Bench, peer: str, told: str) -> None:
    """Report the number of graphs. On a GPU it must be positive."""
    count = told.removesuffix(" CUDA graphs")
    if count.isdecimal() and int(count):
        bench.row(peer, "graphs captured", int(count), "")
    elif bench.dry:
        bench.row(peer, "graphs captured", 0, "", note=told)
    else:
        bench.fail(peer, told, "graphs captured")


class _Arrivals:
    """Calls that arrive while others are computed: a few whenever the batch polls."""

    def __init__(self, requests: list[Request]) -> None:
        self._requests, self._looks = requests[::-1], 0

    def get_nowait(self) -> Request:
        self._looks += 1
        if not self._requests or self._looks % 3 == 0:
            raise queue.Empty
        return self._requests.pop()

    get = get_nowait


def tokens(bench: Bench) -> None:
    """Each call gets the same tokens as alone: greedy and sampled, unfused and fused."""
    from transformers import LlamaConfig

    sizes = bench.pick(
        {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8},
        {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
    )
    config = LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=997, initializer_range=0.04,
                         bos_token_id=None, eos_token_id=None, pad_token_id=None)  # fmt: skip
    for dtype, kind in ((torch.float64, "unfused"), (torch.float32, "unfused"), (torch.float32, "fused")):
        name = f"{str(dtype).removeprefix('torch.')} {kind}"
        with bench.attempt("oslo_models", name), torch.no_grad(), _static(bench):
            model = oslo_models.LlamaForCausalLM.from_config_with_parallel(config, dtype=dtype, seed=0)
            model = model.to(bench.device).eval()
            calls = _calls(bench)
            expected = [_alone(bench, model, call) for call in calls]
            if kind == "fused":
                model.fuse()
            batch, found = _together(model, calls)
            for way in (False, True):
                mine = [each for call, each in zip(calls, found, strict=True) if call["do_sample"] == way]
                right = [each for call, each in zip(calls, expected, strict=True) if call["do_sample"] == way]
                equal = sum(one == other for one, other in zip(mine, right, strict=True))
                bench.check(f"{name}: {'sampled' if way else 'greedy'} calls with their own tokens", equal, len(right))
            _graphs(bench, name, batch.describe_graphs())


@contextmanager
def _static(bench: Bench) -> Iterator[None]:
    """In a dry run, compute the steps eagerly instead of replaying graphs. Warnings are errors."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*without CUDA graphs")
        if not bench.dry:
            yield
            return
        with patch.object(step_runner, "capture_of", lambda model: (run_eagerly, "")):
            yield


def _calls(bench: Bench) -> list[dict[str, Any]]:
    draw = torch.Generator().manual_seed(0)
    made = []
    for number in range(bench.pick(48, 6)):
        length, new = (int(torch.randint(1, most, (), generator=draw)) for most in bench.pick((400, 96), (9, 6)))
        ids = torch.randint(997, (1, length), generator=draw)
        options = {"min_new_tokens": new, "max_new_tokens": new, "pad_token_id": 0, "do_sample": False}
        made.append({"input_ids": ids, **options, **(_SAMPLED if number % 4 == 3 else {})})
    return made


def _alone(bench: Bench, model: Any, call: dict[str, Any]) -> list[int]:
    torch.manual_seed(7)
    result = model.generate(**{**call, "input_ids": call["input_ids"].to(bench.device)})
    return result[0].tolist()


def _together(model: Any, calls: list[dict[str, Any]]) -> tuple[RunningBatch, list[Any]]:
    results: dict[int, Any] = {}

    def send(message: Any, number: int) -> None:
        if isinstance(message, Reply):
            results[number] = message.result[0].tolist()
        elif isinstance(message, Failure):
            results[number] = message.error

    batch = RunningBatch(model, BatchLimits(24, 1024, 256), NoFollowers(), True, send, set(), lambda: None)
    first, *later = [Request(number, "generate", (), call, 7, joins=True) for number, call in enumerate(calls)]
    arrivals = _Arrivals(later)
    while len(results) < len(calls):
        batch.run(first, Messages(arrivals, lambda request: None))
        if arrivals._requests:
            first = arrivals._requests.pop()
    return batch, [results[number] for number in range(len(calls))]
