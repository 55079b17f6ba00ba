"""Calls with rare options on pipeline stages match one process, or raise an error that names the option."""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.generation.streamers import BaseStreamer

from oslo_models import registry
from oslo_models.cache_argument import generation_name
from oslo_models.sharding.layer_lists import is_layer_list, layer_lists

from support import pipelines, zoo
from support.float64 import lifted_casts
from support.pipelines import model_on_stages, run_micro_batches
from support.pool import Pool
from support.reference import full_parameters, reference_model

pytestmark = pytest.mark.drawn(18, of="file")

# Values with one entry per layer --------------------------------------------------------------------------------------

BY_OTHER_NUMBERS = {
    "rope_parameters": "by the type of the layer",
    "block_repeats": "by the pools of Funnel, which allows one stage only",
    "sscp_conv_stride_size": "by the convolution of an audio encoder",
    "hidden_sizes": "by the level of SegFormer, which allows one stage only",
    "cls_token": "by the stage of CvT, which allows one pipeline stage only",
}
"""Configuration values that forwards index by a number other than the layer number, with that index."""


def indexed_values(module: Any) -> set[str]:
    """Return the values of ``self.config`` that forwards of a modeling file index by a variable."""
    found = set()
    methods = re.split(r"(?m)^(?=    def |    @|\S)", inspect.getsource(module))
    # parsing takes long
    forwards = [method for method in methods if method.startswith("    def forward(") and "config." in method]
    for node in [node for method in forwards for node in ast.walk(ast.parse(textwrap.dedent(method)))]:
        indexed = node.value if isinstance(node, ast.Subscript) else None
        if isinstance(node, ast.Subscript) and isinstance(node.slice, (ast.Constant, ast.Slice)):
            continue
        listed = [indexed] if indexed is not None else []
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("zip", "enumerate"):
            listed = list(node.args)
        for each in listed:
            if isinstance(each, ast.Attribute) and getattr(each.value, "attr", "") == "config":
                found.add(each.attr)
    return found


@pytest.mark.stacks
def test_every_list_that_forwards_index_by_layer_is_found_in_every_type() -> None:
    names = [name for model_type in registry.ARCHITECTURES for name in zoo.heads(model_type)]
    unknown = {
        value: module
        for module in {zoo.original(name).__module__ for name in names}
        for value in indexed_values(sys.modules[module]) - BY_OTHER_NUMBERS.keys()
        if not is_layer_list(value)
    }
    assert not unknown


def test_lists_of_layers_are_told_from_other_lists_of_that_length() -> None:
    config = CONFIG_MAPPING["granite_swa"](num_hidden_layers=2, eos_token_id=[1, 2])
    assert set(layer_lists(config, 2)) == {"layer_types", "layer_rope_theta"}
    assert not layer_lists(config, 3)
    computed = CONFIG_MAPPING["bamba"](num_hidden_layers=3, attn_layer_indices=[1])
    assert layer_lists(computed, 3)["layers_block_type"].count("full_attention") == 1


LISTS: dict[str, tuple[str, dict[str, Any]]] = {
    "theta of each layer": ("granite_swa", {"layer_rope_theta": [500.0, 10000.0]}),
    "no positions on layer 1": ("granite_swa", {"layer_rope_theta": [500.0, 0]}),
    "theta in a mixture": ("granitemoe_swa", {"layer_rope_theta": [500.0, 10000.0]}),
    "types of layers": ("gemma3_text", {}),
    "computed types": ("bamba", {}),
    "layers without positions": ("smollm3", {"no_rope_layers": [0, 1]}),
}


def check_lists(name: str, config: PreTrainedConfig, weights: dict[str, Tensor], loss: Tensor, folder: str) -> None:
    model = model_on_stages(name, config, weights, 1, 2, micro_batch_size=2)
    batch = pipelines.batch(name, config, 3)
    assert abs(run_micro_batches(model, batch) - loss) < 1e-10
    before = config.to_dict()
    for each in (model.config, model.base_model.config):
        lists = layer_lists(each, config.num_hidden_layers)
        assert lists == layer_lists(config, config.num_hidden_layers)
        assert {key: value for key, value in each.to_dict().items() if key in lists} == {
            key: before[key] for key in lists if key in before
        }
    model.config.save_pretrained(f"{folder}/{model.stage.index}")
    assert type(config).from_pretrained(f"{folder}/{model.stage.index}").num_hidden_layers == config.num_hidden_layers


@pytest.mark.stacks
@pytest.mark.parametrize("kind", LISTS)
def test_lists_follow_the_layers_to_their_stage(pool: Pool, tmp_path: Path, kind: str, seed: int) -> None:
    """The user sees the full model's configuration and can save it."""
    variant, changes = LISTS[kind]
    if variant not in registry.ARCHITECTURES:
        pytest.skip(f"transformers {transformers.__version__} has no {variant}")
    name, config = zoo.lm_head(variant), zoo.config(variant, **changes)
    model = reference_model(name, config, seed)
    with lifted_casts():
        loss = model(**pipelines.batch(name, config, 3)).loss.detach()
    pool.run(2, check_lists, name, config, full_parameters(model), loss, str(tmp_path))


# Weights that are not tied any more -----------------------------------------------------------------------------------


def tied_llama(**changes: Any) -> PreTrainedConfig:
    return zoo.config("llama", tie_word_embeddings=True, **changes)


def check_untied_head(config: PreTrainedConfig, folder: str, trains_head: bool) -> None:
    """Add an adapter with a head; in further steps, the embedding and the head train separately."""
    from peft import LoraConfig, get_peft_model

    cls: Any = registry.find("LlamaForCausalLM")
    model = cls.from_config_with_parallel(config, pipeline_parallel_size=2, seed=0, dtype=torch.float64)
    lora = LoraConfig(
        task_type="CAUSAL_LM", r=2, target_modules=["q_proj"], modules_to_save=["lm_head"] if trains_head else None
    )
    adapted = get_peft_model(model, lora)
    batch = pipelines.batch("LlamaForCausalLM", config, 3)
    stepper = torch.optim.SGD([param for param in adapted.parameters() if param.requires_grad], lr=1.0)
    for _ in range(3):
        adapted.train_batch(**batch)
        stepper.step()
        stepper.zero_grad()
    merged = adapted.merge_and_unload()
    merged.save_pretrained_with_parallel(f"{folder}/merged", save_with_merging=True)
    assert merged.config.tie_word_embeddings is not trains_head
    for param in merged.parameters():
        param.requires_grad_(True)
    stepper = torch.optim.SGD(merged.parameters(), lr=0.1)
    with lifted_casts():
        loss = merged.train_batch(**batch)
    stepper.step()
    torch.save(loss, f"{folder}/{merged.stage.index}")
    merged.save_pretrained_with_parallel(f"{folder}/trained", save_with_merging=True)


@pytest.mark.parametrize("trains_head", [True, False])
def test_merged_adapters_of_stages_are_saved_and_trained_as_on_one_process(
    pool: Pool, tmp_path: Path, trains_head: bool
) -> None:
    pytest.importorskip("peft", reason="peft is not installed")
    config = tied_llama()
    pool.run(2, check_untied_head, config, str(tmp_path), trains_head)
    plain = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float64)
    assert plain.config.tie_word_embeddings is not trains_head
    with lifted_casts():
        loss = plain(**pipelines.batch("LlamaForCausalLM", config, 3)).loss
    loss.backward()
    assert abs(loss.detach() - torch.load(tmp_path / "1")) < 1e-10
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    trained = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "trained", dtype=torch.float64)
    for name, param in plain.named_parameters(remove_duplicate=False):
        torch.testing.assert_close(trained.get_parameter(name), param, rtol=0, atol=1e-10, msg=name)


def check_untied_by_hand(config: PreTrainedConfig, folder: str) -> None:
    model: Any = registry.find("LlamaForCausalLM").from_config_with_parallel(config, pipeline_parallel_size=2, seed=0)
    if model.stage.is_last:
        model.lm_head.weight.data.add_(1)
    model.save_pretrained_with_parallel(folder, save_with_merging=True)
    model.deparallelize()
    assert not torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)


def test_a_head_that_one_stage_changed_is_saved_and_gathered(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, check_untied_by_hand, tied_llama(), str(tmp_path))
    plain = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(plain.lm_head.weight, plain.model.embed_tokens.weight + 1)


# Packed rows ----------------------------------------------------------------------------------------------------------


def packed(config: PreTrainedConfig, **options: Any) -> dict[str, Any]:
    """Rows with two documents; transformers separates them only without a cache."""
    ids = torch.arange(24).view(2, 12) + 5
    positions = torch.tensor([[*range(5), *range(7)]]).expand(2, -1)
    return {"input_ids": ids, "labels": ids, "position_ids": positions, **options}


def check_packed(
    name: str, config: PreTrainedConfig, weights: dict[str, Tensor], losses: list[Tensor], tp: int, pp: int
) -> None:
    model = model_on_stages(name, config, weights, tp, pp)
    for options, loss in zip(({}, {"use_cache": True}, {"use_cache": False}), losses, strict=True):
        with lifted_casts():
            assert abs(model.train_batch(**packed(config, **options)) - loss) < 1e-10, options


@pytest.mark.stacks
@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
@pytest.mark.parametrize("variant", ["llama", "gemma3_text"])
def test_packed_rows_have_one_loss_at_all_sizes(pool: Pool, variant: str, tp: int, pp: int, seed: int) -> None:
    name, config = zoo.lm_head(variant), zoo.config(variant, vocab_size=61)
    model = reference_model(name, config, seed)
    with lifted_casts():
        losses = [
            model(**packed(config, **options)).loss.detach()
            for options in ({}, {"use_cache": True}, {"use_cache": False})
        ]
    assert abs(losses[0] - losses[2]) > 1e-6
    pool.run(2, check_packed, name, config, full_parameters(model), losses, tp, pp)


# Base models ----------------------------------------------------------------------------------------------------------


def check_ignored_labels(name: str, config: PreTrainedConfig, batch: dict[str, Tensor]) -> None:
    cls: Any = registry.find(name)
    model = cls.from_config_with_parallel(config, 1, 2, seed=0)
    outputs = [*model(**batch, labels=batch["input_ids"])]
    assert all(output.get("loss") is None for output in outputs)
    assert not model.stage.is_last or all("last_hidden_state" in output for output in outputs)


def test_base_models_ignore_labels_on_all_stages(pool: Pool, seed: int) -> None:
    """Gemma3Model accepts labels, and transformers computes no loss from them."""
    config = zoo.config("gemma3")
    batch = zoo.batch("Gemma3Model", config, seed)
    pool.run(2, check_ignored_labels, "Gemma3Model", config, {k: v for k, v in batch.items() if k != "labels"})


# Generation -----------------------------------------------------------------------------------------------------------


def assistant(name: str, config: PreTrainedConfig, tokens: int) -> Any:
    model = reference_model(name, config, 99).eval()
    model.generation_config.num_assistant_tokens = tokens
    return model


ASSISTED: dict[str, Any] = {
    "one candidate": lambda name, config: {"assistant_model": assistant(name, config, 1)},
    "five candidates": lambda name, config: {"assistant_model": assistant(name, config, 5)},
    "prompt lookup": lambda name, config: {"prompt_lookup_num_tokens": 3},
    "plain": lambda name, config: {},
}


def check_assisted(
    name: str, config: PreTrainedConfig, weights: dict[str, Tensor], expected: Tensor, ids: Tensor
) -> None:
    model, lines = model_on_stages(name, config, weights, 1, 2).eval(), []
    for kind, options in ASSISTED.items():
        with lifted_casts():
            tokens = model.generate(ids, do_sample=False, max_new_tokens=9, **options(name, config))
        if not torch.equal(tokens, expected):
            lines.append(f"{kind}: {tokens.tolist()} instead of {expected.tolist()}")
    assert not lines, "\n".join(lines)


@pytest.mark.stacks
@pytest.mark.parametrize("variant", ["t5", "mistral", "gemma3_text", "llama"])
def test_assisted_decoding_on_stages_gives_the_tokens_of_greedy_decoding(pool: Pool, variant: str, seed: int) -> None:
    name, config = zoo.lm_head(variant), zoo.config(variant)
    config.eos_token_id = None
    model = reference_model(name, config, seed).eval()
    model.generation_config.eos_token_id = None
    ids = torch.tensor([[5, 6, 7, 5, 6, 7, 5, 6]])
    with lifted_casts():
        expected = model.generate(ids, do_sample=False, max_new_tokens=9)
    pool.run(2, check_assisted, name, config, full_parameters(model), expected, ids)


def check_own_cache(
    name: str, config: PreTrainedConfig, weights: dict[str, Tensor], expected: Tensor, ids: Tensor
) -> None:
    model = model_on_stages(name, config, weights, 1, 2).eval()
    cache = transformers.DynamicCache(config=model.config)
    with lifted_casts():
        options = {generation_name(): cache, "do_sample": False}
        first = model.generate(ids, max_new_tokens=4, **options)
        options["attention_mask"] = torch.ones_like(first)  # the first tokens may be padding tokens
        assert torch.equal(model.generate(first, max_new_tokens=5, **options), expected)
    layers, own = transformers.DynamicCache(config=config).layers, model.stage.cache_layers
    assert [type(layer) for layer in cache.layers] == [type(layer) for layer in layers[own.start : own.stop]]
    assert len(cache.layers) < config.num_hidden_layers
    kinds = ["sliding_attention", "full_attention", "full_attention"]
    other = zoo.config("gemma3_text", num_hidden_layers=3, layer_types=kinds)
    with pytest.raises(ValueError, match="the cache has 3 layers and the model 2"):
        model.generate(ids, max_new_tokens=4, **{generation_name(): transformers.DynamicCache(config=other)})
    with pytest.raises(ValueError, match="is a cache, and each pipeline stage has its own blocks"):
        model(input_ids=ids, **{generation_name(): transformers.DynamicCache(config=model.config)})


@pytest.mark.stacks
@pytest.mark.parametrize("variant", ["mistral", "gemma3_text"])
def test_generate_continues_with_a_cache_that_the_user_made(pool: Pool, variant: str, seed: int) -> None:
    name, config = zoo.lm_head(variant), zoo.config(variant)
    config.eos_token_id = None
    model = reference_model(name, config, seed).eval()
    ids = torch.tensor([[5, 6, 7, 5, 6, 7, 5, 6]])
    with lifted_casts():
        expected = model.generate(ids, do_sample=False, max_new_tokens=9)
    pool.run(2, check_own_cache, name, config, full_parameters(model), expected, ids)


def check_refused_outputs(name: str, config: PreTrainedConfig) -> None:
    cls: Any = registry.find(name)
    model = cls.from_config_with_parallel(config, 1, 2, seed=0, attn_implementation="eager").eval()
    ids = torch.arange(6)[None] + 5
    for wanted in ("output_hidden_states", "output_attentions"):
        with pytest.raises(ValueError, match=f"generate cannot return {wanted}"):
            model.generate(ids, max_new_tokens=3, return_dict_in_generate=True, **{wanted: True})
        with pytest.raises(ValueError, match=f"generate cannot return {wanted}"):
            options = transformers.GenerationConfig(max_new_tokens=3, return_dict_in_generate=True, **{wanted: True})
            model.generate(ids, options)
    model.generate(ids, max_new_tokens=3)


@pytest.mark.parametrize("variant", ["llama", "t5"])
def test_generate_refuses_outputs_of_other_stages(pool: Pool, variant: str) -> None:
    pool.run(2, check_refused_outputs, zoo.lm_head(variant), zoo.config(variant))


class Clock(transformers.StoppingCriteria):
    """Criterion that stops, or raises, on one rank only."""

    def __init__(self, rank: int, length: int, fails: bool) -> None:
        self.rank, self.length, self.fails = rank, length, fails

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        import torch.distributed as dist

        stops = dist.get_rank() == self.rank and input_ids.shape[1] >= self.length
        if stops and self.fails:
            raise KeyError("no such clock")
        return torch.full((len(input_ids),), stops)


class BrokenStreamer(BaseStreamer):
    """Raises at a call."""

    def __init__(self, at: int) -> None:
        self._left = at

    def put(self, value: torch.Tensor) -> None:
        self.end()

    def end(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise KeyError("the streamer breaks")


def break_at(calls: Iterator[int], at: int, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    if next(calls) == at:
        raise KeyError("the processor breaks")
    return scores


def check_stops(tp: int, pp: int) -> None:
    cls: Any = registry.find("LlamaForCausalLM")
    model = cls.from_config_with_parallel(zoo.config("llama"), tp, pp, seed=0, timeout=20).eval()
    model.generation_config.eos_token_id = None
    ids = torch.arange(12).view(2, 6) + 5
    for rank in range(2):
        for beams in (1, 2):
            tokens = model.generate(
                ids, max_new_tokens=9, num_beams=beams, do_sample=False, stopping_criteria=[Clock(rank, 9, False)]
            )
            assert tokens.shape == (2, 9)
        error = KeyError if model.mesh.model.rank == rank else RuntimeError
        with pytest.raises(error, match=r"clock|has raised on another rank"):
            model.generate(ids, max_new_tokens=9, stopping_criteria=[Clock(rank, 9, True)])
        for at in (0, 1, 3, 4):  # the prompt, a token, the last token, the end
            streamer = BrokenStreamer(at) if model.mesh.model.rank == rank else None
            with pytest.raises(error, match=r"streamer (breaks|has raised|.*another rank)|another rank, \d"):
                model.generate(ids[:1], max_new_tokens=3, do_sample=False, streamer=streamer)
        calls = iter(range(99))
        breaks = partial(break_at, calls, 2 if model.mesh.model.rank == rank else 99)
        with pytest.raises(error, match=r"processor breaks|another rank, \d"):
            model.generate(ids, max_new_tokens=9, num_beams=2, logits_processor=[breaks])
        assert model.generate(ids, None, [breaks], max_new_tokens=2).shape == (2, 8)
    lengths = {model.generate(ids, max_new_tokens=20, max_time=0.01 * i).shape[1] for i in range(6)}
    assert pipelines.gather_from_all_ranks(lengths) == [lengths, lengths]


@pytest.mark.stacks
@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
def test_ranks_stop_at_the_same_token(pool: Pool, tp: int, pp: int) -> None:
    pool.run(2, check_stops, tp, pp)


# Loops ----------------------------------------------------------------------------------------------------------------


def check_two_loops() -> None:
    config = zoo.config("llama")
    model: Any = registry.find("LlamaForCausalLM").from_config_with_parallel(config, 1, 2, seed=0)
    ids = torch.arange(24).view(4, 6) + 5
    batch = {"input_ids": ids, "labels": ids}
    expected = [output.loss.item() for output in model(**batch) if output.loss.backward() is None]
    for start in (lambda: next(iter(model(**batch))), lambda: model.generate(ids, max_new_tokens=2)):
        first = model(**batch)
        output = next(first)
        output.loss.backward()
        with pytest.raises(RuntimeError, match="within a loop over the micro-batches of this LlamaForCausalLM"):
            start()
        with pytest.raises(RuntimeError, match="has been left"):
            next(first)
        model.zero_grad()
        found = [output.loss.item() for output in model(**batch) if output.loss.backward() is None]
        assert found == expected or not model.stage.is_last
    with pytest.raises(RuntimeError, match="within a loop"):
        for a, b in zip(model(**batch), model(**batch), strict=True):
            (a.loss + b.loss).backward()
    assert len([output.loss.backward() for output in model(**batch)]) == 4


def test_a_second_loop_of_a_model_is_refused(pool: Pool) -> None:
    pool.run(2, check_two_loops)


def replace_embeddings() -> None:
    config = zoo.config("llama")
    model: Any = registry.find("LlamaForCausalLM").from_config_with_parallel(config, 1, 2, seed=0)
    model.set_input_embeddings(nn.Embedding(config.vocab_size, config.hidden_size))
    ids = torch.arange(16).view(2, 8) + 5
    with pytest.raises(RuntimeError, match=("not read on stage 1" if model.stage.is_last else r"stage \[1\] left")):
        model.train_batch(input_ids=ids, labels=ids)


def test_hidden_states_that_a_replaced_embedding_would_ignore_are_refused(pool: Pool) -> None:
    pool.run(2, replace_embeddings)


def check_blocks() -> None:
    config = zoo.config("llama", num_hidden_layers=4)
    model: Any = registry.find("LlamaForCausalLM").from_config_with_parallel(config, 1, 2, seed=0)
    layers, first = model.model.layers, 2 * model.stage.index
    assert len(layers) == 2 and [*layers._modules] == [str(first), str(first + 1)]
    for chosen in (slice(1), slice(1, 3), slice(-1, None), slice(None, None, 2), slice(None)):
        expected = [i for i in range(4)[chosen] if first <= i < first + 2]
        assert [*layers[chosen]] == [layers[i] for i in expected] == [layers._modules[str(i)] for i in expected]
    assert layers[first - 4] is layers[first]
    with pytest.raises(IndexError, match=f"block {2 - first} is on another pipeline stage; this stage has {first}, "):
        layers[2 - first]
    with pytest.raises(IndexError):
        layers[4]
    layers[first] = nn.Sequential(layers[first])
    assert type(layers._modules[str(first)]) is nn.Sequential
    layers[first] = layers[first][0]
    for change in (lambda: layers.append(nn.Identity()), lambda: layers.pop(0), lambda: layers.__delitem__(0)):
        with pytest.raises(RuntimeError, match="cannot change on a pipeline stage"):
            change()
    ids = torch.arange(16).view(2, 8) + 5
    model.model.layers = layers[:3]
    with pytest.raises(RuntimeError, match=(r"the blocks 0, and stage 1" if first else r"stage \[1\] left")):
        model.train_batch(input_ids=ids, labels=ids)


def test_blocks_of_a_stage_are_indexed_as_in_the_full_model(pool: Pool) -> None:
    pool.run(2, check_blocks)


REDUCED = {
    "squares": lambda grad: grad.pow(2).sum(),
    "detached": lambda grad: grad.detach().norm(2).item(),
    "data": lambda grad: grad.data.norm() ** 2,
    "largest": lambda grad: grad.abs().max(),
    "mean": lambda grad: (grad * grad).mean(),
    "finite": lambda grad: torch.isfinite(grad).all(),
    "noise": lambda grad: grad.add_(torch.randn_like(grad)),
    "noise in place": lambda grad: torch.zeros_like(grad).normal_(),
}


def check_reduced_gradients(tp: int) -> None:
    model: Any = registry.find("LlamaForCausalLM").from_config_with_parallel(zoo.config("llama"), tp, 2, seed=0)
    ids = torch.arange(16).view(2, 8) + 5
    model.train_batch(input_ids=ids, labels=ids)
    for name, param in model.named_parameters():
        for kind, reduce in REDUCED.items():
            with pytest.raises(RuntimeError, match="pipeline stage"):
                pytest.fail(f"{name}, {kind}: {reduce(param.grad)}")
        assert param.grad.full_tensor().pow(2).sum() >= 0
    squares = [torch.linalg.vector_norm(param.grad) for param in model.parameters()]
    total = torch.linalg.vector_norm(torch.stack(squares))
    torch.testing.assert_close(total, model.clip_grad_norm_(1e9))


@pytest.mark.parametrize("tp", [1, 2])
def test_gradients_of_one_stage_are_not_reduced_to_a_number(pool: Pool, tp: int) -> None:
    pool.run(2 * tp, check_reduced_gradients, tp)


def check_rows() -> None:
    config = zoo.config("llama")
    model: Any = registry.find("LlamaForCausalLM").from_config_with_parallel(config, 1, 2, seed=0)
    ids = torch.arange(24).view(3, 8) + 5
    for kept in ([2, 7], [2, 5, 7]):
        with torch.no_grad():
            outputs = list(model(input_ids=ids, logits_to_keep=torch.tensor(kept)))
        shapes = {tuple(output.logits.shape) for output in outputs if output.logits is not None}
        assert shapes == ({(1, len(kept), config.vocab_size)} if model.stage.is_last else set())
    with pytest.raises(ValueError, match=r"weights of shape \(3,\): it is not known whether its elements"):
        model(input_ids=ids, weights=torch.ones(3))
    with pytest.raises(ValueError, match=r"attention_mask of shape \(2, 8\) has not the 3 rows"):
        model(input_ids=ids, attention_mask=torch.ones(2, 8))
    with pytest.raises(ValueError, match=r"has not the 3 rows"):
        model(input_ids=ids, position_ids=torch.ones(3, 8, 3).long())


def test_only_arguments_with_rows_are_divided(pool: Pool) -> None:
    pool.run(2, check_rows)


def check_encoder_outputs(
    name: str, config: PreTrainedConfig, weights: dict[str, Tensor], encoded: Any, loss: Tensor, blocks: list[int]
) -> None:
    model = model_on_stages(name, config, weights, 1, len(blocks), blocks_per_stage=blocks)
    labels = torch.arange(12).view(4, 3) + 5
    for given in (encoded, tuple(encoded.values()), type(encoded)(encoded.last_hidden_state)):
        with lifted_casts():
            assert abs(model.train_batch(encoder_outputs=given, labels=labels) - loss) < 1e-10
    with pytest.raises(ValueError, match="pipeline stages need decoder_input_ids or input_ids"):
        model(encoder_outputs=encoded)
    needs = type(encoded)(encoded.last_hidden_state.clone().requires_grad_())
    with pytest.raises(ValueError, match="encoder_outputs requires gradients"):
        model(encoder_outputs=needs, labels=labels)


@pytest.mark.stacks
@pytest.mark.parametrize("blocks", [[2, 2], [1, 3], [3, 1], [1, 1, 2]])
@pytest.mark.parametrize("name", ["T5ForConditionalGeneration", "BartForConditionalGeneration"])
def test_encoder_outputs_give_the_loss_of_one_process(pool: Pool, name: str, blocks: list[int], seed: int) -> None:
    config = zoo.config(name.removesuffix("ForConditionalGeneration").lower())
    model = reference_model(name, config, seed)
    with lifted_casts(), torch.no_grad():
        encoded = model.get_encoder()(torch.arange(24).view(4, 6) + 5)
    with lifted_casts():
        loss = model(encoder_outputs=encoded, labels=torch.arange(12).view(4, 3) + 5).loss.detach()
    weights = {**model.state_dict(), **full_parameters(model)}
    pool.run(len(blocks), check_encoder_outputs, name, config, weights, encoded, loss, blocks)


# Errors at the end ----------------------------------------------------------------------------------------------------


def check_loss_of_one_element(name: str, config: PreTrainedConfig, weights: dict[str, Tensor], loss: Tensor) -> None:
    model = model_on_stages(name, config, weights, 1, 2)
    ids = torch.arange(24).view(2, 12) + 5
    with lifted_casts():
        found = model.train_batch(input_ids=ids, labels=ids, num_items_in_batch=torch.tensor([22]))
    assert abs(found - loss) < 1e-10
    error = ValueError if model.stage.is_last else RuntimeError
    with pytest.raises(error, match=r"a loss of shape|left the loop"):
        model.train_batch(input_ids=ids, labels=ids, num_items_in_batch=torch.tensor([22, 22]))


def test_a_loss_of_one_element_counts_as_a_number(pool: Pool, seed: int) -> None:
    name, config = "LlamaForCausalLM", zoo.config("llama")
    model = reference_model(name, config, seed)
    ids = torch.arange(24).view(2, 12) + 5
    with lifted_casts():
        loss = model(input_ids=ids, labels=ids, num_items_in_batch=torch.tensor([22])).loss.detach()
    pool.run(2, check_loss_of_one_element, name, config, full_parameters(model), loss.reshape(()))


# Routers --------------------------------------------------------------------------------------------------------------


def check_routers(name: str, config: PreTrainedConfig, weights: dict[str, Tensor], logits: list[Tensor]) -> None:
    model = model_on_stages(name, config, weights, 1, 2, micro_batch_size=4)
    with torch.no_grad(), lifted_casts():
        (output,) = model(**pipelines.batch(name, config, 3), output_router_logits=True)
    if model.stage.is_last:
        assert len(output.router_logits) == len(logits)
        for own, expected in zip(output.router_logits, logits, strict=True):
            torch.testing.assert_close(own, expected, rtol=0, atol=1e-10)
    model.stage.num_experts += 1
    message = r"the other stages expect the shape|left the loop"
    with torch.no_grad(), pytest.raises((ValueError, RuntimeError), match=message):
        list(model(**pipelines.batch(name, config, 3), output_router_logits=True))


@pytest.mark.stacks
def test_routers_that_choose_from_experts_without_weights(pool: Pool, seed: int) -> None:
    """A mismatch of sizes between stages raises before the message is sent."""
    name, config = "LongcatFlashForCausalLM", zoo.config("longcat_flash")
    model = reference_model(name, config, seed)
    with torch.no_grad(), lifted_casts():
        output = model(**pipelines.batch(name, config, 3), output_router_logits=True)
    if "router_logits" not in output:
        pytest.skip(f"transformers {transformers.__version__} returns no logits of the routers of LongcatFlash")
    weights = {**model.state_dict(), **full_parameters(model)}
    pool.run(2, check_routers, name, config, weights, list(output.router_logits))
