"""Text from the command line becomes the type that its key needs."""

from __future__ import annotations

import json
import math
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel

from gradus.config.keys import UNKNOWN, KeyPath, annotation_at, members, models
from gradus.config.problems import Problem
from gradus.config.read.arguments import BareFlag, Text
from gradus.config.read.toml import refuse_constant, unique_keys


def typed_values(value: Any, model: type[BaseModel], path: KeyPath, problems: list[Problem]) -> Any:
    """`value` with every text from the command line replaced; what cannot be read is a problem."""
    if isinstance(value, dict):
        return {
            key: typed_values(child, model, (*path, key), problems) for key, child in value.items()
        }
    if isinstance(value, list):
        return [
            typed_values(child, model, (*path, index), problems)
            for index, child in enumerate(value)
        ]
    if not isinstance(value, Text | BareFlag):
        return value
    annotation = annotation_at(model, path)
    if annotation is UNKNOWN:
        return str(value)
    try:
        if isinstance(value, BareFlag):
            return flag_value(value, annotation)
        return text_value(value, annotation)
    except ValueError as error:
        problems.append(Problem(path, str(error)))
        return None


def flag_value(flag: BareFlag, annotation: Any) -> Any:
    kinds = members(annotation)
    if bool in kinds or Any in kinds or object in kinds:
        return flag.is_on
    if models(annotation) and (flag.is_on or NoneType in kinds):
        return {} if flag.is_on else None
    raise ValueError("needs a value after it" if flag.is_on else "cannot be switched off")


def text_value(text: str, annotation: Any) -> Any:
    """The value of a typed text where `annotation` is wanted.

    Text that fits nothing stays text, and the model says what it wanted instead.

        >>> text_value("1e-5", float)
        1e-05
    """
    if text == "None":
        return None
    kinds = plain_kinds(annotation)
    if text[:1] in ("{", "[") and kinds & {dict, list, tuple, object}:
        return from_json(text)
    if object in kinds:
        return _guess(text)
    if bool in kinds and text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in kinds & {int, float}:
        try:
            return kind(text)
        except ValueError:
            continue
    return str(text)


def plain_kinds(annotation: Any) -> set[type]:
    """The plain types that a value may have; `object` means any, `dict` a section."""
    kinds: set[type] = {dict} if models(annotation) else set()
    for member in members(annotation):
        if get_origin(member) is Literal:
            kinds.update(type(value) for value in get_args(member))
        elif member is Any or member is object:
            kinds.add(object)
        else:
            kinds.add(get_origin(member) or member)
    return kinds


def from_json(text: str) -> Any:
    try:
        return json.loads(
            text,
            object_pairs_hook=unique_keys,
            parse_constant=refuse_constant,
            parse_float=_finite,
        )
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{text!r} is not JSON: {error}") from None


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else refuse_constant(text)


def _guess(text: str) -> Any:
    """The value of a passed-through setting: what JSON reads as a number or bool, else text."""
    try:
        value = json.loads(text)
    except ValueError:
        return str(text)
    if isinstance(value, float) and not math.isfinite(value):
        return str(text)
    return value
