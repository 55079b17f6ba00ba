"""Compiles every kernel for GPUs that need not be present, and checks the generated code.

Run as a script (Triton's interpreter must be off): prints a line per kernel, and fails if one uses the stack, takes too
many registers, or accesses 16-bit types in less than 128 bits at a time. Arguments are architectures, such as ``100``;
``--table`` prints the most registers of each kernel in a table.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from oslo_kernels import (
    cross_entropy,
    dropout,
    float8,
    full_norm_rotary,
    gated,
    gelu,
    long_norm,
    ngrams,
    norm,
    norm_and_turn,
    rotary,
    softmax,
    sums,
)

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
REGISTERS = 128
"""Limit per thread, out of 255: it leaves room for four blocks of four warps on a multiprocessor."""
FLOATS = {"eps", "offset", "scale", "p", "hit", "rest", "cap", "q_count", "k_count", "limit"}
FLOAT32 = {"statistics_ptr", "products_ptr", "partial_ptr", "loss_ptr", "scale_ptr"}

EXPONENTIALS = {False: 24, True: 41}
"""Limits of the statistics of cross entropy per thread, which has 16 logits of a block in groups of four: one for each
logit, one for each group in the loop and after it. A soft cap takes one more for each logit, and one for the target."""

SOFTMAX = {keys: {**softmax.blocks(keys)} for keys in (1024, softmax.LONGEST, 100000)}
for made in SOFTMAX.values():
    del made["num_warps"]

SUM_AND_NORM = {"RESIDUAL": True, "BIAS": True, "CENTERED": True, "AFTER": False}
RMS = {"RESIDUAL": False, "BIAS": False, "CENTERED": False, "AFTER": False}

# kernel, constants, number of warps, expected numbers of 128-bit loads and stores
BUILDS: list[tuple[Any, dict[str, Any], int, int, int]] = [
    (gelu.gelu_kernel, {"BIAS": True, "TANH": False, "BLOCK": 1024}, 4, 2, 1),
    (gelu.gelu_kernel, {"BIAS": True, "TANH": True, "BLOCK": 1024}, 4, 2, 1),
    (gelu.gelu_backward_kernel, {"BIAS": True, "TANH": False, "BLOCK": 1024}, 4, 3, 1),
    (gelu.gelu_backward_kernel, {"BIAS": False, "TANH": True, "BLOCK": 1024}, 4, 2, 1),
    *((gated.gated_kernel, {"KIND": kind, "BLOCK": 1024}, 4, 2, 1) for kind in range(3)),
    *((gated.gated_backward_kernel, {"KIND": kind, "BLOCK": 1024}, 4, 3, 2) for kind in range(3)),
    (dropout.dropout_kernel, {"BIAS": True, "RESIDUAL": True, "QUARTER": 1024}, 4, 12, 4),
    *((norm.norm_kernel, {**SUM_AND_NORM, "BLOCK": block}, norm.warps(block), 4, 2) for block in (1024, norm.LONGEST)),
    (norm.norm_kernel, {**RMS, "BLOCK": 4096}, 4, 2, 1),
    *(
        (norm.norm_kernel, {**RMS, "AFTER": True, "BLOCK": block}, norm.warps(block), 3, 1)
        for block in (1024, norm.LONGEST)
    ),
    (sums.sum_kernel, {"BLOCK": sums.BLOCK}, 4, 3, 1),
    *(
        (
            norm.norm_backward_kernel,
            {"GRAD_SUM": True, "BIAS": True, "CENTERED": True, "BLOCK": block},
            norm.warps(block, True),
            4,
            1,
        )
        for block in (1024, norm.LONGEST)
    ),
    (long_norm.norm_kernel, {**SUM_AND_NORM, "BLOCK": long_norm.PIECE}, 8, 8, 2),
    (long_norm.norm_kernel, {**RMS, "BLOCK": long_norm.PIECE}, 8, 3, 1),
    (long_norm.norm_kernel, {**RMS, "AFTER": True, "BLOCK": long_norm.PIECE}, 8, 4, 1),
    (long_norm.row_backward_kernel, {"GRAD_SUM": True, "CENTERED": True, "BLOCK": long_norm.PIECE}, 8, 7, 1),
    (long_norm.weight_backward_kernel, {"BIAS": True, "BLOCK": long_norm.COLUMNS}, 1, 2, 0),
    # queries and keys have separate code
    *(
        (
            rotary.rotary_kernel,
            {"HALF": 64, "REST": rest, "BACKWARD": back, "HEADS": 16, "BLOCK": 64, "REST_BLOCK": max(1, rest)},
            4,
            14 if rest else 12,
            6 if rest else 4,
        )
        for rest, back in ((0, False), (0, True), (64, False))
    ),
    *(
        (kernel, {"HALF": half, "HEADS": elements // half, "BLOCK": half, "FULL": full}, 4, loads, stores)
        for kernel, elements, stores in (
            (norm_and_turn.normed_rotary_kernel, 2048, 8),
            (norm_and_turn.normed_rotary_backward_kernel, 1024, 4),
        )
        for half, loads in ((64, 20), (128, 8))
        for full in (False, True)
    ),
    *(
        (
            full_norm_rotary.row_products_kernel,
            {"SQUARE": square, "WIDTH": 128, "HEADS": 32, "BLOCK": 128},
            4,
            8 if square else 16,
            0,
        )
        for square in (False, True)
    ),
    *(
        (
            softmax.softmax_kernel,
            {"MASK": True, "CAUSAL": True, "SINGLE": True, "BLOCK": block, "m_key": 1},
            warps,
            2,
            1,
        )
        for block, warps in ((1024, 2), (8192, 8))
    ),
    (
        softmax.softmax_kernel,
        {"MASK": True, "CAUSAL": True, "SINGLE": False, "BLOCK": softmax.PIECE, "m_key": 1},
        8,
        4,
        1,
    ),
    (softmax.softmax_backward_kernel, {"SINGLE": True, "BLOCK": 1024}, 2, 2, 1),
    (softmax.softmax_backward_kernel, {"SINGLE": False, "BLOCK": softmax.PIECE}, 8, 4, 1),
    *(
        (cross_entropy.statistics_kernel, {"CAPPED": capped, "BLOCK": 4096, "GROUP": cross_entropy.GROUP}, 8, 2, 0)
        for capped in (False, True)
    ),
    *((cross_entropy.gradient_kernel, {"CAPPED": capped, "BLOCK": 4096}, 4, 4, 4) for capped in (False, True)),
    (ngrams.block_repeats_kernel, {"SIZE": 3, "BLOCK": 1024}, 4, 0, 0),
    *(
        (
            float8.cast_kernel,
            {"OF_ROWS": rows, "OF_COLUMNS": columns, "BLOCK_M": float8.BLOCK_M, "BLOCK_N": float8.BLOCK_N},
            4,
            4,
            2,
        )
        for rows, columns in ((True, False), (False, True), (False, False))
    ),
]


def signature(name: str, half: str) -> str:
    """The type of a parameter, by its name."""
    if name in ("ids_ptr", "source_ptr", "target_ptr"):
        return "*i64"
    if name in FLOAT32:
        return "*fp32"
    if name.endswith("_ptr"):
        return f"*{half}"
    return "fp32" if name in FLOATS else "i64" if name == "seed" else "i32"


def build(kernel: Any, constants: dict[str, Any], warps: int, arch: int, half: str) -> tuple[int, int, int, int, int]:
    """Compile, and return registers, bytes of stack, 128-bit loads and stores, and exponentials."""
    names = kernel.arg_names
    types = {name: "constexpr" if name in constants else signature(name, half) for name in names}
    if kernel is cross_entropy.statistics_kernel:
        types["out_ptr"] = "*fp32"
    if kernel is float8.cast_kernel:
        types["out_ptr"] = "*fp8e4nv"
    pointers = [name for name in names if types[name].startswith("*")]
    # Triton finds divisible sizes at run time; logits are padded to a divisible width for every vocabulary
    even = [
        *pointers,
        *(name for name in names if types[name] == "i32" and name not in ("columns", "first", "ignored")),
    ]
    source = ASTSource(
        fn=kernel,
        signature=types,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in even},
    )
    made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": warps})
    # Triton 3.6 corrupts float8 tensors there
    assert not re.search(r"convert_layout.*xf8", made.asm["ttgir"]), f"{kernel.__name__} converts a layout of float8"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        command = [str(TOOLS / "cuobjdump"), "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = (int(re.search(rf"{what}:(\d+)", usage).group(1)) for what in ("REG", "STACK"))
    vectors = (len(re.findall(rf"{what}\.global[^;]*\.v4\.b32", made.asm["ptx"])) for what in ("ld", "st"))
    return registers, stack, *vectors, len(re.findall(r"\bex2\.", made.asm["ptx"]))


def main(arguments: Sequence[str]) -> int:
    failed = 0
    archs = [int(each) for each in arguments if each.isdecimal()] or [80, 90]
    most: dict[str, dict[int, int]] = {}
    for kernel, constants, warps, loads, stores in BUILDS:
        for arch in archs:
            if kernel is float8.cast_kernel and arch < 89:  # float8 begins with Ada
                continue
            registers, stack, own_loads, own_stores, powers = build(kernel, constants, warps, arch, "bf16")
            right = registers <= REGISTERS and stack == 0 and own_loads >= loads and own_stores >= stores
            right = right and (
                kernel is not cross_entropy.statistics_kernel or powers <= EXPONENTIALS[constants["CAPPED"]]
            )
            failed += not right
            name = f"{kernel.__module__.removeprefix('oslo_kernels.')}.{kernel.__name__}"
            found = most.setdefault(name, {})
            found[arch] = max(found.get(arch, 0), registers)
            if right and "--table" in arguments:
                continue
            print(
                f"{'' if right else 'FAILED '}{kernel.__name__} sm_{arch} {constants}: {registers} registers, stack "
                f"{stack}, 128-bit loads {own_loads} (at least {loads}), stores {own_stores} (at least {stores})"
            )
    if "--table" in arguments:
        print("| kernel |", *(f"sm_{arch} |" for arch in archs))
        print("|---|", *("---|" for _ in archs))
        for name, by_arch in most.items():
            print(f"| `{name}` |", *(f"{by_arch.get(arch, '-')} |" for arch in archs))
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
