"""OpenAI's Responses as chat completions, and back: items, reasoning, calls, earlier replies."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator
from typing import Any

from gradus.environments.policy.live import ReplyStart
from gradus_program.speech import (
    Conversation,
    PartsCall,
    Refused,
    function_tool,
    objects,
    refuse_keys,
    renamed,
    reply_of,
    said_in,
    text_parts,
)

_UNSUPPORTED = {
    "background": "the reply is given at once",
    "conversation": "send the items, or `previous_response_id`",
    "prompt": "templates are kept at OpenAI; send the text",
    "context_management": "shorten the input yourself",
}
_KNOWN = frozenset(
    {
        *("client_metadata", "include", "input", "instructions", "max_output_tokens"),
        *("max_tool_calls", "metadata", "model", "parallel_tool_calls", "previous_response_id"),
        *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "reasoning"),
        *("safety_identifier", "service_tier", "store", "stream", "stream_options", "user"),
        *("temperature", "text", "tool_choice", "tools", "top_logprobs", "top_p", "truncation"),
    }
)
_SAMPLING = {
    **{name: name for name in ("temperature", "top_p", "parallel_tool_calls", "top_logprobs")},
    "max_output_tokens": "max_tokens",
}
_ECHOED = ("instructions", "metadata", "previous_response_id", "temperature", "text", "top_p")
_TEXT = ("input_text", "output_text", "text", "refusal")
_THOUGHTS = ("reasoning_text", "summary_text", "text")
_RANKS = {"reasoning": 0, "message": 1, "function_call": 2, "custom_tool_call": 2}
"""Order of the items of one reply; one of an earlier kind, or a second message, begins the next."""
_OUTPUTS = ("function_call_output", "custom_tool_call_output")
_ENCRYPTED = "reasoning.encrypted_content"


class ResponsesCall(PartsCall):
    """One request for a response."""

    name = "Responses"

    def read(self, body: dict[str, Any]) -> dict[str, Any]:
        """The same as a chat completion; what only OpenAI's own servers can do is refused."""
        refuse_keys(body, _UNSUPPORTED, _KNOWN)
        if body.get("truncation") not in (None, "disabled"):
            raise Refused('`truncation` must be "disabled": shorten the input yourself.')
        self._id = f"resp_{secrets.token_hex(16)}"
        self._created = int(time.time())
        self._names = [f"{kind}_{secrets.token_hex(12)}" for kind in ("rs", "msg")]
        self._is_kept = body.get("store") is not False
        self._is_encrypted = _ENCRYPTED in (body.get("include") or [])
        self._echo = {key: body.get(key) for key in _ECHOED}
        self._echo |= {"tools": body.get("tools") or [], "model": str(body.get("model") or "")}
        self._echo["tool_choice"] = body.get("tool_choice") or "auto"
        self._echo["parallel_tool_calls"] = body.get("parallel_tool_calls", True)
        self._spaces: dict[str, dict[str, str]] = {}
        tools = list(self._flat(objects(body.get("tools") or [], "`tools`")))
        self._custom = {tool.get("name") for tool in tools if tool.get("type") == "custom"}
        before = body.get("previous_response_id")
        said = self.memory.turn(before).messages if before else []
        self._messages = [*said, *self._asked(body)]
        system = [{"role": "system", "content": body.get("instructions")}]
        return {
            "messages": [*(system if body.get("instructions") else []), *self._messages],
            **renamed(body, _SAMPLING),
            **_contract(body),
            **({"tools": [_tool(tool) for tool in tools]} if tools else {}),
        }

    def _flat(self, tools: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """The tools, those of a namespace under a name of both."""
        for tool in tools:
            if tool.get("type") != "namespace":
                yield tool
                continue
            for inner in objects(tool.get("tools") or [], "the tools of a namespace"):
                name = _joined(tool["name"], inner["name"])
                self._spaces[name] = {"name": inner["name"], "namespace": tool["name"]}
                yield {**inner, "name": name}

    def _asked(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        given = body.get("input")
        if isinstance(given, str):
            return [{"role": "user", "content": given}]
        messages: list[dict[str, Any]] = []
        reply: dict[str, Any] | None = None
        rank = 0
        for item in objects(given or [], "`input`"):
            item = self._referred(item)
            kind = item.get("type") or "message"
            if kind in _OUTPUTS or (kind == "message" and item.get("role") != "assistant"):
                messages.append(_given(item, kind))
                reply = None
                continue
            if kind not in _RANKS:
                raise Refused(
                    f"An item of `input` is a {str(kind)[:40]!r}; messages, reasoning, calls of "
                    "functions and custom tools, and their outputs are supported."
                )
            if reply is None or _RANKS[kind] < rank or rank == _RANKS[kind] == 1:
                reply = {"role": "assistant", "content": ""}
                messages.append(reply)
            rank = _RANKS[kind]
            self._add(reply, item, kind)
        return messages

    def _referred(self, item: dict[str, Any]) -> dict[str, Any]:
        if item.get("type") != "item_reference":
            return item
        if item.get("id") not in self.memory.items:
            raise Refused(f"There is no item {str(item.get('id'))[:60]!r} in this episode.")
        return self.memory.items[str(item["id"])]

    def _add(self, reply: dict[str, Any], item: dict[str, Any], kind: str) -> None:
        """Add an item to the reply that it is a part of."""
        if kind == "message":
            reply["content"] = text_parts(item.get("content"), _TEXT, "a message")
        elif kind == "reasoning":
            thought = self.memory.thoughts.get(item.get("encrypted_content") or item.get("id", ""))
            if thought is None:
                parts = item.get("content") or item.get("summary")
                listed = text_parts(parts, _THOUGHTS, "a reasoning")
                thought = (
                    listed if isinstance(listed, str) else "".join(part["text"] for part in listed)
                )
            if thought:
                reply["reasoning_content"] = reply.get("reasoning_content", "") + thought
        else:
            text = item.get("arguments") or "{}"
            if kind == "custom_tool_call":
                text = self.memory.sampled_arguments(
                    item.get("call_id"), {"input": item.get("input")}
                )
            call = {"name": _joined(item.get("namespace"), item["name"]), "arguments": text}
            reply.setdefault("tool_calls", []).append(
                {"id": item["call_id"], "type": "function", "function": call}
            )

    def answer(self, completion: dict[str, Any]) -> dict[str, Any]:
        """The response, with an item for each part of the reply."""
        message, ending = reply_of(completion)
        found = completion["choices"][0].get("logprobs") or {}
        told = [{**it, "bytes": it.get("bytes") or []} for it in found.get("content") or []]
        output = list(self._items(message, told))
        self.memory.items.update({item["id"]: item for item in output})
        if self._is_kept:
            self.memory.keep_turn(self._id, Conversation([*self._messages, message], []))
        is_cut = ending == "length"
        for item in output:
            item["status"] = "incomplete" if is_cut and item is output[-1] else "completed"
        return {
            **self._head("incomplete" if is_cut else "completed"),
            "output": output,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "usage": _usage(completion.get("usage") or {}),
        }

    def _items(
        self, message: dict[str, Any], logprobs: list[dict[str, Any]]
    ) -> Iterator[dict[str, Any]]:
        calls, said = message.get("tool_calls") or [], said_in(message)
        if said.reasoning:
            self.memory.thoughts[self._names[0]] = said.reasoning
            yield self._thought(said.reasoning, is_whole=True)
        if said.content or not calls:
            yield self._text(said.content, logprobs)
        for call in calls:
            function = call["function"]
            named = self._spaces.get(function["name"], {"name": function["name"]})
            item = {"call_id": call["id"], **named}
            if function["name"] in self._custom:
                text = str(_input_of(function["arguments"]))
                kind = {"id": f"ctc_{secrets.token_hex(12)}", "type": "custom_tool_call"}
                yield {**kind, **item, "input": text}
            else:
                kind = {"id": f"fc_{secrets.token_hex(12)}", "type": "function_call"}
                yield {**kind, **item, "arguments": function["arguments"]}

    def _thought(self, reasoning: str, *, is_whole: bool) -> dict[str, Any]:
        text = [{"type": "reasoning_text", "text": reasoning}]
        item = {"id": self._names[0], "type": "reasoning", "summary": [], "content": text}
        is_signed = is_whole and self._is_encrypted
        return {**item, **({"encrypted_content": self.sign(reasoning)} if is_signed else {})}

    def _text(self, text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
        return {"id": self._names[1], "type": "message", "role": "assistant", "content": [part]}

    def _head(self, status: str) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "output": [],
            "usage": None,
            "store": self._is_kept,
            **self._echo,
        }

    def counted(self, num_tokens: int) -> dict[str, Any]:
        return {"object": "response.input_tokens", "input_tokens": num_tokens}

    def _event(self, kind: str, **payload: Any) -> bytes:
        self._number = getattr(self, "_number", -1) + 1
        body = {"type": kind, "sequence_number": self._number, **payload}
        return f"event: {kind}\ndata: {json.dumps(body)}\n\n".encode()

    def opening(self) -> bytes:
        return self._event("response.created", response=self._head("in_progress")) + self.pulse()

    def pulse(self) -> bytes:
        return self._event("response.in_progress", response=self._head("in_progress"))

    def events(self, answer: dict[str, Any]) -> bytes:
        events = list(self.progress(answer["output"], is_over=True))
        return b"".join([*events, self._event(f"response.{answer['status']}", response=answer)])

    def parts_of(self, said: ReplyStart) -> Iterator[dict[str, Any]]:
        if said.reasoning:
            yield {**self._thought(said.reasoning, is_whole=bool(said.content)), **_COMPLETED}
        if said.content:
            yield {**self._text(said.content, []), **_COMPLETED}

    def text_of(self, part: dict[str, Any]) -> str:
        key = _GROWING[part["type"]][1]
        return str(part["content"][0]["text"] if key == "text" else part[key])

    def begin(self, index: int, part: dict[str, Any]) -> bytes:
        empty = {**part, "status": "in_progress", **_EMPTY[part["type"]]}
        event = self._event("response.output_item.added", output_index=index, item=empty)
        if part["type"] == "message":
            text = {**part["content"][0], "text": ""}
            event += self._event("response.content_part.added", **_place(index, part), part=text)
        return event

    def add(self, index: int, part: dict[str, Any], text: str) -> bytes:
        kind = f"response.{_GROWING[part['type']][0]}.delta"
        return self._event(kind, **_place(index, part), delta=text, **_logprobs_of(part))

    def end(self, index: int, part: dict[str, Any]) -> bytes:
        kind, key = _GROWING[part["type"]]
        name = {"name": part["name"]} if key == "arguments" else {}
        told = {key: self.text_of(part), **name, **_logprobs_of(part)}
        event = self._event(f"response.{kind}.done", **_place(index, part), **told)
        if part["type"] == "message":
            text = part["content"][0]
            event += self._event("response.content_part.done", **_place(index, part), part=text)
        return event + self._event("response.output_item.done", output_index=index, item=part)

    def failure(self, error: dict[str, Any]) -> bytes:
        text = {"code": "server_error", "message": error["error"]["message"]}
        failed = {**self._head("failed"), "error": text}
        return self._event("response.failed", response=failed, error=error["error"])


class ResponsesCount(ResponsesCall):
    """A question for the number of tokens of such a request."""

    wants_count = True


_EMPTY: dict[str, dict[str, Any]] = {
    "message": {"content": []},
    "reasoning": {"content": []},
    "function_call": {"arguments": ""},
    "custom_tool_call": {"input": ""},
}
_GROWING = {
    "message": ("output_text", "text"),
    "reasoning": ("reasoning_text", "text"),
    "function_call": ("function_call_arguments", "arguments"),
    "custom_tool_call": ("custom_tool_call_input", "input"),
}
"""Type of an item → the name of the events of what grows in it, and its key."""
_COMPLETED = {"status": "completed"}


def _place(index: int, item: dict[str, Any]) -> dict[str, Any]:
    """Where the text of an event belongs."""
    inner = {"content_index": 0} if _GROWING[item["type"]][1] == "text" else {}
    return {"output_index": index, "item_id": item["id"], **inner}


def _logprobs_of(item: dict[str, Any]) -> dict[str, Any]:
    return {"logprobs": item["content"][0]["logprobs"]} if item["type"] == "message" else {}


def _given(item: dict[str, Any], kind: str) -> dict[str, Any]:
    """A message of somebody else than the model."""
    if kind == "message":
        content = text_parts(item.get("content"), _TEXT, "a message")
        return {"role": item.get("role"), "content": content}
    content = text_parts(item.get("output"), _TEXT, "the output of a tool")
    return {"role": "tool", "tool_call_id": item["call_id"], "content": content}


def _joined(namespace: str | None, name: str) -> str:
    return f"{namespace.removesuffix('__')}__{name}" if namespace else name


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    kind = tool.get("type")
    if kind == "function":
        return function_tool(tool, tool.get("parameters"))
    if kind != "custom":
        raise Refused(
            f"The tool {str(kind)[:40]!r} is run by OpenAI, not by the program; give the model "
            "functions and custom tools."
        )
    texts = [tool.get("description"), (tool.get("format") or {}).get("definition")]
    described = {**tool, "description": "\n\n".join(text for text in texts if text)}
    text = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    return function_tool(described, text)


def _input_of(arguments: str) -> object:
    """The text for a custom tool; all that the model wrote where it named no `input`."""
    try:
        return json.loads(arguments)["input"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return arguments


def _contract(body: dict[str, Any]) -> dict[str, Any]:
    """How the reply must look, by the names of chat completions."""
    contract: dict[str, Any] = {}
    choice = body.get("tool_choice")
    if isinstance(choice, dict):
        if choice.get("type") != "function":
            raise Refused(
                f"`tool_choice` of type {str(choice.get('type'))[:40]!r} is unknown here."
            )
        choice = {"type": "function", "function": {"name": choice.get("name")}}
    text = body.get("text") or {}
    form = text.get("format")
    if form and form.get("type") == "json_schema":
        form = {"type": "json_schema", "json_schema": {k: form[k] for k in form if k != "type"}}
    asked = {
        "tool_choice": choice,
        "response_format": form,
        "verbosity": text.get("verbosity"),
        "reasoning_effort": (body.get("reasoning") or {}).get("effort"),
        "logprobs": True if "message.output_text.logprobs" in (body.get("include") or []) else None,
    }
    contract.update({key: value for key, value in asked.items() if value is not None})
    return contract


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    given, made = usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0)
    return {
        "input_tokens": given,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": made,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": given + made,
    }
