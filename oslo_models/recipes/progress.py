"""Shows one progress bar of a run, and draws its losses."""

from __future__ import annotations

import resource
import time
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm  # type: ignore[import-untyped]
from transformers import TrainerCallback

from oslo_models.distributed.collectives import MAX, all_reduce
from oslo_models.distributed.mesh import world_axis


class TrainingProgress(TrainerCallback):
    """Progress bar with loss, tokens per second, memory of the fullest rank and remaining time.

    Args:
        tokens_per_step: tokens of a step, if the trainer does not count them.
        folder: where ``loss.png`` goes.
    """

    def __init__(self, tokens_per_step: int | None, folder: Path) -> None:
        self._tokens_per_step, self._folder = tokens_per_step, folder
        self._bar: Any = None
        self._last: tuple[float, float] | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero and not args.disable_tqdm:
            self._bar = tqdm(total=state.max_steps, initial=state.global_step, dynamic_ncols=True, unit="step")
        self._last = None if self._tokens_per_step is None else (time.monotonic(), self._seen(state, {}))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._bar is not None:
            self._bar.update(state.global_step - self._bar.n)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if not logs or "loss" not in logs:
            return
        memory = _memory_of_fullest_rank()
        now, tokens = time.monotonic(), self._seen(state, logs)
        rate = (tokens - self._last[1]) / (now - self._last[0]) if self._last is not None else None
        self._last = now, tokens
        if self._bar is not None:
            shown = {"loss": f"{float(logs['loss']):.4g}", "memory": f"{memory / 2**30:.2f} GiB"}
            if rate is not None:
                shown["tokens/s"] = f"{rate:.0f}"
            self._bar.set_postfix(shown)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._bar is not None:
            self._bar.close()
        if state.is_world_process_zero:
            print(draw_losses(state.log_history, self._folder))

    def _seen(self, state: Any, logs: dict[str, Any]) -> float:
        """Return the number of tokens of all replicas since the start."""
        if self._tokens_per_step is not None:
            return float(self._tokens_per_step * state.global_step)
        return float(logs.get("num_tokens", 0.0))


def draw_losses(log_history: list[dict[str, Any]], folder: Path) -> str:
    """Draw the losses into ``loss.png``. Return a message with its path, or with the reason for no picture."""
    losses = [(each["step"], float(each["loss"])) for each in log_history if "loss" in each]
    evaluated = [(each["step"], float(each["eval_loss"])) for each in log_history if "eval_loss" in each]
    if not losses:
        return "no loss was logged: logging_steps is more than the steps"
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return "for a picture of the loss: pip install matplotlib"
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(*zip(*losses, strict=True), linewidth=1, label="training")
    if evaluated:
        axes.plot(*zip(*evaluated, strict=True), "o-", label="evaluation")
    axes.set(xlabel="step", ylabel="loss")
    axes.legend()
    figure.savefig(folder / "loss.png", dpi=150)
    return f"loss curve: {folder / 'loss.png'}"


def _memory_of_fullest_rank() -> float:
    """Return the highest peak memory of a rank in bytes. A collective of all ranks."""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated()
    memory = torch.tensor([float(peak)], dtype=torch.float64, device=device)
    return float(all_reduce(world_axis(), memory, MAX))
