"""Agents of other people through the task set `program`: what they ask, and what of it trains.

Each lives in an environment of its own below a folder F: `python -m venv F/oai`, `F/oai/bin/pip
install openai-agents`, `npm install --prefix F/codex @openai/codex` and so on; those that are not
there are left out. A scripted engine with a real tokenizer and renderer stands for the model: it
calls a tool
of the agent until a result came, then says the last word. Exact means that the ids which the
engine saw and gave are those of the trace, token by token.

    python benchmarks/agents.py F --output benchmarks/results/agents.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from transformers import PreTrainedTokenizerFast

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))
from policy_talks import TOKEN, path_of, policy_seat

from gradus.environments.verifiers.table import ProcessSettings, apply
from gradus.testing.engine import ScriptedEngine
from gradus.testing.engine_script import Reply
from gradus.testing.tiny_model import build_tiny_tokenizer
from gradus_program.taskset import ProgramConfig, ProgramTaskset

OPENAI_AGENTS = """
import os, sys, agents
agents.set_tracing_disabled(True)
@agents.function_tool
def add(a: int, b: int) -> int:
    "Add two whole numbers."
    return a + b
model = os.environ["OPENAI_MODEL"]
agent = agents.Agent(name="adder", instructions="Use your tool.", tools=[add], model=model)
STREAM
"""
WHOLE = "print(agents.Runner.run_sync(agent, sys.stdin.read()).final_output)"
STREAMED = """
import asyncio
async def main():
    run = agents.Runner.run_streamed(agent, sys.stdin.read())
    async for event in run.stream_events(): pass
    print(run.final_output)
asyncio.run(main())
"""
MCP = """
import asyncio, os, socket, subprocess, sys, time, agents, agents.mcp
SERVER = '''
import sys
try:
    from mcp.server.fastmcp import FastMCP as Server
except ImportError:
    from mcp.server import MCPServer as Server
server = Server("sums")
@server.tool()
def add(a: int, b: int) -> int:
    "Add two whole numbers."
    return a + b
if sys.argv[1] == "stdio":
    server.run()
else:
    import uvicorn
    uvicorn.run(server.streamable_http_app(), port=int(sys.argv[1]), log_level="error")
'''
agents.set_tracing_disabled(True)
async def main():
    model, task = os.environ["OPENAI_MODEL"], sys.stdin.read()
    async with SERVED as server:
        agent = agents.Agent(name="adder", mcp_servers=[server], model=model)
        print((await agents.Runner.run(agent, task)).final_output)
START
asyncio.run(main())
"""
STDIO = """agents.mcp.MCPServerStdio(
        {"command": sys.executable, "args": ["-c", SERVER, "stdio"]})"""
HTTP = """agents.mcp.MCPServerStreamableHttp({"url": f"http://127.0.0.1:{port}/mcp"})"""
START = """
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
subprocess.Popen([sys.executable, "-c", SERVER, str(port)])
for _ in range(200):
    with socket.socket() as tried:
        if tried.connect_ex(("127.0.0.1", port)) == 0:
            break
    time.sleep(0.1)
"""
ANTHROPIC = """
import os, sys, anthropic
client = anthropic.Anthropic()
@anthropic.beta_tool
def add(a: int, b: int) -> str:
    "Add two whole numbers."
    return str(a + b)
runner = client.beta.messages.tool_runner(
    model=os.environ["ANTHROPIC_MODEL"], max_tokens=2000, tools=[add],
    thinking={"type": "enabled", "budget_tokens": 1024},
    messages=[{"role": "user", "content": sys.stdin.read()}])
for message in runner: pass
print(message.content[-1].text)
"""
PYDANTIC_AI = """
import os, sys, pydantic_ai
agent = pydantic_ai.Agent(KIND + ":" + os.environ["OPENAI_MODEL"], instructions="Use your tool.")
@agent.tool_plain
def add(a: int, b: int) -> int:
    "Add two whole numbers."
    return a + b
print(agent.run_sync(sys.stdin.read()).output)
"""
SMOLAGENTS = """
import os, sys, smolagents
@smolagents.tool
def add(a: int, b: int) -> int:
    '''Add two whole numbers.

    Args:
        a: one
        b: another
    '''
    return a + b
model = smolagents.OpenAIServerModel(os.environ["OPENAI_MODEL"])
print(smolagents.ToolCallingAgent(tools=[add], model=model, max_steps=3).run(sys.stdin.read()))
"""
LANGGRAPH = """
import os, sys
from langchain.agents import create_agent
from langchain.chat_models import init_chat_model
def add(a: int, b: int) -> int:
    "Add two whole numbers."
    return a + b
model = init_chat_model(os.environ["OPENAI_MODEL"], model_provider="PROVIDER")
agent = create_agent(model, [add])
print(agent.invoke({"messages": [("user", sys.stdin.read())]})["messages"][-1].content)
"""
AGNO = """
import os, sys
from agno.agent import Agent
from agno.models.openai import OpenAIResponses
def add(a: int, b: int) -> int:
    "Add two whole numbers."
    return a + b
agent = Agent(model=OpenAIResponses(id=os.environ["OPENAI_MODEL"]), tools=[add])
print(agent.run(sys.stdin.read()).content)
"""
LLAMA_INDEX = """
import asyncio, os, sys
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.llms.openai_like import OpenAILike
def add(a: int, b: int) -> int:
    "Add two whole numbers."
    return a + b
async def main():
    llm = OpenAILike(
        model=os.environ["OPENAI_MODEL"], is_chat_model=True, is_function_calling_model=True)
    print(await FunctionAgent(tools=[add], llm=llm).run(sys.stdin.read()))
asyncio.run(main())
"""
OPENENV = """
import os, socket, subprocess, sys, time
from openai import OpenAI
from openenv.core.generic_client import GenericEnvClient
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
app = [sys.executable, "-m", "uvicorn", "server.app:app", "--port", str(port)]
server = subprocess.Popen(app, stdout=sys.stderr)
for _ in range(900):
    with socket.socket() as tried:
        if tried.connect_ex(("127.0.0.1", port)) == 0:
            break
    time.sleep(0.1)
task, model, rewards = sys.stdin.read(), OpenAI(), []
with GenericEnvClient(base_url=f"http://127.0.0.1:{port}").sync() as env:
    seen = env.reset()
    for _ in range(2):
        said = f"{task} {seen.observation}"
        reply = model.responses.create(model=os.environ["OPENAI_MODEL"], input=said)
        seen = env.step({"message": reply.output_text})
        rewards.append(seen.reward)
server.terminate()
print(rewards, seen.observation)
"""
NEMO_GYM = """
import json, os, pathlib, socket, subprocess, sys
here, bins = pathlib.Path.cwd(), pathlib.Path(sys.prefix, "bin")
os.environ["PATH"] = f"{bins}:{os.environ['PATH']}"
for server in ("resources_servers/example_single_tool_call",
               "responses_api_agents/simple_agent", "responses_api_models/openai_model"):
    (here / "venvs" / server).mkdir(parents=True)
    (here / "venvs" / server / ".venv").symlink_to(sys.prefix)
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    head = f"+head_server.port={free.getsockname()[1]}", "+head_server.host=127.0.0.1"
start = ["gym", "env", "start", "--resources-server", "example_single_tool_call",
         "--model-type", "openai_model", "--model", os.environ["OPENAI_MODEL"],
         "--model-url", os.environ["OPENAI_BASE_URL"], "--model-api-key",
         os.environ["OPENAI_API_KEY"], *head, "+skip_venv_if_present=true",
         f"+uv_venv_dir={here}/venvs"]
servers = subprocess.Popen(start, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
for line in servers.stdout:
    print(line, end="", file=sys.stderr)
    if "servers ready!" in line:
        break
tool = {"type": "function", "name": "get_weather", "strict": True, "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"],
    "additionalProperties": False}}
asked = {"input": [{"role": "user", "content": sys.stdin.read()}], "tools": [tool]}
(here / "task.jsonl").write_text(json.dumps({"responses_create_params": asked}))
subprocess.run(["gym", "eval", "run", "--no-serve", "--agent",
                "example_single_tool_call_simple_agent", "--input", "task.jsonl", "--output",
                "played.jsonl", *head, "+upload_rollouts_to_wandb=false"],
               stdout=sys.stderr, check=True)
(line,) = (here / "played.jsonl").read_text().splitlines()
played = json.loads(line)
print(played["reward"], played["response"]["output"][-1]["content"][0]["text"])
"""
HARBOR = """
import json, os, pathlib, subprocess, sys
from harbor.agents.base import BaseAgent
TOOL = {"type": "function", "name": "bash", "parameters": {
    "type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}}
class Asker(BaseAgent):
    @staticmethod
    def name():
        return "asker"
    def version(self):
        return "1"
    async def setup(self, environment):
        pass
    async def run(self, instruction, environment, context):
        import openai
        model, items = openai.AsyncOpenAI(), [{"role": "user", "content": instruction}]
        while True:
            asked = dict(model=self.model_name, input=items, tools=[TOOL])
            reply = await model.responses.create(**asked)
            items += reply.output
            calls = [it for it in reply.output if it.type == "function_call"]
            for call in calls:
                done = await environment.exec(json.loads(call.arguments)["command"])
                told = {"call_id": call.call_id, "output": done.stdout or ""}
                items.append({"type": "function_call_output", **told})
            if not calls:
                return
TASK = '''schema_version = "1.4"
[task]
name = "try/sum"
version = "1.0.0"
[environment]
docker_image = "localhost/gradus-sandbox:1"
'''
if __name__ == "__main__":
    task, bins = pathlib.Path("sum"), pathlib.Path(sys.prefix, "bin")
    for name, text in {
        "task.toml": TASK, "instruction.md": sys.stdin.read(), "environment/.keep": "",
        "tests/test.sh": "grep -qx 3 /tmp/sum && echo 1 > /logs/verifier/reward.txt",
    }.items():
        (task / name).parent.mkdir(parents=True, exist_ok=True)
        (task / name).write_text(text)
    os.environ |= {"PATH": f"{bins}:{os.environ['PATH']}", "PYTHONPATH": "."}
    run = ["harbor", "run", "-p", "sum", "-e", "podman", "--agent", "agent:Asker", "-y"]
    subprocess.run([*run, "-m", os.environ["OPENAI_MODEL"]], stdout=sys.stderr, check=True)
    (result,) = pathlib.Path("jobs").glob("*/*/result.json")
    print("3, reward", json.loads(result.read_text())["verifier_result"])
"""
AG2 = """
import asyncio, os, sys
from ag2 import Agent, tool
from ag2.config import OpenAIConfig
@tool
async def add(a: int, b: int) -> int:
    "Add two whole numbers."
    return a + b
model = OpenAIConfig(model=os.environ["OPENAI_MODEL"])
agent = Agent("adder", prompt="Use your tool.", config=model, tools=[add])
print(asyncio.run(agent.ask(sys.stdin.read())).body)
"""
ADD = {"name": "add", "arguments": {"a": 1, "b": 2}}
SUM = "Add 1 and 2 with your tool, then say the sum."


@dataclass(frozen=True)
class Agent:
    """An agent: its folder, how it is started, and the call that the model makes."""

    folder: str
    package: str
    command: list[str]
    call: dict[str, Any] | None = None
    env: dict[str, str] = field(default_factory=dict)
    is_set: str = "nothing"
    """What had to be set besides the two variables."""

    program: str = "pass"
    """What is in the file `agent.py`."""
    last: str = "It is 3."
    """What the model says once it has a result."""

    @property
    def bin(self) -> str:
        """Where its commands are."""
        return "node_modules/.bin" if self.folder in ("oc", "codex") else "bin"


def python(folder: str, package: str, program: str, is_set: str = "nothing", **env: str) -> Agent:
    """An agent in Python with one tool that adds."""
    return Agent(folder, package, ["BIN/python", "agent.py"], ADD, env, is_set, program=program)


CODEX = 'model_providers.g={name="g",base_url="URL",env_key="OPENAI_API_KEY",wire_api="responses"}'
AGENTS = {
    "OpenAI Agents SDK": python("oai", "openai-agents", OPENAI_AGENTS.replace("STREAM", WHOLE)),
    "OpenAI Agents SDK, streamed": python(
        "oai", "openai-agents", OPENAI_AGENTS.replace("STREAM", STREAMED)
    ),
    "OpenAI Agents SDK, MCP by stdio": python(
        "oai", "openai-agents", MCP.replace("SERVED", STDIO).replace("START", "")
    ),
    "OpenAI Agents SDK, MCP by HTTP": python(
        "oai", "openai-agents", MCP.replace("SERVED", HTTP).replace("START", START)
    ),
    "Anthropic SDK, thinking": python("ant", "anthropic", ANTHROPIC),
    "Pydantic AI, OpenAI": python(
        "pyd", "pydantic-ai-slim", PYDANTIC_AI.replace("KIND", "'openai-responses'")
    ),
    "Pydantic AI, Anthropic": python(
        "pyd", "pydantic-ai-slim", PYDANTIC_AI.replace("KIND", "'anthropic'")
    ),
    "Agno": python("agno", "agno", AGNO),
    "smolagents": python("smol", "smolagents", SMOLAGENTS),
    "LangGraph, OpenAI": python("lang", "langgraph", LANGGRAPH.replace("PROVIDER", "openai")),
    "LangGraph, Anthropic": python("lang", "langgraph", LANGGRAPH.replace("PROVIDER", "anthropic")),
    "LlamaIndex, streamed": python("llama", "llama-index-llms-openai-like", LLAMA_INDEX),
    "AG2": python("ag2", "ag2", AG2),
    "NeMo Gym, its servers and agent": Agent(
        "gym",
        "nemo-gym",
        ["BIN/python", "agent.py"],
        {"name": "get_weather", "arguments": {"city": "Rome"}},
        program=NEMO_GYM,
    ),
    "Harbor, a class of its kind in Podman": Agent(
        "harbor",
        "harbor",
        ["BIN/python", "agent.py"],
        {"name": "bash", "arguments": {"command": "echo 3 > /tmp/sum"}},
        is_set="podman-compose beside it",
        program=HARBOR,
    ),
    "OpenEnv, its first environment": Agent(
        "openenv",
        "openenv",
        [
            *("sh", "-c"),
            "BIN/openenv init first_env >&2 && cd first_env && exec BIN/python ../agent.py",
        ],
        program=OPENENV,
    ),
    "mini-swe-agent": Agent(
        "mswe",
        "mini-swe-agent",
        ["sh", "-c", 'exec BIN/mini -y --exit-immediately -m "openai/$OPENAI_MODEL" -t "$(cat)"'],
        {"name": "bash", "arguments": {"command": "echo 3"}},
        {
            "MSWEA_CONFIGURED": "true",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "MSWEA_SILENT_STARTUP": "1",
        },
        "that costs are not tracked",
        last='<tool_call>\n{"name": "bash", "arguments": {"command": '
        '"echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}}\n</tool_call>',
    ),
    "aider": Agent(
        "aider",
        "aider-chat",
        [
            *("sh", "-c"),
            'exec BIN/aider --model "openai/$OPENAI_MODEL" --message "$(cat)" --yes-always '
            "--no-git --no-analytics --no-check-update --no-show-model-warnings "
            "--no-show-release-notes",
        ],
        None,
        {},
        "no git, no analytics",
    ),
    "opencode": Agent(
        "oc",
        "opencode-ai",
        ["sh", "-c", 'exec BIN/opencode run -m "openai/gpt-5" "$(cat)"'],
        {"name": "bash", "arguments": {"command": "echo 3", "description": "Say 3"}},
        {"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1"},
        "a known model's name, no fetching",
    ),
    "Codex CLI": Agent(
        "codex",
        "@openai/codex",
        [
            *("sh", "-c"),
            "p=$(printf '%s' '" + CODEX + '\' | sed "s|URL|$OPENAI_BASE_URL|"); '
            'exec BIN/codex exec --skip-git-repo-check -s danger-full-access -c "$p" '
            '-c model_provider=g -c model="$OPENAI_MODEL" -c web_search=disabled -',
        ],
        {"name": "exec_command", "arguments": {"cmd": "echo 3"}},
        {},
        "its provider, no web search",
    ),
}


def version_of(agent: Agent, folder: Path) -> str:
    """The installed version."""
    if (folder / "node_modules").exists():
        card = folder / "node_modules" / agent.package / "package.json"
        return str(json.loads(card.read_text())["version"])
    code = f"import importlib.metadata as m; print(m.version({agent.package!r}))"
    command = [str(folder / "bin" / "python"), "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


async def play(agent: Agent, root: Path, model: Path) -> dict[str, Any]:
    """One episode of an agent, as a row of the table."""
    folder = root / agent.folder
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model)

    def says(prompt: list[int]) -> Reply:
        text = tokenizer.decode(prompt)
        wants = agent.call is not None and "<tools>" in text and "<tool_response>" not in text
        said = "<think>\nI see.\n</think>\n\n" + (
            f"I call.<tool_call>\n{json.dumps(agent.call)}\n</tool_call>" if wants else agent.last
        )
        return Reply(tokenizer.encode(said, add_special_tokens=False))

    words = [word.replace("BIN", str(folder / agent.bin)) for word in agent.command]
    rewards = Path(model, "rewards.py")
    rewards.write_text("def rate(output):\n    return float('3' in output)\n")
    program = Path(model, "agent.py")
    program.write_text(agent.program)
    keys = {"command": words, "files": [program], "tasks": [{"prompt": SUM}], "env": agent.env}
    config = ProgramConfig.model_validate({**keys, "reward": f"{rewards}:rate"})
    task = next(iter(ProgramTaskset(config)))
    row: dict[str, Any] = {"version": version_of(agent, folder), "set": agent.is_set}
    started = time.monotonic()
    async with ScriptedEngine(reply=says, data_token=TOKEN, max_length_tokens=10**6) as engine:
        seat = policy_seat(
            engine,
            model,
            {"id": "gradus-program"},
            sampling={"max_tokens": 2000},
            timeout={"rollout": 300},
        )
        player = vf.make_agent(seat)
        async with player:
            trace = await player.run(task)
    seen = sorted([*it.prompt_token_ids, *it.reply.token_ids] for it in engine.calls if it.reply)
    kept = sorted(path_of(trace, node) for node in trace.nodes if node.sampled)
    info = trace.info.get("program", {})
    row |= {
        "dialects": info.get("dialects"),
        "calls": len(engine.calls),
        "streams": info.get("num_streams"),
        "branches": trace.num_branches,
        "sampled": sum(len(it.reply.token_ids) for it in engine.calls if it.reply),
        "trained": sum(sum(node.mask) for node in trace.nodes),
        "exact": seen == kept,
        "lost_reasoning": info.get("lost_reasoning"),
        "dropped": info.get("dropped"),
        "refused": info.get("refused"),
        "exit_code": info.get("exit_code"),
        "reward": trace.reward,
        "seconds": round(time.monotonic() - started, 1),
        "errors": [str(error.message)[:300] for error in trace.errors],
    }
    if os.environ.get("SHOW"):
        print(info.get("stdout", "")[-3000:], info.get("stderr", "")[-3000:], sep="\n---\n")
    return row


async def measure(root: Path, only: str | None) -> dict[str, Any]:
    """A row for each agent that is installed."""
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        build_tiny_tokenizer(Path(folder))
        for name, agent in AGENTS.items():
            if (root / agent.folder).exists() and (only is None or only in name):
                rows[name] = await play(agent, root, Path(folder))
                print(name, json.dumps(rows[name]), flush=True)
    return rows


def main() -> None:
    """Play and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", type=Path)
    parser.add_argument("--only")
    parser.add_argument("--output", type=Path)
    chosen = parser.parse_args()
    os.environ["GRADUS_INFERENCE_TOKEN"] = TOKEN
    apply(ProcessSettings())
    rows = asyncio.run(measure(chosen.root.absolute(), chosen.only))
    if chosen.output:
        chosen.output.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
