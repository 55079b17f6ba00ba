"""Profile of the CPU time of a decoded token: products, and the calls around them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.definitions import TOKEN_PARTS, Peer, Result
from benchmarks.measure import tokens
from oslo_kernels import decoder_block

PRODUCTS, BLOCKS, NORMS, ATTENTION, MLP, MODEL, LOOP = TOKEN_PARTS


def token(
    peer: Peer, cls: str, checkpoint: Path, tiny: Path, *, new: int, timed: int, weights: str | None = None
) -> Result:
    """Milliseconds of CPU time of a token at batch 1, by part, of a fused model and of an unfused one.

    The fastest of ``timed`` runs of each, in turn, counts, since other programs that fill the caches cost CPU time.
    """
    unfused, fused = peer.load(cls, checkpoint).eval(), peer.load(cls, checkpoint).eval()
    fused.fuse(weights=weights)
    found: dict[str, list[dict[str, float]]] = {"fused": [], "unfused": []}
    for _ in range(timed + 1):
        for name, model in (("fused", fused), ("unfused", unfused)):
            found[name].append(_profile(model, new))
    best = {name: min(runs[1:] or runs, key=lambda run: sum(run.values())) for name, runs in found.items()}
    return Result(best["fused"], [], {"unfused": best["unfused"]})


def _profile(model: Any, new: int) -> dict[str, float]:
    spent = dict.fromkeys(TOKEN_PARTS, 0.0)
    begun: list[str] = [LOOP]
    last = time.thread_time()

    def switch() -> None:
        nonlocal last
        now = time.thread_time()
        spent[begun[-1]] += now - last
        last = now

    def enter(part: str) -> None:
        switch()
        begun.append(part)

    def leave(*_: Any) -> None:
        switch()
        begun.pop()

    def in_blocks(call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            enter(BLOCKS)
            found = call(*args)
            leave()
            return found

        return timed

    @contextmanager
    def hooked(module: Any, part: str) -> Iterator[None]:
        hooks = module.register_forward_pre_hook(lambda *_: enter(part)), module.register_forward_hook(leave)
        yield
        for hook in hooks:
            hook.remove()

    with ExitStack() as stack:
        begin, finish, threaded = decoder_block._library()
        library = (in_blocks(begin), in_blocks(finish), threaded)
        stack.enter_context(mock.patch.object(decoder_block, "_library", lambda: library))
        # a hook inside a block would disable its computation in C++
        inside = {inner for module in model.modules() if hasattr(module, "decoding") for inner in module.modules()}
        for module in model.modules():
            part = MODEL if module is model else _part(type(module).__name__)
            if part and module not in inside:
                stack.enter_context(hooked(module, part))
        ids = tokens(model, 1, 1)
        switch()
        spent = dict.fromkeys(TOKEN_PARTS, 0.0)
        model.generate(input_ids=ids, attention_mask=ids * 0 + 1, max_new_tokens=new, do_sample=False, pad_token_id=0)
        switch()
    return {part: seconds * 1e3 / new for part, seconds in spent.items()}


def _part(layer: str) -> str | None:
    endings = {
        "Linear": PRODUCTS,
        "Conv1D": PRODUCTS,
        "Head": PRODUCTS,
        "Norm": NORMS,
        "Attention": ATTENTION,
        "MLP": MLP,
    }
    return next((part for ending, part in endings.items() if layer.endswith(ending)), None)
