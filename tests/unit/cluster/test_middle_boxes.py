"""What lies between two ends may delay, split and cut; more it cannot, for they speak TLS. And what
an end does with a message that it has had, that comes too early, or too late."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Iterator
from itertools import count

import pytest

from gradus.wire.codec import encode
from gradus_cluster.certificates import LAUNCHER_NAME, tls_context
from gradus_cluster.link import Beat, Channel, Link, Message, Told, _Frame

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
