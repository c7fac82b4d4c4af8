"""What `--help` prints of a config: the keys given most with the sections, or one section."""

from __future__ import annotations

import difflib
import re
import textwrap
from collections.abc import Iterator

from pydantic import BaseModel

from gradus.config.document import REQUIRED, Key, Section, help_text, option_sections, sections
from gradus.config.eval import EvalConfig
from gradus.config.run import RunConfig
from gradus.config.sft import SftConfig
from gradus.errors import ConfigError

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
"""Keys that the short help shows, of the configs that users write."""


def command_help(model: type[BaseModel], command: str, asked: str | None, *, width: int) -> str:
    """The short help, or with `asked` one section, one key or "all"; ConfigError for another name.

    Configs that no user writes are short enough to be shown whole.
    """
    if asked == EVERYTHING or (asked is None and model not in MOST_USED):
        return help_text(model, width=width)
    found = [*sections(model), *option_sections(model)]
    return _short(model, found, command, width) if asked is None else _one(found, asked, width)


def _short(model: type[BaseModel], found: list[Section], command: str, width: int) -> str:
    """The most used keys in full and the name of every section."""
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
    """The keys of one section and the names of those below it, or one key."""
    name = asked.removeprefix("--").replace("-", "_")
    wanted = "" if name == TOP else name
    # A place in a list may be given as in a flag: env.0.id.
    wanted = ".".join("N" if part.isdecimal() else part for part in wanted.split("."))
    chosen = [section for section in found if section.path == wanted]
    if chosen:
        lines = [line for section in chosen for line in _section(section, width)]
        below = [s.path for s in found if s.path.startswith(f"{wanted}.") and wanted]
        if below:
            text = f"below it: {', '.join(dict.fromkeys(below))}"
            lines += ["", *textwrap.wrap(text, width, break_on_hyphens=False)]
        return "\n".join(lines)
    entries = [
        "\n".join(_entry(section, key, width))
        for section in found
        for key in section.keys
        if _path(section, key) == wanted
    ]
    if entries:
        return "\n".join(dict.fromkeys(entries))
    below = sorted({s.path for s in found if s.path.startswith(f"{wanted}.")})
    near = below or difflib.get_close_matches(wanted, [s.path for s in found], n=3)
    hint = f"; there is {', '.join(near)}" if near else ""
    raise ConfigError(f"no section or key {asked!r}{hint}; --help without a name lists them")


def _section(section: Section, width: int) -> Iterator[str]:
    title = f"[{section.path}]" if section.path else "[top level]"
    yield from textwrap.wrap(f"{title} {section.text}", width)
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
