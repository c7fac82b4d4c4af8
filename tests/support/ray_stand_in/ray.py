"""The few calls of Ray that gradus makes, for a cluster that a file describes: `RAY_STAND_IN`.

A folder to put before others on the path. The file is read at each call, so a test changes the
cluster by writing it. Actors are threads, and what they start is the file's `program`.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

ANSWER_SECONDS = 60.0
util = exceptions = scheduling_strategies = sys.modules[__name__]
for _name in ("util", "exceptions", "util.scheduling_strategies"):
    sys.modules[f"{__name__}.{_name}"] = sys.modules[__name__]


class RayError(Exception):
    """As Ray's."""


class AuthenticationError(RayError):
    """As Ray's."""


def _cluster() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(os.environ["RAY_STAND_IN"]).read_text())
    if found.get("is_gone"):
        sys.stderr.write("the cluster is gone\n")
        os._exit(1)
    return found


def init(address: str, **_: object) -> None:
    """Joins, or raises what Ray raises."""
    found = _cluster()
    os.write(1, b"Connecting to existing Ray cluster\n")  # Ray prints too
    if found.get("is_mute"):
        threading.Event().wait(ANSWER_SECONDS)
    if address == "auto" and found.get("is_absent"):
        raise ConnectionError("Could not find any running Ray instance.")
    if why := found.get("refuses_token"):
        raise ConnectionError("Failed to connect") from AuthenticationError(why)
    if why := found.get("hides"):  # as Ray does
        raise ConnectionError("Failed to connect") from RuntimeError(why)
    if why := found.get("raises"):
        raise RuntimeError(why)


def nodes() -> list[dict[str, Any]]:
    """Those of the file; the first is this one."""
    return [
        {
            "NodeID": host,
            "NodeManagerHostname": host,
            "Alive": is_alive,
            "Resources": {"CPU": cpus, **({"GPU": gpus} if gpus else {})},
        }
        for host, cpus, gpus, is_alive in _cluster()["nodes"]
    ]


def available_resources() -> dict[str, float]:
    """What is free in all."""
    return {"CPU": 1.0}


class _Context:
    def get_node_id(self) -> str:
        return str(_cluster()["nodes"][0][0])


def get_runtime_context() -> _Context:
    """Of this process."""
    return _Context()


def get_node_ip_address() -> str:
    """Of this node."""
    return "127.0.0.1"


def placement_group(bundles: list[Any], **options: Any) -> dict[str, Any]:
    """What was asked for, which the file's `asked` shows."""
    asked = {"bundles": bundles, **options}
    Path(_cluster()["asked"]).write_text(json.dumps(asked))
    return asked


def placement_group_table(_: object) -> dict[str, Any]:
    """Whether it was placed."""
    return {"state": "PENDING" if _cluster().get("is_full") else "CREATED"}


def PlacementGroupSchedulingStrategy(group: object, bundle: int) -> tuple[object, int]:
    """Group and place in it."""
    return group, bundle


class _Call:
    def __init__(self, actor: _Actor, run: Any) -> None:
        self.actor, self._run = actor, run
        self.result: Any = None

    def remote(self, *words: str) -> _Call:
        self.thread = threading.Thread(target=self._work, args=words, daemon=True)
        self.thread.start()
        return self

    def _work(self, *words: str) -> None:
        self.result = self._run(*words)

    @property
    def is_over(self) -> bool:
        return not self.thread.is_alive() or self.actor.bundle in _cluster().get("dead", [])


class _Actor:
    def __init__(self, kind: type) -> None:
        self._kind = kind

    def options(self, *, scheduling_strategy: tuple[object, int], **chosen: object) -> _Actor:
        assert chosen["max_restarts"] == 0
        self.bundle = scheduling_strategy[1]
        return self

    def remote(self) -> _Actor:
        sys.modules[self._kind.__module__].PROGRAM = tuple(_cluster()["program"])  # type: ignore[attr-defined]
        return self

    def __getattr__(self, name: str) -> _Call:
        return _Call(self, getattr(self._kind(), name))


def remote(kind: type) -> _Actor:
    """An actor of that class."""
    return _Actor(kind)


def wait(calls: list[_Call], **_: object) -> tuple[list[_Call], list[_Call]]:
    """Those that are over, and the others."""
    return [it for it in calls if it.is_over], [it for it in calls if not it.is_over]


def get(call: _Call) -> Any:
    """What a call returned; RayError when its node died."""
    if call.thread.is_alive():
        raise RayError("The actor died unexpectedly before finishing this task.")
    return call.result
