"""A problem of a config: at which key, what is wrong, and what to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError

from gradus.config.keys import (
    KeyPath,
    all_key_paths,
    annotation_at,
    dotted,
    entries_of,
    models,
)
from gradus.config.schema.base import OWN_PLUGIN, SECRET_KEY, description_of, tag_of
from gradus.errors import is_slip, nearest

_MAX_VALUE_LENGTH = 60


@dataclass(frozen=True)
class Problem:
    """One thing that cannot work: at which key, and why."""

    path: KeyPath
    """The key; empty when the problem belongs to no key."""
    message: str
    """What is wrong, with the value, and what to do."""

    def __str__(self) -> str:
        return f"{dotted(self.path)}: {self.message}" if self.path else self.message


def shown(value: Any) -> str:
    """A value in an error message: short, on one line."""
    text = repr(value)
    return text if len(text) <= _MAX_VALUE_LENGTH else f"{text[:_MAX_VALUE_LENGTH]}..."


def validation_problems(error: ValidationError, model: Any, values: Any) -> list[Problem]:
    """Every error that pydantic found in `values`, one for each key."""
    reasons: dict[KeyPath, dict[str, None]] = {}
    shown_of: dict[KeyPath, str] = {}
    for entry in error.errors(include_url=False):
        kind, value = entry["type"], entry.get("input")
        path, tag = _place(entry["loc"], values, is_missing=kind == "missing")
        reason = entry["msg"]
        if kind == "extra_forbidden":
            reason = unknown_key(model, path, tag)
        elif kind == "missing":
            reason = _missing(model, path)
        elif kind.startswith("union_tag") and isinstance(value, dict):
            path, value = (*path, "type"), value.get("type")
            variants = entry.get("ctx", {}).get("expected_tags") or ", ".join(
                map(repr, _variants(annotation_at(model, path[:-1])))
            )
            reason = f"must be one of {variants}{_meant(value, variants)}"
        elif kind == "literal_error":
            reason += _meant(value, entry["ctx"]["expected"])
        reasons.setdefault(path, {})[reason] = None
        is_secret = SECRET_KEY in path or isinstance(value, dict | list)
        if not is_secret and kind not in ("extra_forbidden", "missing"):
            shown_of[path] = f"{shown(value)}: "
    return [
        Problem(path, shown_of.get(path, "") + ", or ".join(found))
        for path, found in reasons.items()
    ]


def _place(
    loc: tuple[int | str, ...], values: Any, *, is_missing: bool
) -> tuple[KeyPath, str | None]:
    """The key that pydantic's location means, and the tag of the variant that holds it.

    The location has tags and types of unions between its keys.
    """
    path: KeyPath = ()
    tag: str | None = None
    for place, part in enumerate(loc):
        is_last = place == len(loc) - 1
        if part in entries_of(values) or (is_last and is_missing):
            path, values = (*path, part), entries_of(values).get(part)
            tag = tag if is_last else None
        else:
            tag = str(part)
    return path, tag


def _variants(annotation: Any) -> dict[str | None, type[BaseModel]]:
    """`type` → the model that it selects, for the alternatives of an annotation."""
    return {tag_of(variant): variant for variant in models(annotation)}


def _meant(value: Any, expected: str) -> str:
    words = [word.strip("' ") for word in expected.replace(" or ", ",").split(",")]
    near = nearest(str(value), words)
    return f"; did you mean {near!r}?" if near else ""


def unknown_key(model: Any, path: KeyPath, tag: str | None = None) -> str:
    """Says that nothing reads the key at `path`, and which valid key is nearest.

    `tag` is the `type` of the table that holds it, where there are several.
    """
    name, table = str(path[-1]), path[:-1]
    variants = _variants(annotation_at(model, table))
    holders = [variants[tag]] if tag in variants else list(variants.values())
    siblings = list(dict.fromkeys(key for holder in holders for key in holder.model_fields))
    near = nearest(name, siblings)
    meant = f"unknown key; did you mean {dotted((*table, near))}?" if near else ""
    if near and is_slip(name, near):
        return meant
    if len(holders) == 1 and tag_of(holders[0]) == OWN_PLUGIN and "options" in siblings:
        return f"unknown key; write {dotted((*table, 'options', name))} for your own class"
    others = [repr(tag) for tag, other in variants.items() if name in other.model_fields]
    if others and tag is not None:
        return f"unknown key; it is an option of {' or '.join(others)}, not of {tag!r}"
    is_root = isinstance(model, type) and issubclass(model, BaseModel)
    elsewhere = [other for other in (all_key_paths(model) if is_root else ()) if other[-1] == name]
    if elsewhere:
        below = (other for other in elsewhere if other[: len(table)] == table)
        return f"unknown key here; did you mean {dotted(next(below, elsewhere[0]))}?"
    return meant or f"unknown key; remove it, or use one of: {', '.join(siblings)}"


def _missing(model: Any, path: KeyPath) -> str:
    owners = models(annotation_at(model, path[:-1])) if path else ()
    meaning = next((text for owner in owners if (text := description_of(owner, str(path[-1])))), "")
    return f"missing, and has no default. {' '.join(meaning.split())}".strip()
