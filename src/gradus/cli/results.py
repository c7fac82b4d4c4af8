"""Commands about runs that read their folders: view, compare, export."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradus.cli.options import take_options, take_value, take_values, wants_help, whole_number
from gradus.errors import ConfigError, CorruptStateError, ExitCode
from gradus.log import printable

SWEEP_FILE = "sweep.json"
"""In the folder of a sweep: its cells, and what they run."""

if TYPE_CHECKING:
    from gradus.report.series import Axis
    from gradus.view.shelf import Shelf


COMPARE_HELP = """\
usage: gradus compare RUN RUN ... [--metric PATTERN ...] [--last K] [--out FILE.png] [--json]
       gradus compare RUN RUN ... --against RUN RUN ...
       gradus compare SWEEP
       gradus compare EVALUATION EVALUATION [--json]

Shows metrics of runs side by side: first, last and best number, the mean of the last steps, its
difference to the first run with a 95 % interval, and the settings that differ. With --against,
the runs before it and after it are two settings with a run for each seed, and the interval is over
runs.

Two evaluations are compared task by task: the mean difference of the reward with its interval, for
each source, on how many tasks the second is better, the same or worse, and whether it is noise.

  --metric PATTERN   which metrics, with * and ?; may be given again
  --last K           steps at the end that are averaged; without it 50, or half of the shortest run
  --at AXIS          where they are compared: the last of steps, tokens, minutes or episodes
                     that all runs reached, or end: each run at its own end
  --against RUN ...  runs of the second setting
  --out FILE.png     draw the curves too; needs the extra 'plot'
  --over AXIS        what the curves run over: steps (the default), tokens, minutes or episodes
  --json             print JSON"""


def compare(words: Sequence[str]) -> int:
    if wants_help(words) or not words:
        print(COMPARE_HELP)
        return ExitCode.DONE if words else ExitCode.CONFIG
    options, rest = take_options(words, {"--json": ""})
    wants = "the name of a metric, or a pattern such as 'loss/*',"
    patterns, rest = take_values(rest, "--metric", wants=wants)
    last, rest = take_value(rest, "--last", wants="a number of steps")
    out, rest = take_value(rest, "--out", wants="the name of a file that ends with .png")
    over, rest = take_value(rest, "--over", wants="steps, tokens, minutes or episodes")
    at, rest = take_value(rest, "--at", wants="steps, tokens, minutes, episodes or end")
    first, second = _settings(rest)
    if over is not None and out is None:
        raise ConfigError("--over says what a picture's curves run over; give --out FILE.png too")
    if out is not None and not out.endswith(".png"):
        raise ConfigError(f"--out {out}: the picture is a PNG; end the name with .png")
    if out is not None and importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--out needs matplotlib: pip install 'gradus-rl[plot]'")

    from gradus.files import write_atomically
    from gradus.report.compare import as_json, as_lines
    from gradus.report.compare import compare as compare_runs
    from gradus.report.paired import are_evaluations

    is_plain = not (second or patterns or last or out or at)
    if is_plain and len(first) == 2 and are_evaluations(first):
        return _compare_pairs(*first, is_json=bool(options))

    axis = _axis(over)
    place = None if at == "end" else _axis(at, "--at")
    comparison = compare_runs(
        first, second, patterns=patterns, last=whole_number("--last", last), at=place
    )
    if options:
        print(json.dumps(as_json(comparison), indent=1))
    else:
        print("\n".join(printable(line) for line in as_lines(comparison)))
    if out is not None:
        from gradus.report.picture import draw

        write_atomically(Path(out), draw(comparison, over=axis))
        if not options:
            print(f"\n{'picture':<12}{out}")
    return ExitCode.DONE


def _compare_pairs(first: Path, second: Path, *, is_json: bool) -> int:
    from gradus.report.paired import compare_pairs, pair_lines, pairs_as_json

    pairs = compare_pairs(first, second)
    if is_json:
        print(json.dumps(pairs_as_json(pairs), indent=1))
    else:
        print("\n".join(map(printable, pair_lines(pairs))))
    return ExitCode.DONE


def _settings(words: Sequence[str]) -> tuple[list[Path], list[Path]]:
    """The runs before `--against` and those after it."""
    place = words.index("--against") if "--against" in words else len(words)
    first, second = _folders(words[:place]), _folders(words[place + 1 :])
    if place < len(words) and not (first and second):
        raise ConfigError("--against stands between the runs of one setting and those of another")
    if len(first) + len(second) < 2:
        raise ConfigError("which runs? Name two or more, the one to compare with first")
    return first, second


VIEW_HELP = """\
usage: gradus view [RUN_OR_FOLDER ...] [--port N] [--open] [--talk URL ... [--key-var VAR]]
       gradus view RUN --export FILE.html|FOLDER [--where FILTER] [--max-episodes N]
       gradus view RUN --list [--where FILTER] [--sort [-]COLUMN] [--limit N]
                              [--tokens NUMBER | --json]
       gradus view RUN --to TRACKER [--name NAME] [--option value ...]
       gradus view --grafana FILE | --rules FILE

Shows runs in a browser: state, curves, every episode with its tokens; finished, crashed or while
they go on. Without a name all runs of runs/. Reads only, and answers on this machine alone to
whoever has the address that it prints. Ctrl-C ends it.

  --port N    the port; without it a free one
  --open      open a browser too
  --talk URL  a server to talk to, such as that of gradus serve; two answer side by side
  --key-var VAR  the variable that holds its key

With --export it writes one page, or a folder of plain files, that opens from a disk or any server
of files and loads nothing else: all curves, and the newest episodes with their tokens and groups.
What may be a secret is taken out.

  --export FILE.html  one file; any other name is that of a new folder
  --where FILTER      SQL, such as "reward < 0.2 and (staleness > 2 or outcome != 'finished')"
  --max-episodes N    how many at most; without it 500 in a folder and 100 in a file

With --list it prints episodes, newest first: step (of an evaluation: version), reward, advantage,
tokens, replies, staleness, end.

  --sort COLUMN    by which column; - before its name for the largest first
  --limit N        how many; 20 without it, with --json all
  --tokens NUMBER  what was sampled, coloured on a terminal by engine, trainer, mismatch, entropy,
                   advantage, weight, push or version, and the tokens that stand out most
  --json           a line of JSON for each episode

With --to it sends a finished run to a tracker, or a running one until it ends: what the tracker
has not got. TRACKER is the name of a [[monitor]] of the run, whose options hold then, or a type:
tensorboard, wandb, mlflow, trackio, or package.module:Class. Exit code 75 when it is not reached:
nothing is lost, and the same command continues.

  --name NAME     a second place of the same type, with a separate note of what was sent
  --option value  options of the tracker, such as --project; docs/configuration.md lists them
  --grafana FILE  write a dashboard of runs for Grafana, on the numbers of "prometheus"
  --rules FILE    write rules by which Prometheus alerts of alarms, and of runs that stop"""


def view(words: Sequence[str]) -> int:
    if wants_help(words):
        print(VIEW_HELP)
        return ExitCode.DONE
    flags = {word.partition("=")[0] for word in words}
    if "--list" in flags:
        return _list(words)
    if flags & {"--to", *_PACKAGED}:
        return _track(words)
    word, rest = take_value(words, "--port", wants="a number")
    taken, rest = take_options(rest, {"--open": ""})
    urls, rest = take_values(rest, "--talk", wants="the address of a server")
    key_var, rest = take_value(rest, "--key-var", wants="the name of a variable")
    folder, rest = take_value(
        rest, "--export", wants="the name of a file that ends with .html, or of a new folder"
    )
    where, rest = take_value(rest, "--where", wants="a filter such as 'reward < 0.2'")
    most, rest = take_value(rest, "--max-episodes", wants="a number of episodes")
    if folder is None and (where or most):
        raise ConfigError("--where and --max-episodes say what --export FOLDER writes; give it too")
    if folder is not None and (word or taken or urls):
        raise ConfigError("--export serves nothing: leave --port, --open and --talk out")
    if key_var is not None and not urls:
        raise ConfigError("--key-var names the key of --talk URL; give the URL too")
    if word is not None and not (word.isdecimal() and 0 < int(word) < 65536):
        raise ConfigError(f"--port {word}: give a number from 1 to 65535")

    import asyncio
    import webbrowser

    from gradus.view.screens.talk import targets_of
    from gradus.view.server import serve
    from gradus.view.shelf import open_shelf

    talks = targets_of(urls, os.environ, key_var)

    shelf = open_shelf(_folders(rest))
    if folder is not None:
        return _export_view(shelf, Path(folder), where or "", most)

    def announce(port: int, address: str) -> None:
        runs = "1 run" if len(shelf.runs) == 1 else f"{len(shelf.runs)} runs"
        print(f"{runs}: {address}")
        print(f"from another machine first: ssh -L {port}:127.0.0.1:{port} {socket.gethostname()}")
        print("Ctrl-C ends it", flush=True)
        if taken:
            webbrowser.open(address)

    os.nice(10)  # A run on this machine goes first.
    asyncio.run(serve(shelf, port=int(word or 0), announce=announce, talks=talks))
    return ExitCode.DONE


def _list(words: Sequence[str]) -> int:
    """Print the episodes of a run that were chosen."""
    _, rest = take_options(words, {"--list": ""})
    where, rest = take_value(rest, "--where", wants="a filter such as 'reward < 0.2'")
    sort, rest = take_value(rest, "--sort", wants="the name of a column")
    limit, rest = take_value(rest, "--limit", wants="a number of episodes")
    colour, rest = take_value(rest, "--tokens", wants="a number of tokens, such as mismatch,")
    taken, rest = take_options(rest, {"--json": ""})
    if len(runs := _folders(rest)) != 1:
        raise ConfigError(f"name the folder of one run, not {len(runs)}")
    if colour is not None and taken:
        raise ConfigError("--tokens and --json: choose one; from Python load_run(...).tokens")

    from gradus.report.folder import read_folder
    from gradus.view import terminal
    from gradus.view.index import EXPRESSION

    run_dir = read_folder(runs[0]).run_dir
    number = whole_number("--limit", limit) or (None if taken else 20)
    index = terminal.whole_index(run_dir)
    filters = {EXPRESSION: [where or ""]}
    rows = terminal.shown_rows(index, filters, sort or "", number)
    lines: Iterable[str]
    if taken:
        lines = map(json.dumps, rows)
    elif colour is not None:
        is_coloured = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        lines = terminal.token_lines(index, rows, colour, is_coloured=is_coloured)
    else:
        lines = terminal.table_lines(index, rows, index.count(filters))
    for line in lines:
        print(line)
    return ExitCode.DONE


def _export_view(shelf: Shelf, folder: Path, where: str, most: str | None) -> int:
    import asyncio

    from gradus.files import write_atomically
    from gradus.view.export import MAX_EPISODES, MAX_IN_A_FILE, collect, refuse_place

    refuse_place(folder, shelf)
    is_file = folder.suffix == ".html"
    number = whole_number("--max-episodes", most) or (MAX_IN_A_FILE if is_file else MAX_EPISODES)
    found = asyncio.run(collect(shelf, where=where, max_episodes=number))
    left = f"; {found.num_left_out:,} left out (--max-episodes)" if found.num_left_out else ""
    if is_file:
        page = found.page()
        print(
            f"{len(page) / (1 << 20):.1f} MiB, {len(found.episodes):,} episodes{left}", flush=True
        )
        write_atomically(folder, page)
        print(folder)
        return ExitCode.DONE
    size = f"{len(found.files)} files, {found.num_bytes / (1 << 20):.1f} MiB"
    print(f"{size}, {len(found.episodes):,} episodes{left}", flush=True)
    found.write(folder)
    print(folder / "index.html")
    return ExitCode.DONE


def _track(words: Sequence[str]) -> int:
    """Send a run to a tracker, or write what Prometheus and Grafana take."""
    from gradus.config import TrackConfig, load_config

    name, rest = take_value(words, "--to", wants="the name or the type of a tracker")
    for flag in _PACKAGED:
        path, others = take_value(words, flag, wants="the name of a file")
        if path is not None:
            return _write_packaged(flag, Path(path), others)
    if name is None or not rest or rest[0].startswith("-"):
        raise ConfigError(f"expected the folder of a run, and --to\n{VIEW_HELP}")

    from gradus.log import configure_logging
    from gradus.run.lease import is_in_use, run_at
    from gradus.tracking.follow.process import choose_monitor, send_run

    run_dir = run_at(rest[0])
    given = [f"--monitor.{word[2:]}" if word.startswith("--") else word for word in rest[1:]]
    config = load_config(TrackConfig, given, base={"monitor": choose_monitor(run_dir, name)})
    if config.monitor.type == "prometheus" and not is_in_use(run_dir):
        raise ConfigError(
            f"{run_dir.root} has ended, and Prometheus asks for numbers while a run writes them: "
            "choose another tracker, or gradus view"
        )
    configure_logging("track")
    num_sent = send_run(run_dir, config.monitor)
    print(f"{config.monitor.title} has all of {run_dir.root}; {num_sent} records were sent now")
    if given and not num_sent:
        print("with --name NAME they are sent to a second place of this type")
    return ExitCode.DONE


_PACKAGED = {
    "--grafana": ("dashboard.json", "in Grafana: Dashboards, New, Import"),
    "--rules": ("rules.yml", "in prometheus.yml: rule_files"),
}
"""What is written for others' programs: the file, and where it goes."""


def _write_packaged(flag: str, path: Path, others: Sequence[str]) -> int:
    from importlib.resources import files

    from gradus.files import write_atomically

    if others or path.is_dir():
        raise ConfigError(f"{flag} {path}: expected the name of a file, and nothing else")
    name, place = _PACKAGED[flag]
    write_atomically(path, files("gradus.tracking.prometheus").joinpath(name).read_bytes())
    print(f"{path}  {place}")
    return ExitCode.DONE


BEST, PUSH, PRIVATE = "--best", "--push", "--private"
EXPORT_HELP = """\
usage: gradus export RUN_OR_CHECKPOINT DIRECTORY [--best] [--push owner/name [--private]]

Writes the newest checkpoint of a run (runs/NAME), or the one that is named
(runs/NAME/checkpoints/step_00000100), as a Hugging Face model directory; of a run without a
checkpoint the newest version that it published. Every byte is verified first; adapters are added
into the weights.

  --best             of a run with evaluations: the evaluated version with the highest average
                     reward instead of the newest; of equal ones the first
  --push owner/name  then upload the directory to that repository of the hub, which is made when
                     there is none; needs a token that may write (HF_TOKEN, or `hf auth login`)
  --private          make the repository private, and refuse one that is public"""


def export(words: Sequence[str]) -> int:
    if wants_help(words):
        print(EXPORT_HELP)
        return 0
    name, rest = take_value(words, PUSH, wants="owner/name")
    taken, rest = take_options(rest, {BEST: "", PRIVATE: ""})
    if len(rest) != 2 or any(word.startswith("-") for word in rest):
        raise ConfigError(f"expected a run or a checkpoint, and a directory\n{EXPORT_HELP}")
    if PRIVATE in taken and name is None:
        raise ConfigError("--private says how --push uploads; give --push owner/name too")
    source, directory = Path(rest[0]), Path(rest[1])
    if not source.is_dir():
        raise ConfigError(f"{source}: no such directory (seen from {Path.cwd()})")
    from gradus.log import configure_logging

    configure_logging("export")

    from gradus.trainer import export as exporting

    # A name or a token that no hub accepts is refused before an export that may take minutes.
    repository = None if name is None else exporting.open_repository(name, private=PRIVATE in taken)
    if BEST in taken:
        best = exporting.export_best(source, directory)
        step = best.version
        print(f"best: {best}", flush=True)
    else:
        step = exporting.export(source, directory)
    print(f"{directory} holds the weights after {step} steps", flush=True)
    if repository is not None:
        address = exporting.push(
            directory, repository, message=f"Weights after {step} steps of gradus"
        )
        print(f"{address} holds them too")
    return 0


def _folders(words: Sequence[str]) -> list[Path]:
    wrong = [word for word in words if word.startswith(("-", "@"))]
    if wrong:
        raise ConfigError(f"{wrong[0]} is not an option here; see --help")
    return [folder for word in words for folder in _cells(Path(word))]


def _cells(folder: Path) -> list[Path]:
    """The runs of a sweep that have begun, in its order; any other folder as it is."""
    grid = folder / SWEEP_FILE
    if not grid.is_file():
        return [folder]
    cells = [folder / name for name in read_grid(grid)["cells"]]
    return [cell for cell in cells if (cell / "metrics.jsonl").is_file()]


def read_grid(path: Path) -> dict[str, Any]:
    """What `gradus lab sweep` wrote down; CorruptStateError for a file that it did not write."""
    from gradus.files import read_json

    grid = read_json(path)
    names = grid.get("cells") if isinstance(grid, dict) else None
    if not isinstance(names, list) or not all(
        isinstance(it, str) and Path(it).name == it for it in names
    ):
        raise CorruptStateError(
            f"{path} does not list the cells of a sweep; restore it, or delete it and name their "
            "folders one by one"
        )
    return dict(grid)


def _axis(word: str | None, option: str = "--over") -> Axis:
    from gradus.report.series import AXES

    if word is None:
        return AXES[0]
    found = next((axis for axis in AXES if axis == word), None)
    if found is None:
        known = ", ".join([*AXES, *(["end"] if option == "--at" else [])])
        raise ConfigError(f"{option} {word}: choose one of {known}")
    return found
