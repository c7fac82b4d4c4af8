"""What runs in the box before the program: writes its files, sets its limits, becomes the program.

Given as text to `python -I -S -c`, with the numbers of two descriptors: the order as JSON, and a
pipe that hears `+` when all is ready, or why it is not. It imports nothing of gradus, which the box
does not show.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from typing import Any


def write_files(files: dict[str, str]) -> None:
    """Write each text below the working directory."""
    for path, text in files.items():
        folder = os.path.dirname(path)
        if folder:
            os.makedirs(folder, exist_ok=True)
        with open(path, "wb") as file:
            file.write(text.encode("utf-8", "surrogatepass"))


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
        with open(order_fd, "rb") as file:
            order: dict[str, Any] = json.loads(file.read())
        os.umask(0o077)
        write_files(order["files"])
        if order["init"]:
            become_init()
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        path = found(order["command"][0], order["variables"]["PATH"])
        set_limits(order["limits"])
        os.write(ready_fd, b"+")
        os.execve(path, order["command"], order["variables"])
    except BaseException as error:
        os.write(ready_fd, f"{type(error).__name__}: {error}".encode()[:500])
        os._exit(127)


if __name__ == "__main__":
    main()
