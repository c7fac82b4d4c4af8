"""`gradus sft`: supervised fine-tuning, from conversations to a model directory."""

from __future__ import annotations

from collections.abc import Sequence

from gradus.cli.options import print_help, take_options, wants_help
from gradus.config.load import load_config
from gradus.config.preflight import check_sft
from gradus.config.sft import SftConfig

OPTIONS = {
    "--dry-run": "write the config of the trainer, print the plan, start nothing",
    "--clean": "delete the run of the same name first",
}
SUMMARY = "Trains a model on conversations and writes it as a Hugging Face directory."


def run(words: Sequence[str]) -> int:
    """Load the config, check it on this machine, and run it."""
    if wants_help(words):
        print_help("sft", SUMMARY, SftConfig, OPTIONS)
        return 0
    options, rest = take_options(words, OPTIONS)
    config = load_config(SftConfig, rest, check=check_sft)

    from gradus.launch.local import run_sft

    return run_sft(config, clean="--clean" in options, dry_run="--dry-run" in options)
