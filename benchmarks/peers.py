"""The peers: how each one loads a checkpoint and makes a training step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import serving
from benchmarks.definitions import Peer, Step, adamw_trainer


def _alone(cls: str, checkpoint: Path, **kwargs: Any) -> Any:
    import transformers as hf

    return getattr(hf, cls).from_pretrained(checkpoint, **kwargs)


def _compiled(cls: str, checkpoint: Path, **kwargs: Any) -> Any:
    """With a cache of fixed size; then `generate` itself compiles the forward of each token by ``torch.compile``."""
    from transformers import CompileConfig

    model = _alone(cls, checkpoint, **kwargs)
    settings = CompileConfig()
    settings._compile_all_devices = True  # otherwise on GPUs only
    model.generation_config.update(cache_implementation="static", compile_config=settings)
    return model


def _llama_cpp(cls: str, checkpoint: Path, **kwargs: Any) -> Any:
    from benchmarks.llama_cpp_peer import LlamaCpp

    return LlamaCpp(_alone(cls, checkpoint, **kwargs), checkpoint / "model.gguf")


def _native(cls: str, checkpoint: Path, **kwargs: Any) -> Any:
    from transformers import DistributedConfig

    return _alone(cls, checkpoint, distributed_config=DistributedConfig(tp_size=2), **kwargs)


def _native_experts(cls: str, checkpoint: Path, **kwargs: Any) -> Any:
    """As `_native`, with whole experts: each is on one of the two ranks."""
    from transformers import DistributedConfig

    return _alone(cls, checkpoint, distributed_config=DistributedConfig(tp_size=2, ep_size=2), **kwargs)


def _ours(cls: str, checkpoint: Path, **kwargs: Any) -> Any:
    import oslo_models

    return getattr(oslo_models, cls).from_pretrained_with_parallel(checkpoint, tensor_parallel_size=2, **kwargs)


def _ours_fused(cls: str, checkpoint: Path, **kwargs: Any) -> Any:
    return _ours(cls, checkpoint, **kwargs).fuse()


def _ours_by_images(cls: str, checkpoint: Path, **kwargs: Any) -> Any:
    return _ours(cls, checkpoint, tower_parallel="images", **kwargs)


def _ours_divided(cls: str, checkpoint: Path, **kwargs: Any) -> Any:
    return _ours(cls, checkpoint, sequence_parallel=True, **kwargs)


def _ours_over_context(cls: str, checkpoint: Path, **kwargs: Any) -> Any:
    import oslo_models

    return getattr(oslo_models, cls).from_pretrained_with_parallel(checkpoint, context_parallel_size=2, **kwargs)


def _our_experts(cls: str, checkpoint: Path, **kwargs: Any) -> Any:
    return _ours(cls, checkpoint, expert_parallel_size=2, **kwargs)


def _our_stages(cls: str, checkpoint: Path, **kwargs: Any) -> Any:
    import oslo_models

    return getattr(oslo_models, cls).from_pretrained_with_parallel(checkpoint, pipeline_parallel_size=2, **kwargs)


def _ours_alone(cls: str, checkpoint: Path, **kwargs: Any) -> Any:
    import oslo_models

    return getattr(oslo_models, cls).from_pretrained_with_parallel(checkpoint, **kwargs)


def _deployed(cls: str, checkpoint: Path, **kwargs: Any) -> Any:
    import oslo_models

    sizes = {"tensor_parallel_size": 2, "deploy": True}
    return getattr(oslo_models, cls).from_pretrained_with_parallel(checkpoint, **sizes, **kwargs)


def _autotp(cls: str, checkpoint: Path, **kwargs: Any) -> Any:
    import deepspeed
    import torch

    split = {"tensor_parallel": {"tp_size": 2}, "dtype": torch.float32, "replace_with_kernel_inject": False}
    return deepspeed.init_inference(_alone(cls, checkpoint, **kwargs), **split)


def _preprocessed_by(name: str) -> Callable[..., float]:
    """Preprocesses texts by this function of `preprocessing`. Its packages are imported when it runs."""

    def load(cls: str, checkpoint: Path, **kwargs: Any) -> float:
        from benchmarks import preprocessing

        seconds: float = getattr(preprocessing, name)(**kwargs)
        return seconds

    return load


def _fused_adamw(load: Callable[..., Any], cls: str, checkpoint: Path) -> tuple[Any, Step]:
    return adamw_trainer(load, cls, checkpoint, fused=True)


def _micro_batches(load: Callable[..., Any], cls: str, checkpoint: Path) -> tuple[Any, Step]:
    """Micro-batches of one row."""
    import torch

    model = load(cls, checkpoint).train()
    optimizer = torch.optim.AdamW(model.gpu_parameters(), lr=1e-4)

    def step(ids: Any) -> Any:
        loss = model.train_batch(input_ids=ids, labels=ids)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return model, step


def _rows_in_turn(load: Callable[..., Any], cls: str, checkpoint: Path) -> tuple[Any, Step]:
    """As `_micro_batches`, without stages: the gradients of micro-batches of one row are accumulated."""
    import torch

    model = load(cls, checkpoint).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step(ids: Any) -> Any:
        total = 0.0
        for row in ids.split(1):
            loss = model(input_ids=row, labels=row).loss / len(ids)
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return total

    return model, step


def _schedule_of_torch(load: Callable[..., Any], cls: str, checkpoint: Path) -> tuple[Any, Step]:
    from benchmarks.stages import trainer

    return trainer(load, cls, checkpoint)


def _divided_by_torch(load: Callable[..., Any], cls: str, checkpoint: Path) -> tuple[Any, Step]:
    from benchmarks.divided_tokens import trainer

    return trainer(load, cls, checkpoint)


def _ulysses(load: Callable[..., Any], cls: str, checkpoint: Path) -> tuple[Any, Step]:
    from benchmarks.context_peer import trainer

    return trainer(load, cls, checkpoint)


def _slept(name: str) -> Callable[..., Any]:
    def load(*args: Any) -> Any:
        from benchmarks.schedules import SCHEDULES

        return SCHEDULES[name](*args)

    return load


def _autotp_adamw(load: Callable[..., Any], cls: str, checkpoint: Path) -> tuple[Any, Step]:
    import deepspeed
    import torch

    model = deepspeed.tp_model_init(_alone(cls, checkpoint).train(), tp_size=2, dtype=torch.float32)
    settings = {"train_micro_batch_size_per_gpu": 4, "tensor_parallel": {"autotp_size": 2}}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)

    def step(ids: Any) -> Any:
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return model, step


PEERS = {
    peer.name: peer
    for peer in (
        # PASSIVE: two threads that spin while they wait would slow each other down when anything else runs
        Peer("transformers", 1, 2, _alone, environment={"OMP_WAIT_POLICY": "PASSIVE"}),
        Peer("transformers-compile", 1, 2, _compiled, environment={"OMP_WAIT_POLICY": "PASSIVE"}),
        Peer("llama.cpp", 1, 2, _llama_cpp, needs=("llama_cpp", "gguf")),
        Peer("llama.cpp-drafts", 1, 2, _llama_cpp, needs=("llama_cpp", "gguf")),
        Peer("transformers-rows", 1, 2, _alone, _rows_in_turn, environment={"OMP_WAIT_POLICY": "PASSIVE"}),
        Peer("transformers-tp2", 2, 1, _native, needs=("accelerate",)),
        Peer("transformers-ep2", 2, 1, _native_experts, needs=("accelerate",)),
        Peer("oslo_models", 1, 2, _ours_alone, environment={"OMP_WAIT_POLICY": "PASSIVE"}),
        Peer("oslo_models-reserved", 1, 2, _ours_alone, environment={"OMP_WAIT_POLICY": "PASSIVE"}),
        Peer("transformers-batch", 1, 2, _alone, environment={"OMP_WAIT_POLICY": "PASSIVE"}),
        Peer("oslo_models-one-thread", 1, 1, _ours_alone),
        Peer("transformers-lookup", 1, 2, _alone, environment={"OMP_WAIT_POLICY": "PASSIVE"}),
        Peer("oslo_models-tp2-batch", 2, 1, _ours),
        Peer("oslo_models-tp2-drafts", 2, 1, _ours),
        Peer("oslo_models-tp2-fused-batch", 2, 1, _ours_fused),
        Peer("oslo_models-tp2-fused-drafts", 2, 1, _ours_fused),
        Peer("oslo_models-tp2", 2, 1, _ours),
        Peer("oslo_models-tp2-images", 2, 1, _ours_by_images),
        Peer("oslo_models-tp2-sequence", 2, 1, _ours_divided),
        Peer("oslo_models-cp2", 2, 1, _ours_over_context),
        Peer("torch-sequence-tp2", 2, 1, _alone, _divided_by_torch),
        Peer("deepspeed-ulysses-cp2", 2, 1, _alone, _ulysses, ("deepspeed", "ninja"), {"LOCAL_SIZE": "2"}),
        Peer("oslo_models-ep2", 2, 1, _our_experts),
        Peer("oslo_models-tp2-fused", 2, 1, _ours_fused, _fused_adamw),
        Peer("oslo_models-deploy", 1, 2, _deployed, environment={"OMP_WAIT_POLICY": "PASSIVE"}),
        *(
            # PASSIVE as above, for the servers alike
            Peer(name, 1, 2, command, needs=("uvicorn",), environment={"OMP_WAIT_POLICY": "PASSIVE"})
            for name, command in {
                "oslo_models-serve": serving.ours_alone,
                "oslo_models-serve-fused": serving.ours_alone_fused,
                "oslo_models-serve-tp2": serving.ours,
                "oslo_models-serve-tp2-fused": serving.ours_fused,
                "oslo_models-serve-images": serving.images_alone,
                "oslo_models-serve-images-tp2": serving.images_by_weights,
                "oslo_models-serve-images-tp2-images": serving.images_by_images,
                "oslo_models-serve-one-by-one": serving.one_by_one,
                "transformers-serve": serving.plain,
                "transformers-serve-continuous": serving.continuous,
            }.items()
        ),
        Peer("torch-1f1b", 2, 1, _alone, _schedule_of_torch),
        Peer("oslo_models-pp2", 2, 1, _our_stages, _micro_batches),
        *(
            Peer(name, 4, 1, _slept(name))
            for name in ("oslo_models-1f1b", "oslo_models-zb-h1", "torch-1f1b-pp4", "torch-interleaved-zb-pp4")
        ),
        Peer("oslo_models-data", 1, 2, _preprocessed_by("ours")),
        Peer("megatron-loop", 1, 2, _preprocessed_by("megatron_loop")),
        Peer(
            "datasets-map",
            1,
            2,
            _preprocessed_by("datasets_map"),
            needs=("datasets",),
            environment={"HF_DATASETS_OFFLINE": "1"},
        ),
        # DeepSpeed crashes without its shared-memory all-reduce, which needs LOCAL_SIZE
        Peer("deepspeed-autotp", 2, 1, _autotp, _autotp_adamw, ("deepspeed", "ninja"), {"LOCAL_SIZE": "2"}),
    )
}
