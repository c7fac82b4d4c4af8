"""The command line and its files become one valid config, or one error that lists every problem."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from gradus.config.keys import UNKNOWN, KeyPath, all_key_paths, annotation_at, dotted, keys_at
from gradus.config.problems import Problem, for_flags, is_key, unknown_key, validation_problems
from gradus.config.read.arguments import FileArgument, Override, key_path, parse_arguments
from gradus.config.read.foreign import complete_ids, field_hint, translate
from gradus.config.read.layers import MergedConfig, nested
from gradus.config.read.renames import value_at
from gradus.config.read.toml import read_config_file
from gradus.config.read.words import plain_kinds, typed_values
from gradus.config.schema.base import StrictConfig
from gradus.config.schema.inference import SamplingConfig
from gradus.config.schema.run import RunConfig
from gradus.config.schema.sft import SftConfig
from gradus.errors import ConfigError, nearest, refuse
from gradus.log import get_logger
from gradus.run.settings import differences, leaves

Config = TypeVar("Config", bound=StrictConfig)
Check = Callable[[Config], list[Problem]]
"""Finds what cannot work although every single value is valid."""

logger = get_logger(__name__)

_CHANGEABLE = re.compile(r"trainer(\..+)?|max_steps")
"""Keys that decide nothing about what was played and which samples make a batch."""

_OF_ROWS = ("prompt_key", "instruction")
"""Keys of the task set that reads rows."""

_HARMLESS = re.compile(
    r"trainer\.(env_vars|gpus|bench|weight_transfer|broadcast_backend|peak_teraflops)(\..+)?"
)
"""Keys of the trainer that leave the weights as they are."""


@dataclass(frozen=True)
class ReplayChoice:
    """What a command line makes of a recorded run."""

    config: RunConfig
    """The recorded config with the changes."""
    max_steps: int | None
    """Steps to replay. None means all."""
    changes: tuple[str, ...]
    """Dotted keys whose change may change the weights, with both values."""


def load_config(
    model: type[Config],
    words: Sequence[str],
    *,
    check: Check[Config] | None = None,
    base: Mapping[str, Any] | None = None,
    base_name: str = "the recorded config",
) -> Config:
    """The config that a command line describes; touches nothing but the files that it names.

    Files and mounted files merge left to right over `base`, then overrides apply left to right.
    Every problem of one stage (files, keys and types, `check`) is reported at once, with the file
    and line, or what `base_name` calls the base.

        >>> load_config(RunConfig, ["@", "run.toml", "--trainer.optimizer.lr", "1e-5"])
    """
    merged = _merge(words, base or {}, base_name, model)
    for warning in merged.warnings:
        logger.warning("%s", warning)
    unread = list(merged.problems)
    values = typed_values(complete_ids(merged.values), model, (), unread)
    config = None
    try:
        config = model.model_validate(values)
    except ValidationError as error:
        already = {problem.path for problem in unread}
        unread += [it for it in validation_problems(error, model) if it.path not in already]
    refuse(dict.fromkeys(_located(problem, merged) for problem in unread))
    assert config is not None
    if check is not None:
        refuse(_located(problem, merged) for problem in check(config))
    return config


def top_level_keys(words: Sequence[str]) -> set[str]:
    """The sections and keys at the top of what a command line describes, valid or not."""
    return set(given_values(words))


def given_values(words: Sequence[str]) -> dict[str, Any]:
    """What a command line says, merged, valid or not."""
    return _merge(words, {}).values


def load_replay(recorded: Mapping[str, Any], words: Sequence[str]) -> ReplayChoice:
    """The recorded config with what a command line changes of the trainer.

    ConfigError for keys that decided what was played, and for a recorded config that this version
    does not understand.
    """
    given = dict(leaves(given_values(words)))
    if refused := sorted(key for key in given if not _CHANGEABLE.fullmatch(key)):
        raise ConfigError(
            f"{', '.join(refused)}: decided what the run played, and a replay repeats that. A "
            "replay changes only keys of [trainer], and max_steps to end sooner"
        )
    # Both with the defaults of keys that are newer than the record.
    unchanged = load_config(RunConfig, [], base=recorded)
    config = load_config(RunConfig, words, base=recorded)
    max_steps = config.max_steps if "max_steps" in given else None
    # Schedules go by the steps that the run had.
    config = config.model_copy(update={"max_steps": unchanged.max_steps})
    changes = tuple(
        f"{key} was {was!r} and is {now!r}"
        for key, was, now in differences(unchanged.without_secrets(), config.without_secrets())
        if not _HARMLESS.fullmatch(key)
    )
    return ReplayChoice(config, max_steps, changes)


def keyword_values(
    model: type[StrictConfig],
    config: str | Path | Mapping[str, Any],
    own: Mapping[Any, Any],
    keywords: Mapping[str, Any],
    source: KeyPath,
    arguments: Iterable[str] = (),
) -> dict[str, Any]:
    """A config, what a call makes itself, and its keywords, merged in this order.

    A keyword is a key at the top, one of the `source`, one with dots, or the name of a key further
    down that no other has: `lr`. One of sampling holds for all that is played, measured or trained,
    that does not say otherwise. ConfigError for one that may mean several keys, and for one that
    means none, with what is most like it, also of the `arguments` that the call has beside them.

        >>> keyword_values(SftConfig, {}, {}, {"lr": 0.1}, ())
        {'optimizer': {'lr': 0.1}}
    """
    merged = MergedConfig(model)
    values = config if isinstance(config, Mapping) else given_values(["@", str(config)])
    _refuse_unknown(model, keywords, source, arguments)
    for layer in (values, own):
        merged.add(dict(layer), lambda _: "")
    for layer in _layers(model, keywords, source, merged.values):
        merged.add(layer, lambda _: "")
    if merged.problems:
        raise ConfigError("\n".join(map(str, merged.problems)))
    return merged.values


def _layers(
    model: type[StrictConfig], keywords: Mapping[str, Any], source: KeyPath, given: Any
) -> Iterator[dict[Any, Any]]:
    for name, value in keywords.items():
        path = _path_of(model, name, source)
        below = path[len(source) :]
        is_sampling = bool(source) and path[: len(source)] == source and below[0] == "sampling"
        if not is_sampling:
            yield nested(path, _plain(value))
            continue
        # Sampling of the section, from which what is measured meanwhile takes it too.
        yield nested((*source[:-2], *below), _plain(value))
        if value_at(given, (*source, "sampling")) is not None:
            yield nested(path, _plain(value))


_SAID_AS = {
    "train_dataset": "tasks",
    "eval_dataset": "eval_tasks",
    "reward_funcs": "reward",
    "learning_rate": "lr",
    "num_generations": "group_size",
    "max_completion_length": "max_completion_tokens",
}
"""Argument of TRL's trainers → ours of a call."""


def _path_of(model: type[StrictConfig], name: str, source: KeyPath) -> KeyPath:
    if "." in name:
        return key_path(name)
    if name in model.model_fields:
        return (name,)
    if source:
        if name in keys_at(model, source):
            return (*source, name)
        if name in _OF_ROWS:
            return (*source, "taskset", name)
        if name in SamplingConfig.model_fields:
            return (*source, "sampling", name)
    found = [path for path in dict.fromkeys(all_key_paths(model)) if path[-1] == name]
    if len(found) > 1:
        first, second, *_ = map(dotted, found)
        raise ConfigError(
            f"{name} may mean {first} or {second}; write the whole key: "
            f'**{{"{first}": ...}}, or the table: {found[0][0]}={{...}}'
        )
    return found[0] if found else (name,)


def _refuse_unknown(
    model: type[StrictConfig],
    keywords: Mapping[str, Any],
    source: KeyPath,
    arguments: Iterable[str],
) -> None:
    paths = {name: _path_of(model, name, source) for name in keywords if "." not in name}
    unknown = [it for it, path in paths.items() if path == (it,) and it not in model.model_fields]
    known = {str(path[-1]) for path in all_key_paths(model)} | {*arguments, *model.model_fields}
    if source:
        known |= {*keys_at(model, source), *_OF_ROWS, *SamplingConfig.model_fields}
    refuse(_unknown_keyword(model, name, known) for name in unknown)


def _unknown_keyword(model: type[StrictConfig], name: str, known: set[str]) -> str:
    said = "data" if (name, model) == ("train_dataset", SftConfig) else _SAID_AS.get(name)
    if said is not None:
        return f"{name}: gradus calls it {said}: {said}=..."
    hint = field_hint((name,), lambda key: is_key(model, key))
    near = None if hint else nearest(name, sorted(known))
    meant = f"unknown key; did you mean {near}?" if near else unknown_key(model, (name,))
    return f"{name}: {meant}"


def in_keywords(model: type[StrictConfig], source: KeyPath, text: str) -> str:
    """The text with the keywords of a call in the place of keys and options that they set.

    >>> in_keywords(SftConfig, (), "raise optimizer.lr, or use --resume")
    'raise lr, or use resume=True'
    """

    def said(found: re.Match[str]) -> str:
        key, name = found[0], found[0].rpartition(".")[2]
        with contextlib.suppress(ConfigError):
            meant = dotted(_path_of(model, name, source))
            is_of_source = f".sampling.{name}" in f".{key}"
            if meant == key or meant.endswith(f".{key}") or (source and is_of_source):
                return name
        return key

    text = re.sub(r"--(resume|clean)\b", r"\1=True", text)
    return re.sub(r"(?<![\w./])[a-z_]+(?:\.[a-z_0-9]+)+(?![\w/(]|\.\w)", said, text)


def _plain(value: Any) -> Any:
    """As a TOML file would hold it."""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _plain(member) for key, member in value.items()}
    return [_plain(it) for it in value] if isinstance(value, list | tuple) else value


def _merge(
    words: Sequence[str], base: Mapping[str, Any], base_name: str = "", model: Any = object
) -> MergedConfig:
    """Files and overrides of a command line, merged; refuses files that cannot be read."""
    arguments = parse_arguments(words)
    merged = MergedConfig(model)
    merged.add(dict(base), lambda _: base_name)
    problems: list[Problem | str] = list(arguments.problems)
    for file in arguments.files:
        problems.extend(_add_file(merged, file))
    for override in arguments.overrides:
        _add_override(merged, override)
    refuse(problems)
    return merged


def _located(problem: Problem, merged: MergedConfig) -> str:
    place = merged.place(problem.path)
    if not place:
        return str(problem)
    if place.startswith("--"):
        problem = Problem(problem.path, for_flags(problem.message))
    is_key = place.removeprefix("--").replace("-", "_") == dotted(problem.path)
    return f"{place}: {problem.message if is_key else problem}"


def _add_file(merged: MergedConfig, argument: FileArgument) -> list[str]:
    """Merge one file; returns what is wrong with it."""
    wanted = annotation_at(merged.model, argument.section)
    if wanted is not UNKNOWN and not plain_kinds(wanted) & {dict, object}:
        flag = f"--{dotted(argument.section).replace('_', '-')}"
        return [f"{flag} takes a value and no file; write the file first: @ {argument.file} {flag}"]
    try:
        file = read_config_file(argument.file)
    except ConfigError as error:
        return [str(error)]
    depth = len(argument.section)
    translation = translate(nested(argument.section, file.values))
    merged.warnings += [f"{file.name}: {warning}" for warning in translation.warnings]
    merged.add(translation.values, lambda path: file.place(translation.place_before(path)[depth:]))
    return []


def _add_override(merged: MergedConfig, override: Override) -> None:
    translation = translate(nested(override.path, override.value))
    merged.warnings += [f"command line: {warning}" for warning in translation.warnings]
    merged.add(translation.values, lambda _: override.flag)
