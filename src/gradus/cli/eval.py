"""`gradus eval`: measures a model directory, or a model behind an endpoint."""

from __future__ import annotations

from collections.abc import Sequence

from gradus.cli.options import print_help, take_options, wants_help
from gradus.config import EvalConfig, check_eval, load_config
from gradus.errors import ConfigError

OPTIONS = {
    "--dry-run": "check all that can refuse the run, print the plan, change nothing",
    "--clean": "delete the evaluation of the same name first",
    "--resume": "play only what is missing or failed in the evaluation of the same name",
}
SUMMARY = (
    "Plays tasks of some environments and reports avg@k, pass@k and pass^k. "
    "'--model NAME' is short for '--model.name NAME'."
)


def run(words: Sequence[str]) -> int:
    """Load the config, check it on this machine, and evaluate."""
    if wants_help(words):
        print_help("eval", SUMMARY, EvalConfig, OPTIONS, words=words)
        return 0
    options, rest = take_options(words, OPTIONS)
    if {"--clean", "--resume"} <= options:
        raise ConfigError("--clean deletes what --resume needs; use one of them")
    config = load_config(EvalConfig, _spelled_out(rest), check=check_eval)

    from gradus.launch.evaluation import run_eval

    return run_eval(
        config,
        resume="--resume" in options,
        clean="--clean" in options,
        dry_run="--dry-run" in options,
    )


def _spelled_out(words: Sequence[str]) -> list[str]:
    """`--model NAME` as `--model.name NAME`; `--model @ file.toml` stays what it is."""
    followers = [*words[1:], "@"]
    return [
        "--model.name" if word == "--model" and follower != "@" else word
        for word, follower in zip(words, followers, strict=False)
    ]
