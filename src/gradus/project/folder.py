"""A folder that is written whole or not at all, from templates."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from string import Template

from gradus.errors import ConfigError
from gradus.files import DISK_ERRORS, storage_error


@dataclass(frozen=True)
class ProjectNames:
    """How a folder and the task set in it are called."""

    name: str
    task_id: str

    @property
    def module(self) -> str:
        return self.task_id.replace("-", "_")

    @property
    def values(self) -> dict[str, str]:
        """For templates."""
        return {"name": self.name, "task_id": self.task_id, "module": self.module}


@contextmanager
def staged(folder: Path) -> Iterator[Path]:
    """A folder that takes the place of the wanted one when all went well.

    In an empty one that is there it lies, and what it holds moves up: a shell may stand there.

    ConfigError where it cannot be made, StorageError where the disk is full; what stood there,
    nothing or an empty folder, stays so.
    """
    target = folder.resolve()
    is_there = target.is_dir()
    above = target if is_there else next(it for it in target.parents if it.is_dir())
    try:
        with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=above) as outer:
            stage = Path(outer, target.name)
            stage.mkdir()
            yield stage
            target.parent.mkdir(parents=True, exist_ok=True)
            for made in stage.iterdir() if is_there else ():
                made.rename(target / made.name)
            if not is_there:
                stage.rename(target)
    except OSError as error:
        if error.errno in DISK_ERRORS:
            raise storage_error(error, folder) from error
        problem = error.strerror or str(error)
        raise ConfigError(f"{folder} cannot be written: {problem}; choose another place") from error


def fill(folder: Path, files: Mapping[str, str], values: Mapping[str, str]) -> list[Path]:
    """Fill templates in; `files` are templates → names of files."""
    written = []
    for template, file in files.items():
        source = resources.files("gradus").joinpath("templates", f"{template}.template")
        path = folder / file.format(**values)
        text = Template(source.read_text(encoding="utf-8")).substitute(values)
        path.write_text(text, encoding="utf-8")
        written.append(path)
    return written
