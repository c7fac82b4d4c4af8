"""A plug-in is a class named by a registered name or by "package.module:Class"."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, TypeVar, cast

from gradus.errors import ConfigError, CorruptStateError
from gradus.gate import PluginFailed, guarded

T = TypeVar("T")
REWARD_ARGUMENTS = ("prompt", "reply", "row", "messages", "trace")
"""What a function that rates replies to rows may ask for, by name."""


def find_plugin(kind: str, path: str) -> type:
    """The class that "package.module:Class" names; ConfigError when it is none.

    >>> find_plugin("loss", "gradus.trainer.losses:Dppo")
    """
    return cast("type", _find(kind, path, "Class", lambda it: isinstance(it, type)))


@contextlib.contextmanager
def building(plugin: str, options: Mapping[str, Any]) -> Iterator[None]:
    """ConfigError, with the name of the plug-in, when its class refuses its options or raises.

    >>> with building("filter 'mine'", {}):
    ...     pass
    """
    try:
        with guarded(lambda: plugin):
            yield
    except PluginFailed as failed:
        error = failed.cause
        what = f"{error}" if type(error) is TypeError else f"{type(error).__name__}: {error}"
        raise ConfigError(f"{plugin} does not accept options {dict(options)}: {what}") from error


def refuse_async(plugin: str, kind: type, *methods: str) -> None:
    """ConfigError for an `async def` that nothing awaits: it would never run."""
    for method in methods:
        if inspect.iscoroutinefunction(getattr(kind, method, None)):
            raise ConfigError(
                f"{plugin}: {method} is an `async def`, and nothing awaits it; write it as "
                f"`def {method}`"
            )


def find_function(kind: str, path: str) -> Callable[..., Any]:
    """The function that "package.module:function" names; refuses everything else."""
    return cast("Callable[..., Any]", _find(kind, path, "function", callable))


def unknown_argument(parameters: Iterable[inspect.Parameter], offered: Sequence[str]) -> str | None:
    """The first argument that a function needs and that nobody gives it by name."""
    given = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    for it in parameters:
        is_needed = it.default is it.empty and it.kind not in (it.VAR_POSITIONAL, it.VAR_KEYWORD)
        if is_needed and (it.kind not in given or it.name not in offered):
            return it.name
    return None


def refuse_argument(path: str, name: str, offered: Sequence[str]) -> ConfigError:
    """The error for a reward function that asks for what nobody gives."""
    of_row = f"; {name!r} of a row is row[{name!r}]" if "row" in offered else ""
    return ConfigError(
        f"reward {path!r} asks for {name!r}; it may take, by name: {', '.join(offered)}{of_row}"
    )


def plain_state(owner: str, state: object) -> dict[str, Any]:
    """A copy of `state()` as JSON values, which later changes of the plug-in do not reach.

    Numbers and arrays of numpy become Python's. ConfigError, with the name of `owner` and the place
    in the state, for everything that `load_state` would not get back as it was.

        >>> plain_state("curriculum 'words'", {"rates": (0.5, 1.0)})
        {'rates': [0.5, 1.0]}
    """
    if not isinstance(state, Mapping):
        raise ConfigError(f"state() of {owner} gives {type(state).__name__}; it must give a dict")
    try:
        return _plain_dict(state)
    except _NotPlain as error:
        raise ConfigError(
            f"state() of {owner} {error}; a checkpoint keeps finite numbers, text, true, false, "
            "None, and lists and dicts of them"
        ) from None
    except RecursionError as error:
        raise ConfigError(f"state() of {owner} is nested too deep, or contains itself") from error


def take_state(owner: str, plugin: Any) -> dict[str, Any]:
    """`plain_state` of what `state()` gives; ConfigError names the owner when that raises, or when
    what it gives cannot be read, e.g. because a thread of the plug-in changes it meanwhile."""
    try:
        with guarded(lambda: f"state() of {owner}"):
            return plain_state(owner, plugin.state())
    except PluginFailed as failed:
        raise ConfigError(f"{failed}; nothing can be saved without it") from failed


def with_name(name: str, load: Callable[[], T]) -> T:
    """The result of `load`; any error of it becomes a CorruptStateError about piece `name`."""
    try:
        with guarded(lambda: f"state of {name} in the checkpoint"):
            return load()
    except PluginFailed as failed:
        raise CorruptStateError(f"{failed}; it is of another class, or damaged") from failed


class _NotPlain(Exception):
    """What is wrong with a value; the place is put together on the way out."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.problem = problem
        self.place = ""

    def within(self, step: str) -> _NotPlain:
        self.place = f"{step}{self.place}"
        return self

    def __str__(self) -> str:
        return f"holds {self.problem} at {self.place.lstrip('.')!r}"


def _plain(value: Any) -> Any:
    kind = type(value)
    # State may hold a hundred thousand of these.
    if kind is int or value is None or kind is bool or (kind is float and math.isfinite(value)):
        return value
    if kind is list or kind is tuple:
        return _plain_list(value)
    if hasattr(value, "tolist"):
        value = value.tolist()
    match value:
        case bool():
            return value
        case int():
            return int(value)
        case float():
            if not math.isfinite(value):
                raise _NotPlain(f"{value}")
            return float(value)
        case str():
            return _text(value)
        case list() | tuple():
            return _plain_list(value)
        case Mapping():
            return _plain_dict(value)
    raise _NotPlain(f"a {type(value).__name__}")


def _plain_list(values: Sequence[Any]) -> list[Any]:
    found: list[Any] = []
    try:
        for value in values:
            found.append(_plain(value))  # noqa: PERF401  its length is the place of an error
    except _NotPlain as error:
        raise error.within(f"[{len(found)}]") from None
    return found


def _plain_dict(values: Mapping[Any, Any]) -> dict[str, Any]:
    """JSON would turn a key that is a number into text, and `load_state` would miss it."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if not isinstance(key, str):
            raise _NotPlain(f"the key {key!r}, which is not text,")
        try:
            found[_text(key)] = _plain(value)
        except _NotPlain as error:
            raise error.within(f".{key}") from None
    return found


def _text(value: str) -> str:
    try:
        return value.encode().decode()
    except UnicodeEncodeError:
        raise _NotPlain("text that is not Unicode") from None


def _find(kind: str, path: str, what: str, is_one: Callable[[object], bool]) -> object:
    module_name, separator, name = path.partition(":")
    if not separator:
        raise ConfigError(f"{kind} {path!r} must be given as 'package.module:{what}'")
    found = getattr(_import(kind, path, module_name), name, None)
    if not is_one(found):
        text = f"module {module_name!r} has no {what.lower()} {name!r}"
        raise ConfigError(f"{kind} {path!r}: {text}")
    return found


def _import(kind: str, name: str, module_name: str) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{kind} {name!r}: cannot import {module_name!r} ({error}). Install it or fix the path"
        ) from error
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"{kind} {name!r}: {module_name!r} fails when it is imported "
            f"({type(error).__name__}: {error}). Fix the module"
        ) from error
