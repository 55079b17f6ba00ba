"""`fuse` times linear layers, leaves the slower ones to torch and reports why."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from oslo_kernels import linear as kernel
from oslo_kernels import linear_timing, small_operations, split_product
from oslo_kernels.kept_timings import KeptTimings
from oslo_models import GPT2LMHeadModel, LlamaForCausalLM
from oslo_models.fusion.modules import FusedProduct

from support import zoo
from support.fake_timings import faster_at
from support.fusion import spy_on_few_rows, tiles
from support.pool import Pool

SLOWER = "left unfused because it would be slower (1 row: "


def small(cls: Any = LlamaForCausalLM, **options: Any) -> Any:
    name = {LlamaForCausalLM: "llama", GPT2LMHeadModel: "gpt2"}[cls]
    return cls.from_config_with_parallel(zoo.config(name), seed=0, **options).eval()


def faster(model: Any) -> list[frozenset[int]]:
    """Return the row counts of every fused product of a model; the head comes last."""
    products = [module for module in model.modules() if isinstance(module, FusedProduct)]
    return [frozenset() if module.faster is None else frozenset(module.faster.ways) for module in products]


def slowed(function: Any) -> Any:
    def run(*args: Any) -> Any:
        end = time.thread_time() + 1e-3  # CPU time, like the measured time: other processes may use the CPU meanwhile
        while time.thread_time() < end:
            pass
        return function(*args)

    return run


@pytest.mark.parametrize("cls", [LlamaForCausalLM, GPT2LMHeadModel])
def test_fuse_leaves_slower_linear_layers_to_torch(cls: Any) -> None:
    """Use the real clock, and a kernel much slower than torch's product."""
    model, ids = small(cls), torch.tensor([[5, 6, 7]])
    with (
        torch.no_grad(),
        mock.patch.object(linear_timing, "_kept", KeptTimings(in_file=False)),
        mock.patch.object(linear_timing, "_preemptions", return_value=0),
        mock.patch.object(kernel, "_of_few_rows", slowed(kernel._of_few_rows)) as slow,
        mock.patch.object(kernel, "by_onednn", slowed(kernel.by_onednn)),
        mock.patch.object(small_operations, "unavailable_reason", return_value="left out, for equal bits"),
    ):
        expected = model(ids).logits
        model.fuse()
        assert torch.equal(model(ids).logits, expected) and slow is kernel._of_few_rows
    assert faster(model) == ([frozenset()] if isinstance(model.lm_head, FusedProduct) else [])
    linear = [row for row in model.fusion_report() if row.operation == "linear"]
    assert linear and not any(row.fused for row in linear) and all(SLOWER in row.reason for row in linear)
    (head,) = (row for row in model.fusion_report() if row.operation == "head and cross entropy")
    assert head.fused and "product left unfused because it would be slower" in head.reason


@pytest.mark.parametrize("cls", [LlamaForCausalLM, GPT2LMHeadModel])
def test_fuse_keeps_faster_linear_layers(cls: Any) -> None:
    """Use the real clock, and a torch product much slower than the kernel."""
    model = small(cls)
    plain = "plain_conv1d" if cls is GPT2LMHeadModel else "linear"
    owner = kernel if cls is GPT2LMHeadModel else linear_timing.F
    with (
        mock.patch.object(linear_timing, "_kept", KeptTimings(in_file=False)),
        mock.patch.object(linear_timing, "_preemptions", return_value=0),
        mock.patch.object(owner, plain, slowed(getattr(owner, plain))),
    ):
        model.fuse()
    most = kernel.most_rows(torch.float32, cls is GPT2LMHeadModel)  # limit in C++; oneDNN computes more rows
    *layers, _ = faster(model)
    assert layers and all(rows.issuperset(range(1, most + 1)) for rows in layers)
    linear = [row for row in model.fusion_report() if row.operation == "linear"]
    assert linear and all(row.fused and "1 row: " in row.reason and "slower" not in row.reason for row in linear)


@pytest.mark.parametrize("way", [kernel.CPP, kernel.ONEDNN])
def test_fused_linear_is_used_between_row_counts_measured_faster(way: str, seed: int) -> None:
    """Torch computes a row count unless the kernel is faster at both timed row counts around it."""
    torch.manual_seed(seed)
    model = small()
    left_out = mock.patch.object(small_operations, "unavailable_reason", return_value="left out, for equal bits")
    with faster_at({1, 2, 4, 16}, way=way), left_out, torch.no_grad():
        exact = {rows: model(torch.arange(rows)[None]).logits for rows in range(1, 18)}
        model.fuse()
        assert set(faster(model)) == {frozenset({1, 2, 3, 4, 16})}
        for rows in range(1, 18):
            with spy_on_few_rows(way) as product:
                logits = model(torch.arange(rows)[None]).logits
            assert product.called == (rows in (1, 2, 3, 4, 16)), f"{rows} rows"
            assert torch.equal(logits, exact[rows]) or product.called
            assert torch.allclose(logits, exact[rows], atol=1e-5)
    report = str(model.fusion_report())
    assert f"(by {way}, 1 row: 100 vs 200 us, 2 rows: 100 vs 200 us" in report
    assert "others left to torch because it would be slower (8 rows: 200 vs 100 us, 32 rows: " in report


def test_many_rows_are_computed_as_the_most_that_are_timed() -> None:
    layer, most = torch.nn.Linear(32, 16), kernel.MOST_TIMED
    for rows, many in (({most}, True), ({64}, False), ({64, most}, True)):
        with faster_at(rows, way=kernel.ONEDNN):
            timed = linear_timing.timings([(layer.weight, layer.bias)], False)
        found = linear_timing.faster_rows(timed, torch.float32)
        assert (found.way(4 * most, torch.float32) == kernel.ONEDNN) is many
        assert (found.way(most - 1, torch.float32) == kernel.ONEDNN) is (len(rows) == 2)


def test_tiles_are_timed_for_many_rows_only() -> None:
    layer, most = torch.nn.Linear(32, 16), kernel.MOST_TIMED
    with tiles(), faster_at(way=kernel.SPLIT), mock.patch.object(split_product, "FEWEST_ROWS", 32):
        found = linear_timing.timings([(layer.weight, layer.bias)], False)
    assert [rows for rows, ways in found.items() if kernel.SPLIT in ways] == [32, 64, most]
    assert linear_timing.faster_rows(found, torch.float32).many == kernel.SPLIT


@pytest.mark.parametrize("io", [False, True])
def test_a_part_of_a_large_weight_is_timed_with_many_rows(io: bool) -> None:
    most, outputs = kernel.MOST_TIMED, 40
    weight, bias = torch.ones((32, outputs) if io else (outputs, 32)), torch.ones(outputs)
    with (
        faster_at(way=kernel.ONEDNN) as measured,
        mock.patch.object(linear_timing, "LARGEST", 32 * most * outputs // 2),
    ):
        found = linear_timing.timings([(weight, bias)], io)
    timed = [call.args[2][0] for call in measured.call_args_list if call.args[0].args[0].shape[1] == most]
    assert (most in found) is not io
    assert all(part.shape == (outputs // 2, 32) and len(added) == outputs // 2 for part, added in timed)
    assert all(part.data_ptr() == weight.data_ptr() for part, _ in timed)


def test_faster_of_two_ways_is_taken_and_never_one_slower_than_torch() -> None:
    """Between two timed numbers of rows, choose a way that gains at both; of several, choose the largest gain."""
    cpp, onednn, level = kernel.CPP, kernel.ONEDNN, (1.0, 1.0)
    timed = {
        1: {cpp: (1.0, 3.0), onednn: (1.0, 2.0)},
        4: {cpp: (1.0, 1.2), onednn: (1.0, 1.5)},
        8: {cpp: (1.0, 1.9), onednn: level},
        16: {onednn: (1.0, 1.9)},
    }
    ways = linear_timing.faster_rows(timed, torch.float32).ways
    assert [ways.get(rows) for rows in (1, 2, 3, 4, 5, 7, 8, 9, 16)] == [
        *(cpp, onednn, onednn, onednn, cpp, cpp, cpp, None, onednn),
    ]


@pytest.mark.parametrize("form", ["out x in", "in x out"])
def test_product_of_onednn_equals_torch(form: str, seed: int) -> None:
    torch.manual_seed(seed)
    for rows in (1, 7, 33, 300):
        x, weight, bias = torch.randn(1, rows, 40), torch.randn(24, 40), torch.randn(24)
        faster = kernel.FasterRows({rows: kernel.ONEDNN}, None, torch.float32, torch.get_num_threads())
        for given in (bias, None):
            with torch.no_grad(), spy_on_few_rows(kernel.ONEDNN) as product:
                if form == "in x out":
                    found = kernel.conv1d(x, weight.t().contiguous(), given, faster)
                else:
                    found = kernel.linear(x, weight, given, faster)
            assert product.called and found.is_contiguous()
            torch.testing.assert_close(found, torch.nn.functional.linear(x, weight, given))


def test_other_thread_counts_and_dtypes_are_left_to_torch() -> None:
    before = torch.get_num_threads()
    layer = torch.nn.Linear(32, 16)
    with faster_at(), torch.no_grad():
        found = linear_timing.faster_rows(linear_timing.timings([(layer.weight, layer.bias)], False), torch.float32)
        assert found.way(4, torch.float32) == kernel.CPP
        assert found.way(4, torch.float16) is None and found.way(17, torch.float32) is None
        try:
            torch.set_num_threads(before + 1)
            with spy_on_few_rows() as product:
                kernel.linear(torch.randn(1, 32), layer.weight, layer.bias, found)
            assert not product.called
        finally:
            torch.set_num_threads(before)
        with spy_on_few_rows() as product:
            kernel.linear(torch.randn(1, 32), layer.weight, layer.bias, found)
        assert product.called


def test_linear_timing_runs_once_per_process() -> None:
    model = small()
    state = torch.get_rng_state()
    with faster_at() as measured:
        assert "us)" not in str(model.fusion_report()) and not measured.called
        model.fuse([])
        assert not measured.called
        model.fuse()
        count, decided = measured.call_count, faster(model)
        assert count and all(decided)
        model.unfuse().fuse()
        small().fuse()
        assert measured.call_count == count and faster(model) == decided
    assert torch.equal(torch.get_rng_state(), state)


def test_linear_layers_on_other_devices_are_not_measured() -> None:
    model = small().to("meta")
    with faster_at() as measured:
        model.fuse()
    assert not measured.called and not any(row.operation == "linear" for row in model.fusion_report())


def test_dtypes_computed_by_torch_are_not_measured() -> None:
    for dtype, why in ((torch.float64, "torch computes products of torch.float64"), (torch.bfloat16, "instructions")):
        model = small(dtype=dtype)
        with faster_at() as measured, mock.patch.object(kernel, "_is_native", lambda dtype: True):
            report = str(model.fuse().fusion_report())
        assert not measured.called and why in report and not any(faster(model))


def check_ranks(rows: list[set[int]]) -> tuple[list[frozenset[int]], str]:
    """Return the decision of this rank when the ranks' measurements differ."""
    rank = torch.distributed.get_rank()
    with faster_at(rows[rank]):
        model = small(tensor_parallel_size=2).fuse()
        ids = torch.tensor([[5, 6, 7]])
        with torch.no_grad():
            fused, plain = model(ids).logits, model.unfuse()(ids).logits
        assert torch.allclose(fused, plain, atol=1e-5)
        model.fuse()
        return faster(model), str(model.fusion_report())


def test_all_ranks_choose_the_same_linear_layers(pool: Pool) -> None:
    first, second = pool.run(2, check_ranks, [{1, 2, 4}, {1, 4, 8}])
    assert first == second and set(first[0]) == {frozenset({1, 4})}
    first, second = pool.run(2, check_ranks, [{1, 2, 4}, {8}])
    assert first == second and SLOWER in first[1] and not any(first[0])


def test_linear_timings_are_kept_on_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later process reuses earlier timings, except with another version of torch or another thread count."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        with faster_at({1, 2}, in_file=True) as measured:
            decided, calls = faster(small().fuse()), measured.call_count
        assert calls and set(decided) == {frozenset({1, 2})}
        with faster_at({4}, in_file=True) as measured:  # begins without the timings in memory
            assert faster(small().fuse()) == decided and not measured.called
            torch.set_num_threads(2)
            assert set(faster(small().fuse())) == {frozenset({4})} and measured.call_count == calls
        torch.set_num_threads(1)
        with faster_at({4}, in_file=True) as measured, mock.patch.object(torch, "__version__", "0"):
            assert set(faster(small().fuse())) == {frozenset({4})} and measured.called
        for file in tmp_path.rglob("*.json"):
            file.write_text('{"torn')
        with faster_at({8}, in_file=True):
            assert set(faster(small().fuse())) == {frozenset({8})}
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(("preempted", "threads", "left"), [(2, 2, False), (90, 2, True), (90, 1, False)])
def test_products_of_several_threads_are_left_to_torch_on_a_busy_machine(
    preempted: int, threads: int, left: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A single thread waits for no other, and its clock is its CPU time. The next process decides again."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        with faster_at(in_file=True, preempted=preempted):
            model = small().fuse()
            report = str(model.fusion_report())
            assert ("left to torch: other programs keep the cores busy" in report) is left
            assert any(faster(model)) is not left
        with faster_at(in_file=True) as measured:
            small().fuse()
            assert measured.called is left
    finally:
        torch.set_num_threads(before)


def test_products_that_gain_in_some_pairs_only_are_left_to_torch() -> None:
    """On a fake clock, nine of fifteen pairs gain, and so do the median and the minimum."""
    pairs = [(1.0, 2.0), (2.0, 1.9), (1.0, 2.0), (2.0, 1.9), (1.0, 2.0)] * 3
    seconds = [second for number, pair in enumerate(pairs, 1) for second in (pair if number % 2 else pair[::-1])]
    readings = iter([reading for second in seconds for reading in (0.0, second)])
    with mock.patch.object(linear_timing, "time") as clock, mock.patch.object(linear_timing, "BUDGET", 1e9):
        clock.thread_time.side_effect = clock.perf_counter.side_effect = readings
        with mock.patch.object(linear_timing.torch, "get_num_threads", return_value=1):
            clock.perf_counter.side_effect = lambda: 0.0
            found = linear_timing._in_turn(mock.Mock(), mock.Mock(), [(torch.ones(1), None)])
    assert linear_timing.gain(found) < linear_timing.FASTER


def test_fuse_without_measuring_takes_all_products() -> None:
    model = small()
    with faster_at(set()) as measured, torch.no_grad():
        report = str(model.fuse(measure=False).fusion_report())
        with spy_on_few_rows() as product:
            model(torch.tensor([[5, 6, 7]]))
    assert not measured.called and product.called and "in C++ (not timed)" in report
