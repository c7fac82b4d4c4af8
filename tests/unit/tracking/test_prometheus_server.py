"""The page over HTTP: what clients get, and that none of them holds it up."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from gradus.errors import ProcessError
from gradus.tracking.prometheus import server as server_module
from gradus.tracking.prometheus.server import MAX_CLIENTS, MAX_HEAD_BYTES, MetricsServer

PAGE = "gradus_step 3\n"
LIMIT_SECONDS = 20.0
SCRAPE = b"GET /metrics HTTP/1.1\r\n\r\n"
HUGE = 16_000_000
"""Bytes; far more than sockets hold."""


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    made = MetricsServer(lambda: PAGE, host="127.0.0.1", port=0)
    yield made
    made.close()


def connect(server: MetricsServer) -> socket.socket:
    host, port = server.address.rsplit(":", 1)
    return socket.create_connection((host, int(port)), timeout=LIMIT_SECONDS)


def read_all(client: socket.socket) -> bytes:
    received = b""
    try:
        while part := client.recv(65536):
            received += part
    except ConnectionResetError:
        pass
    return received


def ask(server: MetricsServer, request: bytes) -> bytes:
    with connect(server) as client:
        client.sendall(request)
        return read_all(client)


def test_the_page_is_at_metrics_in_the_format_of_prometheus(server: MetricsServer) -> None:
    head, _, body = ask(server, b"GET /metrics?x=1 HTTP/1.1\r\nHost: a\r\n\r\n").partition(
        b"\r\n\r\n"
    )
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"Content-Type: text/plain; version=0.0.4; charset=utf-8" in head
    assert body.decode() == PAGE


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        (b"GET / HTTP/1.1", b"404"),
        (b"GET /../secrets/admin_token HTTP/1.1", b"404"),
        (b"POST /metrics HTTP/1.1", b"405"),
        (b"\x16\x03\x01\x00\xa5 \x00\xff x", b"400"),
        (b"GET /metrics", b"400"),
        (b"", b"400"),
    ],
)
def test_anything_else_is_refused(
    server: MetricsServer, request_line: bytes, status: bytes
) -> None:
    assert ask(server, request_line + b"\r\n\r\n").split()[1] == status


def test_head_gets_no_body(server: MetricsServer) -> None:
    assert ask(server, b"HEAD /metrics HTTP/1.0\r\n\r\n").endswith(b"\r\n\r\n")


def test_a_huge_head_is_refused_and_the_next_client_is_served(server: MetricsServer) -> None:
    huge = b"GET /metrics HTTP/1.1\r\nX: " + b"a" * (4 * MAX_HEAD_BYTES)
    with connect(server) as client:
        client.sendall(huge)
        answer = read_all(client)
    assert answer == b"" or answer.split()[1] == b"431"  # A reset may overtake the answer.
    assert ask(server, SCRAPE).split()[1] == b"200"


def test_clients_that_say_nothing_are_cut_off_and_hold_up_nobody(
    server: MetricsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "HEAD_SECONDS", 0.05)
    with connect(server) as silent, connect(server) as slow:
        slow.sendall(b"GET /metr")
        assert ask(server, SCRAPE).split()[1] == b"200"
        assert read_all(silent) == b""
        assert read_all(slow) == b""


def test_a_client_that_never_reads_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "SEND_SECONDS", 0.05)
    monkeypatch.setattr(server_module, "MAX_CLIENTS", 1)
    server = MetricsServer(lambda: "x" * HUGE, host="127.0.0.1", port=0)
    with connect(server) as client:
        client.sendall(SCRAPE)
        assert client.recv(1)
        # It holds the only place until it is cut off.
        while b" 200 OK" not in ask(server, SCRAPE)[:20]:
            pass
        assert len(read_all(client)) < HUGE
    server.close()


def test_too_many_clients_are_told_so(server: MetricsServer) -> None:
    silent = [connect(server) for _ in range(MAX_CLIENTS)]
    try:
        answer = ask(server, SCRAPE)
        assert answer == b"" or answer.split()[1] == b"503"
    finally:
        for client in silent:
            client.close()


def test_a_taken_port_is_a_clear_error(server: MetricsServer) -> None:
    port = int(server.address.rsplit(":", 1)[1])
    with pytest.raises(ProcessError, match=rf"port {port} of 127\.0\.0\.1 is taken; choose"):
        MetricsServer(lambda: PAGE, host="127.0.0.1", port=port)


def test_a_host_that_is_not_here_is_a_clear_error() -> None:
    with pytest.raises(ProcessError, match=r"cannot listen at 192\.0\.2\.1, port 0"):
        MetricsServer(lambda: PAGE, host="192.0.2.1", port=0)


def test_a_closed_server_is_gone_and_its_port_is_free(server: MetricsServer) -> None:
    port = int(server.address.rsplit(":", 1)[1])
    ask(server, SCRAPE)
    with connect(server):
        server.close()
        server.close()
    MetricsServer(lambda: PAGE, host="127.0.0.1", port=port).close()


def test_a_last_look_is_waited_for_only_where_somebody_comes_regularly(
    server: MetricsServer,
) -> None:
    ask(server, SCRAPE)
    assert not server.wait_for_scrape(at_most_seconds=LIMIT_SECONDS)
    ask(server, SCRAPE)
    server._pace_seconds = LIMIT_SECONDS
    assert not server.wait_for_scrape(at_most_seconds=0.01)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(server.wait_for_scrape, at_most_seconds=LIMIT_SECONDS)
        while not waiting.done():
            ask(server, SCRAPE)
        assert waiting.result()


def test_a_page_that_cannot_be_made_costs_that_scrape_alone() -> None:
    pages: list[str | Exception] = [ValueError("torn"), PAGE]

    def page() -> str:
        made = pages.pop(0)
        if isinstance(made, Exception):
            raise made
        return made

    server = MetricsServer(page, host="127.0.0.1", port=0)
    answers = [ask(server, SCRAPE) for _ in range(2)]
    server.close()
    assert [answer.split()[1] for answer in answers] == [b"500", b"200"]
