"""Starts the processes of one peer for one measurement and collects their results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from benchmarks.cases import CASES, Case
from benchmarks.definitions import UNITS, Peer, Result, more_is_better
from benchmarks.peers import PEERS
from benchmarks.records import ROOT

LIMIT = 1800.0
"""Seconds after which a measurement counts as failed."""
COMMON = {
    "CUDA_VISIBLE_DEVICES": "",  # CPUs only
    "GLOO_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
    "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),  # DeepSpeed looks for ninja
    "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels"), *filter(None, [os.getenv("PYTHONPATH")])]),
    "TRANSFORMERS_VERBOSITY": "error",
}


class MeasurementError(Exception):
    """A process of a peer failed, or peers computed different results."""


def launch(case: Case, peer: Peer, folder: Path, smoke: bool) -> Result:
    """Measure once, in fresh processes. The worst value of all ranks counts.

    Raises:
        MeasurementError: A process failed or took too long.
    """
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # on any free port
    environment = {**os.environ, **COMMON, **peer.environment, "OMP_NUM_THREADS": str(peer.threads)}
    if peer.processes > 1:
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
        environment |= {"WORLD_SIZE": str(peer.processes), "LOCAL_WORLD_SIZE": str(peer.processes)}
        # the store above is running already
        environment |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    with tempfile.TemporaryDirectory() as results:
        command = [sys.executable, "-m", "benchmarks.launch", case.name, peer.name, str(folder), results]
        logs = [Path(results) / f"{rank}.log" for rank in range(peer.processes)]
        processes = []
        for rank, log in enumerate(logs):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if peer.processes > 1 else {}
            with log.open("w") as out:
                options = {"cwd": ROOT, "env": {**environment, **own}, "stdout": out, "stderr": out}
                processes.append(subprocess.Popen([*command, *(["--smoke"] if smoke else [])], **options))
        failed = _wait(processes)
        for left in Path("/dev/shm").glob(f"deepspeed_*_{store.port}_*"):
            left.unlink()  # DeepSpeed does not remove it
        if failed is not None:
            raise MeasurementError(f"{case.name}: {peer.name}, rank {failed}:\n{logs[failed].read_text()[-3000:]}")
        found = [Result(**json.loads(log.with_suffix(".json").read_text())) for log in logs]
    worst = {metric: min if more_is_better(UNITS[metric]) else max for metric in found[0].values}
    values = {metric: choose(result.values[metric] for result in found) for metric, choose in worst.items()}
    pairs = {
        metric: next(result.pairs[metric] for result in found if result.values[metric] == values[metric])
        for metric in found[0].pairs
    }
    return Result(values, found[0].check, found[0].references, pairs)


def _wait(processes: list[subprocess.Popen[bytes]]) -> int | None:
    """Wait until all have finished or one has failed. Kill the others and return the failed rank, if any."""
    deadline = time.monotonic() + LIMIT
    try:
        while None in (codes := [process.poll() for process in processes]) and not any(codes):
            if time.monotonic() > deadline:
                return codes.index(None)
            time.sleep(0.1)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return next((rank for rank, code in enumerate(codes) if code), None)


def main() -> None:
    """One process of a measurement."""
    name, peer, folder, results, *smoke = sys.argv[1:]
    import torch
    import transformers

    torch.set_num_threads(PEERS[peer].threads)
    transformers.utils.logging.disable_progress_bar()
    result = CASES[name].run(PEERS[peer], Path(folder), bool(smoke))
    (Path(results) / f"{os.environ.get('RANK', 0)}.json").write_text(json.dumps(asdict(result)))


if __name__ == "__main__":
    main()
