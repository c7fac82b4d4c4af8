"""One environment process as the orchestrator sees it: its tasks, its episodes, its life."""

from __future__ import annotations

import asyncio
import functools
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import msgspec
import zmq
from pydantic import BaseModel, ValidationError
from verifiers.v1.configs.agent import WireAgentConfig
from verifiers.v1.configs.client import EvalClientConfig, TrainClientConfig
from verifiers.v1.episode import WireEpisode
from verifiers.v1.serve.client import EnvClient
from verifiers.v1.serve.types import HealthRequest, HealthResponse
from verifiers.v1.types import SamplingConfig as WireSampling

from gradus.config import EvaluationSourceConfig, ModelConfig, SamplingConfig, SourceConfig
from gradus.errors import DeadlineError, EnvironmentFailure, ProtocolError, first_line
from gradus.log import get_logger
from gradus.orchestrator.play.episode_check import bound_info
from gradus.orchestrator.play.renderer import known_renderer
from gradus.orchestrator.traces import CUT, keep_images
from gradus.orchestrator.types import EpisodeFailed, Failure, Task
from gradus.run.model_files import reads_images
from gradus.run.paths import Purpose, RunDirectory, environment_process
from gradus.run.ready import EnvironmentReady, read_ready, wait_for_exit
from gradus.wire.episode import LOST, InfoRequest, TaskReply, TaskRequest, TaskSetInfo
from gradus.wire.images import ImageStore
from gradus.wire.inference import INFERENCE_TOKEN_VARIABLE, SERVED_MODEL_NAME, salt_of

log = get_logger(__name__)
R = TypeVar("R", bound=BaseModel)
ANSWER_SECONDS = 60.0
ASK_SECONDS = 5.0
"""Between two looks whether a process answers."""
SILENT_SECONDS = 10.0
"""One that answers nothing for so long gets no episodes while another of its source answers."""
MAX_AGENT_CONFIGS = 64
"""Kept at once; an environment may make one for each of its tasks."""
MAX_EPISODE_BYTES = 256 * 1024**2
"""Of all that an episode sends: turns, metrics, tools, info."""
MAX_EPISODE_MESSAGES = 20_000
"""An episode sends one with each turn, and a few more."""
MAX_MESSAGE_BYTES = 1024**3
"""A connection that brings a longer one is closed."""
SHORT_EPISODE_TOKENS = 20_000
"""Parsing an episode of up to so many tokens blocks the event loop for about a millisecond."""


class Environment(Protocol):
    """What the orchestrator needs of an environment."""

    async def info(self) -> TaskSetInfo: ...

    async def task(self, index: int) -> Task: ...

    async def run(self, task: Task, *, version: int, seed: int | None = None) -> WireEpisode:
        """Play one episode on the policy as it is served; EpisodeFailed when none comes back.

        With a `seed`, every model call asks the engine to sample from it.

        Cancelling the call also gives up the episode inside the environment.
        """

    async def watch(self) -> None:
        """Never returns; EnvironmentFailure when the process ends or cannot play."""

    async def close(self) -> None: ...


@dataclass(frozen=True)
class EnvironmentAddress:
    """Where an environment process listens."""

    run: str
    pid: int | None
    """None when the user started it."""


@dataclass(frozen=True)
class EpisodeSettings:
    """How the episodes of one source reach the policy."""

    client: TrainClientConfig | EvalClientConfig
    sampling: SamplingConfig
    deadline_seconds: float
    model: str = SERVED_MODEL_NAME
    """The `model` of every request."""
    has_cache_salt: bool = True
    """Whether the engine takes vLLM's `cache_salt`."""
    images: ImageStore | None = None
    """What keeps the images of episodes; None where the policy is known to read text alone."""

    def sampling_of(self, version: int, seed: int | None = None) -> WireSampling:
        """Sampling of one request; prefix caches of different versions never mix."""
        salt = {"cache_salt": salt_of(version)} if self.has_cache_salt else {}
        seeded = {} if seed is None else {"seed": seed}
        return WireSampling(
            temperature=self.sampling.temperature,
            top_p=self.sampling.top_p,
            max_tokens=self.sampling.max_completion_tokens,
            **salt,
            **{**seeded, **self.sampling.extra_body},
        )


class ConnectionLost(EnvironmentFailure):
    """The process that was asked is gone; another may take its place."""


class TaskRefused(EnvironmentFailure):
    """The environment lives and cannot give what was asked, such as this one task."""


class AgentConfigs:
    """The configs of agents, parsed once: every trace of a seat brings the same, and parsing it
    took half the time of a short episode. Traces share them, so nothing may write into one."""

    def __init__(self) -> None:
        self._parsed: dict[bytes, WireAgentConfig] = {}

    def parsed(self, config: Any) -> Any:
        """The config of a trace's record; what is not a config stays for the trace to refuse."""
        if not isinstance(config, dict):
            return config
        key = msgspec.msgpack.encode(config)
        found = self._parsed.get(key)
        if found is None:
            if len(self._parsed) == MAX_AGENT_CONFIGS:
                self._parsed.clear()
            found = self._parsed[key] = WireAgentConfig.model_validate(config)
        return found


class _EpisodeSocket(EnvClient):
    """verifiers' client, which parses every episode on a thread; for a short one the hop costs four
    times the work (0.4 ms of 1.4 ms per episode), so it is parsed in place."""

    def __init__(self, address: str, images: ImageStore | None) -> None:
        """`images` keeps those of episodes; None leaves them in the messages."""
        super().__init__(address)
        self._images = images
        # Holds for connections that are made after it.
        self.socket.disconnect(address)
        self.socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self.socket.connect(address)
        self._configs = AgentConfigs()

    async def _request(
        self, request: Any, response_type: Any, timeout: Any = None, on_delta: Any = None
    ) -> Any:
        """Gives an episode up that sends too much, as if its caller had: the worker ends it too."""
        size = num_messages = 0
        asking = asyncio.current_task()
        assert asking is not None, "awaited in a task"

        def count(data: bytes) -> None:
            nonlocal size, num_messages
            was_too_large = is_too_large()
            size, num_messages = size + len(data), num_messages + 1
            if not is_too_large():
                on_delta(data)
            elif not was_too_large:
                asking.cancel()

        def is_too_large() -> bool:
            return size > MAX_EPISODE_BYTES or num_messages > MAX_EPISODE_MESSAGES

        try:
            return await super()._request(request, response_type, timeout, on_delta and count)
        except asyncio.CancelledError:
            if not is_too_large() or asking.uncancel():
                raise
            raise EpisodeFailed(
                Failure(
                    "episode_too_large",
                    f"the episode sent {num_messages:,} messages with {size:,} bytes; at most "
                    f"{MAX_EPISODE_MESSAGES:,} and {MAX_EPISODE_BYTES:,} are taken: bound its "
                    "turns (agent.max_turns) or what it keeps in `info`",
                )
            ) from None

    async def _validate_episode(self, record: dict[str, Any]) -> WireEpisode:
        num_tokens = sum(
            len(node["token_ids"]) for trace in record["traces"] for node in trace["nodes"]
        )
        for trace in record["traces"]:
            info = trace.get("info") or {}
            trace["info"] = bound_info({key: info[key] for key in info if key != CUT})
            agent = trace.get("agent") or {}
            if "config" in agent:
                agent["config"] = self._configs.parsed(agent["config"])
        if self._images is not None:
            await asyncio.to_thread(keep_images, record, self._images)
        if num_tokens > SHORT_EPISODE_TOKENS:
            return cast("WireEpisode", await super()._validate_episode(record))
        return cast("WireEpisode", WireEpisode.model_validate(record))

    def fail_all(self, reason: str) -> None:
        """End every request: no reply will come."""
        for request_id in list(self._pending):
            future = self._pending.pop(request_id)
            if not future.done():
                future.set_exception(ConnectionLost(reason))


class EnvironmentClient:
    """Owns the connections to one environment process."""

    def __init__(self, name: str, address: EnvironmentAddress, settings: EpisodeSettings) -> None:
        """Must be called inside the running event loop."""
        self.answers = True
        """Whether its event loop ran when that was last looked at."""
        self._name = name
        self._pid = address.pid
        self._settings = settings
        self._socket = _EpisodeSocket(address.run, settings.images)

    async def info(self) -> TaskSetInfo:
        return await self._ask(InfoRequest(), TaskSetInfo)

    async def task(self, index: int) -> Task:
        """One task; TaskRefused when the environment lives and cannot give it."""
        try:
            reply = await self._ask(TaskRequest(index=index), TaskReply)
        except DeadlineError as error:
            # Without an answer to this either, the environment hangs, not the task.
            await self._ask(HealthRequest(), HealthResponse)
            raise TaskRefused(f"{error}") from error
        except ProtocolError as error:
            raise TaskRefused(f"{error}") from error
        return Task(reply.task_data, reply.key)

    async def _ask(self, request: InfoRequest | TaskRequest | HealthRequest, kind: type[R]) -> R:
        try:
            return cast("R", await self._socket._request(request, kind, ANSWER_SECONDS))
        except TimeoutError as error:
            raise DeadlineError(
                f"environment {self._name!r} did not answer {request.method!r} in "
                f"{ANSWER_SECONDS:g} s; see its log"
            ) from error
        except RuntimeError as error:
            raise TaskRefused(f"environment {self._name!r}: {error}") from error
        except (ValueError, TypeError) as error:
            raise ProtocolError(
                f"environment {self._name!r} sent no valid {kind.__name__}: "
                f"{first_line(str(error))}"
            ) from error

    async def run(self, task: Task, *, version: int, seed: int | None = None) -> WireEpisode:
        """Play one episode; after the deadline it is cancelled and failed as "episode_timeout"."""
        seconds = self._settings.deadline_seconds
        try:
            async with asyncio.timeout(seconds):
                return await self._socket.run(
                    self._settings.client,
                    self._settings.model,
                    self._settings.sampling_of(version, seed),
                    task.task_data,
                )
        except ConnectionLost as error:
            raise EpisodeFailed(Failure(LOST, str(error))) from error
        except TimeoutError as error:
            text = f"the episode did not end in timeout.episode_seconds = {seconds:g}"
            raise EpisodeFailed(Failure("episode_timeout", text)) from error
        except ValidationError as error:
            raise EpisodeFailed(Failure("invalid_episode", _one_line(error))) from error
        # Whatever else the assembly of a reply raises comes from bytes that we did not write.
        except (RuntimeError, ValueError, TypeError, KeyError, AssertionError) as error:
            raise EpisodeFailed(_refused_request(error)) from error

    async def watch(self) -> None:
        """Never returns; EnvironmentFailure when the process ends.

        waits for: the end of the process, its answers      unblocked by: the kernel, time
        """
        async with asyncio.TaskGroup() as watches:
            watches.create_task(self._watch_answers())
            if self._pid is not None:
                watches.create_task(self._watch_process(self._pid))

    def lose(self, reason: str) -> None:
        """The process is gone: episodes fail as "EnvironmentLost", requests as ConnectionLost."""
        self._socket.fail_all(reason)

    async def close(self) -> None:
        """Close the connection, after telling the environment which episodes are cancelled."""
        await self._socket.close()

    async def _watch_answers(self) -> None:
        """Note whether it answers. One that the user started is lost when it does not; that of a
        launch is the launcher's to end."""
        silent_since = None
        while True:
            try:
                await self._socket._request(HealthRequest(), HealthResponse, SILENT_SECONDS)
                if not self.answers:
                    log.info("environment %r answers again", self._name)
                self.answers, silent_since = True, None
            except TimeoutError as error:
                now = time.monotonic()
                silent_since = silent_since or now - SILENT_SECONDS
                if self.answers:
                    log.warning("environment %r (pid %s) answers nothing", self._name, self._pid)
                self.answers = False
                if self._pid is None and now - silent_since >= ANSWER_SECONDS:
                    raise EnvironmentFailure(
                        f"environment {self._name!r} did not answer in {ANSWER_SECONDS:g} s"
                    ) from error
            await asyncio.sleep(ASK_SECONDS)

    async def _watch_process(self, pid: int) -> None:
        await wait_for_exit(pid)
        raise EnvironmentFailure(
            f"environment process {self._name!r} (pid {pid}) ended while episodes were needed; "
            f"its log {self._name}.log in logs/envs/ says why"
        )


def find_environment(
    run_dir: RunDirectory,
    source: SourceConfig | EvaluationSourceConfig,
    purpose: Purpose = "train",
    number: int = 0,
) -> EnvironmentAddress:
    """Where a process of a source listens: its ready file, or the user's `address`."""
    if source.address is None:
        process = environment_process(source.name, purpose, number)
        ready = read_ready(run_dir, process, EnvironmentReady)
        return EnvironmentAddress(ready.run_address, ready.pid)
    return EnvironmentAddress(source.address, pid=None)


image_store = functools.cache(ImageStore)
"""One for each folder, so that it knows its size."""


def build_settings(
    source: SourceConfig | EvaluationSourceConfig,
    model: ModelConfig,
    base_url: str,
    images: Path | None = None,
) -> EpisodeSettings:
    """How the episodes of `source` reach the policy at `base_url`; refuses unknown renderers.

    `model` is the one that `settle_renderer` returned; otherwise each worker chooses by name.
    `images` is the folder of what it is shown, if it reads images.
    """
    client = TrainClientConfig(
        base_url=base_url,
        api_key_var=INFERENCE_TOKEN_VARIABLE,
        renderer=known_renderer(model),
        renderer_model_name=model.tokenizer or model.name,
    )
    store = image_store(images) if images is not None and reads_images(model.name) else None
    seconds = source.timeout.episode_seconds
    return EpisodeSettings(client, source.sampling, seconds, images=store)


def build_endpoint_settings(
    source: EvaluationSourceConfig, *, model: str, base_url: str, api_key_var: str, images: Path
) -> EpisodeSettings:
    """How the episodes of `source` reach a model behind any OpenAI-compatible endpoint, which may
    read images."""
    return EpisodeSettings(
        EvalClientConfig(base_url=base_url, api_key_var=api_key_var),
        source.sampling,
        source.timeout.episode_seconds,
        model=model,
        has_cache_salt=False,
        images=image_store(images),
    )


def _refused_request(error: Exception) -> Failure:
    """The server's text is "<error type>: <message>"."""
    kind, separator, message = str(error).partition(": ")
    if isinstance(error, RuntimeError) and separator and kind.isidentifier():
        return Failure(kind, message)
    return Failure(type(error).__name__, str(error))


def _one_line(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
