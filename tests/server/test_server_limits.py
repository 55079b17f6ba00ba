"""Bodies, connections and logs must not cost the server more than their senders."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("uvicorn")

from oslo_models import GPT2LMHeadModel
from oslo_models.deploy import forking
from oslo_models.deploy.decoding import Scored
from oslo_models.server import command, connections, log_writer
from oslo_models.server.app import application
from oslo_models.server.connections import ConnectionLimits
from oslo_models.server.log_writer import LogWriter, log_to_stderr

from support import faults
from support.corpora import tokenizer
from support.deployment import Shouts
from support.http_server import StubModel, call, connect, listening, post_bytes, post_json, read_answer

PATH = "/v1/completions"
LIVE = b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"


# Errors ---------------------------------------------------------------------------------------------------------------


def many(item: str, count: int = 200_000) -> str:
    return "[" + ",".join([item] * count) + "]"


HOSTILE = [
    (PATH, '{"prompt":' + many("{}") + "}"),
    (PATH, '{"prompt":' + many("[{}]") + "}"),
    (PATH, '{"prompt":' + many("[[]]") + "}"),
    (PATH, '{"prompt":"a","stop":' + many("0") + "}"),
    (PATH, '{"prompt":"a","stop_token_ids":' + many('"a"') + "}"),
    (PATH, '{"prompt":"a","logit_bias":{' + ",".join(f'"a{i}":"b"' for i in range(60_000)) + "}}"),
    (PATH, '{"prompt":"a","stream_options":{' + ",".join(f'"a{i}":"b"' for i in range(60_000)) + "}}"),
    (PATH, '{"prompt":"a",' + ",".join(f'"a{i}":1' for i in range(90_000)) + "}"),
    (PATH, '{"prompt":"a","' + "k" * 900_000 + '":1}'),
    (PATH, '{"prompt":"a","model":"' + "m" * 900_000 + '"}'),
    (PATH, '{"prompt":"a","best_of":' + "9" * 4000 + "}"),
    (PATH, "[" * 900_000),
    (PATH, '{"prompt":"a","structured_outputs":{"regex":"(' + "s" * 60_000 + '"}}'),
    ("/v1/chat/completions", '{"messages":' + many("0") + "}"),
    ("/v1/chat/completions", '{"messages":' + many("{}") + "}"),
    ("/v1/chat/completions", '{"messages":[{"role":"user","content":"a"}],"tools":' + many("0") + "}"),
    ("/v1/chat/completions", '{"messages":[{"role":"user","content":"a"}],"tool_choice":"' + "t" * 900_000 + '"}'),
    ("/v1/responses", '{"input":' + many("{}") + "}"),
    ("/v1/responses", '{"input":' + many("0") + "}"),
    ("/v1/embeddings", '{"input":' + many("{}") + "}"),
    ("/tokenize", '{"messages":' + many("{}") + "}"),
    ("/detokenize", '{"tokens":' + many("{}") + "}"),
]


def while_the_loop_runs(app: Any, path: str, body: str, seconds: float = 0.25) -> tuple[int, bytes]:
    """Return status and body of the answer. Check that no part of the request holds up the event loop.

    Args:
        seconds: limit of CPU time, because other processes delay the loop too. Threads may hold the interpreter's lock.
    """
    gaps: list[tuple[float, float]] = []

    async def attacked() -> tuple[int, dict[str, str], bytes]:
        async def beat() -> None:
            while True:
                began, cpu = time.monotonic(), time.thread_time()
                await asyncio.sleep(0.01)
                gaps.append((time.monotonic() - began, time.thread_time() - cpu))

        beating = asyncio.ensure_future(beat())
        try:
            return await call(app, "POST", path, body.encode())
        finally:
            await asyncio.sleep(0.02)
            beating.cancel()

    status, _, answer = asyncio.run(attacked())
    assert max(cpu for _, cpu in gaps) < seconds, "the event loop stood still"
    return status, answer


@pytest.mark.parametrize(("path", "body"), HOSTILE, ids=[f"{path} {body[:40]}" for path, body in HOSTILE])
def test_errors_of_large_bodies_are_small_and_cheap(path: str, body: str) -> None:
    status, answer = while_the_loop_runs(application(StubModel(), tokenizer()), path, body)
    assert status in (400, 404) and len(answer) < 4000, answer[:300]
    assert json.loads(answer)["error"]["message"]
    for echoed in ("k" * 100, "m" * 100, "s" * 100, "t" * 100, "9" * 100):
        assert echoed.encode() not in answer


PROBE_SECONDS = 0.5
"""Time in which a probe is answered during any single request."""


def slowest_probe(url: str, request: bytes) -> float:
    """Return the seconds of the slowest probe while a request is read and answered.

    A probe counts with the CPU time of this process if this is less, because other processes delay it too.
    """
    seconds = list[float]()
    with connect(url, LIVE) as client, ThreadPoolExecutor(1) as threads:
        assert read_answer(client)[0] == 200
        asked = threads.submit(lambda: read_answer(connect(url, request))[0])
        while not asked.done():
            began, cpu = time.monotonic(), time.process_time()
            client.sendall(LIVE)
            assert read_answer(client)[0] == 200
            seconds.append(min(time.monotonic() - began, time.process_time() - cpu))
        assert asked.result() in (400, 404)
    return max(seconds)


@pytest.mark.parametrize(("path", "body"), HOSTILE, ids=[f"{path} {body[:40]}" for path, body in HOSTILE])
def test_probes_are_answered_during_hostile_requests(path: str, body: str) -> None:
    found = list[float]()
    with listening(application(StubModel(), tokenizer())) as url:
        for _ in range(4):  # the machine may be busy
            found.append(slowest_probe(url, post_bytes(path, body.encode())))
            if found[-1] < PROBE_SECONDS:
                return
    raise AssertionError(f"a probe took {min(found):.2f} s")


@pytest.mark.parametrize("path", [PATH, "/v1/chat/completions"])
def test_large_answers_are_rendered_outside_of_the_event_loop(path: str) -> None:
    def scored(input_ids: Any, max_new_tokens: int, streamer: Any, **_: Any) -> Any:
        streamer.put(input_ids)
        for _ in range(max_new_tokens):
            streamer.put(Scored(5, -1.0, [(token, -1.0 - token) for token in range(20)]))
        return torch.cat((input_ids, torch.full((1, max_new_tokens), 5)), 1)

    words = tokenizer()
    words.chat_template = "x"
    app = application(StubModel(scored), words)
    asked = {"prompt": "def", "logprobs": 20, "n": 8, "max_tokens": 300}
    if path != PATH:
        chat = {"messages": [{"role": "user", "content": "def"}], "logprobs": True, "top_logprobs": 20}
        asked = {**asked, **chat}
        del asked["prompt"]
    status, answer = while_the_loop_runs(app, path, json.dumps(asked), 0.15)
    found = json.loads(answer)
    assert status == 200 and found["usage"]["completion_tokens"] == 2400
    scores = found["choices"][7]["logprobs"]
    tops = scores["top_logprobs"] if path == PATH else [row["top_logprobs"] for row in scores["content"]]
    assert len(tops) == 300 and len(tops[299]) == 20
    status, answer = while_the_loop_runs(app, path, json.dumps({**asked, "n": 64}))
    assert status == 400 and b"log-probabilities at once" in answer


def test_bodies_of_other_content_types_are_refused() -> None:
    app = application(StubModel(), tokenizer())
    body = b'{"prompt": "def", "max_tokens": 3}'
    for given, expected in (
        (b"application/json", 200),
        (b"application/json; charset=utf-8", 200),
        (b"application/vnd.api+json", 200),
        (b"text/plain", 400),
        (b"", 400),
        (b"application/x-www-form-urlencoded", 400),
    ):
        headers = [(b"host", b"localhost"), (b"content-type", given)]
        assert asyncio.run(call(app, "POST", PATH, body, headers))[0] == expected, given


def test_the_first_problems_of_a_body_are_named() -> None:
    app = application(StubModel(), tokenizer())
    status, answer = post_json(app, PATH, {"prompt": "a", "max_tokens": 0, "top_p": 7, "secret": 1})
    message = answer["error"]["message"]
    assert status == 400 and all(name in message for name in ("max_tokens", "top_p", "secret")), message


def test_more_tokens_than_may_come_are_refused_before_a_stream_begins() -> None:
    body = {
        "prompt": "a",
        "max_tokens": 5,
        "min_tokens": 100,
        "structured_outputs": {"choice": ["yes"]},
        "stream": True,
    }
    status, answer = post_json(application(StubModel(), tokenizer()), PATH, body)
    assert status == 400 and "min_tokens=100 is more than the 5 tokens" in str(answer)


DEEP = '{"a":' * 900 + "1" + "}" * 900
CHAT = '{"messages":[{"role":"user","content":"a"}],'


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT + '"tools":[{"type":"function","function":{"name":"f","parameters":%s}}]}'),
        ("/v1/chat/completions", CHAT + '"chat_template_kwargs":%s}'),
        ("/v1/chat/completions", '{"messages":[{"role":"user","content":"a","x":%s}]}'),
        ("/v1/chat/completions", '{"messages":[{"role":"assistant","tool_calls":[{"name":"f","arguments":%s}]}]}'),
        ("/v1/chat/completions", '{"messages":[{"role":"assistant","tool_calls":[{"name":"f","arguments":"%s"}]}]}'),
        ("/v1/responses", '{"input":"a","tools":[{"type":"function","name":"f","parameters":%s}]}'),
    ],
)
def test_deep_bodies_are_refused(path: str, body: str) -> None:
    words = tokenizer()
    words.chat_template = "{{ messages | tojson }}{{ tools | tojson }}"
    deep = DEEP.replace('"', r"\"") if '"%s"' in body else DEEP
    status, answer = post_json(application(StubModel(), words), path, json.loads(body % deep))
    assert status == 400 and "is nested in more than 100 levels" in str(answer), (status, answer)


def test_requests_with_two_lengths_are_refused() -> None:
    app = application(StubModel(), tokenizer())
    two = [b"Content-Length: 4", b"Transfer-Encoding: chunked"]
    for pair in (two, two[::-1]):
        head = b"\r\n".join([b"POST /v1/completions HTTP/1.1", b"Host: localhost", *pair])
        with listening(app, ConnectionLimits()) as url, connect(url, head + b"\r\n\r\n0\r\n\r\n" + LIVE) as client:
            client.settimeout(10)
            answer = b"".join(iter(lambda: client.recv(65536), b""))
            assert answer.count(b"HTTP/1.1 ") == 1 and b" 400 " in answer.split(b"\r\n")[0], answer


def test_bodies_in_tiny_chunks_are_refused_early() -> None:
    lines = [b"POST /v1/completions HTTP/1.1", b"Host: localhost", b"Content-Type: application/json"]
    head = b"\r\n".join([*lines, b"Transfer-Encoding: chunked"]) + b"\r\n\r\n"
    with listening(application(StubModel(), tokenizer()), ConnectionLimits()) as url:
        with connect(url, head + b"1\r\n{\r\n" * 2000) as client:
            client.settimeout(10)
            assert client.recv(100).startswith(b"HTTP/1.1 400 ")
        body = json.dumps({"prompt": "a", "max_tokens": 1, "user": "x" * 9000}).encode()
        for size in (10, 1000):  # fewer chunks, or larger ones
            chunks = [body[at : at + size] for at in range(0, len(body), size)]
            data = b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"
            with connect(url, head + data) as client:
                assert read_answer(client)[0] == 200


def test_requests_outside_of_the_running_batch_are_refused_on_demand() -> None:
    model = StubModel()
    model.can_join = lambda **given: "num_beams" not in given and given["max_new_tokens"] < 9  # type: ignore[attr-defined]
    app = application(model, tokenizer(), batch_only=True)
    for more, expected in (({}, 200), ({"num_beams": 2}, 400), ({"max_tokens": 9}, 400)):
        for stream in (False, True) if "num_beams" not in more else (False,):
            body = json.dumps({"prompt": "def", "max_tokens": 3, "stream": stream, **more}).encode()
            status, _, answer = asyncio.run(call(app, "POST", PATH, body))
            assert status == expected and (status == 200 or b"--batch-only" in answer), (more, answer)
    assert asyncio.run(call(app, "GET", "/generate_text/def", b""))[0] == 400
    assert post_json(application(model, tokenizer()), PATH, {"prompt": "def", "num_beams": 2})[0] == 200


# Connections ----------------------------------------------------------------------------------------------------------


def half_body() -> bytes:
    return post_bytes(PATH, b"{", length=100)


def test_half_bodies_do_not_keep_the_probes_and_new_clients_out() -> None:
    app = application(StubModel(), tokenizer())
    with listening(app, ConnectionLimits(connections=20)) as url:
        held = [connect(url, half_body()) for _ in range(40)]
        time.sleep(0.3)
        assert read_answer(connect(url, LIVE))[0] == 200
        asked = json.dumps({"prompt": "def", "max_tokens": 3}).encode()
        assert read_answer(connect(url, post_bytes(PATH, asked)))[0] == 200
        for each in held:
            each.close()


def test_vanished_hosts_are_noticed_within_two_minutes() -> None:
    with (
        listening(application(StubModel(), tokenizer()), ConnectionLimits()) as url,
        mock.patch.object(connections, "keep_alive", wraps=connections.keep_alive) as kept,
    ):
        client = connect(url, LIVE)  # the server closes its socket after the client's
        assert read_answer(client)[0] == 200
        (made,) = kept.call_args.args
        tcp = [
            made.getsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_KEEP{name}")) for name in ("IDLE", "INTVL", "CNT")
        ]
        assert made.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) and tcp[0] + tcp[1] * tcp[2] <= 120
        assert made.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) <= 120_000


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_answers_do_not_wait_for_confirmations_of_the_client(host: str) -> None:
    """Otherwise each answer but the first of a connection takes 40 ms more: its header is sent before its body."""
    try:
        listener = command.listen(host, 0)
    except OSError:
        pytest.skip("this machine has no IPv6")
    with listener, socket.create_connection(listener.getsockname()[:2], timeout=10), listener.accept()[0] as accepted:
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_half_bodies_do_not_close_a_connection_that_is_computed() -> None:
    go = threading.Event()

    def waits(input_ids: Any, **_: Any) -> Any:
        assert go.wait(30)
        return torch.cat((input_ids, torch.tensor([[5]])), 1)

    app = application(StubModel(waits), tokenizer())
    with listening(app, ConnectionLimits(connections=5)) as url:
        asked = json.dumps({"prompt": "def", "max_tokens": 3}).encode()
        computed = connect(url, post_bytes(PATH, asked))
        time.sleep(0.3)
        held = [connect(url, half_body()) for _ in range(20)]
        time.sleep(0.3)
        go.set()
        assert read_answer(computed)[0] == 200
        for each in held:
            each.close()


@pytest.mark.parametrize("more", [b"\r\n", b"G", post_bytes(PATH, b"{}")])
def test_a_client_that_leaves_is_heard_beside_bytes_after_its_request(more: bytes) -> None:
    cancelled = threading.Event()

    def until_cancelled(input_ids: Any, cancellation: Any, **_: Any) -> Any:
        with cancellation.observed(cancelled.set):
            assert cancelled.wait(30)
        raise RuntimeError("cancelled")

    app = application(StubModel(until_cancelled), tokenizer())
    with listening(app, ConnectionLimits()) as url:
        connected = connect(url, post_bytes(PATH, json.dumps({"prompt": "def", "max_tokens": 3}).encode()))
        time.sleep(0.3)
        connected.sendall(more)
        time.sleep(0.2)
        connected.close()
        assert cancelled.wait(5)


def test_a_client_that_closes_its_sending_side_counts_as_gone() -> None:
    """TCP shows the server the same as for a client that leaves, whose computation has to end."""
    cancelled = threading.Event()

    def until_cancelled(input_ids: Any, cancellation: Any, **_: Any) -> Any:
        with cancellation.observed(cancelled.set):
            assert cancelled.wait(30)
        raise RuntimeError("cancelled")

    app = application(StubModel(until_cancelled), tokenizer())
    with listening(app, ConnectionLimits()) as url:
        asked = json.dumps({"prompt": "def", "max_tokens": 3}).encode()
        with connect(url, post_bytes(PATH, asked)) as client:
            time.sleep(0.3)
            client.shutdown(socket.SHUT_WR)
            assert cancelled.wait(5) and read_answer(client)[0] == 0
        assert read_answer(connect(url, LIVE))[0] == 200


def test_requests_that_were_sent_together_are_answered_in_order() -> None:
    app = application(StubModel(), tokenizer())
    asked = post_bytes(PATH, json.dumps({"prompt": "def", "max_tokens": 3}).encode())
    with listening(app, ConnectionLimits()) as url:
        for pause in (0.0, 0.05):
            connected = connect(url, asked)
            time.sleep(pause)
            connected.sendall(asked + LIVE)
            data = b""
            while data.count(b"HTTP/1.1 200") < 3 or b'"live"' not in data:
                more = connected.recv(65536)
                assert more, data
                data += more


def test_a_flood_after_a_request_ends_its_connection() -> None:
    waiting = threading.Event()

    def waits(input_ids: Any, **_: Any) -> Any:
        waiting.wait(5)
        return torch.cat((input_ids, torch.tensor([[5]])), 1)

    app = application(StubModel(waits), tokenizer())
    with listening(app, ConnectionLimits()) as url:
        connected = connect(url, post_bytes(PATH, json.dumps({"prompt": "def", "max_tokens": 3}).encode()))
        time.sleep(0.2)
        with pytest.raises(OSError):
            for _ in range(100):
                connected.sendall(b"x" * 65536)
        waiting.set()


def test_connections_fit_the_limit_of_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [256, 512]
    monkeypatch.setattr(command.resource, "getrlimit", lambda _: tuple(limits))
    monkeypatch.setattr(command.resource, "setrlimit", lambda _, new: limits.__setitem__(slice(None), new))
    said: list[str] = []
    monkeypatch.setattr(command.log, "warning", lambda text, *args: said.append(text % args))
    assert command.affordable_connections(1000) == 512 - command._OTHER_FILES and limits[0] == 512
    assert len(said) == 1 and "ulimit" in said[0]
    limits[:] = [256, 4096]
    assert command.affordable_connections(1000) == 1000 and len(said) == 1


# Logs -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["unread pipe", "full disk", "closed"])
def test_a_log_that_cannot_be_written_holds_up_nothing(kind: str) -> None:
    _, writing = os.pipe()
    if kind == "full disk":
        writing = os.open("/dev/full", os.O_WRONLY)
    elif kind == "closed":
        writing = 999
    dropped: list[int] = []
    writer = LogWriter(writing, lambda: dropped.append(1))
    began = time.monotonic()
    for _ in range(20_000):
        print("a line of the log" * 4, file=writer, flush=True)
    writer.finish()
    assert time.monotonic() - began < 10 and dropped


def test_a_server_starts_without_its_log() -> None:
    dropped: list[int] = []
    before = os.dup(2)
    with open("/dev/full", "w") as full:
        os.dup2(full.fileno(), 2)
    try:
        with log_to_stderr(lambda: dropped.append(1), command.log):
            print("listening", file=sys.stderr, flush=True)
            command.log.warning("a warning")
    finally:
        os.dup2(before, 2)
        os.close(before)
    assert len(dropped) >= 2


@contextmanager
def logging_to(descriptor: int) -> Iterator[list[int]]:
    """Send the log to ``descriptor``, as the server does. Yield a list with an item for each dropped line."""
    dropped: list[int] = []
    before = os.dup(2)
    os.dup2(descriptor, 2)
    try:
        with log_to_stderr(lambda: dropped.append(1), command.log):
            yield dropped
    finally:
        os.dup2(before, 2)
        os.close(before)


@pytest.mark.parametrize("is_forked", [True, False])
def test_workers_answer_while_their_output_is_unread(
    stand: faults.Stand, is_forked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They write megabytes, and the log is a pipe that nobody reads."""
    monkeypatch.setattr(forking, "is_available", lambda: is_forked)
    monkeypatch.setattr(log_writer, "MOST_LINES", 100)
    reading, writing = os.pipe()
    call = {**stand.prompt(), "max_new_tokens": 5, "do_sample": False}
    load = GPT2LMHeadModel.from_pretrained_with_parallel
    with logging_to(writing) as dropped:
        os.close(writing)
        with load(stand.checkpoint, tensor_parallel_size=2, deploy=True) as model:
            found = model.generate(**call, logits_processor=[Shouts()], timeout=60)
            assert torch.equal(found, stand.whole.generate(**call))
            model.restart()
            assert torch.equal(model.generate(**call, logits_processor=[Shouts()], timeout=60), found)
        assert len(dropped) > 1000
        os.close(reading)  # lets the log end


def test_the_last_words_of_a_worker_are_in_the_log(stand: faults.Stand, tmp_path: Path) -> None:
    load, last = GPT2LMHeadModel.from_pretrained_with_parallel, [Shouts(exits=True)]
    with (
        (tmp_path / "log").open("wb") as file,
        logging_to(file.fileno()),
        load(stand.checkpoint, deploy=True) as model,
        pytest.raises(RuntimeError, match="exit code 3"),
    ):
        model.generate(**stand.prompt(), max_new_tokens=5, logits_processor=last, timeout=60)
    lines = (tmp_path / "log").read_text().splitlines()
    assert "the last words" in lines and "written below Python" in lines


def test_a_log_is_written_in_order() -> None:
    reading, writing = os.pipe()
    writer = LogWriter(writing, pytest.fail)
    for number in range(100):
        print(number, file=writer)
    writer.finish()
    os.close(writing)
    with open(reading) as file:
        assert file.read().split() == [str(number) for number in range(100)]


# Other sites, and clients without a key -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("header", "value", "expected"),
    [
        (b"sec-fetch-site", b"cross-site", 403),
        (b"origin", b"https://evil.example", 403),
        (b"origin", b"null", 403),
        (b"origin", b"http://localhost.evil.example", 403),
        (b"origin", b"http://localhost:3000", 200),
        (b"sec-fetch-site", b"same-origin", 200),
        (b"sec-fetch-site", b"none", 200),
    ],
)
def test_pages_of_other_sites_cannot_use_a_server_without_a_key(header: bytes, value: bytes, expected: int) -> None:
    for app in (
        application(StubModel(), tokenizer(), allowed_hosts=["localhost"]),
        application(StubModel(), tokenizer()),
    ):
        headers = [(b"host", b"localhost:8000"), (header, value)]
        for path in ("/v1/models", "/generate_text/def?num_beams=1"):
            assert asyncio.run(call(app, "GET", path, b"", headers))[0] == expected, path
        assert asyncio.run(call(app, "GET", "/health/live", b"", headers))[0] == 200
    guarded = application(StubModel(), tokenizer(), api_key="k")
    headers = [(b"host", b"localhost"), (header, value), (b"authorization", b"Bearer k")]
    assert asyncio.run(call(guarded, "GET", "/v1/models", b"", headers))[0] == 200


def test_health_tells_reasons_to_holders_of_the_key_only(caplog: pytest.LogCaptureFixture) -> None:
    model = StubModel()
    model.health = lambda timeout=2.0: {  # type: ignore[method-assign]
        "healthy": False,
        "reason": "OSError('/srv/customer-x holds no config.json')",
        "ranks": [],
    }
    host, key = (b"host", b"localhost"), (b"authorization", b"Bearer k")
    for others in ((), ((model, tokenizer(), "other"),)):
        caplog.clear()
        guarded = application(model, tokenizer(), api_key="k", others=others)
        for headers in ([host], [host, (b"authorization", b"Bearer wrong")]):
            status, _, body = asyncio.run(call(guarded, "GET", "/health", b"", headers))
            assert status == 503 and b"customer" not in body and b"healthy" in body and b"pid" not in body
        assert "customer-x" in caplog.text
        assert b"customer" in asyncio.run(call(guarded, "GET", "/health", b"", [host, key]))[2]
    plain = application(model, tokenizer())
    assert b"customer" not in asyncio.run(call(plain, "GET", "/health", b"", [host]))[2]
