"""Addresses and free ports of this node."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import secrets
import socket
import struct
from pathlib import Path

from gradus.errors import ConfigError

_SIOCGIFADDR = 0x8915
_NAME_BYTES = 16


def reserve_port(host: str) -> socket.socket:
    """A socket that holds a free port without listening, so that a program that asks for this very
    port may listen there: the system gives it to nobody who asks for any."""
    reserved = socket.socket(_family(host), socket.SOCK_STREAM)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind((host, 0))
    return reserved


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def own_address(host: str | None) -> str:
    """The address of this node that others reach: of `host`, else of its name, or ConfigError."""
    name = host or socket.gethostname()
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"launch.nodes.host: {name!r} has no address ({error}); write one of this machine that "
            "the other nodes reach"
        ) from error
    every = [str(it[4][0]) for it in found]
    far = (it for it in every if not ipaddress.ip_address(it.partition("%")[0]).is_link_local)
    return next(far, every[0])


def listen(host: str, port: int, *, backlog: int) -> socket.socket:
    """ConfigError for a port that is taken."""
    try:
        listener = socket.create_server((host, port), family=_family(host), backlog=backlog)
        listener.setblocking(False)
        return listener
    except OSError as error:
        raise ConfigError(
            f"launch.nodes: no port {port} of {host} to listen on ({error.strerror}); choose "
            "another, or 0 for any that is free"
        ) from error


def loopback_lines(address: str, host: str | None) -> list[str]:
    """What to say of an address that no other machine reaches and that was not chosen."""
    if address == host or not (address == "::1" or address.startswith("127.")):
        return []
    name = host or "the name of this machine"
    return [
        f"{name} means {address}, which other machines do not reach; where they are nodes, set "
        "launch.nodes.host"
    ]


def interface_variables(address: str) -> dict[str, str]:
    """For ranks, which talk over the interface of this address to those on other nodes; those of an
    address that no interface says that it has choose for themselves."""
    name = interface_of(address)
    return {} if name is None else {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}


def interface_of(address: str) -> str | None:
    """The network interface that has an address; None where none says so."""
    if ":" in address:
        number = ipaddress.ip_address(address.partition("%")[0]).exploded.replace(":", "")
        rows = map(str.split, Path("/proc/net/if_inet6").read_text().splitlines())
        return next((row[-1] for row in rows if row[0] == number), None)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            request = struct.pack(f"{_NAME_BYTES}s16x", name.encode()[: _NAME_BYTES - 1])
            try:
                answer = fcntl.ioctl(asked, _SIOCGIFADDR, request)
            except OSError:
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None


def new_incarnation() -> str:
    """A name for this process that no other has had."""
    return f"{os.getpid()}.{secrets.token_hex(8)}"
