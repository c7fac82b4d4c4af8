"""One row of data: what was said, and which messages are to be learned."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gradus.errors import ConfigError
from gradus.trainer.data.images import ShownImages

Message = Mapping[str, Any]

_TEXT_TYPES = frozenset({"text", "input_text", "output_text"})
_ROLES = {"human": "user", "gpt": "assistant"}
"""ShareGPT's names, which no template knows."""
_FLAGS = ("weight", "train", "training", "trainable", "loss", "loss_mask", "step_loss_mask")
"""Keys of a message, and of a row, that say whether it is learned."""
_FLAG_LIKE = re.compile(r"(^|_)(train\w*|loss|mask(ed)?|learn\w*|weight|ignored?|skip)(_|$)")
_TOOLS = ("tools", "tool_defs", "functions")
READ_COLUMNS = frozenset({"messages", "prompt", "completion", "system", "image", "images", *_TOOLS})
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
    num_cut: int = 0
    """Replies of an episode that a limit cut, which are not learned."""


@dataclass(frozen=True)
class PlainText:
    """A prompt and its completion as bare text, without a chat template."""

    id: str
    prompt: str
    completion: str
    """Learned, with the end-of-text token after it."""


def parse_row(
    place: str,
    row: Any,
    roles: frozenset[str],
    images: ShownImages | None = None,
    *,
    is_table: bool = True,
) -> Conversation | PlainText:
    """The conversation in one row with `messages`, or with `prompt` and `completion`.

    Both may be text or messages; of a prompt nothing is learned. Images that no message has a place
    for come before the first text of a user. Refuses anything else, and what `images` refuses;
    without it, every image. In a table (`is_table`) a null field is one that the row does not have.
    """
    if not isinstance(row, Mapping):
        raise ConfigError(f"{place}: a {type(row).__name__} is not a conversation; use an object")
    if is_table:
        row = _without_null(row)
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
    tools = _tools(place, row)
    for key in _FLAGS:
        if isinstance(row.get(key), bool | list) or row.get(key) == 0:
            raise ConfigError(
                f"{place}: the column {key!r} is not read; give each message a 'weight' of 0 or 1"
            )
    if row.get("messages") is not None:
        messages, is_left = _messages(place, row["messages"], images, roles)
        return _conversation(place, row, messages, _learned(messages, is_left, roles), tools)
    prompt, completion = row.get("prompt"), row.get("completion")
    if prompt is None or completion is None:
        raise ConfigError(
            f"{place}: has the keys {sorted(map(str, row))}; use 'messages', or 'prompt' and "
            "'completion'"
        )
    if isinstance(prompt, str) and isinstance(completion, str):
        if tools or row.get("system"):
            raise ConfigError(
                f"{place}: the columns 'system' and {_TOOLS} are for messages, and 'prompt' is "
                "text; write prompt and completion as messages"
            )
        return PlainText(place, prompt, completion)
    if isinstance(prompt, str) or isinstance(completion, str):
        text, other = ("prompt", "completion") if isinstance(prompt, str) else _SWAPPED
        raise ConfigError(
            f"{place}: {text!r} is text and {other!r} is messages; write both as text, or {text!r} "
            f'as [{{"role": "{_ROLE[text]}", "content": "…"}}]'
        )
    context, _ = _messages(place, prompt, images, roles)
    replies, is_left = _messages(place, completion, images, roles)
    learned = tuple(len(context) + number for number in _learned(replies, is_left, roles))
    return _conversation(place, row, context + replies, learned, tools)


def _conversation(
    place: str,
    row: Mapping[str, Any],
    messages: list[Message],
    learned: tuple[int, ...],
    tools: list[Any] | None,
) -> Conversation:
    """With the column `system` as the first message."""
    system = row.get("system")
    if not system or (messages[0]["role"] == "system" and messages[0]["content"] == system):
        return Conversation(place, messages, learned, tools)
    if not isinstance(system, str) or messages[0]["role"] in ("system", "developer"):
        raise ConfigError(
            f"{place}: the column 'system' is no text, or the messages have a system message "
            "already; keep one of the two, as text"
        )
    first = {"role": "system", "content": system}
    return Conversation(place, [first, *messages], tuple(n + 1 for n in learned), tools)


def text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _messages(
    place: str, value: Any, images: ShownImages | None, roles: frozenset[str]
) -> tuple[list[Message], list[bool]]:
    """The messages with content as a string or as parts, and calls as objects; and which of them
    a flag leaves out of the loss."""
    value = _parsed(place, "messages", value)
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise ConfigError(f"{place}: messages must be a list with at least one message")
    places = [f"{place}: message {number}" for number in range(len(value))]
    messages = [_message(at, one, images, roles) for at, one in zip(places, value, strict=True)]
    return messages, [_is_left_out(at, one) for at, one in zip(places, value, strict=True)]


def _message(
    place: str, message: Any, images: ShownImages | None, roles: frozenset[str]
) -> Message:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ConfigError(f"{place} has no 'role'")
    calls = _parsed(place, "tool_calls", message.get("tool_calls")) or None
    if message.get("content") is None and not calls:
        raise ConfigError(f"{place} has neither 'content' nor 'tool_calls'")
    if calls is not None and not _is_list_of_objects(calls):
        raise ConfigError(f"{place}: tool_calls must be a list of objects, or one as JSON text")
    role = message["role"]
    found = {
        key: value
        for key, value in message.items()
        if key not in (*_FLAGS, "tool_calls") and value not in (None, "", [], {})
    }
    found["role"] = role if role in roles else _ROLES.get(role, role)
    found["content"] = message_content(place, message.get("content"), images)
    return found | {"tool_calls": [message_call(place, call) for call in calls]} if calls else found


def message_call(place: str, call: Mapping[str, Any]) -> Mapping[str, Any]:
    """A call as templates expect it, whose arguments are an object or its JSON text."""
    function = call.get("function", call)
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ConfigError(f"{place}: a call of tool_calls has no 'name'; name the function")
    arguments = function.get("arguments")
    arguments = {} if arguments is None or arguments == "" else arguments
    parsed = _parsed(place, "tool_calls: arguments", arguments)
    if not isinstance(parsed, Mapping):
        raise ConfigError(
            f"{place}: the arguments of {function['name']!r} are no object; write an object, or "
            "one as JSON text"
        )
    link = {"id": call["id"]} if call.get("id") else {}
    written = arguments if parsed else {}
    return {
        **link,
        "type": "function",
        "function": {"name": function["name"], "arguments": written},
    }


def message_content(
    place: str, content: Any, images: ShownImages | None
) -> str | list[dict[str, str]] | None:
    """Text, or parts of text and images; a template would silently leave anything else out."""
    mark = None if images is None else images.mark
    if content is None or (isinstance(content, str) and (mark is None or mark not in content)):
        return content
    found: list[dict[str, str] | None] = [None]
    if isinstance(content, str | list):
        found = [image for part in _parts(content) for image in _read(place, part, images)]
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


def _tools(place: str, row: Mapping[str, Any]) -> list[Any] | None:
    """Function schemas of whichever column has them, also where it keeps them as JSON text."""
    found = {key: _parsed(place, key, row[key]) for key in _TOOLS if row.get(key)}
    found = {key: tools for key, tools in found.items() if tools}
    if len(found) > 1:
        raise ConfigError(f"{place}: {' and '.join(found)} hold function schemas; keep one of them")
    for key, tools in found.items():
        if isinstance(tools, list):
            tools = [_parsed(place, f"{key}[{n}]", tool) for n, tool in enumerate(tools)]
        if not _is_list_of_objects(tools):
            raise ConfigError(
                f"{place}: {key} must be a list of function schemas, or one as JSON text"
            )
        return [tool_schema(tool) for tool in tools]
    return None


def tool_schema(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """A tool as engines show it to templates; properties without a schema are none."""
    if "function" not in tool and isinstance(tool.get("name"), str):
        bare = {key: value for key, value in tool.items() if key != "type"}
        tool = {"type": "function", "function": bare}
    function = tool.get("function")
    if not isinstance(function, Mapping):
        return tool
    parameters = function.get("parameters")
    if not isinstance(parameters, Mapping):
        return tool
    properties = parameters.get("properties")
    if not isinstance(properties, Mapping) or None not in properties.values():
        return tool
    kept = {name: schema for name, schema in properties.items() if schema is not None}
    return {**tool, "function": {**function, "parameters": {**parameters, "properties": kept}}}


def _without_null(value: Any) -> Any:
    """Without the fields that Arrow adds, so that all rows of a table have the same."""
    if isinstance(value, Mapping):
        return {key: _without_null(part) for key, part in value.items() if part is not None}
    return [_without_null(member) for member in value] if isinstance(value, list) else value


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


def _is_left_out(place: str, message: Message) -> bool:
    """Whether a flag leaves a message out of the loss; ConfigError for one that says neither."""
    for key, value in message.items():
        is_flag = key in _FLAGS or (
            _FLAG_LIKE.search(key) and isinstance(value, bool | int | float)
        )
        if is_flag and value is not None and (key not in _FLAGS or value not in (0, 1)):
            raise ConfigError(
                f"{place} has {key} {value!r}; use a weight of 0 to leave it out of the loss, or 1"
            )
    return any(message.get(key) == 0 for key in _FLAGS)


def _learned(
    messages: Sequence[Message], is_left: Sequence[bool], roles: frozenset[str]
) -> tuple[int, ...]:
    """Indices of the messages of `roles` that no flag leaves out."""
    return tuple(
        number
        for number, message in enumerate(messages)
        if message["role"] in roles and not is_left[number]
    )
