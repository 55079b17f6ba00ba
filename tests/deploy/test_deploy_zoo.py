"""``deploy=True`` with two architectures of each kind, on one pair of workers."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from oslo_models import registry
from oslo_models.deploy import proxy as deploying

from support import deployment, zoo
from support.reference import reference_model

TYPES = {
    "decoders": ("falcon", "opt"),
    "encoders": ("electra", "roberta"),
    "encoder-decoders": ("bart", "fsmt"),
    "vision": ("clip", "vit"),
    "speech": ("hubert", "whisper"),
}


@pytest.mark.zoo
def test_deployed_architectures_answer_as_transformers(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines: list[Any] = []
    original = deploying.Engine

    def shared(ranks: int, threads: int, make: bytes, *more: Any) -> Any:
        if engines:
            engines[0].call("put", (make,))
            monkeypatch.setattr(engines[0], "start", lambda: None)
        else:
            engines.append(original(ranks, threads, pickle.dumps((deployment.Shelf, "holding", (make,), {})), *more))
        return engines[0]

    monkeypatch.setattr(deploying, "Engine", shared)
    served = []
    try:
        for name in [zoo.main_head(model_type) for kind in TYPES.values() for model_type in kind]:
            served.append(serve(name, tmp_path / name, seed))
    finally:
        for engine in engines:
            engine.close()
    assert len(served) == 10


def serve(name: str, folder: Path, seed: int) -> Any:
    """Deploy a class, and compare its methods with the transformers class."""
    model_type = next(kind for kind in registry.ARCHITECTURES if name in registry.names(kind))
    config = zoo.config(model_type)
    # CLIP multiplies the rounding of float32; transformers' FSMT computes nothing in float64.
    dtype = torch.float32 if model_type == "fsmt" else torch.float64
    expected = reference_model(name, config, seed, dtype).eval()
    expected.save_pretrained(folder)
    batch = zoo.batch(name, config, seed, dtype)
    cls: Any = registry.find(name)
    model = cls.from_pretrained_with_parallel(folder, tensor_parallel_size=2, deploy=True)
    with torch.no_grad():
        right = expected(**batch)
    answer = model(**batch)
    fields = [key for key, value in right.items() if isinstance(value, Tensor) and value.is_floating_point()]
    assert "logits" in fields or name == "CLIPModel"
    for key in fields:
        torch.testing.assert_close(answer[key], right[key], rtol=1e-5, atol=1e-6)
    if expected.can_generate():
        prompt = {key: batch[key] for key in (expected.main_input_name, "attention_mask") if key in batch}
        options = {"max_new_tokens": 5, "do_sample": False}
        assert torch.equal(model.generate(**prompt, **options), expected.generate(**prompt, **options))
    return model
