"""Benchmarks of `model.fuse()`: fused and unfused alternate in the same processes."""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.definitions import CHECKS, Peer, Result
from benchmarks.measure import tokens

# Only the measuring processes import torch. The process that reads the registry does not need it.

COMMON = {"hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8}
_GPT = {"n_embd": 512, "n_layer": 4, "n_head": 8}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    # one class of each architecture, small enough to measure all six in minutes
    "bert": ("BertLMHeadModel", {**COMMON, "intermediate_size": 2048, "is_decoder": True}),
    "gpt2": ("GPT2LMHeadModel", _GPT),
    "gpt_neo": (
        "GPTNeoForCausalLM",
        {"hidden_size": 512, "num_layers": 4, "num_heads": 8, "attention_types": [[["global", "local"], 2]]},
    ),
    "gptj": ("GPTJForCausalLM", {**_GPT, "rotary_dim": 32}),
    "llama": ("LlamaForCausalLM", {**COMMON, "intermediate_size": 1376, "vocab_size": 32000}),
    "t5": (
        "T5ForConditionalGeneration",
        {"d_model": 512, "num_layers": 4, "d_ff": 1024, "pad_token_id": 0, "decoder_start_token_id": 0},
    ),
}
_ENDLESS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def _family(name: str, processes: int, smoke: bool, dtype: str = "float32") -> Any:
    return small_model(*FAMILIES[name], processes, dtype, **({"vocab_size": 512} if smoke else {}))


def small_model(cls: str, sizes: dict[str, Any], processes: int, dtype: str = "float32", **more: Any) -> Any:
    """A model with these sizes, random weights and without dropout."""
    import oslo_models

    zoo = getattr(oslo_models, cls)
    config = zoo.config_class(**{**_ENDLESS, **sizes, **more})
    for key, value in config.to_dict().items():
        if "drop" in key and isinstance(value, float):
            setattr(config, key, 0.0)
    return zoo.from_config_with_parallel(config, tensor_parallel_size=processes, seed=0, dtype=dtype)


def _in_turn(runs: dict[str, Callable[[], Any]], timed: int, calls: int = 1) -> dict[str, float]:
    """Return the median seconds per call of each function, after a warm-up round.

    Every round makes ``calls`` calls of each in turn. The order alternates between rounds, so that neither always comes
    first.
    """
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(timed + 1):
        for name, run in list(runs.items())[:: 1 if number % 2 else -1]:
            start = time.perf_counter()
            for _ in range(calls):
                run()
            seconds[name].append((time.perf_counter() - start) / calls)
    return {name: statistics.median(found[1:]) for name, found in seconds.items()}


def _compare(metric: str, runs: dict[str, Callable[[], Any]], timed: int, scale: float = 1e3, calls: int = 1) -> Result:
    """The time of ``runs["fused"]`` as the result, in milliseconds unless scaled; the others as references."""
    found = _in_turn(runs, timed, calls)
    others = {name: {metric: seconds * scale} for name, seconds in found.items() if name != "fused"}
    return Result({metric: found["fused"] * scale}, [], others)


def loss(
    peer: Peer, cls: str, checkpoint: Path, tiny: Path, *, rows: int, vocab: int, hidden: int, timed: int
) -> Result:
    """Head and cross entropy, forward and backward: time, and peak memory above the memory before."""
    import torch
    import torch.nn.functional as F

    from benchmarks.instruments import PeakMemory
    from oslo_models.distributed.autograd_collectives import copy_to
    from oslo_models.distributed.mesh import ParallelMesh
    from oslo_models.fusion.linear_cross_entropy import linear_cross_entropy
    from oslo_models.layers.cross_entropy import VocabShard
    from oslo_models.layers.vocab_parallel import VocabParallelLogits
    from oslo_models.sharding.layout import EvenSplit, Layout

    torch.manual_seed(0)
    tp = ParallelMesh(peer.processes).tp
    layout = Layout.sharded((vocab, hidden), 0, (EvenSplit(vocab),), tp.size)
    ((start, stop),) = layout.ranges[tp.rank]
    states, target = torch.randn(rows, hidden, requires_grad=True), torch.randint(vocab, (rows,))
    weight = (0.02 * torch.randn(stop - start, hidden)).requires_grad_()

    def fused() -> None:
        total = linear_cross_entropy(states, weight, None, target, VocabShard(tp, (start, stop), vocab))
        (total / rows).backward()
        states.grad = weight.grad = None

    def unfused() -> None:
        logits = F.linear(copy_to(tp, states), weight)
        if tp.size > 1:
            logits = VocabParallelLogits.from_local(logits, tp, layout)
        F.cross_entropy(logits, target).backward()
        del logits
        states.grad = weight.grad = None

    runs: dict[str, Callable[[], Any]] = {"fused": fused, "unfused": unfused}
    result = _compare("head and loss", runs, timed)
    for name, run in runs.items():
        ctypes.CDLL(None).malloc_trim(0)  # memory kept by the C library would hide the peak
        memory = PeakMemory()
        with memory.watched():
            run()
        values = result.values if name == "fused" else result.references[name]
        values["peak memory"] = memory.growth["peak memory"]
    return result


def mlp(peer: Peer, cls: str, checkpoint: Path, tiny: Path, *, rows: int, hidden: int, timed: int) -> Result:
    """The forward pass of GPT-2's MLP."""
    import torch
    from transformers import GPT2Config
    from transformers.models.gpt2.modeling_gpt2 import GPT2MLP

    from oslo_models.fusion.modules import TanhGELU

    models = {name: GPT2MLP(4 * hidden, GPT2Config(n_embd=hidden)).eval() for name in ("fused", "unfused")}
    models["fused"].act.__class__ = TanhGELU
    x = torch.randn(rows, hidden)
    with torch.no_grad():
        return _compare("MLP", {name: (lambda model=model: model(x)) for name, model in models.items()}, timed)


def adamw(peer: Peer, cls: str, checkpoint: Path, tiny: Path, *, timed: int) -> Result:
    """A step of AdamW over the parameters of GPT-2."""
    import torch

    model = peer.load(cls, checkpoint)
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    steppers = {"fused": model.fused_adamw(), "unfused": torch.optim.AdamW(model.parameters())}
    return _compare("optimizer step", {name: stepper.step for name, stepper in steppers.items()}, timed)


def blocking(
    peer: Peer, cls: str, checkpoint: Path, tiny: Path, *, batch: int, length: int, vocab: int, timed: int
) -> Result:
    """The time that ``no_repeat_ngram_size=3`` adds to a step of generation, in place and as transformers does it.

    Measured in repeated calls, and ``cold``: fused and unfused calls alternate and evict each other's caches.
    """
    import torch
    from transformers import NoRepeatNGramLogitsProcessor

    from oslo_models.fusion.ngram_processors import FusedNoRepeatNGram

    ids, scores = torch.randint(vocab, (batch, length)), torch.randn(batch, vocab)
    runs = {"fused": FusedNoRepeatNGram(3, in_place=True), "unfused": NoRepeatNGramLogitsProcessor(3)}
    given = {name: (lambda processor=processor: processor(ids, scores)) for name, processor in runs.items()}
    result = _compare("n-gram blocking", given, timed, scale=1e6, calls=20)
    cold = _compare("n-gram blocking, cold", given, timed, scale=1e6)
    result.values.update(cold.values)
    result.references["unfused"].update(cold.references["unfused"])
    return result


def training(
    peer: Peer, cls: str, checkpoint: Path, tiny: Path, *, family: str, batch: int, length: int, timed: int
) -> Result:
    """Forward and backward of a small model."""
    model = _family(family, peer.processes, length < 64).train()
    ids = tokens(model, batch, length)

    def run(prepare: Callable[[], Any]) -> None:
        prepare()
        model.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()

    runs = {"fused": lambda: run(model.fuse), "unfused": lambda: run(model.unfuse)}
    return _compare("forward and backward", runs, timed)


def generation(
    peer: Peer,
    cls: str,
    checkpoint: Path,
    tiny: Path,
    *,
    family: str,
    batch: int,
    length: int,
    new: int,
    timed: int,
    dtype: str = "float32",
) -> Result:
    """Greedy generation by a small model with n-gram blocking."""
    model = _family(family, peer.processes, length < 16, dtype).eval()
    ids = tokens(model, batch, length)
    options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}

    def run(fused: bool) -> None:
        (model.fuse if fused else model.unfuse)()
        more = {"fused_no_repeat_ngram_blocking": True} if fused else {}
        model.generate(input_ids=ids, no_repeat_ngram_size=3, **options, **more)

    return _compare("generation of a text", {"fused": lambda: run(True), "unfused": lambda: run(False)}, timed)


def decoding(
    peer: Peer,
    cls: str,
    checkpoint: Path,
    tiny: Path,
    *,
    batch: int,
    prompt: int,
    new: int,
    timed: int,
    weights: str | None = None,
) -> Result:
    """Greedy generation by a loaded model and by a second model fused with these weights."""
    import torch

    unfused, fused = peer.load(cls, checkpoint).eval(), peer.load(cls, checkpoint).eval()
    fused.fuse(weights=weights)  # compiles and times the products, once per process
    ids = tokens(unfused, batch, prompt)
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": new, "do_sample": False, "pad_token_id": 0}
    runs = {
        "fused": lambda: fused.generate(input_ids=ids, **options),
        "unfused": lambda: unfused.generate(input_ids=ids, **options),
    }
    return _compare("generation of a text", runs, timed)


def checking(peer: Peer, cls: str, checkpoint: Path, tiny: Path, *, timed: int) -> Result:
    """The CPU time that the check adds to ``fuse()``, beside the time of loading the model from the page cache.

    The first pair of times in the process, the median of ``timed`` further pairs, and the median for a model with the
    same sizes as a checked one.
    """
    from oslo_models.fusion import verdicts

    def seconds(run: Callable[[], Any]) -> float:
        start = time.process_time()
        run()
        return time.process_time() - start

    def added() -> float:
        checked = seconds(lambda: model.fuse(measure=False))
        model.unfuse()
        unchecked = seconds(lambda: model.fuse(measure=False, check=False))
        model.unfuse()
        return checked - unchecked

    loading, checks, again = [], [], []
    for _ in range(timed + 1):
        start = time.process_time()
        model = peer.load(cls, checkpoint).eval()
        loading.append(time.process_time() - start)
        model.fuse(measure=False, check=False)  # reads the sources of the layers, and makes huge pages of the weights
        model.unfuse()
        verdicts.forget()
        checks.append(added())
        again.append(added())
    later = statistics.median(loading[1:])
    pairs = (checks[0], loading[0]), (statistics.median(checks[1:]), later), (statistics.median(again), later)
    found = dict(zip(CHECKS, pairs, strict=True))
    ours, others = ({metric: 1e3 * pair[i] for metric, pair in found.items()} for i in (0, 1))
    return Result(ours, [], {"loading": others})
