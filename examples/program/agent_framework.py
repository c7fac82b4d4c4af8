"""An agent of a framework: `pip install openai-agents` into an environment of its own.

The framework asks for OpenAI's Responses unless it is told that the endpoint speaks chat
completions, as for every endpoint that is not OpenAI's.
"""

import os
import sys

import agents

agents.set_default_openai_api("chat_completions")
agents.set_tracing_disabled(True)


@agents.function_tool
def add(a: int, b: int) -> int:
    """Add two whole numbers."""
    return a + b


agent = agents.Agent(
    name="adder", instructions="Use your tool.", tools=[add], model=os.environ["OPENAI_MODEL"]
)
print(agents.Runner.run_sync(agent, sys.stdin.read()).final_output)
