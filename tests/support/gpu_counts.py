"""Counts what a GPU would have to do: waits of the host, copies and launches. Run as a script, on a CPU.

Prints a table for a decoded token of the running batch, for an eager sum over tensor-parallel ranks, and for a linear
layer in float8. Waits are calls of methods that read a tensor, copies are tensors of host values, launches are
operations that compute. Stand-ins show neither the time of any of these, nor the launches inside one operation.
An optional argument is another checkout, such as one of an earlier commit, whose code is counted.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

ROOT = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[2])
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import Tensor  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from transformers import LlamaConfig  # noqa: E402

import oslo_models  # noqa: E402
from oslo_kernels import float8  # noqa: E402
from oslo_models.deploy.messages import Request  # noqa: E402
from oslo_models.deploy.running_batch import row as rows_of_batch  # noqa: E402
from oslo_models.deploy.running_batch import step_runner  # noqa: E402
from oslo_models.deploy.running_batch.limits import BatchLimits  # noqa: E402
from oslo_models.deploy.running_batch.preparation import prepare  # noqa: E402
from oslo_models.deploy.running_batch.step import Step, WholePrompt  # noqa: E402
from oslo_models.distributed import collectives  # noqa: E402
from oslo_models.distributed.mesh import Axis  # noqa: E402
from oslo_models.fusion import float8 as layers  # noqa: E402

READS = ("tolist", "item", "cpu", "nonzero", "__bool__", "__int__", "__float__", "__index__")
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9},
    "sampled, repetition penalty": {"do_sample": True, "temperature": 0.8, "top_k": 20, "repetition_penalty": 1.3},
}


class Launches(TorchDispatchMode):
    """Counts computing operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, (Tensor, tuple)) and not func.is_view and "empty" not in func.__name__:
            self.names[func.overloadpacket.__name__] += 1
        return out


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count waits, copies and launches within the block."""
    counts: Counter[str] = Counter()

    def counting(call: Callable[..., Any], what: str) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            counts[what] += 1
            return call(*args, **kwargs)

        return run

    launches = Launches()
    with ExitStack() as stack:
        for name in READS:
            stack.enter_context(mock.patch.object(Tensor, name, counting(getattr(Tensor, name), "waits")))
        stack.enter_context(mock.patch.object(torch, "tensor", counting(torch.tensor, "copies")))
        stack.enter_context(launches)
        yield counts
    counts["launches"] = launches.names.total()


def running_batch() -> None:
    config = LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                         num_key_value_heads=2, vocab_size=101, bos_token_id=None, eos_token_id=None,
                         pad_token_id=None)  # fmt: skip
    model = oslo_models.LlamaForCausalLM.from_config_with_parallel(config, seed=0).eval()
    has_graphs = hasattr(step_runner, "capture_of")
    patch = mock.patch.object(step_runner, "capture_of", lambda model: (lambda compute: compute, ""), create=True)
    print(
        "| rows | way | waits | copies | launches of the step | launches to choose tokens |\n|---|---|---|---|---|---|"
    )
    for count in (1, 8, 64):
        for name, way in WAYS.items():
            with patch, torch.no_grad():
                runner = step_runner.StepRunner(model, BatchLimits(count, 64, 4096))
                given = {"max_new_tokens": 30, "pad_token_id": 0, **way}
                made = [
                    prepare(
                        model,
                        Request(number, "generate", (), {"input_ids": torch.tensor([[5, 6, 7 + number]]), **given}, 0),
                    ).rows[0]
                    for number in range(count)
                ]
                whole = [WholePrompt(row.number, len(row.prompt), -1) for row in made]
                logits = runner.run(Step(0, whole=whole, chunk=[token for row in made for token in row.prompt]))
                choose = chooser()
                for _ in range(3):
                    choose(made, logits)
                    with counted() as step:
                        logits = runner.run(Step(0, tokens=[row.new[-1] for row in made]))
                with counted() as choice:
                    choose(made, logits)
            launches = "1 graph" if has_graphs else str(step["launches"])
            found = (step["waits"] + choice["waits"], step["copies"] + choice["copies"], launches, choice["launches"])
            print("|", " | ".join(map(str, (count, name, *found))), "|")


def chooser() -> Callable[[Any, Any], None]:
    """Return a function that chooses a token for each row, as on a GPU."""
    if hasattr(rows_of_batch, "plain_tokens"):

        def by_rows(rows: Any, logits: Any) -> None:
            plain = rows_of_batch.plain_tokens(rows, logits)
            for index, row in enumerate(rows):
                row.take_token(plain[index]) if row.is_plain else row.take(logits[index])

        return by_rows
    from oslo_models.deploy.running_batch import sampling

    sampling.TOGETHER_ON = ("cpu",)  # type: ignore[assignment]
    more = ()
    try:
        from oslo_models.deploy.running_batch.penalties import TokenTable

        more = (TokenTable(),)
    except ImportError:
        pass

    def together(rows: Any, logits: Any) -> None:
        for row, token in zip(rows, sampling.choose_tokens(rows, logits, *more), strict=True):
            row.take_token(token)

    return together


class OnAGPU(Tensor):
    """Tensor that claims to be on a GPU."""

    is_cpu, is_cuda = False, True  # type: ignore[assignment]


def eager_sum() -> None:
    calls: list[dict[str, Any]] = []
    watched: list[str] = []
    work = SimpleNamespace(wait=lambda: None, is_completed=lambda: False)

    def all_reduce(x: Tensor, **kwargs: Any) -> Any:
        calls.append(kwargs)
        return work if kwargs.get("async_op") else None

    def queue(axis: Any, what: str, device: Any, call: Any) -> Any:
        watched.append("one increment and one copy of 8 bytes to pinned memory, on the stream")
        return call()

    flights = SimpleNamespace(queue=queue, add=lambda *_: watched.append("a query of the work each 0.25 s"))
    watchdog = SimpleNamespace(in_flight=flights, error=None, waiting_for=None)
    axis: Any = SimpleNamespace(size=2, ranks=(0, 1), name="tp", group="tp", threads=None, symmetric_memory=None,
                                watchdog=watchdog, timeout=1.0)  # fmt: skip
    capturing = mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: False, create=True)
    with mock.patch.object(dist, "all_reduce", all_reduce), capturing, counted() as counts:
        collectives.all_reduce(axis, torch.ones(3).as_subclass(OnAGPU))
    waits = 2 * sum(bool(each.get("async_op")) for each in calls)
    print(f"\neager sum: {len(calls)} collective, {waits} waits of streams for events, {counts['waits']} waits of the "
          f"host, watched by {watched}")  # fmt: skip


def launches_in_float8(rowwise: bool) -> int:
    how, saved, kernels = layers.Float8(rowwise, Axis.alone("tp"), False, False), list[Any](), list[Any]()
    with ExitStack() as stack:
        stack.enter_context(FakeTensorMode())
        if hasattr(float8, "launch"):
            from oslo_kernels import language

            stack.enter_context(mock.patch.object(float8, "launch", lambda *args, **_: kernels.append(args[0])))
            stack.enter_context(mock.patch.object(float8, "triton", language))
            stack.enter_context(mock.patch.object(float8, "is_plain", lambda x: True))
        x, weight = (torch.empty(rows, 128, device="cuda", dtype=torch.bfloat16) for rows in (64, 256))
        ctx: Any = SimpleNamespace(needs_input_grad=(True, True, False), save_for_backward=lambda *t: saved.extend(t))
        launches = stack.enter_context(Launches())
        y = layers._Product._forward(ctx, x, weight, how)
        ctx.saved_tensors = saved
        layers._Product._backward(ctx, torch.empty_like(y))
    return launches.names.total() + len(kernels)


def float8_layer() -> None:
    print("\n| float8 | launches, forward and backward |\n|---|---|")
    for rowwise in (False, True):
        print(f"| {'rowwise' if rowwise else 'tensorwise'} | {launches_in_float8(rowwise)} |")


if __name__ == "__main__":
    running_batch()
    eager_sum()
    float8_layer()
