"""A port that outlives the process that serves it: the launcher binds it, each process inherits it.

While nobody serves, those who connect wait in the backlog.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket

from gradus.errors import ConfigError

LISTENER_VARIABLE = "GRADUS_LISTENER"
"""Descriptor of the socket that a launcher bound for this process."""
BACKLOG = 2048


def inherited_listener() -> socket.socket | None:
    """The socket that the launcher bound; None in a process that was started by hand."""
    number = os.environ.pop(LISTENER_VARIABLE, None)
    if number is None:
        return None
    listener = socket.socket(fileno=int(number))
    # What this process starts must not keep the port.
    listener.set_inheritable(False)
    return listener


def bind(host: str, port: int, *, allow_public_bind: bool) -> socket.socket:
    """A socket that listens; ConfigError when that cannot be.

    Port 0 lets the system choose. Listening at once reserves the port while vLLM loads;
    clients that connect already wait.
    """
    address = resolve_host(host)
    if not address.is_loopback and not allow_public_bind:
        raise ConfigError(
            f"inference.host: {host!r} can be reached from other machines; use 127.0.0.1, or set "
            "inference.allow_public_bind when the network is yours"
        )
    family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
    # With its protocol: otherwise asyncio leaves small answers to wait for one another (Nagle).
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((str(address), port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"inference.port: {port} on {host} is in use; stop its owner, choose another, "
                "or use 0 for a free one"
            ) from error
        raise ConfigError(
            f"inference: cannot listen on {host}:{port} ({error.strerror})"
        ) from error
    return listener


def resolve_host(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"inference.host: {host!r} is not an address ({error})") from error
    return ipaddress.ip_address(found[0][4][0])
