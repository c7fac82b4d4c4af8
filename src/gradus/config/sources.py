"""Every source of a config with nothing left to inherit."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from pydantic import Field

from gradus.config.keys import KeyPath
from gradus.config.problems import Problem
from gradus.config.schema.algorithms import AlgorithmChoice, AlgorithmConfig
from gradus.config.schema.base import StrictConfig
from gradus.config.schema.environment import (
    CurriculumChoice,
    EnvironmentConfig,
    EnvironmentTimeoutConfig,
    ErrorPolicyConfig,
    EvalEnvironmentConfig,
    RoleConfig,
    TrainEnvironmentConfig,
    UniformConfig,
)
from gradus.config.schema.eval import EvalConfig
from gradus.config.schema.inference import SamplingConfig
from gradus.config.schema.run import RunConfig
from gradus.config.schema.sft import SftConfig
from gradus.run.paths import Purpose, environment_process

LaunchedConfig: TypeAlias = RunConfig | SftConfig | EvalConfig
"""What a user writes for a command that plays or trains."""

DEFAULT_SAMPLING = SamplingConfig(temperature=1.0, top_p=1.0, max_completion_tokens=512)
"""What holds where neither the source nor the enclosing section says anything."""

_JUDGE = "judge"
"""A role of this name does not train unless its settings say so."""


class _CompleteSource(StrictConfig):
    """A source with nothing left to inherit."""

    name: str
    """Unique name among the sources of its purpose."""
    group_size: int
    """Episodes per task."""
    sampling: SamplingConfig
    """Complete sampling settings."""
    timeout: EnvironmentTimeoutConfig
    """Deadlines."""
    address: str | None
    """User-managed environment server. None means the run's own, found by their ready files."""
    num_workers: int = 1
    """The run's own processes that play it."""
    state_columns: list[str]
    """Keys of the trace's info kept in records."""
    errors: ErrorPolicyConfig = ErrorPolicyConfig()
    """Which failed episodes are played again."""


class SourceConfig(_CompleteSource):
    """A source that trains, as the orchestrator sees it."""

    ratio: float
    """Relative share of groups."""
    algo: AlgorithmChoice
    """Complete algorithm settings."""
    untrained_agents: list[str] = Field(default_factory=list)
    """Agents whose traces never train."""
    curriculum: CurriculumChoice = UniformConfig()
    """Order of the tasks."""
    is_frozen: bool = False
    """Whether no seat is played by the policy, so that its episodes never become stale."""


class EvaluationSourceConfig(_CompleteSource):
    """A source that measures."""

    num_tasks: int | None
    """Tasks to play, from the first. None means all."""
    unmeasured_agents: list[str] = Field(default_factory=list)
    """Agents whose traces say nothing about the policy."""


@dataclass(frozen=True)
class TrainSource:
    """A source that trains the policy."""

    path: KeyPath
    """Where it is written."""
    given: TrainEnvironmentConfig
    """What is written there."""
    complete: SourceConfig
    """The same with nothing left to inherit."""
    purpose: Purpose = field(default="train", init=False)

    @property
    def algo_path(self) -> KeyPath:
        return (*(self.path[:-2] if self.given.algo is None else self.path), "algo")


@dataclass(frozen=True)
class EvaluatedSource:
    """A source that measures the policy."""

    path: KeyPath
    """Where it is written."""
    given: EvalEnvironmentConfig
    """What is written there."""
    complete: EvaluationSourceConfig
    """The same with nothing left to inherit."""
    purpose: Purpose = field(default="eval", init=False)


@dataclass(frozen=True)
class Sources:
    """The sources of one config, in the order in which they are written."""

    train: tuple[TrainSource, ...] = ()
    evaluated: tuple[EvaluatedSource, ...] = ()

    @property
    def all(self) -> tuple[TrainSource | EvaluatedSource, ...]:
        return (*self.train, *self.evaluated)

    @property
    def by_process(self) -> Mapping[str, EnvironmentConfig]:
        return {
            environment_process(s.complete.name, s.purpose, number): s.given
            for s in self.all
            for number in range(s.given.num_workers)
        }


def resolve_sources(config: LaunchedConfig) -> Sources:
    """The sources of a config.

    >>> resolve_sources(config).train[0].complete.sampling.temperature
    1.0
    """
    if isinstance(config, RunConfig):
        return _run_sources(config)
    evaluation = config if isinstance(config, EvalConfig) else config.eval
    if evaluation is None:
        return Sources()
    path: KeyPath = ("env",) if isinstance(config, EvalConfig) else ("eval", "env")
    section = merged_sampling(evaluation.sampling, DEFAULT_SAMPLING)
    return Sources(evaluated=_evaluated(path, evaluation.env, section, evaluation.max_retries))


def are_references_served(algorithms: Iterable[AlgorithmConfig]) -> bool:
    """Whether each of them that gives the policy advantages names a model that scores it."""
    return all(it.reference is not None for it in algorithms if it.gives_advantages)


def keeps_reference(config: LaunchedConfig, sources: Sources) -> bool:
    """Whether the trainer holds the initial weights too, to score what the policy samples."""
    is_pulled = isinstance(config, RunConfig) and config.trainer.loss.pulls_to_reference
    return is_pulled and not are_references_served(source.complete.algo for source in sources.train)


def distribution_problems(source: TrainSource) -> Iterator[Problem]:
    """The trainer computes the whole softmax; tokens of a part of it have other logprobs."""
    given, complete = source.given, source.complete
    own, found = given.sampling, list[KeyPath]()
    for key in complete.sampling.reshaping:
        is_own = own.top_p is not None if key == "top_p" else key.split(".")[1] in own.extra_body
        found.append((*(source.path if is_own else source.path[:-2]), "sampling", *key.split(".")))
    for role, agent in given.agents.items():
        if agent.sampling is not None and role not in complete.untrained_agents:
            at = (*source.path, "agents", role, "sampling")
            found += [(*at, *key.split(".")) for key in agent.sampling.reshaping]
    for path in [] if complete.is_frozen else found:
        yield Problem(
            path,
            "changes the distribution that tokens are drawn from, and the trainer computes that of "
            "the temperature alone: the two would disagree on every token; remove it",
        )


def holdout_problems(sources: Sources) -> Iterator[Problem]:
    """What an evaluation holds out, and training may have played: their hold-outs are cut
    otherwise, or their tasks have other settings, which are a part of the keys."""
    for source in sources.evaluated:
        for other in sources.train:
            own, trained, name = source.given, other.given, repr(other.complete.name)
            if _short(own.id) == _short(trained.id) and not other.complete.is_frozen:
                problems = (*_other_cuts(own, trained, name), *_other_keys(own, trained, name))
                yield from (Problem((*source.path, *key), words) for key, words in problems)


def _other_cuts(
    own: EnvironmentConfig, trained: EnvironmentConfig, name: str
) -> Iterator[tuple[KeyPath, str]]:
    """Keys of a hold-out, of the source or of the task set, that do not fit those of training."""
    if not _share_tasks(own, trained):
        return
    tables = (("tasks", own.tasks.model_dump(), trained.tasks.model_dump()),)
    for table, keys, theirs in (*tables, ("taskset", own.taskset, trained.taskset)):
        sides = keys.get("side", "train"), theirs.get("side", "train")
        if sides[0] == sides[1]:
            continue
        # What is not written in a task set's table has a default that only the task set knows.
        fractions = [_number(it.get("holdout_fraction")) for it in (keys, theirs)]
        held, other = fractions if sides[0] == "held_out" else reversed(fractions)
        written = ["holdout_fraction" in it for it in (keys, theirs)]
        if held > other or written[0] != written[1]:
            yield (
                (table, "holdout_fraction"),
                f"does not fit the {table} of {name}, which may train on what is held out here; "
                "write the same holdout_fraction in both",
            )
        for key in ("holdout_seed", "holdout_by"):
            if (keys.get(key) or 0) != (theirs.get(key) or 0):
                yield (
                    (table, key),
                    f"is not that of {name}, so held-out tasks may be trained on; make both equal",
                )


def _share_tasks(own: EnvironmentConfig, trained: EnvironmentConfig) -> bool:
    """Whether training can meet the tasks of an evaluation: nothing that it says of its tasks is
    said otherwise there."""
    mine, theirs = _task_settings(own), _task_settings(trained)
    selected = [(it.tasks.include, it.tasks.exclude) for it in (own, trained)]
    return selected[0] == selected[1] and all(mine.get(key) == it for key, it in theirs.items())


def _other_keys(
    own: EnvironmentConfig, trained: EnvironmentConfig, name: str
) -> Iterator[tuple[KeyPath, str]]:
    """Settings of the tasks that differ where the keys of the tasks decide which are held out."""
    if not own.tasks.holdout_fraction or not trained.tasks.holdout_fraction:
        return
    if own.tasks.side == trained.tasks.side or own.tasks.holdout_by is not None:
        return
    mine, theirs = _task_settings(own), _task_settings(trained)
    keys = sorted(key for key in {*mine, *theirs} if mine.get(key) != theirs.get(key))
    if keys:
        yield (
            ("taskset",),
            f"differs from that of {name} in {', '.join(keys)}, so that tasks have other keys here "
            "and held-out ones may be trained on; make them equal, or set tasks.holdout_by in both "
            "to a field such as 'prompt'",
        )


def _short(name: str) -> str:
    return name.replace("_", "-").removeprefix("gradus-")


def _number(value: object) -> float:
    """A number of a table that only its task set checks; 0 for what is none."""
    try:
        return float(value) if isinstance(value, int | float | str) else 0.0
    except ValueError:
        return 0.0


def _task_settings(source: EnvironmentConfig) -> dict[str, Any]:
    """What a task set makes tasks of, without what leaves their keys alone."""
    short, settings = _short(source.id), dict(source.taskset)
    free = {"instruction", "side", "holdout_fraction", "holdout_seed", "task"}
    free |= {"solve_rates", "min_solve_rate", "max_solve_rate"}
    if short == "jsonl":
        free |= {"reward", "prompt_key"}
        settings["path"] = os.path.normpath(str(settings.get("path")))
    if short != "reasoning-gym":
        free |= {"num_tasks"}
    return {key: value for key, value in settings.items() if key not in free}


def reference_problems(source: TrainSource, *, is_pulled: bool) -> Iterator[Problem]:
    """A model that scores is missing, never asked, or cannot be compared with; `is_pulled` says
    that the loss pulls towards one."""
    algo, path = source.complete.algo, source.algo_path
    temperature = source.complete.sampling.temperature
    if algo.needs_teacher and algo.reference is None:
        yield Problem(
            (*path, "reference"),
            f"is missing; {algo.type} needs the base_url and the model of a frozen teacher",
        )
    if algo.scores_at_temperature_one and temperature != 1.0:
        yield Problem(
            (*path, "type"),
            f"{algo.type} compares with logprobs at temperature 1, but sampling.temperature is "
            f"{temperature}; set it to 1.0",
        )
    if algo.scores_at_temperature_one or (algo.reference is not None and is_pulled):
        places: dict[KeyPath, dict[str, Any]] = {("taskset",): source.given.taskset}
        for at, seat in source.given.seats.items():
            places[(*at, "harness")] = seat.harness or {}
        for place, keys in places.items():
            if keys.get("sampling") == "program":
                yield Problem(
                    (*source.path, *place, "sampling"),
                    "lets each call have its own temperature, but what its tokens are compared "
                    'with is scored at temperature 1; use "run"',
                )
    if algo.needs_frozen_player and not source.complete.is_frozen:
        yield Problem(
            (*path, "type"),
            f"{algo.type} learns what a frozen model plays, but the policy plays this source; "
            "give its seats a model and a base_url under agents.<role>",
        )
    if algo.reference is None or algo.takes_teacher:
        return
    if not algo.gives_advantages:
        yield Problem((*path, "reference"), f"{algo.type} asks no frozen model; remove it")
    elif not is_pulled:
        yield Problem(
            (*path, "reference"),
            f"{algo.type} asks no frozen model, and no loss pulls towards one; set "
            "trainer.loss.reference_kl_coefficient, or remove it",
        )
    elif temperature != 1.0:
        yield Problem(
            (*path, "reference"),
            f"it scores at temperature 1, but sampling.temperature is {temperature}; set it to "
            "1.0, or remove this: the trainer then scores with the initial weights, at any one",
        )


def _run_sources(config: RunConfig) -> Sources:
    section = config.orchestrator.train
    sampling = merged_sampling(section.sampling, DEFAULT_SAMPLING)
    train = tuple(
        _train_source(index, source, section.algo if source.algo is None else source.algo, sampling)
        for index, source in enumerate(section.env)
    )
    evaluation = config.orchestrator.eval
    if evaluation is None:
        return Sources(train)
    inherited = merged_sampling(evaluation.sampling, sampling)
    path: KeyPath = ("orchestrator", "eval", "env")
    return Sources(train, _evaluated(path, evaluation.env, inherited, evaluation.max_retries))


def _train_source(
    index: int, source: TrainEnvironmentConfig, algo: AlgorithmChoice, sampling: SamplingConfig
) -> TrainSource:
    return TrainSource(
        path=("orchestrator", "train", "env", index),
        given=source,
        complete=SourceConfig(
            **_kept(source, sampling),
            ratio=source.ratio,
            algo=algo,
            errors=source.errors,
            untrained_agents=_untrained_agents(source, algo),
            curriculum=source.curriculum,
            is_frozen=_is_frozen(source, algo),
        ),
    )


def _evaluated(
    path: KeyPath, sources: list[EvalEnvironmentConfig], section: SamplingConfig, max_retries: int
) -> tuple[EvaluatedSource, ...]:
    return tuple(
        EvaluatedSource(
            path=(*path, index),
            given=source,
            complete=EvaluationSourceConfig(
                **_kept(source, section),
                num_tasks=source.num_tasks,
                unmeasured_agents=_untrained_agents(source),
                errors=_errors(source.errors, max_retries),
            ),
        )
        for index, source in enumerate(sources)
    )


def _kept(
    source: TrainEnvironmentConfig | EvalEnvironmentConfig, section: SamplingConfig
) -> dict[str, Any]:
    """What a complete source takes over from one as it is written, and its sampling."""
    return {
        "name": source.unique_name,
        "sampling": merged_sampling(source.sampling, section),
        **{
            key: getattr(source, key)
            for key in ("group_size", "timeout", "address", "num_workers", "state_columns")
        },
    }


def _errors(own: ErrorPolicyConfig, max_retries: int) -> ErrorPolicyConfig:
    """A source's own policy; its section says how often, where the source does not."""
    if "retries" in own.model_fields_set:
        return own
    return ErrorPolicyConfig(**{**own.model_dump(), "retries": max_retries})


def merged_sampling(inner: SamplingConfig, outer: SamplingConfig) -> SamplingConfig:
    """`inner`, with every unset value taken from `outer`; `extra_body` is joined key by key."""
    given = inner.model_dump(exclude_none=True)
    extra_body = {**outer.extra_body, **inner.extra_body}
    merged: SamplingConfig = outer.model_copy(update={**given, "extra_body": extra_body})
    return merged


def _is_frozen(source: EnvironmentConfig, algo: AlgorithmConfig | None) -> bool:
    """Whether every seat is played by another model than the policy.

    Roles that are not named are the policy's, and only the environment knows whether there are any.
    So the named ones are taken for all where the algorithm learns what other models play, or where
    each of them is said to train.
    """
    roles = source.agents.values()
    if not roles or any(role.base_url is None for role in roles):
        return False
    return (algo is not None and algo.needs_frozen_player) or all(r.train is True for r in roles)


def _untrained_agents(source: EnvironmentConfig, algo: AlgorithmConfig | None = None) -> list[str]:
    """Roles whose traces never train and are not measured, by their settings or by their name.

    What another model plays is neither, unless it is the algorithm's data.
    """
    roles = {_JUDGE: RoleConfig(), **source.agents}
    is_mixed = not _is_frozen(source, algo)
    return sorted(
        name
        for name, role in roles.items()
        if role.train is False
        or (role.train is None and (name == _JUDGE or (is_mixed and role.base_url is not None)))
    )
