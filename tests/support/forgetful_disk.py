"""A disk that loses its power: of a folder it keeps only what was synced.

A file keeps the content that it had at its last fsync, and a folder the names that it held at its
own; everything else is gone, as after a power cut on a disk that writes in any order.
"""

from __future__ import annotations

import os
import shutil
import stat
import threading
from dataclasses import dataclass, field
from pathlib import Path

import pytest


@dataclass
class ForgetfulDisk:
    """Owns what would survive below `root`.

    >>> disk = ForgetfulDisk.under(tmp_path, monkeypatch)  # doctest: +SKIP
    >>> disk.lose_power()  # doctest: +SKIP
    """

    root: Path
    _kept: dict[int, bytes | dict[str, int]] = field(default_factory=dict)
    """Inode → content of a file, or names of a folder with their inodes."""
    _folders: set[int] = field(default_factory=set)
    _held: list[int] = field(default_factory=list)
    """Descriptors of all that was noted, so that the system gives no inode out again."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def under(cls, root: Path, monkeypatch: pytest.MonkeyPatch) -> ForgetfulDisk:
        """From now on; what lies there already is safe."""
        disk = cls(root)
        for path in [root, *root.rglob("*")]:
            descriptor = os.open(path, os.O_RDONLY)
            disk._note(descriptor)
            os.close(descriptor)
        sync = os.fsync

        def sync_and_note(descriptor: int) -> None:
            sync(descriptor)
            disk._note(descriptor)

        monkeypatch.setattr(os, "fsync", sync_and_note)
        return disk

    def _note(self, descriptor: int) -> None:
        status = os.fstat(descriptor)
        path = f"/proc/self/fd/{descriptor}"
        kept: bytes | dict[str, int]
        if stat.S_ISDIR(status.st_mode):
            kept = {entry.name: entry.inode() for entry in os.scandir(path)}
        else:
            kept = Path(path).read_bytes()
        with self._lock:
            self._kept[status.st_ino] = kept
            self._held.append(os.dup(descriptor))

    def lose_power(self) -> None:
        """Make `root` what the disk kept of it."""
        now = {path.stat().st_ino: path for path in [self.root, *self.root.rglob("*")]}
        self._folders = {inode for inode, path in now.items() if path.is_dir()}
        after = self.root.with_name(f"{self.root.name}.after")
        self._rebuild(self.root.stat().st_ino, after)
        shutil.rmtree(self.root)
        after.rename(self.root)
        for descriptor in self._held:
            os.close(descriptor)

    def _rebuild(self, inode: int, target: Path) -> None:
        kept = self._kept.get(inode)
        if isinstance(kept, dict) or (kept is None and inode in self._folders):
            target.mkdir()
            for name, child in (kept or {}).items():
                self._rebuild(child, target / name)
        else:
            target.write_bytes(kept if isinstance(kept, bytes) else b"")
