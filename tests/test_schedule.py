"""The loop over micro-batches: what users do in it, what travels, what is alive, what happens when it breaks."""

from __future__ import annotations

import copy
import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pipelines
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import zoo
from float64 import lifted_casts
from pipelines import (
    Batch,
    Case,
    case,
    differ_in_gradients,
    everywhere,
    gradients_on_stage,
    on_stages,
    stage_parameters,
    take_loop,
    take_reference_step,
)
from pool import Pool
from reference import TOLERANCE, differ, full_gradients, full_parameters, whole
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedConfig

from oslo_models import collectives, registry
from oslo_models.pipeline.schedule import Schedule

LM = {variant: zoo.lm_head(variant) for variant in zoo.FOUNDING}


def lm_case(variant: str, seed: int, **options: Any) -> Case:
    return case(LM[variant], pipelines.config(variant), seed, **options)


def stages_of(given: Case, tp: int, pp: int, **options: Any) -> Any:
    return on_stages(given.name, given.config, given.weights, tp, pp, **options)


# In the body of the loop ----------------------------------------------------------------------------------------------


def check_body(given: Case, twice: dict[str, Tensor | None], tp: int, pp: int) -> None:
    """Scales, accumulation, `train_batch`, and a copy of the model, one after another on the same stages."""
    batch, lines = given.batches[0][0], []
    model = stages_of(given, tp, pp)
    for scale in (1 / 3, 1024.0):
        lines += differ("scaled loss", take_loop(model, batch, scale), given.loss[0], TOLERANCE)
        expected = {key: None if grad is None else grad * scale for key, grad in given.gradients.items()}
        lines += differ_in_gradients(model, expected, TOLERANCE * max(1, scale), f"gradient x {scale:g} of")
        model.zero_grad()

    with lifted_casts():
        loss = model.train_batch(**batch)
    assert not loss.requires_grad
    lines += differ("train_batch", loss, given.loss[0], TOLERANCE)
    lines += differ_in_gradients(model, given.gradients, what="train_batch: gradient of")

    model.set_micro_batch_size(2)  # the gradients of a second batch are added
    take_loop(model, given.batches[1][0])
    lines += differ_in_gradients(model, twice, what="accumulated gradient of")
    model.zero_grad()

    other = copy.deepcopy(model)
    before = gradients_on_stage(model)
    lines += differ("loss of a copy", take_loop(other, batch), given.loss[0], TOLERANCE)
    lines += differ_in_gradients(other, given.gradients, what="copy: gradient of")
    assert all(grad is before[key] for key, grad in gradients_on_stage(model).items())
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1.0)  # the copy does not see that
    other.zero_grad()
    lines += differ("loss of a copy of its own", take_loop(other, batch), given.loss[0], TOLERANCE)
    assert not lines, "\n".join(lines)


@pytest.mark.parametrize(
    ("variant", "tp", "pp"),
    [
        *((variant, 1, 2) for variant in zoo.FOUNDING),
        ("gpt2", 1, 4),
        ("gpt2", 2, 2),
        ("t5", 1, 4),
        ("t5", 2, 2),
    ],
)
def test_what_users_do_in_the_loop(pool: Pool, variant: str, tp: int, pp: int, seed: int) -> None:
    batches = [[pipelines.batch(LM[variant], pipelines.config(variant), seed + step)] for step in range(2)]
    given = lm_case(variant, seed, batches=batches)
    model = whole(given.name, given.config, seed)
    for batch in batches:
        take_reference_step(model, batch)
    pool.run(tp * pp, check_body, given, full_gradients(model), tp, pp)


Clipped = dict[tuple[float, float], tuple[Tensor, dict[str, Tensor | None]]]


def check_clipping(given: Case, expected: Clipped, tp: int, pp: int) -> None:
    model, lines = stages_of(given, tp, pp), []
    for (max_norm, norm_type), (norm, gradients) in expected.items():
        model.zero_grad()
        take_loop(model, given.batches[0][0])
        lines += differ(f"norm {norm_type}", model.clip_grad_norm_(max_norm, norm_type), norm, TOLERANCE)
        lines += differ_in_gradients(model, gradients, what=f"clipped to {max_norm} in norm {norm_type}:")
    assert not lines, "\n".join(lines)


@pytest.mark.parametrize(("tp", "pp"), [(1, 4), (2, 2), (3, 2)])
@pytest.mark.parametrize("variant", ["bert", "gpt2", "gptj-tied", "llama-one-kv", "t5"])
def test_clip_grad_norm(pool: Pool, variant: str, tp: int, pp: int, seed: int) -> None:
    """What several stages hold counts once."""
    given = case(zoo.lm_head(variant), pipelines.config(variant), seed)
    expected: Clipped = {}
    for max_norm, norm_type in ((1e-2, 2.0), (1e6, 1.0), (1e-3, float("inf"))):
        model = whole(given.name, given.config, seed)
        take_reference_step(model, given.batches[0])
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type)
        expected[max_norm, norm_type] = norm, full_gradients(model)
    pool.run(tp * pp, check_clipping, given, expected, tp, pp)


def check_frozen(given: Case, gradients: dict[str, Tensor | None], pp: int) -> None:
    """Only the last block and the head train: stages before have nothing of their own to do."""
    model = stages_of(given, 1, pp)
    for name, param in stage_parameters(model).items():
        param.requires_grad_(not (name.startswith("transformer.") and ".3." not in name))
    lines = differ("loss", take_loop(model, given.batches[0][0]), given.loss[0], TOLERANCE)
    lines += differ_in_gradients(model, gradients)
    assert not lines, "\n".join(lines)


@pytest.mark.parametrize(("variant", "pp"), [("gptj", 2), ("gptj", 4), ("gpt2-untied", 4)])
def test_stages_without_anything_to_train(pool: Pool, variant: str, pp: int, seed: int) -> None:
    given = case(zoo.lm_head(variant), pipelines.config(variant), seed)
    model = whole(given.name, given.config, seed)
    for name, param in model.named_parameters():
        param.requires_grad_(not (name.startswith("transformer.") and ".3." not in name))
    take_reference_step(model, given.batches[0])
    pool.run(pp, check_frozen, given, full_gradients(model), pp)


def check_side_by_side(cases: list[Case]) -> None:
    """Two loops in turns, over models of different families, and one inside the body of the other."""
    lines = []

    def models() -> list[Any]:
        return [stages_of(given, 1, 2, micro_batch_size=1) for given in cases]

    def check(made: list[Any], what: str) -> None:
        for model, given in zip(made, cases, strict=True):
            lines.extend(f"{what}: {line}" for line in differ_in_gradients(model, given.gradients))

    one, two = made = models()
    with lifted_casts():
        for left, right in zip(one(**cases[0].batches[0][0]), two(**cases[1].batches[0][0]), strict=True):
            right.loss.backward()
            left.loss.backward()
    check(made, "in turns")
    one, two = made = models()
    with lifted_casts():
        for number, left in enumerate(one(**cases[0].batches[0][0])):
            if number == 1:
                for right in two(**cases[1].batches[0][0]):
                    right.loss.backward()
            left.loss.backward()
    check(made, "nested")
    assert not lines, "\n".join(lines)


@pytest.mark.parametrize("variants", [("gpt2", "llama"), ("t5", "gpt2")], ids="-".join)
def test_two_pipelines_in_one_process(pool: Pool, variants: tuple[str, str], seed: int) -> None:
    pool.run(2, check_side_by_side, [lm_case(variant, seed) for variant in variants])


def check_refusals(given: Case) -> None:
    model = stages_of(given, 1, 2, micro_batch_size=3)
    batch = given.batches[0][0]
    for _ in range(2):
        with pytest.raises(ValueError, match=r"4 rows .* micro_batch_size=3") as refusal:
            model(**batch)
        assert "set_micro_batch_size" in str(refusal.value)
    with pytest.raises(ValueError, match="no rows"):
        model(attention_mask=None)
    with pytest.raises(ValueError, match="micro_batch_size"):
        model.set_micro_batch_size(0)
    model.set_micro_batch_size(4)  # one micro-batch is fewer than stages
    lines = differ("loss", take_loop(model, batch), given.loss[0], TOLERANCE)
    lines += differ_in_gradients(model, given.gradients)
    assert not lines, "\n".join(lines)


def test_batches_that_do_not_divide(pool: Pool, seed: int) -> None:
    pool.run(2, check_refusals, lm_case("gpt2", seed))


# Without gradients ----------------------------------------------------------------------------------------------------


def check_evaluation(
    name: str, config: PreTrainedConfig, weights: dict[str, Tensor], batch: Batch, outputs: dict[str, Tensor], pp: int
) -> None:
    """The loss is known on every rank after the loop; everything else is on the last stage, row by row."""
    model = on_stages(name, config, weights, 1, pp, micro_batch_size=2).eval()
    with torch.no_grad(), lifted_casts():
        made = list(model(**batch))
    lines = []
    if "loss" in outputs:
        assert not any(output.loss.requires_grad for output in made)
        lines += differ("loss", torch.stack([output.loss for output in made]).sum(), outputs["loss"], TOLERANCE)
    for key, expected in outputs.items():
        if key == "loss":
            continue
        if not model.stage.is_last:
            assert all(getattr(output, key.split(".")[0]) is None for output in made)
            continue
        own = [pipelines.floats(output)[key] for output in made]
        lines += differ(key, torch.cat(own), expected, TOLERANCE)
    assert not any(param.grad is not None for param in model.parameters())
    assert not lines, "\n".join(lines)


@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("variant", zoo.FOUNDING)
def test_evaluation(pool: Pool, variant: str, pp: int, seed: int) -> None:
    for name in (zoo.base(variant), LM[variant], pipelines.heads_with_loss(variant)[-1]):
        config = pipelines.config(variant, use_cache=False)
        model = whole(name, config, seed).eval()
        batch = pipelines.batch(name, config, seed)
        with torch.no_grad(), lifted_casts():
            outputs = pipelines.floats(model(**batch))
        pool.run(pp, check_evaluation, name, config, full_parameters(model), batch, outputs, pp)


# Half precision -------------------------------------------------------------------------------------------------------


def train_in_half_precision(given: Case, tp: int, dtype: torch.dtype) -> tuple[list[float], list[float], bool]:
    """Losses and scales of five steps; whether copies of tied parameters have stayed the same bit for bit."""
    cls: Any = registry.find(given.name)
    model = cls.from_config_with_parallel(given.config, tp, 2, seed=3)
    batch = given.batches[0][0]
    optimizer, scaler = (
        torch.optim.AdamW(model.gpu_parameters(), lr=0.01),
        torch.amp.GradScaler("cpu", init_scale=2.0**10),
    )
    losses, scales = [], []
    for _ in range(5):
        with torch.autocast("cpu", dtype=dtype):
            made = []
            for output in model(**batch):
                made.append(output.loss)
                scaler.scale(output.loss).backward()
        scaler.unscale_(optimizer)
        model.clip_grad_norm_(1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(sum(loss.item() for loss in made))
        scales.append(scaler.get_scale())
    own = {name: param.detach().clone() for name, param in stage_parameters(model).items()}
    tied = model.stage.tied
    everything: dict[tuple[str, int], list[Tensor]] = {}
    for tp_rank, held in everywhere((model.mesh.tp.rank, own)):
        for name, value in held.items():
            everything.setdefault((tied.get(name, name), tp_rank), []).append(value)
    assert any(len(values) > 1 for values in everything.values())
    return losses, scales, all(torch.equal(value, values[0]) for values in everything.values() for value in values)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize(("variant", "tp"), [("gpt2", 1), ("gpt2", 2), ("llama", 1), ("t5", 1), ("bert", 1)])
def test_half_precision(pool: Pool, variant: str, tp: int, dtype: torch.dtype, seed: int) -> None:
    """Autocast and loss scaling, with dropout: every rank sees the same losses, and they fall."""
    config = pipelines.config(variant, dropout=0.02)
    batch = pipelines.batch(LM[variant], config, seed, dtype=torch.float32)
    given = Case(LM[variant], config, [[batch]], {}, [], {})
    results = pool.run(2 * tp, train_in_half_precision, given, tp, dtype)
    for losses, scales, same in results:
        assert same
        assert losses[-1] < losses[0]
        assert (losses, scales) == results[0][:2]


def overflow_on_one_rank(given: Case, bad_rank: int) -> tuple[list[float], list[bool]]:
    """The scales after three steps, and which steps changed the parameters; one rank overflows in the second."""
    cls: Any = registry.find(given.name)
    model = cls.from_config_with_parallel(given.config, 2, 2, seed=3)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.01), torch.amp.GradScaler("cpu", init_scale=8.0)
    scales, stepped = [], []
    for step in range(3):
        before = [param.detach().clone() for param in model.parameters()]
        optimizer.zero_grad()
        bad = step == 1 and dist.get_rank() == bad_rank
        weight = next(param for name, param in model.named_parameters() if name.endswith("mlp.c_fc.weight"))
        hook = weight.register_hook(lambda grad, bad=bad: grad * float("inf") if bad else grad)
        with torch.autocast("cpu", dtype=torch.float16):
            for output in model(**given.batches[0][0]):
                scaler.scale(output.loss).backward()
        hook.remove()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        stepped.append(any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)))
    return scales, stepped


@pytest.mark.parametrize("bad_rank", [0, 3])
def test_an_overflow_of_one_rank_is_one_of_all(pool: Pool, bad_rank: int, seed: int) -> None:
    config = pipelines.config("gpt2")
    batch = pipelines.batch(LM["gpt2"], config, seed, dtype=torch.float32)
    given = Case(LM["gpt2"], config, [[batch]], {}, [], {})
    for result in pool.run(4, overflow_on_one_rank, given, bad_rank):
        assert result == ([8.0, 4.0, 4.0], [True, False, True])


# Gradient checkpointing -----------------------------------------------------------------------------------------------


def check_checkpointing(given: Case, tp: int, pp: int) -> None:
    """Loss and gradients with recomputation are bitwise those without, dropout and all; in float32."""
    lines = []
    results: dict[str, tuple[Tensor, Any, Tensor]] = {}
    for mode in ("plain", "default", "reentrant"):
        model = stages_of(given, tp, pp, dtype=torch.float32)
        wrapped = model
        if mode != "plain":
            options = {"gradient_checkpointing_kwargs": {"use_reentrant": True}} if mode == "reentrant" else {}
            model.gradient_checkpointing_enable(**options)
        if model.mesh.dp.size > 1:
            wrapped = DistributedDataParallel(model, process_group=model.mpu.get_data_parallel_group())
        torch.manual_seed(5)
        if mode == "reentrant" and wrapped is not model:
            with pytest.raises(RuntimeError, match="use_reentrant=False"):  # it cannot do without the parameters' hooks
                take_loop(wrapped, given.batches[0][0], lift=False)
            continue
        loss = take_loop(wrapped, given.batches[0][0], lift=False)
        results[mode] = loss, gradients_on_stage(model), torch.rand(3)
    loss, gradients, drawn = results.pop("plain")
    for mode, (other_loss, other_gradients, other_drawn) in results.items():
        # Reentrant, the gradient of what an encoder hands to all decoder blocks is added up in another order.
        tolerance = 1e-6 if mode == "reentrant" and given.config.is_encoder_decoder else 0
        lines += differ(f"{mode}: loss", other_loss, loss, 0)
        lines += differ(f"{mode}: what is drawn next", other_drawn, drawn, 0)
        for key, gradient in gradients.items():
            lines += differ(f"{mode}: gradient of {key}", other_gradients[key], gradient, tolerance)
    assert not lines, "\n".join(lines)


@pytest.mark.parametrize("variant", zoo.FOUNDING)
def test_gradient_checkpointing(pool: Pool, variant: str, seed: int) -> None:
    config = pipelines.config(variant, dropout=0.3, use_cache=False)
    batch = pipelines.batch(LM[variant], config, seed, dtype=torch.float32)
    weights = full_parameters(whole(LM[variant], config, seed, torch.float32))
    given = Case(LM[variant], config, [[batch]], weights, [], {})
    pool.run(2, check_checkpointing, given, 1, 2)
    if variant in ("gpt2", "t5"):
        pool.run(4, check_checkpointing, given, 2, 2)
        pool.run(4, check_checkpointing, given, 1, 2)  # with two replicas, under DDP


class DropoutsCounted(TorchFunctionMode):
    """Counts the dropouts that fire, by the size of what they are applied to."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[int] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func is F.dropout:
            call = inspect.signature(F.dropout).bind(*args, **kwargs).arguments
            if call.get("training", True) and call.get("p", 0.5) > 0:
                self.found[call["input"].numel()] += 1
        elif func is F.scaled_dot_product_attention and kwargs.get("dropout_p", 0) > 0:
            self.found[args[0].numel()] += 1
        return func(*args, **kwargs)


def count_dropouts(given: Case, pp: int) -> Counter[int]:
    model = stages_of(given, 1, pp, dtype=torch.float32, micro_batch_size=pipelines.ROWS)
    with DropoutsCounted() as counted:
        for output in model(**given.batches[0][0]):
            output.loss.backward()
    return counted.found


@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("variant", zoo.FOUNDING)
def test_every_dropout_is_applied_once(pool: Pool, variant: str, pp: int, seed: int) -> None:
    """On all stages together as in one process, those at the ends of stacks too."""
    config = pipelines.config(variant, dropout=0.3, attn_implementation="eager")
    for name in (LM[variant], pipelines.heads_with_loss(variant)[-1]):
        batch = pipelines.batch(name, config, seed, dtype=torch.float32)
        model = whole(name, config, seed, torch.float32)
        given = Case(name, config, [[batch]], full_parameters(model), [], {})
        with DropoutsCounted() as counted:
            model(**batch)
        assert counted.found
        assert sum(pool.run(pp, count_dropouts, given, pp), Counter()) == counted.found


# Accumulation under data parallelism ----------------------------------------------------------------------------------


def check_accumulation(given: Case, quietly: bool) -> None:
    """Two loops before the optimizer steps; with ``no_sync`` replicas talk in the second one only."""
    model = stages_of(given, 1, 2)
    ddp = DistributedDataParallel(model.gpu_modules(), process_group=model.mpu.get_data_parallel_group())
    for step, batches in enumerate(given.batches):
        with ddp.no_sync() if quietly and step == 0 else nullcontext():
            take_loop(ddp, batches[model.mesh.dp.rank])
    lines = differ_in_gradients(model, given.gradients)
    assert not lines, "\n".join(lines)


@pytest.mark.parametrize("quietly", [False, True], ids=["in sync", "no_sync"])
@pytest.mark.parametrize("variant", ["gpt2", "t5"])
def test_accumulation_over_replicas(pool: Pool, variant: str, quietly: bool, seed: int) -> None:
    config = pipelines.config(variant)
    batches = [[pipelines.batch(LM[variant], config, seed + 10 * step + r) for r in range(2)] for step in range(2)]
    model = whole(LM[variant], config, seed)
    weights = full_parameters(model)
    for step in batches:
        take_reference_step(model, step)
    pool.run(4, check_accumulation, Case(LM[variant], config, batches, weights, [], full_gradients(model)), quietly)


# What travels and what is alive ---------------------------------------------------------------------------------------


class Counted:
    """While active, notes every message: ``(operation, group, peer, elements)``."""

    SENDS = ("isend", "send", "recv", "irecv")
    COLLECTIVES = (
        *("all_reduce", "broadcast", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor", "reduce"),
        *("all_to_all", "all_to_all_single", "gather", "scatter", "all_gather_object", "broadcast_object_list"),
        *("batch_isend_irecv", "reduce_scatter", "barrier", "send_object_list", "recv_object_list", "gather_object"),
    )

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.messages: list[tuple[str, Any, int, int]] = []
        self.collectives: list[tuple[str, Any, int]] = []
        patch.setattr(collectives, "_shared_memory", lambda axis, x: None)  # which would take their place
        for name in self.SENDS:
            patch.setattr(dist, name, self._message(name, getattr(dist, name)))
        for name in self.COLLECTIVES:
            patch.setattr(dist, name, self._collective(name, getattr(dist, name)))

    def _message(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def noted(tensor: Tensor, peer: int, group: Any = None) -> Any:
            self.messages.append((name, group, peer, tensor.numel()))
            return original(tensor, peer, group=group)

        return noted

    def _collective(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            sizes = [x.numel() for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
            self.collectives.append((name, kwargs.get("group"), max(sizes, default=-1)))
            return original(*args, **kwargs)

        return noted


@contextmanager
def live_counted() -> Iterator[list[int]]:
    """How many micro-batches were alive on this stage after every forward."""
    seen: list[int] = []
    forward = Schedule._forward

    def counted(self: Schedule, i: int) -> Any:
        output = forward(self, i)
        seen.append(len(self.alive))
        return output

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Schedule, "_forward", counted)
        yield seen


def streams_after(stage: Any) -> list[int]:
    """For each boundary between stages, how many streams of hidden states cross it."""
    return [sum(stack.first <= index for stack in stage.stacks) for index in range(stage.count - 1)]


def check_traffic(given: Case, tp: int, pp: int, size: int) -> dict[str, Any]:
    model = stages_of(given, tp, pp, micro_batch_size=size, check_inputs=False)
    stage, mesh, batch = model.stage, model.mesh, given.batches[0][0]
    rows, length = batch["input_ids"].shape
    number, hidden = rows // size, size * length * given.config.hidden_size
    with pytest.MonkeyPatch.context() as patch, live_counted() as live:
        counted = Counted(patch)
        take_loop(model, batch)
    crossing = [0, *streams_after(stage), 0]
    before, after = crossing[stage.index], crossing[stage.index + 1]
    down, up = mesh.pp.ranks[stage.index - 1], mesh.pp.ranks[(stage.index + 1) % pp]
    expected = Counter(
        {
            ("isend", mesh.pp.group, up, hidden): number * after,
            ("recv", mesh.pp.group, down, hidden): number * before,
            ("isend", mesh.pp_back.group, down, hidden): number * before,
            ("recv", mesh.pp_back.group, up, hidden): number * after,
        }
    )
    assert Counter(counted.messages) == +expected, counted.messages
    tied = [param.numel() for param, _ in model.pipeline.tied()]
    by_stages = {axis.group for _, axis in model.pipeline.tied()}
    sums = [numel for _, group, numel in counted.collectives if group in by_stages and numel in tied]
    assert sorted(sums) == sorted(tied)
    others = list(counted.collectives)
    for _, axis in model.pipeline.tied():
        others.remove(next(entry for entry in others if entry[1] is axis.group and entry[2] in tied))
    assert all(-1 < numel <= hidden for _, _, numel in others), others
    if tp == 1:
        assert [(name, numel) for name, _, numel in others] == [("all_reduce", number + pp)]
    return {"stage": stage.index, "live": max(live), "bound": min(number, pp - stage.index)}


@pytest.mark.parametrize(("tp", "pp", "size"), [(1, 4, 1), (1, 4, 2), (2, 2, 1)])
@pytest.mark.parametrize("variant", zoo.FOUNDING)
def test_what_travels_and_what_is_alive(pool: Pool, variant: str, tp: int, pp: int, size: int, seed: int) -> None:
    """One activation per micro-batch and stream forward, one gradient back; no logits, nothing larger than those."""
    config = pipelines.config(variant)
    batch = pipelines.batch(LM[variant], config, seed, rows=6)
    weights = full_parameters(whole(LM[variant], config, seed))
    for found in pool.run(tp * pp, check_traffic, Case(LM[variant], config, [[batch]], weights, [], {}), tp, pp, size):
        assert found["live"] == found["bound"], found


# What goes wrong ------------------------------------------------------------------------------------------------------


class Oops(Exception):
    pass


def break_at(at: int, after_backward: bool) -> Callable[[Any, Batch], None]:
    def play(model: Any, batch: Batch) -> None:
        for number, output in enumerate(model(**batch)):
            if number == at and not after_backward:
                break
            output.loss.backward()
            if number == at:
                break

    return play


def raise_at(at: int) -> Callable[[Any, Batch], None]:
    def play(model: Any, batch: Batch) -> None:
        for number, output in enumerate(model(**batch)):
            if number == at:
                raise Oops
            output.loss.backward()

    return play


def drop_after(count: int) -> Callable[[Any, Batch], None]:
    def play(model: Any, batch: Batch) -> None:
        outputs = model(**batch)
        for _ in range(count):
            next(outputs).loss.backward()
        next(outputs)
        del outputs

    return play


def forget_at(at: int) -> Callable[[Any, Batch], None]:
    def play(model: Any, batch: Batch) -> None:
        for number, output in enumerate(model(**batch)):
            if number != at:
                output.loss.backward()

    return play


def backward_again_at(at: int) -> Callable[[Any, Batch], None]:
    def play(model: Any, batch: Batch) -> None:
        made = []
        for number, output in enumerate(model(**batch)):
            made.append(output.loss)
            if number == at:
                made[0].backward()
            output.loss.backward()

    return play


def fail_in(way: str, at: int) -> Callable[[Any, Batch], None]:
    """An exception in the forward, or in the backward, of one micro-batch."""

    def play(model: Any, batch: Batch) -> None:
        calls = 0
        block = next(module for module in model.modules() if type(module).__name__.endswith(("Block", "Layer")))

        def fail(*_: Any) -> None:
            nonlocal calls
            calls += 1
            if calls == at + 1:
                raise Oops

        def watch(module: Any, args: Any, output: Any) -> None:
            (output[0] if isinstance(output, tuple) else output).register_hook(fail)

        hook = block.register_forward_pre_hook(fail) if way == "forward" else block.register_forward_hook(watch)
        try:
            for output in model(**batch):
                output.loss.backward()
        finally:
            hook.remove()

    return play


def well(model: Any, batch: Batch) -> None:
    for output in model(**batch):
        output.loss.backward()


Play = Callable[[Any, Batch], None]
NONE, OOPS = (type(None),), (Oops,)
FORGOTTEN = "was not called in the body of the loop"
AGAIN = "backward of micro-batch 0 was called, and that of"


def scenarios(stages: int, rows: int) -> Iterator[tuple[str, Play, tuple[int, ...], type | None, str]]:
    """What goes wrong, on which stages, and what is raised there at once."""
    everyone = tuple(range(stages))
    for at in range(rows):
        yield f"break before backward {at}", break_at(at, False), everyone, None, ""
    for at in range(rows - 1):
        yield f"break after backward {at}", break_at(at, True), everyone, None, ""
    for stage in everyone:
        for at in (0, rows // 2, rows - 1):
            yield f"stage {stage}: break before backward {at}", break_at(at, False), (stage,), None, ""
        yield f"stage {stage}: break after backward 1", break_at(1, True), (stage,), None, ""
        yield f"stage {stage}: exception", raise_at(1), (stage,), Oops, ""
        yield f"stage {stage}: exception at once", raise_at(0), (stage,), Oops, ""
        yield f"stage {stage}: dropped", drop_after(1), (stage,), None, ""
        yield f"stage {stage}: forgotten backward", forget_at(1), (stage,), RuntimeError, FORGOTTEN
        yield f"stage {stage}: wrong order", backward_again_at(2), (stage,), RuntimeError, AGAIN
        for way in ("forward", "backward"):
            yield f"stage {stage}: exception in {way}", fail_in(way, 1), (stage,), Oops, ""
    yield "exception", raise_at(1), everyone, Oops, ""
    yield "dropped at once", drop_after(0), everyone, None, ""
    yield "dropped", drop_after(2), everyone, None, ""
    yield "forgotten backward", forget_at(rows - 1), everyone, RuntimeError, FORGOTTEN
    yield "wrong order", backward_again_at(1), everyone, RuntimeError, AGAIN


def check_faults(given: Case, tp: int, pp: int, every: int) -> int:
    """After each scenario: the others were told, the next call raises on every rank, and the one after is right."""
    stages = stages_of(given, tp, pp)
    model, (batch,) = stages, given.batches[0][stages.mesh.dp.rank :: stages.mesh.dp.size]
    if stages.mesh.dp.size > 1:
        model = DistributedDataParallel(stages, process_group=stages.mpu.get_data_parallel_group())
    lines, played = [], 0
    with lifted_casts():
        for number, (what, play, where, raised, text) in enumerate(scenarios(pp, pipelines.ROWS)):
            if number % every or (model is not stages and len(where) < pp):
                continue
            played += 1
            here = stages.stage.index in where
            error: BaseException | None = None
            try:
                (play if here else well)(model, batch)
            except (Oops, RuntimeError) as caught:
                error = caught.with_traceback(None)
            if not here:
                raised, text = RuntimeError, f"stage {list(where)} left the loop"
            if (
                (raised is None) != (error is None)
                or not isinstance(error, raised or type(None))
                or text not in str(error)
            ):
                lines.append(f"{what}: raised {error!r} instead of {raised}: {text}")
            try:
                model(**batch)
            except RuntimeError as caught:
                if "was left before its end" not in str(caught):
                    lines.append(f"{what}: the next call raised {caught!r}")
            else:
                lines.append(f"{what}: the next call did not raise")
            model.zero_grad()
            loss = take_loop(model, batch)
            found = differ("loss", loss, given.loss[stages.mesh.dp.rank], TOLERANCE)
            found += differ_in_gradients(stages, given.gradients)
            lines += [f"after {what}: {line}" for line in found]
            model.zero_grad()
    assert not lines, "\n".join(lines)
    return played


@pytest.mark.parametrize(
    ("variant", "tp", "pp", "every"), [("gpt2", 1, 2, 1), ("gpt2", 1, 4, 1), ("gpt2", 2, 2, 3), ("t5", 1, 4, 3)]
)
def test_a_loop_that_breaks(pool: Pool, variant: str, tp: int, pp: int, every: int, seed: int) -> None:
    played = pool.run(tp * pp, check_faults, lm_case(variant, seed), tp, pp, every, timeout=100)
    assert min(played) > 10


def test_replicas_whose_loops_break(pool: Pool, seed: int) -> None:
    played = pool.run(4, check_faults, lm_case("gpt2", seed, replicas=2), 1, 2, 1, timeout=100)
    assert min(played) > 8
