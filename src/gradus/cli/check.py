"""`gradus check` and `gradus check-loss`: what works here, before anything is trained.

`gradus.cli.look` loads each part in a process with the variables that the process of a run would
get: all parts at once, each with a deadline. Everything that they started is ended.
"""

from __future__ import annotations

import shutil
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from gradus.cli.options import print_help, take_options, take_value, wants_help
from gradus.cli.runs import REPLAY, check_replay, kind_of
from gradus.config import (
    EvalConfig,
    InferenceConfig,
    LaunchedConfig,
    LossConfig,
    ModelConfig,
    ProcessConfigs,
    RunConfig,
    SftConfig,
    check,
    describe,
    from_prime_rl,
    is_on_this_machine,
    load_config,
    loss_config,
    read_config_file,
    resolve,
    resolve_sources,
    without_secrets,
)
from gradus.errors import ConfigError, ExitCode
from gradus.files import read_json, write_json
from gradus.launch.job import doubts, settled, tried
from gradus.launch.plan import Machine, placement_of
from gradus.launch.variables import (
    inference_variables,
    orchestrator_variables,
    source_variables,
    trainer_variables,
)
from gradus.processes.hardware import Hardware
from gradus.processes.log_tail import find_cause, find_crash
from gradus.processes.started import Child, ProcessSpec
from gradus.processes.supervisor import Supervisor, become_subreaper

if TYPE_CHECKING:
    from gradus.trainer.loss_check import LossReport

KINDS: dict[str, type[LaunchedConfig]] = {"rl": RunConfig, "sft": SftConfig, "eval": EvalConfig}
SUMMARY = (
    "Loads what a run would load, each part in a separate process, says what works here, and "
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
    machine = Machine.current()
    config, plan = _load(rest, machine, is_loaded=not is_fast)
    if is_fast:
        print("\n".join(["this config is consistent; nothing was loaded", *plan]))
        return ExitCode.DONE
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
    words: Sequence[str], machine: Machine, *, is_loaded: bool
) -> tuple[LaunchedConfig, list[str]]:
    """The config with its plan in a few lines; ConfigError with every problem of the config."""
    is_named = bool(words) and words[0] in KINDS
    rest = words[1:] if is_named else words
    kind = words[0] if is_named else kind_of(rest) or "rl"
    config = load_config(KINDS[kind], rest, check=partial(check, gpus=machine.gpus))
    here = tried(Hardware.current(machine.gpus), config, machine, may_start=is_loaded)
    config = settled(config, here)
    plan = describe(config, machine.gpus, is_loaded=is_loaded)
    return config, [*plan, *(f"precision: {line}" for line in doubts(config, here))]


DEADLINE_SECONDS = 120.0
"""For each part; an environment that loads longer holds a run up too."""
STOP_SECONDS = 3.0
OK = "ok"
REFUSED = "refused"
NOT_LOOKED_AT = "not looked at"


@dataclass(frozen=True)
class Part:
    """One part of a config, and what its child needs to look at it."""

    name: str
    """Its name for a person."""
    look: str = ""
    """The function of `gradus.cli.look`; empty for a part that cannot be looked at."""
    request: Mapping[str, Any] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    """The whole environment of the child."""
    skipped: str = ""
    """Why it is not looked at."""


@dataclass(frozen=True)
class Finding:
    """What is known about one part."""

    part: str
    verdict: str
    """`ok`, `refused` or `not looked at`."""
    text: str
    """What was seen, or why not."""
    seconds: float = 0.0


def parts_of(config: LaunchedConfig, machine: Machine) -> list[Part]:
    """The parts of a config, in the order in which a person reads them."""
    if isinstance(config, RunConfig):
        return list(_run_parts(config, machine))
    if isinstance(config, SftConfig):
        return list(_sft_parts(config, machine))
    return list(_eval_parts(config, machine))


def _run_parts(config: RunConfig, machine: Machine) -> Iterator[Part]:
    configs = resolve(config, run_dir=Path(config.output_dir), term=0)
    assert configs.orchestrator is not None
    yield _model_part(config.model, machine)
    yield from _environment_parts(configs, config, machine)
    variables = orchestrator_variables(machine.environment, config.orchestrator.env_vars, config={})
    request: dict[str, Any] = {"orchestrator": without_secrets(configs.orchestrator)}
    yield Part("plug-ins", "plug-ins", request, variables)
    request = {
        "loss": config.trainer.loss.model_dump(mode="json"),
        "num_processes": config.trainer.num_processes,
    }
    own = {**config.trainer.env_vars, **_gpus("trainer", configs, machine)}
    yield Part("trainer", "trainer", request, _trainer(own, machine))
    yield _engine_part(config.inference, configs, machine)


def _sft_parts(config: SftConfig, machine: Machine) -> Iterator[Part]:
    configs = resolve(config, run_dir=Path(config.output_dir), term=0)
    variables = _trainer({**config.env_vars, **_gpus("trainer", configs, machine)}, machine)
    if config.eval is not None:
        yield _model_part(config.model, machine)
    if Path(config.data.path).exists():
        request: dict[str, Any] = {
            "sft": without_secrets(config),
            "has_model": _is_here(config.model),
        }
        yield Part("data", "data", request, variables)
    else:
        yield Part("data", skipped=f"{config.data.path} is fetched from the hub")
    request = {"loss": None, "num_processes": config.num_processes}
    yield Part("trainer", "trainer", request, variables)
    if config.eval is not None:
        yield from _environment_parts(configs, config, machine)
        yield _engine_part(config.inference, configs, machine)


def _eval_parts(config: EvalConfig, machine: Machine) -> Iterator[Part]:
    configs = resolve(config, run_dir=Path(config.output_dir), term=0)
    if config.base_url is None:
        yield _model_part(config.model, machine)
    else:
        yield Part("model", skipped=f"served at {config.base_url}")
    yield from _environment_parts(configs, config, machine)
    if config.base_url is None:
        yield _engine_part(config.inference, configs, machine)


def _model_part(model: ModelConfig, machine: Machine) -> Part:
    if not _is_here(model):
        return Part("model", skipped=f"{model.name} is fetched from the hub")
    request = {"model": model.model_dump(mode="json")}
    return Part("model", "model", request, _trainer({}, machine))


def _environment_parts(
    configs: ProcessConfigs, config: LaunchedConfig, machine: Machine
) -> Iterator[Part]:
    """Each environment that the run starts, then those that the user runs."""
    is_served = isinstance(config, EvalConfig) and config.base_url is not None
    model = config.model if not is_served and _is_here(config.model) else None
    sources = resolve_sources(config)
    trained = {s.complete.name: s.complete.model_dump(mode="json") for s in sources.train}
    for process in configs.environments:
        variables = source_variables(
            machine.environment,
            configs.env_vars[process.process],
            verifiers=process.verifiers,
            passed=process.env_var_names,
        )
        request = {
            "config": without_secrets(process),
            "model": None if model is None else model.model_dump(mode="json"),
            "plays": not is_served,
            "source": trained.get(process.name) if process.purpose == "train" else None,
        }
        what = "environment" if process.purpose == "train" else "evaluation"
        yield Part(f"{what} {process.name}", "environment", request, variables)
    for source in sources.all:
        if source.given.address is not None:
            name = f"environment {source.complete.name}"
            yield Part(name, skipped=f"you run it at {source.given.address}")


def _engine_part(inference: InferenceConfig, configs: ProcessConfigs, machine: Machine) -> Part:
    own = {**inference.env_vars, **_gpus("inference", configs, machine)}
    variables = inference_variables(machine.environment, own)
    return Part("engine", "engine", {"inference": without_secrets(inference)}, variables)


def _gpus(process: str, configs: ProcessConfigs, machine: Machine) -> dict[str, str]:
    """What makes a process see the GPUs that it would have in a run."""
    placement = placement_of(configs.by_process(), machine.gpus)
    return placement.variables(process, machine.gpus, machine.environment)


def _trainer(own: Mapping[str, str], machine: Machine) -> dict[str, str]:
    return trainer_variables(machine.environment, own, num_cores=machine.num_cores, num_processes=1)


def _is_here(model: ModelConfig) -> bool:
    return is_on_this_machine(model.tokenizer or model.name)


def look_at(
    parts: Sequence[Part], machine: Machine, *, deadline_seconds: float = DEADLINE_SECONDS
) -> list[Finding]:
    """A finding for each part, in order; every process that was started has ended."""
    with TemporaryDirectory(prefix="gradus-check-") as directory:
        folder = Path(directory)
        with Supervisor(folder / "pids.json", stop_timeout_seconds=STOP_SECONDS) as supervisor:
            children = [
                supervisor.start(_spec(part, folder / str(number), machine)) if part.look else None
                for number, part in enumerate(parts)
            ]
            return _wait(parts, children, folder, deadline_seconds)


def _spec(part: Part, folder: Path, machine: Machine) -> ProcessSpec:
    folder.mkdir()
    request, result = folder / "request.json", folder / "result.json"
    write_json(request, dict(part.request))
    command = (machine.python, "-m", "gradus.cli.look", part.look, str(request), str(result))
    return ProcessSpec(
        name=part.name, argv=command, env=part.variables, log=folder / "log", finishes=True
    )


def _wait(
    parts: Sequence[Part],
    children: Sequence[Child | None],
    folder: Path,
    deadline_seconds: float,
) -> list[Finding]:
    """Wait for every answer, or for the deadline, whichever is first."""
    found: dict[int, Finding] = {}
    while len(found) < len(parts):
        for number, (part, child) in enumerate(zip(parts, children, strict=True)):
            if number in found:
                continue
            if child is None:
                found[number] = Finding(part.name, NOT_LOOKED_AT, part.skipped)
            elif child.exit_code() is not None:
                found[number] = _answer(part, child, folder / str(number) / "result.json")
            elif child.seconds() > deadline_seconds:
                text = f"not loaded within {deadline_seconds:g} s; a run would wait for it too"
                found[number] = Finding(part.name, REFUSED, text, child.seconds())
        time.sleep(0.02)
    return [found[number] for number in range(len(parts))]


def _answer(part: Part, child: Child, result: Path) -> Finding:
    """What a child that ended has written; how it died when it wrote nothing."""
    seconds = child.seconds()
    try:
        answer = read_json(result)
    except FileNotFoundError:
        code = child.exit_code() or 0
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        cause = find_crash(child.spec.log) or find_cause(child.spec.log)
        text = f"its code ended the process ({how}){f': {cause}' if cause else ''}"
        return Finding(part.name, REFUSED, text, seconds)
    if "refused" in answer:
        return Finding(part.name, REFUSED, str(answer["refused"]), seconds)
    return Finding(part.name, OK, str(answer["seen"]), seconds)


def table(findings: Sequence[Finding], *, width: int) -> list[str]:
    """One aligned entry per part; long texts go on below themselves."""
    names = max(len(finding.part) for finding in findings)
    lines = []
    for finding in findings:
        seconds = f"{finding.seconds:5.1f} s" if finding.seconds else " " * 7
        head = f"  {finding.part:<{names}}  {seconds}  "
        text = f"{finding.verdict}: {finding.text}"
        if finding.verdict == OK:
            text = f"ok  {finding.text}"
        indent = " " * len(head)
        lines += textwrap.wrap(
            text,
            max(width, len(head) + 40),
            initial_indent=head,
            subsequent_indent=indent,
            break_long_words=False,
        )
    return lines


LOSS_SUMMARY = (
    "Shows whether a loss, by name or as package.module:Class, is the same in micro batches, "
    "packed rows, with padding and over ranks, against float64 on single samples. Its options are "
    "flags: --threshold 0.1, or --options.x 1 for your own class. Ends with an error and its "
    "reason when it is not."
)


def check_loss_command(words: Sequence[str]) -> int:
    """`gradus check-loss`: check the loss and print one row for each layout."""
    if wants_help(words):
        print_help("check-loss NAME", LOSS_SUMMARY, LossConfig)
        return 0
    if not words or words[0].startswith(("-", "@")):
        raise ConfigError("which loss? Write 'gradus check-loss dppo' or '... my_module:MyLoss'")
    config = load_config(loss_config(words[0]), ["--type", words[0], *words[1:]])
    # As in the trainer, which starts by `python -m`: a module in this folder can be named.
    if "" not in sys.path:
        sys.path.insert(0, "")

    from gradus.trainer.distributed import CPU, join_world
    from gradus.trainer.loss_check import check_loss
    from gradus.trainer.losses import build_loss

    loss = build_loss(config)
    # Float64 is the measure, and a table in the place of a model needs no GPU.
    with join_world(CPU) as world:
        report = check_loss(loss, world, aggregation=config.aggregation)
    print("\n".join(_loss_table(config.type, report)))
    if report.reason is not None:
        raise ConfigError(f"{config.type} is not invariant. In {report.reason}")
    return 0


def _loss_table(name: str, report: LossReport) -> list[str]:
    from gradus.trainer.loss_check import BOUND

    width = max(len(row.layout) for row in report.rows)
    lines = [
        f"loss {name}: {report.num_samples} samples, {report.num_members} tokens that train; "
        f"relative difference to float64, bound {BOUND:g}",
        f"{'':<{width}}  {'loss':>8}  {'gradient':>8}",
    ]
    for row in report.rows:
        verdict = "same" if row.reason is None else "DIFFERENT"
        lines.append(f"{row.layout:<{width}}  {row.loss:>8.1e}  {row.gradient:>8.1e}  {verdict}")
    return lines
