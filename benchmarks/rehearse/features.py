"""Features with GPU-specific behaviour: threads, sampling, head sizes, experts, graph capture."""

from __future__ import annotations

import threading
import time
from typing import Any

import torch

from benchmarks.rehearse.bench import Bench
from benchmarks.rehearse.checks import OURS, _fused_like_unfused, _ours
from benchmarks.rehearse.ranks import KINDS, batch, step

_GREEDY = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}


class _Streamer:
    """Collects tokens as transformers' streamers do."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        pass


def threaded_streamer(bench: Bench) -> None:
    """``generate`` of a fused model in a thread, with a streamer, before or after the main thread has compiled."""
    for kind in KINDS:
        for main_first in (False, True):
            with bench.attempt(OURS, f"{kind}, main thread first: {main_first}"):
                model, ids = _ours(bench, kind, torch.float32).eval(), batch(bench.device)[:1]
                expected = model.generate(ids, **_GREEDY)
                model.fuse()
                if main_first:
                    model.generate(ids, **_GREEDY)
                found: list[Any] = []
                streamer = _Streamer()

                def work(model: Any = model, ids: Any = ids, found: Any = found, streamer: Any = streamer) -> None:
                    try:
                        found.append(model.generate(ids, streamer=streamer, **_GREEDY).tolist())
                    except BaseException as error:  # noqa: BLE001  reported as the result
                        found.append(error)

                thread = threading.Thread(target=work)
                thread.start()
                thread.join()
                if isinstance(found[0], BaseException):
                    raise found[0]
                bench.check(f"{kind}: tokens, {main_first}", found[0], expected.tolist())
                bench.check(f"{kind}: streamed, {main_first}", streamer.tokens, expected.flatten().tolist())


def sampling(bench: Bench) -> None:
    """The same seed draws the same tokens, fused or not."""
    options = {"max_new_tokens": 8, "do_sample": True, "top_k": 20, "temperature": 0.9, "pad_token_id": 0}
    for kind in KINDS:
        with bench.attempt(OURS, kind):
            model, ids = _ours(bench, kind, torch.float32).eval(), batch(bench.device)
            tokens = []
            for change in (model.unfuse, model.fuse):
                change()
                torch.manual_seed(7)
                tokens.append(model.generate(ids, **options).tolist())
            bench.check(f"{kind}: tokens", tokens[1], tokens[0])


def head_sizes(bench: Bench) -> None:
    """Head sizes that are no power of two, and the largest head size."""
    for width in (80, 96, 256):
        _fused_like_unfused(bench, "llama", torch.float32, 1e-3, hidden_size=4 * width, head_dim=width)
        _fused_like_unfused(bench, "gpt2", torch.float32, 1e-3, n_embd=2 * width, n_head=2)


def experts(bench: Bench) -> None:
    """Mixtures of experts, in float32 and in bfloat16, the dtype of grouped products on a GPU."""
    from transformers import MixtralConfig, Qwen3MoeConfig

    import oslo_models

    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
             "vocab_size": 101, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}  # fmt: skip
    kinds = {
        "mixtral": (oslo_models.MixtralForCausalLM, MixtralConfig(**sizes, intermediate_size=96, num_local_experts=4)),
        "qwen3_moe": (
            oslo_models.Qwen3MoeForCausalLM,
            Qwen3MoeConfig(**sizes, moe_intermediate_size=32, num_experts=8, num_experts_per_tok=2, head_dim=16),
        ),
    }
    for kind, (cls, config) in kinds.items():
        for dtype, tolerance in ((torch.float32, 1e-3), (torch.bfloat16, 0.05)):
            with bench.attempt(OURS, f"{kind} {dtype}"):
                model: Any = cls.from_config_with_parallel(config, dtype=dtype, seed=0).to(bench.device)
                ids = batch(bench.device)
                losses = []
                for change in (model.unfuse, model.fuse):
                    change()
                    losses.append(step(model, ids)[0].float())
                    model.zero_grad()
                bench.check(f"{kind} {dtype}: loss", losses[1], losses[0], tolerance)


def deterministic(bench: Bench) -> None:
    """Two steps in deterministic mode give the same gradients, bit for bit."""
    torch.use_deterministic_algorithms(True)
    try:
        for kind in KINDS:
            with bench.attempt(OURS, kind):
                model, ids = _ours(bench, kind, torch.float32).fuse(), batch(bench.device)
                grads = []
                for _ in range(2):
                    grads.append({name: grad.clone() for name, grad in step(model, ids)[1].items()})
                    model.zero_grad()
                equal = all(torch.equal(grad, grads[1][name]) for name, grad in grads[0].items())
                bench.check(f"{kind}: gradients", equal, True)
    finally:
        torch.use_deterministic_algorithms(False)


def capture_beside_queries(bench: Bench) -> None:
    """Whether a thread that queries an event breaks the capture of a CUDA graph, by the mode of the capture."""
    if bench.dry:
        bench.skip("torch", "there are no CUDA graphs on a CPU")
        return
    for mode in ("global", "thread_local", "relaxed"):
        with bench.attempt("torch", mode):
            event, over, errors = torch.cuda.Event(), threading.Event(), []
            event.record()

            def query(event: Any = event, over: Any = over, errors: Any = errors) -> None:
                while not over.is_set():
                    try:
                        event.query()
                    except RuntimeError as error:
                        errors.append(str(error))
                        return

            thread = threading.Thread(target=query)
            x = torch.ones(1024, device=bench.device)
            side = torch.cuda.Stream()
            with torch.cuda.stream(side):
                (x * 2).sum()
            torch.cuda.synchronize()
            graph, broken = torch.cuda.CUDAGraph(), 0
            thread.start()
            try:
                with torch.cuda.graph(graph, capture_error_mode=mode):
                    for _ in range(200):
                        x = x * 1.0001
            except RuntimeError as error:
                broken = 1
                errors.append(str(error))
            finally:
                over.set()
                thread.join()
            bench.row(
                "torch", f"capture in mode {mode} beside queries: broken", broken, "", error="; ".join(errors)[:300]
            )


def queries_beside_a_synchronisation(bench: Bench) -> None:
    """The longest call of a thread that queries an event, while the main thread waits for the device."""
    if bench.dry:
        bench.skip("torch", "there are no events on a CPU")
        return
    with bench.attempt("torch"):
        x, event, over, longest = (
            torch.randn(8192, 8192, device=bench.device),
            torch.cuda.Event(),
            threading.Event(),
            [0.0],
        )
        torch.cuda.synchronize()
        for _ in range(50):
            x = x @ x / 8192
        event.record()

        def query() -> None:
            while not over.is_set():
                began = time.perf_counter()
                event.query()
                longest[0] = max(longest[0], time.perf_counter() - began)

        thread = threading.Thread(target=query)
        thread.start()
        began = time.perf_counter()
        torch.cuda.synchronize()
        waited = time.perf_counter() - began
        over.set()
        thread.join()
        bench.row("torch", "a synchronisation", 1e3 * waited, "ms")
        bench.row("torch", "the longest query beside it", 1e3 * longest[0], "ms")


def progress(bench: Bench) -> None:
    """The counter of collectives: a thread that reads it breaks no capture, and each replay of a graph advances it."""
    from oslo_models.distributed.device_collectives import Progress

    counter, x = Progress(bench.device), torch.ones(1024, device=bench.device)
    for _ in range(3):
        counter.write()
    bench.timer.synchronize()
    bench.check("marks of a stream", counter.completed(), 3)
    if bench.dry:
        bench.skip("oslo_models", "there are no CUDA graphs on a CPU")
        return
    over, graph = threading.Event(), torch.cuda.CUDAGraph()

    def read() -> None:
        while not over.is_set():
            counter.completed()

    thread = threading.Thread(target=read)
    thread.start()
    try:
        with torch.cuda.graph(graph):  # in global mode, which queries of events in other threads break
            for _ in range(200):
                x = x * 1.0001
            counter.write()
    finally:
        over.set()
        thread.join()
    for _ in range(5):
        graph.replay()
    torch.cuda.synchronize()
    bench.check("marks of replays", counter.completed(), 8)
    bench.ready()
    bench.row("oslo_models", "a mark, host", 1e6 * bench.timer.host(counter.write), "us")
