"""The bases of every config model: strict tables, and tables whose `type` names a plug-in."""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import itertools
import math
import sys
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias, get_type_hints

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, model_validator
from pydantic_core import PydanticCustomError

OWN_PLUGIN = "package.module:Class"
"""The form of a `type` that names a class of the user's own."""
OWN_PATTERN = r"^[^:]+:[^:]+$"

SECRET_KEY = "env_vars"
"""A key of this name sets variables of a process, maybe secret ones; it is never written down."""

MAX_SEED = 2**32 - 1
Seed: TypeAlias = Annotated[int, Field(ge=0, le=MAX_SEED)]
Precision: TypeAlias = Literal["auto", "bfloat16", "float32"]
"""A dtype; `auto` goes by what the machine multiplies fast, and the launch puts a dtype there."""


def number_or(word: str, *, above: float = 0, most: float = math.inf) -> BeforeValidator:
    """Refuses with one message what pydantic refuses with one for each type of the union."""
    limit = f"above {above:g}" + (f" and at most {most:g}" if most < math.inf else "")

    def check(value: Any) -> Any:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if value == word or (is_number and above < value <= most and value < math.inf):
            return value
        raise PydanticCustomError("number_or", f'must be a number {limit}, or "{word}"')

    return BeforeValidator(check)


class StrictConfig(BaseModel):
    """Base model: no unknown keys, no other type, no change after validation.

    The docstring under a field is its help, see `description_of`. A number in quotes is not a
    number; text from the command line becomes a number in `read/words.py`, where the wanted type is
    known.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        # Of a hundred models a process validates one, whose schema has those of its tables.
        defer_build=True,
    )

    @model_validator(mode="before")
    @classmethod
    def _read_none(cls, values: Any) -> Any:
        """TOML has no empty value, so "None" in quotes is it."""
        if not isinstance(values, dict):
            return values
        return {key: None if value == "None" else value for key, value in values.items()}

    @model_validator(mode="after")
    def _keep_kind(self) -> Self:
        """A table that was made as an object is of its kind, also where only set keys are kept."""
        if "type" in type(self).model_fields:
            self.__pydantic_fields_set__.add("type")
        return self

    def without_secrets(self, *, only_written: bool = False) -> dict[str, Any]:
        """The config as JSON values, without the environment variables of any process.

        With `only_written` without defaults: what a key means may depend on whether it was written.
        What is `{}` there had variables.

        >>> config.without_secrets()["trainer"]["env_vars"]
        {}
        """
        dumped = self.model_dump(mode="json", exclude_unset=only_written)
        values: dict[str, Any] = _without_secrets(self, dumped, only_written)
        return values


def _without_secrets(value: Any, dumped: Any, only_used: bool) -> Any:
    """`dumped` without what `value` keeps for processes, and with `only_used` without a word of it
    where that is nothing; tables of the user's own stay whole."""
    if isinstance(value, StrictConfig):
        return {
            name: {} if name == SECRET_KEY else _without_secrets(own, member, only_used)
            for name, member in dumped.items()
            if (own := getattr(value, name)) or name != SECRET_KEY or not only_used
        }
    if isinstance(value, Mapping):
        pairs = zip(value.values(), dumped.items(), strict=True)
        return {name: _without_secrets(member, entry, only_used) for member, (name, entry) in pairs}
    if isinstance(value, list | tuple):
        return [_without_secrets(*pair, only_used) for pair in zip(value, dumped, strict=True)]
    return dumped


def description_of(model: type[BaseModel], name: str) -> str:
    """The docstring below a field, or below the same one of a base; read from the source when it is
    asked for, "" without one."""
    stated = (_docstrings(base.__module__).get(base.__qualname__, {}) for base in model.__mro__)
    return next((texts[name] for texts in stated if texts.get(name)), "")


@functools.cache
def _docstrings(module: str) -> dict[str, dict[str, str]]:
    """Of each class of a module, by field."""
    try:
        body = ast.parse(inspect.getsource(sys.modules[module])).body
    except (KeyError, OSError, TypeError, SyntaxError):
        return {}
    return {
        stated.name: {
            field.target.id: _text_of(below)
            for field, below in itertools.pairwise([*stated.body, None])
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        }
        for stated in body
        if isinstance(stated, ast.ClassDef)
    }


def _text_of(statement: ast.stmt | None) -> str:
    value = statement.value if isinstance(statement, ast.Expr) else None
    text = value.value if isinstance(value, ast.Constant) else None
    return inspect.cleandoc(text) if isinstance(text, str) else ""


class PluginConfig(StrictConfig):
    """A plug-in with its options.

    A kind of plug-in is a direct subclass, with the keys and the facts that all of the kind share;
    a registered plug-in is a subclass of that, and its further fields are its options.
    """

    type: str
    """Name of the plug-in, or "package.module:Class"."""
    implementation: ClassVar[str] = ""
    """The class that a registered plug-in is built from, as "package.module:Class"."""

    @classmethod
    def registered(cls) -> dict[str, builtins.type[Self]]:
        """Name → config of every registered plug-in of this kind."""
        found = {} if not cls.implementation else {str(tag_of(cls)): cls}
        for below in cls.__subclasses__():
            found |= below.registered()
        return found

    @property
    def target(self) -> str:
        """The class to build, as "package.module:Class"."""
        return self.implementation or self.type

    def arguments(self) -> dict[str, Any]:
        own: dict[str, Any] | None = getattr(self, "options", None)
        if own is not None:
            return dict(own)
        (kind,) = (base for base in type(self).__mro__ if PluginConfig in base.__bases__)
        assert issubclass(kind, PluginConfig)
        names = type(self).model_fields.keys() - kind.model_fields.keys()
        return {name: getattr(self, name) for name in sorted(names)}

    def arguments_for(self, plugin: builtins.type) -> dict[str, Any]:
        """Keyword arguments that a class is built with.

        One whose constructor takes a `config` gets the options of that config in it, and only the
        others by name: a class of the user's own may inherit from a registered one. ValueError for
        an option that the config refuses.
        """
        wanted = _config_of(plugin)
        options = self.arguments()
        if wanted is None:
            return options
        if isinstance(self, wanted):
            return {"config": self}
        known = {name: options.pop(name) for name in wanted.model_fields.keys() & options.keys()}
        if wanted.model_fields["type"].is_required():
            known["type"] = self.type
        config = wanted(**known)
        for key, reason in config.contradictions():
            raise ValueError(f"{key}: {reason}")
        return {"config": config, **options}

    def contradictions(self) -> Iterator[tuple[str, str]]:
        """Options that cannot go together: the key to change, and why."""
        return iter(())


class OwnPlugin(StrictConfig):
    """What a plug-in of the user's own has besides the keys of its kind."""

    type: str = Field(pattern=OWN_PATTERN)
    """Your class."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of your class."""


def _config_of(plugin: type) -> type[PluginConfig] | None:
    """The config that the constructor of a class takes as `config`."""
    try:
        wanted = get_type_hints(plugin.__init__).get("config")  # type: ignore[misc]
    except (NameError, TypeError):  # No annotations, or of names that exist for a type checker.
        return None
    is_config = isinstance(wanted, type) and issubclass(wanted, PluginConfig)
    return wanted if is_config else None


def by_type(default: str | None) -> Discriminator:
    """Chooses a member of a union by its `type`; where none is given, by `default`.

    Its tags are the registered names, and OWN_PLUGIN for a class of the user's own.
    """

    def tag(value: Any) -> str | None:
        is_table = isinstance(value, dict)
        chosen = value.get("type", default) if is_table else getattr(value, "type", default)
        if chosen is None:
            return None
        return variant_tag(chosen)

    return Discriminator(tag)


def variant_tag(chosen: Any) -> str:
    """What `tag_of` says of the variant that a written `type` selects."""
    return OWN_PLUGIN if ":" in str(chosen) else str(chosen)


def tag_of(variant: type[BaseModel]) -> str | None:
    """The `type` that selects a member of a union; None for a model without one."""
    field = variant.model_fields.get("type")
    if field is None:
        return None
    return OWN_PLUGIN if field.is_required() else str(field.default)
