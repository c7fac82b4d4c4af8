"""Debates inside a test: the environment on a scripted engine, member by member."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from renderers import Qwen3RendererConfig
from transformers import PreTrainedTokenizerFast

from gradus.testing.engine import ScriptedEngine
from gradus.testing.engine_script import GenerateCall, Reply
from gradus.wire.control_tokens import MarkedTokenizer

TOKEN = "data-token"
ROLES = ("debater_a", "debater_b", "consultant", "opponent", "judge")
SEAT = {
    "harness": {"id": "gradus-chat", "max_retries": 0, "max_model_calls": 2},
    "runtime": {"type": "subprocess"},
}
Script = dict[str, list[str]]
"""By member, what it says in each of its turns; the last text again and again."""
DEFAULT: Script = {
    "debater_a": ["I say <answer>A</answer>"],
    "debater_b": ["<thinking>hm</thinking>I say <answer>B</answer>"],
    "consultant": ["Take <answer>A</answer>"],
    "judge": ["<decision>debater_b</decision>"],
}


class MemberEngine(ScriptedEngine):
    """Answers each member by its script; it knows them by the first line of their prompt."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, script: Script, **kwargs: Any) -> None:
        super().__init__(data_token=TOKEN, **{"max_length_tokens": 20_000, **kwargs})
        self.by_member: dict[str, list[GenerateCall]] = {}
        self._tokenizer = tokenizer
        self._script = {**DEFAULT, **script}

    def answer_to(self, call: GenerateCall) -> Reply:
        """The member's next text."""
        prompt = self._tokenizer.decode(call.prompt_token_ids)
        member = member_of(prompt)
        self.by_member.setdefault(member, []).append(call)
        texts = self._script[member]
        said = prompt.count("<|im_start|>assistant") - 1
        text = texts[min(said, len(texts) - 1)]
        return Reply(MarkedTokenizer(self._tokenizer).encode(text, add_special_tokens=False))


def member_of(prompt: str) -> str:
    """Whose prompt it is, by the shipped packs."""
    for member in ("debater_a", "debater_b"):
        if f"You are {member} " in prompt:
            return member
    return "consultant" if "You are a consultant" in prompt else "judge"


@dataclass
class Debates:
    """One environment object and the engine behind it."""

    environment: vf.Env[Any]
    context: vf.ModelContext
    engine: MemberEngine
    tasks: list[vf.Task[Any, Any, Any]] = field(default_factory=list)

    async def play(self, index: int = 0, **changed: Any) -> vf.Episode:
        """One episode of a task, its data changed."""
        task = self.tasks[index].with_data(**changed)
        return await self.environment.run_episode(task, self.context)

    async def play_many(self, num: int) -> list[vf.Episode]:
        """So many episodes at once."""
        return await asyncio.gather(*(self.play(i % len(self.tasks)) for i in range(num)))


@dataclass
class Room:
    """Opens environments on one tokenizer."""

    model: Path
    tokenizer: PreTrainedTokenizerFast

    @asynccontextmanager
    async def open(
        self,
        script: Script | None = None,
        *,
        config: dict[str, Any] | None = None,
        seats: dict[str, dict[str, Any]] | None = None,
        renderer: Qwen3RendererConfig | None = None,
        max_length_tokens: int = 20_000,
    ) -> AsyncIterator[Debates]:
        """An environment that plays; `seats` changes single roles."""
        roles = {role: {**SEAT, **(seats or {}).get(role, {})} for role in ROLES}
        written = {"taskset": {"id": "gradus-debate", "num_tasks": 8}, **roles, **(config or {})}
        environment = vf.load_environment(vf.resolve_env_config(written))
        engine = MemberEngine(self.tokenizer, script or {}, max_length_tokens=max_length_tokens)
        async with engine, environment.serving():
            client = vf.TrainClientConfig(
                base_url=engine.base_url,
                api_key_var="GRADUS_INFERENCE_TOKEN",
                renderer=renderer or Qwen3RendererConfig(thinking_retention="all"),
                renderer_model_name=str(self.model),
            )
            sampling = vf.SamplingConfig(temperature=1.0, max_tokens=400)
            context = vf.ModelContext(model="policy", client=client, sampling=sampling)
            yield Debates(environment, context, engine, list(environment.taskset))


def trace_of(episode: vf.Episode, seat: str) -> vf.Trace:
    """The trace of a seat."""
    (found,) = [trace for trace in episode.traces if trace.info.get("seat") == seat]
    return found
