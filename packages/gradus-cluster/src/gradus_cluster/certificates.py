"""The certificates by which the launcher of a run and its node sides know each other.

The run's certificate authority is a key that follows from its node token: whoever has the token can
make a certificate, and nobody else. Each process makes its own, whose key stays in its memory.
"""

from __future__ import annotations

import datetime
import hashlib
import hmac
import ipaddress
import os
import secrets
import ssl
from pathlib import Path
from typing import Literal

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from gradus.errors import ConfigError
from gradus.files import write_atomically

Role = Literal["launcher", "node", "server"]
LAUNCHER_NAME = "launcher.gradus.internal"
"""What the certificate of a launcher is for, whatever its address is."""
_TOKEN_BYTES = 32
_PURPOSES = {
    "launcher": ExtendedKeyUsageOID.SERVER_AUTH,
    "node": ExtendedKeyUsageOID.CLIENT_AUTH,
    "server": ExtendedKeyUsageOID.SERVER_AUTH,
}


def read_node_token(path: Path) -> bytes:
    """ConfigError for a file that holds none, OSError for one that cannot be read."""
    text = path.read_text(encoding="utf-8", errors="replace").strip()
    try:
        token = bytes.fromhex(text)
    except ValueError:
        token = b""
    if len(token) != _TOKEN_BYTES:
        raise ConfigError(
            f"{path} does not hold a node token, which is {2 * _TOKEN_BYTES} hexadecimal digits; "
            "copy the run's secrets/node_token"
        )
    return token


def keep_node_token(path: Path) -> bytes:
    """The run's token, which lies there already or is made now."""
    if path.exists():
        return read_node_token(path)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    token = secrets.token_bytes(_TOKEN_BYTES)
    write_atomically(path, token.hex().encode(), mode=0o600)
    return token


def tls_context(token: bytes, role: Role) -> ssl.SSLContext:
    """What one end of a link needs: TLS 1.3, a certificate of its own, and no trust in any
    that was not made with this token for the other role."""
    is_server = role == "launcher"
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    authority = _authority(token)
    context.load_verify_locations(cadata=_certificate(authority, authority, None))
    _load(context, *_signed(token, role))
    return context


def authority_certificate(token: bytes) -> bytes:
    """By which those who ask servers of the run know them."""
    authority = _authority(token)
    return _certificate(authority, authority, None).encode()


def server_certificate(token: bytes, address: str) -> bytes:
    """A key with the certificate of a server at this address, and of no launcher."""
    own = Ed25519PrivateKey.generate()
    return _pem(own) + _certificate(_authority(token), own, "server", address).encode()


def _authority(token: bytes) -> Ed25519PrivateKey:
    seed = hmac.digest(token, b"gradus certificate authority", hashlib.sha256)
    return Ed25519PrivateKey.from_private_bytes(seed)


def _signed(token: bytes, role: Role) -> tuple[str, Ed25519PrivateKey]:
    own = Ed25519PrivateKey.generate()
    return _certificate(_authority(token), own, role), own


def _certificate(
    authority: Ed25519PrivateKey, key: Ed25519PrivateKey, role: Role | None, address: str = ""
) -> str:
    """That of `key`; without a role that of the authority."""
    now = datetime.datetime.now(datetime.UTC)
    day = datetime.timedelta(days=1)  # clocks of nodes differ
    builder = (
        x509.CertificateBuilder()
        .issuer_name(_name("authority"))
        .subject_name(_name(role or "authority"))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - day)
        .not_valid_after(now + 3650 * day)
        .add_extension(x509.BasicConstraints(ca=role is None, path_length=None), critical=True)
    )
    if role is not None:
        usage = x509.ExtendedKeyUsage([_PURPOSES[role]])
        builder = builder.add_extension(usage, critical=True)
    if role == "launcher":
        names = x509.SubjectAlternativeName([x509.DNSName(LAUNCHER_NAME)])
        builder = builder.add_extension(names, critical=False)
    if role == "server":
        names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))])
        builder = builder.add_extension(names, critical=False)
    return builder.sign(authority, None).public_bytes(serialization.Encoding.PEM).decode("ascii")


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"gradus {text}")])


def _pem(key: Ed25519PrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def _load(context: ssl.SSLContext, certificate: str, key: Ed25519PrivateKey) -> None:
    """Give `context` a certificate with its key, which must come as a file: one in memory."""
    descriptor = os.memfd_create("certificate")
    try:
        os.write(descriptor, _pem(key) + certificate.encode())
        context.load_cert_chain(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)
