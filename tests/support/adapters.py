"""Trains adapters in one process with plain ``peft``, and compares the results with the shards of ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedConfig

from support import zoo
from support.dropout_masks import Recorder
from support.float64 import lifted_casts
from support.pipelines import model_on_stages
from support.reference import TOLERANCE, differences, full_parameters, make_optimizer, reference_model

Batch = dict[str, Tensor]
STEPS = (0, 4)
"""The training steps with compared results."""
PREFIX = "base_model.model."


@dataclass
class Run:
    """Reference results of adapter training in one process: full tensors under their names in ``PeftModel``.

    Attributes:
        initial: the adapter as ``peft`` makes it from ``seed``.
        start: the adapter when training starts.
        logits: the logits of the first batch, in evaluation mode.
    """

    name: str
    config: PreTrainedConfig
    adapter: Any
    seed: int
    optimizer: str
    weights: dict[str, Tensor]
    initial: dict[str, Tensor] = field(default_factory=dict)
    start: dict[str, Tensor] = field(default_factory=dict)
    batches: list[Batch] = field(default_factory=list)
    logits: Tensor | None = None
    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    trained: list[dict[str, Tensor]] = field(default_factory=list)


def plain_model(run: Run, **options: Any) -> Any:
    """Return the single-process model with the adapter of ``peft``."""
    from peft import get_peft_model

    base = reference_model(run.name, run.config, run.seed, **options)
    torch.manual_seed(run.seed)
    return get_peft_model(base, copy.deepcopy(run.adapter))


def trained_parameters(model: Any) -> dict[str, Any]:
    return {name: param for name, param in model.named_parameters() if param.requires_grad}


def reference_run(
    name: str,
    config: PreTrainedConfig,
    adapter: Any,
    seed: int,
    optimizer: str = "AdamW",
    folder: Path | None = None,
) -> Run:
    """Train an adapter with plain ``peft``; save the untrained model in ``folder``."""
    from peft import get_peft_model

    base = reference_model(name, config, seed)
    run = Run(name, config, copy.deepcopy(adapter), seed, optimizer, {**base.state_dict(), **full_parameters(base)})
    torch.manual_seed(seed)
    model: Any = get_peft_model(base, adapter)
    trained = trained_parameters(model)
    run.initial = {key: param.detach().clone() for key, param in trained.items()}
    with torch.no_grad():
        for param in trained.values():  # half of the parameters start at zero
            param += 0.1 * torch.randn_like(param)
    run.start = {key: param.detach().clone() for key, param in trained.items()}
    if folder is not None:
        model.save_pretrained(folder)
    run.batches = [zoo.batch(name, config, seed + step) for step in range(max(STEPS) + 1)]
    run.logits = logits_of(model, run.batches[0])
    run.losses, run.gradients, run.trained = train(model, run.batches, optimizer)
    return run


@torch.no_grad()
def logits_of(model: Any, batch: Batch) -> Tensor:
    model.eval()
    with lifted_casts():
        logits: Tensor = model(**{key: value for key, value in batch.items() if key != "labels"}).logits
    model.train()
    return logits


def train(
    model: Any, batches: Sequence[Batch], optimizer: str, backward: Callable[[Any, Batch], Tensor] | None = None
) -> tuple[list[float], list[dict[str, Tensor]], list[dict[str, Tensor]]]:
    """Return the losses of all steps, and the gradients and parameters of the steps in `STEPS`."""
    params = trained_parameters(model)
    stepper = make_optimizer(optimizer, params.values())
    losses, gradients, trained = [], [], []
    for step, batch in enumerate(batches):
        stepper.zero_grad()
        with lifted_casts():
            if backward is None:
                loss = model(**batch).loss
                loss.backward()
            else:
                loss = backward(model, batch)
        losses.append(loss.item())
        if step in STEPS:
            gradients.append({name: param.grad.clone() for name, param in params.items()})
        stepper.step()
        if step in STEPS:
            trained.append({name: param.detach().clone() for name, param in params.items()})
    return losses, gradients, trained


def own_shards(model: Any, full: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the local shards of full tensors by their names in ``PeftModel``."""
    base = model.get_base_model()
    layouts = {PREFIX + name: layout for name, layout in base.layouts.items()}
    return {
        name: layouts[name].shard(tensor, base.mesh.rank_in(layouts[name])) if name in layouts else tensor
        for name, tensor in full.items()
    }


def compare(model: Any, what: str, own: Mapping[str, Tensor], full: Mapping[str, Tensor]) -> list[str]:
    """Return a line for each local tensor that differs from its shard of the full tensor."""
    expected = own_shards(model, {name: full[name] for name in own if name in full})
    lines = [f"{what} {name}: not in the reference" for name in own if name not in full]
    return lines + [
        line for name in expected for line in differences(f"{what} {name}", own[name], expected[name], TOLERANCE)
    ]


@torch.no_grad()
def start_from(model: Any, full: Mapping[str, Tensor]) -> None:
    own = trained_parameters(model)
    for name, shard in own_shards(model, {name: full[name] for name in own}).items():
        own[name].copy_(shard)


def parallel_base(run: Run, tp: int, pp: int = 1, **options: Any) -> Any:
    """Return this rank's pipeline stage and shard of the model, without adapters."""
    return model_on_stages(run.name, run.config, run.weights, tp, pp, **options).train()


def check_run(run: Run, tp: int, pp: int = 1, options: Mapping[str, Any] | None = None) -> None:
    """On each rank, compare the initial values and the training of an adapter with one process."""
    from peft import get_peft_model

    base = parallel_base(run, tp, pp, **(options or {}))
    torch.manual_seed(run.seed)
    model: Any = get_peft_model(base, copy.deepcopy(run.adapter))
    lines = compare(model, "initial", {n: p.detach() for n, p in trained_parameters(model).items()}, run.initial)
    start_from(model, run.start)
    assert run.logits is not None
    if pp == 1:
        lines += differences("logits", logits_of(model, run.batches[0]), run.logits, TOLERANCE)
    backward = None if pp == 1 else _train_batch
    losses, gradients, trained = train(model, run.batches, run.optimizer, backward)
    for step, (own, expected) in enumerate(zip(losses, run.losses, strict=True)):
        if not abs(own - expected) <= TOLERANCE:
            lines.append(f"loss {step}: {own} instead of {expected}")
    for i, step in enumerate(STEPS):
        lines += compare(model, f"gradient {step}", gradients[i], run.gradients[i])
        lines += compare(model, f"trained {step}", trained[i], run.trained[i])
    assert not lines, "\n".join(lines[:12])


def _train_batch(model: Any, batch: Batch) -> Tensor:
    loss: Tensor = model.train_batch(**batch)
    return loss


def check_files(run: Run, tp: int, pp: int, saved: str, folder: str, options: Mapping[str, Any] | None = None) -> None:
    """On each rank, load an adapter saved by plain ``peft``, and save it again without changes."""
    from peft import PeftModel

    base = parallel_base(run, tp, pp, **(options or {}))
    prompts = run.adapter.is_prompt_learning  # peft does not continue to train loaded prompts
    model: Any = PeftModel.from_pretrained(base, saved, is_trainable=not prompts)
    if not prompts:
        own = {name: param.detach() for name, param in trained_parameters(model).items()}
        lines = compare(model, "loaded", own, run.start)
        assert not lines and own, "\n".join(lines[:12])
    model.save_pretrained(folder)
    assert (
        Path(folder, "adapter_model.safetensors").read_bytes() == Path(saved, "adapter_model.safetensors").read_bytes()
    )


def check_merged(run: Run, tp: int, pp: int, logits: Tensor, options: Mapping[str, Any]) -> None:
    """On each rank, merge an adapter into the model, and compare the logits with one process."""
    from peft import get_peft_model

    model: Any = get_peft_model(parallel_base(run, tp, pp, **options), copy.deepcopy(run.adapter))
    start_from(model, run.start)
    merged = model.merge_and_unload()
    lines = differences("merged", loss_of(merged, run.batches[0]), logits, TOLERANCE)
    assert not lines and not [name for name, _ in merged.named_parameters() if "lora" in name], lines


def check_adapters(run: Run, tp: int, pp: int, other: Any, expected: dict[str, Tensor], folder: str) -> None:
    """On each rank, add, select, disable, save, delete and merge two adapters."""
    from peft import get_peft_model

    base = parallel_base(run, tp, pp)
    torch.manual_seed(run.seed)
    model: Any = get_peft_model(base, copy.deepcopy(run.adapter))
    actual = use_adapters(model, other, run.batches[0], folder)
    lines = [line for what in expected for line in differences(what, actual[what], expected[what], TOLERANCE)]
    assert not lines, "\n".join(lines)


@torch.no_grad()
def use_adapters(model: Any, other: Any, batch: Batch, folder: str) -> dict[str, Tensor]:
    """Return the logits, or the loss on pipeline stages, after each of many calls of ``PeftModel``."""
    results: dict[str, Tensor] = {}

    def note(what: str, called: Any = model) -> None:
        results[what] = loss_of(called, batch)

    model.eval()
    model.add_adapter("other", copy.deepcopy(other))
    note("first")
    model.set_adapter("other")
    note("other")
    model.save_pretrained(folder)
    model.load_adapter(f"{folder}/other", "loaded")
    model.set_adapter("loaded")
    note("loaded")
    with model.disable_adapter():
        note("disabled")
    model.delete_adapter("loaded")
    if not other.use_dora:  # peft cannot combine magnitudes
        model.add_weighted_adapter(["default", "other"], [0.3, 0.6], "both", combination_type="cat")
        model.set_adapter("both")
        note("both")
    model.merge_adapter()
    note("merged")
    model.unmerge_adapter()
    note("unmerged")
    model.base_model.set_adapter(["default", "other"])
    note("two at once")
    merged = model.merge_and_unload()
    note("unloaded", merged)
    if hasattr(merged, "save_pretrained_with_parallel"):
        merged.save_pretrained_with_parallel(f"{folder}/merged", save_with_merging=True)
    else:
        merged.save_pretrained(f"{folder}/merged")
    return results


@torch.no_grad()
def loss_of(model: Any, batch: Batch) -> Tensor:
    with lifted_casts():
        if getattr(model, "pipeline", None) is None:
            loss: Tensor = model(**batch).loss
            return loss
        return torch.stack([output.loss for output in model(**batch)]).sum()


def step_with_recorded_masks(run: Run, tp: int) -> tuple[float, dict[str, Tensor], list[Tensor]]:
    """Take a step with dropout; return the loss, the full gradients, and the local masks in call order."""
    from peft import get_peft_model

    from oslo_models.distributed.sharded_tensor import gather_shards

    base = parallel_base(run, tp, attn_implementation="eager")
    model: Any = get_peft_model(base, copy.deepcopy(run.adapter))
    start_from(model, run.start)
    torch.manual_seed(run.seed)
    with lifted_casts(), Recorder() as recorder:
        loss = model(**run.batches[0]).loss
    loss.backward()
    layouts, axis = base.layouts, base.mesh.tp
    gradients = {
        name: gather_shards(axis, param.grad, layouts[name.removeprefix(PREFIX)])
        for name, param in trained_parameters(model).items()
    }
    return loss.item(), gradients, recorder.masks


def check_dropout(run: Run, loss: float, gradients: dict[str, Tensor], of_ranks: list[Any]) -> list[str]:
    lines = [] if abs(loss - of_ranks[0][0]) <= TOLERANCE else [f"loss: {of_ranks[0][0]} instead of {loss}"]
    for name, expected in gradients.items():
        lines += differences(f"gradient {name}", of_ranks[0][1][name], expected, TOLERANCE)
    return lines


# transformers' own methods --------------------------------------------------------------------------------------------


def check_injected(run: Run, tp: int, pp: int, saved: str, folder: str, expected: list[Tensor]) -> None:
    """On each rank, use adapters through the methods of transformers, without a ``PeftModel``."""
    base = parallel_base(run, tp, pp).eval()
    actual = use_injected(base, run.adapter, saved, run.batches[0], folder, run.seed)
    lines = [line for i, x in enumerate(expected) for line in differences(f"loss {i}", actual[i], x, TOLERANCE)]
    assert not lines, "\n".join(lines)


def use_injected(model: Any, adapter: Any, saved: str, batch: Batch, folder: str, seed: int) -> list[Tensor]:
    """Add, load, select, save and disable adapters of a transformers model; return the losses."""
    torch.manual_seed(seed)
    model.add_adapter(copy.deepcopy(adapter), "first")
    losses = [loss_of(model, batch)]
    model.load_adapter(saved, adapter_name="second")
    model.set_adapter("second")
    losses.append(loss_of(model, batch))
    model.save_pretrained(folder)
    model.set_adapter("first")
    losses.append(loss_of(model, batch))
    model.disable_adapters()
    losses.append(loss_of(model, batch))
    return losses


# With other tools -----------------------------------------------------------------------------------------------------


def check_data_parallel(
    run: Run, wrapper: str, tp: int, norms: list[float], options: Mapping[str, Any] | None = None
) -> None:
    """On each of 2 replicas, train on half of each batch with clipping, and compare with training on all of it."""
    from peft import get_peft_model

    base = parallel_base(run, tp, **(options or {}))
    dp = base.mesh.dp
    torch.manual_seed(run.seed + dp.rank)  # replicas with different random states start with equal adapters
    model: Any = get_peft_model(base, copy.deepcopy(run.adapter))
    start_from(model, run.start)
    if wrapper == "DDP":
        wrapped = DistributedDataParallel(model, process_group=base.mpu.get_data_parallel_group())
    else:
        wrapped = fully_shard(model, mesh=base.mesh.device_mesh["dp"], ignored_params=set(base.expert_parameters()))
    stepper = torch.optim.SGD(params := list(trained_parameters(wrapped).values()), lr=0.01)
    lines = []
    for batch, loss, norm in zip(run.batches, run.losses, norms, strict=True):
        own = {key: value[dp.rank :: dp.size].contiguous() for key, value in batch.items()}
        stepper.zero_grad()
        with lifted_casts():
            mean = wrapped(**own).loss
            mean.backward()
        clip = base.clip_grad_norm_ if wrapper == "FSDP2" else partial(torch.nn.utils.clip_grad_norm_, params)
        actual = torch.as_tensor(clip(0.1))
        stepper.step()
        mean = mean.detach() / dp.size
        dist.all_reduce(mean, group=dp.group)
        lines += differences("loss", mean, torch.tensor(loss, dtype=mean.dtype), TOLERANCE)
        lines += differences("norm", actual, torch.tensor(norm, dtype=actual.dtype), TOLERANCE)
    assert len(params) == len(run.start)
    assert not lines, "\n".join(lines)


def check_variant(run: Run, tp: int, how: str, saved: str, expected: Any) -> None:
    """On each rank, compare logits, loss or tokens with one process, together with another feature."""
    from peft import PeftModel

    base = parallel_base(run, tp, attn_implementation="eager")
    if how == "fused before":
        base.fuse()
    options = {"low_cpu_mem_usage": True} if how == "low memory" else {}
    model: Any = PeftModel.from_pretrained(base, saved, is_trainable=True, **options)
    if how == "fused":
        base.fuse()
    result = use_variant(model, how, run.batches[0])
    assert result.shape == expected.shape
    error = (result - expected).abs().max().item()
    assert error < (TOLERANCE if how in ("generate", "low memory") else 1e-5), error


def use_variant(model: Any, how: str, batch: Batch) -> Tensor:
    """Return generated tokens, or the full gradients of a step as one flat tensor."""
    if how == "generate":
        model.eval()
        tokens: Tensor = model.generate(input_ids=batch["input_ids"][1:2], max_new_tokens=5, do_sample=False)
        return tokens
    if how == "checkpointing":
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
    with nullcontext() if how == "checkpointing" else lifted_casts():  # the mode is not active when torch recomputes
        model(**{key: value[1:2] for key, value in batch.items()}).loss.backward()  # a row without padding
    grads = [param.grad for param in trained_parameters(model).values()]
    return torch.cat([(x.full_tensor() if hasattr(x, "full_tensor") else x).flatten() for x in grads])
