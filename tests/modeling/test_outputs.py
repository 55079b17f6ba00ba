"""Outputs of forward and generate: logits, tuples, attentions and hidden states, token by token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedConfig

from support import zoo
from support.float64 import lifted_casts
from support.pool import Pool
from support.reference import (
    TOLERANCE,
    Step,
    all_outputs,
    differences,
    full_parameters,
    parallel_model,
    reference_model,
    reference_step,
    step_differences,
    tensors,
)

EVERY_HEAD = [(variant, name) for variant in zoo.FOUNDING for name in zoo.heads(variant)]
LABELS = ("labels", "mc_labels", "next_sentence_label", "start_positions", "end_positions")
GENERATING = ["bert-decoder", "gpt2", "gpt_neo", "gptj", "llama", "llama-one-kv", "t5"]


def without_labels(batch: dict[str, Any]) -> dict[str, Any]:
    """Remove the labels from a batch. An encoder-decoder then needs decoder inputs."""
    kept = {key: value for key, value in batch.items() if key not in LABELS}
    if "decoder_attention_mask" in kept:
        kept.setdefault("decoder_input_ids", kept["input_ids"].flip(1))
    return kept


def check_differentiable(steps: list[Step], tensor_parallel_size: int, attn_implementation: str | None = None) -> None:
    """On every rank: all outputs, and the gradients through them, match the reference."""
    lines = []
    options: dict[str, Any] = {"attn_implementation": attn_implementation} if attn_implementation else {}
    for step in steps:
        model = parallel_model(
            step.name, step.config, step.weights, tensor_parallel_size, gather_logits=True, **options
        )
        lines += [f"{step.name}: {line}" for line in step_differences(model, step)]
    assert not lines, "\n".join(lines)


def check_gathering(
    name: str,
    config: PreTrainedConfig,
    weights: dict[str, Tensor],
    batch: dict[str, Any],
    expected: dict[bool, dict[str, Tensor]],
    fields: tuple[str, ...],
) -> None:
    """On each of two ranks: ``fields`` (the logits over the vocabulary) are present or `None` as expected."""
    lines = []
    for gather in (None, True, False):
        model = parallel_model(name, config, weights, 2, gather_logits=gather)
        for labels in (True, False):
            for grad in (True, False):
                gathered = not labels or gather is True or (gather is None and not grad)
                with torch.set_grad_enabled(grad), lifted_casts():
                    output = model(**(batch if labels else without_labels(batch)))
                case = f"gather_logits={gather}, labels {labels}, gradients {grad}"
                wanted = {key: value for key, value in expected[labels].items() if gathered or key not in fields}
                found = {key: value.detach() for key, value in tensors(output)}
                if found.keys() != wanted.keys():
                    lines.append(f"{case}: {list(found)} instead of {list(wanted)}")
                for key in found.keys() & wanted.keys():
                    lines += differences(f"{case}: {key}", found[key], wanted[key], TOLERANCE)
                if any(type(value) is not Tensor for _, value in tensors(output)):
                    lines.append(f"{case}: something divided got out")
    assert not lines, "\n".join(lines)


@pytest.mark.parametrize("variant", zoo.FOUNDING)
def test_gather_logits_returns_full_logits(pool: Pool, variant: str, seed: int) -> None:
    for name in zoo.lm_heads(variant):
        config = zoo.config(variant)
        model, batch = reference_model(name, config, seed), zoo.batch(name, config, seed)
        expected = {}
        for labels in (True, False):
            with torch.no_grad(), lifted_casts():
                expected[labels] = dict(tensors(model(**(batch if labels else without_labels(batch)))))
        fields = tuple(key for key, value in expected[False].items() if value.shape[-1] == config.vocab_size)
        assert fields
        pool.run(2, check_gathering, name, config, full_parameters(model), batch, expected, fields)


@pytest.mark.parametrize("variant", zoo.FOUNDING)
def test_gathered_logits_are_differentiable(pool: Pool, variant: str, seed: int) -> None:
    names = zoo.lm_heads(variant)
    steps = [reference_step(name, zoo.config(variant), seed, objective=all_outputs) for name in names]
    pool.run(3, check_differentiable, steps, 3)


@pytest.mark.drawn(4)
@pytest.mark.parametrize(
    "variant", [*zoo.FOUNDING, "gpt2-cross", "bert-decoder", "prophetnet", "bigbird_pegasus-sparse", "jetmoe"]
)
def test_output_attentions_and_hidden_states_are_full(pool: Pool, variant: str, seed: int) -> None:
    """On four ranks, with six heads split unevenly; gradients pass through these outputs too.

    JetMoE has three key-value heads, which two ranks share, and lists its query heads in groups.
    """
    names = zoo.heads(variant) if variant in zoo.FOUNDING else [zoo.base(variant), zoo.lm_head(variant)]
    steps = []
    for name in names:
        config = zoo.config(variant)
        batch = {**zoo.batch(name, config, seed), "output_attentions": True, "output_hidden_states": True}
        if variant == "prophetnet":  # its weights precede the softmax: masked positions have the smallest number
            batch = {key: value for key, value in batch.items() if not key.endswith("attention_mask")}
        steps.append(
            reference_step(name, config, seed, objective=all_outputs, batch=batch, attn_implementation="eager")
        )
        kinds = {path.split(".")[0] for path in steps[-1].outputs}
        assert any(kind.endswith("attentions") for kind in kinds), kinds
        assert any(kind.endswith("hidden_states") for kind in kinds), kinds
    count = 2 if variant == "jetmoe" else 4
    pool.run(count, check_differentiable, steps, count, "eager")


Case = tuple[str, PreTrainedConfig, dict[str, Tensor], dict[str, Any], list[Tensor]]


def check_tuples(cases: list[Case]) -> None:
    """On each of two ranks: the same tensors in the same order."""
    lines = []
    for name, config, weights, batch, expected in cases:
        model = parallel_model(name, config, weights, 2, gather_logits=True)
        with lifted_casts():
            output = model(**batch)
        found = [value.detach() for _, value in tensors(output)]
        if type(output) is not tuple or len(found) != len(expected):
            lines.append(f"{name}: {type(output).__name__} of {len(found)} tensors instead of {len(expected)}")
        for index, (own, value) in enumerate(zip(found, expected, strict=False)):
            lines += differences(f"{name}: {index}", own, value, TOLERANCE)
    assert not lines, "\n".join(lines)


@pytest.mark.drawn(4)
@pytest.mark.parametrize("how", ["argument", "configured"])
@pytest.mark.parametrize("variant", zoo.FOUNDING)
def test_forward_returns_the_tuples_of_transformers(pool: Pool, variant: str, how: str, seed: int) -> None:
    cases: list[Case] = []
    for name in zoo.heads(variant):
        config = zoo.config(variant)  # a new one: some transformers models write into theirs
        batch: dict[str, Any] = dict(zoo.batch(name, config, seed))
        if how == "configured":
            config.return_dict = False
        else:
            batch["return_dict"] = False
        model = reference_model(name, config, seed)
        for given in (batch, without_labels(batch)):
            try:
                with torch.no_grad(), lifted_casts():
                    expected = [value for _, value in tensors(model(**given))]
            except AttributeError:  # transformers' forward needs named outputs of its base model
                assert how == "configured"
            else:
                cases.append((name, config, full_parameters(model), given, expected))
    assert cases
    pool.run(2, check_tuples, cases)


Places = tuple[str, PreTrainedConfig, dict[str, Tensor], dict[str, Any], list[bool]]


def check_places(cases: list[Places]) -> None:
    for name, config, weights, batch, expected in cases:
        output = parallel_model(name, config, weights, 2, torch.float32)(**batch, return_dict=False)
        assert [value is None for value in output] == expected, name
        output[0].backward()


@pytest.mark.parametrize("variant", zoo.FOUNDING)
def test_omitted_logits_keep_their_place_in_a_tuple(pool: Pool, variant: str, seed: int) -> None:
    cases: list[Places] = []
    for name in zoo.lm_heads(variant):
        config = zoo.config(variant)
        batch = zoo.batch(name, config, seed, torch.float32)
        model = reference_model(name, config, seed, torch.float32)
        whole_output = model(**batch, return_dict=False)
        divided = [isinstance(value, Tensor) and value.shape[-1:] == (config.vocab_size,) for value in whole_output]
        assert any(divided)
        cases.append((name, config, full_parameters(model), batch, divided))
    pool.run(2, check_places, cases)


@pytest.mark.parametrize("keep", [2, torch.tensor([0, 4])], ids=["last", "some"])
def test_logits_to_keep_selects_positions(pool: Pool, keep: Any, seed: int) -> None:
    steps = []
    for variant, name in EVERY_HEAD:
        if "logits_to_keep" in zoo.parameters_of_forward(name):
            config = zoo.config(variant)
            batch = {**without_labels(zoo.batch(name, config, seed)), "logits_to_keep": keep}
            steps.append(reference_step(name, config, seed, batch=batch))
            assert steps[-1].outputs["logits"].shape[-2] == 2
    assert steps
    pool.run(2, check_differentiable, steps, 2)


@pytest.mark.parametrize("variant", [*zoo.FOUNDING, "gpt2-cross"])
def test_forward_with_inputs_embeds_matches_transformers(pool: Pool, variant: str, seed: int) -> None:
    """The gradient of `inputs_embeds` is compared too."""
    steps = []
    for name in (zoo.base(variant), zoo.lm_head(variant)):
        config = zoo.config(variant)
        batch = zoo.batch(name, config, seed)
        for key, embeds in {"input_ids": "inputs_embeds", "decoder_input_ids": "decoder_inputs_embeds"}.items():
            if key in batch:
                torch.manual_seed(seed)
                batch[embeds] = torch.randn(*batch.pop(key).shape, config.hidden_size, dtype=torch.float64)
        steps.append(reference_step(name, config, seed, batch=batch))
        assert steps[-1].input_gradients
    pool.run(3, check_differentiable, steps, 3)


@pytest.mark.parametrize("variant", ["gpt2", "gpt_neo", "gptj", "llama"])
def test_loss_honours_num_items_in_batch(pool: Pool, variant: str, seed: int) -> None:
    """transformers' Trainer passes the total number of labels of all accumulated batches."""
    name, config = zoo.lm_head(variant), zoo.config(variant)
    batch = zoo.batch(name, config, seed)
    plain = reference_step(name, config, seed, batch=batch)
    step = reference_step(name, config, seed, batch={**batch, "num_items_in_batch": torch.tensor(100)})
    assert step.value < plain.value / 2
    pool.run(2, check_differentiable, [step], 2)


def run_with_token(variant: str, token: int) -> None:
    config = zoo.config(variant)
    model = parallel_model(zoo.base(variant), config, full_parameters(reference_model(zoo.base(variant), config, 0)), 2)
    batch = zoo.batch(zoo.base(variant), config, 0)
    batch["input_ids"][1, 2] = token
    model(**batch)


@pytest.mark.parametrize("token", [-1, 101, 10**6])
def test_token_outside_the_vocabulary_raises_on_all_ranks(pool: Pool, token: int) -> None:
    """All ranks raise the same error as torch."""
    with pytest.raises(IndexError):
        reference_model("GPT2Model", zoo.config("gpt2"), 0)(input_ids=torch.tensor([[1, token]]))
    pool.run(2, run_with_token, "gpt2", token, expect=IndexError)


MODES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "without cache": {"do_sample": False, "use_cache": False},
    "beams": {"do_sample": False, "num_beams": 3},
    "sampling": {"do_sample": True, "top_k": 20},
    "sampled beams": {"do_sample": True, "num_beams": 2},
}


def generate(model: Any, prompt: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    generated = {}
    for mode, options in MODES.items():
        torch.manual_seed(seed)
        with lifted_casts():
            generated[mode] = model.generate(**prompt, **options, max_new_tokens=6)
    return generated


def check_generation(
    name: str,
    config: PreTrainedConfig,
    weights: dict[str, Tensor],
    prompt: dict[str, Tensor],
    expected: dict[str, Tensor],
    seed: int,
    n: int,
) -> None:
    model = parallel_model(name, config, weights, n).eval()
    # Ranks with different random states must still sample alike; the first rank's state counts.
    generated = generate(model, prompt, seed + model.mesh.tp.rank)
    lines = [
        f"{mode}: {generated[mode].tolist()} instead of {tokens.tolist()}"
        for mode, tokens in expected.items()
        if not torch.equal(generated[mode], tokens)
    ]
    assert not lines, "\n".join(lines)


@pytest.mark.drawn(4)
@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("variant", GENERATING)
def test_generate_with_left_padding_matches_transformers(pool: Pool, variant: str, n: int, seed: int) -> None:
    name, config = zoo.lm_head(variant), zoo.config(variant)
    model = reference_model(name, config, seed).eval()
    weights = full_parameters(model)
    batch = zoo.batch(name, config, seed)
    prompt = {key: batch[key] for key in ("input_ids", "attention_mask")}
    expected = generate(model, prompt, seed)
    assert len({tuple(row.tolist()) for tokens in expected.values() for row in tokens}) > 2
    pool.run(n, check_generation, name, config, weights, prompt, expected, seed, n)
