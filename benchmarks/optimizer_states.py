"""Measure optimizers with small states on two tensor-parallel ranks, and write ``benchmarks/optimizer_states.csv``.

Each optimizer steps in new processes on the matrices of a Llama with drawn gradients. A row has the bytes of its states
on a rank, and the growth of the rank's anonymous memory from before the optimizer is constructed.
bitsandbytes and torchao have to be importable: ``PYTHONPATH=.venv/quantization``. Prints the table of
docs/guides/consumer-gpus.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.instruments import PeakMemory
from benchmarks.launch import COMMON
from benchmarks.records import stamp, write_rows
from oslo_models.starting import python_module

RESULTS = Path(__file__).with_suffix(".csv")
FIGURES = ("MB of states", "MB of growth")
COLUMNS = ("date", "commit", "machine", "versions", "optimizer", *FIGURES)
SIZES: dict[str, Any] = {
    **{"vocab_size": 4096, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4},
    **{"num_attention_heads": 8, "num_key_value_heads": 4, "tie_word_embeddings": False},
}
OPTIMIZERS = {
    "`adamw_torch_fused`, float32": "float32",
    "`adamw_torch_fused`, `dtype: bfloat16`": "bfloat16",
    "`paged_adamw_32bit`, float32": "paged",
    "`matrix_optimizer(bitsandbytes.optim.AdamW8bit)`": "bitsandbytes",
    "`matrix_optimizer(torchao.optim.AdamW8bit)`": "torchao",
}
STEPS = 2


def make(kind: str, model: Any) -> Any:
    """Return the optimizer of the model's matrices."""
    import torch

    matrices = [param for param in model.parameters() if param.dim() == 2]
    if kind == "bitsandbytes":
        from bitsandbytes.optim import AdamW8bit

        return model.matrix_optimizer(AdamW8bit, matrices, lr=1e-4)
    if kind == "torchao":
        from torchao.optim import AdamW8bit

        return model.matrix_optimizer(AdamW8bit, matrices, lr=1e-4)
    if kind == "paged":
        from bitsandbytes.optim import PagedAdamW32bit

        return PagedAdamW32bit(matrices, lr=1e-4)
    return torch.optim.AdamW(matrices, lr=1e-4, fused=True)


def measure(kind: str, out: Path) -> None:
    """Run on every rank: write the figures."""
    import torch
    from transformers import LlamaConfig

    from oslo_models import LlamaForCausalLM

    torch.set_num_threads(1)
    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
    model = LlamaForCausalLM.from_config_with_parallel(LlamaConfig(**SIZES), 2, seed=0, dtype=dtype)
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    memory = PeakMemory()
    with memory.watched():
        optimizer = make(kind, model)
        for _ in range(STEPS):
            optimizer.step()
    figures = bytes_of(optimizer.state.values()) / 1e6, memory.growth["peak anonymous memory"]
    (out / f"{model.mesh.world.rank}.json").write_text(json.dumps(figures))


def bytes_of(value: Any) -> int:
    """Return the bytes of tensors in states, without step counters. States of torchao have several tensors."""
    if hasattr(value, "__tensor_flatten__"):
        return bytes_of([getattr(value, name) for name in value.__tensor_flatten__()[0]])
    if isinstance(value, dict):
        return bytes_of(value.values())
    if hasattr(value, "numel"):
        return int(value.numel() * value.element_size()) if value.numel() > 1 else 0
    return sum(map(bytes_of, value)) if isinstance(value, Iterable) and not isinstance(value, str) else 0


def run(kind: str) -> tuple[float, ...]:
    """Return the figures of the fuller rank."""
    with tempfile.TemporaryDirectory() as folder:
        start = python_module(
            *("torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2", "--no-python"),
            *python_module("benchmarks.optimizer_states", "--measure", kind, folder),
        )
        environment = {**os.environ, **COMMON, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
        subprocess.run(start, env=environment, check=True)
        ranks = [json.loads(file.read_text()) for file in Path(folder).glob("*.json")]
        return tuple(map(max, *ranks))


def table(rows: list[dict[str, str]]) -> list[str]:
    """Return the lines of a Markdown table."""
    lines = [f"| optimizer | {' | '.join(FIGURES)} |", f"|---|{'---:|' * len(FIGURES)}"]
    return lines + [f"| {row['optimizer']} | {' | '.join(row[figure] for figure in FIGURES)} |" for row in rows]


def main() -> int:
    """Run every optimizer."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.optimizer_states", description=__doc__)
    parser.add_argument("--measure", nargs=2, metavar=("KIND", "OUT"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        measure(args.measure[0], Path(args.measure[1]))
        return 0
    rows = []
    for name, kind in OPTIMIZERS.items():
        states, growth = run(kind)
        figures = f"{states:.1f}", f"{growth:.0f}"
        rows.append({**stamp(), "optimizer": name, **dict(zip(FIGURES, figures, strict=True))})
        print(*rows[-1].values(), sep="\t", flush=True)
    write_rows(RESULTS, COLUMNS, rows)
    print("\n".join(table(rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
