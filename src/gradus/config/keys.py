"""Which keys and types the config models accept at a key path."""

from __future__ import annotations

from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

KeyPath = tuple[str | int, ...]
"""Names of tables and keys; a number is a place in a list, counted from 0."""

UNKNOWN = object()
"""What `annotation_at` returns where no key is accepted."""


def dotted(path: KeyPath) -> str:
    return ".".join(str(part) for part in path)


def key_path(flag: str) -> KeyPath:
    """The key path that a flag names.

    >>> key_path("orchestrator.train.env.0.group-size")
    ('orchestrator', 'train', 'env', 0, 'group_size')
    """
    parts = flag.removeprefix("--").replace("-", "_").split(".")
    return tuple(int(part) if part.isdecimal() else part for part in parts)


def nested(path: KeyPath, value: Any) -> Any:
    """A table that holds `value` at `path` and nothing else."""
    for part in reversed(path):
        value = {part: value}
    return value


def entries_of(value: Any) -> dict[Any, Any]:
    """Keys and values of a table, or places and values of a list; nothing of anything else."""
    if isinstance(value, dict):
        return value
    return dict(enumerate(value)) if isinstance(value, list | tuple) else {}


def depth_of(path: KeyPath, value: Any) -> int:
    """How many parts of the path `value` holds."""
    for depth, part in enumerate(path):
        if part not in entries_of(value):
            return depth
        value = entries_of(value)[part]
    return len(path)


def value_at(path: KeyPath, value: Any) -> Any:
    """The value at a path; None where there is none."""
    for part in path:
        value = entries_of(value).get(part)
    return value


def members(annotation: Any) -> tuple[Any, ...]:
    """The alternatives of an annotation: unions are opened, `Annotated` is removed."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return members(get_args(annotation)[0])
    if origin in (Union, UnionType):
        return tuple(inner for part in get_args(annotation) for inner in members(part))
    return (annotation,)


def models(annotation: Any) -> tuple[type[BaseModel], ...]:
    """The config models among the alternatives of an annotation."""
    return tuple(
        member
        for member in members(annotation)
        if isinstance(member, type) and issubclass(member, BaseModel)
    )


def item_annotation(annotation: Any) -> Any:
    """What a list or a table with free keys holds; UNKNOWN for anything else."""
    for member in members(annotation):
        origin, arguments = get_origin(member), get_args(member)
        if origin is list:
            return arguments[0]
        if origin is dict:
            return arguments[1]
    return UNKNOWN


def annotation_at(annotation: Any, path: KeyPath) -> Any:
    """The annotation of the value at `path` below `annotation`; UNKNOWN where none is accepted.

    >>> annotation_at(RunConfig, ("trainer", "optimizer", "lr"))
    <class 'float'>
    """
    if not path:
        return annotation
    found = [child(member, path[0]) for member in members(annotation)]
    known = [child for child in found if child is not UNKNOWN]
    if not known:
        return UNKNOWN
    joined = known[0] if len(known) == 1 else Union[tuple(known)]  # noqa: UP007
    return annotation_at(joined, path[1:])


def child(member: Any, part: str | int) -> Any:
    if member is Any or member is object:
        return Any
    if isinstance(member, type) and issubclass(member, BaseModel):
        field = member.model_fields.get(str(part))
        return UNKNOWN if field is None else field.annotation
    origin = get_origin(member)
    if (origin is list and isinstance(part, int)) or (origin is dict and isinstance(part, str)):
        return item_annotation(member)
    return UNKNOWN


def keys_at(annotation: Any, path: KeyPath) -> list[str]:
    keys: dict[str, None] = {}
    for model in models(annotation_at(annotation, path)):
        keys.update(dict.fromkeys(model.model_fields))
    return list(keys)


def all_key_paths(annotation: Any, prefix: KeyPath = ()) -> Iterator[KeyPath]:
    """Every key path of a model that does not lead through a list or a free table."""
    for model in models(annotation):
        for name, field in model.model_fields.items():
            path = (*prefix, name)
            yield path
            yield from all_key_paths(field.annotation, path)


def type_text(annotation: Any) -> str:
    """The annotation in words for the reference: `int or None`, `"linear" or "cosine"`."""
    return " or ".join(dict.fromkeys(_member_text(member) for member in members(annotation)))


def _member_text(member: Any) -> str:
    origin, arguments = get_origin(member), get_args(member)
    if member is NoneType:
        return "None"
    if origin is Literal:
        return " or ".join(f'"{value}"' for value in arguments)
    if origin is list:
        return f"list of {type_text(arguments[0])}"
    if origin is dict:
        return f"table of {type_text(arguments[1])}"
    if origin is tuple:
        return f"{len(arguments)} x {type_text(arguments[0])}"
    if isinstance(member, type) and issubclass(member, BaseModel):
        return "table"
    return {Any: "any", object: "any"}.get(member, getattr(member, "__name__", str(member)))
