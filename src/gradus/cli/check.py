"""`gradus check`: whether a config works on this machine, and what it would run."""

from __future__ import annotations

import shutil
from collections.abc import Sequence

from gradus.cli.inspection import REFUSED, look_at, parts_of, table
from gradus.cli.options import print_help, take_options, take_value, wants_help
from gradus.cli.replay import REPLAY, check_replay
from gradus.config import (
    EvalConfig,
    RunConfig,
    SftConfig,
    check_eval,
    check_run,
    check_sft,
    describe_eval,
    describe_run,
    describe_sft,
    from_prime_rl,
    load_config,
    read_config_file,
    top_level_keys,
)
from gradus.errors import ConfigError, ExitCode
from gradus.launch.plan import Machine
from gradus.processes.supervisor import become_subreaper

KINDS = ("rl", "sft", "eval")
SUMMARY = (
    "Loads what a run would load, each part in a process of its own, says what works here, and "
    "prints the plan; starts no run and writes nothing. 'gradus check rl', 'check sft' or 'check "
    "eval' if the config alone does not say which it is. 'gradus check --replay RUN' says whether "
    "a recorded run is whole. The exit code is 0 only when nothing was refused."
)
FAST = "--fast"
FROM = "--from"
OPTIONS = {
    FAST: "look at the config and at installed modules alone, half a second",
    FROM: "prime-rl FILE: print a config of prime-rl as one of gradus, and what has no equivalent",
}


def run(words: Sequence[str]) -> int:
    """Check the config, load its parts, and print what it would run."""
    if wants_help(words):
        print_help("check [rl|sft|eval]", SUMMARY, RunConfig, OPTIONS, words=words)
        return 0
    recorded, words = take_value(words, REPLAY)
    if recorded is not None:
        print("\n".join(["this run can be replayed", *check_replay(recorded, words).lines()]))
        return 0
    trainer, words = take_value(words, FROM, wants="the name of a trainer: prime-rl")
    if trainer is not None:
        print(_converted(trainer, [word for word in words if word != "@"]), end="")
        return ExitCode.DONE
    options, rest = take_options(words, OPTIONS)
    is_fast = FAST in options
    config, plan = _load(rest, is_loaded=not is_fast)
    if is_fast:
        print("\n".join(["this config is consistent; nothing was loaded", *plan]))
        return ExitCode.DONE
    machine = Machine.current()
    become_subreaper()
    findings = look_at(parts_of(config, machine), machine)
    is_refused = any(finding.verdict == REFUSED for finding in findings)
    title = "this config does not work here" if is_refused else "this config works here"
    width = shutil.get_terminal_size((120, 24)).columns
    print("\n".join([title, *table(findings, width=width), *plan]))
    return ExitCode.CONFIG if is_refused else ExitCode.DONE


def _converted(trainer: str, files: Sequence[str]) -> str:
    """The config of another trainer as one of gradus."""
    if trainer != "prime-rl":
        raise ConfigError(f"{FROM} {trainer}: only prime-rl can be converted")
    if len(files) != 1:
        raise ConfigError(f"{FROM} prime-rl needs one file after it, not {len(files)}")
    return from_prime_rl(read_config_file(files[0]).values).toml()


def _load(
    words: Sequence[str], *, is_loaded: bool
) -> tuple[RunConfig | SftConfig | EvalConfig, list[str]]:
    """The config with its plan in a few lines; ConfigError with every problem of the config."""
    is_named = bool(words) and words[0] in KINDS
    rest = words[1:] if is_named else words
    kind = words[0] if is_named else _kind(rest)
    if kind == "sft":
        supervised = load_config(SftConfig, rest, check=check_sft)
        return supervised, describe_sft(supervised)
    if kind == "eval":
        evaluation = load_config(EvalConfig, rest, check=check_eval)
        return evaluation, describe_eval(evaluation)
    config = load_config(RunConfig, rest, check=check_run)
    return config, describe_run(config, is_loaded=is_loaded)


def _kind(words: Sequence[str]) -> str:
    """What a config is for, by the sections that it has."""
    keys = top_level_keys(words)
    if "orchestrator" in keys:
        return "rl"
    return "sft" if "data" in keys else "eval" if "env" in keys else "rl"
