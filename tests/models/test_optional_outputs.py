"""Optional outputs of every class match transformers on two tensor-parallel ranks and on two pipeline stages.

Attention weights, cross-attentions, hidden states, router logits and caches. `make test` tests some main classes a
day; `make test-zoo` tests all classes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from oslo_models import registry
from oslo_models.cache_argument import NAMES

from support import pipelines, zoo
from support.float64 import lifted_casts
from support.pool import Pool
from support.reference import TOLERANCE, differences, reference_model, tensors

OPTIONS = ("output_attentions", "output_hidden_states", "output_router_logits", "use_cache")
OF_CONFIG = ("output_router_logits", "use_cache")
LABELS = ("start_positions", "end_positions", "ans", "return_loss", "reduce_loss")
OF_ROUTERS = re.compile(r"router_(logits|probs)|(z|aux)_loss")
WITHOUT_ROUTERS = ("NllbMoe", "SwitchTransformers", "Doge", "Glm4vMoe")
"""Types that refuse router logits on pipeline stages: a stage lacks the logits of other stages."""
CHANGES: dict[str, dict[str, Any]] = {
    "doge-experts": {"num_experts": 25},  # transformers computes the auxiliary loss of Doge for square numbers only
    "idefics": {"additional_vocab_size": 3, "use_resampler": True},  # it has no loss with additional tokens
}
ALL = {-1}
"""Stands for all indices."""
CACHES = (*NAMES, "state")

Outputs = dict[str, Tensor]


def without_labels(name: str, batch: dict[str, Any]) -> dict[str, Any]:
    """Return a batch without labels, and thus with all outputs. An encoder-decoder then needs decoder inputs."""
    kept = {key: value for key, value in batch.items() if key not in LABELS and "label" not in key}
    if "decoder_input_ids" in zoo.parameters_of_forward(name):
        labels = batch.get("labels")
        given = labels.clamp(min=3) if labels is not None and labels.dim() == 2 else None
        if given is not None or "input_ids" in kept:
            kept.setdefault("decoder_input_ids", kept["input_ids"].flip(1) if given is None else given)
    return kept


def states(cache: Any, prefix: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the floating-point tensors of a cache, with their paths."""
    if isinstance(cache, Tensor):
        if cache.is_floating_point():
            yield prefix, cache
    elif isinstance(cache, EncoderDecoderCache):
        yield from states(cache.self_attention_cache, f"{prefix}.own")
        yield from states(cache.cross_attention_cache, f"{prefix}.cross")
    elif isinstance(cache, Mapping):
        for key, value in cache.items():
            yield from states(value, f"{prefix}.{key}")
    elif isinstance(cache, (list, tuple)):
        for index, value in enumerate(cache):
            yield from states(value, f"{prefix}.{index}")
    elif hasattr(cache, "layers"):
        yield from states(cache.layers, prefix)
        yield from states(getattr(cache, "linear_cache", ()), f"{prefix}.linear")  # MiniMax's
    elif hasattr(cache, "__dict__"):
        yield from states(vars(cache), prefix)


def split(output: Any) -> tuple[Outputs, Outputs, Any]:
    """Return the tensors of an output, those of its cache, and the cache."""
    fields = {key: value for key, value in output.items() if key not in CACHES}
    found = {key: value for key, value in output.items() if key in CACHES and value is not None}
    own = {path: tensor.clone() for path, tensor in tensors(fields)}
    caches = {path: tensor.clone() for key, value in found.items() for path, tensor in states(value, key)}
    return own, caches, found


def continuation(name: str, batch: dict[str, Any], output: Any, found: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call with one more token of each row and the cache of the last call."""
    side = next(key for key in ("decoder_input_ids", "input_ids") if key in batch)
    given: dict[str, Any] = {side: batch[side][..., -1:], "use_cache": True, **found}
    if (encoded := output.get("encoder_last_hidden_state")) is not None:
        given["encoder_outputs"] = BaseModelOutput(last_hidden_state=encoded)
    if "encoder_hidden_states" in batch:
        given["encoder_hidden_states"] = batch["encoder_hidden_states"]
    return given


def run(name: str, model: Any, batch: dict[str, Any], following: bool) -> tuple[Outputs, Outputs, Outputs]:
    """Return the outputs of a call, the states of its cache, and the outputs of the call that continues it."""
    with torch.no_grad(), lifted_casts():
        torch.manual_seed(0)
        output = model(**batch)
        own, caches, found = split(output)
        if not (found and following):
            return own, caches, {}
        return own, caches, split(model(**continuation(name, batch, output, found)))[0]


def held_indices(own: Tensor, full: Tensor) -> set[int] | str:
    """Return the indices at which ``own`` is a part of ``full`` in the dimension that ranks divide, or an error."""
    if own.shape == full.shape:
        same = own.numel() == 0 or (own - full).abs().max() <= TOLERANCE
        return ALL if same else "differs"
    divided = [dim for dim in range(full.dim()) if own.dim() == full.dim() and own.shape[dim] != full.shape[dim]]
    if len(divided) != 1:
        return f"has the shape {tuple(own.shape)} instead of {tuple(full.shape)}"
    entries, all_entries = (each.movedim(divided[0], 0).flatten(1) for each in (own, full))
    found = [((entry - all_entries).abs().amax(-1) <= TOLERANCE).nonzero().flatten().tolist() for entry in entries]
    return {index for indices in found for index in indices} if all(found) else "has entries of no head"


def cache_differences(own: Outputs, full: Outputs) -> list[str]:
    """Compare the states of local heads with those of the full model. Ranks together hold all of them."""
    lines = [] if own.keys() == full.keys() else [f"cache: {list(own)} instead of {list(full)}"]
    for path, expected in full.items():
        found: Any = held_indices(own[path], expected) if path in own else "is missing"
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, found)
        if isinstance(found, str):
            lines.append(f"{path} {found}")
        elif not any(isinstance(each, str) or each == ALL for each in ranks):
            count = len(set().union(*ranks))
            lines += [] if count in expected.shape else [f"{path}: ranks have {count} of {tuple(expected.shape)}"]
    return lines


def check_ranks(
    name: str, folder: Path, batch: dict[str, Any], expected: tuple[Outputs, Outputs, Outputs], limit: int
) -> None:
    cls: Any = registry.find(name)
    model = cls.from_pretrained_with_parallel(folder, min(2, limit), attn_implementation="eager")
    own, caches, following = run(name, model, batch, bool(expected[2]))
    lines = []
    for what, found, wanted in (("", own, expected[0]), ("continued ", following, expected[2])):
        if found.keys() != wanted.keys():
            lines.append(f"{what}lacks {sorted(wanted.keys() - found)}, has {sorted(found.keys() - wanted)}")
        for path in found.keys() & wanted.keys():
            lines += differences(what + path, found[path], wanted[path], TOLERANCE)
    lines += cache_differences(caches, expected[1])
    assert not lines, "\n".join(lines)


def run_stage(name: str, model: Any, batch: dict[str, Any]) -> tuple[Any, bool]:
    """Return the output of a stage, and whether it has no router logits, which some types refuse."""
    with torch.no_grad(), lifted_casts():
        if batch.get("output_router_logits") and name.startswith(WITHOUT_ROUTERS):
            with pytest.raises(ValueError, match="output_router_logits=True"):
                model(**batch)
            return run_stage(name, model, {**batch, "output_router_logits": False})[0], True
        torch.manual_seed(0)
        (output,) = model(**batch)
    return output, False


def missing_differences(model: Any, own: Outputs, expected: Outputs) -> list[str]:
    """Return lines for outputs that are missing though this stage computes them."""
    lists: dict[str, list[str]] = {}
    lines = []
    for path in expected:
        name, _, index = path.rpartition(".")
        if path.startswith(("image_", "audio_")):
            continue  # the first stage has the tower
        if name.endswith(("hidden_states", "attentions")) and index.isdigit():
            lists.setdefault(name, []).append(path)
        elif path not in own:
            lines.append(f"lacks {path}")
    for name, paths in lists.items():
        lost = [path not in own for path in paths]
        stack = model.stage.stacks[0 if name.startswith(("encoder", "vision")) else -1]
        if not lost[-1] and name.endswith("hidden_states") and sum(lost) != stack.blocks_before:
            lines.append(f"lacks {sum(lost)} of {name}")
        if any(lost[sum(lost) :]):
            lines.append(f"{name} lacks {[path for path in paths if path not in own]}")
        has_all = len(lists.get(name.replace("attentions", "hidden_states"), ())) in (len(paths), len(paths) + 1)
        if all(lost) and has_all and len(model.stage.stacks) == 1:
            lines.append(f"lacks {name}")
    return lines


def stage_cache_differences(model: Any, own: Outputs, full: Outputs) -> list[str]:
    """Compare the cache of the blocks of this stage."""
    stage, lines = model.stage, []
    shift = 0 if stage.cache_layers is None else stage.cache_layers.start
    for path, tensor in own.items():
        name, index = re.fullmatch(r"(.*?\.)(\d+)(?:\..*)?", path).groups()  # type: ignore[union-attr]
        if stage.cache_layers is None and int(index) < stage.stacks[-1].blocks_before:
            continue
        there = f"{name}{int(index) + shift}{path.removeprefix(name + index)}"
        if there not in full and not tensor.any():  # xLSTM has states for as many layers as the full model
            continue
        lines += differences(path, tensor, full.get(there), TOLERANCE)
    return lines if own or not full else ["no cache"]


def check_stages(name: str, folder: Path, batch: dict[str, Any], expected: tuple[Outputs, Outputs, Outputs]) -> None:
    """On the last stage, compare all outputs. Those of blocks of the first stage are missing."""
    cls: Any = registry.find(name)
    rows = len(next(value for value in batch.values() if isinstance(value, Tensor)))
    model = cls.from_pretrained_with_parallel(folder, 1, 2, micro_batch_size=rows, attn_implementation="eager")
    output, is_refused = run_stage(name, model, batch)
    if not model.stage.is_last:
        return
    own, caches, _ = split(output)
    full = {path: tensor for path, tensor in expected[0].items() if not (is_refused and OF_ROUTERS.search(path))}
    lines = [f"has {sorted(own.keys() - full)}"] if own.keys() - full else []
    for path in own.keys() & full.keys():
        lines += differences(path, own[path], full[path], TOLERANCE)
    lines += missing_differences(model, own, full)
    lines += stage_cache_differences(model, caches, expected[1] if batch.get("use_cache") else {})
    assert not lines, "\n".join(lines)


def reference(
    name: str, config: PreTrainedConfig, seed: int, folder: Path
) -> tuple[dict[str, Any], tuple[Outputs, Outputs, Outputs]]:
    """Return the batch with all options that transformers' class takes, and what it returns."""
    plan = registry.find(name).plan(config)  # type: ignore[attr-defined]
    whole = plan.pipeline.single_stage_reason or config.model_type in (*zoo.WITH_IMAGES, *zoo.WITH_SOUNDS)
    batch = without_labels(name, (zoo if whole else pipelines).batch(name, config, seed))
    model = reference_model(name, config, seed, attn_implementation="eager").eval()
    model.save_pretrained(folder)
    known = zoo.parameters_of_forward(name)
    for option in OPTIONS:
        is_option = option not in OF_CONFIG or hasattr(config.get_text_config(), option)
        if option in known or ("kwargs" in known and is_option):
            batch[option] = True
    if name == "FSMTModel":  # see `pipelines.batch`
        batch["use_cache"] = False
    for given, following in ((batch, True), (batch, False)):
        with suppress(Exception):  # transformers cannot continue every class: encoders, classifiers
            return given, run(name, model, given, following)
    batch.pop("use_cache")  # encoders refuse it
    return batch, run(name, model, batch, False)


def check_class(pool: Pool, folder: Path, model_type: str, name: str, seed: int) -> None:
    if (reason := zoo.fault_of_release(model_type)) is not None:
        pytest.skip(reason)
    config = zoo.config_of(name, zoo.config(model_type, **CHANGES.get(model_type, {})))
    plan = registry.find(name).plan(config)  # type: ignore[attr-defined]
    batch, expected = reference(name, config, seed, folder)
    limit = 1 if plan.single_rank_reason else plan.max_ranks() or 2
    pool.run(min(2, limit), check_ranks, name, folder, batch, expected, limit)
    if not plan.pipeline.single_stage_reason:
        pool.run(2, check_stages, name, folder, batch, expected)


TYPES = [*zoo.FOUNDING, *zoo.MORE]


@pytest.mark.drawn(15)
@pytest.mark.parametrize("model_type", zoo.cases([*TYPES, *zoo.ODD]))
def test_optional_outputs_of_the_main_class(pool: Pool, tmp_path: Path, model_type: str, seed: int) -> None:
    check_class(pool, tmp_path, model_type, zoo.main_head(model_type), seed)


OTHERS = [(kind, name) for kind in TYPES for name in zoo.heads(kind) if name != zoo.main_head(kind)]


@pytest.mark.zoo
@pytest.mark.parametrize(("model_type", "name"), OTHERS)
def test_optional_outputs_of_other_classes(pool: Pool, tmp_path: Path, model_type: str, name: str, seed: int) -> None:
    check_class(pool, tmp_path, model_type, name, seed)
