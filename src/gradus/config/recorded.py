"""What a launch records of its config, and what a resume or a replay may change of it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gradus.config.read.load import given_values, load_config
from gradus.config.schema.base import StrictConfig
from gradus.config.schema.run import RunConfig
from gradus.errors import ConfigError

SECRET_KEY = "env_vars"
"""A key of this name sets variables of a process, maybe secret ones; it is never written down."""

_CHANGEABLE = re.compile(r"trainer(\..+)?|max_steps")
"""Keys that decide nothing about what was played and which samples make a batch."""

_HARMLESS = re.compile(
    r"trainer\.(env_vars|gpus|bench|weight_transfer|broadcast_backend|peak_teraflops)(\..+)?"
)
"""Keys of the trainer that leave the weights as they are."""

_ONE_LINEAGE = re.compile(
    r"trainer(\..+)?|model(\..+)?|seed"
    r"|orchestrator\.(groups_per_batch|max_staleness|filters|normalize)(\..+)?"
    r"|orchestrator\.train\.(sampling|algo)(\..+)?"
    r"|orchestrator\.train\.env\.[^.]+(\.(id|name|taskset|tasks|agents|algo|sampling|group_size)(\..+)?)?"
)
"""Keys that must be the same in all launches of a run that is replayed in one."""

_WAIT = re.compile(r"\.algo\.scoring_timeout_seconds$|^trainer\.gpus(\..+)?$")
"""Waits and places, which leave what was played and trained as it is."""


@dataclass(frozen=True)
class ReplayChoice:
    """What a command line makes of a recorded run."""

    config: RunConfig
    """The recorded config with the changes."""
    max_steps: int | None
    """Steps to replay. None means all."""
    changes: tuple[str, ...]
    """Dotted keys whose change may change the weights, with both values."""


def without_secrets(config: StrictConfig) -> dict[str, Any]:
    """The config as JSON values, without the environment variables of any process.

    >>> without_secrets(config)["trainer"]["env_vars"]
    {}
    """
    values: dict[str, Any] = _without_secrets(config, config.model_dump(mode="json"))
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
        for key, was, now in differences(without_secrets(unchanged), without_secrets(config))
        if not _HARMLESS.fullmatch(key)
    )
    return ReplayChoice(config, max_steps, changes)


def _is_constant(config: Mapping[str, Any]) -> bool:
    """Whether the learning rate does not depend on the number of steps."""
    return bool(config["trainer"]["optimizer"].get("schedule") == "constant")


def _without_secrets(value: Any, dumped: Any) -> Any:
    """`dumped` without what `value` keeps for processes; tables of the user's own stay whole."""
    if isinstance(value, StrictConfig):
        return {
            name: {} if name == SECRET_KEY else _without_secrets(getattr(value, name), member)
            for name, member in dumped.items()
        }
    if isinstance(value, Mapping):
        pairs = zip(value.values(), dumped.items(), strict=True)
        return {name: _without_secrets(member, entry) for member, (name, entry) in pairs}
    if isinstance(value, list | tuple):
        return [_without_secrets(*pair) for pair in zip(value, dumped, strict=True)]
    return dumped


def continued_identity(before: Any, identity: Mapping[str, Any]) -> dict[str, Any]:
    """The identity to note when an evaluation continues: that of all its episodes, old and new.

    ConfigError, naming every key that differs, when the old ones are of something else. Sources
    that the config no longer names stay noted, like their episodes.
    """
    old = before if isinstance(before, dict) else {}
    sources = old.get("sources", {})
    now = dict(identity)
    # Digests are unknown while the model was not on this disk; then the known ones hold for both.
    files = old.get("files") or now.get("files") or {}
    now["files"] = now.get("files") or files
    expected = {name: sources.get(name, source) for name, source in now["sources"].items()}
    changed = list(differences(old | {"sources": expected, "files": files}, now))
    if changed:
        lines = "\n".join(f"{key} was {was!r} and is {new!r}" for key, was, new in changed)
        raise ConfigError(
            "this evaluation began with something else, so its episodes cannot be kept; put it "
            f"back, or choose another name:\n{lines}"
        )
    return now | {"sources": sources | now["sources"]}


def differences(was: Any, now: Any) -> Iterator[tuple[str, Any, Any]]:
    """Dotted key, old and new value of every leaf that differs; None for an absent one."""
    before, after = dict(leaves(was)), dict(leaves(now))
    for key in sorted(before.keys() | after.keys()):
        if before.get(key) != after.get(key):
            yield key, before.get(key), after.get(key)


def leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted key and value of everything that is no table.

    Members of a list of tables go by their `name` or `id`, else by their place.
    """
    members: list[tuple[str, Any]]
    if isinstance(value, Mapping):
        members = [(str(key), member) for key, member in value.items()]
    elif isinstance(value, list) and value and all(isinstance(it, Mapping) for it in value):
        names = [_name(member, place) for place, member in enumerate(value)]
        is_unique = len(set(names)) == len(names)
        places = [name if is_unique else f"{name}#{n}" for n, name in enumerate(names)]
        members = list(zip(places, value, strict=True))
    else:
        yield prefix, value
        return
    for name, member in members:
        yield from leaves(member, f"{prefix}.{name}" if prefix else name)


def _name(member: Mapping[str, Any], place: int) -> str:
    return str(member.get("name") or member.get("id") or place).replace(".", "_")
