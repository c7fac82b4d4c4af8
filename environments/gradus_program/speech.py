"""Reads a program's call in its dialect as one chat completion, and writes the answer back.

Each dialect becomes the same chat messages and tools, so that the same conversation has the same
tokens in all of them. A subclass reads its dialect and writes its answers, whole or as events;
the one here is chat completions itself.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from verifiers.v1.dialects import ChatDialect

from gradus.environments.policy.live import ReplyStart

MAX_MESSAGES = 4096
"""Of one request, with the parts and the tool calls in them."""
MAX_TOOLS = 512
MAX_TURNS = 256
"""Replies that a later request may continue by their id; the oldest is forgotten first."""
_ROLES = {"system", "developer", "user", "assistant", "tool"}

CHAT = ChatDialect()


class Refused(Exception):
    """A request that cannot be played; its text is the answer."""


@dataclass(frozen=True)
class Conversation:
    """The conversation up to a reply, with its tools."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]


@dataclass
class Memory:
    """Remembers what the programs of one episode were told, to know it again."""

    arguments: dict[str, str] = field(default_factory=dict)
    """Id of a tool call → its arguments as they were sampled."""
    thoughts: dict[str, str] = field(default_factory=dict)
    """Signature of a reasoning → its text."""
    items: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Id of an item of a reply → the item."""
    turns: dict[str, Conversation] = field(default_factory=dict)
    """Id of a reply → the conversation up to it."""
    lost: set[bytes] = field(default_factory=set)
    """Replies that came back without the reasoning that was sampled with them, or with another."""
    _reasoning: dict[bytes, set[str]] = field(default_factory=dict)
    """What a reply says → the reasoning before it, of each time that it was said."""

    def keep(self, message: Mapping[str, Any]) -> None:
        """Note a reply of the model."""
        for call in message.get("tool_calls") or []:
            self.arguments[call["id"]] = call["function"]["arguments"]
        if reasoning := message.get("reasoning_content"):
            self._reasoning.setdefault(_said(message), set()).add(reasoning)

    def keep_turn(self, name: str, conversation: Conversation) -> None:
        """Let a later request continue this conversation by its name."""
        self.turns[name] = conversation
        if len(self.turns) > MAX_TURNS:
            del self.turns[next(iter(self.turns))]

    def turn(self, name: object) -> Conversation:
        """The conversation up to a reply; Refused for one that is not known."""
        if not isinstance(name, str) or name not in self.turns:
            raise Refused(
                f"There is no reply {str(name)[:60]!r} to continue: it was not to be kept, is of "
                "another episode, or of long ago. Send the whole conversation."
            )
        return self.turns[name]

    def sign(self, reasoning: str) -> str:
        """Return what stands for a reasoning where the dialect hides it."""
        signature = f"gradus-{secrets.token_hex(12)}"
        self.thoughts[signature] = reasoning
        return signature

    def sampled_arguments(self, call_id: object, value: object) -> str:
        """The text of a call's arguments: as sampled, where the program sends the same ones."""
        text = self.arguments.get(call_id) if isinstance(call_id, str) else None
        return text if text is not None and as_object(text) == value else json.dumps(value)

    def compare(self, messages: list[dict[str, Any]]) -> None:
        """Count the replies among these messages whose reasoning was dropped or changed."""
        for message in messages:
            if message.get("role") != "assistant":
                continue
            said = _said(message)
            given = message.get("reasoning_content") or message.get("reasoning")
            if said in self._reasoning and given not in self._reasoning[said]:
                self.lost.add(said)


def _said(message: Mapping[str, Any]) -> bytes:
    """Key a reply by the ids of its calls, beside which some agents drop its text."""
    calls = [call.get("id") for call in message.get("tool_calls") or []]
    content = json.dumps(calls if any(calls) else text_of(message.get("content"))).encode()
    return hashlib.blake2b(content, digest_size=16).digest()


def text_of(content: object) -> str:
    """The text of a message, whole or in parts."""
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


def as_object(arguments: str) -> dict[str, Any]:
    """The arguments of a call as an object; what the model wrote otherwise, under one key."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        value = arguments
    return value if isinstance(value, dict) else {"arguments": value}


class ProgramCall:
    """One request of a program: what is asked of the model, and how its answer reads."""

    name: ClassVar[str] = "chat completions"
    wants_count: ClassVar[bool] = False
    """True if only the number of tokens is asked for."""

    def __init__(self, body: dict[str, Any], memory: Memory) -> None:
        self.memory = memory
        self.is_streamed = bool(body.get("stream"))
        self.beside: dict[str, Any] = {}
        """Wishes that chat completions have no name for."""
        self.chat = self.read(body)
        """The body of the chat completion."""
        self.headers: dict[str, str] = {}
        """What the interception server is told besides."""
        self.said = ReplyStart()
        """What was told of the reply while it grew."""
        self._name = f"chatcmpl-{secrets.token_hex(12)}"

    @classmethod
    def read_safely(cls, body: object, memory: Memory) -> Self:
        """The call of any body that is JSON; Refused for one that cannot be read."""
        if not isinstance(body, dict):
            raise Refused("The body must be a JSON object.")
        try:
            return cls(body, memory)
        except Refused:
            raise
        except Exception as error:  # whatever a hostile body makes a reader stumble over
            raise unreadable(error) from error

    def read(self, body: dict[str, Any]) -> dict[str, Any]:
        """The chat completion that the body asks for; Refused where there is none."""
        return {key: value for key, value in body.items() if key not in _OF_STREAMS}

    @property
    def conversation(self) -> bytes:
        """Digest of messages and tools; the same for each try."""
        asked = json.dumps([self.chat["messages"], self.chat.get("tools")]).encode()
        return hashlib.blake2b(asked, digest_size=16).digest()

    def answer(self, completion: dict[str, Any]) -> dict[str, Any]:
        """The body of the answer."""
        return completion

    def counted(self, num_tokens: int) -> dict[str, Any]:
        """The answer to a question for the number of tokens."""
        return {"input_tokens": num_tokens}

    def opening(self) -> bytes:
        """Events that can be sent before the reply is known."""
        return self.pulse()

    def pulse(self) -> bytes:
        """An event that says that the reply is on its way."""
        return b": keepalive\n"

    def tell(self, said: ReplyStart) -> bytes:
        """Events for what is new of a reply that grows."""
        before, self.said = self.said, said
        added = {
            "reasoning_content": said.reasoning[len(before.reasoning) :],
            "content": said.content[len(before.content) :],
        }
        delta = {"role": "assistant", **{key: text for key, text in added.items() if text}}
        choice = {"index": 0, "delta": delta, "finish_reason": None}
        chunk = {"id": self._name, "object": "chat.completion.chunk", "created": 0}
        chunk |= {"model": str(self.chat.get("model") or ""), "choices": [choice]}
        return b"data: " + json.dumps(chunk).encode() + b"\n\n"

    def events(self, answer: dict[str, Any]) -> bytes:
        """The answer as events, after those that were sent."""
        if self.said != ReplyStart():
            choice = answer["choices"][0]
            message = dict(choice["message"])
            message["content"] = rest_of(message.get("content"), self.said.content)
            if self.said.reasoning:
                reasoning = message["reasoning_content"]
                message["reasoning_content"] = rest_of(reasoning, self.said.reasoning)
            answer = {**answer, "id": self._name, "choices": [{**choice, "message": message}]}
        return b"".join(CHAT.stream_events(answer))

    def failure(self, error: dict[str, Any]) -> bytes:
        """An error after the opening events."""
        return b"data: " + json.dumps(error).encode() + b"\n\n"

    def check(self, *, text_only: bool) -> None:
        """Refused for a chat completion that cannot be played."""
        _check(self.chat, text_only=text_only)


class PartsCall(ProgramCall):
    """One request in a dialect whose replies are a row of parts: thoughts, a text, calls."""

    def __init__(self, body: dict[str, Any], memory: Memory) -> None:
        super().__init__(body, memory)
        self._num_ended = 0
        self._sent: list[str] = []
        self._signature = ""

    def sign(self, reasoning: str) -> str:
        """What stands for the reasoning of this reply."""
        self._signature = self._signature or self.memory.sign(reasoning)
        return self._signature

    def tell(self, said: ReplyStart) -> bytes:
        self.said = said
        return b"".join(self.progress(list(self.parts_of(said)), is_over=False))

    def progress(self, parts: list[dict[str, Any]], *, is_over: bool) -> Iterator[bytes]:
        """Events of a reply of these parts, but for those that were sent."""
        for index, part in list(enumerate(parts))[self._num_ended :]:
            text = self.text_of(part)
            if index == len(self._sent):
                self._sent.append("")
                yield self.begin(index, part)
            sent = self._sent[index]
            if (added := rest_of(text, sent)) or not sent:
                yield self.add(index, part, added or "")
            self._sent[index] = text
            if is_over or index < len(parts) - 1:
                self._num_ended += 1
                yield self.end(index, part)

    def parts_of(self, said: ReplyStart) -> Iterator[dict[str, Any]]:
        """The parts of a reply that grows."""
        raise NotImplementedError

    def text_of(self, part: dict[str, Any]) -> str:
        """What grows of a part."""
        raise NotImplementedError

    def begin(self, index: int, part: dict[str, Any]) -> bytes:
        """The part without its text."""
        raise NotImplementedError

    def add(self, index: int, part: dict[str, Any], text: str) -> bytes:
        """More of the text."""
        raise NotImplementedError

    def end(self, index: int, part: dict[str, Any]) -> bytes:
        """The whole part."""
        raise NotImplementedError


_OF_STREAMS = ("stream", "stream_options")


def reply_of(completion: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """The message of a completion, and why it ended."""
    choice = completion["choices"][0]
    return choice["message"], choice.get("finish_reason") or "stop"


def said_in(message: Mapping[str, Any]) -> ReplyStart:
    """The text of a reply."""
    return ReplyStart(message.get("reasoning_content") or "", message.get("content") or "")


def rest_of(text: str | None, told: str) -> str | None:
    """Cut off the beginning of a text, which may lack the spaces before it."""
    if not told or text is None:
        return text
    return text.removeprefix(told) if text.startswith(told) else text.lstrip()[len(told) :]


def text_parts(content: object, kinds: tuple[str, ...], where: str) -> str | list[dict[str, str]]:
    """Content as chat has it: one text, or several in parts; Refused for what is not text."""
    if isinstance(content, str) or content is None:
        return content or ""
    parts = [
        {"type": "text", "text": str(part.get("refusal", part.get("text", "")))}
        for part in objects(content, where)
        if is_kind(part, kinds, where)
    ]
    return parts[0]["text"] if len(parts) == 1 else parts


def is_kind(part: Mapping[str, Any], kinds: tuple[str, ...], where: str) -> bool:
    """True; Refused for another type than these."""
    if part.get("type") not in kinds:
        raise Refused(
            f"The model that trains reads text; {where} holds {str(part.get('type'))[:40]!r}."
        )
    return True


def objects(values: object, where: str) -> list[dict[str, Any]]:
    """A list of JSON objects; Refused for anything else."""
    if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
        raise Refused(f"{where} must be a list of objects.")
    return values


def function_tool(tool: Mapping[str, Any], parameters: object) -> dict[str, Any]:
    """A tool of any dialect as a function of chat completions."""
    function = {
        "name": tool.get("name"),
        "description": tool.get("description") or "",
        "parameters": parameters or {},
    }
    if tool.get("strict") is not None:
        function["strict"] = tool["strict"]
    return {"type": "function", "function": function}


def refuse_keys(body: Mapping[str, Any], reasons: Mapping[str, str], known: frozenset[str]) -> None:
    """Refused for the first of these keys that is set, or one that nobody here knows.

    A key that is ignored may be the one that holds the conversation.
    """
    for key, value in body.items():
        if value and key in reasons:
            raise Refused(f"`{key}` is not supported: {reasons[key]}.")
        if value and key not in known | reasons.keys():
            raise Refused(f"`{key[:60]}` is not known here, and may change what is asked.")


def renamed(
    body: Mapping[str, Any], names: Mapping[str, str], change: Callable[[Any], Any] = lambda it: it
) -> dict[str, Any]:
    """The values that are set, under their names in chat completions."""
    return {to: change(body[key]) for key, to in names.items() if body.get(key) is not None}


def _check(body: dict[str, Any], *, text_only: bool) -> None:
    """Refused for a body that cannot be played; small things are mended in it."""
    if (number := body.pop("n", None)) not in (None, 1):
        raise Refused(
            f"n = {str(number)[:20]} is not supported: each call is one reply, because each "
            "reply trains as a separate turn. Make several calls instead."
        )
    if body.get("functions") or body.get("function_call"):
        raise Refused("`functions` is not supported; use `tools`.")
    _check_messages(body.get("messages"), text_only=text_only)
    _check_tools(body.get("tools") or [])
    if body.get("tool_choice") == "none":
        # The model is not told of tools that it may not call.
        body.pop("tools", None)
        del body["tool_choice"]
    try:
        # Half a surrogate pair is JSON, and no tokenizer takes it.
        json.dumps(body, ensure_ascii=False).encode()
        CHAT.parse_request(body)
    except Exception as error:  # whatever a hostile body makes the library stumble over
        raise unreadable(error) from error


def unreadable(error: Exception) -> Refused:
    """The refusal of a body that made a library stumble."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return Refused(f"The request cannot be read ({text[:300]}).")


def _check_messages(messages: object, *, text_only: bool) -> None:
    if not isinstance(messages, list) or not messages:
        raise Refused("`messages` must be a list with at least one message.")
    num_parts = 0
    for message in messages:
        role = message.get("role") if isinstance(message, dict) else None
        if not isinstance(role, str) or role not in _ROLES:
            known = ", ".join(sorted(_ROLES))
            raise Refused(f"A message has the role {str(role)[:40]!r}; known are: {known}.")
        if role == "developer":
            message["role"] = "system"
        inner = [message.get(key) for key in ("content", "tool_calls", "reasoning_details")]
        parts = [part for listed in inner if isinstance(listed, list) for part in listed]
        num_parts += 1 + len(parts)
        if num_parts > MAX_MESSAGES:
            raise Refused(f"More than {MAX_MESSAGES} messages, parts and tool calls at once.")
        kinds = [part.get("type") for part in parts if isinstance(part, dict)]
        if text_only and "image_url" in kinds:
            raise Refused("The model that trains reads text; a message holds an image.")


def _check_tools(tools: object) -> None:
    listed = tools if isinstance(tools, list) else [tools]
    if len(listed) > MAX_TOOLS:
        raise Refused(f"{len(listed)} tools at once; at most {MAX_TOOLS} are supported.")
    for tool in listed:
        if not isinstance(tool, dict) or tool.get("type", "function") != "function":
            raise Refused("Only tools of type `function` are supported.")
