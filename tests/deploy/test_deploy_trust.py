"""Security of deployment: nothing that reaches the launcher's store or a port is unpickled or gets a worker."""

from __future__ import annotations

import json
import os
import pickle
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from oslo_models import GPT2LMHeadModel
from oslo_models.deploy import handshake, process_executor
from oslo_models.deploy import options as serving
from oslo_models.deploy import torchrun_executor as torchrun
from oslo_models.distributed import mesh, object_exchange
from oslo_models.distributed.directory_store import DirectoryStore

from support import deployment, faults
from support.faults import gone
from support.pool import Pool

SECRET = "0123456789abcdef"


class Attack:
    """Writes a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


@contextmanager
def stranger(says: bytes) -> Iterator[int]:
    """Listen on a port, and send these bytes to every connection; yield the port."""

    def talk() -> None:
        with suppress(OSError):
            while True:
                connected, _ = listener.accept()
                connected.sendall(says)
                connections.append(connected)

    connections: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=talk, daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
    for connected in connections:
        connected.close()


def attacked(mark: Path, how: str, secret: str | None) -> str:
    """Rank 0 attacks through the store alone; return the error of the other process."""
    rank = int(os.environ["RANK"])
    if secret is not None:
        os.environ["LOCAL_WORLD_SIZE"] = "1"
    if rank == 1:
        with pytest.raises(ConnectionError) as caught:
            torchrun.serve(secret)
        torchrun._store().set("done", b"")
        return str(caught.value)
    body = pickle.dumps(Attack(mark))
    with stranger(len(body).to_bytes(4, "big") + body) as port:
        said = {
            "pickle": body,
            "address as it was": pickle.dumps(("127.0.0.1", port, b"k" * 32, True)),
            "address": json.dumps(["127.0.0.1", port]).encode(),
            "nonsense": b"\xff",
            "no address": json.dumps(["\0" * 200] if secret is None else ["a\0b", 10**9]).encode(),
        }[how]
        store = torchrun._store()
        store.set("application", said)
        store.get("done")
    return ""


@pytest.mark.parametrize("secret", [None, SECRET])
@pytest.mark.parametrize("how", ["pickle", "address as it was", "address", "nonsense", "no address"])
def test_worker_start_through_a_forged_store_executes_nothing(
    pool: Pool, tmp_path: Path, how: str, secret: str | None
) -> None:
    _, message = pool.run(2, attacked, tmp_path / "mark", how, secret, env=True)
    assert "the store of the launcher" in message and "deploy_secret" in message
    assert not (tmp_path / "mark").exists()


def launched_with_attacker(address: Any, checkpoint: Path, prompt: Any, mark: Path, secret: str | None) -> Any:
    """A launched script, while strangers connect to every address that the application puts into the store."""
    deployment.use_server(address)
    torchrun.start_worker = deployment.start_forked_worker
    if secret is not None:
        os.environ["LOCAL_WORLD_SIZE"] = "1"
    if int(os.environ["RANK"]) == 1:
        with pytest.raises(SystemExit):
            torchrun.serve(secret)
        return None
    others, listened = torchrun._LauncherProcesses, []

    class Besieged(others):  # type: ignore[misc, valid-type]
        def _listen(self) -> Any:
            """Let strangers connect first."""
            listener, address = super()._listen()
            listened.append(address)
            body = pickle.dumps(Attack(mark))
            strangers = (b"", bytes(32), len(body).to_bytes(4, "big") + body, bytes(32) + body)
            # Only processes of this host can connect to the Unix socket, and the kernel reports their user.
            for said in () if self.loopback else strangers:
                connected = socket.create_connection(("127.0.0.1", address[1]))
                connected.sendall(said)
                connected.shutdown(socket.SHUT_WR)
            return listener, address

    torchrun._LauncherProcesses = Besieged  # type: ignore[misc]
    try:
        options = {"tensor_parallel_size": 2, "deploy": True, "deploy_secret": secret}
        with GPT2LMHeadModel.from_pretrained_with_parallel(checkpoint, **options) as model:
            return model.generate(**prompt, max_new_tokens=5, do_sample=False), model._engine.pids, listened
    finally:
        torchrun._LauncherProcesses = others  # type: ignore[misc]
        torchrun._created.cache_clear()


@pytest.mark.parametrize("secret", [None, SECRET])
def test_deployment_serves_while_strangers_connect(
    pool: Pool, stand: faults.Stand, tmp_path: Path, secret: str | None, seed: int
) -> None:
    """Strangers change nothing, on one host over a Unix socket, or on several over TCP with a secret."""
    batch, mark = deployment.prompt(seed), tmp_path / "mark"
    arguments = (deployment.server_address(), stand.checkpoint, batch, mark, secret)
    (found, pids, listened), _ = pool.run(2, launched_with_attacker, *arguments, env=True)
    assert found.equal(stand.whole.generate(**batch, max_new_tokens=5, do_sample=False))
    assert [len(address) for address in listened] == [1 if secret is None else 2]
    assert gone(pids) and not mark.exists()


# The proofs by themselves ---------------------------------------------------------------------------------------------


def both(accept: Callable[[socket.socket], Any], dial: Callable[[socket.socket], Any]) -> list[type | None]:
    """Return the exception types of both ends of a TCP connection."""
    raised: list[type | None] = [None, None]

    def run(index: int, end: Callable[[socket.socket], Any], connected: socket.socket) -> None:
        with connected:
            try:
                end(connected)
            except OSError as error:
                raised[index] = type(error)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        dialled = socket.create_connection(listener.getsockname())
        accepted, _ = listener.accept()
    thread = threading.Thread(target=run, args=(0, accept, accepted))
    thread.start()
    run(1, dial, dialled)
    thread.join()
    return raised


def test_handshake_requires_the_secret_on_both_ends() -> None:
    one, other = secrets.token_hex(16), secrets.token_hex(16)
    assert both(lambda end: handshake.accept(end, one), lambda end: handshake.dial(end, f"{one}\n")) == [None, None]
    refused = both(lambda end: handshake.accept(end, one), lambda end: handshake.dial(end, other))
    assert None not in refused and handshake.HandshakeError in refused
    for role in (handshake.accept, handshake.dial):  # an echo of the received bytes proves nothing
        refused = both(lambda end, role=role: role(end, one), echo)
        assert refused[0] is handshake.HandshakeError


def echo(end: socket.socket) -> None:
    while data := end.recv(4096):
        end.sendall(data)


def test_relayed_handshake_gives_no_connection() -> None:
    """An attacker that forges the address in the store and relays the proofs gets no connection from either side."""
    outcomes: list[BaseException | None] = [None, None]

    def end(index: int, act: Callable[[], Any]) -> None:
        try:
            act()
        except OSError as error:
            outcomes[index] = error

    def pipe(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(4096):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    with socket.create_server(("127.0.0.1", 0)) as real, socket.create_server(("127.0.0.1", 0)) as fake:
        dialled = socket.create_connection(fake.getsockname())
        victim, _ = fake.accept()
        onward = socket.create_connection(real.getsockname())
        accepted, _ = real.accept()
    ends = [lambda: handshake.accept(accepted, SECRET), lambda: handshake.dial(dialled, SECRET)]
    threads = [threading.Thread(target=end, args=(index, act)) for index, act in enumerate(ends)]
    threads += [threading.Thread(target=pipe, args=pair, daemon=True) for pair in ((victim, onward), (onward, victim))]
    for thread in threads:
        thread.start()
    threads[0].join()
    accepted.close()
    threads[1].join()
    assert all(isinstance(outcome, OSError) for outcome in outcomes)
    for connected in (dialled, victim, onward):
        connected.close()


def test_connection_of_another_user_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        handshake.require_same_user(ours)
        uid = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
        with pytest.raises(handshake.HandshakeError, match=f"of user {uid} is at the other end"):
            handshake.require_same_user(ours)


@pytest.mark.parametrize("rank", ["0", "1"])
def test_deployment_on_several_hosts_requires_a_secret(monkeypatch: pytest.MonkeyPatch, rank: str) -> None:
    """Every rank raises before anything starts."""
    launched = {"RANK": rank, "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "", "MASTER_PORT": ""}
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    for secret, text in (
        (None, "pass deploy_secret="),
        ("", "at least 16 characters.*got 0 characters"),
        ("short but secret"[:15], "got 15 characters"),
        (b"0123456789abcdef", "got bytes"),
    ):
        with pytest.raises(ValueError, match=text) as caught:
            GPT2LMHeadModel.from_config_with_parallel(deployment.CONFIG, deploy=True, deploy_secret=secret)
        assert "short but" not in str(caught.value)
    assert SECRET not in repr(serving.DeployOptions(deploy_secret=SECRET))
    with pytest.raises(ValueError, match="deploy_secret"):
        torchrun.serve()


def test_start_messages_must_be_json() -> None:
    ours, theirs = socket.socketpair()
    one, other = Connection(ours.detach()), Connection(theirs.detach())
    one.send(("start",))  # pickled
    with pytest.raises(ConnectionError, match="not JSON"):
        torchrun._receive(other)
    torchrun._send(one, ("kill", 3))
    assert torchrun._receive(other) == ["kill", 3]


# Between ranks --------------------------------------------------------------------------------------------------------


def test_ranks_on_one_host_meet_in_a_private_directory(stand: faults.Stand) -> None:
    """No store listens on a port, and the directory disappears with the ranks."""
    stand.answers()
    directory = Path(stand.model._engine._directory.name)
    assert directory.stat().st_mode & 0o777 == 0o700 and list(directory.glob("key-*"))
    stand.model.close()
    assert not directory.exists()
    stand.model.restart()
    stand.answers()


def test_directory_that_others_can_enter_is_no_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o700)
    store = DirectoryStore(tmp_path)
    store.set("a" * 500, b"1\x00")
    assert store.get("a" * 500) == b"1\x00" and store.add("n", 2) == 2 and store.add("n", 3) == 5
    assert store.check(["n"]) and store.delete_key("n") and not store.delete_key("n") and store.num_keys() == 1
    for mode in (0o750, 0o701, 0o777):
        tmp_path.chmod(mode)
        with pytest.raises(PermissionError, match="has to be 0700"):
            DirectoryStore(tmp_path)
    tmp_path.chmod(0o700)
    uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    with pytest.raises(PermissionError):
        DirectoryStore(tmp_path)


def exchange(mark: Path, keys: list[bytes | None], forges: bool) -> str:
    """Exchange objects between two ranks; rank 1 may forge its object. Return the result or the error."""
    axis = mesh.world_axis()
    if (key := keys[axis.rank]) is not None:
        object_exchange.authenticate_objects(key)
    patch = pytest.MonkeyPatch()  # undone: other tests use this process too
    try:
        if forges and axis.rank == 1:
            patch.setattr(object_exchange, "_signed", lambda rank, value: bytes(32) + pickle.dumps(value))
        found = object_exchange.gather_objects(axis, Attack(mark) if forges and axis.rank == 1 else axis.rank)
        return str(found)
    except object_exchange.ForgedObjectError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001  without a key, a signature is read as a pickle
        return f"{type(error).__name__} without a key" if keys[axis.rank] is None else repr(error)
    finally:
        patch.undo()
        object_exchange._keys.clear()


@pytest.mark.parametrize("how", ["same key", "other key", "no key", "forged"])
def test_objects_of_ranks_are_unpickled_only_with_their_signature(pool: Pool, tmp_path: Path, how: str) -> None:
    keys: dict[str, list[bytes | None]] = {"other key": [b"k" * 32, b"l" * 32], "no key": [b"k" * 32, None]}
    said = pool.run(2, exchange, tmp_path / "mark", keys.get(how, [b"k" * 32] * 2), how == "forged")[0]
    assert said == "[0, 1]" if how == "same key" else "should come from rank 1 was not signed" in said
    assert not (tmp_path / "mark").exists()


def test_a_handshake_ends_in_time_beside_trickling_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "TIMEOUT", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        connected = socket.create_connection(listener.getsockname())

        def trickle() -> None:
            with suppress(OSError):
                for _ in range(40):
                    connected.sendall(b"\0")
                    time.sleep(0.1)

        threading.Thread(target=trickle, daemon=True).start()
        accepted, _ = listener.accept()
        began = time.monotonic()
        with pytest.raises(handshake.HandshakeError, match="did not authenticate"):
            handshake.accept(accepted, SECRET)
        assert time.monotonic() - began < 2


def test_strangers_do_not_keep_a_process_with_the_secret_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    others: Any = object.__new__(torchrun._LauncherProcesses)
    monkeypatch.setattr(torchrun, "_store", lambda: {})
    others.secret, others.loopback, others.host = SECRET, False, "127.0.0.1"
    others._prepare_handshakes()
    others._listener, (host, port) = others._listen()
    strangers = [socket.create_connection((host, port)) for _ in range(torchrun.MOST_STRANGERS + 10)]
    made: list[socket.socket] = []
    knowing = threading.Thread(target=lambda: made.append(handshake.connect((host, port), SECRET)))
    knowing.start()
    began = time.monotonic()
    accepted = others._accept(30)
    assert time.monotonic() - began < 5
    knowing.join()
    assert accepted.getpeername() == made[0].getsockname()
    for each in (*strangers, *made, accepted, others._listener):
        each.close()


@pytest.mark.parametrize("starts", [True, False])
def test_a_worker_ends_if_its_launcher_answers_before_authentication(
    monkeypatch: pytest.MonkeyPatch, starts: bool
) -> None:
    check = handshake.require_same_user

    def slow(accepted: socket.socket) -> None:
        time.sleep(0.3)
        check(accepted)

    monkeypatch.setattr(handshake, "require_same_user", slow)
    others: Any = object.__new__(torchrun._LauncherProcesses)
    ours, theirs = Pipe()
    others._lock, others._orders, others.loopback = threading.Lock(), {1: ours}, True
    others._prepare_orders()
    others._prepare_handshakes()
    others._listener, (name,) = others._listen()
    with others._listener, handshake.connect("\0" + name, None) as made:
        torchrun._send(theirs, [-1, True])  # a late answer to an earlier order
        torchrun._send(theirs, [0, 88 if starts else None])
        if starts:
            process, connection = others.start(1)
            assert process.pid == 88
            connection.close()
            assert made.recv(1) == b""
        else:
            with pytest.raises(ConnectionError, match="the process of rank 1 that the launcher started has ended"):
                others.start(1)


@pytest.mark.parametrize("answers_first", [False, True])
def test_a_launcher_that_stands_still_delays_calls_by_seconds_and_its_late_answers_are_dropped(
    answers_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its worker was killed. Callers wait for the reason of the worker's end, and for its successor's start."""
    for attempt in range(3):  # the machine may be busy
        others: Any = object.__new__(torchrun._LauncherProcesses)
        ours, theirs = Pipe()
        others._lock, others._orders, others.loopback = threading.Lock(), {1: ours}, True
        others._prepare_orders()
        others._prepare_handshakes()
        executor: Any = object.__new__(process_executor.ProcessExecutor)
        executor.processes, executor._senders = [torchrun._RemoteProcess(others, 1, 77)], []
        began = time.monotonic()
        assert executor.exit_reason(0) == "rank 0 (pid 77) closed its connection"
        executor.kill()
        if time.monotonic() - began < 3:
            break
        assert attempt < 2, "docs/trust.md promises 3 s"
    others._listener, (name,) = others._listen()
    monkeypatch.setattr(torchrun, "_ANSWER_TIMEOUT", 60.0)

    def goes_on() -> None:
        while True:
            number, order, *_ = torchrun._receive(theirs)
            if order == "wait":
                time.sleep(0.2)  # a caller that does not wait for the answer misses it
            if order == "start" and not answers_first:
                made.append(handshake.connect("\0" + name, None))
            torchrun._send(theirs, [number, {"wait": -9, "kill": True, "start": 88}.get(order, order)])
            if order == "start" and answers_first:
                time.sleep(0.5)
                made.append(handshake.connect("\0" + name, None))
            if order == "last":
                return

    made: list[socket.socket] = []
    launcher = threading.Thread(target=goes_on, daemon=True)
    launcher.start()
    process, connection = others.start(1)
    assert process.pid == 88
    assert executor.exit_reason(0) == "rank 0 (pid 77) was killed by SIGKILL"
    assert others.ask(1, "last", seconds=30) == "last"
    launcher.join()
    for each in (*made, connection, others._listener):
        each.close()
