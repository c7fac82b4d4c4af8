"""Anthropic's Messages as chat completions, and back: blocks, thinking, tools and their results."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from typing import Any

from gradus.environments.policy.live import ReplyStart
from gradus_program.speech import (
    Conversation,
    PartsCall,
    Refused,
    as_object,
    function_tool,
    objects,
    refuse_keys,
    renamed,
    reply_of,
    said_in,
    text_of,
    text_parts,
)

_UNSUPPORTED = {
    "mcp_servers": "the program calls MCP servers itself",
    "container": "nothing runs beside the model",
    "context_management": "shorten the conversation yourself",
    "compaction": "shorten the conversation yourself",
}
_KNOWN = frozenset(
    {
        *("betas", "billing_policy", "cache_control", "diagnostics", "fallbacks", "inference_geo"),
        *("max_tokens", "messages", "metadata", "model", "output_config", "output_format"),
        *("service_tier", "speed", "stop_sequences", "stream", "system", "temperature"),
        *("thinking", "thread", "tool_choice", "tools", "top_k", "top_p", "user_profile_id"),
        *("workspace_id", "fallback_credit_token"),
    }
)
_SAMPLING = {
    **{name: name for name in ("temperature", "top_p", "top_k", "max_tokens")},
    "stop_sequences": "stop",
}
_ENDINGS = {"tool_calls": "tool_use", "length": "max_tokens"}
_TEXT = ("text",)
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class MessagesCall(PartsCall):
    """One request for a message."""

    name = "Messages"

    def read(self, body: dict[str, Any]) -> dict[str, Any]:
        """The same as a chat completion; what only Anthropic's own servers can do is refused."""
        refuse_keys(body, _UNSUPPORTED, _KNOWN)
        self._head = {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": str(body.get("model") or ""),
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage({}),
        }
        self.beside = {"thinking": body.get("thinking")}
        thread = body.get("thread") or {}
        self._is_kept = bool(thread)
        held = Conversation([], [])
        if thread.get("type") == "continue":
            held = self.memory.turn(thread.get("previous_message_id"))
        messages = list(held.messages)
        if system := text_parts(body.get("system"), _TEXT, "`system`"):
            messages = [it for it in messages if it["role"] != "system"]
            messages.insert(0, {"role": "system", "content": system})
        for message in objects(body.get("messages"), "`messages`"):
            messages += self._read_message(message)
        if messages and messages[-1]["role"] == "assistant":
            raise Refused(
                "The last message is the assistant's. A reply whose beginning is given is not "
                "supported; end with a message of the user."
            )
        tools = [_tool(tool) for tool in objects(body.get("tools") or [], "`tools`")]
        # A thread keeps its tools until others are given.
        tools = tools or held.tools
        self._conversation = Conversation(messages, tools)
        return {
            "messages": messages,
            **renamed(body, _SAMPLING),
            **_contract(body),
            **({"tools": tools} if tools else {}),
        }

    def _read_message(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        role, content = message.get("role"), message.get("content")
        if isinstance(content, str):
            return [{"role": role, "content": content}]
        blocks = objects(content, "`content`")
        if role == "assistant":
            return [self._read_reply(blocks)]
        found: list[dict[str, Any]] = []
        texts: list[dict[str, Any]] = []
        for block in blocks:
            if block.get("type") != "tool_result":
                texts.append(block)
                continue
            result = text_parts(block.get("content"), _TEXT, "a tool's result")
            if block.get("is_error"):
                result = f"Error: {text_of(result)}"
            found.append({"role": "tool", "tool_call_id": block["tool_use_id"], "content": result})
        if texts or not found:
            found.append({"role": role, "content": text_parts(texts, _TEXT, "a message")})
        return found

    def _read_reply(self, blocks: list[dict[str, Any]]) -> dict[str, Any]:
        """A message of the model, as the chat completion had it."""
        said = [block for block in blocks if block.get("type") not in ("thinking", "tool_use")]
        parts = text_parts(said, _TEXT, "a reply")
        text = parts if isinstance(parts, str) else "".join(part["text"] for part in parts)
        reply: dict[str, Any] = {"role": "assistant", "content": text}
        thoughts = [
            self.memory.thoughts.get(block.get("signature") or "", str(block.get("thinking", "")))
            for block in blocks
            if block.get("type") == "thinking"
        ]
        if any(thoughts):
            reply["reasoning_content"] = "".join(thoughts)
        calls = [
            {
                "id": block["id"],
                "type": "function",
                "function": {
                    "name": block["name"],
                    "arguments": self.memory.sampled_arguments(block["id"], block.get("input")),
                },
            }
            for block in blocks
            if block.get("type") == "tool_use"
        ]
        return {**reply, "tool_calls": calls} if calls else reply

    def answer(self, completion: dict[str, Any]) -> dict[str, Any]:
        """The message, with a block for each part of the reply."""
        message, ending = reply_of(completion)
        calls = message.get("tool_calls") or []
        if self._is_kept:
            said = [*self._conversation.messages, message]
            kept = Conversation(said, self._conversation.tools)
            self.memory.keep_turn(self._head["id"], kept)
        said = said_in(message)
        content = [_thinking(said.reasoning, self.sign(said.reasoning))] if said.reasoning else []
        if said.content or not calls:
            content.append({"type": "text", "text": said.content})
        for call in calls:
            function = call["function"]
            block = {"type": "tool_use", "id": call["id"], "name": function["name"]}
            content.append({**block, "input": as_object(function["arguments"])})
        stop = completion["choices"][0].get("stop_reason")
        is_cut = ending == "stop" and isinstance(stop, str)
        return {
            **self._head,
            "content": content,
            "stop_reason": "stop_sequence" if is_cut else _ENDINGS.get(ending, "end_turn"),
            "stop_sequence": stop if is_cut else None,
            "usage": _usage(completion.get("usage") or {}),
        }

    def opening(self) -> bytes:
        return _event("message_start", message=self._head)

    def pulse(self) -> bytes:
        return _event("ping")

    def events(self, answer: dict[str, Any]) -> bytes:
        parts = list(self.progress(answer["content"], is_over=True))
        ended = {key: answer[key] for key in ("stop_reason", "stop_sequence")}
        parts.append(_event("message_delta", delta=ended, usage=answer["usage"]))
        return b"".join([*parts, _event("message_stop")])

    def parts_of(self, said: ReplyStart) -> Iterator[dict[str, Any]]:
        if said.reasoning:
            yield _thinking(said.reasoning, self.sign(said.reasoning) if said.content else "")
        if said.content:
            yield {"type": "text", "text": said.content}

    def text_of(self, part: dict[str, Any]) -> str:
        text = part[_GROWING[part["type"]][0]]
        return text if isinstance(text, str) else json.dumps(text)

    def begin(self, index: int, part: dict[str, Any]) -> bytes:
        return _event("content_block_start", index=index, content_block=part | _EMPTY[part["type"]])

    def add(self, index: int, part: dict[str, Any], text: str) -> bytes:
        _, kind, key = _GROWING[part["type"]]
        return _event("content_block_delta", index=index, delta={"type": kind, key: text})

    def end(self, index: int, part: dict[str, Any]) -> bytes:
        stop = _event("content_block_stop", index=index)
        if part["type"] != "thinking":
            return stop
        signed = {"type": "signature_delta", "signature": part["signature"]}
        return _event("content_block_delta", index=index, delta=signed) + stop

    def failure(self, error: dict[str, Any]) -> bytes:
        return _event("error", error=error["error"])


class MessagesCount(MessagesCall):
    """A question for the number of tokens of such a request."""

    wants_count = True


_EMPTY: dict[str, dict[str, Any]] = {
    "thinking": {"thinking": "", "signature": ""},
    "text": {"text": ""},
    "tool_use": {"input": {}},
}
_GROWING = {
    "thinking": ("thinking", "thinking_delta", "thinking"),
    "text": ("text", "text_delta", "text"),
    "tool_use": ("input", "input_json_delta", "partial_json"),
}
"""Type of a block → the key of what grows in it, and type and key of what is added."""


def _thinking(reasoning: str, signature: str) -> dict[str, Any]:
    return {"type": "thinking", "thinking": reasoning, "signature": signature}


def _event(kind: str, **payload: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **payload})}\n\n".encode()


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        raise Refused(
            f"The tool {str(tool['type'])[:40]!r} is one of Anthropic's own; give the model tools "
            "with an `input_schema`."
        )
    return function_tool(tool, tool.get("input_schema"))


def _contract(body: dict[str, Any]) -> dict[str, Any]:
    """How the reply must look, by the names of chat completions."""
    choice = body.get("tool_choice") or {}
    kind = choice.get("type")
    named = {"type": "function", "function": {"name": choice.get("name")}}
    if kind not in (None, "tool", *_CHOICES):
        raise Refused(f"`tool_choice` of type {str(kind)[:40]!r} is unknown here.")
    output = body.get("output_config") or {}
    form = body.get("output_format") or output.get("format")
    if form and form.get("type") == "json_schema":
        schema = {"name": "reply", "schema": form.get("schema")}
        form = {"type": "json_schema", "json_schema": schema}
    asked = {
        "tool_choice": named if kind == "tool" else _CHOICES.get(kind or ""),
        "parallel_tool_calls": False if choice.get("disable_parallel_tool_use") else None,
        "response_format": form,
        "reasoning_effort": output.get("effort"),
    }
    return {key: value for key, value in asked.items() if value is not None}


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    return {
        "input_tokens": usage.get("prompt_tokens", 0),
        "output_tokens": usage.get("completion_tokens", 0),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
    }
