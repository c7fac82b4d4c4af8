"""`gradus lab sweep`: a grid of settings and seeds, one run for each cell, in one folder.

A cell is a run of its own below the folder of the sweep, so `compare`, `view` and `report` read it
as any other. The same command again plays only what is missing: a run that ended well is kept, one
that began continues.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from gradus.cli.options import (
    print_help,
    take_options,
    take_value,
    take_values,
    wants_help,
    whole_number,
)
from gradus.cli.results import SWEEP_FILE, compare, read_grid
from gradus.cli.runs import RUN_COMMANDS, kind_of
from gradus.config import RunConfig, load_config
from gradus.errors import ConfigError, CorruptStateError, ExitCode
from gradus.files import read_json, write_json
from gradus.plan.machine import check
from gradus.processes.child import dying_with_parent
from gradus.redact import without_any_secret
from gradus.run.lease import MARKER_NAME
from gradus.run.paths import RunDirectory

SET, SEEDS, PARALLEL, DRY_RUN = "--set", "--seeds", "--parallel", "--dry-run"
OPTIONS = {
    "--set KEY=A,B": "values of a key of the config; again for another key, and all are combined",
    "--seeds N": "so many runs of each, from the seed of the config on",
    "--parallel N": "cells at once; 1 unless given, since they share this machine",
    DRY_RUN: "check every cell and list it, start nothing",
}
SUMMARY = (
    "Runs a grid of settings, each cell as `gradus rl` or `gradus sft`, below output_dir/NAME, and "
    "compares them at the end. The same command again continues: cells that ended well are kept. "
    "Every cell is checked before the first starts. An alarm with action = 'stop' ends its cell."
)
_KEPT = ("done", "solved", "stalled", "alarmed")
"""Outcomes of cells that are not run again."""
_POLL_SECONDS = 0.2
_MOST_CELLS = 1_000
_STOP_SECONDS = 60.0


@dataclass(frozen=True)
class GridCell:
    """One run of the grid."""

    settings: tuple[tuple[str, str], ...]
    seed: int

    @property
    def name(self) -> str:
        """The last word of each key with its value, and the seed."""
        parts = [f"{key.rpartition('.')[2]}-{value}" for key, value in self.settings]
        name = "_".join([*parts, f"seed-{self.seed}"])
        plain = re.sub(r"[^A-Za-z0-9._-]+", "-", name)
        if len(plain) <= 64 and plain == name:
            return name
        digest = hashlib.sha256(json.dumps([self.settings, self.seed]).encode()).hexdigest()[:8]
        return f"{plain[:55].strip('-.')}-{digest}"

    @property
    def words(self) -> list[str]:
        pairs = [(f"--{key}", value) for key, value in (*self.settings, ("seed", str(self.seed)))]
        return list(itertools.chain.from_iterable(pairs))


@dataclass(frozen=True)
class Sweep:
    """A grid, where it lies, and the command of its cells."""

    command: str
    words: list[str]
    """Of all cells, without the name and the folder."""
    folder: Path
    cells: tuple[GridCell, ...]
    config: str
    """Digest of what the words say, files included."""

    def words_of(self, cell: GridCell) -> list[str]:
        place = ["--output-dir", str(self.folder), "--name", cell.name]
        return [*self.words, *cell.words, *place]

    def outcome(self, cell: GridCell) -> str:
        """Of a cell that has ended; empty for one that has not."""
        path = RunDirectory(self.folder / cell.name).summary
        try:
            return str(read_json(path)["outcome"])
        except FileNotFoundError:
            return ""
        except (KeyError, TypeError) as error:
            raise CorruptStateError(f"{path} does not say how its run ended; delete it") from error

    def claim(self) -> None:
        """Write down what is swept; ConfigError where the folder holds another sweep."""
        path = self.folder / SWEEP_FILE
        cells, words = [c.name for c in self.cells], without_any_secret(self.words, os.environ)
        mine = {"command": self.command, "words": words, "cells": cells, "config": self.config}
        if path.exists() and (there := read_grid(path)) != mine:
            changed = ", ".join(key for key in mine if there.get(key) != mine[key])
            raise ConfigError(
                f"{self.folder} holds another sweep ({changed} differ); choose a --name"
            )
        if not path.exists() and self.folder.exists() and any(self.folder.iterdir()):
            raise ConfigError(f"{self.folder} is there already and no sweep; choose another --name")
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(path, mine)


def run(words: Sequence[str]) -> int:
    if wants_help(words):
        print_help("lab sweep [rl|sft]", SUMMARY, RunConfig, OPTIONS, words=words)
        return ExitCode.DONE
    options, rest = take_options(words, {DRY_RUN: ""})
    parallel, rest = take_value(rest, PARALLEL, wants="a number of cells")
    sweep = read_sweep(rest)
    at_once = whole_number(PARALLEL, parallel) or 1
    for cell in sweep.cells:
        kind = RUN_COMMANDS[sweep.command].config
        load_config(kind, sweep.words_of(cell), check=check)
    if DRY_RUN in options:
        print("\n".join(f"{cell.name:<40} {' '.join(cell.words)}" for cell in sweep.cells))
        return ExitCode.DONE
    sweep.claim()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    failed = _play(sweep, at_once)
    if len(sweep.cells) - len(failed) > 1:
        print()
        compare([str(sweep.folder)])
    for cell in failed:
        print(
            f"{cell.name} failed: see {sweep.folder / cell.name}.txt; the same command tries again"
        )
    return ExitCode.INTERNAL if failed else ExitCode.DONE


def read_sweep(words: Sequence[str]) -> Sweep:
    """The grid that a command line describes; ConfigError for one that cannot be made."""
    given, rest = take_values(words, SET, wants="KEY=A,B")
    seeds, rest = take_value(rest, SEEDS, wants="a number of seeds")
    name, rest = take_value(rest, "--name", wants="a name of the sweep")
    command = rest[0] if rest[:1] and rest[0] in ("rl", "sft") else None
    rest = rest[1:] if command else rest
    command = command or kind_of(rest) or "rl"
    if command not in ("rl", "sft"):
        raise ConfigError(f"this is a config of `gradus {command}`; sweep runs rl or sft")
    base = load_config(RUN_COMMANDS[command].config, rest)
    axes = [_axis(it) for it in given]
    keys = [key for key, _ in axes]
    if twice := next((key for key in keys if keys.count(key) > 1), None):
        raise ConfigError(f"{SET} {twice} is given twice; write all values in one")
    if own := {"seed", "name", "output_dir", "output-dir"}.intersection(keys):
        raise ConfigError(f"{SET} {own.pop()}: sweep sets it; use {SEEDS} for seeds")
    combined = itertools.product(*([(key, it) for it in values] for key, values in axes))
    first, count = int(getattr(base, "seed", 0)), whole_number(SEEDS, seeds) or 1
    cells = tuple(GridCell(it, first + n) for it in combined for n in range(count))
    if not axes and count == 1:
        raise ConfigError(f"nothing varies: give {SET} KEY=A,B or {SEEDS} N")
    if len(cells) > _MOST_CELLS:
        raise ConfigError(f"{len(cells):,} cells are more than {_MOST_CELLS:,}; sweep less at once")
    names = [cell.name for cell in cells]
    if len(set(names)) < len(names):
        raise ConfigError(f"a value is given twice in {SET}; each cell must differ")
    digest = hashlib.sha256(json.dumps([command, rest, names]).encode()).hexdigest()[:8]
    chosen = name or base.name or f"sweep--{digest}"
    said = json.dumps(base.model_dump(mode="json", exclude_unset=True), sort_keys=True)
    config = hashlib.sha256(said.encode()).hexdigest()
    return Sweep(command, list(rest), Path(base.output_dir) / chosen, cells, config)


def _axis(given: str) -> tuple[str, list[str]]:
    """Key and values of one `KEY=A,B`; commas inside brackets and quotes part nothing."""
    key, equals, text = given.partition("=")
    values = [it.strip() for it in _parted(text)]
    if not (key and equals) or not all(values):
        raise ConfigError(
            f"{SET} {given}: write KEY=A,B, for example trainer.optimizer.lr=1e-4,3e-4"
        )
    return key.removeprefix("--"), values


def _parted(text: str) -> Iterator[str]:
    depth, quote, start = 0, "", 0
    for place, letter in enumerate(text):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        elif letter in "[{(":
            depth += 1
        elif letter in "]})":
            depth -= 1
        elif letter == "," and depth == 0:
            yield text[start:place]
            start = place + 1
    yield text[start:]


@dataclass
class _Playing:
    """A cell that runs now."""

    cell: GridCell
    child: subprocess.Popen[bytes]
    output: IO[bytes]
    began: float = field(default_factory=time.monotonic)


def _play(sweep: Sweep, at_once: int) -> list[GridCell]:
    """Run every cell that has not ended; those that failed."""
    waiting = [cell for cell in sweep.cells if sweep.outcome(cell) not in _KEPT]
    number = {cell: place for place, cell in enumerate(sweep.cells, 1)}
    for cell in sweep.cells:
        if cell not in waiting:
            _tell(sweep, number[cell], cell, f"{sweep.outcome(cell)} already")
    playing: list[_Playing] = []
    failed: list[GridCell] = []
    try:
        while waiting or playing:
            while waiting and len(playing) < at_once:
                playing.append(_start(sweep, waiting.pop(0)))
                _tell(sweep, number[playing[-1].cell], playing[-1].cell, "starts")
            for it in [it for it in playing if it.child.poll() is not None]:
                playing.remove(it)
                it.output.close()
                outcome = sweep.outcome(it.cell) or f"exit code {it.child.returncode}"
                seconds = time.monotonic() - it.began
                _tell(sweep, number[it.cell], it.cell, f"{outcome} after {seconds:.0f} s")
                if outcome not in _KEPT:
                    failed.append(it.cell)
            time.sleep(_POLL_SECONDS)
    finally:
        _end(playing)
    return failed


def _start(sweep: Sweep, cell: GridCell) -> _Playing:
    """Its process, which continues what was begun; a folder without a marker holds no run yet."""
    begun = (sweep.folder / cell.name / MARKER_NAME).exists()
    words = [sweep.command, *sweep.words_of(cell), *(["--resume"] if begun else [])]
    output = (sweep.folder / f"{cell.name}.txt").open("ab")
    argv = dying_with_parent([sys.executable, "-P", "-m", "gradus.cli.main", *words])
    # In a group of its own Ctrl-C does not reach it: two signals would end it without saving.
    child = subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output, process_group=0
    )
    return _Playing(cell, child, output)


def _end(playing: Sequence[_Playing]) -> None:
    """Ask what still runs to save and end, and wait for it."""
    for it in playing:
        it.child.terminate()
    for it in playing:
        try:
            it.child.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            it.child.kill()
            it.child.wait()
        it.output.close()


def _tell(sweep: Sweep, number: int, cell: GridCell, what: str) -> None:
    print(f"cell {number}/{len(sweep.cells)}  {cell.name}  {what}", flush=True)
