"""Defaults and combinations of request and checkpoint options, compared with plain transformers."""

from __future__ import annotations

import asyncio
import copy
import json
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertModel, GenerationConfig, GPT2Config, GPT2LMHeadModel

pytest.importorskip("uvicorn")

from oslo_models.cli import main as cli
from oslo_models.deploy.cancellation import CallCancelled
from oslo_models.deploy.decoding import Decoding
from oslo_models.server import command
from oslo_models.server.app import application
from oslo_models.server.generation_defaults import GenerationDefaults
from oslo_models.server.responses import ResponsesRequest
from oslo_models.server.schema import ChatRequest, CompletionRequest

from support.corpora import metaspace_tokenizer, tokenizer
from support.http_server import LocalModel, StubModel, call, post_json

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
SPACES = {str(token): -100 for token in tokenizer(vocabulary=1000)(" \n\t\r")["input_ids"]}
"""A model with random weights may write spaces forever."""
IDS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}


def small_model(words: Any, **defaults: Any) -> LocalModel:
    """A model with these generation defaults in its checkpoint."""
    torch.manual_seed(0)
    sizes = {"n_positions": 256, "n_embd": 48, "n_layer": 2, "n_head": 4}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=len(words), **sizes, **IDS))
    model.generation_config = GenerationConfig(**IDS, **defaults)
    return LocalModel(model)


def new_text(words: Any, local: LocalModel, prompt: str, most: int, **options: Any) -> str:
    """Return the text that transformers generates."""
    ids_BL = torch.tensor([words(prompt)["input_ids"]])
    options = {"attention_mask": torch.ones_like(ids_BL), "max_new_tokens": most, **options}
    out_BL = local.model.generate(ids_BL, **options)
    return words.decode(out_BL[0, ids_BL.shape[1] :], skip_special_tokens=True)


def completion(app: Any, **fields: Any) -> tuple[int, Any]:
    status, answer = post_json(app, "/v1/completions", {"prompt": "class", "max_tokens": 10, **fields})
    return status, answer["choices"][0]["text"] if status == 200 else answer["error"]


# Defaults of the checkpoint -------------------------------------------------------------------------------------------

ONE_ROW: list[dict[str, Any]] = [
    {"stream": True},
    {"stop": "x"},
    {"frequency_penalty": 1},
    {"presence_penalty": 1},
    {"logprobs": 1},
    {"structured_outputs": {"choice": ["abc"]}},
]


@pytest.mark.parametrize("fields", ONE_ROW, ids=lambda fields: next(iter(fields)))
@pytest.mark.parametrize("asks", ["request", "checkpoint"])
def test_beams_are_refused_by_name_where_an_answer_is_one_row(fields: dict[str, Any], asks: str) -> None:
    words = tokenizer()
    local = small_model(words, **({"num_beams": 4} if asks == "checkpoint" else {}))
    app = application(local, words, "local")
    beams = {"num_beams": 4} if asks == "request" else {}
    status, text = completion(app, **beams)
    assert (status, text) == (200, new_text(words, local, "class", 10, num_beams=4))
    status, error = completion(app, **beams, **fields)
    assert status == 400 and error["param"] == "num_beams", error
    assert "num_beams" in error["message"] and "streamer" not in error["message"]
    name = "structured output" if "structured_outputs" in fields else next(iter(fields))
    assert name in error["message"] and ("generation_config" in error["message"]) == (asks == "checkpoint")
    if "stop" in fields:
        assert completion(app, num_beams=1, **fields)[0] == 200


def test_several_rows_never_become_one_answer() -> None:
    """This holds also if a model computes rows that were not requested."""

    def generate(input_ids: torch.Tensor, streamer: Any, **_: Any) -> torch.Tensor:
        streamer.put(input_ids)
        streamer.put(torch.tensor([5, 6]))
        return torch.cat((input_ids, torch.tensor([[5]])), 1)

    status, _ = completion(application(StubModel(generate), tokenizer(), "stub"), stop="never")
    assert status == 500
    local = small_model(tokenizer(), num_beams=2)
    with pytest.raises(ValueError, match="num_beams=1"):
        local.generate(None, None, None, Decoding(presence_penalty=1.0), input_ids=torch.tensor([[5, 6]]))


@pytest.mark.parametrize(
    "defaults",
    [
        {"return_dict_in_generate": True, "output_scores": True},
        {"num_return_sequences": 2, "do_sample": True, "temperature": 1e-6},
        {"prompt_lookup_num_tokens": 3},
        {"output_hidden_states": True, "return_dict_in_generate": True},
    ],
    ids=lambda defaults: next(iter(defaults)),
)
def test_the_form_of_results_does_not_depend_on_the_checkpoint(defaults: dict[str, Any]) -> None:
    words = tokenizer()
    app = application(small_model(words, **defaults), words, "local")
    expected = new_text(words, small_model(words), "class", 10, do_sample=False)
    for fields in ({}, {"stop": "never"}, {"logprobs": 1}, {"presence_penalty": 1e-9}):
        assert completion(app, **fields) == (200, expected), fields


@pytest.mark.parametrize("beams", [1, 3])
def test_the_form_of_generated_text_does_not_depend_on_the_checkpoint(beams: int) -> None:
    words = tokenizer()
    defaults = {"return_dict_in_generate": True, "output_scores": True, "num_return_sequences": 2}
    app = application(small_model(words, **{**defaults, "num_beams": 2}), words, "local")
    expected = new_text(words, small_model(words), "class", 10, num_beams=beams, no_repeat_ngram_size=4)
    length = len(words("class")["input_ids"]) + 10
    path = f"/generate_text/class?max_length={length}&num_beams={beams}"
    status, _, answer = asyncio.run(call(app, "GET", path))
    assert (status, json.loads(answer)) == (200, {"inputs": "class", "outputs": f"class{expected}"})


def test_stop_strings_biases_and_lengths_of_the_checkpoint_apply() -> None:
    words = copy.deepcopy(tokenizer())
    plain = small_model(words)
    whole = new_text(words, plain, "class", 10, do_sample=False)
    app = application(small_model(words, stop_strings=[whole[6:8]]), words, "local")
    assert completion(app) == (200, whole[: whole.index(whole[6:8])])
    biases = {(7,): 50.0, (9,): 40.0}
    app = application(small_model(words, sequence_bias=[[list(key), value] for key, value in biases.items()]), words)
    expected = new_text(words, plain, "class", 10, sequence_bias={**biases, (9,): 60.0})
    assert completion(app, logit_bias={"9": 60}) == (200, expected)
    words.chat_template = TEMPLATE
    app = application(small_model(words, max_new_tokens=7, min_new_tokens=7), words, "local")
    answer = post_json(app, "/v1/chat/completions", {"messages": [{"role": "user", "content": "class"}]})[1]
    assert answer["usage"]["completion_tokens"] == 7


@pytest.mark.parametrize("name", ["dola_layers", "force_words_ids", "num_beam_groups", "penalty_alpha"])
def test_ways_of_decoding_that_the_server_lacks_are_refused_before_it_answers(name: str) -> None:
    config = GenerationConfig()
    setattr(config, name, {"dola_layers": "low", "force_words_ids": [[1]], "num_beam_groups": 2}.get(name, 0.6))
    with pytest.raises(ValueError, match=name):
        GenerationDefaults(config)


def test_a_final_stop_token_is_counted_on_every_path_of_an_answer() -> None:
    words = tokenizer()
    local = small_model(words)
    ids = torch.tensor([words.encode("class")])
    first = int(local.model.generate(ids, max_new_tokens=1, do_sample=False)[0, -1])
    app = application(local, words, "local")
    given = {"model": "local", "prompt": "class", "max_tokens": 6, "temperature": 0, "stop_token_ids": [first]}
    for more in ({}, {"logprobs": 1}, {"stop": "never"}):
        status, answer = post_json(app, "/v1/completions", {**given, **more})
        assert (status, answer["usage"]["completion_tokens"]) == (200, 1), more


# Sampling -------------------------------------------------------------------------------------------------------------


def drawn(local: LocalModel, request: Any) -> set[int]:
    """Return the tokens of 800 draws for a request."""
    settings = GenerationDefaults(local.generation_config).settings(request)
    ids_BL = torch.tensor([[5, 6, 7]])
    options = {"max_new_tokens": 1, "num_return_sequences": 800, "eos_token_id": None, **settings}
    return set(local.model.generate(ids_BL, attention_mask=torch.ones_like(ids_BL), **options)[:, -1].tolist())


@pytest.mark.parametrize("kind", [CompletionRequest, ChatRequest])
def test_sampling_without_top_k_reaches_every_token_unless_the_checkpoint_limits_it(kind: Any) -> None:
    """OpenAI documents this default; transformers samples from the 50 best tokens by default."""
    given: dict[str, Any] = {"prompt": "x"} if kind is CompletionRequest else {"messages": [{"role": "user"}]}
    words = tokenizer()
    free, limited = small_model(words), small_model(words, do_sample=True, top_k=3)
    torch.manual_seed(1)
    for fields in ({"temperature": 2}, {"top_p": 1}, {"min_p": 1e-9}, {"temperature": 2, "top_k": -1}):
        assert len(drawn(free, kind(**given, **fields))) > 100, fields
    assert len(drawn(limited, kind(**given))) <= 3
    assert len(drawn(limited, kind(**given, temperature=2))) <= 3
    assert len(drawn(limited, kind(**given, temperature=2, top_k=0))) > 100
    for greedy in ({"temperature": 0}, {"top_p": 0}, {"temperature": 2, "top_p": 0}):
        assert not GenerationDefaults(limited.generation_config).settings(kind(**given, **greedy))["do_sample"]


def test_a_bias_for_a_token_that_there_is_not_is_refused_by_its_name() -> None:
    words = tokenizer()
    app = application(small_model(words), words, "local")
    for token in ("99999", "-1"):
        status, error = completion(app, logit_bias={token: 5})
        assert status == 400 and error["param"] == "logit_bias" and f"token {token}" in error["message"], error


# Structured output ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["a<|end|>b", "a<think>b", "a<eod>b", "😀<|end|>\n"])
def test_literals_of_a_grammar_may_contain_the_texts_of_added_tokens(text: str) -> None:
    """Test with ordinary tokens: special tokens are not in the answer, and an end token would end it."""
    pytest.importorskip("llguidance")
    words = copy.deepcopy(tokenizer(vocabulary=1000))
    words.add_special_tokens({"additional_special_tokens": ["<|end|>"]})
    words.add_tokens(["<think>"])
    app = application(small_model(words), words, "local")
    by_key = {"type": "object", "properties": {text: {"const": 1}}, "required": [text], "additionalProperties": False}
    regex = {"regex": re.escape(text).replace("\n", "n")}
    for wanted in ({"choice": [text]}, regex, {"grammar": f"start: {json.dumps(text)}"}):
        assert completion(app, max_tokens=60, structured_outputs=wanted) == (200, text), wanted
    for schema, value in (({"enum": [text]}, text), ({"const": [text]}, [text]), (by_key, {text: 1})):
        status, answer = completion(app, max_tokens=100, logit_bias=SPACES, structured_outputs={"json": schema})
        assert status == 200 and json.loads(answer) == value, (schema, answer)


def test_a_grammar_of_special_tokens_still_gets_them() -> None:
    pytest.importorskip("llguidance")
    words = copy.deepcopy(tokenizer(vocabulary=1000))
    words.add_special_tokens({"additional_special_tokens": ["<|end|>"]})
    app = application(small_model(words), words, "local")
    asked = {"structured_outputs": {"grammar": 'start: "x" <|end|> "y"'}, "skip_special_tokens": False}
    assert completion(app, **asked)[1].removesuffix("<eod>") == "x<|end|>y"


# Texts of tokens ------------------------------------------------------------------------------------------------------


def saying(tokens: list[int]) -> StubModel:
    """Return a model that generates these tokens; log-probabilities decrease with the token id."""

    def generate(input_ids: torch.Tensor, streamer: Any = None, decoding: Any = None, **_: Any) -> torch.Tensor:
        values = torch.tensor(tokens)
        for value in [input_ids, *values[:, None]] if streamer else ():
            scored = decoding and value.ndim == 1 and decoding.logprobs is not None
            streamer.put(decoding.scored(-torch.arange(2000.0), int(value)) if scored else value)
        return torch.cat((input_ids, values[None]), 1)

    return StubModel(generate)


@pytest.mark.parametrize("made", [metaspace_tokenizer, tokenizer], ids=["metaspace", "bytes"])
def test_text_continues_its_prompt(made: Any) -> None:
    words = made()
    for prompt, text in (("def forward", " return x"), ("class", ":"), ("ab", "cd 😀 e"), ("", "return")):
        answer = words(text, add_special_tokens=False)["input_ids"]
        ids = words(prompt)["input_ids"] or [5]
        expected = words.decode(ids + answer, skip_special_tokens=True)
        expected = expected.removeprefix(words.decode(ids, skip_special_tokens=True))
        app = application(saying(answer), words, "stub")
        asked = {"prompt": prompt or ids, "max_tokens": len(answer)}
        for fields in ({}, {"stop": "never"}, {"echo": False, "logprobs": 1}):
            assert completion(app, **asked, **fields) == (200, expected), fields
        raw = asyncio.run(call(app, "POST", "/v1/completions", json.dumps({**asked, "stream": True}).encode()))[2]
        pieces = [json.loads(line[6:]) for line in raw.decode().splitlines() if line.startswith("data: {")]
        assert "".join(piece["choices"][0]["text"] for piece in pieces) == expected


@pytest.mark.parametrize("made", [metaspace_tokenizer, tokenizer], ids=["metaspace", "bytes"])
def test_bytes_of_log_probabilities_equal_the_answer(made: Any) -> None:
    words = copy.deepcopy(made())
    words.chat_template = TEMPLATE
    text = " return 😀é x"
    answer = words(text.strip(), add_special_tokens=False)["input_ids"]
    app = application(saying(answer), words, "stub")
    asked = {"max_tokens": len(answer), "logprobs": True, "top_logprobs": 20}
    chat = post_json(app, "/v1/chat/completions", {**asked, "messages": [{"role": "user", "content": "x"}]})[1]
    rows = chat["choices"][0]["logprobs"]["content"]
    assert bytes(byte for row in rows for byte in row["bytes"]).decode().strip() == text.strip()
    for row in rows:
        assert len({each["token"] for each in row["top_logprobs"]}) == 20
        assert all(bytes(each["bytes"]).decode("utf-8", "replace").count("\ufffd") <= 1 for each in row["top_logprobs"])
    found = post_json(app, "/v1/completions", {"prompt": "def", "max_tokens": len(answer), "logprobs": 3})[1]
    found = found["choices"][0]["logprobs"]
    assert found["token_logprobs"] == [-float(token) for token in answer]
    for value, row, top in zip(found["token_logprobs"], found["tokens"], found["top_logprobs"], strict=True):
        assert top[row] == value and len(top) in (3, 4)  # the sampled token is added, like OpenAI
    written = [words.decode([*words("def")["input_ids"], *answer[:at]]) for at in range(len(answer))]
    before = len(words.decode(words("def")["input_ids"]))
    for offset, each in zip(found["text_offset"], written, strict=True):
        assert offset == len(each) - before or "\ufffd" in each
    assert found["text_offset"] == sorted(found["text_offset"])


# Embeddings -----------------------------------------------------------------------------------------------------------


def small_bert(words: Any, folder: Path, files: dict[str, Any]) -> LocalModel:
    """An encoder with these sentence-transformers files in its checkpoint."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
    local = LocalModel(BertModel(BertConfig(vocab_size=len(words), **sizes, max_position_embeddings=64)))
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content))
    local.config.name_or_path = str(folder)
    return local


def pooled(words: Any, local: LocalModel, text: str, pooling: str) -> torch.Tensor:
    with torch.no_grad():
        hidden_LD = local.model(torch.tensor([words(text)["input_ids"]])).last_hidden_state[0]
    ways = {"cls": hidden_LD[0], "last": hidden_LD[-1], "max": hidden_LD.amax(0), "mean": hidden_LD.mean(0)}
    return torch.nn.functional.normalize(ways[pooling], dim=0)


MODULES = [{"path": "", "type": "sentence_transformers.models.Transformer"}]
MODULES += [{"path": "pool", "type": "sentence_transformers.models.Pooling"}]
STATED: dict[str, tuple[dict[str, Any], str]] = {
    "no modules": (
        {"1_Pooling/config.json": {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}},
        "cls",
    ),
    "last": ({"modules.json": MODULES, "pool/config.json": {"pooling_mode_lasttoken": True}}, "last"),
    "a name": ({"modules.json": MODULES, "pool/config.json": {"pooling_mode": "lasttoken"}}, "last"),
    "max": ({"modules.json": MODULES, "pool/config.json": {"pooling_mode_max_tokens": True}}, "max"),
    "nothing": ({}, "mean"),
}


@pytest.mark.parametrize("what", STATED)
def test_pooling_of_the_checkpoint_is_the_default(what: str, tmp_path: Path) -> None:
    files, pooling = STATED[what]
    words = tokenizer()
    local, texts = small_bert(words, tmp_path, files), ["def", "import torch, forward"]
    for given, expected in ((None, pooling), ("mean", "mean"), ("last", "last")):
        app = application(local, words, "bert", pooling=given)
        rows = post_json(app, "/v1/embeddings", {"input": texts})[1]["data"]
        for text, row in zip(texts, rows, strict=True):
            assert torch.allclose(torch.tensor(row["embedding"]), pooled(words, local, text, expected), atol=1e-5)


def test_prompts_and_limits_of_a_checkpoint_for_embeddings_apply(tmp_path: Path) -> None:
    words = tokenizer()
    files = {"modules.json": MODULES, "pool/config.json": {"pooling_mode_cls_token": True}}
    files["config_sentence_transformers.json"] = {"prompts": {"query": "Query: "}, "default_prompt_name": "query"}
    files["sentence_bert_config.json"] = {"max_seq_length": 20, "do_lower_case": True}
    local = small_bert(words, tmp_path, files)
    app = application(local, words, "bert")
    row = post_json(app, "/v1/embeddings", {"input": "Def Forward"})[1]["data"][0]
    expected = pooled(words, local, "query: def forward", "cls")
    assert torch.allclose(torch.tensor(row["embedding"]), expected, atol=1e-5)
    assert post_json(app, "/v1/embeddings", {"input": "def " * 25})[0] == 400


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"modules.json": [*MODULES, {"path": "2_Dense", "type": "sentence_transformers.models.Dense"}]}, "Dense"),
        ({"1_Pooling/config.json": {"pooling_mode_weightedmean_tokens": True}}, "weightedmean"),
        ({"1_Pooling/config.json": {"pooling_mode_cls_token": True, "pooling_mode_max_tokens": True}}, "max"),
    ],
)
def test_vectors_that_the_server_does_not_compute_are_refused(files: Any, message: str, tmp_path: Path) -> None:
    local = small_bert(tokenizer(), tmp_path, files)
    with pytest.raises(ValueError, match=message):
        application(local, tokenizer(), "bert")
    application(local, tokenizer(), "bert", pooling="mean")


# Messages -------------------------------------------------------------------------------------------------------------


class Recording:
    """A tokenizer that records the messages passed to its template."""

    chat_template = "{{ messages }}"

    def apply_chat_template(self, messages: Any, tools: Any = None, **options: Any) -> dict[str, Any]:
        self.messages = messages
        return {"input_ids": [5]}


def test_templates_get_every_field_of_a_message() -> None:
    words = Recording()
    call_made = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
    silent = {"id": "2", "type": "function", "function": {"name": "wait", "arguments": ""}}
    messages: list[dict[str, Any]] = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "name": "Ann", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "Let me see.", "tool_calls": [call_made, silent], "reasoning_content": "so"},
        {"role": "tool", "tool_call_id": "1", "name": "look", "content": "seen"},
    ]
    ChatRequest(messages=messages).encode(words)
    system, user, assistant, tool = words.messages
    assert system == {"role": "system", "content": "Be brief."}
    assert user == {"role": "user", "name": "Ann", "content": "a b"}
    assert (assistant["content"], assistant["reasoning_content"]) == ("Let me see.", "so")
    assert [each["function"]["arguments"] for each in assistant["tool_calls"]] == [{"at": 1}, {}]
    assert tool == messages[3] and call_made["function"]["arguments"] == '{"at": 1}'
    words.chat_template = "{% if message.role == 'developer' %}"
    ResponsesRequest(input=[{"role": "developer", "content": "x"}]).chat().encode(words)
    assert words.messages[0]["role"] == "developer"


@pytest.mark.parametrize(
    ("message", "place"),
    [
        (
            {"tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
            "tool_calls[0].function.arguments is not JSON",
        ),
        ({"tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}, "tool_calls[0].function.arguments"),
        ({"tool_calls": [{"function": {"name": "f", "arguments": "[" * 10**5}}]}, "tool_calls[0].function.arguments"),
        ({"tool_calls": [{"function": "f"}]}, "tool_calls[0] has no function"),
        ({"tool_calls": "f"}, "tool_calls is not a list"),
        ({"function_call": {"name": "f"}}, "function_call is not supported"),
        ({"content": ["x"]}, "content has a part that is not text"),
        ({"content": 5}, "content is int"),
    ],
)
def test_messages_that_cannot_be_written_are_refused_with_their_place(message: dict[str, Any], place: str) -> None:
    given = [{"role": "user", "content": "x"}, {"role": "assistant", **message}]
    with pytest.raises(ValueError, match=re.escape(place)) as caught:
        ChatRequest(messages=given).encode(Recording())
    assert "messages[1]" in str(caught.value)


def test_parameters_of_forced_tools_may_have_references() -> None:
    pytest.importorskip("llguidance")
    words = copy.deepcopy(tokenizer(vocabulary=1000))
    words.chat_template = TEMPLATE
    app = application(small_model(words), words, "local")

    def tool(name: str, values: list[str]) -> dict[str, Any]:
        parameters = {"type": "object", "properties": {"$ref": {"$ref": "#/$defs/C"}}, "required": ["$ref"]}
        parameters |= {"$defs": {"C": {"enum": values}}, "additionalProperties": False}
        return {"type": "function", "function": {"name": name, "parameters": parameters}}

    asked = {"messages": [{"role": "user", "content": "x"}], "tools": [tool("a", ["p"]), tool("b/c", ["q"])]}
    asked |= {"max_tokens": 100, "logit_bias": SPACES}
    for name, value in (("a", "p"), ("b/c", "q")):
        choice = {"type": "function", "function": {"name": name}}
        status, answer = post_json(app, "/v1/chat/completions", {**asked, "tool_choice": choice})
        assert status == 200, answer
        made = answer["choices"][0]["message"]["tool_calls"][0]["function"]
        assert (made["name"], json.loads(made["arguments"])) == (name, {"$ref": value})


# Fields that ask for nothing, and errors ------------------------------------------------------------------------------

NOTHING: dict[str, dict[str, Any]] = {
    "/v1/completions": {"length_penalty": 1, "add_special_tokens": True, "early_stopping": False, "priority": 0},
    "/v1/chat/completions": {
        **{"function_call": "none", "top_logprobs": 0, "add_generation_prompt": True, "continue_final_message": False},
        **{"add_special_tokens": False, "length_penalty": 1.0, "include_reasoning": True},
    },
    "/v1/responses": {"background": False, "top_logprobs": 0, "stream_options": {"include_obfuscation": False}},
}
ANYWHERE = {"prompt_cache_key": "a", "safety_identifier": "b", "prompt_cache_retention": "24h", "metadata": {"a": "b"}}


@pytest.mark.parametrize("path", NOTHING)
def test_values_that_ask_for_nothing_are_accepted_and_others_are_not(path: str) -> None:
    words = copy.deepcopy(tokenizer())
    words.chat_template = TEMPLATE
    app = application(StubModel(), words, "stub")
    chat = [{"role": "user", "content": "x"}]
    given = {"/v1/completions": {"prompt": "x"}, "/v1/responses": {"input": chat}}.get(path, {"messages": chat})
    for name, value in {**NOTHING[path], **ANYWHERE}.items():
        assert post_json(app, path, {**given, name: value})[0] == 200, name
    others = {"length_penalty": 2, "background": True, "function_call": {"name": "f"}, "early_stopping": True}
    others |= {"add_special_tokens": path != "/v1/completions", "priority": True}
    for name, value in others.items():
        status, answer = post_json(app, path, {**given, name: value})
        assert status == 400 and name in answer["error"]["message"], (name, answer)


def test_the_last_message_can_be_continued() -> None:
    words = copy.deepcopy(tokenizer())
    words.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    local = small_model(words)
    chat = [{"role": "user", "content": "def?"}, {"role": "assistant", "content": "class"}]
    asked = {"messages": chat, "max_tokens": 5, "add_generation_prompt": False, "continue_final_message": True}
    answer = post_json(application(local, words, "local"), "/v1/chat/completions", asked)[1]
    expected = new_text(words, local, "[user]def?[assistant]class", 5, do_sample=False)
    assert answer["choices"][0]["message"]["content"] == expected


def test_an_empty_prompt_is_answered_if_the_tokenizer_begins_texts() -> None:
    for given in ("", [""]):
        assert completion(application(StubModel(), metaspace_tokenizer(), "stub"), prompt=given)[0] == 200
        status, error = completion(application(StubModel(), tokenizer(), "stub"), prompt=given)
        assert status == 400 and error["param"] == "prompt" and "empty" in error["message"]
    assert completion(application(StubModel(), tokenizer(), "stub"), prompt=[])[0] == 400


def test_a_chat_that_is_too_long_is_refused_with_its_tokens() -> None:
    words = copy.deepcopy(tokenizer())
    words.chat_template = TEMPLATE
    app = application(StubModel(), words, "stub")
    for most in ({}, {"max_tokens": 5}):
        chat = {"messages": [{"role": "user", "content": "def " * 1300}], **most}
        status, answer = post_json(app, "/v1/chat/completions", chat)
        error = answer["error"]
        assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", "messages")
        assert not re.search(r"-\d", error["message"]), error


def test_bodies_that_are_not_json_objects_are_refused_with_the_header_that_they_need() -> None:
    app = application(StubModel(), tokenizer(), "stub")
    form = [(b"host", b"localhost"), (b"content-type", b"application/x-www-form-urlencoded")]
    for body, headers in ((b'{"prompt": "x"}', form), (b'{"prompt": "x"}', form[:1]), (b"", None), (b"[1]", None)):
        status, _, raw = asyncio.run(call(app, "POST", "/v1/completions", body, headers))
        assert status == 400 and "Content-Type: application/json" in json.loads(raw)["error"]["message"], raw


def test_a_slash_at_the_end_is_no_redirect_to_another_host() -> None:
    status, headers, _ = asyncio.run(call(application(StubModel(), tokenizer(), "stub"), "POST", "/v1/completions/"))
    assert status == 404 and "location" not in headers


def test_browsers_may_call_from_the_origins_that_are_allowed() -> None:
    ask = [(b"host", b"localhost"), (b"access-control-request-method", b"POST")]
    ask += [(b"access-control-request-headers", b"authorization,content-type")]

    def preflight(origin: bytes, **options: Any) -> tuple[int, str | None]:
        app = application(StubModel(), tokenizer(), "stub", api_key="key", **options)
        status, headers, _ = asyncio.run(call(app, "OPTIONS", "/v1/completions", headers=[*ask, (b"origin", origin)]))
        return status, headers.get("access-control-allow-origin")

    page = "https://chat.example"
    assert preflight(page.encode(), allowed_origins=[page]) == (200, page)
    assert preflight(b"https://other.example", allowed_origins=[page]) == (400, None)
    assert preflight(page.encode()) == (401, None)


# Streams --------------------------------------------------------------------------------------------------------------


def streamed(app: Any, **fields: Any) -> list[Any]:
    body = json.dumps({"max_tokens": 6, "stream": True, **fields}).encode()
    raw = asyncio.run(call(app, "POST", "/v1/completions", body))[2]
    return [json.loads(line[6:]) for line in raw.decode().splitlines() if line.startswith("data: {")]


def test_usage_is_null_until_the_last_event_that_has_it() -> None:
    app = application(StubModel(), tokenizer(), "stub")
    events = streamed(app, prompt="x", stream_options={"include_usage": True})
    assert len(events) > 2 and all("usage" in each for each in events)
    assert [each["usage"] is None for each in events] == [True] * (len(events) - 1) + [False]
    assert not any("usage" in each for each in streamed(app, prompt="x"))


def test_choices_of_a_stream_are_computed_together() -> None:
    """Each call waits until all have begun; sequential choices would wait forever."""
    everybody = threading.Barrier(4, timeout=30)

    def generate(input_ids: torch.Tensor, streamer: Any, seed: int, **_: Any) -> torch.Tensor:
        everybody.wait()
        for value in (input_ids, torch.tensor([5]), torch.tensor([6 + seed])):
            streamer.put(value)
        return torch.cat((input_ids, torch.tensor([[5, 6 + seed]])), 1)

    words = tokenizer()
    events = streamed(application(StubModel(generate), words, "stub"), prompt=["def", "class"], n=2, seed=0)
    for index in range(4):
        text = "".join(each["choices"][0]["text"] for each in events if each["choices"][0]["index"] == index)
        assert text == words.decode([5, 6 + index])


def test_an_error_of_one_choice_ends_the_stream_and_the_other_choices() -> None:
    begun, ended = threading.Event(), threading.Event()

    def generate(input_ids: torch.Tensor, streamer: Any, seed: int, cancellation: Any, **_: Any) -> torch.Tensor:
        streamer.put(input_ids)
        if seed:
            assert begun.wait(10)  # before the first token, the answer is an error in place of a stream
            raise RuntimeError("broken")
        streamer.put(torch.tensor([5]))
        begun.set()
        while not cancellation.cancelled:
            time.sleep(0.01)
        ended.set()
        raise CallCancelled("cancelled")

    events = streamed(application(StubModel(generate), tokenizer(), "stub"), prompt="def", n=2, seed=0)
    assert "error" in events[-1] and ended.wait(10)


# Options of the command -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [("--port", "99999"), ("--port", "-1"), ("--header-seconds", "nan"), ("--drain-seconds", "-1")],
    ids=" ".join,
)
def test_numbers_out_of_range_are_refused_by_name(options: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.make_parser().parse_args(["serve", "gpt2", *options])
    assert f"argument {options[0]}: '{options[1]}'" in capsys.readouterr().err


def test_models_and_tokenizers_are_checked_before_models_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded: list[str] = []
    monkeypatch.setattr(command, "_load", lambda name, *_: loaded.append(name))
    monkeypatch.setattr(command, "start_fork_server", lambda _: None)
    for arguments, message in (
        (["a", "a"], "named twice"),
        (["a", "--tokenizer", str(tmp_path / "nope")], "nope"),
    ):
        assert cli.main(["serve", *arguments, "--port", "0"]) == 2
        assert message in capsys.readouterr().err and not loaded
