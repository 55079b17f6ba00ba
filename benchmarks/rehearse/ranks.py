"""Models of `oslo_models` beside transformers' in float64, on one rank or on two that share a device."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

EXACT = 1e-5
"""The largest relative error, since transformers computes norms and losses in float32. A wrong shard is far off."""
KINDS = {"llama": "LlamaForCausalLM", "gpt2": "GPT2LMHeadModel"}
_NONE = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
_SIZES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 48, "n_layer": 2, "n_head": 6, "vocab_size": 101, "n_positions": 64, "resid_pdrop": 0.0,
             "embd_pdrop": 0.0, "attn_pdrop": 0.0, **_NONE},
    "llama": {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
              "num_key_value_heads": 2, "vocab_size": 101, **_NONE},
}  # fmt: skip


def plain(kind: str, device: torch.device, **sizes: Any) -> Any:
    """transformers' model in float64, with the same random weights in every call."""
    import transformers

    cls = getattr(transformers, KINDS[kind])
    torch.manual_seed(0)
    config = cls.config_class(**{**_SIZES[kind], **sizes})
    return cls._from_config(config, dtype=torch.float64).to(device).eval()


def batch(device: torch.device) -> Tensor:
    """Token ids: 3 rows of 12."""
    return torch.randint(101, (3, 12), generator=torch.Generator().manual_seed(1)).to(device)


def step(model: Any, ids: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss, and the gradients by name."""
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    grads = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    return loss.detach(), grads


def compare(kind: str, size: int, device: torch.device, **options: Any) -> dict[str, float]:
    """On every rank: the errors of loss, gradients and tokens of ``size`` ranks against transformers."""
    from oslo_models import registry

    model, ids = plain(kind, device), batch(device)
    with _a_folder_of_all_ranks() as folder:
        if dist.get_rank() == 0:
            model.save_pretrained(folder)
        dist.barrier()
        load = registry.find(KINDS[kind]).from_pretrained_with_parallel
        ours = load(folder, tensor_parallel_size=size, dtype=torch.float64, **options)
    expected, theirs = step(model, ids)
    loss, grads = step(ours, ids)
    found = {
        "device": 0.0 if next(ours.parameters()).device == device else float("inf"),
        "loss": error(loss, expected),
    }
    found["gradients"] = max(
        error(grad, ours.layouts[name].shard(theirs[name], ours.mesh.tp.rank)) for name, grad in grads.items()
    )
    for name, beams in (("greedy tokens", 1), ("tokens of beams", 3)):
        options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "num_beams": beams}
        found[name] = (
            0.0 if torch.equal(ours.generate(ids, **options), model.generate(ids, **options)) else float("inf")
        )
    return found


def error(x: Tensor, y: Tensor) -> float:
    return float((x - y).abs().max() / y.abs().max().clamp_min(1e-30))


@contextmanager
def _a_folder_of_all_ranks() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as own:
        names = [own]
        dist.broadcast_object_list(names, device=torch.device("cpu") if dist.get_backend() == "gloo" else None)
        yield names[0]
        dist.barrier()


def compare_kinds(device: torch.device) -> dict[str, float]:
    """`compare` for each kind, on two ranks."""
    return {f"{kind}: {name}": x for kind in KINDS for name, x in compare(kind, 2, device).items()}


def compare_sequence_parallel(device: torch.device) -> dict[str, float]:
    """`compare` with sequence parallelism, on two ranks."""
    found = {kind: compare(kind, 2, device, sequence_parallel=True) for kind in KINDS}
    return {f"{kind}: {name}": x for kind, errors in found.items() for name, x in errors.items()}


def resume_from_split_files(device: torch.device) -> dict[str, float]:
    """On two ranks: the errors of a step of AdamW after its split checkpoint and states were saved and loaded.

    The split checkpoint is also loaded without shards.
    """
    from oslo_models import registry

    found, ids = {}, batch(device)

    def advance(model: Any, optimizer: torch.optim.Optimizer) -> Tensor:
        loss, _ = step(model, ids)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    for kind in KINDS:
        load = registry.find(KINDS[kind]).from_pretrained_with_parallel
        with _a_folder_of_all_ranks() as folder:
            if dist.get_rank() == 0:
                plain(kind, device).save_pretrained(f"{folder}/whole")
            dist.barrier()
            models, losses = [load(f"{folder}/whole", tensor_parallel_size=2, dtype=torch.float64)], []
            optimizers = [torch.optim.AdamW(models[0].parameters(), lr=0.01)]
            advance(models[0], optimizers[0])
            models[0].save_pretrained_with_parallel(f"{folder}/split")
            models[0].save_optimizer(optimizers[0], f"{folder}/split")
            models.append(load(f"{folder}/split", tensor_parallel_size=2, dtype=torch.float64))
            optimizers.append(torch.optim.AdamW(models[1].parameters(), lr=0.01))
            models[1].load_optimizer(optimizers[1], f"{folder}/split")
            whole = load(f"{folder}/split", dtype=torch.float64)
            losses = [advance(*each) for each in zip(models, optimizers, strict=True)]
            found[f"{kind}: loss without shards"] = error(whole(input_ids=ids, labels=ids).loss.detach(), losses[0])
            found[f"{kind}: loss of the resumed step"] = error(losses[1], losses[0])
            found[f"{kind}: parameters after it"] = max(
                error(own.detach(), other.detach())
                for own, other in zip(models[1].parameters(), models[0].parameters(), strict=True)
            )
    return found


def sum_in_shared_memory(device: torch.device) -> dict[str, float]:
    """On two ranks: all-reduces through shared memory, in compiled code and replayed CUDA graphs.

    torch refuses such memory to ranks on the same GPU, unless a test variable is set. CPUs have no such memory.
    """
    from oslo_models.distributed.collectives import all_reduce
    from oslo_models.distributed.mesh import ParallelMesh
    from oslo_models.distributed.symmetric_memory import connect

    axis = ParallelMesh(2).tp
    with mock.patch.dict(os.environ, TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES="1"):
        try:
            connect(axis, device)
        except ValueError:
            if device.type == "cuda":
                raise
            return {"refused on CPUs": 0.0}

    def layers(x: Tensor) -> Tensor:
        for _ in range(4):
            x = all_reduce(axis, x * (axis.rank + 1)) / 3 + x
        return x

    compiled, error = torch.compile(layers, mode="reduce-overhead", fullgraph=True), 0.0
    for number in range(6):  # the first call compiles, the second records
        x = torch.randn(3, 4096, generator=torch.Generator().manual_seed(number)).to(device)
        error = max(error, error(compiled(x).clone(), layers(x)))
    return {"compiled sums": error}


def launch(
    device: torch.device, work: Callable[[torch.device], dict[str, float]], several: bool = False
) -> dict[str, float]:
    """Run ``work`` on two processes. Return the larger value of both, by name.

    Args:
        several: each process has a GPU of its own, and they communicate through NCCL; otherwise both share ``device``.
    """
    import torch.multiprocessing

    with tempfile.TemporaryDirectory() as folder:
        how = "spawn" if device.type == "cuda" else "fork"
        if how == "fork":
            import oslo_models.modeling.construction  # noqa: F401  so that each rank need not import it
        torch.multiprocessing.start_processes(_rank, (device, folder, work, several), nprocs=2, start_method=how)
        found = [json.loads(Path(folder, str(rank)).read_text()) for rank in range(2)]
    return {name: max(each[name] for each in found) for name in found[0]}


def _rank(
    rank: int, device: torch.device, folder: str, work: Callable[[torch.device], dict[str, float]], several: bool
) -> None:
    with group_of(rank, device, folder, several) as device:
        found = work(device)
        Path(folder, str(rank)).write_text(json.dumps(found))
        dist.barrier()


@contextmanager
def group_of(rank: int, device: torch.device, folder: str, several: bool) -> Iterator[torch.device]:
    """Start the process group of two ranks. Yield the device of this rank, which a mesh uses inside the block.

    With gloo a mesh assumes CPUs, so the device is set explicitly.
    """
    from oslo_models.distributed import mesh
    from oslo_models.modeling import construction

    if device.type == "cuda":
        device = torch.device("cuda", rank if several else 0)
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    backend = "cpu:gloo,cuda:nccl" if several and device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=2)
    with ExitStack() as stack:
        for module in (mesh, construction):
            stack.enter_context(mock.patch.object(module, "start_process_group", lambda *_, **__: device))
        yield device
    dist.destroy_process_group()
