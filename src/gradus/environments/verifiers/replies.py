"""Model calls inside a worker: each request has its seed, and a wrong one is its sender's fault."""

from __future__ import annotations

import asyncio
import base64
import functools
import hashlib
import json
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import zmq
from renderers import Qwen3RendererConfig, parsing
from renderers.base import ParsedToolCall
from verifiers.v1 import errors, graph
from verifiers.v1.clients import eval as eval_client
from verifiers.v1.clients import train
from verifiers.v1.interception import server
from verifiers.v1.serve.server import EnvServer

from gradus.environments.policy.live import Listeners, LiveReply
from gradus.environments.verifiers.engine_client import (
    EngineClient,
    RequestSeeds,
    hearing,
    request_seed,
    versions_of_reply,
)
from gradus.environments.verifiers.patch import wrap
from gradus.wire.episode import (
    ARE_YOU_THERE,
    ASKED_SAMPLING,
    POLICY_VERSIONS,
    SETTLE_SECONDS,
    TEMPERATURES,
    TURN,
    UNREAD,
    UNTRAINED,
    leave_out,
)


def use_engine_client(seeds: RequestSeeds) -> None:
    """Ask the engine with one post instead of the openai client."""
    train.build_async_openai = functools.partial(EngineClient, seeds=seeds)


def seed_each_request(seeds: RequestSeeds) -> None:
    """Give each request to another model its own seed, as the engine client does."""

    def seeded(send: Any) -> Any:
        async def send_seeded(
            client: Any, url: str, body: dict[str, Any], *rest: Any, **more: Any
        ) -> Any:
            return await send(client, url, seeds.renewed(body), *rest, **more)

        return send_seeded

    wrap(eval_client.EvalClient, "_request", seeded)


def play_again_as_at_first(seeds: RequestSeeds) -> None:
    """Play an episode that is asked for again with the seeds that it had, and alone.

    An orchestrator that was started again asks for what another one, which is gone, asked for. Who
    asks for the same twice, as a check of an environment does, gets both, and so do two that are
    there, such as two evaluations at one address.
    """
    playing: dict[int, dict[asyncio.Task[Any], bytes]] = {}

    def alone(run: Any) -> Any:
        async def run_alone(self: Any, request: Any, client: bytes, name: bytes) -> Any:
            # An episode without a seed has no such field.
            seed, this = getattr(request.sampling, "seed", None), asyncio.current_task()
            if seed is None or this is None:
                return await run(self, request, client, name)
            gone = await _gone(self, {*playing.get(seed, {}).values()} - {client})
            of_seed = playing.setdefault(seed, {})
            for before, asker in list(of_seed.items()):
                if asker in gone:
                    del of_seed[before]
                    before.cancel()
            if not of_seed:
                seeds.begin(seed)
            of_seed[this] = client
            try:
                return await run(self, request, client, name)
            finally:
                of_seed.pop(this, None)
                if not of_seed and playing.get(seed) is of_seed:
                    del playing[seed]
                    seeds.begin(seed)

        return run_alone

    wrap(EnvServer, "_run", alone)


async def _gone(server: EnvServer, clients: set[bytes]) -> set[bytes]:
    """Those of a worker's clients whose socket is closed."""
    if clients:
        await asyncio.sleep(SETTLE_SECONDS)
    found = set()
    for client in clients:
        try:
            await server.frontend.send_multipart([client, *ARE_YOU_THERE])
        except zmq.ZMQError:
            found.add(client)
    return found


def note_policy_versions() -> None:
    """Write into a trace's `info` which versions of the policy sampled the tokens of each reply."""

    def noted(commit: Any) -> Any:
        def commit_and_note(turn: Any, response: Any) -> int:
            node: int = commit(turn, response)
            if runs := versions_of_reply(response.id):
                of_trace = turn.trace.info.setdefault(POLICY_VERSIONS, {})
                if isinstance(of_trace, dict):
                    of_trace[str(node)] = runs
            return node

        return commit_and_note

    wrap(graph.PendingTurn, "commit", noted)


_COLDEST = 0.01
"""vLLM samples at this temperature where a lower one above 0 is asked for."""
_KEEP_DISTRIBUTION = frozenset({"temperature", "max_tokens", "stop"})
_asked: ContextVar[Mapping[str, Any]] = ContextVar("asked_sampling", default={})  # noqa: B039


def sample_as_asked() -> None:
    """Sample a call as its body says under `ASKED_SAMPLING`, and note what the trainer must know.

    Tokens that were not drawn from the whole distribution of the policy at a temperature have
    logprobs that no trainer can compute again: such a turn is context, and does not train.
    """

    def asking(get_response: Any) -> Any:
        async def get_asked(
            client: Any, dialect: Any, body: Any, sampling: Any, *rest: Any, **more: Any
        ) -> Any:
            own = dict(body.get(ASKED_SAMPLING) or {})
            if 0 < own.get("temperature", 0) < _COLDEST:
                own["temperature"] = _COLDEST
            _asked.set(own)
            if names := own.pop("tool_choice", None):
                _asked.set({**own, "tool_choice": names})
                renderer = await _renderer_of(client.config, body, sampling)
                own["structured_outputs"] = structure_of_calls(renderer, body, names)
            if own:
                kept = sampling.model_dump(exclude_none=True)
                sampling = type(sampling).model_validate({**kept, **own})
            live = None
            if (tell := Listeners.of(more.get("headers"))) is not None:
                renderer = await _renderer_of(client.config, body, sampling)
                live = LiveReply(renderer, tell, stops=own.get("stop") or [])
            hearing.set(live)
            response = await get_response(client, dialect, body, sampling, *rest, **more)
            choice = response.raw["choices"][0]
            if stop := _cut(response.message, choice["message"], own.get("stop") or []):
                choice["stop_reason"] = stop
            if body.get("logprobs"):
                choice["logprobs"] = {"content": _logprobs(response.tokens)}
            return response

        return get_asked

    def noting(commit: Any) -> Any:
        def commit_asked(turn: Any, response: Any) -> int:
            node: int = commit(turn, response)
            own, info = _asked.get(), turn.trace.info
            if own.get("temperature"):
                info.setdefault(TEMPERATURES, {})[str(node)] = own["temperature"]
            number = sum(it.sampled for it in turn.trace.nodes[:node])
            if reason := _reshaped(own):
                leave_out(info, number, reason)
            if UNREAD in info.get(UNTRAINED, ()):
                leave_out(info, number, UNREAD)
                response.raw[TURN] = number
            return node

        return commit_asked

    wrap(train.TrainClient, "get_response", asking)
    wrap(graph.PendingTurn, "commit", noting)


def forces_calls(renderer: object) -> bool:
    """Whether the form of calls of this renderer's config is known here."""
    return isinstance(renderer, Qwen3RendererConfig)


async def _renderer_of(config: Any, body: Mapping[str, Any], sampling: Any) -> Any:
    """What the train client renders this call with."""
    given = sampling.model_dump(exclude_none=True)
    pool = train.ElasticRendererPool(
        config.renderer_model_name or body["model"],
        config.renderer,
        chat_template_kwargs=given.get("chat_template_kwargs"),
        multiplex=config.multiplex,
    )
    async with pool.acquire() as slot:
        return slot.renderer


def structure_of_calls(
    renderer: Any, body: Mapping[str, Any], names: Sequence[str]
) -> dict[str, Any]:
    """One call or more of these tools of a chat completion, and nothing beside them.

    The ends of a call are tokens of their own: their characters one by one would be text. What is
    sampled so comes from a part of the policy's distribution, and does not train.
    """
    ends = [renderer._tool_call, renderer._tool_call_end]
    begin, end = ({"type": "token", "token": token} for token in ends)
    tags = [
        {"type": "tag", "begin": begin, "content": it, "end": end} for it in _calls(body, names)
    ]
    form = {"type": "tags_with_separator", "tags": tags, "separator": "\n", "at_least_one": True}
    form["stop_after_first"] = body.get("parallel_tool_calls") is False
    return {"structural_tag": json.dumps({"type": "structural_tag", "format": form})}


def _calls(body: Mapping[str, Any], names: Sequence[str]) -> Iterator[dict[str, Any]]:
    for function in (tool["function"] for tool in body["tools"]):
        if function["name"] in names:
            head = f'\n{{"name": {json.dumps(function["name"])}, "arguments": '
            arguments = function.get("parameters") or {"type": "object"}
            # A model that was never taught JSON would fill its reply with blanks.
            form = {"json_schema": arguments, "max_whitespace_cnt": 1}
            elements = [
                {"type": "const_string", "value": head},
                {"type": "json_schema", **form},
                {"type": "const_string", "value": "}\n"},
            ]
            yield {"type": "sequence", "elements": elements}


def _reshaped(own: Mapping[str, Any]) -> str | None:
    """What makes the tokens come from another distribution than the policy's at a temperature."""
    if own.get("temperature") == 0:
        return "temperature 0"
    return next((it for it in own if own[it] and it not in _KEEP_DISTRIBUTION), None)


def _cut(message: Any, shown: dict[str, Any], stops: Sequence[str]) -> str | None:
    """End a text before the first of these that is in it, as chat completions do; says which."""
    text = message.content or ""
    found = [(place, stop) for stop in stops if (place := text.find(stop)) >= 0]
    if not found:
        return None
    place, stop = min(found)
    message.content = shown["content"] = text[:place]
    return stop


def _logprobs(tokens: Any) -> list[dict[str, Any]]:
    return [
        {"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []}
        for token, logprob in zip(tokens.completion_ids, tokens.completion_logprobs, strict=True)
    ]


def read_every_tool_call() -> None:
    """Let a model's call come through whatever its JSON holds; the harness answers that it is none.

    A name that is not text, half of a surrogate pair and deep nesting raise otherwise: the episode
    would fail, and a model could so escape a low reward. The tokens stay as they were sampled.

    Each call gets its own id, from the seed of its request. verifiers counts the calls of a reply,
    so that ids repeat from turn to turn, which some programs refuse.
    """

    def mended(read: Any) -> Any:
        def read_mended(result: dict[str, Any], *rest: Any, **more: Any) -> Any:
            calls = [_mended(call) for call in result.get("tool_calls") or []]
            for place, call in enumerate(calls):
                call.id = call.id or call_id(request_seed(), result.get("completion_ids"), place)
            return read({**result, "tool_calls": calls}, *rest, **more)

        return read_mended

    wrap(train, "response_from_generate", mended)
    parsing.json = SimpleNamespace(**{**vars(json), "loads": _loads})


def call_id(seed: int | None, completion_ids: Sequence[int] | None, place: int) -> str:
    """The id of a tool call: nine letters and digits, as some templates demand.

    >>> call_id(7, [1, 2], 0)
    'vptxdopzs'
    """
    if seed is None:  # then nothing repeats anyway
        seed = secrets.randbits(64)
    content = json.dumps([seed, list(completion_ids or ()), place]).encode()
    return base64.b32encode(hashlib.sha256(content).digest())[:9].decode().lower()


def _loads(text: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise json.JSONDecodeError("nested too deep", text[:80], 0) from None


def _mended(call: ParsedToolCall) -> ParsedToolCall:
    def as_text(value: Any) -> str:
        try:
            text = value if isinstance(value, str) else json.dumps(value)
        except RecursionError:
            text = "nested too deep"
        return text.encode("utf-8", "replace").decode()

    name = as_text(call.name) if call.name else None
    return replace(call, name=name, arguments=as_text(call.arguments or {}))


def refuse_what_no_template_takes() -> None:
    """Answer 400 to messages that cannot be rendered, as to any other request that is wrong.

    verifiers answers 502, which says that the engine failed: libraries try again, and the episode
    is played again, which a policy could use to escape a low reward.
    """

    def supported(get_response: Any) -> Any:
        async def get_supported(*args: Any, **more: Any) -> Any:
            try:
                return await get_response(*args, **more)
            except NotImplementedError as error:
                raise errors.ProviderError(str(error), status_code=400) from error

        return get_supported

    def refusing(run: Any) -> Any:
        async def run_or_refuse(slot: Any, render: Callable[[], Any]) -> Any:
            try:
                return await run(slot, render)
            except Exception as error:
                text = f"the conversation cannot be rendered: {type(error).__name__}: {error}"
                raise errors.ProviderError(text, status_code=400) from error

        return run_or_refuse

    wrap(train.TrainClient, "get_response", supported)
    wrap(train.RendererSlot, "run", refusing)


def cancel_left_calls() -> None:
    """Cancel a model call whose client has left: it is recorded, ends in the engine and trains not.

    verifiers lets it end for a retry of the same bytes; any other retry would train beside it.
    """
    if isinstance(server.web, ModuleType):
        runner = functools.partial(server.web.AppRunner, handler_cancellation=True)
        server.web = SimpleNamespace(**{**vars(server.web), "AppRunner": runner})
