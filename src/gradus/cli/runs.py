"""`gradus rl`, `sft`, `eval` and `bench-trainer`: read the config, check it here, and launch it."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from gradus.cli.options import print_help, take_optional, take_options, take_value, wants_help
from gradus.config import (
    EvalConfig,
    LaunchedConfig,
    RunConfig,
    SftConfig,
    load_config,
    top_level_keys,
)
from gradus.errors import ConfigError, ExitCode
from gradus.installed import load_part
from gradus.plan.machine import check
from gradus.run.lease import read_marker
from gradus.run.paths import RunDirectory

RESUME, CLEAN, DRY_RUN = "--resume", "--clean", "--dry-run"
_OPTIONS = {
    CLEAN: "delete the run of the same name first",
    RESUME: "continue with the run of the same name",
}
SLURM, RAY = "--slurm", "--ray"
_SLURM = {
    SLURM: "submit the run to SLURM as one job on the nodes of launch.nodes",
    DRY_RUN: "with --slurm print its script, and submit nothing",
}
_RAY = {
    f"{RAY} [ADDRESS]": "let a cluster of Ray start the nodes of launch.nodes: the one at "
    "HOST:PORT, else that of this machine",
}
LOG_EVERY = "--log-every"
_LOG_EVERY = {f"{LOG_EVERY} N": "a line for every N-th step; metrics.jsonl has all"}


@dataclass(frozen=True)
class RunCommand:
    """A command that launches what a config describes, as its help shows it."""

    name: str
    config: type[LaunchedConfig]
    summary: str
    noun: str = "run"
    """What it makes, in messages."""
    options: Mapping[str, str] = field(default_factory=lambda: _OPTIONS)
    """Option → what it does."""
    value_options: Mapping[str, str] = field(default_factory=dict)
    """As `options`, for those that take a value."""

    @property
    def all_options(self) -> dict[str, str]:
        return {**self.options, **self.value_options}


RL = RunCommand(
    "rl",
    RunConfig,
    "Starts every process of a reinforcement-learning run, shows progress, stops all of them.",
    options={
        **_OPTIONS,
        **_SLURM,
    },
    value_options={**_LOG_EVERY, **_RAY},
)
SFT = RunCommand(
    "sft",
    SftConfig,
    "Trains a model on conversations and writes it as a Hugging Face directory.",
    options={**_OPTIONS, **_SLURM},
    value_options={**_LOG_EVERY, **_RAY},
)
EVAL = RunCommand(
    "eval",
    EvalConfig,
    "Plays tasks of some environments and reports avg@k, pass@k and pass^k. "
    "'--model NAME' is short for '--model.name NAME'; NAME may be a run, whose model it is then.",
    "evaluation",
    {
        CLEAN: "delete the evaluation of the same name first",
        RESUME: "play only what is missing or failed in the evaluation of the same name",
        **_SLURM,
    },
    _RAY,
)
BENCH = RunCommand(
    "bench-trainer",
    RunConfig,
    "Trains on made-up samples with the config of an RL run: tokens per second, MFU, memory and "
    "time, without inference, environments or orchestrator. See trainer.bench.",
    options={},
)
KINDS = {"orchestrator": RL.name, "data": SFT.name, "env": EVAL.name}
"""Section that only configs of one command have → the command."""
RUN_COMMANDS = {command.name: command for command in (RL, SFT, EVAL, BENCH)}


def rl(words: Sequence[str]) -> int:
    """One reinforcement-learning run, from config to a trained model."""
    return _launch(RL, words)


def sft(words: Sequence[str]) -> int:
    return _launch(SFT, words)


def evaluate(words: Sequence[str]) -> int:
    return _launch(EVAL, _with_model_of_run(_spelled_out(words)))


def bench_trainer(words: Sequence[str]) -> int:
    return _launch(BENCH, words)


def kind_of(words: Sequence[str]) -> str | None:
    """Which command a config is for, by the sections that it has; None where they do not say."""
    keys = top_level_keys(words)
    return next((kind for key, kind in KINDS.items() if key in keys), None)


def _load(command: RunCommand, words: Sequence[str]) -> LaunchedConfig:
    """The config, checked; ConfigError with all that is wrong, also a config of another command."""
    if not words:
        raise ConfigError(f"a config is missing; write gradus {command.name} @ FILE.toml")
    try:
        checked = partial(check, is_served=command is not BENCH)
        return load_config(command.config, words, check=checked)
    except ConfigError as error:
        kind = kind_of(words)
        if kind is None or RUN_COMMANDS[kind].config is command.config:
            raise
        text = f"this is a config of `gradus {kind}`, so `gradus {command.name}` refuses it"
        raise ConfigError(f"{text}\n{error}") from error


def _launch(command: RunCommand, words: Sequence[str]) -> int:
    if wants_help(words):
        print_help(command.name, command.summary, command.config, command.all_options, words=words)
        return ExitCode.DONE
    address, words = take_optional(words, RAY)
    options, rest = take_options(words, command.options)
    if DRY_RUN in options and SLURM not in options:
        raise ConfigError(f"{DRY_RUN} goes with --slurm; else write gradus check {command.name}")
    if {CLEAN, RESUME} <= options:
        raise ConfigError("--clean deletes what --resume needs; use one of them")
    if address is not None and (command is BENCH or SLURM in options):
        why = "it runs on one machine" if command is BENCH else "SLURM starts the nodes itself"
        raise ConfigError(f"--ray: {why}; leave it out")
    every, rest = take_value(rest, LOG_EVERY, wants="a number of steps")
    if every is not None and (command not in (RL, SFT) or not every.isdecimal() or int(every) < 1):
        raise ConfigError(f"{LOG_EVERY} {every}: give a number of steps, 1 or more, to rl or sft")
    config = _load(command, rest)
    if RESUME in options and config.name is None:
        raise ConfigError(f"--resume needs the name of the {command.noun}; give it with --name")
    if SLURM in options:
        submit = load_part("gradus.launchers", "slurm", "cluster")
        return int(submit(config, options, () if every is None else (LOG_EVERY, every)))

    from gradus.launch.console import unblocked
    from gradus.launch.job import bench_job, job_of
    from gradus.launch.launch import launch
    from gradus.launch.steps import Steps

    if command is BENCH and isinstance(config, RunConfig):
        job = bench_job(config)
    else:
        job = job_of(config, resume=RESUME in options, asks=True)
    if every is not None and isinstance(job.workload, Steps):
        job = replace(job, workload=replace(job.workload, log_every=int(every)))
    with unblocked(sys.stdout) as out, ExitStack() as cluster:
        if address is not None:
            cluster_of = load_part("gradus.launchers", "ray", "cluster")
            ray = cluster.enter_context(cluster_of(config, address or None))
            job = replace(job, engine=ray, notes=(*job.notes, *ray.join()))
        return launch(job, out, resume=RESUME in options, clean=CLEAN in options)


_NAMED = ("--model=", "--model.name=")


def _spelled_out(words: Sequence[str]) -> list[str]:
    """`--model NAME` as `--model.name NAME`, also behind `=`; `--model @ file.toml` stays."""
    parted = [
        it.split("=", 1) if it.startswith(_NAMED) and "={" not in it else [it] for it in words
    ]
    words = [part for parts in parted for part in parts]
    followers = [*words[1:], "@"]
    return [
        "--model.name" if word == "--model" and follower != "@" else word
        for word, follower in zip(words, followers, strict=False)
    ]


def _with_model_of_run(words: Sequence[str]) -> list[str]:
    """Put the model that a run trained in the place of the run, and print which one it is."""
    named = [place + 1 for place, word in enumerate(words[:-1]) if word == "--model.name"]
    run = words[named[-1]] if named else ""
    if not run or not Path(run).is_dir() or read_marker(RunDirectory(Path(run))) is None:
        return list(words)
    from gradus.cli.serve import find_source

    source = find_source(run)
    if source.is_checkpoint:
        raise ConfigError(
            f"{run} has only checkpoints: 'gradus export {run} DIRECTORY' makes a model of one; "
            "then --model DIRECTORY"
        )
    print(f"{'model':<18}{source.place}", flush=True)
    return [*words[: named[-1]], source.place, *words[named[-1] + 1 :]]
