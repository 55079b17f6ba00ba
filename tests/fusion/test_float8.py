"""``fuse(float8=...)``: products in float8 with the scales of one process."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import LlamaConfig

from oslo_kernels import float8 as kernel
from oslo_models import LlamaForCausalLM, registry
from oslo_models.distributed.mesh import Axis
from oslo_models.fusion import float8
from oslo_models.fusion.float8 import RECIPES, Float8, Float8Product, _Product

from support import zoo
from support.fusion import LOGITS, gpt2
from support.pool import Pool
from support.reference import Step, full_gradients, parallel_model, reference_step, step_differences, take_step

ROWWISE = pytest.param(
    "rowwise",
    marks=pytest.mark.skipif(
        float8._unavailable_reason_on_cpus("rowwise") is not None,
        reason=f"torch {torch.__version__} has no rowwise products on CPUs",
    ),
)


def rounded(x: Tensor, dtype: torch.dtype, dim: int | None, power_of_two: bool = False) -> Tensor:
    """Round a tensor to float8, with one scale for the tensor or one per slice along a dimension."""
    limit = torch.finfo(dtype).max
    largest = x.abs().max() if dim is None else x.abs().amax(dim, keepdim=True)
    scale = (limit / largest).float()
    scale = torch.exp2(scale.log2().floor()) if power_of_two else scale
    return (x * scale).clamp(-limit, limit).to(dtype).to(x.dtype) / scale


def expected_product(x: Tensor, weight: Tensor, grad: Tensor, recipe: str) -> tuple[Tensor, Tensor, Tensor]:
    """Compute output and gradients by the definition of the recipe."""
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    if recipe == "tensorwise":
        x, weight, grad = rounded(x, e4m3, None), rounded(weight, e4m3, None), rounded(grad, e5m2, None)
        return x @ weight.T, grad @ weight, grad.T @ x
    output = rounded(x, e4m3, 1, True) @ rounded(weight, e4m3, 1, True).T
    of_x = rounded(grad, e4m3, 1, True) @ rounded(weight, e4m3, 0, True)
    return output, of_x, rounded(grad, e4m3, 0, True).T @ rounded(x, e4m3, 0, True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("recipe", ["tensorwise", ROWWISE])
def test_products_and_gradients_equal_the_recipe(recipe: str, dtype: torch.dtype, seed: int) -> None:
    """Products use ``torch._scaled_mm``, or the plain formula in float64, with odd sizes and Conv1D weights."""
    generator = torch.Generator().manual_seed(seed)
    x, weight, grad = (torch.randn(*s, generator=generator).to(dtype) for s in ((7, 33), (18, 33), (7, 18)))
    x[0] *= 1e-3
    for transposed in (False, True):
        how = Float8(recipe == "rowwise", Axis.alone("tp"), False, transposed)
        own_x = x.view(1, 7, 33).clone().requires_grad_()
        own = (weight.T.clone() if transposed else weight.clone()).requires_grad_()
        output = _Product.apply(own_x, own, how)
        of_x, of_weight = torch.autograd.grad(output, (own_x, own), grad.view(1, 7, 18))
        found = (output, of_x, of_weight.T if transposed else of_weight)
        for part, exact in zip(
            found, expected_product(x.double(), weight.double(), grad.double(), recipe), strict=True
        ):
            assert part.dtype == dtype
            error = (part.reshape(exact.shape).double() - exact).norm() / exact.norm()
            assert error < {torch.bfloat16: 4e-3, torch.float32: 2e-6, torch.float64: 1e-12}[dtype]


def float8_step(step: Step, recipe: str) -> Step:
    """Return the single-process step in float8."""
    model = parallel_model(step.name, step.config, step.weights, 1).fuse(float8=recipe)
    outputs, value, _ = take_step(model, step.batch, step.objective)
    return replace(step, outputs=outputs, value=value, gradients=full_gradients(model))


def check_step(step: Step, recipe: str, n: int, layers: int) -> None:
    model = parallel_model(step.name, step.config, step.weights, n).fuse(float8=recipe)
    assert sum(isinstance(module, Float8Product) for module in model.modules()) == layers
    lines = step_differences(model, step, without=LOGITS)
    assert not lines, "\n".join(lines)


@pytest.mark.parametrize(("variant", "layers"), [("gpt2", 4), ("llama", 7)])
@pytest.mark.parametrize("recipe", RECIPES)
def test_two_ranks_train_as_one_process_does(pool: Pool, recipe: str, variant: str, layers: int, seed: int) -> None:
    """Loss and gradients in float64: all ranks have the scales of the full tensors."""
    plain = reference_step(zoo.lm_head(variant), zoo.config(variant, num_hidden_layers=1), seed)
    step = float8_step(plain, recipe)
    assert abs(step.value - plain.value) > 1e-6  # the loss in float8 differs from the loss in float64
    pool.run(2, check_step, step, recipe, 2, layers)


def small(seed: int, **options: Any) -> Any:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 64}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, pad_token_id=None)
    return LlamaForCausalLM.from_config_with_parallel(config, seed=seed, **options)


@pytest.mark.parametrize("recipe", ["tensorwise", ROWWISE])
def test_training_in_float8_follows_float32(recipe: str, seed: int) -> None:
    """Learn texts of eight repeated tokens in 25 steps; losses differ from float32 by 0.05 on average."""
    ids = torch.randint(64, (2, 8), generator=torch.Generator().manual_seed(seed)).repeat(1, 2)
    losses = []
    for chosen in (None, recipe):
        model = small(seed)
        if chosen:
            model.fuse(float8=chosen)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        found = []
        for _ in range(25):
            loss = model(input_ids=ids, labels=ids).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        losses.append(found)
    exact, own = (torch.tensor(each) for each in losses)
    assert exact[-1] < exact[0] / 3 and own[-1] < own[0] / 3
    # AdamW may overshoot once one of the trainings has learned the texts, so a single loss says little
    assert 1e-5 < (own - exact).abs().mean() < 0.05


def test_a_model_in_float8_is_used_as_any_other(seed: int) -> None:
    """Test checkpointed activations, autocast, frozen weights, generation, copies and `unfuse`."""
    model, ids = small(seed), torch.randint(64, (2, 9), generator=torch.Generator().manual_seed(seed))

    def gradients() -> list[Tensor]:
        model.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        return [param.grad.clone() for param in model.parameters() if param.grad is not None]

    plain = gradients()
    expected = (model.fuse(float8="tensorwise") and None) or gradients()
    assert not any(map(torch.equal, plain[1:-1], expected[1:-1]))
    model.train().gradient_checkpointing_enable()
    assert all(map(torch.equal, gradients(), expected))
    model.gradient_checkpointing_disable()
    with torch.autocast("cpu", torch.bfloat16):
        assert model(ids).logits.dtype == torch.bfloat16
        own, exact = (torch.cat([grad.flatten() for grad in grads]) for grads in (gradients(), expected))
        assert (own - exact).norm() < 0.1 * exact.norm()
    layer = model.model.layers[0].mlp.down_proj
    layer.weight.requires_grad_(False)
    assert len(gradients()) == len(expected) - 1
    layer.weight.requires_grad_()
    model.generate(ids[:, :3], max_new_tokens=2, pad_token_id=0)
    assert all(map(torch.equal, copy.deepcopy(model).unfuse().state_dict().values(), model.state_dict().values()))
    model.unfuse()
    assert all(map(torch.equal, gradients(), plain))


def stage_layers() -> int:
    config = zoo.config("llama", num_hidden_layers=2)
    model = LlamaForCausalLM.from_config_with_parallel(config, pipeline_parallel_size=2, seed=0)
    return sum(isinstance(module, Float8Product) for module in model.fuse(float8="tensorwise").modules())


def test_stages_have_their_layers_in_float8(pool: Pool) -> None:
    assert pool.run(2, stage_layers) == [7, 7]


def check_shared_heads() -> None:
    config = zoo.config("llama", num_hidden_layers=1, num_key_value_heads=1)
    model = LlamaForCausalLM.from_config_with_parallel(config, 2, seed=0).fuse(float8="tensorwise")
    rows = {row.modules: (row.fused, row.reason) for row in model.fusion_report() if row.operation == "linear"}
    assert rows[2] == (False, "left out of float8: its heads are on several ranks, each with a part of their gradient")
    ids = torch.zeros(1, 4, dtype=torch.long)
    model(input_ids=ids, labels=ids).loss.backward()


def test_heads_on_several_ranks_are_left_out(pool: Pool) -> None:
    pool.run(2, check_shared_heads)


def test_layers_unfit_for_float8_are_refused() -> None:
    model = gpt2()
    with pytest.raises(ValueError, match=r"float8='fp8' is none of 'tensorwise', 'rowwise'"):
        model.fuse(float8="fp8")
    with pytest.raises(ValueError, match=r"weights='int8' cannot be trained: choose one"):
        model.fuse(float8="rowwise", weights="int8")
    model.fuse(float8="tensorwise")
    with pytest.raises(ValueError, match=r"fused with float8='tensorwise': call unfuse\(\) first"):
        model.fuse()
    float8._unavailable_reason_on_cpus.cache_clear()
    with (
        mock.patch.object(torch, "_scaled_mm", side_effect=RuntimeError("INTERNAL ASSERT FAILED")),
        pytest.raises(ValueError, match=r"multiplies rowwise on GPUs only.*leave float8 out"),
    ):
        gpt2().fuse(float8="rowwise")
    float8._unavailable_reason_on_cpus.cache_clear()
    gpu = torch.device("cuda:0")
    for recipe, capability, says in (
        ("tensorwise", (8, 0), r"compute capability 8\.9, and cuda:0 has 8\.0; leave float8 out"),
        ("rowwise", (8, 9), r"compute capability 9\.0, and cuda:0 has 8\.9"),
    ):
        with (
            mock.patch.object(torch.cuda, "get_device_capability", return_value=capability),
            pytest.raises(ValueError, match=says),
        ):
            float8.check_float8(recipe, gpu, torch.bfloat16, None)
    with mock.patch.object(torch.cuda, "get_device_capability", return_value=(9, 0)):
        float8.check_float8("rowwise", gpu, torch.bfloat16, None)
        with pytest.raises(ValueError, match=r"the model is in torch\.float64"):
            float8.check_float8("rowwise", gpu, torch.float64, None)
    with pytest.raises(ValueError, match="on NVIDIA's GPUs and on CPUs, and the model is on mps"):
        float8.check_float8("tensorwise", torch.device("mps"), torch.bfloat16, None)


@pytest.mark.parametrize("rows", [False, True])
def test_operands_have_the_layout_of_products_on_gpus(rows: bool) -> None:
    """torch checks the layout and sizes of fake tensors: any number of tokens, widths that are multiples of 16."""
    with FakeTensorMode():

        def run(m: int, k: int, n: int) -> Tensor:
            x, y = (torch.empty(size, k, device="cuda", dtype=kernel.E4M3) for size in (m, n))
            scales = [torch.empty((size, 1) if rows else (), device="cuda") for size in (m, n)]
            return kernel.product(x, y, *scales, torch.float32)

        for m, k, n in ((7, 64, 48), (48, 7, 64)):  # of a forward pass; of a weight's gradient
            assert run(m, k, n).shape == (m, n)
        with pytest.raises(RuntimeError, match="divisible by 16"):
            run(7, 64, 40)
        for shape, says in (((40, 64), "a weight of 40 x 64; GPUs multiply multiples of 16"), ((48, 64), None)):
            with torch.device("meta"):
                layer = torch.nn.Linear(shape[1], shape[0])
            layer.weight = torch.nn.Parameter(torch.empty(shape, device="cuda"))
            assert float8._unavailable_reason_of_layer(layer) == says


def test_layers_of_plans_that_differ_from_block_to_block_are_in_float8() -> None:
    cls: Any = registry.find("KimiLinearForCausalLM")
    model = cls.from_config_with_parallel(zoo.config("kimi_linear"), seed=0).fuse(float8="tensorwise")
    layers = [name for name, module in model.named_modules() if isinstance(module, Float8Product)]
    kinds = {kind: number for number, kind in enumerate(model.config.layer_types)}
    assert all(f"model.layers.{number}.self_attn.o_proj" in layers for number in kinds.values()), layers
