"""Operating the server: probes, restarts of dead workers, new keys, and its end."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

pytest.importorskip("uvicorn")

from oslo_models.server.app import ApiKeys, application
from oslo_models.server.guard import Access
from oslo_models.server.lifecycle import Lifecycle
from oslo_models.server.log_writer import MOST_LINES
from oslo_models.server.supervisor import RestartPolicy, Supervisor

from support import ROOT
from support.corpora import tokenizer
from support.faults import gone
from support.http_server import StubModel, connect, listening, post_bytes, read_answer
from support.ports import free_port
from support.served import PATH, get, serving
from support.waiting import LIMIT, wait_until

# Probes ---------------------------------------------------------------------------------------------------------------


def test_probes_tell_loading_serving_and_draining_apart() -> None:
    """Probes need no key and allow any host name; all other requests wait for the models."""
    lifecycle, model = Lifecycle(), StubModel()
    healthy = [True]
    model.health = lambda timeout: {"healthy": healthy[0], "reason": None, "ranks": []}  # type: ignore[method-assign]
    app = application(model, tokenizer(), api_key="secret", allowed_hosts=["localhost"])
    with listening(lifecycle, lifespan="off") as url:
        assert [get(f"{url}/health/{probe}")[0] for probe in ("live", "ready")] == [200, 503]
        status, headers, body = read_answer(connect(url, post_bytes(PATH, b"{}")))
        assert status == 503 and headers["retry-after"] and json.loads(body)["error"]["code"] == "service_unavailable"
        lifecycle.application = app
        assert [get(f"{url}/health/{probe}")[0] for probe in ("live", "ready")] == [200, 200]
        assert get(f"{url}/health")[0] == 400  # it shows processes, so it needs an allowed host name
        assert get(f"{url}/health/lives", "Authorization: Bearer secret")[0] == 400
        assert read_answer(connect(url, post_bytes(PATH, b"{}")))[0] == 401
        healthy[0] = False
        assert [get(f"{url}/health/{probe}")[0] for probe in ("live", "ready")] == [200, 503]
        healthy[0], lifecycle.draining = True, True
        assert [get(f"{url}/health/{probe}")[0] for probe in ("live", "ready")] == [200, 503]


# Keys -----------------------------------------------------------------------------------------------------------------


def test_keys_are_replaced_while_the_server_runs() -> None:
    keys = ApiKeys(["old", "older"])
    access = Access(keys)
    assert access.api_keys is keys and keys.include("old") and keys.include("older")
    assert not any(map(keys.include, ("", "ol", "oldx", "older2", "old\nolder")))
    keys.replace(["new"])
    assert keys.include("new") and not keys.include("old")
    for wrong in ([], ["new", ""], ["a b"], [" "]):
        with pytest.raises(ValueError, match="the API key"):
            keys.replace(wrong)
        assert keys.include("new") and not any(map(keys.include, {"", *wrong} - {"new"}))


# Restarts -------------------------------------------------------------------------------------------------------------


class Dying(StubModel):
    """A model with a given number of worker deaths and failed starts."""

    def __init__(self, deaths: int = 0, failures: int = 0, silent: bool = False) -> None:
        super().__init__()
        self.deaths, self.failures, self.silent = deaths, failures, silent
        self.down, self.restarts = False, list[float]()

    def health(self, timeout: float = 2.0) -> dict[str, Any]:
        if self.deaths and not self.down:
            self.deaths, self.down = self.deaths - 1, True
        ranks = [{"pid": 1}] if self.silent or not self.down else []
        return {"healthy": not self.down, "reason": "rank 0 died", "ranks": ranks}

    def restart(self) -> None:
        self.restarts.append(time.monotonic())
        if self.failures:
            self.failures -= 1
            raise RuntimeError("no memory")
        self.down = False


@contextmanager
def supervised(model: Dying, **policy: Any) -> Iterator[SimpleNamespace]:
    given_up, restarted = threading.Event(), list[str]()
    reasons = list[str]()

    def give_up(reason: str) -> None:
        reasons.append(reason)
        given_up.set()

    settings = RestartPolicy(**{"interval": 0.01, "first_delay": 0.1, **policy})
    supervisor = Supervisor({"m": model}, settings, restarted.append, give_up)
    yield SimpleNamespace(given_up=given_up, restarted=restarted, reasons=reasons, supervisor=supervisor)
    supervisor.stop()


@pytest.mark.parametrize("failures", [0, 2])
def test_workers_are_restarted_with_growing_delays_and_then_given_up(failures: int) -> None:
    """A failed start counts as a restart."""
    model = Dying(deaths=9, failures=failures)
    with supervised(model, restarts=3) as seen:
        assert seen.given_up.wait(LIMIT)
    assert len(model.restarts) == 3 and seen.restarted == ["m"] * 3
    assert "rank 0 died" in seen.reasons[0] and len(seen.reasons) == 1
    first, second = (after - before for before, after in zip(model.restarts, model.restarts[1:], strict=False))
    assert first >= 0.1 and second >= 0.2
    with supervised(model := Dying(deaths=1), restarts=0) as seen:
        assert seen.given_up.wait(LIMIT) and not model.restarts


def test_restarts_before_the_window_do_not_count() -> None:
    model = Dying(deaths=6)
    with supervised(model, restarts=1, window=0.02, interval=0.05) as seen:
        wait_until(lambda: len(model.restarts) == 6)
        assert not seen.given_up.is_set()


def test_silent_workers_are_restarted_late_and_stopping_ends_the_watch() -> None:
    model = Dying(deaths=1, silent=True)
    began = time.monotonic()
    with supervised(model, silence=0.5):
        wait_until(lambda: model.restarts)
        assert model.restarts[0] - began >= 0.5
    with supervised(model := Dying(deaths=9), restarts=9, first_delay=30) as seen:
        wait_until(lambda: len(model.restarts) == 1)
        seen.supervisor.stop()
        time.sleep(0.1)
        assert len(model.restarts) == 1 and not seen.given_up.is_set()


# The command ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    tokenizer().save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"n_positions": 512, "n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": len(tokenizer())}
    GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).save_pretrained(folder)
    return folder


def ask(url: str, key: str, **body: Any) -> tuple[int, dict[str, str], bytes]:
    data = json.dumps({"prompt": "def", "max_tokens": 4, "temperature": 0, **body}).encode()
    with connect(url, post_bytes(PATH, data, f"Authorization: Bearer {key}")) as connected:
        return read_answer(connected)


def health(url: str, key: str) -> Any:
    return json.loads(get(f"{url}/health", f"Authorization: Bearer {key}", host="localhost")[2])


def test_served_model_survives_a_worker_and_ends_with_one_when_they_die_too_often(
    checkpoint: Path, tmp_path: Path, warm: None
) -> None:
    """A server loads, gets new keys, loses and replaces a worker during a call, and loses one worker too many."""
    (tmp_path / "keys").write_text("old\n")
    options = ("--api-key-file", tmp_path / "keys", "--tensor-parallel-size", 2, "--restart-workers", 1)
    with serving(checkpoint, *options) as running:
        url = running.says("listening on ").split(" on ")[1].split(",")[0]
        seen = {get(f"{url}/health/live")[0]}
        ready = get(f"{url}/health/ready")
        assert ready[0] == 503 and b"loading" in ready[2]
        assert running.says(" at http")
        assert seen == {200} and get(f"{url}/health/ready")[0] == 200
        expected = ask(url, "old")
        assert expected[0] == 200 and ask(url, "new")[0] == 401
        (tmp_path / "keys").write_text("new\n")
        running.process.send_signal(signal.SIGHUP)
        running.says("the keys were replaced")
        assert ask(url, "old")[0] == 401 and ask(url, "new")[0] == 200
        (tmp_path / "keys").write_text("\n")
        running.process.send_signal(signal.SIGHUP)
        running.says("the keys were not replaced")
        before, long = running.workers, json.dumps({"prompt": "def", "max_tokens": 500, "temperature": 0}).encode()
        os.kill(before[1], signal.SIGSTOP)  # so that the call does not end
        connected = connect(url, post_bytes(PATH, long, "Authorization: Bearer new"))
        wait_until(lambda: any(rank["busy"] for rank in health(url, "new")["ranks"]))
        os.kill(before[1], signal.SIGKILL)
        status, headers, body = read_answer(connected)
        assert status == 503 and int(headers["retry-after"]) > 0, (status, body)
        assert json.loads(body)["error"]["code"] == "service_unavailable"
        assert get(f"{url}/health/live")[0] == 200
        running.says("were started again")
        again = ask(url, "new")
        texts = [json.loads(answer[2])["choices"][0]["text"] for answer in (expected, again)]
        assert texts[0] == texts[1] and get(f"{url}/health/ready")[0] == 200
        metrics = get(f"{url}/metrics", "Authorization: Bearer new", host="localhost")[2].decode()
        assert f'oslo_models_worker_restarts_total{{model="{checkpoint}"}} 1' in metrics.splitlines()
        after = running.workers
        assert len(after) == 2 and not set(before) & set(after)
        os.kill(after[1], signal.SIGKILL)
        assert running.process.wait(LIMIT) == 1 and gone(after)
        assert any("was killed by SIGKILL" in line for line in running.lines[-3:]), running.lines


@pytest.mark.zoo
def test_signals_during_loading_and_a_second_one_end_the_server_at_once(checkpoint: Path) -> None:
    with serving(checkpoint) as running:
        running.says("listening on ")
        wait_until(lambda: running.workers)
        workers = running.workers
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(LIMIT) == 128 + signal.SIGTERM and gone(workers), running.lines
    with serving(checkpoint, "--drain-seconds", 300) as running:
        url = running.says(" at http").split(" at ")[1].strip()
        workers, half = running.workers, connect(url, post_bytes(PATH, b"{", length=50))
        running.process.send_signal(signal.SIGTERM)
        time.sleep(1.0)
        assert running.process.poll() is None
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(LIMIT) == 128 + signal.SIGTERM and gone(workers), running.lines
        half.close()


@pytest.mark.zoo
def test_drain_is_bounded(checkpoint: Path) -> None:
    with serving(checkpoint, "--drain-seconds", 1) as running:
        url = running.says(" at http").split(" at ")[1].strip()
        connected = [connect(url, post_bytes(PATH, b"{", length=50)), connect(url, b"GET / HT")]
        body = json.dumps({"prompt": "def", "max_tokens": 500, "num_beams": 8, "n": 8, "temperature": 0}).encode()
        connected.append(connect(url, post_bytes(PATH, body)))
        wait_until(lambda: b"oslo_models_calls_in_flight 1\n" in get(f"{url}/metrics", host="localhost")[2])
        workers = running.workers
        for pid in workers:
            os.kill(pid, signal.SIGSTOP)  # the call never ends by itself
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(LIMIT) == 0 and gone(workers), running.lines
        for each in connected:
            each.close()


DROPPED = re.compile(rb"^oslo_models_dropped_log_lines_total (\d+)", re.MULTILINE)


@pytest.mark.zoo
@pytest.mark.parametrize("log", ["unread pipe", "full disk"])
def test_a_log_that_cannot_be_written_holds_up_no_answer_and_no_signal(checkpoint: Path, log: str) -> None:
    """The log is larger than the pipe and the queue of lines together, and more is written at the end."""
    reading, writing = os.pipe()
    full = os.open("/dev/full", os.O_WRONLY)
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    ask, count = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n", MOST_LINES + 200
    try:
        with serving(checkpoint, stderr=writing if log == "unread pipe" else full) as running:
            url = running.says(" at http").split(" at ")[1].strip()
            with connect(url) as client:
                for _ in range(count):
                    client.sendall(ask)
                    assert read_answer(client)[0] == 200
            assert [get(f"{url}/health/{probe}")[0] for probe in ("live", "ready")] == [200, 200]
            body = json.dumps({"prompt": "def", "max_tokens": 4, "temperature": 0}).encode()
            assert read_answer(connect(url, post_bytes(PATH, body)))[0] == 200
            dropped = [int(DROPPED.search(get(f"{url}/metrics", host="localhost")[2])[1]) for _ in range(5)]
            assert dropped[-1] > dropped[0] > 0, dropped
            workers = running.workers
            theirs = {os.readlink(f"/proc/{pid}/fd/{number}") for pid in workers for number in (1, 2)}
            assert len(theirs) == 1 and theirs.isdisjoint(
                os.readlink(f"/proc/self/fd/{each}") for each in (writing, full)
            )
            running.process.send_signal(signal.SIGTERM)
            assert running.process.wait(LIMIT) == 0 and gone(workers), running.lines
    finally:
        for descriptor in (reading, writing, full):
            os.close(descriptor)


@pytest.mark.zoo
def test_idle_connections_leave_room_under_a_low_limit_of_open_files(checkpoint: Path) -> None:
    """The limit is hard, so the server can only accept fewer connections."""
    with serving(checkpoint, open_files=256) as running:
        url = running.says(" at http").split(" at ")[1].strip()
        assert "ulimit" in running.says("--max-connections is ")
        held = [connect(url, b"GET / HT") for _ in range(400)]
        try:
            for _ in range(4):
                assert get(f"{url}/health/live")[0] == 200
            body = json.dumps({"prompt": "def", "max_tokens": 4, "temperature": 0}).encode()
            assert read_answer(connect(url, post_bytes(PATH, body)))[0] == 200
        finally:
            for each in held:
                each.close()
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(LIMIT) == 0
        assert not [line for line in running.lines if "Too many open files" in line][10:]


@pytest.mark.zoo
def test_server_over_two_hosts_of_torchrun(checkpoint: Path, tmp_path: Path) -> None:
    """The command of docs/examples, with both hosts on this one."""
    store, port = free_port(), free_port()
    (tmp_path / "secret").write_text("0123456789abcdef0123456789abcdef\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")])}
    serve = ["serve", str(checkpoint), "--tensor-parallel-size=2", f"--port={port}", "--restart-workers=0"]
    serve.append(f"--deploy-secret-file={tmp_path / 'secret'}")

    def launch(rank: int) -> subprocess.Popen[bytes]:
        launcher = ["torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", f"--node-rank={rank}"]
        where = ["--master-addr=127.0.0.1", f"--master-port={store}", "-m", "oslo_models"]
        with (tmp_path / f"log{rank}").open("w") as log:
            command = [sys.executable, "-m", *launcher, *where, *serve]
            return subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    launched = [launch(rank) for rank in range(2)]
    try:
        log = tmp_path / "log0"
        wait_until(lambda: " at http" in log.read_text() or launched[0].poll() is not None, 300)
        assert " at http" in log.read_text(), log.read_text() + (tmp_path / "log1").read_text()
        url = f"http://127.0.0.1:{port}"
        assert get(f"{url}/health/ready")[0] == 200
        body = json.dumps({"prompt": "def", "max_tokens": 4, "temperature": 0}).encode()
        assert read_answer(connect(url, post_bytes("/v1/completions", body)))[0] == 200
        state = json.loads(get(f"{url}/health", host="localhost")[2])
        pids = [rank["pid"] for rank in state["ranks"]]
        assert len(pids) == 2
        launched[0].send_signal(signal.SIGTERM)
        for process in launched:
            process.wait(LIMIT)
        assert gone(pids)
    finally:
        for process in launched:
            process.kill()
            process.wait()
