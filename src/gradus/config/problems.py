"""A problem of a config: at which key, what is wrong, and what to do."""

from __future__ import annotations

from dataclasses import dataclass
from types import NoneType
from typing import Any, get_origin

from pydantic import BaseModel, ValidationError

from gradus.config.keys import (
    UNKNOWN,
    KeyPath,
    all_key_paths,
    annotation_at,
    dotted,
    item_annotation,
    keys_at,
    members,
    models,
)
from gradus.config.read.foreign import field_hint
from gradus.config.schema.algorithms import URL_PATTERN
from gradus.config.schema.base import OWN_PATTERN, OWN_PLUGIN, description_of, tag_of
from gradus.config.schema.environment import ADDRESS_PATTERN, NAME_PATTERN
from gradus.config.schema.run import CLUSTER_FORMS
from gradus.errors import is_slip, nearest

_MAX_VALUE_LENGTH = 60


@dataclass(frozen=True)
class Problem:
    """One thing that cannot work: at which key, and why."""

    path: KeyPath
    """The key; empty when the problem belongs to no key."""
    message: str
    """What is wrong, with the value, and what to do."""
    is_missing_here: bool = False
    """Whether this machine alone lacks something; the config is right for one that has it."""

    def __str__(self) -> str:
        return f"{dotted(self.path)}: {self.message}" if self.path else self.message


def shown(value: Any) -> str:
    """A value in an error message: short, on one line."""
    text = repr(value)
    return text if len(text) <= _MAX_VALUE_LENGTH else f"{text[:_MAX_VALUE_LENGTH]}..."


def validation_problems(error: ValidationError, model: type[BaseModel]) -> list[Problem]:
    """Every error that pydantic found, in our words and with our key paths.

    A value that fits no member of a union of plain types has an error for each member.
    """
    reasons: dict[KeyPath, str] = {}
    for entry in error.errors(include_url=False):
        problem = _problem(dict(entry), model)
        before, reason = reasons.get(problem.path), problem.message
        if before is not None:
            reason = f"{before}, or {reason.removeprefix(shown(entry.get('input'))).lstrip()}"
        reasons[problem.path] = reason
    return [Problem(path, reason) for path, reason in reasons.items()]


def _problem(entry: dict[str, Any], model: type[BaseModel]) -> Problem:
    path, owner = _place(entry["loc"], model)
    kind, value = entry["type"], entry.get("input")
    if kind == "extra_forbidden":
        return Problem(path, unknown_key(model, path, owner, value))
    if kind == "missing":
        return Problem(path, _missing(owner, path))
    if kind == "union_tag_not_found" and not isinstance(value, dict):
        kind = "model_type"
    if kind.startswith("union_tag"):
        found = annotation_at(model, path)
        path = (*path, "type")
        if kind == "union_tag_not_found":
            return Problem(path, f"missing; use one of: {', '.join(map(str, _variants(found)))}")
        value = value.get("type") if isinstance(value, dict) else value
    reason = _reason(kind, value, entry.get("ctx") or {}) or entry["msg"]
    if kind == "list_type" and models(item_annotation(annotation_at(model, path))):
        reason = f"must be a list of tables: [[{dotted(path)}]]"
    if isinstance(value, dict | list) or "env_vars" in path or kind == "value_error":
        return Problem(path, reason)
    return Problem(path, f"{shown(value)} {reason}")


def _place(loc: tuple[str | int, ...], model: type[BaseModel]) -> tuple[KeyPath, Any]:
    """The key that pydantic's location means, and what holds it: the model, list or table.

    The location has the tags of discriminated unions, and names of types, between its keys.
    """
    path: KeyPath = ()
    holder: Any = model
    here: Any = model
    for part in loc:
        if part == "[key]":
            continue
        variants = _variants(here)
        if len(variants) > 1 and part in variants:
            here = variants[str(part)]
            continue
        if str(part).partition("[")[0] in _plain_members(here):
            continue
        # A table that may be left out is a union of its model and None.
        only = models(here)
        holder = only[0] if len(only) == 1 else here
        path, here = (*path, part), annotation_at(here, (part,))
    return path, holder


def _plain_members(annotation: Any) -> set[str]:
    """pydantic's names of the types among which a value may choose; none where there is one."""
    found = {get_origin(member) or member for member in members(annotation)} - {NoneType}
    return {str(kind.__name__).lower() for kind in found} if len(found) > 1 else set()


def _variants(annotation: Any) -> dict[str | None, type[BaseModel]]:
    """`type` → the model that it selects, for the alternatives of an annotation."""
    return {tag_of(variant): variant for variant in models(annotation)}


def unknown_key(model: Any, path: KeyPath, holder: Any = None, value: Any = None) -> str:
    """Says that nothing reads the key at `path`, and which valid key is nearest.

    `holder` is the model that holds the key, where its table may be one of several.
    """
    name, siblings = str(path[-1]), keys_at(holder, ()) or keys_at(model, path[:-1])
    if hint := _variant_hint(_variants(annotation_at(model, path[:-1])), path, holder, value):
        return f"unknown key; {hint}"
    near = nearest(name, siblings)
    if near is not None and is_slip(name, near):
        return f"unknown key; did you mean {dotted((*path[:-1], near))}?"
    if hint := field_hint(path, lambda key: is_key(model, key)):
        return f"unknown key; {hint}"
    is_variant = isinstance(holder, type) and "type" in siblings
    found = () if is_variant else all_key_paths(model)
    elsewhere = [other for other in found if other[-1] == name]
    elsewhere.sort(key=lambda other: not _is_below(other, path[:-1]))
    if near is not None and not elsewhere:
        return f"unknown key; did you mean {dotted((*path[:-1], near))}?"
    is_own = holder is not None and tag_of(holder) == OWN_PLUGIN
    if is_own and "options" in siblings:
        return f"unknown key; write {dotted((*path[:-1], 'options', name))} for your own class"
    if elsewhere:
        return f"unknown key here; did you mean {dotted(elsewhere[0])}?"
    if siblings:
        return f"unknown key; remove it, or use one of: {', '.join(siblings)}"
    return "unknown key; remove it"


def _is_below(key: KeyPath, table: KeyPath) -> bool:
    places = [isinstance(part, int) for part in table]
    return len(key) > len(table) and all(
        is_place or mine == its
        for is_place, mine, its in zip(places, key[: len(table)], table, strict=True)
    )


def _variant_hint(
    variants: dict[str | None, type[BaseModel]], path: KeyPath, holder: Any, value: Any
) -> str | None:
    """What an unknown key of one variant is in the others; None when it is nothing there."""
    name, chosen = str(path[-1]), None if holder is None else tag_of(holder)
    if chosen in (None, OWN_PLUGIN):
        return None
    if name == "options":
        written = list(value) if isinstance(value, dict) else []
        keys = " and ".join(dotted((*path[:-1], key)) for key in written)
        return f"options stand beside `type`: {f'write {keys}' if keys else 'remove it'}"
    others = [f"{tag!r}" for tag, other in variants.items() if name in other.model_fields]
    if not others:
        return None
    return f"it is an option of {' or '.join(others)}, not of {chosen!r}"


def is_key(model: Any, key: str) -> bool:
    """Whether a dotted key is one of this config; `N` and numbers are places in a list."""
    parts = [0 if part == "N" or part.isdigit() else part for part in key.split(".")]
    return annotation_at(model, tuple(parts)) is not UNKNOWN


def _missing(holder: Any, path: KeyPath) -> str:
    if isinstance(path[-1], int):
        return "missing; the list needs one more value"
    for owner in models(holder):
        meaning = description_of(owner, path[-1])
        if meaning:
            return f"missing, and has no default. It is: {' '.join(meaning.split())}"
    return "missing, and has no default"


def _reason(kind: str, value: Any, context: dict[str, Any]) -> str | None:
    """Why pydantic refused a value, in our words; None for an error that we have no words for."""
    if kind in _FIXED:
        return _FIXED[kind]
    if kind in _BOUNDS:
        words, name = _BOUNDS[kind]
        return f"{words} {context[name]}"
    if kind in ("literal_error", "union_tag_invalid"):
        expected = str(context.get("expected") or context.get("expected_tags"))
        known = [word.strip("' ") for word in expected.replace(" or ", ",").split(",")]
        near = nearest(str(value), known)
        return f"is not one of {expected}" + (f"; did you mean {near!r}?" if near else "")
    if kind == "string_pattern_mismatch":
        return _pattern(str(context["pattern"]))
    return None


def _pattern(pattern: str) -> str:
    if pattern == NAME_PATTERN:
        return (
            "is not a name; use at most 64 letters, digits, '.', '_' or '-', "
            "and begin with a letter or digit"
        )
    if pattern in CLUSTER_FORMS:
        return CLUSTER_FORMS[pattern]
    if pattern == OWN_PATTERN:
        return f'must name a class or function: "{OWN_PLUGIN}"'
    if pattern == URL_PATTERN:
        return "must begin with http:// or https://"
    if pattern == ADDRESS_PATTERN:
        return "must begin with tcp:// or ipc://"
    return f"must be {pattern.strip('^()$').replace('|', ' or ')}"


_WHOLE = "must be a whole number, without quotes"
_NUMBER = "must be a number, without quotes"
_BOOLEAN = "must be true or false, without quotes"
_TABLE = "must be a table: {key = value}"
_LIST = "must be a list: [a, b]"
_FIXED = {
    "int_type": _WHOLE,
    "int_parsing": _WHOLE,
    "int_from_float": _WHOLE,
    "float_type": _NUMBER,
    "float_parsing": _NUMBER,
    "finite_number": "must be a finite number",
    "bool_type": _BOOLEAN,
    "bool_parsing": _BOOLEAN,
    "string_type": "must be text in quotes",
    "list_type": _LIST,
    "tuple_type": _LIST,
    "dict_type": _TABLE,
    "model_type": _TABLE,
    "model_attributes_type": _TABLE,
}
"""pydantic's kind of error → what the value must be."""


def for_flags(reason: str) -> str:
    """A reason as a command line needs it, where lists and tables are JSON and nothing is quoted.

    >>> for_flags("'1' must be a number, without quotes")
    "'1' must be a number"
    """
    reason = reason.replace(_LIST, """must be a list, as JSON: '["a", "b"]'""")
    reason = reason.replace(_TABLE, """must be a table, as JSON: '{"key": "value"}'""")
    return reason.replace(", without quotes", "")


_BOUNDS = {
    "too_short": ("has too few entries; the least is", "min_length"),
    "too_long": ("has too many entries; the most is", "max_length"),
    "greater_than": ("is out of range; it must be greater than", "gt"),
    "greater_than_equal": ("is out of range; it must be at least", "ge"),
    "less_than": ("is out of range; it must be less than", "lt"),
    "less_than_equal": ("is out of range; it must be at most", "le"),
}
"""pydantic's kind of error → words, and the name of the bound that ends the sentence."""
