"""QLoRA: adapters over quantised weights, trained by plain ``peft`` in one process and by the ranks of a model."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from oslo_models import registry
from oslo_models.checkpoint.quantized import PackedWeight
from oslo_models.distributed.sharded_tensor import local_tensor

from support import adapters, quantized
from support.adapters import Batch, trained_parameters
from support.float64 import lifted_casts


@dataclass
class QuantizedRun:
    """Reference results of one process: full tensors under their names in ``PeftModel``.

    Attributes:
        directory: the checkpoint.
        adapter: the configuration of the adapter.
        options: how the ranks load the checkpoint.
        initial: the adapter as ``peft`` makes it from ``seed``; the starting adapter is saved beside the checkpoint.
        dequantized: the weights of the quantised layers.
        bytes_held: the bytes of their values and scales.
        logits: before training.
        rounding: the root mean square of their rounding errors in a narrow dtype; 0: all results have one tolerance.
    """

    directory: Path
    adapter: Any
    seed: int
    options: dict[str, Any]
    initial: dict[str, Tensor] = field(default_factory=dict)
    start: dict[str, Tensor] = field(default_factory=dict)
    dequantized: dict[str, Tensor] = field(default_factory=dict)
    bytes_held: dict[str, int] = field(default_factory=dict)
    batches: list[Batch] = field(default_factory=list)
    logits: Tensor | None = None
    rounding: float = 0.0
    losses: list[float] = field(default_factory=list)
    trained: list[dict[str, Tensor]] = field(default_factory=list)

    @property
    def saved(self) -> Path:
        return self.directory / "adapter"


def batches(seed: int, steps: int = 5) -> list[Batch]:
    ids = [quantized.tokens(seed + step) for step in range(steps)]
    return [{"input_ids": each, "labels": each} for each in ids]


def reference_run(directory: Path, base: Any, adapter: Any, seed: int, **options: Any) -> QuantizedRun:
    """Train an adapter with plain ``peft`` over a model of transformers; ``options`` are load options of the ranks."""
    from peft import get_peft_model

    run = QuantizedRun(directory, copy.deepcopy(adapter), seed, options, batches=batches(seed))
    torch.manual_seed(seed)
    model: Any = get_peft_model(base.train(), adapter)
    trained = trained_parameters(model)
    run.initial = {key: param.detach().clone() for key, param in trained.items()}
    with torch.no_grad():
        for param in trained.values():  # half of the parameters start at zero
            param += 0.1 * torch.randn_like(param)
    run.start = {key: param.detach().clone() for key, param in trained.items()}
    model.save_pretrained(run.saved)
    run.logits = _logits(model, run.batches[0])
    run.losses, _, run.trained = adapters.train(model, run.batches, "SGD")
    return run


def error_of_logits(run: QuantizedRun, exact: Any) -> float:
    """Compare the logits of one process with a model of the same quantised weights in a wider dtype.

    Sets ``run.rounding``. Returns the largest error.
    """
    from peft import PeftModel

    logits = _logits(PeftModel.from_pretrained(exact.train(), run.saved), run.batches[0])
    run.rounding = _mean_difference(logits, run.logits)
    return _difference(logits, run.logits)


def train_on_ranks(run: QuantizedRun, tp: int, pp: int, tolerance: float) -> dict[str, float]:
    """On each rank, load the checkpoint, add, save and train the adapter; return the largest differences."""
    from peft import get_peft_model

    cls: Any = registry.find("LlamaForCausalLM")
    base = cls.from_pretrained_with_parallel(run.directory, tp, pp, **run.options).train()
    if run.dequantized:
        check_weights(run, base)
    torch.manual_seed(run.seed)
    model: Any = get_peft_model(base, copy.deepcopy(run.adapter))
    trained = trained_parameters(model)
    assert trained and all("lora_" in name for name in trained)
    for name, shard in adapters.own_shards(model, {name: run.initial[name] for name in trained}).items():
        # Norms over sharded rows are summed over the ranks.
        bound = 1e-12 if "magnitude" in name else 0
        assert trained[name].dtype == shard.dtype, name
        assert _difference(trained[name].detach(), shard) <= bound, name
    adapters.start_from(model, run.start)
    folder = run.directory / f"of-{tp}-{pp}"
    model.save_pretrained(folder)
    files = [(path / "adapter_model.safetensors").read_bytes() for path in (run.saved, folder)]
    assert files[0] == files[1]
    found = {"logits": 0.0}
    if pp == 1:
        logits = _logits(model, run.batches[0])
        if run.rounding:  # the largest error depends on a single logit, so it varies with the seed
            assert _mean_difference(logits, run.logits) <= 3 * run.rounding
        else:
            found["logits"] = _difference(logits, run.logits)
    backward = None if pp == 1 else _train_batch
    losses, _, steps = adapters.train(model, run.batches, "SGD", backward)
    found["loss"] = max(abs(own - other) for own, other in zip(losses, run.losses, strict=True))
    shards = adapters.own_shards(model, {name: run.trained[-1][name] for name in steps[-1]})
    found["trained"] = max(_difference(steps[-1][name], shard) for name, shard in shards.items())
    assert all(value <= tolerance for value in found.values()), found
    assert max((run.start[name] - run.trained[-1][name]).abs().max() for name in run.start) > 1e-3
    return found


def check_weights(run: QuantizedRun, base: Any) -> None:
    """Check that quantised weights stay quantised, and equal the shards of the single-process weights bit for bit."""
    names = {} if base.stage is None else base.stage.full_names
    held, share, seen = 0.0, 0.0, 0
    for name, param in base.named_parameters():
        full_name = names.get(name, name)
        if full_name not in run.dequantized:
            continue
        assert isinstance(param, PackedWeight) and not param.requires_grad, name
        full = run.dequantized[full_name]
        shard = base.layouts[name].shard(full, base.mesh.tp.rank)
        assert torch.equal(param.dequantize(), shard.to(param.dtype)), name
        held, seen = held + param.nbytes_held, seen + 1
        share += run.bytes_held[full_name] * shard.numel() / full.numel()
    assert seen and held < 1.25 * share, (held, share)


def _train_batch(model: Any, batch: Batch) -> Tensor:
    loss: Tensor = model.train_batch(**batch)
    return loss


def _difference(one: Tensor, other: Tensor | None) -> float:
    assert other is not None and one.shape == other.shape
    return float((local_tensor(one).double() - other.double()).abs().max())


def _mean_difference(one: Tensor, other: Tensor | None) -> float:
    """Return the root mean square difference."""
    assert other is not None and one.shape == other.shape
    return float((one.double() - other.double()).square().mean().sqrt())


@torch.no_grad()
def _logits(model: Any, batch: Batch) -> Tensor:
    """Return logits in training mode: evaluation on a CPU makes bitsandbytes pack its weights for bfloat16 for good."""
    with lifted_casts():
        logits: Tensor = model(input_ids=batch["input_ids"]).logits
    return logits
