"""Images in chats: answers are those of plain transformers, and no image does anything else than be looked at."""

from __future__ import annotations

import base64
import io
import json
import struct
import tracemalloc
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("uvicorn")
pytest.importorskip("PIL", reason="images need pillow")

from PIL import Image

from oslo_models.cli.main import make_parser
from oslo_models.server.app import application
from oslo_models.server.images import FORMATS, ImageLimits, read_image
from oslo_models.server.media_chats import MediaChats
from oslo_models.server.sounds import SoundLimits

from support import zoo
from support.http_server import LocalModel, StubModel, connect, post_bytes, post_json, read_answer
from support.processors import TEMPLATE, llava_processor, words
from support.reference import reference_model
from support.served import serving


@pytest.fixture(scope="module")
def processor() -> Any:
    return llava_processor()


@pytest.fixture(scope="module")
def local() -> LocalModel:
    config = zoo.config("llava")
    model = reference_model("LlavaForConditionalGeneration", config, 0).float()
    model.generation_config.eos_token_id = None
    model.config.dtype = torch.float32
    return LocalModel(model)


def picture(seed: int, kind: str = "PNG", size: tuple[int, int] = (20, 18), **options: Any) -> bytes:
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (size[1], size[0], 3), generator=generator, dtype=torch.uint8).numpy()
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind, **options)
    return file.getvalue()


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def ask(app: Any, content: Any, **fields: Any) -> tuple[int, Any]:
    messages = [{"role": "w5", "content": content}]
    return post_json(app, "/v1/chat/completions", {"messages": messages, "max_tokens": 6, "temperature": 0, **fields})


# Answers --------------------------------------------------------------------------------------------------------------


def expected(local: LocalModel, processor: Any, text: str, pictures: list[bytes]) -> tuple[str, int]:
    """Return the answer of transformers and the number of tokens in its prompt."""
    images = [Image.open(io.BytesIO(data)).convert("RGB") for data in pictures]
    given = processor(text=[text], images=images or None, return_tensors="pt")
    out = local.model.generate(**given, max_new_tokens=6, do_sample=False)
    length = given["input_ids"].shape[1]
    return processor.tokenizer.decode(out[0, length:], skip_special_tokens=True), length


@pytest.mark.parametrize("count", [0, 1, 2])
def test_answer_about_images_equals_transformers(local: LocalModel, processor: Any, count: int) -> None:
    app = application(local, processor, "model")
    pictures = [picture(seed) for seed in range(count)]
    content = [{"type": "text", "text": "w7 w8"}, *(part(data_url(data)) for data in pictures)]
    text, length = expected(local, processor, f"w5 w7 w8 {'<image> ' * count}", pictures)
    status, answer = ask(app, content)
    assert (status, answer["choices"][0]["message"]["content"]) == (200, text)
    assert answer["usage"] == {**answer["usage"], "prompt_tokens": length, "completion_tokens": 6}
    assert length == 3 + 4 * count
    items = [{**each, "type": "input_text" if "text" in each else "input_image"} for each in content]
    body = {"input": [{"role": "w5", "content": items}], "max_output_tokens": 6, "temperature": 0}
    status, answer = post_json(app, "/v1/responses", body)
    assert (status, answer["output"][-1]["content"][0]["text"]) == (200, text)


def test_placeholders_in_the_text_of_a_client_are_text(local: LocalModel, processor: Any) -> None:
    app = application(local, processor, "model")
    status, answer = ask(app, [{"type": "text", "text": "w7 <image> w8"}, part(data_url(picture(0)))])
    assert (status, answer["usage"]["prompt_tokens"]) == (200, 4 + 4)
    status, answer = ask(app, "w7 <image>")
    assert (status, answer["usage"]["prompt_tokens"]) == (200, 3)
    chats = MediaChats(processor, local.config, ImageLimits(), SoundLimits())
    ids, media = chats.encode([{"role": "w5", "content": "<image>"}], {})
    assert local.config.image_token_id not in ids
    assert not media


def test_tokens_of_images_count_against_the_length(local: LocalModel, processor: Any) -> None:
    app = application(local, processor, "model", max_length=20)
    status, answer = ask(app, [part(data_url(picture(seed))) for seed in range(4)])
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    assert "17 tokens and 6 to come" in answer["error"]["message"]


# Refusals -------------------------------------------------------------------------------------------------------------


def header_bombs() -> Iterator[tuple[str, str, bytes]]:
    """Yield files of some bytes whose headers promise 65,000 x 65,000 pixels, or as many as their format allows."""
    side = 65_000

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0))
    yield (
        "png",
        "image/png",
        b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"\0" * 1000)) + chunk(b"IEND", b""),
    )
    yield (
        "gif",
        "image/gif",
        b"GIF89a"
        + struct.pack("<HHBBB", side, side, 0, 0, 0)
        + b"\x2c"
        + struct.pack("<HHHHB", 0, 0, side, side, 0)
        + b"\x02\x02\x4c\x01\x00;",
    )
    jpeg = bytearray(picture(0, "JPEG"))
    at = jpeg.index(b"\xff\xc0")
    jpeg[at + 5 : at + 9] = struct.pack(">HH", side, side)
    yield "jpeg", "image/jpeg", bytes(jpeg)
    webp = bytearray(picture(0, "WEBP", lossless=True))
    at = webp.index(b"VP8L") + 9
    webp[at : at + 4] = struct.pack("<I", 0x3FFF | 0x3FFF << 14)
    yield "webp, lossless", "image/webp", bytes(webp)
    lossy = bytearray(picture(0, "WEBP"))
    at = lossy.index(b"VP8 ") + 14
    lossy[at : at + 4] = struct.pack("<HH", 0x3FFF, 0x3FFF)
    yield "webp, lossy", "image/webp", bytes(lossy)
    extended = b"VP8X" + struct.pack("<I", 10) + bytes([2, 0, 0, 0]) + b"\xff\xff\xff" + b"\xff\xff\xff"
    yield "webp, extended", "image/webp", b"RIFF" + struct.pack("<I", len(extended) + 4) + b"WEBP" + extended


BOMBS = list(header_bombs())


@pytest.mark.parametrize(("kind", "data"), [each[1:] for each in BOMBS], ids=[each[0] for each in BOMBS])
def test_size_in_a_header_is_refused_before_pixels_are_decoded(kind: str, data: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=r"has \d+ x \d+ pixels, more than 50000000"):
            read_image(data_url(data, kind), 50_000_000)
        assert tracemalloc.get_traced_memory()[1] < 5 << 20
    finally:
        tracemalloc.stop()


PNG = picture(0)
DAMAGED = {
    "cut": data_url(PNG[: len(PNG) // 2]),
    "empty": data_url(b""),
    "other format": data_url(PNG, "image/jpeg"),
    "format without a name here": data_url(picture(0, "BMP"), "image/png"),
    "header only": data_url(PNG[:33]),
    "cut webp": data_url(picture(0, "WEBP")[:60], "image/webp"),
    "cut jpeg": data_url(picture(0, "JPEG")[:300], "image/jpeg"),
    "cut gif": data_url(picture(0, "GIF")[:40], "image/gif"),
}
ADDRESSES = {
    "http": "http://127.0.0.1:1/a.png",
    "https": "https://example.org/a.png",
    "file": "file:///etc/passwd",
    "path": "/etc/passwd",
    "relative path": "README.md",
    "svg": data_url(b"<svg/>", "image/svg+xml"),
    "bmp": data_url(picture(0, "BMP"), "image/bmp"),
    "no base64": "data:image/png,abc",
    "parameters": data_url(PNG).replace("image/png", "image/png;charset=x"),
    "line breaks": data_url(PNG).replace("base64,", "base64,\n"),
    "other alphabet": f"data:image/png;base64,{base64.urlsafe_b64encode(bytes([255] * 30)).decode()}",
    "no padding": data_url(PNG + b"x" * (len(PNG) % 3 + 1)).rstrip("="),
}


@pytest.mark.parametrize("url", DAMAGED.values(), ids=DAMAGED)
def test_damaged_images_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"is no .* image, or a damaged one"):
        read_image(url, 10**6)


@pytest.mark.parametrize("url", ADDRESSES.values(), ids=ADDRESSES)
def test_nothing_is_fetched_or_opened(url: str) -> None:
    with pytest.raises(ValueError, match=r"is not a data URL .* fetches no address|is not valid base64"):
        read_image(url, 10**6)


@pytest.mark.parametrize("kind", FORMATS)
def test_accepted_formats_are_read(kind: str) -> None:
    image = read_image(data_url(picture(1, FORMATS[kind]), kind), 10**6)
    assert (image.size, image.mode) == ((20, 18), "RGB")


def test_first_frame_of_an_endless_animation_is_read() -> None:
    frames = [Image.new("RGB", (8, 8), (255 * (i == 0), i % 256, 0)) for i in range(300)]
    file = io.BytesIO()
    frames[0].save(file, "GIF", save_all=True, append_images=frames[1:], loop=0)
    assert read_image(data_url(file.getvalue(), "image/gif"), 10**6).getpixel((0, 0))[0] > 200


def test_images_are_turned_as_their_camera_was_held() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    assert read_image(data_url(picture(0, "JPEG", exif=exif), "image/jpeg"), 10**6).size == (18, 20)


def test_refusals_name_the_part_and_quote_nothing(local: LocalModel, processor: Any) -> None:
    app = application(local, processor, "model", max_images=2)
    status, answer = ask(app, [{"type": "text", "text": "w7"}, part("file:///etc/passwd")])
    assert status == 400
    assert answer["error"]["message"].startswith("messages[0].content[1] is not a data URL")
    assert "passwd" not in str(answer)
    status, answer = ask(app, [part(data_url(PNG))] * 3)
    assert (status, answer["error"]["message"]) == (400, "the request has 3 images, more than 2")
    status, answer = ask(app, [{"type": "image_url", "image_url": {}}])
    assert (status, answer["error"]["message"]) == (400, "messages[0].content[0] has no image_url with a url")
    status, answer = ask(app, [part(data_url(b"x" * (21 << 20)))])
    assert status == 413


def test_model_of_text_refuses_images(processor: Any) -> None:
    tokenizer = words()
    tokenizer.chat_template = TEMPLATE
    status, answer = ask(application(StubModel(), tokenizer), [part(data_url(PNG))])
    assert (status, answer["error"]["message"]) == (
        400,
        "messages[0].content of type 'image_url' is not supported; this server takes text",
    )


def test_limits_of_images_are_options_of_the_command(tmp_path: Path) -> None:
    args = make_parser().parse_args(["serve", "model", "--images", "--max-images", "3", "--max-image-pixels", "1000"])
    assert (args.images, args.max_images, args.max_image_pixels, args.max_body_size) == (True, 3, 1000, None)


@pytest.mark.drawn(2)
def test_command_serves_a_checkpoint_with_images(local: LocalModel, processor: Any, tmp_path: Path) -> None:
    local.model.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    pictures = [picture(1)]
    text, length = expected(local, processor, "w5 w7 <image> ", pictures)
    content = [{"type": "text", "text": "w7"}, part(data_url(pictures[0]))]
    fields = {"messages": [{"role": "w5", "content": content}], "max_tokens": 6, "temperature": 0}
    with serving(tmp_path, "--tensor-parallel-size", 2) as running:
        url = running.says(" at http").split(" at ")[1].strip()
        connected = connect(url, post_bytes("/v1/chat/completions", json.dumps(fields).encode()))
        status, _, body = read_answer(connected)
        answer = json.loads(body)
    assert (status, answer["choices"][0]["message"]["content"]) == (200, text)
    assert answer["usage"]["prompt_tokens"] == length
