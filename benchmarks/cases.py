"""The registry of cases: each names a measurement, a model and the peers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks import (
    data,
    deploying,
    fuse_check,
    fusing,
    grpo,
    long_sequences,
    measure,
    serving,
    token_profile,
    vision,
)
from benchmarks.definitions import Peer, Result

OURS, ALONE, NATIVE, DEEPSPEED = "oslo_models-tp2", "transformers", "transformers-tp2", "deepspeed-autotp"
OUR_STAGES, TORCH_STAGES, OURS_ALONE = "oslo_models-pp2", "torch-1f1b", "oslo_models"
RESERVED = "oslo_models-reserved"
ROWS = "transformers-rows"
ENGINES = ("transformers-compile", "llama.cpp")
"""Peers that generate only."""
ONE_THREAD = "oslo_models-one-thread"
OURS_FUSED, DEPLOYED = "oslo_models-tp2-fused", "oslo_models-deploy"
OUR_BATCH, OUR_FUSED_BATCH = "oslo_models-tp2-batch", "oslo_models-tp2-fused-batch"
OUR_DRAFTS, LOOKUP = "oslo_models-tp2-drafts", "transformers-lookup"
OUR_FUSED_DRAFTS = "oslo_models-tp2-fused-drafts"
OUR_DRAFTING = (OUR_BATCH, OUR_DRAFTS, OUR_FUSED_BATCH, OUR_FUSED_DRAFTS)
OUR_DATA, MEGATRON, DATASETS = "oslo_models-data", "megatron-loop", "datasets-map"
OUR_EXPERTS, NATIVE_EXPERTS = "oslo_models-ep2", "transformers-ep2"
OURS_OVER_CONTEXT, ULYSSES = "oslo_models-cp2", "deepspeed-ulysses-cp2"
OURS_BY_IMAGES = "oslo_models-tp2-images"
OURS_DIVIDED, TORCH_DIVIDED = "oslo_models-tp2-sequence", "torch-sequence-tp2"
CONTINUOUS, OUR_SERVER = "transformers-serve-continuous", "oslo_models-serve"
OUR_SERVERS = tuple(OUR_SERVER + way for way in ("", "-fused", "-tp2", "-tp2-fused", "-one-by-one"))
OUR_IMAGE_SERVERS = tuple(f"{OUR_SERVER}-images{way}" for way in ("", "-tp2", "-tp2-images"))
SERVERS = (CONTINUOUS, "transformers-serve", *OUR_SERVERS)
ZERO_BUBBLE, OUR_1F1B, TORCH_1F1B = "oslo_models-zb-h1", "oslo_models-1f1b", "torch-1f1b-pp4"
OUR_SCHEDULES = (ZERO_BUBBLE, OUR_1F1B)
OWN = (
    *OUR_SCHEDULES,
    OUR_FUSED_BATCH,
    OURS_FUSED,
    OUR_FUSED_DRAFTS,
    OUR_DRAFTS,
    OUR_BATCH,
    OURS_DIVIDED,
    OURS,
    OURS_BY_IMAGES,
    OUR_EXPERTS,
    OUR_STAGES,
    OURS_ALONE,
    RESERVED,
    ONE_THREAD,
    OUR_DATA,
    DEPLOYED,
    *OUR_SERVERS,
    *OUR_IMAGE_SERVERS,
)


@dataclass(frozen=True)
class Case:
    """One comparison.

    Attributes:
        what: Label of its row in the documentation's tables.
        runner: Function called in every process: ``runner(peer, cls, checkpoint, tiny_checkpoint, **options)``.
        model: One of ``MODELS``, or none.
        baseline: The peer, or the runner's reference, in the denominator of the ratios in the CSV.
        tolerance: Maximum relative difference of the peers' results; 0 for token ids.
        smoke: Replaces ``options`` in a smoke run.
        limit: Maximum ratio. The case fails if the whole interval of the median ratio is above.
    """

    name: str
    what: str
    runner: Callable[..., Result]
    model: str
    peers: tuple[str, ...]
    baseline: str
    tolerance: float = 0.0
    options: dict[str, Any] = field(default_factory=dict)
    smoke: dict[str, Any] = field(default_factory=dict)
    limit: float | None = None

    def prepare(self, folder: Path, smoke: bool) -> None:
        """Write the checkpoints that the peers load: a tiny one and, except in a smoke run, the model's."""
        import torch
        import transformers as hf

        if not self.model:
            return
        name, sizes = MODELS[self.model]
        cls = getattr(hf, name)
        for path, own in ((folder / f"{self.model}-tiny", _tiny(sizes)), (folder / self.model, sizes)):
            if not path.exists() and not (smoke and own is sizes):
                torch.manual_seed(0)
                cls(cls.config_class(**own, **ENDLESS)).save_pretrained(path)

    def run(self, peer: Peer, folder: Path, smoke: bool) -> Result:
        """Measure in this process."""
        tiny = folder / f"{self.model}-tiny"
        options = {**self.options, **(self.smoke if smoke else {})}
        cls, _ = MODELS.get(self.model, ("", {}))
        return self.runner(peer, cls, tiny if smoke else folder / self.model, tiny, **options)


def _llama(hidden: int, intermediate: int, layers: int, heads: int) -> tuple[str, dict[str, Any]]:
    sizes = {"hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers}
    return "LlamaForCausalLM", {**sizes, "num_attention_heads": heads, "vocab_size": 32000}


def _mixture(cls: str, experts: int, top_k: int, width: int) -> tuple[str, dict[str, Any]]:
    sizes = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4}
    widths = {"intermediate_size": width, "moe_intermediate_size": width, "head_dim": 32, "vocab_size": 32000}
    return cls, {**sizes, **widths, "num_local_experts": experts, "num_experts": experts, "num_experts_per_tok": top_k}


def _llava(tower: dict[str, Any], **text: Any) -> tuple[str, dict[str, Any]]:
    vision = {"model_type": "clip_vision_model", "image_size": 224, "patch_size": 16, **tower}
    text = {**_llama(**text)[1], **ENDLESS, "model_type": "llama"}
    return "LlavaForConditionalGeneration", {
        **{"text_config": text, "vision_config": vision, "image_token_index": text["vocab_size"] - 1},
        "image_seq_length": (vision["image_size"] // vision["patch_size"]) ** 2,
    }


def _tiny(sizes: dict[str, Any]) -> dict[str, Any]:
    """Return the sizes of a smoke run."""
    if "text_config" not in sizes:
        return {**sizes, **TINY}
    parts = {name: {**sizes[name], **TINY} for name in ("text_config", "vision_config")}
    return {**sizes, **parts, "image_token_index": TINY["vocab_size"] - 1}


TINY = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 128}
ENDLESS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}

# Random float32 weights. No dropout, so that losses can be compared; no end token, so that all texts are equally long.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-100m": _llama(768, 2048, 12, 12),
    # tied weights of a random model repeat the last token: every draft is right
    "llama-100m-repeating": (
        "LlamaForCausalLM",
        {**_llama(768, 2048, 12, 12)[1], "tie_word_embeddings": True, "initializer_range": 0.005},
    ),
    # it repeats some tokens: about 70 % of the drafts are right
    "llama-100m-often-repeating": (
        "LlamaForCausalLM",
        {**_llama(768, 2048, 12, 12)[1], "tie_word_embeddings": True, "initializer_range": 0.028},
    ),
    # its first layer alone has about 70 % of its tokens
    "granite-88m": (
        "GraniteForCausalLM",
        {**_llama(768, 2048, 12, 12)[1], "vocab_size": 4096, "residual_multiplier": 0.06, "embedding_multiplier": 12.0},
    ),
    "llama-20m": _llama(256, 688, 4, 8),
    "llama-1gb": _llama(1024, 2816, 16, 16),
    "mixtral-small": _mixture("MixtralForCausalLM", 8, 2, 896),
    "qwen3-moe-small": _mixture("Qwen3MoeForCausalLM", 32, 4, 192),
    "mistral-long": (
        "MistralForCausalLM",
        {
            **_llama(128, 344, 4, 4)[1],
            **{"num_key_value_heads": 4, "vocab_size": 4000, "max_position_embeddings": 8192},
        },
    ),
    "gpt2-124m": ("GPT2LMHeadModel", {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
    "llava-100m": _llava(
        {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 6},
        **{"hidden": 640, "intermediate": 1760, "layers": 10, "heads": 10},
    ),
}


def _cases_of(model: str, label: str, peers: tuple[str, ...], engines: tuple[str, ...] = ()) -> list[Case]:
    """Generation and training of one model; the first peer is the baseline. transformers-tp2 does not support GPT-2.

    Args:
        engines: further peers of generation.
    """
    few = {"batch": 2, "length": 8, "timed": 1}
    counted = tuple(peer for peer in (NATIVE, NATIVE_EXPERTS, OURS, OUR_EXPERTS) if peer in peers)
    return [
        *(
            Case(
                *(f"{model}-generate-b{batch}", f"{label}, generate, batch {batch}", measure.generate, model),
                peers=(*peers, *engines),
                baseline=peers[0],
                options={"batch": batch, "prompt": 32, "new": 64, "timed": 3},
                smoke={"new": 4, "timed": 1},
            )
            for batch in (1, 8)
        ),
        Case(
            *(f"{model}-train", f"{label}, train, 4 x 256 tokens", measure.train, model, peers),
            baseline=peers[0],
            tolerance=1e-3,
            options={"batch": 4, "length": 256, "timed": 3},
            smoke=few,
        ),
        Case(
            *(f"{model}-collectives", f"{label}, train, 4 x 256 tokens", measure.collectives, model, counted),
            baseline="Megatron-LM",
            options={"batch": 4, "length": 256},
            smoke={"batch": 2, "length": 8},
        ),
    ]


def _mixtures_of(model: str, label: str) -> list[Case]:
    """Generation and training of a mixture of experts, with tensor and with expert parallelism over two ranks."""
    return _cases_of(model, label, (ALONE, NATIVE, NATIVE_EXPERTS, OURS, OUR_EXPERTS))


def _stages_of(model: str, label: str, peers: tuple[str, ...]) -> Case:
    """Two pipeline stages, eight micro-batches. transformers' pipeline cannot train: tensor parallelism is its peer."""
    return Case(
        *(f"{model}-stages", f"{label}, train, 8 x 128 tokens", measure.train_in_stages, model, peers),
        baseline=TORCH_STAGES,
        tolerance=1e-3,
        options={"batch": 8, "length": 128, "timed": 3},
        smoke={"batch": 4, "length": 8, "timed": 1},
    )


def _fused(name: str, what: str, runner: Callable[..., Result], ours: str = OURS_ALONE, **options: Any) -> Case:
    """A fused operation or model, beside the same one unfused in the same processes."""
    model, smoke = options.pop("model", ""), options.pop("smoke", {})
    return Case(f"fused-{name}", what, runner, model, (ours,), "unfused", options=options, smoke={"timed": 1, **smoke})


def _fused_cases() -> list[Case]:
    head = {"rows": 4096, "vocab": 50257, "hidden": 768, "timed": 3, "smoke": {"rows": 64, "vocab": 100}}
    cases = [
        _fused("loss", "Head and loss of GPT-2, 4096 tokens", fusing.loss, **head),
        _fused("loss-tp2", "Head and loss of GPT-2, 4096 tokens, tp=2", fusing.loss, OURS, **head),
        _fused("mlp", "MLP of GPT-2, 1024 tokens", fusing.mlp, rows=1024, hidden=768, timed=20),
        _fused("adamw", "AdamW on GPT-2 124M", fusing.adamw, model="gpt2-124m", timed=10),
    ]
    for batch, length in ((8, 128), (32, 512), (128, 1024)):
        sizes = {"batch": batch, "length": length, "vocab": 50257, "timed": 20, "smoke": {"vocab": 100}}
        cases.append(
            _fused(f"ngrams-{batch}x{length}", f"n-grams of {batch} x {length} tokens", fusing.blocking, **sizes)
        )
    for family in fusing.FAMILIES:
        train = {"family": family, "batch": 4, "length": 128, "timed": 8, "smoke": {"length": 8}}
        write = {"family": family, "batch": 4, "length": 16, "new": 48, "timed": 8, "smoke": {"length": 8, "new": 4}}
        cases.append(_fused(f"train-{family}", f"A small {family}, train, 4 x 128 tokens", fusing.training, **train))
        cases.append(
            _fused(f"generate-{family}", f"A small {family}, generate 4 x 48 tokens", fusing.generation, **write)
        )
        if family in ("gpt2", "llama"):
            half = {**write, "dtype": "bfloat16", "timed": 3}
            what = f"A small {family} in bfloat16, generate 4 x 48 tokens"
            cases.append(_fused(f"generate-{family}-bf16", what, fusing.generation, **half))
    for model, label in (("llama-100m", "Llama 100M"), ("gpt2-124m", "GPT-2 124M")):
        for batch in (1, 8, 32):
            sizes = {"model": model, "batch": batch, "prompt": 32, "new": 16, "timed": 5, "smoke": {"new": 4}}
            name, what = f"decode-{model}-b{batch}", f"{label}, generate {batch} x 16 tokens"
            cases.append(_fused(name, what, fusing.decoding, **sizes))
            cases.append(_fused(f"{name}-tp2", f"{what}, tp=2", fusing.decoding, OURS, **sizes))
            new = 64 if batch == 1 else 16  # with 16 tokens, the prompt takes half of the time of one text
            for weights in ("bfloat16", "int8") if batch < 32 else ():
                narrow = f"{label}, generate {batch} x {new} tokens, weights={weights!r}"
                options = {**sizes, "new": new, "weights": weights}
                cases.append(_fused(f"{name}-{weights}", narrow, fusing.decoding, **options))
        check = {"model": model, "timed": 5}
        case = _fused(f"check-{model}", f"{label}, the check of fuse()", fusing.checking, ONE_THREAD, **check)
        cases.append(replace(case, baseline="loading"))
    return cases


def _token_cases() -> list[Case]:
    return [
        Case(
            *(f"token-llama-100m{'-' * bool(weights)}{weights or ''}", f"Llama 100M{what}", token_profile.token),
            *("llama-100m", (ONE_THREAD,)),
            baseline="unfused",
            options={"new": 16, "timed": 4, "weights": weights},
            smoke={"new": 2, "timed": 1},
        )
        for weights, what in ((None, ""), ("bfloat16", ", weights='bfloat16'"), ("int8", ", weights='int8'"))
    ]


def _fuse_check_cases() -> list[Case]:
    """``python -m benchmarks fuse-check``."""
    return [
        Case(
            *(f"fuse-check-{family}", f"A small {family}", fuse_check.slowdown, ""),
            peers=(ONE_THREAD, OURS_ALONE, OURS),
            baseline="",
            options={"family": family, "length": 16, "new": 8, "vocab": 8192, "timed": fuse_check.MOST},
            smoke={"length": 4, "new": 2, "vocab": 128, "timed": 2},
            limit=fuse_check.SLOWER,
        )
        for family in fuse_check.CHECKED
    ]


def _deployed_cases() -> list[Case]:
    return [
        Case(
            *("deploy-start", "Llama of 1.1 GB, from python to an answer", deploying.start, "llama-1gb"),
            peers=(ALONE, DEPLOYED),
            baseline=ALONE,
        ),
        Case(
            *("deploy-call", "Call of a tiny GPT-2", deploying.call_overhead, "gpt2-124m", (DEPLOYED,)),
            baseline="goal",
            options={"timed": 500},
            smoke={"timed": 20},
        ),
        *(
            Case(
                f"deploy-generate-{name}",
                f"One token of a tiny GPT-2 by generate, {label}",
                *(deploying.call_of_generate, "gpt2-124m", peers),
                baseline=peers[0] if peers[1:] else "in process",
                options={"timed": 2000, "ranks": ranks, "threads": threads},
                smoke={"timed": 20},
            )
            for name, label, ranks, threads, peers in (
                ("1", "one thread", 1, 1, (DEPLOYED,)),
                ("1-tp2", "one thread, tp=2", 2, 1, (OURS, DEPLOYED)),
                ("8", "eight threads", 1, 8, (DEPLOYED,)),
            )
        ),
        Case(
            *("deploy-memory", "Llama of 1.1 GB, the application", deploying.application_memory, "llama-1gb"),
            peers=(DEPLOYED,),
            baseline="checkpoint",
        ),
    ]


CASES = {
    case.name: case
    for case in (
        *_cases_of("llama-100m", "Llama 100M", (NATIVE, OURS, OURS_FUSED, ALONE, DEEPSPEED), ENGINES),
        *_cases_of("gpt2-124m", "GPT-2 124M", (ALONE, OURS, OURS_FUSED), ENGINES),
        *_mixtures_of("mixtral-small", "A small Mixtral"),
        *_mixtures_of("qwen3-moe-small", "A small Qwen3 MoE"),
        _stages_of("llama-100m", "Llama 100M", (TORCH_STAGES, OUR_STAGES, NATIVE, ROWS, ALONE)),
        _stages_of("gpt2-124m", "GPT-2 124M", (TORCH_STAGES, OUR_STAGES, ROWS, ALONE)),
        Case(
            *("schedules", "Four stages of slept work, 16 micro-batches", measure.idle_time, ""),
            peers=(TORCH_1F1B, "torch-interleaved-zb-pp4", *OUR_SCHEDULES),
            baseline=TORCH_1F1B,
            options={"seconds": 0.25, "number": 16, "timed": 2},
            smoke={"seconds": 0.005, "number": 8, "timed": 1},
        ),
        Case(
            *("llama-100m-sequence", "Llama 100M, train, 4 x 512 tokens, tp=2", measure.train_divided, "llama-100m"),
            peers=(OURS, OURS_DIVIDED, NATIVE, TORCH_DIVIDED),
            baseline=OURS,
            tolerance=1e-3,
            options={"batch": 4, "length": 512, "timed": 3},
            smoke={"batch": 2, "length": 8, "timed": 1},
        ),
        *(
            Case(
                *(f"llama-20m-context-{length}", f"Llama 20M, train, a row of {length} tokens", measure.train_divided),
                *("llama-20m", (OURS_ALONE, OURS_OVER_CONTEXT, ULYSSES)),
                baseline=OURS_ALONE,
                tolerance=1e-3,
                options={"batch": 1, "length": length, "timed": 3},
                smoke={"batch": 1, "length": 8, "timed": 1},
            )
            for length in (2048, 4096, 8192)
        ),
        Case(
            *("llama-20m-context-2gb", "Llama 20M, train a row within 2 GB a rank", measure.longest_row, "llama-20m"),
            peers=(OURS_ALONE, OURS_OVER_CONTEXT, ULYSSES),
            baseline=OURS_ALONE,
            options={"first": 2048, "increment": 256, "most": 16384, "megabytes": 2000.0},
            smoke={"first": 16, "increment": 2032, "most": 2048, "megabytes": 2000.0},
        ),
        Case(
            *("llama-20m-context-prompt-4096", "Llama 20M, a prompt of 4,096 tokens", measure.first_token),
            *("llama-20m", (ONE_THREAD, OURS_ALONE, OURS_OVER_CONTEXT)),
            baseline=ONE_THREAD,
            options={"batch": 1, "prompt": 4096, "timed": 5},
            smoke={"batch": 1, "prompt": 520, "timed": 1},
        ),
        Case(
            *("llama-100m-lora", "Llama 100M, train LoRA of rank 16, 4 x 256 tokens", measure.train_lora),
            *("llama-100m", (ALONE, OURS)),
            baseline=ALONE,
            tolerance=1e-3,
            options={"batch": 4, "length": 256, "timed": 3, "rank": 16},
            smoke={"batch": 2, "length": 8, "timed": 1},
        ),
        Case(
            *("llama-100m-rollouts", "Llama 100M, 4 groups of 8 completions", measure.rollouts, "llama-100m"),
            peers=(ALONE, "transformers-batch", OURS, OUR_BATCH, OUR_FUSED_BATCH),
            baseline="transformers-batch",
            options={"prompts": 4, "group": 8, "prompt": 64, "new": 256, "mean": 128, "timed": 1},
            smoke={"prompts": 2, "group": 2, "prompt": 4, "new": 4, "mean": 3, "timed": 1},
        ),
        Case(
            *("llama-100m-mixed-rows", "Llama 100M, 32 rows of 32 to 2,048 tokens", measure.mixed_rows, "llama-100m"),
            peers=(RESERVED, OURS_ALONE),
            baseline=RESERVED,
            options={"rows": 32, "shortest": 32, "longest": 2048, "steps": 8, "timed": 3},
            smoke={"rows": 3, "shortest": 4, "longest": 700, "steps": 2, "timed": 1},
        ),
        Case(
            *("llama-100m-grpo", "Llama 100M, GRPO, 2 groups of 8 completions", grpo.take_steps, "llama-100m"),
            peers=(ALONE, "transformers-batch", OURS, OUR_BATCH, OUR_FUSED_BATCH),
            baseline=ALONE,
            options={"prompts": 2, "group": 8, "prompt": 64, "new": 256, "mean": 128, "timed": 1},
            smoke={"prompts": 2, "group": 2, "prompt": 4, "new": 4, "mean": 3, "timed": 1},
        ),
        *(
            Case(
                *(f"{model}-drafts-{prompts}", f"{label}, {prompts} repeating prompts", measure.draft, model),
                peers=(ALONE, LOOKUP, *OUR_DRAFTING),
                baseline=LOOKUP,
                options={"prompts": prompts, "passage": 32, "repeats": 4, "new": 96, "drafted": 4, "timed": 3},
                smoke={"prompts": 2, "passage": 4, "repeats": 2, "new": 8, "timed": 1},
            )
            for model, label in (
                ("llama-100m", "Llama 100M"),
                ("llama-100m-repeating", "Llama 100M that repeats"),
                ("llama-100m-often-repeating", "Llama 100M that often repeats"),
            )
            for prompts in (1, 8)
        ),
        *(
            Case(
                *(f"granite-88m-drafts-{prompts}", f"Granite 88M, {prompts} prompts, drafts of its first layer"),
                *(measure.draft, "granite-88m", (ALONE, LOOKUP, "llama.cpp", "llama.cpp-drafts", *OUR_DRAFTING)),
                baseline=ALONE,
                options={"prompts": prompts, "passage": 32, "repeats": 1, "new": 96, "drafted": 4, "timed": 3}
                | {"layers": 1},
                smoke={"prompts": 2, "passage": 4, "new": 8, "timed": 1},
            )
            for prompts in (1, 8)
        ),
        Case(
            *("llava-100m", "LLaVA 105M, 196 tokens an image", vision.text_and_images, "llava-100m"),
            peers=(ALONE, OURS, OURS_BY_IMAGES),
            baseline=ALONE,
            tolerance=1e-3,
            options={"batch": 4, "prompt": 60, "new": 33, "timed": 3},
            smoke={"batch": 2, "prompt": 8, "new": 4, "timed": 1},
        ),
        Case(
            *("serve-threads", "Llama 20M, 8 threads x 50 prompts", measure.serve, "llama-20m", (DEPLOYED,)),
            baseline="one by one",
            options={"clients": 8, "requests": 50, "prompt": 16, "new": 16},
            smoke={"requests": 2, "new": 4},
        ),
        *(
            Case(
                *(f"serve-streams-{clients}", f"Llama 20M, {clients} streaming clients", serving.streams, "llama-20m"),
                peers=SERVERS,
                baseline=CONTINUOUS,
                options={"clients": clients, "interval": 1 / clients, "requests": 3, "prompt": (8, 64), "new": 64},
                smoke={"clients": 2, "requests": 1, "new": 4},
            )
            for clients in (8, 32)
        ),
        Case(
            *("serve-images", "LLaVA 105M, 8 streaming clients with images and 8 without", serving.image_streams),
            *("llava-100m", ("transformers-serve", *OUR_IMAGE_SERVERS)),
            baseline="transformers-serve",
            options={"clients": 8, "interval": 1 / 16, "requests": 2, "prompt": (8, 64), "new": 64},
            smoke={"clients": 2, "requests": 1, "new": 4},
        ),
        Case(
            *("agreement", "What the next step computes, to the other rank", serving.agreement, "", (OURS,)),
            baseline="gloo",
            options={"rows": 32, "timed": 3000},
            smoke={"timed": 10},
        ),
        Case(
            *("load-memory", "Llama of 1.1 GB, load", measure.load_memory, "llama-1gb", (NATIVE, OURS, ALONE)),
            baseline="checkpoint",
        ),
        Case(
            *("merge-memory", "Llama of 1.1 GB, save merged", measure.merge_memory, "llama-1gb", (NATIVE, OURS)),
            baseline="shard + largest tensor",
        ),
        *(
            Case(
                *(f"long-masks-{length}", f"A small Mistral, train, {length} tokens", long_sequences.train_long),
                *("mistral-long", (ALONE, OURS_ALONE)),
                baseline=ALONE,
                tolerance=1e-3,
                options={"length": length, "batch": 1, "window": 512, "timed": 1},
                smoke={"length": 1024, "window": 64, "timed": 1},
            )
            for length in (4096, 8192)
        ),
        *_fused_cases(),
        *_fuse_check_cases(),
        *_token_cases(),
        *_deployed_cases(),
        *(
            Case(
                *(f"all-reduce-{name}", f"All-reduce of {label}, float32", measure.all_reduce, "", (OURS,)),
                baseline="gloo",
                options={"kilobytes": kilobytes, "timed": timed},
                smoke={"timed": 3},
            )
            for name, label, kilobytes, timed in (("4kb", "4 KB", 4, 3000), ("3mb", "3 MB", 3072, 300))
        ),
        *(
            Case(
                *(f"preprocess-{baseline.split('-')[0]}", what, data.preprocess, "", (baseline, OUR_DATA)),
                baseline=baseline,
                options={"megabytes": 64},
                smoke={"megabytes": 1},
            )
            for baseline, what in (
                (MEGATRON, "Tokenise 64 MB, beside Megatron's loop"),
                (DATASETS, "Tokenise 64 MB, beside datasets.map"),
            )
        ),
        Case(
            *("preprocess-memory", "Tokenise 1 GB", data.preprocess_memory, "", (OUR_DATA,)),
            baseline="100 MB of input",
            options={"megabytes": 1000},
            smoke={"megabytes": 10},
        ),
        Case(
            *("index-samples", "10 M documents, 5 B tokens", data.index_samples, "", (OUR_DATA,)),
            baseline="index",
            options={"documents": 10_000_000, "length": 1024},
            smoke={"documents": 10_000},
        ),
        Case(
            *("blend", "Blend 1,000 datasets, 10 M samples", data.blend, "", (OUR_DATA,)),
            baseline="",
            options={"datasets": 1000, "samples": 10_000_000},
            smoke={"samples": 10_000},
        ),
    )
}
