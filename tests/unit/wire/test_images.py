"""An image is stored once, by its bytes, and no sample is cut or learned inside one."""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from builders import build_sample
from hypothesis import given
from hypothesis import strategies as st

from gradus.errors import FullDiskError, ProtocolError
from gradus.wire.codec import decode, decode_rank_batch, encode
from gradus.wire.images import ImageSpan, ImageStore, whole_length
from gradus.wire.micro_batch import Batch, MicroBatch
from gradus.wire.packing import build_dummy, pack
from gradus.wire.sample import Sample
from gradus.wire.versions import VersionSpan

RED, BLUE = "ab" * 32, "cd" * 32


def with_images(sample: Sample, *spans: ImageSpan) -> Sample:
    return msgspec.structs.replace(sample, images=list(spans))


def pictured(seed: int, length: int = 12) -> Sample:
    """Eight tokens of prompt, with two images of three placeholders that lie side by side."""
    sample = build_sample(length, prompt_length=8, seed=seed)
    return with_images(sample, ImageSpan(RED, 1, 3), ImageSpan(BLUE, 4, 3))


def test_a_sample_with_images_survives_the_wire_and_the_packing() -> None:
    samples = [pictured(0), build_sample(5, seed=1), pictured(2)]
    batch = Batch(0, 1, VersionSpan(0, 0), pack(samples, max_tokens=32, num_ranks=1))
    (micro_batch,) = decode_rank_batch(encode(batch.by_rank()[0])).micro_batches
    images = dict(zip(micro_batch.sample_ids, micro_batch.images, strict=True))
    assert images == {sample.id: sample.images for sample in samples}
    assert decode(encode(samples[0]), Sample).images == samples[0].images


def test_samples_without_images_carry_nothing_of_them() -> None:
    assert MicroBatch.join([build_sample(), build_sample()]).images == []
    assert build_dummy(pictured(0)).images == []


@pytest.mark.parametrize(
    ("spans", "said"),
    [
        ([ImageSpan("red", 1, 3)], "image 0 has the name 'red', which is no SHA-256"),
        ([ImageSpan(RED.upper(), 1, 3)], "which is no SHA-256"),
        ([ImageSpan(RED, 1, 0)], "image 0 has 0 placeholders, expected one or more"),
        ([ImageSpan(RED, -1, 3)], "tokens -1 to 2, expected some between 0 and 12"),
        ([ImageSpan(RED, 11, 3)], "tokens 11 to 14, expected some between 0 and 12"),
        ([ImageSpan(RED, 1, 3), ImageSpan(BLUE, 3, 2)], "image 1 has the tokens 3 to 5"),
        ([ImageSpan(RED, 4, 3), ImageSpan(BLUE, 1, 3)], "image 1 has the tokens 1 to 4"),
        ([ImageSpan(RED, 6, 3)], "image 0 has placeholders that are to be learned"),
    ],
)
def test_spans_that_cannot_be_are_refused_in_sample_and_batch(
    spans: list[ImageSpan], said: str
) -> None:
    sample = with_images(build_sample(12, prompt_length=8), *spans)
    for checked in (sample, MicroBatch.join([build_sample(3), sample])):
        with pytest.raises(ProtocolError, match=said):
            checked.check()


def test_images_of_other_samples_than_there_are_are_refused() -> None:
    row = msgspec.structs.replace(MicroBatch.join([pictured(0), pictured(1)]), images=[[]])
    with pytest.raises(ProtocolError, match="images of 1 samples, there are 2"):
        row.check()


@given(st.integers(0, 12))
def test_a_cut_never_falls_into_an_image_and_takes_the_most_it_can(length: int) -> None:
    spans = pictured(0).images
    whole = whole_length(spans, length)
    assert not any(span.start < whole < span.end for span in spans)
    inside = next((span for span in spans if span.start < length < span.end), None)
    assert whole == (inside.start if inside else length)


def test_the_store_keeps_each_image_once_under_its_hash(tmp_path: Path) -> None:
    store = ImageStore(tmp_path / "images")
    name = store.put(b"red")
    file = tmp_path / "images" / name
    os.utime(file, (0, 0))
    before = file.stat()
    assert store.put(b"red") == name
    assert store.read(name) == b"red"
    assert list(file.parent.iterdir()) == [file]
    assert (file.stat().st_ino, file.stat().st_mtime) == (before.st_ino, 0)


def test_episodes_that_bring_one_image_at_the_same_time_do_not_disturb_each_other(
    tmp_path: Path,
) -> None:
    store = ImageStore(tmp_path)
    images = [bytes([number]) * 50_000 for number in range(8)]
    with ThreadPoolExecutor(16) as threads:
        names = list(threads.map(store.put, [it for it in images for _ in range(16)]))
    assert sorted(set(names)) == sorted(it.name for it in tmp_path.iterdir())
    assert [store.read(name) for name in names[::16]] == images


@pytest.mark.parametrize("content", [b"", bytes(11)])
def test_an_image_of_no_or_too_many_bytes_is_refused(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(ProtocolError, match=f"has {len(content)} bytes, expected 1 to 10"):
        ImageStore(tmp_path, max_image_bytes=10).put(content)
    assert not list(tmp_path.iterdir())


def test_the_store_grows_up_to_its_quota_and_has_room_again_after_a_removal(tmp_path: Path) -> None:
    ImageStore(tmp_path).put(bytes(6))
    store = ImageStore(tmp_path, max_bytes=10)
    with pytest.raises(FullDiskError, match="holds 6 bytes of images, and may hold 10"):
        store.put(b"red and blue")
    kept = store.put(b"red")
    assert store.put(b"red") == kept
    (tmp_path / hashlib.sha256(bytes(6)).hexdigest()).unlink()
    assert store.read(store.put(b"blue12")) == b"blue12"
    assert store.read(kept) == b"red"


def test_an_image_that_is_gone_or_changed_is_named_with_its_file(tmp_path: Path) -> None:
    store = ImageStore(tmp_path)
    with pytest.raises(ProtocolError, match=f"image {RED} cannot be read from {tmp_path}"):
        store.read(RED)
    name = store.put(b"red")
    (tmp_path / name).write_bytes(b"rot")
    with pytest.raises(ProtocolError, match=f"image {name}: {tmp_path}.* holds other bytes"):
        store.read(name)
    with pytest.raises(ProtocolError, match="no SHA-256"):
        store.read("../secrets")
