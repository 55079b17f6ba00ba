"""Hostile or careless clients over raw sockets, against a server with a stub model."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("uvicorn")

import uvicorn

from oslo_models.cli.main import make_parser
from oslo_models.server import command, errors
from oslo_models.server.app import application
from oslo_models.server.connections import ConnectionLimits
from oslo_models.server.guard import ApiKeys, access_log, log
from oslo_models.server.text import StopAutomaton, StopStrings

from support.corpora import tokenizer
from support.http_server import StubModel, call, connect, listening, post_bytes, post_json, read_answer
from support.waiting import LIMIT, wait_until

PATH = "/v1/completions"
ASKED = json.dumps({"prompt": "def", "max_tokens": 3}).encode()
QUICK = ConnectionLimits(connections=20, header_seconds=0.4, write_seconds=0.5, linger_seconds=0.4)


class CountingTokenizer:
    """A tokenizer that counts its calls, and waits for ``go`` in each call."""

    chat_template = None

    def __init__(self) -> None:
        self.calls, self.go = 0, threading.Event()

    def __call__(self, text: str) -> dict[str, list[int]]:
        self.calls += 1
        assert self.go.wait(LIMIT)
        return {"input_ids": [5] * len(text)}

    def get_vocab(self) -> dict[str, int]:
        return {"abcd": 5}

    def decode(self, ids: Any, skip_special_tokens: bool = False) -> str:
        return "x" * len(ids)


class UntilCancelled:
    """A `generate` that computes until it is cancelled, streamed or not."""

    def __init__(self) -> None:
        self.running, self.ended = threading.Semaphore(0), threading.Semaphore(0)

    def __call__(self, input_ids: Any, cancellation: Any, streamer: Any = None, **_: Any) -> Any:
        gone = threading.Event()
        with cancellation.observed(gone.set):
            if streamer is not None:
                streamer.put(input_ids)
                streamer.put(torch.tensor([5]))
            self.running.release()
            assert gone.wait(LIMIT)
        self.ended.release()
        raise RuntimeError("cancelled")


# Work before checks ---------------------------------------------------------------------------------------------------


def test_prompts_are_counted_and_measured_before_they_are_tokenized() -> None:
    counting = CountingTokenizer()
    app = application(StubModel(), counting)
    for prompt, text in (
        (["a"] * 150_001, "150001 answers are asked for"),
        ("a" * 3000, "3000 characters has more than the 512 tokens"),
        ([5] * 513, "513 tokens"),
        ([[5] * 513], "513 tokens"),
    ):
        status, answer = post_json(app, PATH, {"prompt": prompt})
        assert status == 400 and text in answer["error"]["message"], answer
        status, answer = post_json(app, PATH, {"prompt": prompt, "stream": True})
        assert status == 400 and text in answer["error"]["message"], answer
    assert counting.calls == 0


def test_health_answers_while_all_tokenizer_threads_are_busy() -> None:
    counting = CountingTokenizer()
    app = application(StubModel(), counting)
    with listening(app) as url, ThreadPoolExecutor(40) as threads:
        asked = [threads.submit(lambda: read_answer(connect(url, post_bytes(PATH, ASKED)))[0]) for _ in range(40)]
        wait_until(lambda: counting.calls >= 2)
        asking = connect(url, b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
        asking.settimeout(LIMIT / 2)  # the threads wait for longer
        try:
            assert read_answer(asking)[0] == 200
        finally:
            counting.go.set()
        assert {each.result() for each in asked} == {200}


def test_key_is_checked_before_the_body_is_read() -> None:
    app = application(StubModel(), tokenizer(), api_key="secret")
    with listening(app) as url:
        for given in (
            (),
            ("Authorization: secret",),
            ("Authorization: Bearer wrong",),
            ("Authorization: Basic secret",),
        ):
            status, headers, body = read_answer(connect(url, post_bytes(PATH, b"", *given, length=1000)))
            assert (status, headers["www-authenticate"]) == (401, "Bearer")
            assert json.loads(body)["error"]["code"] == "invalid_api_key"
        for scheme in ("Bearer", "bearer", "BEARER"):
            assert read_answer(connect(url, post_bytes(PATH, ASKED, f"Authorization: {scheme} secret")))[0] == 200


def test_requests_of_different_keys_share_no_prefixes() -> None:
    """Each key has a number of its own, which stays when other keys are replaced. Without keys, there is one number."""
    model, keys = StubModel(), ApiKeys(["one", "two"])
    with listening(application(model, tokenizer(), api_key=keys)) as url:
        for key in ("one", "two", "one"):
            assert read_answer(connect(url, post_bytes(PATH, ASKED, f"Authorization: Bearer {key}")))[0] == 200
        keys.replace(["three", "two"])
        for key in ("two", "three"):
            assert read_answer(connect(url, post_bytes(PATH, ASKED, f"Authorization: Bearer {key}")))[0] == 200
    one, two, again, kept, three = (call["tenant"] for call in model.calls)
    assert (one, two) == (again, kept) and len({one, two, three, 0}) == 4
    with listening(application(model, tokenizer())) as url:
        assert read_answer(connect(url, post_bytes(PATH, ASKED)))[0] == 200
    assert model.calls[-1]["tenant"] == 0


def test_oversized_bodies_are_rejected_by_header_and_by_bytes_received() -> None:
    app = application(StubModel(), tokenizer(), max_body_size=1000)
    with listening(app) as url:
        assert read_answer(connect(url, post_bytes(PATH, b"", length=1001)))[0] == 413
        chunked = f"POST {PATH} HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
        assert read_answer(connect(url, chunked + b"7d0\r\n" + b" " * 2000 + b"\r\n"))[0] == 413


# Slow clients ---------------------------------------------------------------------------------------------------------


def test_slow_headers_bodies_and_rests_are_timed_out() -> None:
    app = application(StubModel(), tokenizer(), body_timeout=0.4, api_key="secret")
    key = "Authorization: Bearer secret"
    with listening(app, QUICK) as url:
        silent, half = connect(url), connect(url, b"POST /v1/comp")
        slow, rest = (
            connect(url, post_bytes(PATH, b"{", key, length=50)),
            connect(url, post_bytes(PATH, b"", length=5000)),
        )
        assert read_answer(silent)[0] == read_answer(half)[0] == 0
        status, _, body = read_answer(slow)
        assert status == 408 and "within 0.4 s" in json.loads(body)["error"]["message"]
        assert read_answer(rest)[0] == 401
        deadline = time.monotonic() + LIMIT
        with pytest.raises(ConnectionError):  # closed, though its body goes on
            while time.monotonic() < deadline:
                rest.sendall(b" ")
                time.sleep(0.05)
        again = connect(url, post_bytes(PATH, ASKED, key))
        assert read_answer(again)[0] == 200
        again.sendall(b"POST /v1/comp")
        assert read_answer(again)[0] == 0


def test_client_that_does_not_read_its_answer_is_dropped() -> None:
    """The stream is cancelled, and its place and its connection become free."""
    ended = threading.Event()

    def act(input_ids: Any, cancellation: Any, streamer: Any, **_: Any) -> Any:
        streamer.put(input_ids)
        try:
            while not cancellation.cancelled:
                streamer.put(torch.full((200,), 5))
                time.sleep(0.001)
        finally:
            ended.set()
        return input_ids

    body = json.dumps({"prompt": "def", "stream": True}).encode()
    with listening(application(StubModel(act), tokenizer()), QUICK) as url:
        unread = socket.socket()
        unread.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # keeps the buffers small
        unread.connect(("127.0.0.1", int(url.rpartition(":")[2])))
        unread.sendall(post_bytes(PATH, body))
        assert ended.wait(LIMIT)
        unread.close()


def test_many_idle_connections_do_not_keep_others_out() -> None:
    app = application(StubModel(), tokenizer())
    with listening(app, ConnectionLimits(connections=10, header_seconds=60)) as url:
        held = [connect(url, b"GET / HT") for _ in range(50)]
        for _ in range(5):
            assert read_answer(connect(url, post_bytes(PATH, ASKED)))[0] == 200
        for each in held[:40]:
            assert read_answer(each)[0] == 0  # closed by the server
        for each in held:
            each.close()


@pytest.mark.parametrize("streams", [False, True])
def test_clients_who_leave_free_their_places(streams: bool) -> None:
    act = UntilCancelled()
    body = json.dumps({"prompt": ["def", "if"], "stream": streams, "max_tokens": 400}).encode()
    app = application(StubModel(act), tokenizer(), max_queue_size=4)
    with listening(app) as url:
        clients = [connect(url, post_bytes(PATH, body)) for _ in range(2)]
        for _ in range(2 if streams else 4):  # the choices of a stream are generated one after the other
            assert act.running.acquire(timeout=LIMIT)
        assert read_answer(connect(url, post_bytes(PATH, body)))[0] == 429
        for client in clients:
            client.close()
        for _ in range(2 if streams else 4):
            assert act.ended.acquire(timeout=LIMIT)
        client = connect(url, post_bytes(PATH, body))
        assert act.running.acquire(timeout=LIMIT)  # places are free again
        client.close()


def test_termination_is_bounded_for_all_clients(tmp_path: Path) -> None:
    """A partial header or body, an unread stream and an endless call do not extend --drain-seconds."""
    act = UntilCancelled()
    args = make_parser().parse_args(["serve", "stub", "--drain-seconds", "1"])
    app = application(StubModel(act), tokenizer())
    server = uvicorn.Server(command._config(app, args))
    server.config.port, server.config.log_level = 0, "critical"
    server.config.configure_logging()
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    stream = json.dumps({"prompt": "def", "stream": True}).encode()
    said = (b"GET / HT", post_bytes(PATH, b"{", length=50), post_bytes(PATH, ASKED), post_bytes(PATH, stream))
    held = [connect(url, each) for each in said]
    assert act.running.acquire(timeout=LIMIT) and act.running.acquire(timeout=LIMIT)
    server.should_exit = True
    thread.join(LIMIT / 2)  # the calls end after that
    assert not thread.is_alive()
    assert act.ended.acquire(timeout=LIMIT) and act.ended.acquire(timeout=LIMIT)
    for each in held:
        each.close()


# Stop strings ---------------------------------------------------------------------------------------------------------


def test_stop_strings_are_limited_in_number_and_length() -> None:
    app = application(StubModel(), tokenizer())
    for stop in (["a" * 257], [str(number) for number in range(33)], "a" * 257):
        status, answer = post_json(app, PATH, {"prompt": "def", "stop": stop})
        assert status == 400 and answer["error"]["param"] == "stop", answer


def test_stop_strings_are_matched_in_linear_time() -> None:
    """Feed 200,000 single characters against stop strings that share long prefixes with the text."""
    stops = StopStrings(StopAutomaton(["a" * 511 + chr(0x4E00 + number) for number in range(64)]))
    began = time.process_time()
    passed = sum(len(stops.feed("a")) for _ in range(200_000))
    assert passed == 200_000 - 511 and not stops.hit
    assert time.process_time() - began < 5


def test_first_completed_stop_string_ends_the_text_however_it_is_cut(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)

    def word(most: int) -> str:
        size = int(torch.randint(1, most + 1, (), generator=draw))
        return "".join("ab"[i] for i in torch.randint(2, (size,), generator=draw).tolist())

    for _ in range(300):
        text, given = word(30), [word(5) for _ in range(3)]
        ends = [end for end in range(len(text) + 1) if text[:end].endswith(tuple(given))]
        longest = max((len(stop) for stop in given if ends and text[: ends[0]].endswith(stop)), default=0)
        expected = text[: ends[0] - longest] if ends else text
        stops, passed, left = StopStrings(StopAutomaton(given)), "", text
        while left and not stops.hit:
            piece, left = left[: (size := len(word(4)))], left[size:]
            passed += stops.feed(piece)
        assert passed + ("" if stops.hit else stops.held) == expected and stops.hit == bool(ends)


# Names, ids and logs --------------------------------------------------------------------------------------------------


def test_foreign_host_names_are_rejected() -> None:
    app = application(StubModel(), tokenizer(), allowed_hosts=["localhost", "::1"])
    for host, expected in {
        "localhost": 200,
        "LOCALHOST:80": 200,
        "[::1]:80": 200,
        "[::1]": 200,
        "evil.example": 400,
        "localhost.evil.example": 400,
        "": 400,
    }.items():
        headers = [(b"host", host.encode()), (b"content-type", b"application/json")]
        assert asyncio.run(call(app, "POST", PATH, ASKED, headers))[0] == expected, host
    assert command.allowed_hosts(None, "127.0.0.1") == ["localhost", "127.0.0.1", "::1"]
    assert command.allowed_hosts(None, "0.0.0.0") is None is command.allowed_hosts("*", "127.0.0.1")
    assert command.allowed_hosts("a.example, b.example", "0.0.0.0") == ["a.example", "b.example"]


def test_answers_have_request_ids() -> None:
    app = application(StubModel(), tokenizer())
    for given, kept in ((b"abc-1.2_3:4", True), (b"a\tb", False), (b"a" * 129, False), (b"", False)):
        headers = [(b"host", b"a"), (b"content-type", b"application/json"), (b"x-request-id", given)]
        for body in (ASKED, b"nonsense"):
            found = asyncio.run(call(app, "POST", PATH, body, headers))[1]["x-request-id"]
            assert (found == given.decode()) == kept and found


def test_logs_have_no_texts(caplog: pytest.LogCaptureFixture) -> None:
    """Neither the access log nor the log of an internal error quotes texts of a request."""

    def act(**_: Any) -> Any:
        raise KeyError("private words")

    caplog.set_level(logging.DEBUG)
    app = application(StubModel(act), tokenizer())
    for path, body in ((PATH, {"prompt": "private words"}), (PATH, {"prompt": ["private"], "n": "private words"})):
        status, answer = post_json(app, path, body)
        assert status in (400, 500) and "private words" not in json.dumps(answer)
    asyncio.run(call(app, "GET", "/generate_text/private words?max_length=private"))
    asyncio.run(call(app, "GET", "/private/words"))
    texts = [record.getMessage() for record in caplog.records if record.name.startswith(log.name)]
    assert [text.split()[3] for text in texts if "127.0.0.1" in text] == [PATH, PATH, "/generate_text/{text}", "-"]
    (failed,) = [text for text in texts if "KeyError at " in text]
    assert not any("private" in text for text in texts) and failed.count("\n") == 0
    assert access_log.name.startswith(log.name)


def test_metrics_count_requests_tokens_and_rejections() -> None:
    app = application(StubModel(), tokenizer(), max_queue_size=2)
    assert post_json(app, PATH, {"prompt": "def", "max_tokens": 7, "stop": "never"})[0] == 200
    assert post_json(app, PATH, {"prompt": "def", "n": 0})[0] == 400
    text = asyncio.run(call(app, "GET", "/metrics"))[2].decode()
    for line in (
        'oslo_models_requests_total{route="/v1/completions",status="200"} 1',
        'oslo_models_requests_total{route="/v1/completions",status="400"} 1',
        "oslo_models_generated_tokens_total 7",
        "oslo_models_time_to_first_token_seconds_count 1",
        "oslo_models_calls_in_flight 0",
        "oslo_models_calls_limit 2",
    ):
        assert line in text.splitlines(), text
    for line in text.splitlines():
        assert line.startswith("# ") or float(line.rpartition(" ")[2]) >= 0


def test_error_messages_with_half_a_surrogate_pair_can_be_sent() -> None:
    assert json.dumps(errors.body(400, "no model 'a\ud800'"), ensure_ascii=False).encode()


# Keys -----------------------------------------------------------------------------------------------------------------


def test_memory_of_the_batch_is_reserved_unless_asked_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    reserved: list[str] = []
    model = SimpleNamespace(can_generate=lambda: True, describe_batch=str, reserve_batch=lambda: reserved.append("all"))
    kind = SimpleNamespace(from_pretrained_with_parallel=lambda *args, **options: model)
    for name, value in (("_config_of", None), ("_kind", kind), ("_embeds", False)):
        monkeypatch.setattr(command, name, lambda *args, value=value: value)
    for options in ([], ["--no-reserve"]):
        args = make_parser().parse_args(["serve", "model", *options])
        assert command._load("model", args, None) is model
    assert reserved == ["all"]


def test_api_keys_come_from_a_file_or_the_environment(tmp_path: Path) -> None:
    file, empty = tmp_path / "key", tmp_path / "empty"
    file.write_text("secret\n")
    empty.write_text("\n")

    def read(environment: dict[str, str], **given: Any) -> Any:
        options = SimpleNamespace(api_key=None, api_key_file=None)
        keys = command.read_api_keys(argparse.Namespace(**{**vars(options), **given}), environment)
        return [each for each in ("secret", "other", "secre", "") if keys.include(each)] if keys else None

    assert read({}, api_key_file=file) == ["secret"] == read({command.KEY_VARIABLE: "secret"})
    assert read({command.KEY_VARIABLE: "other"}, api_key="secret") == ["secret"] and read({}) is None
    file.write_text("other\n\nsecret\r\n")
    assert read({}, api_key_file=file) == ["secret", "other"]
    for environment, given in (({}, {"api_key_file": empty}), ({command.KEY_VARIABLE: ""}, {}), ({}, {"api_key": ""})):
        with pytest.raises(ValueError, match="the API key is empty"):
            read(environment, **given)
    with pytest.raises(SystemExit):
        make_parser().parse_args(["serve", "gpt2", "--api-key", "a", "--api-key-file", "b"])
