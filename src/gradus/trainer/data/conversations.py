"""One row of data: what was said, and which messages are to be learned."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gradus.errors import ConfigError
from gradus.trainer.data.images import ShownImages

Message = Mapping[str, Any]

_TEXT_TYPES = frozenset({"text", "input_text", "output_text"})
_SWAPPED = ("completion", "prompt")
_ROLE = {"prompt": "user", "completion": "assistant"}


@dataclass(frozen=True)
class Conversation:
    """Messages for the chat template."""

    id: str
    """Where the row stands, for errors."""
    messages: list[Message]
    learned: tuple[int, ...]
    """Indices of the messages whose tokens are learned."""
    tools: list[Any] | None = None
    """Function schemas that the template shows to the model."""


@dataclass(frozen=True)
class PlainText:
    """A prompt and its completion as bare text, without a chat template."""

    id: str
    prompt: str
    completion: str
    """Learned, with the end-of-text token after it."""


def parse_row(
    place: str, row: Any, roles: frozenset[str], images: ShownImages | None = None
) -> Conversation | PlainText:
    """The conversation in one row with `messages`, or with `prompt` and `completion`.

    Both may be text or messages; of a prompt nothing is learned. Images that no message has a place
    for come before the first text of a user. Refuses anything else, and what `images` refuses;
    without it, every image.
    """
    if not isinstance(row, Mapping):
        raise ConfigError(f"{place}: a {type(row).__name__} is not a conversation; use an object")
    found = _parse_row(place, row, roles, images)
    if images is None or not images.num_left:
        return found
    if isinstance(found, Conversation) and not images.shows_any:
        for number, message in enumerate(found.messages):
            if message["role"] == "user" and message["content"] is not None:
                found.messages[number] = _with_images(place, message, images)
                return found
    if isinstance(found, Conversation):
        advice = "write a part of the type 'image' where each is shown, or '<image>' in the text"
    else:
        advice = "write prompt and completion as messages"
    raise ConfigError(
        f"{place}: {images.num_left} images of {images.column!r} are in no message; {advice}, or "
        "take the column out"
    )


def _with_images(place: str, message: Message, images: ShownImages) -> Message:
    """With all that stand beside the messages before its text, where TRL shows them."""
    shown = [images.take(f"{place}: {images.column!r}") for _ in range(images.num_left)]
    content = message["content"]
    parts = [text_part(content)] if isinstance(content, str) else content
    return {**message, "content": [*shown, *parts]}


def _parse_row(
    place: str, row: Mapping[str, Any], roles: frozenset[str], images: ShownImages | None
) -> Conversation | PlainText:
    tools = _tools(place, row.get("tools"))
    if row.get("messages") is not None:
        messages = _messages(place, row["messages"], images)
        return Conversation(place, messages, _learned(place, messages, roles, start=0), tools)
    prompt, completion = row.get("prompt"), row.get("completion")
    if prompt is None or completion is None:
        raise ConfigError(
            f"{place}: has the keys {sorted(map(str, row))}; use 'messages', or 'prompt' and "
            "'completion'"
        )
    if isinstance(prompt, str) and isinstance(completion, str):
        return PlainText(place, prompt, completion)
    if isinstance(prompt, str) or isinstance(completion, str):
        text, other = ("prompt", "completion") if isinstance(prompt, str) else _SWAPPED
        raise ConfigError(
            f"{place}: {text!r} is text and {other!r} is messages; write both as text, or {text!r} "
            f'as [{{"role": "{_ROLE[text]}", "content": "…"}}]'
        )
    context = _messages(place, prompt, images)
    messages = context + _messages(place, completion, images)
    learned = _learned(place, messages, roles, start=len(context))
    return Conversation(place, messages, learned, tools)


def text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _messages(place: str, value: Any, images: ShownImages | None) -> list[Message]:
    """The messages with content as a string or as parts, and calls as objects."""
    value = _parsed(place, "messages", value)
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise ConfigError(f"{place}: messages must be a list with at least one message")
    return [_message(f"{place}: message {number}", one, images) for number, one in enumerate(value)]


def _message(place: str, message: Any, images: ShownImages | None) -> Message:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ConfigError(f"{place} has no 'role'")
    calls = _parsed(place, "tool_calls", message.get("tool_calls")) or None
    if message.get("content") is None and not calls:
        raise ConfigError(f"{place} has neither 'content' nor 'tool_calls'")
    if calls is not None and not _is_list_of_objects(calls):
        raise ConfigError(f"{place}: tool_calls must be a list of objects, or one as JSON text")
    found = {**message, "content": message_content(place, message.get("content"), images)}
    return found | {"tool_calls": calls} if "tool_calls" in message else found


def message_content(
    place: str, content: Any, images: ShownImages | None
) -> str | list[dict[str, str]] | None:
    """Text, or parts of text and images; a template would silently leave anything else out."""
    mark = None if images is None else images.mark
    if content is None or (isinstance(content, str) and (mark is None or mark not in content)):
        return content
    found: list[dict[str, str] | None] = [None]
    if isinstance(content, str | list):
        found = [it for part in _parts(content) for it in _read(place, part, images)]
    if None not in found:
        return [part for part in found if part is not None]
    raise ConfigError(
        f"{place} has content that is neither text nor an image; use a string, or a list of parts "
        "of the types 'text' and 'image_url'"
    )


def _parts(content: str | list[Any]) -> list[Any]:
    return [content] if isinstance(content, str) else content


def _read(place: str, part: Any, images: ShownImages | None) -> Iterator[dict[str, str] | None]:
    """A part as templates read it, of a text those between its images; None for what is neither."""
    text = _text_of_part(part)
    if text is None:
        yield None if images is None else images.part(place, part)
    elif images is None or images.mark is None or images.mark not in text:
        yield text_part(text)
    else:
        first, *others = text.split(images.mark)
        if first:
            yield text_part(first)
        for other in others:
            yield images.take(place)
            if other:
                yield text_part(other)


def _text_of_part(part: Any) -> str | None:
    if isinstance(part, str):
        return part
    is_text = isinstance(part, Mapping) and part.get("type", "text") in _TEXT_TYPES
    text = part.get("text") if is_text else None
    return text if isinstance(text, str) else None


def _tools(place: str, value: Any) -> list[Any] | None:
    """Function schemas, also where a data set keeps them as JSON text."""
    tools = _parsed(place, "tools", value)
    if isinstance(tools, list):
        tools = [_parsed(place, f"tools[{number}]", tool) for number, tool in enumerate(tools)]
    if not tools:
        return None
    if not _is_list_of_objects(tools):
        raise ConfigError(f"{place}: tools must be a list of function schemas, or one as JSON text")
    return list(tools)


def _parsed(place: str, key: str, value: Any) -> Any:
    """The value that JSON text holds; data sets with one type per column keep nested ones so."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else None
    except ValueError as error:
        raise ConfigError(
            f"{place}: {key} is text, but no JSON ({error}); write a list, or one as JSON text"
        ) from error


def _is_list_of_objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(member, Mapping) for member in value)


def _learned(
    place: str, messages: Sequence[Message], roles: frozenset[str], *, start: int
) -> tuple[int, ...]:
    """Indices of the messages of `roles` whose `weight` is not 0."""
    for number, message in enumerate(messages):
        if message.get("weight") not in (None, 0, 1):
            raise ConfigError(
                f"{place}: message {number} has weight {message['weight']!r}; use 0 to leave it "
                "out of the loss, or 1"
            )
    return tuple(
        number
        for number in range(start, len(messages))
        if messages[number]["role"] in roles and messages[number].get("weight") != 0
    )
