"""``oslo-models serve`` with OpenAI's client; and the serving script of the documents, as printed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel, GPTNeoConfig, GPTNeoForCausalLM

pytest.importorskip("openai")
pytest.importorskip("uvicorn")

import openai

from oslo_models.cli.main import main
from oslo_models.deploy import EngineError
from oslo_models.server import command
from oslo_models.server.app import application
from oslo_models.server.text import StopAutomaton, StopStrings

from support import ROOT, zoo
from support.corpora import tokenizer
from support.faults import gone
from support.http_server import StubModel, listening
from support.reference import reference_model
from support.served import workers_of
from support.waiting import LIMIT, wait_until

pytestmark = [pytest.mark.usefixtures("warm_module"), pytest.mark.drawn(20, of="file")]

TEMPLATE = """{% for m in messages %}[{{ m.role }}] {{ m.content }}
{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"""
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "def?"}]}]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    tokenizer().save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    sizes = {"hidden_size": 48, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]}
    ids = {"vocab_size": len(tokenizer()), "bos_token_id": 0, "eos_token_id": 0, "max_position_embeddings": 512}
    torch.manual_seed(0)
    GPTNeoForCausalLM(GPTNeoConfig(**sizes, **ids)).save_pretrained(folder)
    return folder


class Whole:
    """Reference results of transformers in one process."""

    def __init__(self, folder: Path) -> None:
        self.model = GPTNeoForCausalLM.from_pretrained(folder)

    def ids(self, ids: list[int], **options: Any) -> list[int]:
        given = torch.tensor([ids])
        out = self.model.generate(given, attention_mask=torch.ones_like(given), pad_token_id=0, **options)
        return out[0].tolist()

    def __call__(self, prompt: str, most: int = 8, **options: Any) -> str:
        """Return the generated continuation."""
        ids = tokenizer()(prompt)["input_ids"]
        new = self.ids(ids, max_new_tokens=most, do_sample=False, **options)[len(ids) :]
        return tokenizer().decode(new, skip_special_tokens=True)

    def documented(self, text: str) -> dict[str, str]:
        """The answer of the example in the documents."""
        options = {"num_beams": 5, "no_repeat_ngram_size": 4, "max_length": 15}
        out = self.ids(tokenizer()(text)["input_ids"], **options)
        return {"inputs": text, "outputs": tokenizer().decode(out, skip_special_tokens=True)}


@pytest.fixture(scope="module")
def whole(checkpoint: Path) -> Whole:
    return Whole(checkpoint)


@contextmanager
def program(*arguments: object, folder: Path, says: str) -> Iterator[SimpleNamespace]:
    """A running Python program, and the address that it prints after ``says``."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")])}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen([sys.executable, *map(str, arguments)], cwd=folder, env=environment, **pipes)
    assert process.stdout is not None
    lines: list[str] = []
    try:
        for line in process.stdout:
            lines.append(line)
            if says in line:
                break
        else:
            pytest.fail("it ended: " + "".join(lines))
        reader = threading.Thread(target=lambda: lines.extend(process.stdout), daemon=True)  # type: ignore[arg-type]
        reader.start()
        url, workers = line.split(says)[1].strip(), workers_of(process.pid)
        yield SimpleNamespace(process=process, url=url, workers=workers, lines=lines)
    finally:
        process.kill()
        process.wait()


def get(url: str, key: str | None = None) -> tuple[int, Any]:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=LIMIT) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def post(url: str, body: str) -> tuple[int, Any]:
    """Post a raw body, which clients may be unable to write."""
    headers = {"Content-Type": "application/json", "Authorization": "Bearer secret"}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body.encode(), headers), timeout=LIMIT) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def client_of(url: str, key: str = "secret") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=LIMIT)


# With workers ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[SimpleNamespace]:
    sizes = ("--tensor-parallel-size", 2, "--max-body-size", 5000, "--port", 0, "--api-key", "secret", "--fuse")
    with program("-m", "oslo_models", "serve", checkpoint, *sizes, folder=checkpoint, says=" at ") as running:
        running.name, running.client = str(checkpoint), client_of(running.url)
        yield running


def test_completions_endpoint_returns_the_text_of_generate(server: SimpleNamespace, whole: Whole) -> None:
    create = server.client.completions.create
    prompts = ["def forward(", "import torch", "class"]
    found = create(model=server.name, prompt=prompts, max_tokens=8, temperature=0)
    assert [choice.text for choice in found.choices] == [whole(prompt) for prompt in prompts]
    assert found.usage.completion_tokens == 24 and {choice.finish_reason for choice in found.choices} == {"length"}
    ids = tokenizer()(prompts)["input_ids"]
    assert found.usage.prompt_tokens == sum(map(len, ids))
    assert create(model=server.name, prompt=ids, max_tokens=8).choices == found.choices
    drawn = [create(model=server.name, prompt="def", temperature=1.5, seed=seed, n=2).choices for seed in (7, 7, 70)]
    assert drawn[0] == drawn[1] != drawn[2] and drawn[0][0].text != drawn[0][1].text
    assert server.client.models.list().data[0].id == server.name


def test_unequal_shares_return_the_text_of_generate(checkpoint: Path, whole: Whole) -> None:
    sizes = ("--tensor-parallel-size", 2, "--tensor-parallel-shares", "3,1", "--port", 0, "--api-key", "secret")
    with program("-m", "oslo_models", "serve", checkpoint, *sizes, folder=checkpoint, says=" at ") as running:
        create = client_of(running.url).completions.create
        prompts = ["def forward(", "import torch"]
        found = create(model=str(checkpoint), prompt=prompts, max_tokens=8, temperature=0)
        assert [choice.text for choice in found.choices] == [whole(prompt) for prompt in prompts]


def test_decoder_with_states_returns_the_text_of_generate(tmp_path: Path) -> None:
    """Answers of a hybrid decoder share the running batch, and the next turn continues from the state of a row."""
    tokenizer().save_pretrained(tmp_path)
    ids = {"vocab_size": len(tokenizer()), "bos_token_id": 0, "eos_token_id": 0, "max_position_embeddings": 128}
    model = reference_model("BambaForCausalLM", zoo.config("bamba", **ids), 0, torch.float32).eval()
    model.save_pretrained(tmp_path)

    def expected(prompt: list[int]) -> list[int]:
        given = torch.tensor([prompt])
        out = model.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=8, pad_token_id=0)
        return out[0, len(prompt) :].tolist()

    prompts = tokenizer()(["def forward(self, x):", "import torch", "class Model(nn.Module):"])["input_ids"]
    sizes = ("--tensor-parallel-size", 2, "--port", 0)
    with program("-m", "oslo_models", "serve", tmp_path, *sizes, folder=tmp_path, says=" at ") as running:
        assert any("a running batch of 8 rows" in line for line in running.lines)
        create = client_of(running.url).completions.create
        found = create(model=str(tmp_path), prompt=prompts, max_tokens=8, temperature=0)
        answers = [expected(prompt) for prompt in prompts]
        assert [choice.text for choice in found.choices] == tokenizer().batch_decode(answers, skip_special_tokens=True)
        turn = [*prompts[0], *answers[0], *prompts[1]]
        (choice,) = create(model=str(tmp_path), prompt=turn, max_tokens=8, temperature=0).choices
        assert choice.text == tokenizer().decode(expected(turn), skip_special_tokens=True)
        with urllib.request.urlopen(f"{running.url}/metrics", timeout=LIMIT) as answer:
            metrics = dict(line.rsplit(" ", 1) for line in answer.read().decode().splitlines() if line[0] != "#")
        assert float(metrics["oslo_models_reused_prompt_tokens_total"]) == len(prompts[0]) + len(answers[0]) - 1


@pytest.mark.parametrize("way", ["lookup", "model"])
def test_drafted_tokens_change_no_answer(tmp_path: Path, way: str) -> None:
    """A GPT-2 with small tied weights repeats its last token, so a step adds several tokens to a stream."""
    tokenizer().save_pretrained(tmp_path)
    ids = {"vocab_size": len(tokenizer()), "bos_token_id": 0, "eos_token_id": 0, "n_positions": 256}
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_embd=48, n_layer=2, n_head=4, **ids)).eval()
    model.save_pretrained(tmp_path)
    given = torch.tensor([tokenizer()("def forward(")["input_ids"]])
    out = model.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=40, do_sample=False)
    expected = tokenizer().decode(out[0, given.shape[1] :], skip_special_tokens=True)
    options = ("--speculative-tokens", 4) if way == "lookup" else ("--speculative-model", tmp_path)
    sizes = ("--tensor-parallel-size", 2, "--port", 0, *options)
    with program("-m", "oslo_models", "serve", tmp_path, *sizes, folder=tmp_path, says=" at ") as running:
        create = client_of(running.url).completions.create
        asked: dict[str, Any] = {"model": str(tmp_path), "prompt": "def forward(", "temperature": 0}
        pieces = list(create(**asked, max_tokens=40, stream=True, stream_options={"include_usage": True}))
        assert "".join(piece.choices[0].text for piece in pieces[:-1]) == expected
        assert pieces[-1].usage.completion_tokens == 40 and pieces[-2].choices[0].finish_reason == "length"
        for most in (7, 8, 9):
            (choice,) = (found := create(**asked, max_tokens=most)).choices
            assert found.usage.completion_tokens == most and choice.finish_reason == "length"
            assert expected.startswith(choice.text)
        stop = expected[len(expected) // 2 :][:3]
        for streams in (False, True):
            found = create(**asked, max_tokens=40, stop=stop, stream=streams)
            (*_, last) = pieces = list(found) if streams else [found]
            assert "".join(piece.choices[0].text for piece in pieces) == expected[: expected.index(stop)]
            assert last.choices[0].finish_reason == "stop"
        with urllib.request.urlopen(f"{running.url}/metrics", timeout=LIMIT) as answer:
            metrics = dict(line.rsplit(" ", 1) for line in answer.read().decode().splitlines() if line[0] != "#")
        assert float(metrics["oslo_models_accepted_tokens_total"]) > 0
        assert float(metrics["oslo_models_accepted_tokens_total"]) <= float(metrics["oslo_models_drafted_tokens_total"])


def test_shares_reach_the_model(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers of equal shares would be the same."""
    seen: list[dict[str, Any]] = []

    def load(name: str, **options: Any) -> StubModel:
        seen.append(options)
        raise LookupError("loaded")

    monkeypatch.setattr(command.auto.AutoModelForCausalLM, "from_pretrained_with_parallel", load)
    sizes = ["--tensor-parallel-size", "2", "--tensor-parallel-shares", "3,1"]
    main(["serve", str(checkpoint), *sizes])
    assert seen[0]["tensor_parallel_shares"] == [3, 1] and seen[0]["deploy"]


def test_heads_are_loaded_on_request(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []

    def load(name: str, **options: Any) -> StubModel:
        seen.append(options)
        raise LookupError("loaded")

    monkeypatch.setattr(command.auto.AutoModelForCausalLM, "from_pretrained_with_parallel", load)
    for options in ((), ("--mtp-heads", "--speculative-tokens", "2")):
        main(["serve", str(checkpoint), *options])
    assert [each["mtp_heads"] for each in seen] == [False, True] and seen[1]["speculative_tokens"] == 2


def test_streamed_completion_ends_at_a_stop_string(server: SimpleNamespace, whole: Whole) -> None:
    create, expected = server.client.completions.create, whole("def forward(", 30)
    options = {"model": server.name, "prompt": "def forward(", "max_tokens": 30}
    pieces = list(create(**options, stream=True, stream_options={"include_usage": True}))
    assert "".join(piece.choices[0].text for piece in pieces[:-1]) == expected and len(pieces) > 10
    assert pieces[-2].choices[0].finish_reason == "length" and pieces[-1].usage.completion_tokens == 30
    stop = expected[len(expected) // 2 :][:3]
    (choice,) = create(**options, stop=[stop, "never to be seen"]).choices
    assert (choice.text, choice.finish_reason) == (expected[: expected.index(stop)], "stop")
    assert "".join(piece.choices[0].text for piece in create(**options, stop=stop, stream=True)) == choice.text


def test_chat_endpoint_applies_the_chat_template(server: SimpleNamespace, whole: Whole) -> None:
    create, expected = server.client.chat.completions.create, whole("[system] Be brief.\n[user] def?\n[assistant]", 9)
    (choice,) = create(model=server.name, messages=CHAT, max_completion_tokens=9).choices
    assert (choice.message.role, choice.message.content) == ("assistant", expected)
    deltas = [piece.choices[0].delta for piece in create(model=server.name, messages=CHAT, max_tokens=9, stream=True)]
    assert "".join(delta.content for delta in deltas) == expected and deltas[0].role == "assistant"


def test_concurrent_clients_get_their_own_completions(server: SimpleNamespace, whole: Whole, seed: int) -> None:
    prompts = [f"def f{seed % 997 + i}(" for i in range(24)]

    def ask(prompt: str) -> str:
        return server.client.completions.create(model=server.name, prompt=prompt, max_tokens=6).choices[0].text

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(ask, prompts)) == [whole(prompt, 6) for prompt in prompts]


def test_short_answer_overtakes_a_long_stream(server: SimpleNamespace, whole: Whole) -> None:
    """Both are computed in the running batch; the server has printed its memory."""
    create, read = server.client.completions.create, threading.Event()
    done = threading.Event()

    def stream() -> str:
        text = ""
        for piece in create(model=server.name, prompt="import", max_tokens=400, temperature=0, stream=True):
            text += piece.choices[0].text
            read.set()
        done.set()
        return text

    with ThreadPoolExecutor(1) as threads:
        long = threads.submit(stream)
        assert read.wait(LIMIT)
        drawn = {"temperature": 1.2, "seed": 5, "max_tokens": 3}
        first = create(model=server.name, prompt="def", **drawn).choices[0].text
        assert create(model=server.name, prompt="class", max_tokens=3, temperature=0).choices[0].text == whole(
            "class", 3
        )
        assert not done.is_set()
        assert long.result(LIMIT) == whole("import", 400)
    assert create(model=server.name, prompt="def", **drawn).choices[0].text == first
    assert any("a running batch of 8 rows of up to 512 tokens, " in line for line in server.lines)


BAD: dict[str, tuple[dict[str, Any], type[openai.APIStatusError], str]] = {
    "a number that is none": ({"max_tokens": "many"}, openai.BadRequestError, "max_tokens"),
    "a number out of range": ({"temperature": 3}, openai.BadRequestError, "temperature"),
    "too many tokens": ({"max_tokens": 600}, openai.BadRequestError, "more than the 512"),
    "a token that there is not": ({"prompt": [5, 10**6]}, openai.BadRequestError, "does not know"),
    "nothing": ({"prompt": ""}, openai.BadRequestError, "prompt"),
    "not supported": ({"echo": True}, openai.BadRequestError, "echo is not supported"),
    "beams and a stream": ({"num_beams": 2, "stream": True}, openai.BadRequestError, "num_beams cannot be combined"),
    "another model": ({"model": "gpt-6"}, openai.NotFoundError, "gpt-6"),
    "too long": ({"prompt": "a" * 6000}, openai.APIStatusError, "5000 bytes"),
    "too many answers": ({"n": 65}, openai.BadRequestError, "at most 64"),
}


@pytest.mark.parametrize("what", BAD)
def test_completions_endpoint_rejects_invalid_fields(server: SimpleNamespace, what: str) -> None:
    given, kind, text = BAD[what]
    with pytest.raises(kind, match=text) as caught:
        server.client.completions.create(model=server.name, prompt="def", extra_body=given)
    assert caught.value.status_code == {"too long": 413, "another model": 404}.get(what, 400)


def test_chat_endpoint_rejects_invalid_messages_and_api_keys(server: SimpleNamespace) -> None:
    for messages in (
        [],
        [{"content": "no role"}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": [{}]}],
    ):
        with pytest.raises(openai.BadRequestError, match="messages"):
            server.client.chat.completions.create(model=server.name, messages=messages)
    with pytest.raises(openai.AuthenticationError, match="API key"):
        client_of(server.url, "wrong").completions.create(model=server.name, prompt="def")
    for path in ("/generate_text/def", "/v1/nothing", "/openapi.json", "/metrics"):
        assert get(f"{server.url}{path}")[0] == 401
    assert get(f"{server.url}/health") == (200, {"healthy": True})
    status, state = get(f"{server.url}/health", "secret")
    assert status == 200 and {rank["pid"] for rank in state["ranks"]} == set(server.workers)


NUMBERS = ["temperature", "top_p", "top_k", "repetition_penalty", "num_beams", "no_repeat_ngram_size", "n", "seed"]
NUMBERS += ["max_tokens", "logit_bias", "presence_penalty", "frequency_penalty", "min_p", "best_of", "logprobs"]
STRINGS = ["prompt", "stop", "model", "user", "suffix", "metadata", "stream_options", "response_format", "tools"]
VALUES = ["NaN", "Infinity", "-Infinity", "1e-320", "1e-40", "1e300", "-1e300", "-1", "0", "1.5", f"1{'0' * 400}"]
VALUES += ['""', '"1e-40"', "true", "[]", "{}", "null"]


def require_refused(status: int, answer: Any) -> None:
    assert status == 400, answer
    assert answer["error"]["type"] == "invalid_request_error" and answer["error"]["message"], answer


def test_no_numeric_field_causes_a_server_error(server: SimpleNamespace) -> None:
    url, drawn = f"{server.url}/v1/completions", '"prompt": "def", "max_tokens": 2, "temperature": 1.0'
    for name in NUMBERS:
        for value in VALUES:
            given = f'{{"5": {value}}}' if name == "logit_bias" else value
            status, answer = post(url, f'{{{drawn}, "{name}": {given}}}')  # of two equal keys, the last one counts
            assert status in (200, 400), (name, value, answer)
            if status == 400:
                require_refused(status, answer)
    refused = [f'"temperature": {value}' for value in ("NaN", "Infinity", "1e-40", "1e-320")]
    refused += [f'"repetition_penalty": {value}' for value in ("NaN", "Infinity", "1e-300", "1e300")]
    refused += [f'"logit_bias": {{"5": {value}}}' for value in ("NaN", "Infinity", "-Infinity", "1e300", "100.1")]
    refused += ['"logit_bias": {"-1": 1}', '"logit_bias": {"1000000": 1}', f'"logit_bias": {{"1{"0" * 30}": 1}}']
    for each in refused:
        for more in ("", ', "stream": true'):
            require_refused(*post(url, f"{{{drawn}, {each}{more}}}"))
    for each in ('"temperature": 0', '"temperature": 1e-9', '"logit_bias": {"5": -100, "6": 100}', '"seed": -5'):
        assert post(url, f"{{{drawn}, {each}}}")[0] == 200, each


def test_lone_surrogates_are_rejected_in_every_string(server: SimpleNamespace) -> None:
    """Put half of a surrogate pair into every string and key of a request."""
    url, half = f"{server.url}/v1/completions", '"a \\ud800 b"'
    bodies = [f'{{"prompt": "def", "max_tokens": 2, "{name}": {half}}}' for name in STRINGS]
    for value in (f"[{half}]", f"{{{half}: 1}}", f'{{"a": {half}}}', f'[["a", {{"b": [{half}]}}]]'):
        bodies += [f'{{"prompt": "def", "max_tokens": 2, "{name}": {value}}}' for name in STRINGS]
    bodies += [f'{{"prompt": "def", {half}: 1}}', half, f"[{half}]"]
    for body in bodies:
        require_refused(*post(url, body))
        require_refused(*post(url, body.replace("ud800", "udfff")))
    chats = [f'[{{"role": "user", "content": {half}}}]', f'[{{"role": {half}, "content": "x"}}]']
    chats += [f'[{{"role": "user", "content": [{{"type": "text", "text": {half}}}]}}]', f'[{{{half}: "x"}}]']
    for messages in chats:
        require_refused(*post(f"{server.url}/v1/chat/completions", f'{{"messages": {messages}, "max_tokens": 2}}'))
    for path in ("%ED%A0%80", "%FF", "%00"):
        assert get(f"{server.url}/generate_text/{path}")[0] in (200, 401)
    assert post(url, '{"prompt": "\\ud83d\\ude00", "max_tokens": 2}')[0] == 200  # both halves form a character
    assert get(f"{server.url}/health") == (200, {"healthy": True})
    status, state = get(f"{server.url}/health", "secret")
    assert status == 200 and {rank["pid"] for rank in state["ranks"]} == set(server.workers)


@pytest.mark.parametrize("key", ["", " ", "\n", "a b", "secret\n", "schlüssel", 5])
def test_unusable_api_keys_are_rejected_before_loading(key: Any, checkpoint: Path) -> None:
    """The command refuses them before loading anything, and so does the application; errors do not show the key."""
    from transformers import AutoTokenizer

    with pytest.raises(ValueError, match="the API key") as caught:
        application(StubModel(), AutoTokenizer.from_pretrained(checkpoint), api_key=key)
    assert "secret" not in str(caught.value) and "schl" not in str(caught.value)


def test_serve_command_rejects_an_empty_api_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "/no/such/model", "--port", "0", "--api-key", ""]) == 2
    assert "the API key is empty" in capsys.readouterr().err


def test_sigterm_finishes_running_requests_and_ends_workers(server: SimpleNamespace, whole: Whole) -> None:
    """The last test of this server: on SIGTERM, the running request is answered, new ones are not."""
    stream = server.client.completions.create(model=server.name, prompt="def", max_tokens=100, stream=True)
    pieces = [next(stream).choices[0]]
    server.process.send_signal(signal.SIGTERM)
    pieces += [piece.choices[0] for piece in stream]
    assert "".join(piece.text for piece in pieces) == whole("def", 100) and pieces[-1].finish_reason
    assert server.process.wait(LIMIT) == 0 and gone(server.workers), server.lines
    assert not any("Traceback" in line or "Error" in line for line in server.lines), server.lines


@pytest.mark.zoo
def test_serve_command_serves_several_models(checkpoint: Path, whole: Whole, tmp_path: Path) -> None:
    """Serve a generating and an embedding model with a key file; workers apply log-probabilities and penalties."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
    bert = BertModel(BertConfig(vocab_size=len(tokenizer()), **sizes)).eval()
    bert.save_pretrained(tmp_path / "bert")
    tokenizer().save_pretrained(tmp_path / "bert")
    (tmp_path / "key").write_text("secret\n")
    options = ("--api-key-file", tmp_path / "key", "--tensor-parallel-size", 2, "--port", 0)
    arguments = ("-m", "oslo_models", "serve", checkpoint, tmp_path / "bert", *options)
    with program(*arguments, folder=checkpoint, says=" at ") as running:
        client = client_of(running.url)
        asked: dict[str, Any] = {"model": str(checkpoint), "prompt": "def", "max_tokens": 8, "temperature": 0}
        plain = client.completions.create(**asked, logprobs=2).choices[0]
        assert plain.text == whole("def") and len(plain.logprobs.tokens) == 8
        assert client.completions.create(**asked, frequency_penalty=2).choices[0].text != plain.text
        text = "import torch"
        with torch.no_grad():
            expected_D = bert(torch.tensor([tokenizer()(text)["input_ids"]])).last_hidden_state[0].mean(0)
        (found,) = client.embeddings.create(model=str(tmp_path / "bert"), input=text).data
        torch.testing.assert_close(torch.tensor(found.embedding), expected_D / expected_D.norm(), atol=1e-5, rtol=1e-4)
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(LIMIT) == 0 and gone(running.workers)


# The documents' script ------------------------------------------------------------------------------------------------

FLASK = """
from oslo import GPTNeoForCausalLM

model = GPTNeoForCausalLM.from_pretrained_with_parallel(
    "EleutherAI/gpt-neo-2.7B",
    tensor_parallel_size=4,
    pipeline_parallel_size=1,
    deployment=True
)

# The features such as model.fuse() can be used together !

from flask import Flask

app = Flask(__name__)


@app.route("/generate_text/<text>")
def generate_text(text):
    inputs = tokenizer(text, return_tensors="pt")
    
    outputs = model.generate(
        **inputs,
        num_beams=5,
        no_repeat_ngram_size=4,
        max_length=15,
    )
    
    outputs = tokenizer.batch_decode(
        outputs,
        skip_special_tokens=True,
    )
    
    return {
        "inputs": text,
        "outputs": outputs[0],
    }


app.run(host="0.0.0.0", port=5000)
"""  # noqa: W293
ADAPTED = {
    "from oslo import": "from oslo_models import",
    '"EleutherAI/gpt-neo-2.7B"': '"."',
    "tensor_parallel_size=4": "tensor_parallel_size=2",
    'host="0.0.0.0", port=5000': 'host="127.0.0.1", port=0',
}
GIVEN = 'from transformers import AutoTokenizer\ntokenizer = AutoTokenizer.from_pretrained(".")\n'


def test_flask_script_of_the_documents_runs(checkpoint: Path, whole: Whole, tmp_path: Path) -> None:
    script = FLASK
    for old, new in ADAPTED.items():
        assert script.count(old) == 1
        script = script.replace(old, new)
    (tmp_path / "app.py").write_text(GIVEN + script)
    with program(tmp_path / "app.py", folder=checkpoint, says="Running on ") as running:
        assert get(f"{running.url}/generate_text/Messi") == (200, whole.documented("Messi"))
        running.process.kill()
        running.process.wait()  # its files and sockets are closed by then, also on a busy machine
        assert gone(running.workers) and len(running.workers) == 2


APPLICATION = """
from oslo_models import GPTNeoForCausalLM
from oslo_models.server.app import application
from transformers import AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(FOLDER)
model = GPTNeoForCausalLM.from_pretrained_with_parallel(FOLDER, deploy=True)
app = application(model, tokenizer)
"""


def test_application_under_uvicorn_reports_a_dead_worker(
    checkpoint: Path, whole: Whole, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run ``uvicorn app:app``, and query its health after a worker dies."""
    name = f"app_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(APPLICATION.replace("FOLDER", repr(str(checkpoint))))
    monkeypatch.syspath_prepend(tmp_path)
    with listening(f"{name}:app") as url:
        assert get(f"{url}/generate_text/Messi") == (200, whole.documented("Messi"))
        assert get(f"{url}/generate_text/Messi?max_length=1")[0] == 400
        status, state = get(f"{url}/health")
        assert status == 200 and state["healthy"]
        os.kill(state["ranks"][0]["pid"], signal.SIGKILL)
        wait_until(lambda: get(f"{url}/health")[0] != 200)
        status, state = get(f"{url}/generate_text/Messi")
        assert status == 503 and "was killed by SIGKILL" in state["error"]["message"]


# Without workers ------------------------------------------------------------------------------------------------------


def acting(generate: Callable[..., Any], folder: Path, **limits: Any) -> Any:
    from transformers import AutoTokenizer

    model = StubModel(generate)
    model.config.model_type = "qwen2"
    return listening(application(model, AutoTokenizer.from_pretrained(folder), **limits))


def test_reasoning_and_tool_calls_are_parsed(checkpoint: Path) -> None:
    said = '<think>\nhm\n</think>\n\nwell<tool_call>{"name": "look", "arguments": {"at": 3}}</tool_call>'
    new = tokenizer()(said)["input_ids"]

    def generate(input_ids: torch.Tensor, streamer: Any, **_: Any) -> torch.Tensor:
        for token in [input_ids[0], *torch.tensor(new)[:, None]] if streamer else ():
            streamer.put(token)
        return torch.cat((input_ids, torch.tensor([new])), 1)

    with acting(generate, checkpoint) as url:
        create, options = client_of(url).chat.completions.create, {"model": "stub", "messages": CHAT}
        (choice,) = create(**options).choices
        (call,) = choice.message.tool_calls
        assert choice.finish_reason == "tool_calls" and "hm" in choice.message.reasoning_content
        assert (call.function.name, json.loads(call.function.arguments)) == ("look", {"at": 3})
        pieces = [piece.choices[0] for piece in create(**options, stream=True)]
        (streamed,) = [call for piece in pieces for call in piece.delta.tool_calls or ()]
        assert vars(streamed.function) == vars(call.function) and pieces[-1].finish_reason == "tool_calls"
        assert (
            "".join(piece.delta.content or "" for piece in pieces).strip() == choice.message.content.strip() == "well"
        )


def test_full_queue_is_rejected_and_disconnected_clients_are_dropped(checkpoint: Path) -> None:
    left, came, go = threading.Event(), threading.Event(), threading.Event()

    def generate(input_ids: torch.Tensor, streamer: Any, **_: Any) -> torch.Tensor:
        if streamer is None:
            came.set()
            assert go.wait(LIMIT)
            return input_ids
        try:
            while True:
                streamer.put(input_ids[0])
                time.sleep(0.01)
        finally:
            left.set()

    with acting(generate, checkpoint, max_queue_size=2) as url, ThreadPoolExecutor(1) as threads:
        create, options = client_of(url).completions.create, {"model": "stub", "prompt": "def"}
        stream = create(**options, stream=True)
        next(stream)
        waiting = threads.submit(create, **options)
        assert came.wait(LIMIT)
        with pytest.raises(openai.RateLimitError, match="2 calls are waiting or running"):
            create(**options)
        stream.close()
        assert left.wait(LIMIT)
        go.set()
        assert waiting.result().choices[0].text == ""


@pytest.mark.parametrize("tokens", [0, 3])
def test_worker_death_in_a_stream_is_reported_to_the_client(checkpoint: Path, tokens: int) -> None:
    """Before the first token, the client gets a status; later, it gets an event."""

    def generate(input_ids: torch.Tensor, streamer: Any, **_: Any) -> torch.Tensor:
        for _ in range(tokens + 1):
            streamer.put(input_ids[0])
        raise EngineError('rank 1 "died"')

    with acting(generate, checkpoint) as url:
        with pytest.raises(openai.APIError, match='rank 1 "died"') as caught:
            list(client_of(url).completions.create(model="stub", prompt="def", stream=True))
        assert getattr(caught.value, "status_code", None) == (None if tokens else 503)


def test_stops_pass_text_up_to_the_first_stop_string_however_it_is_split(seed: int) -> None:
    """For every split, text passes up to the first stop string, excluding the stop string."""
    draw = torch.Generator().manual_seed(seed)
    for _ in range(200):
        text = "".join("ab"[i] for i in torch.randint(2, (12,), generator=draw).tolist())
        cuts = sorted(torch.randint(13, (3,), generator=draw).tolist())
        stops, passed = StopStrings(StopAutomaton(["aab", "bb"])), ""
        for begin, end in zip([0, *cuts], [*cuts, 12], strict=True):
            passed += stops.feed(text[begin:end])
            if stops.hit:
                break
        ends = [at for stop in ("aab", "bb") if (at := text.find(stop)) >= 0]
        assert passed + ("" if stops.hit else stops.held) == (text[: min(ends)] if ends else text)
