"""Where the check plays: a real environment process, the orchestrator's client, a scripted engine.

The engine says what the probe says. Everything that is written lies in one folder, which is also
the place of temporary files of all that is started here.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from renderers import Qwen3RendererConfig
from verifiers.v1.configs.client import TrainClientConfig
from verifiers.v1.episode import WireEpisode

from gradus.config import SamplingConfig
from gradus.conformance.probes import Probe
from gradus.conformance.reading import ChildModule, Subject
from gradus.conformance.transcript import ByteTokenizer
from gradus.environments.containers import engines_of
from gradus.errors import EnvironmentFailure
from gradus.files import read_json, write_atomically, write_json
from gradus.orchestrator.play.agents import mark_trainable
from gradus.orchestrator.play.environment import (
    EnvironmentAddress,
    EnvironmentClient,
    EpisodeSettings,
)
from gradus.orchestrator.play.episode_check import find_failure
from gradus.orchestrator.types import EpisodeFailed, Failure, Task
from gradus.processes.table import ProcessEntry, descendants, is_alive, living_processes
from gradus.run.paths import RunDirectory
from gradus.testing.engine import ScriptedEngine
from gradus.testing.engine_script import GenerateCall, Reply
from gradus.wire.inference import INFERENCE_TOKEN_VARIABLE

EPISODE_SECONDS = 100.0
"""After which an episode of the check is given up."""
START_SECONDS = 120.0
LEAVE_SECONDS = 5.0
"""How long what an episode started may outlive it."""
MAX_TOKENS = 400_000
"""Of one reply, and ten times as many in the context: no limit of the model is checked here."""
_PAUSE_SECONDS = 0.02
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Played:
    """One episode of the check."""

    probe: Probe
    episode: WireEpisode | None
    failure: Failure | None
    seconds: float
    calls: list[GenerateCall] = field(default_factory=list)

    @property
    def rewards(self) -> dict[str, float]:
        """Agent → reward, of the traces that have one."""
        traces = [] if self.episode is None else self.episode.traces
        return {t.agent.name: t.reward for t in traces if any(t.rewards.values())}

    @property
    def trained_rewards(self) -> dict[str, float]:
        """The same of the agents that train."""
        traces = [] if self.episode is None else self.episode.traces
        trained = {trace.agent.name for trace in traces if trace.agent.trainable}
        return {name: reward for name, reward in self.rewards.items() if name in trained}


class _ProbeEngine(ScriptedEngine):
    """Says what the stage's probe says, each conversation from its own first turn on."""

    stage: Stage

    def answer_to(self, call: GenerateCall) -> Reply:
        return self.stage.reply_to(call)


class Stage:
    """Owns the environment process, the engine and the client of one subject.

    async with Stage(subject, folder) as stage:
        task = await stage.task(0)
        played = await stage.play(task, Probe("empty reply", [""]))
    """

    def __init__(self, subject: Subject, folder: Path, seen: Mapping[str, Any]) -> None:
        """`seen` is the reader's report."""
        self.subject = subject
        self.agents: dict[str, bool] = {
            name: is_trained and name not in subject.untrained
            for name, is_trained in seen["agents"].items()
        }
        """Role → whether it trains."""
        self.fixed: dict[str, Probe] = {}
        """Role → what it says in every episode, whatever is probed."""
        self.has_container = bool(engines_of(seen["settings"]))
        """Whether what an episode's commands change is gone with its container."""
        self.temporary = folder / "t"
        self.temporary.mkdir(parents=True)
        self.tokenizer = ByteTokenizer()
        self._folder = folder
        self._run = RunDirectory(folder / "run")
        self._run.secrets.mkdir(parents=True)
        token = secrets.token_hex(32)
        write_atomically(self._run.inference_token, token.encode(), mode=0o600)
        self.engine = _ProbeEngine(data_token=token, max_length_tokens=10 * MAX_TOKENS)
        self.engine.stage = self
        update = {
            "run_dir": str(self._run.root),
            "verifiers": _marked(seen["settings"], self.agents),
            # The reader ran it.
            "prepare": [],
        }
        self._config = subject.process.model_copy(update=update)
        self._probe = Probe("nothing", [""])
        self._turns: dict[str, int] = {}
        self._process: ChildModule | None = None
        self._client: EnvironmentClient | None = None
        self._seen: dict[int, ProcessEntry] = {}

    # ------------------------------------------------------------------ life cycle

    async def __aenter__(self) -> Self:
        """Start everything, and wait until episodes can be played; EnvironmentFailure if never."""
        self.tokenizer.save(self._folder / "model")
        await self.engine.start()
        file = self._run.config / f"{self._config.process}.json"
        write_json(file, self._config.model_dump(mode="json"))
        self._process = ChildModule(
            self.subject,
            *("gradus.cli.main", "env-server", "@", str(file)),
            temporary=self.temporary,
            log=self._folder / "env-server.log",
        )
        ready = self._run.ready_file(self._config.process)
        try:
            async with asyncio.timeout(START_SECONDS):
                while not ready.exists():
                    if self._process.exit_code is not None:
                        raise EnvironmentFailure(f"its process ended, {self._process.said()}")
                    await asyncio.sleep(_PAUSE_SECONDS)
        except (TimeoutError, EnvironmentFailure) as error:
            await self.close()
            if isinstance(error, EnvironmentFailure):
                raise
            raise EnvironmentFailure(f"it was not ready in {START_SECONDS:g} s") from None
        where = read_json(ready)
        self._address = EnvironmentAddress(where["run_address"], None)
        self._client = EnvironmentClient(self._config.name, self._address, self.settings())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()
            self._client = None
        if self._process is not None:
            self.below()
            self._process.end()
        for entry in self._seen.values():
            if is_alive(entry.pid, entry.start_time):
                os.kill(entry.pid, signal.SIGKILL)
        await self.engine.close()

    # ------------------------------------------------------------------ play

    def settings(self, *, seconds: float = EPISODE_SECONDS) -> EpisodeSettings:
        """How episodes reach the scripted engine."""
        client = TrainClientConfig(
            base_url=self.engine.base_url,
            api_key_var=INFERENCE_TOKEN_VARIABLE,
            renderer=Qwen3RendererConfig(),
            renderer_model_name=str(self._folder / "model"),
        )
        sampling = SamplingConfig(temperature=1.0, top_p=1.0, max_completion_tokens=MAX_TOKENS)
        return EpisodeSettings(client, sampling, seconds)

    async def task(self, index: int) -> Task:
        assert self._client is not None
        return await self._client.task(index)

    async def play(
        self,
        task: Task,
        probe: Probe,
        *,
        settings: EpisodeSettings | None = None,
        seed: int = 7,
    ) -> Played:
        """One episode in which the model says what the probe says; others must not run."""
        self.say(probe)
        first_call = len(self.engine.calls)
        client = self._client
        if settings is not None:
            client = EnvironmentClient(self._config.name, self._address, settings)
        assert client is not None
        started = time.perf_counter()
        episode, failure = None, None
        try:
            episode = await client.run(task, version=0, seed=seed)
        except EpisodeFailed as error:
            failure = error.failure
        finally:
            if client is not self._client:
                await client.close()
        seconds = time.perf_counter() - started
        if episode is not None:
            failure = mark_trainable(episode, self.subject.untrained) or find_failure(
                episode, needs_tokens=settings is None
            )
        return Played(probe, episode, failure, seconds, self.engine.calls[first_call:])

    async def play_beside(self, task: Task) -> Played:
        """One more episode with what the model says now; others may run beside it."""
        assert self._client is not None
        started = time.perf_counter()
        episode, failure = None, None
        try:
            episode = await self._client.run(task, version=0, seed=7)
            failure = mark_trainable(episode, self.subject.untrained) or find_failure(episode)
        except EpisodeFailed as error:
            failure = error.failure
        return Played(self._probe, episode, failure, time.perf_counter() - started)

    def say(self, probe: Probe) -> None:
        self._probe = probe
        self._turns.clear()

    def reply_to(self, call: GenerateCall) -> Reply:
        """What the probe says to one model call."""
        session = call.session_id or ""
        turn = self._turns.get(session, 0)
        self._turns[session] = turn + 1
        role = call.cache_salt or ""
        user = self.tokenizer.last_user_text(call.prompt_token_ids)
        said = self.fixed.get(role, self._probe).say(turn, user, role)
        return Reply(self.tokenizer.encode(said))

    # ------------------------------------------------------------------ processes and files

    def below(self) -> list[ProcessEntry]:
        if self._process is None:
            return []
        found = descendants(self._process.pid, living_processes())
        self._seen.update({entry.pid: entry for entry in found})
        return found

    async def left(self, known: Sequence[ProcessEntry]) -> list[str]:
        """Names of processes that are new and do not end soon."""
        before = {(entry.pid, entry.start_time) for entry in known}
        deadline = time.monotonic() + LEAVE_SECONDS
        while True:
            new = [e for e in self.below() if (e.pid, e.start_time) not in before]
            if not new or time.monotonic() > deadline:
                return [command_of(entry.pid) for entry in new]
            await asyncio.sleep(_PAUSE_SECONDS)

    def files(self) -> set[str]:
        """What lies in the folder of temporary files, the sockets left out."""
        return {p.name for p in self.temporary.iterdir() if not p.name.startswith("gradus-env-")}

    def cpu_seconds(self) -> float:
        """CPU time of the environment process and all that lives below it."""
        total = 0
        assert self._process is not None
        for pid in (self._process.pid, *(entry.pid for entry in self.below())):
            try:
                stat = Path(f"/proc/{pid}/stat").read_text()
            except OSError:
                continue
            total += sum(int(ticks) for ticks in stat.rpartition(")")[2].split()[11:15])
        return total / _TICKS_PER_SECOND


def _marked(settings: Mapping[str, Any], roles: Iterable[str]) -> dict[str, Any]:
    """Settings in which each role's requests carry its name, where a run writes the version."""
    marked = dict(settings)
    for role in roles:
        seat = marked.get(role, {})
        marked[role] = {**seat, "sampling": {**seat.get("sampling", {}), "cache_salt": role}}
    return marked


def command_of(pid: int) -> str:
    """How a process was started, and its number."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        words = []
    command = " ".join(os.fsdecode(word) for word in words if word)
    return f"{command[:80] or 'unknown'} (pid {pid})"


def record_bytes(episode: WireEpisode) -> int:
    return len(json.dumps(episode.model_dump(mode="json"), default=str).encode())
