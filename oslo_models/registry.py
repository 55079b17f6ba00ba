"""The architectures of the zoo: one line each. Everything that lists, exports or picks classes starts here."""

from __future__ import annotations

import importlib
from types import ModuleType

ARCHITECTURES = {
    # transformers' model type: what the names of its classes begin with
    "bert": "Bert",
    "gpt2": "GPT2",
    "gpt_neo": "GPTNeo",
    "gptj": "GPTJ",
    "llama": "Llama",
    "t5": "T5",
}


def load(model_type: str) -> ModuleType:
    """The file of an architecture."""
    return importlib.import_module(f"oslo_models.models.{model_type}")


def names(model_type: str) -> list[str]:
    """The public names of an architecture: its classes, its configuration, and the layers that can be fused."""
    prefix = ARCHITECTURES[model_type]
    return sorted(name for name in vars(load(model_type)) if name.startswith(prefix) and name != f"{prefix}Parallel")


def model_classes(model_type: str) -> dict[str, type]:
    """The model classes of an architecture by name."""
    from oslo_models.models.base import ParallelModel

    found = {name: getattr(load(model_type), name) for name in names(model_type)}
    return {name: cls for name, cls in found.items() if isinstance(cls, type) and issubclass(cls, ParallelModel)}


def find(name: str) -> object:
    """What the zoo exports as ``name``.

    Raises:
        AttributeError: nothing; the message lists the architectures.
    """
    fitting = [kind for kind, prefix in ARCHITECTURES.items() if name.startswith(prefix)]
    for model_type in sorted(fitting, key=lambda kind: -len(ARCHITECTURES[kind])):
        if name in names(model_type):
            return getattr(load(model_type), name)
    raise AttributeError(
        f"oslo_models has no {name}; architectures: {', '.join(ARCHITECTURES)} (`oslo-models list` shows their classes)"
    )
