"""The images of prompts in the running batch: their tokens, their identity and their features."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from oslo_models.deploy.serialization import portable
from oslo_models.distributed.object_exchange import gather_objects
from oslo_models.media.items import (
    IMAGE,
    PIXEL_MASK,
    images_of_rows,
    placeholder,
    places_of_images,
    take_images,
)
from oslo_models.pipeline.sharded_model import ShardedModel


class ImagesError(Exception):
    """A rank cannot encode the images of a prompt. Raised on every rank. The cause is the rank's exception."""


TOKEN_TYPES = "mm_token_type_ids"
"""Argument that marks the placeholder tokens. Models with positions of height and width read it."""
BOTH_WAYS: Mapping[str, str] = {
    "gemma3": "token_type_ids",
    **dict.fromkeys(("gemma4", "gemma4_unified"), TOKEN_TYPES),
}
"""Types whose tokens of an image attend to each other in both directions, and the argument that marks these tokens."""
OF_EXPERTS: Mapping[str, str] = {"ernie4_5_vl_moe": "moe_mm_token_type_ids"}
"""Types with experts for images, and the argument that marks their tokens."""
_MARKS = {**BOTH_WAYS, **OF_EXPERTS}
_TYPES = frozenset((TOKEN_TYPES, *_MARKS.values()))
ARGUMENTS = frozenset((*IMAGE.arguments, PIXEL_MASK, *_TYPES))
"""Arguments of `generate` with the images of a call that joins."""


def arguments_of(model_type: str) -> frozenset[str]:
    """Return the arguments among `ARGUMENTS` that a type takes."""
    return ARGUMENTS - ({*_MARKS.values()} - {TOKEN_TYPES, _MARKS.get(model_type)})


class PromptImages(NamedTuple):
    """The images of one row of a call. Every rank has them.

    Attributes:
        row: index of the row in its call.
        ids: the tokens of the prompt, [1, L], without padding.
        arguments: the arguments with the images.
        spans: the first position and the end (exclusive) of each image in the prompt.
        digests: a negative number for each image.
        token: the placeholder token.
    """

    row: int
    ids: Tensor
    arguments: dict[str, Any]
    spans: list[tuple[int, int]]
    digests: list[int]
    token: int

    @property
    def encoder_positions(self) -> int:
        """The number of encoded positions beside the tokens. The ones of images are among the tokens."""
        return 0

    def reuse_keys(self) -> list[int]:
        """Return the tokens of the prompt, with the digest of the image in place of each placeholder token.

        Prompts with equal keys have equal entries in the key-value cache.
        """
        keys: list[int] = self.ids[0].tolist()
        for (start, stop), digest in zip(self.spans, self.digests, strict=True):
            keys[start:stop] = [digest if key == self.token else key for key in keys[start:stop]]
        return keys

    def chunk_end(self, start: int, size: int) -> int:
        """Return the end of a chunk that begins at ``start``. No chunk ends inside an image.

        The chunk has at most ``size`` tokens, unless it begins with an image of more tokens.
        """
        stop = min(start + size, self.ids.shape[1])
        for first, end in self.spans:
            if first < stop < end:
                return first if first > start else end
        return stop

    def whole(self, length: int) -> int:
        """Return the length of the longest prefix of ``length`` tokens that does not end inside an image."""
        return min((first for first, end in self.spans if first < length < end), default=length)

    def between(self, start: int, stop: int) -> tuple[int, int]:
        """Return the images, from the first to the last (exclusive), that begin between two positions."""
        return sum(first < start for first, _ in self.spans), sum(first < stop for first, _ in self.spans)


def images_of_call(given: Mapping[str, Any], config: Any, identified: bool = True) -> list[PromptImages]:
    """Return the images of each row of a call that has any.

    Args:
        given: arguments of `generate`, with ``input_ids`` [B, L], padded on the left.
        identified: compute the digests of the images.

    Raises:
        ValueError: the images do not fit the placeholder tokens.
    """
    ids_BL, mask_BL = given["input_ids"], given.get("attention_mask")
    types = {name: given[name] for name in sorted(_TYPES) if given.get(name) is not None}
    images = {name: given[name] for name in (*IMAGE.arguments, PIXEL_MASK) if given.get(name) is not None}
    if not images:
        if any(types_BL.any() for types_BL in types.values()):
            raise ValueError(f"{', '.join(types)} marks images, and there are none")
        return []
    if not isinstance(images.get(IMAGE.values), Tensor):
        raise ValueError(f"{IMAGE.values} is no tensor, and there is {', '.join(sorted(images))}")
    found = []
    for row, own in enumerate(images_of_rows({"input_ids": ids_BL, **images}, config)):
        if not own:
            continue
        kept_L = torch.ones_like(ids_BL[row]).bool() if mask_BL is None else mask_BL[row].bool()
        ids_1L = ids_BL[row][kept_L][None].long()
        spans = [(places[0], places[-1] + 1) for places in places_of_images(ids_1L, own, config)]
        count = len(spans) if identified else 0
        digests = [_digest(take_images(own, number, number + 1)) for number in range(count)]
        for name, types_BL in types.items():
            if types_BL.shape != ids_BL.shape:
                raise ValueError(f"{name} has shape {tuple(types_BL.shape)}, input_ids {tuple(ids_BL.shape)}")
            own = {**own, name: types_BL[row][kept_L][None]}
        _check_marks(ids_1L, own, spans, config)
        found.append(PromptImages(row, ids_1L, own, spans, digests, placeholder(IMAGE, config)))
    return found


def _check_marks(ids_1L: Tensor, own: Mapping[str, Any], spans: list[tuple[int, int]], config: Any) -> None:
    """Raise ``ValueError`` if the marks of a row do not follow from its tokens, or its images are not separate.

    Otherwise, equal tokens could have unequal entries in the key-value cache.
    """
    name = _MARKS.get(config.model_type)
    if name is None:
        return
    marked_1L = ids_1L == placeholder(IMAGE, config)
    if name in OF_EXPERTS.values():
        marked_1L = marked_1L | (ids_1L == config.image_start_token_id)
    elif any(end == first for (_, end), (first, _) in pairwise(spans)):
        raise ValueError("two images without a token between them attend to each other")
    if name not in own or not torch.equal(own[name].bool().cpu(), marked_1L.cpu()):
        raise ValueError(f"{name} does not mark the tokens of the images")


def _digest(image: Mapping[str, Any]) -> int:
    """Return a negative number that identifies an image: 256 bits of its pixels and of its other arguments."""
    digest = hashlib.sha256()
    for name, value in sorted(image.items()):
        x = torch.as_tensor(value).detach().cpu().contiguous()
        digest.update(f"{name} {x.dtype} {tuple(x.shape)} ".encode())
        digest.update(x.reshape(-1).view(torch.uint8).numpy().data)
    return -1 - int.from_bytes(digest.digest(), "big")


NO_OFFSETS = (0, 0, 0)
"""`PromptInProgress.offsets` of a prompt without images."""


class PromptInProgress:
    """The images of the prompt in prefill on one rank: its positions, and the features for its next chunk.

    Args:
        images: of the prompt.
    """

    def __init__(self, model: ShardedModel, images: PromptImages) -> None:
        device = model.device
        arguments = {name: _on_device(value, device) for name, value in images.arguments.items()}
        self._model = model
        self._images = images._replace(ids=images.ids.to(device), arguments=arguments)
        self._positions: Tensor | None = None
        self._features: dict[str, Any] = {}

    def encode(self, first: int, stop: int) -> None:
        """Encode the images from the first to the last (exclusive). A collective.

        Raises:
            ImagesError: on every rank, if any rank raises.
        """
        failure = None
        try:
            if self._positions is None:
                self._positions = _positions(self._model, self._images)
            stage = self._model.stage
            if first < stop and (stage is None or stage.index == 0):
                self._features = _encoded(self._model, self._images, first, stop)
        except Exception as error:  # noqa: BLE001  raised on every rank
            failure = error
        share_failure(self._model, failure)

    def positions(self, start: int, stop: int) -> Tensor:
        """Return the positions of a chunk: [1, L], or [3 or 4, 1, L] with height and width."""
        assert self._positions is not None
        return self._positions[..., start:stop]

    @property
    def offsets(self) -> tuple[int, ...]:
        """The position of the first new token in time, height and width, minus the number of tokens before it.

        As `generate` counts, positions go on from the last token of the prompt, also if it belongs to an image.
        """
        length = self._images.ids.shape[1]
        last = self.positions(length - 1, length)
        return tuple((last[-3:].flatten() + 1 - length).tolist()) if last.dim() > 2 else NO_OFFSETS

    def take_features(self) -> dict[str, Any]:
        """Return the features of the encoded images, as arguments of the model, and drop them."""
        features, self._features = self._features, {}
        return {"mm_encoder_outputs": features} if features else {}

    def token_types(self, start: int, stop: int) -> dict[str, Any]:
        """Return the marks of the tokens of images in a chunk, as an argument of the model.

        Masks read them from the beginning of the prompt.
        """
        name = _MARKS.get(self._model.config.model_type)
        if name is None:
            return {}
        return {name: self._images.arguments[name][:, 0 if name in BOTH_WAYS.values() else start : stop]}


def share_failure(model: ShardedModel, failure: Exception | None) -> None:
    """Raise `ImagesError` on every rank if ``failure`` is an exception on any rank. A collective."""
    found = gather_objects(model.mesh.model, None if failure is None else portable(failure))
    first = next((each for each in found if each is not None), None)
    if first is not None:
        raise ImagesError(str(first)) from (first if failure is None else failure)


def _positions(model: ShardedModel, images: PromptImages) -> Tensor:
    """Return the positions of a prompt, as `generate` counts them."""
    base: Any = model.base_model
    kept = getattr(base, "rope_deltas", None)  # belongs to a call of `generate`
    given = {name: value for name, value in images.arguments.items() if name not in (IMAGE.values, PIXEL_MASK)}
    counting: Any = model
    try:
        found: Tensor = counting._prepare_position_ids_for_generation(images.ids, given)
        return found
    finally:
        if hasattr(base, "rope_deltas"):
            base.rope_deltas = kept


def _encoded(model: ShardedModel, images: PromptImages, first: int, stop: int) -> dict[str, Any]:
    """Return the features of some images by kind."""
    base: Any = model.base_model
    own = {name: value for name, value in images.arguments.items() if name not in _TYPES}
    accepted = inspect.signature(base.get_image_features).parameters
    given = {name: value for name, value in take_images(own, first, stop).items() if name in accepted}
    return {IMAGE.name: base.get_image_features(**given, return_dict=True)}


def _on_device(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value
