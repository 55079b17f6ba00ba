"""`fuse`: fused models match unfused ones, exactly in float64 and within rounding otherwise, and can be unfused."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from oslo_models import GPT2MLP, BertModel, GPT2Attention, GPT2LMHeadModel, registry
from oslo_models.distributed.mesh import ParallelMesh
from oslo_models.fusion import lazy_logits
from oslo_models.fusion import linear_cross_entropy as chunks
from oslo_models.fusion.lazy_logits import LazyFullHead, LazyHead, LazyLogits
from oslo_models.fusion.modules import FusedConv1D, TanhGELU
from oslo_models.sharding.layout import EvenSplit, Layout
from oslo_models.sharding.plan import VocabParallel

from support import pipelines, zoo
from support.fake_timings import faster_at
from support.float64 import lifted_casts
from support.fusion import GELU_NEW, LOGITS, fusion_reference, gpt2, relative_error
from support.logits_operations import IN_PLACE, LABELS, LOSSES, OPERATIONS, SHAPE, VOCAB
from support.pipelines import Case, gradient_differences, model_on_stages, run_micro_batches
from support.pool import Pool
from support.reference import (
    TOLERANCE,
    Step,
    differences,
    full_parameters,
    parallel_model,
    reference_step,
    shard_differences,
    step_differences,
)


@contextmanager
def small_chunks() -> Iterator[None]:
    """Use chunks of three rows, so that tiny batches have several, and chunk small logits too."""
    with mock.patch.multiple(chunks, FAST_ROWS=3, CHUNKS=1000), mock.patch.object(lazy_logits, "SMALL", 0):
        yield


# Whole models ---------------------------------------------------------------------------------------------------------


def check_steps(steps: list[Step], n: int) -> None:
    """On every rank, compare loss and gradients of fused models with the reference; logits are never made."""
    lines = []
    for step in steps:
        model = parallel_model(step.name, step.config, step.weights, n).fuse()
        names = list(model.state_dict())
        needed = model.loss_needs_full_logits or step.config.model_type == "dory"  # its head scales the logits
        heads = (*type(model).head_plan.values(), *model.plan(model.config).head.values())
        sharded = any(isinstance(entry, VocabParallel) for entry in heads)
        assert any(row.fused and "head" in row.operation for row in model.fusion_report()) == (sharded and not needed)
        with small_chunks(), mock.patch.object(LazyLogits, "compute", side_effect=AssertionError("logits were made")):
            without = LOGITS if sharded and not needed else ()
            lines += [f"{step.name}: {line}" for line in step_differences(model, step, without=without)]
        assert names == list(model.state_dict())
    assert not lines, "\n".join(lines)


@pytest.mark.stacks
@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("variant", zoo.FOUNDING)
def test_fused_loss_and_gradients_match_transformers(pool: Pool, variant: str, n: int, seed: int) -> None:
    pool.run(n, check_steps, [fusion_reference(variant, name, seed) for name in zoo.lm_heads(variant)], n)


@pytest.mark.drawn(30)
@pytest.mark.stacks
@pytest.mark.parametrize("variant", zoo.cases(kind for kind in registry.ARCHITECTURES if kind not in zoo.FOUNDING))
def test_fused_loss_and_gradients_of_other_architectures_match_transformers(variant: str, seed: int) -> None:
    if (reason := zoo.not_computed(variant)) is not None:
        pytest.skip(reason)
    check_steps([fusion_reference(variant, (zoo.lm_heads(variant) or zoo.heads(variant))[0], seed)], 1)


def check_stages(case: Case, tp: int, pp: int) -> None:
    """On every rank, check that losses and gradients of micro-batches with unequal label counts add up."""
    model = model_on_stages(case.name, case.config, case.weights, tp, pp, micro_batch_size=1).fuse()
    with small_chunks():
        lines = differences("loss", run_micro_batches(model, case.batches[0][0]), case.loss[0], TOLERANCE)
    lines += gradient_differences(model, case.gradients)
    assert not lines, "\n".join(lines)
    assert any(row.fused and "head" in row.operation for row in model.fusion_report()) == model.stage.is_last


@pytest.mark.drawn(4)
@pytest.mark.parametrize(("tp", "pp"), [(1, 2), (2, 2)])
@pytest.mark.parametrize("variant", zoo.FOUNDING)
def test_fused_pipeline_stages_match_one_process(pool: Pool, variant: str, tp: int, pp: int, seed: int) -> None:
    case = pipelines.case(zoo.lm_head(variant), pipelines.config(variant), seed)
    pool.run(tp * pp, check_stages, case, tp, pp)


def check_rounding(step: Step, n: int, dtype: torch.dtype, exact: dict[str, Tensor]) -> tuple[float, float]:
    """Return the errors of this rank's loss and gradients, unfused and fused."""
    model = parallel_model(step.name, step.config, step.weights, n, dtype)
    errors = []
    for fuse in (False, True):
        if fuse:
            model.fuse()
        model.zero_grad()
        with small_chunks():
            loss = model(**step.batch).loss
            loss.backward()
        own = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
        parts = {name: model.layouts[name].shard(exact[name], model.mesh.tp.rank) for name in own}
        errors.append(relative_error({**own, "loss": loss.detach()}, {**parts, "loss": exact["loss"]}))
    return errors[0], errors[1]


@pytest.mark.drawn(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("variant", zoo.FOUNDING)
def test_fused_rounding_error_is_at_most_twice_the_unfused_one(
    pool: Pool, variant: str, dtype: torch.dtype, seed: int
) -> None:
    """The error in single and half precision is at most twice the error of the unfused model.

    The test combines three draws, because the error of a single draw is sometimes twice as large by chance.
    """
    steps = [step_of_rounded_weights(variant, dtype, seed + draw) for draw in range(3)]
    for n in (1, 2):
        by_draw = [pool.run(n, check_rounding, step, n, dtype, exact) for step, exact in steps]
        for of_rank in zip(*by_draw, strict=True):
            unfused, fused = (math.hypot(*errors) for errors in zip(*of_rank, strict=True))
            assert fused <= 2 * unfused, f"tp {n}: {fused:.2e} instead of {unfused:.2e}"


def step_of_rounded_weights(variant: str, dtype: torch.dtype, seed: int) -> tuple[Step, dict[str, Tensor]]:
    """A step with weights that ``dtype`` represents; the loss and gradients of transformers with them in float64."""
    name, config = zoo.lm_head(variant), zoo.config(variant, **GELU_NEW.get(variant, {}))
    step = reference_step(name, config, seed)
    rounded = {key: weight.to(dtype) for key, weight in step.weights.items()}
    model = zoo.original(name).from_pretrained(
        None, config=config, state_dict={key: weight.double() for key, weight in rounded.items()}, dtype=torch.float64
    )
    with lifted_casts():
        loss = model.train()(**step.batch).loss
        loss.backward()
    exact = {key: param.grad for key, param in model.named_parameters() if param.grad is not None}
    step.weights = rounded
    return step, {**exact, "loss": loss.detach()}


def check_generation(name: str, config: Any, weights: dict[str, Tensor], n: int, options: list[dict[str, Any]]) -> None:
    """On every rank, check that a fused model generates the same tokens from padded prompts."""
    model = parallel_model(name, config, weights, n, torch.float32).eval()
    batch = zoo.batch(name, config, 1, torch.float32)
    given = {key: batch[key] for key in ("input_ids", "attention_mask")}
    for option in options:
        found = []
        for fuse in (False, True):
            blocked = {"fused_no_repeat_ngram_blocking": True} if fuse else {}
            (model.fuse if fuse else model.unfuse)()
            torch.manual_seed(1)
            found.append(model.generate(**given, **option, **blocked, max_new_tokens=12, pad_token_id=0))
        assert torch.equal(*found), f"{option}: {found}"


GENERATION = [
    {"do_sample": False, "no_repeat_ngram_size": 2},
    {"num_beams": 3, "no_repeat_ngram_size": 1, "num_return_sequences": 2, "do_sample": False},
    {"do_sample": True, "num_return_sequences": 2, "no_repeat_ngram_size": 2, "encoder_no_repeat_ngram_size": 2},
]


@pytest.mark.stacks
@pytest.mark.parametrize("variant", ["bert-decoder", "gpt2", "gpt_neo", "gptj", "llama", "t5"])
def test_fused_model_generates_the_same_tokens(pool: Pool, variant: str, seed: int) -> None:
    name, config = zoo.lm_head(variant), zoo.config(variant)
    weights = reference_step(name, config, seed, torch.float32).weights
    for n in (1, 2):
        pool.run(n, check_generation, name, config, weights, n, GENERATION)


# What fuse and unfuse do ----------------------------------------------------------------------------------------------


def step(model: Any, **more: Any) -> tuple[Any, dict[str, Tensor]]:
    model.zero_grad()
    out = model(**zoo.batch("GPT2LMHeadModel", model.config, 1), **more)
    out.loss.backward()
    return out, {name: param.grad.clone() for name, param in model.named_parameters()}


def test_unfuse_restores_every_bit() -> None:
    model = gpt2()
    classes = [type(module) for module in model.modules()]
    before, gradients = step(model)
    kept = [list(module.__dict__) for module in model.children()]
    assert model.fuse() is model
    fused, _ = step(model)
    assert fused.logits is None and type(model.lm_head) is LazyFullHead and isinstance(model.lm_head, nn.Linear)
    assert model.unfuse() is model and model.unfuse() is model
    after, restored = step(model)
    assert torch.equal(before.loss, after.loss) and torch.equal(before.logits, after.logits)
    assert all(torch.equal(gradients[name], restored[name]) for name in gradients)
    assert classes == [type(module) for module in model.modules()]
    assert kept == [list(module.__dict__) for module in model.children()]


@pytest.fixture
def faster_products() -> Iterator[None]:
    """Make the products of linear layers faster than torch's on every machine."""
    with faster_at():
        yield


@pytest.mark.usefixtures("faster_products")
def test_fuse_selects_modules_by_class() -> None:
    model = gpt2()

    def fused() -> set[str]:
        return {row.inside for row in model.fusion_report() if row.fused}

    assert fused() == set()
    model.fuse([])
    assert fused() == set() and not any(isinstance(module, (TanhGELU, LazyHead)) for module in model.modules())
    model.fuse([GPT2Attention])
    assert fused() == {"GPT2Attention"} and "sdpa" in str(model.fusion_report())
    assert all(type(block.attn.c_proj) is FusedConv1D for block in model.transformer.h)
    assert not any(isinstance(module, (TanhGELU, LazyHead)) for module in model.modules())
    model.unfuse().fuse([GPT2MLP])
    assert fused() == {"GPT2MLP"} and all(type(block.mlp.act) is TanhGELU for block in model.transformer.h)
    model.fuse([GPT2MLP, GPT2Attention]).fuse([GPT2LMHeadModel], measure=False)
    assert fused() == {"GPT2MLP", "GPT2Attention", "GPT2Block", "GPT2LMHeadModel"}
    assert model.unfuse() is model and fused() == set()
    assert str(model.fuse(measure=False).fusion_report()).count("yes") == 6


@pytest.mark.parametrize(
    ("modules", "says"),
    [
        ([BertModel], "no BertModel to fuse in; it has .*'GPT2Attention'.*'GPT2MLP'"),
        ([GPT2MLP, int], "no int"),
        ((GPT2MLP,), "must be a list"),
        ("GPT2MLP", "must be a list"),
        (["GPT2MLP"], "must be a list"),
    ],
)
def test_fuse_rejects_unknown_classes(modules: Any, says: str) -> None:
    model = gpt2()
    with pytest.raises(ValueError, match=says):
        model.fuse(modules)
    assert not any(isinstance(module, (TanhGELU, LazyHead)) for module in model.modules())


def check_different_arguments() -> None:
    model = GPT2LMHeadModel.from_config_with_parallel(zoo.config("gpt2"), tensor_parallel_size=2)
    model.fuse([GPT2MLP] if model.mesh.tp.rank else None)


def test_fuse_rejects_arguments_that_differ_between_ranks(pool: Pool) -> None:
    assert "rank 1 has ['GPT2MLP']" in str(pool.run(2, check_different_arguments, expect=ValueError)[0])


def test_fuse_rejects_unavailable_backends(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = gpt2()
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="Triton compiles for GPUs"):
            model.fuse(backend="triton")
    with pytest.raises(ValueError, match="'nvfuser' is none of"):
        model.fuse(backend="nvfuser")
    with pytest.raises(ValueError, match="not installed"):
        model.fuse(backend="apex")
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex" / "__init__.py").write_text("raise ImportError('pyramid is missing')")  # like PyPI's, without it
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="another package than NVIDIA's"):
        model.fuse(backend="apex")
    assert not any(row.fused for row in model.fuse([], backend="torch").fusion_report())


def test_fuse_prints_nothing_and_changes_no_other_model(capsys: pytest.CaptureFixture[str]) -> None:
    model, other = gpt2(), gpt2()
    step(model.fuse())
    print_free = capsys.readouterr()
    assert print_free.out == "" and print_free.err == ""
    assert step(other)[0].logits is not None and type(other.lm_head) is nn.Linear


def test_deepcopy_of_a_fused_model_is_fused() -> None:
    model = gpt2().fuse()
    twin = copy.deepcopy(model)
    assert torch.equal(step(model)[0].loss, step(twin)[0].loss)
    twin.unfuse()
    assert step(twin)[0].logits is not None and step(model)[0].logits is None


def test_fuse_on_a_model_constructed_without_parallelism() -> None:
    model = GPT2LMHeadModel(zoo.config("gpt2")).double()
    unfused, gradients = step(model)
    fused, found = step(model.fuse())
    assert fused.logits is None and torch.equal(fused.loss, unfused.loss)
    assert all((gradients[name] - found[name]).abs().max() < 1e-6 for name in gradients)


def test_fused_model_returns_logits_without_labels() -> None:
    model = gpt2(dtype=torch.float64).fuse()
    batch = zoo.batch("GPT2LMHeadModel", model.config, 1)
    unlabelled = {key: value for key, value in batch.items() if key != "labels"}
    full = model.unfuse()(**batch)
    model.fuse()
    with torch.no_grad():
        assert not differences("logits", model(**batch).logits, full.logits, TOLERANCE)
    unlabelled_logits = model(**unlabelled).logits
    assert type(unlabelled_logits) is Tensor and not differences("", unlabelled_logits, full.logits, TOLERANCE)
    in_tuple = model(**batch, return_dict=False)
    assert torch.equal(in_tuple[0], full.loss) and in_tuple[1] is None
    model.gather_logits = True
    assert not differences("logits", model(**batch).logits, full.logits, TOLERANCE)
    model.gather_logits = False
    with torch.no_grad():
        assert model(**batch).logits is None


def test_fused_loss_honours_num_items_in_batch() -> None:
    """``num_items_in_batch`` gives the loss of a part of a larger batch."""
    model = gpt2(dtype=torch.float64)
    for items in (40, torch.tensor(40)):
        with lifted_casts():
            unfused, gradients = step(model.unfuse(), num_items_in_batch=items)
            fused, found = step(model.fuse(), num_items_in_batch=items)
        assert abs(unfused.loss - fused.loss) < TOLERANCE
        assert all((gradients[name] - found[name]).abs().max() < TOLERANCE for name in gradients)


def test_fused_loss_rejects_a_second_backward_pass() -> None:
    loss = gpt2().fuse(measure=False)(**zoo.batch("GPT2LMHeadModel", zoo.config("gpt2"), 1)).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="differentiated once"):
        loss.backward()


def test_fused_loss_skips_gradients_of_frozen_parameters() -> None:
    """A frozen head (as in LoRA) computes no weight gradient; a frozen body needs no hidden-state gradient."""
    for frozen in ("lm_head", "transformer.h"):
        model = gpt2(dtype=torch.float64, tie_word_embeddings=False)
        model.get_submodule(frozen).requires_grad_(False)
        found = []
        for fuse in (False, True):
            (model.fuse if fuse else model.unfuse)()
            model.zero_grad()
            with lifted_casts():
                model(**zoo.batch("GPT2LMHeadModel", model.config, 1)).loss.backward()
            found.append({name: param.grad for name, param in model.named_parameters()})
        assert not [line for name in found[0] for line in differences(name, found[1][name], found[0][name], TOLERANCE)]


def test_fused_model_under_torch_compile_uses_plain_expressions() -> None:
    model = gpt2(n_layer=1).fuse()
    batch = zoo.batch("GPT2LMHeadModel", model.config, 1)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")(**batch)
    assert compiled.logits is not None and abs(compiled.loss - model(**batch).loss) < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_fused_model_under_autocast(dtype: torch.dtype) -> None:
    model = gpt2()
    found = []
    for fuse in (False, True):
        (model.fuse if fuse else model.unfuse)()
        with torch.autocast("cpu", dtype=dtype):
            found.append(step(model))
    (unfused, gradients), (fused, own) = found
    assert fused.loss.dtype == unfused.loss.dtype and abs(fused.loss - unfused.loss) < 1e-2
    assert relative_error(own, gradients) < 0.05 and all(grad.dtype == torch.float32 for grad in own.values())


def test_fused_adamw_matches_adamw() -> None:
    models = [gpt2(dtype=torch.float64) for _ in range(2)]
    options = {"lr": 0.01, "weight_decay": 0.1, "betas": (0.8, 0.9)}
    optimizers = [torch.optim.AdamW(models[0].parameters(), **options), models[1].fused_adamw(**options)]
    assert optimizers[1].defaults["fused"]
    for _ in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            step(model)
            optimizer.step()
    assert all((p - q).abs().max() < TOLERANCE for p, q in zip(*(m.parameters() for m in models), strict=True))


def check_wrappers(batches: list[dict[str, Tensor]], config: Any, weights: dict[str, Tensor]) -> None:
    """On each of two replicas, train a fused model under DDP and FSDP2, also with a separately wrapped head."""
    trained = []
    for wrap in ("unfused", "DDP", "FSDP", "FSDP of head"):
        model = parallel_model("GPT2LMHeadModel", config, weights, 1)
        if wrap != "unfused":
            model.fuse()
        if wrap == "FSDP of head":
            fully_shard(model.lm_head, mesh=model.mesh.device_mesh["dp"])
        if wrap.startswith("FSDP"):
            fully_shard(model, mesh=model.mesh.device_mesh["dp"])
        run = model if wrap.startswith("FSDP") else DistributedDataParallel(model, find_unused_parameters=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with lifted_casts(), small_chunks():
            run(**batches[model.mesh.dp.rank]).loss.backward()
        optimizer.step()
        trained.append({name: pipelines.to_full_tensor(param).detach() for name, param in model.named_parameters()})
    lines = [line for own in trained[1:] for line in shard_differences(model, "", own, trained[0], TOLERANCE)]
    assert not lines, "\n".join(lines)


def test_fused_model_under_ddp_and_fsdp2(pool: Pool, seed: int) -> None:
    config = zoo.config("gpt2", tie_word_embeddings=False)
    weights = full_parameters(gpt2_reference(config, seed))
    batches = [zoo.batch("GPT2LMHeadModel", config, seed + i) for i in range(2)]
    pool.run(2, check_wrappers, batches, config, weights)


def gpt2_reference(config: Any, seed: int) -> Any:
    torch.manual_seed(seed)
    return zoo.original("GPT2LMHeadModel")._from_config(config, dtype=torch.float64)


# The head that waits --------------------------------------------------------------------------------------------------

HIDDEN = 6


def mine(words: Layout, full: Tensor, rank: int) -> Tensor:
    """Return a rank's rows of the weight or the bias."""
    ((start, stop),) = words.ranges[rank]
    return full[start:stop]


def deferred(tp: Any, seed: int) -> tuple[list[Tensor], Tensor, list[Tensor], Tensor]:
    """Return full leaves and their logits, and local leaves and their deferred logits."""
    torch.manual_seed(seed)
    full = [torch.randn(*shape, dtype=torch.float64) for shape in ((*SHAPE[:-1], HIDDEN), (VOCAB, HIDDEN), (VOCAB,))]
    words = Layout.sharded((VOCAB, HIDDEN), 0, (EvenSplit(VOCAB),), tp.size)
    own = [full[0].clone(), *(mine(words, x, tp.rank).clone() for x in full[1:])]
    head = nn.Linear(1, 1)
    head.weight, head.bias = nn.Parameter(own[1]), nn.Parameter(own[2])
    own = [own[0].requires_grad_(), head.weight, head.bias]
    head.__class__ = LazyFullHead
    head.tp, head.layouts, head.lazy = tp, {"weight": words}, True
    for leaf in full:
        leaf.requires_grad_()
    return full, F.linear(*full), own, head(own[0] * 1)


def compare_deferred(what: str, operation: Any, tp: Any, seed: int) -> list[str]:
    """Return differences in results or gradients between an operation on deferred and on whole logits."""
    leaves, whole, own_leaves, logits = deferred(tp, seed)
    assert type(logits) is LazyLogits
    expected, found = operation(whole), operation(logits)
    if not isinstance(expected, Tensor):
        return [] if found == expected else [f"{what}: {found} instead of {expected}"]
    found = found.full() if hasattr(found, "full") else found
    if expected.dtype == torch.bool or expected.isnan().any():
        return [] if torch.equal(expected.isnan(), found.isnan()) else [f"{what}: {found}"]
    lines = differences(what, found.detach(), expected.detach(), 1e-6 if expected.dtype == torch.float32 else TOLERANCE)
    if expected.requires_grad and not lines:
        weights = torch.arange(expected.numel(), dtype=expected.dtype).cos().view_as(expected)
        (expected * weights).sum().backward()
        (found * weights).sum().backward()
        words = logits.head.layouts["weight"]
        grads = [leaves[0].grad, *(mine(words, leaf.grad, tp.rank) for leaf in leaves[1:])]
        for name, own, grad in zip(("hidden", "weight", "bias"), own_leaves, grads, strict=True):
            lines += differences(f"gradient of {what}, {name}", own.grad, grad, 1e-6 if name == "float" else TOLERANCE)
    return lines


def check_operations(n: int, seed: int) -> None:
    """On every rank, compare all operations on deferred logits with the same operations on logits."""
    tp, lines = ParallelMesh(n).tp, []
    for name, operation in {**OPERATIONS, **IN_PLACE}.items():
        if name in ("float", "tolist"):  # rounded otherwise
            continue
        try:
            lines += compare_deferred(name, operation, tp, seed)
        except Exception as error:  # noqa: BLE001
            lines.append(f"{name}: {type(error).__name__}: {error}")
    assert not lines, "\n".join(lines)


@pytest.mark.parametrize("n", [1, 2])
def test_lazy_logits_support_every_operation(pool: Pool, n: int, seed: int) -> None:
    pool.run(n, check_operations, n, seed)


def check_losses(n: int, seed: int) -> None:
    """On every rank, compare losses and gradients with torch."""
    tp, lines = ParallelMesh(n).tp, []
    target = torch.randint(VOCAB, (15,), generator=torch.Generator().manual_seed(seed))
    for options in LOSSES:
        for name, change in LABELS.items():
            labels = change(target)

            def loss(logits: Tensor, labels: Tensor = labels, options: Any = options) -> Tensor:
                return F.cross_entropy(logits.view(-1, VOCAB)[: len(labels)], labels, **options)

            if "ignore_index" not in options or not (labels == -100).any():
                with small_chunks():
                    lines += compare_deferred(f"{options}, labels: {name}", loss, tp, seed)
    assert not lines, "\n".join(lines)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_lazy_logits_support_every_cross_entropy(pool: Pool, n: int, seed: int) -> None:
    pool.run(n, check_losses, n, seed)


def lose(label: int) -> None:
    _, _, _, logits = deferred(ParallelMesh(2).tp, 0)
    F.cross_entropy(logits.view(-1, VOCAB)[:2], torch.tensor([1, label]))


@pytest.mark.parametrize("label", [-1, VOCAB])
def test_lazy_logits_reject_labels_outside_the_vocabulary(pool: Pool, label: int) -> None:
    pool.run(2, lose, label, expect=IndexError)
