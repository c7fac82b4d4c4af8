"""Turns without tokens, in the tokens of real tokenizers and templates of several families."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer
from verifiers.v1.trace import ModelCall
from verifiers.v1.types import AssistantMessage, UserMessage

from gradus.config import algorithms
from gradus.orchestrator.algorithms.base import CreditContext
from gradus.orchestrator.algorithms.distill import FrozenSampler
from gradus.orchestrator.algorithms.retokenize import tokenize_trace
from gradus.orchestrator.groups.samples import SampleOrigin, build_samples
from gradus.orchestrator.play.episode_check import find_failure
from gradus.testing.episodes import build_episode, build_message, build_trace
from gradus.testing.tiny_model import build_tiny_model
from gradus.wire.control_tokens import read_stop_token_ids
from gradus.wire.sample import Sample
from gradus.wire.versions import VersionSpan

pytestmark = pytest.mark.torch

ORIGIN = SampleOrigin("words", "g0", "g0.0", VersionSpan(0, 0), 1.0, 1000)
CONTEXT = CreditContext("words", task_key="key-0")
ASKS = "{% if add_generation_prompt %}<assistant>{% endif %}"


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory with a real tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    return build_tiny_model(folder, hidden_size=32, num_layers=1)


class Student:
    """The policy's tokenizer, and the tokens at which the policy stops."""

    def __init__(self, folder: Path, *, template: str | None = None) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        if template is not None:
            self.tokenizer.chat_template = template
        self.stop_token_ids = read_stop_token_ids(str(folder))

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Never asked."""
        raise AssertionError

    async def tokenize(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool,
    ) -> list[int]:
        """As vLLM's /tokenize."""
        text = self.tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=add_generation_prompt
        )
        token_ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return token_ids


def trace_of(*texts: str, replies: Sequence[int] = (1, 3), cut_off: int | None = None) -> Any:
    """Messages without tokens; those at `replies` are the frozen model's, one was too long."""
    nodes = []
    for number, text in enumerate(texts):
        node = build_message(number - 1 if number else None, [])
        is_reply = number in replies
        node.message = AssistantMessage(content=text) if is_reply else UserMessage(content=text)
        node.sampled = is_reply
        nodes.append(node)
    trace = build_trace(nodes)
    trace.calls = [
        ModelCall(node=number, finish_reason="length" if number == cut_off else "stop")
        for number in replies
    ]
    return trace


async def sample_of(student: Student, *texts: str, **settings: Any) -> Sample:
    algorithm = FrozenSampler(algorithms.SftAlgorithmConfig(), reference=student)
    episode = build_episode([trace_of(*texts, **settings)])
    await algorithm.tokenize_external(episode)
    assert find_failure(episode) is None
    await algorithm.score_episode(episode, CONTEXT)
    (sample,) = build_samples(episode, ORIGIN)
    return sample


def trained_text(student: Student, sample: Sample) -> str:
    text: str = student.tokenizer.decode(
        sample.arrays.token_ids[sample.arrays.loss_weights["ce"] != 0]
    )
    return text


async def test_training_stops_where_the_student_would(tiny_model: Path) -> None:
    student = Student(tiny_model)
    sample = await sample_of(student, "say hi", "hi", "and bye", "bye")
    assert trained_text(student, sample) == "hi<|im_end|>bye<|im_end|>"
    whole = student.tokenizer.decode(sample.arrays.token_ids)
    assert "hi<|im_end|>\n<|im_start|>user\nand bye<|im_end|>\n" in whole
    assert whole.endswith("bye<|im_end|>")


@pytest.mark.parametrize(
    ("template", "trained"),
    [
        # The end stands right behind the reply, and nothing follows it (llama).
        (
            "{% for m in messages %}<{{ m.role }}>{{ m.content }}<|im_end|>{% endfor %}" + ASKS,
            "hi<|im_end|>bye<|im_end|>",
        ),
        # Another token than the tokenizer's end closes a turn, then a newline (gemma).
        (
            "{% for m in messages %}<{{ m.role }}>{{ m.content }}<|endoftext|>\n{% endfor %}"
            + ASKS,
            "hi<|endoftext|>bye<|endoftext|>",
        ),
        # Only replies are closed (mistral).
        (
            "{% for m in messages %}{% if m.role == 'user' %}[Q] {{ m.content }} [/Q]"
            "{% else %}{{ m.content }}<|im_end|> {% endif %}{% endfor %}",
            "hi<|im_end|>bye<|im_end|>",
        ),
        # Two ends; the model stops at the first.
        (
            "{% for m in messages %}<{{ m.role }}>{{ m.content }}<|im_end|><|endoftext|>\n"
            "{% endfor %}" + ASKS,
            "hi<|im_end|>bye<|im_end|>",
        ),
        # No end at all: everything that belongs to the turn trains.
        (
            "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}" + ASKS,
            "hi\nbye\n",
        ),
    ],
    ids=["llama", "gemma", "mistral", "two-ends", "no-end"],
)
async def test_templates_close_a_turn_in_different_ways(
    tiny_model: Path, template: str, trained: str
) -> None:
    student = Student(tiny_model, template=template)
    texts = ("say hi", "hi", "and bye", "bye")
    sample = await sample_of(student, *texts)
    assert trained_text(student, sample) == trained
    messages = [
        {"role": "assistant" if number % 2 else "user", "content": text}
        for number, text in enumerate(texts)
    ]
    rendered = await student.tokenize(messages, add_generation_prompt=False)
    assert sample.arrays.token_ids.tolist() == rendered[: len(sample)]


@pytest.mark.parametrize(
    ("cut_off", "trained"), [(1, "hibye<|im_end|>"), (3, "hi<|im_end|>bye")], ids=["first", "last"]
)
async def test_a_reply_that_was_cut_off_does_not_train_an_end(
    tiny_model: Path, cut_off: int, trained: str
) -> None:
    student = Student(tiny_model)
    sample = await sample_of(student, "say hi", "hi", "and bye", "bye", cut_off=cut_off)
    assert trained_text(student, sample) == trained
    whole = student.tokenizer.decode(sample.arrays.token_ids)
    assert "hi<|im_end|>\n<|im_start|>user\nand bye<|im_end|>\n" in whole


async def test_a_cut_off_reply_keeps_its_words_where_a_template_has_no_end(
    tiny_model: Path,
) -> None:
    student = Student(tiny_model, template="{% for m in messages %}{{ m.content }}{% endfor %}")
    sample = await sample_of(student, "say hi", "hi", replies=[1], cut_off=1)
    assert trained_text(student, sample) == "hi"


async def test_a_reply_that_quotes_the_end_is_trained_whole(tiny_model: Path) -> None:
    student = Student(tiny_model)
    sample = await sample_of(student, "how?", "write <|im_end|> there", replies=[1])
    assert trained_text(student, sample) == "write <|im_end|> there<|im_end|>"


async def test_a_turn_right_behind_another_keeps_its_header_as_context(tiny_model: Path) -> None:
    student = Student(tiny_model)
    sample = await sample_of(student, "say hi", "hi", "again", replies=[1, 2])
    assert trained_text(student, sample) == "hi<|im_end|>again<|im_end|>"
    whole = student.tokenizer.decode(sample.arrays.token_ids)
    assert whole.endswith("hi<|im_end|>\n<|im_start|>assistant\nagain<|im_end|>")


async def test_branches_that_share_a_turn_each_get_what_stands_behind_it(tiny_model: Path) -> None:
    student = Student(tiny_model)
    trace = trace_of("say hi", "hi", "and bye", "bye")
    for parent, text, is_reply in ((1, "and yes", False), (4, "yes", True)):
        node = build_message(parent, [])
        node.message = AssistantMessage(content=text) if is_reply else UserMessage(content=text)
        node.sampled = is_reply
        trace.nodes.append(node)
    await tokenize_trace(trace, student)
    for branch, text in zip(trace.branches, ("bye", "yes"), strict=True):
        assert student.tokenizer.decode(branch.token_ids).endswith(
            f"hi<|im_end|>\n<|im_start|>user\nand {text}<|im_end|>\n"
            f"<|im_start|>assistant\n{text}<|im_end|>"
        )
