"""`gradus check`: what works here, before anything is trained.

`gradus.cli.look` loads each part in a process with the variables that the process of a run would
get.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from gradus.cli.look.parts import REFUSED, WARNING, parts_of, probe_parts, table
from gradus.cli.options import print_help, take_options, wants_help
from gradus.cli.runs import KINDS, RUN_COMMANDS, kind_of
from gradus.config import LaunchedConfig, RunConfig, load_config
from gradus.errors import ExitCode
from gradus.launch.job import precision_warnings, with_dtypes, with_trial
from gradus.monitor import wrapped
from gradus.plan.hardware import Hardware
from gradus.plan.machine import check
from gradus.plan.processes import Machine
from gradus.plan.show import describe_config
from gradus.processes.supervisor import become_subreaper

SUMMARY = (
    "Loads what a run would load, each part in a separate process, says what works here, and "
    "prints the plan; starts no run, and writes nothing but what it finds of bfloat16 on this "
    "processor, once, in your cache folder. 'gradus check rl', 'check sft' or 'check eval' if the "
    "config alone does not say which it is. The exit code is 0 only when nothing was refused."
)
FAST = "--fast"
NOT_STARTED = (
    "checked without starting: `gradus doctor` starts the engine, plays, and trains two small steps"
)
OPTIONS = {
    FAST: "look at the config and at installed modules alone, about two seconds",
}


def run(words: Sequence[str]) -> int:
    if wants_help(words):
        print_help("check [rl|sft|eval]", SUMMARY, RunConfig, OPTIONS, words=words)
        return 0
    options, rest = take_options(words, OPTIONS)
    is_fast = FAST in options
    machine = Machine.current()
    config, plan = _load(rest, machine, is_loaded=not is_fast)
    if is_fast:
        print("\n".join(["this config is consistent; nothing was loaded", *plan]))
        return ExitCode.DONE
    become_subreaper()
    findings = probe_parts(parts_of(config, machine), machine)
    is_refused = any(finding.verdict == REFUSED for finding in findings)
    title = "this config does not work here" if is_refused else "this config works here"
    if not is_refused and any(WARNING in finding.text for finding in findings):
        title += ", with warnings"
    print("\n".join([title, *table(findings), *plan, NOT_STARTED]))
    return ExitCode.CONFIG if is_refused else ExitCode.DONE


def _load(
    words: Sequence[str], machine: Machine, *, is_loaded: bool
) -> tuple[LaunchedConfig, list[str]]:
    """The config with its plan in a few lines; ConfigError with every problem of the config."""
    is_named = bool(words) and words[0] in KINDS.values()
    rest = words[1:] if is_named else words
    kind = words[0] if is_named else kind_of(rest) or "rl"
    config = load_config(RUN_COMMANDS[kind].config, rest, check=partial(check, gpus=machine.gpus))
    here = with_trial(Hardware.current(machine.gpus), config, machine, may_start=is_loaded)
    config = with_dtypes(config, here)
    plan = describe_config(config, machine.gpus, is_loaded=is_loaded)
    plan += [f"precision: {line}" for line in precision_warnings(config, here)]
    return config, wrapped(plan)
