"""The README's table of architectures, generated from the registry."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto import configuration_auto as auto_configurations
from transformers.models.auto import modeling_auto as auto

from oslo_models import registry
from oslo_models.cli.option_effects import Effect, effects
from oslo_models.fusion.rules import fusion_candidates
from oslo_models.layers.entries import (
    ColumnParallel,
    Plan,
    Replicated,
    VocabParallel,
)

BEGIN, END = "<!-- architectures:begin -->", "<!-- architectures:end -->"
COVERAGE_BEGIN, COVERAGE_END = "<!-- coverage:begin -->", "<!-- coverage:end -->"
MAPPINGS = {
    "AutoModelForCausalLM": auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "AutoModelForSeq2SeqLM": auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "AutoModelForMaskedLM": auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "AutoModelForSequenceClassification": auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    "AutoModelForImageTextToText": auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    "AutoModelForImageClassification": auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    "AutoModelForSpeechSeq2Seq": auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
    "AutoModelForAudioClassification": auto.MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES,
}
"""The auto classes of transformers whose types are counted together."""
MORE_MAPPINGS = {
    "AutoModelForMultimodalLM": auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    "AutoModelForCTC": auto.MODEL_FOR_CTC_MAPPING_NAMES,
}
TIED_HEADS = ("deformable_detr", "grounding-dino", "mm-grounding-dino", "rt_detr_v2")
"""Model types with a head for each block of the decoder. transformers ties them, and fails with one block."""
DETECTORS = ("conditional_detr", "deformable_detr", "detr", "table-transformer")
COLUMNS = ("model type", "classes", "tp", "pp", "ep", "sp", "cp", "fused", "kind of model, and what stays replicated")
DEPTHS = {
    *("num_hidden_layers", "num_layers", "num_encoder_layers", "num_decoder_layers", "n_layer", "n_layers"),
    *("encoder_layers", "decoder_layers", "l_layers", "r_layers", "x_layers"),
    *("encoder_num_hidden_layers", "decoder_num_hidden_layers"),
}
"""The attributes in which configurations state their number of blocks."""
KERNELS = {
    **{"head and cross entropy": "loss", "root mean square norm": "norm", "LayerNorm": "norm", "gelu_new": "GeLU"},
    **{"bias and GeLU": "GeLU", "rotary positions": "rotary", "softmax of weights that are made": "softmax"},
    "dropout and residual": "dropout",
}
"""Short names of the fused operations."""


def table() -> str:
    """Return a row per architecture: its classes without the common prefix, in bold if the vocabulary is sharded."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    lines += [f"| {' | '.join(_row(model_type))} |" for model_type in sorted(registry.ARCHITECTURES)]
    return "\n".join(lines)


def coverage() -> str:
    """Return a row per auto class of transformers: its model types, those of the zoo, and the names of the others."""
    here = {
        auto_configurations.CONFIG_MAPPING_NAMES[kind] for kind in (*registry.ARCHITECTURES, *registry.SAME_CLASSES)
    }
    rows = {f"`{name}`": {*names} for name, names in {**MAPPINGS, **MORE_MAPPINGS}.items()}
    rows["the first eight together"] = {kind for names in MAPPINGS.values() for kind in names}
    lines = ["| auto class | model types | here | not here |", "|---|---|---|---|"]
    for name, kinds in rows.items():
        missing = sorted(kind for kind in kinds if auto_configurations.CONFIG_MAPPING_NAMES[kind] not in here)
        shown = ", ".join(f"`{kind}`" for kind in missing) if name.startswith("`") else ""
        lines.append(f"| {name} | {len(kinds)} | {len(kinds) - len(missing)} | {shown or '-'} |")
    return "\n".join(lines)


def update_table(text: str) -> str:
    """Return ``text`` with the current tables between the markers."""
    for begin, end, content in ((BEGIN, END, table()), (COVERAGE_BEGIN, COVERAGE_END, coverage())):
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}\n\n{content}\n\n{end}{rest.partition(end)[2]}"
    return text


def _row(model_type: str) -> list[str]:
    prefix, classes = registry.ARCHITECTURES[model_type], registry.model_classes(model_type)
    names = {name.removeprefix(prefix): cls for name, cls in classes.items()}
    heads = [f"**{name}**" if _has_sharded_vocabulary(cls) else name for name, cls in names.items()]
    plans = {name: _plan(cls) for name, cls in names.items()}
    reasons = {name: reason for name, plan in plans.items() if (reason := plan.pipeline.single_stage_reason)}
    first = next((cls for cls in classes.values() if _has_sharded_vocabulary(cls)), next(iter(classes.values())))
    notes = _first_sentence(model_type)
    changes = effects(names)
    for reason in dict.fromkeys(reasons.values()):
        which = [name for name, own in reasons.items() if own == reason]
        notes += f" No stages{_of_classes(which, names)}: {reason}."
    notes += _changes(changes, names)
    if model_type in registry.NO_SEQUENCE_PARALLEL:
        notes += f" No sequence parallelism: {registry.NO_SEQUENCE_PARALLEL[model_type]}."
    kinds = {effect.kind for effect in changes}
    may_split = (
        "stages" in kinds or len(reasons) < len(names) or all(each.startswith("with ") for each in reasons.values())
    )
    pp = " or ".join(["blocks"] * may_split + ["1"] * (bool(reasons) or "one stage" in kinds))
    return [
        f"`{model_type}`",
        f"{prefix}: {', '.join(heads)}",
        _tensor_parallel(next(iter(plans.values()))) + (" or 1" if "one rank" in kinds else ""),
        pp,
        "experts" if any(plan.has_experts() for plan in plans.values()) else "-",
        "-" if model_type in registry.NO_SEQUENCE_PARALLEL else "tokens",
        registry.CONTEXT_PARALLEL.get(model_type, "-"),
        ", ".join(_fused_operations(first)) or "-",
        notes,
    ]


def _has_sharded_vocabulary(cls: Any) -> bool:
    return any(isinstance(entry, VocabParallel) for entry in (*cls.head_plan.values(), *_plan(cls).head.values()))


def _plan(cls: Any) -> Plan:
    return cls.plan(cls.config_class())


def _of_classes(which: Sequence[str], names: Collection[str]) -> str:
    return "" if len(which) == len(names) else f" ({', '.join(which)})"


def _changes(changes: Mapping[Effect, list[str]], names: Collection[str]) -> str:
    """Return sentences about the options that change how models of a type are divided."""
    says = {"one rank": "One rank", "one stage": "No stages", "stages": "Stages", "experts": "Experts"}
    says["no experts"] = "No experts"
    text = ""
    for effect, which in changes.items():
        if effect.kind in says:
            reason = f": {_without_option(effect.reason)}" if effect.reason else ""
            text += f" {says[effect.kind]}{_of_classes(which, names)} with `{effect.option}={effect.value!r}`{reason}."
    for limited in ("ranks", "stages"):
        options = [f"`{effect.option}`" for effect in changes if effect.kind == f"limits {limited}"]
        text += f" Limits {limited}: {', '.join(options)}." if options else ""
    return text


def _without_option(reason: str) -> str:
    """Return a reason without its leading option."""
    return reason.partition(", ")[2] if reason.startswith("with ") else reason


def _tensor_parallel(plan: Plan) -> str:
    """Return the sharded dimension of the blocks. It limits the number of ranks."""
    entries = [entry for kind in plan.kinds_of_blocks() for entry in kind.values()]
    convolves = any(isinstance(entry, ColumnParallel) and entry.channels for entry in entries)
    if plan.max_ranks() is not None and not (convolves and all(map(_is_of_channels, entries))):
        return "heads"
    if convolves or any(entry.is_recurrent for entry in entries):
        return "channels"
    return "MLP" if any(isinstance(entry, ColumnParallel) for entry in entries) else "vocabulary"


def _is_of_channels(entry: Replicated) -> bool:
    return not isinstance(entry, ColumnParallel) or entry.channels


WITHOUT_DEFAULT: Mapping[str, Any] = {
    **{"layer_types": ["full_attention"], "mlp_layer_types": ["dense"], "deepstack_layer_map": []},
    **{"spatial_target_layers": [], "downsample_rate": "1/2", "vocabulary_map": {}, "vocab_size": 33},
}
"""Options without a default in some configurations, with a value for each."""


def _fused_operations(cls: Any) -> list[str]:
    """Return the operations that `fuse` replaces on a GPU, found in a model with one block."""
    config = cls.config_class()
    for each in (config, *(part for part in vars(config).values() if isinstance(part, PreTrainedConfig))):
        for name in DEPTHS & each.to_dict().keys():
            if each.model_type != "inkling_vision":  # with one layer, it needs scipy
                setattr(each, name, 1)
        if hasattr(each, "num_kv_shared_layers"):  # there is no earlier block to share with
            each.num_kv_shared_layers = 0
            each.layer_types = each.layer_types[:1]
        if each.model_type == "cohere_compass_text":  # the default lacks an entry for each kind of block
            each.rope_parameters = dict.fromkeys(each.layer_types)
        if vars(each).get("head_dim", 0) is None:
            each.head_dim = each.hidden_size // each.num_attention_heads
        for name, value in WITHOUT_DEFAULT.items():
            if getattr(each, name, value) is None:
                setattr(each, name, value)
    if config.model_type in TIED_HEADS:
        config.decoder_layers = 2
    if config.model_type in DETECTORS:  # their default backbone is from a package that may be missing
        config.backbone_config = CONFIG_MAPPING["resnet"]()
    if vars(config).get("num_key_value_heads", 0) is None:  # the default of HunYuan
        config.num_key_value_heads = config.num_attention_heads
    for name in ("num_local_experts", "n_routed_experts", "n_shared_experts"):  # dots.llm1 has no defaults
        if getattr(config, name, 0) is None:
            setattr(config, name, 1)
    if hasattr(config, "attn_config") and hasattr(config, "ffn_config"):  # the default of DBRX lacks it
        config.attn_config.rope_theta = 10000.0
    if config.model_type == "aya_vision":  # the heads of the default do not divide its width
        config.vision_config.num_attention_heads = 16
    with torch.device("meta"):
        model = cls._from_config(config)
    operations = {candidate.operation for candidate in fusion_candidates(model, "triton") if candidate.cls is not None}
    parts = {part for operation in operations for part in operation.split(", ")}
    return sorted({KERNELS.get(part, part) for part in parts})


def _first_sentence(model_type: str) -> str:
    return " ".join((registry.load(model_type).__doc__ or "").split("\n\n")[0].split())
