"""Prepares chats with images and sounds with the model's own processor."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from oslo_models.server.errors import RequestError
from oslo_models.server.images import ImageLimits, has_images, read_image
from oslo_models.server.sounds import HEARING, SoundLimits, SoundReader, hears, longest_sound, rate_of

DECODERS = 2
"""Limit of the requests of a model whose images or sounds are decoded at once."""
_MEDIA_TOKEN = re.compile(r"(image|video|audio|vision|boi|eoi|boa|eoa).*token_(id|index)$")
_OF_PROCESSORS = ("image_token", "video_token", "audio_token", "audio_bos_token", "audio_eos_token")
"""Attributes of processors with the text of a token that stands for media, or surrounds them."""


def takes_media(processor: Any, config: Any) -> bool:
    """Return whether chats of a model take images or sounds. Then ``processor`` is its processor."""
    return has_images(processor) or hears(processor, config)


class MediaChats:
    """Prepares chats with images and sounds for one model.

    Args:
        processor: the model's processor, from transformers.
        config: the model's configuration. Pixels and features of sounds get its dtype.

    Attributes:
        kinds: nouns of what chats may have beside text.
        template: the chat template.
    """

    def __init__(self, processor: Any, config: Any, images: ImageLimits, sounds: SoundLimits) -> None:
        self._image_limits = images
        # Copies: a call of a tokenizer changes its padding, which fails while another thread uses it.
        self._processors: SimpleQueue[Any] = SimpleQueue()
        for _ in range(DECODERS):
            self._processors.put(copy.deepcopy(processor))
        self._sees, self._hearing = has_images(processor), HEARING.get(config.model_type)
        self.kinds: tuple[str, ...] = ("images",) if self._sees else ()
        if not hears(processor, config):
            self._hearing = None
        else:
            self.kinds += ("sounds",)
            self._rate = rate_of(processor)
            self._sounds = SoundReader(self._rate, sounds, longest_sound(processor, config))
        self._dtype = config.dtype or torch.get_default_dtype()
        self._placeholders = placeholder_texts(processor, config)
        self._in_processor = bool(processor.chat_template)
        self.template = processor.chat_template or processor.tokenizer.chat_template
        self.threads = ThreadPoolExecutor(DECODERS, "oslo-media")

    def encode(
        self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
    ) -> tuple[list[int], dict[str, Tensor]]:
        """Return the tokens of a chat, and the further arguments of ``generate``.

        Args:
            messages: messages for a chat template. Parts of their content are texts, images or sounds.
            options: options of the chat template.

        Raises:
            RequestError: an image or a sound cannot be read. The message has its place.
        """
        parts = [*_parts(messages)]
        media = self._read_images([part for part in parts if "image_url" in part])
        media |= self._read_sounds([part for part in parts if "sound" in part])
        shown = [{**message, "content": self._content(message["content"])} for message in messages]
        processor = self._processors.get()
        try:
            templates = processor if self._in_processor else processor.tokenizer
            text = templates.apply_chat_template(shown, tokenize=False, **options)
            encoded = processor(text=[text], **media, return_tensors="pt")
        finally:
            self._processors.put(processor)
        ids = encoded.pop("input_ids")[0].tolist()
        encoded.pop("attention_mask", None)
        return ids, {name: self._cast(value) for name, value in encoded.items() if isinstance(value, Tensor)}

    def _read_images(self, parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the arguments of the processor with the images."""
        if len(parts) > self._image_limits.images:
            message = f"the request has {len(parts)} images, more than {self._image_limits.images}"
            raise RequestError(400, message, None, "messages")
        images = [self._read_image(part["image_url"], part["place"]) for part in parts]
        return {"images": images or None} if self._sees else {}

    def _read_image(self, url: str, place: str) -> Any:
        try:
            return read_image(url, self._image_limits.pixels)
        except ValueError as error:
            raise RequestError(400, f"{place} {error}", None, "messages") from None

    def _read_sounds(self, parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the arguments of the processor with the sounds."""
        if self._hearing is None:
            return {}
        if self._hearing.one and len(parts) > 1:
            message = f"the request has {len(parts)} sounds; this model reads one sound of a chat"
            raise RequestError(400, message, None, "messages")
        opened = self._sounds.open_parts(parts)
        sounds = [self._sounds.decode(sound, place, "messages") for sound, place in opened]
        return {"audio": sounds, "audio_kwargs": {"sampling_rate": self._rate}} if sounds else {"audio": None}

    def _cast(self, value: Tensor) -> Tensor:
        return value.to(self._dtype) if value.is_floating_point() else value

    def _content(self, content: Any) -> list[dict[str, str]]:
        """Return content for a template, in which a client's text has no placeholder tokens."""
        parts = [{"text": content}] if isinstance(content, str) else content
        return [self._shown(part) for part in parts]

    def _shown(self, part: Mapping[str, Any]) -> dict[str, str]:
        if "image_url" in part:
            return {"type": "image"}
        return {"type": "audio"} if "sound" in part else {"type": "text", "text": self.plain(part["text"])}

    def plain(self, text: str) -> str:
        """Return a text without placeholder tokens: an invisible character separates their first two characters."""
        return plain_text(text, self._placeholders)


def plain_text(text: str, tokens: Sequence[str]) -> str:
    """Return a text without some tokens: an invisible character separates their first two characters."""
    for token in tokens:
        text = text.replace(token, f"{token[0]}\u200b{token[1:]}")
    return text


def _parts(messages: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    for message in messages:
        if not isinstance(message["content"], str):
            yield from message["content"]


def placeholder_texts(processor: Any, config: Any) -> list[str]:
    """Return the texts of the tokens that stand for images and sounds, or that surround them."""
    values = {value for name, value in vars(config).items() if _MEDIA_TOKEN.match(name) and isinstance(value, int)}
    texts = [processor.tokenizer.convert_ids_to_tokens(value) for value in sorted(values)]
    texts += [getattr(processor, name, None) for name in _OF_PROCESSORS]
    return list(dict.fromkeys(text for text in texts if isinstance(text, str) and len(text) > 1))
