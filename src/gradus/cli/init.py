"""`gradus init`: a folder with configs, tasks, a reward and their test that run as they are.

`gradus env init`: a task set of its own, without a model.
"""

from __future__ import annotations

import keyword
import os
import re
import shlex
import shutil
import textwrap
from collections.abc import Sequence
from pathlib import Path

from gradus.cli.options import take_options, take_value, wants_help
from gradus.errors import ConfigError
from gradus.installed import PLAYED, has_plugin
from gradus.plan.gpus import find_gpus
from gradus.project.folder import ProjectNames, fill, staged
from gradus.project.kinds import KINDS, DataWish, Wish

USAGE = """\
usage: gradus init FOLDER [--from DATA] [--subset S] [--split S] [--reward FILE.py:FUNCTION]
                          [--tools | --multi-turn | --agent] [--model NAME_OR_FOLDER]

Writes FOLDER with a config for each stage (eval.toml, sft.toml where there are answers, rl.toml),
the tasks, their reward and its test. Each number in a config stands with its reason. Without
options: a demo in which a tiny untrained model learns to say words. Needs no hub.

  --from DATA        your rows, with a prompt (or question, messages, ...) and, where you have
                     them, an answer or choices: a file (.jsonl, .json, .csv, .tsv, .parquet, also
                     as .gz), a folder, or a data set of the hub; a tenth is held out
  --subset S         of a folder or a hub data set, such as main; --split S likewise (train)
  --reward F.py:FUN  what rates a reply, e.g. def score(reply, row): return 1.0 if ... else 0.0;
                     without it a reply is compared with the answer
  --tools            the model may call tools, of which a calculator is written to change
  --multi-turn       the model may try again after a wrong reply
  --agent            a program that asks an OpenAI endpoint plays; one is written to change
  --model M          the model: a folder, or a name on the hub; without it a tiny untrained one

The name of the folder names the task set: letters, digits, - and _, a letter first."""
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")


NEW_TASK_SET = {
    "task_set.py": "{module}.py",
    "task_set_test.py": "test_{module}.py",
    "task_set.md": "README.md",
    "task_set.toml": "rl.toml",
    "task_set_project.toml": "pyproject.toml",
}
"""Template of `gradus env init` → the file that it becomes."""


def run(words: Sequence[str]) -> int:
    if wants_help(words):
        print(USAGE)
        return 0
    path, rest = take_value(words, "--from", wants="a file of rows, a folder or a data set")
    subset, rest = take_value(rest, "--subset", wants="its name")
    split, rest = take_value(rest, "--split", wants="its name")
    data = None if path is None else DataWish(path, split or "train", subset)
    reward, rest = take_value(rest, "--reward", wants="FILE.py:FUNCTION")
    model, rest = take_value(rest, "--model", wants="a folder or a name on the hub")
    flags, rest = take_options(rest, dict.fromkeys(filter(None, KINDS), ""))
    unknown = [word for word in rest if word.startswith("-")]
    if unknown:
        raise ConfigError(f"there is no option {unknown[0]}\n{USAGE}")
    if len(rest) != 1:
        raise ConfigError(f"one folder must be named, not {len(rest)}\n{USAGE}")
    is_demo = not flags and data is None and reward is None
    if is_demo and model is not None:
        raise ConfigError(
            "--model needs tasks: rows of yours (--from), or --tools, --multi-turn or --agent; the "
            "demo is made for its own tiny model"
        )
    folder = Path(rest[0])
    name = _checked_name(folder)
    wish = None if is_demo else Wish.of(sorted(flags), data, reward, model)
    names = ProjectNames(name, f"{name.lower().replace('_', '-')}-tasks")

    from gradus.project.writing import write_demo, write_project

    with staged(folder) as stage:
        told = (
            write_demo(stage, names)
            if wish is None
            else write_project(stage, names, wish, find_gpus(os.environ))
        )
    tries = []
    if wish is not None and wish.kind.starts_programs:
        model = shlex.quote(wish.model or "model")
        tries = [f"gradus agent {model} --task 'some task' -- python agent.py"]
    _tell(folder, told, tries)
    return 0


def _tell(folder: Path, told: Sequence[str], tries: Sequence[str]) -> None:
    width = min(shutil.get_terminal_size((100, 24)).columns, 110) - 1
    where = folder if _entered(folder) else "here"
    written = f"{where}: {', '.join(sorted(path.name for path in folder.iterdir()))}"
    for line in [*told, "", written, ""]:
        print(textwrap.fill(line, width, subsequent_indent="  ", break_long_words=False))
    stages = [name for name in ("eval", "sft", "rl") if (folder / f"{name}.toml").exists()]
    commands = [*_entered(folder), *tries, "gradus check @ rl.toml"]
    commands += [f"gradus {stage} @ {stage}.toml" for stage in stages]
    trained = folder.resolve().name
    if "sft" in stages:
        commands[-1] += f" --model.name runs/{trained}-sft/model"
    commands.append(f"gradus view runs/{trained} --export report.html")
    if "eval" in stages:
        model = f"--name {trained}-after --model.name runs/{trained}/model"
        commands.append(f"gradus eval @ eval.toml {model}")
    commands.append(f"gradus chat runs/{trained}")
    print("\n".join(commands))


def _entered(folder: Path) -> list[str]:
    """The command that enters the folder; none where the shell stands in it."""
    is_here = folder.resolve() == Path.cwd()
    return [] if is_here else [f"cd {shlex.quote(str(folder))}"]


def new_task_set(words: Sequence[str]) -> int:
    """`gradus env init NAME`: a task set to change, with its test, README and config."""
    if len(words) != 1:
        raise ConfigError(f"one task set must be named, not {len(words)}: gradus env init NAME")
    folder = Path(words[0])
    name = _checked_name(folder)
    names = ProjectNames(name, name.lower().replace("_", "-"))
    if has_plugin(names.task_id, PLAYED):
        raise ConfigError(
            f"there is an environment {names.task_id!r} already, and verifiers would find only one "
            "of them; choose another name"
        )
    with staged(folder) as stage:
        written = fill(stage, NEW_TASK_SET, names.values)
    print("\n".join(str(folder / path.name) for path in written))
    commands = [*_entered(folder), f"gradus env check {names.task_id}", "gradus rl @ rl.toml"]
    print("\n".join(["", *commands]))
    return 0


def _checked_name(folder: Path) -> str:
    """The name of a folder that may be written; ConfigError for any other."""
    name = folder.resolve().name
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r} cannot name a task set; use letters, digits, - and _, a letter first"
        )
    if keyword.iskeyword(name):
        raise ConfigError(f"{name!r} is a word of Python's own, no module; choose another name")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is there and not empty; choose another name")
    return name
