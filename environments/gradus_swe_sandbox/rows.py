"""Repairs of public data: rows of R2E-Gym and of SWE-Gym, with the tests that decide them."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from pydantic import BaseModel, ConfigDict

from gradus.errors import ConfigError, EnvironmentFailure
from gradus_kit.tasksets.hub import hub_rows
from gradus_swe_sandbox.changes import Changes

R2E_COLUMNS = ("docker_image", "commit_hash", "problem_statement", "expected_output_json")
SWE_COLUMNS = ("instance_id", "problem_statement", "test_patch", "FAIL_TO_PASS", "PASS_TO_PASS")
LEGO_COLUMNS = (*SWE_COLUMNS, "test_cmd")
IMAGE_COLUMNS = ("docker_image", "image_name", "image")
"""Any of these names the image of a row."""
_CONDA = "/opt/miniconda3/envs/testbed/bin:/opt/conda/envs/testbed/bin"
PUT_CONDA_FIRST = (
    "for bin in /opt/miniconda3/envs/testbed/bin /opt/conda/envs/testbed/bin; do "
    '[ -d "$bin" ] && ln -sf "$bin"/* /usr/local/bin/; done; true'
)
"""Run in the agent's container: the conda environment `testbed` in front of its PATH."""
_FOLDER = "/testbed"
_PATCH = "/tmp/gradus-tests.patch"
_MAX_OUTPUT_BYTES = 2_000_000
_WORDS = "PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS"
_STATUS = re.compile(rf"^({_WORDS}) +(\S.*?)(?: - .*)?$", re.M)
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_TARGET = re.compile(r"^\+\+\+ b/(\S+)", re.M)


@dataclass(frozen=True)
class Checks:
    """How many checks pass, and how many do before anything is repaired.

    >>> Checks(36, 37, floor=35).beyond_floor
    0.5
    """

    passed: int
    total: int
    floor: int = 0

    @property
    def share(self) -> float:
        return self.passed / self.total

    @property
    def beyond_floor(self) -> float:
        """The share of what the repair is for; 1 for all, 0 for no more than the floor."""
        if self.passed == self.total or self.floor >= self.total:
            return float(self.passed == self.total)
        return max(0.0, (self.passed - self.floor) / (self.total - self.floor))


class HubTests(BaseModel):
    """How a row decides: a command in the container, and the status that each test must have.

    The command runs in a container that the agent never saw, on what it changed there.
    """

    model_config = ConfigDict(frozen=True)

    command: str
    expected: dict[str, str]
    """Status by the name of a test, as pytest's summary has both."""
    patch: str = ""
    """Changes of the tests, which the agent has not seen; applied before the command."""
    folder: str = _FOLDER
    kept: frozenset[str] = frozenset()
    """Tests that pass before the repair too. Empty where the row does not say."""
    has_conda: bool = False
    """True if the image has the conda environment `testbed`."""

    @property
    def files(self) -> set[str]:
        """Files of the tests, as far as the row names them."""
        return {name.split("::")[0] for name in self.expected} | set(_TARGET.findall(self.patch))

    async def apply(self, fresh: Any) -> None:
        """Put the tests that the agent has not seen into a container that has nothing of it.

        So what fails here is the row's or the engine's fault. What an agent changed leaves the
        files of the tests alone, and may follow.
        """
        if not self.patch:
            return
        await fresh.write(_PATCH, self.patch.encode())
        files = " ".join(shlex.quote(name) for name in _TARGET.findall(self.patch))
        apply = f"git checkout -q -- {files} 2>/dev/null; git apply {_PATCH}"
        done = await fresh.run(["sh", "-c", f"cd {self.folder} && {apply}"], {})
        if done.exit_code != 0:
            raise EnvironmentFailure(f"the tests cannot be applied: {done.stderr.strip()[:300]}")

    async def judge(self, fresh: Any, changes: Changes, seconds: int) -> Checks:
        """How many tests have the status that they must have, with what the agent changed."""
        await changes.write(fresh, self.folder)
        limited = f"timeout -k 5 {seconds} sh -c {shlex.quote(self.command)} 2>&1"
        # Lines of a status alone, so that nothing printed after them can push them out.
        lines = f"grep -aE '{_WORDS}' | head -c {_MAX_OUTPUT_BYTES}"
        done = await fresh.run(["sh", "-c", f"cd {self.folder} && {limited} | {lines}"], {})
        is_whole = len(done.stdout.encode()) < _MAX_OUTPUT_BYTES
        found = read_statuses(done.stdout) if is_whole else {}
        right = {name for name, status in self.expected.items() if found.get(name) == status}
        total = len(self.expected)
        # A repair that breaks what worked is none; a row that names nothing so asks for all.
        floor = len(self.kept) if self.kept <= right else total
        return Checks(len(right), total, floor if self.kept else total - 1)


@dataclass(frozen=True)
class HubRepair:
    """One row."""

    name: str
    prompt: str
    image: str
    tests: HubTests


def read_statuses(output: str) -> dict[str, str]:
    """Status by test in pytest's short summary; the last one counts, but none but PASSED may be
    said of a test that passed, nor an error of its file: others print such lines too."""
    statuses: dict[str, str] = {}
    for status, name in _STATUS.findall(_COLOUR.sub("", output)):
        if status != "PASSED" or name.strip() not in statuses:
            statuses[name.strip()] = status
    broken = {name for name, status in statuses.items() if status == "ERROR"}
    for name, status in statuses.items():
        if status == "PASSED" and name.partition("::")[0] in broken:
            statuses[name] = "ERROR"
    return statuses


def hub_repairs(dataset: str, *, split: str, image_prefix: str) -> Iterator[HubRepair]:
    """The rows of a data set; which of the kinds they are is seen from their columns."""
    swe = partial(swe_repair, image_prefix=image_prefix)
    lego = [((*LEGO_COLUMNS, image), swe) for image in IMAGE_COLUMNS]
    for columns, repair in ((R2E_COLUMNS, r2e_repair), *lego):
        try:
            return map(repair, hub_rows(dataset, split=split, columns=columns))
        except ConfigError as error:
            if "has no column" not in str(error):
                raise
    return map(swe, hub_rows(dataset, split=split, columns=SWE_COLUMNS))


def r2e_repair(row: Mapping[str, Any]) -> HubRepair:
    """A row of R2E-Gym, whose image holds its tests and the script that runs them."""
    statuses = json.loads(row["expected_output_json"])
    if not isinstance(statuses, dict) or not statuses:
        raise ConfigError(f"row {row['commit_hash']!r} expects no test to have any status")
    tests = HubTests(
        command="bash run_tests.sh", expected={str(k): str(v) for k, v in statuses.items()}
    )
    return HubRepair(row["commit_hash"], row["problem_statement"], row["docker_image"], tests)


def swe_repair(row: Mapping[str, Any], *, image_prefix: str) -> HubRepair:
    """A row of SWE-Gym, whose tests come as a patch and run under pytest, or of SWE-Lego, which
    names its image and the command of its tests too."""
    name = str(row["instance_id"])
    image = next((str(row[column]) for column in IMAGE_COLUMNS if row.get(column)), "")
    if not image and not image_prefix:
        raise ConfigError(
            f"row {name!r} names no image: set image_prefix, such as 'registry/eval.'"
        )
    wanted = [*_names(row["FAIL_TO_PASS"]), *_names(row["PASS_TO_PASS"])]
    files = sorted({test.split("::")[0] for test in wanted})
    if not files:
        raise ConfigError(f"row {name!r} names no test")
    command = "python -m pytest -rA -q " + " ".join(shlex.quote(file) for file in files)
    given = row.get("test_cmd")
    if given:
        own = given if isinstance(given, str) else " && ".join(map(str, given))
        command = f'export PATH="{_CONDA}:$PATH"; {own}'
    tests = HubTests(
        command=command,
        has_conda=bool(given),
        expected=dict.fromkeys(wanted, "PASSED"),
        patch=str(row["test_patch"] or ""),
        kept=frozenset(_names(row["PASS_TO_PASS"])),
    )
    image = image or f"{image_prefix}{name.replace('__', '_s_').lower()}"
    return HubRepair(name, str(row["problem_statement"]), image, tests)


def _names(value: Any) -> list[str]:
    found = json.loads(value) if isinstance(value, str) else value
    return [str(name) for name in found or []]
