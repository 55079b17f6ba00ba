"""``deploy=True`` of models with images: tokens of one process, from several threads, and errors of a tower."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from oslo_models import AutoModelForImageTextToText
from oslo_models.deploy import EngineError

from support import zoo
from support.reference import reference_model


@pytest.mark.drawn(2)
@pytest.mark.parametrize("sizes", [(2, 1, "weights"), (2, 1, "images"), (1, 2, "weights")])
@pytest.mark.parametrize("model_type", ["llava", "qwen2_5_vl"])
def test_deployed_model_reads_images(tmp_path: Path, forked: None, model_type: str, sizes: Any, seed: int) -> None:
    name, config = zoo.main_head(model_type), zoo.config(model_type)
    full = reference_model(name, config, seed).eval()
    full.save_pretrained(tmp_path)
    batches = [zoo.batch(name, config, seed + number) for number in range(4)]
    prompts = [{key: value for key, value in batch.items() if key != "labels"} for batch in batches]
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}
    expected = [full.generate(**prompt, **options) for prompt in prompts]
    tp, pp, divides = sizes
    load = AutoModelForImageTextToText.from_pretrained_with_parallel
    given = {"deploy": True, "dtype": torch.float64, "tower_parallel": divides}
    with load(tmp_path, tp, pp, **given) as model, ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda prompt: model.generate(**prompt, **options), prompts))
        assert all(torch.equal(own, tokens) for own, tokens in zip(found, expected, strict=True))
        joins = "mm_encoder_outputs" in zoo.parameters_of_forward(name)
        assert model.can_join(**prompts[0], **options) == joins and "a running batch" in model.describe_batch()
        before = model.reused_prompt_tokens
        for _ in range(2):  # other rows may have taken the slots of the first ones
            assert torch.equal(model.generate(**prompts[0], **options), expected[0])
        assert (model.reused_prompt_tokens > before) == joins
        wrong = {**prompts[0], "pixel_values": prompts[0]["pixel_values"][:, 1:]}
        with pytest.raises((RuntimeError, ValueError)) as caught:
            model.generate(**wrong, **options)
        assert not isinstance(caught.value, EngineError)
        assert torch.equal(model.generate(**prompts[0], **options), expected[0])
