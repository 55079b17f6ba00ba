"""The registry: what is measured, with which model, by which peers. Everything else goes by this table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import measure
from benchmarks.measure import Result
from benchmarks.peers import Peer

OURS, ALONE, NATIVE, DEEPSPEED = "oslo_models-tp2", "transformers", "transformers-tp2", "deepspeed-autotp"


@dataclass(frozen=True)
class Case:
    """One comparison.

    Attributes:
        what: the row of the README's table.
        runner: called in every process: ``runner(peer, cls, checkpoint, tiny_checkpoint, **options)``.
        model: one of ``MODELS``.
        baseline: the peer, or the reference that the runner computes, to which ratios are formed.
        tolerance: how far, relatively, the peers' results may differ; 0 for token ids.
        smoke: what replaces ``options`` in a smoke run.
    """

    name: str
    what: str
    runner: Callable[..., Result]
    model: str
    peers: tuple[str, ...]
    baseline: str
    tolerance: float = 0.0
    options: dict[str, int] = field(default_factory=dict)
    smoke: dict[str, int] = field(default_factory=dict)

    def prepare(self, folder: Path, smoke: bool) -> None:
        """Write the checkpoints that the peers load: a tiny one, and unless this is a smoke run that of the model."""
        import torch
        import transformers as hf

        name, sizes = MODELS[self.model]
        cls = getattr(hf, name)
        for path, own in ((folder / f"{self.model}-tiny", {**sizes, **TINY}), (folder / self.model, sizes)):
            if not path.exists() and not (smoke and own is sizes):
                torch.manual_seed(0)
                cls(cls.config_class(**own, **ENDLESS)).save_pretrained(path)

    def run(self, peer: Peer, folder: Path, smoke: bool) -> Result:
        """Measure in this process."""
        tiny = folder / f"{self.model}-tiny"
        options = {**self.options, **(self.smoke if smoke else {})}
        return self.runner(peer, MODELS[self.model][0], tiny if smoke else folder / self.model, tiny, **options)


def _llama(hidden: int, intermediate: int, layers: int, heads: int) -> tuple[str, dict[str, Any]]:
    sizes = {"hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers}
    return "LlamaForCausalLM", {**sizes, "num_attention_heads": heads, "vocab_size": 32000}


# Random float32 weights. Without dropout losses can be compared, and nothing ends a text early.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-100m": _llama(768, 2048, 12, 12),
    "llama-1gb": _llama(1024, 2816, 16, 16),
    "gpt2-124m": ("GPT2LMHeadModel", {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
}
TINY = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 128}
ENDLESS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def _cases_of(model: str, label: str, peers: tuple[str, ...]) -> list[Case]:
    """Generation and training of one model; ratios are to the first peer. Native tensor parallelism has no GPT-2."""
    few = {"batch": 2, "length": 8, "timed": 1}
    counted = tuple(peer for peer in (NATIVE, OURS) if peer in peers)
    return [
        *(
            Case(
                *(f"{model}-generate-b{batch}", f"{label}, generate, batch {batch}", measure.generate, model, peers),
                baseline=peers[0],
                options={"batch": batch, "prompt": 32, "new": 64, "timed": 3},
                smoke={"new": 4, "timed": 1},
            )
            for batch in (1, 8)
        ),
        Case(
            *(f"{model}-train", f"{label}, train, 4 x 256 tokens", measure.train, model, peers),
            baseline=peers[0],
            tolerance=1e-3,
            options={"batch": 4, "length": 256, "timed": 3},
            smoke=few,
        ),
        Case(
            *(f"{model}-collectives", f"{label}, train, 4 x 256 tokens", measure.collectives, model, counted),
            baseline="Megatron-LM",
            options={"batch": 4, "length": 256},
            smoke={"batch": 2, "length": 8},
        ),
    ]


CASES = {
    case.name: case
    for case in (
        *_cases_of("llama-100m", "Llama 100M", (NATIVE, OURS, ALONE, DEEPSPEED)),
        *_cases_of("gpt2-124m", "GPT-2 124M", (ALONE, OURS)),
        Case(
            *("load-memory", "Llama of 1.1 GB, load", measure.load_memory, "llama-1gb", (NATIVE, OURS, ALONE)),
            baseline="checkpoint",
        ),
        Case(
            *("merge-memory", "Llama of 1.1 GB, save merged", measure.merge_memory, "llama-1gb", (NATIVE, OURS)),
            baseline="shard + largest tensor",
        ),
    )
}
