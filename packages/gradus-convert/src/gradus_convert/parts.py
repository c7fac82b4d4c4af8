"""Parts of a file of prime-rl that stand in several of its tables."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from pydantic import BaseModel

from gradus.config.keys import UNKNOWN, KeyPath, annotation_at, dotted
from gradus.config.owned import OWNED_ENGINE_ARGS
from gradus.config.reference import sections
from gradus.config.schema.algorithms import AlgorithmConfig, ReferenceConfig
from gradus.config.schema.base import PluginConfig
from gradus.config.schema.environment import CurriculumConfig, RoleConfig
from gradus.config.schema.run import RunConfig
from gradus_convert import foreign
from gradus_convert.draft import Draft, Moves, Table, shown_json

COMMON = {"type", "name", "path", "id", "host", "port", "url", "timeout", "enabled", "filter"}
"""Names of keys that mean another thing in each table."""
_ALGORITHMS = {"default": "grpo", "rl": "grpo", "ema_per_member": "rae", "sft_distill": "sft"}


def finish(draft: Draft | None, moves: Moves, why: str = "") -> None:
    """Apply the moves, then take out and list every key that the schema does not have."""
    if draft is None:
        return
    draft.move(moves)
    for path, value in list(_leaves(draft.values)):
        if annotation_at(draft.schema, path) is UNKNOWN:
            shown = f" = {shown_json(value)}" if value != {} else ""
            draft.note(f"{dotted(path)}{shown}", why or _word(path, draft.schema))
            draft.take(path)


def _leaves(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    if path and (not isinstance(value, dict) or not value):
        yield path, value
    elif isinstance(value, dict):
        for key, child in value.items():
            yield from _leaves(child, (*path, key))


def _word(path: KeyPath, schema: Any) -> str:
    """What to know about a key that gradus does not have."""
    names = [str(part) for part in path]
    known = [
        ".".join(names[end - length : end])
        for length in range(len(names), 0, -1)
        for end in range(len(names), length - 1, -1)
    ]
    owner = OWNED_ENGINE_ARGS.get(names[-1]) if "vllm" in names[0:-1] else None
    found = (foreign.WORDS[key] for key in known if key in foreign.WORDS)
    return owner or next(found, None) or _namesake(names[-1], schema)


def _namesake(name: str, schema: Any) -> str:
    """Where gradus has a setting of this name, which is not at the place that a line leads to."""
    root = schema if isinstance(schema, type) and issubclass(schema, BaseModel) else RunConfig
    found = [] if name in COMMON else [key for key in _keys(root) if key.endswith(f".{name}")]
    shown = [key.lstrip(".") for key in found[:2]]
    return f"see {' or '.join(shown)}" if found else "gradus has no such setting"


@cache
def _keys(root: type[BaseModel]) -> list[str]:
    """Every key below a model, with `N` for a place in a list."""
    return [f"{section.path}.{key.name}" for section in sections(root) for key in section.keys]


def _entries(value: Any) -> list[Table]:
    """A list of tables, of which one may stand alone or be a name."""
    values = value if isinstance(value, list) else [] if value is None else [value]
    return [dict(entry) if isinstance(entry, dict) else {"id": entry} for entry in values]


def drafts(draft: Draft, path: str, schema: Any) -> Iterator[Draft]:
    """A draft of each entry of a list, which leaves its place."""
    for number, entry in enumerate(_entries(draft.take(path))):
        yield Draft(entry, schema, f"{draft.at}{path}.{number}.", draft.notes)


def frozen(draft: Draft, path: str, schema: type[BaseModel], moves: Moves) -> Table | None:
    """A model that another server holds; None where there is no table of one."""
    one = draft.inside(path, schema)
    finish(one, moves)
    return None if one is None else draft.take(path) or one.values


def algorithm_of(draft: Draft, path: str) -> tuple[Table, Table | None]:
    """An algorithm with its options, and the frozen model that plays for it."""
    value = draft.take(path)
    first, *others = value if isinstance(value, list) and value else [value]
    for spare in others:
        draft.note(path, f"one algorithm here; not {spare!r}")
    table = dict(first) if isinstance(first, dict) else {"type": first}
    one = Draft(table, None, f"{draft.at}{path}.", draft.notes)
    kind = str(table.pop("type", None) or table.pop("id", "grpo"))
    table["type"] = kind = _ALGORITHMS.get(kind, kind)
    player = frozen(one, "sampling.source", RoleConfig, foreign.FROZEN)
    reference = frozen(one, "teacher", ReferenceConfig, foreign.TEACHER)
    if kind == "opsd" and "demo_key" not in table:
        table["demo_key"] = "demonstration"
    new = plugin(one, AlgorithmConfig, "grpo", foreign.ALGORITHM)
    return {**new, **({"reference": reference} if reference else {})}, player


def plugin(draft: Draft, kind: type[PluginConfig], default: str, moves: Moves) -> Table:
    """A plug-in with the options that it has here; one of the user's own keeps its options."""
    table = draft.values
    name = str(table.pop("type", default))
    name = default if name == "default" else name
    draft.schema = kind.registered().get(name)
    if draft.schema is None:
        given = table.pop("options", {})
        options = {**(given if isinstance(given, dict) else {}), **table}
        table.clear()
        table |= {"options": options} if options else {}
    else:
        finish(draft, moves)
    kept = dict(table)
    table.clear()
    table |= {"type": name, **kept}
    return table


def curriculum_of(draft: Draft, path: str) -> Table:
    """The order of tasks; of a buffer what is known of it."""
    table = draft.get(path)
    if isinstance(table, str):
        return {"type": draft.take(path)}
    keys = order_of_tasks(draft, path)
    if not keys:
        return {}
    one = Draft({}, None, f"{draft.at}{path}.", draft.notes)
    one.values = {key.rpartition(".")[2]: draft.take(key) for key in keys}
    if one.values.get("type") == "simple":
        one.values["type"] = "uniform"
    return plugin(one, CurriculumConfig, "difficulty", foreign.CURRICULUM)


def order_of_tasks(draft: Draft, path: str) -> list[str]:
    """The keys of a table that say in which order tasks come."""
    known = ("type", *foreign.CURRICULUM)
    return [f"{path}.{name}" for name in draft.keys(path) if name in known]
