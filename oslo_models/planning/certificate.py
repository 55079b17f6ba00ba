"""`verify`: compares a model on this machine's processes with plain transformers in one process."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from oslo_models._version import __version__
from oslo_models.checkpoint import MANIFEST, current_files
from oslo_models.checkpoint.filenames import split_position
from oslo_models.config.arguments import Arguments, parse_dtype
from oslo_models.config.sources import find_checkpoint
from oslo_models.planning.model_source import find_model
from oslo_models.planning.reference import blocks_that_fit, compute_reference, truncate
from oslo_models.starting import import_path, launch_command

BOUNDS = {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Bounds relative to the largest element. transformers computes some steps in float32 for every dtype."""


@dataclass(frozen=True)
class Check:
    """One comparison.

    Attributes:
        name: what is compared, such as ``"loss"``.
        passed: whether the largest difference is within the bound.
        detail: the figures, or the reason for a failure.
    """

    name: str
    passed: bool
    detail: str


@dataclass(frozen=True)
class Certificate:
    """The result of `verify`. ``str()`` gives a text."""

    model: str
    sizes: Mapping[str, Any]
    checks: tuple[Check, ...]
    notes: tuple[str, ...]
    seconds: float
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether every comparison is within its bound."""
        return all(check.passed for check in self.checks)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {**vars(self), "checks": [vars(check) for check in self.checks], "passed": self.passed}

    def __str__(self) -> str:
        sizes = " ".join(f"{name}={value}" for name, value in self.sizes.items())
        lines = [f"{self.model}: {sizes}", ", ".join(f"{name} {version}" for name, version in self.versions.items())]
        lines += [f"  {'ok    ' if check.passed else 'FAILED'} {check.name}: {check.detail}" for check in self.checks]
        lines += [f"  note: {note}" for note in self.notes]
        verdict = "passed: equal to one process within the bounds" if self.passed else "FAILED: do not train on this"
        return "\n".join([*lines, f"{verdict} ({self.seconds:.0f} s)"])


def verify(
    model: str | Path,
    tensor_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    expert_parallel_size: int = 1,
    *,
    text: str | None = None,
    length: int = 64,
    dtype: torch.dtype | str = "float32",
    blocks: int | None = None,
    ranks_from: Path | None = None,
    tensor_parallel_shares: Sequence[int] | None = None,
    blocks_per_stage: Sequence[int] | None = None,
) -> Certificate:
    """Compare losses, gradients, greedy tokens and merged files of a checkpoint with plain transformers.

    This process computes the reference. Then it starts a process for each rank on this machine, on GPUs where there
    are enough of them.

    Args:
        model: a directory, or a name on the hub.
        tensor_parallel_size, pipeline_parallel_size, expert_parallel_size: as in the constructors, like
            ``tensor_parallel_shares`` and ``blocks_per_stage``.
        text: the text of both rows of the batch, by default a built-in one.
        length: the number of tokens in a row.
        dtype: the dtype of the weights on both sides.
        blocks: compare only the first blocks of each stack. By default, compare the blocks that fit into one process.
        ranks_from: split files of the same weights, which the ranks load in place of ``model``.

    Raises:
        OSError: there is no such checkpoint.
        ValueError: the sizes do not fit the model.
        RuntimeError: the processes failed for another reason than a difference.
    """
    began = time.monotonic()
    notes: list[str] = []
    cls, config = find_model(model)
    unequal: dict[str, Any] = {"tensor_parallel_shares": tensor_parallel_shares, "blocks_per_stage": blocks_per_stage}
    arguments = Arguments(
        tensor_parallel_size, pipeline_parallel_size, expert_parallel_size=expert_parallel_size, **unequal
    )
    arguments.check({})
    arguments.check_config(cls, config)
    if expert_parallel_size > tensor_parallel_size:
        raise ValueError(
            f"expert_parallel_size={expert_parallel_size} needs several replicas, and this compares one: use a divisor "
            f"of tensor_parallel_size={tensor_parallel_size}"
        )
    parsed = parse_dtype({"dtype": dtype})
    if parsed not in BOUNDS:
        raise ValueError(f"dtype must be one of {', '.join(str(key)[6:] for key in BOUNDS)}, got {dtype!r}")
    directory = find_checkpoint(model, None, {})
    if blocks is None and (blocks := blocks_that_fit(cls, config, parsed)) is not None:
        notes.append(f"one process cannot hold the model: only the first {blocks} blocks of each stack are compared")
    options = truncate(config, blocks)
    with tempfile.TemporaryDirectory(prefix="oslo-models-verify-") as folder:
        scratch = Path(folder)
        plain, loading = directory, dict(options)
        if getattr(config, "quantization_config", None) is not None:
            loading["dequantize"] = True
            plain = _merged(cls, directory, parsed, scratch / "whole", dequantize=True)
            notes.append("the weights are quantised: this process and the ranks compute with dequantised weights")
        elif any(split_position(name) for name in current_files(directory)):
            plain = _merged(cls, directory, parsed, scratch / "whole")
            notes.append("the reference is the split files as this process merges them")
        notes += compute_reference(cls, plain, options, parsed, text, length, scratch)
        order = {
            **{"directory": str((ranks_from or directory).resolve()), "cls": cls.__name__, "options": loading},
            **{"tp": tensor_parallel_size, "pp": pipeline_parallel_size, "ep": expert_parallel_size},
            "unequal": unequal,
            **{"dtype": str(parsed)[6:], "bound": BOUNDS[parsed], "scratch": folder},
        }
        (scratch / "order.json").write_text(json.dumps(order))
        checks = _run_ranks(scratch, tensor_parallel_size * pipeline_parallel_size)
    sizes: dict[str, Any] = {
        **{"tensor_parallel_size": tensor_parallel_size, "pipeline_parallel_size": pipeline_parallel_size},
        **{name: list(value) for name, value in unequal.items() if value is not None},
    }
    if expert_parallel_size > 1:
        sizes["expert_parallel_size"] = expert_parallel_size
    versions = {
        **{"oslo_models": __version__, "Python": platform.python_version()},
        **{"torch": torch.__version__, "transformers": transformers.__version__},
    }
    seconds = time.monotonic() - began
    return Certificate(str(model), {**sizes, "dtype": str(parsed)[6:]}, checks, tuple(notes), seconds, versions)


def _merged(cls: Any, directory: Path, dtype: torch.dtype, folder: Path, **options: Any) -> Path:
    """Merge split files into a folder that transformers loads, with the tokenizer beside them. Return the folder."""
    model = cls.from_pretrained_with_parallel(directory, dtype=dtype, **options)
    model.save_pretrained_with_parallel(folder, save_with_merging=True)
    for name, path in current_files(directory).items():
        if not (split_position(name) or name.startswith(MANIFEST.partition(".")[0]) or (folder / name).exists()):
            shutil.copyfile(path, folder / name)
    return folder


def _run_ranks(scratch: Path, ranks: int) -> tuple[Check, ...]:
    """Start a process for each rank, and return the checks of all."""
    command = launch_command(ranks, "oslo_models.planning.certificate_rank", str(scratch))
    environment = {**os.environ, "PYTHONPATH": import_path(), "TRANSFORMERS_VERBOSITY": "error"}
    environment["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // ranks))
    if torch.cuda.device_count() < ranks:  # NCCL needs a GPU for each rank
        environment["CUDA_VISIBLE_DEVICES"] = ""
        if sys.platform == "linux":
            environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    reports = [json.loads(file.read_text()) for file in sorted(scratch.glob("rank-*.json"))]
    refused = next((report["refused"] for report in reports if "refused" in report), None)
    if refused is not None:
        return (Check("loading", False, refused),)
    if done.returncode or len(reports) < ranks:
        raise RuntimeError(f"the ranks failed: {_last_error(done.stderr)}")
    merged: dict[str, Check] = {}
    for report in reports:
        for name, passed, detail in report["checks"]:
            if name not in merged or (merged[name].passed and not passed):
                merged[name] = Check(name, passed, detail)
    shutil.rmtree(scratch / "merged", ignore_errors=True)
    return tuple(merged.values())


def _last_error(stderr: str) -> str:
    """Return the last line of the first traceback, without the launcher's report."""
    lines = [line for line in stderr.splitlines() if line.partition(":")[0].endswith("Error")]
    lines = [line for line in lines if "ChildFailedError" not in line]
    return lines[0] if lines else stderr.strip()[-300:] or "no output"
