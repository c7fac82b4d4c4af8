"""A wrong key, or a value of the wrong shape, in every table of every schema that a user writes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
from pydantic import BaseModel

from gradus.config import (
    EvalConfig,
    RunConfig,
    ServeConfig,
    SftConfig,
    TrackConfig,
    dotted,
    load_config,
)
from gradus.config.keys import KeyPath, item_annotation, members, models, type_text
from gradus.config.schema.base import OWN_PLUGIN, tag_of
from gradus.config.schema.learning import LossConfig, loss_config
from gradus.errors import ConfigError

LOSSES = [loss_config(name) for name in [*LossConfig.registered(), "package.module:Loss"]]
ROOTS: list[type[BaseModel]] = [
    RunConfig, SftConfig, EvalConfig, ServeConfig, TrackConfig, *LOSSES
]  # fmt: skip
HINTS = ("did you mean ", "use one of: ", "write ", "it is an option of ")
OWN = "package.module:Class"


@dataclass(frozen=True)
class Table:
    """One table of a schema: where it may stand, and which of its variants stands there."""

    root: type[BaseModel]
    path: KeyPath
    model: type[BaseModel]

    @property
    def title(self) -> str:
        return f"{self.root.__name__}:{dotted(self.path)}:{self.model.__name__}"

    def with_key(self, key: str, value: Any) -> dict[str, Any]:
        """A file in which this table holds one key, everything else valid."""
        inner: dict[str, Any] = {**required(self.model), **typed(self.model), key: value}
        return placed(self.root, self.path, inner)


def typed(model: type[BaseModel]) -> dict[str, Any]:
    tag = tag_of(model)
    return {} if tag is None else {"type": OWN if tag == OWN_PLUGIN else tag}


def required(model: type[BaseModel]) -> dict[str, Any]:
    """Valid values of the keys that have no default."""
    fields = model.model_fields.items()
    return {name: sample(field.annotation) for name, field in fields if field.is_required()}


def sample(annotation: Any) -> Any:
    if found := models(annotation):
        return {**required(found[0]), **typed(found[0])}
    kind = members(annotation)[0]
    if get_origin(kind) is list:
        return [sample(get_args(kind)[0])]
    return {str: "http://a:1", int: 1, float: 1.0}[kind]


def placed(model: type[BaseModel], path: KeyPath, inner: Any) -> dict[str, Any]:
    """The values of `model` with `inner` at `path`."""
    values = {**required(model), **typed(model)}
    if not path:
        return {**values, **inner}
    holder: Any = model.model_fields[str(path[0])].annotation
    rest, wrap = path[1:], [path[0]]
    while rest and not models(holder):
        holder, wrap, rest = item_annotation(holder), [*wrap, rest[0]], rest[1:]
    below = inner if not rest else placed(models(holder)[0], rest, inner)
    for part in reversed(wrap[1:]):
        below = [below] if isinstance(part, int) else {part: below}
    return {**values, str(wrap[0]): below}


def tables(root: type[BaseModel], model: type[BaseModel], path: KeyPath = ()) -> Iterator[Table]:
    yield Table(root, path, model)
    for name, field in model.model_fields.items():
        at: KeyPath = (*path, name)
        here = field.annotation
        while not models(here) and (inner := item_annotation(here)) is not item_annotation(int):
            is_list = any(get_origin(member) is list for member in members(here))
            at, here = (*at, 0 if is_list else "someone"), inner
        for variant in models(here):
            yield from tables(root, variant, at)


EVERY_TABLE = [table for root in ROOTS for table in tables(root, root)]


def toml(values: Any) -> str:
    if isinstance(values, dict):
        return "{" + ", ".join(f"{key} = {toml(value)}" for key, value in values.items()) + "}"
    if isinstance(values, list):
        return "[" + ", ".join(map(toml, values)) + "]"
    return repr(values).lower() if isinstance(values, bool) else repr(values)


def message(table: Table, key: str, value: Any, folder: Path) -> str:
    """What the user reads of a file with that key; each key at the top has a line."""
    values = table.with_key(key, value)
    lines = [f"{name} = {toml(value)}" for name, value in values.items()]
    file = folder / "wrong.toml"
    file.write_text("\n".join(lines))
    with pytest.raises(ConfigError) as refused:
        load_config(table.root, ["@", str(file)])
    found = str(refused.value)
    line = 1 + list(values).index(str([*table.path, key][0]))
    assert found.startswith(f"{file}:{line}: {dotted((*table.path, key))}: "), found
    return found


def test_every_kind_of_table_is_tried() -> None:
    optional = {"trainer.lora", "orchestrator.eval", "orchestrator.train.env.0.algo.reference"}
    nested = {
        "orchestrator.filters.0",
        "orchestrator.train.env.0.agents.someone.timeout",
        "monitor",
    }
    assert optional | nested <= {dotted(table.path) for table in EVERY_TABLE}
    assert len(EVERY_TABLE) > 150


@pytest.mark.shows("F74")
@pytest.mark.parametrize("table", EVERY_TABLE, ids=lambda table: table.title)
def test_an_unknown_key_is_told_with_its_place_and_what_to_do(table: Table, tmp_path: Path) -> None:
    assert any(hint in message(table, "zzq", 1, tmp_path) for hint in HINTS)
    for known in table.model.model_fields:
        found = message(table, f"{known}_x", 1, tmp_path)
        assert any(hint in found for hint in HINTS), found


@pytest.mark.parametrize("table", EVERY_TABLE, ids=lambda table: table.title)
def test_a_value_of_the_wrong_shape_is_told_at_its_key(table: Table, tmp_path: Path) -> None:
    for known, field in table.model.model_fields.items():
        if known == "type" or type_text(field.annotation) == "any":
            continue
        kinds = {get_origin(it) or it for it in members(field.annotation)}
        takes_table = bool(models(field.annotation)) or dict in kinds
        for wrong in ([{"a": 1}], 3) if takes_table else ({"a": 1},):
            if takes_table or not models(item_annotation(field.annotation)):
                assert len(message(table, known, wrong, tmp_path).splitlines()) == 1
