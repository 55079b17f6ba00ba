"""The product of the head in the running batch: it gives transformers' logits with every implementation."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from oslo_kernels.linear import has_onednn
from oslo_models import LlamaForCausalLM
from oslo_models.deploy.running_batch import head_product
from oslo_models.fusion.lazy_logits import LazyFullHead, LazyVocabParallelHead
from oslo_models.layers.vocab_parallel import VocabParallelHead

from support import running, zoo
from support.fake_timings import faster_at
from support.fusion import spy_on_few_rows
from support.mutants import MutantPool, Patch
from support.pool import Pool


def always(patch: Patch) -> None:
    """Use the faster products for all weights. Test weights are too small, and in float64, which oneDNN lacks."""
    patch.setattr(head_product, "_fits", lambda *args: True)
    patch.setattr(
        head_product, "by_onednn", lambda x, weight, bias=None: x @ weight.t() + (0 if bias is None else bias)
    )


@pytest.mark.parametrize("rows", [1, 2, 5, 8, 9, 65])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("by_mkl", [False, True])
def test_product_equals_a_linear_layer(
    seed: int, rows: int, bias: bool, by_mkl: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_product, "_is_for_mkl", lambda *args: by_mkl)
    torch.manual_seed(seed)
    layer = nn.Linear(24, head_product.FEWEST_OUTPUTS, bias=bias)
    x = torch.randn(rows, 3, 24)[:, -1:]  # not contiguous
    with torch.no_grad():
        found = head_product.product(x, layer.weight, layer.bias)
        torch.testing.assert_close(found, layer(x))
        assert found.is_contiguous()
        for other in (layer.double(), layer.half().float().bfloat16()):
            x = x.to(other.weight.dtype)
            assert torch.equal(head_product.product(x, other.weight, other.bias), F.linear(x, other.weight, other.bias))


def test_head_is_lent_another_class(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The class changes only during a step, even if the step fails; fused, adapted and quantised heads keep theirs."""
    model: Any = LlamaForCausalLM.from_config_with_parallel(zoo.config("llama"), dtype=torch.float64).eval()
    ids = torch.randint(3, 101, (3, 5), generator=torch.Generator().manual_seed(seed))
    always(monkeypatch)
    with torch.no_grad():
        expected, calls = model(ids).logits, []
        monkeypatch.setattr(head_product, "product", lambda *args: calls.append(1) or F.linear(*args))
        with pytest.raises(ZeroDivisionError), head_product.fast_head(model):
            torch.testing.assert_close(model(ids).logits, expected, rtol=1e-10, atol=1e-10)
            raise ZeroDivisionError
    assert calls == [1] and type(model.lm_head) is nn.Linear
    model.lm_head.__class__ = other = type("Other", (nn.Linear,), {})
    with head_product.fast_head(model):
        assert type(model.lm_head) is other


@pytest.mark.parametrize("rows", [2, 5, 30])
def test_fused_head_keeps_timed_calls_and_leaves_the_rest(seed: int, rows: int) -> None:
    model: Any = LlamaForCausalLM.from_config_with_parallel(zoo.config("llama"), seed=seed).eval()
    hidden = torch.randn(rows, 1, model.config.hidden_size)
    with faster_at({4, 8}), torch.no_grad():
        expected = model.lm_head(hidden)
        model.fuse()
        own = type(model.lm_head)
        spy = mock.patch.object(head_product, "product", wraps=head_product.product)
        with spy as product, spy_on_few_rows() as timed, head_product.fast_head(model):
            found = model.lm_head(hidden)
        torch.testing.assert_close(found, expected)
        assert timed.called is (rows == 5) and product.called is (rows != 5) and type(model.lm_head) is own


def test_head_of_a_busy_machine_is_left_to_torch(seed: int) -> None:
    """A head without timings is computed by torch."""
    model: Any = LlamaForCausalLM.from_config_with_parallel(zoo.config("llama"), seed=seed).eval()
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        with faster_at(preempted=90), torch.no_grad(), spy_on_few_rows() as product:
            assert "other programs keep the cores busy" in str(model.fuse().fusion_report())
            model(torch.tensor([[5, 6, 7]]))
        assert not product.called
    finally:
        torch.set_num_threads(before)


class Packed(nn.Parameter):
    """Like a quantised weight: its class computes the product."""


def test_weights_of_other_classes_and_gradients_are_left_to_torch() -> None:
    weight, x = torch.ones(head_product.FEWEST_OUTPUTS, 4), torch.ones(2, 4)
    with torch.no_grad():
        assert head_product._fits(x, weight) is has_onednn()
        assert not head_product._fits(x, Packed(weight))
        assert not head_product._fits(x.double(), weight.double())
        assert not head_product._fits(x, weight[1:])
        with torch.autocast("cpu"):
            assert not head_product._fits(x, weight)
    assert not head_product._fits(x, weight)


def test_sharded_head_computes_its_shard(pool: Pool, tmp_path: Path, seed: int) -> None:
    assert head_product._FAST.keys() == {nn.Linear, VocabParallelHead, LazyFullHead, LazyVocabParallelHead}
    running.compare(MutantPool(pool, always), "llama", tmp_path, seed, 6, tensor_parallel_size=2)


@pytest.mark.skipif(not has_onednn(), reason="this build of torch lacks oneDNN")
def test_packed_head(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The packed head is used if it is faster, repacked for new weights, and skipped for few rows and large weights."""
    monkeypatch.setattr(head_product, "FEWEST_OUTPUTS", 8)
    seconds = {"packed": 1.0, "as it is": 2.0}
    by_onednn = head_product.by_onednn

    def timed(product: Any, x: Any, weight: Any) -> float:
        return seconds["packed" if weight.is_mkldnn else "as it is"]

    monkeypatch.setattr(head_product, "_seconds", timed)
    model: Any = LlamaForCausalLM.from_config_with_parallel(zoo.config("llama"), seed=seed).eval()
    packed = head_product.PackedHead()
    assert packed.reserve(model) == 0  # not fused
    with faster_at(set()):
        model.fuse()
    hidden = {rows: torch.randn(rows, 1, model.config.hidden_size) for rows in (2, 9)}
    used: list[bool] = []

    def spy(x: Any, weight: Any, bias: Any = None) -> Any:
        used.append(weight.is_mkldnn)
        return by_onednn(x, weight, bias)

    def uses_packed(rows: int, given: Any = packed) -> bool:
        used.clear()
        with torch.no_grad():
            expected = F.linear(hidden[rows], model.lm_head.weight)
            with monkeypatch.context() as patch, head_product.fast_head(model, given):
                patch.setattr(head_product, "by_onednn", spy)
                torch.testing.assert_close(model.lm_head(hidden[rows]), expected)
        assert "packed" not in vars(model.lm_head)
        return True in used

    assert packed.reserve(model) == model.lm_head.weight.nbytes and packed.reserve(model)
    kept = packed._weight
    assert uses_packed(9) and not uses_packed(2) and not uses_packed(9, None) and packed._weight is kept
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    assert uses_packed(9) and packed._weight is not kept
    seconds["packed"] = 3.0
    assert not uses_packed(9, slower := head_product.PackedHead()) and slower.reserve(model) == 0
    seconds["packed"] = 1.0
    monkeypatch.setattr(head_product, "MOST_PACKED", 1)
    assert not uses_packed(9)
