"""Tries each part of a config in a process with the variables that it would have in a run.

All parts are tried at once, each with a deadline; everything that they start is ended.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from gradus.cli.check.findings import CheckVerdict, Finding
from gradus.config import (
    EvalConfig,
    LaunchedConfig,
    ModelConfig,
    ProcessConfigs,
    RunConfig,
    SftConfig,
    resolve,
    resolve_sources,
)
from gradus.files import read_json, write_json
from gradus.plan.machine import placement_of
from gradus.plan.processes import Machine
from gradus.plan.variables import (
    inference_variables,
    orchestrator_variables,
    source_variables,
    trainer_variables,
)
from gradus.processes.log_tail import find_cause, find_crash
from gradus.processes.started import Child, ProcessSpec
from gradus.processes.supervisor import Supervisor
from gradus.run.model_files import is_on_this_machine

DEADLINE_SECONDS = 120.0
"""Deadline of each part; an environment that takes longer to load would delay a run too."""
STOP_SECONDS = 3.0
_COSTLY = frozenset({"files", "answers", "step", "tracker"})
"""What is tried in a child beyond loading."""
WARNING = "warning: "
"""Begins a line about what works and costs something, or may teach nothing."""


@dataclass(frozen=True)
class Part:
    """One part of a config, and what its child needs to look at it."""

    name: str
    """Its name for a person."""
    probe: str = ""
    """What the child tries; empty where nothing can."""
    request: Mapping[str, Any] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    """The whole environment of the child."""
    skipped: str = ""
    """Why it is not tried."""
    python: str | None = None
    """Its interpreter. None means that of the command."""


def parts_of(config: LaunchedConfig, machine: Machine) -> list[Part]:
    configs = resolve(config, run_dir=Path(config.output_dir), term=0)
    if isinstance(config, RunConfig):
        return list(_run_parts(configs, config, machine))
    if isinstance(config, SftConfig):
        return list(_sft_parts(configs, config, machine))
    return list(_eval_parts(configs, config, machine))


def _run_parts(configs: ProcessConfigs, config: RunConfig, machine: Machine) -> Iterator[Part]:
    yield _model_part(config.model, machine)
    yield from _environment_parts(configs, config, machine)
    variables = orchestrator_variables(machine.environment, config.orchestrator.env_vars, config={})
    request: dict[str, Any] = {"run": configs.launched.without_secrets()}
    yield Part("plug-ins", "plug-ins", request, variables)
    request = {
        "loss": config.trainer.loss.model_dump(mode="json"),
        "num_processes": config.trainer.num_processes,
    }
    own = {**config.trainer.env_vars, **_gpus("trainer", config, machine)}
    yield Part("trainer", "trainer", request, _trainer(own, machine))
    yield _engine_part(configs, config, machine)


def _sft_parts(configs: ProcessConfigs, config: SftConfig, machine: Machine) -> Iterator[Part]:
    variables = _trainer({**config.env_vars, **_gpus("trainer", config, machine)}, machine)
    if config.eval is not None:
        yield _model_part(config.model, machine)
    fetched = [one.path for one in config.data.data_sets if not Path(one.path).exists()]
    if not fetched:
        request: dict[str, Any] = {
            "sft": config.without_secrets(),
            "has_model": _is_here(config.model),
        }
        yield Part("data", "data", request, variables)
    else:
        yield Part("data", skipped=f"{', '.join(fetched)} is fetched from the hub")
    request = {"loss": None, "num_processes": config.num_processes}
    yield Part("trainer", "trainer", request, variables)
    if config.eval is not None:
        yield from _environment_parts(configs, config, machine)
        yield _engine_part(configs, config, machine)


def _eval_parts(configs: ProcessConfigs, config: EvalConfig, machine: Machine) -> Iterator[Part]:
    if config.base_url is None:
        yield _model_part(config.model, machine)
    else:
        yield Part("model", skipped=f"served at {config.base_url}")
    yield from _environment_parts(configs, config, machine)
    if config.base_url is None:
        yield _engine_part(configs, config, machine)


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
            "config": process.without_secrets(),
            "model": None if model is None else model.model_dump(mode="json"),
            "plays": not is_served,
            "source": trained.get(process.name) if process.purpose == "train" else None,
        }
        what = "environment" if process.purpose == "train" else "evaluation"
        name = f"{what} {process.name}"
        yield Part(name, "environment", request, variables, python=process.python)
    for source in sources.all:
        if source.given.address is not None:
            name = f"environment {source.complete.name}"
            yield Part(name, skipped=f"you run it at {source.given.address}")


def _engine_part(configs: ProcessConfigs, config: LaunchedConfig, machine: Machine) -> Part:
    if not configs.inference:
        where = f"others serve it, at the addresses in {config.inference.addresses}"
        return Part("engine", skipped=where)
    engine = configs.inference[0]  # the others are like it
    own = {**engine.inference.env_vars, **_gpus(engine.process, config, machine)}
    variables = inference_variables(machine.environment, own)
    request = {
        "engine": engine.without_secrets(),
        "has_model": is_on_this_machine(engine.model.name),
    }
    return Part("engine", "engine", request, variables)


def _gpus(process: str, config: LaunchedConfig, machine: Machine) -> dict[str, str]:
    placement = placement_of(config, machine.gpus)
    return placement.variables(process, machine.gpus, machine.environment)


def _trainer(own: Mapping[str, str], machine: Machine) -> dict[str, str]:
    return trainer_variables(machine.environment, own, num_cores=machine.num_cores, num_processes=1)


def _is_here(model: ModelConfig) -> bool:
    return is_on_this_machine(model.tokenizer or model.name)


def probe_parts(
    parts: Sequence[Part], machine: Machine, *, deadline_seconds: float = DEADLINE_SECONDS
) -> list[Finding]:
    """A finding for each part, in order; no started process is left."""
    with TemporaryDirectory(prefix="gradus-check-") as directory:
        folder = Path(directory)
        with Supervisor(folder / "pids.json", stop_timeout_seconds=STOP_SECONDS) as supervisor:
            children = [
                supervisor.start(_spec(part, folder / str(number), machine)) if part.probe else None
                for number, part in enumerate(parts)
            ]
            return _wait(parts, children, folder, deadline_seconds)


def _spec(part: Part, folder: Path, machine: Machine) -> ProcessSpec:
    folder.mkdir()
    request, result = folder / "request.json", folder / "result.json"
    write_json(request, dict(part.request))
    python = part.python or machine.python
    costly, light = "gradus.cli.check.trying", "gradus.cli.check.child"
    module = costly if part.probe in _COSTLY else light
    command = (python, "-P", "-m", module, part.probe, str(request), str(result))
    return ProcessSpec(
        name=part.name, argv=command, env=part.variables, log=folder / "log", finishes=True
    )


def _wait(
    parts: Sequence[Part],
    children: Sequence[Child | None],
    folder: Path,
    deadline_seconds: float,
) -> list[Finding]:
    found: dict[int, Finding] = {}
    while len(found) < len(parts):
        for number, (part, child) in enumerate(zip(parts, children, strict=True)):
            if number in found:
                continue
            if child is None:
                found[number] = Finding(part.name, CheckVerdict.UNKNOWN, part.skipped)
            elif child.exit_code() is not None:
                found[number] = _answer(part, child, folder / str(number) / "result.json")
            elif child.seconds() > deadline_seconds:
                text = f"not loaded within {deadline_seconds:g} s; a run would wait for it too"
                found[number] = Finding(
                    part.name, CheckVerdict.FAILS, text, seconds=child.seconds()
                )
        time.sleep(0.02)
    return [found[number] for number in range(len(parts))]


def _answer(part: Part, child: Child, result: Path) -> Finding:
    """What a child wrote before it ended, or how it died."""
    seconds = child.seconds()
    try:
        answer = read_json(result)
    except FileNotFoundError:
        code = child.exit_code() or 0
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        cause = find_crash(child.spec.log) or find_cause(child.spec.log)
        text = f"its code ended the process ({how}){f': {cause}' if cause else ''}"
        return Finding(part.name, CheckVerdict.FAILS, text, seconds=seconds)
    if "refused" in answer:
        verdict = CheckVerdict.AWAY if answer.get("is_away") else CheckVerdict.FAILS
        return Finding(part.name, verdict, str(answer["refused"]), seconds=seconds)
    seen = str(answer["seen"])
    verdict = CheckVerdict.SLOW if f"\n{WARNING}" in f"\n{seen}" else CheckVerdict.OK
    return Finding(part.name, verdict, seen, seconds=seconds)
