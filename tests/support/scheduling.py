"""Who runs which test when all of them are run at once."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

ROOT = Path(__file__).parents[2]
WHOLE_RUNS = "tests/end_to_end/"
SERVER = f"{WHOLE_RUNS}inference_server"
"""Stands for all files whose tests ask the one inference server."""
TRAINER = "tests/unit/trainer/"
RANKS = f"{TRAINER}ranks"
"""Stands for all files whose tests ask the ranks of trainers, which take seconds to start."""
ASKS_RANKS = re.compile(r"\b(?:forks|ranks|run_ranks): ")
LONGEST = tuple(
    f"{WHOLE_RUNS}test_{name}.py"
    for name in (
        *("init_run", "main_job", "episodes", "resume", "orchestrator", "environment_process"),
        *("sft_with_eval", "sft_commands", "chaos", "solved_run", "plugins_that_leave"),
    )
)
"""Files that take minutes, longest first; they start first, so that no worker ends long after the
others, and so does RANKS among the unit tests."""
MAX_WHOLE_RUNS = 3
"""Workers with whole runs at a time. Those wait for a third of their time, in which others work."""


class WholeSession(LoadScopeScheduling):
    """One worker takes all tests of a file, one all files of the one inference server, and one all
    files of the trainers' ranks.

    Whole runs go to some workers, and files of unit tests to the others and to all at the end.
    """

    def __init__(self, config: pytest.Config, log: Any) -> None:
        super().__init__(config, log)
        self._scopes: dict[str, str] = {}

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.split("::")[0]
        if path not in self._scopes:
            self._scopes[path] = scope_of(path)
        return self._scopes[path]

    def _assign_work_unit(self, node: Any) -> None:
        others = [work for other, work in self.assigned_work.items() if other is not node]
        is_full = sum(map(has_whole_run, others)) >= MAX_WHOLE_RUNS
        best = min(self.workqueue, key=lambda scope: rank(scope, is_full=is_full))
        self.workqueue.move_to_end(best, last=False)
        super()._assign_work_unit(node)


def scope_of(path: str) -> str:
    """The file, or what it asks for."""
    if path.startswith(WHOLE_RUNS) and "inference_server:" in (ROOT / path).read_text():
        return SERVER
    if path.startswith(TRAINER) and ASKS_RANKS.search((ROOT / path).read_text()):
        return RANKS
    return path


def has_whole_run(work: dict[str, dict[str, bool]]) -> bool:
    """Whether a worker has a whole run ahead."""
    return any(
        scope.startswith(WHOLE_RUNS) and not all(tests.values()) for scope, tests in work.items()
    )


def rank(scope: str, *, is_full: bool) -> tuple[bool, int]:
    """What comes first; the order of the files decides between equals."""
    is_whole_run = scope.startswith(WHOLE_RUNS)
    first = (*LONGEST, RANKS)
    place = first.index(scope) if scope in first else len(first)
    return is_whole_run == is_full, place
