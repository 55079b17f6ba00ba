"""A model of a few odd tensors, and ways to save and compare it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from oslo_models.checkpoint import CheckpointReader, open_checkpoint, save_checkpoint, verify_checkpoint
from oslo_models.checkpoint import gather as merging
from oslo_models.distributed.mesh import Axis, ParallelMesh
from oslo_models.distributed.object_exchange import agree
from oslo_models.sharding.layout import EvenSplit, GroupedHeads, Layout

HEADS = GroupedHeads(6, 2, 2)
ALONE = Axis("world", 0, (0,), None)
MANIFEST = "oslo_manifest.json"


def model(tp: int = 1, generation: int = 0) -> tuple[dict[str, Tensor], dict[str, Layout]]:
    """Full tensors of a small model, and how they divide over ``tp`` ranks."""
    generator = torch.Generator().manual_seed(generation)
    divisions: dict[str, Any] = {
        "wte.weight": ((11, 4), 0, (EvenSplit(11),)),
        "h.0.qkv": ((4, 20), 1, (HEADS.query, HEADS.key_value, HEADS.key_value)),
        "h.0.norm": ((4,), None, ()),
        "h.0.scale": ((), None, ()),
        "h.1.up": ((12, 4), 0, (EvenSplit(12),)),
        "h.1.down": ((4, 12), 1, (EvenSplit(12),)),
        "head.weight": ((11, 4), 0, (EvenSplit(11),)),
    }
    tensors = {name: torch.randn(shape, generator=generator) for name, (shape, _, _) in divisions.items()}
    tensors["h.1.up"] = tensors["h.1.up"].bfloat16()
    tensors["head.weight"] = tensors["wte.weight"]
    cut = {
        name: Layout(shape) if dim is None else Layout.sharded(shape, dim, splits, tp)
        for name, (shape, dim, splits) in divisions.items()
    }
    return tensors, cut


TIED = {"head.weight": "wte.weight"}


def with_full_stage_outputs(name: str, pp: int) -> int:
    return 0 if pp == 1 or name.startswith(("wte", "h.0")) else pp - 1


def local(mesh: ParallelMesh, generation: int = 0) -> tuple[dict[str, Tensor], dict[str, Layout]]:
    """The local shards of the model on a rank of the mesh."""
    tensors, cut = model(mesh.tp.size, generation)
    mine = [name for name in tensors if with_full_stage_outputs(name, mesh.pp.size) == mesh.pp.rank]
    parts = {name: cut[name].shard(tensors[name], mesh.tp.rank).clone() for name in mine}
    if len(parts.keys() & {"wte.weight", "head.weight"}) == 2:
        parts["head.weight"] = parts["wte.weight"]
    return parts, {name: cut[name] for name in mine}


def write_config(folder: Path) -> None:
    (folder / "config.json").write_text("{}")


def save(how: str, directory: Path, mesh: ParallelMesh | None = None, generation: int = 0, **kwargs: Any) -> None:
    mesh = mesh or ParallelMesh()
    kwargs = {"tied": TIED, "files": write_config, **kwargs}
    save_checkpoint(directory, *local(mesh, generation), mesh, merging=how == "merged", **kwargs)


def assert_holds(
    reader: CheckpointReader, expected: Mapping[str, Tensor], without: frozenset[str] = frozenset()
) -> None:
    assert reader.tensors.keys() == expected.keys() - without
    for name, info in reader.tensors.items():
        assert (info.shape, info.dtype) == (tuple(expected[name].shape), expected[name].dtype)
        for tp in (1, 2, 3):
            layout = model(tp)[1][name]
            for rank in range(tp):
                part = reader.read(name, layout, rank)
                assert part.dtype == info.dtype and torch.equal(part, layout.shard(expected[name], rank)), (
                    name,
                    tp,
                    rank,
                )


def hidden(folder: Path) -> list[Path]:
    return [*folder.glob(".*"), *folder.glob("*/.*")]


def tiny_gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=61, n_positions=16, n_embd=16, n_layer=2, n_head=2))


def save_on_ranks(how: str, directory: Path, tp: int, pp: int = 1, kwargs: dict[str, Any] | None = None) -> None:
    with patch.object(merging, "_BLOCK", 40):  # a row or two, so that tensors travel in several blocks
        save(how, directory, ParallelMesh(tp, pp), **(kwargs or {}))


def open_and_verify(directory: Path) -> None:
    mesh = ParallelMesh()
    with agree(mesh.world, "opening"):
        reader = open_checkpoint(directory)
    verify_checkpoint(reader, mesh.world)
