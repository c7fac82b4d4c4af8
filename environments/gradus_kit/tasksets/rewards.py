"""Reward functions that a user names, `module:function` or `file.py:function`, one or several."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import math
import socket
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from gradus.errors import ConfigError, EnvironmentFailure
from gradus.plugins import find_function, refuse_argument, unknown_argument
from gradus.processes import plain_calls
from gradus.processes.plain_calls import call

_KINDS = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_MAX_FRAMES = 8
_BETWEEN = {__file__, plain_calls.__file__}
"""Files whose lines stand between a call of a reward and the reward."""
_UNREACHED = {
    *("APIConnectionError", "TransportError", "ClientConnectionError", "ConnectionError"),
    *("Timeout", "URLError"),
}
"""Raised by clients of HTTP when a server does not answer."""


@dataclass(frozen=True)
class RewardFunction:
    """A function that rates what an agent did, and the names of what it wants to know.

    >>> exact = RewardFunction.load("rewards.py:exact", offered=["reply", "row"])  # doctest: +SKIP
    >>> await exact({"reply": "4", "row": {"answer": "4"}})  # doctest: +SKIP
    {'exact': 1.0}
    """

    name: str
    """The function's own name, under which its number is recorded."""
    path: str
    """As the user wrote it."""
    function: Callable[..., Any]
    wanted: tuple[str, ...]
    """Arguments that it takes, of those offered."""

    @classmethod
    def load(cls, path: str, *, offered: Sequence[str]) -> RewardFunction:
        """Import the function; ConfigError when it is not there or asks for something else."""
        function = _function(path)
        wanted = _wanted(path, function, offered)
        return cls(path.rpartition(":")[2], path, function, wanted)

    async def __call__(self, values: Mapping[str, Any]) -> dict[str, float]:
        """Its number or numbers by name, all finite; EnvironmentFailure for anything else, and for
        what it raises, with the lines of its own code.

        An `async def` is awaited; a plain function runs in a thread, beside other episodes.
        """
        work = partial(self.function, **{name: values[name] for name in self.wanted})
        try:
            result = await call(self.function, work, f"reward {self.name!r}")
        except Exception as error:
            every = traceback.extract_tb(error.__traceback__)
            frames = [frame for frame in every if frame.filename not in _BETWEEN]
            said = " ".join(str(error).split())
            text = f"reward {self.name!r} failed: {type(error).__name__}: {said}"
            raise EnvironmentFailure("\n".join([text, *_lines_of(frames)])) from error
        # An empty dict would leave the episode without any reward; it fails like other non-numbers.
        parts = result if isinstance(result, Mapping) and result else {self.name: result}
        return {str(name): self._finite(name, value) for name, value in parts.items()}

    def _finite(self, name: object, value: object) -> float:
        part = "" if name == self.name else f" for {name!r}"
        if inspect.isawaitable(value):
            called = getattr(value, "__name__", type(value).__name__)
            if inspect.iscoroutine(value):
                value.close()
            raise EnvironmentFailure(
                f"reward {self.name!r} returned a coroutine{part}, {called!r}: await it, or return "
                "what it gives"
            )
        try:
            number = float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        # float() reads text too, and a reward that is text is a mistake.
        if isinstance(value, str | bytes) or not math.isfinite(number):
            raise EnvironmentFailure(
                f"reward {self.path!r} returned {_shown(value)}{part}; it must return a finite "
                "number, or a dict of names and finite numbers"
            )
        return number


@dataclass(frozen=True)
class WeightedRewards:
    """Several reward functions, whose weighted numbers add up to the reward.

    >>> rewards = WeightedRewards.load({"mine.py:exact": 1.0, "mine.py:short": 0.2},
    ...                                offered=["reply", "row"])  # doctest: +SKIP
    """

    functions: Mapping[RewardFunction, float]
    """Each with its weight."""

    @classmethod
    def load(
        cls, given: str | Sequence[str] | Mapping[str, float], *, offered: Sequence[str]
    ) -> WeightedRewards:
        """Import one function, several, or those with a weight; ConfigError as for each of them."""
        paths = [given] if isinstance(given, str) else list(given)
        weights = given if isinstance(given, Mapping) else dict.fromkeys(paths, 1.0)
        if not paths:
            raise ConfigError("no reward function is named; name one, or leave `reward` out")
        named: dict[str, str] = {}
        for path in paths:
            name = path.rpartition(":")[2]
            if name in named:
                raise ConfigError(
                    f"rewards {named[name]!r} and {path!r} are both named {name!r}; rename one of "
                    "the functions: each number is recorded under its function's name"
                )
            named[name] = path
        return cls({RewardFunction.load(it, offered=offered): weights[it] for it in paths})

    @property
    def wanted(self) -> set[str]:
        return {name for function in self.functions for name in function.wanted}

    async def __call__(self, values: Mapping[str, Any]) -> dict[str, float]:
        """All numbers by name, each times the weight of its function."""
        found: dict[str, float] = {}
        for function, weight in self.functions.items():
            for name, number in (await function(values)).items():
                if name in found:
                    raise EnvironmentFailure(
                        f"reward {function.name!r} gives {name!r}, as another reward does; give "
                        "each number a name of its own"
                    )
                found[name] = weight * number
        return found


def is_of_an_endpoint(error: BaseException | None) -> bool:
    """Tell whether a reward failed as something that it asks did not answer, which may pass."""
    if isinstance(error, ConnectionError | TimeoutError | socket.gaierror):
        return True
    status = getattr(error, "status_code", getattr(error, "code", None))
    if isinstance(status, int):
        return status in (408, 429) or 500 <= status < 600
    return any(kind.__name__ in _UNREACHED for kind in type(error).__mro__)


def _lines_of(frames: Iterable[traceback.FrameSummary]) -> list[str]:
    """The last lines of a traceback that lie in no library; all where every line lies in one."""
    found = list(frames)
    lines: list[str] = []
    for frame in ([it for it in found if not _is_library(it.filename)] or found)[-_MAX_FRAMES:]:
        lines.append(f'  File "{frame.filename}", line {frame.lineno}, in {frame.name}')
        if frame.line:
            lines.append(f"    {frame.line}")
    return lines


def _is_library(file: str) -> bool:
    places = (sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
    return any(Path(place) in Path(file).parents for place in places)


def _function(path: str) -> Callable[..., Any]:
    where, separator, name = path.rpartition(":")
    if not separator or not where or not name:
        raise ConfigError(
            f"reward {path!r} must be given as 'module:function' or 'file.py:function'"
        )
    if not where.endswith(".py"):
        return find_function("reward", path)
    found = getattr(_module_of_file(path, Path(where)), name, None)
    if not callable(found):
        raise ConfigError(f"reward {path!r}: the file has no function {name!r}")
    return found  # type: ignore[no-any-return]


def _module_of_file(path: str, file: Path) -> ModuleType:
    """The module of a file, executed once in a process however often it is asked for."""
    file = file.expanduser().resolve()
    digest = hashlib.sha256(str(file).encode()).hexdigest()[:12]
    module_name = f"gradus_reward_{file.stem}_{digest}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    if not file.is_file():
        raise ConfigError(
            f"reward {path!r}: there is no file {file}. A relative path starts where the command "
            "was given"
        )
    spec = importlib.util.spec_from_file_location(module_name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[module_name]
        raise ConfigError(
            f"reward {path!r}: {file} fails when it is imported ({type(error).__name__}: {error})"
        ) from error
    return module


def _wanted(path: str, function: Callable[..., Any], offered: Sequence[str]) -> tuple[str, ...]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise ConfigError(f"reward {path!r}: its arguments cannot be read ({error})") from error
    if (strange := unknown_argument(parameters, offered)) is not None:
        raise refuse_argument(path, strange, offered)
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        return tuple(offered)
    return tuple(p.name for p in parameters if p.kind in _KINDS and p.name in offered)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
