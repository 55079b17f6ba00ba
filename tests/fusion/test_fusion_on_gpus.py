"""`fuse` for GPUs: with its operations in plain torch on the CPU and, where there is one, on a GPU."""

from __future__ import annotations

import copy
import gc
import re
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.torch_version import TorchVersion
from transformers import CompileConfig, GenerationConfig
from transformers.generation.configuration_utils import GenerationMode

from oslo_kernels.cross_entropy import PADDING, padded_logits, padded_weight
from oslo_models import registry
from oslo_models.cache_argument import generation_name
from oslo_models.distributed.mesh import Axis
from oslo_models.distributed.object_exchange import gather_objects
from oslo_models.fusion import (
    apex,
    attention,
    decoding,
    full_norms,
    linear_cross_entropy,
    mlps,
    norms,
    parallel_blocks,
    rotary_attention,
)
from oslo_models.fusion import modules as fused_layers
from oslo_models.fusion.decoding import Decoder, Decoders, rounded_length
from oslo_models.fusion.rules import fusion_candidates
from oslo_models.fusion.swap import choose_backend
from oslo_models.layers.cross_entropy import VocabShard

from support import zoo
from support.float64 import lifted_casts
from support.fusion import GELU_NEW, LOGITS, as_on_a_gpu, fusion_reference, gpt2, relative_error
from support.pool import Pool
from support.reference import (
    TOLERANCE,
    Step,
    differences,
    full_parameters,
    parallel_model,
    reference_step,
    step_differences,
    tensors,
)

pytestmark = pytest.mark.drawn(16, of="file")

WOULD = {  # operations fused on a GPU beside the head, and their kernels
    "bert": ({"bias and GeLU", "LayerNorm", "residual", "attention"}, {"add_norm", "bias_gelu"}),
    "bloom": ({"attention", "residual", "head and cross entropy"}, {"masked_softmax"}),
    "gemma": ({"root mean square norm", "GeGLU", "residual", "attention"}, {"add_norm", "gated", "rotary"}),
    "gemma2": ({"root mean square norm", "GeGLU", "residual", "attention"}, {"add_norm", "gated", "rotary"}),
    "gemma3_text": (
        {"root mean square norm", "GeGLU", "residual", "attention"},
        {"add_norm", "gated", "normed_rotary"},
    ),
    "gpt2": ({"bias and GeLU", "LayerNorm", "residual", "attention"}, {"add_norm", "bias_gelu"}),
    "gpt_neo": ({"bias and GeLU", "LayerNorm", "residual"}, {"add_norm", "bias_gelu"}),
    "gpt_neox": ({"bias and GeLU", "residual", "attention"}, {"bias_gelu", "rotary", "sum_of_three"}),
    "gptj": ({"bias and GeLU", "residual"}, {"bias_gelu", "sum_of_three"}),
    "llama": ({"root mean square norm", "SwiGLU", "residual", "attention"}, {"add_norm", "gated", "rotary"}),
    "qwen2": ({"root mean square norm", "SwiGLU", "residual", "attention"}, {"add_norm", "gated", "rotary"}),
    "olmo2": (
        {"root mean square norm", "SwiGLU", "residual", "attention"},
        {"full_norm_rotary", "gated", "norm_add"},
    ),
    "phi3": ({"root mean square norm", "SwiGLU", "residual", "attention"}, {"add_norm", "gated_packed", "rotary"}),
    "qwen3": ({"root mean square norm", "SwiGLU", "residual", "attention"}, {"add_norm", "gated", "normed_rotary"}),
    "t5": ({"root mean square norm", "attention", "residual"}, {"add_norm"}),
}
KERNELS = {
    fused_layers: ("bias_dropout_residual",),
    mlps: ("bias_gelu", "gated", "gated_packed"),
    norms: ("add_norm", "norm_add", "normed_rotary"),
    parallel_blocks: ("sum_of_three",),
    attention: ("masked_softmax",),
    rotary_attention: ("rotary",),
    full_norms: ("full_norm_rotary",),
}


@contextmanager
def counted_kernels() -> Iterator[set[str]]:
    """Record the names of the operations that layers call."""
    called: set[str] = set()

    def noting(module: Any, name: str) -> Any:
        operation = getattr(module, name)
        return lambda *args, **kwargs: called.add(name) or operation(*args, **kwargs)

    with ExitStack() as stack:
        for module, names in KERNELS.items():
            stack.enter_context(mock.patch.multiple(module, **{name: noting(module, name) for name in names}))
        yield called


def check_wiring(steps: dict[str, Step], n: int) -> None:
    """On every rank, compare loss, gradients and attention weights with transformers, and check kernel calls."""
    lines = []
    for variant, step in steps.items():
        operations, kernels = WOULD[variant]
        model = as_on_a_gpu(parallel_model(step.name, step.config, step.weights, n))
        found = {row.operation for row in model.fusion_report() if row.fused}
        lines += [f"{variant}: {missing} not swapped" for missing in operations - found]
        with counted_kernels() as called:
            lines += [f"{variant}: {line}" for line in step_differences(model, step, without=LOGITS)]
            eager = {"attn_implementation": "eager"} if variant != "bloom" else {}
            model = as_on_a_gpu(parallel_model(step.name, step.config, step.weights, n, **eager))
            batch = {key: value for key, value in step.batch.items() if key != "labels"}
            batch |= {"decoder_input_ids": batch["input_ids"]} if "t5" in variant else {}
            made = []
            for _ in (True, False):
                with lifted_casts(), torch.no_grad():
                    made.append(model(**batch, output_attentions=True))
                model.unfuse()
        lines += [f"{variant}: {missing} not called" for missing in kernels - called]
        if "softmax of weights" in str(as_on_a_gpu(model).fusion_report()) and "masked_softmax" not in called:
            lines.append(f"{variant}: masked_softmax not called")
        for own, expected in zip(tensors(made[0]), tensors(made[1]), strict=True):
            lines += differences(f"{variant}: {own[0]} of eager attention", own[1], expected[1], TOLERANCE)
        model.unfuse()
        lines += [f"{variant}: {type(m)}" for m in model.modules() if type(m).__name__.startswith("Fused")]
    assert not lines, "\n".join(lines)


@pytest.mark.parametrize("n", [1, 2])
def test_modules_for_triton_match_on_the_cpu(pool: Pool, n: int, seed: int) -> None:
    """Use the modules for a GPU with operations in plain torch; check their places and their results."""
    steps = {variant: fusion_reference(variant, zoo.lm_heads(variant)[0], seed) for variant in WOULD}
    if n == 1:
        check_wiring(steps, 1)
    else:
        pool.run(n, check_wiring, steps, n)


def check_dropout(variants: dict[str, Any]) -> None:
    """On both ranks, check that fused dropout masks are equal, drop something, and repeat in recomputation."""
    lines = []
    for variant, config in variants.items():
        name = zoo.lm_heads(variant)[0]
        model = zoo.original(name)._from_config(config)
        model = as_on_a_gpu(parallel_model(name, config, full_parameters(model), 2, torch.float32)).train()
        losses, grads = [], []
        for seed, checkpointing in ((1, False), (1, True), (2, False)):
            (model.gradient_checkpointing_enable if checkpointing else model.gradient_checkpointing_disable)()
            torch.manual_seed(seed)
            with counted_kernels() as called:
                loss = model(**zoo.batch(name, config, 1, torch.float32)).loss
                loss.backward()
            losses.append(loss.item())
            grads.append({key: param.grad.clone() for key, param in model.named_parameters() if param.grad is not None})
            model.zero_grad()
        if "bias_dropout_residual" not in called or losses[0] == losses[2]:
            lines.append(f"{variant}: nothing was dropped in one pass with a residual")
        lines += differences(f"{variant}: recomputed loss", torch.tensor(losses[1]), torch.tensor(losses[0]), 1e-6)
        for key, grad in grads[0].items():
            lines += differences(f"{variant}: recomputed gradient of {key}", grads[1][key], grad, 1e-5)
        if len(set(gather_objects(model.mesh.tp, losses[0]))) > 1:
            lines.append(f"{variant}: ranks drew different masks")
    assert not lines, "\n".join(lines)


def test_fused_dropout_and_residual_draw_the_same_masks(pool: Pool) -> None:
    pool.run(2, check_dropout, {variant: zoo.config(variant, dropout=0.3) for variant in ("bert", "bloom", "t5")})


APEX = {
    "normalization/fused_layer_norm.py": """
import torch.nn.functional as F
def fused_rms_norm_affine(x, weight, shape, eps):
    return F.rms_norm(x, shape, weight, eps)
def fused_layer_norm_affine(x, weight, bias, shape, eps):
    return F.layer_norm(x, shape, weight, bias, eps)
""",
    "transformer/functional/fused_softmax.py": """
def generic_scaled_masked_softmax(scores, mask, scale):
    assert mask.shape == (len(scores), 1, *scores.shape[2:])
    return (scores * scale).masked_fill(mask, -10000.0).softmax(-1)
""",
}


def test_fuse_with_apex_calls_its_norms_and_softmax(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in has the functions of NVIDIA's apex; norms and the softmax of eager attention call them."""
    for file, code in APEX.items():
        path = tmp_path / "apex" / file
        path.parent.mkdir(parents=True)
        for folder in (path.parent, path.parent.parent):
            (folder / "__init__.py").touch()
        path.write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    model = gpt2()
    try:
        with pytest.raises(ValueError, match="apex computes on GPUs"):
            model.fuse(backend="apex")
        assert choose_backend("apex", torch.device("cuda")) == "apex"
        from apex.normalization import fused_layer_norm
        from apex.transformer.functional import fused_softmax

        for variant in ("gpt2", "llama"):
            name, config = zoo.lm_head(variant), zoo.config(variant)
            options = {"attn_implementation": "eager", "dtype": torch.bfloat16, "seed": 0}
            model = registry.find(name).from_config_with_parallel(config, **options)
            batch = zoo.batch(name, config, 0, torch.bfloat16)
            expected = model(**batch).loss
            norm = "fused_layer_norm_affine" if variant == "gpt2" else "fused_rms_norm_affine"
            with (
                mock.patch.object(fused_layer_norm, norm, wraps=getattr(fused_layer_norm, norm)) as normed,
                mock.patch.object(
                    fused_softmax, "generic_scaled_masked_softmax", wraps=fused_softmax.generic_scaled_masked_softmax
                ) as weighted,
            ):
                loss = as_on_a_gpu(model, "apex")(**batch).loss
            assert normed.call_count == 5 and weighted.call_count == 2
            assert abs(loss - expected) < 0.02 * abs(expected)
            assert "one pass in apex" in str(model.fusion_report())
            assert torch.equal(model.unfuse()(**batch).loss, expected)
        del fused_softmax.generic_scaled_masked_softmax
        with pytest.raises(ValueError, match=re.escape("has no apex.transformer.functional.fused_softmax")):
            choose_backend("apex", torch.device("cuda"))
    finally:
        for module in [module for module in sys.modules if module.split(".")[0] == "apex"]:
            del sys.modules[module]


def check_kept_caches(model: Any, given: dict[str, Any], options: dict[str, Any], graphs: list[Any]) -> None:
    """Check that another length uses the same cache and graph, and that no call overwrites a returned cache."""
    shorter = {key: value[:, 2:] for key, value in given.items()}
    expected = model.generate(**shorter, **options, cache_implementation="dynamic")
    kept = [decoder.cache for decoder in model._decoders._kept.values()]
    returned = model.generate(**shorter, **options, return_dict_in_generate=True)
    assert torch.equal(returned.sequences, expected) and len(graphs) == 1, len(graphs)
    assert [decoder.cache for decoder in model._decoders._kept.values()] == kept and len(kept) == 1
    keys = returned[generation_name()].layers[0].keys.clone()
    model.generate(**given, **options)
    assert keys.any() and torch.equal(returned[generation_name()].layers[0].keys, keys)
    fewer = {key: value[:1] for key, value in given.items()}
    expected = model.generate(**fewer, **options, cache_implementation="dynamic")
    for size in (1, 8):  # dynamo's limit: with one compilation for each of two caches it is not reached
        with torch._dynamo.config.patch(recompile_limit=size):
            assert torch.equal(model.generate(**fewer, **options), expected)
    assert len(graphs) == 2 and len(model._decoders._kept) == 2


def check_decoding(variants: tuple[str, ...], n: int) -> None:
    """On every rank, compare tokens of compiled decoding with a static cache; one graph holds the collectives."""
    for variant in variants:
        graphs: list[Any] = []

        def keep(graph: Any, inputs: Any, graphs: list[Any] = graphs) -> Any:
            graphs.append(graph)
            return graph.forward

        name, config = zoo.lm_head(variant), zoo.config(variant, num_hidden_layers=1)
        model = zoo.original(name)._from_config(config)
        model = parallel_model(name, config, full_parameters(model), n, torch.float32).eval()
        batch = zoo.batch(name, config, 1, torch.float32)
        given = {key: batch[key] for key in ("input_ids", "attention_mask")}
        options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
        expected = model.generate(**given, **options)
        compiling = CompileConfig(backend=keep, mode=None, dynamic=False)
        compiling._compile_all_devices = True
        as_on_a_gpu(model)
        model._decodes_in_graphs = True
        torch._dynamo.reset()
        with mock.patch.object(decoding, "SHORTEST", 16):  # few positions are as large as this model's weights
            found = model.generate(**given, **options, compile_config=compiling)
            assert torch.equal(found, expected), f"{variant}: {found} instead of {expected}"
            check_kept_caches(model, given, {**options, "compile_config": compiling}, graphs)
        assert len(graphs) == 2, f"{variant}: {len(graphs)} graphs"
        code = graphs[0].print_readable(print_output=False)
        assert ("all_reduce" in code) == ("all_gather" in code) == (n > 1)
        graphs.clear()
        greedy, beams = GenerationMode.GREEDY_SEARCH, GenerationMode.BEAM_SEARCH
        for mode, more in (
            *((greedy, more) for more in ({"cache_implementation": "dynamic"}, {"use_cache": False})),
            *((greedy, {"max_new_tokens": 10**6}), (beams, {"num_beams": 2})),
        ):
            cache = model._prepare_cache_for_generation
            with mock.patch.object(type(model), "_prepare_static_cache", side_effect=AssertionError("a static cache")):
                asked = GenerationConfig(**{**options, **more})
                kwargs: dict[str, Any] = {}
                cache(asked, kwargs, mode, 3, asked.max_new_tokens)


def test_graph_decoding_gives_the_same_tokens(pool: Pool) -> None:
    """Test the graphs for CUDA graphs on the CPU, with another backend of the compilation in transformers."""
    check_decoding(("gpt2",), 1)
    pool.run(2, check_decoding, ("llama",), 2)


def test_graph_decoding_is_offered_where_it_pays() -> None:
    model = gpt2()
    with mock.patch.object(type(model), "device", torch.device("cuda")):
        assert any(each.operation == "decoding" and each.cls is not None for each in fusion_candidates(model, "torch"))
    neo = registry.find("GPTNeoForCausalLM").from_config_with_parallel(zoo.config("gpt_neo"))
    with mock.patch.object(type(neo), "device", torch.device("cuda")):
        (candidate,) = [candidate for candidate in fusion_candidates(neo, "torch") if candidate.operation == "decoding"]
    assert candidate.cls is None and "static cache" in candidate.reason


def test_head_and_loss_on_a_gpu_have_aligned_rows_and_few_chunks() -> None:
    """On fake tensors, rows of an odd vocabulary begin at multiples of 128 bytes; products accumulate in float32."""
    axis = Axis.alone("tp")
    with FakeTensorMode():
        weight = torch.empty(50257, 64, device="cuda", dtype=torch.bfloat16)
        logits = padded_logits(weight, 100)
        assert logits.shape == (100, 50304) and padded_weight(weight).shape == (50304, 64)
        assert padded_weight(weight[:50256]).shape == (50256, 64)
        size = linear_cross_entropy._rows_at_once(8192, weight, VocabShard(axis, (0, 50257), 50257))
        assert 4 * size == 8192 and 2 * size * 50257 <= linear_cross_entropy.CHUNK_BYTES["cuda"]
        assert linear_cross_entropy._rows_at_once(3, weight, VocabShard(axis, (0, 50257), 50257)) == 3
        hidden = torch.empty(100, 64, device="cuda", dtype=torch.bfloat16)
        for total in (None, torch.empty(50257, 64, device="cuda")):
            with mock.patch.object(torch, "addmm") as product:  # torch 2.11 has no fake of it
                linear_cross_entropy._plus_product(total, logits[:, :50257].T, hidden, torch.float32)
            out = product.call_args.kwargs["out"]
            assert product.call_args.kwargs["out_dtype"] == out.dtype == torch.float32
            assert out.shape == (50257, 64) and (total is None or out is total) and product.call_args.args[0] is out


@pytest.mark.parametrize("ignored", [False, True])
def test_padded_products_have_exact_gradients(monkeypatch: pytest.MonkeyPatch, ignored: bool) -> None:
    """On a CPU, with the padding of a GPU."""
    vocab, width, rows = 67, 12, 9
    x, w, bias = (
        torch.randn(*size, dtype=torch.float64).requires_grad_() for size in ((rows, width), (vocab, width), (vocab,))
    )
    target = torch.randint(vocab, (rows,))
    target[: rows if ignored else 2] = -100
    expected = F.cross_entropy(F.linear(x, w, bias), target, reduction="sum")
    wanted = torch.autograd.grad(expected, (x, w, bias))
    pad = -vocab % PADDING
    monkeypatch.setattr(linear_cross_entropy, "padded_weight", lambda weight: F.pad(weight, (0, 0, 0, pad)))
    monkeypatch.setattr(linear_cross_entropy, "padded_logits", lambda weight, rows: weight.new_empty(rows, vocab + pad))
    monkeypatch.setattr(linear_cross_entropy, "_rows_at_once", lambda *_: 4)
    shard = VocabShard(Axis.alone("tp"), (0, vocab), vocab)
    loss = linear_cross_entropy.linear_cross_entropy(x, w, bias, target, shard)
    found = torch.autograd.grad(loss, (x, w, bias))
    assert (loss - expected).abs() < 1e-12
    assert all((a - b).abs().max() < 1e-12 and a.shape == b.shape for a, b in zip(found, wanted, strict=True))


def test_caches_are_kept_within_their_limit() -> None:
    decoders, model = Decoders(), SimpleNamespace(device=torch.device("cpu"), dtype=torch.float32)
    caches = [mock.Mock() for _ in range(4)]
    for cache, rows in zip(caches, (1, 2, 1, 4), strict=True):
        found = decoders.cache(model, rows, 256, cache, limit=5 * 256)
        assert found is (caches[0] if cache is caches[2] else cache)
        found.reset.assert_called()
    assert [decoder.rows for decoder in decoders._kept.values()] == [1, 4]  # two rows were used longest ago
    (one, _) = decoders._kept.values()

    def sample() -> Any:
        assert decoders.running() is one
        assert decoders.cache(model, 1, 256, caches[1], limit=5 * 256) is caches[1]  # nested generate
        raise KeyError

    with pytest.raises(KeyError):
        decoders.run(sample, one.cache)
    assert decoders.running() is None
    assert [rounded_length(n) for n in (3, 257, 513, 1024, 1025, 2176)] == [256, 512, 768, 1024, 2048, 3072]
    assert not copy.deepcopy(decoders)._kept


@pytest.fixture
def generates_in_graphs(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A fused model that chooses static caches as on a GPU; its calls compute nothing."""
    name = zoo.lm_head("llama")
    model = registry.find(name).from_config_with_parallel(zoo.config("llama", num_hidden_layers=1)).eval()
    as_on_a_gpu(model)
    model._decodes_in_graphs = True
    monkeypatch.setattr(decoding, "SHORTEST", 16)
    monkeypatch.setattr(decoding, "MULTIPLE", 16)
    monkeypatch.setattr(type(model), "_cached_positions", lambda model: 64)
    monkeypatch.setattr(transformers.GenerationMixin, "_sample", lambda model, input_ids, **kwargs: input_ids)
    return model


def call(model: Any, length: int) -> None:
    model.generate(torch.ones(1, length, dtype=torch.long), max_new_tokens=1, do_sample=False, pad_token_id=0)


def no_memory(*args: Any, **kwargs: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize(
    "needs", ["a call without memory", "a forward without memory", "training", "a training step", "a move"]
)
def test_kept_caches_are_released_where_memory_is_needed(
    generates_in_graphs: Any, monkeypatch: pytest.MonkeyPatch, needs: str
) -> None:
    model, ids = generates_in_graphs, torch.ones(1, 4, dtype=torch.long)
    if needs == "a training step":
        model.train()
    call(model, 9)
    held = weakref.ref(next(iter(model._decoders._kept.values())).cache)
    if needs == "a training step":
        with torch.no_grad():
            model(input_ids=ids)
        assert held() is not None
        model(input_ids=ids, labels=ids)
    elif needs == "a forward without memory":
        model(input_ids=ids)
        assert held() is not None, "a forward in evaluation mode needs no release"
        monkeypatch.setattr(transformers.LlamaModel, "forward", no_memory)
        with pytest.raises(torch.OutOfMemoryError):
            model(input_ids=ids)
    elif needs == "training":
        model.eval()
        assert held() is not None
        model.train()
    elif needs == "a move":
        model.double()
    else:
        monkeypatch.setattr(transformers.GenerationMixin, "_sample", no_memory)
        with pytest.raises(torch.OutOfMemoryError):
            call(model, 9)
    gc.collect()
    assert held() is None


def test_former_cache_is_gone_before_a_new_one_is_made(
    generates_in_graphs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both would exceed the limit. transformers allocates a cache at once if it computes prompts in chunks."""
    model = generates_in_graphs
    call(model, 30)
    held = weakref.ref(next(iter(model._decoders._kept.values())).cache)
    make, alive = type(model)._prepare_static_cache, []

    def made(*args: Any, **kwargs: Any) -> Any:
        gc.collect()
        alive.append(held() is not None)
        return make(*args, **kwargs)

    monkeypatch.setattr(type(model), "_prepare_static_cache", made)
    call(model, 10)
    call(model, 40)
    assert alive == [True, False]


def test_products_of_one_row_are_tuned(caplog: pytest.LogCaptureFixture) -> None:
    """The first call takes a minute and says so, on one rank."""
    with mock.patch.object(torch, "compile") as compiled:
        model = SimpleNamespace(_default_compile_config=CompileConfig, mesh=None)
        one, two = Decoder(1, None), Decoder(2, None)
        assert one.step(model, None) is one.step(model, None)
        two.step(model, None)
        one.step(model, CompileConfig(mode="default"))
    (first, second, third) = (call.kwargs for call in compiled.call_args_list)
    assert first["mode"] is None and first["options"] == {"triton.cudagraphs": True, "coordinate_descent_tuning": True}
    assert (second["mode"], third["mode"]) == ("reduce-overhead", "default")
    assert caplog.messages == [decoding.TUNING]
    other = SimpleNamespace(
        _default_compile_config=CompileConfig, mesh=SimpleNamespace(world=Axis("world", 1, (0, 1), None))
    )
    with mock.patch.object(torch, "compile"):
        Decoder(1, None).step(other, None)
    assert len(caplog.messages) == 1
    assert len({call.args[0].__code__ for call in compiled.call_args_list}) == 3


def test_each_class_has_compilations_of_its_own() -> None:
    """Dynamo counts compilations by code object, and stops compiling above its limit."""
    graphs: list[Any] = []
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=1), torch.no_grad():
        for name in ("GPT2Model", "GPT2LMHeadModel"):
            model = registry.find(name).from_config_with_parallel(zoo.config("gpt2", num_hidden_layers=1), seed=0)
            torch.compile(model, backend=lambda graph, _: graphs.append(graph) or graph.forward)(torch.tensor([[1, 2]]))
    assert len(graphs) == 2


def test_graphs_run_in_threads_that_own_them() -> None:
    """Inductor of torch 2.11 supports graphs only in the thread that imported its module."""
    trees: Any = SimpleNamespace(local=threading.local())
    trees.local.tree_manager_containers = {}

    def of_torch_2_11(local: Any, name: str) -> Any:
        if hasattr(local, name):
            return getattr(local, name)
        raise AssertionError

    name, here, there = "torch._inductor.cudagraph_trees", decoding.graphs_run_in_this_thread, []

    def ask() -> None:
        thread = threading.Thread(target=lambda: there.append(here()))
        thread.start()
        thread.join()

    trees.get_obj = of_torch_2_11
    with mock.patch.dict(sys.modules, {name: trees}):
        assert here()
        ask()
        trees.get_obj = lambda local, name: {}  # of later releases
        assert here()
        ask()
    assert there == [False, True]
    with mock.patch.dict(sys.modules), mock.patch.object(torch, "__version__", TorchVersion("2.11.0")):
        sys.modules.pop(name, None)
        ask()
        assert not there.pop() and name not in sys.modules


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("variant", [*zoo.FOUNDING, "bloom"])
def test_fused_model_matches_on_a_gpu(variant: str, dtype: torch.dtype, seed: int) -> None:
    """Compare loss, gradients and tokens; bfloat16 errors are at most twice the errors of the unfused model."""
    name, config = zoo.lm_head(variant), zoo.config(variant, **GELU_NEW.get(variant, {}))
    exact = reference_step(name, config, seed)
    errors, texts = [], []
    has_sdpa = variant != "bloom" and getattr(transformers, name)._supports_sdpa
    for implementation in ("sdpa", "eager") if has_sdpa else ("eager",):
        model = parallel_model(name, config, exact.weights, 1, dtype, attn_implementation=implementation).cuda()
        batch = {key: value.cuda() for key, value in exact.batch.items()}
        for fuse in (False, True):
            (model.fuse if fuse else model.unfuse)()
            model.zero_grad()
            loss = model.train()(**batch).loss
            loss.backward()
            own = {key: param.grad.cpu() for key, param in model.named_parameters() if param.grad is not None}
            gradients = {key: exact.gradients[key] for key in own}
            errors.append(relative_error({**own, "loss": loss.detach().cpu()}, {**gradients, "loss": exact.value}))
            prompt = {key: batch[key] for key in ("input_ids", "attention_mask")}
            blocked = {"fused_no_repeat_ngram_blocking": True} if fuse else {}
            model.eval()
            texts.append(model.generate(**prompt, max_new_tokens=8, no_repeat_ngram_size=2, do_sample=False, **blocked))
        assert errors[-1] <= 2 * errors[-2], f"{implementation}: {errors[-1]:.2e} instead of {errors[-2]:.2e}"
        assert dtype != torch.float32 or torch.equal(*texts[-2:])


@pytest.mark.gpu
@pytest.mark.parametrize("approximate", ["tanh", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gelu_in_the_matmul_epilogue_on_a_gpu(dtype: torch.dtype, approximate: str, seed: int) -> None:
    torch.manual_seed(seed)
    layer, x = nn.Linear(64, 256).to("cuda", dtype), torch.randn(3, 40, 64, device="cuda", dtype=dtype)
    with torch.no_grad():
        for rows in (x, x[:1, :1]):
            exact = F.gelu(F.linear(rows.double(), layer.weight.double(), layer.bias.double()), approximate=approximate)
            found = mlps._gelu_of_linear(layer, rows, approximate)
            plain = F.gelu(layer(rows), approximate=approximate)
            assert found.dtype == dtype and (found - exact).abs().max() <= 2 * (plain - exact).abs().max() + 1e-6


def test_gelu_in_the_matmul_epilogue_follows_autocast() -> None:
    """Fake GPU tensors use the epilogue in 16-bit dtypes only; under autocast, the product has its dtype."""
    with FakeTensorMode(), torch.no_grad():
        layer, x = nn.Linear(4, 8, device="meta"), torch.empty(2, 3, 4, device="cuda", dtype=torch.float16)
        with mock.patch.object(torch, "_addmm_activation", wraps=torch._addmm_activation) as epilogue:
            for dtype, calls in ((torch.float32, 0), (torch.float16, 1)):
                layer.weight, layer.bias = (
                    nn.Parameter(torch.empty(*size, device="cuda", dtype=dtype), False) for size in ((8, 4), (8,))
                )
                gelu = partial(mlps._gelu_of_linear, layer, x.to(dtype), "tanh")
                assert gelu().dtype == dtype and epilogue.call_count == calls
            torch.set_autocast_enabled("cuda", True)
            torch.set_autocast_dtype("cuda", torch.bfloat16)
            try:
                assert gelu().dtype == F.linear(x, layer.weight, layer.bias).dtype == torch.bfloat16
            finally:
                torch.set_autocast_enabled("cuda", False)


@pytest.mark.parametrize("variant", ["gemma", "helium", "olmo", "starcoder2", "llama"])
def test_report_names_residuals_that_are_not_fused(variant: str) -> None:
    """Their norms have no kernel, so a fused block would run the same operations as transformers."""
    model = registry.find(zoo.lm_head(variant)).from_config_with_parallel(zoo.config(variant), seed=0)
    rows = [each for each in fusion_candidates(model, "triton") if each.operation == "residual"]
    assert rows and all((each.cls is not None) == (variant in ("gemma", "llama")) for each in rows)


WRONG_LABEL = """
import torch
from oslo_models.fusion.linear_cross_entropy import VocabShard, linear_cross_entropy
from oslo_models.distributed.mesh import Axis
words = VocabShard(Axis.alone("tp"), (0, 9), 9)
x, w = torch.randn(4, 8, device="cuda"), torch.randn(9, 8, device="cuda")
linear_cross_entropy(x, w, None, torch.tensor([1, -100, 8, 0], device="cuda"), words).item()
print("right ones are taken", flush=True)
linear_cross_entropy(x, w, None, torch.tensor([1, -100, 9, 0], device="cuda"), words).item()
"""


@pytest.mark.gpu
def test_label_outside_the_vocabulary_asserts_on_a_gpu() -> None:
    """Run in a separate process, because the assertion ends all work on the device."""
    done = subprocess.run([sys.executable, "-c", WRONG_LABEL], capture_output=True, text=True)
    assert done.returncode != 0 and "right ones are taken" in done.stdout and "it is neither in" in done.stderr


@pytest.mark.parametrize(("value", "taken"), [(0.0, True), (torch.finfo(torch.float16).min, True), (-0.5, False)])
def test_apex_softmax_accepts_masks_without_additive_bias_only(value: float, taken: bool) -> None:
    mask = torch.zeros(1, 1, 2, 3, dtype=torch.float16)
    mask[..., 0] = value
    assert apex._is_supported(torch.zeros(1, 2, 2, 3, dtype=torch.float16), mask) == taken
