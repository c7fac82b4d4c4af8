"""What the two ends of a link say arrives once and in order, and a stranger is not heard."""

from __future__ import annotations

import contextlib
import socket
import ssl
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from gradus.errors import ConfigError
from gradus_cluster.certificates import (
    LAUNCHER_NAME,
    _load,
    _signed,
    keep_node_token,
    read_node_token,
    server_certificate,
    tls_context,
)
from gradus_cluster.link import Beat, Channel, Link, Message, Told
from gradus_cluster.ports import interface_variables


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


def connect(one: Link, other: Link) -> None:
    """Give both links a new pair of sockets, as after a greeting."""
    ours, theirs = socket.socketpair()
    received = other.received
    other.open(Channel(theirs), one.received)
    one.open(Channel(ours), received)


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


def test_a_frame_that_is_longer_than_any_ends_the_socket() -> None:
    one, other = Link(), Link()
    connect(one, other)
    assert one.channel is not None
    one.send(Told("first"))
    one.channel.socket.sendall(b"\xff\xff\xff\xff" + bytes(64))
    assert words(other.take()) == ["first"]
    assert other.channel is None


TOKEN, ANOTHER = b"a" * 32, b"b" * 32


class Wire:
    """A launcher's and a node side's end, and the bytes between them, which a test passes on."""

    def __init__(self, server: ssl.SSLContext, client: ssl.SSLContext) -> None:
        near, self._launcher_side = socket.socketpair()
        far, self._node_side = socket.socketpair()
        for end in (near, far, self._launcher_side, self._node_side):
            end.setblocking(False)
        launcher = server.wrap_socket(near, server_side=True, do_handshake_on_connect=False)
        options = {"server_hostname": LAUNCHER_NAME, "do_handshake_on_connect": False}
        node = client.wrap_socket(far, **options)  # type: ignore[arg-type]
        self.launcher, self.node = Channel(launcher), Channel(node)

    def shake_hands(self) -> None:
        """OSError when either end does not accept the other."""
        for _ in range(8):
            for channel in (self.node, self.launcher):
                channel.read()
                self.carry()

    def carry(self, change: Callable[[bytes], bytes] = lambda sent: sent) -> None:
        ways = (
            (self._node_side, self._launcher_side),
            (self._launcher_side, self._node_side),
        )
        for source, target in ways:
            with contextlib.suppress(BlockingIOError):
                target.sendall(change(source.recv(1 << 16)))

    def close(self) -> None:
        for channel in (self.launcher, self.node):
            channel.close()


@contextlib.contextmanager
def wired(server: ssl.SSLContext, client: ssl.SSLContext) -> Iterator[Wire]:
    wire = Wire(server, client)
    try:
        yield wire
    finally:
        wire.close()


def test_both_ends_with_the_token_of_the_run_hear_each_other() -> None:
    with wired(tls_context(TOKEN, "launcher"), tls_context(TOKEN, "node")) as wire:
        wire.shake_hands()
        wire.node.send(Told("first"))
        wire.carry()
        wire.launcher.read()
        assert wire.launcher.next_body() is not None


def without_certificate() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def server_of_the_run() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with tempfile.NamedTemporaryFile() as file:
        file.write(server_certificate(TOKEN, "127.0.0.1"))
        file.flush()
        context.load_cert_chain(file.name)
    return context


@pytest.mark.parametrize(
    ("server", "client"),
    [
        (partial(tls_context, TOKEN, "launcher"), partial(tls_context, ANOTHER, "node")),
        (partial(tls_context, ANOTHER, "launcher"), partial(tls_context, TOKEN, "node")),
        (server_of_the_run, partial(tls_context, TOKEN, "node")),
        (partial(tls_context, TOKEN, "launcher"), without_certificate),
        (partial(tls_context, TOKEN, "launcher"), ssl.create_default_context),
    ],
    ids=[
        "stranger",
        "strange launcher",
        "an inference server",
        "no certificate",
        "the certificates of the system",
    ],
)
@pytest.mark.shows("SEC7")
def test_an_end_without_the_token_of_the_run_is_not_heard(
    server: Callable[[], ssl.SSLContext], client: Callable[[], ssl.SSLContext]
) -> None:
    with wired(server(), client()) as wire, pytest.raises(ssl.SSLError):
        wire.shake_hands()


def test_the_certificate_of_a_node_side_makes_no_launcher() -> None:
    """Whoever takes a node must not speak for the run to the others."""
    server, client = tls_context(TOKEN, "launcher"), tls_context(TOKEN, "node")
    certificate, key = _signed(TOKEN, "node")
    _load(server, certificate, key)
    with wired(server, client) as wire, pytest.raises(ssl.SSLError):
        wire.shake_hands()


@pytest.mark.shows("SEC7")
@pytest.mark.parametrize("change", ["repeat", "flip"])
def test_what_is_repeated_or_changed_on_the_way_is_not_heard(change: str) -> None:
    def changed(sent: bytes) -> bytes:
        return sent + sent if change == "repeat" else sent[:-1] + bytes([sent[-1] ^ 1])

    with wired(tls_context(TOKEN, "launcher"), tls_context(TOKEN, "node")) as wire:
        wire.shake_hands()
        wire.node.send(Told("first"))
        wire.carry(changed)
        if change == "repeat":
            wire.launcher.socket.recv(1 << 16)  # the frame itself, before its double
        with pytest.raises(ssl.SSLError):
            wire.launcher.read()


@pytest.mark.parametrize("content", ["", "00" * 31, "0g" * 32, "é" * 64, "00" * 33])
def test_a_file_without_a_token_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "token").write_text(content)
    with pytest.raises(ConfigError, match="hexadecimal digits"):
        read_node_token(tmp_path / "token")


def test_a_token_that_lies_there_stays(tmp_path: Path) -> None:
    path = tmp_path / "secrets" / "token"
    made = keep_node_token(path)
    assert keep_node_token(path) == made
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_ranks_talk_over_the_interface_of_their_nodes_address(address: str) -> None:
    """nccl would take whatever begins with the name."""
    found = interface_variables(address)
    assert found == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}


@pytest.mark.parametrize("address", ["192.0.2.1", "2001:db8::1"])
def test_ranks_choose_where_no_interface_has_the_address(address: str) -> None:
    """As in a container whose address is translated; the loopback would reach no other node."""
    assert interface_variables(address) == {}
