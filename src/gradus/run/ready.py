"""How the processes of a run find one another, and notice that one has ended."""

from __future__ import annotations

import asyncio
import os
import re
import secrets
from collections.abc import Sequence, Set
from pathlib import Path
from typing import TypeVar

import msgspec

from gradus.errors import ConfigError, ProcessError, ProtocolError
from gradus.files import read_json, write_atomically, write_json
from gradus.run.paths import RunDirectory

T = TypeVar("T")
_ADDRESS = re.compile(r"https?://([\w-]{1,63}(\.[\w-]{1,63})*|\[[0-9a-fA-F:]+\]):\d{1,5}")
NODE_VARIABLE = "GRADUS_NODE"
"""Set for processes on other nodes than the launcher's: its number."""


_LOOK_SECONDS = 0.02


class InferenceReady(msgspec.Struct, frozen=True):
    """What the inference server writes when it can serve."""

    base_url: str
    pid: int
    """0 on another node than the launcher's."""


class EnvironmentReady(msgspec.Struct, frozen=True):
    """What an environment process writes when it can serve."""

    run_address: str
    pid: int


def own_pid() -> int:
    """The pid of this process for those who watch it; 0 where they cannot."""
    return 0 if NODE_VARIABLE in os.environ else os.getpid()


def write_ready(run_dir: RunDirectory, process: str, term: int) -> None:
    write_json(run_dir.ready_file(process), {"pid": os.getpid(), "term": term})


def write_done(run_dir: RunDirectory, process: str) -> None:
    """Tell the launcher that this process has done its work; exit code 0 alone does not say so.

    Only the process that wrote the ready file may: others are ranks beside it, or of an older term.
    """
    path = run_dir.ready_file(process)
    content = read_json(path) if path.exists() else {}
    if content.get("pid") == os.getpid():
        write_json(path, content | {"done": True})


def read_ready(run_dir: RunDirectory, process: str, kind: type[T]) -> T:
    """The ready file of `process`; ProcessError when that process is not ready."""
    path = run_dir.ready_file(process)
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError as error:
        raise ProcessError(
            f"process {process!r} is not ready: {path} does not exist; start it first"
        ) from error
    except ValueError as error:
        raise ProtocolError(f"{path} is not what {process!r} should write: {error}") from error


def read_servers(text: str, *, only_encrypted: bool = False) -> list[str]:
    """The addresses in a file of `inference.addresses`; ValueError says which line is wrong.

    An empty line and what follows a # count for nothing. With `only_encrypted` each speaks HTTPS.

    >>> read_servers("http://10.0.0.7:8000  # rack 2\\n")
    ['http://10.0.0.7:8000']
    """
    lines = text.splitlines()
    if text and not text.endswith("\n"):
        raise ValueError(
            f"line {len(lines)} does not end: write a newline, else half may be missing"
        )
    found: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        address = line.partition("#")[0].strip().rstrip("/")
        if not address:
            continue
        if not _ADDRESS.fullmatch(address) or int(address.rpartition(":")[2]) > 65535:
            raise ValueError(
                f"line {number}: {address!r} is not the address of a server, such as "
                "http://10.0.0.7:8000"
            )
        if only_encrypted and not address.startswith("https:"):
            raise ValueError(
                f"line {number}: {address} would get the run's tokens in the clear, and "
                "inference.authority is set; write https://, or remove that key"
            )
        if address in found:
            raise ValueError(f"line {number}: {address} stands on line {found[address]} already")
        found[address] = number
    return list(found)


def note_left_out(run_dir: RunDirectory, processes: Sequence[str], left_out: Set[str]) -> None:
    """Say which of the replicas the launcher starts no more."""
    for name in processes:
        note = run_dir.ready / f"{name}.out"
        if name in left_out:
            note.touch()
        else:
            note.unlink(missing_ok=True)


def started_replicas(run_dir: RunDirectory, processes: Sequence[str]) -> list[str]:
    return [it for it in processes if not (run_dir.ready / f"{it}.out").exists()]


def make_tokens(run_dir: RunDirectory) -> None:
    """Those of the inference server's routes, which exist only as these two files."""
    run_dir.secrets.mkdir(mode=0o700, parents=True, exist_ok=True)
    for token in (run_dir.admin_token, run_dir.inference_token):
        write_atomically(token, secrets.token_hex(32).encode(), mode=0o600)


def read_token(path: Path) -> str:
    """A token of the run; ConfigError when the run has none."""
    try:
        return path.read_text().strip()
    except FileNotFoundError as error:
        raise ConfigError(f"{path} does not exist; `gradus rl` makes a run's tokens") from error


async def wait_for_exit(pid: int) -> None:
    """Returns when process `pid` ends, or at once when there is none.

    waits for: the kernel, through a pidfd; the process need not be a child of this one.
    """
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
