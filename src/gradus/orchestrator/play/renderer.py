"""The renderer of the policy: written in the config, known by the model's name, or found by trying.

A renderer turns messages into tokens and replies back into messages, with tool calls and reasoning.
The `renderers` package knows which renderer belongs to which model on the hub. A copy of such a
model in a folder, or one trained from it, has another name and the same chat template; so each
renderer is asked to render a few conversations, and the one that writes exactly the tokens of
the model's own template is taken. `python -m gradus.orchestrator.play.renderer NAME` prints it as
JSON: the tokenizer may bring torch into its process, which the orchestrator must not. With settings
after the name it prints which roles' bodies that renderer marks.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError
from renderers import RendererConfig, base
from renderers.base import (
    MODEL_RENDERER_MAP,
    RENDERER_REGISTRY,
    _populate_registry,
    create_renderer,
)
from renderers.parsers import REASONING_PARSERS, TOOL_PARSERS

from gradus import tokenizing
from gradus.config import ModelConfig
from gradus.errors import ConfigError
from gradus.log import get_logger

AUTO = "auto"
CHAT_TEMPLATE = "default"
"""The renderer that uses the model's own chat template, and parses no tool calls."""
FIND_SECONDS = 180.0
"""Loading a tokenizer takes seconds; one that comes from the hub may take longer."""

_TOOL = {
    "name": "look_up",
    "description": "Look up a word.",
    "parameters": {
        "type": "object",
        "properties": {"word": {"type": "string", "description": "The word."}},
        "required": ["word"],
    },
}
_TOOLS = [{"type": "function", "function": _TOOL}]
_CALL = {"name": "look_up", "arguments": {"word": "sun", "limit": 2}}
_SYSTEM = {"role": "system", "content": "Be brief."}
_QUESTION = {"role": "user", "content": "What is the sun?"}
_ANSWER = {"role": "assistant", "content": "A star."}
_CALLING = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "call_0", "type": "function", "function": _CALL}],
}
_RESULT = {"role": "tool", "tool_call_id": "call_0", "name": "look_up", "content": "a star"}

Conversation = tuple[list[dict[str, Any]], list[dict[str, Any]] | None]
_PLAIN: tuple[Conversation, ...] = (
    ([_QUESTION], None),
    ([_SYSTEM, _QUESTION, _ANSWER, _QUESTION], None),
)
_WITH_TOOLS: tuple[Conversation, ...] = (
    ([_SYSTEM, _QUESTION], _TOOLS),
    ([_QUESTION, _CALLING, _RESULT], _TOOLS),
)
_MARKERS = {"gpt-oss": "<|channel|>"}
"""A renderer is tried only when the vocabulary has this token; this one downloads its own."""

_OTHER_NAMES = {"hermes": "qwen3"}
"""What engines call a parser, and what the `renderers` package calls it."""

log = get_logger(__name__)


def known_renderer(model: ModelConfig) -> dict[str, Any] | None:
    """The renderer's settings by what is written or by the model's name; None: look at the model.

    ConfigError for settings that the renderer does not take.
    """
    settings = model.renderer_settings
    if settings["name"] == AUTO:
        known = MODEL_RENDERER_MAP.get(model.tokenizer or model.name)
        if known is None:
            return None
        settings = {**settings, "name": known}
    return _checked(settings)


async def settle_renderer(model: ModelConfig) -> ModelConfig:
    """The model with a renderer named; warns when only the chat template is left."""
    settings = known_renderer(model)
    if settings is None:
        answer = await _ask_child(model.tokenizer or model.name)
        found = answer.get("renderer", {"name": CHAT_TEMPLATE})
        settings = _checked({**model.renderer_settings, **found})
        _tell(model, settings)
    with_renderer: ModelConfig = model.model_copy(update={"renderer": settings})
    return with_renderer


def reads_tool_calls(settings: Mapping[str, Any]) -> bool:
    """Whether tool calls in a reply are parsed, and not taken for text."""
    return settings["name"] != CHAT_TEMPLATE or settings.get("tool_parser") is not None


def check_tools(source: str, model: ModelConfig, *, offers_tools: bool) -> None:
    """ConfigError when a source offers tools and no call of them would ever be read."""
    if offers_tools and not reads_tool_calls(model.renderer_settings):
        raise ConfigError(f"source {source!r} {unread_tools(model.name)}")


def unread_tools(name: str) -> str:
    """Why tools and a model without a renderer do not go together, and what to write."""
    return (
        f"offers tools, but no renderer reads the tool calls of {name!r}: its chat template is "
        "that of no known model, and every call would be taken for text. Set model.renderer to the "
        'renderer of its family, e.g. "qwen3", or to {name = "default", tool_parser = P} with P '
        f"one of {', '.join(sorted(TOOL_PARSERS))}"
    )


def find_renderer(name: str) -> dict[str, Any]:
    """The settings of the renderer that writes what the model's chat template writes.

    The plain chat template when there is none; ConfigError when the tokenizer cannot be loaded or
    has no template.
    """
    tokenizer = load_policy_tokenizer(name)
    expected = list(_expected(tokenizer))
    if not any(tools for (_, tools), _ in expected):
        return {"name": CHAT_TEMPLATE}
    vocabulary = tokenizer.get_vocab()
    for settings in _candidates():
        marker = _MARKERS.get(settings["name"])
        if marker is not None and marker not in vocabulary:
            continue
        if _matches(tokenizer, settings, expected):
            return settings
    return {"name": CHAT_TEMPLATE}


def load_policy_tokenizer(name: str, settings: Mapping[str, Any] | None = None) -> Any:
    """The tokenizer of the policy; ConfigError without one, or without a chat template where the
    renderer of these settings, or a search for one, needs that."""
    try:
        tokenizer = tokenizing.load_tokenizer(name, load=base.load_tokenizer)
    except Exception as error:
        first = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"the tokenizer of {name!r} cannot be loaded ({type(error).__name__}: {first}); "
            "set model.tokenizer to a folder or a name on the hub that has one"
        ) from error
    needs_template = settings is None or settings["name"] in (AUTO, CHAT_TEMPLATE)
    if needs_template and not tokenizer.chat_template:
        raise ConfigError(
            f"the tokenizer of {name!r} has no chat template, so no prompt can be written; set "
            "model.tokenizer to one that has it, e.g. that of the instruct model, or "
            "model.renderer to a renderer by name"
        )
    return tokenizer


def render(
    tokenizer: Any,
    settings: Mapping[str, Any],
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None = None,
) -> list[int]:
    """The tokens of a prompt, up to where the model answers."""
    renderer = build_renderer(tokenizer, settings)
    return list(renderer.render_ids(messages, tools=tools, add_generation_prompt=True))


def build_renderer(tokenizer: Any, settings: Mapping[str, Any]) -> Any:
    return create_renderer(tokenizer, TypeAdapter(RendererConfig).validate_python(settings))


def _checked(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings that the named renderer takes, with its own name for a parser."""
    parser = settings.get("tool_parser")
    if isinstance(parser, str) and parser in _OTHER_NAMES:
        settings = {**settings, "tool_parser": _OTHER_NAMES[parser]}
    shown = settings["name"] if set(settings) == {"name"} else settings
    for key, problem in (*ModelConfig.renderer_problems(settings), *_unknown_parsers(settings)):
        raise ConfigError(f"model.renderer = {shown!r} is not usable: {key}: {problem}")
    try:
        TypeAdapter(RendererConfig).validate_python(settings)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"][1:])
        said = f"{where}: {first['msg']}" if where else first["msg"]
        if first["type"] == "union_tag_invalid":
            said = f"there is no such renderer; use one of {first['ctx']['expected_tags']}"
        raise ConfigError(f"model.renderer = {shown!r} is not usable: {said}") from error
    return settings


def _unknown_parsers(settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Parsers that do not exist; the chat template's renderer would fail in every call."""
    for key, known in (("tool_parser", TOOL_PARSERS), ("reasoning_parser", REASONING_PARSERS)):
        name = settings.get(key)
        if name is not None and name not in known:
            yield key, f"there is no {name!r}; use one of {', '.join(sorted(known))}"


def _tell(model: ModelConfig, settings: Mapping[str, Any]) -> None:
    if settings["name"] != CHAT_TEMPLATE:
        log.info("renderer %r was found from the chat template of %r", dict(settings), model.name)
        return
    log.warning(
        "no renderer is known for model %r, so its chat template is used: tool calls and "
        "reasoning are not parsed, and a conversation whose template rewrites earlier turns splits "
        "into several samples. Set model.renderer to the renderer of its family, e.g. 'qwen3'",
        model.tokenizer or model.name,
    )


async def check_bodies(source: str, model: ModelConfig, roles: Iterable[str]) -> None:
    """ConfigError when the renderer marks no body of any of these roles, so that nothing could be
    learned of them; a warning for some, and where no conversation could be tried. `model` names
    its renderer."""
    settings = model.renderer_settings
    answer = await _ask_child(model.tokenizer or model.name, json.dumps(settings))
    marked = set(answer.get("marked", roles))
    lacking = sorted(set(roles) - marked)
    if not lacking:
        return
    text = (
        f"source {source!r} learns what messages of {', '.join(lacking)} say, but the renderer "
        f"{settings['name']!r} does not mark which tokens that is"
    )
    if set(lacking) == set(roles) <= set(answer.get("tried", roles)):
        raise ConfigError(
            f"{text}, so there would be none to learn. Set model.renderer to the renderer of the "
            'model\'s family, e.g. "qwen3", or use algo.type = "grpo"'
        )
    log.warning("%s: none of them is learned", text)


async def _ask_child(*arguments: str) -> dict[str, Any]:
    """What `main` answers in its own process, nothing when it takes too long; ConfigError with its
    message."""
    name = arguments[0]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "gradus.orchestrator.play.renderer", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(FIND_SECONDS):
            output, _ = await process.communicate()
    except TimeoutError:
        log.warning("the tokenizer of %r was not loaded within %g s", name, FIND_SECONDS)
        return {}
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
    answer: dict[str, Any] = json.loads(output.decode().strip().rpartition("\n")[2] or "{}")
    if "refused" in answer:
        raise ConfigError(f"model: {answer['refused']}")
    return answer


def _expected(tokenizer: Any) -> Iterator[tuple[Conversation, list[int]]]:
    """What the model's own template writes; conversations that it refuses are left out."""
    for conversation in (*_PLAIN, *_WITH_TOOLS):
        messages, tools = conversation
        with contextlib.suppress(Exception):  # a template may refuse a role or tools
            tokens = tokenizer.apply_chat_template(
                messages, tools=tools, add_generation_prompt=True, tokenize=True, return_dict=False
            )
            yield conversation, list(tokens)


def _candidates() -> Iterator[dict[str, Any]]:
    """Every renderer, then with thinking on and off where it has that switch."""
    _populate_registry()
    for name in RENDERER_REGISTRY:
        if name == CHAT_TEMPLATE:
            continue
        yield {"name": name}
        config = TypeAdapter(RendererConfig).validate_python({"name": name})
        if "enable_thinking" in type(config).model_fields:
            yield from ({"name": name, "enable_thinking": is_on} for is_on in (True, False))


def _matches(
    tokenizer: Any,
    settings: dict[str, Any],
    expected: list[tuple[Conversation, list[int]]],
) -> bool:
    """Whether a renderer writes the expected tokens; one that cannot be built does not."""
    try:
        return all(
            render(tokenizer, settings, messages, tools) == tokens
            for (messages, tools), tokens in expected
        )
    except Exception as error:  # the vocabulary lacks its tokens
        log.debug("renderer %s does not fit: %s", settings, error)
        return False


def marked_roles(name: str, settings: Mapping[str, Any]) -> dict[str, list[str]]:
    """The roles of messages whose text the renderer tells from the template around it, and all
    that were tried."""
    tokenizer = load_policy_tokenizer(name, settings)
    renderer = build_renderer(tokenizer, settings)
    found: set[str] = set()
    tried: set[str] = set()
    for messages, tools in (*_PLAIN, *_WITH_TOOLS):
        with contextlib.suppress(Exception):  # a template may refuse a role or tools
            rendered = renderer.render(messages, tools=tools)
            pairs = zip(rendered.message_indices, rendered.is_content, strict=False)
            found |= {rendered.message_roles[i] for i, is_body in pairs if is_body and i >= 0}
            tried |= {message["role"] for message in messages}
    return {"marked": sorted(found), "tried": sorted(tried)}


def main(name: str, settings: str | None = None) -> None:
    """Print the renderer of a model, or what that of `settings` marks, or why there is none, as
    one line of JSON."""
    answer: dict[str, Any]
    try:
        if settings is None:
            answer = {"renderer": find_renderer(name)}
        else:
            answer = dict(marked_roles(name, json.loads(settings)))
    except ConfigError as error:
        answer = {"refused": str(error)}
    sys.stdout.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
