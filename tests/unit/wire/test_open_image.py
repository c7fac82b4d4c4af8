"""What engine and trainer could read differently is refused; the rest has the engine's pixels."""

from __future__ import annotations

import base64
import io
import struct
from typing import Any

import numpy as np
import pytest
from PIL import Image

from gradus.errors import ProtocolError
from gradus.wire.images import MAX_IMAGE_BYTES, bytes_of, name_of, named_in, open_image


def encoded(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    written = io.BytesIO()
    image.save(written, form, **options)
    return written.getvalue()


def drawn(mode: str = "RGB", width: int = 9, height: int = 7) -> Image.Image:
    """Every pixel another colour, some of them transparent where the mode can be."""
    random = np.random.default_rng(0).integers(0, 256, (height, width, 4)).astype(np.uint8)
    return Image.fromarray(random, "RGBA").convert(mode)


def frames() -> bytes:
    first, *others = (Image.new("L", (8, 8), colour * 90) for colour in range(3))
    return encoded(first, "GIF", save_all=True, append_images=others)


def noted(form: str, notes: bytes) -> bytes:
    return encoded(drawn(), form, exif=b"Exif\0\0" + notes)


TURNED_AND_DATED_BY_A_FLOAT = b"II*\0" + struct.pack(
    "<IH HHI4s HHIf I", 8, 2, 0x112, 3, 1, b"\6", 0x132, 11, 1, 1.0, 0
)
BAD = {
    "text": (b"hello", "cannot be decoded"),
    "nothing": (b"", "cannot be decoded"),
    "truncated": (encoded(drawn(width=90, height=70))[:900], "cannot be decoded"),
    "damaged": (encoded(drawn(), "JPEG")[:200] + b"\0" * 90, "cannot be decoded"),
    "a format that runs a program": (b"%!PS-Adobe-3.0 EPSF-3.0\n" * 9, "cannot be decoded"),
    "one pixel": (encoded(Image.new("RGB", (1, 1))), "has 1 x 1 pixels; each side needs 4"),
    "flat": (encoded(Image.new("RGB", (900, 4))), "a side may be 100 times the other"),
    "too many pixels": (encoded(Image.new("1", (10_000, 6_000))), "may have 50,000,000"),
    "a bomb": (encoded(Image.new("1", (20_000, 20_000))), "cannot be decoded|may have"),
    "cmyk": (encoded(drawn("CMYK"), "JPEG"), "pixels of the kind CMYK"),
    "16 bits": (encoded(Image.new("I;16", (9, 9))), "pixels of the kind I;16"),
    "animated": (frames(), "is animated, with 3 frames"),
    "notes of no format": (noted("PNG", b"nothing!"), "has EXIF notes that cannot be read"),
    "a date that is none": (noted("JPEG", TURNED_AND_DATED_BY_A_FLOAT), "has EXIF notes .*; save"),
}


@pytest.mark.parametrize("case", BAD)
def test_an_image_that_two_could_read_differently_is_refused(case: str) -> None:
    content, said = BAD[case]
    with pytest.raises(ProtocolError, match=said):
        open_image(content)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://127.0.0.1:9/a.png", "addresses are not fetched and files not read"),
        ("https://example.org/a.png", "addresses are not fetched"),
        ("file:///etc/passwd", "files not read"),
        ("data:text/plain;base64,aGk=", "expected data:image"),
        ("data:image/png,abc", "expected data:image"),
        ("data:image/png;base64,####", "is not base64"),
        ("data:image/png;base64,abc", "is not base64"),
        ("", "expected data:image"),
        ("data:image/png;base64," + "A" * (MAX_IMAGE_BYTES * 4 // 3 + 8), "may have 16,777,216"),
    ],
    ids=range(9),
)
def test_only_data_urls_of_images_are_taken(url: str, said: str) -> None:
    with pytest.raises(ProtocolError, match=said):
        bytes_of(url)


def test_the_bytes_of_a_data_url_are_those_that_the_task_gave() -> None:
    content = encoded(drawn())
    assert bytes_of("data:image/png;base64," + base64.b64encode(content).decode()) == content
    assert named_in(name_of("ab" * 32)) == "ab" * 32
    assert named_in("data:image/png;base64,AAAA") is None


def good() -> dict[str, bytes]:
    turned = Image.Exif()
    turned[0x0112] = 6
    found = {mode: encoded(drawn(mode)) for mode in ("1", "L", "LA", "P", "RGB", "RGBA")}
    for mode in ("L", "RGB"):
        there = drawn(mode).getpixel((0, 0))
        found[f"a transparent colour of {mode}"] = encoded(drawn(mode), transparency=there)
    found["a palette with opacities"] = encoded(drawn("P"), transparency=bytes(range(200)))
    found["turned"] = encoded(drawn(), "JPEG", exif=turned)
    found |= {form: encoded(drawn(), form) for form in ("JPEG", "WEBP", "BMP")}
    return found | {"GIF": encoded(drawn("P"), "GIF")}


@pytest.mark.torch
@pytest.mark.parametrize("case", good())
def test_the_pixels_are_those_of_the_engine_bit_by_bit(case: str) -> None:
    vllm = pytest.importorskip("vllm.multimodal.media.image")
    content = good()[case]
    ours = open_image(content)
    assert ours.mode == "RGB"
    theirs = vllm.ImageMediaIO("RGB").load_bytes(content).media
    np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))
