"""`lifted_casts` leaves no float32 in a float64 model, and changes nothing in others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from support.float64 import lifted_casts

SMALL: dict[str, Any] = {"vocab_size": 61, "bos_token_id": 1, "eos_token_id": 2}
CONFIGS = {
    "llama": lambda: hf.LlamaConfig(
        hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, **SMALL
    ),
    "gptj": lambda: hf.GPTJConfig(n_embd=24, n_layer=2, n_head=4, rotary_dim=4, n_positions=32, **SMALL),
    "gpt_neo": lambda: hf.GPTNeoConfig(
        hidden_size=24, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]], window_size=4, **SMALL
    ),
    "t5": lambda: hf.T5Config(
        d_model=24, d_kv=6, d_ff=40, num_layers=2, num_heads=4, decoder_start_token_id=0, **SMALL
    ),
}


class _Narrowings(TorchDispatchMode):
    """Records every operation from float64 to float32, and every other operation with a float32 result."""

    def __init__(self) -> None:
        super().__init__()
        self.lost: list[str] = []
        self.float32: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        inputs = {leaf.dtype for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.dtype == torch.float32:
                self.float32.append(tuple(leaf.shape))
                if torch.float64 in inputs:
                    self.lost.append(str(func))
        return out


def _model(name: str, dtype: torch.dtype = torch.float32) -> hf.PreTrainedModel:
    torch.manual_seed(0)
    auto = hf.AutoModelForSeq2SeqLM if name == "t5" else hf.AutoModelForCausalLM
    model: hf.PreTrainedModel = auto.from_config(CONFIGS[name](), attn_implementation="eager", dtype=dtype)
    return model.eval()


def _step(model: hf.PreTrainedModel) -> Iterator[Tensor]:
    """Yield the loss and the gradients for a left-padded batch."""
    ids = torch.arange(3, 21).reshape(2, 9)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    loss = model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss
    yield loss
    yield from torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad], allow_unused=True)


def _watch(model: hf.PreTrainedModel, lifted: bool) -> _Narrowings:
    with _Narrowings() as seen, lifted_casts() if lifted else nullcontext():
        for value in _step(model):
            assert value is None or value.isfinite().all()
    return seen


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("how", ["dtype", "double"])
def test_lifted_casts_leave_no_float32_in_a_float64_model(name: str, how: str) -> None:
    model = _model(name, torch.float64) if how == "dtype" else _model(name).double()
    seen = _watch(model, lifted=True)
    assert not seen.lost
    if name != "llama":  # Llama makes its rotary tables in float32
        assert not [shape for shape in seen.float32 if len(shape) > 2]


def test_float64_model_without_lifted_casts_computes_in_float32() -> None:
    """Show that the test above can fail."""
    model = _model("gptj", torch.float64)
    assert _watch(model, lifted=False).lost


def test_lifted_casts_make_a_step_exact() -> None:
    """A model without inner casts matches a model with lifted casts; a model with casts differs slightly."""
    model = _model("gptj", torch.float64)
    plain = list(_step(model))
    with lifted_casts():
        exact = list(_step(model))
        again = list(_step(model))
    for a, b, c in zip(plain, exact, again, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6, check_dtype=False)
        torch.testing.assert_close(b, c, rtol=0, atol=0)
    assert (plain[0] - exact[0]).abs() > 1e-12


def test_lifted_casts_leave_other_dtypes_alone() -> None:
    for name in CONFIGS:
        model = _model(name)
        plain = list(_step(model))
        with lifted_casts():
            lifted = list(_step(model))
        for a, b in zip(plain, lifted, strict=True):
            assert (a is b is None) or torch.equal(a, b)


@pytest.mark.parametrize(
    "cast",
    [
        lambda x: x.float(),
        lambda x: x.to(torch.float32),
        lambda x: x.to(dtype=torch.float32),
        lambda x: x.to("cpu", torch.float32),
        lambda x: x.to(torch.zeros(1)),
        lambda x: x.type(torch.float32),
        lambda x: x.type_as(torch.zeros(1)),
        lambda x: F.softmax(x, dim=-1, dtype=torch.float32),
        lambda x: F.log_softmax(x, dim=-1, dtype=torch.float32),
        lambda x: torch.softmax(x, -1, torch.float32),
        lambda x: x.softmax(-1, dtype=torch.float32),
        lambda x: x.mean(-1, dtype=torch.float32),
        lambda x: x @ torch.ones(3, 2),
        lambda x: torch.ones(2, 3) @ x.t(),
    ],
)
def test_lifted_casts_cover_every_way_to_cast(cast: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(2, 3, dtype=torch.float64)
    with lifted_casts():
        assert cast(x).dtype == torch.float64
        assert x.to(torch.float16).dtype == torch.float16
        assert torch.ones(2, dtype=torch.int64).float().dtype == torch.float32
        assert torch.finfo(x.dtype).min == torch.finfo(torch.float64).min
