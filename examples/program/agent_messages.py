"""Anthropic's Messages by the `anthropic` package: thinking, a tool, a count, a stream."""

import os
import sys

import anthropic

client, model = anthropic.Anthropic(), os.environ["ANTHROPIC_MODEL"]
add = {
    "name": "add",
    "input_schema": {"type": "object", "properties": {"a": {}, "b": {}}},
}
messages = [{"role": "user", "content": sys.stdin.read()}]
counted = client.messages.count_tokens(model=model, messages=messages, tools=[add]).input_tokens
while True:
    with client.messages.stream(
        model=model, max_tokens=64, messages=messages, tools=[add], thinking={"type": "adaptive"}
    ) as stream:
        reply = stream.get_final_message()
    if len(messages) == 1:
        assert reply.usage.input_tokens == counted
    calls = [block for block in reply.content if block.type == "tool_use"]
    if not calls or len(messages) > 8:
        break
    results = [
        {"type": "tool_result", "tool_use_id": it.id, "content": str(sum(it.input.values()))}
        for it in calls
    ]
    messages.append({"role": "assistant", "content": reply.content})
    messages.append({"role": "user", "content": results})
print("".join(block.text for block in reply.content if block.type == "text"))
