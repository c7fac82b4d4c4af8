"""What the wheel holds: names that nobody else uses, and everything that an installation needs."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_no_module_of_the_wheel_can_overwrite_one_of_another_package() -> None:
    packages = project()["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert {Path(package).name.split("_")[0] for package in packages} == {"gradus"}


def test_no_text_sends_a_user_to_the_package_of_a_stranger() -> None:
    texts = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "src").rglob("*.py")]
    texts += [*(ROOT / "environments").rglob("*.py"), *(ROOT / "examples").rglob("*.md")]
    wrong = [path.name for path in texts if "gradus[" in path.read_text()]
    assert (project()["project"]["name"], wrong) == ("gradus-rl", [])
