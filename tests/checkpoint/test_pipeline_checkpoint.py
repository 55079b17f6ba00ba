"""Checkpoints of models on (tensor, pipeline) meshes load on any other mesh and merge to the files of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedConfig

from oslo_models import registry

from support import pipelines, zoo
from support.pipelines import model_layout, stage_parameters
from support.pool import Pool, WorkerError
from support.reference import full_parameters

VARIANTS = [
    *("bert", "gpt2", "gpt_neo", "gptj", "llama", "t5"),
    *("bert-untied", "gpt2-untied", "gpt_neo-untied", "gptj-tied", "llama-untied", "llama-one-kv", "t5-gated-untied"),
]
SIZES = [(1, 4), (3, 1)]  # test_resharding covers tensor parallelism alone


def save_whole(name: str, config: PreTrainedConfig, seed: int, folder: Path) -> dict[str, Tensor]:
    """Save a transformers checkpoint with random changes to all initial parameters; return its parameters."""
    torch.manual_seed(seed)
    model = zoo.original(name)(config)
    for param in model.parameters():
        param.data.add_(torch.randn_like(param) * 0.1)
    model.save_pretrained(folder)
    return full_parameters(model)


def differ_from_whole(model: Any, weights: dict[str, Tensor]) -> list[str]:
    """Return the names of local parameters that differ from their shards of the full parameters in any bit."""
    return [
        name
        for name, param in stage_parameters(model).items()
        if not torch.equal(model_layout(model, name).shard(weights[name], model.mesh.tp.rank), param.detach())
    ]


def check_files(model: Any, folder: Path, safe: bool) -> None:
    """The file of this rank holds its parameters, each once, and nothing else."""
    tp, pp = model.mesh.tp.rank, model.mesh.pp.rank
    path = folder / f"pytorch_model_tp={tp}_pp={pp}.{'safetensors' if safe else 'bin'}"
    if safe:
        from safetensors.torch import load_file

        found = load_file(path)
    else:
        found = torch.load(path, weights_only=True)
    own = stage_parameters(model)
    assert found.keys() <= own.keys(), found.keys() - own.keys()
    assert all(torch.equal(found[name], own[name].detach()) for name in found)
    stored = {id(own[name]) for name in found}
    assert stored == {id(param) for param in own.values()}
    sizes = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in found.values()}
    expected = sum(param.numel() * param.element_size() for param in model.parameters())
    assert sum(sizes.values()) == expected
    assert path.stat().st_size < expected + 600 * len(found) + 8192


def load_and_save(
    name: str, source: Path, target: Path, tp: int, pp: int, weights: dict[str, Tensor], safe: bool | None
) -> None:
    cls: Any = registry.find(name)
    model = cls.from_pretrained_with_parallel(source, tp, pp)
    assert not differ_from_whole(model, weights)
    model.save_pretrained_with_parallel(target, safe_serialization=safe)
    check_files(model, target, bool(safe))
    model.save_pretrained_with_parallel(f"{target}-merged", save_with_merging=True)
    names = {path.name for path in target.iterdir()}
    suffix = "safetensors" if safe else "bin"
    split = {f"pytorch_model_tp={t}_pp={p}.{suffix}" for t in range(tp) for p in range(pp)}
    assert {file for file in names if file.startswith("pytorch_model")} == split


@pytest.mark.drawn(2)
@pytest.mark.stacks
@pytest.mark.parametrize("variant", VARIANTS)
def test_any_mesh_loads_the_checkpoint_of_any_other(pool: Pool, tmp_path: Path, variant: str, seed: int) -> None:
    name, config = zoo.lm_head(variant), pipelines.config(variant)
    weights = save_whole(name, config, seed, tmp_path / "whole")
    pool.run(4, load_and_save, name, tmp_path / "whole", tmp_path / "2x2", 2, 2, weights, None)
    sizes = SIZES if variant in zoo.FOUNDING else [(1, 4)]
    for tp, pp in sizes:
        pool.run(tp * pp, load_and_save, name, tmp_path / "2x2", tmp_path / f"{tp}x{pp}", tp, pp, weights, None)
    pool.run(3, load_and_save, name, tmp_path / "1x4", tmp_path / "again", 3, 1, weights, True)
    pool.run(2, load_and_save, name, tmp_path / "again", tmp_path / "at-last", 1, 2, weights, None)
    whole = (tmp_path / "whole" / "model.safetensors").read_bytes()
    for made in ["2x2", *(f"{tp}x{pp}" for tp, pp in sizes), "again", "at-last"]:
        merged = tmp_path / f"{made}-merged"
        assert (merged / "model.safetensors").read_bytes() == whole, made
    model, info = zoo.original(name).from_pretrained(merged, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"], info
    assert all(torch.equal(value, weights[key]) for key, value in full_parameters(model).items())
    saved, given = (json.loads((tmp_path / folder / "config.json").read_text()) for folder in ("at-last", "whole"))
    assert saved == given


def parts(name: str, tp: int, pp: int, source: Any, options: dict[str, Any]) -> list[tuple[str, Any, int, Tensor]]:
    """Return the full-model name, layout, tp rank and local shard of each local parameter."""
    cls: Any = registry.find(name)
    make = cls.from_pretrained_with_parallel if isinstance(source, Path) else cls.from_config_with_parallel
    model = make(source, tp, pp, **options)
    return [
        (key, model_layout(model, key), model.mesh.tp.rank, param.detach().clone())
        for key, param in stage_parameters(model).items()
    ]


def check_sizes(pool: Pool, name: str, source: Any, options: dict[str, Any]) -> dict[str, Tensor]:
    """Check that the model is the same at all sizes; return its parameters."""
    whole = {key: part for key, _, _, part in parts(name, 1, 1, source, options)}
    for tp, pp in ((1, 4), (2, 2), (3, 2)):
        found: set[str] = set()
        for held in pool.run(tp * pp, parts, name, tp, pp, source, options):
            for key, layout, rank, part in held:
                found.add(key)
                assert torch.equal(layout.shard(whole[key], rank), part), (tp, pp, key)
        assert found == whole.keys()
    return whole


@pytest.mark.drawn(2)
@pytest.mark.parametrize("variant", [*zoo.FOUNDING, "gpt2-untied", "t5-gated-untied"])
def test_from_config_seed_gives_the_same_weights_on_every_mesh(pool: Pool, variant: str, seed: int) -> None:
    for name in (zoo.lm_head(variant), pipelines.heads_with_loss(variant)[-1]):
        first = check_sizes(pool, name, pipelines.config(variant), {"seed": 7})
        other = parts(name, 1, 1, pipelines.config(variant), {"seed": 8})
        assert any(not torch.equal(first[key], part) for key, _, _, part in other)


@pytest.mark.parametrize("variant", zoo.FOUNDING)
def test_missing_head_is_initialised_by_the_seed_on_every_mesh(
    pool: Pool, tmp_path: Path, variant: str, seed: int
) -> None:
    """A checkpoint of the base model under another head, which is initialised by the seed at every size."""
    weights = save_whole(zoo.base(variant), pipelines.config(variant), seed, tmp_path)
    name = next(head for head in pipelines.heads_with_loss(variant) if "SequenceClassification" in head)
    found = check_sizes(pool, name, tmp_path, {"seed": 7})
    loaded = [
        key for key in found if any(key.endswith(own) and torch.equal(found[key], weights[own]) for own in weights)
    ]
    assert 0 < len(found) - len(loaded) <= 4


@pytest.mark.parametrize("variant", ["gpt2", "gptj", "llama-untied", "t5"])
def test_resize_token_embeddings_on_stages(pool: Pool, tmp_path: Path, variant: str, seed: int) -> None:
    """Copies of the embeddings on several stages get the same new rows."""
    name, config = zoo.lm_head(variant), pipelines.config(variant)
    save_whole(name, config, seed, tmp_path)
    found = check_sizes(pool, name, tmp_path, {"resize_token_embeddings": config.vocab_size + 9})
    assert sum(part.shape[0] == config.vocab_size + 9 for part in found.values()) >= 2


def load_on_two_stages(folder: Path) -> None:
    cls: Any = registry.find("T5ForConditionalGeneration")
    cls.from_pretrained_with_parallel(folder, 1, 2)


def test_tied_weights_with_two_values_are_rejected_on_stages(pool: Pool, tmp_path: Path, seed: int) -> None:
    """transformers unties them in one process, and says so; stages would silently use the first value for both."""
    torch.manual_seed(seed)
    model: Any = zoo.original("T5ForConditionalGeneration")(zoo.config("t5"))
    model.save_pretrained(tmp_path)
    state = {**model.state_dict()}
    state["decoder.embed_tokens.weight"] = state["shared.weight"] + 1
    (tmp_path / "model.safetensors").unlink()
    torch.save(state, tmp_path / "pytorch_model.bin")
    with pytest.raises(WorkerError, match="set tie_word_embeddings=False in its configuration"):
        pool.run(2, load_on_two_stages, tmp_path)
