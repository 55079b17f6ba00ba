"""Fine-tune one recipe by `oslo-models sft` on two ranks, by `trl sft`, and with `device_map`, in turn.

Each program is a new process with the same cores in total. ``python -m benchmarks.fine_tuning`` writes a row for each
run to ``fine_tuning.csv``: seconds of a step, and peaks of anonymous memory, sampled every 20 ms: of the fullest
process, and of all processes together. Then it prints the table of docs/guides/fine-tune.md, with medians.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.grpo import tokenizer_of_words
from benchmarks.launch import COMMON
from benchmarks.records import stamp, write_rows
from oslo_models.starting import python_module

RESULTS = Path(__file__).with_suffix(".csv")
FIGURES = ("seconds of a step", "MB of the fullest process", "MB of all processes")
COLUMNS = ("date", "commit", "machine", "versions", "program", "run", *FIGURES)
SIZES: dict[str, Any] = {
    **{"vocab_size": 4096, "hidden_size": 640, "intermediate_size": 1760, "num_hidden_layers": 10},
    **{"num_attention_heads": 10, "num_key_value_heads": 5, "max_position_embeddings": 512, "eos_token_id": 0},
}
TINY = {**SIZES, "hidden_size": 40, "intermediate_size": 80, "num_hidden_layers": 2}
PROGRAMS = {
    "oslo-models sft, tp=2": (("oslo_models", "sft"), {"tensor_parallel_size": 2}, 1),
    "trl sft": (("trl.cli.main", "sft", "--config"), {}, 2),
    "trl sft, device_map": (("trl.cli.main", "sft", "--config"), {"model_init_kwargs": {"device_map": "balanced"}}, 2),
}
"""Arguments, further keys of the recipe, and threads of a process."""


def write_files(folder: Path, sizes: dict[str, Any]) -> None:
    """Write a random model with a tokenizer of words, and rows."""
    import transformers

    tokenizer_of_words(sizes["vocab_size"]).save_pretrained(folder / "model")
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).save_pretrained(folder / "model")
    rows = folder / "rows"
    rows.mkdir()
    with (rows / "train.jsonl").open("w") as file:
        for row in range(64):
            text = " ".join(
                f"w{(row * 131 + position * 17) % (sizes['vocab_size'] - 1) + 1}" for position in range(256)
            )
            file.write(json.dumps({"text": text}) + "\n")


def run(program: str, folder: Path, steps: int) -> tuple[float, float, float]:
    """Run a program. Return the seconds of a step, and the MB of the fullest process and of all."""
    import yaml

    arguments, keys, threads = PROGRAMS[program]
    output = folder / "out" / str(time.monotonic_ns())
    recipe = {
        **{"model_name_or_path": str(folder / "model"), "dataset_name": str(folder / "rows"), "dtype": "float32"},
        **{"output_dir": str(output), "max_steps": steps, "per_device_train_batch_size": 4, "max_length": 256},
        **{"use_cpu": True, "bf16": False, "save_strategy": "no", "report_to": "none", "logging_steps": 1, **keys},
    }
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe))
    environment = {**os.environ, **COMMON, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    command = python_module(arguments[0], *arguments[1:], str(file))
    with (folder / "log").open("w") as log:
        started = subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=folder)
        fullest, together = _watch(started)
    if started.returncode:
        raise RuntimeError(f"{program} failed:\n{(folder / 'log').read_text()[-2000:]}")
    return _step_seconds(folder / "log", output), fullest, together


def _watch(started: subprocess.Popen[bytes]) -> tuple[float, float]:
    """Return the peaks of a program and its descendants, when it has ended."""
    import psutil

    fullest = together = 0.0
    root = psutil.Process(started.pid)
    while started.poll() is None:
        sizes = []
        for process in (root, *root.children(recursive=True)):
            try:
                status = Path(f"/proc/{process.pid}/status").read_text()
            except OSError:
                continue
            sizes += [int(line.split()[1]) * 1024 / 1e6 for line in status.splitlines() if line.startswith("RssAnon:")]
        fullest, together = max(fullest, *sizes, 0.0), max(together, sum(sizes))
        time.sleep(0.02)
    return fullest, together


def _step_seconds(log: Path, output: Path) -> float:
    """Return the mean seconds of a step, from the trainer's state or, where none is saved, from its last log."""
    state = output / "trainer_state.json"
    if state.is_file():
        logged = json.loads(state.read_text())["log_history"]
        return 1 / next(each["train_steps_per_second"] for each in reversed(logged) if "train_runtime" in each)
    text = log.read_text().rpartition("train_steps_per_second")[2]
    return 1 / float(text.lstrip("':\" ").split(",")[0].strip("'\"} \n"))


def table(rows: list[dict[str, str]]) -> list[str]:
    """Return the medians of the runs of each program as lines of a Markdown table."""
    lines = [f"| program | {' | '.join(FIGURES)} |", f"|---|{'---:|' * len(FIGURES)}"]
    for program in PROGRAMS:
        runs = [row for row in rows if row["program"] == program]
        seconds, *sizes = (statistics.median(float(run[figure]) for run in runs) for figure in FIGURES)
        lines.append(f"| `{program}` | {seconds:.2f} | {' | '.join(f'{size:,.0f}' for size in sizes)} |")
    return lines


def main() -> int:
    """Run every program."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fine_tuning", description=__doc__)
    parser.add_argument("--repeat", metavar="N", type=int, default=3, help="runs of each program (default: 3)")
    parser.add_argument("--steps", metavar="N", type=int, default=8, help="steps of a run (default: 8)")
    parser.add_argument("--smoke", action="store_true", help="a tiny model, one run of two steps; writes nothing")
    args = parser.parse_args()
    rows: list[dict[str, str]] = []
    with tempfile.TemporaryDirectory() as name:
        write_files(Path(name), TINY if args.smoke else SIZES)
        for number in range(1 if args.smoke else args.repeat):
            for program in PROGRAMS:
                figures = run(program, Path(name), 2 if args.smoke else args.steps)
                found = (program, str(number + 1), *(f"{figure:.3f}" for figure in figures))
                print(*found, sep="\t", flush=True)
                rows.append({**stamp(), **dict(zip(COLUMNS[4:], found, strict=True))})
    if not args.smoke:
        write_rows(RESULTS, COLUMNS, rows)
        print("\n".join(table(rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
