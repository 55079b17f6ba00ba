"""The guards recognise the installed releases of torch, accelerate and peft on the call stack.

`pipeline/test_deepspeed.py` tests DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from oslo_models.distributed import callers
from oslo_models.distributed.mesh import ParallelMesh

from support.pool import Pool

ROOT = Path(callers.__file__).parents[1]


class Watched(nn.Linear):
    """Layer that asks a question whenever a library lists its modules or parameters."""

    def __init__(self, question: Callable[[], Any]) -> None:
        super().__init__(2, 2)
        self.question = question
        self.asked: list[Any] = []

    @property
    def answers(self) -> list[Any]:
        return [answer for answer in self.asked if answer is not None]

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        self.asked.append(self.question())  # not in a function, since some questions look at the caller of this method
        return super().named_modules(*args, **kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        self.asked.append(self.question())
        return super().named_parameters(*args, **kwargs)


class Asked(nn.Parameter):
    """Parameter that asks a question whenever its type or its device is read."""

    question: Callable[[], Any] | None = None
    answers: tuple[Any, ...] = ()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.device.__get__, Tensor.type, Tensor.size):  # type: ignore[attr-defined]
            answer_question(args[0])
        return super().__torch_function__(func, types, args, kwargs or {})


def answer_question(param: Asked) -> None:
    if param.question is not None:
        param.answers = (*param.answers, param.question())


def constructed(name: str) -> Callable[[], Any]:
    return lambda: callers.object_under_construction(name)


def ddp(layer: Watched) -> Any:
    return DistributedDataParallel(layer)


def fsdp1(layer: Watched) -> Any:
    return FullyShardedDataParallel(layer, device_id=torch.device("cpu"))


def accelerated(layer: Watched) -> Any:
    return pytest.importorskip("accelerate").Accelerator(cpu=True).prepare(layer)


WRAPPERS: dict[str, tuple[str, Callable[[Watched], Any]]] = {
    "torch DDP": ("DistributedDataParallel", ddp),
    "torch FSDP1": ("FullyShardedDataParallel", fsdp1),
    "accelerate": ("DistributedDataParallel", accelerated),
}


def wrapped(library: str) -> None:
    name, wrap = WRAPPERS[library]
    ParallelMesh(2)  # starts the process group
    layer = Watched(constructed(name))
    wrap(layer)
    assert layer.answers and all(type(answer).__name__ == name for answer in layer.answers)


@pytest.mark.stacks
@pytest.mark.parametrize("library", WRAPPERS)
def test_wrapper_is_recognised_while_it_lists_a_module(pool: Pool, library: str) -> None:
    pool.run(2, wrapped, library, env=True)


def read_by_torch() -> None:
    ParallelMesh(2)
    layer = Watched(callers.ignored_by_fully_shard)
    fully_shard(layer, ignored_params={layer.bias})
    assert layer.answers and all(layer.bias in answer for answer in layer.answers)

    layer = Watched(callers.state_dict_options)
    get_model_state_dict(layer, options=StateDictOptions(full_state_dict=True))
    assert layer.answers and all(answer.full_state_dict for answer in layer.answers)
    layer.asked.clear()
    layer.state_dict()
    assert not layer.answers

    param = Asked(torch.zeros(2, 2))
    param.question = constructed("ZeroRedundancyOptimizer")
    ZeroRedundancyOptimizer([param], torch.optim.SGD, lr=0.1)
    assert any(isinstance(answer, ZeroRedundancyOptimizer) for answer in param.answers)
    dist.barrier()


@pytest.mark.stacks
def test_torch_is_recognised_while_it_reads_parameters(pool: Pool) -> None:
    pool.run(2, read_by_torch)


def sharded_by_torch() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    for blocks in (model[2], [model[0], model[1]], model):
        fully_shard(blocks)
    found = [(owner, name, ranks.tolist()) for owner, name, ranks in callers.fully_sharded_parameters(model[0])]
    assert found == [(model[0], "weight", [0, 1]), (model[1], "weight", [0, 1]), *biases(model)]
    assert [(owner, name) for owner, name, _ in callers.fully_sharded_parameters(model[2])] == [(model[2], "weight")]
    assert not [*callers.fully_sharded_parameters(model)]
    for module in model.modules():
        module.register_forward_hook(lambda *_: None)
        hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
        assert [callers.is_of_fully_shard(hook) for hook in hooks] == [True, True, False]


def biases(model: nn.Sequential) -> list[tuple[nn.Module, str, list[int]]]:
    return [(layer, "bias", [0, 1]) for layer in model[:2]]


@pytest.mark.stacks
def test_parameters_and_hooks_of_fully_shard_are_found(pool: Pool) -> None:
    pool.run(2, sharded_by_torch)


@pytest.mark.stacks
def test_initial_bounds_and_optimizer_steps_are_recognised() -> None:
    class Sized(nn.Parameter):
        seen: list[bool] = []

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is Tensor.size:
                asked_by_override(cls.seen)
            return super().__torch_function__(func, types, args, kwargs or {})

    def asked_by_override(seen: list[bool]) -> None:
        seen.append(callers.computes_initial_bounds())

    param = Sized(torch.zeros(3, 2))
    nn.init.xavier_uniform_(param)
    assert any(Sized.seen)
    Sized.seen.clear()
    param.size(0)
    assert Sized.seen == [False]

    class Stepping(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return asked()

    def asked() -> str | None:
        return callers.calling_optimizer()

    assert Stepping([param], lr=0.1).step() == "Stepping"
    assert asked() is None


@pytest.mark.stacks
def test_peft_is_recognised_while_it_matches_names() -> None:
    peft = pytest.importorskip("peft")
    seen: list[callers.PeftCall] = []

    class Model(nn.Sequential):
        def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
            if (call := callers.peft_call()) is not None:
                seen.append(call)
            return super().named_modules(*args, **kwargs)

    model = Model(nn.Linear(2, 2))
    config = peft.LoraConfig(target_modules=["0"], r=2)
    wrapper = peft.get_peft_model(model, config)
    injections = [call for call in seen if call.function == "inject_adapter"]
    assert injections and all("self" in call.arguments and "peft_config" in call.arguments for call in injections)
    seen.clear()
    wrapper.add_adapter("other", config)
    wrapper.add_weighted_adapter(["default", "other"], [0.5, 0.5], "both", combination_type="linear")
    (combining,) = [
        call for call in seen if call.caller == "add_weighted_adapter" and call.function == "inject_adapter"
    ]
    assert combining.arguments_of_caller["combination_type"] == "linear"
    seen.clear()
    list(model.named_modules())
    assert not seen

    layer = Watched(constructed("PeftModel"))
    peft.get_peft_model(Model(layer), config)
    assert layer.answers and all(isinstance(answer, peft.PeftModel) for answer in layer.answers)


def test_other_modules_do_not_read_the_call_stack() -> None:
    readers = {path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py") if "_getframe" in path.read_text()}
    assert readers == {"distributed/callers.py", "__init__.py"}  # the latter gives `from ... import` its message
