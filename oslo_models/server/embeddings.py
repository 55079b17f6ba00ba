"""``/v1/embeddings``: embedding vectors of texts, from encoders without a task head."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from oslo_models.server.embedding_config import POOLINGS, EmbeddingConfig
from oslo_models.server.schema import RequestBody, Texts

if TYPE_CHECKING:
    from oslo_models.deploy import Deployment


class EmbeddingRequest(RequestBody):
    """``POST /v1/embeddings``."""

    input: Texts
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(default=None, ge=1)

    @property
    def texts(self) -> list[Any]:
        """Return the inputs, each as text or tokens."""
        single = isinstance(self.input, str) or isinstance(self.input[0], int)
        return [self.input] if single else list(self.input)

    def encode(self, tokenizer: Any, config: EmbeddingConfig) -> list[list[int]]:
        texts = self.texts
        return [tokenizer(config.prepare(each))["input_ids"] if isinstance(each, str) else each for each in texts]


class Embedder:
    """Computes embedding vectors with a deployed encoder, batch by batch.

    Args:
        config: the embedding settings of the checkpoint, or replacements.
        normalizes: scale vectors to length 1.
        batch: limit of inputs per call.
    """

    def __init__(
        self, model: Deployment, tokenizer: Any, config: EmbeddingConfig, normalizes: bool, batch: int = 16
    ) -> None:
        if config.pooling not in POOLINGS:
            raise ValueError(f"pooling={config.pooling!r} is none of {', '.join(POOLINGS)}")
        self.model, self.config, self.normalizes, self.batch = model, config, normalizes, batch
        self._pad = tokenizer.pad_token_id or 0
        self._thread = ThreadPoolExecutor(1, "oslo-embed")

    async def embed(self, inputs: Sequence[list[int]]) -> list[Tensor]:
        """Return the vector of each input. Cancelling the task takes effect after the current batch."""
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
        vector_BD = _pooled(hidden_BLD, mask_BL, self.config.pooling)
        return list(torch.nn.functional.normalize(vector_BD, dim=-1) if self.normalizes else vector_BD)


def _pooled(hidden_BLD: Tensor, mask_BL: Tensor, pooling: str) -> Tensor:
    """Pool right-padded rows to one vector per row."""
    if pooling == "cls":
        return hidden_BLD[:, 0]
    if pooling == "last":
        return hidden_BLD[torch.arange(len(hidden_BLD)), mask_BL.sum(1) - 1]
    mask_BL1 = mask_BL.unsqueeze(-1)
    if pooling == "max":
        return hidden_BLD.masked_fill(mask_BL1 == 0, -torch.inf).amax(1)
    return (hidden_BLD * mask_BL1).sum(1) / mask_BL1.sum(1)


def entry(index: int, vector_D: Tensor, encoding: str) -> dict[str, Any]:
    """Return a vector in the format of OpenAI's API."""
    values: Any = vector_D.tolist()
    if encoding == "base64":
        values = base64.b64encode(np.asarray(values, "<f4").tobytes()).decode()
    return {"object": "embedding", "index": index, "embedding": values}
