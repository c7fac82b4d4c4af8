"""Rows and reward functions of a caller, as files that a run keeps and its environments read."""

from __future__ import annotations

import base64
import contextlib
import functools
import inspect
import io
import itertools
import json
import keyword
import math
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cloudpickle

from gradus.errors import ConfigError
from gradus.launch.job import PICKLED
from gradus.log import get_logger
from gradus.plugins import REWARD_ARGUMENTS, refuse_argument, unknown_argument
from gradus.rows.reading import is_file_name, read_rows
from gradus.rows.reward_trial import rewards_of

logger = get_logger(__name__)

MAX_ROWS = 1_000_000
_UNRATED = "gradus_jsonl.answers:unrated"
_PROMPTS = ("prompt", "messages")
_TRIED_ROWS = 4
_TRIAL_SECONDS = 10.0
_WRONG = ("", "I do not know.", "1 2 3 word " * 40)
"""Replies that are right for hardly any row."""
Reward = Callable[..., Any] | str
_MODULE = '''"""The text of the reward {name!r}, as it was given to gradus."""

import base64
import linecache
import pickle
import sys
from pathlib import Path

ORIGIN, LINE, TEXT = {origin!r}, {line}, {text!r}
sys.path += [folder for folder in {folders!r} if folder not in sys.path]
if not Path(ORIGIN).is_file():  # the cell of a notebook, whose lines an error shows
    held = linecache.cache.setdefault(ORIGIN, (1, None, [], ORIGIN))[2]
    held += [""] * (LINE - 1 - len(held))
    lines = TEXT.splitlines(keepends=True)
    held[LINE - 1 : LINE - 1 + len(lines)] = lines
{name} = pickle.loads(base64.b64decode(Path(__file__).with_suffix({ending!r}).read_text()))
'''


@dataclass(frozen=True)
class OwnTasks:
    """What a source plays: the keys of its table, and the files that they name."""

    keys: Mapping[str, Any]
    """Of the source, but for its files."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Name → text."""
    rows: str = ""
    """Which of the files has the rows; empty where a task set brings its own."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """`file.py:function` of the files, or of others → weight."""

    def source(self, folder: Path) -> dict[str, Any]:
        """The keys of the source when its files lie in `folder`."""
        taskset: dict[str, Any] = dict(self.keys.get("taskset", {}))
        if self.rows:
            taskset["path"] = str(folder / self.rows)
        if self.rewards:
            own = {name.rpartition(":")[0] for name in self.rewards} & self.files.keys()
            taskset["reward"] = {
                str(folder / name) if name.rpartition(":")[0] in own else name: weight
                for name, weight in self.rewards.items()
            }
        return {**self.keys, **({"taskset": taskset} if taskset else {})}


def own_tasks(
    tasks: Any, reward: Any, *, name: str = "tasks", prompt_key: str | None = None
) -> OwnTasks:
    """The tasks of a caller: the id of an environment, a file of JSON lines, rows, or what gives
    rows. ConfigError, which says what to do, for everything else."""
    if isinstance(tasks, str | Path) and not is_environment(tasks):
        path = str(Path(tasks).expanduser().absolute())
        files, rewards = _rewards(reward)
        return OwnTasks(
            {"id": "jsonl", "name": name, "taskset": {"path": path}}, files, "", rewards
        )
    if isinstance(tasks, str):
        if reward is not None:
            raise ConfigError(
                f"reward: the environment {tasks!r} brings its own reward; leave `reward` out, or "
                "give rows as `tasks`"
            )
        return OwnTasks({"id": tasks})
    rows = rows_of(tasks, name)
    for number, row in enumerate(rows):
        _refuse_row_without_prompt(f"{name}, row {number}", row, prompt_key)
    if reward is None and "answer" not in rows[0]:
        raise ConfigError(
            f"reward: missing, and the rows of `{name}` have no 'answer' to compare a reply with. "
            "Give a function of prompt, reply and row that returns a number"
        )
    files, rewards = _rewards(reward)
    rows_file = f"{name}.jsonl"
    return OwnTasks(
        {"id": "jsonl", "name": name},
        {rows_file: lines_of(rows, name), **files},
        rows_file,
        rewards,
    )


def try_rewards(tasks: OwnTasks, folder: Path) -> None:
    """Rate made-up replies to the first rows, with the files as they lie in `folder`.

    ConfigError, with the user's own error and line, for a function that fails for each of them; a
    warning for one that fails for some, or is the same for all.
    """
    taskset = tasks.source(folder).get("taskset", {})
    rewards = [name for name in taskset.get("reward", ()) if name != _UNRATED]
    if not rewards or "path" not in taskset:
        return
    rows = [row for _, row in itertools.islice(read_rows(taskset["path"]), _TRIED_ROWS)]
    calls = [call for row in rows if isinstance(row, dict) for call in _made_up(row)]
    found: set[float] = set()
    for name in rewards:
        try:
            paid = rewards_of(
                name, calls, offered=REWARD_ARGUMENTS, folder=folder, seconds=_TRIAL_SECONDS
            )
        except TimeoutError as error:
            logger.warning("%s", error)
            return
        if paid is None:
            return
        failed = [one for one in paid if isinstance(one, str)]
        if failed:
            which = "every reply" if len(failed) == len(paid) else f"{len(failed)} of {len(paid)}"
            said, *lines = failed[0].splitlines()
            text = "\n".join([f"{said} and {which} that was tried", *lines])
            if len(failed) == len(paid):
                raise ConfigError(text)
            logger.warning("%s", text)
            return
        found.update(round(float(one), 6) for one in paid)
    if len(found) == 1 and any("answer" in row for row in rows):
        logger.warning(
            "the reward is %g for each of %d replies that were tried, right ones, empty ones and "
            "nonsense: where all replies earn the same, nothing is learned",
            found.pop(),
            len(calls),
        )


def _made_up(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What a reward may ask for, of each reply to a row."""
    asked = next((row[key] for key in _PROMPTS if key in row), "")
    messages = asked if isinstance(asked, list) else [{"role": "user", "content": asked}]
    prompt = messages[-1].get("content") if messages else ""
    right = [str(row["answer"])] if "answer" in row else []
    for reply in (*right, *_WRONG):
        said = [*messages, {"role": "assistant", "content": reply}]
        yield {"prompt": prompt, "reply": reply, "row": row, "messages": said, "trace": None}


def unrated(tasks: Any, *, prompt_key: str | None = None) -> OwnTasks:
    return own_tasks(tasks, None if is_environment(tasks) else _UNRATED, prompt_key=prompt_key)


def is_environment(tasks: Any) -> bool:
    """Whether tasks are the id of an environment, which rates them itself."""
    return isinstance(tasks, str) and not is_file_name(tasks)


def rows_of(tasks: Any, name: str) -> list[dict[str, Any]]:
    """The rows of a list, a data set, a data frame, or of what a callable or generator gives; a
    text is a row with that prompt. ConfigError when there is none."""
    if callable(tasks) and not isinstance(tasks, Iterable):
        tasks = tasks()
    if hasattr(tasks, "to_dict") and hasattr(tasks, "notna") and hasattr(tasks, "columns"):
        frame = tasks.astype(object)
        tasks = frame.where(frame.notna(), None).to_dict("records")
    if isinstance(tasks, Mapping):
        if _are_columns(tasks):
            raise ConfigError(
                f"{name}: a dict of columns, not a list of rows; use "
                "datasets.Dataset.from_dict(columns), or a list with a dict for each row"
            )
        first = next(iter(tasks.values()), None)
        has_splits = hasattr(first, "column_names")
        advice = f"choose one: {name}[{next(iter(tasks), '')!r}]" if has_splits else "write [row]"
        what = "splits of a data set" if has_splits else "one dict"
        raise ConfigError(f"{name}: {what}, not a list of rows; {advice}")
    if isinstance(tasks, str | bytes) or not isinstance(tasks, Iterable):
        raise ConfigError(
            f"{name}: a {type(tasks).__name__} gives no rows; use a list of dicts, a data set, or "
            "a function that returns one of these"
        )
    found = list(itertools.islice(tasks, MAX_ROWS + 1))
    if not found:
        raise ConfigError(f"{name}: there are no rows; give one at least")
    if len(found) > MAX_ROWS:
        raise ConfigError(
            f"{name}: more than {MAX_ROWS:,} rows, or without end; cut them with itertools.islice"
        )
    rows = [{"prompt": row} if isinstance(row, str) else row for row in found]
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise ConfigError(
                f"{name}, row {number}: a {type(row).__name__}; a row is a dict, or the text of a "
                "prompt"
            )
    return [dict(row) for row in rows]


def _are_columns(table: Mapping[str, Any]) -> bool:
    """Whether each key has a list, other than the messages of one prompt."""
    lists = [it for it in table.values() if isinstance(it, list | tuple) or hasattr(it, "tolist")]
    prompts = (table[key] for key in _PROMPTS if isinstance(table.get(key), list))
    is_row = any(isinstance(it, Mapping) for prompt in prompts for it in prompt[:1])
    return bool(lists) and len(lists) == len(table) and not is_row


def lines_of(rows: Sequence[Mapping[str, Any]], name: str) -> str:
    """The rows as JSON lines; ConfigError with row and key for a value that JSON has not."""
    lines = []
    for number, row in enumerate(rows):
        try:
            lines.append(_json(row))
        except (TypeError, ValueError, RecursionError) as error:
            key = next((key for key, value in row.items() if not _is_json(value)), None)
            what = error if key is None else f"{key!r} is {row[key]!r:.60}"
            raise ConfigError(
                f"{name}, row {number}: {what}; rows travel as JSON: use text, finite numbers, "
                "true, false, None, and lists and dicts of them"
            ) from error
    return "".join(f"{line}\n" for line in lines)


def _json(value: Any) -> str:
    text = json.dumps(value, default=_of_numpy, allow_nan=False, ensure_ascii=False)
    text.encode()  # half a character ends here
    return text


def _is_json(value: Any) -> bool:
    try:
        _json(value)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def _of_numpy(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not JSON")


def _refuse_row_without_prompt(where: str, row: Mapping[str, Any], key: str | None) -> None:
    tried = (key,) if key else _PROMPTS
    found = next((row[it] for it in tried if it in row), None)
    if isinstance(found, list) or (isinstance(found, str) and found.strip()):
        return
    shown = ", ".join(map(repr, row)) or "nothing"
    if all(it not in row for it in tried):
        raise ConfigError(
            f"{where} has no {' and no '.join(map(repr, tried))}; it has {shown}. Say which key is "
            "the prompt: prompt_key="
        )
    raise ConfigError(f"{where}: the prompt is {found!r:.60}; it must be a text, or messages")


def _rewards(given: Any) -> tuple[dict[str, str], dict[str, float]]:
    """Files with the functions, and `file.py:function` → weight; nothing where none is given."""
    if given is None:
        return {}, {}
    files: dict[str, str] = {}
    weights: dict[str, float] = {}
    names: set[str] = set()
    for name, function, weight in _named(given):
        recorded = function.rpartition(":")[2] if isinstance(function, str) else name
        if recorded in names:
            raise ConfigError(
                f"reward: two functions are named {recorded!r}; name them: "
                "reward={'first': f, 'second': g}"
            )
        names.add(recorded)
        if isinstance(function, str):
            where, separator, rest = function.rpartition(":")
            is_file = bool(separator) and where.endswith(".py")
            path = f"{Path(where).expanduser().absolute()}:{rest}" if is_file else function
        else:
            path = f"{name}.py:{name}"
            files |= files_of(name, function)
        weights[path] = weight
    if not weights:
        raise ConfigError("reward: the list is empty; give a function of prompt, reply and row")
    return files, weights


def _named(given: Any) -> list[tuple[str, Reward, float]]:
    """Name, function and weight of each reward; a table has names or functions as keys."""
    if not isinstance(given, Mapping):
        several = list(given) if isinstance(given, list | tuple) else [given]
        return [(_name_of(one), _checked(one), 1.0) for one in several]
    found: list[tuple[str, Reward, float]] = []
    for key, value in given.items():
        if isinstance(key, str) and callable(value):
            if not key.isidentifier() or keyword.iskeyword(key):
                what = "a word of Python's own" if keyword.iskeyword(key) else "no name"
                raise ConfigError(f"reward: {key!r} is {what}; use letters, digits and _")
            _refuse_arguments(value)
            found.append((key, value, 1.0))
        elif isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(
                f"reward: the weight of {_name_of(key)!r} is {value!r:.60}; give a number"
            )
        elif not math.isfinite(value):
            raise ConfigError(
                f"reward: the weight of {_name_of(key)!r} is {value}; give a finite one"
            )
        else:
            found.append((_name_of(key), _checked(key), float(value)))
    return found


def _checked(one: Any) -> Reward:
    if callable(one):
        _refuse_arguments(one)
        return one  # type: ignore[no-any-return]
    if isinstance(one, str) and ":" in one:
        return one
    if inspect.iscoroutine(one):
        one.close()
        name = one.__name__
        raise ConfigError(f"reward: {name!r} was called; give the function itself: reward={name}")
    raise ConfigError(
        f"reward: {one!r:.60} is no function; give a function of prompt, reply and row, or its "
        "place as text, 'rewards.py:score'"
    )


def _refuse_arguments(function: Callable[..., Any]) -> None:
    """ConfigError here for what a worker would refuse once the run has started."""
    with contextlib.suppress(TypeError, ValueError):  # one whose arguments cannot be read
        parameters = inspect.signature(function).parameters.values()
        if (strange := unknown_argument(parameters, REWARD_ARGUMENTS)) is not None:
            raise refuse_argument(_name_of(function), strange, REWARD_ARGUMENTS)


def _name_of(one: Any) -> str:
    """Under which its number is recorded."""
    name = one.rpartition(":")[2] if isinstance(one, str) else getattr(one, "__name__", "reward")
    return name if name.isidentifier() else "reward"


class _Pickler(cloudpickle.Pickler):
    """Takes functions with a cache by what they cache too, as they have no module to import."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, functools._lru_cache_wrapper) and value.__module__ == "__main__":
            return with_cache, (value.__wrapped__, value.cache_parameters())
        return super().reducer_override(value)


def with_cache(function: Callable[..., Any], settings: Mapping[str, Any]) -> Callable[..., Any]:
    cached: Callable[..., Any] = functools.lru_cache(**settings)(function)
    return cached


def files_of(name: str, function: Callable[..., Any]) -> dict[str, str]:
    """File → text, of a module in which `name` is this function.

    ConfigError, which says what to do, for what cannot be given to another process.
    """
    pickled = io.BytesIO()
    try:
        _Pickler(pickled).dump(function)
    except Exception as error:  # whatever one of its values raises
        raise ConfigError(
            f"reward {name!r} cannot reach the process that calls it: {error}; make what cannot be "
            "copied inside the function, or put the function into a file, rewards.py, and import "
            "it: from rewards import ..."
        ) from error
    try:
        lines, line = inspect.getsourcelines(inspect.unwrap(function))
        origin = str(inspect.getsourcefile(inspect.unwrap(function)))
    except (OSError, TypeError):
        lines, line, origin = [], 1, "<unknown>"
    module = _MODULE.format(
        name=name,
        origin=origin,
        line=line,
        text="".join(lines),
        folders=_own_folders(),
        ending=PICKLED,
    )
    return {f"{name}.py": module, f"{name}{PICKLED}": base64.b64encode(pickled.getvalue()).decode()}


def _own_folders() -> list[str]:
    """Where this process finds modules that are not installed."""
    places = sysconfig.get_paths()
    roots = {Path(places[name]) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    found = dict.fromkeys(Path(place or ".").resolve() for place in sys.path)
    return [str(it) for it in found if it.is_dir() and not roots & {it, *it.parents}]
