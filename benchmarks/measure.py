"""The runners of cases about models: functions that are called in every process of a peer."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.definitions import BY_MEMORY, BY_PRODUCTS, UNITS, Peer, Result, Step

# Only the measuring processes import torch. The process that reads the registry does not need it.


def generate(
    peer: Peer, cls: str, checkpoint: Path, tiny: Path, *, batch: int, prompt: int, new: int, timed: int
) -> Result:
    """Greedy generation: the median of ``timed`` runs after a warm-up run."""
    import torch

    from benchmarks.limits import has_limits, tokens_by_memory

    model = peer.load(cls, checkpoint).eval()
    ids = tokens(model, batch, prompt)
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": new, "do_sample": False, "pad_token_id": 0}
    seconds = []
    for _ in range(timed + 1):
        start = time.perf_counter()
        out = model.generate(input_ids=ids, **options)
        seconds.append(time.perf_counter() - start)
    assert out.shape == (batch, prompt + new)
    result = Result({"generation": batch * new / statistics.median(seconds[1:])}, out[:, prompt:].flatten().tolist())
    if hasattr(model, "parameters") and has_limits(model):
        result.references[BY_MEMORY] = {"generation": tokens_by_memory(model, batch, prompt + new // 2)}
    return result


def first_token(peer: Peer, cls: str, checkpoint: Path, tiny: Path, *, batch: int, prompt: int, timed: int) -> Result:
    """Time from a prompt to its first token: the median of ``timed`` calls after a warm-up call."""
    import torch

    model = peer.load(cls, checkpoint).eval()
    ids = tokens(model, batch, prompt)
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 1, "do_sample": False, "pad_token_id": 0}
    seconds = []
    for _ in range(timed + 1):
        start = time.perf_counter()
        out = model.generate(input_ids=ids, **options)
        seconds.append(time.perf_counter() - start)
    return Result({"first token": 1000 * statistics.median(seconds[1:])}, out[:, prompt:].flatten().tolist())


def rollouts(
    peer: Peer,
    cls: str,
    checkpoint: Path,
    tiny: Path,
    *,
    prompts: int,
    group: int,
    prompt: int,
    new: int,
    mean: int,
    timed: int,
) -> Result:
    """Sampled completions in groups, as in reinforcement learning: the median of ``timed`` runs after a warm-up run.

    Tokens after the end of a completion do not count. A peer with a name that ends in ``-batch`` generates in a running
    batch, and the other peers generate padded rows.

    Args:
        mean: number of tokens after which a completion ends on average: one in ``mean`` tokens is an end token.
    """
    import torch
    from transformers import GenerationConfig

    model = peer.load(cls, checkpoint).eval()
    ids = tokens(model, prompts, prompt).clamp(min=1).repeat_interleave(group, 0)
    ends = [*range(0, model.config.vocab_size, mean)]
    config = GenerationConfig(do_sample=True, max_new_tokens=new, eos_token_id=ends, pad_token_id=0)
    torch.manual_seed(0)

    def complete() -> int:
        if peer.name.endswith("-batch"):
            outputs = model.generate_batch(ids.tolist(), generation_config=config)
            return sum(len(each.generated_tokens) for each in outputs.values())
        out = model.generate(ids, config, attention_mask=torch.ones_like(ids))[:, prompt:]
        is_end = torch.isin(out, torch.tensor(ends))
        return int((is_end.cumsum(1) - is_end.long() == 0).sum())  # up to the first end, and including it

    rates = []
    for _ in range(timed + 1):
        start = time.perf_counter()
        count = complete()
        rates.append(count / (time.perf_counter() - start))
    return Result({"rollouts": statistics.median(rates[1:])})


def mixed_rows(
    peer: Peer,
    cls: str,
    checkpoint: Path,
    tiny: Path,
    *,
    rows: int,
    shortest: int,
    longest: int,
    steps: int,
    timed: int,
) -> Result:
    """Decoding steps of rows with lengths from a log-uniform distribution, and the memory of their keys and values.

    The median of ``timed`` rounds of steps after a warm-up round. Only the last token of each prompt is computed. A
    peer with a name that ends in ``-reserved`` reserves all slots at their maximum length, as the server does.
    """
    import random

    import torch

    from oslo_models.deploy.running_batch.limits import BatchLimits
    from oslo_models.deploy.running_batch.step import Step
    from oslo_models.deploy.running_batch.step_runner import StepRunner

    model = peer.load(cls, checkpoint).eval()
    most = longest + steps * (timed + 1)
    model.config.max_position_embeddings = max(model.config.max_position_embeddings, most)
    chance, rates = random.Random(0), []
    lengths = [round(math.exp(chance.uniform(math.log(shortest), math.log(longest)))) for _ in range(rows)]
    with torch.no_grad():
        runner = StepRunner(model, BatchLimits(rows, most, reuse=False))
        if peer.name.endswith("-reserved"):
            runner.reserve()
        runner.prompt.lengths = [0]
        runner.prompt.make_room(1, longest)
        for length in lengths:
            runner.prompt.lengths, runner.prompt.stop = [length - 1], length - 1
            runner.run(Step(0, chunk=[5], joins=True))
        for _ in range(timed + 1):
            start = time.perf_counter()
            for _ in range(steps):
                runner.run(Step(0, tokens=[5] * rows))
            rates.append(rows * steps / (time.perf_counter() - start))
    values = {"mixed rows": statistics.median(rates[1:]), "memory of mixed rows": runner.rows.bytes_held / 1e6}
    return Result(values)


def draft(
    peer: Peer,
    cls: str,
    checkpoint: Path,
    tiny: Path,
    *,
    prompts: int,
    passage: int,
    repeats: int,
    new: int,
    drafted: int,
    timed: int,
    layers: int = 0,
) -> Result:
    """Greedy answers to prompts that repeat a passage: the median of ``timed`` runs after a warm-up run.

    A peer with a name that ends in ``-lookup`` or ``-drafts`` drafts tokens by prompt lookup, or by the first layers of
    the model. transformers does so for one prompt at a time, and the running batch for all prompts at once.

    Args:
        passage: tokens of the repeated passage.
        drafted: maximum drafted tokens of a step.
        layers: layers of the model that drafts tokens; 0 for prompt lookup.
    """
    import torch
    import transformers

    model = peer.load(cls, checkpoint).eval()
    ids = tokens(model, prompts, passage).clamp(min=1).repeat(1, repeats)
    options = {"max_new_tokens": new, "do_sample": False, "pad_token_id": 0}
    draft_model: Any = None
    drafts: dict[str, Any] = {"prompt_lookup_num_tokens": drafted}
    if layers:
        if hasattr(model, "mesh"):
            draft_model = peer.load(cls, checkpoint, num_hidden_layers=layers).eval()
        else:
            draft_model = getattr(transformers, cls).from_pretrained(checkpoint, num_hidden_layers=layers).eval()
        draft_model.generation_config.update(num_assistant_tokens=drafted, num_assistant_tokens_schedule="constant")
        drafts = {"assistant_model": draft_model}

    is_drafting = peer.name.endswith(("-drafts", "-lookup"))

    def complete() -> list[list[int]]:
        if hasattr(model, "mesh"):  # models of transformers have such a method, too
            given = {"speculative_tokens": drafted, "speculative_model": draft_model} if is_drafting else {}
            return [each.generated_tokens for each in model.generate_batch(ids.tolist(), **options, **given).values()]
        if not is_drafting:
            out = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
            found: list[list[int]] = out[:, ids.shape[1] :].tolist()
            return found
        each = [model.generate(row, attention_mask=torch.ones_like(row), **drafts, **options) for row in ids.split(1)]
        return [out[0, ids.shape[1] :].tolist() for out in each]

    rates, answers = [], list[list[int]]()
    for _ in range(timed + 1):
        start = time.perf_counter()
        answers = complete()
        rates.append(prompts * new / (time.perf_counter() - start))
    found = {"drafts": statistics.median(rates[1:])}
    if draft_model is not None:
        text_BL = torch.cat((ids, torch.tensor(answers)), 1)
        with torch.no_grad():
            logits_BLV = draft_model(text_BL[:, :-1]).logits
        is_right_BL = logits_BLV.argmax(-1) == text_BL[:, 1:]
        found["right drafts"] = 100 * is_right_BL[:, -new:].float().mean().item()
    else:
        found["right drafts"] = statistics.mean(map(partial(_found, most=drafted), ids.tolist(), answers))
    return Result(found, [token for answer in answers for token in answer])


def _found(prompt: list[int], answer: list[int], most: int) -> float:
    """Return the percentage of right tokens among those that prompt lookup drafts for an answer."""
    from oslo_models.deploy.running_batch.speculation import PromptLookup

    lookup, drafted, right, place = PromptLookup(), 0, 0, 1
    lookup.extend([*prompt, answer[0]])
    while place < len(answer):
        drafts = lookup.draft(min(most, len(answer) - place - 1))
        pairs = zip(drafts, answer[place:], strict=False)
        same = next((at for at, (draft, token) in enumerate(pairs) if draft != token), len(drafts))
        drafted, right = drafted + len(drafts), right + same
        lookup.extend(answer[place : place + same + 1])
        place += same + 1
    return 100 * right / max(drafted, 1)


def serve(
    peer: Peer, cls: str, checkpoint: Path, tiny: Path, *, clients: int, requests: int, prompt: int, new: int
) -> Result:
    """Greedy answers to ``requests`` prompts from each of ``clients`` threads, beside the same prompts one by one.

    Every answer must equal the answer of transformers in one process.
    """
    from concurrent.futures import ThreadPoolExecutor

    import torch
    import transformers as hf

    options = {"max_new_tokens": new, "do_sample": False, "pad_token_id": 0}

    def seconds(model: Any, threads: int) -> tuple[float, list[Any]]:
        ids_NL = tokens(model, clients * requests, prompt)
        prompts = [ids_L[: prompt // 2 + i % (prompt // 2)].unsqueeze(0) for i, ids_L in enumerate(ids_NL)]

        def ask(first: int) -> list[Any]:
            mine = prompts[first::threads]
            return [model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options) for ids in mine]

        ask(len(prompts) - 1)  # warm-up
        start = time.perf_counter()
        with ThreadPoolExecutor(threads) as pool:
            answers = list(pool.map(ask, range(threads)))
        return time.perf_counter() - start, [answers[i % threads][i // threads] for i in range(len(prompts))]

    with peer.load(cls, checkpoint) as model:
        at_once, found = seconds(model, clients)
        one_by_one, single = seconds(model, 1)
    alone, right = seconds(getattr(hf, cls).from_pretrained(checkpoint).eval(), 1)
    for answers in (found, single):
        wrong = sum(not torch.equal(mine, theirs) for mine, theirs in zip(answers, right, strict=True))
        if wrong:
            raise RuntimeError(f"{wrong} of {len(right)} answers differ from those of one process")
    total = clients * requests * new
    references = {"one by one": {"serving": total / one_by_one}, "transformers": {"serving": total / alone}}
    return Result({"serving": total / at_once}, [], references)


def _steps(step: Callable[[Any], Any], ids: Any, timed: int) -> tuple[list[float], list[float]]:
    """Return the seconds of ``timed`` steps after a warm-up step, and all losses, including the warm-up step."""
    seconds, losses = [], []
    for _ in range(timed + 1):
        start = time.perf_counter()
        losses.append(float(step(ids)))
        seconds.append(time.perf_counter() - start)
    return seconds[1:], losses


def train(peer: Peer, cls: str, checkpoint: Path, tiny: Path, *, batch: int, length: int, timed: int) -> Result:
    """Forward, backward and AdamW: the median of ``timed`` steps after a warm-up step."""
    from benchmarks.limits import has_limits, seconds_by_products

    model, step = peer.trainer(peer.load, cls, checkpoint)
    ids = tokens(model, batch, length)
    seconds, losses = _steps(step, ids, timed)
    result = Result({"training step": statistics.median(seconds)}, losses[:2])
    if has_limits(model):
        result.references[BY_PRODUCTS] = {"training step": seconds_by_products(model, batch * length)}
    return result


def train_lora(
    peer: Peer, cls: str, checkpoint: Path, tiny: Path, *, batch: int, length: int, timed: int, rank: int
) -> Result:
    """As `train`, for LoRA adapters in all linear layers. peft initialises them equally for all peers.

    Memory counts from a process that has trained a tiny model, as in `train_in_stages`.
    """
    import torch
    from peft import LoraConfig, get_peft_model

    def load(cls: str, checkpoint: Path) -> Any:
        base = peer.load(cls, checkpoint)
        torch.manual_seed(0)
        return get_peft_model(base, LoraConfig(r=rank, target_modules="all-linear"))

    model, step, memory = _trainer_after_tiny(peer, load, cls, checkpoint, tiny, batch)
    ids = tokens(model, batch, length)
    seconds, losses = _steps(step, ids, timed)
    with memory.watched():
        step(ids)
    return Result({"training step": statistics.median(seconds), **memory.growth}, losses[:2])


def _trainer_after_tiny(
    peer: Peer, load: Callable[..., Any], cls: str, checkpoint: Path, tiny: Path, batch: int
) -> tuple[Any, Step, Any]:
    """A model and its step, and the memory of this process since it has trained a tiny model."""
    from benchmarks.instruments import PeakMemory

    model, step = peer.trainer(load, cls, tiny)
    step(tokens(model, batch, 8))
    del model, step
    memory = PeakMemory()
    return *peer.trainer(load, cls, checkpoint), memory


def train_divided(peer: Peer, cls: str, checkpoint: Path, tiny: Path, *, batch: int, length: int, timed: int) -> Result:
    """As `train`, with the peak memory of one more step, and the bytes that a block saves for its backward pass.

    Memory counts from a process that has trained a tiny model.
    """
    from benchmarks.instruments import saved_in_second_block

    model, step, memory = _trainer_after_tiny(peer, peer.load, cls, checkpoint, tiny, batch)
    ids = tokens(model, batch, length)
    seconds, losses = _steps(step, ids, timed)
    with memory.watched():
        step(ids)
    saved = saved_in_second_block(model.model.layers, lambda: step(ids)) / 1e6
    step_seconds, peak = statistics.median(seconds), memory.growth["peak anonymous memory"]
    return Result(
        {"training step": step_seconds, "saved for backward": saved, "peak anonymous memory": peak}, losses[:2]
    )


def longest_row(
    peer: Peer, cls: str, checkpoint: Path, tiny: Path, *, first: int, increment: int, most: int, megabytes: float
) -> Result:
    """Tokens of the longest row whose training step keeps the peak of every rank within a limit.

    Memory counts from a process that has trained a tiny model: weights, gradients, AdamW's state and activations.

    Args:
        first: tokens of the first row, at most.
        increment: tokens by which rows grow.
        most: tokens of the last row, at most.
        megabytes: limit of anonymous memory.
    """
    import torch
    import torch.distributed as dist

    model, step, memory = _trainer_after_tiny(peer, peer.load, cls, checkpoint, tiny, 1)
    fitting, length = 0, first
    while length <= most:
        with memory.watched():
            step(tokens(model, 1, length))
        peak = torch.tensor(memory.growth["peak anonymous memory"])
        if peer.processes > 1:
            dist.all_reduce(peak, dist.ReduceOp.MAX)
        if peak > megabytes:
            break
        fitting, length = length, length + increment
    return Result({"longest row": fitting})


def idle_time(peer: Peer, cls: str, checkpoint: Path, tiny: Path, *, seconds: float, number: int, timed: int) -> Result:
    """Share of a step in which a stage does nothing, in percent: the median of ``timed`` steps after a first one.

    Args:
        seconds: duration of each of the three parts.
        number: micro-batches.
    """
    import torch.distributed as dist

    step = peer.load((seconds,) * 3, number)
    found = []
    for _ in range(timed + 1):
        dist.barrier()
        start = time.perf_counter()
        step()
        found.append(time.perf_counter() - start)
    return Result({"idle time": 100 * (1 - 3 * seconds * number / statistics.median(found[1:]))})


def train_in_stages(
    peer: Peer, cls: str, checkpoint: Path, tiny: Path, *, batch: int, length: int, timed: int
) -> Result:
    """As `train`, with one micro-batch per row if there are stages, and the peak memory of one more step.

    Memory counts from a process that has trained a tiny model: weights, gradients, AdamW's state and activations.
    """
    model, step, memory = _trainer_after_tiny(peer, peer.load, cls, checkpoint, tiny, batch)
    ids = tokens(model, batch, length)
    seconds, losses = _steps(step, ids, timed)
    with memory.watched():
        step(ids)
    speed = batch * length / statistics.median(seconds)
    return Result({"training": speed, **memory.growth}, losses[:2])


def load_memory(peer: Peer, cls: str, checkpoint: Path, tiny: Path) -> Result:
    """Peak memory of loading a model and reading all weights, above a process that has loaded a tiny model."""
    from benchmarks.instruments import PeakMemory, local

    peer.load(cls, tiny)
    memory = PeakMemory()
    with memory.watched():
        for param in peer.load(cls, checkpoint).parameters():
            local(param).detach().sum()
    size = sum(file.stat().st_size for file in checkpoint.glob("*.safetensors")) / 1e6
    return Result(memory.growth, [], {"checkpoint": dict.fromkeys(memory.growth, size)})


def merge_memory(peer: Peer, cls: str, checkpoint: Path, tiny: Path) -> Result:
    """Peak memory while one merged checkpoint is saved, including the model."""
    from safetensors import safe_open

    from benchmarks.instruments import PeakMemory, local

    merged = checkpoint.parent / f"merged-{peer.name}"
    peer.save(peer.load(cls, tiny), merged)
    memory = PeakMemory()
    model = peer.load(cls, checkpoint)
    shard = 0
    for param in model.parameters():
        part = local(param)
        part.data = part.data.clone()  # a copy, since it may be a mapping of the checkpoint's file
        shard += part.nbytes
    with memory.watched():
        peer.save(model, merged)
    with safe_open(next(checkpoint.glob("*.safetensors")), "pt") as file:
        largest = max(file.get_tensor(name).nbytes for name in file.keys())  # noqa: SIM118
    bound = (shard + largest) / 1e6
    return Result(memory.growth, [], {"shard + largest tensor": dict.fromkeys(memory.growth, bound)})


def collectives(peer: Peer, cls: str, checkpoint: Path, tiny: Path, *, batch: int, length: int) -> Result:
    """Collectives of a training step with one and with two blocks: the difference is the cost of a block.

    Megatron-LM's figures are from Shoeybi et al., 2019: two all-reduces of the hidden states each way.
    """
    from benchmarks.instruments import Collectives

    counts = []
    for blocks in (1, 2):
        model = peer.load(cls, checkpoint, num_hidden_layers=blocks).train()
        ids = tokens(model, batch, length)
        with Collectives() as forward:
            loss = model(input_ids=ids, labels=ids).loss
        with Collectives() as backward:
            loss.backward()
        both = (forward.others + backward.others, forward.megabytes + backward.megabytes)
        counts.append((forward.all_reduces, backward.all_reduces, *both))
    block = [two - one for one, two in zip(*counts, strict=True)]
    names = [name for name in UNITS if "a block" in name or "of blocks" in name]
    values = dict(zip(names, (*block, counts[0][-1] - block[-1]), strict=True))
    hidden = batch * length * model.config.hidden_size * 4 / 1e6
    return Result(values, [], {"Megatron-LM": dict(zip(values, (2, 2, 0, 4 * hidden), strict=False))})


def all_reduce(peer: Peer, cls: str, checkpoint: Path, tiny: Path, *, kilobytes: int, timed: int) -> Result:
    """The median time of ``timed`` all-reduces of a float32 tensor: gloo's, then ours."""
    import torch
    import torch.distributed as dist

    from oslo_models.distributed.collectives import all_reduce
    from oslo_models.distributed.mesh import ParallelMesh

    axis, x = ParallelMesh(peer.processes).tp, torch.zeros(kilobytes * 256)

    def median(reduce: Callable[[], Any]) -> float:
        seconds = []
        for _ in range(timed + 10):  # the first ten are warm-up
            start = time.perf_counter()
            reduce()
            seconds.append(time.perf_counter() - start)
        return statistics.median(seconds[10:]) * 1e6

    gloo = median(lambda: dist.all_reduce(x, group=axis.group))
    return Result({"all-reduce": median(lambda: all_reduce(axis, x))}, [], {"gloo": {"all-reduce": gloo}})


def tokens(model: Any, batch: int, length: int) -> Any:
    """The same random token ids in every process."""
    import torch

    generator = torch.Generator().manual_seed(1)
    return torch.randint(model.config.vocab_size, (batch, length), generator=generator)
