"""The load and soak commands: their random requests, measurements and output, with a server that answers them."""

from __future__ import annotations

import csv
import random
from operator import itemgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

pytest.importorskip("uvicorn")

from benchmarks import fault_table, load, serving, soak_clients
from oslo_models.server.app import application

from support.corpora import tokenizer
from support.http_server import StubModel, listening


def test_arrivals_are_a_poisson_process_and_lengths_keep_their_bounds(seed: int) -> None:
    asked = load.draw(4000, 5.0, (3, 300), (2, 9), seed)
    gaps = [after.at - before.at for before, after in zip(asked, asked[1:], strict=False)]
    assert abs(sum(gaps) / len(gaps) - 0.2) < 0.02
    assert abs(sum(gap > 0.2 for gap in gaps) / len(gaps) - 0.368) < 0.04  # as of an exponential distribution
    assert {len(each.words) for each in asked} <= set(range(3, 301)) and {each.new for each in asked} == set(
        range(2, 10)
    )
    assert [each.words for each in load.draw(5, 9.0, (3, 300), (2, 9), seed)] == [each.words for each in asked[:5]]


def test_percentiles_and_figures_count_answers() -> None:
    hundred = [float(i) for i in range(1, 101)]
    assert serving.percentile([3.0, 1.0, 2.0], 50) == 2.0 and serving.percentile(hundred, 99) == 99
    good = load.Asked(0, ["a"], 3, [0.5, 0.6, 0.9], 3)
    bad = load.Asked(0, ["a"], 3, error="status 503")
    found = {name: value for name, (value, _) in load.figures([good, bad], 2.0).items()}
    assert found["throughput"] == 1.5 and found["errors"] == 1 and found["first token, p99"] == 500
    assert found["token, p50"] == pytest.approx(200)


@pytest.mark.parametrize("fails", [False, True])
def test_load_of_a_running_server_is_reported(tmp_path: Path, fails: bool, capsys: Any) -> None:
    def generate(**_: Any) -> Any:
        raise RuntimeError("broken")

    words = tokenizer()
    words.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with listening(application(StubModel(generate if fails else None, token=7), words)) as url:
        options = [
            "--rate",
            "200",
            "--requests",
            "12",
            "--prompt",
            "2:9",
            "--new",
            "4",
            "--out",
            str(tmp_path / "rows"),
        ]
        assert load.main(["--url", f"{url}/v1", "--name", "stub", *options]) == int(fails)
    rows = {row["metric"]: row for row in csv.DictReader((tmp_path / "rows").open())}
    assert rows["errors"]["value"] == ("12" if fails else "0") and rows["errors"]["peer"] == "stub"
    assert fails == ("12 x status 500" in capsys.readouterr().out)


def test_soak_clients_notice_the_answer_of_another(tmp_path: Path) -> None:
    """The client detects a server that answers an earlier request."""
    prompts = [soak_clients.Prompt([10 + i, 20 + i], [30 + i] * 48, [40 + i] * 8) for i in range(5)]
    client = soak_clients.Client(0, "m", prompts, {}, 0)
    client._require(soak_clients.text([0, 31, 2]), "w31 c")
    with pytest.raises(soak_clients.WrongAnswerError, match="the answer to 'w13 w23'"):
        client._require(soak_clients.text(prompts[3].greedy), soak_clients.text(prompts[1].greedy))


def test_soak_clients_ask_and_misbehave() -> None:
    """Send every kind of request to a server that always generates a fixed token."""
    words = tokenizer()
    words.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    prompt = soak_clients.Prompt([5, 6], [5] * 48, [5] * 8)
    with listening(application(StubModel(vocabulary=211), words)) as url:
        client = soak_clients.Client(int(url.rpartition(":")[2]), "stub", [prompt], {}, 0)
        right = {
            client_kind for client_kind in soak_clients.KINDS if client_kind.startswith(("probes", "client", "half"))
        }
        for kind in [*right, "malformed request", "sampled with a seed", "sampled with a seed"]:
            client.draw = random.Random(0)
            soak_clients.KINDS[kind][0](client)
        with pytest.raises(soak_clients.WrongAnswerError, match="instead of ' w5"):
            client.plain()
        with pytest.raises(soak_clients.WrongAnswerError):
            client.streamed()


class AdaptedModel(StubModel):
    """Generates token 7, or token 8 with the adapter, unless a grammar forbids it.

    Args:
        ignores: ``"adapter"`` or ``"grammar"``.
    """

    def __init__(self, ignores: str | None) -> None:
        super().__init__(vocabulary=211)
        self.generation_config.eos_token_id, self.ignores = soak_clients.END, ignores

    disable_adapters = can_join = lambda self, *_, **__: True
    reason_against_adapter_names = lambda self: None  # noqa: E731

    def generate(self, input_ids: torch.Tensor, max_new_tokens: int, streamer: Any = None, **rest: Any) -> Any:
        decoding, out_BL = rest.get("decoding"), input_ids
        chosen = 8 if rest.get("adapter_names") and self.ignores != "adapter" else 7
        processors = [] if decoding is None or self.ignores == "grammar" else decoding.processors()
        if streamer is not None:
            streamer.put(input_ids)
        for _ in range(max_new_tokens):
            scores_BV = torch.zeros(1, 211)
            scores_BV[0, chosen] = 1.0
            for each in processors:
                scores_BV = each(out_BL, scores_BV)
            token = scores_BV.argmax(-1)
            out_BL = torch.cat((out_BL, token[:, None]), 1)
            if streamer is not None:
                streamer.put(token)
            if token == soak_clients.END:
                break
        if streamer is not None:
            streamer.end()
        return out_BL


@pytest.mark.parametrize("ignores", [None, "adapter", "grammar"])
def test_soak_clients_use_adapters_and_grammars_and_attack(tmp_path: Path, ignores: str | None) -> None:
    """Each of these clients accepts the right answer, and notices a server that ignores what it asked for."""
    pytest.importorskip("llguidance")
    soak_clients._save_tokenizer(tmp_path, 211)
    words = transformers.AutoTokenizer.from_pretrained(tmp_path)
    prompt = soak_clients.Prompt([10, 20], [7] * soak_clients.NEW, [7] * 8, [8] * 8)
    app = application(AdaptedModel(ignores), words, "stub", adapters={soak_clients.ADAPTER: "loaded"})
    with listening(app) as url:
        client = soak_clients.Client(int(url.rpartition(":")[2]), "stub", [prompt], {}, 0)
        client.plain()
        for kind, noticed in (("adapter", "adapter"), ("structured output", "grammar")):
            ask = soak_clients.KINDS[kind][0]
            if ignores == noticed:
                with pytest.raises(soak_clients.WrongAnswerError):
                    ask(client)
            else:
                ask(client)
        with pytest.raises(soak_clients.WrongAnswerError, match="status 200"):
            client._require_refusal("/v1/completions", b'{"prompt": "w5"}')
        for number in range(6 if ignores is None else 0):
            client.draw = SimpleNamespace(choice=itemgetter(number))  # each of the bodies
            client.hostile()


def test_rows_of_other_faults_stay(tmp_path: Path) -> None:
    for rows in ([{"fault": "a", "times": 1}, {"fault": "b"}], [{"fault": "a", "times": 2, "wrong": 0}]):
        fault_table.write(tmp_path / "t.csv", rows)
    found = list(csv.DictReader((tmp_path / "t.csv").open()))
    assert [(row["fault"], row["times"]) for row in found] == [("a", "2"), ("b", "")]
