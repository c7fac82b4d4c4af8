"""What is tried beyond loading a config, cheapest first; each in a child with a deadline."""

from __future__ import annotations

import contextlib
import json
import math
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from gradus.cli.check.findings import CheckVerdict, Finding
from gradus.cli.check.parts import DEADLINE_SECONDS, Part, parts_of, probe_parts
from gradus.cli.check.sanity import sanity_lines, ten_steps
from gradus.cli.check.stepping import SLOW_START, precision, ranks_line, trainer_line
from gradus.config import EvalConfig, LaunchedConfig, RunConfig, SftConfig
from gradus.errors import ExitCode, GradusError, first_line
from gradus.files import write_json
from gradus.launch.job import precision_warnings, with_dtypes, with_trial
from gradus.plan.endpoints import check_external_models
from gradus.plan.hardware import Hardware
from gradus.plan.machine import check
from gradus.plan.nodes import plan_nodes
from gradus.plan.processes import LaunchPlan, Machine, config_file, plan_config
from gradus.plan.variables import tracker_variables, trainer_variables
from gradus.processes.child import dying_with_parent
from gradus.processes.started import SIGNALS_FROM_OUTSIDE, signal_name
from gradus.processes.supervisor import Supervisor
from gradus.run.lease import RunLease
from gradus.run.model_files import is_on_this_machine, model_config, text_part
from gradus.run.paths import RunDirectory
from gradus.run.records import read_records

_START_SECONDS = 900.0
"""For an engine, a step or two steps of everything, compiling included."""
_TEN_STEPS_SECONDS = 3600.0
_STOP_SECONDS = 8.0
_NAME = "check"
"""Of a small run."""
_SLOW_LOAD = 30.0
_WORDS = 16
"""Tokens of a reply on the whole way."""
_SMALL_GROUPS = 2
_UNTRIED_TRACKERS = {
    "prometheus": "it asks for numbers itself, while a run writes them",
    "webhook": "it hears of alarms and of the end of a run only",
}
Examined = Iterator[Finding]


@dataclass(frozen=True)
class Patient:
    """What is examined: a config with its dtypes, on a machine."""

    config: LaunchedConfig
    machine: Machine
    fits_here: bool = True
    """Whether this machine alone can start its processes."""

    @property
    def has_engine(self) -> bool:
        own = self.config
        if isinstance(own, EvalConfig):
            return own.base_url is None
        return own.inference.addresses is None and not (
            isinstance(own, SftConfig) and own.eval is None
        )

    @property
    def variables(self) -> dict[str, str]:
        """Of a child that computes."""
        caller, cores = self.machine.environment, self.machine.num_cores
        return trainer_variables(caller, {}, num_cores=cores, num_processes=1)

    def changed(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """The config as JSON values with other ones in places, named with dots."""
        values = self.config.model_dump(mode="json", exclude_unset=True)
        for name, value in changes.items():
            *above, last = name.split(".")
            table = values
            for part in above:
                table = table.setdefault(part, {})
            table[last] = value
        return values


def dtype_line(config: LaunchedConfig, machine: Machine) -> tuple[LaunchedConfig, Finding]:
    """The config with the dtype that a run would take, and whether this processor computes it."""
    began = time.monotonic()
    here = with_trial(Hardware.current(machine.gpus), config, machine)
    config = with_dtypes(config, here)
    seconds = time.monotonic() - began
    if warned := precision_warnings(config, here):
        is_asked_for = warned[0].startswith("bfloat16 as it was asked")
        verdict = CheckVerdict.FAILS if is_asked_for else CheckVerdict.SLOW
        advice = (
            'set inference.dtype and trainer.compute_dtype to "float32"' if is_asked_for else ""
        )
        return config, Finding("dtype", verdict, warned[0], advice, seconds)
    found = {"engine": config.inference.dtype}
    if isinstance(config, RunConfig | SftConfig):
        own = config.trainer if isinstance(config, RunConfig) else config
        found["trainer"] = own.compute_dtype
    if isinstance(config, SftConfig) and config.eval is None:
        del found["engine"]
    told = ", ".join(f"{who} {dtype}" for who, dtype in found.items())
    return config, Finding(
        "dtype",
        CheckVerdict.OK,
        f"{told}: a step and attention come out right here",
        seconds=seconds,
    )


def one_node_of(config: LaunchedConfig, machine: Machine) -> tuple[Patient, Finding | None]:
    """What of a run on several machines one can try, and what to say of the others."""
    nodes = plan_nodes(config)
    if nodes is None:
        return Patient(config, machine), None
    launch = config.launch.model_copy(update={"nodes": None})
    alone = config.model_copy(update={"launch": launch})
    problems = check(alone, gpus=machine.gpus)
    seen = f"the run takes {nodes.number} nodes, and only this is examined"
    if problems:
        seen += f", without starting the run's processes: {problems[0]}"
    advice = "check a node of each kind; whether they reach one another shows in a short run"
    line = Finding("nodes", CheckVerdict.UNKNOWN, seen, advice)
    return Patient(config if problems else alone, machine, fits_here=not problems), line


def play(patient: Patient) -> Examined:
    """What plays and what is asked, in order of cost."""
    yield from _loaded(patient)
    yield from _endpoints(patient)
    yield from _environments(patient)
    yield from _trackers(patient)


def train(patient: Patient) -> Examined:
    """The engine, a step of the trainer, and all together."""
    if not patient.fits_here:
        return
    yield from _engine(patient)
    if isinstance(patient.config, RunConfig):
        yield from _trainer(patient, patient.config)
    yield _whole_way(patient)
    if isinstance(patient.config, RunConfig):
        yield from _ten_steps(patient, patient.config)


def _loaded(patient: Patient) -> Examined:
    """What `gradus check` loads, and the files of the model."""
    parts, model = parts_of(patient.config, patient.machine), patient.config.model
    if patient.has_engine or not isinstance(patient.config, EvalConfig):
        request = {"model": model.model_dump(mode="json")}
        skipped = "" if is_on_this_machine(model.name) else f"{model.name} is fetched from the hub"
        # It loads tokenizer and renderer too, and says what the part "model" would.
        parts = [it for it in parts if it.name != "model"]
        variables = patient.variables
        parts.insert(0, Part("model", "" if skipped else "files", request, variables, skipped))
    for finding in probe_parts(parts, patient.machine, deadline_seconds=2 * DEADLINE_SECONDS):
        yield _judged_by_time(finding)


def _judged_by_time(finding: Finding) -> Finding:
    is_slow = finding.verdict is CheckVerdict.OK and finding.seconds > _SLOW_LOAD
    return replace(finding, verdict=CheckVerdict.SLOW) if is_slow else finding


def _endpoints(patient: Patient) -> Examined:
    """Models of others that the config names: reached, and their keys taken."""
    began = time.monotonic()
    try:
        check_external_models(patient.config, patient.machine.environment)
    except GradusError as error:
        verdict = CheckVerdict.FAILS if error.exit_code == ExitCode.CONFIG else CheckVerdict.AWAY
        yield Finding("endpoints", verdict, str(error), seconds=time.monotonic() - began)


def _environments(patient: Patient) -> Examined:
    """Each environment plays under `gradus env check`, with the scripted engine."""
    with TemporaryDirectory(prefix="gradus-check-") as folder:
        file = Path(folder) / "config.json"
        write_json(file, patient.changed({}))
        ended = _run(
            patient.machine,
            ["env", "check", "@", str(file), "--json"],
            Path(folder),
            _START_SECONDS,
        )
    found: dict[str, list[dict[str, Any]]] = {}
    for line in ended.printed.splitlines():
        with contextlib.suppress(ValueError, KeyError):
            checked = json.loads(line)
            found.setdefault(checked["environment"], []).append(checked)
    if not found:
        yield Finding("environments", ended.verdict, ended.cause, seconds=ended.seconds)
    for name, checks in found.items():
        broken = [it for it in checks if it["outcome"] == "broken"]
        notes = [it for it in checks if it["outcome"] == "note"]
        seconds = max(it["seconds"] for it in checks)
        shown = (broken or notes)[:2]
        seen = "; ".join(f"{it['check']}: {first_line(it['seen'])}" for it in shown)
        advice = " ".join(str(it["advice"]) for it in shown)
        verdict = CheckVerdict.FAILS if broken else CheckVerdict.OK
        if not broken:
            seen = f"plays ({len(checks)} checks)" + f"; {seen}" * bool(seen)
        yield Finding(f"plays {name}", verdict, seen, advice, seconds)
    outcomes = {it["outcome"] for checks in found.values() for it in checks}
    if found and ended.code and "broken" not in outcomes:
        seen = f"not all were checked: {ended.cause}"
        yield Finding("environments", ended.verdict, seen, seconds=ended.seconds)


def _trackers(patient: Patient) -> Examined:
    """Each tracker takes a record."""
    for monitor in patient.config.monitor:
        name = f"tracker {monitor.title}"
        if why := _UNTRIED_TRACKERS.get(monitor.type):
            yield Finding(name, CheckVerdict.UNKNOWN, why)
            continue
        caller, passed = patient.machine.environment, monitor.variables
        part = Part(
            *(name, "tracker", {"monitor": monitor.model_dump(mode="json")}),
            tracker_variables(caller, passed=passed),
        )
        (finding,) = probe_parts([part], patient.machine, deadline_seconds=DEADLINE_SECONDS)
        yield _judged_by_time(finding)


def _engine(patient: Patient) -> Examined:
    """A server with the run's settings, and what it answers."""
    if not patient.has_engine:
        yield Finding("engine starts", CheckVerdict.UNKNOWN, "this config starts none")
        return
    if not is_on_this_machine(patient.config.model.name):
        yield Finding("engine starts", CheckVerdict.UNKNOWN, "the model is fetched from the hub")
        return
    with TemporaryDirectory(prefix="gradus-check-") as folder:
        run_dir = RunDirectory(Path(folder) / "engine")
        run_dir.root.mkdir()
        lease = RunLease.take(run_dir)
        try:
            plan = plan_config(patient.config, patient.machine, run_dir, lease.term)
            for stem, config in plan.configs.items():
                write_json(config_file(run_dir, stem), config.without_secrets())
            run_dir.ready.mkdir(exist_ok=True)
            yield from _served(patient, plan, run_dir, lease.term)
        finally:
            lease.release()


def _served(patient: Patient, plan: LaunchPlan, run_dir: RunDirectory, term: int) -> Examined:
    process, began = plan.servers[0], time.monotonic()
    with Supervisor(run_dir.processes, stop_timeout_seconds=_STOP_SECONDS) as supervisor:
        child = supervisor.start(plan.spec(process))
        try:
            supervisor.wait_ready([child], timeout_seconds=_START_SECONDS)
        except (GradusError, OSError) as error:
            yield Finding(
                "engine starts", CheckVerdict.FAILS, str(error), seconds=time.monotonic() - began
            )
            return
        seconds = time.monotonic() - began
        verdict = CheckVerdict.SLOW if seconds > SLOW_START else CheckVerdict.OK
        yield Finding("engine starts", verdict, "ready, and ten tokens answered", seconds=seconds)
        own = patient.config
        lora = own.trainer.lora if isinstance(own, RunConfig) else None
        is_adapter = lora is not None and lora.serve == "adapter"
        request = {
            "run_dir": str(run_dir.root),
            "term": term,
            "process": process,
            "model": patient.config.model.model_dump(mode="json"),
            "dtype": patient.config.inference.dtype,
            "vocabulary": int(text_part(model_config(own.model.name)).get("vocab_size", 1 << 30)),
            "lora": lora.model_dump(exclude={"serve"}) if lora and is_adapter else None,
            "takes_turns": isinstance(own, RunConfig) and own.inference.gpu_sharing == "turns",
        }
        yield _tried(patient, "engine answers", "answers", request)


def _tried(patient: Patient, name: str, probe: str, request: Mapping[str, Any]) -> Finding:
    part = Part(name, probe, request, patient.variables)
    (finding,) = probe_parts([part], patient.machine, deadline_seconds=_START_SECONDS)
    return finding


def _trainer(patient: Patient, config: RunConfig) -> Examined:
    """One step of the largest micro batch, by `gradus bench-trainer`, and what it is held to."""
    trainer, longest = config.trainer, config.model.max_length_tokens
    tokens = min(longest, trainer.micro_batch_tokens)
    each = max(1, trainer.micro_batch_tokens // longest)
    bench = {
        "steps": 1,
        "warmup_steps": 0,
        "samples_per_step": each * trainer.num_processes,
        "sample_tokens": tokens,
        "ragged": False,
    }
    ended, metrics = _benched(patient, {"trainer.bench": bench})
    if ended.code or not metrics:
        yield Finding("trainer steps", ended.verdict, ended.cause, seconds=ended.seconds)
        return
    found = metrics[-1]
    line = trainer_line(found, each * tokens, ended.seconds)
    yield line
    if line.verdict is CheckVerdict.FAILS:
        return
    if is_on_this_machine(config.model.name):
        request = {
            "model": config.model.name,
            "trainer": trainer.model_dump(mode="json"),
            "bench": bench,
            "dtype": precision(trainer),
            "found": {name: it for name, it in found.items() if math.isfinite(it)},
        }
        yield _tried(patient, "trainer's loss", "step", request)
    if trainer.num_processes > 1:
        alone = {
            "trainer.bench": bench,
            "trainer.num_processes": 1,
            "trainer.gpus": trainer.gpus and trainer.gpus[:1],
            "trainer.parallel.replicate_size": 1,
            "trainer.parallel.context_parallel_size": 1,
        }
        ended, metrics = _benched(patient, alone)
        if ended.code or not metrics:
            seen = f"one rank alone does not step, so nothing is compared: {ended.cause}"
            yield Finding("trainer's ranks", CheckVerdict.UNKNOWN, seen, seconds=ended.seconds)
            return
        dtype, ranks = precision(trainer), trainer.num_processes
        yield ranks_line(found, metrics[-1], ranks, dtype, ended.seconds)


def _benched(
    patient: Patient, changes: Mapping[str, Any]
) -> tuple[EndedCommand, list[Mapping[str, float]]]:
    with TemporaryDirectory(prefix="gradus-check-") as folder:
        return _small_run(patient, "bench-trainer", changes, Path(folder))


def _whole_way(patient: Patient) -> Finding:
    """Two steps, or one task, with every process of the config on tiny shapes."""
    command, changes = _tiny(patient.config)
    with TemporaryDirectory(prefix="gradus-check-") as folder:
        ended, metrics = _small_run(patient, command, changes, Path(folder))
    if ended.code:
        return Finding("whole way", ended.verdict, ended.cause, seconds=ended.seconds)
    return whole_line(patient.config, metrics, ended.seconds)


def _ten_steps(patient: Patient, config: RunConfig) -> Examined:
    """What ten steps as they are written prove of units, masks and credit."""
    with TemporaryDirectory(prefix="gradus-check-") as folder:
        ended, _ = _small_run(
            patient, "rl", ten_steps(config), Path(folder), seconds=_TEN_STEPS_SECONDS
        )
        if ended.is_late:
            yield Finding("ten steps", CheckVerdict.UNKNOWN, ended.cause, seconds=ended.seconds)
        elif ended.code:
            yield Finding("ten steps", ended.verdict, ended.cause, seconds=ended.seconds)
        else:
            yield from sanity_lines(RunDirectory(Path(folder) / "runs" / _NAME))


def whole_line(
    config: LaunchedConfig, metrics: Sequence[Mapping[str, float]], seconds: float
) -> Finding:
    """What the records of a tiny run say."""
    tell = partial(Finding, "whole way", seconds=seconds)
    if isinstance(config, EvalConfig):
        return tell(CheckVerdict.OK, "one task of each environment")
    norms = [it.get("optimizer/grad_norm", math.nan) for it in metrics]
    seen = f"{len(metrics)} steps"
    if versions := [it["weights/version"] for it in metrics if "weights/version" in it]:
        seen += f", version {max(versions):.0f} published"
    mismatches = [it["loss/mismatch_kl/mean"] for it in metrics if "loss/mismatch_kl/mean" in it]
    if mismatches:
        seen += f", mismatch {max(mismatches):.2g} nats"
    if not norms:
        return tell(CheckVerdict.FAILS, "it ended without a step")
    if not all(map(math.isfinite, norms)):
        return tell(CheckVerdict.FAILS, f"{seen}, a gradient is not finite")
    if not any(norms):
        advice = "such short replies may all earn the same; the ten steps look closer"
        return tell(CheckVerdict.SLOW, f"{seen}, every gradient is 0", advice)
    return tell(CheckVerdict.OK, seen)


def _tiny(config: LaunchedConfig) -> tuple[str, dict[str, Any]]:
    """The command, and what makes it short: everything else stays as it is written."""
    nothing: dict[str, Any] = {"monitor": [], "checkpoint": {"interval_steps": 1}}
    if isinstance(config, EvalConfig):
        sources = [
            {**it.model_dump(mode="json", exclude_unset=True), "num_tasks": 1, "group_size": 1}
            for it in config.env
        ]
        return "eval", {"monitor": [], "env": sources}
    if isinstance(config, SftConfig):
        warm = {"optimizer.warmup_steps": 0} if config.optimizer.warmup_steps else {}
        return "sft", {**nothing, **warm, "max_steps": 2, "eval": None}
    trainer = config.trainer
    warm = {"trainer.optimizer.warmup_steps": 0} if trainer.optimizer.warmup_steps else {}
    # Each update, and each rank of the trainer, must have something to do.
    least = max(_SMALL_GROUPS, trainer.updates_per_batch * trainer.num_processes)
    limit = config.orchestrator.train.sampling.max_completion_tokens or _WORDS
    return "rl", {
        **nothing,
        **warm,
        "max_steps": 2,
        "target_reward": None,
        "patience_steps": None,
        "orchestrator.groups_per_batch": min(least, config.orchestrator.groups_per_batch),
        "orchestrator.eval": None,
        "orchestrator.train.sampling.max_completion_tokens": min(_WORDS, limit),
        # Groups whose replies earn the same are what such short replies mostly are.
        "orchestrator.filters": [],
    }


@dataclass(frozen=True)
class EndedCommand:
    """A command that has ended, or was ended at its deadline."""

    code: int
    printed: str
    said: str
    seconds: float
    limit: float = _START_SECONDS

    @property
    def is_late(self) -> bool:
        return self.code == -signal.SIGKILL and self.seconds >= self.limit

    @property
    def verdict(self) -> CheckVerdict:
        """Of one that did not do what it should."""
        return CheckVerdict.AWAY if self.code == ExitCode.TRY_AGAIN else CheckVerdict.FAILS

    @property
    def cause(self) -> str:
        """Its last words, or what killed it."""
        last = next((it for it in reversed(self.said.strip().splitlines()) if it.strip()), "")
        if self.code < 0:
            name = signal_name(-self.code)
            late = self.is_late
            what = f"did not end within {self.limit:g} s" if late else f"was killed by {name}"
            whose = (
                "" if late or -self.code in SIGNALS_FROM_OUTSIDE else ": its compiled code crashed"
            )
            return f"{what}{whose}" + (f" ({last})" if last else "")
        return last or f"ended with exit code {self.code}"


def _small_run(
    patient: Patient,
    command: str,
    changes: Mapping[str, Any],
    folder: Path,
    *,
    seconds: float = _START_SECONDS,
) -> tuple[EndedCommand, list[Mapping[str, float]]]:
    """A whole command on a changed config in a folder of its own, and the numbers of its steps."""
    file = folder / "config.json"
    own = {**changes, "name": _NAME, "output_dir": str(folder / "runs")}
    write_json(file, patient.changed(own))
    file.chmod(0o600)
    ended = _run(patient.machine, [command, "@", str(file)], folder, seconds)
    # A benchmark names its folder itself.
    paths = list((folder / "runs").glob("*/metrics.jsonl"))
    records = (record for path in paths for record in read_records(path))
    return ended, [it.numbers for it in records if not it.is_evaluation]


def _run(machine: Machine, words: Sequence[str], folder: Path, seconds: float) -> EndedCommand:
    """A command of gradus, ended with all below it at its deadline."""
    began = time.monotonic()
    argv = [machine.python, "-P", "-m", "gradus.cli.main", *words]
    outputs = folder / "printed", folder / "said"
    with outputs[0].open("wb") as printed, outputs[1].open("wb") as said:
        child = subprocess.Popen(
            dying_with_parent(argv),
            env=dict(machine.environment),
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=said,
        )
        try:
            code = child.wait(seconds)
        except subprocess.TimeoutExpired:
            child.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(2 * _STOP_SECONDS)
            child.kill()
            child.wait()
            code = -signal.SIGKILL
        except BaseException:
            child.terminate()
            child.wait(2 * _STOP_SECONDS)
            raise
    out, err = (path.read_text("utf-8", errors="replace") for path in outputs)
    return EndedCommand(code, out, err, time.monotonic() - began, seconds)
