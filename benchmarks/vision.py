"""The runner of cases about models of text and images."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.definitions import Peer, Result


def text_and_images(
    peer: Peer, cls: str, checkpoint: Path, tiny: Path, *, batch: int, prompt: int, new: int, timed: int
) -> Result:
    """First tokens after one and after four images, decoding, and steps of AdamW on rows of one image.

    Each figure is the median of ``timed`` runs after a warm-up run.

    Args:
        batch: rows of a training step.
        prompt: tokens of text beside the images.
        new: generated tokens. Decoding excludes the first one.
    """
    import torch

    model = peer.load(cls, checkpoint).eval()
    metrics, tokens = {}, list[int]()
    for name, images in (("one image", 1), ("four images", 4)):
        given = rows_with_images(model.config, 1, images, prompt)
        options = {**given, "do_sample": False, "pad_token_id": 0}

        def first(options: dict[str, Any] = options) -> Any:
            return model.generate(**options, max_new_tokens=1)

        def decoded(options: dict[str, Any] = options) -> Any:
            return model.generate(**options, max_new_tokens=new)

        seconds, _ = _median(first, timed)
        metrics[f"first token, {name}"] = 1000 * seconds
        if images == 1:
            whole, ids = _median(decoded, timed)
            tokens = ids[0, -new:].tolist()
            metrics["generation"] = (new - 1) / (whole - seconds)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    given = rows_with_images(model.config, batch, 1, prompt)
    labels = given["input_ids"].masked_fill(given["input_ids"] == model.config.image_token_id, -100)
    losses = []

    def step() -> None:
        loss = model(**given, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))

    metrics["training step"], _ = _median(step, timed)
    return Result(metrics, [*map(float, tokens), *losses[:2]])


def rows_with_images(config: Any, rows: int, images: int, prompt: int) -> dict[str, Any]:
    """Return rows of images, followed by random tokens. The same in every process."""
    import torch

    generator = torch.Generator().manual_seed(1)
    side, patch = config.vision_config.image_size, config.vision_config.patch_size
    text = torch.randint(1, config.image_token_id, (rows, prompt), generator=generator)
    placeholders = torch.full((rows, images * (side // patch) ** 2), config.image_token_id)
    ids = torch.cat([text[:, :4], placeholders, text[:, 4:]], 1)
    pixels = torch.randn(rows * images, 3, side, side, generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels}


def _median(call: Callable[[], Any], timed: int) -> tuple[float, Any]:
    """Return the median seconds of ``timed`` calls after a warm-up call, and the last result."""
    seconds = []
    for _ in range(timed + 1):
        start = time.perf_counter()
        result = call()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:]), result
