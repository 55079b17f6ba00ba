"""Wrappers, optimizers, hooks, transforms and user modules around sharded layers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.optim import ZeroRedundancyOptimizer  # type: ignore[attr-defined]
from torch.func import functional_call, grad
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize
from transformers import LlamaConfig

from oslo_models import registry
from oslo_models.distributed.autograd_collectives import reduce_from
from oslo_models.distributed.mesh import ParallelMesh
from oslo_models.layers.vocab_parallel import VocabParallelLogits
from oslo_models.sharding.layout import EvenSplit, Layout

from support import zoo
from support.float64 import lifted_casts
from support.pipelines import config as config_of
from support.pipelines import model_on_stages
from support.pool import Pool
from support.reference import (
    TOLERANCE,
    differences,
    full_gradients,
    full_parameters,
    reference_model,
    shard_differences,
)

Weights = dict[str, Tensor]


def of_one_process(seed: int, variant: str = "llama", **changes: Any) -> tuple[str, Any, Any, Weights, dict[str, Any]]:
    name, config = zoo.lm_head(variant), config_of(variant, **changes)
    model = reference_model(name, config, seed).eval()
    return name, config, model, full_parameters(model), zoo.batch(name, config, seed)


# Wrappers and optimizers over ranks with other shards -----------------------------------------------------------------


def first_layer(model: Any) -> nn.Module:
    return next(module for module in model.modules() if type(module).__name__.endswith("DecoderLayer"))


WRONG: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "DDP of the base model": ("DistributedDataParallel over ranks", lambda model: DistributedDataParallel(model.model)),
    "DDP without a first synchronization": (
        "DistributedDataParallel over ranks",
        lambda model: DistributedDataParallel(model.model, init_sync=False),
    ),
    "DDP of a layer": ("DistributedDataParallel over ranks", lambda model: DistributedDataParallel(first_layer(model))),
    "FSDP1 of a layer": (
        "FullyShardedDataParallel would take the shards of model.layers.0",
        lambda model: FullyShardedDataParallel(first_layer(model), device_id=torch.device("cpu")),
    ),
    "ZeRO": (
        "ZeroRedundancyOptimizer over ranks .*process_group=model.mpu.get_data_parallel_group",
        lambda model: ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1),
    ),
}


def wrap(name: str, config: Any, weights: Weights, batch: dict[str, Any]) -> None:
    model = model_on_stages(name, config, weights, 2, 1)
    for what, (message, call) in WRONG.items():
        with pytest.raises(ValueError, match=message):
            print(what, call(model))
    replicas = model.mpu.get_data_parallel_group()
    DistributedDataParallel(model.model, process_group=replicas)
    ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, process_group=replicas, lr=0.1)
    model(**batch).loss.backward()
    with pytest.raises(RuntimeError, match=r"cat of a shard \(model\.embed_tokens"):
        PeriodicModelAverager(period=1, warmup_steps=0).average_parameters(model.parameters())
    for key, param in model.named_parameters():
        assert torch.equal(param.full_tensor() if hasattr(param, "full_tensor") else param, weights[key]), key


@pytest.mark.filterwarnings("ignore")
def test_parts_of_a_model_are_not_wrapped_over_ranks_with_other_shards(pool: Pool, seed: int) -> None:
    name, config, _, weights, batch = of_one_process(seed)
    pool.run(2, wrap, name, config, weights, batch)


def zero_on_stages(name: str, config: Any, weights: Weights) -> None:
    model = model_on_stages(name, config, weights, 1, 2)
    with pytest.raises(ValueError, match="ZeroRedundancyOptimizer over ranks"):
        ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)


def test_zero_redundancy_optimizer_over_stages_is_refused(pool: Pool, seed: int) -> None:
    name, config, _, weights, _ = of_one_process(seed)
    pool.run(2, zero_on_stages, name, config, weights)


# Modules of the user --------------------------------------------------------------------------------------------------


class LoRA(nn.Module):
    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 4, bias=False, dtype=base.weight.dtype)

    def forward(self, x: Tensor) -> Any:
        return self.base(x) + self.down(x).sum()


class Scaled(nn.Module):
    """Wrapper that scales a replicated output."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.scale = nn.Parameter(torch.full((), 1.5, dtype=torch.float64))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.base(*args, **kwargs) * self.scale


def scale_modules(model: Any) -> None:
    model.model.embed_tokens = Scaled(model.model.embed_tokens)
    model.model.layers[0].mlp = Scaled(model.model.layers[0].mlp)


def wrap_layers(name: str, config: Any, weights: Weights, batch: dict[str, Any], expected: Weights) -> None:
    for leaf in ("self_attn.q_proj", "mlp.down_proj"):
        model = model_on_stages(name, config, weights, 2, 1)
        owner, _, attribute = leaf.rpartition(".")
        block = model.model.layers[0].get_submodule(owner)
        setattr(block, attribute, LoRA(getattr(block, attribute)))
        for _ in range(2):
            with pytest.raises(RuntimeError, match=rf"{leaf} is now a .*LoRA with own parameters .*peft"):
                model(**batch)
    model = model_on_stages(name, config, weights, 2, 1).eval()
    scale_modules(model)
    with lifted_casts():
        model(**batch).loss.backward()
    lines = []
    for key, param in model.named_parameters():
        found = param.grad.full_tensor() if hasattr(param.grad, "full_tensor") else param.grad
        lines += differences(key, found, expected[key], TOLERANCE)
    assert not lines, "\n".join(lines)


def test_wrapper_with_parameters_around_a_sharded_layer_is_refused(pool: Pool, seed: int) -> None:
    """The wrapper is exact around modules with replicated inputs and outputs."""
    name, config, model, weights, batch = of_one_process(seed)
    scale_modules(model)
    with lifted_casts():
        model(**batch).loss.backward()
    expected = {key: param.grad for key, param in model.named_parameters()}
    pool.run(2, wrap_layers, name, config, weights, batch, expected)


def clip_added_head(name: str, config: Any, weights: Weights, batch: dict[str, Any], head: Tensor, norm: float) -> None:
    for clip in ("model", "torch"):
        model = model_on_stages(name, config, weights, 2, 1).eval()
        backward_with_head(model, batch, head)
        found = model.clip_grad_norm_(1.0) if clip == "model" else nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        assert abs(float(found) - norm) < TOLERANCE, clip


def backward_with_head(model: Any, batch: dict[str, Any], head: Tensor) -> None:
    model.value = nn.Linear(head.shape[0], 1, dtype=head.dtype)
    model.value.load_state_dict({"weight": head[None], "bias": torch.zeros(1)})
    with lifted_casts():
        output = model(**batch, output_hidden_states=True)
        (output.loss + model.value(output.hidden_states[-1]).square().mean()).backward()


def test_gradients_of_an_added_head_count_once(pool: Pool, seed: int) -> None:
    name, config, model, weights, batch = of_one_process(seed)
    head = torch.randn(config.hidden_size, dtype=torch.float64)
    backward_with_head(model, batch, head)
    norm = float(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    pool.run(2, clip_added_head, name, config, weights, batch, head, norm)


class WithValue(registry.find("LlamaForCausalLM")):  # type: ignore[misc]
    """Subclass with an extra value head."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.value = nn.Linear(config.hidden_size, 1)


class WithRow(registry.find("LlamaForCausalLM")):  # type: ignore[misc]
    """Subclass with an extra parameter inside the sharded base model."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.model.layers[0].mlp.gate = nn.Parameter(torch.ones(()))


def load_subclass(folder: Path, config: Any, seed: int) -> None:
    model = WithValue.from_config_with_parallel(config, tensor_parallel_size=2, seed=seed)
    model.value.weight.data.fill_(dist.get_world_size() + 0.5)
    model.save_pretrained_with_parallel(folder, save_with_merging=True)
    loaded = WithValue.from_pretrained_with_parallel(folder, tensor_parallel_size=2)
    for key, param in model.named_parameters():
        assert torch.equal(loaded.get_parameter(key), param), key
    with pytest.raises(ValueError, match=r"parameters that no entry names: \['model\.layers\.0\.mlp\.gate'\]"):
        WithRow.from_pretrained_with_parallel(folder, tensor_parallel_size=2)


def test_subclass_with_a_head_of_its_own_is_loaded(pool: Pool, tmp_path: Path, seed: int) -> None:
    pool.run(2, load_subclass, tmp_path, config_of("llama"), seed)


# Refused before anything is loaded, or by the number that the user passed --------------------------------------------


# Other ways to a weight -----------------------------------------------------------------------------------------------


class Centred(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight - weight.mean(0, keepdim=True)


REFUSED: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "full parameter": ("a full tensor was assigned", lambda model: setattr(model.lm_head, "weight", full_head(model))),
    "array": (r"numpy of a shard \(", lambda model: model.lm_head.weight.detach().numpy()),
    "list": (r"tolist of a shard \(", lambda model: model.state_dict()["lm_head.weight"].tolist()),
    "element": (r"contains of a shard \(", lambda model: 0.5 in model.lm_head.weight),
    "batches": (
        "continuous batching .* a sharded LlamaForCausalLM: call generate_batch",
        lambda model: model.init_continuous_batching(),
    ),
    "parametrization": (
        r"mean of a shard \(",
        lambda model: parametrize.register_parametrization(model.model.layers[0].mlp.up_proj, "weight", Centred()),
    ),
    "spectral norm": (r"mv of a shard \(", lambda model: nn.utils.spectral_norm(model.model.layers[0].mlp.up_proj)),
}


def full_head(model: Any) -> nn.Parameter:
    return nn.Parameter(model.lm_head.weight.full_tensor().detach())


def assign_weights(model: Any, batch: dict[str, Any]) -> Tensor:
    """Replace weights in ways that a sharded model supports; return the gradient norm and the new loss."""
    head, mlp = model.lm_head, model.model.layers[0].mlp
    start = torch.linspace(-1, 1, model.config.vocab_size * model.config.hidden_size)
    head.weight.data = start.view(model.config.vocab_size, -1).to(model.dtype)
    mlp.up_proj.weight = nn.Parameter(mlp.up_proj.weight.data * 1.5)
    with lifted_casts():
        loss = model(**batch).loss
        loss.backward()
    norm = mlp.up_proj.weight.grad.norm() + head.weight.grad.norm()
    return torch.stack((norm * 1, loss)).detach()


def check_ways(name: str, config: Any, weights: Weights, batch: dict[str, Any], expected: Tensor) -> None:
    for message, call in REFUSED.values():
        model = model_on_stages(name, config, weights, 2, 1)
        with pytest.raises(RuntimeError, match=message):
            print(call(model), model(**batch).loss)
    found = assign_weights(model_on_stages(name, config, weights, 2, 1), batch)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_weights_are_replaced_and_read_as_full_tensors_or_not_at_all(pool: Pool, seed: int) -> None:
    name, config, model, weights, batch = of_one_process(seed)
    pool.run(2, check_ways, name, config, weights, batch, assign_weights(model, batch))


def few_tokens(config: Any) -> None:
    cls: Any = registry.find("LlamaForCausalLM")
    with pytest.raises(ValueError, match="a vocabulary of 3 tokens cannot be sharded over tensor_parallel_size=4"):
        cls.from_config_with_parallel(config, tensor_parallel_size=4)


def test_vocabulary_with_fewer_tokens_than_ranks_is_refused(pool: Pool) -> None:
    sizes = {"hidden_size": 48, "intermediate_size": 84, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=3, bos_token_id=None, eos_token_id=None, **sizes)
    pool.run(4, few_tokens, config)


def wrong_labels(name: str, config: Any, weights: Weights, batch: dict[str, Any]) -> None:
    model = model_on_stages(name, config, weights, 2, 1)
    for label in (config.vocab_size, -1):
        labels = batch["labels"].clone()
        labels[0, -1] = label
        with pytest.raises(IndexError, match=rf"Target {label} is out of bounds"):
            model(**{**batch, "labels": labels})
    model(**batch).loss.backward()


def test_label_outside_of_the_vocabulary_is_named_on_every_rank(pool: Pool, seed: int) -> None:
    name, config, _, weights, batch = of_one_process(seed)
    pool.run(2, wrong_labels, name, config, weights, batch)


# Hooks, transforms and gradients of gradients -------------------------------------------------------------------------


def norms_of_gradients(model: Any, batch: dict[str, Any]) -> dict[str, Tensor]:
    """Return the gradient norms of the full module outputs."""
    norms: dict[str, Tensor] = {}

    def note(name: str) -> Callable[..., None]:
        return lambda module, inputs, outputs: norms.__setitem__(name, outputs[0].norm())

    names = ("lm_head", "model.norm", "model.layers.1.mlp", "model.layers.0.self_attn.o_proj", "model.embed_tokens")
    handles = [model.get_submodule(name).register_full_backward_hook(note(name)) for name in names]
    with lifted_casts():
        model(**batch).loss.backward()
    for handle in handles:
        handle.remove()
    model.zero_grad()
    return norms


def check_hooks(name: str, config: Any, weights: Weights, batch: dict[str, Any], expected: dict[str, Tensor]) -> None:
    for fused in (False, True):
        model = model_on_stages(name, config, weights, 2, 1).eval()
        found = norms_of_gradients(model.fuse() if fused else model, batch)
        assert found.keys() == expected.keys()
        for key, norm in found.items():
            torch.testing.assert_close(norm, expected[key], rtol=1e-10, atol=1e-10, msg=key)
        assert model(**batch).logits is None  # without hooks, they stay sharded
        hook = nn.modules.module.register_module_full_backward_hook(lambda *_: None)
        try:
            assert model(**batch).logits.shape[-1] == config.vocab_size
        finally:
            hook.remove()


def test_full_backward_hooks_of_all_modules_get_the_gradients_of_one_process(pool: Pool, seed: int) -> None:
    name, config, model, weights, batch = of_one_process(seed)
    pool.run(2, check_hooks, name, config, weights, batch, norms_of_gradients(model, batch))


def transform(name: str, config: Any, weights: Weights, batch: dict[str, Any]) -> None:
    model = model_on_stages(name, config, weights, 2, 1)
    params = {key: param.detach() for key, param in model.named_parameters()}

    def loss(params: Any) -> Tensor:
        found: Tensor = functional_call(model, params, (), batch).loss
        return found

    assert loss(params).isfinite()
    with pytest.raises(RuntimeError, match=r"transforms of torch\.func .* LlamaForCausalLM that is sharded"):
        grad(loss)(params)
    with pytest.raises(RuntimeError, match="forward-mode differentiation"), torch.autograd.forward_ad.dual_level():
        loss(params)


def test_transforms_of_functions_are_refused(pool: Pool, seed: int) -> None:
    name, config, _, weights, batch = of_one_process(seed)
    pool.run(2, transform, name, config, weights, batch)


def gradients_of_gradients(model: Any, batch: dict[str, Any]) -> Tensor:
    """Add a penalty on all first derivatives to the loss; return both."""
    params = [param for param in model.parameters() if param.requires_grad]
    with lifted_casts():
        loss = model(**batch).loss
        grads = torch.autograd.grad(loss, params, create_graph=True, allow_unused=True)
        penalty = sum(each.square().sum() for each in grads if each is not None)
        (loss + penalty).backward()
    return torch.stack((loss.detach(), torch.as_tensor(penalty).detach()))


def check_second_derivatives(name: str, config: Any, weights: Weights, batch: Any, values: Tensor, grads: Any) -> None:
    model = model_on_stages(name, config, weights, 2, 1, attn_implementation="eager").eval()
    lines = differences("loss and penalty", gradients_of_gradients(model, batch), values, 1e-9)
    lines += shard_differences(model, "gradient", full_gradients(model), grads, 1e-9)
    assert not lines, "\n".join(lines)


@pytest.mark.parametrize("variant", ["llama", "llama-one-kv", "gpt2", "t5"])
def test_second_derivatives_match_one_process(pool: Pool, variant: str, seed: int) -> None:
    name, config = zoo.lm_head(variant), config_of(variant)
    model = reference_model(name, config, seed, attn_implementation="eager").eval()
    weights, batch = full_parameters(model), zoo.batch(name, config, seed)
    values = gradients_of_gradients(model, batch)
    pool.run(2, check_second_derivatives, name, config, weights, batch, values, full_gradients(model))


def along_directions(
    x: Tensor, logits: Any, target: Tensor, columns: slice, total: Callable[[Tensor], Tensor]
) -> Tensor:
    """Third derivatives of a squared, smoothed cross entropy."""
    loss = F.cross_entropy(logits, target, label_smoothing=0.1).square()
    direction = torch.arange(1.0, 8.0, dtype=x.dtype)[columns].cos()
    for _ in range(2):
        (found,) = torch.autograd.grad(loss, x, create_graph=True)
        loss = total((found * direction).square().sum())
    return torch.autograd.grad(loss, x)[0]


def check_smoothed(logits: Tensor, target: Tensor, expected: Tensor) -> None:
    tp = ParallelMesh(2).tp
    layout = Layout.sharded((logits.shape[1], 1), 0, (EvenSplit(logits.shape[1]),), 2)
    ((start, stop),) = layout.ranges[tp.rank]
    local = logits[:, start:stop].clone().requires_grad_()
    sharded = VocabParallelLogits.from_local(local * 1, tp, layout)
    found = along_directions(local, sharded, target, slice(start, stop), partial(reduce_from, tp))
    torch.testing.assert_close(found, expected[:, start:stop], rtol=1e-9, atol=1e-10)


def test_smoothed_cross_entropy_has_derivatives_of_every_order(pool: Pool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(5, 7, dtype=torch.float64, generator=generator)
    target = torch.tensor([0, 6, -100, 3, 4])
    x = logits.clone().requires_grad_()
    expected = along_directions(x, x * 1, target, slice(None), torch.clone)
    pool.run(2, check_smoothed, logits, target, expected)


# Attention weights of a stack that is called by itself --------------------------------------------------------------


def check_stacks(name: str, config: Any, weights: Weights, ids: Tensor, expected: dict[str, Any]) -> None:
    model = model_on_stages(name, config, weights, 2, 1, attn_implementation="eager").eval()
    lines = []
    for key, value in attentions(model, ids).items():
        assert len(value) == len(expected[key]), key
        for found, wanted in zip(value, expected[key], strict=True):
            lines += differences(key, found, wanted, TOLERANCE)
    with pytest.raises(ValueError, match="return_dict=True"):
        model.get_encoder()(ids, output_attentions=True, return_dict=False)
    assert not lines, "\n".join(lines)


@torch.no_grad()
def attentions(model: Any, ids: Tensor) -> dict[str, list[Tensor]]:
    options = {"output_attentions": True}
    with lifted_casts():
        encoder = model.get_encoder()(ids, **options)
        generated = model.generate(ids, max_new_tokens=3, do_sample=False, return_dict_in_generate=True, **options)
        whole = model(encoder_outputs=encoder, decoder_input_ids=ids, **options)
        base = model.base_model(input_ids=ids, decoder_input_ids=ids, **options)
    found = {"encoder": encoder.attentions, "generate": generated.encoder_attentions}
    found |= {"passed": whole.encoder_attentions, "own": whole.decoder_attentions, "cross": whole.cross_attentions}
    found |= {"base": base.encoder_attentions, "base, decoder": base.decoder_attentions}
    return {key: [each.clone() for each in value] for key, value in found.items()}


@pytest.mark.parametrize(
    ("variant", "name"), [("t5", "T5ForConditionalGeneration"), ("bart", "BartForConditionalGeneration")]
)
def test_attentions_of_a_stack_called_by_itself_have_all_heads(pool: Pool, variant: str, name: str, seed: int) -> None:
    config = config_of(variant)
    model = reference_model(name, config, seed, attn_implementation="eager").eval()
    ids = torch.arange(6)[None] + 5
    pool.run(2, check_stacks, name, config, full_parameters(model), ids, attentions(model, ids))


# State dicts of the full model ----------------------------------------------------------------------------------------


def check_full_state(name: str, config: Any, state: Weights, tp: int, pp: int) -> None:
    model: Any = registry.find(name).from_config_with_parallel(config, tp, pp, seed=0, dtype=torch.float64)
    for assign in (False, True):
        for tensor in model.state_dict().values():
            tensor.zero_()
        missing, unexpected = model.load_state_dict(state, strict=True, assign=assign)
        assert not missing and not unexpected
        assert not shard_differences(model, "weight", dict(model.named_parameters()), state, 0.0)
    kept = {key: value.clone() for key, value in model.state_dict().items()}
    model.load_state_dict(kept)
    assert not shard_differences(model, "weight", dict(model.named_parameters()), state, 0.0)
    with pytest.raises(RuntimeError, match=r"Unexpected key.*another"):
        model.load_state_dict({**state, "another.weight": torch.ones(2)})


@pytest.mark.drawn(6)
@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2), (3, 1), (2, 2)])
@pytest.mark.parametrize("variant", ["llama", "gpt2", "t5", "mixtral"])
def test_load_state_dict_takes_the_part_of_a_rank(pool: Pool, variant: str, tp: int, pp: int, seed: int) -> None:
    name, config, model, _, _ = of_one_process(seed, variant)
    pool.run(tp * pp, check_full_state, name, config, dict(model.state_dict()), tp, pp)
