"""`gradus init`: a folder with a config, a task set and a tiny model that run as they are."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from string import Template

from gradus.cli.options import wants_help
from gradus.errors import ConfigError

USAGE = """\
usage: gradus init FOLDER

Writes FOLDER with rl.toml, a task set of your own to change, and a tiny untrained model; needs no
hub. The name of the folder names the task set: letters, digits, - and _, a letter first."""
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")


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
    name = folder.resolve().name
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r} cannot name a task set; use letters, digits, - and _, a letter first"
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is there and not empty; choose another name")
    task_id = f"{name.lower().replace('_', '-')}-tasks"
    module = task_id.replace("-", "_")
    folder.mkdir(parents=True, exist_ok=True)
    values = {"name": name, "task_id": task_id, "module": module}
    for template, file in (("rl.toml", "rl.toml"), ("tasks.py", f"{module}.py")):
        source = resources.files("gradus") / "templates" / f"{template}.template"
        text = Template(source.read_text(encoding="utf-8")).substitute(values)
        (folder / file).write_text(text, encoding="utf-8")

    from gradus.testing.tiny_model import build_tiny_model

    build_tiny_model(folder / "model", max_length_tokens=256)
    return folder / f"{module}.py"
