"""`gradus report`: what a run did, read from its folder while it runs or later."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gradus.cli.options import take_value, wants_help
from gradus.errors import ConfigError, ExitCode

if TYPE_CHECKING:
    from gradus.report.series import Axis

REPORT_HELP = """\
usage: gradus report RUN [--out FILE.html] [--over steps|tokens|minutes]

Writes one page about a run, finished, crashed or running: curves, settings, episodes before and
after, alarms, where the time went, failures. The page is one file that loads nothing and runs no
script. It shows texts of prompts and replies.

  --out FILE    where to write it; without it report.html in the folder of the run
  --over AXIS   what the curves run over: steps (the default), tokens or minutes"""


def report(words: Sequence[str]) -> int:
    """`gradus report`: write the page of a run."""
    if wants_help(words) or not words:
        print(REPORT_HELP)
        return ExitCode.DONE if words else ExitCode.CONFIG
    out, rest = take_value(words, "--out", wants="the name of a file")
    over, rest = take_value(rest, "--over", wants="steps, tokens or minutes")
    runs = _folders(rest)
    if len(runs) != 1:
        raise ConfigError(f"a report is about one run, not {len(runs)}; see 'gradus compare'")

    from gradus.files import write_atomically
    from gradus.report.page.render import read_run, render

    page = render(read_run(runs[0]), over=_axis(over))
    path = Path(out) if out is not None else runs[0] / "report.html"
    if path.is_dir():
        raise ConfigError(f"--out {path} is a folder; name a file")
    write_atomically(path, page.encode())
    print(f"{path}  {len(page.encode()) / 1024:,.0f} KiB")
    return ExitCode.DONE


def _folders(words: Sequence[str]) -> list[Path]:
    wrong = [word for word in words if word.startswith(("-", "@"))]
    if wrong:
        raise ConfigError(f"{wrong[0]} is no option here; see --help")
    return [Path(word) for word in words]


def _axis(word: str | None) -> Axis:
    from gradus.report.series import AXES

    if word is None:
        return AXES[0]
    found = next((axis for axis in AXES if axis == word), None)
    if found is None:
        raise ConfigError(f"--over {word}: choose one of {', '.join(AXES)}")
    return found
