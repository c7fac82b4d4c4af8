"""Which worker gets which files when all tests are run at once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import scheduling
from scheduling import LONGEST, MAX_WHOLE_RUNS, RANKS, ROOT, SERVER, WHOLE_RUNS, WholeSession
from xdist.remote import Producer

UNITS = [f"tests/unit/test_{number}.py::test_{it}" for number in range(20) for it in range(5)]


class FakeWorker:
    """Does what it is given in order, and remembers it."""

    shutting_down = False

    def __init__(self, number: int) -> None:
        self.gateway = SimpleNamespace(id=f"gw{number}")
        self.given: list[int] = []
        self.done = 0

    def send_runtest_some(self, indices: list[int]) -> None:
        self.given += indices

    def shutdown(self) -> None:
        self.shutting_down = True


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config) -> WholeSession:
    monkeypatch.setattr("xdist.scheduler.loadscope.parse_tx_spec_config", lambda _: range(4))
    monkeypatch.setattr(pytestconfig.option, "loadscopereorder", False)
    return WholeSession(pytestconfig, Producer("test", enabled=False))


def begin(session: WholeSession, tests: list[str]) -> list[Any]:
    workers = [FakeWorker(number) for number in range(4)]
    for worker in workers:
        session.add_node(worker)
        session.add_node_collection(worker, tests)
    session.schedule()
    return workers


def whole_runs(tests: list[str], worker: Any) -> list[str]:
    ahead = worker.given[worker.done :]
    return [tests[index] for index in ahead if tests[index].startswith(WHOLE_RUNS)]


def test_every_test_is_given_once_and_whole_runs_to_three_workers_while_units_are_left(
    session: WholeSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    tests = [*UNITS, *(f"{path}::test_{it}" for path in LONGEST for it in range(4))]
    workers = begin(session, tests)
    given = [tests[worker.given[0]].split("::")[0] for worker in workers]
    assert given[:MAX_WHOLE_RUNS] == list(LONGEST[:MAX_WHOLE_RUNS])
    turn = 0
    while any(worker.done < len(worker.given) for worker in workers):
        # Whole runs take five times as long.
        for worker in workers:
            is_whole_run = bool(whole_runs(tests, worker)[:1])
            if worker.done < len(worker.given) and (turn % 5 == 0 or not is_whole_run):
                worker.done += 1
                session.mark_test_complete(worker, worker.given[worker.done - 1])
        turn += 1
        if any(unit in session.workqueue for unit in {it.split("::")[0] for it in UNITS}):
            assert sum(bool(whole_runs(tests, it)) for it in workers) <= MAX_WHOLE_RUNS
    assert sorted(index for worker in workers for index in worker.given) == list(range(len(tests)))


def test_files_that_ask_for_one_thing_are_one_piece_of_work(session: WholeSession) -> None:
    for name in ("test_token_route_served", "test_reference_scoring"):
        assert session._split_scope(f"{WHOLE_RUNS}{name}.py::test_it") == SERVER
    for name in ("test_ranks", "test_reference_policy", "test_stored"):
        assert session._split_scope(f"tests/unit/trainer/{name}.py::test_it") == RANKS
    assert session._split_scope(LONGEST[0] + "::test_it") == LONGEST[0]


def test_the_longest_files_are_there() -> None:
    assert [path for path in scheduling.LONGEST if not (ROOT / path).is_file()] == []
