"""The memory of a server on one rank: its key-value cache, a part of a prompt, and a decoding step."""

from __future__ import annotations

import inspect
from collections import Counter
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from oslo_models.deploy.running_batch.admission import Admission, with_states
from oslo_models.deploy.running_batch.limits import DEFAULT_LIMITS, GPU_LIMITS, BatchLimits
from oslo_models.deploy.running_batch.runners import runner_of
from oslo_models.deploy.running_batch.slot_groups import limits_of_groups
from oslo_models.deploy.running_batch.step import Step
from oslo_models.pipeline.sharded_model import ShardedModel
from oslo_models.planning.meta_run import ACTIVATIONS, CACHE, MetaRun


@torch.no_grad()
def serve(job: Any, model: ShardedModel, run: MetaRun) -> Counter[str]:
    """Return the peak of a server with ``job.batch`` rows of ``job.length`` tokens."""
    chunk = (GPU_LIMITS if job.device_type == "cuda" else DEFAULT_LIMITS).chunk
    limits = with_states(job.config, BatchLimits(job.batch, max(job.length, 2), min(chunk, job.length)))
    if Admission(job.config, limits).reason is None:
        return _run_batch(model, run, limits)
    cache = _prefill(job, model, run)[CACHE]
    run.collectives.clear()
    peak = _prefill(replace(job, batch=1, length=limits.chunk), model, run)
    peak[CACHE] = cache
    return peak


def _run_batch(model: ShardedModel, run: MetaRun, limits: BatchLimits) -> Counter[str]:
    """Run the steps of a running batch on its whole cache: the last part of a prompt, then a token of each row."""
    stages = 1 if model.stage is None else model.stage.count
    runners = [runner_of(model, own, keeps_logits=True) for own in limits_of_groups(limits, stages)]
    for runner in runners:
        runner.reserve()
        run.count([*runner.rows.tensors, *runner.prompt.tensors], CACHE)
    run.collectives.clear()
    run.reset_peak()
    runner, rows = runners[0], limits_of_groups(limits, stages)[0].rows
    chunk = min(limits.chunk, limits.length - 1) if limits.splits else limits.length - 1
    computed = limits.length - 1 - chunk
    runner.prompt.lengths, runner.prompt.stop = [computed], computed
    runner.run(Step(0, chunk=[0] * chunk, joins=True))
    runner.fork(0, rows - 1)
    runner.run(Step(0, tokens=[0] * rows))
    return run.peak


def _prefill(job: Any, model: ShardedModel, run: MetaRun) -> Counter[str]:
    """Compute prompts by one call. Return the peak, with the cache that remains as its own part."""
    run.reset_peak()
    tokens = torch.zeros(job.batch, job.length, dtype=torch.long, device="meta")
    batch: dict[str, Any] = {"input_ids": tokens}
    with model.generating():
        if job.config.is_encoder_decoder:
            batch["decoder_input_ids"] = tokens
            if model.pipeline is not None:
                batch["encoder_outputs"] = model.pipeline.encode((), batch)
        keep = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
        output = model(**batch, use_cache=True, **keep)
    peak = run.peak
    cached = _cached(output)
    held = sum({each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in cached}.values())
    peak[CACHE] += held
    peak[ACTIVATIONS] -= min(held, peak[ACTIVATIONS])
    return peak


def _cached(output: Any) -> list[Tensor]:
    """Return the tensors of a forward's cache."""
    found: list[Tensor] = []
    seen: set[int] = set()

    def visit(value: Any) -> None:
        if isinstance(value, Tensor):
            if value.is_meta:
                found.append(value)
        elif id(value) not in seen:
            seen.add(id(value))
            items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
            for item in (*items, *getattr(value, "__dict__", {}).values()):
                visit(item)

    for name in ("past_key_values", "cache_params", "state"):
        visit(output.get(name) if hasattr(output, "get") else None)
    return found
