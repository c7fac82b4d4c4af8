"""What of a reply is public, and what cannot be read."""

from __future__ import annotations

import time

import pytest
from dialogue_games import CONTENTS, SAID
from hypothesis import given
from hypothesis import strategies as st

from gradus_kit.multiagent.channels import EMPTY_PUBLIC, VISIBILITIES, Channel, Said


def split(content: str, tag: str = "thinking", reasoning: str | None = None) -> tuple[str, object]:
    found = Channel(tag).split(Said(content, reasoning))
    return found.public, found.private


@pytest.mark.parametrize(
    ("content", "tag", "public", "private"),
    [
        ("a", "thinking", "a", None),
        ("<thinking>p</thinking> x", "thinking", "x", "p"),
        ("<Thinking lang='en'>p</THINKING> x", "thinking", "x", "p"),
        ("x<think>s</think>y", "reason", "xy", None),
        ("<reason>p</reason><think>s</think>y", "reason", "y", "p"),
        ("x<thinker>y</thinker>", "thinking", "x<thinker>y</thinker>", None),
        ("x<secret>y</secret>", "thinking", "x<secret>y</secret>", None),
    ],
)
def test_one_block_is_private_and_native_thinking_never_public(
    content: str, tag: str, public: str, private: str | None
) -> None:
    assert split(content, tag) == (public, private)
    assert Channel(tag).split(Said(content)).parse_error is None


@pytest.mark.parametrize(
    "content",
    [
        "<think>",
        "</thinking> x",
        "<thinking>a</thinking><thinking>b</thinking> x",
        "<thinking>a<thinking>b</thinking></thinking> x",
        "<thinking>a</think> x",
        "<reason>a<think>b</think></reason> x",
        "x <thinking>",
    ],
)
def test_what_cannot_be_told_apart_is_quarantined(content: str) -> None:
    found = Channel("reason" if "reason" in content else "thinking").split(Said(content))
    assert (found.public, found.private, found.is_quarantined) == ("", None, True)
    assert found.parse_error


def test_only_private_text_is_an_error_that_keeps_it() -> None:
    found = Channel().split(Said("<thinking>p</thinking>"))
    assert (found.public, found.private, found.parse_error) == ("", "p", EMPTY_PUBLIC)
    assert not found.is_quarantined


def test_separate_reasoning_is_the_private_channel() -> None:
    assert split(" x ", reasoning=" r ") == ("x", "r")
    found = Channel().split(Said("<thinking>p</thinking> x", "r"))
    assert found.is_quarantined
    unclosed = Channel().split(Said("", "never closed"))
    assert (unclosed.public, unclosed.private, unclosed.is_quarantined) == (
        "",
        "never closed",
        False,
    )


def test_a_disabled_channel_keeps_nothing_private_and_reads_no_tag_of_its_own() -> None:
    channel = Channel("reason", "disabled")
    found = channel.split(Said("<reason>p</reason><think>s</think>x", None))
    assert (found.public, found.private) == ("<reason>p</reason>x", None)
    assert channel.split(Said("x", "r")).private is None


@pytest.mark.parametrize(
    ("visibility", "to_judge", "to_others"),
    [
        ("disabled", False, False),
        ("private", False, False),
        ("visible_to_judge", True, False),
        ("open", True, True),
    ],
)
def test_who_sees_private_text(visibility: str, to_judge: bool, to_others: bool) -> None:
    channel = Channel(visibility=visibility)  # type: ignore[arg-type]
    assert (channel.shows(is_judge=True), channel.shows(is_judge=False)) == (to_judge, to_others)


@given(said=SAID, tag=st.sampled_from(["thinking", "reason"]), who=st.sampled_from(VISIBILITIES))
def test_any_reply_has_public_text_or_a_reason_why_not(said: Said, tag: str, who: str) -> None:
    found = Channel(tag, who).split(said)  # type: ignore[arg-type]
    assert bool(found.public) == (found.parse_error is None)
    assert "<think" not in found.public.lower()


@given(content=CONTENTS)
def test_native_thinking_inside_never_reaches_the_public_text(content: str) -> None:
    marked = f"{content}<think>SECRET</think>"
    assert "SECRET" not in Channel("reason").split(Said(marked)).public


@pytest.mark.parametrize(
    "piece",
    [
        *("<thinking ", "<thinking>", "</thinking>", "<", "a<think x='"),
        "<|channel|>" + "a" * 300_000,
    ],
    ids=lambda piece: piece[:26],
)
def test_a_huge_hostile_reply_is_read_in_bounded_time(piece: str) -> None:
    started = time.process_time()
    Channel().split(Said(piece * max(1, 100_000 // len(piece))))
    assert time.process_time() - started < 1.0


@pytest.mark.parametrize(
    "content",
    [
        "[THINK]they lie[/THINK]\n\nyes",
        "<seed:think>they lie</seed:think>yes",
        "<reasoning>they lie</reasoning>\nyes",
        "<Thought>they lie</Thought>yes",
        "\u25c1think\u25b7they lie\u25c1/think\u25b7yes",
        "<|START_THINKING|>they lie<|END_THINKING|>yes",
        "<|channel>thought\nthey lie<channel|>yes",
        "<|channel|>analysis<|message|>they lie<|end|>"
        "<|start|>assistant<|channel|>final<|message|>yes",
        "<|channel|>analysis<|message|>they lie<|end|><|start|>assistant<|channel|>commentary"
        " to=functions.f <|constrain|>json<|message|>they lie<|call|><|start|>assistant"
        "<|channel|>final<|message|>yes<|return|>",
        "analysisThey: they lie.assistantfinalyes",
    ],
)
def test_thoughts_in_the_notations_of_other_families_are_private(content: str) -> None:
    for tag in ("thinking", "reason"):
        split = Channel(tag).split(Said(content))
        assert (split.public, split.parse_error) == ("yes", None)


@pytest.mark.parametrize(
    "content",
    [
        "[THINK]they lie",
        "<seed:think>they lie",
        "they lie[/THINK]yes",
        "<|channel|>analysis<|message|>they lie",
        "<|START_THINKING|>they lie",
    ],
)
def test_thoughts_that_are_cut_off_are_not_said(content: str) -> None:
    assert Channel().split(Said(content)).public == ""
    assert Channel().split(Said(content)).parse_error is not None


def test_a_text_that_begins_with_the_word_analysis_is_said() -> None:
    text = "analysis shows that the assistantfinal word is A"
    assert Channel().split(Said("analysis shows that A holds")).public
    assert Channel().split(Said(f"My {text}")).public == f"My {text}"
