"""`generate_batch`: each sequence has the tokens that `generate` returns for its prompt alone."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import GenerationConfig, PreTrainedConfig

import oslo_models
from oslo_models import (
    BambaForCausalLM,
    DeepseekV32ForCausalLM,
    Gemma2ForCausalLM,
    LEDForConditionalGeneration,
    LlamaForCausalLM,
    MiniMaxForCausalLM,
    T5ForConditionalGeneration,
    WhisperForConditionalGeneration,
    XLNetLMHeadModel,
)
from oslo_models.deploy.running_batch import offline
from oslo_models.deploy.running_batch.limits import BatchLimits
from oslo_models.deploy.running_batch.offline import Generated, Planner
from oslo_models.deploy.running_batch.slot_cache import SlotCache
from oslo_models.deploy.running_batch.speculation import DraftSpeed
from oslo_models.distributed.stopping import OtherRankError

from support import running, zoo
from support.float64 import lifted_casts
from support.guesses import Guesses
from support.mutants import Edit, MutantPool
from support.pipelines import model_on_stages
from support.pool import Pool, WorkerError
from support.reference import full_parameters, reference_model
from support.running import forget_states, without_ties

NEW = 6
SIZES = [(1, 1), (2, 1), (1, 2), (2, 2)]
SAMPLED = {"do_sample": True, "temperature": 1.3, "top_k": 12, "top_p": 0.9, "repetition_penalty": 1.2}

Case = tuple[str, PreTrainedConfig, dict[str, Tensor]]


def case(variant: str, seed: int, dropout: float = 0.0, **changes: Any) -> tuple[Any, Case]:
    """Return transformers' model, and its class name, configuration and weights."""
    name = running.encoder_decoder(variant) or zoo.lm_head(variant)
    config = without_ties(zoo.config(variant, **changes))
    config.resid_pdrop = dropout
    model = reference_model(name, config, seed).eval()
    for buffer_name, buffer in model.named_buffers():
        if buffer_name.endswith("bias") and buffer_name != "final_logits_bias":  # biases of routers are no parameters
            buffer.zero_()
    biases = {key: value.clone() for key, value in model.state_dict().items() if key == "final_logits_bias"}  # a buffer
    return model, (name, config, {**full_parameters(model), **biases})


def drawn_prompts(vocabulary: int, seed: int) -> list[list[int]]:
    """Prompts of several lengths; two of them are equal, and one begins like another."""
    draw = random.Random(seed)
    prompts = [[draw.randrange(3, vocabulary) for _ in range(draw.randint(1, 9))] for _ in range(5)]
    return [*prompts, [*prompts[1]], [*prompts[2], 5]]


def alone(model: Any, prompt: list[int], **options: Any) -> list[int]:
    """Return the tokens that `generate` adds to a prompt."""
    ids_BL = torch.tensor([prompt])
    with lifted_casts(), torch.no_grad():
        found = model.generate(ids_BL, attention_mask=torch.ones_like(ids_BL), **options)
    return found[0, 1 if model.config.is_encoder_decoder else len(prompt) :].tolist()


def seeds_after(seed: int, count: int) -> list[int]:
    torch.manual_seed(seed)
    return torch.randint(2**63 - 1, (count,)).tolist()


def check_batches(given: Case, tp: int, pp: int, prompts: list[list[int]], expected: dict[str, Any]) -> None:
    model = model_on_stages(*given, tp, pp)
    model.train()
    attention = model.config._attn_implementation
    frozen = next(module for module in model.modules() if "Norm" in type(module).__name__).eval()
    for rows in (1, 3, None):
        with lifted_casts():
            outputs = model.generate_batch(prompts, max_batch_size=rows, **expected["options"])
        found = [each.generated_tokens for each in outputs.values()]
        assert found == expected["greedy"], (rows, found)
        assert [each.prompt_ids for each in outputs.values()] == prompts
    assert model.training and not frozen.training and model.config._attn_implementation == attention
    config = GenerationConfig(**expected["sampling"], num_return_sequences=2)
    torch.manual_seed(7)
    times = SimpleNamespace(return_logprobs=True)
    with lifted_casts():
        outputs = model.generate_batch(prompts, config, times, record_timestamps=True, max_batch_size=4)
    assert [each.generated_tokens for each in outputs.values()] == expected["sampled"]
    for each in outputs.values():
        assert len(each.logprobs) == len(each.timestamps) == len(each.generated_tokens)
        assert all(value <= 0 for value in each.logprobs) and each.timestamps == sorted(each.timestamps)
    assert list(outputs)[:3] == ["req_0", "req_0__child#0", "req_1"]
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.5)
    with lifted_casts():
        outputs = model.generate_batch(prompts, **expected["options"])
    assert [each.generated_tokens for each in outputs.values()] == expected["halved"]


def expectations(model: Any, prompts: list[list[int]]) -> dict[str, Any]:
    first = [alone(model, prompt, min_new_tokens=NEW, max_new_tokens=NEW, do_sample=False) for prompt in prompts]
    options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": first[0][2], "pad_token_id": 0}
    sampling = {**SAMPLED, "max_new_tokens": NEW, "eos_token_id": first[0][2], "pad_token_id": 0}
    greedy, sampled = [alone(model, prompt, **options) for prompt in prompts], []
    for number, seed in enumerate(seeds_after(7, 2 * len(prompts))):
        torch.manual_seed(seed)
        sampled.append(alone(model, prompts[number // 2], **sampling))
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.5)
    halved = [alone(model, prompt, **options) for prompt in prompts]
    return {"options": options, "sampling": sampling, "greedy": greedy, "sampled": sampled, "halved": halved}


def check_drafts(given: Case, tp: int, pp: int, prompts: list[list[int]], expected: dict[str, Any]) -> None:
    """Rows accept different numbers of drafted tokens; prompts join later, and groups are copied."""
    model = model_on_stages(*given, tp, pp)
    made: list[Guesses] = []

    def following(answers: list[list[int]]) -> Any:
        def drafts(most: int, speed: Any) -> Guesses:
            made.append(Guesses(most, random.Random(len(made)), lambda row: [*answers[row.number], 5, 5, 5]))
            return made[-1]

        return drafts

    with pytest.MonkeyPatch.context() as patch, lifted_casts():
        patch.setattr(offline, "Drafts", following(expected["greedy"]))
        for rows in (1, 3, None):
            streamer = Streamer()
            options = {"max_batch_size": rows, "streamer": streamer, "speculative_tokens": 3}
            outputs = model.generate_batch(prompts, **options, **expected["options"])
            found = [each.generated_tokens for each in outputs.values()]
            assert found == expected["greedy"] == [streamer.tokens[number] for number in range(len(prompts))]
            assert sorted(streamer.ended) == [*range(len(prompts))]
        patch.setattr(offline, "Drafts", following(expected["sampled"]))
        config = GenerationConfig(**expected["sampling"], num_return_sequences=2)
        logprobs: list[Any] = []
        for drafted in (4, None):
            torch.manual_seed(7)
            options = {"max_batch_size": 4, "speculative_tokens": drafted}
            outputs = model.generate_batch(prompts, config, SimpleNamespace(return_logprobs=True), **options)
            assert [each.generated_tokens for each in outputs.values()] == expected["sampled"]
            logprobs.append(torch.tensor([value for each in outputs.values() for value in each.logprobs]))
    torch.testing.assert_close(*logprobs, rtol=1e-6, atol=1e-6)  # processors compute in float32
    assert sum(any(each.widths) for each in made) > 1 and not made[-1].widths  # some answers end soon


@pytest.mark.drawn(4)
@pytest.mark.parametrize(("tp", "pp"), SIZES)
@pytest.mark.parametrize("variant", ["llama", "gpt2", "qwen3_moe", "bloom"])
def test_drafts_change_no_sequence(pool: Pool, variant: str, tp: int, pp: int, seed: int) -> None:
    model, given = case(variant, seed)
    prompts = drawn_prompts(given[1].vocab_size, seed)
    pool.run(tp * pp, check_drafts, given, tp, pp, prompts, expectations(model, prompts))


def check_draft_model(
    given: Case, tp: int, pp: int, sharded: bool, folder: Path, prompts: list[list[int]], expected: Any
) -> None:
    model = model_on_stages(*given, tp, pp)
    small: Any = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64)
    if sharded:
        small = LlamaForCausalLM.from_pretrained_with_parallel(folder, tp * pp, dtype=torch.float64)
    called: list[int] = []
    small.register_forward_pre_hook(lambda module, args: called.append(1))
    steps: list[int] = []
    model.register_forward_pre_hook(lambda module, args: steps.append(1))
    with lifted_casts():
        model.generate_batch(prompts, **expected["options"])
        plain = len(steps)
        outputs = model.generate_batch(prompts, speculative_model=small.train(), **expected["options"])
    assert [each.generated_tokens for each in outputs.values()] == expected["greedy"]
    assert small.training and bool(called) is (sharded or model.mesh.model.rank == tp * (pp - 1))
    decoded = max(map(len, expected["greedy"])) - 1  # the steps of the prompts compute the first tokens
    assert len(steps) - plain == plain - decoded + min(decoded, 1)  # one step computes five tokens
    config = GenerationConfig(**expected["sampling"], num_return_sequences=2)
    torch.manual_seed(7)
    with lifted_casts():
        outputs = model.generate_batch(prompts, config, speculative_model=small, speculative_tokens=2, max_batch_size=3)
    assert [each.generated_tokens for each in outputs.values()] == expected["sampled"]


@pytest.mark.drawn(2)
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
def test_draft_model_changes_no_sequence(
    pool: Pool, tmp_path: Path, tp: int, pp: int, sharded: bool, seed: int
) -> None:
    """The model itself drafts, so that all greedy tokens are accepted."""
    model, given = case("llama", seed)
    model.save_pretrained(tmp_path)
    prompts = drawn_prompts(given[1].vocab_size, seed)
    pool.run(tp * pp, check_draft_model, given, tp, pp, sharded, tmp_path, prompts, expectations(model, prompts))


def check_lookup(given: Case, prompts: list[list[int]], expected: list[list[int]]) -> None:
    model = model_on_stages(*given, 2, 1)
    steps: list[int] = []
    handle = model.register_forward_pre_hook(
        lambda module, args, kwargs: steps.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    options: dict[str, Any] = {"max_new_tokens": 60, "do_sample": False, "pad_token_id": 0}
    with lifted_casts():
        outputs = model.generate_batch(prompts, speculative_tokens=5, **options)
    handle.remove()
    assert [each.generated_tokens for each in outputs.values()] == expected
    assert len(steps) < 50 and max(steps[1:]) == 6


def check_pauses(given: Case, prompts: list[list[int]], expected: list[list[int]]) -> list[int]:
    model = model_on_stages(*given, 2, 1)
    widths: list[int] = []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    decisions: list[bool] = []

    def decides(speed: DraftSpeed, count: int) -> bool:
        assert model.mesh.model.rank == 0 and 1 <= count <= len(prompts)  # the leader
        decisions.append(len(decisions) % 3 == 0)
        return decisions[-1]

    options: dict[str, Any] = {"max_new_tokens": 30, "do_sample": False, "pad_token_id": 0}
    with pytest.MonkeyPatch.context() as patch, lifted_casts():
        patch.setattr(DraftSpeed, "decides", decides)
        outputs = model.generate_batch(prompts, speculative_tokens=5, **options)
    assert [each.generated_tokens for each in outputs.values()] == expected
    assert max(widths[1:]) == 6
    assert all(allowed or width == 1 for width, allowed in zip(widths[1:], decisions, strict=False))
    return widths


def test_ranks_pause_drafts_together(pool: Pool, seed: int) -> None:
    """The leader decides about the drafts of each step, and the others follow."""
    name, config = "GPT2LMHeadModel", zoo.config("gpt2", initializer_range=0.02, n_positions=80)
    model = reference_model(name, config, seed).eval()
    prompts = [[5, 5, 5, 5], [9, 9, 9, 9]]
    options: dict[str, Any] = {"max_new_tokens": 30, "do_sample": False, "pad_token_id": 0}
    expected = [alone(model, prompt, **options) for prompt in prompts]
    leader, other = pool.run(2, check_pauses, (name, config, full_parameters(model)), prompts, expected)
    assert leader == other


def test_repeated_tokens_take_fewer_steps(pool: Pool, seed: int) -> None:
    """A GPT-2 with small tied weights repeats its last token."""
    name, config = "GPT2LMHeadModel", zoo.config("gpt2", initializer_range=0.02, n_positions=80)
    model = reference_model(name, config, seed).eval()
    prompts = [[5, 6, 7], [9, 8]]
    options: dict[str, Any] = {"max_new_tokens": 60, "do_sample": False, "pad_token_id": 0}
    expected = [alone(model, prompt, **options) for prompt in prompts]
    pool.run(2, check_lookup, (name, config, full_parameters(model)), prompts, expected)


@pytest.mark.drawn(6)
@pytest.mark.parametrize(("tp", "pp"), SIZES)
@pytest.mark.parametrize(
    "variant",
    [
        *(pytest.param("llama", marks=pytest.mark.stacks), "gpt2", "gemma3_text", "qwen3_moe", "bloom"),
        *(pytest.param("bamba", marks=pytest.mark.stacks), "jamba"),
        *(pytest.param("t5", marks=pytest.mark.stacks), "bart", "pegasus"),
    ],
)
def test_sequences_have_the_tokens_of_generate(pool: Pool, variant: str, tp: int, pp: int, seed: int) -> None:
    model, given = case(variant, seed)
    prompts = drawn_prompts(given[1].vocab_size, seed)
    pool.run(tp * pp, check_batches, given, tp, pp, prompts, expectations(model, prompts))


def check_log_probabilities(given: Case, tp: int, pp: int, prompts: list[list[int]], expected: Any) -> None:
    model = model_on_stages(*given, tp, pp)
    options = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    for rows in (2, None):
        with lifted_casts():
            keeps = SimpleNamespace(return_logprobs=True)
            outputs = model.generate_batch(prompts, None, keeps, max_batch_size=rows, **options)
        for each, (tokens, logprobs) in zip(outputs.values(), expected, strict=True):
            assert each.generated_tokens == tokens
            found = torch.tensor(each.logprobs, dtype=torch.float64)
            torch.testing.assert_close(found, torch.tensor(logprobs, dtype=torch.float64), rtol=0, atol=1e-10)


def scored(model: Any, prompts: list[list[int]]) -> list[tuple[list[int], list[float]]]:
    """Return the tokens that `generate` adds to each prompt, and their log-probabilities."""
    options = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    found = []
    for prompt in prompts:
        forget_states(model)
        with lifted_casts(), torch.no_grad():
            made = model.generate(torch.tensor([prompt]), return_dict_in_generate=True, output_scores=True, **options)
            scores_LV = torch.cat(made.scores).log_softmax(-1)
        tokens_L = made.sequences[0, len(prompt) :]
        found.append((tokens_L.tolist(), scores_LV.gather(1, tokens_L[:, None])[:, 0].tolist()))
    return found


BY_POSITION = ("glm_moe_dsa-shared", "axk2", "dots3_note_text", "hy_v4", "minimax_m3_vl_text", "qwen4_exp_text")
BY_POSITION += ("inkling_text", "recurrent_gemma")
"""Decoders whose slots hold more than keys and values."""


@pytest.mark.drawn(3)
@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (3, 1), (1, 2)])
@pytest.mark.parametrize(
    "variant",
    ["deepseek_v32", *zoo.cases(each for each in BY_POSITION if each in {**zoo.MORE, **zoo.ODD})],
)
def test_rows_have_the_log_probabilities_of_their_prompt_alone(
    pool: Pool, variant: str, tp: int, pp: int, seed: int
) -> None:
    if reason := zoo.not_computed(variant):
        pytest.skip(reason)
    model, given = case(variant, seed)
    plan: Any = getattr(oslo_models, given[0]).plan(given[1])
    if pp > 1 and (reason := plan.pipeline.single_stage_reason):
        pytest.skip(f"one stage: {reason}")
    prompts = drawn_prompts(given[1].vocab_size, seed)
    pool.run(tp * pp, check_log_probabilities, given, tp, pp, prompts, scored(model, prompts))


def check_long_rows(given: Case, prompts: list[list[int]], expected: Any) -> None:
    check_log_probabilities(given, 2, 1, prompts, expected)
    model = model_on_stages(*given, 2, 1)
    with pytest.raises(ValueError, match=r"more than the original_max_position_embeddings=20 of Phi3ForCausalLM"):
        model.generate_batch([[5] * 9], max_new_tokens=12, do_sample=False)


def test_rows_are_too_short_to_change_the_positions_of_others(pool: Pool, seed: int) -> None:
    rope = {"rope_type": "longrope", "rope_theta": 100.0, "original_max_position_embeddings": 20, "factor": 2.0}
    rope |= {"short_factor": [1.0, 1.5], "long_factor": [2.0, 3.0]}
    model, given = case("phi3", seed, rope_parameters=rope, original_max_position_embeddings=20)
    prompts = drawn_prompts(given[1].vocab_size, seed)
    pool.run(2, check_long_rows, given, prompts, scored(model, prompts))


# Groups and plans -----------------------------------------------------------------------------------------------------


def test_plans_compute_each_group_once_within_the_limits(seed: int) -> None:
    """Any prompts, group sizes and limits: slots are in order, and each sequence gets each of its tokens once."""
    for trial in range(200):
        draw = random.Random(f"{seed} {trial}")
        limits = BatchLimits(draw.randint(1, 6), 64, chunk=draw.randint(2, 12), reuse=False)
        prompts = [[draw.randrange(4) for _ in range(draw.randint(1, 15))] for _ in range(draw.randint(1, 9))]
        sequences = [Generated(number, draw.choice(prompts), 0) for number in range(draw.randint(1, 20))]
        wanted = {each.number: draw.randint(1, 4) for each in sequences}
        planner, slots, computed, partial_ = Planner(sequences, limits), list[Generated](), 0, 0
        while (planned := planner.next()) is not None:
            step, groups = planned
            for slot in step.leaving:
                assert slots[slot].ended
                slots[slot] = slots[-1]
                slots.pop()
            if step.whole:
                assert len(step.chunk) == sum(len(group[0].prompt) for group in groups)
                padded = len(step.whole) * max(prompt.length for prompt in step.whole)
                assert padded <= limits.chunk or len(step.whole) == 1
            elif step.chunk:
                partial_ += len(step.chunk)
                assert len(step.chunk) <= limits.chunk and step.begins == (partial_ == len(step.chunk))
                if step.joins:
                    assert partial_ == len(groups[0][0].prompt)
                    partial_ = 0
            computed += len(groups)
            slots += [group[0] for group in groups] + [each for group in groups for each in group[1:]]
            assert len(slots) <= limits.rows and slots == planner.rows
            if step.tokens:
                assert step.tokens == [row.new[-1] for row in slots]
            for row in slots if step.tokens else [each for group in groups for each in group]:
                assert len({tuple(row.prompt)}) == 1 and not row.ended
                row.new.append(row.number)
                row.ended = len(row.new) == wanted[row.number]
        assert {each.number: len(each.new) for each in sequences} == wanted
        sizes = {tuple(each.prompt): 0 for each in sequences}
        for each in sequences:
            sizes[tuple(each.prompt)] += 1
        assert computed == sum(-(-size // limits.rows) for size in sizes.values())


def test_copies_of_a_row_keep_its_keys_and_values(seed: int) -> None:
    torch.manual_seed(seed)
    cache, given = SlotCache(5, 12), SlotCache(1, 12)
    for length in (4, 6):
        given.clear()
        given.lengths = [0]
        given.make_room(1, length)
        states = torch.randn(2, 1, 2, length, 3)
        given.update(*states, 0)
        given.grow(length)
        cache.append(given.layers, 0, given.stop, length)
    cache.fork(0, 3)
    assert cache.lengths == [4, 6, 4, 4, 4]
    more = torch.randn(2, 5, 2, 1, 3)
    keys, values = cache.update(*more, 0)
    for held, new in ((keys, more[0]), (values, more[1])):
        torch.testing.assert_close(held[:, :, -1:], new)
        for copied in (2, 3, 4):
            torch.testing.assert_close(held[copied, :, :-1], held[0, :, :-1])


def check_work(given: Case, prompt: list[int], folder: Path) -> None:
    model = model_on_stages(*given, 2, 1)
    shapes: list[tuple[int, ...]] = []
    handle = model.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    config = GenerationConfig(
        do_sample=True, min_new_tokens=4, max_new_tokens=4, num_return_sequences=5, pad_token_id=0
    )
    outputs = model.generate_batch([prompt], config)
    handle.remove()
    assert shapes == [(1, len(prompt)), *[(5, 1)] * 3]
    assert len({tuple(each.generated_tokens) for each in outputs.values()}) > 1
    held = [each for each in vars(model).values() if isinstance(each, SlotCache)]
    assert not held and model.generate_batch([]) == {}


def test_the_prompt_of_a_group_is_computed_once(pool: Pool, tmp_path: Path, seed: int) -> None:
    _, given = case("llama", seed)
    pool.run(2, check_work, given, [5, 6, 7, 8], tmp_path)


# Adapters -------------------------------------------------------------------------------------------------------------


def adapt(model: Any, seed: int) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    return get_peft_model(
        model, LoraConfig(target_modules=["q_proj", "down_proj"], lora_alpha=256, init_lora_weights=False)
    )


def check_adapters(given: Case, prompts: list[list[int]], folder: Path, expected: list[list[int]]) -> None:
    from peft import PeftModel

    model = PeftModel.from_pretrained(model_on_stages(*given, 2, 1), folder).train()
    with lifted_casts():
        outputs = model.generate_batch(prompts, max_new_tokens=NEW, do_sample=False, pad_token_id=0)
    assert [each.generated_tokens for each in outputs.values()] == expected


def test_adapters_stay_active(pool: Pool, tmp_path: Path, seed: int) -> None:
    plain, given = case("llama", seed)
    prompts = drawn_prompts(given[1].vocab_size, seed)
    adapted = adapt(plain, seed).eval()
    adapted.save_pretrained(tmp_path)
    options: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    expected = [alone(adapted.base_model.model, prompt, **options) for prompt in prompts]
    with adapted.disable_adapter():
        assert expected != [alone(adapted.base_model.model, prompt, **options) for prompt in prompts]
    pool.run(2, check_adapters, given, prompts, tmp_path, expected)


# Errors ---------------------------------------------------------------------------------------------------------------


class Streamer:
    def __init__(self, fails_at: int | None = None) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.ended: list[int] = []
        self.left = fails_at

    def put(self, number: int, token: int) -> None:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise LookupError("the terminal is gone")
        self.tokens.setdefault(number, []).append(token)

    def end(self, number: int) -> None:
        self.ended.append(number)


def check_streamers(given: Case, tp: int, pp: int) -> None:
    model = model_on_stages(*given, tp, pp)
    rank, prompts = model.mesh.model.rank, [[5, 6, 7], [8, 9]]
    options: dict[str, Any] = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    streamer = Streamer()
    outputs = [*model.generate_batch(prompts, **options, streamer=streamer if rank == 0 else None).values()]
    if rank == 0:
        assert streamer.tokens == {number: each.generated_tokens for number, each in enumerate(outputs)}
        assert sorted(streamer.ended) == [0, 1]
    for fails_at in (3, 7):  # in the middle, and at the last token
        failing = Streamer(fails_at) if rank == 0 else None
        with pytest.raises(LookupError if rank == 0 else OtherRankError):
            model.generate_batch(prompts, **options, streamer=failing)

    def processor(ids_BL: Tensor, scores_BV: Tensor) -> Tensor:
        if ids_BL.shape[1] > 4:
            raise ArithmeticError("no score")
        return scores_BV

    leads = rank == tp * (pp - 1)
    with pytest.raises(ArithmeticError if leads else OtherRankError):
        model.generate_batch(prompts, **options, logits_processor=[processor])
    again = [*model.generate_batch(prompts, **options).values()]
    assert [each.generated_tokens for each in again] == [each.generated_tokens for each in outputs]


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
def test_errors_of_user_code_are_raised_on_all_ranks(pool: Pool, tp: int, pp: int, seed: int) -> None:
    _, given = case("llama", seed)
    pool.run(2, check_streamers, given, tp, pp)


REFUSED: dict[str, tuple[str, Any]] = {
    "beams": ("does not support num_beams=3: leave it out", {"num_beams": 3}),
    "greedy copies": ("num_return_sequences=2 needs do_sample=True", {"num_return_sequences": 2}),
    "no room": ("max_new_tokens=0 leaves no room", {"max_new_tokens": 0}),
    "positions": ("more than the max_position_embeddings=", {"max_new_tokens": 10_000}),
    "rows": ("max_batch_size must be at least 1, got 0", {"max_batch_size": 0}),
    "drafts": ("speculative_tokens must be from 1 to 32, or left out for none; got 0", {"speculative_tokens": 0}),
    "mask": ("has no argument attention_mask: it takes settings", {"attention_mask": torch.ones(1, 2)}),
    "empty": (r"inputs\[1\] is empty", {"inputs": [[1], []]}),
    "token": (r"inputs\[0\] has the token 9999; the vocabulary has", {"inputs": [[1, 9999]]}),
    "differing": ("ranks were given different arguments of generate_batch:\n  hash of inputs", {"inputs": "by rank"}),
}


def check_refusals(given: Case) -> None:
    model = model_on_stages(*given, 2, 1)
    for message, options in REFUSED.values():
        options = {"inputs": [[1, 2]], "do_sample": False, **options}
        if options["inputs"] == "by rank":
            options["inputs"] = [[1, 2 + model.mesh.tp.rank]]
        with pytest.raises(ValueError, match=message):
            model.generate_batch(**options)
    with pytest.raises(ValueError, match=r"max_batch_size: rank 0 has 1, rank 1 has 2"):
        model.generate_batch([[1, 2]], do_sample=False, max_batch_size=1 + model.mesh.tp.rank)
    with pytest.raises(ValueError, match=r"speculative_tokens: rank 0 has 1, rank 1 has 2"):
        model.generate_batch([[1, 2]], do_sample=False, speculative_tokens=1 + model.mesh.tp.rank)
    with pytest.raises(ValueError, match="hash of inputs"):
        model.generate_batch([[1, 2]] * model.mesh.tp.rank, do_sample=False)
    minimax: Any = MiniMaxForCausalLM.from_config_with_parallel(zoo.config("minimax"), 2, seed=0)
    with pytest.raises(ValueError, match=r"speculative_tokens=2 is not possible for MiniMaxForCausalLM: some of its"):
        minimax.generate_batch([[1, 2]], max_new_tokens=2, speculative_tokens=2)
    bamba: Any = BambaForCausalLM.from_config_with_parallel(zoo.config("bamba"), 2, seed=0, sequence_parallel=True)
    with pytest.raises(ValueError, match=r"run BambaForCausalLM: .* not tested with sequence_parallel=True; call gen"):
        bamba.generate_batch([[1, 2]])
    sparse: Any = DeepseekV32ForCausalLM.from_config_with_parallel(
        zoo.config("deepseek_v32"), 2, seed=0, sequence_parallel=True
    )
    with pytest.raises(ValueError, match=r"keep keys of an indexer, which was not tested with sequence_parallel=True"):
        sparse.generate_batch([[1, 2]])
    minimax: Any = MiniMaxForCausalLM.from_config_with_parallel(zoo.config("minimax"), 2, seed=0)
    with pytest.raises(
        ValueError, match=r"common_draws=True does not work with prompts of different .*MiniMaxForCausalLM: its blocks"
    ):
        minimax.generate_batch([[1, 2], [3]], max_new_tokens=2, common_draws=True)
    t5: Any = T5ForConditionalGeneration.from_config_with_parallel(zoo.config("t5"), 2, seed=0)
    with pytest.raises(ValueError, match=r"speculative_tokens=2 is not possible for T5For.*: its decoder counts"):
        t5.generate_batch([[1, 2]], max_new_tokens=2, speculative_tokens=2)
    with pytest.raises(ValueError, match=r"decoder_start_token_id=\[0, 0\]: generate_batch needs the token with which"):
        t5.generate_batch([[1, 2]], max_new_tokens=2, decoder_start_token_id=[0, 0])
    led: Any = LEDForConditionalGeneration.from_config_with_parallel(zoo.config("led"), 2, seed=0)
    hears: Any = WhisperForConditionalGeneration.from_config_with_parallel(zoo.config("whisper"), 2, seed=0)
    with pytest.raises(ValueError, match=r"run WhisperFor.*: its prompts are sounds; call generate"):
        hears.generate_batch([[5]])
    with pytest.raises(ValueError, match=r"run LEDFor.*: its decoder reads no mask when it computes one token; call"):
        led.generate_batch([[1, 2]], max_new_tokens=2)
    xlnet: Any = XLNetLMHeadModel.from_config_with_parallel(zoo.config("xlnet"), 2, seed=0)
    with pytest.raises(ValueError, match=r"run XLNetLMHeadModel: it predicts with a separate query.*; call generate"):
        xlnet.generate_batch([[1, 2]])
    plain: Any = transformers.LlamaForCausalLM(zoo.config("llama"))
    with pytest.raises(ValueError, match=r"speculative_model must be a model of this library, such as Llama"):
        model.generate_batch([[1, 2]], max_new_tokens=2, speculative_model=plain)
    with pytest.raises(ValueError, match="speculative_model: rank 0 has False, rank 1 has True"):
        full = LlamaForCausalLM(zoo.config("llama")) if model.mesh.tp.rank else None
        model.generate_batch([[1, 2]], max_new_tokens=2, speculative_model=full)
    staged: Any = LlamaForCausalLM.from_config_with_parallel(zoo.config("llama"), 1, 2, seed=0)
    with pytest.raises(ValueError, match=r"sharded by tensor_parallel_size=2 alone, .*got tensor_parallel_size=1, pip"):
        model.generate_batch([[1, 2]], max_new_tokens=2, speculative_model=staged)
    gemma: Any = Gemma2ForCausalLM.from_config_with_parallel(zoo.config("gemma2"), 2, seed=0)
    with pytest.raises(ValueError, match=r"speculative_tokens=2 is not possible for Gemma2ForCausalLM: some of its"):
        gemma.generate_batch([[1, 2]], max_new_tokens=2, speculative_tokens=2)


def test_unsupported_calls_are_refused_on_every_rank(pool: Pool, seed: int) -> None:
    _, given = case("llama", seed)
    pool.run(2, check_refusals, given)


def test_a_full_model_generates_by_transformers() -> None:
    model: Any = LlamaForCausalLM(zoo.config("llama"))
    with pytest.raises(ValueError, match="num_return_sequences=2 of a full model belongs into generation_config"):
        model.generate_batch([[1, 2]], num_return_sequences=2)
    with pytest.raises(ValueError, match="speculative_tokens and speculative_model need a sharded model"):
        model.generate_batch([[1, 2]], speculative_tokens=2)


# Mutants --------------------------------------------------------------------------------------------------------------

OFFLINE = "deploy.running_batch.offline"
MUTANTS = {
    "logits of another prompt": Edit(
        f"{OFFLINE}:OfflineBatch._fork", "[*range(len(groups)), *copies]", "[*range(len(groups)), *[0] * len(copies)]"
    ),
    "keys of another prompt": Edit(f"{OFFLINE}:OfflineBatch._fork", "first + index,", "first,"),
    "seeds of a group": Edit(
        f"{OFFLINE}:OfflineBatch._prepare", "(each.number, each.seed)", "(each.number, group[0].seed)"
    ),
    "dropout": Edit("modeling.batch_generation:_evaluating", "model.eval()", "pass"),
}


@pytest.mark.drawn(1)
@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_caught(pool: Pool, name: str, seed: int) -> None:
    model, given = case("gpt2", seed, dropout=0.3) if name == "dropout" else case("llama", seed)
    draw = random.Random(seed)
    prompts = [[draw.randrange(3, given[1].vocab_size) for _ in range(5)] for _ in range(4)]  # join two at a time
    expected = expectations(model, prompts)
    pool.run(2, check_batches, given, 2, 1, prompts, expected)
    with pytest.raises(WorkerError, match="AssertionError"):
        MutantPool(pool, MUTANTS[name]).run(2, check_batches, given, 2, 1, prompts, expected)


DRAFTED_MUTANTS = {
    "tokens after the end token": Edit("deploy.running_batch.speculation:going_on", "and not rows[index].ended", ""),
    "tokens after the last one": Edit(f"{OFFLINE}:OfflineBatch._take", "if mark:", "if True:"),
    "unsettled cache": Edit(f"{OFFLINE}:Planner.next", "step.settled = settled", "pass"),
    "probabilities of another position": Edit(
        f"{OFFLINE}:OfflineBatch._choose", "chosen[2, going, place]", "chosen[2, going, 0]"
    ),
}


@pytest.mark.drawn(1)
@pytest.mark.parametrize("name", DRAFTED_MUTANTS)
def test_mutants_of_drafts_are_caught(pool: Pool, name: str, seed: int) -> None:
    model, given = case("llama", seed)
    prompts = drawn_prompts(given[1].vocab_size, seed)
    expected = expectations(model, prompts)
    pool.run(2, check_drafts, given, 2, 1, prompts, expected)
    with pytest.raises(WorkerError, match=r"AssertionError|IndexError|KeyError"):
        MutantPool(pool, DRAFTED_MUTANTS[name]).run(2, check_drafts, given, 2, 1, prompts, expected)
