"""The clients of the soak test: each kind of request knows its correct answer, or misbehaves on purpose."""

from __future__ import annotations

import contextlib
import copy
import json
import random
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

LIMIT = 90.0
"""Seconds after which a request counts as hanging."""
ADAPTER, DRAFTER, END = "soak", "drafter", 1
"""Name of the adapter, folder of the draft model, and the end token, which no answer has."""
NEW = 48
"""Tokens of the longest answer."""


class WrongAnswerError(Exception):
    """The server gave a wrong answer."""


class UnavailableError(Exception):
    """Status 429 or 503, or an equivalent event: correct while the server is full, or has no workers."""


@dataclass
class Prompt:
    """A prompt with the answers of transformers, in words by their number; ``adapted`` with the adapter."""

    ids: list[int]
    greedy: list[int]
    beams: list[int]
    adapted: list[int] = field(default_factory=list)


def prepare(folder: Path, count: int, seed: int) -> list[Prompt]:
    """Save a model, its tokenizer, an adapter and a model that drafts tokens. Return prompts with different answers."""
    from peft import LoraConfig, get_peft_model

    torch.set_num_threads(1)  # several threads would wait for each other on a busy machine
    torch.manual_seed(seed)
    sizes = {"vocab_size": 211, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    ids = {"bos_token_id": None, "eos_token_id": END, "pad_token_id": 0, "initializer_range": 0.4}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads, **ids)).double().eval()
    model.save_pretrained(folder)
    _save_tokenizer(folder, sizes["vocab_size"])
    draw = random.Random(seed)
    drafter = copy.deepcopy(model)
    with torch.no_grad():
        for param in drafter.parameters():
            param *= 1 + 0.01 * torch.randn_like(param)  # some drafts are wrong
    drafter.save_pretrained(folder / DRAFTER)
    lora = LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    adapted = get_peft_model(copy.deepcopy(model), lora).double().eval()
    adapted.save_pretrained(folder / ADAPTER)
    drawn = [[draw.randrange(5, 211) for _ in range(draw.randint(2, 60))] for _ in range(2 * count)]
    ids_BL = torch.tensor([[0] * (60 - len(given)) + given for given in drawn])
    options = {"attention_mask": (ids_BL > 0).long(), "do_sample": False, "pad_token_id": 0}
    answers = [
        made.generate(input_ids=ids_BL, max_new_tokens=new, num_beams=beams, **options)[:, 60:].tolist()
        for made, new, beams in ((model, NEW, 1), (model, 8, 3), (adapted, 8, 1))
    ]
    prompts = [Prompt(*row) for row in zip(drawn, *answers, strict=True) if not any(END in ids for ids in row[1:])]
    prompts = prompts[:count]
    if len({tuple(prompt.greedy[:4]) for prompt in prompts}) < 0.9 * count:
        raise RuntimeError("the answers to different prompts are alike: they could not tell crossed answers")
    return prompts


def _save_tokenizer(folder: Path, size: int) -> None:
    """Save a tokenizer with one word for each token, and a decoder that grammars support."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    words = {f"\u2581{text([i]) or 'a'}": i for i in range(size)}
    made = Tokenizer(models.WordLevel(words, unk_token="\u2581a"))
    made.pre_tokenizer = pre_tokenizers.Metaspace()  # type: ignore[assignment]
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(steps)  # type: ignore[assignment]
    special = {"unk_token": "\u2581a", "eos_token": "\u2581b"}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=made, **special)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer.save_pretrained(folder)


def text(ids: list[int]) -> str:
    """As the tokenizer decodes them: the first token is a special one, which it leaves out."""
    return " ".join("abcde"[i] if i < 5 else f"w{i}" for i in ids if i > 0)


def continuation(ids: list[int]) -> str:
    """As the tokenizer decodes them after a prompt."""
    return " " + text(ids)


class Client:
    """A client that draws its next action at random.

    Args:
        drawn: Sampled answers by prompt and seed, shared by all clients: a seed repeats its draw.
    """

    def __init__(self, port: int, name: str, prompts: list[Prompt], drawn: dict[Any, str], seed: int) -> None:
        self.port, self.name, self.prompts, self.drawn = port, name, prompts, drawn
        self.draw = random.Random(seed)

    # Requests with a right answer -------------------------------------------------------------------------------------

    def plain(self) -> None:
        prompt, new = self._prompt()
        answer = self._post("/v1/completions", {**self._asked(prompt), "max_tokens": new})
        self._require(answer["choices"][0]["text"], continuation(prompt.greedy[:new]))

    def several(self) -> None:
        """Several prompts in one request."""
        prompts = [self._prompt()[0] for _ in range(self.draw.randint(2, 5))]
        body = {**self._asked(prompts[0]), "prompt": [prompt.ids for prompt in prompts], "max_tokens": 6}
        choices = self._post("/v1/completions", body)["choices"]
        self._require([each["text"] for each in choices], [continuation(prompt.greedy[:6]) for prompt in prompts])

    def streamed(self) -> None:
        prompt, new = self._prompt()
        body = {**self._asked(prompt), "max_tokens": new, "stream": True}
        found = "".join(choice["text"] for event in self._events(body) for choice in event["choices"])
        self._require(found, continuation(prompt.greedy[:new]))

    def chat(self) -> None:
        prompt, new = self._prompt()
        body = {"messages": [{"role": "user", "content": text(prompt.ids)}], "max_tokens": new, "temperature": 0}
        answer = self._post("/v1/chat/completions", body)
        self._require(answer["choices"][0]["message"]["content"], text(prompt.greedy[:new]))

    def stopped(self) -> None:
        """At a stop string, which is the fifth word; with log-probabilities."""
        prompt, _ = self._prompt()
        expected = continuation(prompt.greedy)
        stop = " " + expected.split()[4]
        answer = self._post("/v1/completions", {**self._asked(prompt), "max_tokens": NEW, "stop": stop, "logprobs": 1})
        self._require(answer["choices"][0]["text"], expected[: expected.index(stop)])

    def sampled(self) -> None:
        """Check that a seed repeats its draw, independently of concurrent requests."""
        prompt, seed = self._prompt()[0], self.draw.randrange(4)
        drawn = {"temperature": 1.3, "top_k": 50, "seed": seed, "max_tokens": 10}
        found = self._post("/v1/completions", {**self._asked(prompt), **drawn})["choices"][0]["text"]
        self._require(found, self.drawn.setdefault((tuple(prompt.ids), seed), found))

    def beams(self) -> None:
        """Computed alone, between the steps of the others."""
        prompt, _ = self._prompt()
        answer = self._post("/v1/completions", {**self._asked(prompt), "max_tokens": 8, "num_beams": 3})
        self._require(answer["choices"][0]["text"], continuation(prompt.beams))

    def adapted(self) -> None:
        """Wait for the turn of the adapter."""
        prompt, _ = self._prompt()
        answer = self._post("/v1/completions", {**self._asked(prompt), "model": ADAPTER, "max_tokens": 8})
        self._require(answer["choices"][0]["text"], continuation(prompt.adapted))

    def structured(self) -> None:
        """Force a word that no other client forces at the same time."""
        word = f" w{self.draw.randrange(10, 50)}"  # no other word begins it, so the text has one token
        body = {**self._asked(self._prompt()[0]), "structured_outputs": {"choice": [word]}, "max_tokens": 5}
        self._require(self._post("/v1/completions", body)["choices"][0]["text"], word)

    def health(self) -> None:
        path = self.draw.choice(["/health", "/health/ready", "/health/live", "/metrics", "/v1/models"])
        status, _ = self._exchange(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        if status != 200 and (status != 503 or path == "/health/live"):
            raise WrongAnswerError(f"{path} has status {status}")
        if status == 503:
            raise UnavailableError

    # Clients that misbehave -------------------------------------------------------------------------------------------

    def leaves(self) -> None:
        """Closes the connection while its answer is computed or sent."""
        prompt, _ = self._prompt()
        body = {**self._asked(prompt), "max_tokens": NEW, "stream": self.draw.random() < 0.5}
        with self._connect() as connected:
            connected.sendall(_post_bytes("/v1/completions", json.dumps(body).encode()))
            connected.settimeout(0.05)
            for _ in range(self.draw.randint(0, 5)):
                with contextlib.suppress(TimeoutError):
                    connected.recv(200)

    def half_sent(self) -> None:
        """Sends a part of its headers or body, waits, and leaves."""
        whole = _post_bytes("/v1/completions", json.dumps(self._asked(self._prompt()[0])).encode())
        with self._connect() as connected:
            connected.sendall(whole[: self.draw.randrange(len(whole))])
            time.sleep(self.draw.choice([0, 0.01, 0.3, 3.0]))

    def malformed(self) -> None:
        bodies: list[bytes] = [b"{", b"[]", b'{"prompt": NaN}', b'{"prompt": "a", "max_tokens": "many"}', b"\xff" * 50]
        bodies += [json.dumps(body).encode() for body in ({"prompt": ""}, {"prompt": "a", "temperature": 1e-40})]
        bodies += [b'{"prompt": "a", "logit_bias": {"5": 1e300}}', b'{"prompt": "\\ud800"}', b'{"prompt": [[1e9]]}']
        bodies += [json.dumps({"prompt": "a " * 5000}).encode(), json.dumps({"prompt": "a", "nonsense": 1}).encode()]
        self._require_refusal("/v1/completions", self.draw.choice(bodies))

    def hostile(self) -> None:
        """Sends a request that would cost the server much more than its sender."""
        chain = "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(900)) + "r900: r900"
        wide = {"type": "object", "properties": {f"k{i}": {"type": "string"} for i in range(4000)}}
        grammars: list[dict[str, Any]] = [{"grammar": chain}, {"json": wide}, {"regex": "(" * 60 + "a{0,900}" * 60}]
        bodies = [json.dumps({"prompt": "a", "structured_outputs": each}).encode() for each in grammars]
        bodies += [b'{"prompt":[' + b",".join([b"{}"] * 300_000) + b"]}", b"[" * 900_000]
        bodies += [b'{"prompt":"a","stop":[' + b",".join([b"0"] * 400_000) + b"]}"]
        self._require_refusal("/v1/completions", self.draw.choice(bodies))

    def _require_refusal(self, path: str, body: bytes) -> None:
        status, answer = self._exchange(_post_bytes(path, body))
        if status in (429, 503):
            raise UnavailableError
        if status != 400 or len(answer) > 4096:
            raise WrongAnswerError(f"status {status} and {len(answer)} bytes for a malformed request: {body[:80]!r}")

    # Details ----------------------------------------------------------------------------------------------------------

    def _prompt(self) -> tuple[Prompt, int]:
        return self.draw.choice(self.prompts), self.draw.randint(1, NEW)

    def _asked(self, prompt: Prompt) -> dict[str, Any]:
        return {"model": self.name, "prompt": prompt.ids, "temperature": 0}

    def _require(self, found: Any, expected: Any) -> None:
        if found != expected:
            others = [prompt for prompt in self.prompts if text(prompt.greedy).startswith(str(found).strip()[:20])]
            whose = f", the answer to {text(others[0].ids)!r}" if others else ""
            raise WrongAnswerError(f"{found!r} instead of {expected!r}{whose}")

    def _connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=LIMIT)

    def _exchange(self, data: bytes) -> tuple[int, bytes]:
        """Send a request. Return the status and the body, which ends with the connection."""
        with self._connect() as connected:
            connected.sendall(data)
            answer = b""
            while more := connected.recv(65536):
                answer += more
        head, _, body = answer.partition(b"\r\n\r\n")
        if not head:
            raise WrongAnswerError("the connection was closed without an answer")
        return int(head.split()[1]), _dechunked(body) if b"chunked" in head.lower() else body

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        status, answer = self._exchange(_post_bytes(path, json.dumps(body).encode()))
        if status in (429, 503):
            raise UnavailableError
        if status != 200:
            raise WrongAnswerError(f"status {status}: {answer[:300]!r}")
        return json.loads(answer)

    def _events(self, body: dict[str, Any]) -> list[Any]:
        status, answer = self._exchange(_post_bytes("/v1/completions", json.dumps(body).encode()))
        if status in (429, 503):
            raise UnavailableError
        if status != 200:
            raise WrongAnswerError(f"status {status}: {answer[:300]!r}")
        events = [line.removeprefix(b"data: ") for line in answer.split(b"\n\n") if line]
        loaded = [json.loads(event) for event in events if event != b"[DONE]"]
        if any(event.get("error", {}).get("code") == "service_unavailable" for event in loaded):
            raise UnavailableError
        if events[-1] != b"[DONE]":
            raise WrongAnswerError(f"a stream ended with {events[-1]!r}")
        return loaded


def _post_bytes(path: str, body: bytes) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", "Connection: close"]
    return "\r\n".join([*lines, f"Content-Length: {len(body)}"]).encode() + b"\r\n\r\n" + body


def _dechunked(body: bytes) -> bytes:
    data = b""
    while body:
        size, _, rest = body.partition(b"\r\n")
        data, body = data + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    return data


KINDS: dict[str, tuple[Callable[[Client], None], float]] = {
    "answer": (Client.plain, 4),
    "several prompts": (Client.several, 1),
    "stream": (Client.streamed, 4),
    "chat": (Client.chat, 1),
    "stop string and log-probabilities": (Client.stopped, 1),
    "sampled with a seed": (Client.sampled, 1),
    "beams": (Client.beams, 0.5),
    "adapter": (Client.adapted, 0.5),
    "structured output": (Client.structured, 1),
    "probes, metrics, models": (Client.health, 1),
    "client leaves": (Client.leaves, 2),
    "half a request": (Client.half_sent, 1),
    "malformed request": (Client.malformed, 2),
    "hostile request": (Client.hostile, 0.5),
}
"""The actions of a client by name, with their frequencies."""
