"""The settings that launches of a run recorded, as JSON values: how two differ, and whether one run
may go by both."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gradus.errors import ConfigError

_ONE_LINEAGE = re.compile(
    r"trainer(\..+)?|model(\..+)?|seed"
    r"|orchestrator\.(groups_per_batch|max_staleness|filters|normalize)(\..+)?"
    r"|orchestrator\.train\.(sampling|algo)(\..+)?"
    r"|orchestrator\.train\.env\.[^.]+(\.(id|name|taskset|tasks|agents|algo|sampling|group_size)(\..+)?)?"
)
"""Keys that must be the same in all launches of a run that is replayed in one."""

_WAIT = re.compile(r"\.algo\.scoring_timeout_seconds$|^trainer\.gpus(\..+)?$")
"""Waits and places, which leave what was played and trained as it is."""


ALARM_THRESHOLDS: Mapping[str, float] = {
    "reward_part": 0.9,
    "length_drift": 4.0,
    "entropy_collapse": 0.1,
    "judge_flips": 0.3,
    "unreadable": 0.5,
    "mismatch_kl": 0.1,
    "flat_groups": 0.95,
    "failing_episodes": 0.5,
    "truncated": 0.5,
    "reward_drop": 0.5,
    "gradient_jump": 100.0,
    "dropped_episodes": 0.95,
    "large_ratios": 10.0,
    "slow_tasks": 0.25,
    "echo_tokens": 1.0,
}
"""Every built-in alarm; docs/monitoring.md says what each number measures."""
OPEN_ENDED_STEPS = 1_000_000
"""`max_steps` of a run that goes on until it is stopped."""


def planned_steps(max_steps: object) -> int | None:
    """The steps that a run has; None where it goes on until it is stopped.

    >>> planned_steps(20), planned_steps(OPEN_ENDED_STEPS)
    (20, None)
    """
    return max_steps if isinstance(max_steps, int) and max_steps < OPEN_ENDED_STEPS else None


def check_one_config(launches: Sequence[Mapping[str, Any]]) -> None:
    """ConfigError when launches of one run trained or graded with different settings, all of them
    by name."""
    last = launches[-1]
    changed = [
        f"{key} was {was!r} and became {now!r}"
        for launch in launches[:-1]
        for key, was, now in differences(launch, last)
        if (_ONE_LINEAGE.fullmatch(key) and not _WAIT.search(key))
        or (key == "max_steps" and last["trainer"]["optimizer"].get("schedule") != "constant")
    ]
    if changed:
        raise ConfigError(
            "the run was resumed with other settings, and a replay trains all steps with one:\n"
            + "\n".join(dict.fromkeys(changed))
        )


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
    """Dotted key and value of everything that is not a table.

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
