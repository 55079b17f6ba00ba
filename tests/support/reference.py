"""Reference results of transformers in one process, and their comparison with the shards of a rank.

The reference is computed in the parent process and sent to the ranks as full tensors. Each rank loads its shards of the
same weights, takes the same step, and compares its results with its shards of the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from oslo_models import registry
from oslo_models.distributed.sharded_tensor import local_tensor

from support import zoo
from support.float64 import lifted_casts

logging.disable_progress_bar()

TOLERANCE = 1e-10
"""The largest absolute difference in float64."""


def reference_model(
    name: str, config: PreTrainedConfig, seed: int, dtype: torch.dtype = torch.float64, **options: Any
) -> Any:
    """Return a transformers model in training mode, without the zeros and ones of initial biases and norms.

    The model is loaded with `from_pretrained`, like the models of the zoo: it computes buffers in float32 for every
    model dtype, while `_from_config` computes them in the model dtype (GPT-J's table of positions).
    """
    torch.manual_seed(seed)
    cls = zoo.original(name)
    weights = cls._from_config(config, dtype=dtype).state_dict()
    fixed = cls._keys_to_ignore_on_save or ()  # tables of sines
    for tensor in {tensor.data_ptr(): tensor for name, tensor in weights.items() if name not in fixed}.values():
        if tensor.is_floating_point():
            tensor += 0.1 * torch.randn_like(tensor)
        elif config.model_type == "deepseek_v4":  # the experts of each token
            tensor.random_(config.num_local_experts)
    model = cls.from_pretrained(None, config=config, state_dict=weights, dtype=dtype, **options).train()
    for param in model.parameters():  # some of XLNet's and DeBERTa's ignore the requested dtype and are float32
        param.data = param.data.to(dtype)
    return model


def full_parameters(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return copies of all parameters; tied parameters occur under each of their names."""
    return {name: param.detach().clone() for name, param in model.named_parameters(remove_duplicate=False)}


def full_gradients(model: PreTrainedModel) -> dict[str, Tensor | None]:
    return {name: param.grad for name, param in model.named_parameters(remove_duplicate=False)}


def parallel_model(
    name: str,
    config: PreTrainedConfig,
    weights: Mapping[str, Tensor],
    tensor_parallel_size: int,
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> Any:
    """Return this rank's shard of a model with the given full weights."""
    cls: Any = registry.find(name)
    model = cls.from_config_with_parallel(config, tensor_parallel_size, dtype=dtype, seed=0, **options)
    load(model, weights)
    return model.train()


def own_part(model: Any, name: str, full: Tensor) -> Tensor:
    """Return the local shard of a tensor, or the whole tensor without a layout (buffers)."""
    layout = model.layouts.get(name)
    return full if layout is None else layout.shard(full, model.mesh.rank_in(layout))


@torch.no_grad()
def load(model: Any, weights: Mapping[str, Tensor]) -> None:
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    buffers = dict(model.named_buffers())
    assert names == weights.keys() - buffers.keys() == model.layouts.keys() - buffers.keys()
    for name in buffers.keys() & weights.keys():
        buffers[name].copy_(own_part(model, name, weights[name]))
    for name, param in model.named_parameters(remove_duplicate=False):
        part = own_part(model, name, weights[name])
        assert part.shape == param.shape, f"{name}: {tuple(param.shape)} instead of {tuple(part.shape)}"
        param.copy_(part)
        param.requires_grad_(True)  # loading unfreezes it, like transformers; new models of DETR freeze some parameters


def tensors(output: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the floating-point tensors of an output with their paths, without caches."""
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield prefix, output
    elif isinstance(output, (dict, tuple, list)):
        for key, value in output.items() if isinstance(output, dict) else enumerate(output):
            yield from tensors(value, f"{prefix}.{key}" if prefix else str(key))


def all_outputs(output: Any) -> Tensor:
    """A weighted sum of all elements of all outputs, with a different weight for each."""
    total = torch.zeros((), dtype=torch.float64)
    for _, value in tensors(output):
        weights = torch.arange(value.numel(), dtype=torch.float64).cos().view_as(value).to(value.dtype)
        total = total + (value.masked_fill(value.isinf(), 0) * weights).sum()  # logits of no text are infinite
    return total


def loss_or_all_outputs(output: Any) -> Tensor:
    """Return the loss, or a weighted sum of all outputs of a class without a loss."""
    return output.loss if output.get("loss") is not None else all_outputs(output)


Objective = Callable[[Any], Tensor]


@dataclass
class Step:
    """One forward and backward pass in one process: inputs, weights, outputs and gradients, all as full tensors."""

    name: str
    config: PreTrainedConfig
    batch: dict[str, Any]
    weights: dict[str, Tensor]
    outputs: dict[str, Tensor]
    value: Tensor
    gradients: dict[str, Tensor | None]
    input_gradients: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    objective: Objective = loss_or_all_outputs


def take_step(
    model: PreTrainedModel, batch: Mapping[str, Any], objective: Objective, lift: bool = True
) -> tuple[dict[str, Tensor], Tensor, dict[str, Tensor]]:
    """Run forward and backward; return the outputs, the objective, and gradients of floating-point inputs."""
    inputs = {
        key: value.detach().requires_grad_() if isinstance(value, Tensor) and value.is_floating_point() else value
        for key, value in batch.items()
    }
    for name in {"inputs", "input_values"} & inputs.keys():  # transformers' models make a leaf of them themselves
        inputs[name] = batch[name]
    if lift:
        with lifted_casts():
            output = model(**inputs)
            value = objective(output)
            value.backward()  # type: ignore[no-untyped-call]
    else:
        output = model(**inputs)
        value = objective(output)
        value.backward()  # type: ignore[no-untyped-call]
    gradients = {key: value.grad for key, value in inputs.items() if isinstance(value, Tensor) and value.requires_grad}
    return {path: tensor.detach() for path, tensor in tensors(output)}, value.detach(), gradients


def reference_step(
    name: str,
    config: PreTrainedConfig,
    seed: int,
    dtype: torch.dtype = torch.float64,
    objective: Objective = loss_or_all_outputs,
    batch: dict[str, Any] | None = None,
    **options: Any,
) -> Step:
    """Return the step of the transformers class. In float64, its casts to float32 do nothing."""
    model = reference_model(name, config, seed, dtype, **options)
    weights = {**model.state_dict(), **full_parameters(model)}  # buffers too, such as the logits bias of BART
    batch = zoo.batch(name, config, seed + 1, dtype) if batch is None else batch
    torch.manual_seed(0)  # Wav2Vec2 samples its targets
    outputs, value, input_gradients = take_step(model, batch, objective, lift=dtype == torch.float64)
    return Step(
        name, config, batch, weights, outputs, value, full_gradients(model), input_gradients, objective=objective
    )


def differences(what: str, own: Tensor | None, expected: Tensor | None, tolerance: float) -> list[str]:
    """Return one line if the tensors differ by more than the tolerance, else none."""
    if own is None or expected is None:
        return [] if own is expected else [f"{what}: {'no' if own is None else 'a'} tensor"]
    if own.shape != expected.shape or own.dtype != expected.dtype:
        return [f"{what}: {own.dtype} {tuple(own.shape)} instead of {expected.dtype} {tuple(expected.shape)}"]
    if not own.numel():
        return []
    found, right = local_tensor(own), local_tensor(expected)
    error = (found - right).masked_fill(found == right, 0).abs().max().item()  # infinities may be equal
    return [] if error <= tolerance else [f"{what}: off by {error:.2e}"]  # a nan is not small either


def shard_differences(
    model: Any, what: str, own: Mapping[str, Tensor | None], full: Mapping[str, Tensor | None], tolerance: float
) -> list[str]:
    """Return a line for each local tensor that differs from its shard of the full tensor. Gather tensors of FSDP2."""
    lines = []
    for name, part in own.items():
        part, expected = part.full_tensor() if isinstance(part, DTensor) else part, full[name]
        if expected is not None:
            expected = own_part(model, name, expected)
        lines += differences(f"{what} {name}", part, expected, tolerance)
    return lines


def step_differences(
    model: Any, step: Step, tolerance: float = TOLERANCE, without: tuple[str, ...] = (), optional: tuple[str, ...] = ()
) -> list[str]:
    """Take the same step with this rank's shard of the model; return a line for each different result.

    Args:
        without: first parts of the paths of outputs that the model must not return.
        optional: first parts of the paths of outputs that the model need not return.
    """
    outputs, value, input_gradients = take_step(model, step.batch, step.objective, lift=tolerance > 0)
    expected = {path: tensor for path, tensor in step.outputs.items() if not path.startswith(without or " ")}
    needed = {path for path in expected if path in outputs or not path.startswith(optional or " ")}
    lines = [] if outputs.keys() == needed else [f"outputs: {list(outputs)} instead of {list(expected)}"]
    for path in outputs.keys() & expected.keys():
        lines += differences(f"output {path}", outputs[path], expected[path], tolerance)
    lines += differences("value", value, step.value, tolerance)
    for key, gradient in input_gradients.items():
        lines += differences(f"gradient of input {key}", gradient, step.input_gradients[key], tolerance)
    own = {name: param.grad for name, param in model.named_parameters(remove_duplicate=False)}
    lines += shard_differences(model, "gradient of", own, step.gradients, tolerance)
    return lines


def train(model: Any, batches: Sequence[Mapping[str, Any]], optimizer: str = "SGD", lr: float = 0.01) -> list[float]:
    """Take one optimizer step for each batch; return the losses."""
    return take_steps(model, make_optimizer(optimizer, model.parameters(), lr), batches)


ADAMW_EPS = 1e-6
"""AdamW divides a gradient by its own size plus ``eps``, so a step moves by up to ``lr / eps`` times an error of the
gradient: torch's default of 1e-8 makes 1e-10 of an error of 1e-16, which no order of summation can avoid."""


def make_optimizer(name: str, params: Iterable[Tensor], lr: float = 0.01) -> Any:
    """Return an optimizer of ``torch.optim`` that does not magnify rounding errors of zero gradients."""
    return getattr(torch.optim, name)(params, lr=lr, **({"eps": ADAMW_EPS} if name == "AdamW" else {}))


def take_steps(
    model: Any, optimizer: Any, batches: Sequence[Mapping[str, Any]], after: Callable[[], Any] = lambda: None
) -> list[float]:
    """Take a step for each batch, and call ``after`` after each step; return the losses."""
    losses = []
    with lifted_casts():
        for batch in batches:
            optimizer.zero_grad()
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            after()
            losses.append(loss.item())
    return losses


def saved_step(name: str, config: PreTrainedConfig, seed: int, batch: dict[str, Any], folder: Path) -> Step:
    """Save a transformers model, and return its step, including its buffers."""
    model = reference_model(name, config, seed)
    model._weight_conversions = None  # save experts as separate weights, like checkpoints on the hub, not as loaded
    model.save_pretrained(folder)
    torch.manual_seed(0)
    outputs, value, inputs = take_step(model, batch, loss_or_all_outputs)
    weights = full_parameters(model)
    buffers = {key: value for key, value in model.state_dict().items() if key not in weights}
    return Step(name, config, batch, weights, outputs, value, full_gradients(model), inputs, buffers)
