"""Mixtures of experts: routers, auxiliary loss, experts without tokens, implementations, and checkpoints on the hub."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.integrations import moe
from transformers.utils.output_capturing import OutputRecorder

from oslo_models import registry
from oslo_models.checkpoint import CheckpointError
from oslo_models.cli.convert import convert
from oslo_models.cli.main import main
from oslo_models.layers.experts import ParallelExperts

from support import ROOT, pipelines, zoo
from support.float64 import lifted_casts
from support.pool import Pool
from support.reference import Step, full_gradients, full_parameters, reference_model, saved_step, step_differences

pytestmark = pytest.mark.drawn(26, of="file")

Sizes = tuple[int, int]
"""The tensor-parallel and the expert-parallel size."""
NAMES = {"mixtral": "MixtralForCausalLM", "qwen2_moe": "Qwen2MoeForCausalLM", "glm4_moe": "Glm4MoeForCausalLM"}


def check_step(step: Step, folder: Path, tp: int, options: dict[str, Any]) -> None:
    cls: Any = registry.find(step.name)
    model = cls.from_pretrained_with_parallel(folder, tp, gather_logits=True, **options).train()
    lines = step_differences(model, step)
    assert not lines, "\n".join(lines)


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
def test_step_with_auxiliary_loss_matches_on_three_ranks(
    pool: Pool, tmp_path: Path, seed: int, implementation: str
) -> None:
    config = zoo.config("mixtral", output_router_logits=True, router_aux_loss_coef=0.5)
    batch = pipelines.batch("MixtralForCausalLM", config, seed)
    step = saved_step("MixtralForCausalLM", config, seed, batch, tmp_path)
    for expert_parallel_size in (1, 3):
        options = {"experts_implementation": implementation, "expert_parallel_size": expert_parallel_size}
        pool.run(3, check_step, step, tmp_path, 3, options)


@pytest.mark.zoo
@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("switch_transformers", {"num_layers": 4, "num_decoder_layers": 4, "router_z_loss_coef": 0.5}),
        ("nllb-moe", {"expert_capacity": 2, "normalize_router_prob_before_dropping": True}),
    ],
)
def test_step_with_losses_of_the_routers_of_both_stacks_matches(
    pool: Pool, tmp_path: Path, seed: int, model_type: str, changes: dict[str, Any]
) -> None:
    name, config = zoo.main_head(model_type), zoo.config(model_type, router_aux_loss_coef=0.5, **changes)
    batch = {**zoo.batch(name, config, seed), "output_router_logits": True}
    step = saved_step(name, config, seed, batch, tmp_path)
    without = reference_model(name, config, seed)(**{**batch, "output_router_logits": False})
    assert abs(step.value - without.loss) > 0.01 and {"encoder_aux_loss", "decoder_aux_loss"} <= step.outputs.keys()
    pool.run(3, check_step, step, tmp_path, 3, {})


@pytest.mark.parametrize(
    "model_type",
    zoo.cases(
        (
            *(
                "mixtral",
                "gpt_oss",
                "nemotron_h",
                "qwen2_moe",
                "axk1",
                "deepseek_v32",
                "zaya",
                "inkling_text",
                "inkling2_text",
            ),
            *("deepseek_v4", "dots3_note_text", "llama4_text", "longcat_flash", "minimax", "minimax_m3_vl_text"),
            *("hy_v4", "qwen4_exp_text", "lara_mini", "inkling2_loop_text", "hy_v4_vl_text"),
        )
    ),
)
def test_experts_over_a_part_of_the_ranks_match(pool: Pool, tmp_path: Path, seed: int, model_type: str) -> None:
    """Five experts over two groups of two ranks."""
    name = zoo.main_head(model_type)
    config = zoo.config(model_type)
    step = saved_step(name, config, seed, pipelines.batch(name, config, seed), tmp_path)
    pool.run(4, check_step, step, tmp_path, 4, {"expert_parallel_size": 2})


@pytest.mark.parametrize("model_type", NAMES)
def test_experts_without_tokens_have_gradients_of_zero(pool: Pool, tmp_path: Path, seed: int, model_type: str) -> None:
    config = zoo.config(model_type, num_experts=9, num_local_experts=9, n_routed_experts=9)
    batch = zoo.batch(NAMES[model_type], config, seed)
    batch = {name: value[:1, -4:] for name, value in batch.items()}  # four tokens, two experts for each
    step = saved_step(NAMES[model_type], config, seed, batch, tmp_path)
    assert any(
        grad is not None and (grad == 0).flatten(1).all(1).any() for grad in step.gradients.values() if grad.dim() == 3
    )
    for expert_parallel_size in (1, 2):
        pool.run(2, check_step, step, tmp_path, 2, {"expert_parallel_size": expert_parallel_size})


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
def test_biases_and_interleaved_projections_match_with_expert_parallelism(
    pool: Pool, tmp_path: Path, seed: int, implementation: str
) -> None:
    config = zoo.config("gpt_oss")
    step = saved_step("GptOssForCausalLM", config, seed, pipelines.batch("GptOssForCausalLM", config, seed), tmp_path)
    options = {"expert_parallel_size": 3, "experts_implementation": implementation}
    pool.run(3, check_step, step, tmp_path, 3, options)


def test_experts_without_weights_count_on_one_rank(pool: Pool, tmp_path: Path, seed: int) -> None:
    name, config = "LongcatFlashForCausalLM", zoo.config("longcat_flash")
    step = saved_step(name, config, seed, pipelines.batch(name, config, seed), tmp_path)
    for expert_parallel_size in (1, 2):
        pool.run(2, check_step, step, tmp_path, 2, {"expert_parallel_size": expert_parallel_size})


def check_refusal_over_replicas(config: Any) -> None:
    cls: Any = registry.find("Llama4ForCausalLM")
    with pytest.raises(ValueError, match="each of these experts computes every token: use at most tensor_parallel_siz"):
        cls.from_config_with_parallel(config, 1, expert_parallel_size=2)


def test_experts_that_compute_every_token_are_not_over_replicas(pool: Pool) -> None:
    pool.run(2, check_refusal_over_replicas, zoo.config("llama4_text"))


@pytest.mark.parametrize(
    ("name", "sizes", "message"),
    [
        ("MixtralForCausalLM", (4, 3), r"expert_parallel_size=3 must divide tensor_parallel_size=4"),
        ("MixtralForCausalLM", (2, 3), r"expert_parallel_size=3 must divide .*=2, .* or be a multiple of it"),
        (
            "LlamaForCausalLM",
            (2, 2),
            "expert_parallel_size=2 is for mixtures of experts, and LlamaForCausalLM has no experts to divide",
        ),
        ("DogeForCausalLM", (2, 2), "DogeForCausalLM has no experts to divide"),
        ("MixtralForCausalLM", (1, 0), "expert_parallel_size must be an integer of at least 1"),
    ],
)
def test_sizes_of_expert_parallelism_that_do_not_fit_are_refused(
    name: str, sizes: tuple[int, int], message: str
) -> None:
    cls: Any = registry.find(name)
    variants = {"MixtralForCausalLM": "mixtral", "LlamaForCausalLM": "llama", "DogeForCausalLM": "doge-experts"}
    config = zoo.config(variants[name])
    with pytest.raises(ValueError, match=message):
        cls.from_config_with_parallel(config, sizes[0], expert_parallel_size=sizes[1])


def check_grouped_products(expert_parallel_size: int) -> None:
    """On every rank: local experts use torch's grouped matrix products by default and in bfloat16, also in training.

    The GPU case uses fake GPU tensors and a stand-in for the device capability that the code queries.
    """
    for model_type in ("mixtral", "gpt_oss"):
        cls: Any = registry.find(zoo.lm_head(model_type))
        config = zoo.config(model_type, intermediate_size=16)
        given = {"expert_parallel_size": expert_parallel_size, "dtype": torch.bfloat16}
        model = cls.from_config_with_parallel(config, 2, **given, gather_logits=True)
        experts = next(module for module in model.modules() if isinstance(module, ParallelExperts))
        loop = mock.patch.object(torch.ops.transformers, "grouped_mm_fallback", side_effect=AssertionError("a loop"))
        with mock.patch.object(F, "grouped_mm", wraps=F.grouped_mm) as grouped, loop:
            model(**pipelines.batch(cls.__name__, config, 1)).loss.backward()
        weights = [call.args[1] for call in grouped.call_args_list]
        count = experts.down_proj.shape[0]
        assert len(weights) == 2 * config.num_hidden_layers and all(len(weight) == count for weight in weights), [
            x.shape for x in weights
        ]
        assert count == (5 if expert_parallel_size == 1 else (3, 2)[model.mesh.tp.rank])
        assert weights[1].shape[1] == (8 if expert_parallel_size == 1 else 16)
        with FakeTensorMode(), mock.patch.object(torch.cuda, "get_device_capability", return_value=(8, 0)) as asked:
            x, offs = torch.empty(4, 24, device="cuda"), torch.empty(count, dtype=torch.int32, device="cuda")
            assert moe._can_use_grouped_mm(x, torch.empty(count, 24, 8, device="cuda"), offs) and asked.called


@pytest.mark.parametrize("expert_parallel_size", [1, 2])
def test_products_of_experts_are_grouped(pool: Pool, expert_parallel_size: int) -> None:
    pool.run(2, check_grouped_products, expert_parallel_size)


def refuse_short_rows() -> None:
    cls: Any = registry.find("MixtralForCausalLM")
    config = zoo.config("mixtral", intermediate_size=8)
    with pytest.raises(
        ValueError, match=r"shards the experts' down_proj .* to rows of \[3, 3, 2\] elements, .* of 4 in"
    ):
        cls.from_config_with_parallel(config, 3, dtype=torch.float32)
    model = cls.from_config_with_parallel(config, 3, dtype=torch.float32, experts_implementation="eager")
    assert model(input_ids=torch.ones(1, 3, dtype=torch.long)).logits.isfinite().all()


def test_shards_that_grouped_products_cannot_address_are_refused_by_name(pool: Pool) -> None:
    pool.run(3, refuse_short_rows)


def refuse_fewer_experts_than_ranks() -> None:
    cls: Any = registry.find("MixtralForCausalLM")
    with pytest.raises(ValueError, match="expert_parallel_size=3 is more than 2, the number of experts"):
        cls.from_config_with_parallel(
            zoo.config("mixtral", num_experts=2, num_local_experts=2), 3, expert_parallel_size=3
        )


def test_fewer_experts_than_ranks_are_refused_on_every_rank(pool: Pool) -> None:
    pool.run(3, refuse_fewer_experts_than_ranks)


def step_on_stages(given: pipelines.Case, tp: int, pp: int, options: dict[str, Any]) -> None:
    model = pipelines.case_on_stages(given, tp, pp, **options)
    loss = pipelines.run_micro_batches(model, given.batches[0][0])
    assert (loss - given.loss[0]).abs() < 1e-10, (loss, given.loss)
    lines = pipelines.gradient_differences(model, given.gradients)
    assert not lines, "\n".join(lines)


def case_with_auxiliary_loss(model_type: str, seed: int, rows: int, **changes: Any) -> pipelines.Case:
    """Return the mean loss of a batch and the mean auxiliary loss of its micro-batches, on one process."""
    name = zoo.main_head(model_type)
    given = {"num_hidden_layers": 4, "router_aux_loss_coef": 0.5, **changes}
    config = zoo.config(model_type, output_router_logits=True, **given)
    batch = pipelines.batch(name, config, seed)
    model = reference_model(name, config, seed)
    weights = {**model.state_dict(), **full_parameters(model)}  # buffers too
    with lifted_casts():
        loss = model(**batch, output_router_logits=False).loss
        parts = [{key: x[i : i + rows] for key, x in batch.items()} for i in range(0, pipelines.ROWS, rows)]
        for part in parts:
            loss = loss + 0.5 * model(**part).aux_loss / len(parts)
        loss.backward()
    return pipelines.Case(name, config, [[batch]], weights, [loss.detach()], full_gradients(model))


@pytest.mark.parametrize("rows", [1, pipelines.ROWS])
@pytest.mark.parametrize("sizes", [(1, 3), (2, 2)])
def test_auxiliary_loss_on_stages_is_the_mean_over_micro_batches(
    pool: Pool, seed: int, rows: int, sizes: tuple[int, int]
) -> None:
    given = case_with_auxiliary_loss("mixtral", seed, rows)
    pool.run(sizes[0] * sizes[1], step_on_stages, given, *sizes, {"micro_batch_size": rows})


@pytest.mark.stacks
@pytest.mark.drawn(2)
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("model_type", ["dbrx", "jetmoe"])
def test_auxiliary_loss_of_experts_that_are_not_stacked_matches_on_stages(
    pool: Pool, seed: int, model_type: str, tp: int
) -> None:
    """JetMoE has two routers per block; these types name both coefficients differently."""
    recorded = zoo.original(zoo.main_head(model_type))._can_record_outputs or {}
    if not isinstance(recorded.get("router_logits"), OutputRecorder):
        pytest.skip(f"transformers {transformers.__version__} returns no logits of its routers, or some twice")
    changes: dict[str, Any] = {"num_hidden_layers": 2, "aux_loss_coef": 0.5}
    if model_type == "dbrx":
        changes = {"n_layers": 2, "ffn_config": {**zoo.MORE["dbrx"]["ffn_config"], "moe_loss_weight": 0.5}}
    given = case_with_auxiliary_loss(model_type, seed, 2, **changes)
    pool.run(2 * tp, step_on_stages, given, tp, 2, {"micro_batch_size": 2})


@pytest.mark.zoo
@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("minimax", {"layer_types": 2 * ["full_attention", "linear_attention"]}),
        (
            "minimax_m3_vl_text",
            {
                "layer_types": 2 * ["full_attention", "minimax_m3_sparse"],
                "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
            },
        ),
    ],
)
def test_auxiliary_loss_beside_blocks_of_two_kinds_matches_on_stages(
    pool: Pool, seed: int, model_type: str, changes: dict[str, Any]
) -> None:
    given = case_with_auxiliary_loss(model_type, seed, 2, **changes)
    for tp, pp in ((1, 3), (2, 2)):
        pool.run(tp * pp, step_on_stages, given, tp, pp, {"micro_batch_size": 2})


def test_auxiliary_loss_on_stages_without_routers_matches(pool: Pool, seed: int) -> None:
    """The first and the last block are dense, so the first and the last stage have no router."""
    given = case_with_auxiliary_loss("qwen3_moe", seed, 2, mlp_only_layers=[0, 3])
    pool.run(3, step_on_stages, given, 1, 3, {"micro_batch_size": 2, "blocks_per_stage": [1, 2, 1]})


def dense_on_stages(given: pipelines.Case) -> None:
    model = pipelines.case_on_stages(given, 1, 2, micro_batch_size=2)
    with pytest.raises(ValueError, match=r"output_router_logits=True: no block of this .* has a router; leave it out"):
        list(model(**given.batches[0][0], output_router_logits=True))


def test_auxiliary_loss_of_a_configuration_without_experts_is_refused(pool: Pool, seed: int) -> None:
    given = pipelines.case("GraniteMoeHybridForCausalLM", zoo.config("granitemoehybrid", num_local_experts=0), seed)
    pool.run(2, dense_on_stages, given)


def test_the_documentation_names_types_without_auxiliary_loss_on_stages() -> None:
    refused = set()
    for name in (name for kind in registry.ARCHITECTURES for name in registry.model_classes(kind)):
        cls: Any = registry.find(name)
        with_routers = "output_router_logits" in inspect.signature(zoo.original(name).forward).parameters
        recorded = getattr(cls, "_can_record_outputs", None) or {}
        rules = cls.plan(cls.config_class()).pipeline
        if with_routers and "router_logits" not in recorded and not rules.single_stage_reason:
            refused.add(name)
    text = " ".join((ROOT / "docs/guides/experts.md").read_text().split())
    (listed,) = re.findall(r"`output_router_logits=True` is refused on stages: (.*?)\.", text)
    assert refused == set(re.findall(r"`(\w+)`", listed))


def test_scaled_embeddings_are_scaled_on_the_first_stage_only(pool: Pool, seed: int) -> None:
    config = zoo.config("afmoe", mup_enabled=True)
    given = pipelines.case("AfmoeForCausalLM", config, seed)
    pool.run(2, step_on_stages, given, 1, 2, {"micro_batch_size": 2})


def router_logits_on_stages(given: pipelines.Case, expected: list[Any]) -> None:
    model = pipelines.case_on_stages(given, 1, 2, share_logits=True, micro_batch_size=pipelines.ROWS)
    with torch.no_grad(), lifted_casts():
        (output,) = model(**given.batches[0][0])
        generated = model.generate(torch.ones(1, 3, dtype=torch.long), min_new_tokens=2, max_new_tokens=2)
    assert generated.shape == (1, 5)
    if model.stage.is_last:
        assert all((a - b).abs().max() < 1e-10 for a, b in zip(output.router_logits, expected, strict=True))


def test_last_stage_returns_the_logits_of_all_routers(pool: Pool, seed: int) -> None:
    given = case_with_auxiliary_loss("mixtral", seed, pipelines.ROWS)
    model = reference_model(given.name, given.config, seed)
    with torch.no_grad(), lifted_casts():
        expected = [logits.clone() for logits in model(**given.batches[0][0]).router_logits]
    pool.run(2, router_logits_on_stages, given, expected)


def check_initial_weights(expected: dict[str, torch.Tensor], tp: int, ep: int) -> None:
    config = zoo.config("mixtral")
    cls: Any = registry.find("MixtralForCausalLM")
    eager = {"experts_implementation": "eager"}  # grouped matrix products cannot address these shards
    model = cls.from_config_with_parallel(config, tp, seed=5, expert_parallel_size=ep, **eager)
    for name, param in model.named_parameters():
        assert param.equal(model.layouts[name].shard(expected[name], model.mesh.tp.rank)), name


def test_random_experts_do_not_depend_on_the_number_of_ranks(pool: Pool) -> None:
    cls: Any = registry.find("MixtralForCausalLM")
    expected = cls.from_config_with_parallel(zoo.config("mixtral"), seed=5).state_dict()
    stack = expected["model.layers.0.mlp.experts.gate_up_proj"]
    assert len({expert.sum().item() for expert in stack}) == len(stack)
    for tp, ep in ((2, 1), (3, 1), (3, 3), (4, 2)):
        pool.run(tp, check_initial_weights, dict(expected), tp, ep)


def test_checkpoint_that_lacks_an_expert_is_refused_by_name(pool: Pool, tmp_path: Path) -> None:
    zoo.original("MixtralForCausalLM")(zoo.config("mixtral")).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.block_sparse_moe.experts.3.w2.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"lacks 1 of the 5 matrices .*layers\.1.*experts\.3\.w2\.weight"):
        registry.find("MixtralForCausalLM").from_pretrained_with_parallel(tmp_path)  # type: ignore[attr-defined]


def refuse_shards_that_one_rank_cannot_address() -> None:
    """Otherwise that rank raises torch's error in its first forward, and the other waits for it."""
    cls: Any = registry.find("MixtralForCausalLM")
    config = zoo.config("mixtral", intermediate_size=36)
    with pytest.raises(
        ValueError, match=r"down_proj .* to rows of \[20, 16\] .*take multiples of 8 in torch\.bfloat16"
    ):
        cls.from_config_with_parallel(config, 2, dtype=torch.bfloat16)
    cls.from_config_with_parallel(config, 2, dtype=torch.bfloat16, experts_implementation="eager")


def test_shards_that_grouped_products_cannot_address_are_refused_on_all_ranks(pool: Pool) -> None:
    pool.run(2, refuse_shards_that_one_rank_cannot_address)


@pytest.mark.parametrize(
    ("expert", "says"),
    [
        (torch.zeros(24, 40), r"experts\.3\.w2\.weight is a \(24, 40\) .*experts\.0\.w2\.weight a \(24, \d+\)"),
        (None, r"experts\.3\.w2\.weight is a .* of torch\.int32, .* of torch\.float32: both are in .*down_proj"),
    ],
)
def test_checkpoint_with_another_kind_of_expert_is_refused_by_name(
    tmp_path: Path, expert: torch.Tensor | None, says: str
) -> None:
    """Without the check, a larger matrix would be read in part, and integers would be read as weights."""
    zoo.original("MixtralForCausalLM")(zoo.config("mixtral")).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.block_sparse_moe.experts.3.w2.weight"
    tensors[name] = tensors[name].int() if expert is None else expert
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=says):
        registry.find("MixtralForCausalLM").from_pretrained_with_parallel(tmp_path)  # type: ignore[attr-defined]


def save_merged(name: str, source: Path, folder: Path, tp: int, pp: int, ep: int) -> None:
    cls: Any = registry.find(name)
    first = cls.from_pretrained_with_parallel(source, tp, pp, expert_parallel_size=ep)
    first.save_pretrained_with_parallel(folder / "split")
    first.save_pretrained_with_parallel(folder / "merged from experts", save_with_merging=True)
    other = cls.from_pretrained_with_parallel(folder / "split", 4, expert_parallel_size=2 if ep == tp else 4)
    other.save_pretrained_with_parallel(folder / "split again")
    again = cls.from_pretrained_with_parallel(folder / "split again", 1, tp * pp)
    again.save_pretrained_with_parallel(folder / "merged", save_with_merging=True, max_shard_size="20KB")


FOUR_BLOCKS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_hidden_layers": 4},
    "llama4_text": {"num_hidden_layers": 4, "no_rope_layers": [1, 0, 1, 0], "moe_layers": [1, 3]},
    "longcat_flash": {"num_layers": 4},
    "dbrx": {"n_layers": 4},
    "switch_transformers": {"num_layers": 4, "num_decoder_layers": 4},
    "jetmoe": {"num_hidden_layers": 4, "num_key_value_heads": 4},
    "nllb-moe": {"encoder_layers": 4, "decoder_layers": 4},
}


@pytest.mark.parametrize("sizes", [(2, 2, 2), (4, 1, 2)])
@pytest.mark.parametrize("model_type", zoo.cases(FOUR_BLOCKS))
def test_experts_survive_changes_of_sizes_byte_for_byte(
    pool: Pool, tmp_path: Path, model_type: str, sizes: tuple[int, int, int]
) -> None:
    name = zoo.main_head(model_type)
    model = zoo.original(name)(zoo.config(model_type, **FOUR_BLOCKS[model_type]))
    model.save_pretrained(tmp_path / "hub", max_shard_size="20KB")
    pool.run(4, save_merged, name, tmp_path / "hub", tmp_path, *sizes)
    assert len(list((tmp_path / "hub").glob("*.safetensors"))) > 3
    expected, merged = read_all(tmp_path / "hub"), read_all(tmp_path / "merged")
    assert expected.keys() == merged.keys()
    assert all(expected[name].equal(merged[name]) for name in expected)
    merged = read_all(tmp_path / "merged from experts")
    assert expected.keys() == merged.keys()
    assert all(expected[name].equal(merged[name]) for name in expected)


def reshard_alternating(name: str, source: Path, folder: Path, tp: int, ep: int) -> None:
    cls: Any = registry.find(name)
    first = cls.from_pretrained_with_parallel(source, tp, expert_parallel_size=ep)
    first.save_pretrained_with_parallel(folder / "split")
    first.save_pretrained_with_parallel(folder / "merged", save_with_merging=True)
    other = cls.from_pretrained_with_parallel(folder / "split", tp, expert_parallel_size=1 if ep == tp else tp)
    other.save_pretrained_with_parallel(folder / "merged again", save_with_merging=True)


@pytest.mark.parametrize("sizes", [(2, 1), (3, 3), (4, 2)])
def test_experts_with_alternating_projections_are_saved_as_by_transformers(
    pool: Pool, tmp_path: Path, seed: int, sizes: Sizes
) -> None:
    """Inkling 2's checkpoints interleave the rows of gate and up projections."""
    name = zoo.main_head("inkling2_text")
    torch.manual_seed(seed)
    zoo.original(name)(zoo.config("inkling2_text", moe_intermediate_size=24)).save_pretrained(tmp_path / "hub")
    pool.run(sizes[0], reshard_alternating, name, tmp_path / "hub", tmp_path, *sizes)
    expected = read_all(tmp_path / "hub")
    assert any(name.endswith("experts.w13_weight") for name in expected)
    for folder in ("merged", "merged again"):
        merged = read_all(tmp_path / folder)
        assert expected.keys() == merged.keys()
        assert all(expected[name].equal(merged[name]) for name in expected)


@pytest.mark.parametrize("model_type", ["mixtral", "gpt_neox-in-turn", "hrm_text"])
def test_command_line_merges_to_the_file_of_transformers(pool: Pool, tmp_path: Path, model_type: str) -> None:
    zoo.original(zoo.main_head(model_type))(zoo.config(model_type)).save_pretrained(tmp_path / "hub")
    pool.run(2, convert, tmp_path / "hub", tmp_path / "split", 2)  # what `reshard` runs on each rank
    assert main(["merge", str(tmp_path / "split"), str(tmp_path / "merged")]) == 0
    file = "model.safetensors"
    assert (tmp_path / "merged" / file).read_bytes() == (tmp_path / "hub" / file).read_bytes()


def read_all(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def load_dequantised(folder: Path, merged: Path) -> None:
    cls: Any = registry.find("DeepseekV3ForCausalLM")
    model = cls.from_pretrained_with_parallel(folder, 2, dequantize=True, dtype=torch.float32)
    model.save_pretrained_with_parallel(merged, save_with_merging=True)


def test_experts_in_fp8_blocks_are_dequantised_one_by_one(pool: Pool, tmp_path: Path) -> None:
    """As in DeepSeek-V3's checkpoint."""
    config = zoo.config("deepseek_v3", moe_intermediate_size=16)
    zoo.original("DeepseekV3ForCausalLM")(config).save_pretrained(tmp_path)
    expected = load_file(tmp_path / "model.safetensors")
    stored = dict(expected)
    for name in [name for name in expected if ".experts." in name]:
        rows, columns = expected[name].shape
        values = expected[name].to(torch.float8_e4m3fn)
        scales = torch.rand(-(-rows // 8), -(-columns // 8))
        grid = scales.repeat_interleave(8, 0).repeat_interleave(8, 1)[:rows, :columns]
        expected[name], stored[name] = values.float() * grid, values
        stored[f"{name}_scale_inv"] = scales
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    content = json.loads((tmp_path / "config.json").read_text())
    content["quantization_config"] = {
        "quant_method": "fp8",
        "weight_block_size": [8, 8],
        "activation_scheme": "dynamic",
    }
    (tmp_path / "config.json").write_text(json.dumps(content))
    pool.run(2, load_dequantised, tmp_path, tmp_path / "merged")
    merged = read_all(tmp_path / "merged")
    assert expected.keys() == merged.keys()
    assert all(expected[name].equal(merged[name]) for name in expected)


def check_step_with_hook(step: Step, folder: Path) -> None:
    """Code that reads the output of shared experts gets the full output."""
    cls: Any = registry.find(step.name)
    model = cls.from_pretrained_with_parallel(folder, 2, gather_logits=True).train()
    outputs: list[torch.Tensor] = []
    handle = model.model.layers[1].mlp.shared_experts.register_forward_hook(lambda *args: outputs.append(args[-1]))
    lines = step_differences(model, step)
    assert not lines, "\n".join(lines)
    handle.remove()
    of_ranks = pipelines.gather_from_all_ranks([output.detach() for output in outputs])
    assert outputs and all((a - b).abs().max() < 1e-10 for a, b in zip(*of_ranks, strict=True))


@pytest.mark.parametrize("model_type", zoo.cases(("glm4_moe", "inkling_text")))
def test_hooks_on_shared_experts_see_full_outputs(pool: Pool, tmp_path: Path, seed: int, model_type: str) -> None:
    name, config = zoo.main_head(model_type), zoo.config(model_type)
    step = saved_step(name, config, seed, pipelines.batch(name, config, seed), tmp_path)
    pool.run(2, check_step_with_hook, step, tmp_path)


def refuse_routers_of_one_stage(name: str, variant: str) -> None:
    cls: Any = registry.find(name)
    model = cls.from_config_with_parallel(zoo.config(variant), pipeline_parallel_size=2, seed=0)
    ids = torch.ones(1, 4, dtype=torch.long)
    with torch.no_grad():
        list(model(input_ids=ids, labels=ids, output_router_logits=False))
        with pytest.raises(ValueError, match=r"would leave out the routers of the other pipeline stages"):
            list(model(input_ids=ids, labels=ids, output_router_logits=True))


@pytest.mark.parametrize(
    ("name", "variant"),
    [
        ("NllbMoeForConditionalGeneration", "nllb-moe"),
        ("SwitchTransformersForConditionalGeneration", "switch_transformers"),
    ],
)
def test_auxiliary_loss_without_the_routers_of_other_stages_is_refused(pool: Pool, name: str, variant: str) -> None:
    pool.run(2, refuse_routers_of_one_stage, name, variant)
