"""Reads the images of chats.

Clients are not trusted: no address is fetched and no file is opened. Images arrive as data URLs. Their format is one of
four, and their size is read from the header before pixels are decoded.
"""

from __future__ import annotations

import base64
import binascii
import io
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

IMAGE_PARTS = ("image_url", "input_image")
"""Types of message parts with an image: of chats, and of responses."""
FORMATS = {"image/png": "PNG", "image/jpeg": "JPEG", "image/webp": "WEBP", "image/gif": "GIF"}
"""Pillow's name of each accepted format. Pillow reads no other format."""
_DATA_URL = re.compile(r"data:([a-z]+/[a-z0-9.+-]+);base64,")


@dataclass(frozen=True)
class ImageLimits:
    """Limits of the images in a request.

    Attributes:
        images: number of images in a request.
        pixels: pixels of an image.
    """

    images: int = 8
    pixels: int = 50_000_000


def has_images(tokenizer: Any) -> bool:
    """Return whether this is a processor of text and images. Otherwise it is a tokenizer."""
    return hasattr(tokenizer, "image_processor") and hasattr(tokenizer, "tokenizer")


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
