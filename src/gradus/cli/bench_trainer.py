"""`gradus bench-trainer`: how fast the trainer of a run is on this machine, without the rest."""

from __future__ import annotations

from collections.abc import Sequence

from gradus.cli.options import print_help, wants_help
from gradus.config import RunConfig, check_run, load_config

SUMMARY = (
    "Trains on made-up samples with the config of an RL run: tokens per second, MFU, memory and "
    "time, without inference, environments or orchestrator. See trainer.bench."
)


def run(words: Sequence[str]) -> int:
    """Load the config of an RL run, check it, and measure its trainer."""
    if wants_help(words):
        print_help("bench-trainer", SUMMARY, RunConfig, words=words)
        return 0
    config = load_config(RunConfig, words, check=check_run)

    from gradus.launch.local import run_bench

    return run_bench(config)
