"""Resumed training equals uninterrupted training bit for bit: optimizer states, crashes, restarts by torchrun."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedConfig

from oslo_models import GPT2LMHeadModel
from oslo_models.checkpoint import CheckpointError

from support import ROOT, pipelines, zoo
from support.pipelines import Batch
from support.pool import Pool

pytestmark = pytest.mark.drawn(4, of="file")

SIZES = {
    **{"tp=2": (2, 1, 2), "tp=1:3": (2, 1, 2), "pp=2": (1, 2, 2), "dp=2": (1, 1, 2), "dp=2, FSDP2": (1, 1, 2)},
    "cp=2, FSDP2": (1, 1, 2),
}
SHARES = {"tp=1:3": [1, 3]}
STEPS = 3


def with_replicas(model: Any, fsdp: bool) -> Any:
    if fsdp:
        return fully_shard(model, mesh=model.mesh.dp_cp_mesh)
    if not model.is_data_parallelized():
        return model
    return DistributedDataParallel(model.gpu_modules(), process_group=model.mpu.get_data_parallel_group())


def train(model: Any, wrapped: Any, optimizer: Any, scheduler: Any, batches: list[Batch]) -> list[float]:
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        outputs = wrapped(**batch)
        for output in outputs if model.is_pipeline_parallelized() else [outputs]:
            output.loss.backward()
            losses.append(output.loss.detach())  # earlier stages know the value after the loop
        optimizer.step()
        scheduler.step()
    return [loss.item() for loss in losses]


def training(model: Any, fsdp: bool) -> tuple[Any, Any, Any]:
    wrapped = with_replicas(model, fsdp)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-2)
    return wrapped, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def check_resume(
    config: PreTrainedConfig, sizes: dict[str, Any], fsdp: bool, batches: list[Batch], folder: Path
) -> int:
    """Compare six steps with three steps, a save, and three more steps in a new model."""
    model = GPT2LMHeadModel.from_config_with_parallel(config, seed=0, **sizes)
    wrapped, optimizer, scheduler = training(model, fsdp)
    torch.manual_seed(7 + model.mesh.dp.rank)  # replicas draw different dropout masks
    own = [{key: value[model.mesh.dp.rank :: model.mesh.dp.size] for key, value in batch.items()} for batch in batches]
    train(model, wrapped, optimizer, scheduler, own[:STEPS])
    model.save_pretrained_with_parallel(folder)
    model.save_optimizer(optimizer, folder, step=STEPS, scheduler=scheduler.state_dict(), rank=model.mesh.world.rank)
    expected = train(model, wrapped, optimizer, scheduler, own[STEPS:])

    torch.manual_seed(99)
    again = GPT2LMHeadModel.from_pretrained_with_parallel(folder, **sizes).train()
    wrapped, optimizer, scheduler = training(again, fsdp)
    saved = again.load_optimizer(optimizer, folder)
    assert (saved["step"], saved["rank"]) == (STEPS, model.mesh.world.rank)
    scheduler.load_state_dict(saved["scheduler"])
    assert train(again, wrapped, optimizer, scheduler, own[STEPS:]) == expected
    for (name, found), param in zip(again.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(local(found), local(param)), name
    return sum(path.stat().st_size for path in folder.glob("optimizer_*"))


def local(param: Any) -> Tensor:
    return (param.to_local() if isinstance(param, DTensor) else param).detach()


@pytest.mark.parametrize("sizes", SIZES)
def test_resumed_training_equals_uninterrupted_training(pool: Pool, sizes: str, tmp_path: Path, seed: int) -> None:
    tp, pp, processes = SIZES[sizes]
    config = zoo.config("gpt2", dropout=0.3)
    batches = [
        pipelines.batch("GPT2LMHeadModel", config, seed + step, dtype=torch.float32) for step in range(2 * STEPS)
    ]
    folder = tmp_path / "checkpoint"
    given = {"tensor_parallel_size": tp, "pipeline_parallel_size": pp, "tensor_parallel_shares": SHARES.get(sizes)}
    given |= {"context_parallel_size": 2} if sizes.startswith("cp") else {}
    pool.run(processes, check_resume, config, given, "FSDP2" in sizes, batches, folder)
    files = sorted(path.name for path in folder.glob("optimizer_*"))
    assert files == [
        f"optimizer_tp={t}_pp={p}_dp={d}.bin" for t in range(tp) for p in range(pp) for d in range(2 // tp // pp)
    ]
    bytes_of_adamw = sum(2 * 4 * param.numel() for param in GPT2LMHeadModel(config).parameters())
    total = sum((folder / name).stat().st_size for name in files)
    # saved once, not once per copy of the weights; each rank adds replicated and tied parameters, and random states
    assert bytes_of_adamw < total < 1.5 * bytes_of_adamw + 40_000 * len(files)


# Refusals -------------------------------------------------------------------------------------------------------------


def small(tp: int = 1, pp: int = 1, shares: list[int] | None = None, seed: int = 0) -> tuple[Any, Any]:
    sizes: dict[str, Any] = {"tensor_parallel_size": tp, "pipeline_parallel_size": pp, "tensor_parallel_shares": shares}
    model = GPT2LMHeadModel.from_config_with_parallel(zoo.config("gpt2"), seed=seed, **sizes)
    return model, torch.optim.AdamW(model.gpu_parameters(), lr=1e-2)


def save_at(folder: Path, tp: int, pp: int) -> None:
    model, optimizer = small(tp, pp)
    model.save_optimizer(optimizer, folder)


def load_at(folder: Path, tp: int, pp: int, shares: list[int] | None = None) -> None:
    model, optimizer = small(tp, pp, shares)
    model.load_optimizer(optimizer, folder)


def test_optimizer_state_of_another_mesh_is_rejected(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, save_at, tmp_path, 2, 1)
    pool.run(2, load_at, tmp_path, 2, 1)
    for sizes in ((1, 2), (1, 1)):
        for error in pool.run(2, load_at, tmp_path, *sizes, expect=ValueError):
            assert "tensor_parallel_size=2, pipeline_parallel_size=1 and 1 replicas" in str(error)
            assert "keep the earlier sizes" in str(error)
    for error in pool.run(2, load_at, tmp_path, 2, 1, [1, 3], expect=ValueError):
        assert "tensor_parallel_shares=None, and this run has [1, 3]" in str(error)


def save_and_load_over(folder: Path, saved: bool, loaded: bool) -> None:
    """On ranks that divide tokens, whose optimizer states FSDP2 has sharded over them or not."""
    optimizers = []
    for is_sharded in (saved, loaded):
        model = GPT2LMHeadModel.from_config_with_parallel(zoo.config("gpt2"), context_parallel_size=2, seed=0)
        optimizers.append(torch.optim.AdamW(with_replicas(model, is_sharded).parameters()))
    model.save_optimizer(optimizers[0], folder)
    model.load_optimizer(optimizers[1], folder)


@pytest.mark.parametrize("saved", [True, False])
def test_optimizer_state_sharded_over_other_ranks_is_rejected(pool: Pool, saved: bool, tmp_path: Path) -> None:
    pool.run(2, save_and_load_over, tmp_path, saved, saved)
    for error in pool.run(2, save_and_load_over, tmp_path, saved, not saved, expect=ValueError):
        assert f"over {1 + saved} ranks that divide tokens, and this one over {2 - saved}" in str(error)


def damage_on_one_rank(folder: Path) -> None:
    """Flip a bit in a file of rank 1: all ranks raise, and name the file."""
    model, optimizer = small(2)
    model.save_optimizer(optimizer, folder)
    path = folder / "optimizer_tp=1_pp=0_dp=0.bin"
    if model.mesh.world.rank == 1:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    model.load_optimizer(optimizer, folder)


def test_damaged_optimizer_state_is_rejected_on_all_ranks(pool: Pool, tmp_path: Path) -> None:
    for error in pool.run(2, damage_on_one_rank, tmp_path / "state", expect=CheckpointError):
        assert "optimizer_tp=1_pp=0_dp=0.bin" in str(error) and "damaged" in str(error)


def test_load_optimizer_rejects_a_state_that_does_not_fit(tmp_path: Path) -> None:
    model, optimizer = small()
    with pytest.raises(FileNotFoundError, match="save_optimizer writes it"):
        model.load_optimizer(optimizer, tmp_path)
    model.save_pretrained_with_parallel(tmp_path)
    model.save_optimizer(optimizer, tmp_path)
    with pytest.raises(ValueError, match="one of AdamW, not of SGD"):
        model.load_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), tmp_path)
    with pytest.raises(ValueError, match="same groups and order"):
        model.load_optimizer(torch.optim.AdamW(list(model.parameters())[1:]), tmp_path)
    with pytest.raises(ValueError, match="cannot be read back"):
        model.save_optimizer(optimizer, tmp_path, config=model.config)
    assert model.load_optimizer(optimizer, tmp_path) == {}  # the failed save has kept the previous state
    other, _ = small(seed=1)
    other.save_pretrained_with_parallel(tmp_path)
    with pytest.raises(CheckpointError, match="another checkpoint of the model"):
        model.load_optimizer(optimizer, tmp_path)
    assert GPT2LMHeadModel.from_pretrained_with_parallel(tmp_path) is not None


def save_and_die(folder: Path, system_call: int) -> None:
    """Save over an older state, and die at the n-th rename or fsync of rank 0."""
    model, optimizer = small(2)
    if model.mesh.world.rank == 0:
        calls = 0

        def deadly(function: Any) -> Any:
            def counted(*args: Any, **kwargs: Any) -> Any:
                nonlocal calls
                calls += 1
                if calls == system_call:
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*args, **kwargs)

            return counted

        for name in ("rename", "fsync", "replace", "link"):
            setattr(os, name, deadly(getattr(os, name)))
    model.save_optimizer(optimizer, folder, step="new")


def load_step(folder: Path) -> Any:
    model, optimizer = small(2)
    return model.load_optimizer(optimizer, folder)["step"]


def save_step(folder: Path) -> None:
    model, optimizer = small(2)
    model.save_pretrained_with_parallel(folder)
    model.save_optimizer(optimizer, folder, step="old")


def test_kill_while_saving_leaves_a_loadable_state(pool: Pool, tmp_path: Path) -> None:
    """Either the old or the new state remains, and loads with the model beside it."""
    found = []
    pool.run(2, save_step, tmp_path / "first")
    for system_call in (1, 4, 7, 10):
        folder = tmp_path / str(system_call)
        shutil.copytree(tmp_path / "first", folder)
        with pytest.raises(Exception, match="died"):
            pool.run(2, save_and_die, folder, system_call)
        found += pool.run(2, load_step, folder)
    assert set(found) <= {"old", "new"} and found[0] == "old"


# Restarts -------------------------------------------------------------------------------------------------------------


SCRIPT = '''
"""Trains a tiny GPT-2 on two ranks as the README shows it, but for rank 1, which kills itself once."""
import json, os, signal, sys
from pathlib import Path

import torch
from oslo_models import GPT2Config, GPT2LMHeadModel

folder, sizes, deadly_step = Path(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(1)

done = sorted(folder.glob("step-*/oslo_manifest.optimizer.json"))    # the optimizer is saved last
if done:
    model = GPT2LMHeadModel.from_pretrained_with_parallel(done[-1].parent, **sizes).train()
else:
    config = GPT2Config(vocab_size=101, n_embd=24, n_layer=2, n_head=6, n_positions=32)
    model = GPT2LMHeadModel.from_config_with_parallel(config, seed=1, **sizes)
optimizer = torch.optim.AdamW(model.gpu_parameters(), lr=1e-2)
start = model.load_optimizer(optimizer, done[-1].parent)["step"] if done else 0

for step in range(start, 8):
    batch = torch.randint(101, (4, 12), generator=torch.Generator().manual_seed(step))
    optimizer.zero_grad()
    loss = model.train_batch(input_ids=batch, labels=batch)
    optimizer.step()
    if model.mesh.world.rank == 0:
        with open(folder / "losses.jsonl", "a") as file:
            print(json.dumps([step, loss.item()]), file=file)
    if step == deadly_step and model.mesh.world.rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    if (step + 1) % 2 == 0:
        checkpoint = folder / f"step-{step + 1:08}"
        model.save_pretrained_with_parallel(checkpoint)
        model.save_optimizer(optimizer, checkpoint, step=step + 1)
'''


def run_script(folder: Path, sizes: dict[str, int]) -> None:
    """Run the script without a launcher and without faults."""
    sys.argv = ["train.py", str(folder), json.dumps(sizes), "-1"]
    exec(SCRIPT, {"__name__": "__main__"})


def losses(folder: Path) -> list[tuple[int, float]]:
    """Return the losses in the order of writing; repeated steps occur twice."""
    return [tuple(json.loads(line)) for line in (folder / "losses.jsonl").read_text().splitlines()]


def run_torchrun(folder: Path, sizes: dict[str, int], deadly_step: int) -> None:
    script = folder / "train.py"
    script.write_text(SCRIPT)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    options = ["--max-restarts=1", "--monitor-interval=0.1"]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]),
        "CUDA_VISIBLE_DEVICES": "",
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [*launcher, *options, str(script), str(folder), json.dumps(sizes), str(deadly_step)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_torchrun_restart_after_a_kill_resumes_from_the_last_save(
    pool: Pool, tmp_path: Path, warm_launchers: None
) -> None:
    """A rank is killed in the step before a save: all ranks resume from the last save, and lose nothing."""
    sizes = {"pipeline_parallel_size": 2}
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir(), broken.mkdir()
    pool.run(2, run_script, whole, sizes, env=True)
    assert [step for step, _ in losses(whole)] == list(range(8))
    run_torchrun(broken, sizes, 4)
    steps = [step for step, _ in losses(broken)]
    assert steps in ([0, 1, 2, 3, 4, *range(4, 8)], [0, 1, 2, 3, *range(4, 8)])
    assert set(losses(broken)) == set(losses(whole))
