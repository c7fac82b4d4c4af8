"""What lies between two ends may delay, split and cut; more it cannot, for they speak TLS. And what
an end does with a message that it has had, that comes too early, or too late."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
from mirrored import Ends

from gradus.errors import CorruptStateError
from gradus.nodes.certificates import LAUNCHER_NAME, tls_context
from gradus.nodes.folder import Append, Delete, Done, Finish, Put, PutPiece, Request, Talk
from gradus.nodes.link import Beat, Channel, Link, Message, Told, _Frame
from gradus.sealed import content_entry
from gradus.wire.codec import encode

TOKEN = bytes(range(32))
SERVER, CLIENT = tls_context(TOKEN, "launcher"), tls_context(TOKEN, "node")
LINES = [f"line {number} " + "x" * 37 * number for number in range(6)]


class Box:
    """Two links over TLS, and what a middle box does with the bytes of each way between them."""

    def __init__(self, launcher: Link, node: Link) -> None:
        self.links = (launcher, node)
        near, self._near = socket.socketpair()
        far, self._far = socket.socketpair()
        for end in (near, far, self._near, self._far):
            end.setblocking(False)
        options = {"do_handshake_on_connect": False}
        ours = SERVER.wrap_socket(near, server_side=True, **options)
        theirs = CLIENT.wrap_socket(far, server_hostname=LAUNCHER_NAME, **options)
        self.channels = (Channel(ours), Channel(theirs))
        self.num_carried = 0

    def shake_hands(self, size: int = 1 << 16) -> None:
        """Then both links continue on it, as after a greeting."""
        while any(channel.socket.version() is None for channel in self.channels) or self.carry(1):
            for channel in self.channels:
                channel.read()
            self.carry(size)
        launcher, node = self.links
        received = launcher.received
        launcher.open(self.channels[0], node.received)
        node.open(self.channels[1], received)

    def carry(self, size: int, limit: int | None = None) -> int:
        """At most `size` bytes of each way, and no more than `limit` in all from the node; how many
        there were."""
        moved = 0
        for source, target in ((self._far, self._near), (self._near, self._far)):
            most = size
            if limit is not None and source is self._far:
                most = min(size, limit - self.num_carried)
            with contextlib.suppress(BlockingIOError):
                content = source.recv(most) if most > 0 else b""
                target.sendall(content)
                moved += len(content)
                self.num_carried += len(content) if source is self._far else 0
        return moved

    def close(self) -> None:
        for end in (*self.channels, self._near, self._far):
            end.close()


@contextlib.contextmanager
def box(launcher: Link, node: Link) -> Iterator[Box]:
    made = Box(launcher, node)
    try:
        yield made
    finally:
        made.close()


def words(messages: list[Message]) -> list[str]:
    return [message.line for message in messages if isinstance(message, Told)]


def settle(between: Box, size: int, limit: int | None = None) -> list[str]:
    """What the launcher hears until nothing moves any more."""
    heard: list[str] = []
    while True:
        moved = between.carry(size, limit)
        for link in between.links:
            told = words(link.take())
            heard += told if link is between.links[0] else []
            link.beat()
        if not moved:
            return heard


@pytest.mark.parametrize("size", [1, 7])
def test_a_link_that_drips_loses_nothing(size: int) -> None:
    launcher, node = Link(), Link()
    with box(launcher, node) as between:
        between.shake_hands(size)
        for line in LINES:
            node.send(Told(line))
        assert settle(between, size) == LINES


@pytest.mark.shows("F70")
def test_a_link_that_is_reset_anywhere_says_each_message_once_and_in_order() -> None:
    """At every 23rd byte of what the node says: in heads of records, in frames, between them."""
    with box(Link(), link := Link()) as whole:
        whole.shake_hands()
        before = whole.num_carried
        for line in LINES:
            link.send(Told(line))
        settle(whole, 1 << 16)
        length = whole.num_carried - before
    for offset in range(1, length, 23):
        launcher, node, heard = Link(), Link(), list[str]()
        with box(launcher, node) as between:
            between.shake_hands()
            for line in LINES:
                node.send(Told(line))
            heard += settle(between, 1 << 16, between.num_carried + offset)
        with box(launcher, node) as between:
            between.shake_hands()
            heard += settle(between, 1 << 16)
        assert heard == LINES, offset


def test_a_greeting_that_is_reset_anywhere_leaves_no_trace() -> None:
    for offset in range(1, 1200, 97):
        with box(Link(), Link()) as between:
            for _ in range(9):
                for channel in between.channels:
                    with contextlib.suppress(OSError):
                        channel.read()
                between.carry(1 << 16, offset)
            assert between.channels[0].next_body() is None, offset


# ------------------------------------------------------------------ numbers of messages


@pytest.mark.parametrize(
    ("numbers", "heard"),
    [
        ([1, 2, 3], ["1", "2", "3"]),
        ([1, 1, 2, 1, 2, 3], ["1", "2", "3"]),
        ([1, 3, 2], ["1"]),
        ([2, 1], []),
        ([1, 2, 4, 3], ["1", "2"]),
        ([0, 1], ["1"]),
    ],
    ids=["in order", "had before", "overtaken", "the first is missing", "a gap", "no number"],
)
def test_an_end_takes_each_number_once_and_after_the_one_before(
    numbers: list[int], heard: list[str]
) -> None:
    """After a gap it takes nothing more from that socket: what is missing comes by the next one."""
    near, far = socket.socketpair()
    link = Link()
    link.open(Channel(near), 0)
    for number in numbers:
        body = encode(_Frame(number, 0, Told(str(number))))
        far.sendall(struct.pack(">I", len(body)) + body)
    assert words(link.take()) == heard
    is_whole = heard == [str(it) for it in sorted(set(numbers) - {0})]
    assert (link.channel is not None) is is_whole
    assert link.received == len(heard)
    link.drop()
    far.close()


def test_a_silent_end_is_not_taken_for_one_that_has_heard() -> None:
    """A box that holds all back: neither end becomes surer of the other."""
    seconds = count(100.0, 10.0)
    link = Link(lambda: next(seconds))
    near, far = socket.socketpair()
    link.open(Channel(near), 0)
    before = (link.heard_at, link.safe_at)
    link.send(Beat())
    assert link.take() == []
    assert (link.heard_at, link.safe_at, link.num_unacknowledged) == (*before, 1)
    link.drop()
    far.close()


# ------------------------------------------------------------------ the folder


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[Ends]:
    made = Ends.below(tmp_path)
    yield made
    made.close()


READY = "ready/trainer.json"
LATE: dict[str, Request] = {
    "an old sign": Put(READY, 0, b"old", True),
    "a deletion": Delete(READY),
    "a line": Append("logs/a.log", 0, b"old"),
    "a range": PutPiece("model", "a", 0, b"old"),
    "an end": Finish("model", {"a": content_entry(b"old")}),
}


def read(ends: Ends, path: str) -> bytes:
    place = ends.here.root / path
    return place.read_bytes() if place.exists() else b""


@pytest.mark.parametrize("late", LATE)
def test_what_a_box_held_back_until_the_node_has_another_connection_changes_nothing(
    ends: Ends, late: str
) -> None:
    held = ends.connect("brings")
    newer = ends.connect("brings")
    newer.ask(Put(READY, 0, b"new", True), Done)
    with pytest.raises(ConnectionError):
        held.ask(LATE[late], Done)
    found = [it for it in ends.here.root.rglob("*") if it.is_file()]
    assert found == [ends.here.root / READY]
    assert read(ends, READY) == b"new"
    newer.ask(Put(READY, 0, b"newer", True), Done)
    assert read(ends, READY) == b"newer"
    for talk in (held, newer):
        talk.close()


def test_a_connection_for_the_other_way_takes_no_place(ends: Ends) -> None:
    brings, fetches = ends.connect("brings"), ends.connect("fetches")
    for talk in (fetches, brings):
        talk.ask(Put(READY, 0, b"new", True), Done)
        talk.close()


def test_what_is_asked_at_this_moment_ends_before_the_next_connection_is_answered(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node gave up waiting for a disk that is slow; it must not overtake itself."""
    begun, may_end, real = threading.Event(), threading.Event(), ends.server._put

    def slow(path: Path, request: Put) -> None:
        if request.content == b"old":
            begun.set()
            assert may_end.wait(60)
        real(path, request)

    monkeypatch.setattr(ends.server, "_put", slow)
    held = ends.connect("brings")
    held.send(Put(READY, 0, b"old", True))
    assert begun.wait(60)
    newer = ends.connect("brings")
    newer.send(Put(READY, 0, b"new", True))
    newer._socket.settimeout(0.2)
    with pytest.raises(ConnectionError, match="timed out"):
        newer.receive(Done)
    newer._socket.settimeout(60)
    may_end.set()
    assert newer.receive(Done) == Done()
    assert read(ends, READY) == b"new"
    for talk in (held, newer):
        talk.close()


@pytest.mark.parametrize("size", [1, 1000])
def test_a_folder_that_drips_or_is_reset_in_the_middle_arrives_whole(ends: Ends, size: int) -> None:
    """Each range is one message: half of one counts for nothing, and is asked for again."""
    body = encode(PutPiece("model", "a", 0, b"x" * 3000))
    framed = struct.pack(">I", len(body)) + body
    for cut in (3, 4, 5, len(framed) - 1):
        half = ends.connect("brings")
        half._socket.sendall(framed[:cut])
        half.close()
    talk = ends.connect("brings")
    for begin in range(0, len(framed), size):
        talk._socket.sendall(framed[begin : begin + size])
    assert talk.receive(Done) == Done()
    talk.ask(Finish("model", {"a": content_entry(b"x" * 3000)}), Done)
    assert (ends.here.model / "a").read_bytes() == b"x" * 3000
    talk.close()


def test_requests_that_come_twice_or_in_another_order_change_nothing(ends: Ends) -> None:
    talk: Talk = ends.connect("brings")
    for request in (
        *[Append("logs/a.log", 0, b"one")] * 2,
        Append("logs/a.log", 3, b"two"),
        Append("logs/a.log", 0, b"onetwo"),
        *[PutPiece("model", "a", 0, b"one")] * 2,
        PutPiece("model", "a", 3, b"two"),
        *[Finish("model", {"a": content_entry(b"onetwo")})] * 2,
    ):
        talk.ask(request, Done)
    for request in (Append("logs/a.log", 9, b"x"), PutPiece("model", "b", 9, b"x")):
        with pytest.raises(CorruptStateError, match="missing"):
            talk.ask(request, Done)
    assert read(ends, "logs/a.log") == b"onetwo"
    assert (ends.here.model / "a").read_bytes() == b"onetwo"
    talk.close()
