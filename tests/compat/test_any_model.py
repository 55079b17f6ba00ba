"""Models without a written plan: a derived plan shards them; they compute, train and save as one process does."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from transformers import dynamic_module_utils

import oslo_models
from oslo_models import registry
from oslo_models.modeling.derived.derivation import derive_plan, templates
from oslo_models.modeling.derived.deriving import DerivedFromConfig, derive_for_model
from oslo_models.modeling.derived.probe import copy_of_model, small_model
from oslo_models.modeling.derived.verification import differences
from oslo_models.sharding.layer_lists import layer_lists
from oslo_models.sharding.plan import ColumnParallel, HeadNorm

from support import derived_models, zoo
from support.float64 import lifted_casts
from support.pool import Pool
from support.reference import TOLERANCE, all_outputs
from support.reference import differences as lines_of

pytestmark = pytest.mark.drawn(18, of="file")

Report = dict[str, str]


def largest_difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max((one[key].double() - other[key].double()).abs().max().item() for key in one)


def train_both(model: nn.Module, other: Any, inputs: Tensor, seed: int, steps: int = 2) -> None:
    """SGD steps with dropout, then inference: outputs, weights and buffers match one process."""
    optimizers = [torch.optim.SGD(each.parameters(), 0.001) for each in (model, other)]
    for step in range(steps):
        values = []
        for each, optimizer in zip((model, other), optimizers, strict=True):
            torch.manual_seed(seed + step)
            value = all_outputs(each(inputs))
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            values.append(value.item())
        assert values[1] == pytest.approx(values[0], abs=TOLERANCE)
    assert largest_difference(model.state_dict(), other.state_dict()) < TOLERANCE
    model.eval(), other.eval()
    with torch.no_grad():
        assert not lines_of("output", all_outputs(other(inputs)), all_outputs(model(inputs)), TOLERANCE)


@pytest.mark.parametrize("name", [*derived_models.PLAIN])
@pytest.mark.parametrize("n", [2, pytest.param(3, marks=pytest.mark.zoo)])
def test_plain_modules_train_as_on_one_process(name: str, n: int, seed: int) -> None:
    model, inputs = derived_models.plain(name, seed)
    other = oslo_models.tensor_parallel(copy.deepcopy(model), ["cpu"] * n, inputs=inputs)
    assert isinstance(other, oslo_models.TensorParallel) and isinstance(other, type(model))
    train_both(model, other, inputs, seed)


@pytest.mark.zoo
@pytest.mark.parametrize("name", [*derived_models.PLAIN])
def test_plain_modules_without_inputs_are_tried_at_the_first_call(name: str, seed: int) -> None:
    model, inputs = derived_models.plain(name, seed)
    other = oslo_models.TensorParallel(copy.deepcopy(model), ["cpu"] * 2)
    assert other._untried
    train_both(model, other, inputs, seed)
    assert not other._untried


def sharding(report: Any) -> Report:
    return {row.name: row.sharding for row in report}


def test_a_report_names_the_sharding_of_each_module() -> None:
    model, inputs = derived_models.plain("nanogpt", 0)
    report = oslo_models.tensor_parallel(model, ["cpu"] * 2, inputs=inputs).sharding_report()
    assert sharding(report) == {
        "wte": "vocabulary",
        "wpe": "vocabulary",
        "lm_head": "columns",
        "ln_f": "replicated",
        **{
            f"blocks.{block}.{name}": kind
            for block in range(2)
            for name, kind in {
                **{"ln_1": "replicated", "ln_2": "replicated", "attn.c_attn": "columns", "attn.c_proj": "rows"},
                **{"c_fc": "columns", "c_proj": "rows"},
            }.items()
        },
    }
    text = str(report)
    assert "3 matrices; by 5 heads; outputs stay sharded" in text and "of the parameters are sharded" in text
    lstm = oslo_models.tensor_parallel(derived_models.plain("lstm", 0)[0], ["cpu"] * 2).sharding_report()
    assert "LSTM is not among the layers" in str(lstm)


class Stage(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6)) for _ in range(depth))
        self.heads = nn.ModuleList(nn.Linear(6, 6) for _ in range(depth))


def test_names_are_generalised_over_equal_structures_only() -> None:
    model = nn.ModuleList([Stage(2), nn.Linear(6, 6), Stage(3), nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))])
    keys = templates(model)
    assert keys["0.blocks.1.2"] == keys["2.blocks.2.2"] == "*.blocks.*.2" and keys["0.heads.1"] == "*.heads.*"
    assert keys["1"] == "*1" and (keys["3.0"], keys["3.1"]) == ("*2.0", "*2.1")


def test_layers_of_one_sequential_work_in_pairs(seed: int) -> None:
    torch.manual_seed(seed)
    stack = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 8), nn.Linear(8, 7), nn.GELU(), nn.Linear(7, 3))
    model, inputs = stack.double(), torch.randn(5, 6).double()
    other = oslo_models.tensor_parallel(copy.deepcopy(model), ["cpu"] * 2, inputs=inputs)
    assert [row.sharding for row in other.sharding_report()] == ["columns", "rows"] * 2
    train_both(model, other, inputs, seed)


class Attends(nn.Module):
    """Uses torch's attention in all supported ways."""

    def __init__(self, batch_first: bool, **options: Any) -> None:
        super().__init__()
        self.plain = nn.MultiheadAttention(15, 5, dropout=0.0, batch_first=batch_first, **options)
        self.other = nn.MultiheadAttention(15, 3, kdim=7, vdim=4, batch_first=batch_first, bias=False)
        self.batch_first = batch_first

    def forward(self, x: Tensor, memory: Tensor) -> Any:
        x, memory = (each if self.batch_first else each.transpose(0, 1) for each in (x, memory))
        rows, keys = 2, 4
        causal = torch.ones(keys, keys).triu(1).bool()
        padding = torch.zeros(rows, keys).bool().index_fill(1, torch.tensor([3]), True)
        of_heads = torch.linspace(-1, 1, rows * 5 * keys * keys).view(-1, keys, keys).to(x.dtype)
        one = self.plain(x, x, x, key_padding_mask=padding, attn_mask=causal, average_attn_weights=False)
        two = self.plain(one[0], x, x, attn_mask=of_heads, need_weights=False)
        three = self.plain(two[0], x, x, attn_mask=causal, is_causal=True)
        row = x[0] if self.batch_first else x[:, 0]
        return one, two[0], three, self.other(x, memory, memory[..., :4]), self.plain(row, row, row)


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("options", [{}, {"add_bias_kv": True, "add_zero_attn": True}])
def test_attention_of_torch_is_sharded_by_heads(n: int, options: Any, seed: int) -> None:
    torch.manual_seed(seed)
    model, inputs = Attends(n == 2, **options).double(), (torch.randn(2, 4, 15).double(), torch.randn(2, 4, 7).double())
    other = oslo_models.tensor_parallel(copy.deepcopy(model), ["cpu"] * n, inputs=inputs)
    kinds = {"plain": "heads", "plain.out_proj": "rows", "other": "heads", "other.out_proj": "rows"}
    assert sharding(other.sharding_report()) == kinds
    for each in (model, other):
        optimizer = torch.optim.SGD(each.parameters(), 0.01)
        each.seen = all_outputs(each(*inputs))
        each.seen.backward()
        optimizer.step()
    assert other.seen.item() == pytest.approx(model.seen.item(), abs=TOLERANCE)
    assert largest_difference(model.state_dict(), other.state_dict()) < TOLERANCE
    found, expected = (torch.utils._pytree.tree_leaves(each.eval()(*inputs)) for each in (other, model))
    assert all((one - two).abs().max() < TOLERANCE for one, two in zip(found, expected, strict=True))


class Translates(nn.Module):
    def __init__(self, nested: bool) -> None:
        super().__init__()
        sizes = {"d_model": 12, "nhead": 4, "num_encoder_layers": 2, "num_decoder_layers": 1}
        self.model = nn.Transformer(**sizes, dim_feedforward=16, dropout=0.0, batch_first=True)
        self.model.encoder.use_nested_tensor = nested

    def forward(self, x: Tensor) -> Tensor:
        padding = torch.zeros(x.shape[:2]).bool().index_fill(1, torch.tensor([3]), True)
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1]).to(x.dtype)
        given = {"tgt_mask": mask, "src_key_padding_mask": padding, "memory_key_padding_mask": padding}
        return self.model(x, x.flip(0), **given)


@pytest.mark.parametrize("nested", [False, True])
def test_a_transformer_of_torch_and_its_fast_path(nested: bool, seed: int) -> None:
    torch.manual_seed(seed)
    model, inputs = Translates(nested).double(), torch.randn(2, 4, 12).double()
    other = oslo_models.tensor_parallel(copy.deepcopy(model), ["cpu"] * 2, inputs=inputs)
    kinds = sharding(other.sharding_report())
    attention, linear = (kinds[f"model.encoder.layers.1.{name}"] for name in ("self_attn", "linear2"))
    assert (attention, linear) == (("replicated",) * 2 if nested else ("heads", "rows"))
    assert kinds["model.decoder.layers.0.multihead_attn"] == "heads"
    assert nested == ("enable_nested_tensor=False" in str(other.sharding_report()))
    train_both(model, other, inputs, seed)


class ReadsWeights(nn.Module):
    """Reads the weight of a layer instead of calling it, and shares a layer and a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.shared, self.tied = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.again, self.called = self.shared, nn.Linear(6, 6)
        self.tied.weight = self.read.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.again(torch.relu(self.shared(x))) @ self.read.weight
        return self.tied(self.called(x)) + self.called.out_features


def test_layers_that_are_used_otherwise_stay_replicated(seed: int) -> None:
    torch.manual_seed(seed)
    model, inputs = ReadsWeights().double(), torch.randn(4, 6).double()
    other = oslo_models.tensor_parallel(copy.deepcopy(model), ["cpu"] * 2, inputs=inputs)
    assert sharding(other.sharding_report()) == dict.fromkeys(["read", "shared", "tied"], "replicated") | {
        "called": "columns"
    }
    assert "read outside of the layer, by matmul" in str(other.sharding_report())
    train_both(model, other, inputs, seed)


class Surprises(nn.Module):
    """Applies an operation without a sharding rule between two layers."""

    def __init__(self, way: int) -> None:
        super().__init__()
        self.up, self.down, self.way = nn.Linear(6, 12), nn.Linear(12, 6), way

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        if self.way == 0:
            x = x.flip(-1)
        elif self.way == 1:
            x = x / x.norm()
        elif self.way == 2:
            x[:, 3:9] = 0.0
        elif self.way == 3:
            x = x.cumsum(-1)
        elif self.way == 4:
            x = torch.einsum("ij,j->ij", x, torch.arange(12.0).double())
        elif self.way == 5:
            x = torch.cat((x[:, 6:], x[:, :6]), -1) * x
        elif self.way == 6:
            x *= x.mean(-1, keepdim=True)
        elif self.way == 7:
            x = x.view(-1, 3, 4).softmax(1).transpose(1, 2).reshape(-1, 12)
        elif self.way == 8:
            x = Scale.apply(x)
        return self.down(torch.relu(x))


class Scale(torch.autograd.Function):
    """Custom autograd function; it sees the shards themselves."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 3


@pytest.mark.parametrize("way", range(9))
def test_unknown_functions_are_computed_in_full(way: int, seed: int) -> None:
    torch.manual_seed(seed)
    model, inputs = Surprises(way).double(), torch.randn(5, 6).double()
    other = oslo_models.tensor_parallel(copy.deepcopy(model), ["cpu"] * 3, inputs=inputs)
    train_both(model, other, inputs, seed)


class TakesOtherWays(nn.Module):
    """Takes a branch that the traced call did not show."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.fast = nn.Linear(6, 12), nn.Linear(12, 6), False

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        return self.down(x.flip(-1) / x.sum() if self.fast else torch.relu(x))


def test_ways_that_no_call_showed_are_right_too(seed: int) -> None:
    torch.manual_seed(seed)
    model, inputs = TakesOtherWays().double(), torch.randn(5, 6).double()
    other: Any = oslo_models.tensor_parallel(copy.deepcopy(model), ["cpu"] * 2, inputs=inputs)
    assert sharding(other.sharding_report()) == {"up": "columns", "down": "rows"}
    model.fast = True
    for part in other.parts:
        part.fast = True
    train_both(model, other, inputs, seed)


class ReadsWeightsElsewhere(nn.Module):
    """Reads weights outside of their layers in a branch that the traced call did not show."""

    def __init__(self, way: int) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(6, 12), nn.Linear(6, 12), nn.Linear(12, 6)
        self.table, self.filter, self.spare = nn.Embedding(9, 6), nn.Conv1d(6, 6, 1), nn.Linear(6, 6)
        self.attention, self.way, self.other = nn.MultiheadAttention(6, 3, batch_first=True), way, False

    def forward(self, x: Tensor) -> Tensor:
        x = self.filter(x[..., None])[..., 0] + self.table(torch.arange(len(x)))
        x = self.attention(x[None], x[None], x[None])[0][0]
        y = self.down(torch.relu(self.up(x)) * self.gate(x))
        if not self.other:
            return y
        tensors = {name: param for name, param in self.named_parameters() if param.dim() > 1}
        weights = [self.get_submodule(name.rpartition(".")[0]) for name in tensors]
        values = [getattr(module, name.rpartition(".")[2]) for module, name in zip(weights, tensors, strict=True)]
        if self.way == 0:
            return y + sum(value.sum() + value.flatten()[5:9].prod() for value in values)
        if self.way == 1:
            return y + sum(value.shape[0] + value.size(1) + len(value) + value.numel() for value in values)
        if self.way == 2:
            return y + nn.functional.linear(torch.relu(nn.functional.linear(x, self.up.weight)), self.down.weight)
        if self.way == 3:
            return y + nn.functional.embedding(torch.full((len(x),), 8), self.table.weight) + x @ self.spare.weight
        return y.to(self.up.weight.dtype) + self.spare(x) + self.up.bias.mean()


@pytest.mark.parametrize("way", range(5))
@pytest.mark.parametrize("is_tried", [True, False])
def test_weights_that_untried_code_reads_are_full(way: int, is_tried: bool, seed: int) -> None:
    torch.manual_seed(seed)
    model, inputs = ReadsWeightsElsewhere(way).double(), torch.randn(5, 6).double()
    given = {"inputs": inputs} if is_tried else {}
    other: Any = oslo_models.tensor_parallel(copy.deepcopy(model), ["cpu"] * 2, **given)
    other(inputs)
    kinds = sharding(other.sharding_report())
    assert kinds["up"] == "columns" and kinds["attention"] == "heads" and kinds["table"] == "vocabulary"
    assert (kinds["spare"] == "replicated") == is_tried == ("no call of the trial" in str(other.sharding_report()))
    model.other = True
    for part in other.parts:
        part.other = True
    train_both(model, other, inputs, seed)


class ReadsPadding(nn.Module):
    """Counts the images that are not zero, as models of images and texts do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, ids: Tensor, images: Tensor) -> Tensor:
        images = images[(images != 0).any(-1)]
        if len(images) != int((ids == 0).sum()):
            raise ValueError("the number of images differs from the number of their tokens")
        return self.layer(images)


def test_zeros_of_inputs_stay_zeros() -> None:
    images = torch.randn(2, 3, 6)
    images[1, 2] = 0
    inputs = (torch.tensor([[0, 0, 0, 1], [0, 0, 2, 2]]), images)
    report = oslo_models.tensor_parallel(ReadsPadding(), ["cpu"] * 2, inputs=inputs).sharding_report()
    assert sharding(report) == {"layer": "columns"}


class LooksAtClasses(nn.Module):
    """Its result depends on the class of a layer, which no derived plan can know."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * (1.0 if type(self.layer) is nn.Linear else 2.0)


def test_a_plan_that_computes_something_else_is_refused_before_the_model_is_sharded() -> None:
    model, inputs = LooksAtClasses(), torch.randn(2, 6)
    with pytest.raises(ValueError, match=r"(?s)a small random one, sharded, differs.*output of rank 0: differs by"):
        oslo_models.tensor_parallel(model, ["cpu"] * 2, inputs=inputs)
    untried = oslo_models.tensor_parallel(model, ["cpu"] * 2)
    with pytest.raises(ValueError, match="sharded over 2 ranks, differs"):
        untried(inputs)
    with pytest.raises(ValueError, match="pass inputs= of a call that works"):
        oslo_models.tensor_parallel(model, ["cpu"] * 2, inputs=torch.randn(2, 7))


def test_the_trial_notices_a_wrong_plan(seed: int) -> None:
    """One plan sums gradients too often; the other has a column-parallel layer that later code does not expect."""
    model, inputs = derived_models.plain("nanogpt", seed)
    model.eval()
    calls = [lambda model: model(inputs)]
    plan = derive_for_model(model, inputs)
    assert not differences(model, plan, calls, 2, seed) and not differences(model, derive_plan(model), calls, 2, seed)
    for name, entry in (("ln_f", HeadNorm()), ("blocks.0.c_fc", ColumnParallel())):
        assert differences(model, replace(plan, embed={**plan.embed, name: entry}), calls, 2, seed), name


# Classes of transformers' kind ----------------------------------------------------------------------------------------


SIZES = {"hidden_size": 24, "num_attention_heads": 3, "intermediate_size": 40, "max_position_embeddings": 32}
ENCODER = {**SIZES, "type_vocab_size": 2, "num_hidden_layers": 2, "vocab_size": 50}
IMAGE = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 40, "image_size": 16}
ARCHITECTURES: dict[str, Any] = {
    "nystromformer": lambda: (
        hf.NystromformerForMaskedLM,
        hf.NystromformerConfig(segment_means_seq_len=8, num_landmarks=8, **ENCODER),
    ),
    "yoso": lambda: (hf.YosoForMaskedLM, hf.YosoConfig(**ENCODER)),
}
FAST = "nystromformer"


def lifted_call(model: Any, inputs: dict[str, Tensor]) -> Any:
    return model(**inputs, **({"labels": inputs["input_ids"]} if "input_ids" in inputs else {}))


def architecture(name: str, seed: int) -> tuple[Any, Any, dict[str, Tensor]]:
    """Return a class, its configuration and a batch."""
    torch.manual_seed(seed)
    cls, config = ARCHITECTURES[name]()
    for key, value in vars(config).items():
        if "drop" in key and isinstance(value, float):
            setattr(config, key, 0.0)
    return cls, config, {"input_ids": torch.randint(3, 50, (2, 8))}


def randomized(cls: Any, config: Any) -> Any:
    model = cls(copy.deepcopy(config)).double().train()
    with torch.no_grad():
        for param in model.parameters():
            param += 0.1 * torch.randn_like(param)
    return model


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n == FAST else [pytest.mark.zoo]) for n in ARCHITECTURES])
def test_architectures_that_the_zoo_lacks_train_as_on_one_process(name: str, seed: int) -> None:
    cls, config, inputs = architecture(name, seed)
    assert config.model_type not in registry.ARCHITECTURES, "the zoo has it now: take another one"
    model = randomized(cls, config)
    other = oslo_models.tensor_parallel(copy.deepcopy(model), ["cpu"] * 2)
    assert isinstance(other, cls)
    for each in (model, other):
        optimizer = torch.optim.SGD(each.parameters(), 0.001)
        with lifted_casts():
            output = lifted_call(each, inputs)
            all_outputs(output).backward()
        optimizer.step()
        each.seen = output.logits.detach()
    assert not lines_of("logits", other.seen, model.seen, TOLERANCE)
    assert largest_difference(model.state_dict(), other.state_dict()) < TOLERANCE
    model.eval(), other.eval()
    with torch.no_grad(), lifted_casts():
        assert not lines_of("logits", other(**inputs).logits, model(**inputs).logits, TOLERANCE)


def with_code(folder: Path, model: Any) -> Any:
    """Load the model again through transformers, from ``auto_map`` code beside its checkpoint."""
    model.save_pretrained(folder)
    shutil.copy(derived_models.__file__, folder / "modeling_tiny.py")
    cls, config = type(model).__name__, folder / "config.json"
    auto = f"AutoModelFor{cls.partition('For')[2]}"
    names = {"AutoConfig": f"modeling_tiny.{type(model.config).__name__}", auto: f"modeling_tiny.{cls}"}
    config.write_text(json.dumps({**json.loads(config.read_text()), "auto_map": names}))
    full = getattr(hf, auto).from_pretrained(folder, trust_remote_code=True, dtype=torch.float64)
    assert type(full).__module__.startswith("transformers_modules.")
    return full


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let transformers copy the code of checkpoints into a temporary folder: there may be no home."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path_factory.mktemp("modules")))
        yield


def test_code_of_an_encoder(tmp_path: Path, seed: int, modules: None) -> None:
    """An encoder with torch's attention, convolutions and a fused gate, on a padded batch."""
    torch.manual_seed(seed)
    full = with_code(tmp_path, randomized(derived_models.GatedForTokenClassification, derived_models.GatedConfig()))
    ids, mask = torch.randint(3, 41, (3, 7)), torch.ones(3, 7)
    mask[1, 4:] = 0
    inputs = {"input_ids": ids, "attention_mask": mask, "labels": torch.randint(0, 2, (3, 7))}
    other = oslo_models.tensor_parallel(copy.deepcopy(full), ["cpu"] * 3)
    for each in (full, other):
        optimizer = torch.optim.AdamW(each.parameters(), 0.01)
        for _ in range(2):
            optimizer.zero_grad()
            each.train()(**inputs).loss.backward()
            optimizer.step()
    with torch.no_grad():
        assert not lines_of("logits", other.eval()(**inputs).logits, full.eval()(**inputs).logits, TOLERANCE)
    assert largest_difference(full.state_dict(), other.state_dict()) < TOLERANCE
    kinds = sharding(other.sharding_report())
    assert (kinds["blocks.0.up"], kinds["blocks.0.down"]) == ("columns", "rows"), kinds


def test_code_of_a_checkpoint(tmp_path: Path, seed: int, modules: None) -> None:
    """transformers makes this model from ``auto_map`` code beside the checkpoint."""
    torch.manual_seed(seed)
    model = randomized(derived_models.TinyForCausalLM, derived_models.TinyConfig())
    full = with_code(tmp_path, model)
    other = oslo_models.tensor_parallel(full, ["cpu"] * 2)
    assert sharding(other.sharding_report())["layers.1.attn.c_proj"] == "rows"
    ids = torch.randint(3, 37, (2, 6))
    assert not lines_of("logits", other(ids).logits, model.eval()(ids).logits, TOLERANCE)
    options = {"max_new_tokens": 5, "do_sample": False, "num_beams": 2}
    assert torch.equal(other.generate(ids, **options), model.generate(ids, **options))
    other.save_pretrained(tmp_path / "saved")
    again = derived_models.TinyForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float64)
    assert largest_difference(again.state_dict(), model.state_dict()) == 0


class MyGPT2(hf.GPT2LMHeadModel):
    """User's subclass of a supported class, with an extra head."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.value = nn.Linear(config.n_embd, 1)

    def forward(self, input_ids: Tensor, **kwargs: Any) -> Any:
        hidden = self.transformer(input_ids).last_hidden_state
        return self.lm_head(hidden), self.value(hidden).squeeze(-1)


def test_a_subclass_of_a_class_of_the_zoo(seed: int) -> None:
    torch.manual_seed(seed)
    rates = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model = randomized(MyGPT2, hf.GPT2Config(vocab_size=37, n_embd=24, n_layer=2, n_head=3, n_positions=16, **rates))
    other = oslo_models.tensor_parallel(copy.deepcopy(model), ["cpu"] * 2)
    kinds = sharding(other.sharding_report())
    assert kinds["transformer.h.0.attn.c_attn"] == "columns" and kinds["transformer.h.1.mlp.c_proj"] == "rows"
    with lifted_casts():
        train_both(model, other, torch.randint(3, 37, (2, 6)), seed)


INPUTS = {"pixel_values": torch.randn(2, 3, 16, 16)}
SIGLIP = hf.SiglipVisionConfig(patch_size=4, **IMAGE)


def test_a_class_from_a_configuration_is_tried_with_its_buffers() -> None:
    """It is on the meta device, where the numbers of positions have no values."""
    with torch.device("meta"):
        model = hf.SiglipVisionModel._from_config(SIGLIP)
    positions = {name: buffer for name, buffer in model.named_buffers() if not buffer.is_floating_point()}
    assert positions
    for name, buffer in copy_of_model(model).named_buffers():
        assert torch.equal(buffer, torch.arange(16)[None]), name
    report = DerivedFromConfig(hf.SiglipVisionModel, INPUTS)(SIGLIP).report
    assert report.sharded_share > 0.9
    model.extra = nn.Linear(2, 2, device="meta")
    with pytest.raises(ValueError, match="position_ids of this SiglipVisionModel is a buffer on the meta device"):
        derive_for_model(model, INPUTS)


def test_experts_are_tried_one_by_one(seed: int) -> None:
    """transformers' default, ``grouped_mm``, has no float64."""
    torch.manual_seed(seed)
    config = zoo.config("qwen3_moe")
    config._experts_implementation = "grouped_mm"
    model = hf.Qwen3MoeForCausalLM(config)
    plan = derive_for_model(model, {"input_ids": torch.randint(3, 37, (2, 6))})
    assert sharding(plan.report)["model.layers.0.self_attn.o_proj"] == "rows"
    assert model.config._experts_implementation == "grouped_mm"


def parallel_state(cls: Any, config: Any, weights: Any, inputs: Any, how: str, n: int) -> dict[str, Tensor]:
    """Return logits, and the full weights after a step, on a rank."""
    if how == "initialize":
        model = cls(config).double()
        model.load_state_dict(weights)
        model = oslo_models.initialize(model, {"model_parallelism": {"tensor_parallel_size": n}}, plan="derive")
    else:
        model = oslo_models.parallel_class(cls, "derive").from_pretrained_with_parallel(how, n, dtype=torch.float64)
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), 0.001)
    with lifted_casts():
        output = lifted_call(model, inputs)
        output.loss.backward()
    optimizer.step()
    parts = {
        name: param.full_tensor() if hasattr(param, "full_tensor") else param
        for name, param in model.named_parameters()
    }
    full = {name: tensor.detach().clone().as_subclass(Tensor) for name, tensor in parts.items()}
    return {"loss": output.loss.detach(), **full}


@pytest.mark.parametrize(("kind", "n"), [("remote", 2), pytest.param(FAST, 3, marks=pytest.mark.zoo)])
@pytest.mark.parametrize("how", ["initialize", "from_pretrained"])
def test_ranks_of_a_launcher_train_as_one_process(
    kind: str, n: int, how: str, tmp_path: Any, pool: Pool, seed: int
) -> None:
    if kind == "remote":
        torch.manual_seed(seed)
        cls, config, inputs = (
            derived_models.TinyForCausalLM,
            derived_models.TinyConfig(),
            {"input_ids": torch.randint(3, 37, (2, 8))},
        )
    else:
        cls, config, inputs = architecture(kind, seed)
    model = randomized(cls, config)
    model.save_pretrained(tmp_path)
    given = "initialize" if how == "initialize" else str(tmp_path)
    found = pool.run(n, parallel_state, cls, config, model.state_dict(), inputs, given, n)
    optimizer = torch.optim.SGD(model.parameters(), 0.001)
    with lifted_casts():
        output = lifted_call(model, inputs)
        output.loss.backward()
    optimizer.step()
    expected = {"loss": output.loss.detach(), **{name: param.detach() for name, param in model.named_parameters()}}
    for own in found:
        assert largest_difference(expected, own) < TOLERANCE


class ReadsItsHead(hf.GPT2LMHeadModel):
    """Reads a weight outside of its layer in a branch that the traced call did not show."""

    other = False

    def forward(self, input_ids: Tensor, **kwargs: Any) -> Any:
        logits = self.lm_head(self.transformer(input_ids).last_hidden_state)
        weight = self.transformer.h[0].mlp.c_fc.weight
        return logits + (weight.sum() + weight.shape[1] if self.other else 0)


def read_of_transformers_on_a_rank(path: Any, ids: Tensor) -> Tensor:
    model = oslo_models.parallel_class(ReadsItsHead, "derive").from_pretrained_with_parallel(path, 2)
    assert sharding(model.sharding_report())["transformer.h.0.mlp.c_fc"] == "columns"
    model.other = True
    return model(ids).detach()


def test_weights_that_untried_code_of_a_transformer_reads_are_full(pool: Pool, tmp_path: Any, seed: int) -> None:
    torch.manual_seed(seed)
    model = ReadsItsHead(hf.GPT2Config(vocab_size=37, n_embd=24, n_layer=2, n_head=3, n_positions=16)).eval()
    model.save_pretrained(tmp_path)
    model.other, ids = True, torch.randint(3, 37, (2, 6))
    for own in pool.run(2, read_of_transformers_on_a_rank, tmp_path, ids):
        assert (own - model(ids)).abs().max() < 1e-4


def read_on_a_rank(seed: int, way: int) -> dict[str, Tensor]:
    """Take the branch of untried code on the ranks of a launcher; return the weights after a step."""
    torch.manual_seed(seed)
    model, inputs = ReadsWeightsElsewhere(way).double(), torch.randn(5, 6).double()
    model = oslo_models.initialize(
        model, {"model_parallelism": {"tensor_parallel_size": 2}}, plan="derive", inputs=inputs
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.001)
    model.other = True
    model(inputs).square().sum().backward()
    optimizer.step()
    return model.full_state_dict()


@pytest.mark.parametrize("way", range(5))
def test_weights_that_untried_code_reads_are_full_on_ranks(way: int, pool: Pool, seed: int) -> None:
    found = pool.run(2, read_on_a_rank, seed, way)
    torch.manual_seed(seed)
    model, inputs = ReadsWeightsElsewhere(way).double(), torch.randn(5, 6).double()
    model.other = True
    model(inputs).square().sum().backward()
    torch.optim.SGD(model.parameters(), 0.001).step()
    for own in found:
        assert largest_difference(model.state_dict(), own) < TOLERANCE


def parallel_module(name: str, seed: int, n: int) -> dict[str, Tensor]:
    """Shard a plain module on the ranks of a launcher; return its weights after a step with dropout."""
    model, inputs = derived_models.plain(name, seed)
    config = {"model_parallelism": {"tensor_parallel_size": n}}
    with pytest.raises(ValueError, match="pass plan="):
        oslo_models.initialize(model, config)
    optimizer = torch.optim.SGD(model.parameters(), 0.001)
    assert oslo_models.initialize(model, config, plan="derive", inputs=inputs) is model
    torch.manual_seed(seed)
    all_outputs(model(inputs)).backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="already sharded"):
        oslo_models.initialize(model, config, plan="derive", inputs=inputs)
    return model.full_state_dict()


@pytest.mark.parametrize(
    ("name", "n"), [("nanogpt", 2), *(pytest.param(name, 3, marks=pytest.mark.zoo) for name in derived_models.PLAIN)]
)
def test_a_plain_module_on_ranks_of_a_launcher(name: str, n: int, pool: Pool, seed: int) -> None:
    model, inputs = derived_models.plain(name, seed)
    found = pool.run(n, parallel_module, name, seed, n)
    torch.manual_seed(seed)
    all_outputs(model(inputs)).backward()
    torch.optim.SGD(model.parameters(), 0.001).step()
    for own in found:
        assert largest_difference(model.state_dict(), own) < TOLERANCE


def test_probes_have_a_block_of_each_kind_in_every_list_of_layers() -> None:
    kinds = {"layer_types": 2 * ["full_attention"] + 4 * ["sliding_attention"]}
    kinds |= {"mlp_layer_types": 3 * ["dense"] + 3 * ["sparse"], "num_attention_heads_per_layer": 3 * [6, 4]}
    config = zoo.config("laguna", num_hidden_layers=6, **kinds)
    probe = small_model(hf.LagunaForCausalLM, config)
    assert probe.config.num_hidden_layers == len(probe.model.layers) == 4
    assert layer_lists(probe.config, 4) == {name: values[:4] for name, values in kinds.items()}
