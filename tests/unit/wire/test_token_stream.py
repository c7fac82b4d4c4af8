"""Frames of a token connection, and a server's end of one over a real socket."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradus.errors import ProtocolError
from gradus.wire.codec import decode, encode
from gradus.wire.token_stream import (
    FrameReader,
    TokenAnswer,
    TokenAnswers,
    TokenConnection,
    TokenPart,
    TokenQuestion,
    TokenQuestions,
    frame,
    frames,
)

ENDED = (ConnectionError, asyncio.IncompleteReadError)
Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def question(number: int, token_ids: Any = (1, 2, 3)) -> TokenQuestion:
    return TokenQuestion(number, np.asarray(token_ids, np.int32), {}, None, None, None)


class Echo:
    """Answers with the prompt; notes what it is told."""

    def __init__(self) -> None:
        self.cancelled: list[int] = []
        self.has_lost = asyncio.Event()
        self.answers_at_once = True

    def ask(self, connection: TokenConnection, questions: list[TokenQuestion]) -> None:
        for asked in questions if self.answers_at_once else []:
            logprobs = np.zeros(asked.token_ids.size, np.float32)
            connection.answer(TokenAnswer(asked.number, 200, "r", asked.token_ids, logprobs))

    def cancel(self, connection: TokenConnection, numbers: list[int]) -> None:
        self.cancelled += numbers

    def disconnect(self, connection: TokenConnection) -> None:
        self.has_lost.set()


class Telling(Echo):
    """Tells the prompt token by token before it answers."""

    def ask(self, connection: TokenConnection, questions: list[TokenQuestion]) -> None:
        for asked in questions:
            for token in asked.token_ids.tolist():
                connection.tell(TokenPart(asked.number, [token]))
        super().ask(connection, questions)


@asynccontextmanager
async def connected(service: Echo, **limits: Any) -> AsyncIterator[Stream]:
    loop = asyncio.get_running_loop()
    listener = socket.create_server(("127.0.0.1", 0))
    server = await loop.create_server(lambda: TokenConnection(service, **limits), sock=listener)
    reader, writer = await asyncio.open_connection(*listener.getsockname())
    try:
        yield reader, writer
    finally:
        writer.close()
        server.close()


async def next_frame(reader: asyncio.StreamReader) -> TokenAnswers:
    async with asyncio.timeout(60):
        size = int.from_bytes(await reader.readexactly(4))
        answers: TokenAnswers = decode(await reader.readexactly(size), TokenAnswers)
        return answers


async def test_parts_arrive_before_the_answer_that_holds_them() -> None:
    async with connected(Telling()) as (reader, writer):
        writer.write(frame(TokenQuestions([question(4, [7, 8])], [])))
        told = await next_frame(reader)
        assert [(part.number, part.token_ids) for part in told.parts] == [(4, [7]), (4, [8])]
        assert told.answers == []
        (answer,) = (await next_frame(reader)).answers
        assert answer.token_ids.tolist() == [7, 8]


@given(bodies=st.lists(st.binary(max_size=40), max_size=6), cut=st.integers(1, 17))
def test_frames_arrive_whole_however_the_bytes_are_cut(bodies: list[bytes], cut: int) -> None:
    sent = b"".join(len(body).to_bytes(4) + body for body in bodies)
    reader = FrameReader()
    received = [
        body for at in range(0, len(sent), cut) for body in reader.feed(sent[at : at + cut])
    ]
    assert received == bodies
    assert not reader.is_partial


@pytest.mark.shows("SEC8")
def test_a_frame_that_is_too_long_is_refused_before_it_arrives() -> None:
    reader = FrameReader(max_bytes=8)
    assert reader.feed((8).to_bytes(4)) == []
    with pytest.raises(ProtocolError, match="a frame of 9 bytes; 8 are allowed"):
        FrameReader(max_bytes=8).feed((9).to_bytes(4))


def test_a_question_keeps_its_prompt_and_its_parameters() -> None:
    sent = TokenQuestion(
        7, np.arange(3, dtype=np.int32), {"seed": 2**40, "top_p": 0.5}, "policy", "v1", "trace", -2
    )
    received: TokenQuestions = decode(encode(TokenQuestions([sent], [3])), TokenQuestions)
    (asked,) = received.asked
    assert asked.token_ids.tolist() == [0, 1, 2]
    assert (asked.number, asked.sampling_params, asked.model, asked.cache_salt) == (
        7,
        {"seed": 2**40, "top_p": 0.5},
        "policy",
        "v1",
    )
    assert (asked.session_id, asked.priority, received.cancelled) == ("trace", -2, [3])


@pytest.mark.parametrize(
    "token_ids",
    [np.zeros(3, np.float32), np.zeros((1, 3), np.int32), np.zeros(3, bool)],
    ids=["float", "matrix", "bool"],
)
def test_a_prompt_that_is_no_row_of_whole_numbers_is_refused(token_ids: Any) -> None:
    with pytest.raises(ProtocolError, match="one row of int32"):
        TokenQuestion(0, token_ids, {}, None, None, None).check()


async def test_answers_of_one_round_of_the_loop_share_a_frame() -> None:
    async with connected(Echo()) as (reader, writer):
        writer.write(frame(TokenQuestions([question(n) for n in range(5)], [])))
        answers = (await next_frame(reader)).answers
    assert [answer.number for answer in answers] == [0, 1, 2, 3, 4]
    assert answers[0].token_ids.dtype == np.int32
    assert answers[0].logprobs.dtype == np.float32


async def test_cancelled_numbers_reach_the_service() -> None:
    service = Echo()
    async with connected(service) as (reader, writer):
        writer.write(frame(TokenQuestions([question(1)], [8, 9])))
        await next_frame(reader)
    assert service.cancelled == [8, 9]


NO_MESSAGE = [
    (4).to_bytes(4) + b"\xff\xff\xff\xff",
    frame(TokenAnswers([TokenAnswer.without_tokens(1, 200)])),
    (1 << 31).to_bytes(4),
    b"GET / HTTP/1.1\r\n\r\n",
]


@pytest.mark.shows("F54", "SEC40")
@pytest.mark.parametrize("sent", NO_MESSAGE, ids=["noise", "answers", "oversized", "http"])
async def test_what_is_no_message_closes_the_connection(sent: bytes) -> None:
    service = Echo()
    async with connected(service) as (reader, writer):
        writer.write(sent)
        async with asyncio.timeout(60):
            with pytest.raises(ENDED):
                await reader.readexactly(1)
            await service.has_lost.wait()


@pytest.mark.shows("F65", "SEC40")
async def test_a_frame_that_stays_half_sent_closes_the_connection() -> None:
    service = Echo()
    async with connected(service, frame_seconds=0.1) as (reader, writer):
        whole = frame(TokenQuestions([question(1)], []))
        writer.write(whole + whole[:-1])
        assert len((await next_frame(reader)).answers) == 1
        async with asyncio.timeout(60):
            with pytest.raises(ENDED):
                await reader.readexactly(1)


async def test_a_connection_may_be_silent_between_frames() -> None:
    async with connected(Echo(), frame_seconds=0.05) as (reader, writer):
        for number in range(3):
            whole = frame(TokenQuestions([question(number)], []))
            writer.write(whole[:9])
            await writer.drain()
            writer.write(whole[9:])
            assert len((await next_frame(reader)).answers) == 1
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(reader.read(1), 0.1)


@pytest.mark.shows("F55")
async def test_a_client_that_goes_away_is_forgotten() -> None:
    service = Echo()
    service.answers_at_once = False
    async with connected(service) as (_, writer):
        writer.write(frame(TokenQuestions([question(1)], [])))
        await writer.drain()
        writer.close()
        async with asyncio.timeout(60):
            await service.has_lost.wait()


@given(sizes=st.lists(st.integers(0, 40), max_size=20), limit=st.integers(60, 400))
def test_what_is_too_much_for_one_frame_is_sent_in_several(sizes: list[int], limit: int) -> None:
    asked = [question(number, [7] * size) for number, size in enumerate(sizes)]
    fits = all(len(frame(TokenQuestions([one], []))) <= limit for one in asked)
    sent = frames(lambda part: TokenQuestions(part, []), asked, max_bytes=limit)
    reader = FrameReader(max_bytes=limit if fits else len(sent))
    found: list[TokenQuestion] = []
    for body in reader.feed(sent):
        found += decode(body, TokenQuestions).asked
    assert not reader.is_partial
    assert [(it.number, it.token_ids.size) for it in found] == [*enumerate(sizes)]
