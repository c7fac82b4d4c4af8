"""`gradus lab replay`: a recorded run, trained again from its episodes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gradus.cli.options import print_help, take_options, take_value, wants_help
from gradus.config import ReplayConfig, RunConfig, resolve
from gradus.errors import ConfigError, ExitCode, ReplayError
from gradus.launch.console import unblocked
from gradus.launch.launch import launch
from gradus.run.paths import RunDirectory
from gradus.run.settings import check_one_config
from gradus_lab.replay.job import (
    ReplayChoice,
    load_replay,
    read_report,
    replay_folder,
    replay_job,
    verdict_lines,
)
from gradus_lab.replay.recording import RecordedRun, open_recorded_run

RUN_DIR, CLEAN, DRY_RUN = "--run-dir", "--clean", "--dry-run"
SUMMARY = (
    "Trains a recorded run again from its episodes and compares the weights. Keys of [trainer] may "
    "be changed, and max_steps to end sooner."
)
OPTIONS = {
    f"{RUN_DIR} NEW": "folder of the replay; a new one beside RUN unless given",
    CLEAN: "delete what that folder holds first",
    DRY_RUN: "say whether the run is whole, and what would start; change nothing",
}


def run(words: Sequence[str]) -> int:
    """Replay a run; ReplayError when it came out otherwise although nothing was changed."""
    if wants_help(words):
        print_help("lab replay RUN", SUMMARY, RunConfig, OPTIONS, words=words)
        return ExitCode.DONE
    if not words or words[0].startswith(("-", "@")):
        raise ConfigError("which run? Write gradus lab replay RUN")
    options, rest = take_options(words[1:], {CLEAN: "", DRY_RUN: ""})
    target, rest = take_value(rest, RUN_DIR)
    folder = replay_folder(Path(words[0]).resolve(), target)
    replay = check_replay(words[0], rest)
    recorded = replay.recorded.run_dir.root
    job = replay_job(ReplayConfig(replay.choice.config, recorded, replay.num_steps), folder)
    print("\n".join(replay.lines()), flush=True)
    is_dry = DRY_RUN in options
    with unblocked(sys.stdout) as out:
        code = launch(job, out, clean=CLEAN in options, dry_run=is_dry)
    if code or is_dry:
        return code
    report, is_expected = read_report(folder), not replay.choice.changes
    print("\n".join(verdict_lines(report, is_expected=is_expected)), flush=True)
    if is_expected and not report.is_same:
        path = RunDirectory(folder).replay_report
        raise ReplayError(f"{recorded} and its replay came to other weights; see {path}")
    return code


@dataclass(frozen=True)
class Replay:
    """A recorded run that was found whole, and what is replayed of it."""

    recorded: RecordedRun
    choice: ReplayChoice
    num_steps: int
    num_episodes: int

    def lines(self) -> list[str]:
        steps = f"{self.num_steps} of {self.recorded.decisions.num_batches} steps"
        launches = len(self.recorded.launches)
        lines = [
            f"{'replay of':<18}{self.recorded.run_dir.root}: {steps}, {self.num_episodes} "
            f"episodes of {launches} {'launches' if launches > 1 else 'launch'}"
        ]
        lines += [f"{'changed':<18}{change}" for change in self.choice.changes]
        lines += [f"{'changed':<18}{library}" for library in self.recorded.changed_libraries()]
        if not self.choice.config.trainer.deterministic:
            lines.append(
                f"{'note':<18}trainer.deterministic is false: equal weights are likely with the "
                "same number of threads, and not promised"
            )
        return lines


def check_replay(run: str, words: Sequence[str]) -> Replay:
    """Read a recorded run as a whole; refuses what cannot be replayed, creates nothing."""
    recorded = open_recorded_run(Path(run).resolve())
    check_one_config([it.config for it in recorded.launches])
    choice = load_replay(recorded.launches[-1].written, words)
    num_steps = recorded.check_steps(choice.max_steps)
    resolve(choice.config, run_dir=Path(run), term=0)
    recorded.check_model(choice.config.model.name)
    return Replay(recorded, choice, num_steps, recorded.check_episodes(num_steps))
