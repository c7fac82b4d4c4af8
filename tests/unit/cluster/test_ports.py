"""The address of the launcher: which one it is, that it can be listened on, and what is said."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path

import pytest

from gradus.config import LaunchConfig
from gradus.errors import ConfigError
from gradus.log import LogSettings
from gradus.run.lease import RunLease
from gradus.run.paths import RunDirectory
from gradus_cluster.launcher import Nodes, NodeSettings, open_nodes
from gradus_cluster.ports import own_address


def named(monkeypatch: pytest.MonkeyPatch, addresses: Sequence[str]) -> None:
    """Lets every name have these addresses."""
    found = [(0, 0, 0, "", (address, 0)) for address in addresses]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)


@pytest.mark.parametrize(
    ("addresses", "chosen"),
    [
        (["fe80::1%eth0", "2001:db8::7"], "2001:db8::7"),
        (["169.254.0.3", "10.0.0.3"], "10.0.0.3"),
        (["10.0.0.3", "fe80::1%eth0"], "10.0.0.3"),
        (["fe80::1%eth0"], "fe80::1%eth0"),
    ],
)
def test_an_address_of_one_cable_is_the_last_choice(
    addresses: list[str], chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    named(monkeypatch, addresses)
    assert own_address(None) == chosen


def test_a_launcher_listens_on_an_ipv6_address(tmp_path: Path) -> None:
    if not Path("/proc/net/if_inet6").exists():
        pytest.skip("this machine has no IPv6")
    settings = NodeSettings(
        term=1, host="::1", away_seconds=9, stop_seconds=1, hang_seconds=9, logs=LogSettings()
    )
    with Nodes(RunDirectory(tmp_path), settings) as nodes:
        host, port = nodes._listener.getsockname()[:2]
        socket.create_connection((host, port), timeout=5).close()


@pytest.mark.parametrize("host", ["no-such-host.invalid", "a" * 70, None])
def test_a_name_without_an_address_is_refused_with_its_key(
    host: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if host is None:
        monkeypatch.setattr(socket, "gethostname", lambda: "no-such-host.invalid")
    with pytest.raises(ConfigError, match=r"launch.nodes.host: '.*' has no address \(.*\); write"):
        own_address(host)


@pytest.mark.parametrize(
    ("host", "address", "is_told"),
    [
        (None, "127.0.1.1", True),
        ("here", "127.0.1.1", True),
        ("here", "::1", True),
        ("127.0.0.1", "127.0.0.1", False),
    ],
)
def test_a_name_that_other_machines_take_for_themselves_is_told_at_once(
    host: str | None, address: str, is_told: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named(monkeypatch, [address])
    lease = RunLease.take(RunDirectory(tmp_path))
    config = LaunchConfig.model_validate({"nodes": {"host": host}})
    with open_nodes(config, lease, LogSettings()) as nodes:
        lines = nodes.lines()
    lease.release()
    assert len(lines) == is_told
    assert all(f"means {address}, " in it and "set launch.nodes.host" in it for it in lines)
