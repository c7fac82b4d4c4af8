"""`gradus init`: a folder with a config, a task set and a tiny model that run as they are.

`gradus env init`: a task set of its own, without a model.
"""

from __future__ import annotations

import keyword
import re
import shlex
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from string import Template

from gradus.cli.options import wants_help
from gradus.errors import ConfigError
from gradus.installed import PLAYED, has_plugin

USAGE = """\
usage: gradus init FOLDER

Writes FOLDER with rl.toml, a task set of your own to change, and a tiny untrained model; needs no
hub. The name of the folder names the task set: letters, digits, - and _, a letter first."""
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
    """Write the folder and say what to type next."""
    if wants_help(words):
        print(USAGE)
        return 0
    if len(words) != 1:
        raise ConfigError(f"one folder must be named, not {len(words)}\n{USAGE}")
    folder = Path(words[0])
    tasks = write_project(folder)
    print(
        f"{folder}/rl.toml  the run\n"
        f"{folder}/{tasks.name}  a task set to change\n"
        f"{folder}/model  a tiny untrained model\n\n"
        f"cd {shlex.quote(str(folder))}\ngradus check @ rl.toml\ngradus rl @ rl.toml"
    )
    return 0


def write_project(folder: Path) -> Path:
    """Write config, task set and model; returns the file of the task set.

    ConfigError for a name that gives no module, and for a folder that holds something.
    """
    name = _checked_name(folder)
    task_id = f"{name.lower().replace('_', '-')}-tasks"
    module = task_id.replace("-", "_")
    folder.mkdir(parents=True, exist_ok=True)
    values = {"name": name, "task_id": task_id, "module": module}
    _write(folder, {"rl.toml": "rl.toml", "tasks.py": "{module}.py"}, values)

    from gradus.testing.tiny_model import build_tiny_model

    build_tiny_model(folder / "model", max_length_tokens=256)
    return folder / f"{module}.py"


def new_task_set(words: Sequence[str]) -> int:
    """`gradus env init NAME`: a task set to change, with its test, README and config."""
    if len(words) != 1:
        raise ConfigError(f"one task set must be named, not {len(words)}: gradus env init NAME")
    folder = Path(words[0])
    name = _checked_name(folder)
    task_id = name.lower().replace("_", "-")
    module = task_id.replace("-", "_")
    if has_plugin(task_id, PLAYED):
        raise ConfigError(
            f"there is an environment {task_id!r} already, and verifiers would find only one of "
            "them; choose another name"
        )
    folder.mkdir(parents=True, exist_ok=True)
    written = _write(folder, NEW_TASK_SET, {"name": name, "task_id": task_id, "module": module})
    print("\n".join(str(path) for path in written))
    print(f"\ncd {shlex.quote(str(folder))}\ngradus env check {task_id}\ngradus rl @ rl.toml")
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


def _write(folder: Path, files: Mapping[str, str], values: Mapping[str, str]) -> list[Path]:
    """Fill templates in; `files` are templates → names of files."""
    written = []
    for template, file in files.items():
        source = resources.files("gradus") / "templates" / f"{template}.template"
        path = folder / file.format(**values)
        text = Template(source.read_text(encoding="utf-8")).substitute(values)
        path.write_text(text, encoding="utf-8")
        written.append(path)
    return written
