"""The GPU rehearsal runs without a GPU, keeps all results when a case fails, and reports the measurements."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import warnings
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.rehearse import kernels, models, report, timing
from benchmarks.rehearse.cases import ALONE, PARTS, QUESTIONS, Case, cases
from benchmarks.rehearse.schedule import Schedule

from support import ROOT

pytestmark = pytest.mark.drawn(5, of="file")


def run(cases: list[Case], folder: Path, seconds: float = 100, gigabytes: float = 100) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "kernels", ROOT / "tests")))
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}

    def note(case: Case, row: dict[str, Any]) -> None:
        rows.append({"case": case.name, **row})
        if case.name == "hangs":
            object.__setattr__(case, "limit", 1.0)  # from here on, however long it took to start

    schedule = Schedule(folder, True, environment, note, 8, gigabytes)
    schedule.run(cases, time.monotonic() + seconds)
    return rows


def case(name: str, **options: Any) -> Case:
    return Case("tests", name, f"support.rehearsal_cases:{name}", options=options)


def test_dry_run_has_no_failures_and_writes_rows_only(tmp_path: Path, warm_launchers: None) -> None:
    """One case of each kind, in a process without a GPU; the whole dry run is ``make rehearse-gpu``."""
    command = [sys.executable, "-m", "benchmarks.rehearse", "all", "--quick", "--out", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "kernels"))), "OSLO_COMMIT": "c0"}
    done = subprocess.run([*command, "--dry"], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {f"{part}.jsonl" for part in PARTS}
    rows = report.rows_of(tmp_path)
    assert {row["case"] for row in rows} == {case.name for part in PARTS for case in cases(part, quick=True)}
    assert {row["part"] for row in rows if row["state"] == "measured"} == set(PARTS)
    assert all(row["dry"] and row["commit"] == "c0" and row["versions"] for row in rows)
    assert report.record(tmp_path) == 1, "figures of a dry run are not for the documentation"


def test_every_outcome_of_a_case_is_a_row(tmp_path: Path) -> None:
    names = ("raises", "crashes", "leaves_a_process", "recompiles")
    rows = run([*(case(name) for name in names), case("hangs")], tmp_path)
    of = {name: [row for row in rows if row["case"] == name] for name in (*names, "hangs")}

    states = [(row.get("metric"), row["state"]) for row in of["raises"]]
    assert states == [("before", "measured"), ("broken", "failed"), ("after", "measured"), (None, "done")]
    assert "ValueError: no such thing" in of["raises"][1]["error"] and not report.met(of["raises"][2])
    assert [row["state"] for row in of["crashes"]] == ["failed", "done"]
    assert "about to crash" in of["crashes"][0]["error"] and "exit code -6" in of["crashes"][0]["error"]
    assert [row["state"] for row in of["leaves_a_process"]] == ["done"]
    assert [row["state"] for row in of["hangs"]] == ["measured", "failed"]
    assert "more than 1 s, while preparing" in of["hangs"][1]["error"]
    assert "rehearsal_cases.py" in of["hangs"][1]["error"], "where it hung"
    found = {row.get("metric"): row for row in of["recompiles"]}
    assert {name: found[name]["state"] for name in ("first", "last", "skipped", "neither")} == {
        "first": "measured",
        "last": "failed",
        "skipped": "failed",
        "neither": "measured",
    }
    assert "recompile_limit" in found["last"]["error"] and found["first"]["graphs"] == 1
    assert "CUDA graphs were skipped" in found["skipped"]["error"]


def test_others_are_stopped_while_a_case_measures_and_the_limit_of_the_part_is_kept(
    tmp_path: Path, warm_launchers: None
) -> None:
    late = Case("tests", "late", "support.rehearsal_cases:crashes", gigabytes=ALONE)
    folder = {"folder": str(tmp_path)}
    rows = run([case("counts", **folder), case("measures", **folder), late], tmp_path)
    of = {name: [row for row in rows if row["case"] == name] for name in ("counts", "measures", "late")}
    assert [row["state"] for row in of["measures"]] == ["measured", "done"]
    assert of["measures"][0]["value"] == 0, "the other case went on"
    assert [row["state"] for row in of["counts"]] == ["measured", "done"], "the other case was not resumed"
    assert rows.index(of["late"][0]) == len(rows) - 2, "begins when nothing else runs"
    rows = run([Case("tests", "waits", "support.rehearsal_cases:hangs"), late], tmp_path, seconds=3)
    assert [(row["case"], row["state"]) for row in rows if row["state"] != "measured"] == [
        ("waits", "not finished"),
        ("late", "not run"),
    ]


def test_every_case_names_a_function() -> None:
    import importlib

    for part in PARTS:
        names = [case.name for case in cases(part)]
        assert len(set(names)) == len(names)
        assert 0 < len(cases(part, quick=True, dry=True)) < len(cases(part, dry=True)) <= len(names)
        assert {each.run for each in cases(part)} == {each.run for each in cases(part, dry=True)}
        for each in cases(part):
            module, _, function = each.run.partition(":")
            assert callable(getattr(importlib.import_module(module), function))


@pytest.mark.parametrize("name", kernels.OPERATIONS)
def test_operations_have_the_sizes_of_a_gpu(name: str) -> None:
    """Both passes of our kernels and of eager torch run without memory, on inputs of 256 MB that exceed any cache."""
    bench: Any = SimpleNamespace(device=torch.device("meta"), dry=False)
    build, options, rows = kernels.OPERATIONS[name]
    large = build(bench, rows, **options)
    assert max(x.nbytes for x in large.tensors) >= 256 << 20
    assert large.forward >= sum(x.nbytes for x in large.tensors if x.nbytes > 1 << 20)
    shapes = []
    for function in (large.ours, large.eager):
        out = kernels._tuple(function(*large.tensors))
        grads = torch.autograd.grad(out, large.tensors, [torch.empty_like(y) for y in out])
        shapes.append([(x.shape, x.dtype) for x in (*out, *grads)])
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize(
    ("name", "low", "high"), [("gpt2-124m", 0.12, 0.13), ("llama-1b", 1.2, 1.3), ("llama-8b", 7.4, 7.6)]
)
def test_weights_that_a_token_is_multiplied_with_are_counted(name: str, low: float, high: float) -> None:
    """Weights count in billions, without tables that are only looked up."""
    bench: Any = SimpleNamespace(device=torch.device("meta"), pick=lambda real, tiny: real)
    model = models.build(bench, name, "transformers", models.config_of(bench, name))
    assert low < models.weights(model) / 1e9 < high


class FakeCuda:
    """Stand-in for ``torch.cuda`` in the timer: its clock advances with the calls of `work`."""

    def __init__(self) -> None:
        self.now, self.graphs, self.capturing = 0.0, 0, False
        cuda = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                self.at = 0.0

            def record(self) -> None:
                self.at = cuda.now

            def elapsed_time(self, other: Any) -> float:
                return 1e3 * (other.at - self.at)

        class CUDAGraph:
            def replay(self) -> None:
                cuda.now += 0.001

        self.Event, self.CUDAGraph = Event, CUDAGraph
        self.Stream = lambda: SimpleNamespace(wait_stream=lambda stream: None)
        self.current_stream, self.stream = self.Stream, lambda stream: nullcontext()
        self.synchronize = self.empty_cache = self.reset_peak_memory_stats = lambda: None
        self.memory_allocated, self.max_memory_allocated = lambda: 5, lambda: 12

    def graph(self, graph: Any) -> Any:
        self.graphs += 1
        return nullcontext()

    def work(self) -> None:
        self.now += 0.002


def test_timer_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its Python, with a stand-in for the device: graphs are replayed, and the cache's flush is not counted."""
    cuda, flushed = FakeCuda(), []
    monkeypatch.setattr(torch.cuda, "synchronize", cuda.synchronize)

    def empty(*_: Any, **__: Any) -> Any:
        return SimpleNamespace(zero_=lambda: flushed.append(setattr(cuda, "now", cuda.now + 1)))

    stand_in = SimpleNamespace(cuda=cuda, empty=empty, int8=torch.int8)
    monkeypatch.setattr(timing, "torch", stand_in)
    timer = timing.Gpu()
    assert timer.seconds(cuda.work) == pytest.approx(0.001) and cuda.graphs == 1, "replayed"
    assert timer.seconds(cuda.work, graph=False) == pytest.approx(0.002) and cuda.graphs == 1
    assert len(flushed) > 100
    assert timer.peak(cuda.work) == 7
    assert timer.host(cuda.work, 3) > 0 and len(timer.wall(cuda.work, 3)) == 3
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # there is no CUDA to profile
        assert timer.launches(lambda: torch.ones(3) + 1) == 0, "no calls of a driver here"


def measured(part: str, case: str, peer: str, metric: str, value: float, unit: str, **more: Any) -> dict[str, Any]:
    where = {"date": "2030-01-01 10:00", "commit": "c0", "machine": "m", "versions": "v", "at": 1.0}
    return {**where, "part": part, "case": case, "peer": peer, "metric": metric, "value": value, "unit": unit,
            "state": "measured", **more}  # fmt: skip


def test_rows_become_a_summary_a_csv_and_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("RESULTS", "PAGE"):
        monkeypatch.setattr(report, name, tmp_path / name)
    report.PAGE.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    speed = "prompt 32, generation"
    rows = [
        measured("kernels", "rmsnorm", "oslo_models", "forward, share of a copy", 0.9, "", target=0.85),
        measured("kernels", "rmsnorm", "eager", "forward, share of a copy", 0.2, ""),
        measured("decoding", "llama-1b, batch 1 / oslo_models fused", "oslo_models fused", speed, 300, "tokens/s"),
        measured("decoding", "llama-1b, batch 1 / transformers", "transformers", speed, 100, "tokens/s"),
        {**measured("decoding", "x", "", "", 0, ""), "value": None, "state": "failed", "error": "Traceback\nE: wrong"},
    ]
    for part in ("kernels", "decoding"):
        (tmp_path / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows if row["part"] == part))
    with (tmp_path / "decoding.jsonl").open("a") as file:
        file.write('{"part": "decod')  # killed while it wrote
    assert report.summary(tmp_path) == 1
    shown = capsys.readouterr().out
    assert "| rmsnorm: forward, share of a copy |  | 0.9 (target 0.85) | 0.2 |" in shown
    assert "target 0.85: met" in shown and "target 4: MISSED" in shown, "three times transformers' speed"
    assert "FAILED E: wrong" in shown and "cut off" in shown
    (tmp_path / "decoding.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[2:]))
    assert report.record(tmp_path) == report.record(tmp_path) == 0
    assert len(report.read(report.RESULTS)) == 6, "recorded once, with the comparison"
    page = report.PAGE.read_text()
    assert page.startswith("before\n") and page.endswith("after\n") and "old" not in page
    assert "| rmsnorm: forward, share of a copy |  | 0.9 (target 0.85) | 0.2 |" in page
    assert "E: wrong" in page and "Measured on: m, v, at c0 (2030-01-01)." in page


def test_summary_answers_each_question(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A row of each question's first case is shown under the question, and a case that did not run is named."""
    parts: dict[str, list[Any]] = {part: [] for part in PARTS}
    for place, question in enumerate(QUESTIONS[:-1], 1):
        part, _, name = question.cases[0].partition("/")
        metric = " ".join(question.metrics)
        parts[part].append(measured(part, name or "single_rank", "a peer", metric, 1000.0 + place, "us"))
        parts[part].append(measured(part, f"another {name}", "a peer", metric, 5.0, "us"))
    parts["tests"].append({**measured("tests", "imports", "", "", 0, ""), "state": "failed", "error": "wrong"})
    for part, rows in parts.items():
        (tmp_path / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    report.summary(tmp_path)
    told = capsys.readouterr().out.partition("\nQuestions\n")[2].splitlines()
    assert sum(line[0].isdigit() for line in told) == len(QUESTIONS) == 13
    for place, question in enumerate(QUESTIONS, 1):
        at = told.index(next(line for line in told if line.startswith(f"{place}. {question.text}")))
        if place == len(QUESTIONS):
            assert told[at].endswith("NOT MEASURED")
        elif question.counts:
            assert "measured, 1 failed" in told[at + 1]
        else:
            assert str(1000 + place) in told[at + 1] and "another" not in told[at + 1]


def test_questions_name_cases() -> None:
    names = [f"{case.part}/{case.name}" for part in PARTS for case in cases(part)]
    for question in QUESTIONS:
        for start in question.cases:
            assert any(name.startswith(start) for name in names), f"no case is named {start}..."


def test_documentation_shows_the_recorded_rows() -> None:
    assert report.page(report.PAGE.read_text(), report.read(report.RESULTS)) == report.PAGE.read_text()
