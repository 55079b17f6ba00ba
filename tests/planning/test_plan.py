"""The plan of a job: memory, sizes for devices, groups and collectives. Nothing is allocated and no process starts."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from transformers import LlamaConfig, MistralConfig, Qwen3MoeConfig, T5Config

import oslo_models
from oslo_models import registry
from oslo_models.cli import main as cli
from oslo_models.deploy.running_batch.limits import BatchLimits
from oslo_models.deploy.running_batch.runners import runner_of
from oslo_models.deploy.running_batch.slot_groups import limits_of_groups
from oslo_models.planning.dry_run import dry_run
from oslo_models.planning.memory import estimate_job, make_job
from oslo_models.planning.picture import COLORS, page
from oslo_models.planning.sizes import choose_sizes, parse_devices

from support import zoo
from support.hub_server import hub_server, using_hub
from support.pool import Pool

SIZES: dict[str, Any] = {
    **{"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64},
}
LLAMA = LlamaConfig(**SIZES, architectures=["LlamaForCausalLM"])
MIXTURE = Qwen3MoeConfig(**SIZES, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
T5 = T5Config(
    vocab_size=96, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0, pad_token_id=0
)


UNEQUAL = {"tensor_parallel_shares": [1, 3], "blocks_per_stage": [2, 1]}


@pytest.fixture
def file(tmp_path: Path) -> str:
    LLAMA.save_pretrained(tmp_path)
    return str(tmp_path / "config.json")


def _bytes_of_rank(config: Any, tp: int, pp: int, unequal: dict[str, list[int]]) -> tuple[int, int, int]:
    name = {"llama": "LlamaForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}[config.model_type]
    cls: Any = registry.find(name)
    model = cls.from_config_with_parallel(config, tp, pp, **unequal)
    tensors = {
        each.untyped_storage().data_ptr(): each.untyped_storage() for each in (*model.parameters(), *model.buffers())
    }
    return model.mesh.pp.rank, model.mesh.tp.rank, sum(storage.nbytes() for storage in tensors.values())


@pytest.mark.parametrize("config", [LLAMA, MIXTURE], ids=["llama", "mixture"])
@pytest.mark.parametrize("tp, pp, unequal", [(3, 1, {}), (1, 2, {}), (2, 2, UNEQUAL)])
def test_weights_equal_the_constructors(
    pool: Pool, config: Any, tp: int, pp: int, unequal: dict[str, list[int]]
) -> None:
    found = oslo_models.estimate(config, "full", tp, pp, 2, 16, **unequal)
    planned = {(rank.stage, tp_rank): rank.parts["weights"] for rank in found.ranks for tp_rank in rank.tp_ranks}
    real = {(stage, rank): size for stage, rank, size in pool.run(tp * pp, _bytes_of_rank, config, tp, pp, unequal)}
    assert planned == real
    states = {rank.parts["optimizer states"] for rank in found.ranks}
    trained = {2 * 4 * rank.trainable for rank in found.ranks}
    assert states == trained


@pytest.mark.parametrize("task", ["lora", "qlora", "serve"])
def test_tasks_take_less_than_training_everything(task: str) -> None:
    full = oslo_models.estimate(LLAMA, "full", 2, 1, 4, 32).largest
    found = oslo_models.estimate(LLAMA, task, 2, 1, 4, 32, lora_rank=2).largest
    assert found.parts["gradients"] + found.parts["optimizer states"] < full.parts["optimizer states"]
    if task == "serve":  # keys and values of 3 blocks, 4 rows and a prompt, 32 + 64 tokens, one head of 8 in float32
        assert found.parts["key-value cache"] == 2 * 3 * 5 * 96 * 8 * 4
    if task == "qlora":
        assert found.parts["weights"] < full.parts["weights"]


WINDOWED = MistralConfig(**SIZES, sliding_window=8, architectures=["MistralForCausalLM"])


def _reserved(config: Any, tp: int, pp: int, rows: int, length: int) -> tuple[int, int, int]:
    cls: Any = registry.find(config.architectures[0])
    model = cls.from_config_with_parallel(config, tp, pp)
    each = limits_of_groups(BatchLimits(rows, length), pp)
    with torch.no_grad():
        held = sum(runner_of(model, own, keeps_logits=True).reserve() for own in each)
    return model.mesh.pp.rank, model.mesh.tp.rank, held


HYBRID, WHOLE, ENCODING = (
    zoo.config(kind, architectures=[zoo.lm_head(kind)], max_position_embeddings=40) for kind in ("bamba", "mamba", "t5")
)


@pytest.mark.parametrize(
    ("config", "tp", "pp"),
    [
        *((config, tp, pp) for config in (LLAMA, WINDOWED) for tp, pp in ((3, 1), (1, 2), (2, 2))),
        *((config, tp, pp) for config in (HYBRID, WHOLE, ENCODING) for tp, pp in ((2, 1), (1, 2))),
    ],
)
def test_plan_has_the_cache_that_a_server_reserves(pool: Pool, config: Any, tp: int, pp: int) -> None:
    found = oslo_models.estimate(config, "serve", tp, pp, 5, 40)
    planned = {
        (rank.stage, tp_rank): rank.parts["key-value cache"] for rank in found.ranks for tp_rank in rank.tp_ranks
    }
    real = {(stage, rank): size for stage, rank, size in pool.run(tp * pp, _reserved, config, tp, pp, 5, 40)}
    assert planned == real


def test_zero_bubble_holds_more_on_later_stages() -> None:
    """The first stage defers no weight gradients."""
    first, later = (
        [
            oslo_models.estimate(LLAMA, "full", 1, 2, 8, 32, micro_batch_size=2, schedule=schedule).ranks[stage]
            for schedule in ("1f1b", "zb-h1")
        ]
        for stage in (0, 1)
    )
    assert first[0].parts == first[1].parts
    assert later[1].parts["activations"] > 1.2 * later[0].parts["activations"]
    held = {name: [rank.parts[name] for rank in later] for name in ("weights", "optimizer states")}
    assert all(one == other for one, other in held.values())


def test_divided_tokens_take_less_activations() -> None:
    whole, divided = (oslo_models.estimate(LLAMA, "full", 2, 1, 4, 64, sequence_parallel=on) for on in (False, True))
    parts, own_parts = whole.largest.parts, divided.largest.parts
    assert all(own_parts[name] == parts[name] for name in ("weights", "optimizer states"))
    assert own_parts["activations"] < 0.78 * parts["activations"] and divided.largest.total < whole.largest.total


def test_devices_are_large_enough_for_divided_tokens(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    divided = oslo_models.estimate(LLAMA, "full", 2, 1, 4, 64, sequence_parallel=True)
    devices = f"2x{divided.largest.total / 0.92 / (1 << 20) * 1.01:.4f}MB"
    common = ["plan", file, "--task", "full", "--batch", "4", "--length", "64", "--devices", devices]
    assert cli.main([*common, "--tensor-parallel-size", "2"]) == 1
    assert cli.main([*common, "--tensor-parallel-size", "2", "--sequence-parallel"]) == 0
    assert "tensor_parallel_size=2 pipeline_parallel_size=1 sequence_parallel=True" in capsys.readouterr().out
    assert cli.main([*common, "--sequence-parallel"]) == 0  # one rank is no candidate
    assert "tensor_parallel_size=2 pipeline_parallel_size=1 sequence_parallel=True" in capsys.readouterr().out


def test_sizes_are_chosen_beside_context_parallelism(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = {"task": "full", "batch": 4, "length": 64, "context_parallel_size": 2}
    alone, of_two = (oslo_models.estimate(LLAMA, tensor_parallel_size=tp, **options).largest.total for tp in (1, 2))
    middle = (alone + of_two) / 2 / 0.92 / (1 << 20)
    common = ["plan", file, "--task", "full", "--batch", "4", "--length", "64", "--context-parallel-size", "2"]
    assert cli.main([*common, "--devices", f"4x{middle:.4f}MB", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    sizes = [found[f"{name}_parallel_size"] for name in ("tensor", "pipeline", "context", "data")]
    assert sizes == [2, 1, 2, 1]
    assert cli.main([*common, "--devices", f"3x{alone / 0.92 / (1 << 20) * 2:.4f}MB"]) == 2
    assert "context_parallel_size=2 does not divide --devices, which has 3 devices" in capsys.readouterr().err
    devices = parse_devices(f"{middle:.4f}MB,{middle:.4f}MB,{middle:.4f}MB,{middle / 2:.4f}MB")
    job = make_job(LLAMA, tensor_parallel_size=2, **options)
    (rank,) = estimate_job(job).ranks
    assert devices.limit(job, rank) == int(devices.bytes * 0.92), "the fourth device has other tokens"
    assert devices.limit(replace(job, context_parallel_size=1), rank) == int(devices.sizes[0] * 0.92)


def test_dry_run_lists_the_collectives_of_divided_tokens() -> None:
    """In the forward pass, a block gathers twice and reduce-scatters twice; no sum of hidden states remains."""
    job = make_job(LLAMA, task="full", tensor_parallel_size=2, length=16, sequence_parallel=True)
    ((run, _),) = dry_run(job, 2).ranks
    calls = Counter[tuple[str, int]]()
    for each, count in run.collectives.items():
        calls[each.operation, each.payload] += count
    blocks, hidden = LLAMA.num_hidden_layers, 16 * LLAMA.hidden_size * 4
    assert calls["reduce-scatter", hidden] == 2 * blocks + 2 * blocks + 1
    assert calls["all-gather", hidden // 2] == 2 * blocks + 1 + 4 * blocks + 2
    assert calls["all-reduce", hidden] <= 1  # the embedding


@pytest.mark.parametrize("tp", [1, 2])
def test_rows_over_ranks_take_the_activations_of_their_tokens(tp: int) -> None:
    """The weights stay whole, and so do sums of the gradients of a block, which are small beside 32 rows."""
    whole, divided = (oslo_models.estimate(LLAMA, "full", tp, 1, 32, 64, context_parallel_size=cp) for cp in (1, 2))
    parts, own_parts = whole.largest.parts, divided.largest.parts
    assert all(own_parts[name] == parts[name] for name in ("weights", "optimizer states"))
    assert own_parts["activations"] < 0.65 * parts["activations"] and divided.largest.total < whole.largest.total
    assert divided.as_dict()["context_parallel_size"] == 2


def test_experts_over_ranks_compute_the_tokens_of_a_rank() -> None:
    whole, divided = (
        oslo_models.estimate(MIXTURE, "full", 2, 1, 32, 64, expert_parallel_size=2, context_parallel_size=cp)
        for cp in (1, 2)
    )
    parts, own_parts = whole.largest.parts, divided.largest.parts
    assert own_parts["weights"] == parts["weights"] and own_parts["activations"] < 0.65 * parts["activations"]
    with pytest.raises(ValueError, match="expert_parallel_size=4 sends tokens to other ranks"):
        oslo_models.estimate(MIXTURE, "full", 2, 1, 32, 64, expert_parallel_size=4, context_parallel_size=2)


def test_dry_run_lists_the_exchanges_of_heads() -> None:
    """A block exchanges twice in each pass, and sums its gradients once."""
    job = make_job(LLAMA, task="full", length=16, context_parallel_size=2)
    ((run, _),) = dry_run(job, 4).ranks
    calls = Counter[tuple[str, str]]()
    for each, count in run.collectives.items():
        calls[each.axis, each.operation] += count
    assert run.groups["cp"] == run.groups["dp"] == 2
    assert calls["cp", "all-to-all"] == 4 * LLAMA.num_hidden_layers
    sums = sum(count for each, count in run.collectives.items() if (each.axis, each.operation) == ("cp", "all-reduce"))
    assert sums == LLAMA.num_hidden_layers + 3  # the loss, norm and head
    with pytest.raises(ValueError, match=r"--dry-run 3 is not a multiple of .* x context_parallel_size=2 = 2"):
        dry_run(job, 3)


def test_dry_run_lists_the_tokens_that_stages_send() -> None:
    job = make_job(LLAMA, task="full", length=16, context_parallel_size=2, pipeline_parallel_size=2)
    (first, _), (last, _) = dry_run(job, 4).ranks
    messages = {"send": first.collectives, "receive": last.collectives}
    for operation, collectives in messages.items():
        assert [each.payload for each in collectives if each.operation == operation] == [8 * LLAMA.hidden_size * 4]


def test_an_encoder_decoder_and_checkpointed_activations() -> None:
    assert oslo_models.estimate(T5, "full", 2, 2, 4, 16).largest.parts["activations"]
    plain, checkpointed = (
        oslo_models.estimate(LLAMA, "full", 1, 1, 4, 64, gradient_checkpointing=on).largest.total
        for on in (False, True)
    )
    assert checkpointed < plain


def test_sizes_are_chosen_for_the_devices(file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    alone = (
        oslo_models.estimate(LLAMA, "full", batch=4, length=32, data_parallel_size=2).largest.total / 0.92 / (1 << 20)
    )
    common = ["plan", file, "--task", "full", "--batch", "4", "--length", "32"]
    file_of_page = tmp_path / "plan.html"
    assert cli.main([*common, "--devices", f"2x{alone * 0.95:.3f}MB", "--json", "--picture", str(file_of_page)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["tensor_parallel_size"], found["pipeline_parallel_size"]) == (2, 1) and found["fits"]
    assert [each["tensor_parallel_size"] for each in found["choice"]["tried"]] == [1, 2]
    text = file_of_page.read_text()
    assert "stage 0, tp 0-1" in text and "model.layers.2" in text and "http" not in text and "<script" not in text
    assert cli.main([*common, "--devices", f"2x{alone * 1.05:.3f}MB"]) == 0
    assert "2 replicas" in capsys.readouterr().out
    assert cli.main([*common, "--devices", "2x0.1MB"]) == 1
    assert "would fit: " in capsys.readouterr().out


def test_only_the_configuration_is_downloaded(
    file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    with hub_server() as hub, using_hub(hub.url):
        hub.repos["some/model"] = {
            "config.json": Path(file).read_bytes(),
            "model.safetensors": b"",
            "tokenizer.json": b"",
        }
        assert cli.main(["plan", "some/model", "--length", "16", "--task", "full"]) == 0
    assert "LlamaForCausalLM, full, 1 x 16 tokens" in capsys.readouterr().out
    assert [path.name for path in cache.rglob("*") if "snapshots" in path.parts and not path.is_dir()] == [
        "config.json"
    ]


def test_shares_and_blocks_are_chosen_for_unequal_devices(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Devices on which equal parts do not fit, and parts by memory do."""
    common = ["plan", file, "--task", "full", "--batch", "1", "--length", "2", "--json"]

    def sizes(config: Any, **unequal: Any) -> list[float]:
        """Return the memory of each of two ranks, in MB of devices with 8 % free."""
        found = oslo_models.estimate(config, "full", batch=1, length=2, **unequal)
        return [rank.total / 0.92 / (1 << 20) * 1.01 for rank in found.ranks for _ in rank.tp_ranks]

    first, second = sizes(LLAMA, tensor_parallel_size=2, tensor_parallel_shares=[2, 1])
    even, _ = sizes(LLAMA, tensor_parallel_size=2)
    assert first > even > second
    assert cli.main([*common, "--devices", f"{2 * second:.4f}MB,{second:.4f}MB"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tensor_parallel_size"] == 2 and found["tensor_parallel_shares"] == [2, 1] and found["fits"]

    one_head = LlamaConfig(**{**SIZES, "num_attention_heads": 1, "num_key_value_heads": 1, "num_hidden_layers": 4})
    large, small = sizes(one_head, pipeline_parallel_size=2, blocks_per_stage=[3, 1])
    job = make_job(one_head, task="full", length=2)
    choice = choose_sizes(job, parse_devices(f"{large:.4f}MB,{small:.4f}MB"))
    assert choice.fits and list(choice.estimate.job.blocks_per_stage or []) == [3, 1], choice.tried


class Page(HTMLParser):
    """Reads a page strictly: every element is closed in turn, and every attribute has a value once.

    Attributes:
        bars: the elements of each bar of memory, as (left, width, title) in percent of the bar.
        texts: the classes of the elements around each text, and the text.
    """

    EMPTY = ("meta",)

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[tuple[str, dict[str, str | None]]] = []
        self.bars: list[list[tuple[float, float, str]]] = []
        self.texts: list[tuple[list[str | None], str]] = []
        self.feed(text)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        assert len(given) == len(attrs) and all(value is not None for value in given.values()), attrs
        if self.open and self.open[-1][1].get("class") == "bar":
            style = dict(each.split(":") for each in (given["style"] or "").split(";"))
            assert given.get("class") != "bar" and set(style) <= {"left", "width", "background"}, style
            left, width = (float(style.get(name, "0%").removesuffix("%")) for name in ("left", "width"))
            self.bars[-1].append((left, width, given.get("title") or given["class"] or ""))
        if given.get("class") == "bar":
            self.bars.append([])
        if tag not in self.EMPTY:
            self.open.append((tag, given))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop()[0] == tag, f"</{tag}> closes nothing"

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        raise AssertionError(f"<{tag}/> is not HTML")

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.texts.append(([given.get("class") for _, given in self.open], data))


@pytest.mark.parametrize("limit", [0.4, 1.5], ids=["too small", "fits"])
def test_picture_is_well_formed_and_every_bar_is_within_its_axis(limit: float) -> None:
    """Parts of a bar do not overlap, and a bar holds no text, which could overlap."""
    found = oslo_models.estimate(LLAMA, "lora", 2, 2, 4, 32)
    devices = parse_devices(f"4x{found.largest.total / 0.92 / (1 << 20) * limit:.4f}MB")
    text = page(found, devices)
    parsed = Page(text)
    assert len(parsed.bars) == len(found.ranks) and text.startswith("<!doctype html>")
    for bar, rank in zip(parsed.bars, found.ranks, strict=True):
        parts = [each for each in bar if ": " in each[2] and not each[2].startswith("limit")]
        assert len(parts) == len(rank.parts) and [each[2].partition(":")[0] for each in parts] == list(rank.parts)
        assert all(left >= 0 and width >= 0 and left + width <= 100.01 for left, width, _ in bar), bar
        for (left, width, _), (following, _, _) in zip(parts, parts[1:], strict=False):
            assert abs(left + width - following) <= 2e-3, bar
        sizes = [width / sum(width for _, width, _ in parts) for _, width, _ in parts]
        assert sizes == pytest.approx([size / rank.total for size in rank.parts.values()], abs=1e-4)
        (edge,) = [left for left, _, title in bar if title.startswith("limit")]
        total = parts[-1][0] + parts[-1][1]
        over = [(left, width) for left, width, title in bar if title == "over"]
        assert over == ([pytest.approx((edge, total - edge), abs=2e-3)] if total > edge else [])
    assert any(title == "over" for bar in parsed.bars for *_, title in bar) == (limit < 1)
    assert not any("bar" in classes for classes, _ in parsed.texts)
    names = [text for classes, text in parsed.texts if "blocks" in classes]
    assert names == [name for rank in found.ranks for name in rank.modules]


def test_a_browser_draws_every_part(tmp_path: Path) -> None:
    """In a headless browser, each rank has a bar with the colours of its parts, and stripes where it does not fit."""
    browser = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chrome"))), None)
    if browser is None:
        pytest.skip("there is no Chromium")
    Image = pytest.importorskip("PIL.Image")
    found = oslo_models.estimate(LLAMA, "lora", 2, 1, 4, 32)
    file, shown = tmp_path / "plan.html", {}
    for name, factor in (("fits", 1.5), ("too small", 0.6)):
        devices = parse_devices(f"2x{found.largest.total / 0.92 / (1 << 20) * factor:.4f}MB")
        file.write_text(page(found, devices), encoding="utf-8")
        picture = tmp_path / f"{name}.png"
        options = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            f"--user-data-dir={tmp_path / name}",
        ]
        command = [browser, *options, "--window-size=900,600", f"--screenshot={picture}", file.as_uri()]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
        colors = Image.open(picture).convert("RGB").getcolors(1 << 20)
        shown[name] = {f"#{red:02x}{green:02x}{blue:02x}": count for count, (red, green, blue) in colors}
    for part, size in found.largest.parts.items():
        area = size / found.largest.total
        assert shown["fits"].get(COLORS[part], 0) > 1000 * area, part
    stripes = [sum(count for color, count in each.items() if color not in shown["fits"]) for each in shown.values()]
    assert stripes[0] == 0 and stripes[1] > 2000


def test_devices_are_read() -> None:
    assert (parse_devices("2x24GB").count, parse_devices("24GB,16GiB").bytes) == (2, 16 << 30)
    assert str(parse_devices("2x24GB,16GB")) == "2 x 24 GiB, 1 x 16 GiB"


BAD = {
    "model": (["nowhere/at/all"], "MODEL nowhere/at/all"),
    "devices": (["FILE", "--devices", "24"], "--devices '24'"),
    "no devices": (["FILE", "--devices", "0x24GB"], "--devices '0x24GB'"),
    "heads": (["FILE", "--tensor-parallel-size", "5"], "tensor_parallel_size=5"),
    "blocks": (["FILE", "--pipeline-parallel-size", "4"], "pipeline_parallel_size=4"),
    "positions": (["FILE", "--length", "65"], "length=65"),
    "rows": (["FILE", "--batch", "3", "--micro-batch-size", "2"], "batch=3"),
    "experts": (["FILE", "--expert-parallel-size", "2"], "expert_parallel_size=2"),
    "type": (["FILE", "--dtype", "int3"], "int3"),
    "shares": (["FILE", "--tensor-parallel-size", "2", "--tensor-parallel-shares", "1,1,1"], "[1, 1, 1] has 3 shares"),
    "schedule": (["FILE", "--schedule", "gpipe"], "schedule must be one of '1f1b', 'zb-h1', got 'gpipe'"),
    "tokens of one rank": (["FILE", "--sequence-parallel"], "tensor_parallel_size is 1: set it"),
    "tokens of one device": (
        ["FILE", "--task", "full", "--sequence-parallel", "--devices", "24GB"],
        "sequence_parallel=True divides tokens over ranks, and --devices has one",
    ),
    "tokens of a server": (
        ["FILE", "--task", "serve", "--sequence-parallel", "--tensor-parallel-size", "2"],
        "sequence_parallel=True cannot be used together with task='serve'",
    ),
    "rows of a server": (
        ["FILE", "--task", "serve", "--context-parallel-size", "2"],
        "context_parallel_size=2 cannot be used together with task='serve'",
    ),
    "checkpointed schedule": (
        ["FILE", "--task", "full", "--pipeline-parallel-size", "2", "--schedule", "zb-h1", "--gradient-checkpointing"],
        'schedule="zb-h1" cannot be used with gradient checkpointing',
    ),
    "ranks": (["FILE", "--dry-run", "7", "--tensor-parallel-size", "2"], "--dry-run 7"),
    "many ranks": (["FILE", "--dry-run", "2000"], "--dry-run 2000"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_answered_by_one_line(case: str, file: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, named = BAD[case]
    length = [] if "--length" in arguments else ["--length", "16"]
    assert cli.main(["plan", *(file if each == "FILE" else each for each in arguments), *length]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and named in lines[0], lines


def test_dry_run_lists_groups_and_collectives_of_distinct_ranks() -> None:
    found = dry_run(make_job(LLAMA, task="full", tensor_parallel_size=2, pipeline_parallel_size=2, length=16), 1024)
    assert [tp_ranks for _, tp_ranks in found.ranks] == [(0, 1), (0, 1)]
    first, last = (run for run, _ in found.ranks)
    assert first.groups["world"] == 1024 and first.groups["dp"] == 256 and first.groups["pp"] == 2
    hidden = 16 * LLAMA.hidden_size * 4
    sent = {each.payload: calls for each, calls in first.collectives.items() if each.operation == "send"}
    assert sent == {hidden: 1}
    reduced = {each.payload: calls for each, calls in last.collectives.items() if each.axis == "tp"}
    assert reduced[hidden] >= 4  # attention and MLP of a block, forward and backward
    assert [each.payload for each in first.collectives if each.axis == "dp"] == [4 * first.trainable]
    assert "dp of 256" in str(found)


@pytest.mark.zoo
def test_dry_run_of_a_large_job_takes_less_than_five_minutes() -> None:
    """1,024 ranks of Llama 70B: 16 stages of 8 ranks, 8 replicas."""
    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
    config = LlamaConfig(vocab_size=128256, num_key_value_heads=8, max_position_embeddings=8192, **sizes)
    start = time.process_time()
    job = make_job(config, task="full", tensor_parallel_size=8, pipeline_parallel_size=16, length=4096, batch=16)
    found = dry_run(job, 1024)
    seconds = time.process_time() - start
    assert seconds < 300, seconds
    assert len(found.ranks) == 16 and all(tp_ranks == tuple(range(8)) for _, tp_ranks in found.ranks)
    parameters = 8 * sum(run.parameters for run, _ in found.ranks)
    assert 70e9 < parameters < 71e9 and found.job.data_parallel_size == 8


def test_a_rank_of_a_process_group_cannot_plan(pool: Pool) -> None:
    assert pool.run(2, _plan_in_a_group) == [True, True]


def _plan_in_a_group() -> bool:
    with pytest.raises(RuntimeError, match="already one of a process group"):
        oslo_models.estimate(LLAMA, "full", length=16)
    return torch.distributed.is_initialized()
