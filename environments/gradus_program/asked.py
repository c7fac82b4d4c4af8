"""How a program wants its replies sampled: what of that is done, refused, or left to the run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from gradus_program.speech import CHAT, Refused

UNABLE = (
    *("parallel_tool_calls", "reasoning", "reasoning_effort", "thinking", "verbosity"),
    "chat_template_kwargs",
)
"""Wishes that no sampler grants. They are counted, never refused: agents send them to any model."""
_OF_ENGINES = {
    *("allowed_token_ids", "bad_words", "continue_final_message", "guided_choice"),
    *("guided_grammar", "guided_json", "guided_regex", "ignore_eos", "length_penalty"),
    *("min_tokens", "stop_token_ids", "structured_outputs", "use_beam_search"),
}
"""Keys that vLLM adds to chat completions."""
_NOT_SAMPLING = {"n", "service_tier", "logprobs"}
_DONE = {"temperature", "top_p", "top_k", "min_p", "max_tokens", "stop", "response_format"}
_NOTHING: Mapping[str, tuple[object, ...]] = {
    **dict.fromkeys(_OF_ENGINES, (False, [])),
    "length_penalty": (1,),
    "tool_choice": ("auto", "none"),
    "parallel_tool_calls": (True,),
    "thinking": ({"type": "adaptive"},),
    "top_logprobs": (0,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "stop": ([],),
    "logit_bias": ({},),
    "extra_body": ({},),
    "response_format": ({"type": "text"},),
}
"""Values that ask for what happens anyway."""
_RANGES: Mapping[str, tuple[type, float, float]] = {
    "temperature": (float, 0, 2),
    "top_p": (float, 0, 1),
    "min_p": (float, 0, 1),
    "top_k": (int, 1, 2**31),
    "max_tokens": (int, 1, 2**31),
}


def wishes(chat: Mapping[str, Any], sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Collect, by name, what a chat completion asks for that the run does not do anyway."""
    names = (CHAT.sampling_fields | set(UNABLE) | _OF_ENGINES) - _NOT_SAMPLING
    given = {
        ("max_tokens" if name == "max_completion_tokens" else name): value
        for name, value in chat.items()
        if name in names and value is not None
    }
    return {
        name: value
        for name, value in sorted(given.items())
        if sampling.get(name) != value and not any(value == it for it in _NOTHING.get(name, ()))
    }


def granted(
    wished: Mapping[str, Any],
    sampling: Mapping[str, Any],
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """The sampling parameters of one call whose program decides; Refused for what is not done.

    `tools` are those of the call where it can be forced to call one, else None.
    """
    own: dict[str, Any] = {}
    for name, value in wished.items():
        if name in UNABLE:
            continue
        if name == "tool_choice" and tools is not None:
            own[name] = _callable_tools(value, tools)
            continue
        if name not in _DONE:
            raise Refused(
                f"`{name}` is not supported where the program decides how it samples. Leave it "
                'out, or let the run decide: sampling = "run".'
            )
        if name in _RANGES:
            _check_range(name, value, *_RANGES[name])
        own[name] = value
    if "max_tokens" in own:
        own["max_tokens"] = min(own["max_tokens"], sampling.get("max_tokens") or own["max_tokens"])
    if "stop" in own:
        own["stop"] = _stops(own["stop"])
    if "response_format" in own:
        own["structured_outputs"] = _structure(own.pop("response_format"))
        if "tool_choice" in own:
            raise Refused("`response_format` and a forced `tool_choice` exclude each other.")
    return own


def _callable_tools(choice: object, tools: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names of the tools of which one must be called."""
    names = [tool["function"]["name"] for tool in tools]
    if choice != "required":
        function = choice.get("function") if isinstance(choice, dict) else None
        wanted = function.get("name") if isinstance(function, dict) else None
        names = [name for name in names if name == wanted]
    if not names:
        raise Refused(f"`tool_choice` = {json.dumps(choice)[:80]} names none of the `tools`.")
    return names


def _check_range(name: str, value: object, kind: type, low: float, high: float) -> None:
    is_kind = type(value) is kind or (kind is float and type(value) is int)
    if not is_kind or not low <= value <= high:  # type: ignore[operator]
        what = "a whole number" if kind is int else "a number"
        raise Refused(f"`{name}` = {str(value)[:40]} is not {what} between {low:g} and {high:g}.")


def _stops(value: object) -> list[str]:
    stops = [value] if isinstance(value, str) else value
    is_list = isinstance(stops, list) and 0 < len(stops) <= 16
    if not is_list or not all(isinstance(stop, str) and stop for stop in stops):
        raise Refused("`stop` must be a text or up to 16 texts, none of them empty.")
    return list(stops)


def _structure(form: object) -> dict[str, Any]:
    """Write what the engine's structured output is told."""
    kind = form.get("type") if isinstance(form, dict) else None
    if kind == "json_object":
        return {"json_object": True}
    schema = (form.get("json_schema") or {}).get("schema") if isinstance(form, dict) else None
    if kind == "json_schema" and isinstance(schema, dict):
        return {"json": schema}
    raise Refused("`response_format` must be text, json_object, or json_schema with a schema.")
