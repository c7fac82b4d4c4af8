"""An agent of a framework: `pip install openai-agents` into an environment of its own.

The framework asks by OpenAI's Responses, its default. Its traces would go to OpenAI.
"""

import os
import sys

import agents

agents.set_tracing_disabled(True)


@agents.function_tool
def add(a: int, b: int) -> int:
    """Add two whole numbers."""
    return a + b


agent = agents.Agent(
    name="adder", instructions="Use your tool.", tools=[add], model=os.environ["OPENAI_MODEL"]
)
print(agents.Runner.run_sync(agent, sys.stdin.read()).final_output)
