"""Measure exact rollouts beside the ordinary mode, and write ``benchmarks/exact_rollouts.csv``.

A Llama of 20M parameters in float32 samples completions, and computes their log-probabilities again in a padded
training forward. Each mode and each number of tensor-parallel ranks runs in new processes with one thread each. Seconds
are CPU time of the busiest rank, with its waits for other ranks. Prints the table of docs/guides/generation.md.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.launch import COMMON
from benchmarks.records import number, stamp, write_rows
from oslo_models.starting import launch_command

RESULTS = Path(__file__).with_suffix(".csv")
TIMES = ("rollout, CPU s", "forward, CPU s", "step, CPU s")
SHARES = ("equal to the rollout", "equal to one rank")
COLUMNS = ("date", "commit", "machine", "versions", "mode", "ranks", *TIMES, *SHARES)
MODES = ("ordinary", "exact")
RANKS = (1, 2, 3, 4)
SIZES: dict[str, Any] = {
    **{"vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4},
    **{"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 512},
}
TINY: dict[str, Any] = {
    **{"vocab_size": 101, "hidden_size": 24, "intermediate_size": 35, "num_hidden_layers": 2},
    **{"num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 128},
}
TEMPERATURE = 0.8
LENGTHS, GROUP, NEW = (7, 30, 12, 21), 4, 40
ROWS, LENGTH = 8, 104


def measure(mode: str, ranks: int, smoke: bool, out: Path) -> None:
    """Run on every rank: write the figures."""
    import torch
    from transformers import LlamaConfig

    from oslo_models import LlamaForCausalLM

    torch.set_num_threads(1)
    config = LlamaConfig(**(TINY if smoke else SIZES), eos_token_id=None)
    model: Any = LlamaForCausalLM.from_config_with_parallel(config, ranks, seed=0)
    if mode == "exact":
        model.use_exact_rollouts()
    model.train()

    def log_probabilities(ids_BL: Any, mask_BL: Any) -> Any:
        positions_BL = (mask_BL.cumsum(-1) - 1).clamp(min=0)
        logits = model(ids_BL, attention_mask=mask_BL, position_ids=positions_BL).logits[:, :-1]
        if mode == "exact":
            return model.token_log_probabilities(logits, ids_BL[:, 1:], TEMPERATURE)
        return (logits / TEMPERATURE).log_softmax(-1).gather(-1, ids_BL[:, 1:, None]).squeeze(-1)

    draw = random.Random(5)

    def drawn(length: int) -> list[int]:
        return [draw.randrange(3, config.vocab_size) for _ in range(length)]

    prompts = [prompt for prompt in map(drawn, LENGTHS) for _ in range(GROUP)]
    options = {"do_sample": True, "temperature": TEMPERATURE, "top_k": 0, "max_new_tokens": NEW, "pad_token_id": 0}

    def roll_out() -> list[Any]:
        return [*model.generate_batch(prompts, None, SimpleNamespace(return_logprobs=True), **options).values()]

    outputs, rollout = timed(roll_out)
    rows = [output.prompt_ids + output.generated_tokens for output in outputs]
    longest = max(map(len, rows))
    ids_BL = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    mask_BL = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    fixed_BL = torch.tensor([drawn(LENGTH) for _ in range(ROWS)])
    every_BL = torch.ones_like(fixed_BL)
    with torch.no_grad():
        again = log_probabilities(ids_BL, mask_BL)[:, -NEW:].float()
        found, forward = timed(lambda: log_probabilities(fixed_BL, every_BL))
    _, step = timed(lambda: log_probabilities(fixed_BL, every_BL).sum().backward())
    sampled = torch.tensor([output.logprobs for output in outputs])
    figures = {"seconds": (rollout, forward, step), "equal": (again == sampled).float().mean().item()}
    if model.mesh.world.rank == 0:
        figures["fixed"] = found.float().flatten().tolist()
    (out / f"{model.mesh.world.rank}.json").write_text(json.dumps(figures))


def timed(function: Callable[[], Any]) -> tuple[Any, float]:
    """Return the result of a call after another one, and its CPU time in seconds."""
    function()
    began = time.process_time()
    return function(), time.process_time() - began


def run(mode: str, ranks: int, smoke: bool = False) -> tuple[list[float], float, list[float]]:
    """Return the seconds, the share of equal tokens and the log-probabilities of fixed tokens."""
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--smoke"] if smoke else []
        start = launch_command(ranks, "benchmarks.exact_rollouts", "--measure", mode, str(ranks), folder, *flags)
        subprocess.run(start, env={**os.environ, **COMMON, "OMP_NUM_THREADS": "1"}, check=True)
        own = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(ranks)]
    seconds = [max(times) for times in zip(*(each["seconds"] for each in own), strict=True)]
    return seconds, own[0]["equal"], own[0]["fixed"]


def figures_of(ranks: tuple[int, ...], smoke: bool) -> list[dict[str, str]]:
    """Return a row for each mode and number of ranks."""
    rows = []
    for mode in MODES:
        alone: list[float] = []
        for count in ranks:
            seconds, equal, fixed = run(mode, count, smoke)
            alone = alone or fixed
            same = sum(own == first for own, first in zip(fixed, alone, strict=True)) / len(alone)
            figures = dict(zip(TIMES, map(number, seconds), strict=True))
            shares = dict(zip(SHARES, (f"{100 * equal:.1f} %", f"{100 * same:.1f} %"), strict=True))
            rows.append({**stamp(), "mode": mode, "ranks": str(count), **figures, **shares})
            print(*rows[-1].values(), sep="\t", flush=True)
    return rows


def table(rows: list[dict[str, str]]) -> list[str]:
    """Return the lines of a Markdown table."""
    shown = ("mode", "ranks", *TIMES, *SHARES)
    lines = [f"| {' | '.join(shown)} |", f"|---|{'---:|' * (len(shown) - 1)}"]
    return lines + [f"| {' | '.join(row[name] for name in shown)} |" for row in rows]


def main() -> int:
    """Run every mode on every number of ranks."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.exact_rollouts", description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="a tiny model on one and two ranks, nothing written")
    parser.add_argument("--measure", nargs=3, metavar=("MODE", "RANKS", "OUT"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        mode, ranks, out = args.measure
        measure(mode, int(ranks), args.smoke, Path(out))
        return 0
    rows = figures_of(RANKS[:2] if args.smoke else RANKS, args.smoke)
    if not args.smoke:
        write_rows(RESULTS, COLUMNS, rows)
    print("\n".join(table(rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
