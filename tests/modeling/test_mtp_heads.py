"""Heads for multi-token prediction: loaded, saved and trained as published, and drafting in the running batch.

The heads of the reference are written from their description (DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024,
section 2.2) with the blocks and norms of transformers, without a cache and in one process. In MiMo-V2, each head reads
the hidden states of the decoder before its norm, as in SGLang.
"""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers.modeling_layers import GradientCheckpointingLayer

from oslo_models import registry
from oslo_models.deploy.messages import Speculated
from oslo_models.deploy.running_batch import slot_parts
from oslo_models.deploy.running_batch.head_drafts import HeadStates
from oslo_models.deploy.running_batch.limits import BatchLimits
from oslo_models.deploy.running_batch.loop import RunningBatch
from oslo_models.deploy.running_batch.offline import OfflineBatch
from oslo_models.deploy.running_batch.step_runner import StepRunner
from oslo_models.distributed.stopping import OtherRankError

from support import deployment, pipelines, running, zoo
from support.batch_loop import Application, request
from support.float64 import lifted_casts
from support.mutants import Edit, MutantPool
from support.pool import Pool, WorkerError
from support.reference import TOLERANCE, differences, make_optimizer, own_part, reference_model

pytestmark = pytest.mark.drawn(24, of="file")

FOLLOWING = ["glm4_moe", "deepseek_v3", "deepseek_v32", "glm4_moe_lite"]
"""Types with the blocks of heads in the list of the decoder's blocks."""
SEVERAL = [*FOLLOWING, "mimo_v2_flash"]
BESIDE = ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"]
TYPES = [*SEVERAL, *BESIDE]
WINDOW, UNBOUND = {"sliding_window": 3}, {"sliding_window": 128, "index_topk": 64}
"""Windows smaller than rows, and settings with drafts that do not depend on the columns of rows.

An indexer that chooses some keys meets equal scores, mostly zeros of its ReLU, and which of them it chooses depends on
the columns.
"""
CHANGES = {"tie_word_embeddings": False, "max_position_embeddings": 64}
NEW, WEIGHT = 10, 0.3
Records = list[tuple[list[int], list[int]]]
"""The known tokens of a row and the tokens that were drafted after them."""


class PlainHead(nn.Module):
    """One head behind a model of transformers."""

    def __init__(self, whole: Any, depth: int) -> None:
        super().__init__()
        config, norm, self.depth = whole.config, type(whole.model.norm), depth
        self.enorm, self.hnorm, self.norm = (norm(config.hidden_size, eps=config.rms_norm_eps) for _ in range(3))
        self.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.of_mimo = config.model_type == "mimo_v2_flash"
        if self.of_mimo:  # sliding attention and a dense MLP
            config = copy.deepcopy(config)
            config.layer_types = ["sliding_attention"] * config.num_hidden_layers
            config.mlp_layer_types = ["dense"] * config.num_hidden_layers
        self.block = type(whole.model.layers[-1])(config, config.num_hidden_layers - 1)

    def forward(self, whole: Any, ids_BL: Tensor, hidden_BLD: Tensor, first: int, mask_BL: Any = None) -> Tensor:
        """Return hidden states as the library returns them. ``first`` is the position of the first token."""
        embedded_BLD, length = whole.model.embed_tokens(ids_BL), ids_BL.shape[1]
        x = self.eh_proj(torch.cat((self.enorm(embedded_BLD), self.hnorm(hidden_BLD)), -1))
        seen_B1LL = torch.ones(len(ids_BL), 1, length, length).tril().bool()
        if self.of_mimo:
            seen_B1LL = seen_B1LL.triu(1 - whole.config.sliding_window)
        if mask_BL is not None:
            seen_B1LL = seen_B1LL & mask_BL[:, None, None].bool() | torch.eye(length).bool()
        positions = torch.arange(first, first + length)[None]
        planes = positions[None].expand(3, -1, -1) if "qwen3_5" in whole.config.model_type else positions
        rotations = whole.model.rotary_emb(x, planes, *(["sliding_attention"] if self.of_mimo else []))
        bias = torch.zeros(seen_B1LL.shape, dtype=x.dtype).masked_fill(~seen_B1LL, -torch.inf)
        made = self.block(x, attention_mask=bias, position_ids=positions, position_embeddings=rotations)
        return made if self.of_mimo else self.norm(made)

    def logits(self, whole: Any, hidden: Tensor) -> Tensor:
        """Return the logits after hidden states of this head."""
        return whole.lm_head(self.norm(hidden) if self.of_mimo else hidden)

    def named(self, config: Any) -> dict[str, Tensor]:
        """Return the weights by their names in a model."""
        block, outer = f"model.layers.{config.num_hidden_layers + self.depth}", ""
        names = ["enorm", "hnorm", "eh_proj", "shared_head.norm"]
        if self.of_mimo:
            block, names[-1] = f"model.mtp.layers.{self.depth}", "final_layernorm"
        elif config.model_type not in FOLLOWING:
            block, outer = f"mtp.layers.{self.depth}", "mtp"
            names = ["pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"]
        modules = zip(names, (self.enorm, self.hnorm, self.eh_proj, self.norm), strict=True)
        tensors = {**dict(self.block.named_parameters()), **dict(self.block.named_buffers())}
        named: dict[str, Any] = {f"{outer or block}.{name}.weight": module.weight for name, module in modules}
        return {**named, **{f"{block}.{name}": value for name, value in tensors.items()}}


def decoder_states(whole: Any, ids_BL: Tensor, mask_BL: Tensor | None = None) -> Tensor:
    """Return the hidden states of the decoder that its heads read."""
    seen: list[Tensor] = []
    norm = whole.model.norm
    hook = norm.register_forward_hook(
        lambda module, args, output: seen.append(args[0] if whole.config.model_type == "mimo_v2_flash" else output)
    )
    whole.model(ids_BL, attention_mask=mask_BL)
    hook.remove()
    return seen[0]


def published(named: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights by their names in published checkpoints, which have separate experts."""
    found = {}
    for name, value in named.items():
        name = name.replace(".sinks", ".attention_sink_bias")
        if name.startswith("model.mtp."):
            name = name.replace("post_attention_layernorm", "pre_mlp_layernorm")
        if value.dim() < 3 or "experts." not in name:
            found[name] = value.detach().clone()
            continue
        stem, _, leaf = name.rpartition(".")
        for number, matrix in enumerate(value.detach()):
            parts = dict(zip(("gate_proj", "up_proj"), matrix.chunk(2), strict=True))
            for part, own in (parts if leaf == "gate_up_proj" else {leaf: matrix}).items():
                found[f"{stem}.{number}.{part}.weight"] = own.clone()
    return found


def config_with_heads(variant: str, **changes: Any) -> Any:
    heads: dict[str, Any] = {"num_nextn_predict_layers": 2, "n_routed_experts": 5} if variant in SEVERAL else {}
    if variant == "mimo_v2_flash":
        heads |= WINDOW
    return zoo.config(variant, **{**CHANGES, **heads, **changes})


def model_with_heads(variant: str, seed: int, damped: bool = False, **changes: Any) -> tuple[Any, list[PlainHead]]:
    """Return a model of transformers and heads.

    Args:
        damped: let the blocks add little to the embedding of a token, so that the heads often predict like the model.
    """
    config = config_with_heads(variant, **changes)
    whole = reference_model(zoo.lm_head(variant), config, seed).eval()
    heads = [PlainHead(whole, depth).double().eval() for depth in range(2 if variant in SEVERAL else 1)]
    with torch.no_grad():
        for head in heads:
            for name, value in (*head.named_parameters(), *head.named_buffers()):
                value.copy_((torch.randn_like(value) * 0.2).float() + float("norm" in name))  # biases stay in float32
            if damped:
                size = config.hidden_size
                head.eh_proj.weight.mul_(0.1)[:, :size] += torch.eye(size)
        for module in (whole, *heads) if damped else ():
            for name, param in module.named_parameters():
                if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj", "down_proj.weight")):
                    param.mul_(0.1)
                if name.endswith("norm.weight"):
                    neutral = float(variant not in BESIDE)  # the other norms multiply by 1 + weight
                    param.sub_(1).mul_(0.2).add_(neutral)
    return whole, heads


def save(folder: Path, whole: Any, heads: list[PlainHead]) -> dict[str, Tensor]:
    """Save a checkpoint in the published layout. Return its tensors, without copies of the embedding and the head."""
    whole.save_pretrained(folder)
    tensors, copies = published(load_file(folder / "model.safetensors")), dict[str, Tensor]()
    for index, head in enumerate(heads, whole.config.num_hidden_layers):
        tensors |= published(head.named(whole.config))
        if whole.config.model_type not in FOLLOWING:
            continue
        copies[f"model.layers.{index}.embed_tokens.weight"] = whole.model.embed_tokens.weight.detach().clone()
        copies[f"model.layers.{index}.shared_head.head.weight"] = whole.lm_head.weight.detach().clone()
    save_file({**tensors, **copies}, folder / "model.safetensors", {"format": "pt"})
    return tensors


def load(folder: Path, variant: str, tp: int = 1, **options: Any) -> Any:
    cls: Any = registry.find(zoo.lm_head(variant))
    options = {"mtp_heads": True, "dtype": torch.float64, **options}
    return cls.from_pretrained_with_parallel(folder, tp, **options)


def rows_of(config: Any, seed: int, rows: int = 3, length: int = 9) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, config.vocab_size, (rows, length), generator=generator)


# Weights --------------------------------------------------------------------------------------------------------------


def check_hidden_states(folder: Path, variant: str, tp: int, ids_BL: Tensor, expected: list[Tensor], ep: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = load(folder, variant, tp, expert_parallel_size=ep)
    positions = torch.arange(ids_BL.shape[1])[None]
    with lifted_casts(), torch.no_grad(), model.seeing_hidden_states() as seen:
        model(ids_BL)
        hidden_BLD = seen[0]
        for depth, wanted_BLD in enumerate(expected):
            ahead = depth + 1
            shifted = ids_BL[:, ahead:], hidden_BLD[:, : ids_BL.shape[1] - ahead], positions[:, ahead:], None
            made_BTD = model.mtp_hidden_states(*shifted, depth=depth)
            torch.testing.assert_close(made_BTD, wanted_BLD, rtol=0, atol=TOLERANCE)
            hidden_BLD = hidden_BLD if variant == "mimo_v2_flash" else made_BTD
    frozen = {name for name, param in model.named_parameters() if not param.requires_grad}
    assert frozen == set(model.mtp_names()) & dict(model.named_parameters()).keys()
    assert len(frozen) > 10


@torch.no_grad()
def hidden_states(whole: Any, heads: list[PlainHead], ids_BL: Tensor) -> list[Tensor]:
    found, hidden_BLD = [], decoder_states(whole, ids_BL)
    for ahead, head in enumerate(heads, 1):
        made_BTD = head(whole, ids_BL[:, ahead:], hidden_BLD[:, : ids_BL.shape[1] - ahead], ahead)
        hidden_BLD = hidden_BLD if head.of_mimo else made_BTD
        found.append(made_BTD)
    return found


SIZES = [
    (variant, tp, ep)
    for variant in TYPES
    for tp, ep in ((1, 1), (2, 1), (3, 1), (2, 2))
    if ep == 1 or variant != "qwen3_5_text"  # has no experts
]


@pytest.mark.parametrize(("variant", "tp", "ep"), SIZES)
def test_heads_of_published_checkpoints_are_loaded(
    pool: Pool, tmp_path: Path, variant: str, tp: int, ep: int, seed: int
) -> None:
    whole, heads = model_with_heads(variant, seed)
    save(tmp_path, whole, heads)
    ids_BL = rows_of(whole.config, seed)
    with lifted_casts():
        expected = hidden_states(whole, heads, ids_BL)
    pool.run(tp, check_hidden_states, tmp_path, variant, tp, ids_BL, expected, ep)


def check_saved(folder: Path, variant: str, tp: int, ways: tuple[bool, bool]) -> None:
    """Save files of each rank or one checkpoint, load them, and save again."""
    for number, merging in enumerate(ways):
        model = load(folder / str(number), variant, tp)
        model.save_pretrained_with_parallel(folder / str(number + 1), save_with_merging=merging)


@pytest.mark.parametrize("ways", [(True, True), (False, True)])
@pytest.mark.parametrize("tp", [1, 2, 3])
@pytest.mark.parametrize("variant", TYPES)
def test_heads_are_saved_as_published(
    pool: Pool, tmp_path: Path, variant: str, tp: int, ways: tuple[bool, bool], seed: int
) -> None:
    whole, heads = model_with_heads(variant, seed)
    expected = save(tmp_path / "0", whole, heads)
    pool.run(tp, check_saved, tmp_path, variant, tp, ways)
    found = load_file(tmp_path / "2" / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name].double(), tensor.double()), name
    ids_BL = rows_of(whole.config, seed)
    with lifted_casts(), torch.no_grad():  # transformers and models without heads leave the heads out
        before, after = (type(whole).from_pretrained(tmp_path / each, dtype=torch.float64) for each in ("0", "2"))
        assert all(torch.equal(tensor, after.state_dict()[name]) for name, tensor in before.state_dict().items())
        model = load(tmp_path / "2", variant, mtp_heads=False)
        torch.testing.assert_close(model(ids_BL).logits, whole(ids_BL).logits, rtol=0, atol=TOLERANCE)
    assert not hasattr(model, "mtp_step") and model.state_dict().keys() == whole.state_dict().keys()


def check_random(folder: Path, variant: str, tp: int) -> None:
    cls: Any = registry.find(zoo.lm_head(variant))
    config = config_with_heads(variant)
    model = cls.from_config_with_parallel(config, tp, dtype=torch.float64, seed=3, mtp_heads=True, mtp_loss_weight=0.1)
    assert all(param.requires_grad for param in model.parameters()) and model.training
    model.save_pretrained_with_parallel(folder / str(tp), save_with_merging=True)


@pytest.mark.parametrize("variant", TYPES)
def test_random_heads_are_equal_at_all_sizes(pool: Pool, tmp_path: Path, variant: str) -> None:
    for tp in (1, 3):
        pool.run(tp, check_random, tmp_path, variant, tp)
    one, three = (load_file(tmp_path / str(tp) / "model.safetensors") for tp in (1, 3))
    assert one.keys() == three.keys() and all(torch.equal(one[name], three[name]) for name in one)
    (projection,) = [
        tensor
        for name, tensor in one.items()
        if name.endswith(("2.eh_proj.weight", "mtp.fc.weight", "mtp.layers.0.eh_proj.weight"))
    ]
    assert float(projection.std()) > 0


# Training -------------------------------------------------------------------------------------------------------------


def drawn_batch(config: Any, seed: int, items: int | None) -> dict[str, Any]:
    """Rows with padding on either side and ignored labels. The last row has a label for its second token only."""
    ids_BL = rows_of(config, seed, 4)
    mask_BL, labels_BL = torch.ones_like(ids_BL), ids_BL.clone()
    mask_BL[1, :3], mask_BL[2, -2:] = 0, 0
    labels_BL[mask_BL == 0], labels_BL[0, :4] = -100, -100
    labels_BL[3, 2:] = -100
    batch = {"input_ids": ids_BL, "attention_mask": mask_BL, "labels": labels_BL}
    return batch if items is None else {**batch, "num_items_in_batch": torch.tensor(items)}


def plain_loss(whole: Any, heads: list[PlainHead], batch: dict[str, Any]) -> Tensor:
    ids_BL, mask_BL, labels_BL = (batch[name] for name in ("input_ids", "attention_mask", "labels"))
    items, added = batch.get("num_items_in_batch"), torch.zeros((), dtype=torch.float64)
    hidden_BLD = decoder_states(whole, ids_BL, mask_BL)
    for ahead, head in enumerate(heads, 1):
        valid_BL = mask_BL[:, ahead:] * mask_BL[:, :-ahead]
        read_BTD = hidden_BLD[:, : ids_BL.shape[1] - ahead]
        made_BTD = head(whole, ids_BL[:, ahead:], read_BTD, ahead, valid_BL)
        hidden_BLD = hidden_BLD if head.of_mimo else made_BTD
        logits_NV = head.logits(whole, made_BTD[:, :-1]).flatten(0, 1)
        wanted_N = labels_BL[:, ahead + 1 :].masked_fill(valid_BL[:, :-1] == 0, -100).flatten()
        total = F.cross_entropy(logits_NV, wanted_N, ignore_index=-100, reduction="sum")
        added = added + total / (items or (wanted_N != -100).sum())
    loss: Tensor = whole(**batch).loss + WEIGHT * added / len(heads)
    return loss


def check_loss(folder: Path, variant: str, tp: int, batch: dict[str, Any], loss: Tensor, grads: Any) -> None:
    model = load(folder, variant, tp, mtp_loss_weight=WEIGHT, share_loss=False).train()
    with lifted_casts():
        output = model(**batch)
        output.loss.backward()
        torch.testing.assert_close(output.loss.detach(), loss, rtol=0, atol=TOLERANCE)
        model.eval()
        assert output.loss > model(**batch).loss + 1e-3  # evaluation has the loss of the model alone
        as_tuple = model.train()(**batch, return_dict=False)
        torch.testing.assert_close(as_tuple[0], output.loss, rtol=0, atol=TOLERANCE)
    check_gradients(model, grads)
    model.zero_grad()
    model.fuse()
    with lifted_casts():
        output = model(**batch)
        output.loss.backward()
        torch.testing.assert_close(output.loss.detach(), loss, rtol=0, atol=TOLERANCE)
    model.unfuse()
    check_gradients(model, grads)
    model.deparallelize()
    with lifted_casts():
        torch.testing.assert_close(model(**batch).loss.detach(), loss, rtol=0, atol=TOLERANCE)


def check_gradients(model: Any, grads: Any) -> None:
    assert {name for name, _ in model.named_parameters()} == grads.keys()
    for name, param in model.named_parameters():
        wanted = grads[name]
        if wanted is None:
            assert param.grad is None or not param.grad.any(), name
        else:
            assert param.grad is not None, name
            torch.testing.assert_close(param.grad, own_part(model, name, wanted), rtol=0, atol=TOLERANCE, msg=name)


@pytest.mark.parametrize("items", [None, 11])
@pytest.mark.parametrize("tp", [1, 2, 3])
@pytest.mark.parametrize("variant", TYPES)
def test_loss_of_the_heads_has_the_gradients_of_one_process(
    pool: Pool, tmp_path: Path, variant: str, tp: int, items: int | None, seed: int
) -> None:
    whole, heads = model_with_heads(variant, seed)
    save(tmp_path, whole, heads)
    batch = drawn_batch(whole.config, seed, items)
    with lifted_casts():
        loss = plain_loss(whole, heads, batch)
        loss.backward()
    grads = {name: param.grad for name, param in parameters(whole, heads).items()}
    pool.run(tp, check_loss, tmp_path, variant, tp, batch, loss.detach(), grads)


def parameters(whole: Any, heads: list[PlainHead]) -> dict[str, nn.Parameter]:
    """Return all parameters by their names in a model, tied ones under each of their names."""
    named = dict(whole.named_parameters(remove_duplicate=False))
    for head in heads:
        named |= {name: value for name, value in head.named(whole.config).items() if isinstance(value, nn.Parameter)}
    return named


# Pipeline stages ------------------------------------------------------------------------------------------------------


STEPS = 3


class Trained(NamedTuple):
    """Some steps of one process: the loss and the gradients of the first, and the parameters after the last."""

    batches: list[dict[str, Any]]
    loss: Tensor
    grads: dict[str, Tensor | None]
    named: dict[str, Tensor]


def train_plainly(whole: Any, heads: list[PlainHead], seed: int, items: int | None) -> Trained:
    batches = [drawn_batch(whole.config, seed + step, items) for step in range(STEPS)]
    named = parameters(whole, heads)
    optimizer = make_optimizer("AdamW", {*named.values()})
    for step, batch in enumerate(batches):
        optimizer.zero_grad()
        with lifted_casts():
            loss = plain_loss(whole, heads, batch)
            loss.backward()
        if step == 0:
            first = loss.detach()
            grads = {name: None if param.grad is None else param.grad.clone() for name, param in named.items()}
        optimizer.step()
    return Trained(batches, first, grads, {name: param.detach() for name, param in named.items()})


def check_training_on_stages(
    folder: Path, variant: str, tp: int, expected: Trained, fuses: bool, options: dict[str, Any]
) -> None:
    options = {"pipeline_parallel_size": 2, "mtp_loss_weight": WEIGHT, **options}
    model = load(folder, variant, tp, **options).train()
    model = model.fuse() or model if fuses else model
    optimizer = make_optimizer("AdamW", model.parameters())
    lines = []
    for step, batch in enumerate(expected.batches):
        model.set_micro_batch_size(2 - step % 2)
        optimizer.zero_grad()
        loss = pipelines.run_micro_batches(model, batch)
        if step == 0:
            lines = differences("loss", loss, expected.loss, TOLERANCE)
            lines += pipelines.gradient_differences(model, expected.grads)
        optimizer.step()
    trained = pipelines.stage_parameters(model)
    lines += pipelines.stage_differences(model, "after AdamW:", trained, expected.named, TOLERANCE)
    assert not lines, "\n".join(lines)
    names = set(model.mtp_names())
    assert bool(names) == model.stage.is_last and bool(names & trained.keys()) == model.stage.is_last
    model.save_pretrained_with_parallel(folder / "trained", save_with_merging=True)
    model.deparallelize()
    with lifted_casts(), torch.no_grad():
        model.train()
        assert model(**expected.batches[0]).loss > 0
    assert {name for name, _ in model.named_parameters()} <= expected.named.keys()
    for name, param in model.named_parameters():
        torch.testing.assert_close(param, expected.named[name], rtol=0, atol=TOLERANCE, msg=name)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("variant", TYPES)
def test_training_on_stages_equals_one_process(
    pool: Pool, tmp_path: Path, variant: str, tp: int, tied: bool, schedule: str, seed: int
) -> None:
    whole, heads = model_with_heads(variant, seed, tie_word_embeddings=tied)
    save(tmp_path, whole, heads)
    expected = train_plainly(whole, heads, seed, 11 if seed % 2 else None)
    fuses, options = tied == (schedule == "1f1b"), {"schedule": schedule}  # in half of the cases
    pool.run(2 * tp, check_training_on_stages, tmp_path, variant, tp, expected, fuses, options)
    stored = load_file(tmp_path / "trained" / "model.safetensors")
    wanted = published(expected.named)
    assert {name for name in stored if not name.endswith("e_score_correction_bias")} == wanted.keys() - (
        {"lm_head.weight"} if tied else set()
    )
    for name in stored.keys() & wanted.keys():
        torch.testing.assert_close(stored[name], wanted[name], rtol=0, atol=TOLERANCE, msg=name)


DEEP: dict[str, dict[str, Any]] = {
    "glm4_moe": {"num_hidden_layers": 3},
    "mimo_v2_flash": {
        **{"num_hidden_layers": 3, "mlp_layer_types": ["dense", "sparse", "sparse"]},
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    },
}


@pytest.mark.parametrize("variant", DEEP)
def test_three_stages_train_and_draft(pool: Pool, tmp_path: Path, variant: str, seed: int) -> None:
    """The stage in the middle has neither the embedding nor the heads."""
    whole, heads = model_with_heads(variant, seed, damped=True, **{**UNBOUND, **DEEP[variant]})
    save(tmp_path, whole, heads)
    prompts = drawn_prompts(whole.config.vocab_size, seed)
    first, *others = pool.run(3, check_generation, tmp_path, variant, (1, 3), prompts, *generated(whole, prompts))
    assert all(other == first for other in others)
    assert_are_drafts_of(whole, heads[0], first)
    expected = train_plainly(whole, heads, seed, None)
    pool.run(3, check_training_on_stages, tmp_path, variant, 1, expected, False, {"pipeline_parallel_size": 3})


def with_ddp(model: Any) -> Any:
    return DistributedDataParallel(model, process_group=model.mpu.get_data_parallel_group())


def with_fsdp2(model: Any) -> Any:
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer) and not hasattr(module, "eh_proj"):
            fully_shard(module, mesh=model.mesh.device_mesh["dp"])
    return fully_shard(model, mesh=model.mesh.device_mesh["dp"])


def check_replicas(
    folder: Path,
    variant: str,
    wrap: Callable[[Any], Any],
    tp: int,
    weight: float,
    batch: dict[str, Any],
    norm: float,
    named: dict[str, Tensor],
) -> None:
    """Train two replicas of two stages on the same rows."""
    model = load(folder, variant, tp, pipeline_parallel_size=2, mtp_loss_weight=weight).train()
    wrapped = wrap(model)
    optimizer = make_optimizer("AdamW", [param for param in model.parameters() if param.requires_grad])
    for step in range(2):
        optimizer.zero_grad()
        pipelines.run_micro_batches(wrapped, batch)
        if step == 0:
            assert abs(float(model.clip_grad_norm_(1e9)) - norm) < TOLERANCE
        optimizer.step()
    own = pipelines.stage_parameters(model)
    lines = pipelines.stage_differences(model, "after AdamW:", own, named, TOLERANCE)
    assert not lines, "\n".join(lines)


@pytest.mark.parametrize("weight", [0.0, WEIGHT])
@pytest.mark.parametrize("wrap", [with_ddp, with_fsdp2])
@pytest.mark.parametrize(("variant", "tp"), [("glm4_moe", 1), ("glm4_moe", 2), ("qwen3_5_text", 1)])
def test_replicas_of_stages_equal_one_process(
    pool: Pool, tmp_path: Path, variant: str, tp: int, wrap: Callable[[Any], Any], weight: float, seed: int
) -> None:
    """Frozen heads, too, follow the embedding: the last stage has a copy of it."""
    whole, heads = model_with_heads(variant, seed)
    save(tmp_path, whole, heads)
    batch, named = drawn_batch(whole.config, seed, None), parameters(whole, heads)
    trained = {*named.values()} if weight else {*whole.parameters()}
    optimizer = make_optimizer("AdamW", trained)
    for step in range(2):
        optimizer.zero_grad()
        with lifted_casts():
            (plain_loss(whole, heads, batch) if weight else whole(**batch).loss).backward()
        if step == 0:
            norm = torch.nn.utils.get_total_norm([param.grad for param in trained if param.grad is not None]).item()
        optimizer.step()
    expected = {name: param.detach() for name, param in named.items()}
    pool.run(4 * tp, check_replicas, tmp_path, variant, wrap, tp, weight, batch, norm, expected)


def check_resharded(folder: Path, variant: str, sizes: tuple[tuple[int, int], ...], number: int) -> None:
    """Load a checkpoint at one size, and save it for the next one."""
    tp, pp = sizes[number]
    model = load(folder / str(number), variant, tp, pipeline_parallel_size=pp)
    frozen = {name for name, param in model.named_parameters() if not param.requires_grad}
    assert frozen == set(model.mtp_names()) & dict(model.named_parameters()).keys()
    merging = number == len(sizes) - 1
    model.save_pretrained_with_parallel(folder / str(number + 1), save_with_merging=merging)


@pytest.mark.parametrize("sizes", [((1, 2), (2, 1), (2, 2), (1, 1)), ((2, 2), (1, 2))])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("variant", TYPES)
def test_heads_are_loaded_and_saved_on_stages(
    pool: Pool, tmp_path: Path, variant: str, tied: bool, sizes: tuple[tuple[int, int], ...], seed: int
) -> None:
    whole, heads = model_with_heads(variant, seed, tie_word_embeddings=tied)
    expected = save(tmp_path / "0", whole, heads)
    for number, (tp, pp) in enumerate(sizes):
        pool.run(tp * pp, check_resharded, tmp_path, variant, sizes, number)
    found = load_file(tmp_path / str(len(sizes)) / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name].double(), tensor.double()), name


# Drafts ---------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def drafts_of(whole: Any, head: PlainHead, tokens: list[int], count: int) -> list[int]:
    """Return the tokens that a head drafts, from its own hidden states after the first one."""
    ids_1L, found = torch.tensor([tokens]), list[int]()
    hidden_1LD, ids_1L = decoder_states(whole, ids_1L[:, :-1]), ids_1L[:, 1:]
    for _ in range(count):
        last_11D = head(whole, ids_1L, hidden_1LD, 1)[:, -1:]
        token_11 = head.logits(whole, last_11D).argmax(-1)
        found.append(int(token_11))
        ids_1L, hidden_1LD = torch.cat((ids_1L, token_11), 1), torch.cat((hidden_1LD, last_11D), 1)
    return found


def assert_are_drafts_of(whole: Any, head: PlainHead, records: Records) -> None:
    assert any(draft for _, draft in records)
    with lifted_casts():
        for tokens, draft in records:
            assert draft == drafts_of(whole, head, tokens, len(draft)), (tokens, draft)


def check_generation(
    folder: Path,
    variant: str,
    sizes: tuple[int, int],
    prompts: list[list[int]],
    greedy: list[list[int]],
    sampled: list[list[int]],
) -> Records:
    model = load(folder, variant, sizes[0], pipeline_parallel_size=sizes[1])
    records: Records = []

    def choose(batch: Any, rows: Any, groups: Any, logits: Any, drafts: Any, own: Any = OfflineBatch._choose) -> Any:
        records.extend(([*row.prompt, *row.new], [*draft]) for row, draft in zip(rows, drafts, strict=False))
        return own(batch, rows, groups, logits, drafts)

    with pytest.MonkeyPatch.context() as patch, lifted_casts():
        patch.setattr(OfflineBatch, "_choose", choose)
        for rows, count in ((1, 1), (3, 3), (None, 4)):
            options = {"max_batch_size": rows, "speculative_tokens": count}
            outputs = model.generate_batch(prompts, **options, **GREEDY)
            assert [each.generated_tokens for each in outputs.values()] == greedy
        torch.manual_seed(7)
        outputs = model.generate_batch(
            prompts, num_return_sequences=2, max_batch_size=4, speculative_tokens=3, **SAMPLED
        )
        assert [each.generated_tokens for each in outputs.values()] == sampled
        drafted = len(records)
        model.generate_batch(prompts, **GREEDY)
    assert len(records) == drafted  # none without speculative_tokens
    return records


GREEDY: dict[str, Any] = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
SAMPLED: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": True, "temperature": 0.7, "top_k": 12, "pad_token_id": 0}


def drawn_prompts(vocabulary: int, seed: int) -> list[list[int]]:
    """Prompts of several lengths; two of them are equal."""
    draw = random.Random(seed)
    prompts = [[draw.randrange(3, vocabulary) for _ in range(draw.randint(1, 9))] for _ in range(5)]
    return [*prompts, [*prompts[1]]]


def alone(whole: Any, prompt: list[int], **options: Any) -> list[int]:
    ids_1L = torch.tensor([prompt])
    with lifted_casts(), torch.no_grad():
        found = whole.generate(ids_1L, attention_mask=torch.ones_like(ids_1L), **options)
    return found[0, len(prompt) :].tolist()


def generated(whole: Any, prompts: list[list[int]]) -> tuple[list[list[int]], list[list[int]]]:
    """Return transformers' greedy and sampled tokens, two samples of each prompt."""
    torch.manual_seed(7)
    sampled = []
    for number, seed in enumerate(torch.randint(2**63 - 1, (2 * len(prompts),)).tolist()):
        torch.manual_seed(seed)
        sampled.append(alone(whole, prompts[number // 2], **SAMPLED))
    return [alone(whole, prompt, **GREEDY) for prompt in prompts], sampled


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (3, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("variant", TYPES)
def test_heads_draft_and_change_no_sequence(
    pool: Pool, tmp_path: Path, variant: str, tp: int, pp: int, seed: int
) -> None:
    whole, heads = model_with_heads(variant, seed, damped=True, **UNBOUND)
    save(tmp_path, whole, heads)
    prompts = drawn_prompts(whole.config.vocab_size, seed)
    expected = generated(whole, prompts)
    first, *others = pool.run(tp * pp, check_generation, tmp_path, variant, (tp, pp), prompts, *expected)
    assert all(other == first for other in others)  # each rank drafts the same tokens
    assert_are_drafts_of(whole, heads[0], first)


def check_failures(folder: Path, prompts: list[list[int]], greedy: list[list[int]]) -> None:
    """Let the heads fail on the last stage, and the bookkeeping of drafts on the first one. The next call succeeds."""
    model = load(folder, "glm4_moe", pipeline_parallel_size=2)
    options = {"max_batch_size": 3, "speculative_tokens": 2}
    for cls, name, stage in ((HeadStates, "tokens", 1), (StepRunner, "_draft", 0)):
        with pytest.MonkeyPatch.context() as patch, lifted_casts():
            if model.stage.index == stage:
                patch.setattr(cls, name, fail)
            error = NotImplementedError if model.stage.index == stage else OtherRankError
            with pytest.raises(error):
                model.generate_batch(prompts, **options, **GREEDY)
        with lifted_casts():
            outputs = model.generate_batch(prompts, **options, **GREEDY)
        assert [each.generated_tokens for each in outputs.values()] == greedy


def fail(*_: Any) -> Any:
    raise NotImplementedError


def test_stages_survive_failed_drafts(pool: Pool, tmp_path: Path, seed: int) -> None:
    whole, heads = model_with_heads("glm4_moe", seed, damped=True)
    save(tmp_path, whole, heads)
    prompts = drawn_prompts(whole.config.vocab_size, seed)
    pool.run(2, check_failures, tmp_path, prompts, [alone(whole, prompt, **GREEDY) for prompt in prompts])


@pytest.mark.parametrize("way", ["slots", "parts", "fused"])
@pytest.mark.parametrize("variant", TYPES)
def test_rows_that_come_and_go_have_the_drafts_of_their_heads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variant: str, way: str, seed: int
) -> None:
    """Prompts in chunks join while other rows accept some drafted tokens, pause and leave."""
    whole, heads = model_with_heads(variant, seed, damped=True, **UNBOUND)
    save(tmp_path, whole, heads)
    model = load(tmp_path, variant)
    model = model.fuse() or model if way == "fused" else model
    if way == "parts":
        monkeypatch.setattr(slot_parts, "LEAST", 16)
        monkeypatch.setattr(slot_parts, "SPARE", 4)
    records: Records = []

    def take(
        batch: Any, rows: Any, logits: Any, drafts: Any, *rest: Any, own: Any = RunningBatch._take_drafted
    ) -> None:
        records.extend(([*row.prompt, *row.new], [*draft]) for row, draft in zip(rows, drafts, strict=True))
        own(batch, rows, logits, drafts, *rest)

    monkeypatch.setattr(RunningBatch, "_take_drafted", take)
    rng = random.Random(seed)
    calls = running.requests(rng, 10)
    limits = BatchLimits(3, 48, 4, drafted=3, by_heads=True, reuse=False)
    with lifted_casts():
        application = Application(model, limits)
        for number, call in enumerate(calls):
            application.send(rng.randrange(20), request(number, call, len(call["input_ids"]) == 1))
        application.run()
        for number, call in enumerate(calls):
            assert torch.equal(application.answer(number).result, running.alone(whole, call))
    assert_are_drafts_of(whole, heads[0], records)
    reported = [each for each in application.sent if isinstance(each, Speculated)]
    drafted, accepted = (sum(getattr(each, name) for each in reported) for name in ("drafted", "accepted"))
    assert 0 < accepted < drafted, (drafted, accepted)


def test_prompts_with_a_cached_prefix_have_drafts(tmp_path: Path, seed: int) -> None:
    """The head reads zeros for the hidden state before the rest of such a prompt. Answers stay the same."""
    whole, heads = model_with_heads("glm4_moe", seed, damped=True)
    save(tmp_path, whole, heads)
    limits = BatchLimits(3, 48, 8, drafted=2, by_heads=True)
    call = {**deployment.prompt(seed, 1, 8), "max_new_tokens": 9, "do_sample": False, "pad_token_id": 0}
    with lifted_casts():
        application = Application(load(tmp_path, "glm4_moe"), limits)
        for number in range(3):
            application.send(6 * number, request(number, call))
        application.run()
        for number in range(3):
            assert torch.equal(application.answer(number).result, running.alone(whole, {"seed": 0, **call}))


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2)])
def test_deployed_model_drafts_with_its_heads(forked: None, tmp_path: Path, tp: int, pp: int, seed: int) -> None:
    whole, heads = model_with_heads("glm4_moe", seed, damped=True)
    save(tmp_path, whole, heads)
    call = {**deployment.prompt(seed, 2), "max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
    whole.set_experts_implementation("eager")
    options = {"pipeline_parallel_size": pp, "deploy": True, "experts_implementation": "eager"}
    with load(tmp_path, "glm4_moe", tp, **options) as model:
        assert model.describe_batch().endswith("; up to 1 tokens of a row are drafted")
        assert torch.equal(model.generate(**call), whole.generate(**call))
        assert 0 < model.accepted_tokens <= model.drafted_tokens


# Refusals -------------------------------------------------------------------------------------------------------------


REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "flag": ("mtp_heads must be True or False, got 1", {"mtp_heads": 1}),
    "weight": ("mtp_loss_weight must be a number of at least 0, got -1", {"mtp_loss_weight": -1}),
    "weight alone": ("is the weight of the heads of mtp_heads=True", {"mtp_heads": False, "mtp_loss_weight": 0.1}),
    "tokens": ("used together with sequence_parallel=True", {"sequence_parallel": True}),
    "context": ("used together with context_parallel_size=2", {"tp": 1, "context_parallel_size": 2}),
    "none": ("Glm4MoeForCausalLM: its configuration has num_nextn_predict", {"num_nextn_predict_layers": 0}),
}


def check_refusals(folder: Path) -> None:
    for message, options in REFUSED.values():
        with pytest.raises(ValueError, match=message):
            load(folder, "glm4_moe", **{"tp": 2, **options})
    with pytest.raises(ValueError, match=r"has no model.layers.2.* and \d+ others: leave mtp_heads out"):
        load(folder, "glm4_moe", 2)
    llama: Any = registry.find("LlamaForCausalLM")
    with pytest.raises(ValueError, match="mtp_heads=True does not support LlamaForCausalLM: it is none of"):
        llama.from_config_with_parallel(zoo.config("llama"), 2, mtp_heads=True)
    base: Any = registry.find("Glm4MoeModel")
    with pytest.raises(ValueError, match="mtp_heads=True does not support Glm4MoeModel: it is none of"):
        base.from_pretrained_with_parallel(folder, 2, mtp_heads=True)


def test_models_without_heads_are_refused_on_every_rank(pool: Pool, tmp_path: Path, seed: int) -> None:
    whole, _ = model_with_heads("glm4_moe", seed)
    whole.save_pretrained(tmp_path)
    pool.run(2, check_refusals, tmp_path)


def test_heads_need_the_attention_of_a_block(seed: int) -> None:
    cls: Any = registry.find("MiMoV2FlashForCausalLM")
    config = config_with_heads("mimo_v2_flash", layer_types=["full_attention"] * 2)
    with pytest.raises(ValueError, match="needs the layout of sliding_attention"):
        cls.from_config_with_parallel(config, mtp_heads=True, seed=seed)


def test_two_ways_to_draft_are_refused(tmp_path: Path, seed: int) -> None:
    whole, heads = model_with_heads("glm4_moe", seed)
    save(tmp_path, whole, heads)
    with pytest.raises(ValueError, match="mtp_heads=True both draft tokens: leave one of them out"):
        load(tmp_path, "glm4_moe", deploy=True, speculative_model=tmp_path)


def check_adapters(folder: Path, batch: dict[str, Any]) -> None:
    import peft

    for options in ({"target_modules": ["embed_tokens"]}, {"modules_to_save": ["embed_tokens"]}):
        model = load(folder, "glm4_moe", pipeline_parallel_size=2, mtp_loss_weight=WEIGHT).train()
        with pytest.raises(ValueError, match="embed_tokens do not work on pipeline stages with mtp_heads=True"):
            peft.get_peft_model(model, peft.LoraConfig(**{"target_modules": ["q_proj"], **options}))
    model = load(folder, "glm4_moe", pipeline_parallel_size=2, mtp_loss_weight=WEIGHT).train()
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
    pipelines.run_micro_batches(adapted, batch)
    grads = [name for name, param in adapted.named_parameters() if param.grad is not None]
    assert any("lora_B" in name for name in grads) and all("lora_" in name for name in grads)


def test_adapters_of_the_embedding_are_refused_on_stages(pool: Pool, tmp_path: Path, seed: int) -> None:
    pytest.importorskip("peft")
    whole, heads = model_with_heads("glm4_moe", seed)
    save(tmp_path, whole, heads)
    pool.run(2, check_adapters, tmp_path, drawn_batch(whole.config, seed, None))


def check_sharded_blocks(folder: Path, ids_BL: Tensor) -> None:
    model = load(folder, "glm4_moe", mtp_loss_weight=WEIGHT).train()
    fully_shard(model.mtp_head(1).block, mesh=model.mesh.device_mesh["dp"])
    with (
        lifted_casts(),
        pytest.raises(ValueError, match=r"fully_shard of model\.layers\.3 .* wrap the model around it"),
    ):
        model(input_ids=ids_BL, labels=ids_BL)


def test_heads_that_fsdp_shards_apart_are_refused(pool: Pool, tmp_path: Path, seed: int) -> None:
    whole, heads = model_with_heads("glm4_moe", seed)
    save(tmp_path, whole, heads)
    pool.run(2, check_sharded_blocks, tmp_path, rows_of(whole.config, seed))


def test_packed_rows_are_refused_in_training(tmp_path: Path, seed: int) -> None:
    whole, heads = model_with_heads("glm4_moe", seed)
    save(tmp_path, whole, heads)
    model = load(tmp_path, "glm4_moe", mtp_loss_weight=WEIGHT).train()
    ids_BL = rows_of(whole.config, seed)
    with lifted_casts(), pytest.raises(ValueError, match=r"position_ids is not supported with mtp_loss_weight=0\.3"):
        model(input_ids=ids_BL, labels=ids_BL, position_ids=torch.arange(ids_BL.shape[1])[None])


# Mutants --------------------------------------------------------------------------------------------------------------

HEADS, STATES = "modeling.mtp_heads:MtpHeads", "deploy.running_batch.head_drafts:HeadStates"
LOSS_MUTANTS = {
    "labels of the tokens themselves": Edit(
        "modeling.mtp_heads:_labels_of_head", '["labels"][:, ahead:]', '["labels"][:, :-ahead]'
    ),
    "padding before the tokens": Edit(f"{HEADS}.mtp_loss", "* mask_BL[:, :-ahead]", ""),
    "hidden state first": Edit(
        f"{HEADS}.mtp_hidden_states",
        "(head.embedding_norm(embedded_BLD), head.hidden_norm(hidden_BLD))",
        "(head.hidden_norm(hidden_BLD), head.embedding_norm(embedded_BLD))",
    ),
}
MIMO_MUTANTS = {
    "normed hidden states": Edit(f"{HEADS}.seeing_hidden_states", "append(args[0])", "append(module.forward(args[0]))"),
    "hidden states of the former head": Edit(
        f"{HEADS}.mtp_loss", "made_BTD if _names_of(type(self)).reads_normed else hidden_BLD", "made_BTD"
    ),
    "attention without a window": Edit(
        f"{HEADS}.mtp_hidden_states",
        "create_sliding_window_causal_mask if is_windowed else create_causal_mask",
        "create_causal_mask",
    ),
}
STAGE_MUTANTS = {
    "embedding of one stage": Edit(
        "pipeline.split:_stages_of", "return {first, max(stage_of.values())} if kept else {first}", "return {first}"
    ),
    "labels of a micro-batch": Edit(
        "modeling.mtp_heads:_with_loss_of_stage",
        "self.mtp_loss(given, seen[-1], items)",
        "self.mtp_loss(given, seen[-1], self.mtp_items(given))",
    ),
    "no loss of the heads": Edit(
        "modeling.mtp_heads:_with_loss_of_stage", "self.mtp_loss_weight * self.mtp_loss", "0 * self.mtp_loss"
    ),
}
SHARING_MUTANTS = {
    "drafts of the first stage": Edit(f"{STATES}.share", "axis.size - 1", "0"),
    "drafts stay on the last stage": Edit(f"{STATES}.share", "draft[:] = islice(remaining, len(draft))", "pass"),
}
DRAFT_MUTANTS = {
    "hidden state of a rejected token": Edit(f"{STATES}.settle", "own_LD[max(0, count - 1)]", "own_LD[-1]"),
    "first token is read": Edit(f"{STATES}.compute", "> 1)", "> 0)"),
    "hidden state of the token itself": Edit(
        f"{STATES}.following", "torch.cat((before_BD[:, None], self.seen_BLD[:, :-1]), 1)", "self.seen_BLD"
    ),
    "rows that leave": Edit(f"{STATES}.free", "self._by_slot[slot] = self._by_slot[-1]", "pass"),
}


@pytest.mark.parametrize("name", [*LOSS_MUTANTS, *MIMO_MUTANTS])
def test_mutants_of_the_loss_are_caught(pool: Pool, tmp_path: Path, name: str, seed: int) -> None:
    given = "mimo_v2_flash" if name in MIMO_MUTANTS else "glm4_moe", 2, None, seed
    test_loss_of_the_heads_has_the_gradients_of_one_process(pool, tmp_path / "right", *given)
    with pytest.raises(WorkerError, match="AssertionError"):
        test_loss_of_the_heads_has_the_gradients_of_one_process(
            MutantPool(pool, {**LOSS_MUTANTS, **MIMO_MUTANTS}[name]), tmp_path / "wrong", *given
        )


@pytest.mark.parametrize("name", SHARING_MUTANTS)
def test_mutants_of_drafts_on_stages_are_caught(pool: Pool, tmp_path: Path, name: str) -> None:
    given = "glm4_moe", 1, 2, 1
    test_heads_draft_and_change_no_sequence(pool, tmp_path / "right", *given)
    with pytest.raises((WorkerError, AssertionError), match=r"AssertionError|IndexError|assert"):
        test_heads_draft_and_change_no_sequence(MutantPool(pool, SHARING_MUTANTS[name]), tmp_path / "wrong", *given)


@pytest.mark.parametrize("name", STAGE_MUTANTS)
def test_mutants_of_stages_are_caught(pool: Pool, tmp_path: Path, name: str) -> None:
    given = "glm4_moe", 1, False, "1f1b", 2  # of a seed with the number of labels left out
    test_training_on_stages_equals_one_process(pool, tmp_path / "right", *given)
    with pytest.raises(WorkerError, match="AssertionError"):
        test_training_on_stages_equals_one_process(MutantPool(pool, STAGE_MUTANTS[name]), tmp_path / "wrong", *given)


@pytest.mark.parametrize("name", DRAFT_MUTANTS)
def test_mutants_of_drafts_are_caught(tmp_path: Path, name: str) -> None:
    given = "glm4_moe", "slots", 1  # a head with drafts that each mistake changes
    with pytest.MonkeyPatch.context() as patch:
        test_rows_that_come_and_go_have_the_drafts_of_their_heads(tmp_path / "right", patch, *given)
    with pytest.MonkeyPatch.context() as patch:
        DRAFT_MUTANTS[name](patch)
        with pytest.raises(AssertionError):
            test_rows_that_come_and_go_have_the_drafts_of_their_heads(tmp_path / "wrong", patch, *given)
