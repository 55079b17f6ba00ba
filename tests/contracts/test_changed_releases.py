"""Releases of transformers that differ from the checked ones: fused models still compute the same results."""

from __future__ import annotations

import inspect
import linecache
import textwrap
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache, StaticCache
from transformers.models.gpt2 import modeling_gpt2 as gpt2
from transformers.models.llama import modeling_llama as llama

import oslo_models
from oslo_kernels import decoder_block
from oslo_models import contracts
from oslo_models.cache_argument import cache_name
from oslo_models.contracts import checks
from oslo_models.contracts.sources import Sources
from oslo_models.fusion import known_layers, recorded_calls, self_check, small_blocks, verdicts
from oslo_models.fusion.decoder_blocks import BlockDecoding
from oslo_models.fusion.rules import fusion_candidates
from oslo_models.fusion.swap import Fusion

from support import zoo
from support.pool import Pool

Patch = pytest.MonkeyPatch
VERSION = transformers.__version__


@pytest.fixture(autouse=True)
def nothing_is_known() -> Iterator[None]:
    """Clear the caches: earlier tests may have compared the same functions, and later tests must not see changes."""
    caches = (checks._changed_layer, checks._broken)
    for each in caches:
        each.cache_clear()
    verdicts.forget()
    yield
    for each in caches:
        each.cache_clear()
    verdicts.forget()


WIDE: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 36, "n_head": 6, "n_inner": 600},
    "llama": {"num_attention_heads": 12, "num_key_value_heads": 6, "head_dim": 4, "intermediate_size": 600},
}
"""Sizes of blocks that the check cuts."""


def model_of(variant: str, dtype: torch.dtype = torch.float32, wide: bool = False, **options: Any) -> Any:
    """A model with attention far from uniform, so that mistakes in it show."""
    config = zoo.config(variant, **(WIDE[variant] if wide else {}))
    model = getattr(oslo_models, zoo.lm_head(variant)).from_config_with_parallel(config, seed=0, dtype=dtype, **options)
    with torch.no_grad():
        for param in model.parameters():
            if param.dim() > 1:
                param.mul_(8)
    return model.eval()


@torch.no_grad()
def tokens_of(model: Any) -> list[list[int]]:
    ids = torch.tensor([[5, 6, 7, 8, 9], [0, 0, 11, 12, 13]])
    mask = (ids > 0).long()
    return model.generate(ids, attention_mask=mask, max_new_tokens=8, min_new_tokens=8, do_sample=False).tolist()


def changed(function: Any, *edits: tuple[str, str]) -> Any:
    """Return a function of transformers with edited source; ``inspect`` can read the edited source."""
    original = inspect.unwrap(function)
    source = textwrap.dedent(inspect.getsource(original))
    for old, new in edits:
        assert old in source, old
        source = source.replace(old, new)
    file = f"<changed {function.__qualname__} {hash(source)}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    names: dict[str, Any] = {}
    exec(compile(source, file, "exec"), original.__globals__, names)
    return names[function.__name__]


def reasons(model: Any, operation: str) -> set[str]:
    return {row.reason for row in model.fusion_report() if row.operation == operation and not row.fused}


# Contracts ------------------------------------------------------------------------------------------------------------


def test_a_renamed_argument_is_refused_by_the_contract(monkeypatch: Patch) -> None:
    old = cache_name(llama.LlamaAttention.forward)
    edits = ((f"{old}:", "states:"), (f"if {old} ", "if states "), (f"{old}.update", "states.update"))
    attention = changed(llama.LlamaAttention.forward, *edits)
    block = changed(llama.LlamaDecoderLayer.forward, (f"{old}={old}", f"states={old}"))
    monkeypatch.setattr(llama.LlamaAttention, "forward", attention)
    monkeypatch.setattr(llama.LlamaDecoderLayer, "forward", block)
    model = model_of("llama")
    plain = tokens_of(model)
    model.fuse(measure=False)
    assert reasons(model, "attention") == {
        f"transformers {VERSION} changed LlamaAttention.forward, so attention stays unfused"
    }
    assert reasons(model, "block") == {
        f"transformers {VERSION} changed LlamaDecoderLayer.forward, so block stays unfused"
    }
    assert tokens_of(model) == plain


def test_a_changed_function_that_a_layer_calls_is_named(monkeypatch: Patch) -> None:
    rotate = changed(llama.rotate_half, ("-x2", "x2"))
    monkeypatch.setattr(llama, "rotate_half", rotate)
    rotate.__module__ = llama.__name__
    model = model_of("llama")
    plain = tokens_of(model)
    model.fuse(measure=False)
    assert reasons(model, "attention") == {f"transformers {VERSION} changed rotate_half, so attention stays unfused"}
    assert tokens_of(model) == plain


def test_a_changed_attention_function_leaves_attention_unfused(monkeypatch: Patch) -> None:
    from transformers.integrations import sdpa_attention

    other = changed(sdpa_attention.sdpa_attention_forward, ("dropout: float = 0.0", "dropout: float = 0.1"))
    monkeypatch.setattr(sdpa_attention, "sdpa_attention_forward", other)
    model = model_of("gpt2").fuse(measure=False)
    expected = f"transformers {VERSION} changed sdpa_attention.sdpa_attention_forward, so attention stays unfused"
    assert reasons(model, "attention") == {expected}


def test_changed_generation_is_left_to_transformers(monkeypatch: Patch) -> None:
    model = model_of("llama").fuse(measure=False)
    fused = tokens_of(model)
    base = transformers.GenerationMixin
    original = base._prepare_cache_for_generation

    def renamed(self: Any, settings: Any, inputs: Any, mode: Any, rows: int, length: int) -> Any:
        return original(self, settings, inputs, mode, rows, length)

    monkeypatch.setattr(base, "_prepare_cache_for_generation", renamed)
    with pytest.warns(UserWarning, match=r"changed the parameters of GenerationMixin\._prepare_cache_for_generation"):
        assert tokens_of(model) == fused
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the warning occurs once
        assert tokens_of(model) == fused


def test_code_that_cannot_step_aside_raises(monkeypatch: Patch) -> None:
    checks._required.cache_clear()
    monkeypatch.setattr(torch.nn.Module, "_apply", lambda self, function: self)
    with pytest.raises(contracts.ContractError, match=r"torch .* changed the parameters of Module\._apply: .*pipeline"):
        contracts.require("pipeline")
    checks._required.cache_clear()


def test_contracts_hold_here() -> None:
    found = {contract.original: contracts.broken(contract.original) for contract in checks.CONTRACTS}
    missing = ("trl", "peft", "deepspeed", "lightning")  # possibly not installed
    assert {name: why for name, why in found.items() if why and not name.startswith(missing)} == {}


# The check of fuse() --------------------------------------------------------------------------------------------------


def without_contracts(patch: Patch) -> None:
    """Make the fingerprints match any source."""
    patch.setattr(known_layers, "changed_layer", lambda *_: None)


MUTANTS: list[tuple[Any, str, str, str, str]] = [
    (llama.LlamaAttention, "scaling=self.scaling", "scaling=2 * self.scaling", "llama", "attention"),
    (llama.LlamaRMSNorm, "self.weight *", "(self.weight + 1) *", "llama", "root mean square norm"),
    (
        llama.LlamaDecoderLayer,
        "hidden_states = residual + hidden_states",
        "hidden_states += 2 * residual",
        "llama",
        "block",
    ),
    (gpt2.GPT2Block, "hidden_states = self.ln_2(hidden_states)", "pass", "gpt2", "block"),
]


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize(("layer", "old", "new", "variant", "operation"), MUTANTS, ids=lambda each: str(each)[:40])
def test_a_change_behind_the_same_signature_is_found(
    layer: Any, old: str, new: str, variant: str, operation: str, wide: bool, monkeypatch: Patch
) -> None:
    without_contracts(monkeypatch)
    model_of(variant, wide=wide).fuse(measure=False)  # its verdict does not count for the changed release
    monkeypatch.setattr(layer, "forward", changed(layer.forward, (old, new)))
    model = model_of(variant, wide=wide)
    plain = tokens_of(model)
    with pytest.warns(UserWarning, match=f"differ from transformers: .*{operation} ..*{layer.__name__}") as warned:
        model.fuse(measure=False)
    assert len(warned) == 1
    (reason,) = reasons(model, operation)
    assert reason.startswith("left unfused: its output differs from transformers' by ")
    assert tokens_of(model) == plain


def test_without_the_check_the_change_is_not_found(monkeypatch: Patch) -> None:
    without_contracts(monkeypatch)
    attention = changed(llama.LlamaAttention.forward, ("scaling=self.scaling", "scaling=2 * self.scaling"))
    monkeypatch.setattr(llama.LlamaAttention, "forward", attention)
    model = model_of("llama")
    plain = tokens_of(model)
    assert tokens_of(model.fuse(measure=False, check=False)) != plain


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("variant", ["gpt2", "llama", "gemma2", "qwen3", "mixtral", "olmo2", "bert", "t5", "gpt_neox"])
def test_rounding_is_no_difference(variant: str, backend: str, dtype: torch.dtype) -> None:
    """On the CPU, the operations of GPU kernels run in plain torch."""
    config = zoo.config(variant)
    model = getattr(oslo_models, zoo.main_head(variant)).from_config_with_parallel(config, seed=0, dtype=dtype)
    fusion = Fusion(backend)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = self_check.apply_checked(model, fusion, list(fusion_candidates(model, backend)), None)
    assert len(fusion.swapped()) == sum(each.cls is not None for each in found) > 0
    if variant != "mixtral":  # its experts have no product in float64
        assert not any("not checked" in each.reason for each in found)


def state_of(model: Any) -> list[Any]:
    """Return all state of a model that a forward could change."""
    found: list[Any] = [("random state", torch.get_rng_state())]
    for path, module in model.named_modules():
        attributes = {name: value for name, value in vars(module).items() if name != "_fusion"}
        found += [(f"{path}.{name}", id(value)) for name, value in attributes.items()]
        found += [(f"{path} hooks", [*hooks]) for hooks in (module._forward_hooks, module._forward_pre_hooks)]
    for path, tensor in (*model.named_parameters(), *model.named_buffers()):
        found += [(path, tensor.clone()), (f"version of {path}", tensor._version)]
        found += [(f"grad of {path}", None if tensor.grad is None else tensor.grad.clone())]
    return found


def test_the_check_leaves_no_trace() -> None:
    model = model_of("llama").train()
    ids = torch.arange(12).view(2, 6)
    model(input_ids=ids, labels=ids).loss.backward()
    seen: list[Any] = []
    handle = model.model.layers[0].register_forward_hook(lambda *_: seen.append(1))
    model.model.layers[0].self_attn.eval()
    model.fuse(measure=False, check=False)
    names = model._fusion.swapped()
    unchecked = [*model._fusion.fusion_candidates]
    model.unfuse()
    before = state_of(model)
    model.fuse(measure=False)
    assert model._fusion.swapped() == names
    assert [each.reason for each in model._fusion.fusion_candidates] == [each.reason for each in unchecked]
    model.unfuse()
    after = state_of(model)
    for (name, one), (same, other) in zip(before, after, strict=True):
        assert name == same
        assert torch.equal(one, other) if isinstance(one, Tensor) else one == other, name
    assert not seen
    handle.remove()


def check_wide(sizes: dict[str, int], variant: str) -> None:
    """A cut block runs in C++ with few heads and features. Afterwards, the model has all of its parameters."""
    model = model_of(variant, wide=True, **sizes)
    plain, before = tokens_of(model), dict(model.named_parameters(remove_duplicate=False))
    shapes, count, run, cut = [], 0, BlockDecoding._run, small_blocks._cut

    def noted(self: Any, block: Any, *args: Any) -> Tensor:
        shapes.append((block.heads, block.groups, block.mlp_out.shape[1]))
        return run(self, block, *args)

    def counted(layer: Any, **kept: Any) -> None:
        nonlocal count
        count += 1
        cut(layer, **kept)

    with mock.patch.object(BlockDecoding, "_run", noted), mock.patch.object(small_blocks, "_cut", counted):
        model.fuse(measure=False)
    features = 600 // sizes.get("tensor_parallel_size", 1)
    assert shapes == [({"gpt2": 2, "llama": 4}[variant], 2, 128 + features % 128)]
    assert count == {"gpt2": 4, "llama": 7}[variant]
    after = dict(model.named_parameters(remove_duplicate=False))
    assert before.keys() == after.keys() and all(after[name] is param for name, param in before.items())
    assert tokens_of(model) == plain
    assert not any("not checked" in row.reason or "left unfused" in row.reason for row in model.fusion_report())


@pytest.mark.skipif(decoder_block.unavailable_reason() is not None, reason="needs a C++ compiler")
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("variant", WIDE)
def test_blocks_are_cut_for_the_check_only(pool: Pool, variant: str, ranks: int) -> None:
    if ranks == 1:
        check_wide({}, variant)
    else:
        pool.run(ranks, check_wide, {"tensor_parallel_size": ranks}, variant)


@pytest.mark.parametrize("make", [DynamicCache, StaticCache, EncoderDecoderCache], ids=lambda each: each.__name__)
def test_copies_of_caches_are_independent(make: Any) -> None:
    config = zoo.config("llama")

    def keys(cache: Any) -> Tensor:
        own = getattr(cache, "self_attention_cache", cache)
        return own.update(torch.ones(1, 2, 1, 8), torch.ones(1, 2, 1, 8), 0)[0].clone()

    own = DynamicCache(config=config) if make is not StaticCache else StaticCache(config=config, max_cache_len=4)
    cache = EncoderDecoderCache(own, DynamicCache(config=config)) if make is EncoderDecoderCache else own
    keys(cache)
    twin, third = recorded_calls.copied(cache), recorded_calls.copied(cache)
    keys(twin)
    assert torch.equal(keys(cache), keys(third))
    assert type(twin) is type(cache) and twin.get_seq_length() == cache.get_seq_length() == 2


def test_a_verdict_counts_for_models_alike(monkeypatch: Patch) -> None:
    """Another model alike is not compared. Other sizes, dtypes, settings and functions are."""
    compared: list[Any] = []
    compare = self_check._compare
    monkeypatch.setattr(self_check, "_compare", lambda *args: compared.append(args) or compare(*args))

    def comparisons(dtype: torch.dtype = torch.float32, **sizes: Any) -> int:
        before = len(compared)
        model = oslo_models.LlamaForCausalLM(zoo.config("llama", **sizes)).to(dtype)
        report = str(model.fuse(measure=False).fusion_report())
        model.unfuse()
        assert str(model.fuse(measure=False).fusion_report()) == report
        return len(compared) - before

    assert [comparisons(), comparisons()] == [1, 0]
    assert [comparisons(torch.float64), comparisons(rms_norm_eps=1e-3), comparisons(attention_bias=True)] == [1, 1, 1]
    assert comparisons() == 0
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        assert comparisons() == 1
    finally:
        torch.set_num_threads(threads)
    for owner, name in (
        (llama.LlamaMLP, "forward"),
        (llama.LlamaRotaryEmbedding, "forward"),
        (llama, "rotate_half"),
        (DynamicCache, "update"),
        (BlockDecoding, "_run"),
    ):
        original = getattr(owner, name)
        with monkeypatch.context() as patch, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a contract names the changed function
            patch.setattr(owner, name, lambda *args, original=original, **options: original(*args, **options))
            assert comparisons() > 0, name
    assert comparisons() == 0


def test_models_that_cannot_run_are_not_checked() -> None:
    with torch.device("meta"):
        model = oslo_models.LlamaForCausalLM(zoo.config("llama"))
    found = self_check.apply_checked(model, Fusion("triton"), list(fusion_candidates(model, "triton")), None)
    assert {each.reason.partition("not checked: ")[2] for each in found if each.cls is not None} == {
        "weights are on the meta device"
    }


def fused_with_a_wrong_rank(sizes: dict[str, int], wrong: int) -> tuple[list[str], list[list[int]], list[list[int]]]:
    """If the norm of one rank computes different results, all ranks leave the norms unfused."""
    from oslo_models.fusion import norms

    model = model_of("llama", **sizes)
    plain, original = tokens_of(model), norms.CPURMSNorm.forward
    if model.mesh.world.rank == wrong:
        norms.CPURMSNorm.forward = lambda self, x: 2 * original(self, x)  # type: ignore[method-assign]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.fuse(measure=False)
    finally:
        norms.CPURMSNorm.forward = original  # type: ignore[method-assign]
    fused = sorted({c.operation for c in model._fusion.fusion_candidates if c.module in model._fusion.swapped()})
    return fused, plain, tokens_of(model)


@pytest.mark.parametrize(
    ("sizes", "wrong"),
    [({"tensor_parallel_size": 2}, 1), ({"tensor_parallel_size": 2}, 5), ({"pipeline_parallel_size": 2}, 0)],
    ids=str,
)
def test_ranks_decide_alike(pool: Pool, sizes: dict[str, int], wrong: int) -> None:
    results = pool.run(2, fused_with_a_wrong_rank, sizes, wrong)
    operations = {operation for fused, *_ in results for operation in fused}
    assert ("root mean square norm" in operations) == (wrong > 1)
    for fused, plain, tokens in results:
        assert "attention" in fused
        assert tokens == plain


# The command ----------------------------------------------------------------------------------------------------------


def release_with(path: Path, edit: Callable[[str], str]) -> Path:
    """Write a release with a single model into a folder."""
    file = path / "transformers/models/llama/modeling_llama.py"
    file.parent.mkdir(parents=True)
    (path / "transformers/__init__.py").write_text('__version__ = "5.99.0"\n')
    file.write_text(edit(Path(llama.__file__).read_text()))
    return path


def test_the_command_names_the_changes_of_a_release(tmp_path: Path) -> None:
    from oslo_models.contracts import __main__ as command

    same = Sources("transformers", release_with(tmp_path / "same", lambda source: source))
    other = release_with(tmp_path / "other", lambda source: source.replace("scaling=self.scaling", "scaling=1.0"))
    key = "transformers.models.llama.modeling_llama.LlamaAttention.forward changed"
    assert key not in command.problems_in(same)
    assert key in command.problems_in(Sources("transformers", other))
