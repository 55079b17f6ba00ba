"""Compare the predicted with the measured peak memory of each rank, and write ``benchmarks/plan_accuracy.csv``.

A rank measures the growth of its anonymous pages (RssAnon, sampled every 2 ms) from before the model is constructed to
the end of two training steps with AdamW. glibc returns blocks from 64 KB at once (``MALLOC_MMAP_THRESHOLD_``), so that
pages follow tensors. Models are small, but tensors dominate: a process has run a tiny model before.
"""

from __future__ import annotations

import argparse
import csv
import ctypes
import gc
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.instruments import PeakMemory
from benchmarks.launch import COMMON
from oslo_models.starting import python_module

RESULTS = Path(__file__).with_suffix(".csv")
COLUMNS = ("model", "task", "tp", "pp", "batch", "length", "rank", "predicted MB", "measured MB", "ratio")
LLAMA = {
    **{"vocab_size": 4096, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4},
    **{"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 512},
}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "GPT-2": ("GPT2LMHeadModel", "full", {"vocab_size": 4096, "n_embd": 256, "n_layer": 4, "n_head": 8}),
    "Llama": ("LlamaForCausalLM", "full", LLAMA),
    "Llama, LoRA": ("LlamaForCausalLM", "lora", LLAMA),
    "Qwen3-MoE": (
        "Qwen3MoeForCausalLM",
        "full",
        {
            **{"vocab_size": 4096, "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8},
            **{"num_key_value_heads": 4, "head_dim": 32, "moe_intermediate_size": 256, "num_experts": 8},
            **{"num_experts_per_tok": 2, "max_position_embeddings": 512},
        },
    ),
    "T5": (
        "T5ForConditionalGeneration",
        "full",
        {
            **{"vocab_size": 4096, "d_model": 256, "d_kv": 32, "d_ff": 512, "num_layers": 3, "num_heads": 8},
            **{"decoder_start_token_id": 0, "pad_token_id": 0},
        },
    ),
}
BATCHES = ((4, 256), (8, 64))
LEAST = 50.0
"""MB of a rank from which a prediction counts: below, a few MB of the allocator and the threads weigh too much."""
SIZES = ((1, 1), (2, 1), (1, 2))


def cases(only: str) -> list[tuple[str, int, int]]:
    return [(name, *each) for name in MODELS if only in name for each in BATCHES]


def config_of(name: str) -> Any:
    import transformers

    cls, _, options = MODELS[name]
    return getattr(transformers, cls).config_class(**options, architectures=[cls])


def predicted(name: str, tp: int, pp: int, batch: int, length: int) -> dict[tuple[int, int], float]:
    """Return the MB of each rank, by its stage and tensor-parallel rank."""
    from oslo_models import estimate

    found = estimate(config_of(name), MODELS[name][1], tp, pp, batch, length, device_type="cpu", dtype="float32")
    return {(rank.stage, tp_rank): rank.total / 1e6 for rank in found.ranks for tp_rank in rank.tp_ranks}


def measure(tp: int, pp: int, only: str, out: Path) -> None:
    """Run on every rank: write the MB of each case."""
    import torch

    torch.set_num_threads(1)
    rows = {}
    _step_twice(next(iter(cases(only)))[0], tp, pp, 2, 16, tiny=True)
    for name, batch, length in cases(only):
        _step_twice(name, tp, pp, 2, 16, tiny=True)
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # pages that an earlier case has freed would not count as growth
        memory = PeakMemory()
        with memory.watched():
            rank = _step_twice(name, tp, pp, batch, length)
        print(name, batch, length, memory.growth, file=sys.stderr, flush=True)
        rows[f"{name}/{batch}/{length}"] = memory.growth["peak anonymous memory"]
    out.joinpath(f"{rank[0]}-{rank[1]}.json").write_text(json.dumps(rows))


def _step_twice(name: str, tp: int, pp: int, batch: int, length: int, tiny: bool = False) -> tuple[int, int]:
    import torch

    from oslo_models import registry

    cls: Any = registry.find(MODELS[name][0])
    config = config_of(name)
    if tiny:
        for key in ("num_hidden_layers", "num_layers", "n_layer", "num_decoder_layers"):
            if hasattr(config, key):
                setattr(config, key, 2)
        config.vocab_size = 64
    model = cls.from_config_with_parallel(config, tp, pp, seed=0, check_inputs=False).train()
    own = model.mesh.pp.rank, model.mesh.tp.rank
    base = model
    if MODELS[name][1] == "lora":
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-4)
    ids = torch.randint(1, 60, (batch, length))
    for _ in range(2):
        for output in (
            model(input_ids=ids, labels=ids) if base.stage is not None else [model(input_ids=ids, labels=ids)]
        ):
            output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return own


def main() -> int:
    """Measure and predict every case. Return 1 if a prediction is wrong by more than 10 %."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plan_accuracy", description=__doc__)
    parser.add_argument("--only", default="", help="models whose names contain this text; writes nothing")
    parser.add_argument("--measure", nargs=3, metavar=("TP", "PP", "OUT"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        measure(int(args.measure[0]), int(args.measure[1]), args.only, Path(args.measure[2]))
        return 0
    rows = []
    for tp, pp in SIZES:
        with tempfile.TemporaryDirectory() as folder:
            own = ["--measure", str(tp), str(pp), folder, f"--only={args.only}"]
            launcher = ["torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", "--no-python"]
            start = python_module(*launcher, f"--nproc-per-node={tp * pp}") if tp * pp > 1 else []
            environment = {**os.environ, **COMMON, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
            subprocess.run([*start, *python_module("benchmarks.plan_accuracy", *own)], env=environment, check=True)
            measured = {tuple(map(int, file.stem.split("-"))): file for file in Path(folder).glob("*.json")}
            found = {rank: json.loads(file.read_text()) for rank, file in measured.items()}
        for name, batch, length in cases(args.only):
            for (stage, tp_rank), expected in predicted(name, tp, pp, batch, length).items():
                real = found[stage, tp_rank][f"{name}/{batch}/{length}"]
                figures = f"{expected:.1f}", f"{real:.1f}", f"{expected / real:.3f}"
                rows.append((name, MODELS[name][1], tp, pp, batch, length, stage * tp + tp_rank, *figures))
                print(*rows[-1], sep="\t", flush=True)
    if not args.only:
        with RESULTS.open("w", newline="") as file:
            csv.writer(file).writerows([COLUMNS, *rows])
    wrong = [row for row in rows if abs(float(row[-1]) - 1) > 0.1 and float(row[-2]) >= LEAST]
    print(f"{len(wrong)} of {len(rows)} predictions are wrong by more than 10 %, of {LEAST} MB or more")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
