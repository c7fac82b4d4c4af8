"""`gradus lab chaos`: hurt a run on purpose, or only look whether what must hold does."""

from __future__ import annotations

import math
import secrets
import signal
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from gradus.cli.options import print_help, take_options, take_value, take_values, wants_help
from gradus.config import RunConfig, load_config
from gradus.errors import ConfigError, ExitCode
from gradus.log import printable
from gradus.run.lease import is_in_use, run_at, run_path
from gradus.run.paths import RunDirectory
from gradus_lab.chaos.faults import KINDS, kinds_here
from gradus_lab.chaos.invariants import RULES, check_run, compare_weights
from gradus_lab.chaos.soak import MOST_REST_SECONDS, Plan, Soak, growth, sum_up

OPTIONS = {
    "--minutes M": "how long; 60 without it",
    "--seed S": "the same faults in the same order; printed when it is not given",
    "--kind KIND": "only this kind; can be repeated, and one given N times comes N times as often",
    "--rest S": "most seconds between a step and the next fault; 15 without it",
    "--double": "a second fault while the first is being healed",
    "--check RUN": "only look at the folder of a run, finished or not",
    "--against RUN": "with --check: whether both served the same weights, bit by bit (I5)",
}
SUMMARY = (
    "Starts a run of `gradus rl` and hurts it: again and again it picks a process of\n"
    "it and a fault, waits for the next step, and looks whether what must hold still\n"
    "does. The kinds of faults:\n\n"
    + "\n".join(f"  {kind:<8}{what}" for kind, what in KINDS.items())
    + "\n\nWhat must hold:\n\n"
    + "\n".join(f"  {rule}  {what}" for rule, what in RULES.items())
    + "\n\nThe faults and what came of them stand in RUN.chaos.jsonl beside the folder of\n"
    "the run, and what the run printed in RUN.chaos.log. Exit code 70 when something\n"
    "did not hold. For machines where a lost run is no loss."
)


def run(words: Sequence[str]) -> int:
    if wants_help(words):
        print_help("lab chaos", SUMMARY, RunConfig, OPTIONS, words=words)
        return ExitCode.DONE
    checked, rest = take_value(words, "--check", wants="the folder of a run")
    against, rest = take_value(rest, "--against")
    if checked is not None:
        if rest:
            raise ConfigError(f"--check takes the folder of a run and nothing else, not {rest[0]}")
        return _check(run_at(checked), run_at(against) if against else None)
    if against is not None:
        raise ConfigError("--against compares with the run behind --check; give that too")
    minutes, rest = take_value(rest, "--minutes", wants="a number of minutes")
    seed, rest = take_value(rest, "--seed", wants="a whole number")
    kinds, rest = take_values(rest, "--kind", wants=f"one of {', '.join(KINDS)}")
    wait, rest = take_value(rest, "--rest", wants="a number of seconds")
    double, rest = take_options(rest, {"--double": ""})
    limit = _number(minutes, "--minutes", least=0.1) if minutes else 60.0
    chosen = int(_number(seed, "--seed", least=0)) if seed else secrets.randbelow(10_000)
    most = _number(wait, "--rest", least=0) if wait else MOST_REST_SECONDS
    possible, left_out = kinds_here(kinds)
    config = load_config(RunConfig, rest)
    if config.name is None:
        raise ConfigError("a run under faults needs a name to be found again by; add --name NAME")
    run_dir = RunDirectory(run_path(Path(config.output_dir), config.name))
    if run_dir.root.exists():
        raise ConfigError(f"{run_dir.root} is there already; choose another --name, or delete it")
    if left_out:
        print(left_out)
    return _hurt(Plan(rest, run_dir, limit, chosen, possible, most, is_double=bool(double)))


def _hurt(plan: Plan) -> int:
    root = plan.run_dir.root
    root.parent.mkdir(parents=True, exist_ok=True)
    history = root.with_name(f"{root.name}.chaos.jsonl")
    history.unlink(missing_ok=True)
    print(f"seed {plan.seed}, {plan.minutes:g} minutes; {history}")
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)
    rounds = Soak(plan, history, partial(print, flush=True)).run()
    print("\n".join(sum_up(rounds)))
    for role, (first, second) in growth(rounds).items():
        files = f"{first[1]} -> {second[1]} open files"
        print(f"{role:<28}{first[0]} -> {second[0]} MiB, {files} (most, in each half)")
    return ExitCode.INTERNAL if any(found.broken for found in rounds) else ExitCode.DONE


def _leave(*_: object) -> None:
    """End as after an interrupt; the soak ends its run on the way, however often it is asked."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.exit(ExitCode.TRY_AGAIN)


def _check(run_dir: RunDirectory, other: RunDirectory | None) -> int:
    left_out = {"I7", "I8"} if is_in_use(run_dir) else set[str]()
    broken = check_run(run_dir) + (compare_weights(run_dir, other) if other else [])
    for it in broken:
        print(f"BROKEN {printable(str(it))}")
    asked = [*RULES, "I5"] if other else RULES
    held = [rule for rule in asked if rule not in left_out | {it.rule for it in broken}]
    later = "; I7 and I8 are about a run that is over" if left_out else ""
    print(f"{', '.join(held)} hold{later}")
    return ExitCode.INTERNAL if broken else ExitCode.DONE


def _number(word: str, option: str, *, least: float) -> float:
    try:
        number = float(word)
    except ValueError:
        number = -1.0
    is_whole = option != "--seed" or number.is_integer()
    if not (least <= number < math.inf and is_whole):
        raise ConfigError(f"{option} {word}: give a number of at least {least:g}")
    return number
