"""Models to fuse, their reference steps, and how rounding errors are measured."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any
from unittest import mock

from torch import Tensor

from oslo_kernels import linear as kernel
from oslo_kernels import split_product
from oslo_models import GPT2LMHeadModel
from oslo_models.fusion.rules import fusion_candidates
from oslo_models.fusion.swap import Fusion

from support import zoo
from support.reference import Step, reference_step

LOGITS = ("logits", "prediction_logits", "entity_logits")

GELU_NEW = {"gpt2": {}, "bert": {"hidden_act": "gelu_new"}, "t5": {"feed_forward_proj": "gated-gelu"}}


@lru_cache(maxsize=64)
def fusion_reference(variant: str, name: str, seed: int) -> Step:
    """The step of a model with an activation that `fuse` replaces."""
    config = zoo.config_of(name, zoo.config(variant, **GELU_NEW.get(variant, {})))
    return reference_step(name, config, seed)


def relative_error(own: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    """The norm of all errors together over the norm of the exact values."""
    error = sum((own[name].double() - exact[name].double()).pow(2).sum() for name in exact)
    return float((error / sum(exact[name].double().pow(2).sum() for name in exact)).sqrt())


def gpt2(seed: int = 0, **options: Any) -> Any:
    return GPT2LMHeadModel.from_config_with_parallel(zoo.config("gpt2"), seed=seed, **options)


def as_on_a_gpu(model: Any, backend: str = "triton") -> Any:
    """Replace the modules that are replaced on a GPU; on the CPU, their operations run in plain torch."""
    model._fusion = Fusion(backend)
    model._fusion.apply(model, fusion_candidates(model, backend), None)
    return model


def spy_on_few_rows(way: str = kernel.CPP) -> Any:
    """Record calls of the kernel for few rows, or of another implementation of a product."""
    name = {kernel.CPP: "_of_few_rows", kernel.ONEDNN: "by_onednn", kernel.SPLIT: "by_split"}[way]
    return mock.patch.object(kernel, name, wraps=getattr(kernel, name))


def tiles() -> Any:
    """Allow split bfloat16 products for all sizes on any processor, in plain C++ without tile units."""
    plain = split_product.unavailable_reason() is not None
    product = partial(split_product.product, plain=plain)
    return mock.patch.multiple(split_product, product=product, FEWEST_ROWS=1, unavailable_reason=lambda: None)
