"""One rank of a certificate: loads its part of the model, and compares it with the reference."""

from __future__ import annotations

import filecmp
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from oslo_models import registry
from oslo_models.checkpoint import CheckpointError
from oslo_models.distributed.object_exchange import gather_objects
from oslo_models.pipeline.sharded_model import ShardedModel
from oslo_models.planning.reference import generation_options

SMALL = 1e-3
"""Gradients are compared with at least this part of the largest gradient: smaller ones are rounding errors."""


def main(scratch: Path) -> None:
    """Write the checks of this rank."""
    order = json.loads((scratch / "order.json").read_text())
    cls: Any = registry.find(order["cls"])
    report: dict[str, Any] = {}
    try:
        model = cls.from_pretrained_with_parallel(
            order["directory"],
            order["tp"],
            order["pp"],
            expert_parallel_size=order["ep"],
            dtype=order["dtype"],
            **order["unequal"],
            **order["options"],
        ).eval()
    except CheckpointError as error:
        report["refused"] = " ".join(str(error).split())
        rank = 0
    else:
        rank = model.mesh.world.rank
        report["checks"] = list(compare(model, scratch, order["bound"]))
    (scratch / f"rank-{rank}.json").write_text(json.dumps(report))


def compare(model: ShardedModel, scratch: Path, bound: float) -> Iterator[tuple[str, bool, str]]:
    """Yield name, verdict and figures of each check. This is a collective of all ranks of the model."""
    reference = torch.load(scratch / "reference.pt", weights_only=True)
    batch = reference["batch"]
    staged = model.stage is not None
    losses = []
    for output in model(**batch) if staged else [model(**batch)]:
        output.loss.backward()
        losses.append(output.loss.detach())
    difference = _relative(torch.stack(losses).sum().cpu(), reference["loss"])
    yield (
        "loss",
        difference <= bound,
        f"{float(reference['loss']):.6f}, differs by {difference:.1e} (bound {bound:.0e})",
    )
    yield _gradients(model, scratch, bound)
    if reference["tokens"] is not None:
        prompt = {name: value for name, value in batch.items() if name != "labels"}
        yield _tokens(model.generate(**prompt, **generation_options(model)).cpu(), reference["tokens"])
    model.save_pretrained_with_parallel(scratch / "merged", save_with_merging=True)
    gather_objects(model.mesh.world, None)  # all ranks have written
    yield _files(scratch / "merged", scratch / "plain")


def _gradients(model: ShardedModel, scratch: Path, bound: float) -> tuple[str, bool, str]:
    names = json.loads((scratch / "names.json").read_text())
    floor = SMALL * names["largest"]
    full_names = {} if model.stage is None else model.stage.full_names
    worst, where, count = 0.0, "", 0
    with safe_open(scratch / "gradients.safetensors", "pt") as file:
        known = set(file.keys())
        for name, param in model.named_parameters(remove_duplicate=False):
            full = names["aliases"][full_names.get(name, name)]
            count += 1
            if (full in known) != (param.grad is not None):
                return "gradients", False, f"only one of the models has a gradient of {full}"
            if param.grad is None:
                continue
            layout = model.layouts[name]
            expected = layout.shard(file.get_tensor(full), model.mesh.rank_in(layout))
            difference = _relative(param.grad.cpu(), expected, floor)
            if not difference <= worst:
                worst, where = difference, full
    rank = model.mesh.world.rank
    figures = f"{count} parameters of rank {rank}, differ by {worst:.1e} (bound {bound:.0e}), most in {where}"
    return "gradients", worst <= bound, figures


def _relative(found: Tensor, expected: Tensor, floor: float = 0.0) -> float:
    """Return the largest difference, relative to the largest expected element."""
    if found.shape != expected.shape:
        return float("inf")
    if not found.numel():
        return 0.0
    scale = max(float(expected.abs().max()), floor)
    difference = float((found.double() - expected.double()).abs().max())
    return difference if not scale else difference / scale


def _tokens(found: Tensor, expected: Tensor) -> tuple[str, bool, str]:
    if torch.equal(found, expected):
        return "greedy tokens", True, f"{expected.numel()} tokens are equal"
    if found.shape != expected.shape:
        return "greedy tokens", False, f"shape {tuple(found.shape)} in place of {tuple(expected.shape)}"
    first = int((found != expected).any(0).nonzero()[0])
    return "greedy tokens", False, f"differ from position {first} on"


def _files(merged: Path, plain: Path) -> tuple[str, bool, str]:
    """Compare the files with weights byte for byte."""
    names = {file.name for folder in (merged, plain) for file in folder.glob("*.safetensors*")}
    wrong = sorted(name for name in names if not _same(merged / name, plain / name))
    if wrong:
        return "merged files", False, f"differ from the files of plain transformers: {', '.join(wrong)}"
    return "merged files", True, f"{len(names)} files equal the files of plain transformers byte for byte"


def _same(one: Path, other: Path) -> bool:
    return one.is_file() and other.is_file() and filecmp.cmp(one, other, shallow=False)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
