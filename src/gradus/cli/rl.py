"""`gradus rl`: one reinforcement-learning run, from config to a trained model."""

from __future__ import annotations

from collections.abc import Sequence

from gradus.cli.options import print_help, take_options, take_value, wants_help
from gradus.cli.replay import REPLAY, RUN_DIR, run_replay
from gradus.config import RunConfig, check_run, load_config
from gradus.errors import ConfigError

OPTIONS = {
    "--dry-run": "check all that can refuse the run, print the plan, change nothing",
    "--clean": "delete the run of the same name first",
    "--resume": "go on with the run of the same name",
}
REPLAY_OPTIONS = {
    f"{REPLAY} RUN": "train a recorded run again from its episodes and compare the weights",
    f"{RUN_DIR} NEW": "folder of the replay; a new one beside RUN unless given",
}
SUMMARY = "Starts every process of a reinforcement-learning run, shows progress, stops all of them."


def run(words: Sequence[str]) -> int:
    """Load the config, check it on this machine, and run it."""
    if wants_help(words):
        print_help("rl", SUMMARY, RunConfig, OPTIONS | REPLAY_OPTIONS, words=words)
        return 0
    options, rest = take_options(words, OPTIONS)
    if {"--clean", "--resume"} <= options:
        raise ConfigError("--clean deletes what --resume needs; use one of them")
    recorded, rest = take_value(rest, REPLAY)
    if recorded is not None:
        return run_replay(recorded, rest, options=options)
    config = load_config(RunConfig, rest, check=check_run)
    if "--resume" in options and config.name is None:
        raise ConfigError("--resume needs the name of the run; give it with --name")

    from gradus.launch.local import run_rl

    return run_rl(
        config,
        resume="--resume" in options,
        clean="--clean" in options,
        dry_run="--dry-run" in options,
    )
