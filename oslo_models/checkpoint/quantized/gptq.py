"""GPTQ: integers of 2, 4 or 8 bits with scales and zero points per group of input features."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from oslo_models.checkpoint.quantized.weight import QuantizedWeight, cover, units, unpack_words, within
from oslo_models.sharding.layout import Range


class GPTQWeight(QuantizedWeight):
    """``scales[g] * (qweight - qzeros[g])`` with ``g = g_idx[input feature]``, transposed.

    ``qweight`` is packed along the input features, ``qzeros`` along the output features. With ``desc_act``, input
    features were quantised in order of importance: ``g_idx`` is not ascending, and a shard of the input features can
    belong to any groups.

    Source: Frantar et al., "GPTQ", 2022. The packing follows AutoGPTQ and GPTQModel.
    """

    suffixes = ("qweight", "qzeros", "scales", "g_idx")
    markers = ("qweight",)

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.bits = 32 * self.part_shape("qzeros")[1] // self.part_shape("scales")[1]  # may differ between layers
        self.per_word = 32 // self.bits

    @classmethod
    def unreadable(cls, settings: Mapping[str, Any]) -> str | None:
        bits = {settings.get("bits", 4)} | {
            rule["bits"] for rule in (settings.get("dynamic") or {}).values() if "bits" in rule
        }
        if unknown := sorted(bits - {2, 4, 8}):
            return f"bits={unknown[0]} is none of 2, 4 and 8"
        if (kind := settings.get("checkpoint_format", "gptq")) not in ("gptq", "gptq_v2"):
            return f'checkpoint_format="{kind}" is packed for one kernel; use the checkpoint in the format "gptq"'
        return None

    @property
    def shape(self) -> tuple[int, int]:
        words, rows = self.part_shape("qweight")
        return rows, self.part_shape("g_idx")[0] if "g_idx" in self.parts else words * self.per_word

    def read(self, rows: Range, columns: Range, *expert: int) -> Tensor:
        groups = self._groups(columns)
        some = int(groups.min()), int(groups.max()) + 1
        weight = unpack_words(self.part("qweight", units(columns, self.per_word), rows), self.bits, dim=0)
        zeros = self._zeros(some, rows)[groups - some[0]]
        scales = self.part("scales", some, rows).float()[groups - some[0]]
        return ((weight[within(columns, cover(columns, self.per_word))] - zeros) * scales).T

    def _groups(self, columns: Range) -> Tensor:
        """Return the group index of each input feature in ``columns``."""
        if "g_idx" in self.parts:
            return self.part("g_idx", columns).long()
        size = self.settings.get("group_size", 128)
        return torch.arange(*columns) // (size if size > 0 else self.shape[1])

    def _zeros(self, groups: Range, rows: Range) -> Tensor:
        words = self.part("qzeros", groups, units(rows, self.per_word))
        if self.settings.get("checkpoint_format", "gptq") == "gptq":
            # The first version of the format stores zero points minus one, subtracted in packed form.
            words = words + sum(1 << shift for shift in range(0, 32, self.bits))
        return unpack_words(words, self.bits, dim=1)[:, within(rows, cover(rows, self.per_word))]
