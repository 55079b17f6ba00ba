"""OpenAI's interface with OpenAI's client, over a small model that transformers computes in this process."""

from __future__ import annotations

import asyncio
import base64
import json
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    BertConfig,
    BertModel,
    ByT5Tokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
)

pytest.importorskip("openai")
pytest.importorskip("uvicorn")

import openai

from oslo_models.server.app import application
from oslo_models.server.connections import ConnectionLimits

from support.corpora import tokenizer
from support.http_server import LocalModel, StubModel, call, listening, post_json
from support.waiting import LIMIT

TEMPLATE = """{% for m in messages %}[{{ m.role }}] {{ m.content }}
{% endfor %}{% if tools %}tools: {{ tools | length }}
{% endif %}{% if mood is defined %}mood: {{ mood }}
{% endif %}{% if add_generation_prompt %}[assistant]{% endif %}"""
CHAT: list[Any] = [{"role": "user", "content": "def?"}]
LOOK = {
    "name": "look",
    "parameters": {"type": "object", "properties": {"at": {"enum": ["a", "b"]}}, "required": ["at"]},
}
LOOK["parameters"]["additionalProperties"] = False  # type: ignore[index]
WAIT = {"name": "wait", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}
TOOLS: list[Any] = [{"type": "function", "function": LOOK}, {"type": "function", "function": WAIT}]


@pytest.fixture(scope="module")
def words() -> Any:
    made = tokenizer()
    made.chat_template = TEMPLATE
    return made


@pytest.fixture(scope="module")
def local(words: Any) -> LocalModel:
    torch.manual_seed(0)
    ids = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    return LocalModel(
        GPT2LMHeadModel(GPT2Config(vocab_size=len(words), n_positions=256, n_embd=48, n_layer=2, n_head=4, **ids))
    )


@pytest.fixture(scope="module")
def app(words: Any, local: LocalModel) -> Any:
    return application(local, words, "local")


@pytest.fixture(scope="module")
def client(app: Any) -> Iterator[openai.OpenAI]:
    with listening(app, ConnectionLimits()) as url:
        yield openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=LIMIT)


def text_of(words: Any, local: LocalModel, prompt: str, most: int, **options: Any) -> str:
    ids_BL = torch.tensor([words(prompt)["input_ids"]])
    options = {"attention_mask": torch.ones_like(ids_BL), "max_new_tokens": most, "do_sample": False, **options}
    return words.decode(local.model.generate(ids_BL, **options)[0, ids_BL.shape[1] :], skip_special_tokens=True)


# Options are applied, or refused by name ------------------------------------------------------------------------------

NO_OPS = {
    "completions": '{"best_of": 1, "echo": false, "n": 1, "logprobs": null, "suffix": "", "skip_special_tokens": true, '
    '"service_tier": "auto", "min_p": 0, "top_k": -1, "stop": [], "logit_bias": {}, "frequency_penalty": 0}',
    "chat": '{"tool_choice": "auto", "parallel_tool_calls": true, "response_format": {"type": "text"}, "tools": [], '
    '"modalities": ["text"], "service_tier": "default", "logprobs": false, "store": false, "metadata": {}}',
}
REFUSED = {
    "completions": '{"best_of": 2, "echo": true, "suffix": "x", "ignore_eos": true, "logprobs": 21, "no_such": false, '
    '"prompt_logprobs": 0, "use_beam_search": true, "stream_options": {"include": true}}',
    "chat": '{"tool_choice": "required", "modalities": ["audio"], "service_tier": "flex", "top_logprobs": 2, '
    '"response_format": {"type": "xml"}, "functions": [{"name": "f"}], "tool_choice ": 1, "reasoning_effort": "low", '
    '"chat_template_kwargs": {"chat_template": "x"}, "structured_outputs": {"json": 1}}',
}


@pytest.mark.parametrize("kind", ["completions", "chat"])
def test_fields_that_ask_for_nothing_are_accepted_and_others_refused_by_name(app: Any, kind: str) -> None:
    path = "/v1/completions" if kind == "completions" else "/v1/chat/completions"
    given = {"prompt": "def"} if kind == "completions" else {"messages": CHAT}
    given["max_tokens"] = 3
    expected = post_json(app, path, given)[1]["choices"]
    fields = json.loads(NO_OPS[kind])
    for some in ({name: value} for name, value in fields.items()):
        status, answer = post_json(app, path, {**given, **some})
        assert status == 200 and answer["choices"] == expected, (some, answer)
    assert post_json(app, path, {**given, **fields})[0] == 200
    for name, value in json.loads(REFUSED[kind]).items():
        status, answer = post_json(app, path, {**given, name: value})
        assert status == 400 and name.strip() in answer["error"]["message"], (name, answer)


def test_log_probabilities_of_completions_and_chats(client: openai.OpenAI, words: Any, local: LocalModel) -> None:
    asked: Any = {"model": "local", "prompt": "def forward(", "max_tokens": 6, "temperature": 0}
    (choice,) = client.completions.create(**asked, logprobs=3).choices
    assert choice.text == text_of(words, local, "def forward(", 6) and choice.logprobs is not None
    found = choice.logprobs
    ids = words("def forward(")["input_ids"]
    for at in range(len(found.tokens or [])):
        with torch.no_grad():
            expected_V = local.model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
        assert found.token_logprobs[at] == pytest.approx(float(expected_V.max()), abs=1e-4)  # type: ignore[index]
        top = expected_V.topk(3)
        given = sorted(found.top_logprobs[at].items(), key=lambda pair: -pair[1])  # type: ignore[index]
        # a part of a character has no text
        texts = ["\ufffd" if name.startswith("bytes:") else name for name, _ in given]
        assert texts == [words.decode([token]) for token in top.indices]
        assert [value for _, value in given] == pytest.approx(top.values.tolist(), abs=1e-4)
        assert found.text_offset[at] == len("".join(found.tokens[:at]))  # type: ignore[index]
        ids.append(int(expected_V.argmax()))
    assert len(found.tokens or []) == 6
    pieces = list(client.completions.create(**asked, logprobs=0, stream=True))
    assert [each for piece in pieces for each in piece.choices[0].logprobs.tokens] == found.tokens  # type: ignore
    said: Any = {"model": "local", "messages": CHAT, "max_tokens": 5, "logprobs": True}
    (chosen,) = client.chat.completions.create(**said, top_logprobs=2).choices
    rows = chosen.logprobs.content  # type: ignore[union-attr]
    assert "".join(row.token for row in rows) == chosen.message.content and len(rows) == 5  # type: ignore[arg-type]
    assert all(len(row.top_logprobs) == 2 and bytes(row.bytes).decode() == row.token for row in rows)  # type: ignore
    assert client.chat.completions.create(**{**said, "logprobs": False}).choices[0].logprobs is None


def test_penalties_stop_tokens_and_other_settings(client: openai.OpenAI, words: Any, local: LocalModel) -> None:
    asked: Any = {"model": "local", "prompt": "class", "max_tokens": 12, "temperature": 0}

    def text(**more: Any) -> Any:
        return client.completions.create(**{**asked, **more}).choices[0]

    plain = text()
    ids = words("class" + plain.text)["input_ids"]
    assert text(frequency_penalty=2, presence_penalty=2).text != plain.text
    ids_BL = torch.tensor([words("class")["input_ids"]])
    new = local.model.generate(ids_BL, max_new_tokens=12, do_sample=False)[0, ids_BL.shape[1] :].tolist()
    stopped = text(extra_body={"stop_token_ids": [new[4]]})
    at = new.index(new[4])
    assert (stopped.text, stopped.finish_reason) == (words.decode(new[:at]), "stop") and ids
    drawn = [text(temperature=2, seed=3, extra_body={"min_p": value}).text for value in (0, 1)]
    assert drawn[0] != drawn[1] == plain.text  # min_p=1 leaves the most probable token only
    (one, two) = client.completions.create(**{**asked, "temperature": 2}, n=2, seed=1).choices
    assert one.text != two.text
    with pytest.raises(openai.BadRequestError, match="num_beams cannot be combined"):
        text(frequency_penalty=1, extra_body={"num_beams": 2})


def test_chat_template_gets_its_variables_and_tools(client: openai.OpenAI, words: Any, local: LocalModel) -> None:
    def content(**more: Any) -> Any:
        asked = {"model": "local", "messages": CHAT, "max_tokens": 6, "temperature": 0, **more}
        return client.chat.completions.create(**asked).choices[0].message.content

    assert content() == text_of(words, local, "[user] def?\n[assistant]", 6)
    mood = content(extra_body={"chat_template_kwargs": {"mood": "good"}})
    assert mood == text_of(words, local, "[user] def?\nmood: good\n[assistant]", 6)
    assert content(tools=TOOLS) == text_of(words, local, "[user] def?\ntools: 2\n[assistant]", 6)
    assert content(tools=TOOLS, tool_choice="none") == content()


@pytest.mark.parametrize("kind", ["stub", "qwen2"])
def test_chat_answers_have_neither_the_prompt_nor_the_end_of_text(words: Any, kind: str) -> None:
    """Streams have neither. One model has formats of reasoning and tool calls in transformers."""
    new = [*words("def forward(")["input_ids"], 0]

    def generate(input_ids: torch.Tensor, streamer: Any, **_: Any) -> torch.Tensor:
        for value in [input_ids, *torch.tensor(new)[:, None]] if streamer else ():
            streamer.put(value)
        return torch.cat((input_ids, torch.tensor([new])), 1)

    model = StubModel(generate)
    model.config.model_type = kind
    with listening(application(model, words)) as url:
        create = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0).chat.completions.create
        asked: dict[str, Any] = {"model": "stub", "messages": CHAT}
        assert create(**asked).choices[0].message.content == "def forward("
        pieces = [piece.choices[0].delta.content or "" for piece in create(**asked, stream=True)]
        assert "".join(pieces) == "def forward("


def test_content_that_is_no_text_is_refused_and_empty_fields_are_not(app: Any) -> None:
    image = [{"type": "text", "text": "what?"}, {"type": "image_url", "image_url": {"url": "http://a/b.png"}}]
    for path, body in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": image}]}),
        ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:x"}]}]}),
    ):
        status, answer = post_json(app, path, body)
        assert status == 400 and re.search("supports text|takes text", answer["error"]["message"]), answer
    empty = {"role": "assistant", "content": "yes", "tool_calls": None, "refusal": None, "name": None}
    assert post_json(app, "/v1/chat/completions", {"messages": [*CHAT, empty, *CHAT], "max_tokens": 2})[0] == 200


def test_models_are_listed_and_found_by_name(words: Any, local: LocalModel) -> None:
    with listening(application(local, words, "org/local", others=[(local, words, "/srv/other")])) as url:
        models = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0).models
        assert [each.id for each in models.list()] == ["org/local", "/srv/other"]
        assert [models.retrieve(name).id for name in ("org/local", "/srv/other")] == ["org/local", "/srv/other"]
        with pytest.raises(openai.NotFoundError, match="no model 'org'"):
            models.retrieve("org")


def test_slow_tokenizers_serve(client: openai.OpenAI) -> None:
    """ByT5: tokens are bytes, so that a character may need several."""
    torch.manual_seed(1)
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 4, "decoder_start_token_id": 0}
    model = LocalModel(T5ForConditionalGeneration(T5Config(vocab_size=384, **sizes, pad_token_id=0, eos_token_id=1)))
    app, words = application(model, ByT5Tokenizer(), "bytes", max_length=128), ByT5Tokenizer()
    ids_BL = torch.tensor([words("Größe")["input_ids"]])
    expected = words.decode(
        model.model.generate(ids_BL, max_new_tokens=20, do_sample=False)[0], skip_special_tokens=True
    )
    for stop in ([], ["never"]):
        asked = {"prompt": "Größe", "max_tokens": 20, "temperature": 0, "stop": stop}
        assert post_json(app, "/v1/completions", asked)[1]["choices"][0]["text"] == expected
    events = asyncio.run(call(app, "POST", "/v1/completions", json.dumps({**asked, "stream": True}).encode()))[2]
    pieces = [json.loads(line[6:]) for line in events.decode().splitlines() if line.startswith("data: {")]
    assert "".join(piece["choices"][0]["text"] for piece in pieces) == expected


def test_texts_are_tokenized_and_back(app: Any, words: Any) -> None:
    status, answer = post_json(app, "/tokenize", {"prompt": "def forward(", "return_token_strs": True})
    ids = words("def forward(")["input_ids"]
    assert status == 200 and (answer["tokens"], answer["count"], answer["max_model_len"]) == (ids, len(ids), 256)
    assert answer["token_strs"] == words.convert_ids_to_tokens(ids)
    assert post_json(app, "/detokenize", {"tokens": ids}) == (200, {"prompt": "def forward("})
    chat = post_json(app, "/tokenize", {"messages": CHAT})[1]["tokens"]
    assert words.decode(chat) == "[user] def?\n[assistant]"
    for path, body in (("/tokenize", {}), ("/tokenize", {"prompt": "a", "messages": CHAT}), ("/detokenize", {})):
        assert post_json(app, path, body)[0] == 400
    assert post_json(app, "/detokenize", {"tokens": [10**6]})[0] == 400


# Further endpoints ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("pooling", "normalize"), [("mean", True), ("cls", False)])
def test_embeddings_are_pooled_and_normalized(words: Any, local: LocalModel, pooling: str, normalize: bool) -> None:
    """Serve embeddings beside a generating model, in both encodings of OpenAI's client."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
    bert = BertModel(BertConfig(vocab_size=len(words), **sizes, max_position_embeddings=64)).eval()
    others = [(LocalModel(bert), words, "bert")]
    app = application(local, words, "local", others=others, pooling=pooling, normalize=normalize)
    texts = ["def", "import torch, forward", "x"]
    expected = []
    for text in texts:
        with torch.no_grad():
            hidden_LD = bert(torch.tensor([words(text)["input_ids"]])).last_hidden_state[0]
        vector_D = hidden_LD.mean(0) if pooling == "mean" else hidden_LD[0]
        expected.append((vector_D / vector_D.norm() if normalize else vector_D).numpy())
    with listening(app) as url:
        one = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        for encoding in ({}, {"encoding_format": "float"}):
            found: Any = one.embeddings.create(model="bert", input=texts, **encoding)
            assert [row.index for row in found.data] == [0, 1, 2] and found.usage.prompt_tokens > 3
            for row, vector_D in zip(found.data, expected, strict=True):
                np.testing.assert_allclose(row.embedding, vector_D, atol=1e-5)
        assert {each.id for each in one.models.list()} == {"local", "bert"}
        with pytest.raises(openai.BadRequestError, match="only generates text"):
            one.embeddings.create(model="local", input="x")
        with pytest.raises(openai.BadRequestError, match="only makes embeddings"):
            one.completions.create(model="bert", prompt="x")
        for wrong in ({"dimensions": 5}, {"input": "def " * 70}, {"input": [""]}, {"input": [[10**6]]}):
            with pytest.raises(openai.BadRequestError):
                one.embeddings.create(**{"model": "bert", "input": "x", **wrong})  # type: ignore[arg-type]
    _, raw = post_json(app, "/v1/embeddings", {"input": "x", "encoding_format": "base64"})
    values = np.frombuffer(base64.b64decode(raw["data"][0]["embedding"]), "<f4")
    np.testing.assert_allclose(values, expected[2], atol=1e-5)


def test_responses_answer_as_chats_do(client: openai.OpenAI, words: Any, local: LocalModel) -> None:
    asked: Any = {"model": "local", "max_output_tokens": 6, "temperature": 0}
    found = client.responses.create(**asked, input="def?", instructions="Be brief.")
    expected = text_of(words, local, "[system] Be brief.\n[user] def?\n[assistant]", 6)
    assert found.output_text == expected and found.status == "incomplete"
    assert found.incomplete_details and found.incomplete_details.reason == "max_output_tokens"
    assert found.usage and found.usage.output_tokens == 6
    turns: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": "def?"}]},
        *(item.model_dump() for item in found.output),
        {"role": "user", "content": "more"},
    ]
    events = list(client.responses.create(**asked, input=turns, stream=True))
    expected = text_of(words, local, f"[user] def?\n[assistant] {found.output_text}\n[user] more\n[assistant]", 6)
    assert "".join(each.delta for each in events if each.type == "response.output_text.delta") == expected
    assert events[-1].type == "response.incomplete" and events[-1].response.output_text == expected
    assert [each.sequence_number for each in events] == list(range(len(events)))
    for wrong in ({"previous_response_id": "resp_1"}, {"tools": [{"type": "web_search"}]}, {"background": True}):
        with pytest.raises(openai.BadRequestError, match=next(iter(wrong))):
            client.responses.create(**asked, input="x", **wrong)


# Structured output ----------------------------------------------------------------------------------------------------


def test_structured_output_without_its_library_is_refused(app: Any) -> None:
    try:
        import llguidance  # noqa: F401
    except ModuleNotFoundError:
        status, answer = post_json(
            app, "/v1/chat/completions", {"messages": CHAT, "response_format": {"type": "json_object"}}
        )
        assert status == 400 and "pip install 'oslo-models[grammar]'" in answer["error"]["message"]


def test_structured_output_follows_schemas_and_grammars(client: openai.OpenAI, seed: int) -> None:
    pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {"age": {"type": "integer"}, "who": {"enum": ["me", "you"]}}}
    schema |= {"required": ["age", "who"], "additionalProperties": False}
    formats: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}
    asked: Any = {"model": "local", "max_tokens": 150, "temperature": 0.5, "seed": seed % 2**31}
    for _ in range(3):
        asked["seed"] += 1
        (choice,) = client.chat.completions.create(**asked, messages=CHAT, response_format=formats).choices
        if choice.finish_reason == "stop":
            person = json.loads(choice.message.content or "")
            assert isinstance(person["age"], int) and person["who"] in ("me", "you") and len(person) == 2
    for wanted, check in (
        ({"regex": "[ab]{3}c"}, lambda text: len(text) == 4 and text[3] == "c" and set(text[:3]) <= {"a", "b"}),
        ({"choice": ["yes", 'no "way"']}, lambda text: text in ("yes", 'no "way"')),
        ({"grammar": 'start: "x" "y"~1..3'}, lambda text: text in ("xy", "xyy", "xyyy")),
    ):
        (chosen,) = client.completions.create(**asked, prompt="x", extra_body={"structured_outputs": wanted}).choices
        assert check(chosen.text) and chosen.finish_reason == "stop", chosen
    for wrong in ({"regex": "((("}, {"json": {"type": "nonsense"}}, {"regex": "a", "choice": ["b"]}, {"choice": []}):
        with pytest.raises(openai.BadRequestError):
            client.completions.create(**asked, prompt="x", extra_body={"structured_outputs": wrong})


def test_forced_tools_are_called(client: openai.OpenAI, seed: int) -> None:
    pytest.importorskip("llguidance")
    asked: Any = {"model": "local", "messages": CHAT, "tools": TOOLS, "max_tokens": 200, "seed": seed % 2**31}
    named: Any = {"type": "function", "function": {"name": "look"}}
    for choice, names in (("required", {"look", "wait"}), (named, {"look"})):
        (found,) = client.chat.completions.create(**asked, tool_choice=choice).choices
        pieces = [each.choices[0] for each in client.chat.completions.create(**asked, tool_choice=choice, stream=True)]
        if found.finish_reason == "length":  # a model with random weights may write spaces until then
            continue
        (made,) = found.message.tool_calls or []
        function: Any = SimpleNamespace(**made.function.model_dump())  # type: ignore[union-attr]
        assert found.finish_reason == "tool_calls" and function.name in names and not found.message.content
        assert json.loads(function.arguments) in ({}, {"at": "a"}, {"at": "b"})
        assert pieces[-1].finish_reason == "tool_calls" and pieces[-1].delta.tool_calls
    with pytest.raises(openai.BadRequestError, match="tool_choice names no tool"):
        client.chat.completions.create(**asked, tool_choice={"type": "function", "function": {"name": "x"}})
