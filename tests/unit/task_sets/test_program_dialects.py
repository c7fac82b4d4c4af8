"""One conversation in three dialects has the same tokens, and each answer reads as its own."""

from __future__ import annotations

import json
from typing import Any

import anthropic.types
import openai.types.responses
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from renderers import Qwen3RendererConfig, Renderer, create_renderer
from transformers import PreTrainedTokenizerFast
from verifiers.v1.clients.train import tool_to_wire
from verifiers.v1.dialects.chat import message_to_wire

from gradus_program.messages import MessagesCall
from gradus_program.responses import ResponsesCall
from gradus_program.speech import CHAT, Memory, ProgramCall, Refused

pytestmark = pytest.mark.torch

TEXT = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12)
ARGUMENTS = st.dictionaries(
    TEXT, TEXT | st.integers(-9, 9) | st.lists(TEXT, max_size=2), max_size=2
)
PARAMETERS = {"type": "object", "properties": {"a": {"type": "string"}}}
TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "description": name * 2, "parameters": PARAMETERS},
    }
    for name in ("look", "write")
]


@st.composite
def conversations(draw: st.DrawFn) -> dict[str, Any]:
    """A body of chat completions: turns of a user, replies, calls of tools and their results."""
    messages: list[dict[str, Any]] = []
    if draw(st.booleans()):
        messages.append({"role": "system", "content": draw(TEXT)})
    number = 0
    for _ in range(draw(st.integers(1, 3))):
        messages.append({"role": "user", "content": draw(TEXT)})
        for _ in range(draw(st.integers(0, 2))):
            num_calls = draw(st.integers(1, 3))
            calls, results = [], []
            for place in range(num_calls):
                name = f"call{number + place}"
                function = {"name": "look", "arguments": json.dumps(draw(ARGUMENTS))}
                calls.append({"id": name, "type": "function", "function": function})
                results.append({"role": "tool", "tool_call_id": name, "content": draw(TEXT)})
            number += num_calls
            messages += [{**draw(replies(st.just("") | TEXT)), "tool_calls": calls}, *results]
        messages.append(draw(replies(TEXT)))
    messages.append({"role": "user", "content": draw(TEXT)})
    return {"messages": messages, **({"tools": TOOLS} if draw(st.booleans()) else {})}


def replies(content: st.SearchStrategy[str]) -> st.SearchStrategy[dict[str, Any]]:
    fixed = {"role": st.just("assistant"), "content": content}
    return st.fixed_dictionaries(fixed, optional={"reasoning_content": TEXT})


def as_responses(chat: dict[str, Any]) -> dict[str, Any]:
    """The same conversation as items."""
    items: list[dict[str, Any]] = []
    body: dict[str, Any] = {"model": "any", "input": items}
    for message in chat["messages"]:
        role, content = message["role"], message["content"]
        if role == "system":
            body["instructions"] = content
        elif role == "tool":
            call = {"call_id": message["tool_call_id"], "output": content}
            items.append({"type": "function_call_output", **call})
        elif role == "user":
            items.append({"role": "user", "content": [{"type": "input_text", "text": content}]})
        else:
            if reasoning := message.get("reasoning_content"):
                text = [{"type": "reasoning_text", "text": reasoning}]
                items.append({"type": "reasoning", "id": "rs", "summary": [], "content": text})
            if content:
                text = [{"type": "output_text", "text": content, "annotations": []}]
                items.append({"type": "message", "role": "assistant", "content": text})
            items += [
                {"type": "function_call", "call_id": call["id"], **call["function"]}
                for call in message.get("tool_calls", [])
            ]
    if "tools" in chat:
        body["tools"] = [{"type": "function", **tool["function"]} for tool in chat["tools"]]
    return body


def as_messages(chat: dict[str, Any]) -> dict[str, Any]:
    """The same conversation as blocks, with marks for a cache."""
    mark = {"cache_control": {"type": "ephemeral"}}
    messages: list[dict[str, Any]] = []
    body: dict[str, Any] = {"model": "any", "max_tokens": 9, "messages": messages}
    for message in chat["messages"]:
        role, content = message["role"], message["content"]
        if role == "system":
            body["system"] = [{"type": "text", "text": content, **mark}]
        elif role == "tool":
            result = {"tool_use_id": message["tool_call_id"], "content": content, **mark}
            if messages[-1]["role"] == "assistant":
                messages.append({"role": "user", "content": []})
            messages[-1]["content"].append({"type": "tool_result", **result})
        elif role == "user" and messages and messages[-1]["role"] == "user":
            messages[-1]["content"].append({"type": "text", "text": content})
        elif role == "user":
            messages.append({"role": "user", "content": content})
        else:
            blocks = []
            if reasoning := message.get("reasoning_content"):
                blocks.append({"type": "thinking", "thinking": reasoning, "signature": "x"})
            if content:
                blocks.append({"type": "text", "text": content})
            for call in message.get("tool_calls", []):
                function = call["function"]
                given = {"name": function["name"], "input": json.loads(function["arguments"])}
                blocks.append({"type": "tool_use", "id": call["id"], **given})
            messages.append({"role": "assistant", "content": blocks})
    if "tools" in chat:
        functions = [tool["function"] for tool in chat["tools"]]
        body["tools"] = [
            {**{k: it[k] for k in ("name", "description")}, "input_schema": it["parameters"]}
            for it in functions
        ]
    return body


@pytest.fixture(scope="module")
def renderer(tokenizer: PreTrainedTokenizerFast) -> Renderer:
    return create_renderer(tokenizer, Qwen3RendererConfig())


def prompt_ids(renderer: Renderer, call: ProgramCall) -> list[int]:
    """The tokens of a call, as the train client renders it."""
    call.check(text_only=True)
    asked = CHAT.parse_request(call.chat)
    tools = [tool_to_wire(tool) for tool in asked.tools or []] or None
    messages = [message_to_wire(message) for message in asked.messages]
    made = renderer.render(messages, tools=tools, add_generation_prompt=True)
    return list(made.token_ids)


@settings(deadline=None)
@given(chat=conversations())
def test_a_conversation_has_the_same_tokens_in_every_dialect(
    renderer: Renderer, chat: dict[str, Any]
) -> None:
    memory = Memory()
    expected = prompt_ids(renderer, ProgramCall(chat, memory))
    assert prompt_ids(renderer, ResponsesCall(as_responses(chat), memory)) == expected
    assert prompt_ids(renderer, MessagesCall(as_messages(chat), memory)) == expected


@settings(deadline=None)
@given(chat=conversations(), reply=replies(TEXT), arguments=st.none() | ARGUMENTS | TEXT)
def test_a_reply_that_comes_back_is_the_reply_that_was_sampled(
    chat: dict[str, Any], reply: dict[str, Any], arguments: Any
) -> None:
    if arguments is not None:
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, indent=1)
        function = {"name": "look", "arguments": text}
        reply["tool_calls"] = [{"id": "c9", "type": "function", "function": function}]
    completion = completion_of(reply)
    memory = Memory()
    memory.keep(reply)

    responses = as_responses(chat)
    answer = ResponsesCall(responses, memory).answer(completion)
    openai.types.responses.Response.model_validate(answer)
    again = ResponsesCall({**responses, "input": responses["input"] + answer["output"]}, memory)
    by_name = {"input": "go", "previous_response_id": answer["id"]}
    named = ResponsesCall(by_name, memory).chat["messages"]
    assert again.chat["messages"][-1] == reply
    system = [it for it in chat["messages"] if it["role"] != "system"]
    assert named == [*system, reply, {"role": "user", "content": "go"}]

    messages = as_messages(chat)
    blocks = MessagesCall(messages, memory).answer(completion)
    anthropic.types.Message.model_validate(blocks)
    said = {"role": "assistant", "content": blocks["content"]}
    more = [*messages["messages"], said, {"role": "user", "content": "go"}]
    assert MessagesCall({**messages, "messages": more}, memory).chat["messages"][-2] == reply
    memory.compare([again.chat["messages"][-1]])
    assert memory.lost == set()


def completion_of(reply: dict[str, Any], reason: str = "stop") -> dict[str, Any]:
    """A chat completion with this reply."""
    usage = {"prompt_tokens": 3, "completion_tokens": 2}
    return {"choices": [{"message": reply, "finish_reason": reason}], "usage": usage}


HI = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("kind", "body", "text"),
    [
        (ResponsesCall, {"input": "x", "background": True}, "`background` is not supported"),
        (ResponsesCall, {"input": "x", "conversation": "c"}, "`conversation` is not supported"),
        (ResponsesCall, {"input": "x", "prompt": {"id": "p"}}, "send the text"),
        (ResponsesCall, {"input": "x", "truncation": "auto"}, "shorten the input"),
        (ResponsesCall, {"input": "x", "previous_response_id": "resp_1"}, "There is no reply"),
        (ResponsesCall, {"input": [{"type": "item_reference", "id": "m"}]}, "There is no item"),
        (ResponsesCall, {"input": [{"type": "computer_call"}]}, "'computer_call'"),
        (ResponsesCall, {"input": "x", "tools": [{"type": "web_search"}]}, "run by OpenAI"),
        (
            ResponsesCall,
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "a message holds 'input_image'",
        ),
        (ResponsesCall, {"input": "x", "tool_choice": {"type": "allowed_tools"}}, "is unknown"),
        (ResponsesCall, {"input": []}, "at least one message"),
        (ResponsesCall, {"input": "x", "continuation_id": "c"}, "`continuation_id` is not known"),
        (MessagesCall, {"messages": HI, "history": "h"}, "`history` is not known"),
        (
            MessagesCall,
            {"messages": HI, "thread": {"type": "continue", "previous_message_id": "m"}},
            "There is no reply 'm'",
        ),
        (MessagesCall, {"messages": HI, "mcp_servers": [{}]}, "`mcp_servers` is not supported"),
        (MessagesCall, {"messages": HI, "context_management": {"edits": []}}, "shorten"),
        (MessagesCall, {"messages": HI, "tools": [{"type": "bash_20250124"}]}, "Anthropic's own"),
        (
            MessagesCall,
            {"messages": [{"role": "user", "content": [{"type": "document"}]}]},
            "a message holds 'document'",
        ),
        (
            MessagesCall,
            {"messages": [*HI, {"role": "assistant", "content": "Sure"}]},
            "whose beginning is given",
        ),
        (MessagesCall, {"messages": "hi"}, "must be a list of objects"),
        (MessagesCall, {"messages": []}, "at least one message"),
        (MessagesCall, {"messages": HI, "tool_choice": {"type": "some"}}, "is unknown"),
    ],
)
def test_what_a_dialect_has_and_the_policy_has_not_gets_a_sentence(
    kind: type[ProgramCall], body: dict[str, Any], text: str
) -> None:
    with pytest.raises(Refused, match=text):
        kind.read_safely(body, Memory()).check(text_only=True)


def test_a_hidden_reasoning_is_known_again_by_its_signature_and_a_dropped_one_is_counted() -> None:
    memory = Memory()
    reply = {"role": "assistant", "content": "yes", "reasoning_content": "because"}
    body = {"input": "why", "include": ["reasoning.encrypted_content"], "store": False}
    memory.keep(reply)
    answer = ResponsesCall(body, memory).answer(completion_of(reply))
    thought, said = answer["output"]
    hidden = {"type": "reasoning", "summary": [], "encrypted_content": thought["encrypted_content"]}
    again = ResponsesCall({"input": [hidden, said]}, memory).chat["messages"]
    assert again == [reply]
    memory.compare(again)
    assert memory.lost == set()
    for _ in range(2):
        memory.compare(ResponsesCall({"input": [said]}, memory).chat["messages"])
    assert len(memory.lost) == 1
    memory.lost.clear()
    memory.compare([{**reply, "reasoning_content": "bec"}])
    assert len(memory.lost) == 1
    with pytest.raises(Refused, match="was not to be kept"):
        ResponsesCall({"input": "x", "previous_response_id": answer["id"]}, memory)


def test_a_reply_that_came_back_as_its_call_alone_lost_its_reasoning() -> None:
    memory = Memory()
    function = {"name": "look", "arguments": "{}"}
    reply: dict[str, Any] = {"role": "assistant", "content": "I look."}
    reply["reasoning_content"] = "because"
    reply["tool_calls"] = [{"id": "c1", "type": "function", "function": function}]
    memory.keep(reply)
    *_, call = ResponsesCall({"input": "why"}, memory).answer(completion_of(reply))["output"]
    memory.compare([reply])
    assert memory.lost == set()
    memory.compare(ResponsesCall({"input": [call]}, memory).chat["messages"])
    assert len(memory.lost) == 1


def test_a_custom_tool_is_a_function_of_one_text_and_its_calls_are_custom_again() -> None:
    memory = Memory()
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: TEXT"}
    tool = {"type": "custom", "name": "patch", "description": "Edit.", "format": grammar}
    call = ResponsesCall({"input": "x", "tools": [tool]}, memory)
    function = call.chat["tools"][0]["function"]
    assert function["description"] == "Edit.\n\nstart: TEXT"
    assert function["parameters"]["required"] == ["input"]
    sampled = {"name": "patch", "arguments": '{"input":  "a"}'}
    reply = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "c1", "type": "function", "function": sampled}],
    }
    memory.keep(reply)
    (item,) = call.answer(completion_of(reply))["output"]
    assert (item["type"], item["call_id"], item["input"]) == ("custom_tool_call", "c1", "a")
    output = {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"}
    again = ResponsesCall({"input": [item, output], "tools": [tool]}, memory).chat["messages"]
    assert again == [reply, {"role": "tool", "tool_call_id": "c1", "content": "done"}]


def test_items_of_two_replies_in_a_row_stay_two_replies() -> None:
    said = {"type": "message", "role": "assistant"}
    thought = {"type": "reasoning", "id": "r", "content": [{"type": "text", "text": "so"}]}
    call = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"}
    items = [{**said, "content": "a"}, thought, {**said, "content": "b"}, call]
    replies = ResponsesCall({"input": [*items, {**said, "content": "c"}]}, Memory())
    found = [(it["content"], it.get("reasoning_content")) for it in replies.chat["messages"]]
    assert found == [("a", None), ("b", "so"), ("c", None)]
    assert [len(it.get("tool_calls", [])) for it in replies.chat["messages"]] == [0, 1, 0]


def test_a_thread_of_messages_holds_what_was_said_with_its_system_and_tools() -> None:
    memory = Memory()
    tools = [{"name": "look", "input_schema": {"type": "object"}}]
    body = {"messages": HI, "system": "be brief", "tools": tools, "thread": {"type": "create"}}
    first = MessagesCall(body, memory)
    reply = {"role": "assistant", "content": "yes"}
    name = first.answer(completion_of(reply))["id"]
    thread = {"type": "continue", "previous_message_id": name}
    asked = {"messages": [{"role": "user", "content": "go"}], "thread": thread}
    again = MessagesCall(asked, memory)
    said = [reply, {"role": "user", "content": "go"}]
    assert again.chat["messages"] == [*first.chat["messages"], *said]
    assert again.chat["tools"] == first.chat["tools"]
    other = MessagesCall({**asked, "system": "be long"}, memory).chat["messages"]
    assert other == [{"role": "system", "content": "be long"}, *HI, *said]


def test_tools_of_a_namespace_have_one_name_in_the_prompt_and_both_in_the_answer() -> None:
    memory = Memory()
    inner = {"type": "function", "name": "look", "parameters": {}}
    tools = [{"type": "namespace", "name": "files", "description": "Files.", "tools": [inner]}]
    call = ResponsesCall({"input": "x", "tools": tools}, memory)
    assert call.chat["tools"][0]["function"]["name"] == "files__look"
    sampled = {"name": "files__look", "arguments": "{}"}
    calls = [{"id": "c1", "type": "function", "function": sampled}]
    reply = {"role": "assistant", "content": "", "tool_calls": calls}
    (item,) = call.answer(completion_of(reply))["output"]
    assert (item["namespace"], item["name"]) == ("files", "look")
    assert ResponsesCall({"input": [item], "tools": tools}, memory).chat["messages"] == [reply]


def test_a_reply_that_was_cut_says_so_in_every_dialect() -> None:
    memory, cut = Memory(), completion_of({"role": "assistant", "content": "a"}, "length")
    response = ResponsesCall({"input": "x"}, memory).answer(cut)
    assert (response["status"], response["output"][0]["status"]) == ("incomplete", "incomplete")
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert MessagesCall({"messages": HI}, memory).answer(cut)["stop_reason"] == "max_tokens"


@pytest.mark.parametrize(
    ("ending", "stop", "told"),
    [
        ("stop", ".", ("stop_sequence", ".")),
        ("stop", None, ("end_turn", None)),
        ("stop", 151645, ("end_turn", None)),
        ("length", ".", ("max_tokens", None)),
    ],
)
def test_messages_say_which_stop_ended_a_reply(ending: str, stop: object, told: object) -> None:
    completion = completion_of({"role": "assistant", "content": "a"}, ending)
    completion["choices"][0]["stop_reason"] = stop
    call = MessagesCall({"messages": HI}, Memory())
    answer = call.answer(completion)
    assert (answer["stop_reason"], answer["stop_sequence"]) == told
    anthropic.types.Message.model_validate(answer)
    ended = {"stop_reason": told[0], "stop_sequence": told[1]}
    assert json.dumps(ended) in call.events(answer).decode()


@pytest.mark.parametrize("text", ["no such file", [{"type": "text", "text": "no such file"}], ""])
def test_a_tool_that_failed_reads_as_an_error(text: Any) -> None:
    result = {"type": "tool_result", "tool_use_id": "c1", "content": text, "is_error": True}
    body = {"messages": [*HI, {"role": "user", "content": [result]}]}
    message = MessagesCall(body, Memory()).chat["messages"][-1]
    assert message["content"] == ("Error: no such file" if text else "Error: ")
    result["is_error"] = False
    assert MessagesCall(body, Memory()).chat["messages"][-1]["content"] == (
        "no such file" if text else ""
    )


def test_logprobs_that_were_asked_for_stand_in_the_response() -> None:
    call = ResponsesCall({"input": "x", "include": ["message.output_text.logprobs"]}, Memory())
    assert call.chat["logprobs"] is True
    completion = completion_of({"role": "assistant", "content": "a"})
    entry = {"token": "token_id:5", "logprob": -0.5, "bytes": None, "top_logprobs": []}
    completion["choices"][0]["logprobs"] = {"content": [entry]}
    response = openai.types.responses.Response.model_validate(call.answer(completion))
    item = response.output[0]
    assert isinstance(item, openai.types.responses.ResponseOutputMessage)
    part = item.content[0]
    assert isinstance(part, openai.types.responses.ResponseOutputText)
    assert part.logprobs is not None
    assert [it.logprob for it in part.logprobs] == [-0.5]


def test_what_a_program_wishes_has_one_name_in_all_dialects() -> None:
    schema = {"type": "object"}
    form = {"type": "json_schema", "json_schema": {"name": "reply", "schema": schema}}
    named = {"type": "function", "function": {"name": "look"}}
    body = {"input": "x", "max_output_tokens": 5, "temperature": 0.5}
    body |= {"text": {"format": {"type": "json_schema", "name": "reply", "schema": schema}}}
    body |= {"tool_choice": {"type": "function", "name": "look"}, "reasoning": {"effort": "low"}}
    chat = ResponsesCall(body, Memory()).chat
    assert chat["response_format"] == form
    assert (chat["max_tokens"], chat["temperature"], chat["tool_choice"]) == (5, 0.5, named)
    assert chat["reasoning_effort"] == "low"
    body = {"messages": HI, "max_tokens": 5, "stop_sequences": ["."], "temperature": 0.5}
    body |= {"output_config": {"format": {"type": "json_schema", "schema": schema}}}
    body |= {"tool_choice": {"type": "tool", "name": "look", "disable_parallel_tool_use": True}}
    chat = MessagesCall(body, Memory()).chat
    assert chat["response_format"] == form
    assert (chat["stop"], chat["tool_choice"]) == (["."], named)
    assert chat["parallel_tool_calls"] is False
    any_tool = MessagesCall({"messages": HI, "tool_choice": {"type": "any"}}, Memory())
    assert any_tool.chat["tool_choice"] == "required"
