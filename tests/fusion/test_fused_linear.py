"""Linear layers on a CPU that use `oslo_kernels.linear`: the function alone and in fused models."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

from oslo_kernels import build, passes, small_operations, split_product
from oslo_kernels import linear as kernel
from oslo_models import GPT2LMHeadModel, LlamaForCausalLM
from oslo_models.distributed.mesh import Axis
from oslo_models.fusion import lazy_logits
from oslo_models.fusion import linear_cross_entropy as chunks
from oslo_models.fusion.modules import FusedLinear
from oslo_models.layers.cross_entropy import VocabShard

from support import zoo
from support.fake_timings import faster_at
from support.fusion import relative_error, spy_on_few_rows, tiles
from support.pool import Pool
from support.reference import parallel_model, reference_step

KINDS = (torch.float32, torch.bfloat16, torch.float16)
FORMS = {"out x in": (kernel.linear, F.linear), "in x out": (kernel.conv1d, kernel.plain_conv1d)}


def operands(rows: int, inner: int, outer: int, dtype: torch.dtype, io: bool) -> tuple[Tensor, Tensor, Tensor]:
    shape = (inner, outer) if io else (outer, inner)
    return tuple(torch.randn(size).to(dtype) for size in ((rows, inner), shape, (outer,)))  # type: ignore[return-value]


def error(found: Tensor, exact: Tensor) -> float:
    return ((found.double() - exact).norm() / exact.norm()).item()


def emulated() -> Any:
    """Emulate a processor without 16-bit instructions."""
    return mock.patch.object(kernel, "_is_native", lambda dtype: False)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_linear_rounding_error_is_at_most_twice_as_large_as_by_torch(form: str, dtype: torch.dtype, seed: int) -> None:
    """At any size, the error is at most twice torch's error in the same dtype."""
    ours, plain = FORMS[form]
    torch.manual_seed(seed)
    draw = random.Random(seed)
    sizes = [(rows, draw.randint(1, 700), draw.randint(8, 90)) for rows in (1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 40)]
    for rows, inner, outer in (*sizes, (2, 64, 8), (3, 1, 9), (6, 3000, 12), (5, 260, 2100), (1, 8, 1024)):
        x, weight, bias = operands(rows, inner, outer, dtype, form == "in x out")
        for given in (bias, None):
            several = [x, *(torch.randn(x.shape).to(dtype) for _ in range(7))]  # one row's error depends on its draw
            wide = weight.double(), None if given is None else given.double()
            exact = torch.cat([plain(each.double(), *wide) for each in several])
            with torch.no_grad(), emulated():
                found = torch.cat([ours(each, weight, given) for each in several])
                torchs = torch.cat([plain(each, weight, given) for each in several])
            assert found.dtype == dtype and found.shape == exact.shape
            # the last term is for sizes at which torch happens to be exact
            limit = 2 * error(torchs, exact) + torch.finfo(dtype).eps / 16
            assert error(found, exact) <= limit, f"{rows} x {inner} x {outer}, bias {given is not None}"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_linear_is_bitwise_independent_of_threads_and_other_rows(
    form: str, dtype: torch.dtype, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(seed)
    monkeypatch.setattr(kernel, "WEIGHTS_PER_THREAD", 1)
    x, weight, bias = operands(7, 300, 70, dtype, form == "in x out")
    before, found = torch.get_num_threads(), []
    with torch.no_grad(), emulated():
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(FORMS[form][0](x, weight, bias))
        torch.set_num_threads(before)
        found.append(torch.cat([FORMS[form][0](row, weight, bias) for row in x.split(1)]))
    assert all(torch.equal(found[0], other) for other in found[1:])


@pytest.mark.parametrize("form", FORMS)
def test_linear_keeps_non_finite_values_in_their_rows(form: str) -> None:
    x, weight, bias = operands(5, 40, 30, torch.float32, form == "in x out")
    x[1, 3], x[2, 39], bias[4] = float("inf"), float("nan"), float("-inf")
    with torch.no_grad(), spy_on_few_rows() as product:
        found = FORMS[form][0](x, weight, bias)
    assert product.called
    exact = FORMS[form][1](x, weight, bias)
    assert torch.equal(found.isnan(), exact.isnan()) and torch.equal(found.isinf(), exact.isinf())


def test_linear_accepts_any_shape_and_stride(seed: int) -> None:
    torch.manual_seed(seed)
    _, weight, bias = operands(1, 48, 24, torch.float32, False)
    given = [torch.randn(48), torch.randn(2, 3, 48), torch.randn(48, 5).t(), torch.randn(4, 96)[:, ::2]]
    for x in (*given, torch.randn(1, 48).expand(3, 48), torch.randn(2, 1, 1, 48)):
        with torch.no_grad(), spy_on_few_rows() as product:
            found = kernel.linear(x, weight, bias)
        assert product.called and found.is_contiguous()
        assert error(found, F.linear(x.double(), weight.double(), bias.double())) < 1e-6


LEFT: dict[str, Callable[[], tuple[Tensor, Tensor, Tensor]]] = {
    "many rows": lambda: operands(kernel.MOST_ROWS + 1, 32, 16, torch.float32, False),
    "no rows": lambda: operands(0, 32, 16, torch.float32, False),
    "double precision": lambda: operands(2, 32, 16, torch.float64, False),
    "few columns": lambda: operands(2, 32, 7, torch.float32, False),
    "weights in another order": lambda: (torch.randn(2, 32), torch.randn(32, 16).t(), torch.randn(16)),
    "another class": lambda: (torch.randn(2, 32).as_subclass(Other), torch.randn(16, 32), torch.randn(16)),
}


class Other(Tensor):
    pass


@pytest.mark.parametrize("what", LEFT)
def test_linear_leaves_unsupported_operands_to_torch(what: str) -> None:
    given = LEFT[what]()
    with torch.no_grad(), spy_on_few_rows() as product:
        assert torch.equal(kernel.linear(*given), F.linear(*given))
    assert not product.called


def test_linear_leaves_gradients_and_autocast_to_torch() -> None:
    x, weight, bias = operands(2, 32, 16, torch.float32, False)
    with spy_on_few_rows() as product:
        kernel.linear(x, weight.requires_grad_(), bias).sum().backward()
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            assert kernel.linear(x, weight, bias).dtype == torch.bfloat16
        with torch.no_grad(), pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            kernel.linear(x[:, 1:], weight, bias)
        with torch.no_grad(), pytest.raises(RuntimeError, match="dtype"):
            kernel.linear(x, weight.bfloat16(), bias.bfloat16())
    assert weight.grad is not None and not product.called


def test_linear_splits_many_rows_of_16_bits(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(seed)
    monkeypatch.setattr(kernel, "WIDENED", 100)
    for form, (ours, plain) in FORMS.items():
        x, weight, bias = operands(kernel.MOST_ROWS_HALF + 1, 30, 16, torch.bfloat16, form == "in x out")
        x = x.view(3, -1, 30)
        with torch.no_grad(), emulated(), mock.patch.object(kernel, "_widened", wraps=kernel._widened) as widened:
            found = ours(x, weight, bias)
        exact = plain(x.double(), weight.double(), bias.double())
        assert widened.called and found.dtype == torch.bfloat16
        assert error(found, exact) <= 2 * error(plain(x, weight, bias), exact)


def prompts(name: str, config: Any) -> list[dict[str, Tensor]]:
    """Return batches with few enough rows for the kernel. The errors of one batch vary by more than a factor of two."""
    made = []
    for number in range(12):
        batch = {key: value[:1] for key, value in zoo.batch(name, config, number).items() if key != "labels"}
        made.append({**batch, "decoder_input_ids": batch["input_ids"]} if config.is_encoder_decoder else batch)
    return made


def check_inference(name: str, config: Any, weights: Any, exact: Any, n: int, dtype: torch.dtype) -> tuple[float, ...]:
    """Return the errors of this rank's logits: unfused, fused, and unfused again."""
    model = parallel_model(name, config, weights, n, dtype).eval()
    made = []
    with torch.no_grad(), emulated(), faster_at(), spy_on_few_rows() as product:
        for prepare in (model.unfuse, model.fuse, model.unfuse):
            prepare()
            product.reset_mock()
            made.append({str(i): model(**each).logits.float() for i, each in enumerate(prompts(name, config))})
            assert product.called == (prepare == model.fuse)
    assert all(map(torch.equal, made[0].values(), made[2].values()))
    unfused, fused, _ = (relative_error(logits, exact) for logits in made)
    return unfused, fused


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("variant", zoo.FOUNDING)
def test_fused_linear_logits_are_as_exact_as_transformers(
    pool: Pool, variant: str, dtype: torch.dtype, seed: int
) -> None:
    """Logits of a fused model are as exact as transformers' logits, within a factor of two."""
    name, config = zoo.lm_head(variant), zoo.config(variant)
    weights = {key: value.to(dtype) for key, value in reference_step(name, config, seed).weights.items()}
    model = zoo.original(name).from_pretrained(
        None, config=config, state_dict={key: value.double() for key, value in weights.items()}, dtype=torch.float64
    )
    with torch.no_grad():
        exact = {str(i): model.eval()(**each).logits for i, each in enumerate(prompts(name, config))}
    for n in (1, 2):
        for unfused, fused in pool.run(n, check_inference, name, config, weights, exact, n, dtype):
            assert fused <= 2 * unfused, f"tp {n}: {fused:.2e} instead of {unfused:.2e}"


def test_fuse_without_a_compiler_leaves_linear_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    model = LlamaForCausalLM.from_config_with_parallel(zoo.config("llama"), seed=0).eval()
    ids = torch.tensor([[5, 6, 7]])
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    monkeypatch.setattr(kernel, "has_onednn", lambda: False)
    cached = [
        build.load,
        *(
            f
            for module in (kernel, small_operations, passes, split_product)
            for f in (module._library, module.unavailable_reason)
        ),
    ]
    for function in cached:
        function.cache_clear()
    try:
        with torch.no_grad():
            expected, found = model(ids).logits, model.fuse()(ids).logits
        assert torch.equal(found, expected) and not any(type(module) is FusedLinear for module in model.modules())
        assert "needs a C++ compiler" in str(model.fusion_report())
    finally:
        for function in cached:
            function.cache_clear()


def test_fused_linear_under_torch_compile_is_left_to_inductor() -> None:
    model = GPT2LMHeadModel.from_config_with_parallel(zoo.config("gpt2", n_layer=1), seed=0).eval()
    with faster_at():
        model.fuse()
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad(), spy_on_few_rows() as product:
        expected = model(ids).logits
        assert product.called
        product.reset_mock()
        found = torch.compile(model, backend="eager", fullgraph=True)(ids).logits
    assert not product.called and torch.allclose(found, expected, atol=1e-5)


# With gradients -------------------------------------------------------------------------------------------------------

MANY = kernel.FasterRows({kernel.MOST_TIMED: kernel.ONEDNN}, kernel.ONEDNN, torch.float32, torch.get_num_threads())
WANTED = list(itertools.product((False, True), repeat=3))[1:]


@pytest.mark.parametrize("way", kernel.MANY)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("wanted", WANTED, ids=str)
def test_gradients_of_many_rows_equal_torch(form: str, wanted: tuple[bool, ...], way: str, seed: int) -> None:
    """This holds for any operands with gradients, and for gradients of gradients."""
    torch.manual_seed(seed)
    ours, plain = FORMS[form]
    drawn = operands(300, 40, 56, torch.float32, form == "in x out")
    given = [each.requires_grad_(wants) for each, wants in zip(drawn, wanted, strict=True)]
    exact = [each.detach().double().requires_grad_(wants) for each, wants in zip(given, wanted, strict=True)]
    faster = replace(MANY, many=way, threads=torch.get_num_threads())
    found: list[list[Tensor]] = []
    for product, (x, weight, bias) in ((partial(ours, faster=faster), given), (plain, exact)):
        with tiles(), spy_on_few_rows(way) as used:
            out = product(x.view(3, 100, 40), weight, bias)
            needed = [each for each, wants in zip((x, weight, bias), wanted, strict=True) if wants]
            once = torch.autograd.grad(out.pow(2).sum(), needed, retain_graph=True)
            assert used.call_count == (1 + sum(wanted[:2]) if product is not plain else 0)
        twice = torch.autograd.grad(out.pow(2).sum(), needed, create_graph=True)
        again = torch.autograd.grad(sum(each.pow(2).sum() for each in twice), needed)
        found.append([out, *once, *again])
    for mine, right in zip(*found, strict=True):
        assert error(mine, right) < 1e-5


def test_gradients_of_few_rows_and_transforms_are_left_to_torch(seed: int) -> None:
    torch.manual_seed(seed)
    faster = replace(MANY, threads=torch.get_num_threads())
    x, weight, bias = operands(300, 40, 24, torch.float32, False)
    few = kernel.FasterRows({2: kernel.ONEDNN}, None, torch.float32, torch.get_num_threads())
    with mock.patch.object(kernel, "by_onednn", wraps=kernel.by_onednn) as used:
        kernel.linear(x[:2], weight.requires_grad_(), bias, few).sum().backward()
        loss = lambda weight: kernel.linear(x, weight, bias, faster).pow(2).sum()  # noqa: E731
        found = torch.func.grad(loss)(weight.detach())
        kernel.linear(x.double(), weight.double(), bias.double(), faster)
        with torch.autocast("cpu", torch.bfloat16):
            kernel.linear(x, weight, bias, faster)
        with forward_ad.dual_level():
            kernel.linear(forward_ad.make_dual(x, x), weight, bias, faster)
    assert not used.called
    (expected,) = torch.autograd.grad(F.linear(x, weight, bias).pow(2).sum(), weight)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("way", kernel.MANY)
def test_fused_model_trains_as_an_unfused_one(pool: Pool, way: str, seed: int) -> None:
    for rank in pool.run(2, trained, way, seed):
        assert rank == "equal"


def trained(way: str, seed: int) -> str:
    """On a rank, compare losses and parameters after three steps with torch's products, and check the kernel's use."""
    made = []
    for fused in (False, True):
        model = llama_of_two_ranks(seed)
        with tiles(), spy_on_few_rows(way) as used, faster_at(way=way):
            if fused:
                model.fuse()
            made.append(learn(model, seed))
        assert used.called is fused
    compare(*made)
    return "equal"


def llama_of_two_ranks(seed: int) -> Any:
    return LlamaForCausalLM.from_config_with_parallel(zoo.config("llama"), seed=seed, tensor_parallel_size=2)


def learn(model: Any, seed: int) -> tuple[list[float], dict[str, Tensor]]:
    """Train three steps of 320 tokens; return the losses and the final parameters."""
    batch = torch.randint(3, 90, (4, 80), generator=torch.Generator().manual_seed(seed))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        loss = model(batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: torch.as_tensor(param.detach().clone()) for name, param in model.named_parameters()}


def compare(found: tuple[list[float], dict[str, Tensor]], right: tuple[list[float], dict[str, Tensor]]) -> None:
    assert found[0] == pytest.approx(right[0], rel=1e-5)
    for name, value in right[1].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-4, atol=1e-5)


def test_counted_and_transformed_operations_are_operations_of_torch(seed: int) -> None:
    torch.manual_seed(seed)
    x, weight, bias = operands(300, 40, 24, torch.float32, False)
    faster = replace(MANY, threads=torch.get_num_threads())
    product = partial(kernel.linear, weight_oi=weight, bias=bias, faster=faster)
    with mock.patch.object(kernel, "by_onednn", wraps=kernel.by_onednn) as used, spy_on_few_rows() as few:
        for trains in (False, True):
            with torch.set_grad_enabled(trains), FlopCounterMode(display=False) as counter:
                product(x)
            assert counter.get_total_flops() == 2 * 300 * 40 * 24
            with torch.set_grad_enabled(trains):
                found = torch.vmap(product)(x.view(3, 100, 40))
            torch.testing.assert_close(found, F.linear(x, weight, bias).view(3, 100, 24))
        torch.vmap(partial(kernel.linear, weight_oi=weight))(x[:2])
    assert not used.called and not few.called


UNTIMED = {"out x in": (kernel.untimed_linear, F.linear), "in x out": (kernel.untimed_conv1d, kernel.plain_conv1d)}


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("form", UNTIMED)
def test_layers_compute_large_products_by_tiles_without_timings(form: str, trains: bool, seed: int) -> None:
    """Torch computes small products, other dtypes, products on several threads, and all without tiles."""
    torch.manual_seed(seed)
    ours, plain = UNTIMED[form]
    rows, side = kernel.MOST_TIMED, kernel.FEWEST_SIDE
    draw = partial(operands, dtype=torch.float32, io=form == "in x out")
    large = draw(rows, side, side)
    small = [draw(rows - 1, side, 2 * side), draw(rows, side - 1, 2 * side), draw(rows, 2 * side, side - 1)]
    wide = tuple(each.double() for each in large)
    lone = partial(mock.patch.object, kernel, "LARGE", rows * side**2)
    of_torch = mock.patch.object(kernel, "_prefers_onednn", return_value=False)
    with tiles(), spy_on_few_rows(kernel.SPLIT) as used, torch.set_grad_enabled(trains), of_torch:
        with lone():
            for given in (*small, wide):
                assert torch.equal(ours(*given), plain(*given)) and not used.called
            with mock.patch.object(torch, "get_num_threads", return_value=2):
                assert torch.equal(ours(*large), plain(*large)) and not used.called
            with mock.patch.object(
                split_product, "unavailable_reason", lambda: "the processor has no units for tiles (AMX)"
            ):
                assert torch.equal(ours(*large), plain(*large)) and not used.called
            found = ours(*large)
            assert used.call_count == 1
        assert torch.equal(ours(*large), plain(*large)) and used.call_count == 1
    assert error(found, plain(*wide)) < 1e-6


@pytest.mark.skipif(not kernel.has_onednn(), reason="this build of torch lacks oneDNN")
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("form", UNTIMED)
def test_layers_compute_by_onednn_on_amd_without_timings(
    form: str, biased: bool, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch computes products with few features, other dtypes, and few rows with gradients or with few weights."""
    monkeypatch.setattr(kernel, "_prefers_onednn", lambda: True)
    monkeypatch.setattr(split_product, "unavailable_reason", lambda: "the processor has no units for tiles (AMX)")
    torch.manual_seed(seed)
    ours, plain = UNTIMED[form]
    side, io = kernel.FEWEST_SIDE, form == "in x out"
    outer = kernel.FEWEST_WEIGHTS // side
    with mock.patch.object(kernel, "by_onednn", wraps=kernel.by_onednn) as used:
        for rows in (1, 5, kernel.MOST_TIMED, 2 * kernel.MOST_TIMED):
            x, weight, bias = operands(rows, side, outer, torch.float32, io)
            bias = bias if biased else None
            for trains in (False, True):
                leaves = [x.clone().requires_grad_(trains), weight.clone().requires_grad_(trains)]
                with torch.set_grad_enabled(trains):
                    found, right = ours(*leaves, bias), plain(*leaves, bias)
                torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-4)
                assert used.called is (not trains or rows >= kernel.MOST_TIMED)
                if trains:
                    for mine, other in zip(
                        torch.autograd.grad(found.square().sum(), leaves),
                        torch.autograd.grad(right.square().sum(), leaves),
                        strict=True,
                    ):
                        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-2)
                used.reset_mock()
        narrow = operands(5, side - 1, 2 * outer, torch.float32, io)
        small = operands(kernel.MOST_TIMED - 1, side, outer - 1, torch.float32, io)
        wide = tuple(each.double() for each in operands(5, side, outer, torch.float32, io))
        with torch.no_grad():
            for given in (narrow, small, wide):
                assert torch.equal(ours(*given), plain(*given))
        assert not used.called


@pytest.mark.parametrize(("maker", "preferred"), [("AuthenticAMD", True), ("GenuineIntel", False)])
def test_onednn_is_preferred_on_amd(maker: str, preferred: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "has_onednn", lambda: True)
    with mock.patch.object(kernel.Path, "read_text", return_value=f"vendor_id\t: {maker}"):
        assert kernel._prefers_onednn.__wrapped__() is preferred
    with mock.patch.object(kernel.Path, "read_text", side_effect=FileNotFoundError):
        assert not kernel._prefers_onednn.__wrapped__()


def test_unfused_model_trains_by_tiles(pool: Pool, seed: int) -> None:
    layers = zoo.config("llama").num_hidden_layers * 7 + 1
    for counts in pool.run(2, trained_unfused, seed):
        assert counts == [3 * 3 * layers, 0]


def trained_unfused(seed: int) -> list[int]:
    """On a rank, count the products by tiles in three steps, and compare the results without tiles."""
    made, counts = [], []
    for fewest in (1, 1 << 60):
        model = llama_of_two_ranks(seed)
        with (
            tiles(),
            spy_on_few_rows(kernel.SPLIT) as used,
            mock.patch.multiple(kernel, LARGE=fewest, FEWEST_SIDE=1),
        ):
            made.append(learn(model, seed))
        counts.append(used.call_count)
    compare(*made)
    return counts


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("ignored", [0, 7])
def test_loss_of_a_head_by_tiles_equals_torch(biased: bool, ignored: int, seed: int) -> None:
    """Compute in chunks; the last chunk has too few rows for tiles."""
    torch.manual_seed(seed)
    drawn = [torch.randn(150, 40), torch.randn(57, 40), torch.randn(57)]
    target = torch.randint(57, (150,)).index_fill_(0, torch.arange(ignored), -100)
    shard, given = VocabShard(Axis.alone("tp"), (0, 57), 57), drawn[: 2 + biased]
    faster = kernel.FasterRows({64: kernel.SPLIT}, kernel.SPLIT, torch.float32, torch.get_num_threads())
    found = []
    for way in (None, faster):
        leaves = [x.clone().requires_grad_() for x in given]
        with (
            tiles(),
            mock.patch.object(split_product, "FEWEST_ROWS", 30),
            mock.patch.object(chunks, "_rows_at_once", return_value=64),
            mock.patch.object(split_product, "product", wraps=split_product.product) as used,
        ):
            bias = leaves[2] if biased else None
            loss = chunks.linear_cross_entropy(leaves[0], leaves[1], bias, target, shard, mean=True, faster=way)
            loss.backward()
        assert used.call_count == (7 if way else 0)  # of the last chunk, the gradient of the weight
        found.append([loss, *(leaf.grad for leaf in leaves)])
    for mine, right in zip(*found, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-5, atol=1e-6)


def test_chunks_are_longer_where_the_weight_is_packed_for_each() -> None:
    weight, shard = torch.empty(1000, 8), VocabShard(Axis.alone("tp"), (0, 1000), 1000)
    rows = [chunks._rows_at_once(4096, weight, shard, MANY), chunks._rows_at_once(1024, weight, shard, MANY)]
    packed = replace(MANY, many=kernel.SPLIT)
    assert chunks._rows_at_once(1024, weight, shard, packed) == max(rows[1], chunks.SPLIT_ROWS)
    assert rows[1] <= chunks.SPLIT_ROWS <= rows[0] == chunks._rows_at_once(4096, weight, shard, packed)


def test_small_logits_and_their_loss_are_computed_one_after_the_other(seed: int) -> None:
    """This holds if `fuse` has measured. Without measurements, all possible operations are fused."""
    ids = torch.randint(3, 90, (2, 9), generator=torch.Generator().manual_seed(seed))
    called = []
    for options in ({}, {"measure": False}):
        model: Any = LlamaForCausalLM.from_config_with_parallel(zoo.config("llama"), seed=seed)
        spy = mock.patch.object(lazy_logits, "linear_cross_entropy", wraps=chunks.linear_cross_entropy)
        with faster_at(), spy as used:
            model.fuse(**options)
            for small in (lazy_logits.SMALL, 18 * 101 * 4, 18 * 101 * 4 - 1):
                with mock.patch.object(lazy_logits, "SMALL", small):
                    model(ids, labels=ids)
                called.append(used.called)
                used.reset_mock()
    assert called == [False, False, True, True, True, True]
