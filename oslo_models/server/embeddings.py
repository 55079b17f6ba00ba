"""``/v1/embeddings``: vectors of texts, from encoders without a head."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from oslo_models.server.schema import First, Request, Texts, Tokens

POOLINGS = ("mean", "cls")
"""The mean of the vectors of all tokens, or the vector of the first."""


class EmbeddingRequest(Request):
    """``POST /v1/embeddings``."""

    input: str | Texts | Tokens | Annotated[list[Tokens], First] = Field(min_length=1)
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(default=None, ge=1)

    @property
    def texts(self) -> list[Any]:
        """Each input: a text or tokens."""
        single = isinstance(self.input, str) or isinstance(self.input[0], int)
        return [self.input] if single else list(self.input)

    def encode(self, tokenizer: Any) -> list[list[int]]:
        return [tokenizer(each)["input_ids"] if isinstance(each, str) else each for each in self.texts]


class Embedder:
    """Computes vectors by calls of a deployed encoder, one batch after the other.

    Args:
        pooling: one of `POOLINGS`.
        normalizes: to length 1.
        batch: inputs of a call at most.
    """

    def __init__(self, model: Any, tokenizer: Any, pooling: str, normalizes: bool, batch: int = 16) -> None:
        if pooling not in POOLINGS:
            raise ValueError(f"pooling={pooling!r} is none of {', '.join(POOLINGS)}")
        self.model, self.pooling, self.normalizes, self.batch = model, pooling, normalizes, batch
        self._pad = tokenizer.pad_token_id or 0
        self._thread = ThreadPoolExecutor(1, "oslo-embed")

    async def embed(self, inputs: Sequence[list[int]]) -> list[Tensor]:
        """The vector of each input. Cancelling the task ends it after the batch that is computed."""
        vectors: list[Tensor] = []
        for start in range(0, len(inputs), self.batch):
            part = inputs[start : start + self.batch]
            vectors += await asyncio.get_running_loop().run_in_executor(self._thread, self._compute, part)
        return vectors

    def _compute(self, inputs: Sequence[list[int]]) -> list[Tensor]:
        longest = max(map(len, inputs))
        ids_BL = torch.full((len(inputs), longest), self._pad)
        mask_BL = torch.zeros_like(ids_BL)
        for row, ids in enumerate(inputs):
            ids_BL[row, : len(ids)] = torch.tensor(ids)
            mask_BL[row, : len(ids)] = 1
        hidden_BLD = self.model(input_ids=ids_BL, attention_mask=mask_BL).last_hidden_state.float()
        weight_BL1 = mask_BL.float().unsqueeze(-1)
        mean_BD = (hidden_BLD * weight_BL1).sum(1) / weight_BL1.sum(1)
        vector_BD = mean_BD if self.pooling == "mean" else hidden_BLD[:, 0]
        return list(torch.nn.functional.normalize(vector_BD, dim=-1) if self.normalizes else vector_BD)


def entry(index: int, vector_D: Tensor, encoding: str) -> dict[str, Any]:
    """The form of a vector in OpenAI's API."""
    values: Any = vector_D.tolist()
    if encoding == "base64":
        values = base64.b64encode(np.asarray(values, "<f4").tobytes()).decode()
    return {"object": "embedding", "index": index, "embedding": values}
