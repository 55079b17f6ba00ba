"""Parameters of a sharded model in other code: torch's norms, checkpoints and optimizers, and copies."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from transformers import PreTrainedConfig

from oslo_models import registry
from oslo_models.distributed.sharded_tensor import Shard, ShardedParameter, local_tensor

from support import zoo
from support.float64 import lifted_casts
from support.pipelines import config as config_of
from support.pipelines import model_on_stages, stage_differences, stage_parameters
from support.pool import Pool
from support.reference import TOLERANCE, differences, full_parameters, make_optimizer, reference_model

pytestmark = pytest.mark.drawn(10, of="file")

Weights = dict[str, Tensor]
Batch = dict[str, Tensor]
SIZES = [(2, 1), (3, 1), (1, 2), (2, 2)]
VARIANTS = ["llama-one-kv", "gpt2"]


def backward(model: Any, batch: Batch) -> None:
    with lifted_casts():
        if getattr(model, "pipeline", None) is None:
            model(**batch).loss.backward()
        else:
            model.train_batch(**batch)


def reference(variant: str, seed: int) -> tuple[str, PreTrainedConfig, Any, Weights, Batch]:
    name, config = zoo.lm_head(variant), config_of(variant)
    model = reference_model(name, config, seed).eval()
    weights = {**model.state_dict(), **full_parameters(model)}  # buffers too
    return name, config, model, weights, zoo.batch(name, config, seed)


# Norms ----------------------------------------------------------------------------------------------------------------


def check_clipping(
    name: str, config: Any, weights: Weights, batch: Batch, sizes: Any, norms: list[float], trained: Weights
) -> None:
    tp, pp = sizes
    model = model_on_stages(name, config, weights, tp, pp).eval()
    lines = []
    for foreach in (None, True, False):
        model.zero_grad()
        backward(model, batch)
        for (order, limit), expected in zip(LIMITS, norms, strict=True):
            found = nn.utils.clip_grad_norm_(model.parameters(), limit, order, foreach=foreach)
            assert type(found) is Tensor
            lines += differences(f"norm {order} {foreach}", found, torch.tensor(expected, dtype=found.dtype), TOLERANCE)
    torch.optim.SGD(model.parameters(), lr=0.01).step()
    lines += stage_differences(model, "trained", stage_parameters(model), trained, TOLERANCE)
    assert not lines, "\n".join(lines)


LIMITS = [(2.0, 1.0), (1.0, 3.0), (float("inf"), 0.01), (3.0, 1e-3)]


@pytest.mark.drawn(3)
@pytest.mark.parametrize(("tp", "pp"), SIZES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_torch_clips_gradients_by_the_norm_of_the_full_model(
    pool: Pool, variant: str, tp: int, pp: int, seed: int
) -> None:
    name, config, model, weights, batch = reference(variant, seed)
    backward(model, batch)
    norms = [float(nn.utils.clip_grad_norm_(model.parameters(), limit, order)) for order, limit in LIMITS]
    torch.optim.SGD(model.parameters(), lr=0.01).step()
    pool.run(tp * pp, check_clipping, name, config, weights, batch, (tp, pp), norms, full_parameters(model))


def check_single_norms(name: str, config: Any, weights: Weights, batch: Batch, expected: dict[str, float]) -> None:
    model = model_on_stages(name, config, weights, 2, 1).eval()
    backward(model, batch)
    found = {key: float(param.grad.norm()) for key, param in model.named_parameters()}
    assert found == pytest.approx(expected, rel=TOLERANCE)
    total = sum(param.grad.norm() ** 2 for param in model.parameters()) ** 0.5
    assert float(total) == pytest.approx(sum(norm**2 for norm in expected.values()) ** 0.5, rel=TOLERANCE)


def test_norm_of_one_gradient_equals_the_full_gradient(pool: Pool, seed: int) -> None:
    name, config, model, weights, batch = reference("llama-one-kv", seed)
    backward(model, batch)
    norms = {key: float(param.grad.norm()) for key, param in model.named_parameters()}
    pool.run(2, check_single_norms, name, config, weights, batch, norms)


def norm_of_one_stage(name: str, config: Any, weights: Weights, batch: Batch) -> None:
    model = model_on_stages(name, config, weights, 1, 2).eval()
    backward(model, batch)
    with pytest.raises(RuntimeError, match="would lack the other stages"):
        sum(param.grad.norm() ** 2 for param in model.parameters())


def test_sum_of_norms_over_one_stage_is_refused(pool: Pool, seed: int) -> None:
    name, config, _, weights, batch = reference("gpt2", seed)
    pool.run(2, norm_of_one_stage, name, config, weights, batch)


def whole(grads: list[Tensor]) -> list[Tensor]:
    return [grad.flatten() for grad in grads]


ONE_NUMBER: list[Callable[[list[Tensor]], Any]] = [
    lambda grads: torch.cat(whole(grads)).norm(),
    lambda grads: torch.cat([grad.detach().cpu().float().reshape(-1) for grad in grads]).square().sum(),
    lambda grads: nn.utils.parameters_to_vector(grads).abs().max(),
    lambda grads: torch._utils._flatten_dense_tensors(grads).dot(torch._utils._flatten_dense_tensors(grads)),
    lambda grads: (torch.hstack(whole(grads)) * 2).topk(3),
    lambda grads: torch.cat(whole(grads)).view(1, -1).quantile(0.9, dim=1),
    lambda grads: torch._foreach_norm(torch._foreach_mul(whole(grads), 2.0)),
    lambda grads: F.cosine_similarity(torch.cat(whole(grads)), torch.cat(whole(grads)), dim=0),
    lambda grads: sum(grad.flatten() @ grad.flatten() for grad in grads),
    lambda grads: sum(F.mse_loss(grad, torch.zeros_like(grad)) for grad in grads),
    lambda grads: torch.stack([grad for grad in grads if grad.shape == grads[-1].shape]).mean(),
]
"""Ways to a number of all gradients of a model."""


def numbers_of_one_stage(name: str, config: Any, weights: Weights, batch: Batch) -> None:
    model = model_on_stages(name, config, weights, 1, 2).eval()
    backward(model, batch)
    grads = [param.grad for param in model.parameters()]
    for number in ONE_NUMBER:
        with pytest.raises(RuntimeError, match=r"would be missing|would lack the other stages"):
            number(grads)


def test_numbers_of_joined_gradients_of_one_stage_are_refused(pool: Pool, seed: int) -> None:
    name, config, _, weights, batch = reference("gpt2", seed)
    pool.run(2, numbers_of_one_stage, name, config, weights, batch)


def same_use(name: str, config: Any, weights: Weights, batch: Batch) -> None:
    """Average flat gradients over replicas, as scripts do, and compute with each gradient alone."""
    model = model_on_stages(name, config, weights, 1, 2).eval()
    backward(model, batch)
    params = list(model.parameters())
    grads = [param.grad for param in params]
    expected = [local_tensor(grad).clone() for grad in grads]
    flat = torch._utils._flatten_dense_tensors(grads)
    flat *= 4
    flat.add_(torch.zeros_like(flat)).div_(4)
    flat[2:5] = flat[2:5] + 0
    for grad, value in zip(grads, torch._utils._unflatten_dense_tensors(flat, grads), strict=True):
        grad.copy_(value)
    assert all(torch.equal(param.grad, values) for param, values in zip(params, expected, strict=True))
    matrix = next(grad for grad in grads if grad.dim() == 2)
    matrices = [grad for grad in grads if grad.shape == matrix.shape]
    torch.testing.assert_close(torch.stack(matrices).mT.bmm(torch.stack(matrices))[0], matrix.mT @ matrix)
    assert len(matrix.flatten().topk(3).values) == 3
    assert float(matrix[0, 0]) == float(matrix.flatten()[0])


def test_joined_gradients_of_one_stage_are_averaged_and_written_back(pool: Pool, seed: int) -> None:
    name, config, _, weights, batch = reference("gpt2", seed)
    pool.run(2, same_use, name, config, weights, batch)


def step_of_lbfgs(name: str, config: Any, weights: Weights, batch: Batch) -> None:
    model = model_on_stages(name, config, weights, 1, 2).eval()
    backward(model, batch)
    optimizer = torch.optim.LBFGS(model.parameters())
    with pytest.raises(RuntimeError, match=r"joined gradients .* covers one pipeline stage"):
        optimizer.step(lambda: 1.0)


def test_optimizer_that_joins_gradients_of_one_stage_is_refused(pool: Pool, seed: int) -> None:
    name, config, _, weights, batch = reference("gpt2", seed)
    pool.run(2, step_of_lbfgs, name, config, weights, batch)


def norms_of_tied_weight(name: str, config: Any, weights: Weights) -> bool:
    """On each rank: the norm of a tied weight of two stages is a number on the first stage only."""
    model = model_on_stages(name, config, weights, 2, 2)
    if not model.stage.is_last:
        expected = float(weights["transformer.wte.weight"].norm())
        assert float(model.transformer.wte.weight.norm()) == pytest.approx(expected, rel=TOLERANCE)
        return False
    with pytest.raises(RuntimeError, match="of a tied weight that counts on another stage"):
        float(model.lm_head.weight.norm())
    return True


def test_norm_of_a_tied_weight_is_refused_where_it_does_not_count(pool: Pool, seed: int) -> None:
    name, config, _, weights, _ = reference("gpt2", seed)
    assert sorted(pool.run(4, norms_of_tied_weight, name, config, weights)) == [False, False, True, True]


# torch.distributed.checkpoint -----------------------------------------------------------------------------------------


def adamw(model: Any) -> torch.optim.Optimizer:
    return make_optimizer("AdamW", [param for _, param in sorted(model.named_parameters())])


def states(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    optimizer_state = get_optimizer_state_dict(model, optimizer, options=options)
    return {"model": get_model_state_dict(model), "optimizer": optimizer_state}


def step_and_save(name: str, config: Any, weights: Weights, batch: Batch, sizes: Any, folder: Path) -> None:
    model = model_on_stages(name, config, weights, *sizes).eval()
    optimizer = adamw(model)
    backward(model, batch)
    optimizer.step()
    dcp.save(states(model, optimizer), checkpoint_id=folder)
    dcp.async_save({"model": model.state_dict()}, checkpoint_id=f"{folder}-async").result()
    stager = DefaultStager(  # copies storages, as asynchronous saves from GPUs do
        StagingOptions(
            use_pinned_memory=False, use_shared_memory=True, use_async_staging=False, use_non_blocking_copy=False
        )
    )
    dcp.async_save({"model": model.state_dict()}, checkpoint_id=f"{folder}-staged", async_stager=stager).result()
    stager.close()


def load_and_step(
    name: str, config: Any, weights: Weights, batch: Batch, sizes: Any, folder: Path, trained: Weights
) -> None:
    model = model_on_stages(name, config, {key: torch.zeros_like(value) for key, value in weights.items()}, *sizes)
    optimizer = adamw(model.eval())
    state = states(model, optimizer)
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(model, state["model"])
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)
    own = model.state_dict()
    for kind in ("async", "staged"):
        again = {"model": {key: torch.zeros_like(value) for key, value in own.items()}}
        dcp.load(again, checkpoint_id=f"{folder}-{kind}")
        for key, value in own.items():
            assert torch.equal(again["model"][key], value), (kind, key)
    optimizer.zero_grad()
    backward(model, batch)
    optimizer.step()
    lines = stage_differences(model, "trained", stage_parameters(model), trained, TOLERANCE)
    assert not lines, "\n".join(lines)


@pytest.mark.parametrize(
    ("variant", "saved", "loaded"),
    [
        ("llama-one-kv", (2, 1), (3, 1)),
        ("llama-one-kv", (3, 1), (1, 1)),
        ("gpt2-untied", (3, 1), (1, 2)),
        ("gpt2-untied", (1, 2), (2, 2)),
        ("gpt2-untied", (2, 2), (2, 1)),
        ("gpt2", (1, 2), (2, 1)),
        ("minimax", (3, 1), (2, 1)),  # with sharded buffers
        pytest.param("minimax", (2, 2), (3, 1), marks=pytest.mark.zoo),
        pytest.param("minimax", (1, 2), (2, 2), marks=pytest.mark.zoo),
        pytest.param("gpt2", (1, 2), (1, 1), marks=pytest.mark.zoo),
    ],
)
def test_torch_distributed_checkpoint_goes_on_at_other_sizes(
    pool: Pool, tmp_path: Path, variant: str, saved: tuple[int, int], loaded: tuple[int, int], seed: int
) -> None:
    """With the states of the optimizer, and asynchronously."""
    name, config, model, weights, batch = reference(variant, seed)
    optimizer = adamw(model)
    for _ in range(2):
        optimizer.zero_grad()
        backward(model, batch)
        optimizer.step()
    folder = tmp_path / "checkpoint"
    pool.run(saved[0] * saved[1], step_and_save, name, config, weights, batch, saved, folder)
    pool.run(loaded[0] * loaded[1], load_and_step, name, config, weights, batch, loaded, folder, full_parameters(model))


def check_buffers(name: str, config: Any, weights: Weights) -> None:
    model = model_on_stages(name, config, weights, 3, 1)
    names = [key for key, _ in model.named_buffers() if key in model.layouts]
    assert len(names) == 2 * 4
    for held in (model, copy.deepcopy(model)):
        state, buffers = held.state_dict(), dict(held.named_buffers())
        for key in names:
            assert isinstance(state[key], Shard) and type(buffers[key]) is Tensor, key
            assert torch.equal(state[key].full_tensor(), weights[key]) and buffers[key].numel() < weights[key].numel()
    assert not [key for key in model.full_layouts if key in names]


def test_sharded_buffers_are_shards_in_state_dictionaries_only(pool: Pool, seed: int) -> None:
    kinds = ["full_attention", "linear_attention", "linear_attention"]
    name, config = zoo.lm_head("minimax"), config_of("minimax", layer_types=kinds, num_hidden_layers=3)
    model = reference_model(name, config, seed)
    pool.run(3, check_buffers, name, config, {**model.state_dict(), **full_parameters(model)})


def check_missing_buffers(folder: Path, expected: Weights) -> None:
    cls: Any = registry.find("MiniMaxForCausalLM")
    model = cls.from_pretrained_with_parallel(folder, 3, expert_parallel_size=3)
    buffers = {key: buffer for key, buffer in model.named_buffers() if key in model.layouts}
    assert buffers.keys() == expected.keys()
    for key, buffer in buffers.items():
        torch.testing.assert_close(buffer, model.layouts[key].shard(expected[key], model.mesh.tp.rank))


def test_sharded_buffers_missing_in_a_checkpoint_equal_transformers(pool: Pool, tmp_path: Path) -> None:
    model = zoo.original("MiniMaxForCausalLM")._from_config(config_of("minimax"))
    expected = {key: buffer for key, buffer in model.named_buffers() if key in model.state_dict()}
    model.save_pretrained(tmp_path, state_dict={k: v for k, v in model.state_dict().items() if k not in expected})
    pool.run(3, check_missing_buffers, tmp_path, expected)


def load_tied_states(name: str, config: Any, weights: Weights, folder: Path) -> None:
    """On each stage: the last stage names the tied weight ``lm_head``, a name that one process does not save."""
    model = model_on_stages(name, config, weights, 1, 2)
    state = states(model, adamw(model.eval()))
    with pytest.raises(CheckpointException, match=r"Missing key in checkpoint state_dict: optimizer\.state\.lm_head"):
        dcp.load(state, checkpoint_id=folder)


def test_states_of_tied_weights_of_one_process_are_not_loaded_on_stages(pool: Pool, tmp_path: Path, seed: int) -> None:
    name, config, _, weights, batch = reference("gpt2", seed)
    pool.run(1, step_and_save, name, config, weights, batch, (1, 1), tmp_path / "checkpoint")
    pool.run(2, load_tied_states, name, config, weights, tmp_path / "checkpoint")


def full_state_dict(name: str, config: Any, weights: Weights) -> None:
    model = model_on_stages(name, config, weights, 2, 1)
    options = StateDictOptions(full_state_dict=True)
    for call in (
        lambda: get_model_state_dict(model, options=options),
        lambda: get_optimizer_state_dict(model, adamw(model), options=options),
        lambda: set_model_state_dict(model, weights, options=options),
        lambda: get_model_state_dict(nn.Sequential(model), options=options),
    ):
        with pytest.raises(ValueError, match=r"full_state_dict=True does not gather the shards of a LlamaForCausalLM"):
            call()
    assert get_model_state_dict(model).keys() == model.state_dict().keys()


def test_full_state_dict_of_torch_is_refused(pool: Pool, seed: int) -> None:
    name, config, _, weights, _ = reference("llama-one-kv", seed)
    pool.run(2, full_state_dict, name, config, weights)


# Optimizers -----------------------------------------------------------------------------------------------------------


def is_hidden_matrix(key: str, param: Tensor) -> bool:
    return param.dim() == 2 and "embed" not in key and "lm_head" not in key


def muon(model: Any, optimizer_of: Any) -> list[torch.optim.Optimizer]:
    matrices = [param for key, param in model.named_parameters() if is_hidden_matrix(key, param)]
    rest = [param for key, param in model.named_parameters() if not is_hidden_matrix(key, param)]
    return [optimizer_of(torch.optim.Muon, matrices, lr=0.02), torch.optim.AdamW(rest, lr=0.01)]


def check_muon(
    name: str, config: Any, weights: Weights, batch: Batch, sizes: Any, trained: list[Weights], tolerance: float
) -> None:
    model = model_on_stages(name, config, weights, *sizes).eval()
    optimizers = muon(model, model.matrix_optimizer)
    lines = []
    for number, expected in enumerate(trained):
        model.zero_grad()
        backward(model, batch)
        for optimizer in optimizers:
            optimizer.step()
        lines += stage_differences(model, f"step {number}", stage_parameters(model), expected, tolerance)
    assert not lines, "\n".join(lines)
    held = sum(state["momentum_buffer"].numel() for state in optimizers[0].state.values())
    full = sum(value.numel() for key, value in weights.items() if is_hidden_matrix(key, value))
    assert 0 < held < 0.7 * full


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (2, 2)])
def test_matrix_optimizer_makes_the_updates_of_one_process(pool: Pool, tp: int, pp: int, seed: int) -> None:
    """Muon orthogonalises in bfloat16, so rounding differences in the gradients may become one unit in bfloat16."""
    name, config, model, weights, batch = reference("llama-one-kv", seed)
    optimizers = muon(model, lambda cls, params, **options: cls(params, **options))
    trained = []
    for _ in range(3):
        model.zero_grad()
        backward(model, batch)
        for optimizer in optimizers:
            optimizer.step()
        trained.append(full_parameters(model))
    pool.run(tp * pp, check_muon, name, config, weights, batch, (tp, pp), trained, 2e-4)


def plain_muon(name: str, config: Any, weights: Weights, batch: Batch) -> None:
    model = model_on_stages(name, config, weights, 2, 1).eval()
    optimizer = muon(model, lambda cls, params, **options: cls(params, **options))[0]
    backward(model, batch)
    with pytest.raises(RuntimeError, match=r"a shard \(model\.layers\.0.*Muon needs full tensors.*matrix_optimizer"):
        optimizer.step()
    with pytest.raises(RuntimeError, match=r"a shard \(.*LBFGS needs full tensors"):
        torch.optim.LBFGS(model.parameters()).step(lambda: torch.zeros(()))
    names = ["AdamW", "Adam", "Adamax", "NAdam", "RAdam", "SGD", "ASGD", "Rprop", "Adagrad", "Adadelta", "RMSprop"]
    for name in names:
        for foreach in (False, True):
            getattr(torch.optim, name)(model.parameters(), lr=0.0, foreach=foreach).step()


def test_optimizer_that_treats_shards_as_matrices_is_refused(pool: Pool, seed: int) -> None:
    name, config, _, weights, batch = reference("llama-one-kv", seed)
    pool.run(2, plain_muon, name, config, weights, batch)


# The parameters themselves --------------------------------------------------------------------------------------------


def check_parameters(name: str, config: Any, weights: Weights) -> None:
    model = model_on_stages(name, config, weights, 2, 1)
    for key, param in model.named_parameters():
        assert isinstance(param, nn.Parameter) and param.sharding.name == key
        if isinstance(param, ShardedParameter):
            assert torch.equal(param.full_tensor(), weights[key]), key
            assert key in repr(param) and "rank" in repr(param)
    head = model.lm_head.weight
    with pytest.raises(RuntimeError, match=r"linear with a shard \(model\.embed_tokens.*call the layer itself"):
        F.linear(torch.ones(1, head.shape[1], dtype=head.dtype), head)
    assert isinstance(model.state_dict()["lm_head.weight"], Shard)

    copied = copy.deepcopy(model)
    twin = copied.lm_head.weight
    assert isinstance(twin, ShardedParameter) and twin is not head
    assert torch.equal(twin.full_tensor(), head.full_tensor())
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    for key, value in torch.load(file).items():
        assert type(value) is Tensor and torch.equal(value, model.state_dict()[key])
    assert isinstance(model.float().lm_head.weight, ShardedParameter) and head.dtype == torch.float32


PRODUCTS: dict[str, Any] = {
    "linear": lambda x, weight: F.linear(x, weight),
    "matmul": lambda x, weight: x @ weight.T,
    "mT": lambda x, weight: torch.matmul(x, weight.mT),
    "t": lambda x, weight: torch.mm(x, torch.t(weight)),
    "transpose": lambda x, weight: x @ weight.detach().transpose(0, 1),
    "type": lambda x, weight: x.float() @ weight.float().permute(1, 0),
    "rows": lambda x, weight: F.linear(x, weight[:3]),
    "batches": lambda x, weight: torch.bmm(x[None], weight.t().unsqueeze(0)),
    "einsum": lambda x, weight: torch.einsum("nd,vd->nv", x, weight),
    "transposed, then of another type": lambda x, weight: x.float() @ weight.T.float(),
    "token embedding": lambda x, weight: F.embedding(torch.zeros(1, dtype=torch.long), weight),
}


def multiply_outside_of_layers(name: str, config: Any, weights: Weights) -> None:
    """On each rank: a product with the head's weight raises for a shard, and works with the full tensor."""
    model = model_on_stages(name, config, weights, 2, 1)
    head: Any = model.lm_head.weight
    x = torch.randn(2, head.shape[1], dtype=head.dtype)
    full = head.full_tensor()
    for what, product in PRODUCTS.items():
        with pytest.raises(RuntimeError, match=r"with a shard \(model\.embed_tokens.*weight\.full_tensor\(\)"):
            print(what, product(x, head))
        assert type(product(x, full)) is Tensor
    assert pickle.loads(pickle.dumps(head[0])).equal(local_tensor(head)[0])


def test_products_outside_of_layers_are_refused(pool: Pool, seed: int) -> None:
    name, config, _, weights, _ = reference("llama-one-kv", seed)
    pool.run(2, multiply_outside_of_layers, name, config, weights)


def test_parameter_knows_that_it_is_a_shard(pool: Pool, seed: int) -> None:
    name, config, _, weights, _ = reference("llama-one-kv", seed)
    pool.run(2, check_parameters, name, config, weights)


def call_by_keywords(seed: int) -> None:
    """On each rank: torch's functions behave the same with their first argument passed by name."""
    cls: Any = registry.find("LlamaForCausalLM")
    weight = cls.from_config_with_parallel(config_of("llama"), 2, seed=seed).lm_head.weight
    for function, name, more in (
        (torch.clone, "input", {}),
        (torch.detach, "input", {}),
        (torch.zeros_like, "input", {}),
        (torch.add, "input", {"other": 1.0}),
        (torch.norm, "input", {}),
        (torch.linalg.vector_norm, "x", {}),
    ):
        by_name, by_position = function(**{name: weight}, **more), function(weight, **more)
        assert type(by_name) is type(by_position) and float(by_name.sum()) == float(by_position.sum()), function
    assert [part.shape for part in torch.chunk(input=weight, chunks=2)] == [part.shape for part in weight.chunk(2)]
    with pytest.raises(RuntimeError, match="outside of its layer"):
        torch.matmul(input=torch.ones(1, weight.shape[1]), other=torch.transpose(input=weight, dim0=0, dim1=1))


def test_functions_of_torch_are_called_by_keywords(pool: Pool, seed: int) -> None:
    pool.run(2, call_by_keywords, seed)
