"""Print the closed set of pinned packages that the current environment has for gradus.

With each version come the digests of its files for the systems that gradus runs on, as pip's own
index has them.
"""

import json
import re
import sys
import tomllib
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.tags import Tag
from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    parse_sdist_filename,
    parse_wheel_filename,
)
from packaging.version import Version
from pip._internal.models.index import PyPI

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio")
EXTRAS = ("cpu", "data", "images", "plot", "tasks", "reasoning", *TRACKERS, "dev")
TOOLS = ("hatchling", "editables", "gguf", "setuptools")
LEFT_OUT = {"torch", "torchaudio", "torchcodec"}
"""torch is installed by its own line; the other two do not match the CPU build, and torchvision is
there for its Python part."""
PYTHON = re.compile(r"py3|py2\.py3|(?:cp31[1-9]|cp3\d*)")
PLATFORM = re.compile(r"any|(?:manylinux|linux|macosx).*_(?:x86_64|aarch64|arm64|universal2)")
INDEX_SECONDS = 60.0


def digests(name: str, version: str) -> list[str]:
    """SHA-256 of the source and of every wheel of a version that one of our systems may install."""
    request = urllib.request.Request(
        f"{PyPI.simple_url}/{name}/", headers={"Accept": "application/vnd.pypi.simple.v1+json"}
    )
    with urllib.request.urlopen(request, timeout=INDEX_SECONDS) as answer:
        files = json.load(answer)["files"]
    wanted = Version(version)
    return sorted({it["hashes"]["sha256"] for it in files if is_wanted(it["filename"], wanted)})


def is_wanted(file: str, wanted: Version) -> bool:
    if not file.endswith(".whl"):
        return file.endswith(".tar.gz") and version_of_source(file) == wanted
    return any(
        PYTHON.fullmatch(tag.interpreter)
        and (tag.abi in {"none", "abi3", tag.interpreter})
        and PLATFORM.fullmatch(tag.platform)
        for tag in tags_of(file, wanted)
    )


def tags_of(file: str, wanted: Version) -> Iterator[Tag]:
    """The systems that a wheel of the wanted version is for."""
    with suppress(InvalidWheelFilename):
        _, version, _, tags = parse_wheel_filename(file)
        if version == wanted:
            yield from tags


def version_of_source(file: str) -> Version | None:
    with suppress(InvalidSdistFilename):
        return parse_sdist_filename(file)[1]
    return None


def closure(roots: list[str]) -> dict[str, str]:
    """Name and version of every installed package that the roots need."""
    found: dict[str, str] = {}
    todo = [Requirement(root) for root in roots]
    seen: set[tuple[str, frozenset[str]]] = set()
    while todo:
        wanted = todo.pop()
        name = re.sub(r"[-_.]+", "-", wanted.name).lower()
        extras = frozenset(wanted.extras)
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        try:
            installed = distribution(wanted.name)
        except PackageNotFoundError:
            continue
        found[name] = installed.version
        for line in installed.requires or []:
            need = Requirement(line)
            marker = need.marker
            if marker is None or any(marker.evaluate({"extra": e}) for e in ("", *extras)):
                todo.append(need)
    return found


def main() -> None:
    roots = list(PROJECT["dependencies"]) + list(TOOLS)
    for extra in EXTRAS:
        roots += PROJECT["optional-dependencies"][extra]
    pinned = closure(roots)
    for name in sorted(pinned.keys() - LEFT_OUT):
        lines = [f"{name}=={pinned[name]}"]
        lines += [f"    --hash=sha256:{digest}" for digest in digests(name, pinned[name])]
        sys.stdout.write(" \\\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
