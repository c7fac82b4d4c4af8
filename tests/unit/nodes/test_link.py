"""What the two ends of a link say arrives once and in order, and a stranger is not heard."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from gradus.nodes.link import Beat, Channel, Link, Message, Told


class Clock:
    """A time that a test moves."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def _closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every socket of a test ends with it."""
    pairs, make = [], socket.socketpair

    def remembered() -> tuple[socket.socket, socket.socket]:
        pairs.append(make())
        return pairs[-1]

    monkeypatch.setattr(socket, "socketpair", remembered)
    yield
    for end in (end for pair in pairs for end in pair):
        end.close()


def connect(one: Link, other: Link, *, other_key: bytes = b"a") -> None:
    """Give both links a new pair of sockets, as after a greeting."""
    ours, theirs = socket.socketpair()
    received = other.received
    other.open(Channel(theirs, incoming=other_key, outgoing=b"b"), one.received)
    one.open(Channel(ours, incoming=b"b", outgoing=b"a"), received)


def words(messages: list[Message]) -> list[str]:
    return [message.line for message in messages if isinstance(message, Told)]


def test_what_a_cut_lost_comes_again_once_and_in_order() -> None:
    one, other = Link(), Link()
    connect(one, other)
    one.send(Told("first"))
    assert words(other.take()) == ["first"]
    one.send(Told("second"))
    one.drop()
    one.send(Told("third"))
    other.drop()
    assert other.take() == []
    connect(one, other)
    assert words(other.take()) == ["second", "third"]


def test_only_what_is_acknowledged_is_forgotten() -> None:
    one, other = Link(), Link()
    connect(one, other)
    one.send(Told("first"))
    assert one.num_unacknowledged == 1
    other.take()
    other.send(Told("heard"))
    one.take()
    assert one.num_unacknowledged == 0


def test_an_end_is_sure_of_the_other_from_the_moment_of_what_that_one_has() -> None:
    clock = Clock()
    one, other = Link(clock), Link()
    connect(one, other)
    clock.now = 107.0
    one.send(Beat())
    clock.now = 120.0
    other.take()
    other.send(Beat())
    one.take()
    assert (one.safe_at, one.heard_at) == (107.0, 120.0)


def test_a_frame_with_another_key_ends_the_socket_and_is_not_heard() -> None:
    one, other = Link(), Link()
    connect(one, other, other_key=b"another")
    one.send(Told("first"))
    assert other.take() == []
    assert other.channel is None


@pytest.mark.parametrize("change", ["repeat", "flip", "long", "swap"])
def test_a_frame_that_is_repeated_or_changed_is_not_heard(change: str) -> None:
    one, other = Link(), Link()
    connect(one, other)
    ours, theirs = socket.socketpair()
    sender = Channel(ours, incoming=b"b", outgoing=b"a")
    one.open(sender, 0)
    one.send(Told("first"))
    first = theirs.recv(4096)
    one.send(Told("other"))
    second = theirs.recv(4096)
    forged = {
        "repeat": first + first,
        "flip": first + second[:-1] + bytes([second[-1] ^ 1]),
        "long": first + b"\xff\xff\xff\xff" + second[4:],
        "swap": second + first,
    }[change]
    near, far = socket.socketpair()
    other.open(Channel(near, incoming=b"a", outgoing=b"b"), 0)
    far.sendall(forged)
    assert words(other.take()) == ([] if change == "swap" else ["first"])
    assert other.channel is None
