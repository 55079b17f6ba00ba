"""The registry: every case of the five parts, and their order by value, since GPU time may run out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
HERE = "benchmarks.rehearse"
PARTS = ("tests", "kernels", "training", "decoding", "nccl")
LIMITS = {"tests": 480, "kernels": 360, "training": 540, "decoding": 540, "nccl": 240}
"""Default seconds of each part."""
LONG = (8192, 32768)
"""Tokens of prompts with a long context."""
ALONE = 10_000.0
"""Value of ``gigabytes`` for a case that prepares alone, so that no other case disturbs its tuning."""


@dataclass(frozen=True)
class Case:
    """The measurements of one process.

    Attributes:
        run: ``"module:function"``; the function takes a `Bench` and ``options``.
        limit: Maximum run time in seconds, without the time of waiting for other cases.
        gigabytes: Device memory. Cases prepare at the same time if their sum fits.
        quick: Whether the case belongs to the small slice that ``make test`` runs.
        larger: Whether the case differs from another case in sizes only. A dry run, with tiny sizes, leaves it out.
    """

    part: str
    name: str
    run: str
    limit: float = 120
    gigabytes: float = 4
    options: dict[str, Any] = field(default_factory=dict)
    quick: bool = False
    larger: bool = False


def cases(part: str, quick: bool = False, dry: bool = False) -> list[Case]:
    """The cases of a part, in the order in which they start."""
    parts = {"tests": _tests, "kernels": _kernels, "training": _training, "decoding": _decoding, "nccl": _nccl}
    found = parts[part]()
    return [case for case in found if (case.quick or not quick) and not (case.larger and dry)]


FIRST = (
    # does it work
    *("tests/ceilings", "tests/fused_decoding", "tests/single_rank", "tests/from_pretrained", "tests/two_ranks"),
    *(
        "tests/split_files",
        "tests/exact_rollouts",
        "tests/threaded_streamer",
        "tests/sampling",
        "tests/head_sizes",
        "tests/experts",
        "tests/deployed",
    ),
    *("tests/half_precision", "tests/compiled", "tests/tests/"),
    # how fast are models
    *("decoding/llama-1b, batch 8 /", "training/llama-1b / oslo_models fused", "training/llama-1b / transformers"),
    *("training/llama-1b / Liger", "decoding/llama-1b, batch 32 /", "decoding/running batch", "decoding/served"),
    *("training/recipe", "decoding/rollouts"),
    # and operations
    *("kernels/head and loss, V=128256", "kernels/rmsnorm", "kernels/add-rmsnorm", "kernels/swiglu", "kernels/rotary"),
    *("kernels/float8", "kernels/launch", "tests/large", "tests/loading", "tests/kept_caches"),
    "decoding/llama-1b, batch 1 / oslo_models fused",  # tunes for minutes, alone
    *("nccl/", "decoding/llama-1b, batch 1 /", "decoding/llama-1b, long", "tests/", "training/gpt2", "kernels/"),
)
"""Prefixes of ``part/name``, the most valuable first. Unmatched cases come last."""


def by_value(found: list[Case]) -> list[Case]:
    """The cases of all parts in the order of `FIRST`."""

    def place(case: Case) -> int:
        name = f"{case.part}/{case.name}"
        return next((number for number, start in enumerate(FIRST) if name.startswith(start)), len(FIRST))

    return sorted(found, key=place)


def _tests() -> Iterator[Case]:
    limits = {"fused_decoding": 360}  # some twenty compilations
    for name in ("ceilings", "single_rank", "two_ranks", "from_pretrained", "fused_decoding"):
        yield Case("tests", name, f"{HERE}.checks:{name}", limits.get(name, 120), quick=name == "two_ranks")
    for name in ("sequence_parallel", "split_files"):
        yield Case("tests", name, f"{HERE}.checks:{name}", 120)
    yield Case("tests", "exact_rollouts", f"{HERE}.fine_tuning:exact_rollouts", 180, 24)
    for path in gpu_tests():
        yield Case("tests", path, f"{HERE}.checks:pytest_file", 420, 6, {"path": path}, quick="ngrams" in path)
    for name in ("threaded_streamer", "sampling", "head_sizes", "experts", "deterministic", "capture_beside_queries",
                 "queries_beside_a_synchronisation", "progress"):  # fmt: skip
        yield Case("tests", name, f"{HERE}.features:{name}", 240)
    for name, gigabytes in (("large", 40), ("loading", 12), ("kept_caches", 12)):
        yield Case("tests", name, f"{HERE}.memory:{name}", 240, gigabytes)
    for name in ("symmetric_memory", "autocast", "half_precision", "odd_sizes", "strided", "compiled", "deployed",
                 "parallelized", "threads", "imports"):  # fmt: skip
        yield Case("tests", name, f"{HERE}.checks:{name}", 180)


def gpu_tests() -> list[str]:
    """The files of tests that are marked ``gpu``."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(path.relative_to(ROOT)) for path in files if "@pytest.mark.gpu" in path.read_text()]


def _kernels() -> Iterator[Case]:
    yield Case("kernels", "ceilings", f"{HERE}.checks:ceilings", 60)
    for vocab in (131072, 50257, 32000, 128256):
        yield Case("kernels", f"head and loss, V={vocab}", f"{HERE}.losses:head", 120, 30, {"vocab": vocab},
                   quick=vocab == 50257, larger=vocab != 50257)  # fmt: skip
    for name in ("rmsnorm", "add-rmsnorm", "swiglu", "rotary", "bias-gelu", "add-layernorm", "layernorm", "geglu",
                 "packed-swiglu", "add-rmsnorm-16384", "head-norms-rotary", "full-norms-rotary",
                 "rmsnorm-add", "sum-of-three"):  # fmt: skip
        yield Case("kernels", name, f"{HERE}.kernels:operation", 90, 8, {"name": name}, quick=name == "add-rmsnorm")
    for vocab in (50257, 32000, 128256):
        yield Case("kernels", f"loss of a narrow head, V={vocab}", f"{HERE}.losses:narrow", 90, 12, {"vocab": vocab},
                   larger=vocab != 50257)  # fmt: skip
    for name in ("masked-softmax", "causal-softmax", "dropout-residual"):
        yield Case("kernels", name, f"{HERE}.kernels:operation", 90, 8, {"name": name})
    for name in ("mlp", "ngrams", "optimizer"):
        yield Case("kernels", name, f"{HERE}.kernels:{name}", 90, 12)
    yield Case("kernels", "launch", f"{HERE}.launches:many_arguments", 60, 1)
    for recipe in ("tensorwise", "rowwise"):
        yield Case("kernels", f"float8 {recipe}", f"{HERE}.float8:linear", 120, 12, {"recipe": recipe})


def _training() -> Iterator[Case]:
    fused = "oslo_models fused"
    order = {"llama-1b": 45, "gpt2-124m": 22, "llama-8b-width": 40}
    for peers in (
        (fused, "transformers"),
        ("transformers compiled", f"{fused} and compiled"),
        ("Liger", "oslo_models"),
        (f"{fused} and compiled, float8",),
    ):
        for (model, gigabytes), peer in product(order.items(), peers):
            options = {"model": model, "peer": peer}
            quick = (model, peer) == ("llama-1b", fused)
            larger = model == "llama-8b-width"
            yield Case(
                "training", f"{model} / {peer}", f"{HERE}.training:train", 200, gigabytes, options, quick, larger
            )

    lora = {"use_peft": True, "lora_r": 16, "learning_rate": 1e-4}
    for name, keys in {"LoRA": lora, "QLoRA": {**lora, "load_in_4bit": True}}.items():
        yield Case("training", f"recipe, {name}", f"{HERE}.fine_tuning:recipes", 240, 40, {"keys": keys},
                   larger=name == "QLoRA")  # fmt: skip


def _decoding() -> Iterator[Case]:
    def case(model: str, peer: str, batch: int, beams: int = 1, gigabytes: float = 12) -> Case:
        name = f"{model}, batch {batch}{f', {beams} beams' if beams > 1 else ''} / {peer}"
        options = {"model": model, "peer": peer, "batch": batch, "beams": beams}
        quick = peer == "oslo_models fused" and beams > 1
        larger = (batch > 1 and beams == 1) or model == "llama-8b"
        limit = 330 if batch == 1 else 200
        return Case("decoding", name, f"{HERE}.decoding:decode", limit, gigabytes, options, quick, larger)

    default, compiled, fused = "transformers", "transformers compiled", "oslo_models fused"
    yield case("llama-1b", fused, 1, gigabytes=ALONE)  # tunes its products
    yield case("llama-1b", default, 1)
    yield case("llama-1b", compiled, 1)
    for batch in (8, 32):
        for peer in (fused, default, compiled):
            yield case("llama-1b", peer, batch)
    for peer in (fused, compiled, default):
        yield case("llama-8b", peer, 1, gigabytes=24)
    for peer in (fused, default):
        yield case("llama-1b", peer, 8, beams=4)
    for peer in (fused, compiled, default):
        yield case("gpt2-124m", peer, 1)
    for batch in (1, 8, 32):
        yield case("llama-1b", "transformers static", batch)
    yield case("llama-1b", "oslo_models", 1)
    for peer in (fused, default):
        options = {"model": "llama-1b", "peer": peer, "batch": 2, "beams": 1, "lengths": LONG}
        yield Case("decoding", f"llama-1b, long contexts / {peer}", f"{HERE}.decoding:decode", 200, 24, options,
                   larger=True)  # fmt: skip
    yield Case("decoding", "running batch, tokens", f"{HERE}.running_batch:tokens", 180, 4)
    yield Case("decoding", "running batch, llama-1b", f"{HERE}.running_batch:speeds", 300, 24)
    yield Case("decoding", "served", f"{HERE}.running_batch:served", 240, 24)
    for peer in ("oslo_models running batch", fused, default):
        yield Case("decoding", f"rollouts, llama-1b / {peer}", f"{HERE}.fine_tuning:rollouts", 120, 24, {"peer": peer},
                   quick=peer.endswith("batch"), larger=not peer.endswith("batch"))  # fmt: skip


def _nccl() -> Iterator[Case]:
    """Between two GPUs. With one GPU, each case is a skipped row."""
    for name in ("models", "wrappers", "sums", "overlap", "graphs", "killed"):
        yield Case("nccl", name, f"{HERE}.several_gpus:{name}", 240, 8, quick=name == "sums")


@dataclass(frozen=True)
class Question:
    """A question that only a GPU answers.

    Attributes:
        cases: prefixes of ``part/name`` of the cases with the answer.
        metrics: parts of the metrics that answer it; empty for all metrics.
        counts: whether the numbers of rows are the answer, instead of each row.
    """

    text: str
    cases: tuple[str, ...]
    metrics: tuple[str, ...] = ()
    counts: bool = False


QUESTIONS = (
    Question("Do all correctness checks pass?", ("tests/",), counts=True),
    Question("Does Llama-1B decode from graphs at batch 1: share of bandwidth, seconds of the first call?",
             ("decoding/llama-1b, batch 1 / oslo_models fused",), ("share of bandwidth", "first call")),
    Question("How long do head and loss take beside Liger's?", ("kernels/head and loss",), ("forward and backward",)),
    Question("Which share of a copy's bandwidth do norms, SwiGLU and rotary positions reach?",
             ("kernels/rmsnorm", "kernels/add-rmsnorm", "kernels/swiglu", "kernels/rotary"), ("share of a copy",)),
    Question("Which MFU does a fused Llama-1B reach beside transformers compiled?",
             ("training/llama-1b / oslo_models fused", "training/llama-1b / transformers compiled"), ("MFU",)),
    Question("How fast are deployed and served models beside generate in one process?",
             ("decoding/running batch, llama-1b", "decoding/served", "decoding/llama-1b, batch 8 / oslo_models fused",
              "decoding/llama-1b, batch 32 / oslo_models fused"), ("tokens/s",)),
    Question("How long does the host take for a Triton launch with 40 arguments?", ("kernels/launch",), ("host",)),
    Question("How fast is float8, eager and compiled?",
             ("kernels/float8", "training/llama-1b / oslo_models fused and compiled, float8")),
    Question("Does a query of an event break a capture, or wait for a synchronisation?",
             ("tests/capture_beside_queries", "tests/queries_beside_a_synchronisation")),
    Question("Do two GPUs load and train a model as one process does?", ("nccl/models", "nccl/wrappers")),
    Question("Who names a rank that was killed, and when?", ("nccl/killed",)),
    Question("How long does a tensor-parallel sum take: eager, asynchronous, in symmetric memory?", ("nccl/sums",)),
    Question("Are overlapping sums exact, and hidden?", ("nccl/overlap",)),
)  # fmt: skip
"""The most important first. ``summary`` answers them by their numbers."""
