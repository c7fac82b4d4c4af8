"""Connections to servers of a run on other machines: encrypted, and checked by an authority.

Over nodes that is the run's own, which signs a certificate for the address of each server; of
servers that others start it is named by the config. Both are told to processes by variables.
"""

from __future__ import annotations

import os
import ssl
import time
from functools import lru_cache
from pathlib import Path
from typing import Literal

from gradus.errors import ConfigError

AUTHORITY_VARIABLE = "GRADUS_AUTHORITY"
"""File with the certificates of who signs those of the servers, for all who ask these."""
CERTIFICATE_VARIABLE = "GRADUS_CERTIFICATE"
"""File with the key and the certificate of a server that other machines ask."""
_EXPIRED, _NOT_YET = 10, 9
_UNKNOWN_SIGNER = (7, 18, 19, 20, 21)
_OTHER_NAME = (62, 64)
"""Codes of OpenSSL."""


def server_context() -> ssl.SSLContext | None:
    """With which this process serves; None where it may do so in the clear."""
    file = os.environ.get(CERTIFICATE_VARIABLE)
    if file is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        # A key with a password must not ask for it at a terminal.
        context.load_cert_chain(file, password="")
    except OSError as error:
        raise ConfigError(
            f"{file} holds no certificate with its key, or a key with a password ({error}); put "
            "the certificate, those that signed it and the key into one file (PEM)"
        ) from error
    return context


def trust_in(file: str | None) -> dict[str, str]:
    """The variable by which a process believes who signed the certificates of servers."""
    return {} if file is None else {AUTHORITY_VARIABLE: str(Path(file).absolute())}


def client_context(*, is_own: bool) -> ssl.SSLContext | Literal[True]:
    """Whom this process believes: of the run's own servers its authority and nobody else, of others
    those of the system too. True, which says these to aiohttp, in a run without an authority."""
    file = os.environ.get(AUTHORITY_VARIABLE)
    return True if file is None else _trusting(file, is_own)


@lru_cache(maxsize=2)
def _trusting(file: str, is_own: bool) -> ssl.SSLContext:
    # One for all connections: reading the certificates of the system takes 10 ms.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if not is_own:
        context.load_default_certs()
    context.load_verify_locations(file)
    # Who signed a server's certificate is enough; who signed theirs need not be there.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context


def authority_problem(file: str) -> str | None:
    """Why servers cannot be checked by the certificates in a file."""
    try:
        content = Path(file).read_bytes()
    except OSError as error:
        return f"cannot be read ({error.strerror}); name a file with certificates (PEM)"
    if b"PRIVATE KEY-----" in content:
        return "holds a private key, and environments read this file; leave only certificates there"
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(file)
    except OSError:
        return "holds no certificate (PEM); name the file of who signs those of the servers"
    ends = [str(it["notAfter"]) for it in context.get_ca_certs()]
    if ends and max(map(ssl.cert_time_to_seconds, ends)) < time.time():
        return f"what it holds has expired ({ends[-1]}); name a newer one"
    return None


def why_unchecked(error: BaseException | None) -> str | None:
    """What is wrong with a server's certificate where an error says so."""
    found: ssl.SSLError | None = None
    while error is not None:
        # aiohttp's own, which stand above the error itself, are of its class but lack its fields.
        found = error if isinstance(error, ssl.SSLError) else found
        error = error.__cause__
    if found is None:
        return None
    if not isinstance(found, ssl.SSLCertVerificationError):
        return f"it speaks no TLS that this run knows ({found.reason}); is it http://?"
    if found.verify_code == _EXPIRED:
        return "its certificate, or that of who signed it, has expired; give it a new one"
    if found.verify_code == _NOT_YET:
        return "its certificate is not valid yet; compare the clocks"
    if found.verify_code in _OTHER_NAME:
        return (
            f"its certificate is for another name ({found.verify_message}); name it as its "
            "certificate does"
        )
    if found.verify_code in _UNKNOWN_SIGNER:
        trusted = os.environ.get(AUTHORITY_VARIABLE, "those of the system")
        return (
            f"its certificate is signed by nobody whom this run trusts ({trusted}); name the "
            "certificate of who signed it in inference.authority"
        )
    return f"its certificate is refused: {found.verify_message}"
