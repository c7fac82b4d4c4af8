"""Images of supervised data: each is found, checked before the start, and never a target."""

from __future__ import annotations

import base64
import io
import json
import subprocess
import sys
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers import AutoTokenizer
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

from gradus.config import ModelConfig, SftDataConfig, SftProcessConfig
from gradus.errors import ConfigError, ProcessError, ProtocolError
from gradus.rows.reading import read_rows
from gradus.run.paths import RunDirectory
from gradus.testing.tiny_images import IMAGE_CHAT_TEMPLATE, IMAGE_TOKENS
from gradus.trainer.data.conversation_files import load_conversations
from gradus.trainer.data.conversation_samples import ConversationEncoder
from gradus.trainer.data.images import DataImages, Placeholders, ShownImages
from gradus.trainer.data.stream import encode_row
from gradus.trainer.entry.sft import image_processor
from gradus.wire.images import ImageStore, name_of, open_image
from gradus.wire.sample import Sample

pytestmark = pytest.mark.torch

TEXT = {"type": "text", "text": "how many?"}
REPLY = {"role": "assistant", "content": "two"}


def drawn(width: int = 28, height: int = 28, colour: str = "red") -> bytes:
    written = io.BytesIO()
    Image.new("RGB", (width, height), colour).save(written, "PNG")
    return written.getvalue()


RED, BLUE = drawn(), drawn(56, 28, "blue")
URL = "data:image/png;base64," + base64.b64encode(RED).decode()


def name(content: bytes) -> dict[str, str]:
    return {"type": "image", "image": name_of(sha256(content).hexdigest())}


def asked(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def loaded(
    root: Path, *rows: Any, images: DataImages | None = None
) -> tuple[list[Any], DataImages]:
    """Rows of a data file beside two images."""
    folder = root / "data"
    folder.mkdir(exist_ok=True)
    (folder.parent / "away.png").write_bytes(RED)
    (folder / "link.png").unlink(missing_ok=True)
    (folder / "link.png").symlink_to(folder.parent / "away.png")
    (folder / "red.png").write_bytes(RED)
    (folder / "blue.png").write_bytes(BLUE)
    (folder / "text.png").write_text("no image")
    (folder / "large.png").write_bytes(b"\0" * ((16 << 20) + 1))
    (folder / "data.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    images = images or DataImages()
    return load_conversations(SftDataConfig(path=str(folder / "data.jsonl")), images), images


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": URL, "detail": "low"}},
        {"type": "image_url", "image_url": "red.png"},
        {"type": "input_image", "image_url": URL},
        {"type": "image", "image": "red.png", "text": None},
        {"type": "image", "image": {"bytes": None, "path": "red.png"}},
        {"type": "image", "url": "file://r%65d.png"},
        {"type": "image", "path": "./red.png"},
    ],
)
def test_a_part_shows_its_image_however_it_is_written(tmp_path: Path, part: Any) -> None:
    [row], images = loaded(tmp_path, {"messages": [asked(part, TEXT), REPLY]})
    assert row.messages[0]["content"] == [name(RED), TEXT]
    digest = sha256(RED).hexdigest()
    assert (images.read(digest), images.size(digest)) == (RED, (28, 28))


def test_images_beside_the_messages_are_taken_in_their_order(tmp_path: Path) -> None:
    beside = {"images": ["red.png", {"path": "blue.png"}]}
    empty = {"type": "image", "text": None}
    rows, _ = loaded(
        tmp_path,
        {"messages": [asked(empty, TEXT), REPLY, asked(empty), REPLY], **beside},
        {"messages": [{"role": "user", "content": "a<image>b<image>"}, REPLY], **beside},
        {"prompt": [{"role": "user", "content": "<image>"}], "completion": [REPLY], "image": URL},
        {"messages": [{"role": "user", "content": "<image> of text"}, REPLY]},
    )
    contents = [[m["content"] for m in row.messages if m["role"] == "user"] for row in rows]
    a, b = ({"type": "text", "text": text} for text in "ab")
    assert contents == [
        [[name(RED), TEXT], [name(BLUE)]],
        [[a, name(RED), b, name(BLUE)]],
        [[name(RED)]],
        ["<image> of text"],
    ]


def test_an_empty_cell_is_no_image_and_arrays_of_bytes_are() -> None:
    cell = {"bytes": None, "path": None}
    images = DataImages()
    row = {"images": (cell, bytearray(RED), None, {"bytes": bytearray(BLUE)})}
    shown = ShownImages(images, row, None, None)
    assert shown.num_left == 2
    assert shown.part("here", {"type": "image", "image": cell}) == name(RED)
    assert shown.take("here") == name(BLUE)
    assert images.read(sha256(BLUE).hexdigest()) == BLUE
    with pytest.raises(ConfigError, match="shows more images than the row has"):
        shown.part("here", {"type": "image", "image": cell})


@pytest.mark.parametrize(
    ("shown", "message"),
    [
        ("https://example.com/a.png", "addresses are not fetched"),
        ("../away.png", "outside of the data file's folder"),
        ("file://../away.png", "outside of the data file's folder"),
        ("link.png", "outside of the data file's folder"),
        ("data:text/plain;base64,aGk=", "expected data:image"),
        ("data:image/png;base64,!", "is not base64"),
        ("missing.png", "missing.png, which is no file"),
        (".", "which is no file"),
        ("a\0b", "null byte"),
        ("text.png", "cannot be decoded"),
        ("large.png", "may have 16,777,216"),
        (7, "an image is a int"),
        ({"height": 7}, "an image is a dict"),
        ({"bytes": "iVBORw0"}, "has text as its 'bytes'; write it as a data URL"),
        (name_of("ab" * 32), "which is no file"),
    ],
)
def test_a_bad_image_is_refused_with_its_row(tmp_path: Path, shown: Any, message: str) -> None:
    good = {"messages": [{"role": "user", "content": "hi"}, REPLY]}
    bad = {"messages": [asked(TEXT, {"type": "image", "image": shown}), REPLY]}
    with pytest.raises(ConfigError, match=rf"data\.jsonl:2: message 0: .*{message}"):
        loaded(tmp_path, good, bad)


@pytest.mark.parametrize(
    "how", ["{}", "file://{}", "FILE://{}", "file://localhost{}", "file://LocalHost{}"]
)
def test_a_file_elsewhere_is_read_where_its_whole_path_is_written(tmp_path: Path, how: str) -> None:
    part = {"type": "image", "image": how.format(tmp_path / "away.png")}
    [row], images = loaded(tmp_path, {"messages": [asked(part), REPLY]})
    assert row.messages[0]["content"] == [name(RED)]
    assert images.read(sha256(RED).hexdigest()) == RED


def shared(root: Path, *names: str) -> list[Any]:
    """What two ranks know of the images of one data set: their sizes, or what they raise."""
    rows = [{"messages": [asked({"type": "image", "image": it}), REPLY]} for it in names]
    told: list[Any] = []
    worlds: list[Any] = [
        SimpleNamespace(data_rank=rank, data_size=2, added_up=told.append) for rank in range(2)
    ]
    ranks = [loaded(root, *rows, images=DataImages(world))[1] for world in worlds]
    for images in ranks:
        with pytest.raises(TypeError):
            images.exchange()
    found: list[Any] = []
    for world, images in zip(worlds, ranks, strict=True):
        world.added_up = lambda _: sum(told).tolist()
        try:
            images.exchange()
            found.append({it: images.size(sha256(it).hexdigest()) for it in (RED, BLUE)})
        except (ConfigError, ProcessError) as error:
            found.append(error)
    return found


def test_ranks_decode_each_image_once_between_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[bytes] = []

    def opening(content: bytes) -> Any:
        opened.append(content)
        return open_image(content)

    monkeypatch.setattr("gradus.trainer.data.images.open_image", opening)
    found = shared(tmp_path, "red.png", "blue.png", "red.png")
    assert found == [{RED: (28, 28), BLUE: (56, 28)}] * 2
    assert opened == [RED, BLUE]


def test_an_image_that_one_rank_refuses_ends_all_of_them(tmp_path: Path) -> None:
    first, second = shared(tmp_path, "red.png", "text.png", "blue.png")
    assert "data.jsonl:2: message 0: an image cannot be decoded" in str(second)
    assert isinstance(second, ConfigError)
    assert isinstance(first, ProcessError)
    assert "another rank refused an image" in str(first)


def test_images_that_no_message_shows_and_those_that_lack_are_refused(tmp_path: Path) -> None:
    part, beside = {"type": "image"}, {"images": ["red.png", "blue.png"]}
    with pytest.raises(ConfigError, match="jsonl:1: 1 images of 'images' are in no message"):
        loaded(tmp_path, {"messages": [asked(part), REPLY], **beside})
    with pytest.raises(ConfigError, match=r"message 0 shows more images than the row has.*2"):
        loaded(tmp_path, {"messages": [asked(part, part, part), REPLY], **beside})
    with pytest.raises(ConfigError, match=r"1 images of .image. are in no message.*take the"):
        loaded(tmp_path, {"prompt": "a", "completion": "b", "image": "http://web/of-the-row"})
    with pytest.raises(ConfigError, match=r"2 images of 'images' .* and completion as messages"):
        loaded(tmp_path, {"prompt": "<image>", "completion": "b", **beside})
    own = {"type": "image", "path": "red.png"}
    for messages in ([asked(own), REPLY], [{"role": "system", "content": "a"}, REPLY]):
        with pytest.raises(ConfigError, match=r"2 images of 'images' .* the type 'image' where"):
            loaded(tmp_path, {"messages": messages, **beside})
    source = {"type": "image", "source": {"type": "base64", "data": ""}}
    with pytest.raises(ConfigError, match=r"than the row has.*\(0\).*own, as one of image_url, im"):
        loaded(tmp_path, {"messages": [asked(source), REPLY]})
    reply = {"role": "assistant", "content": "write <image>"}
    with pytest.raises(ConfigError, match=r"message 1 shows more.*'<image>' that is a word"):
        loaded(tmp_path, {"messages": [asked(part, part), reply], **beside})


def test_images_without_a_place_come_before_the_first_text_of_a_user(tmp_path: Path) -> None:
    """As TRL shows them, whatever a message's content is."""
    system, first = {"role": "system", "content": "a"}, {"role": "user", "content": "how many?"}
    beside = {"images": ["red.png", None, "blue.png"]}
    rows, _ = loaded(
        tmp_path,
        {"messages": [system, first, REPLY, first, REPLY], **beside},
        {"prompt": [asked(TEXT)], "completion": [REPLY], **beside},
        {"messages": [first, REPLY], "images": [None]},
    )
    both = [name(RED), name(BLUE), TEXT]
    assert [m["content"] for m in rows[0].messages] == ["a", both, "two", "how many?", "two"]
    assert rows[0].learned == (2, 4)
    assert rows[1].messages[0]["content"] == both
    assert rows[2].messages[0]["content"] == "how many?"
    with pytest.raises(ConfigError, match=r"jsonl:1: 'image': .* the address 'https://a/b.png'"):
        loaded(tmp_path, {"messages": [first, REPLY], "image": "https://a/b.png"})


def test_a_file_that_changes_later_is_no_longer_the_image(tmp_path: Path) -> None:
    _, images = loaded(tmp_path, {"messages": [asked({"type": "image", "path": "red.png"}), REPLY]})
    (tmp_path / "data/red.png").write_bytes(BLUE)
    with pytest.raises(ProtocolError, match=r"red\.png holds another image than at the start"):
        images.read(sha256(RED).hexdigest())


def test_episodes_of_a_run_find_their_images_in_its_store(tmp_path: Path) -> None:
    run_dir = RunDirectory(tmp_path / "run")
    stored = name_of(ImageStore(run_dir.images).put(RED))
    shown = {"type": "image_url", "image_url": {"url": stored}}
    nodes = [
        {"message": {"role": "user", "content": [shown]}, "sampled": False},
        {"message": REPLY, "sampled": True, "parent": 0},
    ]
    trace = {"id": "t", "ok": True, "agent": {"trainable": True}, "rewards": {}, "nodes": nodes}
    file = tmp_path / "run" / "episodes" / "step_3" / "train.jsonl"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"traces": [trace], "gradus": {}}))
    images = DataImages()
    for path in (file.parent.parent, file):
        [row] = load_conversations(SftDataConfig(path=str(path)), images)
        assert row.messages[0]["content"] == [name(RED)]  # type: ignore[union-attr]
    file.write_text(json.dumps({"traces": [trace], "gradus": {}}).replace(stored, "image:../../a"))
    with pytest.raises(ConfigError, match="which is no file"):
        load_conversations(SftDataConfig(path=str(file)), images)


def test_a_data_set_of_the_hub_gives_the_bytes_of_its_images(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    datasets = pytest.importorskip("datasets")
    held = datasets.Dataset.from_dict(
        {"image": [{"bytes": RED}], "images": [[{"bytes": RED}, {"bytes": BLUE}]]},
        features=datasets.Features(
            {"image": datasets.Image(), "images": datasets.List(datasets.Image())}
        ),
    )
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: held)
    [(_, row)] = read_rows("org/pictures")
    assert row["image"]["bytes"] == RED
    assert [it["bytes"] for it in row["images"]] == [RED, BLUE]


def test_a_model_of_text_or_unknown_and_a_tower_without_images_are_refused(
    tmp_path: Path, tiny_model: Path
) -> None:
    data = str(tmp_path / "data.jsonl")
    config = SftProcessConfig(
        run_dir=str(tmp_path / "run"),
        term=0,
        model=ModelConfig(name=str(tiny_model)),
        data=SftDataConfig(path=data),
    )
    _, images = loaded(tmp_path, {"messages": [asked({"type": "image", "image": URL}), REPLY]})
    with pytest.raises(
        ConfigError, match=r"jsonl:1: message 0 shows an image, and model .*text al"
    ):
        image_processor(config, images)
    elsewhere = config.model_copy(update={"model": ModelConfig(name="o/elsewhere")})
    with pytest.raises(
        ConfigError, match=r"jsonl:1: .*'o/elsewhere' is not on this machine.*; hf download o/els"
    ):
        image_processor(elsewhere, images)
    assert image_processor(config, DataImages()) is None
    with pytest.raises(ConfigError, match=r"train_vision: no conversation of .* shows an image"):
        image_processor(config.model_copy(update={"train_vision": True}), DataImages())


class Halves:
    """Makes a patch of each 14 pixels, as Qwen's processor of an image that fits."""

    def get_number_of_image_patches(self, height: int, width: int) -> int:
        return (height // 14) * (width // 14)


HALVES = Halves()


def encoded(
    tiny_model: Path,
    folder: Path,
    *rows: Any,
    template: str = IMAGE_CHAT_TEMPLATE,
    around: tuple[int, int] | None = None,
    processor: Any = HALVES,
    **data: Any,
) -> tuple[list[Sample], Any]:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.add_special_tokens({"additional_special_tokens": list(IMAGE_TOKENS)})
    tokenizer.chat_template = template
    loaded(folder, *rows)
    images = DataImages()
    config = SftDataConfig(path=str(folder / "data" / "data.jsonl"), **data)
    conversations = load_conversations(config, images)
    pad: Any = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    placeholders = Placeholders(images, pad, processor, merge=2, around=around)
    encoder = ConversationEncoder(tokenizer, (), placeholders)
    return [it for row in conversations for it in encoder.encode(row)], tokenizer


SEEN = [
    asked(TEXT, {"type": "image", "image": "red.png"}),
    REPLY,
    asked({"type": "image", "image": "blue.png"}, {"type": "text", "text": "<|image_pad|>?"}),
    REPLY,
]


def test_each_image_has_its_placeholders_and_none_is_learned(
    tmp_path: Path, tiny_model: Path
) -> None:
    [sample], tokenizer = encoded(tiny_model, tmp_path, {"messages": SEEN})
    pad = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    first, second = sample.images
    assert [(it.sha256, it.length) for it in sample.images] == [
        (sha256(RED).hexdigest(), 1),
        (sha256(BLUE).hexdigest(), 2),
    ]
    places = np.flatnonzero(sample.arrays.token_ids == pad)
    assert places.tolist() == [first.start, second.start, second.start + 1]
    learned = tokenizer.decode(sample.arrays.token_ids[sample.arrays.loss_mask])
    assert learned == "two<|im_end|>two<|im_end|>"
    sample.check()
    text = tokenizer.decode(sample.arrays.token_ids)
    assert "<|vision_start|><|image_pad|><|image_pad|><|vision_end|>" in text


def test_what_a_processor_writes_around_an_image_is_written_and_the_rest_stays(
    tmp_path: Path, tiny_model: Path
) -> None:
    """As that of Gemma 4: its template writes one token for an image."""
    processor = Gemma4ImageProcessorPil(max_soft_tokens=70)
    bare = IMAGE_CHAT_TEMPLATE.replace("<|vision_start|>", "").replace("<|vision_end|>", "")
    [sample], tokenizer = encoded(
        *(tiny_model, tmp_path, {"messages": SEEN}),
        template=bare,
        processor=processor,
        around=(7, 8),
    )
    sample.check()
    pad = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    ids, counts = sample.arrays.token_ids.tolist(), []
    for span, content in zip(sample.images, (RED, BLUE), strict=True):
        found = processor(images=[open_image(content)], return_tensors="np")
        counts.append(int(found["num_soft_tokens_per_image"][0]))
        assert span.length == counts[-1] > 50
        assert ids[span.start - 1 : span.end + 1] == [7, *[pad] * span.length, 8]
    [plain], _ = encoded(tiny_model, tmp_path, {"messages": SEEN}, template=bare)
    assert len(ids) == len(plain) - 3 + sum(counts) + 4
    assert tokenizer.decode(ids[-10:]) == tokenizer.decode(plain.arrays.token_ids[-10:])
    assert sample.arrays.loss_mask.sum() == plain.arrays.loss_mask.sum()
    learned = tokenizer.decode(sample.arrays.token_ids[sample.arrays.loss_mask])
    assert learned == "two<|im_end|>two<|im_end|>"


@pytest.mark.parametrize("size", [(28, 28), (98, 70), (640, 480), (30, 3000), (1200, 30), (31, 33)])
def test_placeholders_of_gemma_4_are_as_many_as_its_processor_makes(size: tuple[int, int]) -> None:
    processor, images = Gemma4ImageProcessorPil(max_soft_tokens=70), DataImages()
    url = "data:image/png;base64," + base64.b64encode(drawn(*size)).decode()
    digest = images.add("here", url, None, None)
    made = processor(images=[open_image(images.read(digest))], return_tensors="np")
    count = Placeholders(images, 0, processor, 3, around=(7, 8)).count(digest)
    assert count == made["num_soft_tokens_per_image"][0]


def test_a_role_that_shows_images_learns_what_is_around_them(
    tmp_path: Path, tiny_model: Path
) -> None:
    row = {"messages": [asked({"type": "image", "image": "blue.png"}, TEXT), REPLY]}
    [sample], tokenizer = encoded(tiny_model, tmp_path, row, train_roles=["user"])
    sample.check()
    learned = tokenizer.decode(sample.arrays.token_ids[sample.arrays.loss_mask])
    assert learned == "<|vision_start|><|vision_end|>how many?<|im_end|>"


def test_images_after_the_last_learned_message_are_left_out(
    tmp_path: Path, tiny_model: Path
) -> None:
    row = {"messages": [{**m, "weight": 0} if n == 3 else m for n, m in enumerate(SEEN)]}
    [sample], _ = encoded(tiny_model, tmp_path, row)
    assert [it.sha256 for it in sample.images] == [sha256(RED).hexdigest()]


def test_a_template_that_leaves_images_out_is_refused(tmp_path: Path, tiny_model: Path) -> None:
    template = IMAGE_CHAT_TEMPLATE.replace("<|image_pad|>", "")
    with pytest.raises(ConfigError, match=r"1: 1 images are shown up to message 1.*for 0"):
        encoded(tiny_model, tmp_path, {"messages": SEEN}, template=template)


def test_a_conversation_with_more_patches_than_a_micro_batch_is_skipped(
    tmp_path: Path, tiny_model: Path
) -> None:
    samples, tokenizer = encoded(tiny_model, tmp_path, {"messages": SEEN})
    [row], images = loaded(tmp_path, {"messages": SEEN})
    pad: Any = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    placeholders = Placeholders(images, pad, Halves(), merge=2)
    for limit, found in ((None, samples), (3, samples), (2, [])):
        encoder = ConversationEncoder(tokenizer, (), placeholders, limit)
        assert [it.id for it in encode_row(encoder, row, 999).samples] == [it.id for it in found]


LEARNS = """
import base64, json, sys
from pathlib import Path
from gradus.companions import show_torchvision
show_torchvision()
from gradus.config import AdamWConfig, ModelConfig, SftDataConfig, SftProcessConfig
from gradus.config.schema.sft import SftValidationConfig
from gradus.testing.tiny_images import build_tiny_image_model
from gradus.trainer.data.conversation_files import load_conversations
from gradus.trainer.data.conversation_samples import ConversationEncoder
from gradus.trainer.data.images import DataImages, Placeholders
from gradus.trainer.entry.sft import run
from gradus.trainer.images.pixels import load_processor
from renderers.qwen3_vl import Qwen3VLRenderer
from transformers import AutoProcessor

folder = Path(sys.argv[1])
build_tiny_image_model(folder / "model", hidden_size=64, num_layers=2)
model = ModelConfig(name=str(folder / "model"), max_length_tokens=128)
data = SftDataConfig(path=str(folder / "data.jsonl"), shuffle=False)
images = DataImages()
rows = load_conversations(data, images)
processor = AutoProcessor.from_pretrained(model.name)
encoder = ConversationEncoder(
    processor.tokenizer, (), Placeholders.of(model, images, load_processor(model))
)
renderer = Qwen3VLRenderer(processor.tokenizer, processor=processor)
for line, row in zip((folder / "data.jsonl").read_text().splitlines(), rows, strict=True):
    [sample] = encoder.encode(row)
    rendered = renderer.render(json.loads(line)["messages"])
    found = sample.arrays.token_ids.tolist()
    # A sample ends with its last learned token.
    assert found == rendered.token_ids[: len(found)], (found, rendered.token_ids)
    spans = [(it.offset, it.length) for it in rendered.multi_modal_data.mm_placeholders["image"]]
    assert spans == [(it.start, it.length) for it in sample.images]
run(SftProcessConfig(
    run_dir=str(folder / "run"), term=0, model=model, data=data, train_vision=True,
    validation=SftValidationConfig(path=data.path, interval_steps=5),
    optimizer=AdamWConfig(lr=1e-2, warmup_steps=2), max_steps=16, batch_conversations=4,
    micro_batch_tokens=128, micro_batch_patches=100, compute_dtype="float32",
))
published = load_processor(ModelConfig(name=str(folder / "run" / "model")))
assert published.to_dict() == load_processor(model).to_dict()
"""


def test_answers_are_learned_from_pixels_rendered_as_in_reinforcement_learning(
    tmp_path: Path,
) -> None:
    """The answer is the colour, which the text does not say."""
    rows = []
    for number, (colour, answer) in enumerate([("red", "r"), ("blue", "b")] * 2):
        (tmp_path / f"{number}.png").write_bytes(drawn(70 + 40 * number, 98, colour))
        url = (tmp_path / f"{number}.png").absolute().as_uri()
        shown = {"type": "image_url", "image_url": {"url": url}}
        rows.append({"messages": [asked(TEXT, shown), {"role": "assistant", "content": answer}]})
    (tmp_path / "data.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    done = subprocess.run(
        [sys.executable, "-c", LEARNS, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss/ce/mean"] for line in lines]
    held_out = [json.loads(line).get("validation/loss/mean") for line in lines]
    # Half of the tokens are answers: guessing costs ln(2) / 2.
    assert losses[0] > 2
    # 70 x 98 to 190 x 98 pixels; the processor makes at most 25 placeholders of any, 100 patches.
    assert all(json.loads(line)["batch/patches/max"] <= 100 for line in lines)
    assert max(json.loads(line)["batch/patches/max"] for line in lines) > 60
    assert losses[-1] < 0.1
    assert held_out[-1] is not None
    assert held_out[-1] < 0.1
