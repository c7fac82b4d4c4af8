"""The harness `program`: it plays a task by running somebody else's program.

The program finds the model at OPENAI_BASE_URL. verifiers records every call as the engine saw it;
this harness runs the program, hears how it ended, and says what of that is data and what a failure.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any, ClassVar

import aiohttp
import verifiers.v1 as vf
from verifiers.v1.clients.train import ElasticRendererPool, tool_to_wire
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.errors import HarnessError, ProviderError
from verifiers.v1.runtimes.subprocess import SubprocessRuntime

from gradus.environments.verifiers.in_process import address_of
from gradus.environments.verifiers.replies import forces_calls
from gradus.log import get_logger
from gradus.wire.episode import CONTEXT_FULL, UNREAD, UNTRAINED, take_back
from gradus_program.door import Count, Door, Traffic, served_context
from gradus_program.running import Place, Run, Start, local_folder, open_up, place_for
from gradus_program.settings import ProgramKeys, check_program, program_environment
from gradus_program.speech import CHAT

INFO_KEY = "program"
"""Where the trace's info says how the program ended."""
TAIL_CHARACTERS = 4_000
"""Kept of standard output and of the errors in a trace's info; the reward sees more."""

log = get_logger(__name__)


class NoModelCall(HarnessError):
    """The program ended without one answered model call, so there is nothing to train."""


class ProgramHarnessConfig(ProgramKeys, vf.HarnessConfig):
    """The program that plays tasks of any task set; those of `program` bring their own."""

    id: str = "gradus-program"
    """Id under which verifiers imports it."""


class ProgramState(vf.State):
    """The end of the program, for the reward of a task; not part of the record."""

    run: Any = None
    """The program's `Run`. None when it was not started."""


class ProgramHarness(vf.Harness[ProgramHarnessConfig]):
    """Runs one command per episode."""

    APPENDS_SYSTEM_PROMPT = False
    SUPPORTS_MCP = False
    SUPPORTS_RESUME = False
    EXECUTES_CODE = True
    NEEDS_CONTAINER = False

    warned: ClassVar[set[str]] = set()
    """Parameters that were warned about; on the class, because each episode has its harness."""
    contexts: ClassVar[dict[tuple[str, str], int | None]] = {}
    """Server and model → its context."""

    async def launch(
        self,
        ctx: Any,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: Mapping[str, str],  # noqa: ARG002 - verifiers refuses tool servers here
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        """Run the program to its end; its exit code is data."""
        keys = getattr(data, "program", None) or self.config
        check_program(keys)
        _, prompt = self.resolve_text_prompt(data)
        run = Run.of(keys.max_output_bytes)
        if isinstance(trace.state, ProgramState):
            trace.state.run = run
        upstream = address_of(secret) or endpoint
        trace.info[UNTRAINED] = {UNREAD: []}
        started = time.monotonic()
        async with (
            Door.open(
                upstream,
                sampling=_sampling(ctx),
                is_training=isinstance(ctx.client, vf.TrainClientConfig),
                context_tokens=await self._context_tokens(ctx, upstream, secret),
                count=_counter(ctx),
                program_decides=keys.sampling == "program",
                forces_calls=forces_calls(getattr(ctx.client, "renderer", None)),
                traffic=Traffic(on_read=lambda turn: take_back(trace.info, turn, UNREAD)),
            ) as door,
            place_for(runtime) as place,
        ):
            start = _start(
                keys, place, prompt or "", _model(ctx, runtime.host_url(door.url), secret)
            )
            try:
                await place.run(start, run)
            finally:
                trace.info[INFO_KEY] = _told(run, door, time.monotonic() - started)
                self._warn(door.traffic)
        _check(trace, run, door.traffic)
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")

    async def _context_tokens(self, ctx: Any, upstream: str, secret: str) -> int | None:
        """The longest prompt and reply of the model; None when its server does not say."""
        key = (ctx.client.base_url, ctx.model)
        if key not in self.contexts:
            try:
                self.contexts[key] = await served_context(upstream, secret, ctx.model)
            except (aiohttp.ClientError, TimeoutError):
                return None  # the next episode asks again
        return self.contexts[key]

    def _warn(self, traffic: Traffic) -> None:
        new = set(traffic.dropped) - self.warned
        self.warned.update(new)
        for name in sorted(new):
            log.warning(
                "the program asks for its own %s; the source's sampling decides, so it is not used "
                "(further ones are only counted, in the metric dropped_parameters)",
                name,
            )

    async def cleanup(self, trace: vf.Trace, runtime: vf.Runtime) -> None:  # noqa: ARG002
        """Make sure that the working folder can be removed."""
        if isinstance(runtime, SubprocessRuntime) and runtime.workdir is not None:
            open_up(local_folder(runtime))

    @vf.metric  # type: ignore[untyped-decorator]
    async def program_failed(self, trace: vf.Trace) -> float:
        """1 when the program ended with another exit code than 0, or did not end."""
        return float(trace.info.get(INFO_KEY, {}).get("exit_code") != 0)

    @vf.metric  # type: ignore[untyped-decorator]
    async def dropped_parameters(self, trace: vf.Trace) -> float:
        """Sampling parameters of the program that were not used, over all calls."""
        return float(sum(trace.info.get(INFO_KEY, {}).get("dropped", {}).values()))

    @vf.metric  # type: ignore[untyped-decorator]
    async def refused_calls(self, trace: vf.Trace) -> float:
        """Requests that could not be played."""
        return float(trace.info.get(INFO_KEY, {}).get("num_refused", 0))

    @vf.metric  # type: ignore[untyped-decorator]
    async def unread_calls(self, trace: vf.Trace) -> float:
        """Calls that the program left before their reply."""
        return float(trace.info.get(INFO_KEY, {}).get("num_unread", 0))

    @vf.metric  # type: ignore[untyped-decorator]
    async def lost_reasoning(self, trace: vf.Trace) -> float:
        """Replies that the program sent back without their reasoning, or with another."""
        return float(trace.info.get(INFO_KEY, {}).get("lost_reasoning", 0))


def _sampling(ctx: Any) -> dict[str, Any]:
    given: dict[str, Any] = ctx.sampling.model_dump(exclude_none=True)
    if "max_completion_tokens" in given:
        given.setdefault("max_tokens", given["max_completion_tokens"])
    return given


def _model(ctx: Any, url: str, secret: str) -> dict[str, str]:
    return {
        "OPENAI_BASE_URL": url,
        "OPENAI_API_BASE": url,
        "OPENAI_API_KEY": secret,
        "OPENAI_MODEL": ctx.model,
        "ANTHROPIC_BASE_URL": url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": secret,
        "ANTHROPIC_MODEL": ctx.model,
    }


def _start(keys: ProgramKeys, place: Place, prompt: str, model: Mapping[str, str]) -> Start:
    return Start(
        command=keys.command,
        env=program_environment(
            keys, os.environ, home=place.home, model=model, is_contained=place.is_contained
        ),
        files=keys.files,
        task=prompt.encode("utf-8", "replace"),
        task_file=keys.task_file if keys.input == "file" else None,
    )


def _counter(ctx: Any) -> Count | None:
    """What counts the tokens of a prompt as the train client renders it; None without one."""
    client = ctx.client
    if not isinstance(client, vf.TrainClientConfig):
        return None
    pool = ElasticRendererPool(
        client.renderer_model_name or ctx.model,
        client.renderer,
        chat_template_kwargs=_sampling(ctx).get("chat_template_kwargs"),
        multiplex=client.multiplex,
    )

    async def count(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> int:
        asked = CHAT.parse_request({"messages": messages, "tools": tools})
        prompt = [message_to_wire(message) for message in asked.messages]
        offered = [tool_to_wire(tool) for tool in asked.tools or []] or None
        async with pool.acquire() as slot:
            render = slot.renderer.render
            made = await slot.run(lambda: render(prompt, tools=offered, add_generation_prompt=True))
        return len(made.token_ids)

    return count


def _told(run: Run, door: Door, seconds: float) -> dict[str, Any]:
    """Cut what a trace's info keeps, small enough for every record."""
    traffic = door.traffic
    return {
        "exit_code": run.exit_code,
        "stdout": run.output.text[-TAIL_CHARACTERS:],
        "stderr": run.errors.text[-TAIL_CHARACTERS:],
        "stdout_bytes": run.output.num_bytes,
        "stderr_bytes": run.errors.num_bytes,
        "seconds": round(seconds, 3),
        "num_calls": traffic.num_answered,
        "num_unread": traffic.num_unread,
        "num_refused": traffic.num_refused,
        "refused": traffic.refused,
        "dropped": dict(traffic.dropped),
        "dialects": dict(traffic.dialects),
        "num_streams": traffic.num_streams,
        "lost_reasoning": len(door.memory.lost),
    }


def _last_said(text: str) -> str:
    """The end of what a program said; of a long last line its beginning too."""
    line = text.rpartition("\n")[2]
    return text[-500:] if len(line) <= 500 else f"{line[:300]} ... {line[-150:]}"


def _check(trace: vf.Trace, run: Run, traffic: Traffic) -> None:
    """Raise where the end of the program is not an outcome of the policy's."""
    for status, text in traffic.faults.values():
        # Also when the program lived with it: what it did instead is not what it does.
        text = f"the program's model call failed, {status}: {text}"
        error = ProviderError(text, status_code=status)
        if trace.stop_condition is None:
            raise error
        # verifiers ignores what a harness raises once the rollout is stopped.
        trace.record_error(error)
        return
    if trace.stop_condition is None and traffic.is_full:
        # As in a chat: a failed episode would be played again, and be as long.
        trace.stop(CONTEXT_FULL)
    if trace.stop_condition is not None or trace.num_turns > 0:
        return
    text = f"the program ended with exit code {run.exit_code} and made no model call"
    if traffic.refused:
        text += f" that could be played; it was told: {traffic.refused[-1][:500]}"
    said = _last_said(run.errors.text.strip() or run.output.text.strip())
    raise NoModelCall(
        f"{text}. It must ask the endpoint that OPENAI_BASE_URL names"
        + (f". The last that it said: {said}" if said else "")
    )
