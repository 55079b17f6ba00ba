"""Random malformed requests and extreme sampling options: none gets status 500, none leaks a place."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections import Counter
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

from oslo_models.deploy.generation_limits import check_generation
from oslo_models.server.app import application
from oslo_models.server.embeddings import EmbeddingRequest
from oslo_models.server.responses import ResponsesRequest
from oslo_models.server.schema import ChatRequest, CompletionRequest
from oslo_models.server.tokens import DetokenizeRequest, TokenizeRequest

from support.corpora import tokenizer
from support.http_server import StubModel, call

CHAT = [{"role": "user", "content": "def?"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "def", "max_tokens": 3},
    "/v1/chat/completions": {"messages": CHAT, "max_tokens": 3},
    "/v1/responses": {"input": "def", "max_output_tokens": 3},
    "/v1/embeddings": {"input": "def"},
    "/tokenize": {"prompt": "def"},
    "/detokenize": {"tokens": [5, 6]},
}
MODELS = (CompletionRequest, ChatRequest, ResponsesRequest, EmbeddingRequest, TokenizeRequest, DetokenizeRequest)
FIELDS = [*dict.fromkeys(name for each in MODELS for name in each.model_fields), "echo", "suffix", "ignore_eos"]
FIELDS += ["previous_response_id", "nonsense", "modalities", "service_tier"]
SCALARS: list[Any] = [
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    3,
    64,
    65,
    10**6,
    2**31,
    2**63,
    2**64,
    10**40,
    0.0,
    -0.0,
    0.5,
    1.0,
]
SCALARS += [1e-9, 9e-10, 1e-40, 5e-324, 1e9, 1.1e9, 1e300, float("nan"), float("inf"), -float("inf"), 99.9, 100.1]
SCALARS += ["", " ", "def", "auto", "none", "required", "base64", "a" * 600, "\0", "\ud800", "\udfff\ud800", "😀", "1"]
SCALARS += ["0x10", "{{ 1/0 }}", "{% for i in range(10**9) %}x{% endfor %}", "../../etc/passwd", "<|im_start|>"]
KEYS = [
    "type",
    "json_schema",
    "schema",
    "name",
    "function",
    "parameters",
    "role",
    "content",
    "text",
    "5",
    "-1",
    "1e3",
    "",
]
KEYS += ["include_usage", "json", "regex", "choice", "grammar", "format", "\ud800", "tool_calls", "arguments", "\0"]
ROLES = ["user", "assistant", "system", "tool", "developer", "", "\0"]
KINDS = ["text", "input_text", "json_object", "json_schema", "function", "message", "image_url", "function_call_output"]
KINDS += ["input_audio"]


class Fuzz:
    """Draws requests."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)

    def value(self, depth: int = 3) -> Any:
        draw = self.draw
        kind = draw.random()
        if depth == 0 or kind < 0.55:
            return draw.choice(SCALARS)
        if kind < 0.7:
            return [self.value(depth - 1) for _ in range(draw.choice([0, 1, 2, 3, 70]))][: 3 if depth < 3 else 70]
        if kind < 0.8:
            return {"role": draw.choice(ROLES), "content": self.value(depth - 1), "type": draw.choice(KINDS)}
        made = {draw.choice(KEYS): self.value(depth - 1) for _ in range(draw.randint(0, 4))}
        return {**made, "type": draw.choice(KINDS)} if draw.random() < 0.5 else made

    def fields(self) -> tuple[str, bytes]:
        """Return a request with some invalid fields."""
        path = self.draw.choice(list(BODIES))
        body = dict(BODIES[path])
        for _ in range(self.draw.choice([1, 1, 1, 2, 3])):
            body[self.draw.choice(FIELDS)] = self.value()
        if self.draw.random() < 0.1:
            body.pop(self.draw.choice(list(body)))
        return path, json.dumps(body).encode()

    def bytes(self) -> tuple[str, bytes]:
        """A request with a damaged body, or no JSON at all."""
        path, body = self.fields()
        draw, data = self.draw, bytearray(body)
        for _ in range(draw.randint(1, 4)):
            at = draw.randrange(len(data) + 1)
            match draw.randrange(6):
                case 0:
                    del data[at:]
                case 1:
                    data[at:at] = draw.randbytes(draw.randint(1, 5))
                case 2:
                    data[at : at + 1] = b"\xff"
                case 3:
                    data[at:at] = b'{"a":[' * draw.choice([1, 5, 3000])
                case 4:
                    data[at:at] = b"9" * draw.choice([1, 400, 5000])
                case _:
                    data[at:at] = draw.choice([b"\\ud800", b"NaN", b"-Infinity", b"\\u0000", b'"', b"\0", b"1e999"])
        return path, bytes(data)

    def headers(self) -> list[tuple[bytes, bytes]]:
        draw = self.draw
        kinds = [b"application/json", b"text/plain", b"", b"application/json; charset=utf-16", b"multipart/form-data"]
        headers = [(b"host", b"localhost"), (b"content-type", draw.choice(kinds))]
        names = [b"authorization", b"content-length", b"x-request-id", b"accept", b"content-encoding", b"expect"]
        headers += [
            (draw.choice(names), draw.choice([b"", b"\xff\xfe", b"-1", b"9" * 30, b"Bearer ", b"gzip", b"a b"]))
        ]
        return headers if draw.random() < 0.3 else [(b"host", b"localhost"), (b"content-type", b"application/json")]

    def target(self, path: str) -> tuple[str, str]:
        draw = self.draw
        if draw.random() < 0.9:
            return "POST", path
        paths = [
            "/",
            "//",
            "/v1",
            "/v1/completions/",
            "/v1/../v1/models",
            "/generate_text/a b",
            "/generate_text/",
            "/health",
        ]
        paths += ["/generate_text/x?max_length=nan", "/generate_text/x?num_beams=0", "/generate_text/%00?max_length=9"]
        paths += ["/metrics", "/openapi.json", "/v1/models?x=1", "/\xff", "/generate_text/x?no_repeat_ngram_size=-1"]
        return draw.choice(["GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "TRACE", "NONSENSE"]), draw.choice(paths)


class CheckingModel(StubModel):
    """Checks that the model can compute all requests that reach it."""

    def generate(self, **options: Any) -> Any:
        check_generation(options, self.generation_config)
        assert 1 <= options["max_new_tokens"] <= 512 and options["input_ids"].shape[1] <= 512
        assert all(0 <= token < self.config.vocab_size for token in options["input_ids"][0].tolist())
        return super().generate(**options)


class Encoder(StubModel):
    """Stand-in for a deployed encoder."""

    def can_generate(self) -> bool:
        return False

    def __call__(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        return type("Output", (), {"last_hidden_state": torch.ones(*input_ids.shape, 4)})


def require_well_formed(status: int, headers: dict[str, str], body: bytes, sent: Any) -> None:
    assert status < 500, (status, body[:500], sent)
    assert headers["x-request-id"], sent
    if status < 400 or not headers.get("content-type", "").startswith("application/json"):
        return
    if body:
        error = json.loads(body)["error"]
        assert error["message"] and isinstance(error["type"], str), (error, sent)
        assert all(error[name] is None or isinstance(error[name], str) for name in ("param", "code")), (error, sent)


def fuzz(count: int, seed: int) -> Counter[int]:
    words = tokenizer()
    words.chat_template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}[assistant]"
    model, drawn = CheckingModel(vocabulary=len(words)), Fuzz(seed)
    app = application(model, words, others=[(Encoder(vocabulary=len(words)), words, "encoder")])
    statuses: Counter[int] = Counter()

    async def run() -> None:
        for number in range(count):
            path, body = drawn.fields() if number % 3 else drawn.bytes()
            method, target = drawn.target(path)
            headers = drawn.headers()
            found = await asyncio.wait_for(call(app, method, target, body, headers), 30)
            require_well_formed(*found, (method, target, headers, body))
            statuses[found[0]] += 1
        measured = (await call(app, "GET", "/metrics"))[2].decode()
        assert "oslo_models_calls_in_flight 0\n" in measured
        status, _, _ = await call(app, "POST", "/v1/completions", json.dumps(BODIES["/v1/completions"]).encode())
        await asyncio.sleep(0.1)
        assert status == 200 and len(asyncio.all_tasks()) == 1

    asyncio.run(run())
    return statuses


def test_malformed_requests_are_refused(seed: int) -> None:
    statuses = fuzz(1200, seed)
    assert set(statuses) <= {200, 307, 400, 404, 405, 413}, statuses
    assert statuses[200] > 30 and statuses[400] > 400  # the draws include both valid and invalid requests


@pytest.mark.zoo
@pytest.mark.parametrize("part", range(4))
def test_many_malformed_requests_are_refused(seed: int, part: int) -> None:
    assert set(fuzz(5000, seed + part + 1)) <= {200, 307, 400, 404, 405, 413}


EDGES: dict[str, list[Any]] = {
    "temperature": [0, 1e-9, 1e-3, 2],
    "top_p": [1e-300, 1e-9, 1],
    "top_k": [-1, 0, 1, 10**6],
    "min_p": [0, 1e-9, 1],
    "repetition_penalty": [1e-9, 1e-3, 1e9],
    "frequency_penalty": [-2, 2],
    "presence_penalty": [-2, 2],
    "logit_bias": [{"5": 100}, {"5": -100, "6": 100}, {str(token): -100 for token in range(101)}],
    "no_repeat_ngram_size": [0, 1, 50],
    "seed": [0, -1, 2**64],
    "logprobs": [0, 20],
    "stop": [["\0", "a"], "😀"],
}


class SmallModel(StubModel):
    """Computes with transformers in this process."""

    def __init__(self) -> None:
        super().__init__(vocabulary=101)
        torch.manual_seed(0)
        sizes = {"vocab_size": 101, "n_positions": 512, "n_embd": 16, "n_layer": 1, "n_head": 2}
        self.model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, pad_token_id=0)).eval()
        self.generation_config = self.model.generation_config

    def generate(
        self, seed: Any, cancellation: Any, streamer: Any, decoding: Any = None, tenant: int = 0, **options: Any
    ) -> Any:
        check_generation(options, self.generation_config)
        if decoding is not None:
            options["custom_generate"] = decoding.method(streamer)
        return self.model.generate(**options, streamer=streamer)


def test_edges_of_sampling_can_be_computed() -> None:
    """Test all pairs of accepted extreme values."""
    app = application(SmallModel(), tokenizer())
    pairs = [pair for one, other in itertools.combinations(EDGES, 2) for pair in itertools.product([one], [other])]

    async def run() -> None:
        for one, other in pairs:
            for at in range(max(len(EDGES[one]), len(EDGES[other]))):
                some = {name: EDGES[name][at % len(EDGES[name])] for name in (one, other)}
                body = {"prompt": [5, 6], "max_tokens": 2, "temperature": 1.0, **some}
                status, _, answer = await call(app, "POST", "/v1/completions", json.dumps(body).encode())
                assert status == 200, (some, answer)

    asyncio.run(run())
