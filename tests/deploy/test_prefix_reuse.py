"""Prompts reuse the cached keys and values of their prefixes."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from oslo_models import GPT2LMHeadModel, registry
from oslo_models.deploy.running_batch.limits import BatchLimits
from oslo_models.deploy.running_batch.prefixes import Prefixes
from oslo_models.deploy.running_batch.scheduler import Scheduler
from oslo_models.deploy.running_batch.speculation import Drafts
from oslo_models.deploy.running_batch.step import Step

from support import deployment, zoo
from support.reference import reference_model


class Row:
    """A row with given new tokens, without a model."""

    def __init__(self, number: int, prompt: list[int], answer: list[int], tenant: int = 0) -> None:
        self.number, self.prompt, self.answer, self.tenant = number, prompt, answer, tenant
        self.keys, self.images, self.adapter = prompt, None, 0
        self.new: list[int] = []
        self.ended, self.shares = False, True

    def take(self) -> None:
        self.new.append(self.answer[len(self.new)])
        self.ended = self.ended or len(self.new) == len(self.answer)


class Slots:
    """A follower rank: derives the tokens cached in each slot from the steps alone."""

    def __init__(self, slots: int) -> None:
        self.held: list[list[int]] = [[] for _ in range(slots)]
        self.rows, self.prompt = 0, list[int]()

    def run(self, step: Step) -> None:
        for slot in step.leaving:
            self.rows -= 1
            self.held[slot], self.held[self.rows] = self.held[self.rows], self.held[slot]
        for slot, token in enumerate(step.tokens):
            self.held[slot].append(token)
        chunk = list(step.chunk)
        for _, length, displaced, _ in step.whole:
            self.join(chunk[:length], displaced)
            chunk = chunk[length:]
        if step.begins:
            self.prompt = self.held[step.source][: step.reused]
        self.prompt = [*self.prompt, *chunk]
        if step.joins:
            self.join(self.prompt, step.displaced)

    def join(self, prompt: list[int], displaced: int) -> None:
        if displaced >= 0:
            self.held[displaced] = self.held[self.rows]
        self.held[self.rows] = prompt
        self.rows += 1


TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=9)
CALLS = st.lists(st.tuples(TOKENS, TOKENS, st.integers(0, 12), st.integers(0, 25)), max_size=14)


@given(CALLS, st.integers(1, 4), st.integers(1, 3))
def test_reused_tokens_are_a_prefix_of_the_prompt(calls: list[Any], slots: int, least: int) -> None:
    """Rows join, leave, are cancelled or displaced. No cached prefix of ``least`` tokens or more is recomputed."""
    scheduler, follower = Scheduler(slots, 3, Prefixes(slots, least)), Slots(slots)
    arrivals = [(when, Row(number, prompt, answer)) for number, (prompt, answer, when, _) in enumerate(calls)]
    cancelled = {number: at for number, (*_, at) in enumerate(calls)}
    number = 0
    while arrivals or not scheduler.is_idle:
        for arrival in [each for each in arrivals if each[0] <= number]:
            arrivals.remove(arrival)
            scheduler.add(arrival[1])
        scheduler.drop(lambda row: cancelled[row.number] == number)  # noqa: B023
        before = [list(held) for held in follower.held]
        step, number = scheduler.plan(number), number + 1
        assert Step.decode(step.encode()) == step and number < 500
        follower.run(step)
        if step.begins:
            prompt = calls[step.number][0]
            assert step.chunk and follower.prompt == prompt[: step.reused + len(step.chunk)]
            assert step.reused == 0 or least <= step.reused < len(prompt)
            if slots == 1 and before[0] == prompt[: len(before[0])] and least <= len(before[0]) < len(prompt):
                assert step.reused == len(before[0])
        assert follower.rows == len(scheduler.rows)
        joined = range(follower.rows - step.joining, follower.rows)
        assert all(follower.held[slot] == scheduler.rows[slot].prompt for slot in joined)
        prompts = [calls[prompt.number][0] for prompt in step.whole]
        for index, prompt in enumerate(prompts):  # no prompt begins with a cached prefix or with an earlier prompt
            there = [*before, *prompts[:index]]
            assert not any(len(held) >= least and prompt[:-1][:least] == held[:least] for held in there if slots == 1)
            assert not any(prompt[:-1][:least] == each[:least] for each in prompts[:index] if len(prompt) > least)
        for row in scheduler.rows[-step.joining :] if step.joining else scheduler.rows[: len(step.tokens)]:
            row.take()


def test_least_recently_used_is_lost_and_contained_ones_first() -> None:
    prefixes = Prefixes(4, least=2)
    for slot in (2, 3, 1):
        prefixes.keep(slot, [slot, slot, slot, slot])
    assert prefixes.find([2, 2, 2, 2], []) == (2, 3)  # the last token is always computed
    assert prefixes.find([3, 9, 9], []) == (0, 0)  # one token is below the minimum
    assert prefixes.find([1, 1, 9, 9], [[0], [1, 1, 9]]) == (1, 3)  # a running row has the longest prefix
    assert prefixes.displace(0, [7, 7]) == -1  # the slot is empty
    assert prefixes.displace(1, [7, 7]) == 3  # the others are full: the prefix in slot 3 is lost
    assert prefixes.find([3, 3, 3], []) == (0, 0) and prefixes.find([1, 1, 1], []) == (3, 2)
    prefixes.keep(1, [5, 5])
    assert prefixes.displace(1, [1, 1, 1, 1, 4]) == 3  # the row contains the prefix in slot 3
    assert prefixes.find([1, 1, 1], []) == (0, 0) and prefixes.find([5, 5, 5], []) == (3, 2)
    assert prefixes.displace(2, [7, 7]) == -1  # the others are newer
    assert prefixes.find([2, 2, 2], []) == (0, 0)
    prefixes.clear()
    assert prefixes.find([5, 5, 5], []) == (0, 0)


def test_rows_with_states_are_reused_as_a_whole() -> None:
    """A state covers all tokens of its row, so it continues only prompts that begin with all of them."""
    prefixes = Prefixes(4, least=2, is_exact=True)
    prefixes.keep(3, [1, 2, 3, 4])
    assert prefixes.find([1, 2, 3, 4], []) == (0, 0)  # the last token has to be computed
    assert prefixes.find([1, 2, 3, 9, 9], []) == (0, 0)
    assert prefixes.find([1, 2, 3, 4, 9], [[1, 2, 9], [1, 2]]) == (3, 4)
    assert prefixes.find([1, 2, 3, 4, 9], [[1, 2, 3, 4, 9], [1, 2, 3, 4, 9, 9]]) == (3, 4)
    assert prefixes.are_alike([1, 2, 3], [1, 2]) and not prefixes.are_alike([1, 2, 3], [1, 2, 9])
    prefixes.keep(2, [1, 2, 3, 4, 5])  # the shorter state stays of use for other continuations
    assert prefixes.find([1, 2, 3, 4, 9], []) == (3, 4) and prefixes.find([1, 2, 3, 4, 5, 6], []) == (2, 5)
    prefixes.keep(1, [1, 2, 3, 4])
    assert prefixes.find([1, 2, 3, 4, 9], []) == (1, 4)


def test_prompts_reuse_rows_of_their_tenant_only() -> None:
    """Rows that run, and rows that have ended. Rows of another tenant are neither reused nor replaced."""
    scheduler, prompt = Scheduler(4, 16, Prefixes(4, 2)), [1, 2, 3, 4]
    reused = []
    for number, (tenant, answer) in enumerate([(7, [5, 6]), (8, [5]), (7, [5]), (8, [5]), (7, [5]), (9, [5])]):
        scheduler.add(Row(number, prompt, answer, tenant))
        step = scheduler.plan(0)
        assert step.joining == 1
        reused.append(step.reused)
        scheduler.rows[-1].take()
        if number == 3:  # all leave
            scheduler.rows[0].take()
    assert reused == [0, 0, 3, 3, 3, 0]
    both = [Row(number, prompt, [5], tenant) for number, tenant in enumerate((3, 4))]
    for row in both:
        scheduler.add(row)
    assert [prompt.length for prompt in scheduler.plan(0).whole] == [4, 4]  # not after each other


@pytest.mark.parametrize(("is_dropped", "reused"), [(False, 5), (True, 0)])
def test_state_of_a_row_that_is_dropped_is_not_reused(is_dropped: bool, reused: int) -> None:
    """The step that was published before may have advanced the state by the newest token."""
    scheduler = Scheduler.of(BatchLimits(2, 32, 8, has_states=True), Prefixes(2, 2, is_exact=True), Drafts(0))
    row = Row(0, [1, 2, 3, 4], [5, 6])
    scheduler.add(row)
    assert scheduler.plan(0).joining == 1
    row.take()
    assert scheduler.plan(0).tokens == [5]
    if is_dropped:
        scheduler.drop(lambda each: True)
    else:
        row.take()
    scheduler.add(Row(1, [1, 2, 3, 4, 5, 7], [8]))
    step = scheduler.plan(0)
    assert step.leaving == [0] and step.reused == reused


def test_prompts_with_states_are_not_padded() -> None:
    scheduler = Scheduler.of(BatchLimits(4, 32, 16, has_states=True), None, Drafts(0))
    for number, length in enumerate((3, 3, 4, 4)):
        scheduler.add(Row(number, [*range(length)], [5]))
    assert [prompt.length for prompt in scheduler.plan(0).whole] == [3, 3]


def test_long_prompts_are_computed_in_one_step() -> None:
    """For models that cannot continue a prompt from a state."""
    scheduler = Scheduler.of(BatchLimits(2, 64, 4, has_states=True, splits=False), None, Drafts(0))
    scheduler.add(Row(0, [*range(30)], [5]))
    step = scheduler.plan(0)
    assert step.chunk == [*range(30)] and step.begins and step.joins


SIZES: list[dict[str, Any]] = [
    {"tensor_parallel_size": 1},
    {"tensor_parallel_size": 2},
    {"pipeline_parallel_size": 2},
]


@pytest.mark.parametrize("sizes", SIZES)
def test_deployed_model_counts_reused_tokens(tmp_path: Path, seed: int, sizes: dict[str, Any]) -> None:
    """It reuses prefixes also after idle times, with unchanged tokens, but not after an adapter or ``fuse``."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    torch.manual_seed(seed)
    whole: Any = transformers.GPT2LMHeadModel(deployment.SENSITIVE).double().eval()
    whole.save_pretrained(tmp_path / "base")
    config = peft.LoraConfig(r=3, lora_alpha=40, target_modules=["c_attn"], init_lora_weights=False)
    adapted = peft.get_peft_model(copy.deepcopy(whole), config).eval()
    adapted.save_pretrained(tmp_path / "adapter")
    batch, options = deployment.prompt(seed, 1, 30), {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    expected, other = whole.generate(**batch, **options), adapted.generate(**batch, **options)
    assert not torch.equal(expected, other)
    made = GPT2LMHeadModel.from_pretrained_with_parallel(
        tmp_path / "base", deploy=True, dtype=torch.float64, max_batch_size=2, **sizes
    )
    with made as model:
        for change, found, reused in (
            (None, expected, 0),
            (None, expected, 29),
            (lambda: model.load_adapter(tmp_path / "adapter"), other, 0),
            (lambda: model(**batch), other, 29),
            (model.disable_adapters, expected, 0),
            (model.reserve_batch, expected, 29),
        ):
            before = model.reused_prompt_tokens
            if change is not None:
                change()
            assert torch.equal(model.generate(**batch, **options), found)
            assert model.reused_prompt_tokens - before == reused
        turn = {"input_ids": torch.cat([expected, batch["input_ids"]], 1)}
        turn["attention_mask"] = torch.ones_like(turn["input_ids"])
        assert torch.equal(model.generate(**turn, **options), whole.generate(**turn, **options))
        assert model.reused_prompt_tokens - before == 29 + 37


@pytest.mark.parametrize("sizes", SIZES)
def test_next_turn_continues_from_the_state(tmp_path: Path, seed: int, sizes: dict[str, Any]) -> None:
    """A hybrid decoder reuses a former row as a whole, and computes other prompts in full."""
    name, config = zoo.lm_head("bamba"), zoo.config("bamba")
    whole = reference_model(name, config, seed, torch.float64).eval()
    whole.save_pretrained(tmp_path)
    cls: Any = registry.find(name)
    options = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    batch = deployment.prompt(seed, 1, 10)
    answer = whole.generate(**batch, **options)
    turn = torch.cat([answer, batch["input_ids"][:, :6]], 1)
    with cls.from_pretrained_with_parallel(tmp_path, deploy=True, dtype=torch.float64, **sizes) as model:
        for ids_BL, reused in ((batch["input_ids"], 0), (turn, 14), (batch["input_ids"], 0), (turn[:, :-3], 14)):
            given, before = {"input_ids": ids_BL, "attention_mask": torch.ones_like(ids_BL)}, model.reused_prompt_tokens
            assert torch.equal(model.generate(**given, **options), whole.generate(**given, **options))
            assert model.reused_prompt_tokens - before == reused


def test_reuse_can_be_turned_off(tmp_path: Path, seed: int) -> None:
    whole: Any = transformers.GPT2LMHeadModel(deployment.SENSITIVE).double().eval()
    whole.save_pretrained(tmp_path)
    batch, options = deployment.prompt(seed, 1, 30), {"max_new_tokens": 4, "do_sample": False}
    made = GPT2LMHeadModel.from_pretrained_with_parallel(
        tmp_path, deploy=True, dtype=torch.float64, reuse_prefixes=False
    )
    with made as model:
        for _ in range(2):
            assert torch.equal(model.generate(**batch, **options), whole.generate(**batch, **options))
        assert model.reused_prompt_tokens == 0 and "prefixes" not in model.describe_batch()


def test_deployed_model_reuses_prefixes_of_one_tenant(tmp_path: Path, seed: int) -> None:
    """Former rows of other tenants stay beside its own."""
    torch.manual_seed(seed)
    whole: Any = transformers.GPT2LMHeadModel(deployment.SENSITIVE).double().eval()
    whole.save_pretrained(tmp_path)
    batch, options = deployment.prompt(seed, 1, 30), {"max_new_tokens": 4, "do_sample": False}
    expected = whole.generate(**batch, **options)
    with GPT2LMHeadModel.from_pretrained_with_parallel(tmp_path, deploy=True, dtype=torch.float64) as model:
        for tenant, reused in ((5, 0), (7, 0), (5, 29), (0, 0), (7, 29), (0, 29)):
            known = model.reused_prompt_tokens
            assert torch.equal(model.generate(**batch, **options, tenant=tenant), expected)
            assert model.reused_prompt_tokens - known == reused
        with pytest.raises(ValueError, match="tenant must be an integer"):
            model.generate(**batch, **options, tenant=-1)
