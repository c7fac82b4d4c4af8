"""A stream tells a reply while it is sampled: only what stays, and the record is as without it."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import verifiers.v1 as vf
from hypothesis import example, given, settings
from hypothesis import strategies as st
from policy_talks import TOKEN, policy_seat
from renderers import (
    DefaultRendererConfig,
    Nemotron3RendererConfig,
    PrimeQwen3RendererConfig,
    Qwen3RendererConfig,
    create_renderer,
)
from renderers.base import ParsedResponse
from transformers import PreTrainedTokenizerFast
from verifiers.v1 import graph
from verifiers.v1.clients import train

from gradus.environments.policy.live import LiveReply, ReplyStart
from gradus.environments.verifiers import replies
from gradus.testing.engine import ScriptedEngine
from gradus.testing.engine_script import Reply
from gradus_program.messages import MessagesCall
from gradus_program.responses import ResponsesCall
from gradus_program.speech import Memory, ProgramCall
from gradus_program.taskset import ProgramConfig, ProgramTaskset

pytestmark = pytest.mark.torch

READER = """
import http.client, os, sys
from urllib.parse import urlsplit
route, body, word, heard, then = sys.argv[1:]
address = urlsplit(os.environ["OPENAI_BASE_URL"])
connection = http.client.HTTPConnection(address.netloc)
key = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
connection.request("POST", address.path + route, body, key)
reply = connection.getresponse()
for line in reply:
    if word.encode() in line:
        break
open(heard, "w").close()
if then == "leave":
    os._exit(0)
print(reply.read().decode())
"""
HELLO = [{"role": "user", "content": "hello"}]
DIALECTS: dict[str, dict[str, Any]] = {
    "/chat/completions": {"messages": HELLO},
    "/responses": {"input": "hello"},
    "/messages": {"messages": HELLO},
}
TEXT = "one two three"


class Played:
    """Episodes of a program that reads one stream, and where their engine stands meanwhile."""

    def __init__(self, model: Path, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
        self.model, self.heard = model, folder / "heard"
        self.encode: Callable[[str], list[int]] = lambda text: tokenizer.encode(
            text, add_special_tokens=False
        )
        (folder / "read.py").write_text(READER)
        (folder / "stream_reward.py").write_text("def rate(reply):\n    return 1.0\n")
        self.folder, self.cancelled = folder, False
        os.mkfifo(self.heard)

    async def until_heard(self, _: ScriptedEngine) -> None:
        """Until the program has read the word."""
        await asyncio.to_thread(self.heard.read_bytes)

    async def run(
        self,
        path: str,
        body: dict[str, Any],
        texts: list[str],
        meanwhile: Callable[[ScriptedEngine], Awaitable[None]],
        *,
        then: str = "read",
        word: str = "one",
    ) -> vf.Trace:
        """Play; `meanwhile` is awaited once, where `one` was sampled."""
        command = [sys.executable, "read.py", path, json.dumps({**body, "stream": True})]
        config = {"command": [*command, word, str(self.heard), then], "tasks": [{"prompt": "x"}]}
        config |= {"reward": "stream_reward:rate", "sampling": "program"}
        config |= {"files": [str(self.folder / "read.py")]}
        task = next(iter(ProgramTaskset(ProgramConfig.model_validate(config))))
        answers = [Reply(self.encode(text)) for text in texts]
        place, pending = len(self.encode("one")), [meanwhile]

        async def between(count: int) -> None:
            if count == place and pending:
                try:
                    await pending.pop()(engine)
                except asyncio.CancelledError:
                    self.cancelled = True
                    raise

        async with ScriptedEngine(reply=lambda _: answers.pop(0), data_token=TOKEN) as engine:
            engine.between_parts = between
            harness = {"id": "gradus-program"}
            seat = policy_seat(engine, self.model, harness, sampling={"max_tokens": 100})
            agent = vf.make_agent(seat)
            async with asyncio.timeout(120), agent:
                return await agent.run(task)


@pytest.fixture
def played(
    model: Path,
    tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Played:
    monkeypatch.setattr("verifiers.v1.runtimes.subprocess.CACHE_DIR", tmp_path / "verifiers")
    monkeypatch.setenv("GRADUS_INFERENCE_TOKEN", TOKEN)
    monkeypatch.syspath_prepend(tmp_path)
    for owner, name in ((train.TrainClient, "get_response"), (graph.PendingTurn, "commit")):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    monkeypatch.setattr(train, "build_async_openai", train.build_async_openai)
    replies.use_engine_client(replies.RequestSeeds())
    replies.sample_as_asked()
    return Played(model, tokenizer, tmp_path)


def deltas_of(raw: str) -> str:
    """The text that the events of any dialect add."""
    found = []
    for line in raw.splitlines():
        event = json.loads(line[6:]) if line.startswith("data: {") else {}
        delta = event.get("delta") or (event.get("choices") or [{}])[0].get("delta") or ""
        is_text = "text" in event.get("type", "text") or "content" in event["type"]
        if is_text:
            found.append(
                delta if isinstance(delta, str) else delta.get("text", delta.get("content")) or ""
            )
    return "".join(found)


@pytest.mark.parametrize("path", DIALECTS)
async def test_text_reaches_the_program_before_the_last_token_and_trains_as_sampled(
    path: str, played: Played
) -> None:
    trace = await played.run(path, DIALECTS[path], [TEXT], played.until_heard)
    assert trace.errors == []
    (node,) = [it for it in trace.nodes if it.sampled]
    trained = [token for token, trains in zip(node.token_ids, node.mask, strict=True) if trains]
    assert (node.message.content, trained[:-1]) == (TEXT, played.encode(TEXT))
    assert trace.info["untrained_turns"] == {"unread": []}
    assert deltas_of(trace.info["program"]["stdout"]) == " two three"


async def test_a_program_that_leaves_in_the_middle_of_a_stream_ends_it_in_the_engine(
    played: Played,
) -> None:
    async def stay(engine: ScriptedEngine) -> None:
        await played.until_heard(engine)
        await asyncio.Event().wait()

    path = "/chat/completions"
    trace = await played.run(path, DIALECTS[path], [TEXT], stay, then="leave")
    assert played.cancelled
    assert [it for it in trace.nodes if it.sampled] == []
    assert trace.info["program"]["num_unread"] == 1


@pytest.mark.parametrize("path", DIALECTS)
@pytest.mark.parametrize(
    ("again", "is_told"), [(TEXT, True), ("another", True), ("another", False)]
)
async def test_an_engine_lost_in_the_middle_of_a_stream_goes_on_or_fails_by_name(
    path: str, again: str, is_told: bool, played: Played
) -> None:
    async def fail(engine: ScriptedEngine) -> None:
        await played.until_heard(engine)
        if not is_told:
            engine.between_parts = None
        next(iter(engine._answering)).abort()

    trace = await played.run(path, DIALECTS[path], [TEXT, again], fail)
    said = trace.info["program"]["stdout"]
    if again == TEXT:
        assert trace.errors == []
        assert deltas_of(said) == " two three"
        assert trace.info["untrained_turns"] == {"unread": []}
        return
    assert "became another than the one whose beginning was sent" in said
    assert "another" not in deltas_of(said)
    assert [error.type for error in trace.errors] == ["ProviderError"]


async def test_a_stop_string_over_two_pieces_is_never_told(played: Played) -> None:
    path = "/chat/completions"
    body = {**DIALECTS[path], "stop": ["e tw"]}
    trace = await played.run(path, body, [TEXT], played.until_heard, word='"on"')
    assert trace.errors == []
    assert deltas_of(trace.info["program"]["stdout"]) == ""


TOLD = ["", "\ufffd", " ", "a", "<", "{", "`", "é", "\n", "stop", "st", "op", "日"]
BY_TOKENS = [Qwen3RendererConfig(), PrimeQwen3RendererConfig(), Nemotron3RendererConfig()]
SPECIAL = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<|im_end|>"]


@settings(max_examples=60)
@given(
    st.lists(st.sampled_from(TOLD + SPECIAL) | st.integers(0, 250), max_size=12),
    st.sampled_from([*BY_TOKENS, DefaultRendererConfig()]),
    st.sampled_from([(), ("stop",)]),
)
@example(["<think>", "a", "</think>", "a", "<tool_call>", "{"], Qwen3RendererConfig(), ())
@example(["<think>", "\n", "a"], Qwen3RendererConfig(), ())
@example(["<think>", " ", "a"], DefaultRendererConfig(), ())
def test_what_was_told_is_how_the_reply_begins(
    model: Path,
    tokenizer: PreTrainedTokenizerFast,
    pieces: list[str | int],
    kind: Any,
    stops: tuple[str, ...],
) -> None:
    tokens: list[int] = []
    for piece in pieces:
        given = piece if isinstance(piece, str) else None
        tokens += (
            [int(piece)] if given is None else tokenizer.encode(given, add_special_tokens=False)
        )
    renderer = create_renderer(tokenizer, kind)
    told: list[Any] = []
    live = LiveReply(renderer, told.append, stops=stops)
    for length in range(1, len(tokens) + 1):
        live.hear([], tokens[:length])
    whole = renderer.parse_response(tokens, prompt_ids=[])
    content = whole.content or ""
    for stop in stops:
        content = content.split(stop)[0]
    thoughts = whole.reasoning_content or ""
    # The default renderer keeps the first spaces, and so does what is told.
    keeps = isinstance(kind, DefaultRendererConfig)
    final = ReplyStart(thoughts if keeps else thoughts.lstrip(), content)
    for before, after in zip([*told, final][:-1], [*told, final][1:], strict=True):
        assert after.is_begun_by(before) or ReplyStart(
            after.reasoning, after.content.lstrip()
        ).is_begun_by(before)


class ByText:
    """A renderer that knows calls by their text."""

    def parse_response(self, tokens: list[int], **_: Any) -> ParsedResponse:
        return ParsedResponse(content="".join(map(chr, tokens)))


def test_text_waits_behind_a_brace_only_where_calls_are_text(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    text = "so {a < `b`} ends"
    told: list[ReplyStart] = []
    for kind in BY_TOKENS:
        tokens = tokenizer.encode(f"<think>a</think>{text}", add_special_tokens=False)
        LiveReply(create_renderer(tokenizer, kind), told.append).hear([], tokens)
    LiveReply(ByText(), told.append).hear([], [ord(it) for it in text])
    assert [it.content for it in told] == [text, text, text, "so"]


def test_a_long_reply_is_read_a_bounded_number_of_times(tokenizer: PreTrainedTokenizerFast) -> None:
    renderer = create_renderer(tokenizer, Qwen3RendererConfig())
    told: list[Any] = []
    live = LiveReply(renderer, told.append)
    tokens = tokenizer.encode("word " * 2000, add_special_tokens=False)
    for length in range(1, len(tokens) + 1):
        live.hear([], tokens[:length])
    assert 50 < len(told) < 400


def test_a_reply_that_begins_again_is_said_to(tokenizer: PreTrainedTokenizerFast) -> None:
    told: list[Any] = []
    live = LiveReply(create_renderer(tokenizer, Qwen3RendererConfig()), told.append)
    for texts in ("one", "one two"), ("o", "other"), ():
        live.begin()
        for text in texts:
            live.hear([], tokenizer.encode(text, add_special_tokens=False))
    assert told == [ReplyStart("", "one"), ReplyStart("", "one two"), None, None]


REPLY = {
    "role": "assistant",
    "reasoning_content": "I think",
    "content": "so it is",
    "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"a": 1}'}}
    ],
}
WHOLE = {"id": "x", "choices": [{"index": 0, "message": REPLY, "finish_reason": "tool_calls"}]}


@pytest.mark.parametrize("kind", [ProgramCall, ResponsesCall, MessagesCall])
@pytest.mark.parametrize(
    "told",
    [
        [],
        [ReplyStart("I")],
        [ReplyStart("I"), ReplyStart("I think")],
        [ReplyStart("I think", "so"), ReplyStart("I think", "so it")],
        [ReplyStart("I thi"), ReplyStart("I think", "so it is")],
    ],
)
def test_however_a_reply_was_told_its_events_add_up_to_it(
    kind: type[ProgramCall], told: list[ReplyStart]
) -> None:
    body = {"model": "m", "stream": True, "input": "x", "messages": HELLO}
    wanted = {"input", "messages"} - ({"messages"} if kind is ResponsesCall else {"input"})
    call = kind({key: body[key] for key in ("model", "stream", *wanted)}, Memory())
    raw = b"".join(call.tell(said) for said in told)
    raw += call.events(call.answer(json.loads(json.dumps(WHOLE))))
    events = [json.loads(line[6:]) for line in raw.decode().splitlines() if line[:7] == "data: {"]
    if kind is ProgramCall:
        found = [event["choices"][0]["delta"] for event in events]
        assert "".join(it.get("reasoning_content") or "" for it in found) == "I think"
        assert "".join(it.get("content") or "" for it in found) == "so it is"
        assert len({event["id"] for event in events}) == 1
        assert found[-1]["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'
        return
    place = "output_index" if kind is ResponsesCall else "index"
    ends = ("response.output_item", "content_block")
    begun = [it[place] for it in events if it["type"] in (f"{ends[0]}.added", f"{ends[1]}_start")]
    ended = [it[place] for it in events if it["type"] in (f"{ends[0]}.done", f"{ends[1]}_stop")]
    assert begun == ended == [0, 1, 2]
    grown = {0: "", 1: "", 2: ""}
    for event in events:
        delta = event.get("delta")
        if isinstance(delta, dict) and place in event:
            keys = ("thinking", "text", "partial_json")
            delta = "".join(delta.get(key, "") for key in keys)
        if isinstance(delta, str):
            grown[event[place]] += delta
    assert grown == {0: "I think", 1: "so it is", 2: '{"a": 1}'}
    if kind is ResponsesCall:
        done = [it["item"]["id"] for it in events if it["type"] == "response.output_item.done"]
        assert [item["id"] for item in events[-1]["response"]["output"]] == done
        assert [it["sequence_number"] for it in events] == list(range(len(events)))
