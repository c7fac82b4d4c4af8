"""Imports the trainer once, then forks the ranks of each small world that a test asks for.

The fixture `forks` starts this program. A forked rank starts in milliseconds; torchrun and each
rank that it starts import torch for seconds. One JSON line on standard input asks for one world;
the answer is the exit codes of its ranks.
"""

from __future__ import annotations

import json
import os
import runpy
import socket
import sys
import traceback
from typing import Any, NoReturn

import gradus.trainer.entry.rl  # noqa: F401


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def be_rank(rank: int, port: int, command: dict[str, Any]) -> NoReturn:
    """Run the program as torchrun would run it, with its output in a file."""
    num_ranks = str(command["num_ranks"])
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": num_ranks,
        "LOCAL_WORLD_SIZE": num_ranks,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    output = os.open(command["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.argv = command["argv"]
    code = 0
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def fork_world(command: dict[str, Any]) -> list[int]:
    port, pids = free_port(), []
    for rank in range(command["num_ranks"]):
        pid = os.fork()
        if pid == 0:
            be_rank(rank, port, command)
        pids.append(pid)
    return pids


def say(answer: object) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def main() -> None:
    left = []
    say("ready")
    for line in sys.stdin:
        command = json.loads(line)
        pids = fork_world(command)
        if command["waits"]:
            codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
            say(codes)
        else:
            left += pids
            say([])
    for pid in left:
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
