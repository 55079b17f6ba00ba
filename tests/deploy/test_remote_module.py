"""A deployed model answers like a local model: attributes, custom methods, copies of its weights."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

import oslo_models
from oslo_models.deploy import proxy as deploying

from support import deployment, zoo
from support.float64 import lifted_casts
from support.reference import reference_model

OWN = {"BertModel": deployment.SentenceEncoder, "GPT2LMHeadModel": deployment.ScoringGPT2}
KINDS = {"clip": "CLIPModel", "bert": "BertModel", "gpt2": "GPT2LMHeadModel", "t5": "T5ForConditionalGeneration"}


class Deployed:
    """A deployed model and the full one with the same weights."""

    def __init__(self, model_type: str, folder: Path, seed: int, **sizes: int) -> None:
        name = KINDS[model_type]
        self.full: Any = reference_model(name, zoo.config(model_type), seed, torch.float32).eval()
        self.full.save_pretrained(folder)
        cls: Any = OWN.get(name) or getattr(oslo_models, name)
        self.full.set_attn_implementation("eager")  # others give no attention weights
        options: dict[str, Any] = sizes or {"tensor_parallel_size": 2}
        self.model = cls.from_pretrained_with_parallel(folder, deploy=True, attn_implementation="eager", **options)
        self.folder, self.cls = folder, cls


class OnTwoWorkers:
    """Models that share one pair of workers; the requested model is loaded on demand."""

    def __init__(self) -> None:
        self.engine: Any = None
        self.made: dict[str, tuple[Deployed, bytes]] = {}

    def make_engine(self, ranks: int, threads: int, make: bytes, *more: Any) -> Any:
        self.latest = make
        if self.engine is None:
            held = pickle.dumps((deployment.Shelf, "holding", (make,), {}))
            self.engine = deploying_engine(ranks, threads, held, *more)
            self.current, start = make, self.engine.start
            self.engine.start = lambda: None if self.engine.devices else start()
        return self.engine

    def __getitem__(self, model_type: str) -> Deployed:
        deployed, make = self.made[model_type]
        if make != self.current:
            self.engine.call("put", (make,))
            self.current = make
        return deployed


deploying_engine = deploying.Engine


@pytest.fixture(scope="module")
def deployed(forked: None, tmp_path_factory: pytest.TempPathFactory, request: Any) -> Iterator[OnTwoWorkers]:
    workers, seed = OnTwoWorkers(), request.config.option.seed
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deploying, "Engine", workers.make_engine)
        for kind in KINDS:
            workers.made[kind] = Deployed(kind, tmp_path_factory.mktemp(kind), seed), workers.latest
    yield workers
    workers.engine.close()


@pytest.fixture(params=KINDS)
def pair(deployed: OnTwoWorkers, request: pytest.FixtureRequest) -> Deployed:
    return deployed[request.param]


def close(mine: Tensor, right: Tensor) -> None:
    torch.testing.assert_close(mine, right.detach(), rtol=1e-5, atol=1e-5)


def tokens(seed: int, rows: int = 2, length: int = 7) -> Tensor:
    return torch.randint(3, 101, (rows, length), generator=torch.Generator().manual_seed(seed))


def test_attributes_equal_the_full_model(pair: Deployed) -> None:
    model, full = pair.model, pair.full
    assert model.config.to_dict() == {**full.config.to_dict(), "_name_or_path": str(pair.folder)}
    assert model.name_or_path == model.config.name_or_path == str(pair.folder)
    assert model.dtype == torch.float32 and model.device == torch.device("cpu")
    assert model.num_parameters() == full.num_parameters()
    assert model.get_memory_footprint() == full.get_memory_footprint()
    assert model.get_memory_footprint(return_buffers=False) == full.get_memory_footprint(return_buffers=False)
    assert model.can_generate() == full.can_generate() and not model.is_gradient_checkpointing
    if full.can_generate():
        assert model.generation_config.to_dict() == full.generation_config.to_dict()
    assert list(inspect.signature(model.forward).parameters) == list(inspect.signature(full.forward).parameters)


def test_weights_are_gathered_when_asked_for(pair: Deployed) -> None:
    model, full = pair.model, pair.full
    state, expected = model.state_dict(gather=True), full.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())
    named, right = dict(model.named_parameters(gather=True)), dict(full.named_parameters())
    assert named.keys() == right.keys() and all(torch.equal(named[name], param) for name, param in right.items())
    assert sum(param.numel() for param in model.parameters(gather=True)) == full.num_parameters()
    for method in ("state_dict", "parameters", "named_parameters", "get_encoder", "get_input_embeddings"):
        with pytest.raises(RuntimeError, match=rf"{method}\(gather=True\) copies them in full into the memory"):
            getattr(model, method)()


def test_tied_weights_are_one_tensor(deployed: OnTwoWorkers) -> None:
    state = deployed["gpt2"].model.state_dict(gather=True)
    assert state["lm_head.weight"] is state["transformer.wte.weight"]


def test_modules_are_copied_when_asked_for(deployed: OnTwoWorkers, seed: int) -> None:
    ids = tokens(seed)
    for kind in ("bert", "gpt2", "t5"):
        model, full = deployed[kind].model, deployed[kind].full
        close(model.get_input_embeddings(gather=True)(ids), full.get_input_embeddings()(ids))
    assert deployed["bert"].model.get_output_embeddings(gather=True) is None
    encoder = deployed["t5"].model.get_encoder(gather=True)
    close(encoder(input_ids=ids).last_hidden_state, deployed["t5"].full.get_encoder()(input_ids=ids).last_hidden_state)


def test_methods_of_clip_run_in_the_workers(deployed: OnTwoWorkers, seed: int) -> None:
    model, full = deployed["clip"].model, deployed["clip"].full
    batch = zoo.batch("CLIPModel", zoo.config("clip"), seed, torch.float32)
    text = {key: batch[key] for key in ("input_ids", "attention_mask")}
    pixels = batch["pixel_values"]
    close(model.get_text_features(**text).pooler_output, full.get_text_features(**text).pooler_output)
    close(model.get_image_features(pixels).pooler_output, full.get_image_features(pixels).pooler_output)
    mine = model.get_image_features(pixels, output_attentions=True, timeout=30)
    right = full.get_image_features(pixels, output_attentions=True)
    assert len(right.attentions) == 2
    for own, other in zip(mine.attentions, right.attentions, strict=True):
        close(own, other)  # attention weights of all heads


def test_methods_of_the_application_run_in_the_workers(deployed: OnTwoWorkers, seed: int) -> None:
    model, full, ids = deployed["bert"].model, deployed["bert"].full, tokens(seed)
    expected = full(ids).last_hidden_state.mean(1) * 2
    close(model.encode(ids), expected)
    found = model.encode_many([ids, ids[:1]])
    close(found["means"][0], expected)
    close(found["means"][1], expected[:1])
    assert found["count"] == 2
    close(model.embed_tokens(ids), full.embeddings.word_embeddings(ids))
    gpt2, reference = deployed["gpt2"].model, deployed["gpt2"].full
    close(gpt2.scores(ids), reference(ids).logits)


def test_a_method_that_fails_raises_its_own_exception(deployed: OnTwoWorkers, seed: int) -> None:
    model = deployed["bert"].model
    with pytest.raises(LookupError, match="there is no number 7") as raised:
        model.fails(7)
    assert "deployment.py" in str(raised.value.__cause__)  # the traceback of the worker
    with pytest.raises(TypeError, match="layers returns a ModuleList, which cannot be sent"):
        model.layers()
    with pytest.raises(TypeError, match="stream returns a generator"):
        model.stream()
    with pytest.raises(ValueError, match="an argument of call_with_full_outputs cannot be sent"):
        model.encode(lambda: 0)
    with pytest.raises(ValueError, match="timeout must be a number"):
        model.encode(tokens(seed), timeout=-1)
    assert model.health()["healthy"] and model.encode(tokens(seed)).shape == (2, 24)


def test_unknown_attributes_get_a_hint(deployed: OnTwoWorkers) -> None:
    model = deployed["clip"].model
    with pytest.raises(AttributeError, match=r"has no attribute 'get_text_feature'; did you mean get_text_features\?"):
        model.get_text_feature  # noqa: B018
    with pytest.raises(AttributeError, match="text_model is a module of this CLIPModel, which the workers hold"):
        model.text_model  # noqa: B018
    with pytest.raises(AttributeError, match="logit_scale is a tensor of this CLIPModel"):
        model.logit_scale  # noqa: B018
    assert model.projection_dim == 7  # a plain attribute of the model
    assert not hasattr(model, "hf_device_map") and not hasattr(model, "_private")
    with pytest.raises(RuntimeError, match="base_model: the workers hold"):
        model.base_model  # noqa: B018


@pytest.mark.parametrize("name", ["modules", "half", "gradient_checkpointing_enable", "register_forward_hook", "apply"])
def test_methods_that_change_the_empty_module_are_refused(deployed: OnTwoWorkers, name: str) -> None:
    with pytest.raises(RuntimeError, match=f"{name}: .*cpu\\(\\) ends the workers"):
        getattr(deployed["gpt2"].model, name)()


def test_scores_of_transitions_are_computed_here(deployed: OnTwoWorkers, seed: int) -> None:
    model, full = deployed["gpt2"].model, deployed["gpt2"].full

    ids = tokens(seed, 1)
    options = {"max_new_tokens": 5, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    scored = model.generate(ids, **options, output_scores=True, return_dict_in_generate=True)
    close(
        model.compute_transition_scores(scored.sequences, scored.scores),
        full.compute_transition_scores(scored.sequences, scored.scores),
    )
    assert isinstance(model, hf.GPT2LMHeadModel) and isinstance(model, deployment.ScoringGPT2)


def test_weights_of_pipeline_stages_are_gathered_too(forked: None, tmp_path: Path, seed: int) -> None:
    pair = Deployed("t5", tmp_path, seed, tensor_parallel_size=1, pipeline_parallel_size=2)
    with pair.model as model:
        state, expected = model.state_dict(gather=True), pair.full.state_dict()
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())
        assert model.get_memory_footprint() == pair.full.get_memory_footprint()
        labels = tokens(seed)
        prepared = model.prepare_decoder_input_ids_from_labels(labels)
        assert torch.equal(prepared, pair.full.prepare_decoder_input_ids_from_labels(labels))
        with pytest.raises(ValueError, match="get_text_features cannot run on 2 pipeline stages"):
            model._call_method("get_text_features", (), {})
        with lifted_casts():
            close(model(input_ids=labels, labels=labels).loss, pair.full(input_ids=labels, labels=labels).loss)
