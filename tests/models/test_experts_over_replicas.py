"""Experts over replicas and ranks that divide tokens: all-to-all sends tokens to their experts' ranks, and back."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

from oslo_models import registry, tensor_parallel
from oslo_models.checkpoint import CheckpointError
from oslo_models.distributed import autograd_collectives
from oslo_models.distributed.sharded_tensor import local_tensor
from oslo_models.layers import experts as layer

from support import pipelines, zoo
from support.drawn_steps import shortened
from support.experts import TOLERANCE, average_gradients, load, own_differences, saved_case
from support.float64 import lifted_casts
from support.pool import Pool
from support.reference import make_optimizer, reference_model
from support.token_divisions import counting_exchanges, dividing_short_prompts


def take_steps(
    folder: Path, given: pipelines.Case, sizes: tuple[int, int, int], options: dict[str, Any], steps: int
) -> None:
    """Check loss, gradients and gradient norm of a step, and parameters after optimizer steps."""
    for optimizer in given.trained:
        model = load(folder, given, sizes, **options)
        stepper = make_optimizer(optimizer, model.gpu_parameters())
        for step in range(steps if optimizer == "AdamW" else 1):
            stepper.zero_grad()
            batch = given.batches[step][model.mesh.dp.rank]
            with lifted_casts():
                loss = model.train_batch(**batch)
            average_gradients(model)
            if step == 0:
                expected = given.loss[model.mesh.dp.rank]
                assert model.mesh.pp.rank < model.mesh.pp.size - 1 or (loss - expected).abs() < TOLERANCE
                gradients = pipelines.gradients_on_stage(model)
                assert not (lines := own_differences(model, "gradient of", gradients, given.gradients)), lines
                norms = [
                    model.clip_grad_norm_(1e9).item(),
                    float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)),
                ]
                assert all(abs(norm - given.norm) < 1e-9 for norm in norms), (norms, given.norm)
            stepper.step()
        own = {name: param.detach() for name, param in pipelines.stage_parameters(model).items()}
        lines = own_differences(model, f"{optimizer}: parameter", own, given.trained[optimizer])
        assert not lines, lines


AUXILIARY = {"output_router_logits": True, "router_aux_loss_coef": 0.5}


@pytest.mark.parametrize(
    ("model_type", "sizes", "replicas", "implementation"),
    [
        ("mixtral", (1, 1, 2), 4, "eager"),
        ("mixtral", (2, 1, 4), 2, "batched_mm"),
        ("glm4_moe", (2, 1, 4), 2, "eager"),
        ("mixtral", (4, 1, 2), 1, "eager"),
        pytest.param("mixtral", (1, 1, 4), 4, "grouped_mm", marks=pytest.mark.zoo),
        pytest.param("mixtral", (1, 2, 2), 2, "eager", marks=pytest.mark.zoo),
        pytest.param("gpt_oss", (1, 1, 2), 2, "eager", marks=pytest.mark.zoo),
        pytest.param("gpt_oss", (2, 1, 4), 2, "grouped_mm", marks=pytest.mark.zoo),
        pytest.param("qwen2_moe", (2, 1, 4), 2, "grouped_mm", marks=pytest.mark.zoo),
        pytest.param("deepseek_v3", (1, 1, 2), 2, "batched_mm", marks=pytest.mark.zoo),
        pytest.param("minimax", (1, 1, 2), 2, "eager", marks=pytest.mark.zoo),
        pytest.param("minimax", (2, 1, 4), 2, "batched_mm", marks=pytest.mark.zoo),
        pytest.param("minimax_m3_vl_text", (2, 1, 4), 2, "eager", marks=pytest.mark.zoo),
        pytest.param("deepseek_v4", (1, 1, 2), 2, "eager", marks=pytest.mark.zoo),
        pytest.param("deepseek_v4", (2, 1, 4), 2, "grouped_mm", marks=pytest.mark.zoo),
        pytest.param("longcat_flash", (1, 1, 2), 2, "eager", marks=pytest.mark.zoo),
        pytest.param("longcat_flash", (2, 1, 4), 2, "eager", marks=pytest.mark.zoo),
        pytest.param("zaya", (2, 1, 4), 2, "eager", marks=pytest.mark.zoo),
        pytest.param("qwen4_exp_text", (2, 1, 4), 2, "eager", marks=pytest.mark.zoo),
        pytest.param("inkling_text", (1, 1, 2), 2, "eager", marks=pytest.mark.zoo),
        pytest.param("inkling_text", (2, 1, 4), 2, "eager", marks=pytest.mark.zoo),
        pytest.param("inkling2_text", (2, 1, 4), 2, "eager", marks=pytest.mark.zoo),
    ],
)
def test_training_matches_one_process(
    pool: Pool,
    tmp_path: Path,
    seed: int,
    model_type: str,
    sizes: tuple[int, int, int],
    replicas: int,
    implementation: str,
) -> None:
    changes = AUXILIARY if model_type == "mixtral" else {}
    given = saved_case(tmp_path, model_type, seed, replicas, ("SGD", "AdamW"), **changes)
    options = {"experts_implementation": implementation, "micro_batch_size": pipelines.ROWS}
    pool.run(sizes[0] * sizes[1] * replicas, take_steps, tmp_path, given, sizes, options, pipelines.STEPS["AdamW"])


def wrap(model: Any, wrapper: str) -> Any:
    if wrapper != "FSDP2":
        return DistributedDataParallel(model.gpu_modules(), process_group=model.mpu.get_data_parallel_group())
    mesh, experts = model.mesh.device_mesh["dp"], set(model.expert_parameters())
    for block in model.model.layers:
        fully_shard(block, mesh=mesh, ignored_params=experts)
    return fully_shard(model, mesh=mesh, ignored_params=experts)


def optimizers(model: Any, wrapper: str) -> list[torch.optim.Optimizer]:
    """Experts over replicas need a separate optimizer where ZeRO shards the other states."""
    if wrapper != "ZeRO":
        return [torch.optim.SGD(model.gpu_parameters(), lr=0.01)]
    experts = set(model.expert_parameters())
    rest = [param for param in model.parameters() if param not in experts]
    group = model.mpu.get_data_parallel_group()
    sharded: Any = ZeroRedundancyOptimizer(rest, torch.optim.SGD, process_group=group, lr=0.01)
    return [sharded, *([torch.optim.SGD(experts, lr=0.01)] if experts else [])]


def step_in_wrapper(folder: Path, given: pipelines.Case, sizes: tuple[int, int, int], wrapper: str) -> None:
    """Check a step of SGD after two accumulated backward passes."""
    model = load(folder, given, sizes, experts_implementation="eager")
    wrapped = wrap(model, wrapper)
    steppers = optimizers(model, wrapper)
    with lifted_casts():
        for _ in range(2):
            (wrapped(**given.batches[0][model.mesh.dp.rank]).loss / 2).backward()
    norm = model.clip_grad_norm_(1e9).item()
    assert abs(norm - given.norm) < 1e-9, (norm, given.norm)
    for stepper in steppers:
        stepper.step()
    own = {name: param.detach() for name, param in model.named_parameters()}
    lines = own_differences(model, "parameter", own, given.trained["SGD"])
    assert not lines, lines


@pytest.mark.parametrize(
    ("wrapper", "sizes"),
    [
        *((wrapper, (1, 1, 2)) for wrapper in ("DDP", "FSDP2", "ZeRO")),
        *(
            pytest.param(wrapper, sizes, marks=pytest.mark.zoo)
            for wrapper in ("DDP", "FSDP2", "ZeRO")
            for sizes in ((2, 1, 4), (4, 1, 2))
        ),
    ],
)
def test_training_in_wrappers_of_torch_matches_one_process(
    pool: Pool, tmp_path: Path, seed: int, wrapper: str, sizes: tuple[int, int, int]
) -> None:
    given = saved_case(tmp_path, "mixtral", seed, 2, ("SGD",))
    pool.run(2 * sizes[0], step_in_wrapper, tmp_path, given, sizes, wrapper)


class Waits(TorchFunctionMode):
    """Notes the functions of torch for whose results the host would wait on a GPU."""

    NAMES = {"tolist", "item", "__bool__", "__int__", "cpu", "nonzero", "bincount", "masked_select", "unique", "tensor"}

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ in self.NAMES:
            self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def count_waits(config: Any) -> None:
    """Count the waits of each exchange, without the computation of the experts."""
    cls: Any = registry.find("MixtralForCausalLM")
    model = cls.from_config_with_parallel(config, expert_parallel_size=2, seed=0)
    exchanged, counted = layer.ParallelExperts._exchanged, []

    def noted(self: Any, *args: Any) -> Any:
        with Waits() as waits:
            output = exchanged(self, *args)
        counted.append(waits.names)
        return output

    def compute(self: Any, hidden_states: torch.Tensor, *args: Any) -> torch.Tensor:
        return hidden_states * 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer.ParallelExperts, "_exchanged", noted)
        patch.setattr(layer.ParallelExperts, "compute", compute)
        for _ in range(2):
            model(input_ids=torch.arange(12).view(2, 6) % config.vocab_size)
    layers = config.num_hidden_layers
    assert len(counted) == 2 * layers and counted[layers:] == [["tolist"]] * layers, counted


def test_host_waits_once_for_each_exchange_of_tokens(pool: Pool) -> None:
    pool.run(2, count_waits, zoo.config("mixtral"))


def test_selected_values_are_as_by_nonzero(seed: int) -> None:
    for count in (0, 1, 9):
        values, flags = torch.randint(99, (count,)), torch.rand(count) < 0.5
        assert torch.equal(layer._selected(values, flags, int(flags.sum())), values[flags.nonzero().flatten()])


def refuse_wrappers() -> None:
    cls: Any = registry.find("MixtralForCausalLM")
    model = cls.from_config_with_parallel(zoo.config("mixtral"), expert_parallel_size=2, seed=0)
    around = torch.nn.Sequential(model)
    with pytest.raises(ValueError, match=r"DistributedDataParallel would overwrite experts .*0\.model\.layers"):
        DistributedDataParallel(around)
    with pytest.raises(ValueError, match=r"leave them out by fully_shard\(\.\.\., ignored_params"):
        fully_shard(model, mesh=model.mesh.device_mesh["dp"])
    for module in (around, model, model.model.layers[0]):
        with pytest.raises(ValueError, match=r"FullyShardedDataParallel would take the shards of .*fully_shard\("):
            FullyShardedDataParallel(module, device_id=torch.device("cpu"))
    with pytest.raises(ValueError, match="ZeroRedundancyOptimizer would overwrite the experts"):
        ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    with pytest.raises(ValueError, match="sharded over several replicas, but matrix_optimizer"):
        model.matrix_optimizer(torch.optim.SGD, lr=0.1)
    with pytest.raises(ValueError, match=r"expert_parallel_size=3 divides the experts over groups of 3 replicas"):
        cls.from_config_with_parallel(zoo.config("mixtral"), expert_parallel_size=3)
    with pytest.raises(RuntimeError, match="this MixtralForCausalLM is already sharded"):
        tensor_parallel(model, ["cpu"] * 2)
    with pytest.raises(ValueError, match="over several replicas, and a deployed model has one"):
        cls.from_config_with_parallel(zoo.config("mixtral"), expert_parallel_size=2, deploy=True)


def test_wrappers_that_treat_experts_as_copies_are_refused_by_name(pool: Pool) -> None:
    pool.run(2, refuse_wrappers)


def refuse_wrappers_over_shards() -> None:
    cls: Any = registry.find("LlamaForCausalLM")
    model = cls.from_config_with_parallel(zoo.config("llama"), 2, seed=0)
    with pytest.raises(ValueError, match="FullyShardedDataParallel would take the shards of this LlamaForCausalLM"):
        FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    with pytest.raises(ValueError, match=r"fully_shard over ranks \[0, 1\] would mix .*\(tensor_parallel_size=2"):
        fully_shard(model)
    with pytest.raises(ValueError, match=r"fully_shard over ranks \[0, 1\] would mix .* hold model\.layers\.1\."):
        fully_shard(model.model.layers[1])


def test_fsdp_over_ranks_with_other_shards_is_refused(pool: Pool) -> None:
    pool.run(2, refuse_wrappers_over_shards)


def save_and_load_again(folder: Path, config: Any) -> None:
    cls: Any = registry.find("MixtralForCausalLM")
    model = cls.from_pretrained_with_parallel(folder / "hub", 1, 1, expert_parallel_size=4)
    for index, (tp, pp, ep) in enumerate([(2, 1, 4), (1, 2, 2), (2, 2, 1), (1, 1, 2)]):
        target = folder / str(index)
        model.save_pretrained_with_parallel(target)
        model = cls.from_pretrained_with_parallel(target, tp, pp, expert_parallel_size=ep)
        assert all(model.mesh.rank_in(layout) >= 0 for layout in model.layouts.values())
    model.save_pretrained_with_parallel(folder / "merged", save_with_merging=True)


def test_checkpoints_survive_changes_of_sizes_byte_for_byte(pool: Pool, tmp_path: Path) -> None:
    zoo.original("MixtralForCausalLM")(zoo.config("mixtral", num_hidden_layers=2)).save_pretrained(tmp_path / "hub")
    pool.run(4, save_and_load_again, tmp_path, None)
    assert len(list((tmp_path / "0").glob("pytorch_model_tp=0_pp=0_dp=*.bin"))) == 3
    name = "model.safetensors"
    assert (tmp_path / "merged" / name).read_bytes() == (tmp_path / "hub" / name).read_bytes()


def generate(folder: Path, prompts: list[torch.Tensor], lengths: list[int], expected: list[torch.Tensor]) -> None:
    cls: Any = registry.find("MixtralForCausalLM")
    model = cls.from_pretrained_with_parallel(folder, expert_parallel_size=2, experts_implementation="eager")
    rank = model.mesh.dp.rank
    for options in ({}, {"num_beams": 2}, {"use_cache": False}):
        with lifted_casts():
            own = model.generate(prompts[rank], max_new_tokens=lengths[rank], min_new_tokens=lengths[rank], **options)
        assert own.equal(expected[rank][tuple(options)]), (options, own, expected[rank])


def test_replicas_generate_texts_of_different_lengths(pool: Pool, tmp_path: Path, seed: int) -> None:
    given = saved_case(tmp_path, "mixtral", seed, 2)
    model = reference_model(given.name, given.config, seed).eval()
    prompts, lengths = [torch.randint(3, 60, (2, 3)), torch.randint(3, 60, (1, 6))], [2, 7]
    expected = []
    with lifted_casts():
        for prompt, length in zip(prompts, lengths, strict=True):
            expected.append({})
            for options in ({}, {"num_beams": 2}, {"use_cache": False}):
                more = {"max_new_tokens": length, "min_new_tokens": length, **options}
                expected[-1][tuple(options)] = model.generate(prompt, **more)
    pool.run(2, generate, tmp_path, prompts, lengths, expected)


def route_to(model: Any, expert: int) -> None:
    """Route all tokens to two successive experts, regardless of the router."""

    def choose(module: Any, args: Any, output: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        *others, index = output
        return *others, torch.stack([torch.full_like(index[:, 0], expert + choice) for choice in range(2)], -1)

    for block in model.model.layers:
        block.mlp.gate.register_forward_hook(choose)


def step_with_all_tokens_on_one_rank(folder: Path, given: pipelines.Case, tp: int, expert: int) -> None:
    model = load(folder, given, (tp, 1, 2), experts_implementation="eager")
    route_to(model, expert)
    sizes: list[int] = []

    def counted(axis: Any, tensors: Any, sent: Any, received: Any) -> Any:
        sizes.append(sum(received))
        return autograd_collectives.exchange(axis, tensors, sent, received)

    with lifted_casts(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer, "exchange", counted)
        loss = model.train_batch(**given.batches[0][model.mesh.dp.rank])
    tokens = sum(batch["input_ids"].numel() for batch in given.batches[0])
    has_tokens = model.mesh.experts.rank == expert // 2
    received = sizes[::2]  # the others are the outputs that come back
    if tp == 1:
        assert set(received) == {tokens if has_tokens else 0}, (sizes, tokens)  # once, though for two experts
    assert (loss - given.loss[model.mesh.dp.rank]).abs() < TOLERANCE
    average_gradients(model)
    gradients = pipelines.gradients_on_stage(model)
    own_experts = [param.grad for name, param in model.named_parameters() if ".experts." in name]
    assert own_experts
    assert all(grad is not None and bool(local_tensor(grad).any()) == has_tokens for grad in own_experts)
    lines = own_differences(model, "gradient of", gradients, given.gradients)
    assert not lines, lines


@pytest.mark.parametrize(("tp", "expert"), [(1, 0), (1, 2), (2, 0)])
def test_step_with_all_tokens_on_one_rank_matches(pool: Pool, tmp_path: Path, seed: int, tp: int, expert: int) -> None:
    """The other rank receives no token, and its experts have zero gradients."""
    given = saved_case(tmp_path, "mixtral", seed, 2 // tp, num_local_experts=4, num_experts=4)
    model = reference_model(given.name, given.config, seed)
    route_to(model, expert)
    given.loss = pipelines.run_reference_step(model, given.batches[0])
    given.gradients = pipelines.full_gradients(model)
    pool.run(2, step_with_all_tokens_on_one_rank, tmp_path, given, tp, expert)


def step_with_nan_in_a_router(folder: Path) -> None:
    cls: Any = registry.find("MixtralForCausalLM")
    model = cls.from_pretrained_with_parallel(folder, expert_parallel_size=2, experts_implementation="eager")
    with torch.no_grad():
        model.model.layers[0].mlp.gate.weight[0] = float("nan")
    ids = torch.full((1, 3 + model.mesh.dp.rank), 5)
    assert model.train_batch(input_ids=ids, labels=ids).isnan()
    assert all(param.grad is not None for param in model.parameters())


def test_nan_in_a_router_is_a_loss_of_nan_on_all_replicas(pool: Pool, tmp_path: Path, seed: int) -> None:
    saved_case(tmp_path, "mixtral", seed, 2)
    pool.run(2, step_with_nan_in_a_router, tmp_path)


def refuse_missing_experts(folder: Path) -> None:
    cls: Any = registry.find("MixtralForCausalLM")
    with pytest.raises(CheckpointError, match=r"pytorch_model_tp=0_pp=0_dp=1\.bin: expected a file of .* found none"):
        cls.from_pretrained_with_parallel(folder, expert_parallel_size=2)


def save_split(source: Path, folder: Path) -> None:
    cls: Any = registry.find("MixtralForCausalLM")
    cls.from_pretrained_with_parallel(source, expert_parallel_size=2).save_pretrained_with_parallel(folder)


def test_split_checkpoint_without_the_experts_of_a_replica_is_refused(pool: Pool, tmp_path: Path, seed: int) -> None:
    saved_case(tmp_path / "hub", "mixtral", seed, 2)
    pool.run(2, save_split, tmp_path / "hub", tmp_path / "split")
    (tmp_path / "split" / "pytorch_model_tp=0_pp=0_dp=1.bin").unlink()
    pool.run(2, refuse_missing_experts, tmp_path / "split")


def exchange_files_of_experts(folder: Path) -> None:
    """Load exchanged files of the same size, named in the manifest: only checksums detect the exchange."""
    cls: Any = registry.find("MixtralForCausalLM")
    with pytest.raises(CheckpointError, match="CRC-32"):
        cls.from_pretrained_with_parallel(folder, expert_parallel_size=4)


def save_split_over_four(source: Path, folder: Path) -> None:
    cls: Any = registry.find("MixtralForCausalLM")
    cls.from_pretrained_with_parallel(source, expert_parallel_size=4).save_pretrained_with_parallel(folder)


def test_exchanged_files_of_experts_are_noticed(pool: Pool, tmp_path: Path, seed: int) -> None:
    saved_case(tmp_path / "hub", "mixtral", seed, 2, num_local_experts=4, num_experts=4)
    pool.run(4, save_split_over_four, tmp_path / "hub", tmp_path / "split")
    one, other = (tmp_path / "split" / f"pytorch_model_tp=0_pp=0_dp={replica}.bin" for replica in (1, 2))
    assert one.stat().st_size == other.stat().st_size
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)
    pool.run(4, exchange_files_of_experts, tmp_path / "split")


# Tokens divided over ranks --------------------------------------------------------------------------------------------


def take_divided_steps(*args: Any) -> None:
    with counting_exchanges() as counts:
        take_steps(*args)
    assert counts["sum"], counts


@pytest.mark.parametrize(
    ("model_type", "sizes", "cp", "replicas", "implementation"),
    [
        ("mixtral", (2, 1, 2), 2, 1, "eager"),
        ("mixtral", (1, 1, 2), 2, 1, "eager"),
        ("mixtral", (1, 1, 2), 2, 2, "batched_mm"),
        ("mixtral", (1, 1, 4), 2, 2, "eager"),
        ("glm4_moe", (2, 1, 4), 2, 1, "eager"),
        ("gpt_oss", (1, 1, 2), 2, 1, "eager"),
        *(
            pytest.param(*case, marks=pytest.mark.zoo)
            for case in (
                ("mixtral", (1, 1, 2), 3, 2, "eager"),  # two experts' ranks are of two replicas
                ("mixtral", (1, 1, 3), 3, 2, "grouped_mm"),
                ("mixtral", (2, 1, 2), 2, 2, "eager"),
                ("mixtral", (2, 1, 8), 2, 2, "eager"),
                ("mixtral", (4, 1, 2), 2, 1, "eager"),
                ("mixtral", (1, 2, 2), 2, 1, "eager"),
                ("mixtral", (1, 2, 4), 2, 2, "eager"),
                ("mixtral", (2, 2, 2), 2, 1, "eager"),
                ("qwen3_moe", (1, 1, 2), 2, 2, "eager"),
                ("qwen3_moe", (2, 1, 4), 2, 1, "grouped_mm"),
                ("deepseek_v3", (1, 1, 2), 2, 1, "eager"),
                ("deepseek_v3", (2, 1, 2), 2, 1, "batched_mm"),
                ("gpt_oss", (2, 1, 4), 2, 1, "grouped_mm"),
                ("gpt_oss", (4, 1, 2), 2, 1, "eager"),
            )
        ),
    ],
)
def test_training_with_divided_tokens_matches_one_process(
    pool: Pool,
    tmp_path: Path,
    seed: int,
    model_type: str,
    sizes: tuple[int, int, int],
    cp: int,
    replicas: int,
    implementation: str,
) -> None:
    """Left padding. The auxiliary loss is of whole batches. Averages count replicas, not their ranks."""
    experts = {} if sizes[2] < 6 else {"num_local_experts": 9, "num_experts": 9}
    changes = AUXILIARY | experts if model_type == "mixtral" else {}
    given = saved_case(tmp_path, model_type, seed, replicas, ("SGD", "AdamW"), **changes)
    options = {
        "experts_implementation": implementation,
        "micro_batch_size": pipelines.ROWS,
        "context_parallel_size": cp,
    }
    pool.run(
        sizes[0] * sizes[1] * cp * replicas,
        *(take_divided_steps, tmp_path, given, sizes, options, pipelines.STEPS["AdamW"]),
    )


def step_of_rows_of_other_lengths(folder: Path, given: pipelines.Case, ep: int) -> None:
    """Check two steps in which only one replica divides tokens."""
    model = load(folder, given, (1, 1, ep), context_parallel_size=3, experts_implementation="eager")
    for _ in range(2):
        with counting_exchanges() as counts, lifted_casts():
            loss = model.train_batch(**given.batches[0][model.mesh.dp.rank])
        assert bool(counts["sum"]) == (model.mesh.dp.rank == 0), counts
        assert (loss - given.loss[model.mesh.dp.rank]).abs() < TOLERANCE
        average_gradients(model)
        lines = own_differences(model, "gradient of", pipelines.gradients_on_stage(model), given.gradients)
        assert not lines, lines
        model.zero_grad()


@pytest.mark.parametrize("ep", [3, pytest.param(2, marks=pytest.mark.zoo), pytest.param(6, marks=pytest.mark.zoo)])
def test_whole_and_divided_tokens_of_replicas_match(pool: Pool, tmp_path: Path, seed: int, ep: int) -> None:
    """Rows of two tokens are whole on three ranks. Each of these sends a share of them."""
    given = saved_case(tmp_path, "mixtral", seed, 2, num_local_experts=6, num_experts=6)
    given.batches[0][1] = shortened(given.batches[0][1], 2)
    model = reference_model(given.name, given.config, seed)
    given.loss = pipelines.run_reference_step(model, given.batches[0])
    given.gradients = pipelines.full_gradients(model)
    pool.run(6, step_of_rows_of_other_lengths, tmp_path, given, ep)


def send_divided_tokens(config: Any, batch: Any) -> None:
    """Count the tokens that each rank sends to others, and the gathers of tokens."""
    cls: Any = registry.find("MixtralForCausalLM")
    options = {"expert_parallel_size": 2, "context_parallel_size": 2, "experts_implementation": "eager"}
    model = cls.from_config_with_parallel(config, seed=0, **options)
    sent: list[int] = []

    def counted(axis: Any, tensors: Any, counts: Any, received: Any) -> Any:
        sent.extend([max(counts)] if len(tensors) == 2 else [])  # the others are the outputs that come back
        return autograd_collectives.exchange(axis, tensors, counts, received)

    with counting_exchanges() as counts, pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer, "exchange", counted)
        model(**batch).loss.backward()
    rows, length = batch["input_ids"].shape
    own = rows * model.token_division.count(length)
    assert len(sent) == config.num_hidden_layers and max(sent) <= own < rows * length, (sent, own)
    assert not counts["gather"], counts


def test_ranks_send_their_own_tokens_to_experts(pool: Pool, seed: int) -> None:
    config = zoo.config("mixtral")
    pool.run(2, send_divided_tokens, config, zoo.batch("MixtralForCausalLM", config, seed, torch.float32))


def recompute_divided_tokens(name: str, config: Any, batch: Any) -> None:
    """In float32: the mode that lifts casts is not active while the backward pass recomputes."""
    results, cls = [], registry.find(name)
    for reentrant in (None, False, True):
        options = {"expert_parallel_size": 2, "context_parallel_size": 2, "experts_implementation": "eager"}
        model: Any = cls.from_config_with_parallel(config, seed=0, **options).train()  # type: ignore[attr-defined]
        if reentrant is not None:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        loss = model.train_batch(**batch)
        results.append({"loss": loss, **{name: local_tensor(param.grad) for name, param in model.named_parameters()}})
    for result in results[1:]:
        assert all(torch.equal(value, results[0][key]) for key, value in result.items())


@pytest.mark.parametrize("model_type", ["mixtral", pytest.param("gpt_oss", marks=pytest.mark.zoo)])
def test_checkpointed_blocks_with_divided_tokens_equal_others(pool: Pool, seed: int, model_type: str) -> None:
    name, config = zoo.lm_head(model_type), zoo.config(model_type)
    pool.run(2, recompute_divided_tokens, name, config, zoo.batch(name, config, seed, torch.float32))


def generate_from_divided_prompts(folder: Path, ids: Any, expected: Any, sizes: tuple[int, int]) -> None:
    cls: Any = registry.find("MixtralForCausalLM")
    tp, ep = sizes
    options = {"expert_parallel_size": ep, "context_parallel_size": 2, "experts_implementation": "eager"}
    model = cls.from_pretrained_with_parallel(folder, tp, **options)
    for divides in (False, True):
        for more in WAYS:
            with lifted_casts(), dividing_short_prompts() if divides else contextlib.nullcontext() as counts:
                own = model.generate(ids, max_new_tokens=5, min_new_tokens=5, do_sample=False, **more)
            assert own.equal(expected[tuple(more)]), (divides, more, own)
            assert not divides or counts["exchange"], counts


WAYS: tuple[dict[str, Any], ...] = ({}, {"num_beams": 2}, {"use_cache": False})


@pytest.mark.parametrize("sizes", [(1, 2), pytest.param((2, 2), marks=pytest.mark.zoo)])
def test_divided_and_whole_prompts_generate_the_same(
    pool: Pool, tmp_path: Path, seed: int, sizes: tuple[int, int]
) -> None:
    """A decoding step of one row has a token on one of the ranks."""
    given = saved_case(tmp_path, "mixtral", seed, 1)
    model = reference_model(given.name, given.config, seed).eval()
    ids = torch.randint(3, 60, (1, 7))
    with lifted_casts():
        expected = {
            tuple(more): model.generate(ids, max_new_tokens=5, min_new_tokens=5, do_sample=False, **more)
            for more in WAYS
        }
    pool.run(2 * sizes[0], generate_from_divided_prompts, tmp_path, ids, expected, sizes)


def save_and_load_divided(folder: Path, config: Any) -> None:
    cls: Any = registry.find("MixtralForCausalLM")
    model = cls.from_pretrained_with_parallel(folder / "hub", expert_parallel_size=4, context_parallel_size=2)
    for index, (tp, pp, ep, cp) in enumerate([(1, 2, 2, 2), (2, 1, 4, 2), (2, 1, 2, 2), (1, 1, 4, 1), (1, 1, 2, 4)]):
        target = folder / str(index)
        model.save_pretrained_with_parallel(target)
        options = {"expert_parallel_size": ep, "context_parallel_size": cp}
        model = cls.from_pretrained_with_parallel(target, tp, pp, **options)
    model.save_pretrained_with_parallel(folder / "merged", save_with_merging=True)
    full = model.deparallelize()
    original = zoo.original("MixtralForCausalLM").from_pretrained(folder / "hub")
    assert all(torch.equal(own, original.get_parameter(name)) for name, own in full.named_parameters())


def test_checkpoints_of_divided_tokens_survive_changes_of_sizes(pool: Pool, tmp_path: Path) -> None:
    zoo.original("MixtralForCausalLM")(zoo.config("mixtral", num_hidden_layers=2)).save_pretrained(tmp_path / "hub")
    pool.run(4, save_and_load_divided, tmp_path, None)
    names = [[path.name for path in (tmp_path / str(index)).glob("pytorch_model_*.bin")] for index in range(5)]
    assert [len(each) for each in names] == [4, 4, 4, 2, 4], names
    name = "model.safetensors"
    assert (tmp_path / "merged" / name).read_bytes() == (tmp_path / "hub" / name).read_bytes()


def refuse_divided(config: Any) -> None:
    cls: Any = registry.find("MixtralForCausalLM")
    with pytest.raises(ValueError, match=r"groups of 3 replicas of .*=1 and context_parallel_size=2, and .* 2 x 1 = 2"):
        cls.from_config_with_parallel(config, expert_parallel_size=3, context_parallel_size=2)
    model = cls.from_config_with_parallel(config, expert_parallel_size=2, context_parallel_size=2, seed=0)
    with pytest.raises(
        ValueError, match="generate_batch does not run MixtralForCausalLM: its experts are divided over"
    ):
        model.generate_batch([[1, 2]])
    with pytest.raises(ValueError, match=r"over ranks \[0, 1\] would overwrite"):
        DistributedDataParallel(model)


def test_unsupported_divisions_of_experts_are_refused_by_name(pool: Pool) -> None:
    pool.run(2, refuse_divided, zoo.config("mixtral"))
