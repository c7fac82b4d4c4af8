"""A replay on this machine: the trainer of a recorded run, its batches, and the verdict."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from gradus.config import ReplayConfig, RunConfig, given_values, load_config
from gradus.errors import ConfigError
from gradus.files import read_json
from gradus.launch.job import Job, with_dtypes
from gradus.launch.steps import Steps
from gradus.monitor import SFT_COLUMNS
from gradus.plan.hardware import Hardware
from gradus.plan.processes import Machine, plan_config
from gradus.run.paths import RunDirectory
from gradus.run.settings import differences, leaves

_NAME_LENGTH = 44
"""Characters of the recorded run's name in that of its replay."""
_TITLE = 12
_CHANGEABLE = re.compile(r"trainer(\..+)?|max_steps")
"""Keys that decide nothing about what was played and which samples make a batch."""
_HARMLESS = re.compile(
    r"trainer\.(env_vars|gpus|bench|weight_transfer|broadcast_backend|peak_teraflops)(\..+)?"
)
"""Keys of the trainer that leave the weights as they are."""


@dataclass(frozen=True)
class ReplayChoice:
    """What a command line makes of a recorded run."""

    config: RunConfig
    """The recorded config with the changes."""
    max_steps: int | None
    """Steps to replay. None means all."""
    changes: tuple[str, ...]
    """Dotted keys whose change may change the weights, with both values."""


@dataclass(frozen=True)
class ReplayReport:
    """How a replay compares with its run."""

    is_same: bool
    steps: int
    versions_compared: int
    first_different_version: int | None
    first_different_step: int | None
    different_metrics: list[str]
    model_files: dict[str, bool] | None
    loss: list[list[float | None]]


def load_replay(recorded: Mapping[str, Any], words: Sequence[str]) -> ReplayChoice:
    """The recorded config with what a command line changes of the trainer.

    ConfigError for keys that decided what was played, and for a recorded config that this version
    does not understand.
    """
    given = dict(leaves(given_values(words)))
    if refused := sorted(key for key in given if not _CHANGEABLE.fullmatch(key)):
        raise ConfigError(
            f"{', '.join(refused)}: decided what the run played, and a replay repeats that. A "
            "replay changes only keys of [trainer], and max_steps to end sooner"
        )
    # Both with the defaults of keys that are newer than the record.
    unchanged = load_config(RunConfig, [], base=recorded)
    config = load_config(RunConfig, words, base=recorded)
    max_steps = config.max_steps if "max_steps" in given else None
    # Schedules go by the steps that the run had.
    config = config.model_copy(update={"max_steps": unchanged.max_steps})
    changes = tuple(
        f"{key} was {was!r} and is {now!r}"
        for key, was, now in differences(unchanged.without_secrets(), config.without_secrets())
        if not _HARMLESS.fullmatch(key)
    )
    return ReplayChoice(config, max_steps, changes)


def replay_folder(recorded: Path, given: str | None) -> Path:
    """The folder that was asked for, or a new one beside the recorded run.

    ConfigError when one of both would lie in the other: neither may go with the other.
    """
    if given is not None:
        folder, run = Path(given).resolve(), recorded.resolve()
        if folder.is_relative_to(run) or run.is_relative_to(folder):
            raise ConfigError(
                f"--run-dir {given} is, contains or is inside the recorded run {run}; "
                "choose a folder beside the recorded run, or omit --run-dir"
            )
        return Path(given).absolute()
    return recorded.with_name(f"{recorded.name[:_NAME_LENGTH]}--replay-{secrets.token_hex(4)}")


def replay_job(config: ReplayConfig, folder: Path) -> Job:
    """What trains the batches of a recorded run again, in `folder`.

    A record names its dtypes; `auto` on the command line is that of the recorded engine.
    """
    machine = Machine.current()
    config = replace(config, run=with_dtypes(config.run, Hardware.current(machine.gpus)))
    return Job(
        name=folder.name,
        output_dir=folder.parent,
        kind="replay",
        launch=config.run.launch,
        logs=config.run.log.settings(),
        written=config.run,
        plan=partial(plan_config, config, machine),
        workload=Steps("replay", config.num_steps, SFT_COLUMNS),
    )


def read_report(folder: Path) -> ReplayReport:
    return ReplayReport(**read_json(RunDirectory(folder).replay_report))


def verdict_lines(report: ReplayReport, *, is_expected: bool) -> list[str]:
    """The last lines on the terminal: whether both came to the same."""
    lines = [_line("batches", f"{report.steps} made again from the episodes, each as recorded")]
    if not is_expected:
        same = "are bitwise the same nevertheless" if report.is_same else "differ, as they may"
        lines.append(_line("weights", f"the trainer was changed; the weights {same}"))
        return [*lines, *_losses(report)]
    if report.is_same:
        versions = report.versions_compared
        compared = [f"{versions} published versions"] if versions else []
        compared += sorted(report.model_files or {})
        lines.append(_line("weights", f"bitwise the same: {', '.join(compared)}"))
        return lines
    return [*lines, *_differences(report)]


def _differences(report: ReplayReport) -> list[str]:
    lines = []
    if report.first_different_version is not None:
        step = report.first_different_version
        text = f"DIFFERENT, first after step {step} (version {step})"
        lines.append(_line("weights", text))
    if report.first_different_step is not None:
        names = ", ".join(report.different_metrics[:3])
        text = f"DIFFERENT, first in step {report.first_different_step + 1}: {names}"
        lines.append(_line("numbers", text))
    for name, is_same in sorted((report.model_files or {}).items()):
        if not is_same:
            lines.append(_line("weights", f"DIFFERENT in {name}"))
    if not lines:
        lines.append(_line("weights", "unknown: the run kept no digest of any version"))
    return lines


def _losses(report: ReplayReport) -> list[str]:
    if not report.loss:
        return []
    first, last = report.loss[0], report.loss[-1]
    return [
        _line("loss", f"first step {_number(first[0])} in the run, {_number(first[1])} now"),
        _line("loss", f"last step {_number(last[0])} in the run, {_number(last[1])} now"),
    ]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"


def _line(title: str, text: str) -> str:
    return f"{title:<{_TITLE}}{text}"
