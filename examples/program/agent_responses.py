"""OpenAI's Responses by the `openai` package: a tool, an earlier reply by its id, a stream."""

import json
import os
import sys

import openai

client, model = openai.OpenAI(), os.environ["OPENAI_MODEL"]
add = {
    "type": "function",
    "name": "add",
    "parameters": {"type": "object", "properties": {"a": {}, "b": {}}},
}
task = sys.stdin.read()
first = client.responses.create(model=model, input=task, tools=[add])
outputs = []
for item in first.output:
    if item.type == "function_call":
        total = sum(json.loads(item.arguments).values())
        output = {"type": "function_call_output", "call_id": item.call_id, "output": str(total)}
        outputs.append(output)
with client.responses.stream(
    model=model,
    input=outputs or "Go on.",
    tools=[add],
    previous_response_id=first.id,
) as stream:
    for event in stream:
        if event.type == "response.output_text.delta":
            print(event.delta, end="")
    print(f"\n{stream.get_final_response().usage.output_tokens} tokens", file=sys.stderr)
