"""Models that encode their input anew for each window of a sound."""

from __future__ import annotations

from typing import Any

from transformers import GenerationMixin
from transformers.utils import ModelOutput

from oslo_models.cache_argument import NAMES


class WindowEncoding(GenerationMixin):
    """Last base of a class with a `generate` for long inputs, which calls transformers' `generate` for each window.

    On pipeline stages, all stages encode a window together. Other models encode their whole input before `generate`.
    """

    pipeline: Any

    def generate(self, inputs: Any = None, *args: Any, **kwargs: Any) -> Any:
        if self.pipeline is not None and "encoder_outputs" not in kwargs:
            kwargs["encoder_outputs"] = self.pipeline.encode((inputs,), kwargs)
        output = super().generate(inputs, *args, **kwargs)
        if self.pipeline is None or not isinstance(output, ModelOutput):
            return output
        # transformers reads the caches of all blocks, of which a stage has its own
        return type(output)(**{name: value for name, value in output.items() if name not in NAMES})
