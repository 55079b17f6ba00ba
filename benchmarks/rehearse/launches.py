"""Host time of a Triton launch with 40 arguments. The rotary kernels have about as many."""

from __future__ import annotations

import torch

from benchmarks.rehearse.bench import Bench
from oslo_kernels.language import jit, launch, tl

COUNT = 38
"""Integers beside the pointer and the block."""


@jit
def store_kernel(
    out_ptr, a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, a10, a11, a12, a13, a14, a15, a16, a17, a18, a19, a20, a21, a22,
    a23, a24, a25, a26, a27, a28, a29, a30, a31, a32, a33, a34, a35, a36, a37, BLOCK: tl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """Store the sum of some arguments: a launch that takes no time of the device."""
    offsets = tl.arange(0, BLOCK)
    tl.store(out_ptr + offsets, a0 + a1 + a36 + a37 + offsets)


def many_arguments(bench: Bench) -> None:
    """Microseconds of the host for this launch, and for the cheapest operation of torch."""
    if bench.dry:
        bench.skip("oslo_models", "a CPU launches no kernels of Triton")
        return
    out = torch.zeros(32, dtype=torch.int32, device=bench.device)
    numbers = range(2, COUNT + 2)

    def run() -> None:
        launch(store_kernel, (1,), out, *numbers, BLOCK=32)

    with bench.attempt("oslo_models"):
        run()
        bench.check("sum of arguments", out.tolist(), [2 + 3 + 38 + 39 + each for each in range(32)])
        bench.ready()
        bench.row("oslo_models", "launch with 40 arguments, host", 1e6 * bench.timer.host(run), "us")
        bench.row("torch", "zero_, host", 1e6 * bench.timer.host(out.zero_), "us")
