"""`gradus rl --replay RUN`: check a recorded run, train it again, say whether it came out alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gradus.cli.options import take_value
from gradus.config import ReplayChoice, load_replay, one_config, resolve_run
from gradus.errors import ConfigError, ReplayError

if TYPE_CHECKING:
    from gradus.orchestrator.replay.recording import RecordedRun

REPLAY = "--replay"
RUN_DIR = "--run-dir"


@dataclass(frozen=True)
class Replay:
    """A recorded run that was found whole, and what is replayed of it."""

    recorded: RecordedRun
    choice: ReplayChoice
    num_steps: int
    num_episodes: int

    def lines(self) -> list[str]:
        """The plan for a person."""
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
    from gradus.orchestrator.replay.recording import open_recorded_run

    recorded = open_recorded_run(Path(run).resolve())
    choice = load_replay(one_config(recorded.configs), words)
    num_steps = recorded.check_steps(choice.max_steps)
    resolve_run(choice.config, run_dir=Path(run), term=0)
    recorded.check_model(choice.config.model.name)
    return Replay(recorded, choice, num_steps, recorded.check_episodes(num_steps))


def run_replay(run: str, words: Sequence[str], *, options: set[str]) -> int:
    """Replay a run; ReplayError when it came out otherwise although nothing was changed."""
    if "--resume" in options:
        raise ConfigError("a replay starts from the first step; leave --resume away")
    target, rest = take_value(words, RUN_DIR)

    from gradus.launch.replay import ReplayJob, launch_replay, replay_folder

    folder = replay_folder(Path(run).resolve(), target)
    replay = check_replay(run, rest)
    job = ReplayJob(
        config=replay.choice.config,
        recorded=replay.recorded.run_dir.root,
        folder=folder,
        num_steps=replay.num_steps,
    )
    print("\n".join(replay.lines()), flush=True)
    is_dry = "--dry-run" in options
    code = launch_replay(job, clean="--clean" in options, dry_run=is_dry)
    if code or is_dry:
        return code
    return _verdict(job.folder, replay)


def _verdict(folder: Path, replay: Replay) -> int:
    from gradus.launch.replay import read_report, verdict_lines

    report = read_report(folder)
    is_expected = not replay.choice.changes
    print("\n".join(verdict_lines(report, is_expected=is_expected)), flush=True)
    if is_expected and not report.is_same:
        raise ReplayError(
            f"the replay of {replay.recorded.run_dir.root} did not come to the same weights; see "
            f"{folder / 'replay' / 'report.json'} and docs/replay.md"
        )
    return 0
