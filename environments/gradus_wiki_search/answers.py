"""An answer between tags at the end of a conversation with tools, and what it is worth."""

from __future__ import annotations

from typing import Any

import verifiers.v1 as vf

from gradus_kit.tasksets.marked import only_tagged
from gradus_kit.tasksets.same import same_answer

_MAX_CHARACTERS = 500


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
    found = only_tagged(reply, "answer", _MAX_CHARACTERS)
    return None if found is None else found.strip()
