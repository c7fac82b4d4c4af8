"""A real environment process: what it tells, what it refuses, and how it ends."""

from __future__ import annotations

import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import wait_until
from configs import build_algorithm_config
from listening import listeners
from malformed import throw_bytes, throw_messages
from running import RunningEnvironment, exchange

from gradus.config import EnvironmentProcessConfig
from gradus.errors import ExitCode
from gradus.processes.table import (
    descendants,
    is_alive,
    living_processes,
    read_process,
    resident_bytes,
)

pytestmark = pytest.mark.end_to_end


def config_of(run_dir: Path, taskset: dict[str, Any]) -> EnvironmentProcessConfig:
    seat = {"harness": {"id": "gradus-chat"}, "runtime": {"type": "subprocess"}}
    return EnvironmentProcessConfig(
        run_dir=str(run_dir),
        term=3,
        name="source",
        verifiers={"taskset": taskset, "agent": seat},
    )


def start(run_dir: Path, **taskset: Any) -> RunningEnvironment:
    return RunningEnvironment(config_of(run_dir, taskset))


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEnvironment]:
    """One process for the tests that only talk to it."""
    run_dir = tmp_path_factory.mktemp("run")
    config = config_of(run_dir, {"id": "gradus-test-programs", "num_tasks": 3})
    names = {"env_var_names": ["OWN_SETTING", "PASSED_KEY"], "inherited_env": ["OWN_SETTING"]}
    config = config.model_copy(update=names)
    (run_dir / "secrets").mkdir()
    (run_dir / "secrets" / "inference_token").write_text("the-data-token\n")
    given = {"CANARY_SECRET": "sings", "OWN_SETTING": "kept", "HF_TOKEN": "of-the-hub"}
    given["PASSED_KEY"] = "of-a-service"
    with RunningEnvironment(config, variables=given) as environment:
        environment.wait_ready()
        yield environment


def test_ready_file_tells_the_address_and_the_number_of_tasks(shared: RunningEnvironment) -> None:
    ready = shared.wait_ready()
    assert (ready["num_tasks"], ready["term"], ready["pid"]) == (3, 3, shared.process.pid)
    assert ready["run_address"].startswith("ipc://")


@pytest.mark.shows("SEC1", "SEC36")
def test_sockets_lie_in_a_directory_that_only_the_owner_can_enter(
    shared: RunningEnvironment,
) -> None:
    directory = Path(shared.wait_ready()["run_address"].removeprefix("ipc://")).parent
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700


async def test_tasks_are_served_by_index(shared: RunningEnvironment) -> None:
    told = await shared.ask("info")
    assert (told["num_tasks"], told["taskset"]) == (3, "gradus-test-programs")
    assert (told["agents"], told["tools"]) == ({"agent": True}, False)
    task = await shared.ask("task", index=2)
    assert task["task_data"]["prompt"] == "repeat 2"
    assert task["task_data"]["idx"] == 2
    assert len(task["key"]) == 64


async def test_a_task_outside_the_range_is_refused_with_the_range(
    shared: RunningEnvironment,
) -> None:
    for index in (3, -1):
        reply = await shared.ask("task", index=index)
        assert not reply["success"]
        assert "it has 3 tasks, counted from 0" in reply["error"]


def memory(pids: list[int]) -> int:
    return sum(resident_bytes(pid) for pid in pids)


@pytest.mark.shows("F53", "F54", "SEC40", "I10")
async def test_f54_malformed_frames_at_every_socket_end_nothing(
    shared: RunningEnvironment,
) -> None:
    processes = [shared.process.pid]
    processes += [it.pid for it in descendants(shared.process.pid, living_processes())]
    sockets = listeners(processes)
    before = memory(processes)
    assert sockets
    for it in sockets:
        await throw_bytes(it)
        if not it.is_tcp:
            await throw_messages(it)
    reply = await exchange(shared.wait_ready()["run_address"], [b"1", b"unknown", b"\xc0"])
    assert b"unknown method" in reply[-1]
    assert (await shared.ask("health"))["success"]
    assert memory(processes) - before < 200 << 20


@pytest.mark.shows("SEC10", "SEC11")
def test_programs_of_an_environment_inherit_no_variable_that_was_not_given_to_it(
    shared: RunningEnvironment,
) -> None:
    inherited = (shared.log_file.parents[3] / "inherited").read_text()
    assert "OWN_SETTING=kept" in inherited
    for secret in ("sings", "of-a-service", "the-data-token", "of-the-hub"):
        assert secret not in inherited
    assert "the-data-token" not in shared.log


def test_a_stop_signal_ends_everything_and_orphans_without_a_trace_too(tmp_path: Path) -> None:
    with start(tmp_path, id="gradus-test-stray") as environment:
        ready = environment.wait_ready()
        started = descendants(environment.process.pid, living_processes())
        strays = [int(line) for line in (tmp_path / "strays").read_text().splitlines()]
        assert strays
        assert all(read_process(pid) for pid in strays)
        assert environment.stop() == 0
    wait_until(lambda: not any(is_alive(p.pid, p.start_time) for p in started))
    wait_until(lambda: not any(read_process(pid) for pid in strays))
    assert not Path(ready["run_address"].removeprefix("ipc://")).parent.exists()


def test_a_stop_signal_during_the_start_leaves_nothing(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="g") as short:
        config = config_of(tmp_path, {"id": "gradus-test-echo"})
        variables = {"TMPDIR": short}
        with RunningEnvironment(config, variables=variables) as environment:
            wait_until(lambda: list(Path(short).iterdir()), timeout_seconds=60)
            assert environment.stop() == 0
        wait_until(lambda: not list(Path(short).iterdir()))


def test_an_algorithm_that_cannot_learn_from_the_agents_ends_the_process(tmp_path: Path) -> None:
    config = config_of(tmp_path, {"id": "gradus-test-echo"})
    config = config.model_copy(update={"algo": build_algorithm_config("rae")})
    with RunningEnvironment(config) as environment:
        assert environment.wait_exit() == ExitCode.CONFIG
        assert "source 'source': rae compares agents" in environment.error_line


def test_an_environment_that_raises_at_import_is_told_with_the_place(tmp_path: Path) -> None:
    with start(tmp_path, id="gradus-test-broken-import") as environment:
        assert environment.wait_exit() == ExitCode.INTERNAL
        assert "Traceback" not in environment.log
        assert "RuntimeError: the data of this environment is not there" in environment.error_line
        assert "gradus_test_broken_import.py, line 5" in environment.error_line
