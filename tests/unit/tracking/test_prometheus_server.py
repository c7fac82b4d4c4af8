"""The page over HTTP: what clients get, and that none of them holds it up."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from prometheus_client.core import GaugeMetricFamily

from gradus.errors import ProcessError
from gradus.tracking.prometheus import tracker as server_module
from gradus.tracking.prometheus.tracker import MAX_CLIENTS, MetricsServer

LIMIT_SECONDS = 60.0
SCRAPE = b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n"


class Numbers:
    """A collector that gives, or raises, what a test says."""

    def __init__(self, number: Callable[[], float] = lambda: 3.0) -> None:
        self._number = number

    def collect(self) -> Iterator[GaugeMetricFamily]:
        yield GaugeMetricFamily("gradus_step", "Step.", self._number())


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    made = MetricsServer(Numbers(), host="127.0.0.1", port=0)
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


def ask(server: MetricsServer, request: bytes = SCRAPE) -> bytes:
    with connect(server) as client:
        client.sendall(request)
        return read_all(client)


def test_the_page_is_at_metrics_in_the_format_of_prometheus(server: MetricsServer) -> None:
    head, _, body = ask(server).partition(b"\r\n\r\n")
    assert head.split()[1] == b"200"
    assert b"Content-Type: text/plain; version=0.0.4; charset=utf-8" in head
    assert b"\ngradus_step 3.0\n" in body


def test_it_listens_without_asking_a_name_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where that does not answer, the run would start seconds later."""

    def ask_a_name_server(name: str = "") -> str:
        raise AssertionError(f"asked for the name of {name}")

    monkeypatch.setattr(socket, "getfqdn", ask_a_name_server)
    made = MetricsServer(Numbers(), host="0.0.0.0", port=0)
    made.close()


@pytest.mark.shows("SEC40")
def test_no_client_learns_anything_but_the_page(server: MetricsServer) -> None:
    answer = ask(server, b"GET /../secrets/admin_token HTTP/1.1\r\n\r\n")
    assert answer.endswith(b"gradus_step 3.0\n")
    assert ask(server, b"POST /metrics HTTP/1.1\r\n\r\n").split()[1] == b"405"
    assert b" 200 " not in ask(server, b"\x16\x03\x01\x00\xa5 \x00\xff x\r\n\r\n")


@pytest.mark.shows("F65")
def test_clients_that_say_nothing_are_cut_off_and_hold_up_nobody(
    server: MetricsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module._Handler, "timeout", 0.2)
    with connect(server) as silent, connect(server) as slow:
        slow.sendall(b"GET /metr")
        assert ask(server).split()[1] == b"200"
        assert read_all(silent) == b""
        assert b" 200 " not in read_all(slow)


@pytest.mark.shows("SEC8")
@pytest.mark.slow
def test_too_many_clients_are_cut_off_and_have_their_place_again(server: MetricsServer) -> None:
    silent = [connect(server) for _ in range(MAX_CLIENTS)]
    try:
        assert ask(server) == b""
    finally:
        for client in silent:
            client.close()
    while b" 200 " not in ask(server):
        pass


def test_a_taken_port_is_a_clear_error(server: MetricsServer) -> None:
    port = int(server.address.rsplit(":", 1)[1])
    with pytest.raises(ProcessError, match=rf"port {port} of 127\.0\.0\.1 is taken; choose"):
        MetricsServer(Numbers(), host="127.0.0.1", port=port)


def test_a_host_that_is_not_here_is_a_clear_error() -> None:
    with pytest.raises(ProcessError, match=r"cannot listen at 192\.0\.2\.1, port 0"):
        MetricsServer(Numbers(), host="192.0.2.1", port=0)


def test_a_closed_server_is_gone_and_its_port_is_free(server: MetricsServer) -> None:
    port = int(server.address.rsplit(":", 1)[1])
    ask(server)
    with connect(server):
        server.close()
        server.close()
    MetricsServer(Numbers(), host="127.0.0.1", port=port).close()


def test_a_last_look_is_waited_for_only_where_somebody_comes_regularly(
    server: MetricsServer,
) -> None:
    ask(server)
    assert not server.wait_for_scrape(at_most_seconds=LIMIT_SECONDS)
    ask(server)
    server._pace_seconds = LIMIT_SECONDS
    assert not server.wait_for_scrape(at_most_seconds=0.01)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(server.wait_for_scrape, at_most_seconds=LIMIT_SECONDS)
        while not waiting.done():
            ask(server)
        assert waiting.result()


def test_a_page_that_cannot_be_made_costs_that_scrape_alone() -> None:
    numbers: list[float | None] = [None, 3.0]
    server = MetricsServer(Numbers(lambda: float(numbers.pop(0))), host="127.0.0.1", port=0)
    answers = [ask(server) for _ in range(2)]
    server.close()
    assert [answer.split()[1] for answer in answers] == [b"500", b"200"]
