"""Auto classes: select the zoo class for a configuration by transformers' mappings."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import transformers
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto import configuration_auto, modeling_auto

from oslo_models import registry
from oslo_models.checkpoint import current_folder
from oslo_models.config.sources import auto_config, read_raw


class _Auto:
    """Base of the auto classes. Each auto class represents one task."""

    mapping: ClassVar[str]

    def __init__(self) -> None:
        raise OSError(f"{type(self).__name__} is made by from_pretrained_with_parallel or from_config_with_parallel")

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """Raise ``TypeError``: call `from_pretrained_with_parallel` on these auto classes."""
        raise TypeError(
            f"{cls.__name__}.from_pretrained is transformers' own method: call from_pretrained_with_parallel for a "
            f"sharded model, or transformers.{cls.__name__}.from_pretrained for a full one"
        )

    @classmethod
    def class_for(cls, config: PreTrainedConfig) -> Any:
        """Return the zoo class for ``config``.

        Raises:
            ValueError: the zoo lacks a class. The message names the nearest model type, and lists the model types of
                this task.
        """
        found = getattr(modeling_auto, cls.mapping).get(config.model_type)
        module = configuration_auto.model_type_to_module_name(config.model_type)  # "clip" of "clip_vision_model"
        for kind in dict.fromkeys((config.model_type, module, config.get_text_config().model_type)):
            kind = registry.SAME_CLASSES.get(kind, kind)
            for name in found if isinstance(found, (tuple, list)) else (found,):
                if kind in registry.ARCHITECTURES and name in registry.names(kind):
                    return registry.find(name)
        raise cls._unknown(config.model_type)

    @classmethod
    def _class_with_plan(cls, config: PreTrainedConfig, plan: Any) -> Any:
        """Return the class for ``config``. With a plan, parallelize transformers' class if the zoo lacks one."""
        try:
            return cls.class_for(config)
        except ValueError:
            original = getattr(transformers, cls.__name__)._model_mapping.get(type(config), None)
            if plan is None or original is None:
                raise
            from oslo_models.modeling.parallel_class import parallel_class

            return parallel_class(original[0] if isinstance(original, (tuple, list)) else original, plan)

    @classmethod
    def _unknown(cls, model_type: str) -> ValueError:
        """Return the error for a model type without a class for this task."""
        if needed := registry.needed_release(model_type):
            return ValueError(f"{cls.__name__}: {needed}")
        known = [kind for kind in registry.ARCHITECTURES if kind in getattr(modeling_auto, cls.mapping)]
        if model_type in registry.ARCHITECTURES:
            others = f" Classes of {model_type}: {', '.join(registry.model_classes(model_type))}"
        else:
            others = f" {registry.ADDING}"
        nearest = registry.did_you_mean(model_type, known) or ";"
        return ValueError(
            f"{cls.__name__} has no class for {model_type!r}{nearest} it has: {', '.join(known)}.{others}"
        )

    @classmethod
    def from_pretrained_with_parallel(cls, pretrained_model_name_or_path: str | Path, *args: Any, **kwargs: Any) -> Any:
        """Call `ParallelModel.from_pretrained_with_parallel` of the class for the checkpoint's configuration.

        With ``plan=``, this includes classes that the zoo lacks: transformers' classes, and classes that are registered
        with transformers' auto classes.
        """
        hub = ("cache_dir", "force_download", "local_files_only", "revision", "token", "subfolder")
        known = {key: kwargs[key] for key in hub if key in kwargs}
        config = kwargs.get("config") or cls._config_of(pretrained_model_name_or_path, known)
        zoo_class = cls._class_with_plan(config, kwargs.get("plan"))
        if "config" in kwargs:
            kwargs["config"] = config_for(zoo_class, config)
        return zoo_class.from_pretrained_with_parallel(pretrained_model_name_or_path, *args, **kwargs)

    @classmethod
    def _config_of(cls, source: str | Path, hub: dict[str, Any]) -> PreTrainedConfig:
        """Return the configuration of a checkpoint. The model type in ``config.json`` determines its class."""
        if Path(source, hub.get("subfolder", "")).is_dir():
            source, hub = current_folder(Path(source, hub.get("subfolder", "")), "config.json"), {}
        model_type = read_raw(source, **hub).get("model_type", "")
        if model_type and model_type not in CONFIG_MAPPING:
            raise cls._unknown(model_type)
        return auto_config(source, **hub)

    @classmethod
    def from_config_with_parallel(cls, config: PreTrainedConfig, *args: Any, **kwargs: Any) -> Any:
        """Call `ParallelModel.from_config_with_parallel` of the class for ``config``."""
        zoo_class = cls._class_with_plan(config, kwargs.get("plan"))
        return zoo_class.from_config_with_parallel(config_for(zoo_class, config), *args, **kwargs)


def config_for(cls: Any, config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the text configuration of a multimodal configuration if the class has no other part of the model."""
    text = config.get_text_config()
    return text if isinstance(text, cls.config_class) and not isinstance(config, cls.config_class) else config


class AutoModel(_Auto):
    mapping = "MODEL_MAPPING_NAMES"


class AutoModelForPreTraining(_Auto):
    mapping = "MODEL_FOR_PRETRAINING_MAPPING_NAMES"


class AutoModelForCausalLM(_Auto):
    mapping = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"


class AutoModelForImageTextToText(_Auto):
    mapping = "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES"


class AutoModelForMultimodalLM(_Auto):
    mapping = "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES"


class AutoModelForMaskedLM(_Auto):
    mapping = "MODEL_FOR_MASKED_LM_MAPPING_NAMES"


class AutoModelForSeq2SeqLM(_Auto):
    mapping = "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES"


class AutoModelForSequenceClassification(_Auto):
    mapping = "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES"


class AutoModelForTokenClassification(_Auto):
    mapping = "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES"


class AutoModelForQuestionAnswering(_Auto):
    mapping = "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES"


class AutoModelForMultipleChoice(_Auto):
    mapping = "MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES"


class AutoModelForNextSentencePrediction(_Auto):
    mapping = "MODEL_FOR_NEXT_SENTENCE_PREDICTION_MAPPING_NAMES"


class AutoModelForImageClassification(_Auto):
    mapping = "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES"


class AutoModelForVideoClassification(_Auto):
    mapping = "MODEL_FOR_VIDEO_CLASSIFICATION_MAPPING_NAMES"


class AutoModelForSemanticSegmentation(_Auto):
    mapping = "MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING_NAMES"


class AutoModelForUniversalSegmentation(_Auto):
    mapping = "MODEL_FOR_UNIVERSAL_SEGMENTATION_MAPPING_NAMES"


class AutoModelForMaskGeneration(_Auto):
    mapping = "MODEL_FOR_MASK_GENERATION_MAPPING_NAMES"


class AutoModelForObjectDetection(_Auto):
    mapping = "MODEL_FOR_OBJECT_DETECTION_MAPPING_NAMES"


class AutoModelForZeroShotObjectDetection(_Auto):
    mapping = "MODEL_FOR_ZERO_SHOT_OBJECT_DETECTION_MAPPING_NAMES"


class AutoModelForAudioClassification(_Auto):
    mapping = "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES"


class AutoModelForAudioFrameClassification(_Auto):
    mapping = "MODEL_FOR_AUDIO_FRAME_CLASSIFICATION_MAPPING_NAMES"


class AutoModelForAudioXVector(_Auto):
    mapping = "MODEL_FOR_AUDIO_XVECTOR_MAPPING_NAMES"


class AutoModelForCTC(_Auto):
    mapping = "MODEL_FOR_CTC_MAPPING_NAMES"


class AutoModelForSpeechSeq2Seq(_Auto):
    mapping = "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES"


class AutoModelForTextToWaveform(_Auto):
    mapping = "MODEL_FOR_TEXT_TO_WAVEFORM_MAPPING_NAMES"
