"""An agent on the openai package: a tool, a stream, and four calls at once.

Nothing in it knows of gradus: the package reads OPENAI_BASE_URL and OPENAI_API_KEY.
"""

import asyncio
import sys

import openai

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two whole numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        },
    },
}


async def main() -> None:
    """Read the task, ask the model in three ways, write what it said."""
    client = openai.AsyncOpenAI()
    messages = [{"role": "user", "content": sys.stdin.read()}]

    first = await client.chat.completions.create(model="any", messages=messages, tools=[ADD])
    reply = first.choices[0].message
    messages.append(reply.model_dump(exclude_none=True))
    messages += [
        {"role": "tool", "tool_call_id": call.id, "content": "3"} for call in reply.tool_calls or []
    ]

    stream = await client.chat.completions.create(
        model="any", messages=messages, tools=[ADD], stream=True
    )
    text = ""
    async for chunk in stream:
        text += chunk.choices[0].delta.content or ""

    answers = await asyncio.gather(
        *(
            client.chat.completions.create(
                model="any", messages=[{"role": "user", "content": f"{number}: {text}"}]
            )
            for number in range(4)
        )
    )
    print(text, *(answer.choices[0].message.content for answer in answers), sep="\n")


asyncio.run(main())
