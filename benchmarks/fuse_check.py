"""Whether `model.fuse()` makes anything slower on a CPU: small models of six architectures, fused and unfused."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.definitions import Peer, Result
from benchmarks.fusing import COMMON, FAMILIES, small_model
from benchmarks.measure import tokens

# Only the measuring processes import torch. The process that reads the registry does not need it.

CHECKED: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: FAMILIES[name] for name in ("gpt2", "llama", "bert", "t5")},
    "opt": ("OPTForCausalLM", {**COMMON, "ffn_dim": 2048, "word_embed_proj_dim": 512}),
    "gpt_neox": ("GPTNeoXForCausalLM", {**COMMON, "intermediate_size": 2048}),
}
BATCHES = (1, 8, 32)
SLOWER = 1.02
"""Maximum ratio fused / unfused: a case fails if its whole interval is above."""
FEWEST, MOST, BUDGET = 9, 61, 4.0
"""Minimum and maximum number of pairs of calls, and their budget in seconds."""


def slowdown(
    peer: Peer, cls: str, checkpoint: Path, tiny: Path, *, family: str, length: int, new: int, vocab: int, timed: int
) -> Result:
    """Measure the ratio of fused to unfused time for three batches, in pairs of calls.

    Args:
        timed: Maximum number of pairs.
    """
    import torch

    unfused, fused = (
        small_model(*CHECKED[family], peer.processes, vocab_size=vocab, max_position_embeddings=256).eval()
        for _ in range(2)
    )
    fused.fuse()
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    pairs = {}
    for batch in BATCHES:
        ids = tokens(unfused, batch, length)
        for (metric, run), (_, other) in zip(_calls(fused, ids, new), _calls(unfused, ids, new), strict=True):
            pairs[f"{metric}, batch {batch}"] = _ratios(run, other, clock, timed)
    return Result.of_pairs(pairs)


def _calls(model: Any, ids: Any, new: int) -> Iterator[tuple[str, Callable[[], Any]]]:
    import torch

    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    decoder = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}

    def forward() -> None:
        with torch.no_grad():
            model(**given, **decoder)

    def train() -> None:
        model.zero_grad()
        model(**given, labels=ids).loss.backward()

    yield "forward", forward
    yield "decoding", lambda: model.generate(**given, **options)
    yield "forward and backward", train


def _ratios(fused: Callable[[], Any], unfused: Callable[[], Any], clock: Callable[[], float], most: int) -> list[float]:
    """Return the ratios of pairs of calls in alternating order, after a warm-up pair; equally many on all ranks."""

    def ratio(order: tuple[Callable[[], Any], ...]) -> float:
        seconds = {}
        for run in order:
            start = clock()
            run()
            seconds[run] = clock() - start
        return seconds[fused] / seconds[unfused]

    start = time.perf_counter()
    ratio((unfused, fused))
    affordable = int(BUDGET / (time.perf_counter() - start))
    count = min(most, max(FEWEST, _least(affordable)))
    return [ratio((fused, unfused) if pair % 2 else (unfused, fused)) for pair in range(count)]


def _least(count: int) -> int:
    """Return the minimum over all ranks."""
    import torch
    import torch.distributed as dist

    agreed = torch.tensor(count)
    if dist.is_initialized():
        dist.all_reduce(agreed, dist.ReduceOp.MIN)
    return int(agreed)
