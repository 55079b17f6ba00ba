"""Architectures outside this package with a user's plan: exact at all sizes, through every entry point."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

import oslo_models
from oslo_models import parallel_class
from oslo_models.modeling.apply_plan import layouts_of
from oslo_models.pipeline.split import split_stage
from oslo_models.sharding.plan import ColumnParallel, Norm, Plan, Replicated, VocabParallel
from oslo_models.testing import assert_same_as_one_process

from support.float64 import lifted_casts
from support.own_models import (
    FlatNoteForCausalLM,
    NoteConfig,
    NoteForCausalLM,
    NoteModel,
    ParallelNoteForCausalLM,
    plan_of_base,
    plan_of_lm,
)
from support.pool import Pool
from support.reference import Step, full_gradients, full_parameters, loss_or_all_outputs, step_differences, take_step

CONFIG = NoteConfig()


def reference(seed: int, folder: Path, cls: Any = NoteForCausalLM) -> Step:
    """Save the model in a folder; return its step on one process."""
    torch.manual_seed(seed)
    model = cls(CONFIG).double()
    with torch.no_grad():
        for param in model.parameters():
            param += 0.1 * torch.randn_like(param)
    model.save_pretrained(folder)
    ids = torch.randint(0, 101, (4, 9))
    batch = {"input_ids": ids, "labels": ids} if cls is NoteForCausalLM else {"input_ids": ids}
    outputs, value, inputs = take_step(model, batch, loss_or_all_outputs)
    return Step(cls.__name__, CONFIG, batch, full_parameters(model), outputs, value, full_gradients(model), inputs)


def full_model(folder: Path, cls: Any = NoteForCausalLM) -> Any:
    return cls.from_pretrained(folder, dtype=torch.float64)


def register() -> None:
    hf.AutoConfig.register("note", NoteConfig, exist_ok=True)
    hf.AutoModelForCausalLM.register(NoteConfig, NoteForCausalLM, exist_ok=True)


def by_subclass(folder: Path, **sizes: Any) -> Any:
    return ParallelNoteForCausalLM.from_pretrained_with_parallel(folder, **sizes)


def by_parallel_class(folder: Path, **sizes: Any) -> Any:
    return parallel_class(NoteForCausalLM, plan_of_lm).from_pretrained_with_parallel(folder, **sizes)


def by_auto_class(folder: Path, **sizes: Any) -> Any:
    register()
    return oslo_models.AutoModelForCausalLM.from_pretrained_with_parallel(folder, plan=plan_of_lm, **sizes)


def by_argument(folder: Path, **sizes: Any) -> Any:
    """The plan names modules of the base model; the class still provides the plan of the head."""
    return ParallelNoteForCausalLM.from_pretrained_with_parallel(folder, plan=plan_of_base(CONFIG), **sizes)


def by_initialize(folder: Path, **sizes: Any) -> Any:
    return oslo_models.initialize(full_model(folder), {"model_parallelism": sizes}, plan=plan_of_lm)


def by_section(folder: Path, **sizes: Any) -> Any:
    return oslo_models.initialize(full_model(folder), {"model_parallelism": {**sizes, "plan": plan_of_lm(CONFIG)}})


ENTRIES = [by_subclass, by_parallel_class, by_auto_class, by_argument, by_initialize, by_section]


def compare(entry: Callable[..., Any], step: Step, folder: Path, sizes: dict[str, int]) -> Any:
    model = entry(folder, **sizes)
    assert isinstance(model, NoteForCausalLM) and isinstance(model, oslo_models.ParallelModel)
    return step_differences(model.train(), step, without=("logits",))  # which are not gathered beside a loss


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_plan_is_taken_by_every_entry(entry: Any, pool: Pool, tmp_path: Path, seed: int) -> None:
    step = reference(seed, tmp_path)
    assert pool.run(2, compare, entry, step, tmp_path, {"tensor_parallel_size": 2}) == [[], []]


def train_on_stages(entry: Callable[..., Any], step: Step, folder: Path, tp: int) -> Any:
    """The gradients of the batch in micro-batches, saved merged, and generation over the stages."""
    model = entry(folder, tensor_parallel_size=tp, pipeline_parallel_size=2, micro_batch_size=2).train()
    with lifted_casts():
        total = torch.zeros((), dtype=torch.float64)
        for output in model(**step.batch):
            output.loss.backward()
            total = total + output.loss.detach().nan_to_num()
    lines = []
    for name, param in model.named_parameters(remove_duplicate=False):
        expected = model.layouts[name].shard(step.gradients[name], model.mesh.tp.rank)
        if not torch.allclose(param.grad, expected, rtol=0, atol=1e-10):
            lines.append(name)
    model.save_pretrained_with_parallel(folder / "merged", save_with_merging=True)
    model.save_pretrained_with_parallel(folder / "split")
    tokens = model.eval().generate(step.batch["input_ids"], max_new_tokens=5, do_sample=False)
    return lines, tokens


@pytest.mark.parametrize(("entry", "tp"), [(by_parallel_class, 1), (by_subclass, 2)])
def test_stages_checkpoints_and_generation(entry: Any, tp: int, pool: Pool, tmp_path: Path, seed: int) -> None:
    step = reference(seed, tmp_path)
    expected = full_model(tmp_path).generate(step.batch["input_ids"], max_new_tokens=5, do_sample=False)
    for lines, tokens in pool.run(2 * tp, train_on_stages, entry, step, tmp_path, tp):
        assert lines == [] and torch.equal(tokens, expected)
    assert all(torch.equal(step.weights[name], p) for name, p in full_model(tmp_path / "merged").named_parameters())
    other = {"tensor_parallel_size": 3}
    assert pool.run(3, compare, entry, step, tmp_path / "split", other) == [[], [], []]


def test_threads_take_a_plan(tmp_path: Path, seed: int) -> None:
    for cls, plan in ((NoteForCausalLM, plan_of_lm), (NoteModel, plan_of_base)):
        step = reference(seed, tmp_path, cls)
        full = full_model(tmp_path, cls)
        model = oslo_models.tensor_parallel(full, ["cpu"] * 3, plan=plan).train()
        assert type(model).__name__ == cls.__name__ and isinstance(model, cls)
        outputs, _, _ = take_step(model, step.batch, loss_or_all_outputs)
        for path, value in outputs.items():
            torch.testing.assert_close(value, step.outputs[path], rtol=0, atol=1e-10)
        assert model.state_dict().keys() == full.state_dict().keys()


@pytest.mark.parametrize("in_place", [True, False])
def test_deployments_take_a_plan(forked: None, in_place: bool, tmp_path: Path, seed: int) -> None:
    step, full = reference(seed, tmp_path), full_model(tmp_path)
    with torch.no_grad():
        expected = full(**step.batch).logits
    if in_place:
        model = oslo_models.parallelize(full, num_gpus=2, plan=plan_of_lm)
    else:
        model = parallel_class(NoteForCausalLM, plan_of_lm).from_pretrained_with_parallel(
            tmp_path, tensor_parallel_size=2, deploy=True
        )
    try:
        torch.testing.assert_close(model(**step.batch).logits, expected, rtol=0, atol=1e-10)
    finally:
        model.close()


def test_random_weights_do_not_depend_on_sizes(pool: Pool) -> None:
    (one,), two = pool.run(1, draw, 1), pool.run(2, draw, 2)
    assert one == pytest.approx(sum(two[:1]), abs=1e-12) and two[0] == two[1]


def draw(ranks: int) -> float:
    model = parallel_class(NoteForCausalLM, plan_of_lm).from_config_with_parallel(
        CONFIG, tensor_parallel_size=ranks, seed=3, dtype=torch.float64
    )
    ids = torch.arange(9)[None]
    return float(model.eval()(input_ids=ids, labels=ids).loss)


def test_invalid_plans_are_refused(tmp_path: Path) -> None:
    model = NoteForCausalLM(CONFIG)
    sizes = {"model_parallelism": {"tensor_parallel_size": 1}}
    with pytest.raises(ValueError, match=r"oslo_models has no NoteForCausalLM.*pass plan= to shard it by a plan"):
        oslo_models.initialize(model, sizes)
    with pytest.raises(
        ValueError, match='plan must be a Plan, a function from a configuration to one or "derive", got 7'
    ):
        oslo_models.initialize(model, sizes, plan=7)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="returned 'no' for a NoteConfig, which is not a Plan"):
        oslo_models.initialize(model, sizes, plan=lambda config: "no")  # type: ignore[arg-type,return-value]
    wrong = Plan(embed={"tokens": Replicated()}, blocks={"blocks": {"up": ColumnParallel(), "middle": Norm()}}, head={})
    with pytest.raises(ValueError, match=r"parameters that no entry names: \['model.positions.weight'") as raised:
        oslo_models.tensor_parallel(model, ["cpu", "cpu"], plan=wrong)
    assert "entries that name nothing: ['model.blocks.0.middle', 'model.blocks.1.middle']" in str(raised.value)
    with pytest.raises(ValueError, match="tensor_parallel_size=7 is more than num_heads=6 of NoteConfig"):
        oslo_models.tensor_parallel(model, ["cpu"] * 7, plan=plan_of_lm)
    with pytest.raises(ValueError, match="a subclass of transformers' PreTrainedModel, not "):
        parallel_class(torch.nn.Linear, plan_of_lm)
    assert type(model) is NoteForCausalLM


def flat_plan(config: NoteConfig) -> Plan:
    plan = plan_of_base(config)
    return replace(plan, head={**plan.head, "lm_head": VocabParallel()})


def test_a_head_without_a_base_model_has_no_stages(pool: Pool) -> None:
    """The first output of each stage has to be hidden states; tensor parallelism needs no base model."""
    model = FlatNoteForCausalLM(CONFIG)
    ids = torch.arange(14).view(2, 7)
    assert_same_as_one_process(model, {"input_ids": ids, "labels": ids}, flat_plan, 3)
    messages = pool.run(2, split_flat)
    assert all("FlatNoteForCausalLM are not inside a base model" in message for message in messages)


def split_flat() -> str:
    cls = parallel_class(FlatNoteForCausalLM, flat_plan)
    with pytest.raises(ValueError) as raised:
        cls.from_config_with_parallel(CONFIG, pipeline_parallel_size=2)
    return str(raised.value)


def test_stages_need_the_name_of_the_hidden_size() -> None:
    model = NoteForCausalLM(NoteConfig())
    del model.config.hidden_size
    plan, head = plan_of_base(CONFIG), {"lm_head": VocabParallel()}
    layouts = layouts_of(model, plan, "model.", head, 1)
    with pytest.raises(ValueError, match="NoteConfig has no hidden_size: add attribute_map"):
        split_stage(model, plan, "model.", head, layouts, 0, 2)


def test_different_plans_of_ranks_are_refused(pool: Pool) -> None:
    pool.run(2, differing_plans, expect=ValueError)


def differing_plans() -> None:
    rank = torch.distributed.get_rank()
    plan = plan_of_lm(CONFIG) if rank else plan_of_lm(NoteConfig(num_heads=3))
    parallel_class(NoteForCausalLM, plan_of_lm).from_config_with_parallel(CONFIG, tensor_parallel_size=2, plan=plan)


def test_names_inside_and_outside_of_the_base_model() -> None:
    plan, outside = plan_of_lm(CONFIG).inside("model.")
    assert repr(plan) == repr(plan_of_base(CONFIG))
    assert list(outside) == ["lm_head"]
