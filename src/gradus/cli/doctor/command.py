"""`gradus doctor`: says whether this machine and this config can work, by trying."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from gradus.cli.doctor.lines import ProbeLine, ProbeVerdict, Report
from gradus.cli.doctor.machine import (
    Facts,
    Needs,
    gpu_lines,
    link_lines,
    machine_lines,
    version_lines,
)
from gradus.cli.doctor.probes import dtype_line, examine, one_node_of
from gradus.cli.options import print_help, take_options, take_value, wants_help
from gradus.cli.runs import KINDS, RUN_COMMANDS, kind_of
from gradus.config import LaunchedConfig, RunConfig, load_config
from gradus.errors import ConfigError, ExitCode
from gradus.plan.machine import check
from gradus.plan.processes import Machine
from gradus.processes.supervisor import become_subreaper
from gradus.run.lease import run_at
from gradus.run.recording import read_launched

JSON = "--json"
OPTIONS = {
    JSON: "one JSON object for each probe",
    "--run RUN": "examine the config of a run; what follows changes it",
}
SUMMARY = (
    "Says whether this machine and this config can work, by trying: machine, versions, files of "
    "the model, environments, trackers, the engine with its logprobs and versions, a step of the "
    "trainer, and two steps of everything on tiny shapes. Without a config only the machine. "
    "Leaves nothing behind. The exit code is 65 when a probe fails, 75 when something outside is "
    "away."
)


def run(words: Sequence[str]) -> int:
    if wants_help(words):
        print_help("doctor [rl|sft|eval]", SUMMARY, RunConfig, OPTIONS, words=words)
        return ExitCode.DONE
    named, words = take_value(words, "--run")
    options, rest = take_options(words, {JSON: ""})
    machine = Machine.current()
    config = _config(rest, named)
    become_subreaper()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # Its temporary folders go then too.
    report = Report(is_json=JSON in options)
    for line in _lines(config, machine):
        report.add(line)
    report.end()
    return report.exit_code


def _config(words: Sequence[str], run_folder: str | None) -> LaunchedConfig | None:
    """What is examined; None for the machine alone. ConfigError for a config that is not one."""
    if run_folder is not None:
        launched = read_launched(run_at(run_folder))
        if launched.kind not in KINDS.values():
            raise ConfigError(
                f"{run_folder} is a {launched.kind or 'run'}; give one of rl, sft or eval"
            )
        return load_config(RUN_COMMANDS[launched.kind].config, words, base=dict(launched.written))
    if not words:
        return None
    is_named = words[0] in KINDS.values()
    rest = words[1:] if is_named else words
    kind = words[0] if is_named else kind_of(rest) or "rl"
    return load_config(RUN_COMMANDS[kind].config, rest)


def _lines(config: LaunchedConfig | None, machine: Machine) -> Iterator[ProbeLine]:
    """Everything that is known after each probe."""
    place = Path("runs" if config is None else config.output_dir)
    needs = Needs.of(config, machine.gpus)
    yield from _timed(lambda: machine_lines(Facts.read(place), needs))
    yield from _timed(lambda: gpu_lines(machine.gpus))
    yield from _timed(lambda: link_lines(machine.gpus))
    yield from _timed(version_lines)
    if config is None:
        return
    if problems := check(config, gpus=machine.gpus):
        for problem in problems:
            yield ProbeLine("config", ProbeVerdict.FAILS, str(problem))
        return
    yield ProbeLine(
        "config", ProbeVerdict.OK, "its keys agree with each other and with this machine"
    )
    patient, told = one_node_of(config, machine)
    if told is not None:
        yield told
    if patient.fits_here:
        config, line = dtype_line(patient.config, machine)
        patient = replace(patient, config=config)
        yield line
    yield from examine(patient)


def _timed(lines: Callable[[], Iterable[ProbeLine]]) -> Iterator[ProbeLine]:
    """The first line says how long all of them took."""
    began = time.monotonic()
    for number, line in enumerate(list(lines())):
        seconds = 0.0 if number else time.monotonic() - began
        yield ProbeLine(line.probe, line.verdict, line.seen, line.advice, seconds, line.values)
