"""What the wheel holds: names that nobody else uses, and everything that an installation needs."""

from __future__ import annotations

import re
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
from hatchling.build import build_wheel
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_no_text_sends_a_user_to_the_package_of_a_stranger() -> None:
    texts = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "src").rglob("*.py")]
    texts += [*(ROOT / "environments").rglob("*.py"), *(ROOT / "examples").rglob("*.md")]
    texts += (ROOT / "packages").rglob("*.py")
    wrong = [path.name for path in texts if "gradus[" in path.read_text()]
    assert (project()["project"]["name"], wrong) == ("gradus-rl", [])


def test_the_packages_of_the_workspace_are_of_one_version() -> None:
    root = project()["project"]
    for path in (ROOT / "packages").glob("*/pyproject.toml"):
        own = tomllib.loads(path.read_text())["project"]
        extra = own["name"].removeprefix("gradus-")
        assert own["version"] == root["version"]
        assert f"gradus-rl=={own['version']}" in own["dependencies"]
        assert f"{own['name']}=={own['version']}" in root["optional-dependencies"][extra]


def locked_packages() -> list[tuple[str, str, list[str]]]:
    """Name, version and digests of each package of the lock."""
    entries = (ROOT / "requirements.lock").read_text().replace(" \\\n", " ").splitlines()
    packages = [entry.split() for entry in entries]
    return [(*pin.split("=="), digests) for pin, *digests in packages]  # type: ignore[misc]


@pytest.mark.shows("SEC32")
def test_every_file_of_the_lock_is_known_by_its_digest() -> None:
    """SEC 32: pip installs nothing else, whoever serves it."""
    form = re.compile(r"--hash=sha256:[0-9a-f]{64}")
    bare = [
        name
        for name, _, all_ in locked_packages()
        if not all_ or not all(map(form.fullmatch, all_))
    ]
    assert bare == []
    assert len(locked_packages()) > 200


def test_the_lock_holds_the_extra_of_every_tracker_at_a_version_that_it_allows() -> None:
    locked = {name: version for name, version, _ in locked_packages()}
    extras = project()["project"]["optional-dependencies"]
    wanted = [
        Requirement(line)
        for extra in ("tensorboard", "wandb", "mlflow", "trackio")
        for line in extras[extra]
    ]
    wrong = [
        str(need)
        for need in wanted
        if not need.specifier.contains(locked.get(canonicalize_name(need.name), "0"))
    ]
    assert wrong == []


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
        "gradus/templates/task_set.toml.template",
        "gradus/templates/project/demo.py.template",
        "gradus_reverse_text/taskset.py",
        "gradus_chat/__init__.py",
        "gradus_kit/__init__.py",
        "gradus_kit/sandbox/launcher.py",
    }
