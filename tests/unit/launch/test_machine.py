"""What is noted of the machine, who reads it, and that nothing of it can end a launch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gradus.errors import ConfigError
from gradus.launch import machine
from gradus.launch.machine import MachineLog
from gradus.monitor import describe_metric
from gradus.monitor.machine import MachineTail, read_machine
from gradus.run.paths import RunDirectory
from gradus.view.screens.about import machine_now


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path)


def watched(run_dir: RunDirectory, term: int = 1, **pids: int) -> MachineLog:
    """The log of a launch whose processes have these pids."""
    children = [
        SimpleNamespace(spec=SimpleNamespace(name=k, node=0), pid=v) for k, v in pids.items()
    ]
    children.append(SimpleNamespace(spec=SimpleNamespace(name="elsewhere", node=1), pid=-1))
    lease: Any = SimpleNamespace(run_dir=run_dir, term=term)
    supervisor: Any = SimpleNamespace(children=children)
    return MachineLog(lease, supervisor)


def a_look(run_dir: RunDirectory, time: float, free: float = 1e9, **more: object) -> None:
    line = {"format": 1, "time": time, "term": 1, "numbers": {"machine/disk_free_bytes": free}}
    with run_dir.machine.open("a") as file:
        file.write(json.dumps(line | more) + "\n")


def test_a_process_counts_with_what_it_started_and_every_name_is_in_the_catalogue(
    run_dir: RunDirectory,
) -> None:
    holds = "x = b'1' * (64 << 20); print(1, flush=True); input()"
    starts = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {holds!r}])"
    child = subprocess.Popen(
        [sys.executable, "-c", starts], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert child.stdout is not None
        child.stdout.readline()
        log = watched(run_dir, 3, trainer=child.pid, gone=2**22 + 1)
        log.look()
        sum(range(30_000_000))
        log.look()
    finally:
        child.communicate(b"\n")
    first, second = read_machine(run_dir)
    assert (first.term, "machine/launcher/cpu" in first.numbers) == (3, False)
    assert first.numbers["machine/trainer/memory_bytes"] > 64 << 20
    assert 0 < second.numbers["machine/launcher/cpu"] <= 1.1
    assert second.numbers["machine/trainer/cpu"] < second.numbers["machine/launcher/cpu"]
    assert not [name for name in second.numbers if "gone" in name or "else" in name]
    assert [name for name in second.numbers if describe_metric(name) is None] == []
    assert second.numbers["machine/disk_free_bytes"] > 0
    assert run_dir.machine.read_bytes().startswith(b'{"format":1,')


def test_gpus_are_read_as_nvidia_smi_prints_them(run_dir: RunDirectory, tmp_path: Path) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(
        "#!/bin/sh\necho '0, 37, 1024, 71.50'\necho '1, [N/A], 2, [N/A]'\necho WARNING: infoROM\n"
    )
    program.chmod(0o755)
    log = watched(run_dir)
    log._nvidia = str(program)
    log.look()
    program.unlink()  # As after an update of the driver.
    log.look()
    first, second = (
        {name: value for name, value in it.numbers.items() if "gpu" in name}
        for it in read_machine(run_dir)
    )
    assert first == {
        "machine/gpu_0/use": 0.37,
        "machine/gpu_0/memory_bytes": 1 << 30,
        "machine/gpu_0/power_watts": 71.5,
        "machine/gpu_1/memory_bytes": 2 << 20,
    }
    assert second == {}
    assert [name for name in first if describe_metric(name) is None] == []


def test_the_file_is_renamed_when_it_is_full_and_both_are_read(
    run_dir: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "MAX_BYTES", 1_000)
    log = watched(run_dir)
    for _ in range(40):
        log.look()
    assert run_dir.older_machine.stat().st_size < 1_400
    times = [it.time for it in read_machine(run_dir)]
    assert len(times) > 5
    assert times == sorted(times)


def test_a_look_that_cannot_be_written_ends_nothing(run_dir: RunDirectory) -> None:
    run_dir.machine.mkdir()
    with watched(run_dir, self=os.getpid()) as log:
        log.look()
    assert read_machine(run_dir) == []


def test_torn_and_damaged_lines_are_no_looks_and_a_newer_format_is_refused(
    run_dir: RunDirectory,
) -> None:
    a_look(run_dir, 10.0)
    with run_dir.machine.open("ab") as file:
        file.write(b'{"format": "x"}\n\xff\n[]\n{"format":1,"time":11')
    assert [it.time for it in read_machine(run_dir)] == [10.0]
    run_dir.machine.unlink()
    a_look(run_dir, 10.0, format=2)
    with pytest.raises(ConfigError, match="has format 2; this gradus reads up to 1"):
        read_machine(run_dir)
    assert MachineTail(run_dir).at(11.0) == {}
    assert "format 2" in str(machine_now(run_dir))


def test_a_record_gets_the_last_look_before_it(run_dir: RunDirectory) -> None:
    tail = MachineTail(run_dir)
    assert tail.at(10.0) == {}
    a_look(run_dir, 10.0, 1.0)
    a_look(run_dir, 20.0, 2.0)
    found = [tail.at(time).get("machine/disk_free_bytes") for time in (9.9, 10, 19.9, 20, 50, 51)]
    assert found == [None, 1.0, 1.0, 2.0, 2.0, None]


def test_the_disk_is_full_when_the_rate_says(run_dir: RunDirectory) -> None:
    assert machine_now(run_dir) is None
    a_look(run_dir, 0.0, 1_000.0)
    a_look(run_dir, 30.0, 900.0)
    found = machine_now(run_dir)
    assert found is not None
    assert found["full_seconds"] is None  # Too short to tell.
    a_look(run_dir, 100.0, 600.0)
    found = machine_now(run_dir)
    assert found is not None
    assert found["full_seconds"] == pytest.approx(150.0)
    assert found["of"][""] == {"disk_free_bytes": 600.0}
    a_look(run_dir, 110.0, 2_000.0)
    found = machine_now(run_dir)
    assert found is not None
    assert found["full_seconds"] is None
