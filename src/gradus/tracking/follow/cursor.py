"""What of a run is safe at a tracker: a small file beside the run's records, one per tracker."""

from __future__ import annotations

import os
import secrets
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import msgspec

from gradus.errors import CorruptStateError, RunDirectoryError
from gradus.files import take_lock, write_json
from gradus.run.paths import RunDirectory
from gradus.run.records import Place


@dataclass(frozen=True)
class Cursor(Place):
    """Everything before it is safe at the tracker.

    A `resume_step` says that the tracker was not told yet what of it is void.
    """

    mark: str | None = None
    """What the tracker said at its last flush."""


class CursorFile:
    """Owns the cursor of one tracker for as long as it is open."""

    def __init__(self, run_dir: RunDirectory, tracker: str) -> None:
        """RunDirectoryError while another process sends to this tracker."""
        folder = run_dir.trackers
        folder.mkdir(mode=0o700, exist_ok=True)
        self.path = folder / f"{tracker}.json"
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
        self._lock = os.open(folder / f"{tracker}.lock", flags, 0o600)
        try:
            take_lock(self._lock, run_dir.root)
        except BlockingIOError:
            os.close(self._lock)
            raise RunDirectoryError(
                f"another process sends {run_dir.root} to {tracker!r} already, the run's own "
                "tracker for example; wait for its end, or give --name to send it to a second place"
            ) from None

    def __enter__(self) -> CursorFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def load(self) -> Cursor | None:
        """The cursor; None before anything was sent."""
        try:
            found = msgspec.json.decode(self.path.read_bytes(), type=dict[str, Any])
            if found.keys() != {field.name for field in fields(Cursor)}:
                raise ValueError("it has other keys")
            return msgspec.convert(found, Cursor)
        except FileNotFoundError:
            return None
        except (ValueError, RecursionError) as error:
            raise CorruptStateError(
                f"{self.path} does not say what was sent ({error}); delete it, and everything is "
                "sent again"
            ) from error

    def save(self, cursor: Cursor) -> None:
        write_json(self.path, asdict(cursor))

    def close(self) -> None:
        """Let another process send."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def run_identity(run_dir: RunDirectory) -> str:
    """Hex digits that belong to this run alone; made on the first call, kept in its folder."""
    run_dir.trackers.mkdir(mode=0o700, exist_ok=True)
    path = run_dir.trackers / ".identity"  # No tracker can have this name.
    if not path.exists():
        new = run_dir.trackers / f".identity-{os.getpid()}-{secrets.token_hex(4)}"
        new.write_text(secrets.token_hex(16))
        try:
            # A link, unlike a rename, leaves what another process put there first.
            os.link(new, path)
        except FileExistsError:
            pass
        finally:
            new.unlink()
    return _read_identity(path)


def _read_identity(path: Path) -> str:
    text = path.read_text().strip()
    if len(text) != 32 or not text.isalnum():
        raise CorruptStateError(f"{path} holds no identity; delete it, and a new one is made")
    return text
