"""``oslo-models demo``: its options, and the start of the processes that run `oslo_models.cli.demo_worker`."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from oslo_models.starting import launch_command

# torch takes seconds to import: the command line asks this file for its options only.

DESCRIPTION = """\
Train a small GPT-2 on the sources of Python's standard library, tensor parallel over two processes: each process holds
half of each layer, and the results equal one process. Then save it, load it again in plain transformers, and
generate some Python. Takes about two minutes on two CPU cores; needs no GPU and no network."""
EPILOG = """\
examples:
  oslo-models demo
  oslo-models demo --steps 3000                   a better model
  oslo-models demo --tensor-parallel-size 3       sizes need not be powers of two

The model in --output/merged is an ordinary one:
  transformers.AutoModelForCausalLM.from_pretrained("oslo-demo/merged")
"""
HEADS = 8
TOLERANCE = 1e-4
"""The demo fails if float32 logits differ by more."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the demo."""
    add = parser.add_argument
    add(
        "--output",
        metavar="DIR",
        type=Path,
        default=Path("oslo-demo"),
        help="directory of all files (default: %(default)s)",
    )
    add("--steps", metavar="N", type=int, default=300, help="training steps (default: %(default)s)")
    ranks = f"processes over which each layer is sharded: 1 to {HEADS}, the attention heads (default: %(default)s)"
    add("--tensor-parallel-size", "-n", metavar="N", type=int, default=2, help=ranks)
    add("--seed", metavar="N", type=int, default=0, help="of the random weights and batches (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Run the demo in fresh processes, on GPUs where there are enough of them.

    Returns:
        The exit code: 1 when the parallel model and transformers disagree or a process failed.

    Raises:
        ValueError: an option is out of range.
        OSError: ``--output`` cannot be written.
    """
    ranks = args.tensor_parallel_size
    if not 1 <= ranks <= HEADS:
        raise ValueError(f"--tensor-parallel-size {ranks} is not 1 to {HEADS}, the attention heads of the demo's model")
    if args.steps < 1 or args.seed < 0:
        raise ValueError(f"--steps must be at least 1 and --seed at least 0, got {args.steps} and {args.seed}")
    output = args.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    summary = output / "summary.json"
    summary.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix=".scratch-", dir=output) as scratch:
        options = [f"--output={output}", f"--steps={args.steps}", f"--seed={args.seed}", f"-n={ranks}"]
        command = launch_command(ranks, "oslo_models.cli.demo_worker", *options)
        code = subprocess.run(command, env=_environment(ranks, scratch), check=False).returncode
    if code or not summary.exists():
        return code or 1
    return 0 if json.loads(summary.read_text())["largest_difference"] <= TOLERANCE else 1


def _environment(ranks: int, scratch: str) -> dict[str, str]:
    """Return the environment of the processes: their device, and temporary files and caches inside ``--output``."""
    import torch

    environment = {
        **os.environ,
        **dict.fromkeys(("TMPDIR", "MPLCONFIGDIR", "HF_HOME", "TORCHINDUCTOR_CACHE_DIR"), scratch),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // ranks)),
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, [os.getenv("PYTHONPATH")])]),
        "TRANSFORMERS_VERBOSITY": "error",
    }
    if torch.cuda.device_count() < ranks:  # NCCL needs a GPU for each rank
        environment["CUDA_VISIBLE_DEVICES"] = ""
        if sys.platform == "linux":
            environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return environment
