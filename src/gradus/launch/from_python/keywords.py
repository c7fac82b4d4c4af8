"""Keywords of a call in Python: the one key that each can mean."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from gradus.config import Layers, SamplingConfig, SftConfig, StrictConfig, keys, unknown_key
from gradus.errors import ConfigError, nearest, refuse

_OF_ROWS = ("prompt_key", "instruction")
"""Keys of the task set that reads rows."""
_SAID_AS = {
    "train_dataset": "tasks",
    "eval_dataset": "eval_tasks",
    "reward_funcs": "reward",
    "learning_rate": "lr",
    "num_generations": "group_size",
    "max_completion_length": "max_completion_tokens",
}
"""Argument of TRL's trainers → ours of a call."""


def keyword_values(
    model: type[StrictConfig],
    config: str | Path | Mapping[str, Any],
    own: Mapping[Any, Any],
    keywords: Mapping[str, Any],
    source: keys.KeyPath,
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
    _refuse_unknown(model, keywords, source, arguments)
    merged = Layers(model)
    if isinstance(config, Mapping):
        merged.add(dict(config))
    else:
        merged.read(["@", str(config)])
    merged.add(dict(own))
    for layer in _layers(model, keywords, source, merged.values):
        merged.add(layer)
    refuse(merged.problems)
    return merged.values


def _layers(
    model: type[StrictConfig], keywords: Mapping[str, Any], source: keys.KeyPath, given: Any
) -> Iterator[dict[Any, Any]]:
    for name, value in keywords.items():
        path = _path_of(model, name, source)
        below = path[len(source) :]
        is_sampling = bool(source) and path[: len(source)] == source and below[0] == "sampling"
        if not is_sampling:
            yield keys.nested(path, _plain(value))
            continue
        # Sampling of the section, from which what is measured meanwhile takes it too.
        yield keys.nested((*source[:-2], *below), _plain(value))
        if keys.depth_of((*source, "sampling"), given) > len(source):
            yield keys.nested(path, _plain(value))


def _path_of(model: type[StrictConfig], name: str, source: keys.KeyPath) -> keys.KeyPath:
    if "." in name:
        return keys.key_path(name)
    if name in model.model_fields:
        return (name,)
    if source:
        if name in keys.keys_at(model, source):
            return (*source, name)
        if name in _OF_ROWS:
            return (*source, "taskset", name)
        if name in SamplingConfig.model_fields:
            return (*source, "sampling", name)
    found = [path for path in dict.fromkeys(keys.all_key_paths(model)) if path[-1] == name]
    if len(found) > 1:
        first, second, *_ = map(keys.dotted, found)
        raise ConfigError(
            f"{name} may mean {first} or {second}; write the whole key: "
            f'**{{"{first}": ...}}, or the table: {found[0][0]}={{...}}'
        )
    return found[0] if found else (name,)


def _refuse_unknown(
    model: type[StrictConfig],
    keywords: Mapping[str, Any],
    source: keys.KeyPath,
    arguments: Iterable[str],
) -> None:
    paths = {name: _path_of(model, name, source) for name in keywords if "." not in name}
    wrong = [it for it, path in paths.items() if path == (it,) and it not in model.model_fields]
    known = {str(path[-1]) for path in keys.all_key_paths(model)} | {*arguments}
    if source:
        known |= {*keys.keys_at(model, source), *_OF_ROWS, *SamplingConfig.model_fields}
    refuse(_unknown_keyword(model, name, known) for name in wrong)


def _unknown_keyword(model: type[StrictConfig], name: str, known: set[str]) -> str:
    said = "data" if (name, model) == ("train_dataset", SftConfig) else _SAID_AS.get(name)
    if said is not None:
        return f"{name}: gradus calls it {said}: {said}=..."
    near = nearest(name, sorted(known))
    meant = f"unknown key; did you mean {near}?" if near else unknown_key(model, (name,))
    return f"{name}: {meant}"


def in_keywords(model: type[StrictConfig], source: keys.KeyPath, text: str) -> str:
    """The text with the keywords of a call in the place of keys and options that they set.

    >>> in_keywords(SftConfig, (), "raise optimizer.lr, or use --resume")
    'raise lr, or use resume=True'
    """

    def said(found: re.Match[str]) -> str:
        key, name = found[0], found[0].rpartition(".")[2]
        with contextlib.suppress(ConfigError):
            meant = keys.dotted(_path_of(model, name, source))
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
