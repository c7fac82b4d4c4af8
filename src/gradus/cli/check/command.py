"""`gradus check`: whether a config and this machine work, at four levels of trying."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from gradus.cli.check.findings import Finding, Report
from gradus.cli.check.machine import (
    Facts,
    Needs,
    gpu_lines,
    link_lines,
    machine_lines,
    version_lines,
)
from gradus.cli.check.parts import parts_of, probe_parts
from gradus.cli.check.probes import dtype_line, one_node_of, play, train
from gradus.cli.options import print_help, take_options, take_value, wants_help
from gradus.cli.runs import KINDS, RUN_COMMANDS, kind_of
from gradus.config import LaunchedConfig, RunConfig, load_config
from gradus.errors import ConfigError, ExitCode
from gradus.launch.job import precision_warnings, with_dtypes, with_trial
from gradus.monitor import wrapped
from gradus.plan.hardware import Hardware
from gradus.plan.machine import check
from gradus.plan.processes import Machine
from gradus.plan.show import describe_config
from gradus.processes.supervisor import become_subreaper
from gradus.run.lease import run_at
from gradus.run.recording import read_launched

JSON = "--json"
LEVELS = ("config", "load", "play", "train")
OPTIONS = {
    "--level LEVEL": "config: keys and installed modules alone, in seconds; load, unless another "
    "is given: each part in a process of its own; play: also the machine, the files of the model, "
    "trackers, and every environment with a scripted engine; train: also the engine with its "
    "logprobs and versions, a step of the trainer, and ten steps of everything",
    "--run RUN": "examine the config of a run; what follows changes it",
    JSON: "one JSON object for each finding",
}
SUMMARY = (
    "Says what works here, by trying as much as its level says, and prints the plan; leaves "
    "nothing behind but what it finds of bfloat16 on this processor, in your cache folder. "
    "'gradus check rl', 'check sft' or 'check eval' if the config alone does not say which it is; "
    "without a config only the machine. The exit code is 64 for a config that is refused, 65 when "
    "something fails, 75 when something outside is away."
)


def run(words: Sequence[str]) -> int:
    if wants_help(words):
        print_help("check [rl|sft|eval]", SUMMARY, RunConfig, OPTIONS, words=words)
        return 0
    level, words = take_value(words, "--level", wants=f"one of {', '.join(LEVELS)}")
    level = level or "load"
    if level not in LEVELS:
        raise ConfigError(f"--level {level}: use one of {', '.join(LEVELS)}")
    named, words = take_value(words, "--run")
    options, rest = take_options(words, {JSON: ""})
    machine = Machine.current()
    report = Report(is_json=JSON in options)
    if named is None and not rest:
        _tell(report, _machine(None, machine))
        return report.exit_code
    config = _config(rest, named, machine)
    plan = ["this config is consistent; nothing was loaded"]
    if level != "config":
        become_subreaper()
        # Its temporary folders go then too.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        _tell(report, _findings(config, machine, level))
        works = "works here" if report.exit_code == ExitCode.DONE else "does not work here"
        plan = [f"this config {works}"]
    if not report.is_json:
        here = with_trial(Hardware.current(machine.gpus), config, machine, may_start=False)
        config = with_dtypes(config, here)
        plan += describe_config(config, machine.gpus, is_loaded=level != "config")
        plan += [f"precision: {line}" for line in precision_warnings(config, here)]
        print("\n".join(wrapped(plan)))
    return report.exit_code


def _tell(report: Report, findings: Iterable[Finding]) -> None:
    for finding in findings:
        report.add(finding)
    report.end()


def _config(words: Sequence[str], run_folder: str | None, machine: Machine) -> LaunchedConfig:
    """What is examined; ConfigError with every problem of the config."""
    checked = partial(check, gpus=machine.gpus)
    if run_folder is not None:
        launched = read_launched(run_at(run_folder))
        if launched.kind not in KINDS.values():
            raise ConfigError(
                f"{run_folder} is a {launched.kind or 'run'}; give one of rl, sft or eval"
            )
        base = dict(launched.written)
        return load_config(RUN_COMMANDS[launched.kind].config, words, base=base, check=checked)
    is_named = words[0] in KINDS.values()
    rest = words[1:] if is_named else words
    kind = words[0] if is_named else kind_of(rest) or "rl"
    return load_config(RUN_COMMANDS[kind].config, rest, check=checked)


def _findings(config: LaunchedConfig, machine: Machine, level: str) -> Iterator[Finding]:
    """Everything that is tried, as it is known."""
    if level == "load":
        config, line = dtype_line(config, machine)
        yield line
        yield from probe_parts(parts_of(config, machine), machine)
        return
    yield from _machine(config, machine)
    patient, told = one_node_of(config, machine)
    if told is not None:
        yield told
    if patient.fits_here:
        config, line = dtype_line(patient.config, machine)
        patient = replace(patient, config=config)
        yield line
    yield from play(patient)
    if level == "train":
        yield from train(patient)


def _machine(config: LaunchedConfig | None, machine: Machine) -> Iterator[Finding]:
    place = Path("runs" if config is None else config.output_dir)
    needs = Needs.of(config, machine.gpus)
    yield from _timed(lambda: machine_lines(Facts.read(place), needs))
    yield from _timed(lambda: gpu_lines(machine.gpus))
    yield from _timed(lambda: link_lines(machine.gpus))
    yield from _timed(version_lines)


def _timed(lines: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    """The first says how long all of them took."""
    began = time.monotonic()
    for number, line in enumerate(list(lines())):
        yield replace(line, seconds=0.0 if number else time.monotonic() - began)
