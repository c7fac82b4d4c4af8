"""Connections to servers of a run on other nodes: encrypted, and checked by the run's authority.

Each such server has a certificate for its address, which its node side made; those who ask find
that of the authority in the run's folder. Both are named by variables, and absent on one machine.
"""

from __future__ import annotations

import os
import ssl
from functools import lru_cache
from typing import Literal

AUTHORITY_VARIABLE = "GRADUS_AUTHORITY"
"""File with the certificate of the run's authority, for all processes of a run over nodes."""
CERTIFICATE_VARIABLE = "GRADUS_CERTIFICATE"
"""File with the key and the certificate of a server that other nodes ask."""


def server_context() -> ssl.SSLContext | None:
    """With which this process serves; None where it may do so in the clear."""
    file = os.environ.get(CERTIFICATE_VARIABLE)
    if file is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_cert_chain(file)
    return context


def client_context() -> ssl.SSLContext | Literal[True]:
    """Whom this process believes: the run's authority beside those of the system. True, which says
    the latter to aiohttp, in a run that has none."""
    file = os.environ.get(AUTHORITY_VARIABLE)
    return True if file is None else _trusting(file)


@lru_cache(maxsize=1)
def _trusting(file: str) -> ssl.SSLContext:
    # One for all connections: reading the certificates of the system takes 10 ms.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_default_certs()
    context.load_verify_locations(file)
    return context
