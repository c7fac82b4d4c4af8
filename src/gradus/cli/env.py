"""`gradus env check` and `gradus env init`: is an environment fit to train on, and a new one."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from gradus.cli.init import new_task_set
from gradus.cli.options import take_options, take_value, wants_help
from gradus.cli.runs import RUN_COMMANDS, kind_of
from gradus.config import (
    EVERY_ROLE,
    NO_KEY_VARIABLE,
    EnvironmentConfig,
    EnvironmentProcessConfig,
    EvalConfig,
    RunConfig,
    load_config,
    resolve,
    resolve_sources,
)
from gradus.conformance.findings import Checked, Outcome, broken, ok
from gradus.conformance.reading import ModelEndpoint, Reading, Subject
from gradus.errors import ConfigError, ExitCode
from gradus.installed import PLAYED, has_plugin, installed_id, plugin_module
from gradus.plan.variables import source_variables
from gradus.processes.child import end_below
from gradus.processes.supervisor import become_subreaper

USAGE = """\
usage: gradus env check ID [@ source.toml ...] [--taskset.key value ...]
       gradus env check @ run.toml [--attack]
       gradus env init NAME

check  plays an installed environment, or one in this folder, with a scripted model, and says what
       is broken: the same task twice, rewards of right and hostile replies, tools, tokens,
       deadlines, speed. A file holds keys of a source (taskset, settings, agents,
       ...), or is the config of a run, whose sources are all checked. The exit code is 64 when
       something is broken.
init   writes a folder with a task set to change: its module, test, README, config and project file.

  --attack           also play every hostile policy of the library (93), and compare with chance
  --json             one JSON object per line instead of text
  --base-url URL     also play one episode with the model of an OpenAI-compatible endpoint,
  --model NAME       its name there, and
  --api-key-var VAR  the variable that holds the endpoint's key"""
JSON = "--json"
ATTACK = "--attack"
_MAX_TURNS = 64
_SECONDS = {"setup": 60.0, "rollout": 60.0, "finalize": 30.0, "scoring": 30.0}
"""Deadlines of the check where the source says nothing: the scripted model answers at once."""


def run(words: Sequence[str]) -> int:
    if not words or wants_help(words):
        print(USAGE)
        return ExitCode.DONE
    if words[0] == "check":
        return check(words[1:])
    if words[0] == "init":
        return new_task_set(words[1:])
    raise ConfigError(f"gradus env takes check or init, not {words[0]!r}\n{USAGE}")


def check(words: Sequence[str]) -> int:
    """Check every environment that the words name; prints each line as it comes."""
    options, rest = take_options(words, {JSON: "", ATTACK: ""})
    base_url, rest = take_value(rest, "--base-url", wants="the URL of an endpoint")
    model, rest = take_value(rest, "--model", wants="the name of a model")
    key, rest = take_value(rest, "--api-key-var", wants="the name of a variable")
    if (base_url is None) != (model is None):
        raise ConfigError("--base-url and --model belong together")
    if key is not None and base_url is None:
        raise ConfigError("--api-key-var names the key of --base-url URL; give the URL too")
    sources = sources_of(rest)
    endpoint = None
    if base_url is not None and model is not None:
        endpoint = ModelEndpoint(base_url, model, key or NO_KEY_VARIABLE)
    report = _Report(is_json=JSON in options)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    become_subreaper()
    try:
        for source in sources:
            report.begin(source.id)
            subject = subject_of(source, endpoint)
            subject = replace(subject, attacks=ATTACK in options)
            report.add(found := _found(source))
            if found.outcome is not Outcome.BROKEN:
                _check(subject, report)
            report.end()
    finally:
        end_below(time.monotonic())
    return report.exit_code


def sources_of(
    words: Sequence[str], *, seconds: Mapping[str, float] = _SECONDS
) -> list[EnvironmentConfig]:
    """The sources that a command line names, with these deadlines where they have none of their
    own; ConfigError without any."""
    if not words:
        raise ConfigError(f"name an environment, or a file after @\n{USAGE}")
    if words[0] != "@" and not words[0].startswith("-"):
        return [_ready(load_config(EnvironmentConfig, ["--id", *words]), seconds)]
    command = kind_of(words)
    if command is None:
        return [_ready(load_config(EnvironmentConfig, words), seconds)]
    # A file with sources alone says enough: no model is trained here.
    kind = RUN_COMMANDS[command].config
    base = {"model": {"name": "none"}, "max_steps": 1} if kind is RunConfig else None
    written = load_config(kind, words, base=base, base_name="gradus env")
    known = EnvironmentConfig.model_fields
    sources = []
    for source in resolve_sources(written).all:
        given = source.given.model_dump(exclude_unset=True)
        values = {name: value for name, value in given.items() if name in known}
        sources.append(_ready(EnvironmentConfig.model_validate(values), seconds))
    if not sources:
        raise ConfigError("this config has no environment")
    return sources


def _ready(source: EnvironmentConfig, seconds: Mapping[str, float]) -> EnvironmentConfig:
    """A source as one engine plays it: one process, these deadlines, all roles by the engine."""
    values = source.model_dump(exclude_unset=True)
    seat = values.get("agent", {})
    values["agent"] = {**seat, "timeout": {**seconds, **seat.get("timeout", {})}}
    values["num_workers"] = 1
    for role in values.get("agents", {}).values():
        for key in ("base_url", "model", "api_key_var"):
            role.pop(key, None)
    return EnvironmentConfig.model_validate(values)


def subject_of(source: EnvironmentConfig, endpoint: ModelEndpoint | None = None) -> Subject:
    """What the check needs of a source; ConfigError for one that contradicts itself."""
    config = EvalConfig.model_validate(
        {
            "model": {"name": "scripted"},
            "base_url": "http://127.0.0.1:9/v1",
            "env": [source.model_dump(exclude_unset=True)],
        }
    )
    configs = resolve(config, run_dir=Path("."), term=0)
    if not configs.environments:
        raise ConfigError(f"{source.id}: you run it at {source.address}; leave `address` out")
    process = _bounded(configs.environments[0])
    (resolved,) = resolve_sources(config).evaluated
    variables = source_variables(
        os.environ,
        configs.env_vars[process.process],
        verifiers=process.verifiers,
        passed=[*process.env_var_names, *([] if endpoint is None else [endpoint.api_key_var])],
    )
    if endpoint is not None:
        names = sorted({*process.env_var_names, endpoint.api_key_var} - {NO_KEY_VARIABLE})
        process = process.model_copy(update={"env_var_names": names})
    return Subject(process, variables, resolved.complete.unmeasured_agents, endpoint)


def _bounded(process: EnvironmentProcessConfig) -> EnvironmentProcessConfig:
    """With an end of every conversation to which neither the config nor the author set one."""
    seats = process.verifiers[EVERY_ROLE]
    seat = {**seats["seat"], "max_turns": seats["seat"]["max_turns"] or _MAX_TURNS}
    verifiers = {**process.verifiers, EVERY_ROLE: {**seats, "seat": seat}}
    return process.model_copy(update={"verifiers": verifiers})


def _check(subject: Subject, report: _Report) -> None:
    with TemporaryDirectory(prefix="gradus-check-") as folder:
        # The child loads the environment while this process imports what plays it.
        reading = Reading(subject, Path(folder))
        try:
            from gradus.conformance.check import check_environment

            async def tell() -> None:
                async for line in check_environment(subject, reading, Path(folder)):
                    report.add(line)

            asyncio.run(tell())
        finally:
            reading.close()


def _found(source: EnvironmentConfig) -> Checked:
    """Whether there is a module of that name; verifiers imports it, so it may fail nevertheless."""
    wanted = str(source.taskset.get("id", source.id))
    found = installed_id(wanted)
    module = plugin_module(found)
    if source.python is not None:
        if shutil.which(source.python) is not None:
            return ok("found", f"{found} is looked for by {source.python}")
        advice = "Name the `bin/python` of a virtual environment"
        return broken("found", f"python = {source.python!r} is no program", advice)
    if has_plugin(wanted, PLAYED):
        return ok("found", f"{found}, the module {module}")
    return broken(
        "found",
        f"there is no Python module {module!r}, here or installed",
        "Install its package, go to its folder, or correct the id",
    )


@dataclass
class _Report:
    """Prints lines as they come, and knows whether one says broken."""

    is_json: bool
    num_broken: int = 0
    _name: str = ""
    _started: float = 0.0
    _counts: Mapping[str, int] | None = None

    @property
    def exit_code(self) -> int:
        return ExitCode.CONFIG if self.num_broken else ExitCode.DONE

    def begin(self, name: str) -> None:
        self._name, self._started, self._counts = name, time.monotonic(), {}
        if not self.is_json:
            print(f"{name}", flush=True)

    def add(self, line: Checked) -> None:
        assert self._counts is not None
        self.num_broken += line.outcome == "broken"
        self._counts = {**self._counts, line.outcome: self._counts.get(line.outcome, 0) + 1}
        if self.is_json:
            seconds = round(time.monotonic() - self._started, 2)
            print(json.dumps({"environment": self._name, "seconds": seconds, **line.record()}))
        else:
            width = shutil.get_terminal_size((110, 24)).columns
            print("\n".join(line.lines(width)))
        sys.stdout.flush()

    def end(self) -> None:
        counts = ", ".join(f"{n} {kind}" for kind, n in (self._counts or {}).items())
        if not self.is_json:
            print(f"{self._name}: {counts} in {time.monotonic() - self._started:.0f} s", flush=True)
