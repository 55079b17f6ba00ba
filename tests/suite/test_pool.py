"""The worker pool: results, exceptions, hangs and deaths; no worker outlives the session."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from support import ROOT
from support import pool as pool_module
from support.pool import Pool, WorkerError


def _sum_of_ranks(offset: torch.Tensor) -> tuple[int, torch.Tensor]:
    total = offset + dist.get_rank()
    dist.all_reduce(total)
    return os.getpid(), total


def _random() -> float:
    torch.set_default_dtype(torch.float64)
    os.environ["OSLO_LEFT_BEHIND"] = "1"
    torch.set_grad_enabled(False)
    return torch.rand(()).item()


def _state() -> tuple[bool, torch.dtype, bool, int]:
    left_behind = "OSLO_LEFT_BEHIND" in os.environ or "RANK" in os.environ
    return left_behind, torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads()


def _fail_on(bad: int | None, error: Exception) -> str:
    """Fail on one rank, or on all; the others wait in a collective."""
    if bad is None or dist.get_rank() == bad:
        raise error
    dist.barrier()
    return "done"


class _Untransportable(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def _raise_untransportable() -> None:
    raise _Untransportable(1, 2)


def _sleep_on(rank: int) -> None:
    if dist.get_rank() == rank:
        _sleep()


def _sleep() -> None:
    time.sleep(600)


def _abort_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os.write(2, b"terminate called after a throw")  # as C++ does
        os.abort()
    dist.barrier()


def _die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def _launched() -> tuple[bool, int]:
    before = dist.is_initialized()
    dist.init_process_group("gloo")
    return before, dist.get_rank()


def _echo(value: object) -> object:
    return value


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the wait for ranks that hang on purpose."""
    monkeypatch.setattr(pool_module, "TIMEOUT", 0.2)
    monkeypatch.setattr(pool_module, "GRACE", 8.0)


def test_run_returns_results_by_rank_from_distinct_processes(pool: Pool) -> None:
    pids, totals = zip(*pool.run(3, _sum_of_ranks, torch.tensor([1.0, 2.0])), strict=True)
    assert list(pids) == pool.pids[:3] and len({*pids, os.getpid()}) == 4
    for total in totals:
        torch.testing.assert_close(total, torch.tensor([6.0, 9.0]))


def test_run_starts_from_the_same_state_every_time(pool: Pool) -> None:
    first = pool.run(2, _random)
    assert first == pool.run(2, _random) and first[0] == first[1]
    assert pool.run(2, _state) == [(False, torch.float32, True, 1)] * 2


def test_run_reports_a_rank_that_raises_while_others_wait(pool: Pool, short: None) -> None:
    pool.start(3)
    before = pool.pids
    with pytest.raises(WorkerError, match=r"(?s)failed on rank 0, 1, 2.*---- rank 1.*ValueError: wrong size") as info:
        pool.run(3, _fail_on, 1, ValueError("wrong size"))
    assert next(iter(info.value.failures)) == 1  # the cause first, then its effects on other ranks
    assert "_fail_on" in info.value.failures[1]
    assert pool.pids == before  # an exception costs no process
    assert len(pool.run(3, _sum_of_ranks, torch.zeros(1))) == 3


def test_run_returns_expected_exceptions(pool: Pool, short: None) -> None:
    errors = pool.run(2, _fail_on, None, ValueError("wrong size"), expect=ValueError)
    assert [str(error) for error in errors] == ["wrong size"] * 2
    with pytest.raises(AssertionError, match="should have raised"):
        pool.run(2, _fail_on, 0, ValueError("wrong size"), expect=ValueError)  # the other gets gloo's RuntimeError
    with pytest.raises(AssertionError, match="returned 5"):
        pool.run(2, _echo, 5, expect=ValueError)
    with pytest.raises(WorkerError, match="_Untransportable: 1 and 2"):
        pool.run(2, _raise_untransportable)


def test_run_kills_a_hanging_rank_and_shows_its_stack(pool: Pool) -> None:
    pool.start(2)
    before = pool.pids
    with pytest.raises(WorkerError, match=r"(?s)---- rank 1\ndid not finish within 1 s.*in _sleep") as info:
        pool.run(2, _sleep_on, 1, timeout=1)
    assert list(info.value.failures) == [1]
    assert not any(_alive(pid) for pid in before[:2])
    assert len(pool.run(2, _sum_of_ranks, torch.zeros(1))) == 2


def test_run_names_a_dead_worker_and_replaces_it(pool: Pool) -> None:
    pool.start(3)
    before = pool.pids
    with pytest.raises(WorkerError, match=rf"rank 2\nits process \(pid {before[2]}\) died with exit code -9") as info:
        pool.run(3, _die_on, 2)
    assert "did not finish" not in str(info.value)  # the others were not waited for
    assert not any(_alive(pid) for pid in before[:3])
    assert len(pool.run(3, _sum_of_ranks, torch.zeros(1))) == 3
    os.kill(pool.pids[0], signal.SIGKILL)  # between two runs
    pool._workers[0].process.join()
    assert len(pool.run(3, _sum_of_ranks, torch.zeros(1))) == 3


def test_run_shows_messages_of_cpp_before_an_abort(pool: Pool) -> None:
    with pytest.raises(WorkerError, match=r"(?s)exit code -6\n.*in _abort_on.*terminate called after a throw"):
        pool.run(2, _abort_on, 1)


def test_run_with_env_sets_the_variables_of_a_launcher(pool: Pool) -> None:
    assert pool.run(2, _launched, env=True) == [(False, 0), (False, 1)]
    assert pool.run(1, _state)[0][0] is False


def test_run_passes_tensors_and_modules_by_value(pool: Pool) -> None:
    linear = torch.nn.Linear(3, 2)
    tensors = {
        "view": torch.arange(12.0).reshape(3, 4).t()[1:3],
        "bfloat16": torch.randn(3).bfloat16(),
        "scalar": torch.tensor(3),
        "bool": torch.tensor([True, False]),
        "empty": torch.zeros(0, 3),
        "graph": linear(torch.randn(1, 3)),
    }
    (got,) = pool.run(1, _echo, {**tensors, "module": linear, "meta": torch.empty(2, 3, device="meta")})
    for name, tensor in tensors.items():
        torch.testing.assert_close(got[name], tensor.detach(), rtol=0, atol=0)
        assert not got[name].requires_grad
    assert got["meta"].is_meta and got["meta"].shape == (2, 3)
    assert isinstance(got["module"].weight, torch.nn.Parameter) and torch.equal(got["module"].weight, linear.weight)


def test_run_rejects_too_many_ranks_and_local_functions(pool: Pool) -> None:
    with pytest.raises(ValueError, match="1 to 8"):
        pool.run(9, _echo, 1)
    with pytest.raises((AttributeError, TypeError), match=r"lambda|local"):
        pool.run(1, lambda: 1)


def test_workers_end_with_a_killed_session(tmp_path: Path) -> None:
    (tmp_path / "victim.py").write_text(
        "import test_victim\n"
        "from support import pool\n"
        "if __name__ == '__main__':\n"
        "    p = pool.Pool(2, preload=())\n"
        "    p.start(2)\n"
        "    print(*p.pids, flush=True)\n"
        "    p.run(1, test_victim.sleep, env=True)\n"
    )
    (tmp_path / "test_victim.py").write_text(
        "import subprocess\n"
        "def sleep():\n"
        "    child = subprocess.Popen(['sleep', '600'])\n"
        "    print(child.pid, flush=True)\n"
        "    child.wait()\n"
    )
    folder = tmp_path / ("long" * 25)  # as in the folders of job schedulers
    folder.mkdir()
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'tests'}:{ROOT}", "TMPDIR": str(folder)}
    command = [sys.executable, str(tmp_path / "victim.py")]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as victim:
        assert victim.stdout is not None
        pids = [int(pid) for line in (victim.stdout.readline(), victim.stdout.readline()) for pid in line.split()]
        assert len(pids) == 3 and all(_alive(pid) for pid in pids)
        victim.kill()
        deadline = time.monotonic() + 60
        while any(_alive(pid) for pid in pids):
            assert time.monotonic() < deadline, f"{[pid for pid in pids if _alive(pid)]} of {pids} live on"
            time.sleep(0.02)


def _alive(pid: int) -> bool:
    """Return whether a process runs; a zombie does not run."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
