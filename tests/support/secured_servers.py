"""The certificates of a run over nodes, for a server and a client in one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradus.nodes.certificates import authority_certificate, server_certificate
from gradus.processes.secured import AUTHORITY_VARIABLE, CERTIFICATE_VARIABLE

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
