"""Collects what an agent changed in its container, without tests and what configures them."""

from __future__ import annotations

import io
import sys
import tarfile
from collections.abc import Collection
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import PurePosixPath
from typing import Any

from gradus.errors import EnvironmentFailure

_NAMES, _ARCHIVE = "/tmp/gradus-names", "/tmp/gradus-changes.tar"
_MAX_BYTES = 64 << 20
_HOW_TESTS_RUN = (
    *("conftest.py", "run_tests*", "pytest.ini", ".pytest.ini", "tox.ini", "setup.cfg"),
    *("pyproject.toml", "noxfile.py", ".coveragerc", "Makefile"),
    *("sitecustomize.py", "usercustomize.py", "*.pth"),
)
_NEVER_JUDGED = {"r2e_tests", ".git"}
"""Folders: the tests of R2E-Gym, whose rows name no files, and the history."""
_TEST_FOLDERS = {"test", "tests"}
_RUNNERS = {
    "pytest",
    "_pytest",
    "py",
    "pluggy",
    "iniconfig",
    "packaging",
    "exceptiongroup",
    "tomli",
}
"""Modules of the test runner, whose place no new file may take; nor the standard library's."""


@dataclass(frozen=True)
class Origin:
    """The repository as the image has it."""

    commit: str
    tracked: frozenset[str]

    @classmethod
    async def of(cls, runtime: Any, folder: str) -> Origin:
        """Read it in a container that no agent used."""
        git = f"git -c safe.directory='*' -C {folder}"
        # With -z git quotes no name.
        script = f"{git} rev-parse HEAD && {git} ls-files -z"
        done = await runtime.run(["sh", "-c", script], {})
        if done.exit_code != 0:
            raise EnvironmentFailure(
                f"the image has no git repository in {folder}: {done.stderr.strip()[:300]}"
            )
        commit, _, tracked = done.stdout.partition("\n")
        return cls(commit, frozenset(tracked.split("\0")) - {""})


@dataclass(frozen=True)
class Changes:
    """Files with their new content, and those that are gone."""

    files: dict[str, tuple[bytes, int]]
    """Content and mode by path."""
    removed: tuple[str, ...]

    @classmethod
    async def of(cls, runtime: Any, folder: str, origin: Origin, tests: Collection[str]) -> Changes:
        """Read them in the agent's container; what it says there can only be of its own work."""
        git = f"git -c safe.directory='*' -C {folder}"
        script = (
            f"{{ {git} diff --name-only --no-renames -z {origin.commit}; "
            f"{git} ls-files --others --exclude-standard -z; }} > {_NAMES}; "
            f"tar --null --no-recursion --hard-dereference -C {folder} -cf {_ARCHIVE} -T {_NAMES}; "
            "true"
        )
        await runtime.run(["sh", "-c", script], {})
        names = (await runtime.read(_NAMES, max_bytes=_MAX_BYTES)).decode("utf-8", "replace")
        archive = await runtime.read(_ARCHIVE, max_bytes=_MAX_BYTES)
        wanted = {n for n in names.split("\0") if is_judged(n, origin.tracked, tests)}
        found, seen = {}, set()
        try:
            with tarfile.open(fileobj=io.BytesIO(archive)) as opened:
                for entry in opened:
                    seen.add(entry.name)
                    content = opened.extractfile(entry) if entry.isreg() else None
                    if content is not None and entry.name in wanted:
                        found[entry.name] = (content.read(), entry.mode & 0o755)
        except (tarfile.TarError, OSError, EOFError, ValueError) as error:
            raise EnvironmentFailure(f"the agent's changes cannot be read: {error}") from error
        return cls(found, tuple(sorted((wanted - seen) & origin.tracked)))

    async def write(self, runtime: Any, folder: str) -> None:
        """Make the same changes in another container."""
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as archive:
            for name, (content, mode) in sorted(self.files.items()):
                entry = tarfile.TarInfo(name)
                entry.size, entry.mode = len(content), mode
                archive.addfile(entry, io.BytesIO(content))
        await runtime.write(_ARCHIVE, buffer.getvalue())
        await runtime.write(_NAMES, "".join(f"{name}\0" for name in self.removed).encode())
        script = (
            f"cd {folder} && xargs -0 rm -f -- < {_NAMES} && tar --no-same-owner -xf {_ARCHIVE}"
        )
        done = await runtime.run(["sh", "-c", script], {})
        if done.exit_code != 0:
            raise EnvironmentFailure(f"changes cannot be applied: {done.stderr.strip()[:300]}")


def is_judged(path: str, tracked: Collection[str], tests: Collection[str]) -> bool:
    """Whether a changed file is the agent's work, and neither one of the tests, or beside them, nor
    what says how tests run.

    >>> tests = ["tests/client/test_get.py"]
    >>> [is_judged(path, {"web/a.py"}, tests) for path in ("web/test/client.py", "tests/case.py")]
    [True, False]
    """
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or ".." in parts or path in tests:
        return False
    if any(path.startswith(folder) for folder in map(_test_folder, tests) if folder):
        return False
    if _NEVER_JUDGED & {part.lower() for part in parts[:-1]}:
        return False
    if any(fnmatch(parts[-1].lower(), pattern.lower()) for pattern in _HOW_TESTS_RUN):
        return False
    if path in tracked:
        return True
    module = parts[0].partition(".")[0]
    is_known = any(name.split("/")[0] == parts[0] for name in tracked)
    return is_known or module not in _RUNNERS | sys.stdlib_module_names


def _test_folder(test: str) -> str:
    """The outermost folder of tests that a test lies in, with what it may import; "" without."""
    *folders, _ = PurePosixPath(test).parts or ("",)
    for number, name in enumerate(folders, start=1):
        if name.lower() in _TEST_FOLDERS:
            return "/".join(folders[:number]) + "/"
    return ""
