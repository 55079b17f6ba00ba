"""Trains one model by one process and by four (two tensor-parallel ranks by two stages), and keeps their losses.

``python -m benchmarks.loss_parity`` writes ``loss_parity.csv`` in a few minutes; `benchmarks.plots` draws it.
Both runs have one seed, one order of batches, float32, and no dropout: its masks depend on the number of ranks.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).with_name("loss_parity.csv")
STEPS, BATCH, LENGTH = 150, 8, 64
RUNS = {"one process": (1, 1), "tp=2 x pp=2": (2, 2)}
"""Tensor-parallel and pipeline-parallel sizes."""


def train(tensor: int, pipeline: int, output: Path) -> None:
    """One process of a run; rank 0 writes the losses. The text is Python's standard library, byte by byte."""
    import torch
    from transformers import GPT2Config

    from oslo_models import GPT2LMHeadModel

    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text_N = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
    sizes = {"vocab_size": 256, "n_embd": 128, "n_layer": 4, "n_head": 8, "n_positions": LENGTH}
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(**sizes, **no_dropout, bos_token_id=0, eos_token_id=0)
    parallel = {"tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline, "micro_batch_size": 2}
    model = GPT2LMHeadModel.from_config_with_parallel(config, **parallel, seed=0).train()
    optimizer = torch.optim.AdamW(model.gpu_parameters(), lr=1e-3)
    draw, losses = torch.Generator().manual_seed(0), []
    for _ in range(STEPS):
        starts = torch.randint(len(text_N) - LENGTH, (BATCH,), generator=draw).tolist()
        ids_BL = torch.stack([text_N[start : start + LENGTH] for start in starts]).long()
        optimizer.zero_grad()
        losses.append(model.train_batch(input_ids=ids_BL, labels=ids_BL).item())
        optimizer.step()
    if int(os.environ["RANK"]) == 0:
        output.write_text(json.dumps(losses))


def main() -> int:
    """Start both runs and write their losses side by side."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loss_parity", description=__doc__)
    parser.add_argument("--worker", nargs=3, metavar=("TP", "PP", "FILE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        train(int(args.worker[0]), int(args.worker[1]), Path(args.worker[2]))
        return 0
    columns = []
    with tempfile.TemporaryDirectory() as folder:
        for number, (tensor, pipeline) in enumerate(RUNS.values()):
            file = Path(folder, f"{number}.json")
            launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
            module = [f"--nproc-per-node={tensor * pipeline}", "-m", "benchmarks.loss_parity"]
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
            command = [*launcher, *module, "--worker", str(tensor), str(pipeline), str(file)]
            subprocess.run(command, cwd=ROOT, env=environment, check=True)
            columns.append(json.loads(file.read_text()))
    with RESULTS.open("w", newline="") as output:
        writer = csv.writer(output, lineterminator="\n")
        writer.writerows([("step", *RUNS), *((step, *row) for step, row in enumerate(zip(*columns, strict=True), 1))])
    return 0


if __name__ == "__main__":
    sys.exit(main())
