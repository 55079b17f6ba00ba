"""What requests and checkpoints leave open, or ask for in combination, beside plain transformers."""

from __future__ import annotations

import asyncio
import copy
import json
import re
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, GPT2Config, GPT2LMHeadModel

pytest.importorskip("uvicorn")

from oslo_models.deploy.decoding import Decoding
from oslo_models.server.app import application
from oslo_models.server.generation_defaults import GenerationDefaults
from oslo_models.server.schema import ChatRequest, CompletionRequest

from support.corpora import metaspace_tokenizer, tokenizer
from support.http_server import LocalModel, StubModel, call, post_json

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
SPACES = {str(token): -100 for token in tokenizer(vocabulary=1000)(" \n\t\r")["input_ids"]}
"""A model with random weights may write spaces for ever."""
IDS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}


def small_model(words: Any, **defaults: Any) -> LocalModel:
    """A model whose checkpoint has these defaults."""
    torch.manual_seed(0)
    sizes = {"n_positions": 256, "n_embd": 48, "n_layer": 2, "n_head": 4}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=len(words), **sizes, **IDS))
    model.generation_config = GenerationConfig(**IDS, **defaults)
    return LocalModel(model)


def new_text(words: Any, local: LocalModel, prompt: str, most: int, **options: Any) -> str:
    """The text that transformers generates."""
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
    """Also where a model computes rows that nobody asked for."""

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


# Sampling -------------------------------------------------------------------------------------------------------------


def drawn(local: LocalModel, request: Any) -> set[int]:
    """The tokens that 800 draws for a request give."""
    settings = GenerationDefaults(local.generation_config).settings(request)
    ids_BL = torch.tensor([[5, 6, 7]])
    options = {"max_new_tokens": 1, "num_return_sequences": 800, "eos_token_id": None, **settings}
    return set(local.model.generate(ids_BL, attention_mask=torch.ones_like(ids_BL), **options)[:, -1].tolist())


@pytest.mark.parametrize("kind", [CompletionRequest, ChatRequest])
def test_sampling_without_top_k_reaches_every_token_unless_the_checkpoint_limits_it(kind: Any) -> None:
    """As OpenAI documents it; transformers takes the 50 best tokens by default."""
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
    """As ordinary tokens: a special one would not be in the answer, and an end token would end it."""
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
    """A model that answers these tokens, with log-probabilities that fall with the token."""

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
def test_bytes_of_log_probabilities_are_those_of_the_answer(made: Any) -> None:
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
        assert top[row] == value and len(top) in (3, 4)  # the sampled token is added, as OpenAI does
    written = [words.decode([*words("def")["input_ids"], *answer[:at]]) for at in range(len(answer))]
    before = len(words.decode(words("def")["input_ids"]))
    for offset, each in zip(found["text_offset"], written, strict=True):
        assert offset == len(each) - before or "\ufffd" in each
    assert found["text_offset"] == sorted(found["text_offset"])
