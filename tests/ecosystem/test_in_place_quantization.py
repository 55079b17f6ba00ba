"""Quantisation of sharded models: exact if only weights change, refused if it replaces layers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from oslo_models import registry

from support import quantized
from support.pool import Pool

pytestmark = pytest.mark.quantization


def _model(tp: int, pp: int = 1, **sizes: Any) -> Any:
    cls: Any = registry.find("LlamaForCausalLM")
    return cls.from_config_with_parallel(quantized.llama_config(**sizes), tp, pp, seed=1).eval()


class _Wrapper(nn.Module):
    """Adapter around a layer."""

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer

    def forward(self, x: Any) -> Any:
        return self.base_layer(x)


class _Transparent(_Wrapper):
    """Wrapper with the block's attributes, as around checkpointed or compiled blocks."""

    def __getattr__(self, name: str) -> Any:
        return self._modules[name] if name in self._modules else getattr(self._modules["base_layer"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.base_layer(*args, **kwargs)


def _replace_and_wrap(seed: int) -> None:
    model, ids = _model(2), quantized.tokens(seed)
    with torch.no_grad():
        expected = model(ids).logits
        block = model.model.layers[1]
        block.mlp.down_proj = _Wrapper(block.mlp.down_proj)
        assert torch.equal(model(ids).logits, expected)
        model.model.layers[0] = _Transparent(model.model.layers[0])
        assert torch.equal(model(ids).logits, expected)
        twin = copy.deepcopy(model)
        plain = nn.Linear(block.mlp.up_proj.in_features, block.mlp.up_proj.out_features, bias=False)
        block.mlp = copy.deepcopy(block.mlp)  # the new parent module is checked too
        block.mlp.up_proj = plain
        with pytest.raises(RuntimeError, match=r"model\.layers\.1\.mlp\.up_proj is now torch\..*Linear"):
            model(ids)
        with pytest.raises(RuntimeError, match="was replaced"):
            model.generate(ids, max_new_tokens=1)
        assert torch.equal(twin(ids).logits, expected)
        del twin.model.layers[1]
        twin(ids)
        twin.model.layers[0].base_layer.mlp = nn.Identity()
        twin(ids)
        twin.model.layers[0].base_layer.self_attn = nn.Linear(48, 48)
        with pytest.raises(RuntimeError, match=r"model\.layers\.0\.self_attn is now torch\..*Linear"):
            twin(ids)


def test_replaced_layers_are_refused_and_wrapped_ones_are_not(pool: Pool, seed: int) -> None:
    pool.run(2, _replace_and_wrap, seed)


def _refuse_eager_quantization() -> None:
    with pytest.raises(RuntimeError, match=r"torch\.ao\.quantization does not quantise sharded layers"):
        torch.ao.quantization.quantize_dynamic(_model(2), {nn.Linear})


def test_eager_quantization_is_refused(pool: Pool) -> None:
    pool.run(2, _refuse_eager_quantization)


def _refuse_float8_training(seed: int) -> None:
    from torchao.float8 import convert_to_float8_training

    model = _model(2, hidden_size=96, intermediate_size=192, head_dim=16)
    with pytest.raises(RuntimeError, match=r"is now torchao\.float8.* Call model\.fuse\(float8='tensorwise'\)"):
        convert_to_float8_training(model)(quantized.tokens(seed))


def test_float8_training_is_refused(pool: Pool, seed: int) -> None:
    pytest.importorskip("torchao")
    pool.run(2, _refuse_float8_training, seed)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_float8_layers_equal_torchao(recipe: str, seed: int) -> None:
    """Output and gradients are bitwise equal."""
    pytest.importorskip("torchao")
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    sizes = {"hidden_size": 96, "intermediate_size": 192, "head_dim": 16}
    own, theirs = (_model(1, **sizes).bfloat16() for _ in range(2))
    own.fuse(float8=recipe)
    wide = Float8LinearConfig.from_recipe_name(recipe)
    convert_to_float8_training(theirs, config=wide, module_filter_fn=lambda _, name: name != "lm_head")
    ids = quantized.tokens(seed)
    for model in (own, theirs):
        model(ids).logits.float().square().mean().backward()
    assert sum(type(module).__name__ == "Float8Linear" for module in own.modules()) == 14
    for (name, ours), exact in zip(own.named_parameters(), theirs.parameters(), strict=True):
        assert ours.grad is not None and torch.equal(ours.grad, exact.grad), name


def _refuse_quanto(seed: int) -> None:
    from optimum.quanto import qint8, quantize

    model = _model(2)
    quantize(model, weights=qint8)
    with pytest.raises(RuntimeError, match=r"q_proj is now optimum\.quanto\.nn\.qlinear\.QLinear"):
        model(quantized.tokens(seed))


def test_quanto_is_refused(pool: Pool, seed: int) -> None:
    pytest.importorskip("optimum.quanto", reason="optimum-quanto is not installed")
    pool.run(2, _refuse_quanto, seed)


# ---- torchao, as weights are loaded


def _inner_bytes(weight: Any) -> int:
    names, _ = weight.__tensor_flatten__()
    return sum(getattr(weight, name).untyped_storage().nbytes() for name in names)


def _load_quantized(
    directory: Path, config: Any, expected: dict[str, Any], logits: Tensor, seed: int, *sizes: int
) -> tuple[float, float]:
    cls: Any = registry.find("LlamaForCausalLM")
    model = cls.from_pretrained_with_parallel(directory, *sizes, quantization_config=config)
    names = {} if model.stage is None else model.stage.full_names
    held, share = 0, 0.0
    for name, param in model.named_parameters():
        full, bytes_of_full = expected[names.get(name, name)]
        local = param.detach()
        if bytes_of_full is not None:
            local = param.dequantize()
            held, share = held + _inner_bytes(param), share + bytes_of_full * local.numel() / full.numel()
        assert torch.equal(local, model.layouts[name].shard(full, model.mesh.tp.rank)), name
    with torch.no_grad():
        ids = quantized.tokens(seed)
        outputs = list(model(ids)) if sizes[1] > 1 else [model(ids)]
        if outputs[0].logits is not None:
            found = torch.cat([output.logits for output in outputs])
            return float((found - logits).abs().max()), held / share
    return 0.0, held / share


CONFIGS = {
    "int8": lambda ao: ao.Int8WeightOnlyConfig(),
    "int8-groups": lambda ao: ao.Int8WeightOnlyConfig(granularity=ao.PerGroup(16)),
    "int8-tensor": lambda ao: ao.Int8WeightOnlyConfig(granularity=ao.PerTensor()),
    "float8": lambda ao: ao.Float8WeightOnlyConfig(),
    "int4-groups": lambda ao: ao.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=ao.PerGroup(16)),
    "int8-dynamic": lambda ao: ao.Int8DynamicActivationInt8WeightConfig(),
}


@pytest.mark.drawn(3)
@pytest.mark.parametrize("kind", CONFIGS)
def test_torchao_shards_equal_one_process(pool: Pool, tmp_path: Path, seed: int, kind: str) -> None:
    ao = pytest.importorskip("torchao.quantization")
    config = transformers.TorchAoConfig(CONFIGS[kind](ao))
    torch.manual_seed(seed)
    sizes = dict(hidden_size=96, head_dim=16, intermediate_size=192)
    LlamaForCausalLM(quantized.llama_config(**sizes)).save_pretrained(tmp_path / "plain")
    model = LlamaForCausalLM.from_pretrained(tmp_path / "plain", quantization_config=config)
    expected: dict[str, Any] = {name: (param.detach(), None) for name, param in model.named_parameters()}
    for name in filter(quantized.is_quantized, expected):
        param = model.get_parameter(name)
        expected[name] = param.dequantize(), _inner_bytes(param)
    with torch.no_grad():
        logits = model(quantized.tokens(seed)).logits
    for tp, pp in ((1, 1), (2, 1), (3, 1), (1, 2), (2, 2)):
        results = pool.run(tp * pp, _load_quantized, tmp_path / "plain", config, expected, logits, seed, tp, pp)
        for difference, share in results:
            # Activations of row-parallel layers are quantised by rank in "int8-dynamic".
            assert difference < (1e-1 if kind == "int8-dynamic" and tp > 1 else 1e-5)
            assert share < 1.1, "a rank holds more than its share"  # of scales of rows, each rank needs all


def _refuse(directory: Path, config: Any, seed: int) -> None:
    cls: Any = registry.find("LlamaForCausalLM")
    with pytest.raises(
        ValueError, match=r"down_proj\.weight, (0:27|27:54|54:80) of dimension 1 .* quantised full weight"
    ):
        cls.from_pretrained_with_parallel(directory, 3, quantization_config=config)
    config.modules_to_not_convert = [".*down_proj", "lm_head"]
    model = cls.from_pretrained_with_parallel(directory, 3, quantization_config=config)
    with pytest.raises(ValueError, match="are not saved"):
        model.save_pretrained_with_parallel(directory / "again")
    with pytest.raises(ValueError, match="takes no other values"):
        model.from_parallelized(directory)
    with pytest.raises(ValueError, match="leave fuse out"):
        model.fuse()
    for other, message in (
        (transformers.FineGrainedFP8Config(), r"FineGrainedFP8Config\(\.\.\.\) is not supported: "),
        (transformers.BitsAndBytesConfig(), r"BitsAndBytesConfig\(\.\.\.\) needs load_in_4bit=True"),
        (transformers.TorchAoConfig(config.quant_type, include_input_output_embeddings=True), "with include_input"),
    ):
        with pytest.raises(ValueError, match=message):
            cls.from_pretrained_with_parallel(directory, 3, quantization_config=other)
    with pytest.raises(ValueError, match="is for from_pretrained_with_parallel"):
        cls.from_config_with_parallel(quantized.llama_config(), 3, quantization_config=config)


def test_unsupported_calls_of_torchao_on_shards_are_refused(pool: Pool, tmp_path: Path, seed: int) -> None:
    ao = pytest.importorskip("torchao.quantization")
    LlamaForCausalLM(quantized.llama_config()).save_pretrained(tmp_path / "plain")
    config = transformers.TorchAoConfig(ao.Int8WeightOnlyConfig(granularity=ao.PerGroup(16)))
    pool.run(3, _refuse, tmp_path / "plain", config, seed)


def _quantize_in_place(seed: int) -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model, ids = _model(2, hidden_size=96, intermediate_size=192, head_dim=16), quantized.tokens(seed)
    with torch.no_grad():
        expected = model(ids).logits
        quantize_(model, Int8WeightOnlyConfig())
        found = model(ids).logits
    assert 0 < (found - expected).abs().max() < 0.03 * expected.abs().max()
    assert type(model.model.layers[0].mlp.down_proj.weight).__name__ == "Int8Tensor"


def test_torchao_quantizes_sharded_weights_in_place(pool: Pool, seed: int) -> None:
    pytest.importorskip("torchao")
    pool.run(2, _quantize_in_place, seed)
