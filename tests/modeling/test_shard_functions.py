"""Torch's functions on a shard: each is exact, with gradients, or raises and names the shard."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import get_testing_overrides
from torch.utils._pytree import tree_leaves, tree_map

from oslo_models.distributed.mesh import ParallelMesh
from oslo_models.distributed.partial_norm import PartialNorm
from oslo_models.distributed.shard_functions import ABOUT_MEMORY
from oslo_models.distributed.sharded_tensor import Shard, ShardedParameter, Sharding, WeightView, mark
from oslo_models.sharding.layout import Layout, even_ranges

from support.pipelines import config as config_of
from support.pipelines import model_on_stages
from support.pool import Pool
from support.reference import full_parameters, reference_model

SHAPE = (6, 6)
OF_PROCESS = (
    "apply_",
    "map_",
    "share_memory",
    "storage",
    "deepcopy",
    "reduce_ex",
    "format",
    "repr",
    "data_ptr",
    "cuda",
)
UNDEFINED = (
    "empty",
    "resize",
    "lobpcg",
    "lowrank",
    "fbgemm",
    "quantize",
    "has_torch_function",
    "torch.tensor",
    "dlpack",
    "miopen",
    "cudnn",
    "segment_reduce",
    "set_",
    "torch.save",  # (x, "fro") would write a file
)


class Input:
    """Position of the tensor in a call."""


def calls() -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    x = Input()
    mask = torch.arange(36).view(6, 6) % 2 == 0
    for args in (
        *[
            (x,),
            (x, x),
            (x, 2.0),
            (x, 2),
            (x, 0),
            (x, 1),
            (x, x, x),
            (x, 0, 1),
            ([x, x],),
            ([x, x], [x, x]),
            ([x, x], 2.0),
        ],
        *[(x, (3, 12)), (x, (1,)), (x, 0, 1, 2), (x, "fro"), (x, 0, torch.tensor([1, 3])), (x, torch.tensor([1, 3]))],
        *[(mask, x, 0.5), (x, 0, torch.tensor([1, 3]), 0.5), (x, -1), ("ij,kj->ik", x, x), (1, x), (0.5, x)],
        *[(x, [6]), (x, 0, torch.zeros(6, 6, dtype=torch.long)), (x, 0, torch.zeros(6, 6, dtype=torch.long), x)],
    ):
        yield args, {}


def functions() -> dict[str, Callable[..., Any]]:
    found = {torch.overrides.resolve_name(each) or repr(each): each for each in get_testing_overrides()}
    for space, prefix in (
        (torch, "torch"),
        (Tensor, "Tensor"),
        (F, "F"),
        (torch.linalg, "linalg"),
        (torch.special, "s"),
        (nn.init, "init"),
    ):
        for name in dir(space):
            each = getattr(space, name)
            if (
                callable(each)
                and not inspect.isclass(each)
                and (not name.startswith("_") or name.startswith("_foreach"))
            ):
                found.setdefault(f"{prefix}.{name}", each)
    skipped = (
        *OF_PROCESS,
        *UNDEFINED,
        "all_gather",
        "all_reduce",
        "all_to_all",
        "broadcast at",
        "__set__",
        "__delete",
    )
    distributed = (
        "reduce_scatter",
        "send",
        "recv",
        "function gather",
        "function scatter",
        "function reduce",
        "backward",
    )
    unique = {each: name for name, each in sorted(found.items(), reverse=True)}
    return {
        name: each
        for each, name in unique.items()
        if each not in ABOUT_MEMORY and not any(part in name for part in (*skipped, *distributed))
    }


class Outcome:
    """Result and gradient of a call, as plain numbers."""

    def __init__(self, function: Callable[..., Any], args: Any, kwargs: Any, tensor: Tensor) -> None:
        result = function(*args, **kwargs)
        leaves = [leaf for leaf in tree_leaves(result) if isinstance(leaf, (Tensor, bool, int, float))]
        self.is_view = any(isinstance(leaf, WeightView) for leaf in leaves)
        if self.is_view:
            return
        graph = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad and not leaf.is_complex()]
        loss = sum((leaf * leaf).sum() for leaf in graph) if graph else None
        self.grad = None
        if loss is not None and tensor.requires_grad:
            (grad,) = torch.autograd.grad(loss, tensor, allow_unused=True)
            if grad is not None and isinstance(tensor, Shard):
                grad = mark(grad, tensor.sharding, Shard)
            self.grad = full(grad)
        self.values = [full(leaf) for leaf in leaves]


def full(value: Any) -> Any:
    value = value.full_tensor() if isinstance(value, Shard) else value
    value = value * 1 if isinstance(value, PartialNorm) else value
    return value.detach().as_subclass(Tensor) + 0 if isinstance(value, Tensor) else torch.tensor(value)


def is_same(a: Any, b: Any) -> bool:
    if a is None or b is None:
        return a is b
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.allclose(a, b, rtol=1e-10, atol=1e-10, equal_nan=True)


def sort_functions(values: Tensor, dim: int, with_graph: bool, seed: int = 0, count: int = 24) -> dict[str, list[str]]:
    """On each rank: return the names of exact, refused, impossible (by shape) and wrong calls."""
    mesh = ParallelMesh(2)
    ranges = even_ranges(6, 2)
    sharding = Sharding("weight", Layout(SHAPE, dim, ranges=tuple((each,) for each in ranges)), mesh)
    start, stop = ranges[mesh.tp.rank]
    drawn = random.Random(seed)
    sorted_: dict[str, list[str]] = {"exact": [], "refused": [], "raised": [], "wrong": []}
    for name, function in functions().items():
        for number, (args, kwargs) in drawn.sample([*enumerate(calls())], count):
            plain, shard = nn.Parameter(values.clone()), nn.Parameter(values.narrow(dim, start, stop - start).clone())
            mark(shard, sharding, ShardedParameter)
            inputs = [x if with_graph else x.detach() for x in (plain, shard)]
            given = [tree_map(lambda a, x=x: x if isinstance(a, Input) else a, args) for x in inputs]
            torch.manual_seed(number)
            try:
                expected = Outcome(function, given[0], kwargs, inputs[0])
            except Exception:  # noqa: BLE001
                continue
            what = f"{name} {number}"
            torch.manual_seed(number)
            try:
                found = Outcome(function, given[1], kwargs, inputs[1])
            except RuntimeError as error:
                if "shard (" in str(error):
                    sorted_["refused"].append(what)
                else:
                    sorted_["raised"].append(f"{what}: {error!r}"[:200])
                continue
            except Exception as error:  # noqa: BLE001
                sorted_["raised"].append(f"{what}: {error!r}"[:200])
                continue
            if found.is_view:
                sorted_["refused"].append(what)
            elif len(found.values) == len(expected.values) and all(map(is_same, found.values, expected.values)):
                sorted_["exact" if is_same(found.grad, expected.grad) else "wrong"].append(what)
            else:
                sorted_["wrong"].append(f"{what}: other values")
    return sorted_


@pytest.mark.parametrize(("dim", "with_graph"), [(0, True), (1, False)])
@pytest.mark.filterwarnings("ignore")
def test_every_function_of_torch_is_exact_or_refused(pool: Pool, dim: int, with_graph: bool, seed: int) -> None:
    values = torch.rand(SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * 0.8 + 0.1
    for found in pool.run(2, sort_functions, values, dim, with_graph, seed, 4):
        assert not found["wrong"], "\n".join(found["wrong"])
        assert len(found["exact"]) > 100 and len(found["refused"]) > 100


# Terms of a loss ------------------------------------------------------------------------------------------------------

TERMS: dict[str, Callable[[Any], Tensor]] = {
    "norm": lambda x: sum(p.norm() for p in x.parameters()),
    "norm of order 3": lambda x: sum(torch.norm(p, 3) for p in x.parameters()),
    "highest": lambda x: sum(torch.linalg.vector_norm(p, float("inf")) for p in x.parameters()),
    "foreach": lambda x: sum(torch._foreach_norm(list(x.parameters()), 1)),
    "squares": lambda x: sum(p.square().sum() for p in x.parameters()),
    "start": lambda x: sum(((p - torch.ones_like(p)) ** 2).mean() for p in x.parameters()),
    "two rows": lambda x: F.cosine_similarity(*_full(x.lm_head.weight)[[7, 9]], dim=0),
    "share": lambda x: sum((p / p.norm()).abs().sum() for p in x.model.layers[0].mlp.parameters()),
}
REFUSED: dict[str, Callable[[Any], Any]] = {
    "mse_loss": lambda x: F.mse_loss(x.lm_head.weight, torch.ones_like(x.lm_head.weight)),
    "module": lambda x: nn.MSELoss()(x.lm_head.weight, torch.ones_like(x.lm_head.weight)),
    "vector": lambda x: nn.utils.parameters_to_vector(x.parameters()),
    "cat": lambda x: torch.cat([p.flatten() for p in x.parameters()]),
    "dot": lambda x: torch.dot(x.lm_head.weight.flatten(), x.lm_head.weight.flatten()),
    "rows": lambda x: F.cosine_similarity(x.lm_head.weight[7], x.lm_head.weight[9], dim=0),
    "row": lambda x: x.lm_head.weight.detach()[7].fill_(0),
    "row of data": lambda x: x.lm_head.weight.data[5].zero_(),
    "row, added to": lambda x: x.lm_head.weight.data[5].__iadd__(1.0),
    "row of bits": lambda x: (x.lm_head.weight.data > 0)[5].__iand__(True),
    "row as an output": lambda x: torch.add(torch.ones(1), torch.ones(1), out=x.lm_head.weight.data[5]),
    "rows, added to": lambda x: x.lm_head.weight.data.index_add_(0, torch.tensor([3]), torch.ones(1, 24)),
    "assignment": lambda x: x.lm_head.weight.detach().__setitem__(slice(-4, None), 0.0),
    "assignment to data": lambda x: x.lm_head.weight.data.__setitem__(5, 0.0),
    "identity": lambda x: nn.init.eye_(x.lm_head.weight),
    "orthogonal": lambda x: nn.init.orthogonal_(x.lm_head.weight),
}
DRAWN: dict[str, Callable[[Any], Any]] = {
    **{
        name: lambda x, name=name: [getattr(nn.init, name)(each.weight) for each in linear_layers(x)]
        for name in dir(nn.init)
        if name.endswith("_") and not name.startswith("_") and name.partition("_")[0] in ("uniform", "normal", "trunc")
    },
    "xavier_uniform_": lambda x: [nn.init.xavier_uniform_(each.weight) for each in linear_layers(x)],
    "xavier_normal_": lambda x: [nn.init.xavier_normal_(each.weight) for each in linear_layers(x)],
    "kaiming_uniform_": lambda x: [nn.init.kaiming_uniform_(each.weight, a=0.5) for each in linear_layers(x)],
    "kaiming_normal_": lambda x: [nn.init.kaiming_normal_(each.weight, mode="fan_out") for each in linear_layers(x)],
    "reset_parameters": lambda x: [each.reset_parameters() for each in linear_layers(x)],
    "embedding": lambda x: x.model.embed_tokens.reset_parameters(),
    "in place": lambda x: [each.weight.data.uniform_(-1, 1) for each in linear_layers(x)],
}
"""Functions that reinitialise weights at random."""


def linear_layers(model: Any) -> list[Any]:
    names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")
    return [model.model.layers[1].get_submodule(name) for name in names]


def draw(model: Any, how: str) -> list[Tensor]:
    torch.manual_seed(3)
    with torch.no_grad():
        DRAWN[how](model)
    weights = [each.weight for each in (*linear_layers(model), model.model.embed_tokens)]
    return [*(_full(weight).detach().clone() for weight in weights), torch.rand(2)]


def assign_rows(weight: Any) -> Tensor:
    """Set new tokens to the mean of the other tokens, in the way that sharded weights support."""
    with torch.no_grad():
        full = _full(weight).clone()
        full[-4:] = full[:-4].mean(0)
        weight.copy_(full)
        weight.data.copy_(full)
    return full


def _full(weight: Any) -> Tensor:
    return weight.full_tensor() if isinstance(weight, Shard) else weight


def second_derivatives(model: Any, term: Callable[[Any], Tensor]) -> tuple[Tensor, list[Tensor]]:
    params = list(model.parameters())
    value = term(model)
    grads = torch.autograd.grad(value, params, create_graph=True, allow_unused=True)
    squares = sum(grad.square().sum() for grad in grads if grad is not None)
    (value + 0.1 * squares).backward()
    found = [_full(param.grad).detach().clone() for param in params if param.grad is not None]
    model.zero_grad()
    return value.detach(), found


def check_terms(config: Any, weights: Any, expected: dict[str, Any], drawn: dict[str, list[Tensor]]) -> None:
    model = model_on_stages("LlamaForCausalLM", config, weights, 2, 1)
    for name, term in TERMS.items():
        value, grads = second_derivatives(model, term)
        torch.testing.assert_close(value, expected[name][0], rtol=1e-10, atol=1e-10)
        for found, grad in zip(grads, expected[name][1], strict=True):
            torch.testing.assert_close(
                found, grad, rtol=1e-9, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}"
            )
    for name, call in REFUSED.items():
        with pytest.raises(RuntimeError, match=r"shard \("):
            print(name, call(model))
    for name, param in model.named_parameters():  # nothing was changed before an error
        assert torch.equal(_full(param), weights[name]), name
    for how, numbers in drawn.items():
        for found, number in zip(draw(model, how), numbers, strict=True):
            assert torch.equal(found, number), how
    assert torch.equal(assign_rows(model.lm_head.weight), model.lm_head.weight.full_tensor())
    with pytest.raises(RuntimeError, match=r"setitem of a shard \("):
        nn.init.sparse_(model.lm_head.weight, 0.5)
    check_hooks(model.lm_head.weight)


def double(grad: Tensor) -> None:
    grad.mul_(2)


def check_hooks(weight: Any) -> None:
    """Gradient hooks receive a shard."""
    handle = weight.register_hook(lambda grad: grad.__setitem__(slice(0, 3), 0.0))
    with pytest.raises(RuntimeError, match=r"setitem of a shard \("):
        weight.sum().backward()
    handle.remove()
    for hook in (lambda grad: grad * 2, double):
        handle = weight.register_hook(hook)
        weight.grad = None
        weight.sum().backward()
        assert float(weight.grad.sum()) == 2 * 101 * 24
        handle.remove()


def test_terms_of_a_loss_have_the_gradients_of_one_process(pool: Pool, seed: int) -> None:
    """With second derivatives; reinitialised weights match one process."""
    config = config_of("llama-one-kv")
    model = reference_model("LlamaForCausalLM", config, seed)
    weights = full_parameters(model)
    expected = {name: second_derivatives(model, term) for name, term in TERMS.items()}
    drawn = {how: draw(model, how) for how in DRAWN}
    pool.run(2, check_terms, config, weights, expected, drawn)
