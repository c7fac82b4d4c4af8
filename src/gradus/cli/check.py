"""`gradus check`: whether a config works on this machine, and what it would run."""

from __future__ import annotations

from collections.abc import Sequence

from gradus.cli.options import print_help, take_value, wants_help
from gradus.cli.replay import REPLAY, check_replay
from gradus.config.eval import EvalConfig
from gradus.config.load import load_config, top_level_keys
from gradus.config.overview import describe_eval, describe_run, describe_sft
from gradus.config.preflight import check_eval, check_run, check_sft
from gradus.config.run import RunConfig
from gradus.config.sft import SftConfig

KINDS = ("rl", "sft", "eval")
SUMMARY = (
    "Checks a config and prints the plan; starts and writes nothing. 'gradus check rl', "
    "'check sft' or 'check eval' if the config alone does not say which it is. "
    "'gradus check --replay RUN' says whether a recorded run is whole."
)


def run(words: Sequence[str]) -> int:
    """Check the config and print what it would run."""
    if wants_help(words):
        print_help("check [rl|sft|eval]", SUMMARY, RunConfig)
        return 0
    recorded, words = take_value(words, REPLAY)
    if recorded is not None:
        print("\n".join(["this run can be replayed", *check_replay(recorded, words).lines()]))
        return 0
    is_named = bool(words) and words[0] in KINDS
    rest = words[1:] if is_named else words
    kind = words[0] if is_named else _kind(rest)
    if kind == "sft":
        lines = describe_sft(load_config(SftConfig, rest, check=check_sft))
    elif kind == "eval":
        lines = describe_eval(load_config(EvalConfig, rest, check=check_eval))
    else:
        lines = describe_run(load_config(RunConfig, rest, check=check_run))
    print("\n".join(["this config works here", *lines]))
    return 0


def _kind(words: Sequence[str]) -> str:
    """What a config is for, by the sections that it has."""
    keys = top_level_keys(words)
    if "orchestrator" in keys:
        return "rl"
    return "sft" if "data" in keys else "eval" if "env" in keys else "rl"
