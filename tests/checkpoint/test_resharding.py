"""Tensor-parallel checkpoints of every class load at other sizes bit for bit, including split files of OSLO 1."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from oslo_models import checkpoint, registry
from oslo_models.checkpoint.manifest import read_manifest

from support import zoo
from support.pool import Pool

VARIANTS = ["bert", "gpt2", "gpt_neo", "gptj", "llama", "llama-9-heads", "llama-one-kv", "t5", "t5-gated-untied"]

WIDTHS = {"deepseek_v4": {"moe_intermediate_size": 16}}
"""Expert widths: grouped products in float32 can address the rows of their shards."""


def load_and_save(
    source: Path,
    tp: int,
    names: list[str],
    split: Path | None = None,
    merged: Path | None = None,
    shares: list[int] | None = None,
) -> None:
    """Load these classes from ``source``, compare with the original, and save below the given folders."""
    for name in names:
        cls: Any = registry.find(name)
        model = cls.from_pretrained_with_parallel(source / name, tp, tensor_parallel_shares=shares)
        original: dict[str, Tensor] = torch.load(source.parent / "original" / f"{name}.pt")
        for key, param in model.named_parameters(remove_duplicate=False):
            assert torch.equal(param.detach(), model.layouts[key].shard(original[key], model.mesh.tp.rank)), (name, key)
        share = [math.prod(model.layouts[key].local_shape(model.mesh.tp.rank)) for key, _ in model.named_parameters()]
        assert sum(param.numel() for param in model.parameters()) == sum(share)
        if split:
            model.save_pretrained_with_parallel(split / name)
        if merged:
            model.save_pretrained_with_parallel(merged / name, save_with_merging=True)


@pytest.mark.drawn(2)
@pytest.mark.stacks
@pytest.mark.parametrize("variant", [*VARIANTS, pytest.param("deepseek_v4", marks=pytest.mark.zoo)])
def test_split_checkpoint_of_four_ranks_loads_at_other_sizes(
    pool: Pool, tmp_path: Path, variant: str, seed: int
) -> None:
    """Load the language model at every size, and each other class of a family at one size."""
    main = zoo.lm_head(variant)
    names = zoo.heads(variant) if variant in zoo.FOUNDING else [main]
    for name in names:
        write_original(tmp_path, name, zoo.config(variant, **WIDTHS.get(variant, {})), seed)
    pool.run(4, load_and_save, tmp_path / "whole", 4, names, tmp_path / "four", tmp_path / "four-merged")
    taken = {tp: sorted({main, *names[tp - 1 :: 3]}) for tp in (1, 2, 3)}
    for tp, some in taken.items():
        pool.run(tp, load_and_save, tmp_path / "four", tp, some, None, tmp_path / f"at-{tp}-merged")
    for merged, some in (("four-merged", names), *((f"at-{tp}-merged", taken[tp]) for tp in taken)):
        for name in some:
            expected = safetensors.torch.load_file(tmp_path / "whole" / name / "model.safetensors")
            found = safetensors.torch.load_file(tmp_path / merged / name / "model.safetensors")
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[key], expected[key]) for key in expected), (merged, name)
            _, info = zoo.original(name).from_pretrained(tmp_path / merged / name, output_loading_info=True)
            assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"], info


@pytest.mark.drawn(1)
@pytest.mark.parametrize("variant", ["llama", "llama-one-kv", "gpt2", "t5", "mixtral"])
def test_split_checkpoint_of_unequal_shares_loads_at_other_sizes(
    pool: Pool, tmp_path: Path, variant: str, seed: int
) -> None:
    """The files state their ranges. Without a manifest, the shares that are passed say how they were split."""
    name, folder = zoo.lm_head(variant), tmp_path / "shares"
    sizes = {"intermediate_size": 40} if variant == "mixtral" else {}  # rows that grouped products can address
    write_original(tmp_path, name, zoo.config(variant, **sizes), seed)
    pool.run(3, load_and_save, tmp_path / "whole", 3, [name], folder, tmp_path / "merged", [2, 1, 1])
    manifest = read_manifest(folder / name / checkpoint.MANIFEST)
    assert manifest["tp_shares"] == [2, 1, 1]
    files = [path.stat().st_size for path in sorted((folder / name).glob("pytorch_model_tp=*"))]
    assert files[0] > 1.2 * files[2], files
    whole, merged = (path / name / "model.safetensors" for path in (tmp_path / "whole", tmp_path / "merged"))
    assert whole.read_bytes() == merged.read_bytes()
    pool.run(2, load_and_save, folder, 2, [name], None, None, [1, 3])
    pool.run(3, load_and_save, folder, 3, [name])
    (folder / name / checkpoint.MANIFEST).unlink()
    pool.run(3, load_and_save, folder, 3, [name], None, None, [2, 1, 1])


def write_original(folder: Path, name: str, config: Any, seed: int) -> None:
    """Save a model with transformers, and its weights for the comparison in `load_and_save`."""
    (folder / "original").mkdir(exist_ok=True)
    torch.manual_seed(seed)
    model = zoo.original(name)(config)
    for param in model.parameters():
        param.data.add_(torch.randn_like(param) * 0.1)
    model.save_pretrained(folder / "whole" / name)
    torch.save(model.state_dict(), folder / "original" / f"{name}.pt")


@pytest.mark.drawn(2)
@pytest.mark.parametrize("variant", ["llama", "llama-one-kv", "falcon", "falcon-one-kv", "gpt_bigcode-many-kv"])
@pytest.mark.parametrize("saved_at", [3, 4])
def test_oslo_1_split_files_load_without_a_manifest(
    pool: Pool, tmp_path: Path, variant: str, saved_at: int, seed: int
) -> None:
    """The files do not describe replicated or interleaved key-value heads."""
    name = zoo.lm_head(variant)
    write_original(tmp_path, name, zoo.config(variant), seed)
    pool.run(saved_at, load_and_save, tmp_path / "whole", saved_at, [name], tmp_path / "split")
    (tmp_path / "split" / name / "oslo_manifest.json").unlink()
    for tp in (1, 2, 3):
        pool.run(tp, load_and_save, tmp_path / "split", tp, [name])


def _refused(directory: Path, tp: int) -> str:
    cls = registry.find("LlamaForCausalLM")
    with pytest.raises(checkpoint.CheckpointError) as caught:
        cls.from_pretrained_with_parallel(directory, tp, num_key_value_heads=6)  # type: ignore[attr-defined]
    return str(caught.value)


def test_oslo_1_split_files_that_contradict_the_config_are_rejected(pool: Pool, tmp_path: Path, seed: int) -> None:
    """Existing weights are never reported as newly initialised."""
    name = zoo.lm_head("llama")
    write_original(tmp_path, name, zoo.config("llama"), seed)
    pool.run(3, load_and_save, tmp_path / "whole", 3, [name], tmp_path / "split")
    (tmp_path / "split" / name / "oslo_manifest.json").unlink()
    for tp in (1, 2):
        for message in pool.run(tp, _refused, tmp_path / "split" / name, tp):
            assert "self_attn.k_proj.weight: (" in message and "pytorch_model_tp=2_pp=0.bin" in message
            assert "config.json" in message and "over 3 ranks it is" in message
            assert "anew" not in message and "ignore_mismatched_sizes" not in message


def _grow(directory: Path, size: int) -> tuple[Tensor, Tensor]:
    cls = registry.find("LlamaForCausalLM")
    model = cls.from_pretrained_with_parallel(  # type: ignore[attr-defined]
        directory, tensor_parallel_size=torch.distributed.get_world_size(), resize_token_embeddings=size
    )
    merged = directory.parent / f"grown-{torch.distributed.get_world_size()}"
    model.save_pretrained_with_parallel(merged, save_with_merging=True)
    tensors = safetensors.torch.load_file(merged / "model.safetensors")
    assert model.config.vocab_size == size
    return tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]


def test_resize_token_embeddings_is_the_same_at_every_tensor_parallel_size(
    pool: Pool, tmp_path: Path, seed: int
) -> None:
    torch.manual_seed(seed)
    model = zoo.original("LlamaForCausalLM")(zoo.config("llama-untied"))
    model.save_pretrained(tmp_path / "whole")
    for ranks in (1, 2, 3):
        for embedding, head in pool.run(ranks, _grow, tmp_path / "whole", 110):
            for grown, old in ((embedding, model.model.embed_tokens.weight), (head, model.lm_head.weight)):
                assert torch.equal(grown[:101], old)
                torch.testing.assert_close(grown[101:], old.mean(0).expand(9, -1), rtol=1e-6, atol=1e-7)


def _grown_bias(directory: Path) -> Tensor:
    cls = registry.find("BartForConditionalGeneration")
    model = cls.from_pretrained_with_parallel(directory, 2, resize_token_embeddings=110)  # type: ignore[attr-defined]
    assert model(**zoo.batch("BartForConditionalGeneration", model.config, 0)).loss.isfinite()
    return model.final_logits_bias


def test_resize_token_embeddings_grows_the_logits_bias(pool: Pool, tmp_path: Path, seed: int) -> None:
    torch.manual_seed(seed)
    model = zoo.original("BartForConditionalGeneration")(zoo.config("bart"))
    model.final_logits_bias.normal_()
    model.save_pretrained(tmp_path)
    for grown in pool.run(2, _grown_bias, tmp_path):
        assert torch.equal(grown[:, :101], model.final_logits_bias) and not grown[:, 101:].any()


def _seeded(sizes: dict[str, int]) -> dict[str, Tensor]:
    cls = registry.find("T5ForConditionalGeneration")
    model = cls.from_config_with_parallel(zoo.config("t5"), seed=7, **sizes)  # type: ignore[attr-defined]
    aliases = model.stage.full_names if model.stage else {}
    return {
        aliases.get(name, name): (model.layouts[name], model.mesh.tp.rank, param.detach().clone())  # type: ignore[misc]
        for name, param in model.named_parameters()
    }


def test_from_config_seed_gives_the_same_gpt2_weights_at_every_size(pool: Pool) -> None:
    (whole,) = pool.run(1, _seeded, {})
    for tp, pp in ((2, 1), (3, 1), (1, 2), (2, 2), (1, 4)):
        for part in pool.run(tp * pp, _seeded, {"tensor_parallel_size": tp, "pipeline_parallel_size": pp}):
            for name, (layout, rank, local) in part.items():
                full = whole.get(name, whole["shared.weight"])[2]  # on later stages the tied head has its own name
                assert torch.equal(layout.shard(full, rank), local), (tp, pp, name)
