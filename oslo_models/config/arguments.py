"""The arguments of the constructors of `ParallelModel`, and the checks on them."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from transformers import PreTrainedConfig

from oslo_models.checkpoint.quantized import check_quantization, quantization_of
from oslo_models.checkpoint.quantized.weight import missing_library
from oslo_models.config.sources import HUB_ARGUMENTS
from oslo_models.distributed.mesh import check_size
from oslo_models.distributed.watchdog import TIMEOUT
from oslo_models.media.division import IMAGES, TOWER_PARALLEL, WEIGHTS
from oslo_models.registry import (
    CONTEXT_PARALLEL,
    MTP_HEADS,
    NO_CONTEXT_PARALLEL,
    NO_DIVIDED_IMAGES,
    NO_SEQUENCE_PARALLEL,
    count_mtp_heads,
    did_you_mean,
    model_type_of,
)
from oslo_models.sharding.pipeline_rules import ONE_F_ONE_B, SCHEDULES
from oslo_models.sharding.plan import DividedTower, Plan

UNSUPPORTED = {
    "places the weights in transformers' own way; sizes here are tensor_parallel_size and pipeline_parallel_size": (
        *("device_map", "tp_plan", "tp_size", "tp_mesh", "device_mesh", "distributed_config", "max_memory"),
    ),
    "is not supported; quantization_config=BitsAndBytesConfig(...) quantises weights as they are loaded": (
        *("load_in_8bit", "load_in_4bit"),
    ),
    "is not supported; load it with transformers on one process, and save that with save_pretrained()": ("gguf_file",),
    "is not needed: the zoo runs no code of checkpoints": ("trust_remote_code",),
    "is not supported; weights are read from the checkpoint": ("state_dict", "from_tf", "from_flax", "offload_folder"),
}
"""Arguments of transformers' ``from_pretrained`` that the constructors refuse, by the reason."""
IGNORED = ("low_cpu_mem_usage", "weights_only", "use_safetensors", "output_loading_info")
"""Arguments of transformers' ``from_pretrained`` that do not affect how weights are read here."""
_OF_TRANSFORMERS = (
    *("dtype", "torch_dtype", "attn_implementation", "experts_implementation", "config", "variant", "subfolder"),
    *("ignore_mismatched_sizes", "key_mapping", "quantization_config", *IGNORED, *HUB_ARGUMENTS),
    *("deployment", *(name for names in UNSUPPORTED.values() for name in names)),
)
"""Arguments of transformers' ``from_pretrained`` that the constructors take."""


@dataclass(frozen=True)
class Arguments:
    """Constructor arguments that transformers does not have."""

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    micro_batch_size: int = 1
    resize_token_embeddings: int | None = None
    seed: int | None = None
    deploy: bool | None = None
    gather_logits: bool | None = None
    timeout: float = TIMEOUT
    blocks_per_stage: Sequence[int] | None = None
    check_inputs: bool | int | str = True
    dequantize: bool = False
    share_loss: bool = False
    share_logits: bool = False
    expert_parallel_size: int = 1
    plan: Plan | Callable[[Any], Plan] | str | None = None
    tensor_parallel_shares: Sequence[int] | None = None
    schedule: str = ONE_F_ONE_B
    sequence_parallel: bool = False
    context_parallel_size: int = 1
    tower_parallel: str = WEIGHTS
    mtp_heads: bool = False
    mtp_loss_weight: float = 0.0

    def check(self, kwargs: Mapping[str, Any]) -> None:
        """Check the arguments that do not depend on the configuration of the model.

        Args:
            kwargs: further keyword arguments of the constructor.

        Raises:
            ValueError: an argument is invalid or not supported.
        """
        sizes = ("tensor_parallel_size", "pipeline_parallel_size", "expert_parallel_size", "context_parallel_size")
        for name in (*sizes, "micro_batch_size"):
            check_size(name, getattr(self, name))
        if self.tensor_parallel_size % self.expert_parallel_size and (
            self.expert_parallel_size % self.tensor_parallel_size
        ):
            raise ValueError(
                f"expert_parallel_size={self.expert_parallel_size} must divide tensor_parallel_size="
                f"{self.tensor_parallel_size}, from 1 (each rank has a part of every expert) to "
                f"{self.tensor_parallel_size} (each rank has some of the experts as a whole), or be a multiple of it "
                "(experts over ranks that divide tokens, or over several replicas)"
            )
        self._check_shares()
        deployment = kwargs.get("deployment")
        if (self.deploy or deployment) and self.expert_parallel_size > self.tensor_parallel_size:
            raise ValueError(
                f"expert_parallel_size={self.expert_parallel_size} is over several replicas, and a deployed model has "
                f"one: use a divisor of tensor_parallel_size={self.tensor_parallel_size}"
            )
        flags = {"deploy": self.deploy, "deployment": deployment, "gather_logits": self.gather_logits}
        for name, flag in flags.items():
            if not isinstance(flag, (bool, type(None))):
                raise ValueError(f"{name} must be True, False or None, got {flag!r}")
        if not is_timeout(self.timeout):
            raise ValueError(f"timeout must be a number of seconds greater than 0, got {self.timeout!r}")
        when = self.check_inputs
        if not isinstance(when, bool) and when != "always" and not (isinstance(when, int) and when > 0):
            raise ValueError(f'check_inputs must be True, False, "always" or an integer of at least 1, got {when!r}')
        for name in ("dequantize", "share_loss", "share_logits", "sequence_parallel", "mtp_heads"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if self.share_logits and self.gather_logits is False:
            raise ValueError("share_logits=True needs the logits that gather_logits=False leaves out; pass one of them")
        if not isinstance(self.plan, (Plan, type(None))) and not callable(self.plan) and self.plan != "derive":
            raise ValueError(
                f'plan must be a Plan, a function from a configuration to one or "derive", got {self.plan!r:.100}'
            )
        blocks = self.blocks_per_stage
        if blocks is not None and not isinstance(blocks, (list, tuple)):
            raise ValueError(f"blocks_per_stage must be a list of integers, got {blocks!r}")
        for number in blocks or ():
            check_size("each of blocks_per_stage", number)
        if blocks and len(blocks) > 1 and self.pipeline_parallel_size == 1:
            raise ValueError(
                f"blocks_per_stage={list(blocks)} is for pipeline_parallel_size={len(blocks)}, and it is 1: set it, or "
                "leave blocks_per_stage out"
            )
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule must be one of {', '.join(map(repr, SCHEDULES))}, got {self.schedule!r}")
        if self.schedule != ONE_F_ONE_B and self.pipeline_parallel_size == 1:
            raise ValueError(
                f"schedule={self.schedule!r} is for pipeline stages, and pipeline_parallel_size is 1: set it, or leave "
                "schedule out"
            )
        self._check_token_division(kwargs)
        self._check_tower_parallel(kwargs)
        self._check_mtp_heads(kwargs)
        if self.seed is not None:
            check_size("seed", self.seed, 0)
        for reason, names in UNSUPPORTED.items():
            for name in names:
                if kwargs.get(name) is not None and kwargs[name] is not False:
                    raise ValueError(f"{name}={kwargs[name]!r} {reason}")
        if kwargs.get("quantization_config") is not None:
            _check_quantization_config(kwargs["quantization_config"])
        if None not in (self.deploy, deployment) and self.deploy != deployment:
            raise ValueError(f"deploy={self.deploy} and deployment={deployment} are the same argument; pass one")

    def _check_shares(self) -> None:
        shares, size = self.tensor_parallel_shares, self.tensor_parallel_size
        if shares is None:
            return
        if not isinstance(shares, (list, tuple)):
            raise ValueError(f"tensor_parallel_shares must be a list of integers such as [2, 1, 1], got {shares!r}")
        for share in shares:
            check_size("each of tensor_parallel_shares", share)
        if len(shares) != size:
            raise ValueError(
                f"tensor_parallel_shares={list(shares)} has {len(shares)} shares for tensor_parallel_size={size}: give "
                "one for each rank"
            )
        if self.expert_parallel_size > 1 and len(set(shares)) > 1:
            raise ValueError(
                f"tensor_parallel_shares={list(shares)} and expert_parallel_size={self.expert_parallel_size} are not "
                "supported together, since experts are divided evenly: leave one of them out. Shares alone divide the "
                "width of every expert"
            )

    @property
    def token_division(self) -> str | None:
        """The option that divides tokens, if any, as messages name it."""
        if self.context_parallel_size > 1:
            return f"context_parallel_size={self.context_parallel_size}"
        return "sequence_parallel=True" if self.sequence_parallel else None

    def _check_token_division(self, kwargs: Mapping[str, Any]) -> None:
        if (option := self.token_division) is None:
            return
        shares = {*(self.tensor_parallel_shares or ())}
        others = {f"expert_parallel_size={self.expert_parallel_size}": self.expert_parallel_size > 1}
        if self.context_parallel_size > 1:
            others = {
                "sequence_parallel=True": self.sequence_parallel,
                f"tensor_parallel_shares={self.tensor_parallel_shares}": len(shares) > 1,
            }
        elif self.tensor_parallel_size == 1:
            raise ValueError(
                f"{option} divides tokens over tensor-parallel ranks, and tensor_parallel_size is 1: set it, or leave "
                "sequence_parallel out"
            )
        others |= {
            "deploy=True": bool(self.deploy or kwargs.get("deployment")),
            f"schedule={self.schedule!r}": self.schedule != ONE_F_ONE_B,
            "plan": self.plan is not None,
            "quantization_config": kwargs.get("quantization_config") is not None,
        }
        for other, is_given in others.items():
            if is_given:
                raise ValueError(f"{option} cannot be used together with {other}: leave one of them out")

    def _check_division_of(self, cls: type[Any], is_quantized: bool) -> None:
        """Raise ``ValueError`` if the tokens of a model cannot be divided."""
        if (option := self.token_division) is None:
            return
        is_context = self.context_parallel_size > 1
        model_type = None if getattr(cls, "made_from", None) is not None else model_type_of(cls)
        reasons = NO_CONTEXT_PARALLEL if is_context else NO_SEQUENCE_PARALLEL
        names = [model_type, *(base.__name__ for base in cls.__mro__)]
        reason = next((reasons[name] for name in names if name in reasons), None)
        if model_type is None:
            reason = "it has a plan of your own"
        elif is_context and reason is None and model_type not in CONTEXT_PARALLEL:
            reason = f"it was not tested with {model_type}, see column cp of docs/models.md"
        if reason is not None:
            raise ValueError(f"{option} does not support {cls.__name__}: {reason}; leave it out")
        if is_quantized:
            raise ValueError(f"{option} does not support quantised weights: pass dequantize=True, or leave it out")

    def _check_tower_parallel(self, kwargs: Mapping[str, Any]) -> None:
        if self.tower_parallel not in TOWER_PARALLEL:
            known = " or ".join(f'"{each}"' for each in TOWER_PARALLEL)
            raise ValueError(f"tower_parallel must be {known}, got {self.tower_parallel!r}")
        if self.tower_parallel == WEIGHTS:
            return
        if self.tensor_parallel_size == 1:
            raise ValueError(
                f'tower_parallel="{IMAGES}" divides images over tensor-parallel ranks, and tensor_parallel_size is 1: '
                "set it, or leave tower_parallel out"
            )
        others = {
            "plan": self.plan is not None,
            "quantization_config": kwargs.get("quantization_config") is not None,
        }
        for other, is_given in others.items():
            if is_given:
                raise ValueError(
                    f'tower_parallel="{IMAGES}" cannot be used together with {other}: leave one of them out'
                )

    def _check_towers(self, cls: type[Any], plan: Plan, is_quantized: bool) -> None:
        """Raise ``ValueError`` if ranks cannot divide the images of a model."""
        if self.tower_parallel == WEIGHTS:
            return
        model_type, option = model_type_of(cls), f'tower_parallel="{IMAGES}"'
        reason = NO_DIVIDED_IMAGES.get(model_type or "")
        towers = plan.with_divided_images().towers.values()
        if not any(isinstance(entry, DividedTower) for tower in towers for entry in tower.head.values()):
            reason = "it has no tower of images"
        if reason is not None:
            raise ValueError(f'{option} does not support {cls.__name__}: {reason}; use tower_parallel="{WEIGHTS}"')
        if is_quantized:
            raise ValueError(
                f'{option} does not support quantised weights: pass dequantize=True, or use tower_parallel="{WEIGHTS}"'
            )

    def _check_mtp_heads(self, kwargs: Mapping[str, Any]) -> None:
        weight = self.mtp_loss_weight
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 <= weight < math.inf:
            raise ValueError(f"mtp_loss_weight must be a number of at least 0, got {weight!r}")
        if weight and not self.mtp_heads:
            raise ValueError(f"mtp_loss_weight={weight} is the weight of the heads of mtp_heads=True: pass it, too")
        others = {
            self.token_division or "": self.token_division is not None,
            "plan": self.plan is not None,
            "quantization_config": kwargs.get("quantization_config") is not None,
        }
        for other, is_given in others.items():
            if is_given and self.mtp_heads:
                raise ValueError(f"mtp_heads=True cannot be used together with {other}: leave one of them out")

    def _check_heads_of(self, cls: type[Any], config: PreTrainedConfig, is_quantized: bool) -> None:
        """Raise ``ValueError`` if a model has no MTP heads."""
        if not self.mtp_heads:
            return
        model_type = model_type_of(cls) or ""
        if model_type not in MTP_HEADS or not cls.__name__.endswith("ForCausalLM"):
            reason = f"it is none of the language models with heads: {', '.join(MTP_HEADS)}"
        elif not count_mtp_heads(cls, config):
            attribute, _ = MTP_HEADS[model_type]
            reason = f"its configuration has {attribute}={getattr(config, attribute, None)}"
        elif is_quantized:
            reason = "its weights are quantised; pass dequantize=True"
        else:
            return
        raise ValueError(f"mtp_heads=True does not support {cls.__name__}: {reason}, or leave mtp_heads out")

    def check_config(self, cls: type[Any], config: PreTrainedConfig) -> None:
        """Check the sizes against the model.

        Args:
            cls: the class of the model.
            config: its configuration.

        Raises:
            ValueError: the model cannot be sharded over this number of ranks or stages; or its weights are quantised
                and ``dequantize`` is not set; or its vocabulary cannot be resized to ``resize_token_embeddings``.
        """
        name, plan = type(config).__name__, cls.plan(config)
        quantization = quantization_of(config)
        is_quantized = quantization is not None and not self.dequantize
        self._check_towers(cls, plan, is_quantized)
        if self.tower_parallel == IMAGES:
            plan = plan.with_divided_images()
        plan.check_ranks(cls.__name__, config, self.tensor_parallel_size)
        plan.check_stages(cls.__name__, self.pipeline_parallel_size)
        if self.expert_parallel_size > 1 and not plan.has_experts():
            raise ValueError(
                f"expert_parallel_size={self.expert_parallel_size} is for mixtures of experts, and {cls.__name__} has "
                "no experts to divide: leave it at 1"
            )
        if quantization is not None:
            check_quantization(quantization, self.dequantize)
        self._check_division_of(cls, is_quantized)
        self._check_heads_of(cls, config, is_quantized)
        if (size := self.resize_token_embeddings) is None:
            return
        text = config.get_text_config()
        vocab = getattr(text, "vocab_size", None)
        if vocab is None or not (text is config or plan.towers):  # of several text models, none is resized
            raise ValueError(f"resize_token_embeddings={size} was passed, but a {name} has no vocab_size; leave it out")
        check_size("resize_token_embeddings", size, vocab, "vocab_size=")


def _check_quantization_config(config: Any) -> None:
    """Check a ``quantization_config`` that quantises weights after loading.

    Raises:
        ValueError: it cannot be applied to shards.
    """
    name = type(config).__name__
    if name == "BitsAndBytesConfig":
        if config.llm_int8_has_fp16_weight or not (config.load_in_4bit or config.load_in_8bit):
            raise ValueError(
                "quantization_config=BitsAndBytesConfig(...) needs load_in_4bit=True, or load_in_8bit=True without "
                "llm_int8_has_fp16_weight"
            )
        if (reason := missing_library("bitsandbytes")) is not None:
            raise ValueError(f"quantization_config=BitsAndBytesConfig(...) cannot be used: {reason}")
        return
    if name != "TorchAoConfig":
        raise ValueError(
            f"quantization_config={name}(...) is not supported: weights can be quantised as they are loaded by a "
            "TorchAoConfig or a BitsAndBytesConfig. For a checkpoint that is already quantised, leave it out: "
            "config.json says how"
        )
    kind = type(config.quant_type).__name__
    if kind == "FqnToConfig" or config.include_input_output_embeddings:
        what = "FqnToConfig" if kind == "FqnToConfig" else "include_input_output_embeddings=True"
        raise ValueError(
            f"TorchAoConfig with {what} is not supported: all linear layers of the blocks are quantised in the same "
            "way, except modules_to_not_convert"
        )


def check_unused(
    cls: type[Any], config: PreTrainedConfig, options: Mapping[str, Any], of_deployment: Sequence[str] = ()
) -> None:
    """Check the keyword arguments that neither a constructor nor the configuration has used.

    Args:
        cls: the class of the model. Its ``__init__`` may take some of them.
        config: its configuration.
        options: the unused keyword arguments.
        of_deployment: names of arguments that only ``deploy=True`` takes.

    Raises:
        ValueError: an argument is unknown. The message suggests the nearest known name.
    """
    parameters = [
        parameter
        for base in cls.__mro__
        if base.__module__.startswith("transformers.models.") and "__init__" in vars(base)
        for parameter in inspect.signature(base.__init__).parameters.values()  # type: ignore[misc]
    ]
    taken = {*_OF_TRANSFORMERS, *(parameter.name for parameter in parameters)}
    unknown = [name for name in options if name not in taken and not hasattr(config, name)]
    if not unknown or any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    name = unknown[0]
    if name in of_deployment:
        raise ValueError(f"{name}={options[name]!r} is for deploy=True")
    own = [field.name for field in fields(Arguments)]
    refused = {name for names in UNSUPPORTED.values() for name in names}
    hint = did_you_mean(name, [*own, *of_deployment, *(taken - refused), *config.to_dict()])
    raise ValueError(
        f"{cls.__name__} has no argument {name}{hint or f', and {type(config).__name__} has no attribute of that name'}"
    )


def of_class(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the checked keyword arguments that belong to the ``__init__`` of the model class."""
    return {key: value for key, value in options.items() if key == "attn_implementation" or key not in _OF_TRANSFORMERS}


def refuse_parallel(cls: type[Any], names: Collection[str]) -> None:
    """Raise ``TypeError`` if one of transformers' constructors was given an argument of the parallel constructors."""
    if given := [field.name for field in fields(Arguments) if field.name in names]:
        raise TypeError(
            f"transformers' own constructors of {cls.__name__} make the full model and do not take {', '.join(given)}: "
            "call from_pretrained_with_parallel or from_config_with_parallel"
        )


def is_timeout(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < 1e8


def parse_dtype(kwargs: dict[str, Any]) -> torch.dtype | None:
    """Remove ``dtype`` and ``torch_dtype`` from ``kwargs``. Return the dtype; ``None`` means the checkpoint's dtype.

    Raises:
        ValueError: the dtype is not a floating-point type, or the two arguments differ.
    """
    given = {key: kwargs.pop(key) for key in ("dtype", "torch_dtype") if kwargs.get(key) is not None}
    parsed = set()
    for key, value in given.items():
        dtype = getattr(torch, value, None) if isinstance(value, str) else value
        if value != "auto" and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ValueError(f'{key} must be a floating torch.dtype, its name or "auto", got {value!r}')
        parsed.add(None if value == "auto" else dtype)
    if len(parsed) > 1:
        raise ValueError(f"dtype={given['dtype']!r} and torch_dtype={given['torch_dtype']!r} differ; pass dtype only")
    return parsed.pop() if parsed else None
