"""Reads a `gradus` command as the command line would, without doing what it says."""

from __future__ import annotations

import contextlib
import io
import re
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from pages import ROOT

from gradus.cli import env, runs, serve
from gradus.cli.completion import CONFIGS
from gradus.cli.main import COMMANDS, _find, main
from gradus.cli.options import take_optional, take_options, take_value
from gradus.cli.roles import ROLES
from gradus.config import (
    EnvironmentConfig,
    EvalConfig,
    RunConfig,
    ServeConfig,
    SftConfig,
    StrictConfig,
    TrackConfig,
    load_config,
)
from gradus.errors import ConfigError

MODEL = {"name": "some/model"}
BASES: Mapping[type[StrictConfig], Mapping[str, Any]] = {
    RunConfig: {
        "max_steps": 1,
        "model": MODEL,
        "orchestrator": {"train": {"env": [{"id": "reverse-text"}]}},
    },
    SftConfig: {"max_steps": 1, "model": MODEL, "data": {"path": "data.jsonl"}},
    EvalConfig: {"model": MODEL, "env": [{"id": "reverse-text"}]},
    ServeConfig: {"model": "some/model"},
}
"""What the reader's own file would hold."""
_FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*")


@cache
def help_of(*words: str) -> str:
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        main([*words, "--help"])
        main([*words, "--help", "all"])
    return shown.getvalue()


def refusal(words: Sequence[str]) -> str | None:
    """What the command line has against `gradus ...`; None where it would begin."""
    line = " ".join(words)
    if len(words) == 1 or words[1].startswith("-"):
        known = {"--help", "-h", "--version", "--all"}
        return None if set(words[1:]) <= known else f"{line}: unknown option"
    command, rest = words[1], list(words[2:])
    try:
        _find(command, rest)
        if command in ROLES or "--help" in rest:
            return None
        wrong = _own_files(rest)
        if wrong is not None:
            return f"{line}: {wrong} is no file of the repository"
        _read(command, rest)
    except ConfigError as error:
        return f"{line}: {error}"
    return None


def _own_files(words: list[str]) -> str | None:
    """Point `@ file` at the repository, leave out a reader's own; the first that is not there."""
    for place in reversed([index for index, word in enumerate(words) if word == "@"]):
        name = words[place + 1] if place + 1 < len(words) else ""
        if "/" in name and not (ROOT / name).is_file():
            return name
        if "/" in name:
            words[place + 1] = str(ROOT / name)
        else:
            del words[place : place + 2]
    return None


def _read(command: str, words: list[str]) -> None:
    if command == "env":
        _read_env(words)
    elif command == "view" and "--to" in words:
        kind, rest = take_value(words, "--to")
        given = [f"--monitor.{word[2:]}" if word.startswith("--") else word for word in rest[1:]]
        load_config(TrackConfig, given, base={"monitor": {"type": kind}})
    elif command not in CONFIGS or "://" in "".join(words[:1]):
        asked = [command, *words[: command == "lab"]]
        known = set(_FLAG.findall(help_of(*asked)))
        wrong = [flag for word in words for flag in _FLAG.findall(word) if flag not in known]
        if wrong:
            raise ConfigError(f"{wrong[0]} is not in its help")
    else:
        config, rest = _without_options(command, words)
        load_config(config, rest, base=BASES[config])


def _without_options(command: str, words: list[str]) -> tuple[type[StrictConfig], list[str]]:
    """The config that a command reads, and the words that are left for it."""
    module = sys.modules[COMMANDS[command].entry.partition(":")[0]]
    known = runs.RUN_COMMANDS[command].all_options if command in runs.RUN_COMMANDS else None
    options: Mapping[str, str] = module.OPTIONS if known is None else known
    for option in [it.split()[0] for it in options if it.endswith("]")]:
        _, words = take_optional(words, option)
    valued = {it.split()[0] for it in options if " " in it and not it.endswith("]")}
    for option in valued:
        _, words = take_value(words, option, wants="a value")
    _, words = take_options(words, dict.fromkeys(options, ""))
    if command == "check":
        named = words[0] if words and words[0] in runs.KINDS.values() else None
        kind = named or runs.kind_of(words) or "rl"
        return runs.RUN_COMMANDS[kind].config, words[1:] if named else words
    if CONFIGS[command] is ServeConfig:
        return ServeConfig, serve._spelled_out(words)
    return CONFIGS[command], runs._spelled_out(words) if command == "eval" else words


def _read_env(words: list[str]) -> None:
    """`gradus env check` or `init`."""
    if words[:1] == ["init"]:
        return
    if words[:1] != ["check"]:
        raise ConfigError(f"gradus env takes check or init, not {words[:1]}")
    _, words = take_options(words[1:], {env.JSON: "", env.ATTACK: ""})
    for option in ("--base-url", "--model", "--api-key-var"):
        _, words = take_value(words, option, wants="a value")
    if words and words[0] != "@" and not words[0].startswith("-"):
        load_config(EnvironmentConfig, ["--id", *words])
    elif words:
        env.sources_of(words)
