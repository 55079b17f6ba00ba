"""Compare the predicted with the measured peak memory of each rank, and write ``benchmarks/plan_accuracy.csv``.

A rank measures the growth of its anonymous pages (RssAnon, sampled every 2 ms) from before the model is constructed to
the end of two training steps with AdamW, or of the steps of a server. glibc returns blocks from 64 KB at once
(``MALLOC_MMAP_THRESHOLD_``), so that pages follow tensors. Models are small, but tensors dominate: a process has run a
tiny model before. The rows of QLoRA need bitsandbytes: ``PYTHONPATH=.venv/quantization``.
"""

from __future__ import annotations

import argparse
import csv
import ctypes
import gc
import itertools
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.instruments import PeakMemory
from benchmarks.launch import COMMON
from benchmarks.records import write_rows
from oslo_models.starting import python_module

RESULTS = Path(__file__).with_suffix(".csv")
COLUMNS = ("model", "task", "tp", "pp", "batch", "length", "rank", "predicted MB", "measured MB", "ratio")
SIZES = ((1, 1), (2, 1), (1, 2))
LLAMA = {
    **{"vocab_size": 4096, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4},
    **{"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 512},
}
WIDE = {**LLAMA, "hidden_size": 768, "intermediate_size": 2112}
"""For ranks with little beside weights, so that the few MB by which processes differ weigh less."""


@dataclass(frozen=True)
class Case:
    """A model with a task.

    Attributes:
        cls: the class.
        config: arguments of its configuration.
        task: of `oslo_models.estimate`.
        batches: rows and tokens of each batch.
        sizes: of tp and pp.
        options: further arguments of the constructors and of `oslo_models.estimate`.
        checkpoints: compute blocks again in the backward pass.
    """

    cls: str
    config: dict[str, Any]
    task: str = "full"
    batches: tuple[tuple[int, int], ...] = ((4, 256), (8, 64))
    sizes: tuple[tuple[int, int], ...] = SIZES
    options: dict[str, Any] = field(default_factory=lambda: {"dtype": "float32"})
    checkpoints: bool = False

    @property
    def cp(self) -> int:
        """Ranks that divide the tokens of each row."""
        return int(self.options.get("context_parallel_size", 1))

    def hf_config(self, **changes: Any) -> Any:
        """Return the configuration."""
        import transformers

        return getattr(transformers, self.cls).config_class(**self.config | changes, architectures=[self.cls])


CASES: dict[str, Case] = {
    "GPT-2": Case("GPT2LMHeadModel", {"vocab_size": 4096, "n_embd": 256, "n_layer": 4, "n_head": 8}),
    "Llama": Case("LlamaForCausalLM", LLAMA),
    "Llama, bfloat16": Case("LlamaForCausalLM", WIDE, options={"dtype": "bfloat16"}),
    "Llama, checkpointing": Case("LlamaForCausalLM", WIDE, checkpoints=True),
    "Llama, zb-h1": Case("LlamaForCausalLM", WIDE, sizes=((1, 2),), options={"dtype": "float32", "schedule": "zb-h1"}),
    "Llama, sequence parallel": Case(
        "LlamaForCausalLM", LLAMA, sizes=((2, 1),), options={"dtype": "float32", "sequence_parallel": True}
    ),
    "Llama, context parallel": Case(
        "LlamaForCausalLM",
        WIDE,
        batches=((4, 256), (1, 512)),
        sizes=((1, 1), (2, 1), (1, 2)),
        options={"dtype": "float32", "context_parallel_size": 2},
    ),
    "Llama, LoRA": Case("LlamaForCausalLM", WIDE, "lora", ((8, 256), (16, 64))),
    "Llama, QLoRA": Case("LlamaForCausalLM", WIDE, "qlora", ((8, 256),)),
    "Llama, served": Case("LlamaForCausalLM", WIDE, "serve", ((16, 512), (32, 128))),
    "Qwen3-MoE": Case(
        "Qwen3MoeForCausalLM",
        {
            **{"vocab_size": 4096, "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8},
            **{"num_key_value_heads": 4, "head_dim": 32, "moe_intermediate_size": 256, "num_experts": 8},
            **{"num_experts_per_tok": 2, "max_position_embeddings": 512},
        },
    ),
    "T5": Case(
        "T5ForConditionalGeneration",
        {
            **{"vocab_size": 4096, "d_model": 256, "d_kv": 32, "d_ff": 512, "num_layers": 3, "num_heads": 8},
            **{"decoder_start_token_id": 0, "pad_token_id": 0},
        },
    ),
}
LEAST = 50.0
"""MB of a rank from which a prediction counts: below, a few MB of the allocator and the threads weigh too much."""
TINY = {**dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "num_decoder_layers"), 2), "vocab_size": 64}


def predicted(case: Case, tp: int, pp: int, batch: int, length: int) -> dict[tuple[int, int], float]:
    """Return the MB of each rank, by its stage and tensor-parallel rank."""
    from oslo_models import estimate

    options = {**case.options, "gradient_checkpointing": case.checkpoints, "device_type": "cpu"}
    found = estimate(case.hf_config(), case.task, tp, pp, batch, length, **options)
    return {(rank.stage, tp_rank): rank.total / 1e6 for rank in found.ranks for tp_rank in rank.tp_ranks}


def measure(tp: int, pp: int, names: list[str], out: Path) -> None:
    """Run on every rank: write the MB of each case."""
    import torch

    torch.set_num_threads(1)
    rows = {}
    for name in names:
        case = CASES[name]
        for batch, length in case.batches:
            own = run(case, tp, pp, 2, 16, out, tiny=True)
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)  # pages that an earlier case has freed would not count as growth
            memory = PeakMemory()
            with memory.watched():
                run(case, tp, pp, batch, length, out)
            print(name, batch, length, memory.growth, file=sys.stderr, flush=True)
            rows[f"{name}/{batch}/{length}"] = memory.growth["peak anonymous memory"]
    out.joinpath("-".join(map(str, own)) + ".json").write_text(json.dumps(rows))


def run(
    case: Case, tp: int, pp: int, batch: int, length: int, folder: Path, tiny: bool = False
) -> tuple[int, int, int]:
    """Construct the model and run steps of its task. Return the pipeline, tensor and context-parallel rank."""
    model = construct(case, tp, pp, folder, tiny)
    own = model.mesh.pp.rank, model.mesh.tp.rank, model.mesh.cp.rank
    if case.task == "serve":
        serve(model.eval(), batch, length)
    else:
        train(case, model.train(), batch, length)
    return own


def construct(case: Case, tp: int, pp: int, folder: Path, tiny: bool) -> Any:
    """Return a new model; for QLoRA, the quantised model of a checkpoint in the folder."""
    from oslo_models import registry

    cls: Any = registry.find(case.cls)
    config = case.hf_config(**{key: TINY[key] for key in TINY.keys() & case.config.keys()} if tiny else {})
    if case.task != "qlora":
        return cls.from_config_with_parallel(config, tp, pp, seed=0, check_inputs=False, **case.options)
    import transformers

    kind = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    path = folder / ("tiny" if tiny else "model")
    return cls.from_pretrained_with_parallel(path, tp, pp, quantization_config=kind, check_inputs=False, **case.options)


def write_checkpoint(case: Case, folder: Path) -> None:
    """Write the checkpoints of `construct`."""
    import transformers

    for name, changes in (("tiny", {key: TINY[key] for key in TINY.keys() & case.config.keys()}), ("model", {})):
        model = getattr(transformers, case.cls)(case.hf_config(**changes))
        model.save_pretrained(folder / name)


def train(case: Case, model: Any, batch: int, length: int) -> None:
    """Take two training steps."""
    import torch

    base = model
    if case.task in ("lora", "qlora"):
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
    if case.checkpoints:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-4)
    ids = torch.randint(1, 60, (batch, length))
    for _ in range(2):
        outputs = model(input_ids=ids, labels=ids)
        for output in outputs if base.stage is not None else [outputs]:
            output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def serve(model: Any, rows: int, length: int) -> None:
    """Run the steps of a server whose cache has been in use."""
    import torch

    from oslo_models.deploy.running_batch.limits import DEFAULT_LIMITS, BatchLimits
    from oslo_models.deploy.running_batch.slot_groups import limits_of_groups
    from oslo_models.deploy.running_batch.step import Step
    from oslo_models.deploy.running_batch.step_runner import StepRunner

    limits = BatchLimits(rows, length, DEFAULT_LIMITS.chunk)
    stages = 1 if model.stage is None else model.stage.count
    with torch.no_grad():
        runners = [StepRunner(model, own, keeps_logits=True) for own in limits_of_groups(limits, stages)]
        for runner in runners:
            runner.reserve()
            for layer in (*runner.rows.layers, *runner.prompt.layers):
                if layer.is_initialized:  # the system gives pages of zeros when they are written
                    layer.keys.fill_(0)
                    layer.values.fill_(0)
        for runner, own in zip(runners, limits_of_groups(limits, stages), strict=True):
            for _ in range(own.rows):
                for start in range(0, length - 2, limits.chunk):
                    stop = min(start + limits.chunk, length - 2)
                    runner.run(Step(0, chunk=[1] * (stop - start), begins=start == 0, joins=stop == length - 2))
            for _ in range(2):
                runner.run(Step(0, tokens=[1] * own.rows))


def measured(tp: int, pp: int, names: list[str]) -> dict[tuple[int, ...], dict[str, float]]:
    """Return the MB of each case, by rank, from new processes."""
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            if CASES[name].task == "qlora":
                write_checkpoint(CASES[name], Path(folder))
        own = ["--measure", str(tp), str(pp), folder, "--cases", *names]
        launcher = ["torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", "--no-python"]
        ranks = tp * pp * CASES[names[0]].cp
        start = python_module(*launcher, f"--nproc-per-node={ranks}") if ranks > 1 else []
        environment = {**os.environ, **COMMON, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
        subprocess.run([*start, *python_module("benchmarks.plan_accuracy", *own)], env=environment, check=True)
        files = {tuple(map(int, file.stem.split("-"))): file for file in Path(folder).glob("*.json")}
        return {rank: json.loads(file.read_text()) for rank, file in files.items()}


def main() -> int:
    """Measure and predict every case. Return 1 if a prediction is wrong by more than 10 %."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plan_accuracy", description=__doc__)
    parser.add_argument("--only", default="", help="models whose names contain this text; other rows stay")
    parser.add_argument("--measure", nargs=3, metavar=("TP", "PP", "OUT"), help=argparse.SUPPRESS)
    parser.add_argument("--cases", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        measure(int(args.measure[0]), int(args.measure[1]), args.cases, Path(args.measure[2]))
        return 0
    rows = []
    for (tp, pp), cp in itertools.product(SIZES, (1, 2)):
        names = [name for name, case in CASES.items() if args.only in name and (tp, pp) in case.sizes and case.cp == cp]
        found = measured(tp, pp, names) if names else {}
        for name in names:
            case = CASES[name]
            for batch, length in case.batches:
                for (stage, tp_rank), expected in predicted(case, tp, pp, batch, length).items():
                    real = found[stage, tp_rank, 0][f"{name}/{batch}/{length}"]
                    figures = f"{expected:.1f}", f"{real:.1f}", f"{expected / real:.3f}"
                    key = (name, case.task, tp, pp, batch, length, stage * tp + tp_rank)
                    rows.append(dict(zip(COLUMNS, map(str, (*key, *figures)), strict=True)))
                    print(*rows[-1].values(), sep="\t", flush=True)
    write(rows)
    wrong = [row for row in rows if abs(float(row["ratio"]) - 1) > 0.1 and float(row["measured MB"]) >= LEAST]
    print(f"{len(wrong)} of {len(rows)} predictions are wrong by more than 10 %, of {LEAST} MB or more")
    return int(bool(wrong))


def write(rows: list[dict[str, str]]) -> None:
    """Replace the rows of the measured models."""
    measured_models = {row["model"] for row in rows}
    with RESULTS.open(newline="") as file:
        kept = [row for row in csv.DictReader(file) if row["model"] in CASES.keys() - measured_models]
    write_rows(RESULTS, COLUMNS, sorted((*kept, *rows), key=lambda row: list(CASES).index(row["model"])))


if __name__ == "__main__":
    sys.exit(main())
