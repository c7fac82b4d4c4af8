"""Certificates for a server and a client in one process: of a run over nodes, or of a user."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ec import (
    SECP256R1,
    EllipticCurvePrivateKey,
    generate_private_key,
)
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    KeySerializationEncryption,
    NoEncryption,
    PrivateFormat,
)
from cryptography.x509.oid import NameOID

from gradus.processes.secured import AUTHORITY_VARIABLE, CERTIFICATE_VARIABLE
from gradus_cluster.certificates import authority_certificate, server_certificate

TOKEN = bytes(range(32))
ANOTHER = bytes(32)


def certify(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    address: str = "127.0.0.1",
    trusted: bytes = TOKEN,
) -> None:
    """From now on this process serves with a certificate for `address`, and trusts the authority
    of the run whose node token is `trusted`."""
    for variable, name, content in (
        (AUTHORITY_VARIABLE, "authority", authority_certificate(trusted)),
        (CERTIFICATE_VARIABLE, "server", server_certificate(TOKEN, address)),
    ):
        file = folder / f"{name}.pem"
        file.write_bytes(content)
        monkeypatch.setenv(variable, str(file))


class OwnAuthority:
    """A certificate authority such as a user has, and what it signs."""

    def __init__(self, *, days: tuple[int, int] = (-1, 1)) -> None:
        """`days` from today: since when it is valid, and until when."""
        self._key = generate_private_key(SECP256R1())
        self.certificate = self._sign(self._key, days, address=None)

    def server(
        self, address: str = "127.0.0.1", *, days: tuple[int, int] = (-1, 1), password: str = ""
    ) -> bytes:
        """A key with a certificate for an address."""
        key = generate_private_key(SECP256R1())
        kept: KeySerializationEncryption = NoEncryption()
        if password:
            kept = BestAvailableEncryption(password.encode())
        pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, kept)
        return pem + self._sign(key, days, address=address)

    def _sign(
        self, key: EllipticCurvePrivateKey, days: tuple[int, int], *, address: str | None
    ) -> bytes:
        now = datetime.datetime.now(datetime.UTC)
        begins, ends = (now + datetime.timedelta(days=it) for it in days)
        own, signer = (
            x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, it)])
            for it in (address or "an authority", "an authority")
        )
        constraints = x509.BasicConstraints(ca=address is None, path_length=None)
        builder = (
            x509.CertificateBuilder(signer, own, key.public_key(), x509.random_serial_number())
            .not_valid_before(begins)
            .not_valid_after(ends)
            .add_extension(constraints, critical=True)
        )
        if address is not None:
            names = [x509.IPAddress(ipaddress.ip_address(address))]
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        return builder.sign(self._key, SHA256()).public_bytes(Encoding.PEM)
