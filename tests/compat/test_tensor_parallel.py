"""`tensor_parallel`: ranks are threads of this process and compute, train, generate and save as one model does."""

from __future__ import annotations

import copy
import signal
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from torch import Tensor

import oslo_models
from oslo_models.cache_argument import generation_name
from oslo_models.distributed.mesh import ParallelMesh
from oslo_models.distributed.thread_group import ThreadGroup

from support import zoo
from support.dropout_masks import RATE, Recorder, Replay, Shapes, check_masks, join_masks
from support.float64 import lifted_casts
from support.pool import Pool
from support.reference import (
    TOLERANCE,
    differences,
    full_gradients,
    full_parameters,
    reference_model,
    shard_differences,
    take_step,
    train,
)
from support.tensor_parallel import check_tensor_parallel_step, tensor_parallel_model, transformers_model

pytestmark = pytest.mark.drawn(15, of="file")


@pytest.mark.parametrize(("variant", "n"), [("gpt2", 2), ("llama", 3), ("t5", 2), ("gpt2-cross", 3)])
def test_tensor_parallel_step_matches_transformers(variant: str, n: int, seed: int) -> None:
    check_tensor_parallel_step(zoo.lm_head(variant), variant, n, seed)


@pytest.mark.zoo
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("variant", [*zoo.VARIANTS, *zoo.MORE])
def test_tensor_parallel_step_of_every_architecture_matches_transformers(
    variant: str, sharded: bool, seed: int
) -> None:
    check_tensor_parallel_step(zoo.main_head(variant), variant, 2, seed, sharded=sharded)


@pytest.mark.parametrize(
    ("optimizer", "variant", "sharded"),
    [("SGD", "gpt2", False), ("AdamW", "llama", False), ("AdamW", "t5", False), ("AdamW", "gpt2", True)],
)
def test_tensor_parallel_trains_and_saves_as_transformers(
    tmp_path: Path, optimizer: str, variant: str, sharded: bool, seed: int
) -> None:
    name, config = zoo.lm_head(variant), zoo.config(variant)
    model = transformers_model(variant, seed)
    other = tensor_parallel_model(model, 3, sharded=sharded)
    initial, batches = other.state_dict(), [zoo.batch(name, config, seed + step) for step in range(2)]
    assert train(other, batches, optimizer) == pytest.approx(train(model, batches, optimizer), abs=TOLERANCE)
    trained = full_parameters(model)
    other.save_pretrained(tmp_path / "one")
    with oslo_models.save_tensor_parallel(other):
        torch.save(other.state_dict(), tmp_path / "state.pt")
    states = {
        "state_dict": other.state_dict(),
        "save_pretrained": full_parameters(type(model).from_pretrained(tmp_path / "one")),
        "torch.save": torch.load(tmp_path / "state.pt"),
    }
    assert list(states["state_dict"]) == list(model.state_dict())
    for kind, state in states.items():
        lines = [line for key in trained for line in differences(f"{kind} {key}", state[key], trained[key], TOLERANCE)]
        assert not lines, "\n".join(lines)
    copied = copy.deepcopy(other)
    other.load_state_dict(initial)
    assert all(torch.equal(tensor, initial[key]) for key, tensor in other.state_dict().items())
    assert all(torch.equal(tensor, states["state_dict"][key]) for key, tensor in copied.state_dict().items())


def test_clip_grad_norm_counts_each_parameter_once(seed: int) -> None:
    """Each parameter counts once. GPT-2's head is tied, and Llama's ranks share a key-value head."""
    for variant in ("gpt2", "llama-one-kv"):
        model, name = transformers_model(variant, seed), zoo.lm_head(variant)
        other, batch = tensor_parallel_model(model), zoo.batch(name, model.config, seed)
        for each in (model, other):
            take_step(each, batch, lambda output: output.loss)
        norms = [torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1).item(), other.clip_grad_norm_(0.1).item()]
        assert norms[0] == pytest.approx(norms[1], abs=TOLERANCE)
        expected = full_gradients(model)
        for part in other.parts:
            own = {key: param.grad for key, param in part.named_parameters(remove_duplicate=False)}
            assert not shard_differences(
                part, "gradient of", own, expected, 1e-7
            )  # torch's clipping adds 1e-6 to its norm


class RecorderOfThreads(Recorder):
    """Records the masks of each thread separately."""

    def __init__(self) -> None:
        super().__init__()
        self.of: dict[int, list[Tensor]] = defaultdict(list)

    def drop(self, x: Tensor, p: float) -> Tensor:
        self.masks = self.of[threading.get_ident()]
        return super().drop(x, p)


@pytest.mark.parametrize("variant", ["gpt2", "t5"])
def test_tensor_parallel_dropout_matches_a_replay_of_its_masks(variant: str, seed: int) -> None:
    """Masks of replicated activations are equal, others differ; the step matches one process with these masks."""
    model = transformers_model(variant, seed, RATE, attn_implementation="eager")
    other, batch = tensor_parallel_model(model), zoo.batch(zoo.lm_head(variant), model.config, seed)
    torch.manual_seed(seed)
    with lifted_casts(), RecorderOfThreads() as recorder:
        loss = other(**batch).loss
    loss.backward()
    masks = [recorder.of.pop(threading.get_ident()), *recorder.of.values()]
    with lifted_casts(), Shapes() as calls:
        model(**batch)
    joined = [
        join_masks(of_ranks, shape) for of_ranks, shape in zip(zip(*masks, strict=True), calls.shapes, strict=True)
    ]
    with lifted_casts(), Replay([mask for mask, _ in joined]):
        expected = model(**batch).loss
    expected.backward()
    lines = differences("loss", loss.detach(), expected.detach(), TOLERANCE)
    for part in other.parts:
        own = {name: param.grad for name, param in part.named_parameters(remove_duplicate=False)}
        lines += shard_differences(part, "gradient of", own, full_gradients(model), TOLERANCE)
    assert not lines, "\n".join(lines)
    check_masks([mask for mask, sharded in joined if sharded], [mask for mask, sharded in joined if not sharded], masks)


def test_activation_checkpointing_draws_the_same_dropout_masks(seed: int) -> None:
    model = transformers_model("gpt2", seed, RATE)
    other, batch, gradients = tensor_parallel_model(model), zoo.batch("GPT2LMHeadModel", model.config, seed), []
    for reentrant in (None, False, True):
        if reentrant is not None:
            other.activation_checkpointing_enable({"use_reentrant": reentrant})
        other.zero_grad()
        torch.manual_seed(seed)
        other(**batch).loss.backward()
        gradients.append([param.grad for param in other.parameters()])
    for checkpointed in gradients[1:]:
        torch.testing.assert_close(checkpointed, gradients[0], rtol=0, atol=TOLERANCE)


def test_wav2vec2_numpy_masks_match_transformers(seed: int) -> None:
    """Wav2Vec2 draws the same masks as transformers in training."""
    masks = {"mask_time_prob": 0.3, "mask_time_length": 2, "mask_feature_prob": 0.2, "mask_feature_length": 2}
    config = zoo.config("wav2vec2", apply_spec_augment=True, **masks)
    model = reference_model("Wav2Vec2Model", config, seed)
    batch, outputs = zoo.batch("Wav2Vec2Model", config, seed), []
    for each in (model, tensor_parallel_model(model)):
        np.random.seed(seed)
        with lifted_casts():
            outputs.append((each(**batch).last_hidden_state.detach(), np.random.rand()))
    torch.testing.assert_close(outputs[0], outputs[1], rtol=0, atol=TOLERANCE)
    np.random.seed(seed)
    assert np.random.rand() != outputs[0][1]  # masks were drawn


@pytest.mark.parametrize("variant", ["gpt2", "llama", "t5"])
def test_tensor_parallel_generation_matches_transformers(variant: str, seed: int) -> None:
    """Compare tokens and scores of left-padded prompts, a static cache, and the random state after sampling."""
    name = zoo.lm_head(variant)
    model = transformers_model(variant, seed).eval()
    other, batch = tensor_parallel_model(model, 3), zoo.batch(name, model.config, seed)
    prompts = {key: batch[key] for key in ("input_ids", "attention_mask")}
    for options in (
        {"do_sample": False},
        {"do_sample": False, "num_beams": 4, "num_return_sequences": 2, "length_penalty": 0.0},
        {"do_sample": True, "top_p": 0.9},
        {"do_sample": False, "cache_implementation": "static"},
    ):
        found = []
        for each in (model, other):
            torch.manual_seed(seed)
            with lifted_casts():
                output = each.generate(
                    **prompts,
                    **options,
                    max_new_tokens=10,
                    eos_token_id=None,
                    return_dict_in_generate=True,
                    output_scores=True,
                )
            found.append((output.sequences, torch.stack(output.scores), torch.rand(2)))
        torch.testing.assert_close(found[1], found[0], rtol=0, atol=TOLERANCE, msg=str(options))


def test_key_value_cache_is_passed_between_calls(seed: int) -> None:
    """Calls pass a cache on; a cache of another model is refused."""
    model = transformers_model("llama", seed).eval()
    other, ids = (
        tensor_parallel_model(model),
        torch.randint(3, 20, (2, 6), generator=torch.Generator().manual_seed(seed)),
    )
    with torch.no_grad(), lifted_casts():
        expected = model(ids).logits
        first = other(ids[:, :4])
        cache = hf.DynamicCache(config=model.config)
        name = generation_name()
        again = [other(ids[:, :4], **{name: cache}), other(ids[:, 4:], **{name: copy.deepcopy(cache)})]
        logits = [torch.cat((first.logits, other(ids[:, 4:], **{name: first[name]}).logits), 1)]
        logits.append(torch.cat([output.logits for output in again], 1))
        for own in logits:
            torch.testing.assert_close(own, expected, rtol=0, atol=TOLERANCE)
        with pytest.raises(ValueError, match="the cache was filled by another model"):
            other(ids[:, 4:], **{name: model(ids[:, :4])[name]})


def test_rank_threads_inherit_autocast_and_inference_mode(seed: int) -> None:
    """Autocast and inference mode apply to all ranks."""
    model = transformers_model("gpt2", seed, dtype=torch.float32).eval()
    other, ids = (
        tensor_parallel_model(model),
        torch.randint(3, 20, (2, 6), generator=torch.Generator().manual_seed(seed)),
    )
    seen: list[tuple[Any, ...]] = []
    for part in other.parts:
        part.transformer.h[1].register_forward_hook(
            lambda module, args, output: seen.append((module.mlp(args[0]).dtype, torch.is_inference_mode_enabled()))
        )
    with torch.autocast("cpu", torch.bfloat16):
        other(ids)
    with torch.inference_mode():
        other(ids)
    assert seen == [(torch.bfloat16, False)] * 2 + [(torch.float32, True)] * 2


def test_in_place_changes_of_inputs_are_seen_by_the_caller(seed: int) -> None:
    """Each rank changes its copy of the input; the first rank's copy is the caller's tensor."""
    model = transformers_model("gpt2", seed).eval()
    other, ids = (
        tensor_parallel_model(model),
        torch.randint(3, 20, (2, 6), generator=torch.Generator().manual_seed(seed)),
    )
    expected = model(ids + 1).logits
    for part in other.parts:
        part.transformer.wte.register_forward_pre_hook(lambda module, args: (args[0].add_(1),))
    given = ids.clone()
    torch.testing.assert_close(other(given).logits, expected, rtol=0, atol=TOLERANCE)
    assert torch.equal(given, ids + 1)


# Failures -------------------------------------------------------------------------------------------------------------


class _Broken(Exception):
    pass


def _raise(*_: Any) -> None:
    raise _Broken


def _interrupt(*_: Any) -> None:
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


@pytest.fixture(scope="module")
def broken_now_and_then(request: pytest.FixtureRequest) -> Iterator[Callable[..., None]]:
    """Return a check: a wrong call raises, the next call is right, and no extra thread remains."""
    seed = request.config.option.seed
    model = transformers_model("gpt2", seed)
    other, batch = tensor_parallel_model(model, 3), zoo.batch("GPT2LMHeadModel", model.config, seed)

    def step(**changes: Any) -> float:
        other.zero_grad()
        with lifted_casts():
            loss = other(**{**batch, **changes}).loss
            loss.backward()
        return float(loss.detach())

    expected = step()
    gradients = [param.grad for param in other.parameters()]

    def check(kind: type[BaseException], *handles: Any, **changes: Any) -> None:
        with pytest.raises(kind):
            step(**changes)
        for handle in handles:
            handle.remove()
        assert step() == expected
        assert all(torch.equal(param.grad, grad) for param, grad in zip(other.parameters(), gradients, strict=True))
        assert sum(thread.name.startswith("oslo-rank") for thread in threading.enumerate()) <= before + 2

    before = sum(thread.name.startswith("oslo-rank") for thread in threading.enumerate()) - 2
    check.model, check.batch = other, batch  # type: ignore[attr-defined]
    yield check


def test_model_works_after_bad_input(broken_now_and_then: Any) -> None:
    bad = broken_now_and_then.batch["input_ids"].clone()
    bad[1, 4] = 10**6
    broken_now_and_then(IndexError, input_ids=bad)
    broken_now_and_then(ValueError, input_ids=bad[:0])


@pytest.mark.parametrize("rank", [0, 2])
def test_model_works_after_an_exception_on_one_rank(broken_now_and_then: Any, rank: int) -> None:
    """In the middle of a forward or backward pass, while other ranks wait for it."""
    block = broken_now_and_then.model.parts[rank].transformer.h[1]
    broken_now_and_then(_Broken, block.mlp.register_forward_hook(_raise))
    broken_now_and_then(_Broken, block.mlp.c_fc.weight.register_hook(_raise))


def test_call_inside_a_forward_is_rejected(broken_now_and_then: Any) -> None:
    model = broken_now_and_then.model
    again = model.parts[0].register_forward_hook(lambda *_: model(**broken_now_and_then.batch))
    broken_now_and_then(RuntimeError, again)


def test_keyboard_interrupt_ends_a_call(broken_now_and_then: Any) -> None:
    """Ctrl-C while the calling thread waits for other ranks."""
    block = broken_now_and_then.model.parts[1].transformer.h[1]
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        broken_now_and_then(KeyboardInterrupt, block.mlp.register_forward_hook(_interrupt))
    finally:
        signal.signal(signal.SIGINT, previous)


def test_rank_thread_that_ends_releases_waiting_ranks() -> None:
    """A rank that ends while other ranks wait in a collective ends them, too."""
    threads = ThreadGroup([torch.device("cpu")] * 3)
    for leaving in range(3):
        with pytest.raises(RuntimeError, match="rank"):
            threads.run(lambda rank: None if rank == leaving else threads.all_gather(rank, rank))  # noqa: B023
    assert threads.run(lambda rank: threads.all_gather(rank, rank)) == [[0, 1, 2]] * 3
    assert ParallelMesh.of_thread(threads, 1).tp.rank == 1


def test_autograd_grad_is_rejected_in_favour_of_backward(seed: int) -> None:
    other = tensor_parallel_model(transformers_model("gpt2", seed))
    embeds, labels = torch.randn(2, 3, 24, dtype=torch.float64, requires_grad=True), torch.tensor([[3, 4, 5]] * 2)
    loss = other(inputs_embeds=embeds, labels=labels).loss
    for what, message in (
        (next(other.parameters()), "appears to not have been used"),
        (embeds, r"only, without `inputs`"),
    ):
        with pytest.raises(RuntimeError, match=message):
            torch.autograd.grad(loss, what, retain_graph=True)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="one backward pass"):
        loss.backward()


def test_gpus_that_are_not_there_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    model = hf.GPT2LMHeadModel(zoo.config("gpt2"))
    for devices, name, options in (
        (["cuda:0", "cuda:1"], "device_ids asks for cuda:1", {}),
        ([0, 3], "device_ids asks for cuda:3", {}),
        (["cpu", "cpu"], "output_device asks for cuda:2", {"output_device": "cuda:2"}),
    ):
        with pytest.raises(ValueError, match=f"{name}, and torch sees 1 GPUs here .*: (pass CPUs|leave it out)"):
            oslo_models.tensor_parallel(model, devices, **options)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    for given in (["cuda"], ["cuda:0", "cuda:1"], []):
        with pytest.raises(ValueError, match=r"torch sees no GPU here .*\[\"cpu\", \"cpu\"\]"):
            oslo_models.tensor_parallel(model, given)


def test_num_parameters_over_devices_equals_the_full_model() -> None:
    model = hf.GPT2LMHeadModel(zoo.config("gpt2"))
    for sharded in (False, True):
        parallel = oslo_models.tensor_parallel(model, ["cpu"] * 2, sharded=sharded)
        assert parallel.num_parameters() == model.num_parameters()
        assert parallel.num_parameters(exclude_embeddings=True) == model.num_parameters(exclude_embeddings=True)


def part_of_a_process() -> Any:
    model = oslo_models.tensor_parallel(hf.GPT2LMHeadModel(zoo.config("gpt2")), distributed=True)
    return type(model) is oslo_models.GPT2LMHeadModel, model.mesh.tp.size, model.mesh.tp.threads


def test_tensor_parallel_inside_a_process_group(pool: Pool) -> None:
    assert pool.run(2, part_of_a_process) == [(True, 2, None)] * 2


def test_tensor_parallel_rejects_unsupported_arguments() -> None:
    model = hf.GPT2LMHeadModel(zoo.config("gpt2"))
    for message, devices, options in (
        ("tensor_parallel_size=7 is more than num_attention_heads=6", ["cpu"] * 7, {}),
        ("names a GPU twice", ["cuda:0", 0], {}),
        ("GPUs only or CPUs only", ["cuda:0", "cpu"], {}),
        ("there is no GPU", [], {}),
        ("sharded_param_names has 'wte', which is no parameter", ["cpu"] * 2, {"sharded_param_names": ["wte"]}),
        ("which is already sharded", ["cpu"] * 2, {"sharded_param_names": ["lm_head.weight"]}),
        ("tensor_parallel_config must be a Config", ["cpu"] * 2, {"tensor_parallel_config": {}}),
        ("no argument colour", ["cpu"] * 2, {"colour": "red"}),
        ("leave out device_ids", ["cpu"] * 2, {"distributed": True}),
        ("FSDP2 shards", None, {"distributed": True, "sharded": True}),
    ):
        with pytest.raises(ValueError, match=message):
            oslo_models.tensor_parallel(model, devices, **options)
    with pytest.raises(ValueError, match=r"must be a torch\.nn\.Module"):
        oslo_models.tensor_parallel(object(), ["cpu"] * 2)
    other = tensor_parallel_model(model, sharded=False)
    assert type(other).__name__ == "GPT2LMHeadModel" and isinstance(other, hf.GPT2LMHeadModel)
    with pytest.raises(ValueError, match=r"stay on \['cpu', 'cpu'\]"):
        other.to("meta")
    with pytest.raises(RuntimeError, match="resize it before"):
        other.resize_token_embeddings(50)
    assert other.to("cpu").half().dtype == torch.float16 and model.dtype == torch.float32
    with pytest.raises(RuntimeError, match="already sharded"):
        oslo_models.tensor_parallel(other.parts[0], ["cpu"] * 2)
