"""The harness `compact`: a chat that asks the model for notes when the conversation gets long.

It continues from the system prompt and the notes, which is a new branch of the trace. The request
for notes extends the conversation that the model has seen, so the notes are sampled at the end of
that branch and train there; in the next branch they are a prompt.
"""

from __future__ import annotations

from typing import Any

import verifiers.v1 as vf
from pydantic import Field, model_validator

from gradus.wire.episode import CONTEXT_FULL
from gradus_chat.chat import (
    ChatHarness,
    ChatHarnessConfig,
    ChatSession,
    ContextFullError,
)

ASK_FOR_NOTES = (
    "The conversation is about to be cleared. Write notes from which you can go on without it: "
    "the task and its rules, what you did and found so far with the exact values that matter, and "
    "what is left to do. Only the notes are kept. Reply with the notes alone and call no tool."
)
GO_ON = "These are your notes of the conversation so far. Go on from them.\n\n{notes}"
LOST = "\n\n(The messages after these notes were too long and are lost.)"
NOTES_METRIC = "notes"
MISSING_METRIC = "notes_missing"


class CompactHarnessConfig(ChatHarnessConfig):
    """Settings of the compact harness, beside those of `chat`."""

    id: str = "gradus-compact"
    """Id under which verifiers imports it."""
    every_turns: int | None = Field(None, ge=1)
    """Ask for notes after so many of the model's turns since the last. None: not by turns."""
    at_tokens: int | None = Field(None, ge=1)
    """Ask for notes once prompt and reply of a turn have so many tokens. Below the context of the
    engine, this loses nothing; an overflow loses the messages that did not fit."""
    max_notes: int = Field(8, ge=1)
    """Requests for notes in one episode; then it continues as `chat` does, up to the end of the
    context."""
    keep_prompt: bool = False
    """Repeat the task's own prompt before the notes."""
    ask_for_notes: str = Field(ASK_FOR_NOTES, min_length=1)
    """What the model is asked for."""
    go_on: str = GO_ON
    """What the next branch begins with; `{notes}` is replaced by the notes."""

    @model_validator(mode="after")
    def _has_a_place_for_the_notes(self) -> CompactHarnessConfig:
        if "{notes}" not in self.go_on:
            raise ValueError("go_on must hold {notes}, where the notes are put")
        return self


class CompactHarness(ChatHarness, vf.Harness[CompactHarnessConfig]):
    """Plays a seat as a chat of any length."""

    @property
    def session_type(self) -> type[ChatSession]:
        return CompactSession


class CompactSession(ChatSession):
    """A conversation that is replaced by notes of itself.

    >>> session = await harness.session(ctx, trace, runtime, endpoint, secret, urls, data)
    >>> await session.turn()  # as many model calls, tool calls and notes as the task needs
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._kept: int | None = None
        """Messages at the beginning that every branch repeats."""
        self._fitting: list[int] = []
        """Lengths of this branch's prompts that the engine took."""
        self._num_notes = 0
        self._num_missing = 0
        """Requests that the model answered with something else, such as a tool call."""

    async def _next(self) -> dict[str, Any] | None:
        """The model's next message, in this branch or in the next one."""
        config = self.harness.config
        if self._kept is None:
            is_kept = [config.keep_prompt or m["role"] == "system" for m in self._conversation]
            self._kept = [*is_kept, False].index(False)
        if self._is_due(config) and not await self._take_notes():
            return None
        while True:
            try:
                message = await self._ask(self._conversation)
            except ContextFullError:
                if await self._take_notes(is_full=True):
                    continue
                return None
            self._fitting.append(len(self._conversation))
            return message

    def _is_due(self, config: CompactHarnessConfig) -> bool:
        if not self._fitting or self._is_last(config):
            return False
        is_long = config.at_tokens is not None and self._used_tokens >= config.at_tokens
        every = config.every_turns
        return is_long or (every is not None and len(self._fitting) % every == 0)

    def _is_last(self, config: CompactHarnessConfig) -> bool:
        return self._num_notes + self._num_missing >= config.max_notes

    async def _take_notes(self, *, is_full: bool = False) -> bool:
        """Replace the conversation; False when the rollout ended instead.

        Where the whole does not fit, the notes are of the longest prompt that did and leaves room.
        What a user said last needs no notes: it follows them. A model that writes none keeps
        the conversation as long as it fits; without notes it would not know its task any more.
        """
        config = self.harness.config
        asked = len(self._conversation)
        while asked and self._conversation[asked - 1]["role"] == "user":
            asked -= 1
        pending = self._conversation[asked:] if self._fitting else []
        lengths = [*([] if is_full and not pending else [asked]), *reversed(self._fitting)]
        if self._is_last(config):
            lengths = []
        for length in lengths:
            request = {"role": "user", "content": config.ask_for_notes}
            try:
                reply = await self._ask([*self._conversation[:length], request])
            except ContextFullError:
                continue
            if reply is None:
                return False
            notes = reply.get("content")
            if isinstance(notes, str) and notes.strip():
                self._go_on(notes, pending, is_lost=length < asked)
                return True
            self._num_missing += 1
            self.trace.record_metric(MISSING_METRIC, self._num_missing)
            if not is_full:
                return True
            break
        self.trace.stop(CONTEXT_FULL)
        return False

    def _go_on(self, notes: str, pending: list[dict[str, Any]], *, is_lost: bool) -> None:
        text = self.harness.config.go_on.replace("{notes}", notes)
        opening = {"role": "user", "content": text + (LOST if is_lost else "")}
        self._conversation = [*self._conversation[: self._kept], opening, *pending]
        self._fitting = []
        self._num_notes += 1
        self.trace.record_metric(NOTES_METRIC, self._num_notes)
