"""Images of an episode: kept once by their hash, and found again in the tokens of its samples."""

from __future__ import annotations

import base64
import copy
import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from verifiers.v1.episode import WireEpisode
from verifiers.v1.graph import MessageNode
from verifiers.v1.types import UserMessage

from gradus.config import algorithms
from gradus.orchestrator.algorithms.base import CreditContext, assign_advantage, write_credit
from gradus.orchestrator.algorithms.echo import Echo
from gradus.orchestrator.groups.samples import SampleOrigin, build_samples
from gradus.orchestrator.play.episode_check import find_failure
from gradus.orchestrator.records.recording import load_played, save_played
from gradus.orchestrator.traces import keep_images
from gradus.orchestrator.types import PlayedEpisode
from gradus.testing.episodes import build_episode, build_message, build_trace
from gradus.wire.images import ImageSpan, ImageStore, name_of
from gradus.wire.versions import VersionSpan

PAD, START, END = 90, 91, 92
ORIGIN = SampleOrigin("shapes", "g0", "g0.0", VersionSpan(0, 0), 1.0, 1000)
RED, BLUE = (hashlib.sha256(colour).hexdigest() for colour in (b"red", b"blue"))


def url_of(content: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(content).decode()


def shown(parent: int | None, token_ids: list[int], *urls: str) -> MessageNode:
    node = build_message(parent, token_ids)
    parts: list[Any] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    node.message = UserMessage(content=[*parts, {"type": "text", "text": "how many?"}])
    return node


def two_turns(*urls: str) -> WireEpisode:
    """An image of two placeholders, a reply that samples one, then two images of one and three."""
    red, blue = urls or (name_of(RED), name_of(BLUE))
    trace = build_trace(
        [
            shown(None, [1, START, PAD, PAD, END, 2], red),
            build_message(0, [3, 4, PAD, 5], sampled=3),
            shown(1, [START, PAD, END, START, PAD, PAD, PAD, END, 6], blue, red),
            build_message(2, [3, 7, 8], sampled=2),
        ]
    )
    trace.mm_token_type_id_map = {PAD: 1, 93: 2}
    assign_advantage(trace, 0.5)
    return build_episode([trace])


def test_each_image_of_two_turns_is_named_where_its_placeholders_lie() -> None:
    (sample,) = build_samples(two_turns(), ORIGIN)
    sample.check()
    assert sample.images == [ImageSpan(RED, 2, 2), ImageSpan(BLUE, 11, 1), ImageSpan(RED, 14, 3)]
    assert all(
        sample.arrays.token_ids[it.start : it.end].tolist() == [PAD] * it.length
        for it in sample.images
    )
    # What the policy sampled itself is learned as any other token.
    assert sample.arrays.token_ids[8] == PAD
    assert sample.arrays.loss_mask[8]


async def test_echo_learns_the_text_beside_an_image_and_none_of_its_placeholders() -> None:
    """As qwen3-vl renders, whose placeholders are body; their weights add up to alpha."""
    episode = two_turns()
    for node in episode.traces[0].nodes:
        node.is_content = [token not in (START, END) for token in node.token_ids]
    echo = Echo(algorithms.EchoAlgorithmConfig(roles={"user": 0.1}, normalize="observations"))
    await echo.score_episode(episode, CreditContext("shapes", task_key=0))
    weights = episode.traces[0].nodes[2].loss_weights
    assert weights is not None
    assert weights["ce_trace"] == [0, 0, 0, 0, 0, 0, 0, 0, 0.1]
    (sample,) = build_samples(episode, ORIGIN)
    sample.check()


def test_an_algorithm_of_ones_own_that_weighs_placeholders_trains_the_other_tokens() -> None:
    episode = two_turns()
    node = episode.traces[0].nodes[2]
    write_credit(node, loss_weights={"ce": [0.5] * 9})
    (sample,) = build_samples(episode, ORIGIN)
    sample.check()
    weighed = np.flatnonzero(sample.arrays.loss_weights["ce"])
    assert weighed.tolist() == [10, 12, 13, 17, 18]


@pytest.mark.parametrize(("longest", "length", "images"), [(15, 14, 2), (17, 17, 3), (12, 12, 2)])
def test_a_long_branch_is_cut_before_the_image_that_does_not_fit(
    longest: int, length: int, images: int
) -> None:
    (sample,) = build_samples(two_turns(), replace(ORIGIN, max_length_tokens=longest))
    sample.check()
    assert (len(sample), len(sample.images)) == (length, images)


def test_a_branch_that_is_cut_within_its_first_image_trains_nothing() -> None:
    assert build_samples(two_turns(), replace(ORIGIN, max_length_tokens=3)) == []


def test_images_of_an_episode_are_kept_once_and_their_bytes_leave_its_record(
    tmp_path: Path,
) -> None:
    store = ImageStore(tmp_path)
    record = two_turns(url_of(b"red"), url_of(b"blue")).model_dump(mode="python")
    record["traces"][0]["task"]["data"]["prompt"] = [
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url_of(b"red")}}]}
    ]
    record["task"]["data"]["prompt"] = copy.deepcopy(record["traces"][0]["task"]["data"]["prompt"])
    keep_images(record, store)
    assert "base64" not in repr(record)
    assert sorted(it.name for it in tmp_path.iterdir()) == sorted([RED, BLUE])
    (sample,) = build_samples(WireEpisode.model_validate(record), ORIGIN)
    assert [store.read(it.sha256) for it in sample.images] == [b"red", b"blue", b"red"]
    keep_images(record, store)  # names stay names
    assert WireEpisode.model_validate(record).traces[0].nodes[0] == two_turns().traces[0].nodes[0]


def test_a_recorded_episode_gives_the_same_images_again() -> None:
    played = PlayedEpisode("g0.0", "g0", VersionSpan(0, 0), two_turns())
    again = load_played(save_played(played)).episode
    assert again is not None
    assert [it.images for it in build_samples(again, ORIGIN)] == [
        it.images for it in build_samples(two_turns(), ORIGIN)
    ]


def test_an_address_stays_as_it_is_and_its_episode_cannot_train(tmp_path: Path) -> None:
    record = two_turns("http://example.org/a.png", url_of(b"blue")).model_dump(mode="python")
    keep_images(record, ImageStore(tmp_path))
    failure = find_failure(WireEpisode.model_validate(record))
    assert failure is not None
    assert (failure.kind, failure.message) == (
        "invalid_images",
        "message 0 has an image that is not stored",
    )


def test_more_patches_than_a_micro_batch_holds_cost_their_own_episode() -> None:
    """Red has 2 placeholders, blue 1, and red again 3: what the processor makes of it is alike."""
    assert find_failure(two_turns(), max_image_tokens=4) is None
    failure = find_failure(two_turns(), max_image_tokens=3)
    assert failure is not None
    assert failure.kind == "too_many_patches"
    assert "its 3 images stand for 4 tokens, the largest for 3" in failure.message
    assert "raise it, or show smaller images" in failure.message


def test_images_that_do_not_fit_their_placeholders_fail_their_episode_by_message() -> None:
    assert find_failure(two_turns()) is None
    episode = two_turns()
    episode.traces[0].nodes[2] = shown(1, [START, PAD, END, 6], name_of(RED), name_of(BLUE))
    failure = find_failure(episode)
    assert failure is not None
    assert failure.message == (
        "message 2 of the trace shows 2 images, and its tokens have 1 runs of placeholders"
    )
