"""`context_parallel_size=` matches transformers: outputs, loss, gradients and trained parameters."""

from __future__ import annotations

import contextlib
import copy
import random
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import DynamicCache

from oslo_models import registry
from oslo_models.cache_argument import NAMES as CACHES
from oslo_models.cache_argument import generation_name
from oslo_models.distributed import autograd_collectives
from oslo_models.layers import context_parts, token_division
from oslo_models.layers.context_parts import ContextPart
from oslo_models.modeling.apply_plan import layouts_of
from oslo_models.pipeline import schedule

from support import pipelines, zoo
from support.drawn_steps import OF_TEXT, drawn_step, shortened
from support.dropout_masks import RATE, Recorder, Replay
from support.float64 import lifted_casts
from support.generation import BEAMS, GREEDY, Tokens, depend_on_rounding, generate_tokens, token_differences
from support.pool import Pool
from support.reference import (
    TOLERANCE,
    Step,
    differences,
    full_gradients,
    full_parameters,
    parallel_model,
    reference_model,
    reference_step,
    shard_differences,
    step_differences,
    tensors,
)
from support.token_divisions import COPIES, REPLICAS, counting_exchanges, dividing_short_prompts, fully_sharded

TYPES = [kind for kind in registry.ARCHITECTURES if kind in registry.CONTEXT_PARALLEL]
MIXERS = [kind for kind in TYPES if kind in registry.MIXERS_WITH_CONTEXT]
OPTIONS: dict[str, Any] = {"gather_logits": True}


def context_model(step: Step, cp: int, tp: int = 1, **options: Any) -> Any:
    return parallel_model(step.name, step.config, step.weights, tp, context_parallel_size=cp, **OPTIONS | options)


def check_step(
    step: Step,
    cp: int,
    tp: int = 1,
    options: Mapping[str, Any] = OPTIONS,
    divides: bool = True,
    over: str | None = None,
) -> None:
    """Take two steps.

    Args:
        over: the ranks over which FSDP2 shards the weights, if any.
    """
    model = context_model(step, cp, tp, **options).train()
    if over is not None:
        fully_sharded(model, over)
    for _ in range(2):
        torch.manual_seed(0)  # Wav2Vec2 samples its targets
        with counting_exchanges() as counts:
            lines = step_differences(model, step)
        assert not lines, "\n".join(lines)
        assert bool(counts["sum"]) == divides, counts
        model.zero_grad()


def llama(**changes: Any) -> Any:
    return zoo.config("llama-untied", **changes)


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("variant", zoo.FOUNDING)
def test_step_matches_transformers(pool: Pool, variant: str, n: int, seed: int) -> None:
    """Left padding; five and four tokens of a row on two ranks, three each on three."""
    pool.run(n, check_step, reference_step(zoo.lm_head(variant), zoo.config(variant), seed), n)


@pytest.mark.parametrize("variant", ["llama", "gpt2"])
def test_step_with_sharded_layers_matches_transformers(pool: Pool, variant: str, seed: int) -> None:
    pool.run(4, check_step, reference_step(zoo.lm_head(variant), zoo.config(variant), seed), 2, 2)


def heads_for(model_type: str, cp: int, tp: int) -> int:
    """Return the least number of heads of a type. Ranks divide the heads of mixers twice."""
    return cp * tp if model_type in MIXERS else tp


def check_drawn(
    pool: Pool, name: str, model_type: str, n: int, seed: int, tp: int = 1, over: str | None = None
) -> None:
    step, options, text = drawn_step(
        name, model_type, seed, heads_for(model_type, n, tp), None if n == 2 or seed % 2 else 8
    )
    try:
        pool.run(n * tp, check_step, step, n, tp, options, True, over)
    except Exception as error:
        raise AssertionError(text) from error


@pytest.mark.drawn(37)
@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("model_type", TYPES)
def test_drawn_configuration_matches_transformers(pool: Pool, model_type: str, n: int, seed: int) -> None:
    """Left padding; five and four tokens of a row on two ranks, three each or three, three and two on three."""
    check_drawn(pool, zoo.main_head(model_type), model_type, n, seed + n)


@pytest.mark.drawn(19)
@pytest.mark.parametrize("model_type", TYPES)
def test_drawn_class_matches_transformers(pool: Pool, model_type: str, seed: int) -> None:
    draw = random.Random(f"{model_type} {seed}")
    names = sorted(registry.model_classes(model_type).keys() - registry.NO_CONTEXT_PARALLEL.keys())
    check_drawn(pool, draw.choice(names), model_type, draw.choice((2, 3)), seed)


@pytest.mark.drawn(19)
@pytest.mark.parametrize("model_type", TYPES)
def test_drawn_configuration_with_sharded_layers_matches_transformers(pool: Pool, model_type: str, seed: int) -> None:
    check_drawn(pool, zoo.main_head(model_type), model_type, 2, seed, tp=2)


GROUPED: dict[str, dict[str, Any]] = {
    "rules": {"linear_num_key_heads": 7, "linear_num_value_heads": 14},
    "one group": {"mamba_n_heads": 6, "mamba_n_groups": 1},
    "two groups": {"mamba_n_heads": 8, "mamba_n_groups": 2},
    "a group for each head": {"mamba_n_heads": 8, "mamba_n_groups": 8},
}


@pytest.mark.parametrize(
    ("variant", "heads", "sizes"),
    [
        ("qwen3_5_text", "rules", (2, 2)),  # two heads, one, and two of one on both other ranks
        ("bamba", "two groups", (2, 2)),  # both ranks of a group share it
        *(
            pytest.param(variant, heads, sizes, marks=pytest.mark.zoo)
            for variant, heads, sizes in (
                ("qwen3_5_text", "rules", (3, 2)),
                ("qwen3_5_text", "rules", (2, 3)),
                ("bamba", "one group", (3, 2)),
                ("bamba", "one group", (2, 3)),
                ("bamba", "two groups", (4, 2)),  # ranks divide two heads of each group
                ("bamba", "two groups", (2, 3)),
                ("falcon_h1", "a group for each head", (3, 2)),
                ("lfm2", "", (3, 2)),
                ("mamba", "", (2, 3)),
            )
        ),
    ],
)
def test_heads_of_mixers_divided_twice_match_transformers(
    pool: Pool, variant: str, heads: str, sizes: tuple[int, int], seed: int
) -> None:
    """Left padding; uneven heads, and groups of heads that ranks of both axes share."""
    config = zoo.config(variant, **GROUPED.get(heads, {}))
    pool.run(sizes[0] * sizes[1], check_step, reference_step(zoo.lm_head(variant), config, seed), *sizes)


WITH_EXPERTS = (
    *("afmoe", "aria", "aria_text", "axk1", "axk2", "beam", "cohere2_moe", "deepseek_v2", "deepseek_v3"),
    *("deepseek_v32", "dots1", "dots3_note_text", "ernie4_5_moe", "exaone_moe", "flex_olmo", "flint", "gemma4"),
    *("gemma4_text", "gemma4_unified", "gemma4_unified_text", "glm4_moe", "glm4_moe_lite", "glm4v_moe"),
    *("glm_moe_dsa", "gpt_oss", "granitemoe", "granitemoe_swa", "granitemoeshared", "hunyuan_v1_moe", "hy_v3"),
    *(
        "kimi_k25",
        "kolibri1",
        "laguna",
        "longcat_flash",
        "mellum",
        "mimo_v2_flash",
        "minimax_m2",
        "mistral4",
        "mixtral",
    ),
    *("olmoe", "qwen2_moe", "qwen3_moe", "qwen3_vl_moe", "solar_open"),
    *("granitemoehybrid", "jamba", "lara_mini", "lfm2_moe", "nemotron_h", "qwen3_5_moe", "qwen3_5_moe_text"),
    "qwen3_next",
)


def has_experts(model_type: str) -> bool:
    cls: Any = registry.find(zoo.main_head(model_type))
    return bool(cls.plan(zoo.config(model_type)).has_experts())


def test_all_types_with_experts_are_drawn() -> None:
    found, listed = {kind for kind in TYPES if has_experts(kind)}, {kind for kind in WITH_EXPERTS if kind in TYPES}
    assert found <= listed
    # older releases of transformers have the experts of Aria as single modules
    are_stacked = [*map(int, transformers.__version__.split(".")[:2])] >= [5, 24]
    assert listed - found <= (set() if are_stacked else {"aria", "aria_text"})


def layouts_over(name: str, config: Any, tp: int, ep: int) -> dict[str, Any]:
    cls: Any = registry.find(name)
    with torch.device("meta"):
        model = cls(copy.deepcopy(config))
    plan = cls.plan(model.config).with_experts_over(ep)
    return layouts_of(model, plan, model._prefix(), model.head_entries(model.config), tp)


def check_experts(step: Step, sizes: tuple[int, int, int], options: dict[str, Any]) -> None:
    cp, tp, ep = sizes
    check_step(step, cp, tp, {**OPTIONS, **options, "expert_parallel_size": ep})


@pytest.mark.drawn(9)
@pytest.mark.parametrize("model_type", [kind for kind in WITH_EXPERTS if kind in TYPES])
def test_drawn_configuration_with_experts_over_ranks_matches_transformers(
    pool: Pool, model_type: str, seed: int
) -> None:
    """Experts over tensor-parallel ranks, the ranks that divide tokens, or both."""
    if not has_experts(model_type):
        pytest.skip(f"this release of transformers does not stack the experts of {model_type}")
    sizes = random.Random(f"{model_type} {seed}").choice([(2, 2, 2), (2, 1, 2), (2, 2, 4), (3, 1, 3)])
    heads = heads_for(model_type, *sizes[:2])
    step, options, text = drawn_step(zoo.main_head(model_type), model_type, seed, heads, None)
    try:
        layouts_over(step.name, step.config, *sizes[1:])
    except ValueError:  # fewer experts
        sizes = (2, sizes[1], 2)
    try:
        pool.run(sizes[0] * sizes[1], check_experts, step, sizes, options)
    except Exception as error:
        raise AssertionError(f"{sizes} {text}") from error


@pytest.mark.drawn(19)
@pytest.mark.parametrize("model_type", [kind for kind in TYPES if kind != "vit_mae"])
def test_drawn_configuration_with_fully_sharded_weights_matches_transformers(
    pool: Pool, model_type: str, seed: int
) -> None:
    """Not ViTMAE: FSDP2 gives its random order of patches, an input, a gradient of zeros."""
    check_drawn(pool, zoo.main_head(model_type), model_type, 2, seed, over=COPIES)


@pytest.mark.parametrize(
    ("heads", "key_heads", "n"),
    [
        (4, 1, 2),  # both ranks have the key head
        (4, 4, 3),  # two heads, one and one
        (6, 2, 3),  # two query heads and one of two key heads
        (4, 2, 3),  # query heads of both key heads on one rank
        (2, 1, 3),  # fewer heads than ranks: gathered keys
        (2, 2, 4),
    ],
)
@pytest.mark.parametrize("attention", ["sdpa", "eager", None])
def test_any_numbers_of_heads_match_transformers(
    pool: Pool, heads: int, key_heads: int, n: int, attention: str | None, seed: int
) -> None:
    config = llama(num_attention_heads=heads, num_key_value_heads=key_heads, head_dim=8)
    options = {} if attention is None else {"attn_implementation": attention}
    batch = zoo.batch("LlamaForCausalLM", config, seed)
    if attention == "sdpa" and seed % 2:  # attention without a mask
        batch["attention_mask"] = torch.ones_like(batch["attention_mask"])
    step = reference_step("LlamaForCausalLM", config, seed, batch=batch, **options)
    pool.run(n, check_step, step, n, 1, options)


def packed(config: Any, seed: int) -> dict[str, Any]:
    """Return rows of three texts, whose positions restart."""
    ids = torch.randint(config.vocab_size, (2, 11), generator=torch.Generator().manual_seed(seed))
    positions = torch.cat([torch.arange(length) for length in (4, 2, 5)]).expand(2, -1).contiguous()
    return {"input_ids": ids, "labels": ids, "position_ids": positions, "use_cache": False}


@pytest.mark.parametrize(
    ("variant", "attention"),
    [
        *(("llama-untied", attention) for attention in ("sdpa", "eager", None)),
        ("qwen3_5_text", None),
        *(pytest.param(variant, None, marks=pytest.mark.zoo) for variant in ("granitemoehybrid", "lfm2", "qwen3_next")),
    ],
)
def test_packed_texts_match_transformers(pool: Pool, variant: str, attention: str | None, seed: int) -> None:
    options, config = {} if attention is None else {"attn_implementation": attention}, zoo.config(variant)
    step = reference_step(zoo.lm_head(variant), config, seed, batch=packed(config, seed), **options)
    pool.run(2, check_step, step, 2, 1, options)


@pytest.mark.parametrize("length", [1100])
def test_lazy_masks_match_transformers(pool: Pool, length: int, seed: int) -> None:
    """Rows of more than 1,024 tokens have masks without memory."""
    config = zoo.config("mistral" if "mistral" in registry.CONTEXT_PARALLEL else "llama", max_position_embeddings=2048)
    ids = torch.randint(config.vocab_size, (2, length), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    mask[0, :300] = 0
    name = zoo.lm_head(config.model_type)
    step = reference_step(name, config, seed, batch={"input_ids": ids, "labels": ids, "attention_mask": mask})
    pool.run(2, check_step, step, 2)


# Training -------------------------------------------------------------------------------------------------------------


def check_replicas(step: Step, batches: list[dict[str, Any]], tp: int) -> None:
    """Each replica has rows of its own, and DistributedDataParallel averages the gradients."""
    model = context_model(step, 2, tp).train()
    with pytest.raises(ValueError, match="replicas are on ranks"):
        DistributedDataParallel(model)
    ddp = DistributedDataParallel(model, process_group=model.mpu.get_data_parallel_group())
    with lifted_casts(), counting_exchanges() as counts:
        for rows in batches[2 * model.mpu.get_data_parallel_rank() :][:2]:
            last = rows is batches[2 * model.mpu.get_data_parallel_rank() + 1]
            with contextlib.nullcontext() if last else ddp.no_sync():
                (ddp(**rows).loss / 2).backward()
    assert counts["sum"]
    own = {name: param.grad for name, param in model.named_parameters(remove_duplicate=False)}
    average = model.mpu.get_data_parallel_world_size()
    assert average == 2
    lines = shard_differences(model, "gradient of", own, step.gradients, TOLERANCE)
    assert not lines, "\n".join(lines)


@pytest.mark.parametrize(("variant", "tp"), [("llama-untied", 1), pytest.param("bamba", 2, marks=pytest.mark.zoo)])
def test_replicas_match_transformers(pool: Pool, variant: str, tp: int, seed: int) -> None:
    """Gradients are averaged over replicas, not over the ranks that divide the tokens."""
    name, config = zoo.lm_head(variant), zoo.config(variant)
    rows = [zoo.batch(name, config, seed + number) for number in range(4)]
    model = reference_model(name, config, seed)
    weights = full_parameters(model)
    with lifted_casts():
        (sum(model(**each).loss for each in rows) / 4).backward()
    step = Step(name, config, {}, weights, {}, torch.zeros(()), full_gradients(model))
    pool.run(4 * tp, check_replicas, step, rows, tp)


def drop_with_recorder(name: str, config: Any, weights: Any, batch: Any, seed: int) -> Any:
    """Return loss, gradients, masks of whole activations, masks of local tokens, and the next random numbers."""
    options = {"attn_implementation": "eager"}
    model = parallel_model(name, config, weights, 1, context_parallel_size=2, **options).train()
    torch.manual_seed(seed)
    with lifted_casts(), Recorder() as recorder:
        loss = model(**batch).loss
    drawn = torch.rand(3)
    loss.backward()
    local = [mask.local() if isinstance(mask, ContextPart) else mask for mask in recorder.masks]
    whole = [mask.full() if isinstance(mask, ContextPart) else mask for mask in recorder.masks]
    return loss.detach(), dict(full_gradients(model)), whole, local, drawn


@pytest.mark.parametrize("variant", ["gpt2", "bert", "t5"])
def test_dropout_drops_other_elements_of_the_tokens_of_each_rank(pool: Pool, variant: str, seed: int) -> None:
    """Random states stay equal. One process with the joined masks gets the same loss and gradients."""
    if variant not in registry.CONTEXT_PARALLEL:
        pytest.skip(f"{variant} is not supported")
    name, config = zoo.lm_head(variant), zoo.config(variant, dropout=RATE)
    model = reference_model(name, config, seed, attn_implementation="eager")
    weights, batch = full_parameters(model), zoo.batch(name, config, seed)
    results = pool.run(2, drop_with_recorder, name, config, weights, batch, seed)
    (loss, gradients, masks, _, drawn), (_, _, other_masks, _, other_drawn) = results
    assert torch.equal(drawn, other_drawn)
    assert all(torch.equal(mask, other) for mask, other in zip(masks, other_masks, strict=True))
    with lifted_casts(), Replay(masks):
        expected = model(**batch).loss
    expected.backward()
    lines = differences("loss", loss, expected.detach(), TOLERANCE)
    for key, gradient in full_gradients(model).items():
        lines += differences(f"gradient of {key}", gradients[key], gradient, TOLERANCE)
    assert not lines, "\n".join(lines)
    of_ranks = [local for _, _, _, local, _ in results]
    divided = [index for index, mask in enumerate(masks) if of_ranks[0][index].shape != mask.shape]
    parts = [[local[index] for index in divided] for local in of_ranks]
    assert divided
    for own, other in zip(*parts, strict=True):
        shortest = [slice(0, min(sizes)) for sizes in zip(own.shape, other.shape, strict=True)]
        assert not torch.equal(own[tuple(shortest)], other[tuple(shortest)])
    dropped = torch.cat([(mask == 0).flatten() for rank in parts for mask in rank]).double()
    assert abs(dropped.mean().item() - RATE) < 6 * (RATE / len(dropped)) ** 0.5


def check_norm(step: Step, tp: int, norms: dict[float, Tensor], clipped: dict[str, Tensor]) -> None:
    model = context_model(step, 2, tp).train()
    with lifted_casts():
        model(**step.batch).loss.backward()
    for order in (float("inf"), 1.0, 2.0):
        largest = 1e9 if order != 2.0 else 0.1
        lines = differences(f"norm {order}", model.clip_grad_norm_(largest, order), norms[order], TOLERANCE)
        assert not lines, "\n".join(lines)
    own = {name: param.grad for name, param in model.named_parameters(remove_duplicate=False)}
    lines = shard_differences(model, "gradient of", own, clipped, TOLERANCE)
    lines += differences(
        "of torch", torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9), norms[2.0] * 0 + 0.1, 1e-6
    )
    assert not lines, "\n".join(lines)


@pytest.mark.parametrize("tp", [1, 2])
def test_gradient_norms_count_each_weight_once(pool: Pool, tp: int, seed: int) -> None:
    config = llama()
    step = reference_step("LlamaForCausalLM", config, seed)
    gradients = {name: gradient.clone() for name, gradient in step.gradients.items() if gradient is not None}
    norms = {
        order: torch.nn.utils.get_total_norm(gradients.values(), order).to(torch.float64)
        for order in (float("inf"), 1.0, 2.0)
    }
    scale = min(0.1 / (norms[2.0].item() + 1e-6), 1.0)
    clipped = {name: gradient * scale for name, gradient in gradients.items()}
    pool.run(2 * tp, check_norm, step, tp, norms, clipped)


def check_files(step: Step, tp: int, folder: Path) -> None:
    """Files are those of a model without context parallelism, and load at any size."""
    cls: Any = registry.find(step.name)
    model = context_model(step, 2, tp)
    model.save_pretrained_with_parallel(folder / "merged", save_with_merging=True)
    model.save_pretrained_with_parallel(folder / "split")
    optimizer = torch.optim.AdamW(model.parameters())
    model(**step.batch).loss.backward()
    optimizer.step()
    model.save_optimizer(optimizer, folder / "split", step=3)
    assert len([*(folder / "split").glob("pytorch_model*")]) == (tp if tp > 1 else 0)
    for saved, options in {"merged": {"context_parallel_size": 2 * tp}, "split": {"tensor_parallel_size": 2}}.items():
        loaded = cls.from_pretrained_with_parallel(folder / saved, dtype=torch.float64, **options)
        for name, param in loaded.named_parameters():
            expected = loaded.layouts[name].shard(step.weights[name], loaded.mesh.tp.rank)
            assert not differences(name, param.detach(), expected, 0)
    again = context_model(step, 2, tp)
    optimizer = torch.optim.AdamW(again.parameters())
    assert again.load_optimizer(optimizer, folder / "split") == {"step": 3}
    assert len(optimizer.state) == len([*again.parameters()])


def check_merged_file(name: str, folder: Path, weights: Mapping[str, Tensor]) -> None:
    """Compare the parameters that transformers loads with the saved ones."""
    model = zoo.original(name).from_pretrained(folder / "merged", dtype=torch.float64)
    found = full_parameters(model)
    lines = [line for each, value in found.items() for line in differences(each, value, weights[each], 0)]
    assert not lines, "\n".join(lines)


@pytest.mark.parametrize("tp", [1, 2])
def test_checkpoints_hold_one_copy_of_the_weights(pool: Pool, tp: int, tmp_path: Path, seed: int) -> None:
    step = reference_step("LlamaForCausalLM", llama(), seed)
    pool.run(2 * tp, check_files, step, tp, tmp_path)
    check_merged_file("LlamaForCausalLM", tmp_path, step.weights)


def check_full(step: Step) -> None:
    model = context_model(step, 2, 2).deparallelize()
    assert model.mesh is None
    for name, param in model.named_parameters():
        assert torch.equal(param, step.weights[name])


def test_deparallelized_model_has_the_full_weights(pool: Pool, seed: int) -> None:
    pool.run(4, check_full, reference_step("LlamaForCausalLM", llama(), seed))


# Pipeline stages ------------------------------------------------------------------------------------------------------


def stage_of(given: pipelines.Case, tp: int = 1, pp: int = 2, cp: int = 2, **options: Any) -> Any:
    return pipelines.case_on_stages(given, tp, pp, context_parallel_size=cp, **options)


def check_stages(given: pipelines.Case, sizes: Mapping[str, int], options: Mapping[str, Any], rows: int = 1) -> None:
    """On every rank: the loss, gradients and trained parameters."""
    model = stage_of(given, **sizes, **options)
    with counting_exchanges() as counts:
        lines = pipelines.case_differences(model, given, rows)
    assert not lines, "\n".join(lines)
    assert counts["sum"], counts


@pytest.mark.parametrize(
    ("variant", "sizes"),
    [
        *((variant, {}) for variant in ("llama", "llama-untied", "gpt2", "t5", "qwen3_next")),
        *(
            pytest.param(variant, sizes, marks=pytest.mark.zoo)
            for variant in ("bamba", "lfm2", "mamba")
            for sizes in ({"cp": 3}, {"tp": 2})
        ),
        *(
            pytest.param(variant, sizes, marks=pytest.mark.zoo)
            for variant in zoo.FOUNDING
            for sizes in ({"tp": 2}, {"pp": 4}, {"cp": 3}, {"cp": 4})
        ),
    ],
)
def test_steps_on_stages_match_transformers(pool: Pool, variant: str, sizes: dict[str, int], seed: int) -> None:
    """Left padding; tied and untied weights; micro-batches of one and two rows with unequal numbers of labels."""
    optimizers = ["AdamW"] if not sizes or seed % 2 else []
    given = pipelines.lm_case(variant, seed, optimizers=optimizers)
    ranks = sizes.get("tp", 1) * sizes.get("pp", 2) * sizes.get("cp", 2)
    pool.run(ranks, check_stages, given, sizes, {}, 1 + seed % 2)


@pytest.mark.parametrize("attention", ["sdpa", None])
def test_packed_texts_on_stages_match_transformers(pool: Pool, attention: str | None, seed: int) -> None:
    options = {} if attention is None else {"attn_implementation": attention}
    config = pipelines.config("llama-untied")
    batch = {key: torch.cat([x, x.flip(0)]) if isinstance(x, Tensor) else x for key, x in packed(config, seed).items()}
    given = pipelines.case("LlamaForCausalLM", config, seed, batches=[[{**batch, "use_cache": None}]])
    pool.run(4, check_stages, given, {}, options)


def batch_of(config: Any, seed: int, kind: str) -> dict[str, Any]:
    name = "LlamaForCausalLM"
    batch = pipelines.batch(name, config, seed)
    if kind == "three tokens":
        return shortened(batch, 3)
    if kind == "items":
        return {**batch, "num_items_in_batch": torch.tensor(17)}
    generator = torch.Generator().manual_seed(seed)
    ids = batch.pop("input_ids")
    return {**batch, "inputs_embeds": torch.randn(*ids.shape, config.hidden_size, generator=generator).double()}


@pytest.mark.parametrize("kind", ["three tokens", "items", "embeddings"])
def test_batches_on_stages_match_transformers(pool: Pool, kind: str, seed: int) -> None:
    config = pipelines.config("llama")
    batch = batch_of(config, seed, kind)
    given = pipelines.case("LlamaForCausalLM", config, seed, batches=[[batch]])
    pool.run(4, check_stages, given, {}, {}, 2)


def check_short_rows(given: pipelines.Case) -> None:
    with counting_exchanges() as counts:
        lines = pipelines.case_differences(stage_of(given), given)
    assert not lines, "\n".join(lines)
    assert not counts


def test_short_rows_on_stages_match_transformers(pool: Pool, seed: int) -> None:
    """Rows with fewer tokens than ranks are whole, and travel whole."""
    name, config = "BertForMaskedLM", pipelines.config("bert")
    batch = pipelines.batch(name, config, seed)
    batch = {"input_ids": batch["input_ids"][:, :1], "labels": batch["input_ids"][:, :1]}
    pool.run(4, check_short_rows, pipelines.case(name, config, seed, batches=[[batch]]))


def test_auxiliary_loss_on_stages_matches_transformers(pool: Pool, seed: int) -> None:
    """The last stage reads the router logits of all stages."""
    name, config = zoo.lm_head("mixtral"), pipelines.config("mixtral")
    batch = {**pipelines.batch(name, config, seed), "output_router_logits": True}
    given = pipelines.case(name, config, seed, batches=[[batch]])
    pool.run(4, check_stages, given, {}, {}, pipelines.ROWS)


def check_drawn_stages(step: Step, options: dict[str, Any], folder: Path) -> None:
    cls: Any = registry.find(step.name)
    options = {**options, "context_parallel_size": 2}
    if cls.plan(step.config).pipeline.single_stage_reason:
        with pytest.raises(ValueError, match="pipeline_parallel_size=2 is more than 1"):
            cls.from_pretrained_with_parallel(folder, 1, 2, **options)
        return
    mixes_rows = getattr(step.config, "conv_pos_batch_norm", False)
    size = 2 if cls.loss_is_mean and not mixes_rows else pipelines.ROWS
    model = cls.from_pretrained_with_parallel(folder, 1, 2, size, gather_logits=True, **options).train()
    torch.manual_seed(0)  # Wav2Vec2 samples its targets
    with counting_exchanges() as counts:
        lines = pipelines.loop_differences(model, step)
    assert not lines, "\n".join(lines)
    assert bool(counts["sum"]) == ("loss" in step.outputs), counts


@pytest.mark.drawn(10)
@pytest.mark.parametrize(
    "model_type", [pytest.param(kind, marks=pytest.mark.zoo) if index % 2 else kind for index, kind in enumerate(TYPES)]
)
def test_drawn_configuration_on_stages_matches_transformers(
    pool: Pool, model_type: str, tmp_path: Path, seed: int
) -> None:
    """Every second type takes turns in `make test`, and types of one stage are refused."""
    heads = 2 if model_type in MIXERS else 1
    step, options, text = drawn_step(zoo.main_head(model_type), model_type, seed, heads, None, tmp_path)
    try:
        pool.run(4, check_drawn_stages, step, options, tmp_path)
    except Exception as error:
        raise AssertionError(text) from error


def with_ddp(model: Any) -> Any:
    return DistributedDataParallel(model.gpu_modules(), process_group=model.mpu.get_data_parallel_group())


def check_replicas_on_stages(given: pipelines.Case) -> None:
    lines = pipelines.replica_differences(with_ddp, given, 1, 2, context_parallel_size=2)
    assert not lines, "\n".join(lines)


def test_replicas_on_stages_match_transformers(pool: Pool, seed: int) -> None:
    """Losses, gradients, their norm, and trained parameters."""
    pool.run(8, check_replicas_on_stages, pipelines.lm_case("llama", seed, replicas=2, optimizers=["AdamW"]))


def check_fully_sharded_stages(given: pipelines.Case, over: str) -> None:
    lines = pipelines.replica_differences(partial(fully_sharded, over=over), given, 1, 2, context_parallel_size=2)
    assert not lines, "\n".join(lines)


@pytest.mark.parametrize("over", [REPLICAS, COPIES])
@pytest.mark.parametrize(("variant", "replicas"), [("llama", 1), pytest.param("t5", 2, marks=pytest.mark.zoo)])
def test_fully_sharded_stages_match_transformers(pool: Pool, variant: str, replicas: int, over: str, seed: int) -> None:
    given = pipelines.lm_case(variant, seed, replicas=replicas, optimizers=["AdamW"])
    pool.run(4 * replicas, check_fully_sharded_stages, given, over)


def check_checkpointed_stages(name: str, config: Any, batch: dict[str, Any]) -> None:
    """In float32: the mode that lifts casts is not active while the backward pass recomputes."""
    results, cls = {}, registry.find(name)
    for mode in ("plain", "not reentrant", "reentrant"):
        model: Any = cls.from_config_with_parallel(config, 1, 2, 2, context_parallel_size=2, seed=0)  # type: ignore[attr-defined]
        if mode != "plain":
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": mode == "reentrant"})
        torch.manual_seed(5)
        with counting_exchanges() as counts:
            loss = pipelines.run_micro_batches(model, batch, lift=False)
        assert counts["sum"]
        results[mode] = {"loss": loss, **pipelines.gradients_on_stage(model), "random numbers": torch.rand(3)}
    plain, lines = results.pop("plain"), list[str]()
    for mode, own in results.items():
        # a reentrant block sums the gradients of its readers separately
        tolerance = 1e-6 if mode == "reentrant" or config.is_encoder_decoder else 0
        for key, value in own.items():
            lines += differences(f"{mode}: {key}", value, plain[key], tolerance)
    assert not lines, "\n".join(lines)


@pytest.mark.parametrize("variant", ["gpt2", pytest.param("t5", marks=pytest.mark.zoo)])
def test_checkpointed_blocks_on_stages_equal_others(pool: Pool, variant: str, seed: int) -> None:
    """With dropout."""
    name, config = zoo.lm_head(variant), pipelines.config(variant, dropout=RATE, use_cache=False)
    pool.run(4, check_checkpointed_stages, name, config, pipelines.batch(name, config, seed, dtype=torch.float32))


def check_clipping_on_stages(given: pipelines.Case) -> None:
    model = stage_of(given)
    pipelines.run_micro_batches(model, given.batches[0][0])
    norm = model.clip_grad_norm_(given.norm / 2)
    lines = differences("norm", norm, torch.tensor(given.norm, dtype=norm.dtype), TOLERANCE)
    scale = given.norm / 2 / (given.norm + 1e-6)
    clipped = {name: None if grad is None else grad * scale for name, grad in given.gradients.items()}
    lines += pipelines.gradient_differences(model, clipped)
    assert not lines, "\n".join(lines)


@pytest.mark.parametrize("variant", ["llama", pytest.param("llama-untied", marks=pytest.mark.zoo)])
def test_gradient_norms_on_stages_count_each_weight_once(pool: Pool, variant: str, seed: int) -> None:
    pool.run(4, check_clipping_on_stages, pipelines.lm_case(variant, seed))


def check_files_of_stages(given: pipelines.Case, folder: Path) -> None:
    cls: Any = registry.find(given.name)
    model = stage_of(given)
    model.save_pretrained_with_parallel(folder / "merged", save_with_merging=True)
    model.save_pretrained_with_parallel(folder / "split")
    optimizer = torch.optim.AdamW(model.parameters())
    pipelines.run_micro_batches(model, given.batches[0][0])
    optimizer.step()
    model.save_optimizer(optimizer, folder / "split", step=3)
    assert len([*(folder / "split").glob("pytorch_model*")]) == 2
    for saved, sizes in {
        "merged": {"pipeline_parallel_size": 2, "context_parallel_size": 2},
        "split": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    }.items():
        loaded = cls.from_pretrained_with_parallel(folder / saved, dtype=torch.float64, **sizes)
        lines = pipelines.stage_differences(loaded, saved, pipelines.stage_parameters(loaded), given.weights, 0)
        assert not lines, "\n".join(lines)
    again = stage_of(given)
    optimizer = torch.optim.AdamW(again.parameters())
    assert again.load_optimizer(optimizer, folder / "split") == {"step": 3}
    assert len(optimizer.state) == len([*again.parameters()])


@pytest.mark.parametrize("variant", ["llama", pytest.param("llama-untied", marks=pytest.mark.zoo)])
def test_checkpoints_of_stages_hold_one_copy_of_the_weights(
    pool: Pool, variant: str, tmp_path: Path, seed: int
) -> None:
    given = pipelines.lm_case(variant, seed)
    pool.run(4, check_files_of_stages, given, tmp_path)
    check_merged_file(given.name, tmp_path, given.weights)


def check_shared_outputs(step: Step) -> None:
    """Logits of all stages are whole, with and without gradients."""
    model = pipelines.model_on_stages(
        step.name, step.config, step.weights, 1, 2, context_parallel_size=2, share_logits=True, micro_batch_size=2
    )
    for trains in (False, True):
        logits, losses = list[Tensor](), list[Tensor]()
        with torch.set_grad_enabled(trains), lifted_casts():
            for output in model(**step.batch):
                logits.append(output.logits.detach())
                losses.append(output.loss)
                if trains:
                    output.loss.backward()
        lines = differences("logits", torch.cat(logits), step.outputs["logits"], TOLERANCE)
        lines += differences("loss", torch.stack(losses).sum().detach(), step.value, TOLERANCE)
        assert not lines, "\n".join(lines)


def test_shared_outputs_of_stages_are_whole(pool: Pool, seed: int) -> None:
    name, config = "LlamaForCausalLM", pipelines.config("llama")
    step = reference_step(name, config, seed, batch=pipelines.batch(name, config, seed))
    pool.run(4, check_shared_outputs, step)


def sent_shapes(given: pipelines.Case) -> list[tuple[int, ...]]:
    """Return the shapes of all messages between stages, hidden states and gradients."""
    model, shapes = stage_of(given, micro_batch_size=2), list[tuple[int, ...]]()
    right = schedule.start_send

    def start_send(axis: Any, x: Tensor, to: int) -> Any:
        shapes.append(tuple(x.shape))
        return right(axis, x, to)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedule, "start_send", start_send)
        pipelines.run_micro_batches(model, given.batches[0][0])
    return shapes


@pytest.mark.parametrize("variant", ["llama", "t5"])
def test_stages_send_the_tokens_of_a_rank(pool: Pool, variant: str, seed: int) -> None:
    """Two micro-batches of hidden states in one direction, and of gradients in the other."""
    given = pipelines.lm_case(variant, seed)
    length = given.batches[0][0]["input_ids"].shape[1]
    width = given.config.hidden_size
    for rank, shapes in enumerate(pool.run(4, sent_shapes, given)):
        tokens = [-(-length // 2), length // 2][rank % 2]
        assert len(shapes) == 2 and {*shapes} == {(2, tokens, width)}


# Prompts --------------------------------------------------------------------------------------------------------------


def cached(output: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of the caches in an output with their paths."""
    cache = next((output[name] for name in CACHES if output.get(name) is not None), None)
    sides = [cache.self_attention_cache, cache.cross_attention_cache] if hasattr(cache, "is_updated") else [cache]
    for side, layers in enumerate(getattr(each, "layers", ()) for each in sides):
        for index, layer in enumerate(layers):
            for kind in ("keys", "values", "indexer_keys", "conv_states", "recurrent_states"):
                found = getattr(layer, kind, None)
                for place, value in (found if isinstance(found, dict) else {0: found}).items():
                    if value is not None:
                        yield f"cache.{side}.{index}.{kind}.{place}", value


def answer(model: Any, batch: Mapping[str, Any], caches: bool = True) -> dict[str, Tensor]:
    """Return the outputs of a call without gradients, and the contents of its cache."""
    torch.manual_seed(0)
    with torch.no_grad(), lifted_casts():
        output = model.eval()(**batch)
    found = dict(cached(output)) if caches else {}
    assert all(type(value) in (Tensor, torch.nn.Parameter) for value in found.values())
    return {**dict(tensors(output)), **found}


def check_answer(step: Step, tokens: Tokens, sizes: tuple[int, int], options: Mapping[str, Any], ways: Any) -> None:
    cp, tp = sizes
    model = context_model(step, cp, tp, **options)
    with dividing_short_prompts() as counts:
        own = answer(model, step.batch, caches=tp == 1)
        assert counts["exchange"] or counts["gather"]
        lines = token_differences(model, step.batch, tokens, ways)
    expected = {path: value for path, value in step.outputs.items() if path in own or not path.startswith(CACHES)}
    lines += [] if own.keys() == expected.keys() else [f"outputs: {list(own)} instead of {list(expected)}"]
    for path in own.keys() & expected.keys():
        lines += differences(path, own[path], expected[path], TOLERANCE)
    assert not lines, "\n".join(lines)


def answered(step: Step, seed: int, options: Mapping[str, Any], ways: Any) -> tuple[Step, Tokens]:
    """Replace the outputs of a step by those without gradients, and generate the tokens of transformers' class."""
    model = reference_model(step.name, step.config, seed, **options)
    model.load_state_dict(step.weights, strict=False)  # with the statistics of the step
    step.outputs = answer(model, step.batch)
    generates = model.can_generate() and not step.name.endswith(("DoubleHeadsModel", "ForCTC"))
    tokens = generate_tokens(model, step.batch, ways) if generates else {}
    return step, {} if depend_on_rounding(step.name, step.config, seed, step.batch, tokens, ways) else tokens


@pytest.mark.drawn(19)
@pytest.mark.parametrize("model_type", TYPES)
def test_divided_prompt_matches_transformers(pool: Pool, model_type: str, seed: int) -> None:
    """Left padding. Outputs and cache of a call without gradients, and tokens of greedy and beam search."""
    n, tp = random.Random(f"{model_type} {seed}").choice([(2, 1), (3, 1), (2, 2)])
    step, options, text = drawn_step(zoo.main_head(model_type), model_type, seed, heads_for(model_type, n, tp), None)
    ways = BEAMS if step.batch.keys() <= OF_TEXT else GREEDY
    step, tokens = answered(step, seed, options, ways)
    if model_type in WITH_EXPERTS and n == 2 and seed % 2:
        options["expert_parallel_size"] = 2
    try:
        pool.run(n * tp, check_answer, step, tokens, (n, tp), options, ways)
    except Exception as error:
        raise AssertionError(text) from error


def prompt_of(variant: str, seed: int, **changes: Any) -> tuple[Step, Any]:
    """Return a step without outputs, and the model of transformers."""
    name, config = zoo.lm_head(variant), zoo.config(variant, **changes)
    model = reference_model(name, config, seed).eval()
    return Step(name, config, zoo.batch(name, config, seed), full_parameters(model), {}, torch.zeros(()), {}), model


@pytest.mark.parametrize("fills_cache", [True, False])
@pytest.mark.parametrize(("variant", "heads"), [("bamba", "two groups"), ("qwen3_5_text", "rules")])
def test_prompts_of_mixers_divided_twice_match_transformers(
    pool: Pool, variant: str, heads: str, fills_cache: bool, seed: int
) -> None:
    """Each rank computes all heads of its shard for a cache, and some of them without one."""
    step, _ = prompt_of(variant, seed, **GROUPED[heads])
    if not fills_cache:
        step.batch = {**step.batch, "use_cache": False}
    step, tokens = answered(step, seed, {}, GREEDY)
    pool.run(4, check_answer, step, tokens, (2, 2), {}, GREEDY)


GENERATION: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "top_k": 20},
    "beams": {"num_beams": 3},
    "sampled beams": {"num_beams": 2, "do_sample": True},
    "whole outputs": {"output_hidden_states": True, "output_logits": True, "output_scores": True},
    "no cache": {"use_cache": False},
    "static cache": {"cache_implementation": "static"},
    "chunks": {"prefill_chunk_size": 4},
    "drafts": {"prompt_lookup_num_tokens": 3},
}


def generations(model: Any, batch: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return tokens and outputs of each way to generate, and of calls that continue a cache."""
    prompt, found = {key: batch[key] for key in ("input_ids", "attention_mask") if key in batch}, {}
    for way, options in GENERATION.items():
        rows = {key: value[-1:] for key, value in prompt.items()} if way == "drafts" else prompt
        torch.manual_seed(3)
        with lifted_casts():
            output = model.generate(**rows, **options, max_new_tokens=5, return_dict_in_generate=True)
        found[way] = output.sequences
        found |= {f"{way}: {path}": value for path, value in tensors(output) if not path.startswith(CACHES)}
        if way in ("greedy", "chunks", "static cache"):
            found |= {f"{way}: {path}": value for path, value in cached(output)}
        if way == "greedy":
            name = next(name for name in CACHES if output.get(name) is not None)
            further = torch.cat([output.sequences, prompt["input_ids"]], 1)
            mask = torch.cat([prompt["attention_mask"], torch.ones_like(further[:, prompt["input_ids"].shape[1] :])], 1)
            with lifted_casts():
                again = model.generate(further, attention_mask=mask, **{name: output[name]}, max_new_tokens=3)
            found["continued"] = again
    return found


def check_generations(step: Step, expected: Mapping[str, Tensor], tp: int) -> None:
    model = context_model(step, 2, tp).eval()
    with dividing_short_prompts() as counts:
        own = generations(model, step.batch)
    assert counts["exchange"] or counts["gather"]
    lines = [] if own.keys() == expected.keys() else [f"{own.keys() ^ expected.keys()}"]
    for path in own.keys() & expected.keys():
        if tp == 1 or ": cache." not in path:
            lines += differences(path, own[path], expected[path], TOLERANCE)
    assert not lines, "\n".join(lines)


@pytest.mark.parametrize(
    ("variant", "tp"),
    [("llama-untied", 1), ("llama-untied", 2), ("mistral", 1), ("gpt2", 1), ("bloom", 1), ("gemma2", 1)],
)
def test_ways_to_generate_match_transformers(pool: Pool, variant: str, tp: int, seed: int) -> None:
    """Attention with exchanged heads or gathered keys; caches of all tokens, of windows, and static ones."""
    changes = {"sliding_window": 4} if variant in ("mistral", "gemma2") else {}
    step, model = prompt_of(variant, seed, **changes)
    pool.run(2 * tp, check_generations, step, generations(model, step.batch), tp)


def check_tokens_of_stages(step: Step, tokens: Tokens) -> None:
    model = pipelines.model_on_stages(step.name, step.config, step.weights, 1, 2, context_parallel_size=2).eval()
    with dividing_short_prompts() as counts:
        lines = token_differences(model, step.batch, tokens, BEAMS)
    assert not lines, "\n".join(lines)
    assert counts["exchange"]


def test_tokens_of_stages_match_transformers(pool: Pool, seed: int) -> None:
    """Hidden states of a prompt travel whole, and each stage divides them again."""
    step, model = prompt_of("llama-untied", seed)
    pool.run(4, check_tokens_of_stages, step, generate_tokens(model, step.batch, BEAMS))


@pytest.mark.parametrize("length", [1100])
def test_prompt_with_lazy_masks_matches_transformers(pool: Pool, length: int, seed: int) -> None:
    """Left padding and windows, in attention by blocks."""
    step, _ = prompt_of("mistral", seed, max_position_embeddings=2048)
    ids = torch.randint(step.config.vocab_size, (2, length), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    mask[0, :300] = 0
    step.batch = {"input_ids": ids, "attention_mask": mask}
    step, tokens = answered(step, seed, {}, GREEDY)
    pool.run(2, check_answer, step, tokens, (2, 1), {"attn_implementation": "oslo_models_blockwise"}, GREEDY)


def check_encoder(step: Step, tokens: Tokens) -> None:
    """The encoder divides its input, although ``generate`` calls it outside of the model. The decoder starts short."""
    model = context_model(step, 2)
    encoder = model.get_encoder()
    lengths: list[int] = []
    encoder.final_layer_norm.register_forward_pre_hook(lambda _, args: lengths.append(len(args[0].local()[0])))
    with dividing_short_prompts():
        lines = token_differences(model, step.batch, tokens, BEAMS)
    assert not lines, "\n".join(lines)
    assert set(lengths) <= {4, 5}


def test_encoder_of_a_generating_model_divides_its_input(pool: Pool, seed: int) -> None:
    step, model = prompt_of("t5", seed)
    pool.run(2, check_encoder, step, generate_tokens(model, step.batch, BEAMS))


class OtherCache(DynamicCache):
    """A cache that may hold something other than keys and values."""


def check_lengths(step: Step, expected: Mapping[str, Tensor]) -> None:
    """Short prompts, unknown caches and prompts in compiled blocks stay whole. The head computes one token."""
    model, ids = context_model(step, 2).eval(), step.batch["input_ids"]
    tokens: list[int] = []
    model.lm_head.register_forward_pre_hook(lambda _, args: tokens.append(args[0].shape[1]))

    def tokens_of(length: int, **options: Any) -> tuple[Tensor, bool]:
        with lifted_casts(), counting_exchanges() as counts:
            found: Tensor = model.generate(ids[:, :length], max_new_tokens=3, do_sample=False, **options)
        return found, bool(counts)

    least = token_division.LEAST_PROMPT
    assert ids.shape[1] > least
    found, is_divided = tokens_of(ids.shape[1])
    assert is_divided
    assert set(tokens) == {1}
    assert torch.equal(found, expected["long"])
    found, is_divided = tokens_of(least - 1)
    assert not is_divided
    assert torch.equal(found, expected["short"])
    found, is_divided = tokens_of(ids.shape[1], **{generation_name(): OtherCache()})
    assert not is_divided
    assert torch.equal(found, expected["long"])
    model.model.layers[0].compile(backend="eager")
    found, is_divided = tokens_of(ids.shape[1])
    assert not is_divided
    assert torch.equal(found, expected["long"])


def test_long_prompts_of_known_caches_are_divided(pool: Pool, seed: int) -> None:
    step, model = prompt_of("llama-untied", seed, max_position_embeddings=1024)
    least = token_division.LEAST_PROMPT
    ids = torch.randint(step.config.vocab_size, (2, least + 7), generator=torch.Generator().manual_seed(seed))
    step.batch = {"input_ids": ids}
    with lifted_casts():
        expected = {
            name: model.generate(ids[:, :length], max_new_tokens=3, do_sample=False)
            for name, length in {"long": least + 7, "short": least - 1}.items()
        }
    pool.run(2, check_lengths, step, expected)


def check_without_gradients(step: Step) -> None:
    """Evaluation in training mode, with checkpointing on."""
    for reentrant in (False, True):
        model = context_model(step, 2).train()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        with dividing_short_prompts() as counts, torch.no_grad(), lifted_casts():
            output = model(**step.batch)
        assert counts["exchange"]
        assert not differences("loss", output.loss, step.value, TOLERANCE)
        assert not differences("logits", output.logits, step.outputs["logits"], TOLERANCE)


def test_losses_without_gradients_match_transformers(pool: Pool, seed: int) -> None:
    pool.run(2, check_without_gradients, reference_step("LlamaForCausalLM", llama(), seed))


# Calls ----------------------------------------------------------------------------------------------------------------


def check_caches(step: Step) -> None:
    """A call that asks for a cache, or that continues one, computes whole hidden states."""
    model = context_model(step, 2).train()
    with lifted_casts(), counting_exchanges() as counts:
        first = model(input_ids=step.batch["input_ids"][:, :4], use_cache=True)
    cache = {name: value for name, value in first.items() if name in CACHES}
    assert not counts
    assert cache
    assert type(next(iter(cache.values())).layers[0].keys) is Tensor
    with lifted_casts(), counting_exchanges() as counts:
        second = model(input_ids=step.batch["input_ids"][:, 4:], **cache)
    assert not counts
    logits = torch.cat((first.logits, second.logits), 1)
    lines = differences("logits", logits.detach(), step.outputs["logits"], TOLERANCE)
    assert not lines, "\n".join(lines)
    with counting_exchanges() as counts:
        divided = model(**step.batch)
    assert counts
    assert not {*CACHES} & {name for name, value in divided.items() if value is not None}


def test_caches_are_of_whole_hidden_states(pool: Pool, seed: int) -> None:
    ids = zoo.batch("LlamaForCausalLM", llama(), seed)["input_ids"]
    pool.run(2, check_caches, reference_step("LlamaForCausalLM", llama(), seed, batch={"input_ids": ids}))


def check_inputs(step: Step) -> None:
    """Ranks that divide tokens get the same batch."""
    model = context_model(step, 2).train()
    batch = {**step.batch, "input_ids": step.batch["input_ids"] + model.mesh.cp.rank}
    with pytest.raises(ValueError, match="input_ids"):
        model(**batch)


def test_other_batches_of_ranks_of_a_replica_are_refused(pool: Pool, seed: int) -> None:
    pool.run(2, check_inputs, reference_step("LlamaForCausalLM", llama(), seed))


def check_attentions(step: Step) -> None:
    model = context_model(step, 2, attn_implementation="eager").train()
    lines = step_differences(model, step)
    assert not lines, "\n".join(lines)


def test_attention_weights_are_whole(pool: Pool, seed: int) -> None:
    batch = {**zoo.batch("LlamaForCausalLM", llama(), seed), "output_attentions": True}
    options = {"attn_implementation": "eager"}
    pool.run(2, check_attentions, reference_step("LlamaForCausalLM", llama(), seed, batch=batch, **options))


@pytest.mark.parametrize("ignored", [0, 4, 9])
def test_losses_of_ignored_labels_match_transformers(pool: Pool, ignored: int, seed: int) -> None:
    """All labels of a rank may be ignored. Gradients of a sum are of the sum."""
    batch = zoo.batch("LlamaForCausalLM", llama(), seed)
    batch["labels"] = batch["labels"].clone()
    batch["labels"][:, :ignored] = -100
    batch["labels"][0, -1] = 3
    batch["num_items_in_batch"] = torch.tensor(7) if ignored else 7
    pool.run(2, check_step, reference_step("LlamaForCausalLM", llama(), seed, batch=batch), 2)


def check_autocast(step: Step) -> None:
    losses = []
    for size in (1, 2):
        cls: Any = registry.find(step.name)
        model = cls.from_config_with_parallel(step.config, context_parallel_size=size, seed=0).train()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**step.batch).loss
        loss.backward()
        losses.append([loss.detach(), *(param.grad for param in model.parameters())])
    for own, whole in zip(*losses, strict=True):
        assert own.dtype == torch.float32
        assert torch.allclose(own, whole, atol=0.02, rtol=0.1)


@pytest.mark.parametrize(
    "variant", ["llama-untied", "gpt2", *(pytest.param(kind, marks=pytest.mark.zoo) for kind in ("lfm2", "mamba2"))]
)
def test_step_with_autocast_is_near_one_process(pool: Pool, variant: str, seed: int) -> None:
    name = zoo.lm_head(variant)
    config = zoo.config(variant)
    pool.run(2, check_autocast, reference_step(name, config, seed, torch.float32))


def count_step(config: Any, seed: int) -> list[Counter[str]]:
    cls: Any = registry.find("LlamaForCausalLM")
    model = cls.from_config_with_parallel(config, context_parallel_size=2, seed=seed, check_inputs=False)
    batch = zoo.batch("LlamaForCausalLM", config, seed, torch.float32)
    with counting_exchanges() as forward:
        loss = model(**batch).loss
    with counting_exchanges() as backward:
        loss.backward()
    return [forward, backward]


def test_block_makes_two_exchanges_and_one_sum_of_gradients(pool: Pool, seed: int) -> None:
    """Query, key and value are one message, and the output is another one."""
    config = llama()
    blocks = config.num_hidden_layers
    for forward, backward in pool.run(2, count_step, config, seed):
        assert forward == {"exchange": 2 * blocks}
        assert backward == {"sum": blocks}


def elements_of_sums(config: Any, seed: int, over: str) -> list[int]:
    """Return the number of elements of each sum of a step over the cp axis."""
    cls: Any = registry.find("LlamaForCausalLM")
    model = cls.from_config_with_parallel(config, context_parallel_size=2, seed=seed)
    fully_sharded(model, over)
    elements, right = list[int](), context_parts.reduce_fresh

    def counted(axis: Any, x: Tensor) -> Tensor:
        elements.append(x.numel())
        return right(axis, x)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(context_parts, "reduce_fresh", counted)
        model(**zoo.batch("LlamaForCausalLM", config, seed, torch.float32)).loss.backward()
    return elements


def test_blocks_sharded_over_context_send_their_gradients_once(pool: Pool, seed: int) -> None:
    """FSDP2 reduces them. Ranks exchange only which parameters have a gradient."""
    config = llama()
    (whole, *_), (flags, *_) = (pool.run(2, elements_of_sums, config, seed, over) for over in (REPLICAS, COPIES))
    assert len(whole) == len(flags) == config.num_hidden_layers
    assert all(count == 9 for count in flags)  # seven matrices and two norms
    assert min(whole) > 1000


def check_fully_sharded_prompts(step: Step) -> None:
    model = fully_sharded(context_model(step, 2), COPIES).eval()
    with dividing_short_prompts() as counts, torch.no_grad(), lifted_casts():
        output = model(**step.batch)
    assert counts["exchange"]
    assert not differences("loss", output.loss, step.value, TOLERANCE)
    assert not differences("logits", output.logits, step.outputs["logits"], TOLERANCE)


def test_prompts_of_fully_sharded_blocks_are_divided(pool: Pool, seed: int) -> None:
    pool.run(2, check_fully_sharded_prompts, reference_step("LlamaForCausalLM", llama(), seed))


def count_messages(config: Any, seed: int) -> Counter[str]:
    """Count all collectives of a step over the cp axis."""
    cls: Any = registry.find("LlamaForCausalLM")
    model = cls.from_config_with_parallel(config, context_parallel_size=2, seed=seed, check_inputs=False)
    batch = zoo.batch("LlamaForCausalLM", config, seed, torch.float32)
    counts: Counter[str] = Counter()

    def counted(name: str, function: Any) -> Any:
        def call(axis: Any, *args: Any, **kwargs: Any) -> Any:
            counts[name] += axis is model.mesh.cp
            return function(axis, *args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for module, names in {
            autograd_collectives: ("all_gather", "all_to_all", "reduce_fresh", "reduce_scatter", "all_reduce"),
            context_parts: ("reduce_fresh",),
        }.items():
            for name in names:
                patch.setattr(module, name, counted(name, getattr(module, name)))
        model(**batch).loss.backward()
    return counts


def test_step_communicates_little_outside_of_blocks(pool: Pool, seed: int) -> None:
    """The sum of the loss, the gradients of norm and head, and the gathered gradient of the embeddings."""
    config = llama()
    blocks = config.num_hidden_layers
    for counts in pool.run(2, count_messages, config, seed):
        assert counts == {"all_to_all": 4 * blocks, "reduce_fresh": blocks + 3, "all_gather": 1}


def elements_of_sums_of_shards(config: Any, seed: int) -> list[int]:
    """Return the number of elements of each sum of a step over the tp axis."""
    cls: Any = registry.find("Lfm2ForCausalLM")
    model = cls.from_config_with_parallel(config, 2, context_parallel_size=2, seed=seed, check_inputs=False)
    elements, right = list[int](), autograd_collectives.reduce_fresh

    def counted(axis: Any, x: Tensor) -> Tensor:
        elements.extend([x.numel()] if axis is model.mesh.tp else [])
        return right(axis, x)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(autograd_collectives, "reduce_fresh", counted)
        model(**zoo.batch("Lfm2ForCausalLM", config, seed, torch.float32)).loss.backward()
    return sorted(elements)


def test_mixers_sum_the_tokens_of_a_rank_over_shards(pool: Pool, seed: int) -> None:
    """Once forward, once backward. Query, key and value of attention sum their gradients separately."""
    of_mixers, of_attention = (
        pool.run(4, elements_of_sums_of_shards, zoo.config("lfm2", layer_types=[kind, "full_attention"]), seed)
        for kind in ("conv", "full_attention")
    )
    for mixer, attention in zip(of_mixers, of_attention, strict=True):
        assert {*mixer} == {*attention}
        assert len(attention) - len(mixer) == 2


def saved_bytes(model: Any, batch: Mapping[str, Any]) -> int:
    """Return the bytes that blocks save for their backward pass, without parameters."""
    running, saved, kept = [0], dict[int, int](), list[Any]()
    own = {each.untyped_storage().data_ptr() for each in (*model.parameters(), *model.buffers())}
    for stack in model.plan(model.config).blocks:
        for block in model.get_submodule(model._prefix() + stack).children():
            block.register_forward_pre_hook(lambda *_: running.append(1))
            block.register_forward_hook(lambda *_: running.remove(1))

    def pack(x: Tensor) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            storage = x.untyped_storage()
        if len(running) > 1 and storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
            kept.append(x)  # so that no other tensor gets its memory
        return x

    with lifted_casts(), torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        model(**batch)
    return sum(saved.values())


def share_of_saved_bytes(step: Step, n: int, options: dict[str, Any], tp: int = 1) -> float:
    whole, part = (saved_bytes(context_model(step, size, tp, **options).train(), step.batch) for size in (1, n))
    return part / whole


@pytest.mark.drawn(19)
@pytest.mark.parametrize("model_type", TYPES)
def test_blocks_save_the_tokens_of_a_rank(pool: Pool, model_type: str, seed: int) -> None:
    """Three of nine tokens, and masks, positions and whole keys in addition, which count for much in tiny models."""
    step, options, text = drawn_step(zoo.main_head(model_type), model_type, seed, 3, None)
    for share in pool.run(3, share_of_saved_bytes, step, 3, options):
        assert share < 0.62, text


def share_of_long_rows(pool: Pool, name: str, config: Any, seed: int, tp: int = 1) -> float:
    """Return the largest share of a rank of two, or of two for each tensor-parallel rank."""
    ids = torch.randint(config.vocab_size, (2, 256), generator=torch.Generator().manual_seed(seed))
    step = reference_step(name, config, seed, batch={"input_ids": ids, "labels": ids})
    return max(pool.run(2 * tp, share_of_saved_bytes, step, 2, {}, tp))


def test_long_rows_save_little_more_than_the_tokens_of_a_rank(pool: Pool, seed: int) -> None:
    config = llama(num_hidden_layers=4, max_position_embeddings=256)
    assert share_of_long_rows(pool, "LlamaForCausalLM", config, seed) < 0.56


EVEN_RULES: dict[str, Any] = {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
EVEN_SPACES: dict[str, Any] = {"mamba_n_heads": 8, "mamba_n_groups": 4}
EVEN_MIXERS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("lara_mini", "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"), EVEN_RULES),
    **dict.fromkeys(("bamba", "falcon_h1", "granitemoehybrid"), EVEN_SPACES),
    "lfm3": {"num_attention_heads": 4, "num_key_value_heads": 4},
    "mamba2": {"num_heads": 8, "head_dim": 6, "n_groups": 4},
    "nemotron_h": {"mamba_num_heads": 8, "n_groups": 4},
}
"""Sizes of mixers that ranks divide evenly, where those of `zoo` are odd."""


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.zoo)])
@pytest.mark.parametrize("model_type", [kind for kind in MIXERS if hasattr(zoo.config(kind), "vocab_size")])
def test_mixers_save_the_heads_or_channels_of_a_rank(pool: Pool, model_type: str, tp: int, seed: int) -> None:
    config = zoo.config(model_type, **EVEN_MIXERS.get(model_type, {}))
    share = share_of_long_rows(pool, zoo.lm_head(model_type), config, seed, tp)
    assert share < (0.58 if tp == 1 else 0.6)  # masks are whole


# Refusals -------------------------------------------------------------------------------------------------------------


def construct(name: str, config: Any, sizes: tuple[int, ...], options: dict[str, Any]) -> None:
    cls: Any = registry.find(name)
    cls.from_config_with_parallel(config, *sizes, **{"context_parallel_size": 2, **options})


@pytest.mark.parametrize(
    ("variant", "sizes", "options", "message"),
    [
        ("llama", (1,), {"context_parallel_size": 0}, "context_parallel_size must be an integer of at least 1, got 0"),
        ("llama", (1,), {"context_parallel_size": 3}, "is not a multiple of tensor_parallel_size=1 x"),
        ("llama", (2,), {}, "x context_parallel_size=2 needs 4 processes"),
        ("llama", (1,), {"deploy": True}, "together with deploy=True"),
        ("llama", (1, 2), {"schedule": "zb-h1"}, "together with schedule='zb-h1'"),
        ("llama", (1, 2), {}, "x context_parallel_size=2 needs 4 processes"),
        ("llama", (2,), {"sequence_parallel": True}, "together with sequence_parallel=True"),
        ("llama", (2,), {"tensor_parallel_shares": [2, 1]}, "together with tensor_parallel_shares=[2, 1]"),
        ("llama", (1,), {"plan": "derive"}, "together with plan"),
        ("llama", (1,), {"attn_implementation": "flex_attention"}, "attn_implementation='flex_attention'"),
        ("reformer", (1,), {}, "does not support ReformerModelWithLMHead: it was not tested with reformer"),
        ("glm4v", (1,), {}, "does not support Glm4vVisionModel: its hidden states have no dimension of rows"),
        ("rwkv", (1,), {}, "RwkvForCausalLM: it was not tested with rwkv, see column cp of docs/models.md; leave"),
        ("qwen3_next", (2,), {}, "=2 is more than the 1 heads of each Qwen3NextGatedDeltaNet on a rank of tensor_para"),
        ("nemotron_h", (2,), {"context_parallel_size": 3}, "=3 is more than the 2 heads of each NemotronHMamba2Mixer"),
        ("qwen3_next", (1,), {"context_parallel_size": 4}, "=4 is more than the 3 heads of each Qwen3NextGatedDeltaN"),
    ],
)
def test_unsupported_arguments_are_refused(
    pool: Pool, variant: str, sizes: tuple[int, ...], options: dict[str, Any], message: str
) -> None:
    cp = options.get("context_parallel_size", 2)
    ranks = cp * sizes[0] if variant in MIXERS else 4 if cp > 2 else 2
    name = "Glm4vVisionModel" if variant == "glm4v" else zoo.lm_head(variant)
    config = zoo.config_of(name, zoo.config(variant))
    for error in pool.run(ranks, construct, name, config, sizes, dict(options), expect=ValueError):
        assert message in str(error)


def refused_calls(config: Any) -> None:
    cls: Any = registry.find("LlamaForCausalLM")
    batch = zoo.batch("LlamaForCausalLM", config, 0, torch.float32)

    def make() -> Any:
        return cls.from_config_with_parallel(config, context_parallel_size=2, seed=0)

    model = make()
    model.set_attn_implementation("flex_attention")
    with pytest.raises(ValueError, match="does not support attn_implementation='flex_attention'"):
        model(**batch)
    model = make()
    with pytest.raises(RuntimeError, match="once_differentiable"):
        second_derivatives(model, batch)


def second_derivatives(model: Any, batch: Any) -> None:
    grads = torch.autograd.grad(model(**batch).loss, list(model.parameters()), create_graph=True)
    sum((grad.square().sum() for grad in grads), start=torch.zeros(())).backward()


def test_unsupported_wrappers_are_refused(pool: Pool) -> None:
    pool.run(2, refused_calls, zoo.config("llama", attn_implementation="eager"))


def refused_meshes(config: Any) -> None:
    """Two replicas of two ranks that divide tokens."""
    cls: Any = registry.find("LlamaForCausalLM")
    batch = zoo.batch("LlamaForCausalLM", config, 0, torch.float32)

    def make() -> Any:
        return cls.from_config_with_parallel(config, context_parallel_size=2, seed=0)

    remedy = r"mesh=model\.mesh\.device_mesh\[\"dp\"\]\), or .*mesh=model\.mesh\.dp_cp_mesh\)"
    for names in ("cp", ("dp", "cp")):
        model = make()
        with pytest.raises(ValueError, match=f"fully_shard over ranks .* would mix .*{remedy}"):
            fully_shard(model, mesh=model.mesh.device_mesh[names])
        model = make()
        for layer in model.model.layers:
            fully_shard(layer, mesh=model.mesh.device_mesh[names])
        with pytest.raises(ValueError, match=f"fully_shard over ranks .* would mix .*{remedy}"):
            model(**batch)
    model = make()
    fully_shard(model.model.layers[1].mlp, mesh=model.mesh.dp_cp_mesh)
    with pytest.raises(ValueError, match="fully_shard of mlp, a part of a LlamaDecoderLayer: shard whole blocks"):
        model(**batch)


def test_fully_shard_over_other_ranks_is_refused(pool: Pool) -> None:
    pool.run(4, refused_meshes, zoo.config("llama"))
