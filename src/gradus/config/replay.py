"""The config of a recorded run, what of it a replay may change, and the processes of a replay."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradus.config.processes import ReplayProcessConfig, TrainerProcessConfig
from gradus.config.read.load import given_values, load_config
from gradus.config.resolve import resolve_run
from gradus.config.schema.base import StrictConfig
from gradus.config.schema.run import CheckpointConfig, RunConfig
from gradus.errors import ConfigError

SECRET_KEY = "env_vars"
"""Tables of this name may hold secrets, so they are never written down."""

_CHANGEABLE = re.compile(r"trainer(\..+)?|max_steps")
"""Keys that decide nothing about what was played and which samples make a batch."""

_HARMLESS = re.compile(
    r"trainer\.(env_vars|bench|receive_timeout_seconds|weight_transfer|keep_published"
    r"|peak_teraflops)(\..+)?"
)
"""Keys of the trainer that leave the weights as they are."""

_ONE_LINEAGE = re.compile(
    r"trainer(\..+)?|model(\..+)?|seed"
    r"|orchestrator\.(groups_per_batch|max_staleness|filters|normalize)(\..+)?"
    r"|orchestrator\.train\.(sampling|algo)(\..+)?"
    r"|orchestrator\.train\.env\.[^.]+(\.(id|name|taskset|agents|algo|sampling|group_size)(\..+)?)?"
)
"""Keys that must be the same in all launches of a run that is replayed in one."""

_WAIT = re.compile(r"\.algo\.scoring_timeout_seconds$|^trainer\.receive_timeout_seconds$")
"""Waits, which leave what was played and trained as it is."""


@dataclass(frozen=True)
class ReplayChoice:
    """What a command line makes of a recorded run."""

    config: RunConfig
    """The recorded config with the changes."""
    max_steps: int | None
    """Steps to replay. None means all."""
    changes: tuple[str, ...]
    """Dotted keys whose change may change the weights, with both values."""


@dataclass(frozen=True)
class ReplayConfigs:
    """The config of each process of a replay."""

    trainer: TrainerProcessConfig
    replayer: ReplayProcessConfig
    env_vars: Mapping[str, str]
    """Variables of the trainer; they stand in no process config."""

    def by_process(self) -> dict[str, StrictConfig]:
        """Process name → its config."""
        return {"trainer": self.trainer, "replayer": self.replayer}


def recorded_config(config: RunConfig) -> dict[str, Any]:
    """The config as JSON values, without the environment variables of any process.

    >>> recorded_config(config)["trainer"]["env_vars"]
    {}
    """
    values: dict[str, Any] = _without_secrets(config.model_dump(mode="json"))
    return values


def one_config(launches: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The config of a run with one or more launches: the last one's.

    ConfigError when they trained or graded with different settings, all of them by name.
    """
    last = launches[-1]
    changed = [
        f"{key} was {was!r} and became {now!r}"
        for launch in launches[:-1]
        for key, was, now in differences(launch, last)
        if (_ONE_LINEAGE.fullmatch(key) and not _WAIT.search(key))
        or (key == "max_steps" and not _is_constant(last))
    ]
    if changed:
        raise ConfigError(
            "the run was resumed with other settings, and a replay trains all steps with one:\n"
            + "\n".join(dict.fromkeys(changed))
        )
    return last


def load_replay(recorded: Mapping[str, Any], words: Sequence[str]) -> ReplayChoice:
    """The recorded config with what a command line changes of the trainer.

    ConfigError for keys that decided what was played, and for a recorded config that this version
    does not understand.
    """
    given = dict(leaves(given_values(words)))
    if refused := sorted(key for key in given if not _CHANGEABLE.fullmatch(key)):
        raise ConfigError(
            f"{', '.join(refused)}: decided what the run played, and a replay repeats that. A "
            "replay changes only keys of [trainer], and max_steps to end sooner"
        )
    # Both with the defaults of keys that are newer than the record.
    unchanged = load_config(RunConfig, [], base=recorded)
    config = load_config(RunConfig, words, base=recorded)
    max_steps = config.max_steps if "max_steps" in given else None
    # Schedules go by the steps that the run had.
    config = config.model_copy(update={"max_steps": unchanged.max_steps})
    changes = tuple(
        f"{key} was {was!r} and is {now!r}"
        for key, was, now in differences(recorded_config(unchanged), recorded_config(config))
        if not _HARMLESS.fullmatch(key)
    )
    return ReplayChoice(config, max_steps, changes)


def resolve_replay(
    config: RunConfig, *, run_dir: Path, term: int, recorded: Path, num_steps: int
) -> ReplayConfigs:
    """The processes of a replay; refuses a config whose sections contradict each other."""
    configs = resolve_run(config, run_dir=run_dir, term=term)
    # Nobody would fetch a broadcast.
    trainer = configs.trainer.model_copy(
        update={
            "num_steps": num_steps,
            "checkpoint": CheckpointConfig(interval_steps=None, interval_minutes=None),
            "trainer": configs.trainer.trainer.model_copy(update={"weight_transfer": "filesystem"}),
        }
    )
    replayer = ReplayProcessConfig(
        run_dir=str(run_dir),
        term=term,
        recorded=str(recorded),
        num_steps=num_steps,
        orchestrator=configs.orchestrator,
    )
    return ReplayConfigs(trainer, replayer, configs.env_vars["trainer"])


def _is_constant(config: Mapping[str, Any]) -> bool:
    """Whether the learning rate does not depend on the number of steps."""
    return bool(config["trainer"]["optimizer"].get("schedule") == "constant")


def _without_secrets(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: {} if key == SECRET_KEY else _without_secrets(member)
            for key, member in value.items()
        }
    if isinstance(value, list):
        return [_without_secrets(member) for member in value]
    return value


# ---- Two configs as JSON values, compared key by key.
def differences(was: Any, now: Any) -> Iterator[tuple[str, Any, Any]]:
    """Dotted key, old and new value of every leaf that differs; None stands for an absent one."""
    before, after = dict(leaves(was)), dict(leaves(now))
    for key in sorted(before.keys() | after.keys()):
        if before.get(key) != after.get(key):
            yield key, before.get(key), after.get(key)


def leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted key and value of everything that is no table; members of a list go by their `name` or
    `id`, else by their place."""
    if isinstance(value, Mapping):
        members = [(str(key), member) for key, member in value.items()]
    elif isinstance(value, list) and value:
        members = [(_name(member, place), member) for place, member in enumerate(value)]
    else:
        yield prefix, value
        return
    for name, member in members:
        yield from leaves(member, f"{prefix}.{name}" if prefix else name)


def _name(member: Any, place: int) -> str:
    name = (member.get("name") or member.get("id")) if isinstance(member, Mapping) else None
    return str(name or place).replace(".", "_")
