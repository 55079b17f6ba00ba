"""Benchmarks run, reject peers that compute something else, and agree with the documentation."""

from __future__ import annotations

import csv
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks import __main__ as driver
from benchmarks import limits, table
from benchmarks.cases import CASES, ONE_THREAD, OUR_DATA, OUR_STAGES, OURS, OURS_ALONE, OURS_FUSED, OWN, TORCH_STAGES
from benchmarks.definitions import BY_MEMORY, TOKEN_PARTS, Result
from benchmarks.launch import MeasurementError
from benchmarks.peers import PEERS
from benchmarks.records import RESULTS, append

from support import ROOT
from support.pool import Pool


def test_case_runs_and_records_results(warm_launchers: None) -> None:
    command = [sys.executable, "-m", "benchmarks", "--smoke", "--only=gpt2-124m-collectives"]
    stamp = os.stat(table.RESULTS).st_mtime_ns if table.RESULTS.exists() else None
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    assert [OURS, "all-reduces", "a", "block,", "backward", "2", "calls", "1", "x", "Megatron-LM"] in rows
    assert stamp == (os.stat(table.RESULTS).st_mtime_ns if table.RESULTS.exists() else None), (
        "a smoke run writes nothing"
    )


@pytest.mark.zoo
def test_exact_rollouts_are_measured(warm_launchers: None) -> None:
    command = [sys.executable, "-m", "benchmarks.exact_rollouts", "--smoke"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.strip("| ").split(" | ") for line in done.stdout.splitlines() if line.startswith("| exact")]
    assert [(row[:2], row[-2:]) for row in rows] == [(["exact", ranks], ["100.0 %"] * 2) for ranks in ("1", "2")]


def measure(case: str, peer: str, folder: Path) -> Result:
    return CASES[case].run(PEERS[peer], folder, smoke=True)


@pytest.mark.parametrize("case", ["gpt2-124m-stages", "llama-100m-stages"])
def test_pipeline_peers_compute_the_same(pool: Pool, tmp_path: Path, case: str) -> None:
    CASES[case].prepare(tmp_path, smoke=True)
    found = {peer: pool.run(2, measure, case, peer, tmp_path, env=True) for peer in (TORCH_STAGES, OUR_STAGES)}
    checks = [result.check for results in found.values() for result in results]
    assert len(checks[0]) == 2
    assert all(check == pytest.approx(checks[0], rel=1e-5) for check in checks)
    assert all(result.values["training"] > 0 for results in found.values() for result in results)


@pytest.mark.parametrize("peer", CASES["schedules"].peers)
def test_schedules_of_slept_stages_run(pool: Pool, tmp_path: Path, peer: str) -> None:
    found = pool.run(4, measure, "schedules", peer, tmp_path, env=True)
    assert all(0 < result.values["idle time"] < 100 for result in found)


@pytest.mark.parametrize(("megabytes", "tokens"), [(2000.0, 2048), (-1.0, 0)])
def test_rows_grow_up_to_a_limit_of_memory(tmp_path: Path, megabytes: float, tokens: int) -> None:
    case = CASES["llama-20m-context-2gb"]
    case = replace(case, smoke={**case.smoke, "megabytes": megabytes})
    case.prepare(tmp_path, smoke=True)
    assert case.run(PEERS[OURS_ALONE], tmp_path, smoke=True).values == {"longest row": tokens}


MEMORIES = ("peak memory", "peak anonymous memory")


@pytest.mark.parametrize("case", ["blend", "index-samples"])
def test_data_cases_run(tmp_path: Path, case: str) -> None:
    result = measure(case, OUR_DATA, tmp_path)
    assert any(name not in MEMORIES for name in result.values)
    for name, value in result.values.items():
        assert value > 0 or (name in MEMORIES and value == 0), name  # so little may need no more memory


def test_disagreeing_peers_fail_a_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = replace(CASES["gpt2-124m-generate-b1"], peers=("transformers", OURS, OURS_FUSED))
    monkeypatch.setattr(
        driver, "launch", lambda case, peer, *_: Result({"generation": 1.0}, [5, 6 + (wrong and peer.name == OURS)])
    )
    wrong = False
    measured = driver._measure(case, tmp_path, 2, True)
    assert {name: len(found) for name, found in measured.items()} == {"transformers": 2, OURS: 2, OURS_FUSED: 2}
    wrong = True
    with pytest.raises(MeasurementError, match=f"{OURS} computed 7, transformers 6"):
        driver._measure(case, tmp_path, 2, True)


def test_every_case_has_known_peers_and_a_table() -> None:
    for case in CASES.values():
        assert set(case.peers) <= PEERS.keys() and set(OWN) & set(case.peers)
        assert case.runner.__name__ in table.TITLES


def test_fuse_check_measures_pairs_of_calls(tmp_path: Path) -> None:
    result = measure("fuse-check-llama", ONE_THREAD, tmp_path)
    assert result.values.keys() == result.pairs.keys() and "decoding, batch 8" in result.values
    assert all(len(ratios) == 2 and min(ratios) > 0 for ratios in result.pairs.values())


def test_fuse_check_fails_where_fused_is_slower_by_more_than_noise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(ratios: list[float]) -> int:
        pairs = {"decoding, batch 1": ratios, "forward, batch 1": [1.0] * 20}
        monkeypatch.setattr(driver, "launch", lambda *_: Result.of_pairs(pairs))
        monkeypatch.setattr(sys, "argv", ["benchmarks", "fuse-check", "--repeat=1", f"--out={tmp_path / 'rows.csv'}"])
        return driver.main()

    assert run([0.9, 1.2] * 10) == 0, "the interval of the median contains 1"
    assert run([1.1, 1.2] * 10) == 1
    assert (
        "FAILED fuse-check-gpt2: oslo_models-one-thread, decoding, batch 1: 1.15 (1.1 to 1.2)"
        in capsys.readouterr().err
    )
    with (tmp_path / "rows.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["case"] for row in rows} == {name for name in CASES if name.startswith("fuse-check")}
    assert {row["repeats"] for row in rows} == {"20"}


def test_ratios_are_computed_within_a_repetition(tmp_path: Path) -> None:
    case = CASES["gpt2-124m-generate-b1"]
    speeds = {"transformers": (10.0, 20.0, 40.0), OURS: (20.0, 40.0, 60.0)}
    rows = driver._rows(case, {peer: [Result({"generation": value}) for value in speeds[peer]] for peer in speeds})
    assert [(row["value"], row["ratio"], row["ratio to"]) for row in rows] == [
        ("20", "1", "transformers"),
        ("40", "2", "transformers"),
    ]
    stamp = {"date": "2030-01-01", "commit": "c", "machine": "m", "versions": "v"}
    append(tmp_path / "results.csv", [{**stamp, "date": "2029-01-01", **rows[0]}])
    append(tmp_path / "results.csv", [{**stamp, **row} for row in rows])
    assert [row["date"] for row in table.latest(tmp_path / "results.csv")] == ["2030-01-01"] * 2
    text = table.tables(table.latest(tmp_path / "results.csv"))
    assert "| GPT-2 124M, generate, batch 1 | 20 (10 to 40) | 40 (20 to 60) | 2 x transformers |" in text


def test_limits_are_of_our_runs_and_no_peer_to_compare_with() -> None:
    case = CASES["gpt2-124m-generate-b1"]
    limits = {"transformers": (70.0, 70.0, 70.0), OURS: (50.0, 80.0, 60.0)}
    measured = {
        peer: [Result({"generation": 40.0}, [], {BY_MEMORY: {"generation": value}}) for value in values]
        for peer, values in limits.items()
    }
    rows = driver._rows(case, measured)
    assert [(row["value"], row["min"], row["max"]) for row in rows if row["peer"] == BY_MEMORY] == [("60", "50", "80")]
    cells = {str(row["peer"]): {name: str(value) for name, value in row.items()} for row in rows}
    assert table._ratio(cells) == "1 x transformers"


def test_limits_apply_to_this_process() -> None:
    config = GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2)
    model = GPT2LMHeadModel(config)
    weights = sum(param.nbytes for param in model.parameters())
    one, eight = (limits.tokens_by_memory(model, batch, 0) for batch in (1, 8))
    assert weights * one > 1e7 and eight > one  # bytes per second; the weights are read once for all rows
    assert limits.tokens_by_memory(model, 8, 10**6) < eight / 100
    assert 0 < limits.seconds_by_products(model, 8) < limits.seconds_by_products(model, 8000)
    assert limits.has_limits(model)
    model.experts = torch.nn.Parameter(torch.zeros(2, 3, 4))
    assert not limits.has_limits(model)


def test_ratios_are_to_the_best_peer_and_few_runs_are_marked() -> None:
    def row(case: str, peer: str, metric: str, unit: str, value: str, runs: str = "3") -> dict[str, str]:
        measured = {"value": value, "min": value, "max": value, "repeats": runs, "processes x threads": ""}
        where = {"date": "2030-01-01", "commit": "c", "machine": "m", "versions": "v"}
        return {**where, "case": case, "peer": peer, "metric": metric, "unit": unit, **measured}

    speed, time = ("generation", "tokens/s"), ("training step", "s")
    text = table.tables(
        [
            row("llama-100m-generate-b1", "transformers-tp2", *speed, "8"),
            row("llama-100m-generate-b1", "deepspeed-autotp", *speed, "20"),
            row("llama-100m-generate-b1", OURS, *speed, "25"),
            row("llama-100m-train", "transformers-tp2", *time, "8", runs="1"),
            row("llama-100m-train", "transformers", *time, "4", runs="1"),
            row("llama-100m-train", OURS, *time, "5", runs="1"),
        ]
    )
    assert "| Llama 100M, generate, batch 1 | 20 | 8 | 25 | 1.25 x deepspeed-autotp |" in text
    assert "| Llama 100M, train, 4 x 256 tokens \N{DAGGER} | 4 | 8 | 5 | 1.25 x transformers |" in text


def test_table_is_written_and_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{table.BEGIN}\nold\n{table.END}\nafter\n")

    def run(*arguments: object) -> int:
        monkeypatch.setattr(sys, "argv", ["table", *map(str, arguments)])
        return table.main()

    assert run("--check", readme) == 1
    assert run("--write", readme) == 0
    assert run("--check", readme) == 0
    assert readme.read_text().startswith("before\n") and readme.read_text().endswith("\nafter\n")
    readme.write_text("no markers")
    assert run("--check", readme) == 1


def test_documentation_shows_the_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["table", "--check", str(ROOT / "docs/benchmarks.md")])
    assert table.main() == 0


def test_figures_of_the_readme_are_of_the_latest_rows() -> None:
    """Tokens per second, seconds, and GB where rows have MB; not batch sizes, model sizes or numbers of clients."""
    rows = table.latest(RESULTS)
    values = {row["value"] for row in rows}
    values |= {f"{float(row['value']) / 1000:.1f}" for row in rows if row["unit"] == "MB"}
    measured = (ROOT / "README.md").read_text().split("## Measured")[1].split("##")[0]
    figures = re.findall(r"(?<!batch )\b\d[\d.]*\b(?! million| clients)", measured)
    assert len(figures) > 10 and not [figure for figure in figures if figure not in values]


def test_documentation_shows_the_profile_of_a_token() -> None:
    page = (ROOT / "docs/guides/fusion.md").read_text()
    with (ROOT / "benchmarks/token_profile.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            parts = [row[part] for part in TOKEN_PARTS]
            assert f"| {row['model']} | {' | '.join(parts)} | {sum(map(float, parts)):.2f} |" in page
