"""The config schema as text: the help of each command, and the reference in `docs/`."""

from __future__ import annotations

import difflib
import html
import json
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from gradus.config.keys import item_annotation, members, models, type_text
from gradus.config.schema.base import description_of, tag_of
from gradus.config.schema.eval import EvalConfig
from gradus.config.schema.inference import ServeConfig
from gradus.config.schema.run import RunConfig
from gradus.config.schema.sft import SftConfig
from gradus.errors import ConfigError

REQUIRED = "required"
_ENTRY_OF_LIST = "N"
_ENTRY_OF_TABLE = "<name>"
_OR_NONE = " or None"
_VARIANT = "With `type = "
_BOUND_WORDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


@dataclass(frozen=True)
class Key:
    """One key of a section."""

    name: str
    """Its name in a file."""
    type: str
    """What it takes, in words."""
    default: str
    """Its default as JSON, or "required"."""
    text: str
    """Its meaning, from the docstring under the field."""


@dataclass(frozen=True)
class Section:
    """One table of the config."""

    path: str
    """Dotted path; empty for the root. `N` is a place in a list, `<name>` a free name."""
    text: str
    """Its meaning."""
    keys: tuple[Key, ...]
    """Its keys, without the tables below it."""


def sections(model: type[BaseModel], defaults: BaseModel | None = None) -> list[Section]:
    """Every table of a config model in the order of its fields, the root first.

    Defaults are those that hold in place: where a section changes the default of a model that it
    holds, the changed one is listed.
    """
    return list(_walk(model, defaults, path="", text=_first_line(model)))


def _walk(
    model: type[BaseModel], defaults: BaseModel | None, *, path: str, text: str
) -> Iterator[Section]:
    yield Section(path=path, text=text, keys=tuple(_keys(model, defaults).values()))
    for name in _tables(model):
        yield from _below(model, name, defaults, path=path)


def _keys(model: type[BaseModel], defaults: BaseModel | None) -> dict[str, Key]:
    """The keys of a model that hold no table of keys, by name."""
    return {
        name: _key(model, name, defaults)
        for name, field in model.model_fields.items()
        if not models(field.annotation)
    }


def _tables(model: type[BaseModel]) -> list[str]:
    fields = model.model_fields.items()
    return [
        name
        for name, field in fields
        if models(field.annotation) or models(item_annotation(field.annotation))
    ]


def _below(
    model: type[BaseModel], name: str, defaults: BaseModel | None, *, path: str
) -> Iterator[Section]:
    """The sections that one key holds: a table, variants of a table, or entries of a list."""
    field = model.model_fields[name]
    default, text = _default(name, field, defaults), _one_line(description_of(model, name))
    below = f"{path}.{name}" if path else name
    variants = models(field.annotation)
    if variants:
        yield from _table_of(variants, default, path=below, text=text)
    entries = models(item_annotation(field.annotation))
    if entries:
        is_list = any(get_origin(member) is list for member in members(field.annotation))
        place = f"{below}.{_ENTRY_OF_LIST if is_list else _ENTRY_OF_TABLE}"
        yield from _table_of(entries, REQUIRED, path=place, text=text)


def _table_of(
    variants: tuple[type[BaseModel], ...], default: Any, *, path: str, text: str
) -> Iterator[Section]:
    """The sections of a table. Of several variants, what all have is listed once, before them."""
    text = f"{text} Off unless given." if default is None else text
    held = {v: default if isinstance(default, v) else None for v in variants}
    if len(variants) == 1:
        yield from _walk(variants[0], held[variants[0]], path=path, text=text)
        return
    keys = {variant: _keys(variant, held[variant]) for variant in variants}
    first = keys[variants[0]]
    shared = {
        name: key
        for name, key in first.items()
        if name != "type" and all(keys[variant].get(name) == key for variant in variants)
    }
    yield Section(path, text, keys=(_type_key(variants, default), *shared.values()))
    tables = _tables(variants[0])
    for name in tables:
        yield from _below(variants[0], name, held[variants[0]], path=path)
    for variant in variants:
        own = [k for k in keys[variant].values() if k.name not in shared and k.name != "type"]
        yield Section(
            path, f'{_VARIANT}"{tag_of(variant)}"`: {_first_line(variant)}', keys=tuple(own)
        )


def _type_key(variants: tuple[type[BaseModel], ...], default: Any) -> Key:
    """The key that selects one of several variants."""
    chosen = getattr(default, "type", None)
    return Key(
        name="type",
        type=" or ".join(f'"{tag_of(variant)}"' for variant in variants),
        default=REQUIRED if chosen is None else json.dumps(chosen),
        text="Which of them; the sections below list what only one of them takes.",
    )


def _default(name: str, field: FieldInfo, defaults: BaseModel | None) -> Any:
    if defaults is not None:
        return getattr(defaults, name)
    return REQUIRED if field.is_required() else field.get_default(call_default_factory=True)


def _key(model: type[BaseModel], name: str, defaults: BaseModel | None) -> Key:
    field = model.model_fields[name]
    default = _default(name, field, defaults)
    return Key(
        name=name,
        type=_type(field),
        default=REQUIRED if default is REQUIRED else _shown(default),
        text=_one_line(description_of(model, name)),
    )


def _type(field: FieldInfo) -> str:
    """What a key takes, with the range of a number before the `or None`."""
    text = type_text(field.annotation)
    plain = text.removesuffix(_OR_NONE)
    return plain + _bounds(field) + text[len(plain) :]


def _bounds(field: FieldInfo) -> str:
    found = [
        f" {words} {getattr(constraint, name)}"
        for constraint in field.metadata
        for name, words in _BOUND_WORDS.items()
        if getattr(constraint, name, None) is not None
    ]
    return " and".join(found)


def _shown(default: Any) -> str:
    return "None" if default is None else json.dumps(default, default=_as_table)


def _as_table(entry: BaseModel) -> dict[str, Any]:
    tag = tag_of(type(entry))
    return {**({} if tag is None else {"type": tag}), **entry.model_dump(exclude_defaults=True)}


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _first_line(model: type[BaseModel]) -> str:
    return _one_line((model.__doc__ or "").split("\n\n")[0])


def _unrepeated(found: Sequence[Section]) -> Iterator[Section]:
    """The sections without variants that an earlier table has too."""
    seen: set[tuple[str, tuple[Key, ...]]] = set()
    for section in found:
        if section.text.startswith(_VARIANT):
            if (section.text, section.keys) in seen:
                continue
            seen.add((section.text, section.keys))
        yield section


def help_text(model: type[BaseModel], *, width: int) -> str:
    found = _unrepeated(sections(model))
    return "\n\n".join("\n".join(_section(section, width)) for section in found)


_INTRODUCTION = """\
# Configuration

```
gradus rl @ base.toml @ overlay.toml --trainer.optimizer.lr 1e-5 --max-steps 20
```

- Files are TOML or JSON and merge left to right, table by table; every other value replaces the
  earlier one. Another `type` of a table keeps the keys that it has too. Flags apply after all
  files, left to right.
- `--section @ file.toml` puts a file into a section. A word that ends in `.toml` or `.json`
  is a file even without the `@`.
- Flags are key paths in kebab-case: `--trainer.optimizer.max-grad-norm 0.5`. One entry of a list is
  reached by its place, counted from 0: `--orchestrator.train.env.0.group-size 4`.
- `--trainer.deterministic` and `--no-trainer.deterministic` switch a boolean. `None` is the empty
  value, in flags and in quotes in files (a file's "None" in a table of any is text). Lists and
  tables are JSON in flags: `--trainer.optimizer.betas '[0.9, 0.99]'`.
- A key that nothing reads is an error, and so is a value of another type. All errors are reported
  at once, each with file and line, and nothing is started or created (exit code 64).
- `gradus rl --help` lists the keys given most and the sections, `gradus rl --help trainer` one
  section (or one key), `gradus rl --help all` everything.
- `gradus check @ run.toml` says whether a config works on this machine, without a run.
"""


def reference() -> str:
    """The whole of `docs/configuration.md`."""
    parts = [
        _INTRODUCTION,
        *_chapter("gradus rl", RunConfig),
        *_chapter("gradus sft", SftConfig),
        *_chapter("gradus eval", EvalConfig),
        *_chapter("gradus serve", ServeConfig),
    ]
    return "\n".join(parts)


def _chapter(title: str, model: type[BaseModel]) -> Iterator[str]:
    """The most used keys of one command, then all sections, folded by their first two names."""
    command = title.removeprefix("gradus ")
    found = list(_unrepeated(sections(model)))
    yield f"## `{title}`\n"
    if model in MOST_USED:
        holder = {_path(it, key): (it, key) for it in found for key in it.keys}
        yield "Most runs set no more than these:\n"
        yield _table(
            _COLUMNS,
            [
                _row(f"[`{path}`](#{_anchor(command, section)})", key)
                for path, (section, key) in ((path, holder[path]) for path in MOST_USED[model])
            ],
        )
        yield "Every key, by section:\n"
    for name, folded in groupby(found, _fold):
        yield from _folded(name, list(folded), command)


def _fold(section: Section) -> str:
    """The section under which another one is folded: the first two names of its path."""
    return ".".join(section.path.split(f".{_ENTRY_OF_LIST}")[0].split(".")[:2])


def _folded(name: str, found: Sequence[Section], command: str) -> Iterator[str]:
    """Sections that one click opens; Markdown inside HTML needs the empty lines around it."""
    count = sum(len(section.keys) for section in found)
    title = f"<code>[{name}]</code>" if name else "Top level"
    text = re.sub("`(.+?)`", r"<code>\1</code>", html.escape(found[0].text, quote=False))
    keys = "1 key" if count == 1 else f"{count} keys"
    yield f"<details>\n<summary>{title}: {text} ({keys})</summary>\n"
    for section in found:
        heading = f"`[{section.path}]`" if section.path else "Top level"
        yield f'### <a id="{_anchor(command, section)}"></a>{heading}\n'
        yield f"{section.text}\n"
        if section.keys:
            yield _table(_COLUMNS, [_row(f"`{key.name}`", key) for key in section.keys])
    yield "</details>\n"


def _anchor(command: str, section: Section) -> str:
    """What a link to a section ends in: rl-trainer-optimizer, or rl-trainer-optimizer-sgd."""
    variant = re.match(f'{_VARIANT}"([^"]+)"', section.text)
    parts = (command, section.path or TOP, variant[1] if variant else "")
    return re.sub("[^a-z0-9_]+", "-", " ".join(parts).lower()).strip("-")


_COLUMNS = ("key", "type", "default", "meaning")


def _row(name: str, key: Key) -> tuple[str, str, str, str]:
    default = key.default if key.default == REQUIRED else f"`{key.default}`"
    return name, key.type, default, key.text


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    cells = [[cell.replace("|", "\\|") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells) + "\n"


EVERYTHING = "all"
TOP = "top"
_SOURCE = "orchestrator.train.env.N"
_SAMPLING = "orchestrator.train.sampling"
MOST_USED: dict[type[BaseModel], tuple[str, ...]] = {
    RunConfig: (
        *("name", "max_steps", "model.name", "model.max_length_tokens", f"{_SOURCE}.id"),
        *(f"{_SOURCE}.group_size", "orchestrator.groups_per_batch", f"{_SAMPLING}.temperature"),
        *(f"{_SAMPLING}.max_completion_tokens", "orchestrator.train.algo.type"),
        *("trainer.optimizer.lr", "checkpoint.interval_steps"),
    ),
    SftConfig: (
        *("name", "max_steps", "model.name", "model.max_length_tokens", "data.path"),
        *("batch_conversations", "optimizer.lr", "checkpoint.interval_steps"),
    ),
    EvalConfig: (
        *("name", "model.name", "base_url", "env.N.id", "env.N.num_tasks", "env.N.group_size"),
        *("sampling.temperature", "sampling.max_completion_tokens"),
    ),
}
"""Keys that the short help and the reference show first, of the configs that users write."""


def command_help(model: type[BaseModel], command: str, asked: str | None, *, width: int) -> str:
    """The short help, or with `asked` one section, one key or "all"; ConfigError for another name.

    Configs that no user writes are short enough to be shown whole.
    """
    if asked == EVERYTHING or (asked is None and model not in MOST_USED):
        return help_text(model, width=width)
    found = sections(model)
    return _short(model, found, command, width) if asked is None else _one(found, asked, width)


def _short(model: type[BaseModel], found: list[Section], command: str, width: int) -> str:
    keys = {_path(section, key): (section, key) for section in found for key in section.keys}
    lines = ["keys given most:"]
    for path in MOST_USED[model]:
        lines += _entry(*keys[path], width, is_brief=True)
    lines += ["", f"sections (gradus {command} --help SECTION, 'top' or 'all'):"]
    names = dict.fromkeys(section.path for section in found if section.path)
    # What lies below an entry of a list is named by the help of that entry.
    outer = ", ".join(name for name in names if ".N." not in name)
    wrapped = textwrap.wrap(outer, width - 2, break_on_hyphens=False)
    return "\n".join([*lines, *(f"  {line}" for line in wrapped)])


def _one(found: list[Section], asked: str, width: int) -> str:
    name = asked.removeprefix("--").replace("-", "_")
    wanted = "" if name == TOP else name
    # A place in a list may be given as in a flag: env.0.id.
    wanted = ".".join("N" if part.isdecimal() else part for part in wanted.split("."))
    paths = [it.path for it in found] + [_path(it, key) for it in found for key in it.keys]
    wanted = next((path for path in paths if _stands_for(path, wanted)), wanted)
    below = list(dict.fromkeys(it.path for it in found if it.path.startswith(f"{wanted}.")))
    shown = textwrap.wrap(f"below it: {', '.join(below)}", width, break_on_hyphens=False)
    after = ["", *shown] if below and wanted else []
    chosen = [section for section in found if section.path == wanted]
    if chosen:
        return "\n".join([*(it for section in chosen for it in _section(section, width)), *after])
    entries = [
        (section, "\n".join(_entry(section, key, width)))
        for section in found
        for key in section.keys
        if _path(section, key) == wanted
    ]
    different = dict.fromkeys(entry for _, entry in entries)
    if len(different) > 1:
        lines = [line for section, entry in entries for line in (*_title(section, width), entry)]
        return "\n".join([*lines, *after])
    if different:
        return "\n".join([*different, *after])
    named = [path for path in dict.fromkeys(paths) if path.endswith(f".{wanted}")][:3]
    near = below or named or difflib.get_close_matches(wanted, [s.path for s in found], n=3)
    hint = f"; there is {', '.join(near)}" if near else ""
    raise ConfigError(f"no section or key {asked!r}{hint}; --help without a name lists them")


def _stands_for(path: str, asked: str) -> bool:
    """Whether a path is what was asked for, with a name of the user's own for each `<name>`."""
    return bool(re.fullmatch(re.sub("<[^>]*>", "[^.]+", path.replace(".", r"\.")), asked))


def _title(section: Section, width: int) -> list[str]:
    title = f"[{section.path}]" if section.path else "[top level]"
    return textwrap.wrap(f"{title} {section.text}", width)


def _section(section: Section, width: int) -> Iterator[str]:
    yield from _title(section, width)
    for key in section.keys:
        yield from _entry(section, key, width)


def _entry(section: Section, key: Key, width: int, *, is_brief: bool = False) -> Iterator[str]:
    """A flag with its type and default, and what it means; only its first sentence if brief."""
    flag = f"--{_path(section, key)}".replace("_", "-")
    default = REQUIRED if key.default == REQUIRED else f"default: {key.default}"
    yield f"  {flag}  {key.type}, {default}"
    text = re.split(r"(?<=\.) (?=[A-Z])", key.text)[0] if is_brief else key.text
    yield from (f"      {line}" for line in textwrap.wrap(text, width - 6))


def _path(section: Section, key: Key) -> str:
    return f"{section.path}.{key.name}" if section.path else key.name
