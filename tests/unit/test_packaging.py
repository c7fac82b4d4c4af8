"""What the wheel holds: names that nobody else uses, and everything that an installation needs."""

from __future__ import annotations

import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
from hatchling.build import build_wheel

ROOT = Path(__file__).parents[2]


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_no_text_sends_a_user_to_the_package_of_a_stranger() -> None:
    texts = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "src").rglob("*.py")]
    texts += [*(ROOT / "environments").rglob("*.py"), *(ROOT / "examples").rglob("*.md")]
    wrong = [path.name for path in texts if "gradus[" in path.read_text()]
    assert (project()["project"]["name"], wrong) == ("gradus-rl", [])


def test_the_wheel_holds_templates_types_and_task_sets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    wheel = tmp_path / build_wheel(str(tmp_path))
    names = set(zipfile.ZipFile(wheel).namelist())
    assert wheel.name.startswith("gradus_rl-")
    # A module of another name could overwrite somebody else's file.
    assert {name.split("/")[0].split("_")[0] for name in names} == {"gradus"}
    assert names >= {
        "gradus/py.typed",
        "gradus/templates/rl.toml.template",
        "gradus/templates/tasks.py.template",
        "gradus_reverse_text/taskset.py",
        "gradus_chat/__init__.py",
    }
