"""Reads the images of chats, and prepares them with the model's own processor.

Clients are not trusted: no address is fetched and no file is opened. Images arrive as data URLs. Their format is one of
four, and their size is read from the header before pixels are decoded.
"""

from __future__ import annotations

import base64
import binascii
import io
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from oslo_models.server.errors import RequestError

IMAGE_PARTS = ("image_url", "input_image")
"""Types of message parts with an image: of chats, and of responses."""
FORMATS = {"image/png": "PNG", "image/jpeg": "JPEG", "image/webp": "WEBP", "image/gif": "GIF"}
"""Pillow's name of each accepted format. Pillow reads no other format."""
_DATA_URL = re.compile(r"data:([a-z]+/[a-z0-9.+-]+);base64,")
_MEDIA_TOKEN = re.compile(r"(image|video|audio|vision|boi|eoi|boa|eoa).*token_(id|index)$")
_DECODERS = 2
"""Limit of images that are decoded at once."""


@dataclass(frozen=True)
class ImageLimits:
    """Limits of the images in a request.

    Attributes:
        images: number of images in a request.
        pixels: pixels of an image.
    """

    images: int = 8
    pixels: int = 50_000_000


class ImageChats:
    """Prepares chats with images for one model.

    Args:
        processor: the model's processor, from transformers.
        config: the model's configuration. Pixels get its dtype.
    """

    def __init__(self, processor: Any, config: Any, limits: ImageLimits) -> None:
        self._processor, self._limits = processor, limits
        self._dtype = config.dtype or torch.get_default_dtype()
        self._placeholders = placeholder_texts(processor.tokenizer, config)
        self.template = processor.chat_template or processor.tokenizer.chat_template
        self.threads = ThreadPoolExecutor(_DECODERS, "oslo-images")

    def encode(
        self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
    ) -> tuple[list[int], dict[str, Tensor]]:
        """Return the tokens of a chat, and the further arguments of ``generate``.

        Args:
            messages: messages for a chat template. Parts of their content are texts or images.
            options: options of the chat template.

        Raises:
            RequestError: an image cannot be read. The message has its place.
        """
        parts = [*_image_parts(messages)]
        if len(parts) > self._limits.images:
            message = f"the request has {len(parts)} images, more than {self._limits.images}"
            raise RequestError(400, message, None, "messages")
        images = [self._read(part["image_url"], part["place"]) for part in parts]
        shown = [{**message, "content": self._content(message["content"])} for message in messages]
        text = self._processor.apply_chat_template(shown, tokenize=False, **options)
        encoded = self._processor(text=[text], images=images or None, return_tensors="pt")
        ids = encoded.pop("input_ids")[0].tolist()
        encoded.pop("attention_mask", None)
        return ids, {name: self._cast(value) for name, value in encoded.items() if isinstance(value, Tensor)}

    def _cast(self, value: Tensor) -> Tensor:
        return value.to(self._dtype) if value.is_floating_point() else value

    def _content(self, content: Any) -> list[dict[str, str]]:
        """Return content for a template, in which a client's text has no placeholder tokens."""
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        return [
            {"type": "image"} if "image_url" in part else {"type": "text", "text": self.plain(part["text"])}
            for part in parts
        ]

    def plain(self, text: str) -> str:
        """Return a text without placeholder tokens: an invisible character separates their first two characters."""
        for placeholder in self._placeholders:
            text = text.replace(placeholder, f"{placeholder[0]}\u200b{placeholder[1:]}")
        return text

    def _read(self, url: str, place: str) -> Any:
        try:
            return read_image(url, self._limits.pixels)
        except ValueError as error:
            raise RequestError(400, f"{place} {error}", None, "messages") from None


def _image_parts(messages: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    for message in messages:
        if not isinstance(message["content"], str):
            yield from (part for part in message["content"] if "image_url" in part)


def has_images(tokenizer: Any) -> bool:
    """Return whether this is a processor of text and images. Otherwise it is a tokenizer."""
    return hasattr(tokenizer, "image_processor") and hasattr(tokenizer, "tokenizer")


def placeholder_texts(tokenizer: Any, config: Any) -> list[str]:
    """Return the texts of the tokens that stand for images and sounds, or that surround them."""
    values = {value for name, value in vars(config).items() if _MEDIA_TOKEN.match(name) and isinstance(value, int)}
    texts = (tokenizer.convert_ids_to_tokens(value) for value in sorted(values))
    return [text for text in texts if isinstance(text, str) and len(text) > 1]


def image_url(part: Mapping[str, Any], place: str) -> str:
    """Return the address in a message part of `IMAGE_PARTS`.

    Raises:
        ValueError: the part has none.
    """
    value = part.get("image_url")
    found = value.get("url") if isinstance(value, dict) else value
    if not isinstance(found, str):
        raise ValueError(f"{place} has no image_url with a url")
    return found


class _Unacceptable(ValueError):
    """An image that is refused for a reason that may be told."""


def read_image(url: str, pixels: int) -> Any:
    """Return the image in a data URL, with Pillow. Of several frames, the first.

    Args:
        pixels: limit of the pixels, checked before any are decoded.

    Raises:
        ValueError: the address is no data URL of an accepted format, or its image is damaged or too large. The message
            quotes nothing of the address.
    """
    from PIL import Image, ImageOps

    match = _DATA_URL.match(url[:64])
    if match is None or match[1] not in FORMATS:
        accepted = ", ".join(FORMATS)
        raise ValueError(f"is not a data URL (data:TYPE;base64,...) of type {accepted}. This server fetches no address")
    try:
        data = base64.b64decode(url[match.end() :], validate=True)
    except (binascii.Error, ValueError):
        raise ValueError("is not valid base64") from None
    name = FORMATS[match[1]]
    try:
        if name == "WEBP":
            _check_size(_webp_size(data), pixels)  # Pillow allocates all pixels before it tells their number
        image = _opened(name, data)
        _check_size(image.size, pixels)
        image.load()
        return ImageOps.exif_transpose(image).convert("RGB")
    except _Unacceptable:
        raise
    except Image.DecompressionBombError:  # a frame of a GIF may be larger than the image
        raise ValueError(f"has more than {pixels} pixels") from None
    except (OSError, SyntaxError, ValueError, EOFError, struct.error, LookupError, TypeError, OverflowError):
        raise ValueError(f"is no {name} image, or a damaged one") from None


def _check_size(size: tuple[int, int], pixels: int) -> None:
    width, height = size
    if width * height > pixels:
        raise _Unacceptable(f"has {width} x {height} pixels, more than {pixels}")


def _opened(name: str, data: bytes) -> Any:
    """Read the header of an image. ``Image.open`` would add an entry to the table of warnings for each large size."""
    from PIL import GifImagePlugin, JpegImagePlugin, PngImagePlugin, WebPImagePlugin

    kinds: dict[str, Any] = {
        "PNG": PngImagePlugin.PngImageFile,
        "JPEG": JpegImagePlugin.JpegImageFile,
        "WEBP": WebPImagePlugin.WebPImageFile,
        "GIF": GifImagePlugin.GifImageFile,
    }
    return kinds[name](io.BytesIO(data))


def _webp_size(data: bytes) -> tuple[int, int]:
    """Return the width and height in the header of a WebP file.

    Source: RFC 9649, sections 2.5 to 2.7.
    """
    if data[:4] != b"RIFF" or data[8:12] != b"WEBP":
        raise ValueError("no WebP header")
    kind, body = data[12:16], data[20:30]
    if kind == b"VP8X":
        return int.from_bytes(body[4:7], "little") + 1, int.from_bytes(body[7:10], "little") + 1
    if kind == b"VP8L":
        (bits,) = struct.unpack("<I", body[1:5])
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    width, height = struct.unpack("<HH", body[6:10])
    return width & 0x3FFF, height & 0x3FFF
