"""Small sums of compiled code through symmetric memory, with a stand-in for that memory.

torch has it for GPUs only. The stand-in sums through the process group. It takes the same sums and refuses the same
arguments.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.utils import counters
from torch.distributed import _symmetric_memory

from oslo_models.distributed.collectives import MAX, all_reduce, axis_handle
from oslo_models.distributed.mesh import Axis, ParallelMesh
from oslo_models.distributed.symmetric_memory import BYTES, SymmetricMemory, connect, disconnect

from support import ROOT, zoo
from support.float64 import lifted_casts
from support.pool import Pool
from support.reference import full_parameters, parallel_model, reference_model

pytestmark = pytest.mark.drawn(4, of="file")

CPU = torch.device("cpu")


class StandIn(SymmetricMemory):
    """Memory that sums through the process group, and counts sums by dtype and number of elements."""

    dtypes = (torch.float32, torch.bfloat16, torch.float64)

    def __init__(self, device: torch.device) -> None:
        self.counts: Counter[tuple[torch.dtype, int]] = Counter()

    def connect(self, axis: Axis) -> None:
        self.group, self.axis = axis.group, axis_handle(axis)

    def sum(self, x: Tensor) -> Tensor:
        self.counts[x.dtype, x.numel()] += 1
        summed = x.clone()
        dist.all_reduce(summed, group=self.group)
        return summed


class Late(StandIn):
    """Memory with a fault: the last rank reads the parts of an earlier sum."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.earlier: dict[Any, Tensor] = {}

    def sum(self, x: Tensor) -> Tensor:
        summed = super().sum(x)
        earlier = self.earlier.get((x.dtype, x.shape), summed)
        self.earlier[x.dtype, x.shape] = summed
        return earlier if dist.get_rank() == dist.get_world_size() - 1 else summed


class Unconnected(StandIn):
    """Memory that the second rank cannot connect."""

    def connect(self, axis: Axis) -> None:
        if axis.rank == 1:
            raise RuntimeError("no peer access")
        super().connect(axis)


# Which sums -----------------------------------------------------------------------------------------------------------


def check_compiled_sums(n: int, seed: int) -> None:
    axis = ParallelMesh(n).tp
    connect(axis, CPU, StandIn)
    memory = axis.symmetric_memory
    memory.counts.clear()
    largest = BYTES // 4
    generator = torch.Generator().manual_seed(seed + axis.rank)
    parts = [torch.randint(-9, 9, (size,), generator=generator).float() for size in (8, largest)]  # exact in any order
    odd, larger, half = parts[0][:3], torch.cat((parts[1], parts[0])), parts[0].half()

    def sums(small: Tensor, large: Tensor, odd: Tensor, larger: Tensor, half: Tensor) -> list[Tensor]:
        x, y = small * 2, (large * 2).view(2, -1).t()
        return [
            *(all_reduce(axis, x) + x, all_reduce(axis, y), all_reduce(axis, odd * 2), all_reduce(axis, larger * 2)),
            *(all_reduce(axis, half * 2), all_reduce(axis, small + 1, MAX)),
        ]

    given = (*parts, odd, larger, half)
    found = torch.compile(sums, backend="aot_eager", fullgraph=True)(*given)
    assert memory.counts == {(torch.float32, 8): 1, (torch.float32, largest): 1}
    for a, b in zip(found, sums(*given), strict=True):
        assert torch.equal(a, b)
    disconnect(axis)
    torch.compile(sums, backend="aot_eager", fullgraph=True)(*given)
    assert memory.counts.total() == 2


@pytest.mark.stacks
@pytest.mark.parametrize("n", [2, 3])
def test_small_sums_of_compiled_code_go_through_the_memory(pool: Pool, n: int, seed: int) -> None:
    pool.run(n, check_compiled_sums, n, seed)


def check_generation(config: Any, weights: Any, name: str, prompts: list[Tensor], expected: list[Tensor]) -> None:
    model = parallel_model(name, config, weights, 2).eval()
    connect(model.mesh.tp, CPU, StandIn)
    memory = model.mesh.tp.symmetric_memory
    memory.counts.clear()
    torch._dynamo.reset()
    counters.clear()
    with lifted_casts():
        model.forward = torch.compile(model.forward, backend="aot_eager", fullgraph=True)
        for prompt, tokens in zip(prompts, expected, strict=True):
            assert generate(model, prompt).equal(tokens)
    assert counters["stats"]["unique_graphs"] <= 2
    steps = len(prompts) * 5  # after the prompt: its sums have one row per token
    sums = 2 * config.num_hidden_layers + 1  # attention, MLP and the embedding
    assert memory.counts[torch.float64, 2 * config.hidden_size] == steps * sums


def generate(model: Any, prompt: Tensor) -> Tensor:
    options = {"cache_implementation": "static", "max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    tokens: Tensor = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
    return tokens


@pytest.mark.stacks
def test_compiled_decoding_sums_through_the_memory(pool: Pool, seed: int) -> None:
    name, config = zoo.lm_head("llama"), zoo.config("llama")
    model = reference_model(name, config, seed).eval()
    generator = torch.Generator().manual_seed(seed)
    prompts = [torch.randint(3, config.vocab_size, (2, 5), generator=generator) for _ in range(2)]
    with lifted_casts():
        expected = [generate(model, prompt) for prompt in prompts]
    pool.run(2, check_generation, config, full_parameters(model), name, prompts, expected)


def check_kernel_arguments() -> None:
    """A CPU operation of torch replaces the GPU kernel."""
    axis = ParallelMesh(2).tp
    seen: list[tuple[Any, ...]] = []

    def kernel(part: Tensor, x: Tensor, op: str, group: str) -> Tensor:
        assert part.data_ptr() == buffers[0].data_ptr() and part.is_contiguous() and x.data_ptr() % 16 == 0
        seen.append((part.shape, part.dtype, op, group))
        summed = x.clone()
        dist.all_reduce(summed, group=axis.group)
        return summed

    buffers = []

    def empty(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        buffers.append(torch.empty(size, dtype=dtype))
        return buffers[0]

    library = torch.library.Library("symm_mem", "IMPL")
    library.impl("one_shot_all_reduce_copy", kernel, "CPU")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", "/tmp")
        patch.setattr(_symmetric_memory, "empty", empty)
        patch.setattr(_symmetric_memory, "rendezvous", lambda buffer, group: (buffer, group))
        memory = SymmetricMemory(CPU)
        memory.connect(axis)
    x = torch.arange(9, dtype=torch.bfloat16)[1:].view(2, 4)  # not aligned
    assert memory.takes(x) and torch.equal(memory.sum(x), 2 * x)
    assert seen == [((2, 4), torch.bfloat16, "sum", axis.group.group_name)]
    library._destroy()


def test_kernel_gets_the_buffer_in_the_shape_of_the_part(pool: Pool) -> None:
    pool.run(2, check_kernel_arguments)


# Refusals -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["TMPDIR", "TEMP"])
def test_long_folder_for_sockets_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the check, torch would write beyond the end of an array."""
    for each in ("TMPDIR", "TMP", "TEMP", "TEMPDIR"):
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setattr(_symmetric_memory, "empty", lambda *_, **__: "memory")
    assert SymmetricMemory(CPU)._buffer == "memory"
    monkeypatch.setenv(name, "/" + 89 * "a")
    assert SymmetricMemory(CPU)._buffer == "memory"
    monkeypatch.setenv(name, "/" + 90 * "a")
    with pytest.raises(RuntimeError, match=rf"the variable {name}. Its path has 91 bytes and may have 90"):
        SymmetricMemory(CPU)


def refusal_of(axis: Axis, memory_type: type[SymmetricMemory]) -> str:
    try:
        connect(axis, CPU, memory_type)
    except ValueError as error:
        return str(error)
    return ""


def check_refusals() -> None:
    axis = ParallelMesh(2).tp
    for memory_type, why in (
        (SymmetricMemory, "processes on cpu"),
        (Late, "wrong sums here, of"),
        (Unconnected, "no peer access"),
    ):
        refusal = refusal_of(axis, memory_type)
        assert why in refusal and "leave symmetric_memory out" in refusal, refusal
        assert axis.symmetric_memory is None


def test_memory_that_is_missing_or_sums_wrongly_is_refused_on_all_ranks(pool: Pool) -> None:
    pool.run(2, check_refusals)


def check_fuse(name: str, config: Any, weights: Any) -> None:
    model = parallel_model(name, config, weights, 2)
    before = [type(module) for module in model.modules()]
    with pytest.raises(ValueError, match="symmetric_memory=True is for processes that have a GPU each"):
        model.fuse(symmetric_memory=True)
    assert [type(module) for module in model.modules()] == before
    with pytest.raises(ValueError, match="different arguments of fuse"):
        model.fuse(symmetric_memory=model.mesh.tp.rank == 0)
    model.fuse().unfuse()


def test_fuse_refuses_symmetric_memory_on_cpus(pool: Pool, seed: int) -> None:
    name, config = zoo.lm_head("llama"), zoo.config("llama")
    pool.run(2, check_fuse, name, config, full_parameters(reference_model(name, config, seed)))


def test_one_rank_needs_no_memory(seed: int) -> None:
    axis = Axis("tp", 0, (0,), None)
    connect(axis, CPU)
    assert axis.symmetric_memory is None


# Inductor's cache -----------------------------------------------------------------------------------------------------

COMPILED = """
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

from distributed.test_symmetric_memory import CPU, StandIn
from oslo_models.distributed.collectives import all_reduce
from oslo_models.distributed.mesh import ParallelMesh

from torch.testing._internal.distributed.fake_pg import FakeStore

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
axis = ParallelMesh(2).tp
memory = StandIn(CPU)
memory.connect(axis)
object.__setattr__(axis, "symmetric_memory", memory)
sums = torch.compile(lambda x: all_reduce(axis, x * 2) + x, fullgraph=True)
sums(torch.ones(8))
assert memory.counts[torch.float32, 8] == 1
found = {**counters["inductor"], **counters["aot_autograd"]}
print(found.get("fxgraph_cache_hit", 0) + found.get("autograd_cache_hit", 0))
"""


def test_another_process_finds_compiled_sums_in_the_cache_of_inductor(tmp_path: Path) -> None:
    """The graph has the number of an axis, which the same script gives it in each process, and no address."""
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "kernels", ROOT / "tests")))
    environment = {**os.environ, "PYTHONPATH": paths, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    hits = []
    for _ in range(2):
        command = [sys.executable, "-W", "ignore", "-c", COMPILED]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        hits.append(int(done.stdout.split()[-1]))
    assert hits[0] == 0 and hits[1] > 0, hits
