"""Kernels with a mistake: the cases of `kernel_cases` find each.

Run as a script, under ``TRITON_INTERPRET=1``; it fails and names the mistakes that no case has found. Each is a line of
a kernel's source, what takes its place, and the operations that have to differ.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch

import oslo_kernels
from oslo_kernels import full_norm_rotary, norm, normed_rotary

from support import kernel_cases

Mutant = tuple[str, str, str, str]
MUTANTS: list[Mutant] = [
    ("gated", "value = g * tl.sigmoid(g) if", "value = tl.sigmoid(g) if", "gated"),
    ("gated", "slope = s * (1.0 + g * (1.0 - s))", "slope = s * (1.0 + g * s)", "gated backward"),
    ("gated", "up_ptr + row * up_stride + n", "up_ptr + row * gate_stride + n", "gated"),
    ("gated", "strides = (dy.stride(0), g.stride(0), u.stride(0), packed.shape[-1])",
     "strides = (dy.stride(0), g.stride(0), u.stride(0), g.shape[1])", "packed backward"),
    ("gated", "gelu_slope(g, KIND == 2)", "gelu_slope(g, False)", "gated backward"),
    ("long_norm", ".to(tl.float32) + offset", ".to(tl.float32)", "long norm"),
    ("norm", "    if AFTER:\n", "    if RESIDUAL:\n", "norm and sum"),
    ("long_norm", "        if AFTER:\n", "        if BIAS:\n", "norm and sum"),
    ("sums", "x + y + z, mask", "x + z + z, mask", "sum of three"),
    ("sums", "y.contiguous()", "y", "sum of three"),
    ("long_norm", "h = tl.where(n < N, h - mean, 0.0)", "h = h - mean", "long norm"),
    ("long_norm", "- mean_total) * scale", ") * scale", "long norm backward"),
    ("long_norm", "tl.cast(STRIPS + strip, tl.int64)", "tl.cast(strip, tl.int64)", "long norm backward"),
    ("rotary", "tl.store(y, x1 * c1 + x2 * s2, mask=inside)", "tl.store(y, x1 * c1 + x2 * s1, mask=inside)", "rotary"),
    ("rotary", "k_heads, program - q_programs,", "k_heads, program,", "rotary"),
    ("rotary", "table_batch = cos.stride(0) if len(cos) > 1 else 0", "table_batch = cos.stride(0)", "rotary"),
    ("rotary", "tl.store(y_ptr + head * y_head + 2 * HALF + r, rest, mask=there)", "pass", "rotary"),
    ("norm_and_turn", "/ (2 * HALF) + eps)", "/ (2 * BLOCK) + eps)", "normed rotary"),
    ("norm_and_turn", "statistics + k_first, table,", "statistics, table,", "normed rotary"),
    ("norm_and_turn", "(wdy2 - n2 * mean) * scale", "(wdy2 + n2 * mean) * scale", "normed rotary backward"),
    ("norm_and_turn", "total2 += tl.where(inside, dy2 * n2, 0.0)", "total2 += tl.where(inside, dy1 * n2, 0.0)",
     "normed rotary backward"),
    ("norm_and_turn", "statistics + k_first, table,", "statistics, table,", "full norm rotary"),
    ("norm_and_turn", "program - q_programs, k_count, eps", "program - q_programs, q_count, eps", "full norm rotary"),
    ("norm_and_turn", "q_heads * (2 * HALF) if FULL", "0 if FULL", "full norm rotary backward"),
    ("norm_and_turn", "products_ptr + 1,", "products_ptr,", "full norm rotary backward"),
    ("full_norm_rotary", "y_ptr + head * y_head + d", "y_ptr + head * x_head + d", "row products"),
    ("cross_entropy", "grad *= scale * (cap - y * y / cap)", "grad *= cap - y * y / cap", "gradient of logits"),
    ("cross_entropy", "        grad *= scale\n", "        pass\n", "gradient of logits"),
    ("cross_entropy", "tl.where(counts & (offsets < columns), ", "tl.where(offsets < columns, ", "gradient of logits"),
    ("cross_entropy", "tl.where(counts & (offsets < columns), ", "tl.where(counts, ", "gradient of logits"),
    ("cross_entropy", "tl.where(counts, loss, 0.0)", "loss", "gradient of logits"),
    ("cross_entropy", "here = (target != ignored) & (column >= 0)", "here = (column >= 0)", "statistics"),
    ("cross_entropy", "tl.reshape(tl.where(inside, x, 0.0),", "tl.reshape(x,", "statistics"),
    ("cross_entropy", "tl.max(grouped, 1)", "tl.min(grouped, 1)", "statistics"),
    ("cross_entropy", "finite = tl.where(higher == float(\"-inf\"), 0.0, higher)", "finite = higher", "statistics"),
    ("cross_entropy", "tl.where(here, _logit(picked, scale, cap, CAPPED), 0.0)", "picked", "statistics"),
]  # fmt: skip


@contextlib.contextmanager
def loaded(mutant: Mutant, folder: Path) -> Iterator[None]:
    """Replace the module by a copy with the mistake, wherever cases look it up."""
    name, right, wrong, _ = mutant
    source = Path(oslo_kernels.__path__[0], f"{name}.py").read_text()
    if right not in source:
        raise ValueError(f"{name}.py has no {right!r}: write the mutant anew")
    path = folder / f"mutant_{name}.py"
    path.write_text(source.replace(right, wrong))
    spec: Any = importlib.util.spec_from_file_location(path.stem, path)
    module: ModuleType = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    with contextlib.ExitStack() as stack:
        for user in (kernel_cases, norm, normed_rotary, full_norm_rotary):
            if hasattr(user, name):
                stack.enter_context(mock.patch.object(user, name, module))
        yield


def is_found(operation: str) -> bool:
    """Whether some case of the operation differs in float32 or bfloat16."""
    for dtype in (torch.float32, torch.bfloat16):
        for kind in kernel_cases.KINDS:
            for name, fused, plain, args in kind(dtype):
                if name == operation and kernel_cases.differ(fused(*args), plain(*args), dtype):
                    return True
    return False


def survivors() -> list[str]:
    found = []
    for number, mutant in enumerate(MUTANTS):
        with tempfile.TemporaryDirectory() as folder, loaded(mutant, Path(folder)):
            torch.manual_seed(number)
            if not is_found(mutant[3]):
                found.append(f"{mutant[0]}: {mutant[2]!r} instead of {mutant[1]!r}")
    return found


if __name__ == "__main__":
    kernel_cases.convert_loop_bounds()
    torch.set_num_threads(1)
    sys.exit("\n".join(survivors()) or 0)
