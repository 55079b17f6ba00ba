"""The device of a rank, with mocked GPUs and mocked backends of a running process group."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.integrations import accelerate as hf_accelerate

import oslo_models
from oslo_models.distributed import mesh, rng
from oslo_models.distributed.mesh import start_process_group
from oslo_models.modeling import construction


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Four GPUs with the third selected by the user, and a running process group."""
    state = {"current": 2, "count": 4}
    stand_ins: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: state["count"],
        "current_device": lambda: state["current"],
        "set_device": lambda device: state.update(current=torch.device("cuda", device).index),
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda: "undefined")  # as after `init_process_group()`
    monkeypatch.setattr(dist, "get_backend_config", lambda group=None: "cpu:gloo,cuda:nccl")
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    return state


@pytest.mark.parametrize("backends", ["cpu:gloo,cuda:nccl", "cuda:nccl"])
def test_device_is_a_gpu_for_a_group_without_a_named_backend(
    gpus: dict[str, int], backends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "get_backend_config", lambda group=None: backends)
    assert start_process_group() == torch.device("cuda", 2)


@pytest.mark.parametrize("backends", ["cpu:gloo,cuda:gloo", "cpu:gloo"])
def test_device_is_the_cpu_for_a_group_without_nccl(
    gpus: dict[str, int], backends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "get_backend_config", lambda group=None: backends)
    assert start_process_group() == torch.device("cpu")
    assert gpus["current"] == 2


@pytest.mark.parametrize("env", [{}, {"RANK": "1", "WORLD_SIZE": "4"}], ids=["plain", "srun"])
def test_device_without_local_rank_is_the_current_one(
    gpus: dict[str, int], env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", {**os.environ, **env})
    assert start_process_group() == torch.device("cuda", 2)
    assert gpus["current"] == 2


@pytest.mark.parametrize(("count", "index"), [(4, 3), (2, 1), (1, 0)])
def test_device_with_local_rank_is_the_one_of_the_launcher(
    gpus: dict[str, int], count: int, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if each process sees fewer GPUs than the number of ranks."""
    gpus["count"] = count
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert start_process_group() == torch.device("cuda", index)
    assert gpus["current"] == index


@pytest.mark.parametrize("device", ["cpu", "cuda:1"])
def test_ranks_broadcast_the_states_of_generators_in_one_order(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order does not depend on the generators' addresses: a set would iterate differently on each rank."""
    axis: Any = SimpleNamespace(size=2)
    orders = set()
    for _ in range(20):
        spare = [torch.Generator() for _ in range(2)]
        generators = {"cuda": spare.pop(), "cpu": spare.pop()}
        sent: list[int] = []

        def send(_: Any, state: Any, src: int, sent: list[int] = sent) -> Any:
            sent.append(int(state[0]))
            return state

        for kind, number in (("cpu", 1), ("cuda", 2)):
            state = torch.full((3,), number, dtype=torch.uint8)
            generators[kind] = mock.Mock(get_state=lambda state=state: mock.Mock(to=lambda _, s=state: s))
        monkeypatch.setattr(rng, "default_generator", lambda device, g=generators: g[device.type])
        monkeypatch.setattr(rng, "broadcast", send)
        rng.synchronize(axis, torch.device(device))
        orders.add(tuple(sent))
    assert orders == {(1,) if device == "cpu" else (1, 2)}


def test_torch_names_its_default_backends() -> None:
    """torch names its backends as the stand-ins do."""
    config = dist.distributed_c10d.BackendConfig(dist.Backend("cuda:nccl,cpu:gloo"))
    assert set(str(config).split(",")) == {"cuda:nccl", "cpu:gloo"}
    assert "cuda:nccl" not in str(dist.distributed_c10d.BackendConfig(dist.Backend("gloo")))
    assert "cuda:nccl" in str(dist.distributed_c10d.BackendConfig(dist.Backend("nccl")))


def test_weights_are_loaded_onto_a_gpu_without_accelerate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' own ``device_map`` needs it; the library does not require it."""
    GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=9)).save_pretrained(tmp_path)
    gpu = torch.device("cuda", 0)
    assert construction.device_map(gpu) in (None, {"": gpu}) and construction.device_map(torch.device("cpu")) is None
    monkeypatch.setattr(mesh, "start_process_group", lambda *args, **kwargs: gpu)
    for module in (hf_accelerate, construction):
        monkeypatch.setattr(module, "is_accelerate_available", lambda: False)
    with mock.patch.object(GPT2LMHeadModel, "to") as moved:
        model = oslo_models.GPT2LMHeadModel.from_pretrained_with_parallel(tmp_path, seed=0)
    moved.assert_called_once_with(gpu)
    assert model.transformer.wte.weight.shape == (9, 8)
