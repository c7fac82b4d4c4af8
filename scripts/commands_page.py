"""docs/look-up/commands.md: what each command says of itself, at 80 columns."""

from __future__ import annotations

import contextlib
import io
import os

from gradus.cli.main import COMMANDS, main

INTRO = """# Commands

What `gradus COMMAND --help` prints. Where a command reads a config, `--help SECTION` shows the keys
of one section and `--help all` every key; all stand in [configuration](../configuration.md).

| exit code | meaning |
|---|---|
| 0 | done |
| 64 | the config, the command line or a file of yours is refused, before anything started |
| 65 | `gradus check`: something that it tried does not work |
| 70 | a process ended, or a mistake of gradus |
| 75 | try again: a full disk, a service that is away, a run that stood still |
| 78 | a file of the run is damaged |
| 130 | Ctrl-C |

`gradus --version` prints the version; `gradus --version --all` what belongs in a report of a bug.
"""


def said_by(*words: str) -> str:
    """What a command prints on a terminal of 80 columns."""
    shown = io.StringIO()
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "80"
    try:
        with contextlib.redirect_stdout(shown):
            main(words)
    finally:
        os.environ.pop("COLUMNS") if before is None else os.environ.update(COLUMNS=before)
    return "\n".join(line.rstrip() for line in shown.getvalue().splitlines())


def page() -> str:
    parts = [INTRO]
    for command, about in COMMANDS.items():
        title = about.summary[0].upper() + about.summary[1:]
        parts.append(
            f"## gradus {command}\n{title}.\n\n```text\n{said_by(command, '--help')}\n```\n"
        )
    return "\n".join(parts)
