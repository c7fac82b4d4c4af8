"""What runs in the box before the program: builds the box's file system where bubblewrap did not,
writes the program's files, sets its limits, becomes the program.

Given as text to `python -I -S -c`, with the numbers of two descriptors: the order, and a pipe that
hears `+` when all is ready, or why it is not. It imports nothing of gradus, which the box does not
show, and no json, which takes longer than all else here.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
from collections.abc import Iterable

_BUILT_ON = "/proc"
"""Where the new root is built: a folder that exists, and from which nothing is needed."""
_READ_ONLY, _NO_SUID, _NO_DEVICES, _NO_EXEC = 1, 2, 4, 8
_BIND, _RECURSIVE = 4096, 16384
_MOUNT_SETATTR, _HERE, _AT_RECURSIVE = 442, -100, 0x8000
_DETACH = 2
_MAX_FILES = 20_000
_DROP_BOUND, _NO_NEW_PRIVILEGES, _AMBIENT, _CLEAR = 24, 38, 47, 4
_CAPABILITIES_VERSION = 0x20080522


def read_order(descriptor: int) -> dict[str, dict[str, bytes]]:
    """The order: entries of a kind, a name and a value, each after a line with both lengths."""
    order: dict[str, dict[str, bytes]] = {}
    with open(descriptor, "rb") as file:
        while header := file.readline():
            kind, name_length, value_length = header.split()
            name = file.read(int(name_length)).decode()
            order.setdefault(kind.decode(), {})[name] = file.read(int(value_length))
    return order


class Room:
    """Builds a root that shows only what the steps name, in namespaces of our own."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)

    def build(self, steps: Iterable[bytes]) -> None:
        """Take the steps, then move into the new root and lose the old one."""
        self._mount("tmpfs", _BUILT_ON, "tmpfs", _NO_SUID | _NO_DEVICES, "size=1m,mode=755")
        for step in steps:
            kind, *rest = os.fsdecode(step).split("\0")
            getattr(self, f"_{kind}")(*rest)
        os.chdir(_BUILT_ON)
        self._call("pivot_root", b".", b".")
        self._call("umount2", b".", _DETACH)
        self._seal("/", _READ_ONLY, 0)
        os.chdir("/box")

    def drop_rights(self) -> None:
        """Lose every capability in the namespaces, also for what a root of them would start."""
        self._call("prctl", _AMBIENT, _CLEAR, 0, 0, 0)
        bound = 0
        while self._does("prctl", _DROP_BOUND, bound, 0, 0, 0):
            bound += 1
        header = (ctypes.c_uint32 * 2)(_CAPABILITIES_VERSION, 0)
        self._call("capset", header, (ctypes.c_uint32 * 6)())
        self._call("prctl", _NO_NEW_PRIVILEGES, 1, 0, 0, 0)

    def _bind(self, path: str, options: int = _READ_ONLY | _NO_SUID | _NO_DEVICES) -> None:
        inside = _BUILT_ON + path
        if os.path.isdir(path):
            os.makedirs(inside, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(inside), exist_ok=True)
            open(inside, "x").close()
        self._mount(path, inside, "", _BIND | _RECURSIVE)
        self._seal(inside, options)

    def _link(self, path: str, target: str) -> None:
        os.symlink(target, _BUILT_ON + path)

    def _hide(self, path: str) -> None:
        options = _READ_ONLY | _NO_SUID | _NO_DEVICES
        self._mount("tmpfs", _BUILT_ON + path, "tmpfs", options, "size=4k")

    def _proc(self) -> None:
        inside = f"{_BUILT_ON}/proc"
        os.mkdir(inside)
        self._mount("proc", inside, "proc", _NO_SUID | _NO_DEVICES | _NO_EXEC)
        # In namespaces of its own a program could mount memory that no limit counts.
        with open(f"{inside}/sys/user/max_user_namespaces", "w") as file:
            file.write("0")
        self._seal(inside, _READ_ONLY)

    def _dev(self) -> None:
        for name in ("null", "zero", "full", "random", "urandom"):
            self._bind(f"/dev/{name}", _NO_SUID)
        for name, target in (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")):
            os.symlink(f"/proc/self/fd{target}", f"{_BUILT_ON}/dev/{name}")

    def _disk(self, size: str) -> None:
        os.mkdir(f"{_BUILT_ON}/box")
        options = f"size={size},nr_inodes={_MAX_FILES},mode=700"
        self._mount("tmpfs", f"{_BUILT_ON}/box", "tmpfs", _NO_SUID | _NO_DEVICES, options)

    def _mount(self, source: str, target: str, kind: str, flags: int, options: str = "") -> None:
        words = [os.fsencode(word) for word in (source, target, kind)]
        self._call("mount", *words, flags, os.fsencode(options) or None, name=target)

    def _seal(self, path: str, options: int, flags: int = _AT_RECURSIVE) -> None:
        added = (ctypes.c_uint64 * 4)(options, 0, 0, 0)
        place = os.fsencode(path)
        self._call("syscall", _MOUNT_SETATTR, _HERE, place, flags, added, 32, name=path)

    def _call(self, function: str, *arguments: object, name: str = "") -> None:
        if not self._does(function, *arguments):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), name or function)

    def _does(self, function: str, *arguments: object) -> bool:
        whole = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
        return bool(getattr(self._libc, function)(*whole) == 0)


def write_files(files: dict[str, bytes]) -> None:
    """Write each content below the working directory."""
    for path, content in files.items():
        folder = os.path.dirname(path)
        if folder:
            os.makedirs(folder, exist_ok=True)
        with open(path, "wb") as file:
            file.write(content)


def found(command: str, path: str) -> str:
    """The file of a command; FileNotFoundError when there is none."""
    folders = [""] if "/" in command else path.split(":")
    for folder in folders:
        candidate = os.path.join(folder, command)
        if os.access(candidate, os.X_OK):
            return candidate
    raise FileNotFoundError(f"there is no command {command!r} in the box")


def become_init() -> None:
    """Leave process 1 behind, which collects the dead and ends with the program's own status."""
    child = os.fork()
    if child == 0:
        return
    while True:
        pid, status = os.wait()
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


def set_limits(limits: dict[str, int]) -> None:
    """Hard limits, which a process without privileges cannot raise again."""
    cpu = limits["cpu_seconds"]
    resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu + 1))
    for name, value in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, limits["file_bytes"]),
        (resource.RLIMIT_NOFILE, limits["open_files"]),
        (resource.RLIMIT_NPROC, limits["processes"]),
        (resource.RLIMIT_AS, limits["memory_bytes"]),
    ):
        hard = resource.getrlimit(name)[1]
        bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(name, (bound, bound))


def main() -> None:
    """Prepare, say so, and become the program."""
    order_fd, ready_fd = int(sys.argv[1]), int(sys.argv[2])
    os.set_inheritable(ready_fd, False)
    try:
        order = read_order(order_fd)
        os.umask(0o022)
        if "room" in order:
            room = Room()
            room.build(order["room"].values())
            room.drop_rights()
        os.umask(0o077)
        write_files(order.get("file", {}))
        if "init" in order:
            become_init()
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        command = [os.fsdecode(word) for word in order["word"].values()]
        variables = {name: os.fsdecode(value) for name, value in order["variable"].items()}
        path = found(command[0], variables["PATH"])
        set_limits({name: int(value) for name, value in order["limit"].items()})
        os.write(ready_fd, b"+")
        os.execve(path, command, variables)
    except BaseException as error:
        os.write(ready_fd, f"{type(error).__name__}: {error}".encode()[:500])
        os._exit(127)


if __name__ == "__main__":
    main()
