"""What the classes that Kubeflow generates from JobSet's definition say of an object.

They know every field with its type, and let unknown keys pass: these are found here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, get_args, get_origin

from pydantic import BaseModel, TypeAdapter, ValidationError

_ONE_OF = re.compile(r"Valid values are ([\w, ]+)\.")
"""How the description of a field names all of its values."""


def complaints(kind: Any, value: Any, at: str) -> Iterator[str]:
    """What is wrong with a value of an annotated type, by its place."""
    if isinstance(value, dict) and (model := _model(kind)) is not None:
        fields = {field.alias or name: field for name, field in model.model_fields.items()}
        yield from (f"{at}.{key} is no field" for key in value.keys() - fields.keys())
        missing = [key for key, field in fields.items() if field.is_required() and key not in value]
        yield from (f"{at}.{key} is missing" for key in missing)
        for key in value.keys() & fields.keys():
            place, field = f"{at}.{key}", fields[key]
            yield from complaints(field.annotation, value[key], place)
            known = _ONE_OF.search(field.description or "")
            if known is not None and value[key] not in known[1].split(", "):
                yield f"{place} is {value[key]!r}, which is none of {known[1]}"
    elif isinstance(value, list) and (inner := _inside(kind, list)) is not None:
        for number, entry in enumerate(value):
            yield from complaints(inner, entry, f"{at}.{number}")
    elif isinstance(value, dict) and (inner := _inside(kind, dict)) is not None:
        for key, entry in value.items():
            yield from complaints(inner, entry, f"{at}.{key}")
    elif (model := _model(kind)) is not None and "actual_instance" in model.model_fields:
        if not isinstance(value, str | int | float):  # a quantity, or a number or a name
            yield f"{at} is {value!r}"
    else:
        try:
            TypeAdapter(kind).validate_python(value)
        except ValidationError as error:
            yield f"{at} is {value!r}: {error.errors()[0]['msg']}"


def _model(kind: Any) -> type[BaseModel] | None:
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return kind
    if get_origin(kind) in (list, dict):
        return None
    return next((it for part in get_args(kind) if (it := _model(part)) is not None), None)


def _inside(kind: Any, container: type) -> Any:
    """The type of the entries, where a kind is such a container."""
    if get_origin(kind) is container:
        return get_args(kind)[-1]
    if get_origin(kind) in (list, dict):
        return None
    return next((it for part in get_args(kind) if (it := _inside(part, container))), None)
