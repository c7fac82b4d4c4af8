"""What runs in the box before the program: writes its files, sets its limits, becomes the program.

Given as text to `python -I -S -c`, with the numbers of two descriptors: the order, and a pipe that
hears `+` when all is ready, or why it is not. It imports nothing of gradus, which the box does not
show, and no json, which takes longer than all else here.
"""

from __future__ import annotations

import os
import resource
import signal
import sys


def read_order(descriptor: int) -> dict[str, dict[str, bytes]]:
    """The order: entries of a kind, a name and a value, each after a line with both lengths."""
    order: dict[str, dict[str, bytes]] = {}
    with open(descriptor, "rb") as file:
        while header := file.readline():
            kind, name_length, value_length = header.split()
            name = file.read(int(name_length)).decode()
            order.setdefault(kind.decode(), {})[name] = file.read(int(value_length))
    return order


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
        os.umask(0o077)
        write_files(order.get("file", {}))
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
