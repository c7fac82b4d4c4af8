"""`gradus sft`: supervised fine-tuning, from conversations to a model directory."""

from __future__ import annotations

from collections.abc import Sequence

from gradus.cli.options import print_help, take_options, wants_help
from gradus.config import SftConfig, check_sft, load_config
from gradus.errors import ConfigError

OPTIONS = {
    "--dry-run": "check all that can refuse the run, print the plan, change nothing",
    "--clean": "delete the run of the same name first",
    "--resume": "go on with the run of the same name",
}
SUMMARY = "Trains a model on conversations and writes it as a Hugging Face directory."


def run(words: Sequence[str]) -> int:
    """Load the config, check it on this machine, and run it."""
    if wants_help(words):
        print_help("sft", SUMMARY, SftConfig, OPTIONS, words=words)
        return 0
    options, rest = take_options(words, OPTIONS)
    if {"--clean", "--resume"} <= options:
        raise ConfigError("--clean deletes what --resume needs; use one of them")
    config = load_config(SftConfig, rest, check=check_sft)
    if "--resume" in options and config.name is None:
        raise ConfigError("--resume needs the name of the run; give it with --name")

    from gradus.launch.local import run_sft

    return run_sft(
        config,
        resume="--resume" in options,
        clean="--clean" in options,
        dry_run="--dry-run" in options,
    )
