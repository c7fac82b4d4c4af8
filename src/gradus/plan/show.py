"""A summary of a config: what will run, and which processes run it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

from gradus.config.families import mixture_note
from gradus.config.resolve import resolve, run_name
from gradus.config.schema.environment import (
    CHAT_HARNESS,
    EnvironmentConfig,
)
from gradus.config.schema.eval import EvalConfig
from gradus.config.schema.inference import InferenceConfig
from gradus.config.schema.learning import OptimizerConfig
from gradus.config.schema.run import RunConfig
from gradus.config.schema.sft import SftConfig
from gradus.config.schema.trainer import LoraConfig
from gradus.config.sources import (
    EvaluationSourceConfig,
    LaunchedConfig,
    Sources,
    TrainSource,
    resolve_sources,
)
from gradus.installed import installed_id
from gradus.plan.gpus import NOT_ASKED, FoundGpus
from gradus.plan.machine import placement_of, trainer_footprint
from gradus.plan.nodes import plan_nodes
from gradus.plan.placement import Placement
from gradus.run.model_files import model_config
from gradus.run.settings import planned_steps

_SUFFIX = "<8 hex>"


def describe_config(
    config: LaunchedConfig, gpus: FoundGpus = NOT_ASKED, *, is_loaded: bool = False
) -> list[str]:
    """The plan of a command: its size, its folder, and its processes in starting order.

    `gpus` are those of this shell; `is_loaded` says that the environments were asked who plays, so
    that no note guesses it.
    """
    configs = resolve(config, run_dir=Path(config.output_dir), term=0)
    sources = resolve_sources(config)
    words = _words(config, sources)
    placement = placement_of(config, gpus)
    nodes = plan_nodes(config)
    served = f"{config.model.max_length_tokens} tokens"
    if isinstance(config, EvalConfig):
        served = config.base_url or f"served by gradus, {served}"
    return [
        _size(config, sources),
        f"model: {config.model.name}, {served}",
        f"folder: {Path(config.output_dir) / run_name(config, _SUFFIX)}",
        *_gpu_lines(gpus),
        "processes, in starting order:",
        *(
            f"  {process:<24} {words[process]}{_places(placement, process)}"
            for process in configs.by_process()
        ),
        *([] if nodes is None else ["nodes:", *nodes.describe()]),
        *_memory_lines(config, sources, placement),
        *_gpu_notes(gpus, placement, config.inference.gpu_sharing == "turns"),
        *(f"note: {note}" for note in _model_notes(config)),
        *(f"note: {note}" for source in sources.train for note in _notes(source, is_loaded)),
    ]


def _model_notes(config: LaunchedConfig) -> Iterator[str]:
    if isinstance(config, RunConfig):
        name = config.model.name
        yield from mixture_note(config.trainer, name, model_config(name))


def _gpu_lines(gpus: FoundGpus) -> Iterator[str]:
    """The GPUs of this shell, those of one kind together."""
    if gpus.why_none:
        yield f"gpus: none: {gpus.why_none}"
    for kind in dict.fromkeys(gpu.description for gpu in gpus.gpus):
        numbers = [str(n) for n, gpu in enumerate(gpus.gpus) if gpu.description == kind]
        yield f"gpus: {', '.join(numbers)}: {kind}"


def _memory_lines(config: LaunchedConfig, sources: Sources, placement: Placement) -> Iterator[str]:
    """What a rank of the trainer holds at least, where the model's files are here."""
    if isinstance(config, EvalConfig):
        return
    on_gpu = bool(placement.gpus.get("trainer"))
    predicted = trainer_footprint(config, sources, on_gpu=on_gpu)
    if predicted is not None:
        yield f"memory of each trainer process, at least: {predicted}"


def _places(placement: Placement, process: str) -> str:
    """The GPUs of a process, after its other words."""
    numbers = placement.gpus.get(process)
    if numbers is None:
        return ""
    return f", GPU {', '.join(map(str, numbers))}" if numbers else ", no GPU"


def _gpu_notes(gpus: FoundGpus, placement: Placement, takes_turns: bool) -> Iterator[str]:
    """GPUs that two processes have, and those that are not used."""
    how = "the engine sleeps while the trainer learns" if takes_turns else "both stay on them"
    used = {number for numbers in placement.gpus.values() for number in numbers}
    idle = [str(number) for number in range(len(gpus.gpus)) if number not in used]
    if placement.shared():
        numbers = ", ".join(map(str, sorted(placement.shared())))
        yield f"note: engine and trainer share GPU {numbers}; {how}"
    if used and idle:
        yield (
            f"note: idle GPUs: {', '.join(idle)}; raise num_processes of the trainer or "
            "inference.tensor_parallel_size to use them"
        )


def _size(config: LaunchedConfig, sources: Sources) -> str:
    if isinstance(config, RunConfig):
        orchestrator = config.orchestrator
        ahead = _counted(orchestrator.max_lag, "batch", "batches")
        count, end = planned_steps(config.max_steps), ""
        if count is None:
            end = ", until it is stopped (no max_steps)"
        steps = "steps" if count is None else f"{count} steps"
        return f"run: {steps} of {orchestrator.groups_per_batch} groups, at most {ahead} ahead{end}"
    if isinstance(config, SftConfig):
        return (
            f"run: {config.max_steps} steps of {config.batch_conversations} conversations "
            f"from {', '.join(one.path for one in config.data.data_sets)}"
        )
    return f"evaluation: {_all_tasks(sources)}"


def _words(config: LaunchedConfig, sources: Sources) -> dict[str, str]:
    """Process name → what it does."""
    words = {process: _environment(given) for process, given in sources.by_process.items()}
    for number, process in enumerate(config.inference.processes):
        words[process] = _engine(config.inference, number)
    if isinstance(config, RunConfig):
        trainer = config.trainer
        words["trainer"] = (
            f"{_ranks(trainer.num_processes)}, {trainer.compute_dtype}, {trainer.loss.type}, "
            f"{_update_rule(trainer.optimizer, trainer.lora)}"
        )
        words["orchestrator"] = ", ".join(
            f"{source.complete.name} x {source.complete.group_size} ({source.complete.algo.type})"
            for source in sources.train
        )
    elif isinstance(config, SftConfig):
        words["trainer"] = (
            f"{_ranks(config.num_processes)}, {config.compute_dtype}, "
            f"{_update_rule(config.optimizer, config.lora)}"
        )
        if config.eval is not None:
            steps = config.eval.interval_steps
            words["evaluator"] = f"{_all_tasks(sources)}, every {steps} steps"
    else:
        words["evaluator"] = f"at most {config.max_in_flight_episodes} episodes at once"
    if config.monitor:
        words["tracker"] = ", ".join(monitor.title for monitor in config.monitor)
    return words


def _all_tasks(sources: Sources) -> str:
    return ", ".join(_tasks(source.complete) for source in sources.evaluated)


def _tasks(source: EvaluationSourceConfig) -> str:
    number = "all" if source.num_tasks is None else str(source.num_tasks)
    sampling = source.sampling
    how = "greedy" if sampling.temperature == 0 else f"temperature {sampling.temperature:g}"
    return f"{number} tasks of {source.name} x {source.group_size} ({how})"


def _notes(source: TrainSource, is_loaded: bool) -> Iterator[str]:
    """What is allowed but rarely meant, and what only the environments can decide."""
    given, complete = source.given, source.complete
    name, kind = complete.name, complete.algo.type
    if is_loaded and given.address is None:
        return
    trained = [role for role in given.agents if role not in complete.untrained_agents]
    if complete.algo.compares_all_traces and len(trained) > 1:
        yield (
            f"source {name!r}: {kind} compares all traces of a group, and "
            f"{', '.join(trained)} all train. The start refuses that unless the tasks name a "
            "learner_seat; rae and hierarchical_grpo tell agents apart"
        )
    if complete.algo.compares_agents and len(given.agents) < 2:
        yield (
            f"source {name!r}: {kind} compares agents. Whether this environment has several is "
            "seen when it is loaded, by gradus check or by the start, which refuses "
            "one that has a single agent"
        )


def _engine(inference: InferenceConfig, number: int) -> str:
    port = (inference.port and inference.port + number) or "a port that the system chooses"
    return f"vLLM, {inference.dtype}, {inference.host}, {port}"


def _environment(source: EnvironmentConfig) -> str:
    found = installed_id(source.id)
    first = f", first runs {shlex.join(source.prepare)!r}" if source.prepare else ""
    # What an author pinned is known when the environment is loaded.
    harness = source.agent.harness
    name = "of its author, else chat" if harness is None else harness.get("id", CHAT_HARNESS)
    own = f", by {source.python}" if source.python else ""
    return f"{found}, harness {name}{own}{first}"


def _update_rule(optimizer: OptimizerConfig, lora: LoraConfig | None) -> str:
    rate = optimizer.lr if isinstance(optimizer.lr, str) else f"{optimizer.lr:g}"
    what = "" if lora is None else f", LoRA rank {lora.rank}"
    return f"{optimizer.type} lr {rate}{what}"


def _counted(number: int, one: str, several: str) -> str:
    return f"{number} {one if number == 1 else several}"


def _ranks(number: int) -> str:
    return "1 process" if number == 1 else f"{number} processes under torchrun"
