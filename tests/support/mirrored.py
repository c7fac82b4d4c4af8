"""A run's folder and a node's copy of it, in one process, over connections that a test breaks."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from gradus.errors import FencedError
from gradus.nodes.folder import FileRange, Opening, Request, Talk
from gradus.nodes.folder_server import FolderServer
from gradus.nodes.mirror import Mirror
from gradus.run.paths import RunDirectory

T = TypeVar("T")


class BrokenTalk(Talk):
    """A connection that is lost at one message, before or after the other end had it."""

    def __init__(self, connected: socket.socket, ends: Ends) -> None:
        super().__init__(connected)
        self._ends = ends

    def ask(self, request: Request, kind: type[T]) -> T:
        ends = self._ends
        ends.num_asked += 1
        ends.asked.append(request)
        if ends.is_cut or ends.lost_before(request):
            raise ConnectionError("lost before the other end had it")
        answer = super().ask(request, kind)
        if ends.lost_after(request):
            raise ConnectionError("lost with the answer")
        return ends.change(answer)


@dataclass
class Ends:
    """The folder at the launcher's node, and that of a node that does not see it."""

    here: RunDirectory
    there: RunDirectory
    term: int = 1
    is_fenced: bool = False
    is_joined: bool = True
    is_cut: bool = False
    num_asked: int = 0
    asked: list[Request] = field(default_factory=list)
    lost_before: Callable[[Request], bool] = lambda _: False
    lost_after: Callable[[Request], bool] = lambda _: False
    change: Callable[[Any], Any] = lambda answer: answer
    mirrors: list[Mirror] = field(default_factory=list)
    serving: list[tuple[Talk, threading.Thread]] = field(default_factory=list)

    @classmethod
    def below(cls, folder: Path) -> Ends:
        ends = cls(RunDirectory(folder / "here" / "run"), RunDirectory(folder / "there" / "run"))
        for path in (ends.here.spool / "events", ends.here.ready, ends.here.logs):
            path.mkdir(parents=True)
        ends.server = FolderServer(ends.here, check=ends.check, term=lambda: ends.term)
        return ends

    server: FolderServer = field(init=False)

    def check(self) -> None:
        if self.is_fenced:
            raise FencedError("another launcher has the run")

    def connect(self, way: str = "a test") -> Talk:
        if self.is_cut:
            raise ConnectionRefusedError
        near, far = socket.socketpair()
        talk = Talk(far)
        thread = self.server.serve(talk, Opening("1.a", way), lambda: self.is_joined)
        self.serving.append((talk, thread))
        return BrokenTalk(near, self)

    def mirror(self) -> Mirror:
        """A node side's copy, from a node side that has just started."""
        self.mirrors.append(Mirror(self.there, self.connect))
        return self.mirrors[-1]

    def close(self) -> None:
        for mirror in self.mirrors:
            mirror.close()
        for talk, thread in self.serving:
            talk.end()
            thread.join()


def damaged_once() -> Callable[[Any], Any]:
    """Flips a bit in the first long range that arrives."""
    is_done = False

    def change(answer: Any) -> Any:
        nonlocal is_done
        if is_done or not isinstance(answer, FileRange) or len(answer.content) < 1000:
            return answer
        is_done = True
        return FileRange(bytes([answer.content[0] ^ 1]) + answer.content[1:])

    return change
