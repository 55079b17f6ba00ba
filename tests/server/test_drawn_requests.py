"""Drawn requests to models with drawn generation defaults, compared with plain transformers.

The reference resolves the options of a request as the guide states them, calls `generate` of transformers once per
choice, and searches for stop strings token by token. It shares no code with the server.
"""

from __future__ import annotations

import asyncio
import copy
import json
import random
import threading
from typing import Any

import pytest
import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

pytest.importorskip("uvicorn")

from oslo_models.server.app import application
from oslo_models.server.text import TokenDecoder
from oslo_models.server.token_texts import TokenTexts

from support.corpora import metaspace_tokenizer, tokenizer
from support.http_server import LocalModel, call

ROOM = 128
IDS = {"bos_token_id": 0, "eos_token_id": 0}
ARRANGED = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ m.name }}\n{% endfor %}"
TEMPLATES = [
    "{% for m in messages %}{{ m.content }}{% endfor %}",
    "{{ bos_token }}" + ARRANGED + "{% if add_generation_prompt %}[assistant] {% endif %}",
    "{% if tools %}{{ tools | tojson }}{% endif %}" + ARRANGED + "{% if thinking %}<think>{% endif %}",
]
TEXTS = [
    "def",
    "class",
    " return x",
    "import torch, forward",
    "é 😀 naïve",
    "the quick brown",
    "a  b\n\n\tc",
    "日本",
    "<eod>x",
]
TEXTS += ["</s>", "\u200b", "def forward(self", "end."]


class Reference:
    """Mixin of models: subtracts OpenAI's penalties from the logits of one row, and keeps the log-probabilities."""

    penalties = (0.0, 0.0)
    given: Any = None

    def forward(self, *args: Any, **inputs: Any) -> Any:
        made = super().forward(*args, **inputs)  # type: ignore[misc]
        ids_BL = inputs.get("decoder_input_ids", inputs.get("input_ids"))
        if len(ids_BL) > 1:  # beams
            return made
        self.new = [] if self.given is None else [*self.new, int(ids_BL[0, -1])]
        self.given = ids_BL
        logits_V = made.logits[0, -1]
        self.scores.append(logits_V.float().log_softmax(-1))
        count_V = torch.bincount(torch.tensor(self.new, dtype=torch.long), minlength=len(logits_V))
        made.logits = made.logits.clone()
        made.logits[0, -1] -= self.penalties[0] * count_V + self.penalties[1] * (count_V > 0)
        return made

    def begin(self, penalties: tuple[float, float]) -> None:
        self.penalties, self.given, self.scores = penalties, None, list[Any]()


class ReferenceGPT2(Reference, GPT2LMHeadModel):
    pass


class ReferenceLlama(Reference, LlamaForCausalLM):
    pass


class ReferenceBart(Reference, BartForConditionalGeneration):
    pass


class OneAtATime(LocalModel):
    """Seeds are of the process, and the choices of a request are computed in several threads."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self._lock = threading.Lock()

    def generate(self, **options: Any) -> Any:  # type: ignore[override]
        with self._lock:
            return super().generate(**options)


def model_of(rng: random.Random, vocabulary: int) -> Any:
    """A float64 model with tokens that depend on the whole context."""
    sizes: dict[str, Any] = {"vocab_size": vocabulary, "initializer_range": 0.3, "tie_word_embeddings": False, **IDS}
    torch.manual_seed(rng.getrandbits(32))
    kind = rng.choice(["gpt2", "llama", "bart"])
    if kind == "gpt2":
        sizes |= {"n_positions": ROOM, "n_embd": 32, "n_layer": 2, "n_head": 4, "pad_token_id": rng.choice([0, None])}
        made: Any = ReferenceGPT2(GPT2Config(**sizes))
    elif kind == "llama":
        sizes |= {"max_position_embeddings": ROOM, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
        made = ReferenceLlama(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
    else:
        sizes |= {f"{part}_{name}": 4 for part in ("encoder", "decoder") for name in ("attention_heads", "ffn_dim")}
        sizes |= {"max_position_embeddings": ROOM, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1}
        ends = {"forced_eos_token_id": rng.choice([None, 0]), "decoder_start_token_id": 2, "pad_token_id": 1}
        made = ReferenceBart(BartConfig(**sizes, init_std=0.3, **ends))
    return made.double().eval()


def some_tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(3, 500) for _ in range(count)]


def chosen(rng: random.Random, values: dict[str, tuple[float, Any]]) -> dict[str, Any]:
    """Choose some of the fields, each with a probability and its possible values."""
    return {name: rng.choice(each) for name, (share, each) in values.items() if rng.random() < share}


def defaults(rng: random.Random) -> dict[str, Any]:
    """Values of a checkpoint's generation_config."""
    made = chosen(
        rng,
        {
            **{"do_sample": (0.3, [True]), "temperature": (0.2, [0.5, 1.7]), "top_k": (0.2, [0, 3, 20])},
            **{"top_p": (0.2, [0.3, 0.9]), "min_p": (0.1, [0.05]), "typical_p": (0.1, [0.7]), "top_h": (0.05, [0.4])},
            **{"epsilon_cutoff": (0.1, [0.002]), "eta_cutoff": (0.1, [0.002]), "no_repeat_ngram_size": (0.1, [1, 2])},
            **{"repetition_penalty": (0.15, [1.3, 0.7]), "encoder_repetition_penalty": (0.1, [1.4])},
            **{"bad_words_ids": (0.1, [[[each] for each in some_tokens(rng, 20)]])},
            **{
                "suppress_tokens": (0.1, [some_tokens(rng, 30)]),
                "begin_suppress_tokens": (0.1, [some_tokens(rng, 300)]),
            },
            **{"forced_eos_token_id": (0.1, [0]), "forced_bos_token_id": (0.1, [7]), "pad_token_id": (0.05, [1])},
            **{"sequence_bias": (0.1, [[[[each], 5.0] for each in some_tokens(rng, 4)]])},
            **{
                "exponential_decay_length_penalty": (0.05, [(3, 1.5)]),
                "eos_token_id": (0.15, [[0, *some_tokens(rng, 60)]]),
            },
            **{"min_new_tokens": (0.1, [3, 8]), "min_length": (0.1, [3, 12]), "max_length": (0.1, [5, 200])},
            **{"max_new_tokens": (0.1, [3, 9]), "renormalize_logits": (0.1, [True]), "num_beams": (0.1, [2, 3])},
            **{"length_penalty": (0.1, [0.3, 2.0]), "early_stopping": (0.1, [True, "never"])},
            **{"return_dict_in_generate": (0.1, [True]), "output_scores": (0.1, [True]), "use_cache": (0.05, [False])},
            **{"prompt_lookup_num_tokens": (0.05, [3]), "prefill_chunk_size": (0.05, [3])},
            **{"stop_strings": (0.1, ["e", ["e", "in"], ["ret"]])},
        },
    )
    if "use_cache" in made:
        made.pop("prefill_chunk_size", None)  # the server does not start
    return {**made, **({"num_return_sequences": 2} if made.get("do_sample") and rng.random() < 0.2 else {})}


def drawn_request(rng: random.Random) -> tuple[str, dict[str, Any]]:
    path = rng.choice(["/v1/completions"] * 5 + ["/v1/chat/completions"] * 3 + ["/v1/responses"])
    roles = ["user", "assistant", "system", "developer"]
    messages = [{"role": rng.choice(roles), "content": rng.choice(TEXTS)} for _ in range(rng.randint(1, 3))]
    common = {"temperature": (0.3, [0, 0.3, 1.8]), "top_p": (0.2, [0, 0.2, 1]), "stream": (0.3, [True])}
    common |= {"stop": (0.3, ["e", "in", ["r", "st", "\n"], " ", ["er", "e"], ""]), "num_beams": (0.1, [1, 2])}
    body: dict[str, Any] = {"seed": rng.choice([rng.randrange(1000), -1, 2**32 - 1]), **chosen(rng, common)}
    if path == "/v1/responses":
        more = {"max_output_tokens": (0.8, range(1, 12)), "instructions": (0.3, TEXTS)}
        return path, {"input": rng.choice([messages, rng.choice(TEXTS)]), **body, **chosen(rng, more)}
    more = {
        **{"top_k": (0.2, [-1, 0, 1, 4]), "min_p": (0.1, [0, 0.02]), "frequency_penalty": (0.15, [-2, 0.7])},
        **{"presence_penalty": (0.15, [-1, 1.5]), "repetition_penalty": (0.15, [0.5, 1.0]), "n": (0.15, [1, 2, 3])},
        **{"no_repeat_ngram_size": (0.1, [0, 1]), "min_tokens": (0.15, range(6)), "best_of": (0.05, [1, 2])},
        **{"logit_bias": (0.15, [{str(each): rng.choice([-100, 4, 100]) for each in some_tokens(rng, 5)}])},
        **{"stop_token_ids": (0.1, [some_tokens(rng, 32)]), "skip_special_tokens": (0.15, [True, False])},
        **{"max_tokens": (0.85, range(1, 14)), "stream_options": (0.2, [{"include_usage": True}])},
    }
    body |= chosen(rng, more)
    if path == "/v1/completions":
        prompt = rng.choice(
            [rng.choice(TEXTS), rng.sample(TEXTS, 2), some_tokens(rng, 5), [some_tokens(rng, 1), [5, 6]]]
        )
        more = {"logprobs": (0.3, range(5)), "echo": (0.05, [True, False]), "suffix": (0.05, ["x"])}
        return path, {"prompt": prompt, **body, **chosen(rng, more)}
    look = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    more = {"tools": (0.2, [[look]]), "tool_choice": (0.2, ["none"]), "logprobs": (0.3, [True])}
    more |= {"chat_template_kwargs": (0.2, [{"thinking": True}]), "add_generation_prompt": (0.2, [False])}
    body |= chosen(rng, more)
    body |= {"top_logprobs": rng.randint(0, 5)} if "logprobs" in body else {}
    body |= {"continue_final_message": True} if "add_generation_prompt" in body and rng.random() < 0.5 else {}
    return path, {"messages": messages, **body}


class Refused(Exception):
    """The guide states that the server refuses this request."""


class World:
    """A tokenizer, a model and its generation defaults; the server around it, and the reference."""

    def __init__(self, rng: random.Random) -> None:
        self.words = copy.deepcopy(rng.choice([tokenizer, metaspace_tokenizer])())
        if rng.random() < 0.3:
            self.words.add_special_tokens({"additional_special_tokens": ["<|user|>"]})
            self.words.add_tokens(["<think>"])
        self.words.chat_template = rng.choice(TEMPLATES)
        self.model = model_of(rng, len(self.words) + rng.choice([0, 13]))  # vocabularies of models are often padded
        self.is_encoder_decoder = self.model.config.is_encoder_decoder
        self.own = defaults(rng)
        self.config = copy.deepcopy(self.model.generation_config)
        for name, value in self.own.items():
            setattr(self.config, name, value)
        served = copy.deepcopy(self.model)
        served.__class__ = type(self.model).__mro__[2]
        served.generation_config = copy.deepcopy(self.config)
        self.app = application(OneAtATime(served), self.words, "local")

    def prompts(self, path: str, body: dict[str, Any]) -> list[list[int]]:
        if path == "/v1/completions":
            prompt = body["prompt"]
            several = prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
            return [self.words(each)["input_ids"] if isinstance(each, str) else each for each in several]
        messages = body.get("messages", body.get("input"))
        messages = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        first = [{"role": "system", "content": body["instructions"]}] if "instructions" in body else []
        messages = [{**each, "role": each["role"].replace("developer", "system")} for each in (*first, *messages)]
        options = {
            name: body.get(name, name == "add_generation_prompt") for name in ("add_generation_prompt", "thinking")
        }
        options |= body.get("chat_template_kwargs", {})
        tools = None if body.get("tool_choice") == "none" else body.get("tools")
        continues = body.get("continue_final_message", False)
        made = self.words.apply_chat_template(
            messages, tools=tools, continue_final_message=continues, return_dict=True, **options
        )
        return [made["input_ids"]]

    def settings(self, path: str, body: dict[str, Any]) -> GenerationConfig:
        """Return the settings of `generate` that the guide promises, without lengths."""
        made, own = copy.deepcopy(self.config), self.own
        beams = body.get("num_beams") or own.get("num_beams") or 1
        single = ("stream", "frequency_penalty", "presence_penalty")
        if beams > 1 and (self.stops(body) or scores_asked(path, body) is not None or any(map(body.get, single))):
            raise Refused("beams")
        if body.get("echo") or body.get("suffix") or body.get("best_of", 1) not in (1, body.get("n", 1)):
            raise Refused("echo, suffix, best_of")
        for name in ("stop_strings", "num_return_sequences", "return_dict_in_generate", "output_scores", "max_length"):
            setattr(made, name, None)
        made.prompt_lookup_num_tokens = None
        temperature, top_p = body.get("temperature"), body.get("top_p")
        asked = top_p is not None or body.get("top_k", 0) > 0 or body.get("min_p")
        made.do_sample = temperature != 0 and top_p != 0 and bool(temperature or asked or own.get("do_sample"))
        made.temperature = float(temperature or own.get("temperature", 1.0))
        made.top_p = float(top_p or own.get("top_p", 1.0))
        made.top_k = max(body.get("top_k", own.get("top_k", 0)), 0)
        made.num_beams = beams
        for name in ("min_p", "repetition_penalty", "no_repeat_ngram_size"):
            if name in body:
                setattr(made, name, body[name])
        if body.get("min_tokens"):
            made.min_new_tokens = body["min_tokens"]
        biases = {tuple(key): value for key, value in own.get("sequence_bias", ())}
        biases |= {(int(key),): float(value) for key, value in body.get("logit_bias", {}).items()}
        made.sequence_bias = [[list(key), value] for key, value in biases.items()] or None
        made.eos_token_id = [*self.ends, *body.get("stop_token_ids", ())]
        made.pad_token_id = self.ends[0] if made.pad_token_id is None else made.pad_token_id
        return made

    @property
    def ends(self) -> list[int]:
        return self.config.eos_token_id if isinstance(self.config.eos_token_id, list) else [self.config.eos_token_id]

    def stops(self, body: dict[str, Any]) -> list[str]:
        stops = []
        for given in (body.get("stop", []), self.own.get("stop_strings", [])):
            stops += [given] if isinstance(given, str) else given
        return [each for each in stops if each]

    def answers(self, path: str, body: dict[str, Any]) -> tuple[list[list[int]], list[dict[str, Any]]]:
        """Return the prompts, and the expected answers."""
        settings, prompts = self.settings(path, body), self.prompts(path, body)
        answers = []
        for number, ids in enumerate(prompts):
            room = ROOM - (0 if self.is_encoder_decoder else len(ids))
            limit = body.get("max_tokens", body.get("max_output_tokens"))
            if limit is None:
                limit = min(16 if path == "/v1/completions" else self.own.get("max_new_tokens", 1024), room)
            if not ids or limit > room or body.get("min_tokens", 0) > limit:
                raise Refused("lengths")
            settings.max_new_tokens = limit
            for choice in range(body.get("n", 1)):
                seed = (body["seed"] + number * body.get("n", 1) + choice) % 2**32
                answers.append(self.answer(path, body, ids, seed, settings))
        return prompts, answers

    def answer(
        self, path: str, body: dict[str, Any], ids: list[int], seed: int, settings: GenerationConfig
    ) -> dict[str, Any]:
        self.model.begin((body.get("frequency_penalty", 0), body.get("presence_penalty", 0)))
        settings.prefill_chunk_size = None  # `Reference` takes each call for a token
        self.model.generation_config = copy.deepcopy(settings)
        torch.manual_seed(seed)
        ids_BL = torch.tensor([ids])
        out_BL = self.model.generate(ids_BL, attention_mask=torch.ones_like(ids_BL), generation_config=settings)
        new = out_BL[0, 1 if self.is_encoder_decoder else len(ids) :].tolist()
        count = len(new)
        finish = "length" if count == settings.max_new_tokens and new[-1] not in self.ends else "stop"
        if new[-1] in body.get("stop_token_ids", ()):
            new, finish = new[:-1], "stop"
        continues = path == "/v1/completions" or body.get("continue_final_message")
        context = ids if continues and not self.is_encoder_decoder else []
        if self.decode(context, body).endswith("\N{REPLACEMENT CHARACTER}"):
            context = []  # the prompt ends inside a character, so the answer is decoded by itself
        decoded = [self.decode([*context, *new[:length]], body) for length in range(len(new) + 1)]
        text = decoded[-1][len(decoded[0]) :]
        for length, whole in enumerate(decoded[1:], start=1):
            written = whole[len(decoded[0]) :]
            found = [
                (written.find(stop) + len(stop), written.find(stop)) for stop in self.stops(body) if stop in written
            ]
            if found:
                text, new, count, finish = written[: min(found)[1]], new[:length], length, "stop"
                break
        scores = [(token, row) for token, row in zip(new, self.model.scores, strict=False) if token not in self.ends]
        return {"text": text, "finish": finish, "count": count, "scores": scores}

    def decode(self, tokens: list[int], body: dict[str, Any]) -> str:
        return self.words.decode(tokens, skip_special_tokens=body.get("skip_special_tokens", True))


def scores_asked(path: str, body: dict[str, Any]) -> int | None:
    if path == "/v1/completions":
        return body.get("logprobs")
    return body.get("top_logprobs", 0) if body.get("logprobs") else None


def received(path: str, body: dict[str, Any], raw: str, count: int) -> tuple[list[dict[str, Any]], Any]:
    """Return the answers of the server in the form of the reference, and the usage."""
    answers: list[dict[str, Any]] = [{"text": "", "finish": None, "scores": []} for _ in range(count)]
    events = [json.loads(line[6:]) for line in raw.split("\n") if line.startswith("data: {")]
    assert not any("error" in each for each in events if path != "/v1/responses"), events[-1]
    if path == "/v1/responses":
        whole = events[-1]["response"] if body.get("stream") else json.loads(raw)
        answers[0]["text"] = "".join(part["text"] for item in whole["output"] for part in item["content"])
        answers[0]["finish"] = {"completed": "stop", "incomplete": "length"}[whole["status"]]
        deltas = [each["delta"] for each in events if each["type"] == "response.output_text.delta"]
        assert not body.get("stream") or "".join(deltas) == answers[0]["text"]
        return answers, {
            "prompt_tokens": whole["usage"]["input_tokens"],
            "completion_tokens": whole["usage"]["output_tokens"],
        }
    events = events if body.get("stream") else [json.loads(raw)]
    assert not body.get("stream") or raw.endswith("data: [DONE]\n\n")
    for choice in (each for event in events for each in event["choices"]):
        answer, message = answers[choice["index"]], choice.get("delta", choice.get("message", choice))
        answer["text"] += message.get("text", message.get("content")) or ""
        answer["finish"] = choice["finish_reason"] or answer["finish"]
        found = choice.get("logprobs") or {}
        for row in found.get("content", ()):
            answer["scores"].append((row["logprob"], [each["logprob"] for each in row["top_logprobs"]]))
        tops = found.get("top_logprobs") or [{}] * len(found.get("tokens", ()))
        for value, top in zip(found.get("token_logprobs", ()), tops, strict=True):
            answer["scores"].append((value, list(top.values())))
    return answers, events[-1].get("usage")


def require_same(world: World, path: str, body: dict[str, Any], status: int, raw: str) -> None:
    try:
        prompts, expected = world.answers(path, body)
    except Refused:
        assert status == 400
        return
    except (ValueError, TypeError) as error:  # transformers refuses the settings or the template the messages
        assert status == 400, error
        return
    assert status == 200, raw
    found, usage = received(path, body, raw, len(expected))
    if usage is not None:
        assert usage["prompt_tokens"] == sum(map(len, prompts))
        assert usage["completion_tokens"] == sum(each["count"] for each in expected)
    for got, want in zip(found, expected, strict=True):
        if "\N{REPLACEMENT CHARACTER}" in want["text"]:  # a stream cannot take back text that later bytes change
            continue
        assert (got["text"], got["finish"]) == (want["text"], want["finish"])
        asked = scores_asked(path, body)
        assert len(got["scores"]) == (0 if asked is None else len(want["scores"]))
        for (value, top), (token, row_V) in zip(got["scores"], want["scores"], strict=asked is not None):
            best = [max(each, -9999.0) for each in row_V.topk(asked or 0).values.tolist()]
            assert value == pytest.approx(max(float(row_V[token]), -9999.0), abs=1e-4)
            if path == "/v1/completions":  # the sampled token is added, and equal texts are one entry
                assert all(min(abs(each - other) for other in (*best, value)) < 1e-4 for each in top)
            else:
                assert top == pytest.approx(best, abs=1e-4)


def run_requests(seed: int, worlds: int, requests: int) -> None:
    for number in range(worlds):
        rng = random.Random(f"{seed} {number}")
        world = World(rng)
        for _ in range(requests):
            path, body = drawn_request(rng)
            status, _, raw = asyncio.run(call(world.app, "POST", path, json.dumps(body).encode()))
            try:
                require_same(world, path, body, status, raw.decode())
            except BaseException as error:
                error.add_note(f"model {number}: {type(world.model).__name__}, {world.own}\n{path} {body}")
                raise


def test_drawn_requests_get_the_answers_of_transformers(seed: int) -> None:
    run_requests(seed, 4, 6)


@pytest.mark.zoo
def test_many_drawn_requests_get_the_answers_of_transformers(seed: int) -> None:
    run_requests(seed + 1, 50, 10)


# Mistakes that drawn requests found -----------------------------------------------------------------------------------


def test_log_probabilities_of_tokens_that_only_the_model_has() -> None:
    """Vocabularies of models are padded, and any row of their logits may be among the most probable."""
    for words in (tokenizer(), metaspace_tokenizer()):
        assert TokenTexts(words)[len(words) + 5] == ("", b"")


def test_bytes_that_are_no_character_do_not_end_an_answer() -> None:
    """A byte token after others changes the text of all of them, if they are no UTF-8 together."""
    words = metaspace_tokenizer()
    tokens = words.convert_tokens_to_ids(["<0x41>", "<0xE6>", "▁def", "<0xF0>", "<0x9F>", "<0x98>", "<0x80>", "▁x"])
    decoder = TokenDecoder(words)
    assert "".join(map(decoder.step, tokens)).endswith(" def😀 x")
