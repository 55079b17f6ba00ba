"""Fine-tuning on one GPU: exact rollouts, rollouts of groups, and recipes beside TRL's command."""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import oslo_models
from benchmarks.fine_tuning import write_files
from benchmarks.rehearse.bench import Bench
from benchmarks.rehearse.models import build, config_of
from benchmarks.rehearse.ranks import plain
from oslo_models.starting import python_module

OURS = "oslo_models"
_DRAWN = {"do_sample": True, "top_k": 0, "pad_token_id": 0}
_SIZES: dict[str, Any] = {
    **{"vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 8},
    **{"num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 2048, "eos_token_id": 0},
}
_TINY = {**_SIZES, "vocab_size": 67, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
_COMMANDS = {OURS: ("oslo_models", "sft"), "TRL": ("trl.cli.main", "sft", "--config")}


def exact_rollouts(bench: Bench) -> None:
    """A padded training forward computes the log-probabilities of a rollout again, bit for bit."""
    for dtype in (torch.float32, torch.bfloat16):
        with bench.attempt(OURS, str(dtype)):
            config = plain("llama", torch.device("cpu"), num_hidden_layers=3).config
            made = oslo_models.LlamaForCausalLM.from_config_with_parallel(config, dtype=dtype, seed=0)
            model: Any = made.to(bench.device).use_exact_rollouts().train()
            draw = random.Random(5)
            prompts = [[draw.randrange(3, 101) for _ in range(draw.randint(1, 12))] for _ in range(10)]
            prompts += prompts[:4]
            for rows in (3, None):
                rollouts = _rollouts(model, prompts, 8, rows)
                for side in ("left", "right"):
                    found, expected = _log_probabilities(model, rollouts, side)
                    bench.check(f"{dtype}: {rows} rows at once, padded on the {side}", found, expected)
            del model
    with bench.attempt(OURS, "llama-1b"):
        _time_exact(bench)


def _rollouts(model: Any, prompts: list[list[int]], new: int, rows: int | None = None) -> list[Any]:
    torch.manual_seed(11)
    options = {**_DRAWN, "temperature": 1.3, "max_new_tokens": new, "max_batch_size": rows}
    return [*model.generate_batch(prompts, None, SimpleNamespace(return_logprobs=True), **options).values()]


def _log_probabilities(model: Any, rollouts: list[Any], side: str) -> tuple[list[list[float]], list[list[float]]]:
    """Return the log-probabilities of a padded training forward, and of the rollouts."""
    rows = [[*each.prompt_ids, *each.generated_tokens] for each in rollouts]
    longest = max(map(len, rows)) + 2
    before = [(longest - len(row)) * (side == "left") for row in rows]
    ids_BL, mask_BL = torch.zeros(2, len(rows), longest, dtype=torch.long)
    for index, row in enumerate(rows):
        ids_BL[index, before[index] : before[index] + len(row)] = torch.tensor(row)
        mask_BL[index, before[index] : before[index] + len(row)] = 1
    positions_BL = (mask_BL.cumsum(-1) - 1).clamp(min=0)
    ids_BL, mask_BL, positions_BL = (each.to(model.device) for each in (ids_BL, mask_BL, positions_BL))
    logits = model(ids_BL, attention_mask=mask_BL, position_ids=positions_BL).logits
    found_BL: Tensor = model.token_log_probabilities(logits[:, :-1], ids_BL[:, 1:], 1.3)
    found_BL.sum().backward()
    model.zero_grad()
    ends = [start + len(row) - 1 for start, row in zip(before, rows, strict=True)]
    found = [
        found_BL[index, end - len(each.generated_tokens) : end].tolist()
        for index, (end, each) in enumerate(zip(ends, rollouts, strict=True))
    ]
    return found, [each.logprobs for each in rollouts]


def _time_exact(bench: Bench) -> None:
    """The time of a rollout and of a training step, with ordinary and with exact sums."""
    config = config_of(bench, "llama-1b")
    new, rows = bench.pick(64, 3), bench.pick(32, 2)
    prompts = [torch.randint(config.vocab_size, (bench.pick(64, 4),)).tolist() for _ in range(rows)]
    model = build(bench, "llama-1b", OURS, config).train()
    for kind in ("ordinary", "exact"):
        if kind == "exact":
            model.use_exact_rollouts()
        _rollouts(model, prompts, 4)
        bench.ready()
        began = time.perf_counter()
        rollouts = _rollouts(model, prompts, new)
        bench.timer.synchronize()
        bench.row(f"{OURS} {kind}", "rollout, 32 rows", rows * new / (time.perf_counter() - began), "tokens/s")
        _log_probabilities(model, rollouts, "left")
        seconds = min(bench.timer.wall(lambda: _log_probabilities(model, rollouts, "left"), 2))  # noqa: B023
        bench.row(f"{OURS} {kind}", "training step, 32 rows", 1e3 * seconds, "ms")
    found, expected = _log_probabilities(model, rollouts, "left")
    bench.check("llama-1b: log-probabilities", found, expected)


def rollouts(bench: Bench, peer: str) -> None:
    """Sampled completions in groups of 8 with different lengths: tokens per second up to the end tokens."""
    from transformers import GenerationConfig

    with bench.attempt(peer):
        config = config_of(bench, "llama-1b")
        groups, group, length, new = bench.pick((8, 8, 128, 256), (2, 2, 4, 6))
        model = build(bench, "llama-1b", peer, config).eval()
        if "fused" in peer:
            model.fuse()
        ids_BL = torch.randint(1, config.vocab_size, (groups, length), device=bench.device).repeat_interleave(group, 0)
        ends = [*range(0, config.vocab_size, 96)]
        settings = GenerationConfig(**_DRAWN, max_new_tokens=new, eos_token_id=ends)

        def complete() -> int:
            if peer.endswith("running batch"):
                outputs = model.generate_batch(ids_BL.tolist(), generation_config=settings)
                return sum(len(each.generated_tokens) for each in outputs.values())
            out_BL = model.generate(ids_BL, settings, attention_mask=torch.ones_like(ids_BL))[:, length:]
            is_end_BL = torch.isin(out_BL, torch.tensor(ends, device=bench.device))
            return int((is_end_BL.cumsum(1) - is_end_BL.long() == 0).sum())

        torch.manual_seed(0)
        complete()
        bench.ready()
        rates = []
        for _ in range(3):
            began = time.perf_counter()
            count = complete()
            rates.append(count / (time.perf_counter() - began))
        bench.row(peer, f"{groups * group} completions", statistics.median(rates), "tokens/s")


def recipes(bench: Bench, keys: dict[str, Any]) -> None:
    """`oslo-models sft` and `trl sft` with one recipe: tokens per second, and memory of the device."""
    needed = ("trl", "peft", *(("bitsandbytes",) if keys.get("load_in_4bit") else ()))
    if missing := [name for name in needed if find_spec(name) is None]:
        bench.skip(OURS, f"{', '.join(missing)} is not installed")
        return
    with tempfile.TemporaryDirectory() as name:
        write_files(Path(name), bench.pick(_SIZES, _TINY))
        bench.ready()
        for peer in _COMMANDS:
            with bench.attempt(peer):
                _train(bench, peer, Path(name), keys)


def _train(bench: Bench, peer: str, folder: Path, keys: dict[str, Any]) -> None:
    import yaml

    output, batch, length, between = folder / peer, bench.pick(8, 2), 256, bench.pick(10, 1)
    recipe = {
        **{"model_name_or_path": str(folder / "model"), "dataset_name": str(folder / "rows"), "dtype": "bfloat16"},
        **{"output_dir": str(output), "max_steps": 3 * between, "save_steps": between, "max_length": length},
        **{"bf16": not bench.dry, "use_cpu": bench.dry, "per_device_train_batch_size": batch, "report_to": "none"},
        **{"logging_steps": 1, **keys},
    }
    file, log = folder / "recipe.yaml", folder / "log"
    file.write_text(yaml.safe_dump(recipe))
    module, *words = _COMMANDS[peer]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    free, began = [0 if bench.dry else torch.cuda.mem_get_info()[0]], time.perf_counter()
    with log.open("w") as out:
        started = subprocess.Popen(python_module(module, *words, str(file)), stdout=out, stderr=out, env=environment)
        while started.poll() is None:
            free.append(0 if bench.dry else torch.cuda.mem_get_info()[0])
            time.sleep(0.02)
    if started.returncode:
        raise RuntimeError(f"{peer} ended with {started.returncode}:\n{log.read_text()[-3000:]}")
    states = [output / f"checkpoint-{number * between}" / "trainer_state.json" for number in (1, 2, 3)]
    seconds = min(later.stat().st_mtime - file.stat().st_mtime for file, later in zip(states, states[1:], strict=False))
    losses = [each["loss"] for each in json.loads(states[-1].read_text())["log_history"] if "loss" in each]
    bench.row(peer, "training, with a checkpoint", between * batch * length / seconds, "tokens/s")
    bench.row(peer, "whole command", time.perf_counter() - began, "s")
    bench.row(peer, "memory of the device", (free[0] - min(free)) / 1e6, "MB")
    bench.row(peer, "last loss", losses[-1], "")
