"""Generation: the first call, tokens per second, and their share of the limit by reading weights and cache."""

from __future__ import annotations

import time
from typing import Any

import torch

from benchmarks.rehearse.bench import Bench
from benchmarks.rehearse.models import build, config_of, weights

PROMPTS, NEW = (32, 2048), 128
SHARE = 0.7
"""The target of `oslo_models` at batch 1: the share of the bandwidth limit."""
WAYS: dict[str, dict[str, Any]] = {
    "transformers": {},
    "transformers static": {"cache_implementation": "static", "disable_compile": True},
    "transformers compiled": {"cache_implementation": "static"},
    "oslo_models": {},
    "oslo_models fused": {},
}
"""The options of ``generate`` by peer. On GPUs, transformers compiles with every static cache."""


def decode(bench: Bench, model: str, peer: str, batch: int, beams: int, lengths: tuple[int, ...] = PROMPTS) -> None:
    """Two lengths of prompt, one after the other in one process: the second must not repeat the cost of the first."""
    with bench.attempt(peer):
        config = config_of(bench, model)
        config.max_position_embeddings = max(config.max_position_embeddings, lengths[-1] + NEW)
        built = build(bench, model, peer, config).eval()
        if "fused" in peer:
            built.fuse()
        new = bench.pick(NEW, 3)
        options = {"min_new_tokens": new, "max_new_tokens": new, "do_sample": False, "pad_token_id": 0,
                   "num_beams": beams, **_way(bench, peer)}  # fmt: skip
        prompts = {length: torch.randint(config.vocab_size, (bench.pick(batch, 2), length), device=bench.device)
                   for length in bench.pick(lengths if beams == 1 else lengths[:1], (4, 9))}  # fmt: skip
        first, graphs = {}, {}
        for length, ids in prompts.items():
            before, start = bench.watch.graphs, time.perf_counter()
            _generate(bench, built, ids, options)
            first[length], graphs[length] = time.perf_counter() - start, bench.watch.graphs - before
            _generate(bench, built, ids, options)
        compiles = peer == "transformers compiled" or (peer == "oslo_models fused" and beams == 1)
        if compiles and not bench.dry and not sum(graphs.values()):
            raise RuntimeError("nothing was compiled, so this is not what it is called")
        bench.ready()
        for length, ids in prompts.items():
            bench.row(peer, f"prompt {length}, first call", first[length], "s", graphs=graphs[length])
            _speeds(bench, peer, built, config, ids, options)


def _way(bench: Bench, peer: str) -> dict[str, Any]:
    """The options of a peer. In a dry run transformers compiles as on a GPU, but without Inductor."""
    if not (bench.dry and peer == "transformers compiled"):
        return WAYS[peer]
    from transformers import CompileConfig

    config = CompileConfig(backend="aot_eager", mode=None)
    config._compile_all_devices = True
    return {**WAYS[peer], "compile_config": config}


def _generate(bench: Bench, model: Any, ids: torch.Tensor, options: dict[str, Any]) -> None:
    out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)
    if out.shape != (len(ids), ids.shape[1] + options["max_new_tokens"]):
        raise RuntimeError(f"generated {tuple(out.shape)} from {tuple(ids.shape)}")
    bench.timer.synchronize()


def _speeds(bench: Bench, peer: str, model: Any, config: Any, ids: torch.Tensor, options: dict[str, Any]) -> None:
    batch, length = ids.shape
    new, what = options["max_new_tokens"], f"prompt {ids.shape[1]}"
    total = min(bench.timer.wall(lambda: _generate(bench, model, ids, options), 3))
    bench.row(peer, f"{what}, generation", batch * new / total, "tokens/s")
    if options["num_beams"] > 1:
        return
    with torch.no_grad():
        prefill = min(bench.timer.wall(lambda: model(input_ids=ids, use_cache=True, logits_to_keep=1), 3))
    bench.row(peer, f"{what}, prefill", prefill * 1e3, "ms")
    step = max(total - prefill, 1e-9) / max(new - 1, 1)
    read = 2 * weights(model) + _cache_bytes(config, batch, length + new // 2)
    share = read / step / bench.timer.ceilings().copy
    wanted = peer == "oslo_models fused" and (batch, length) == (1, PROMPTS[0]) and not bench.dry
    bench.row(peer, f"{what}, a token", step * 1e6, "us")
    bench.row(peer, f"{what}, share of bandwidth", share, "", target=SHARE if wanted else None)


def _cache_bytes(config: Any, batch: int, length: int) -> int:
    """Keys and values of a text in bfloat16, as every step reads them."""
    heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
    return 2 * 2 * config.num_hidden_layers * batch * length * heads * config.hidden_size // config.num_attention_heads
