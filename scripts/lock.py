"""Print the closed set of pinned packages that the current environment has for gradus."""

import re
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio")
EXTRAS = ("cpu", "data", "plot", "tasks", "reasoning", *TRACKERS, "dev")
TOOLS = ("hatchling", "editables", "gguf", "setuptools")
LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec"}
"""torch is installed by its own line; its family does not match the CPU build."""


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
        sys.stdout.write(f"{name}=={pinned[name]}\n")


if __name__ == "__main__":
    main()
