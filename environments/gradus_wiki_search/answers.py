"""An answer between tags at the end of a conversation with tools, and what it is worth."""

from __future__ import annotations

import re
import string
import unicodedata
from typing import Any

import verifiers.v1 as vf

_ANSWER = re.compile(r"<answer>([^<>]{0,500})</answer>")
_ARTICLES = {"a", "an", "the"}


class TaggedAnswer:
    """The reward and the metrics of a task whose data has an `answer`."""

    data: Any

    @vf.reward
    async def correct(self, trace: vf.Trace) -> float:
        """1 for the right answer between tags, but for case, marks and articles."""
        said = read_answer(trace.last_reply)
        return float(said is not None and same_answer(said, self.data.answer))

    @vf.metric
    async def tool_calls(self, trace: vf.Trace) -> float:
        """Answers of tools in the conversation."""
        return float(len(trace.tool_messages))

    @vf.metric
    async def unreadable(self, trace: vf.Trace) -> float:
        """1 for a last reply without an answer, or with several."""
        return float(read_answer(trace.last_reply) is None)


def read_answer(reply: str) -> str | None:
    """The answer between tags; None for a reply that has none, or several."""
    found = _ANSWER.findall(reply)
    return found[0].strip() if len(found) == 1 else None


def same_answer(said: str, right: str) -> bool:
    """Whether two answers are the same but for case, marks, and articles.

    >>> same_answer("The 1,250.", "1250")
    True
    """
    return bool(_plain(right)) and _plain(said) == _plain(right)


def _plain(text: str) -> str:
    text = unicodedata.normalize("NFKC", text).lower()
    words = text.translate(str.maketrans("", "", string.punctuation)).split()
    return " ".join(word for word in words if word not in _ARTICLES)
