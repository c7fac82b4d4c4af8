"""The taskset `swe-sandbox`: find and repair a bug of a repository in a container."""

from __future__ import annotations

import asyncio
import itertools
import json
import shlex
from collections.abc import Awaitable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, TypeVar

import verifiers.v1 as vf
from pydantic import Field
from verifiers.v1.errors import SandboxError
from verifiers.v1.runtimes import provision_runtime

from gradus.errors import EnvironmentFailure
from gradus_kit.tasksets.holdout import HoldoutKeys
from gradus_swe_sandbox.bugs import (
    BUGS,
    CALLS,
    PASSED_UNREPAIRED,
    expected_answers,
    packed,
    repository_files,
)
from gradus_swe_sandbox.changes import Changes, Origin
from gradus_swe_sandbox.rows import PUT_CONDA_FIRST, Checks, HubTests, hub_repairs
from gradus_swe_sandbox.shell import GRACE_SECONDS, is_answering, is_there

LOCAL_IMAGE = "localhost/gradus-sandbox:1"
FOLDER = "/app/ledger"
INSTRUCTION = (
    "You repair programs. Use the shell to look around, change files and run tests. When you are "
    "done, say so without calling a tool."
)
_JUDGE_FOLDER = "/tmp/gradus-judge"
_MAX_ANSWER_BYTES = 200_000
_Found = TypeVar("_Found")
_ANSWERING = Path(__file__).parent / "answering.py"


class RepairConfig(vf.TaskConfig):
    """How a repair is judged."""

    seconds: int = Field(60, ge=1, le=3600)
    """Time for the checks; a repository of the hub may need more."""
    partial: bool = False
    """Pay the share of what the bug breaks that works again; otherwise 1 for all and 0 for less."""


class SweSandboxConfig(vf.TasksetConfig, HoldoutKeys):
    """Which repairs."""

    source: Literal["ledger", "hub"] = "ledger"
    """`ledger`: our own repository of ten files and fourteen bugs. `hub`: rows of `dataset`."""
    dataset: str = "R2E-Gym/R2E-Gym-Lite"
    """Data set with the columns of R2E-Gym or of SWE-Gym."""
    dataset_split: str = "train"
    """Split of that data set."""
    image_prefix: str = ""
    """Before the image's name, where rows name none: `PREFIX` + `instance_id`."""
    image: str | None = LOCAL_IMAGE
    """Image of `ledger`; any with Python 3 and a shell. None means that of the runtime."""
    num_tasks: int | None = Field(None, ge=1)
    """Number of repairs. None means all."""
    instruction: str | None = INSTRUCTION
    """System prompt. None means that the model sees only the report."""
    holdout_fraction: float = Field(0.0, ge=0.0, le=1.0)
    """Share of the repairs that is held out, by the hash of each name."""
    task: RepairConfig = RepairConfig()
    """How a repair is judged."""


def shell_call(command: str) -> str:
    """A reply that runs a command, as most open models write it."""
    call = json.dumps({"name": "shell", "arguments": {"command": command}})
    return f"<tool_call>\n{call}\n</tool_call>"


async def unpack(runtime: vf.Runtime, files: dict[str, str], folder: str) -> None:
    """Put files into a folder of the container, all at once."""
    archive = "/tmp/gradus-files.tar"
    await runtime.write(archive, packed(files))
    script = f"mkdir -p {folder} && tar -xf {archive} -C {folder} && rm {archive}"
    done = await runtime.run(["sh", "-c", script], {})
    if done.exit_code != 0:
        raise EnvironmentFailure(f"files cannot be put into the container: {done.stderr[:300]}")


class RepairData(vf.TaskData):
    """One bug."""

    bug: int | None = None
    """Number of one of our bugs; None for a row of the hub."""
    tests: HubTests | None = None
    """Tests of a row of the hub."""


class RepairTask(vf.Task[RepairData, vf.State, RepairConfig]):
    """One bug in a fresh container."""

    NEEDS_CONTAINER = True

    def gold_replies(self) -> list[str]:
        """A repair in one command; none for rows of the hub."""
        if self.data.bug is None:
            return []
        bug = BUGS[self.data.bug]
        program = (
            f"p = {f'{FOLDER}/{bug.file}'!r}; t = open(p).read(); "
            f"open(p, 'w').write(t.replace({bug.wrong!r}, {bug.right!r}))"
        )
        return [shell_call(f"python3 -c {shlex.quote(program)}"), "Done."]

    async def setup(self, trace: vf.Trace, runtime: vf.Runtime) -> None:  # noqa: ARG002
        """Put the repository with its bug, or what a row's image needs, into the container."""
        if self.data.tests is not None and self.data.tests.has_conda:
            await runtime.run(["sh", "-c", PUT_CONDA_FIRST], {})
        if self.data.bug is None:
            return
        await unpack(runtime, repository_files(BUGS[self.data.bug]), FOLDER)

    @vf.reward
    async def repaired(self, trace: vf.Trace, runtime: vf.Runtime) -> float:
        """1 when everything does what it should; with `partial`, the share of what was broken.

        A container that its agent wrecked earns 0: a failed episode would be played again.
        """
        if self.data.tests is None:
            bug = self.data.bug
            floor = 0 if bug is None else PASSED_UNREPAIRED[bug]
            found = await self._unless_ruined(trace, runtime, self._ask(runtime, floor))
        else:
            found = await self._by_tests(self.data.tests, trace, runtime)
        checks = found or Checks(0, 1)
        trace.record_metric("checks_passed", checks.share)
        trace.info["repair"] = {"passed": checks.passed, "total": checks.total}
        return checks.beyond_floor if self.config.partial else float(checks.passed == checks.total)

    async def _unless_ruined(
        self,
        trace: vf.Trace,
        runtime: vf.Runtime,
        asked: Awaitable[_Found],
        *,
        is_fresh: bool = False,
    ) -> _Found | None:
        """What the container answers; None when what ran in it left it unable to.

        In a fresh one that goes on, a command that the engine could not run is no agent's work.
        """
        try:
            async with asyncio.timeout(self.config.seconds + GRACE_SECONDS):
                return await asked
        except (SandboxError, EnvironmentFailure, TimeoutError) as error:
            is_engine = is_fresh and isinstance(error, SandboxError) and await is_answering(runtime)
            if is_engine or not await is_there(runtime):
                raise
            trace.info["ruined"] = str(error)[:300] or "the checks did not end"
            return None

    async def _by_tests(
        self, tests: HubTests, trace: vf.Trace, runtime: vf.Runtime
    ) -> Checks | None:
        """Run the tests in a container that the agent never saw."""
        async with provision_runtime(runtime.config, env=runtime.env) as fresh:
            origin = await Origin.of(fresh, tests.folder)
            changes = await self._unless_ruined(
                trace, runtime, Changes.of(runtime, tests.folder, origin, tests.files)
            )
            if changes is None:
                return None
            await tests.apply(fresh)
            # What cannot be put into the repository, or ends its container, is the agent's work.
            judged = tests.judge(fresh, changes, self.config.seconds)
            return await self._unless_ruined(trace, fresh, judged, is_fresh=True)

    async def _ask(self, runtime: vf.Runtime, floor: int) -> Checks:
        """Ask the repository of `ledger` in the agent's container; no answer is in there."""
        expected = expected_answers()
        calls = json.dumps(CALLS).encode()
        await runtime.write(f"{_JUDGE_FOLDER}/answering.py", _ANSWERING.read_bytes())
        await runtime.write(f"{_JUDGE_FOLDER}/calls.json", calls)
        script = (
            f"timeout -k 2 {self.config.seconds} python3 -I -B {_JUDGE_FOLDER}/answering.py "
            f"{FOLDER} <{_JUDGE_FOLDER}/calls.json 2>/dev/null | head -c {_MAX_ANSWER_BYTES}"
        )
        done = await runtime.run(["sh", "-c", script], {})
        answers = done.stdout.split("\n")
        return Checks(sum(map(_is_same, answers, expected)), len(expected), floor)


def _is_same(answer: str, expected: str) -> bool:
    try:
        return bool(json.dumps(json.loads(answer)) == expected)
    except (ValueError, RecursionError):
        return False


class SweSandboxTaskset(vf.Taskset[RepairTask, SweSandboxConfig]):
    """The repairs in the order of their source."""

    def load(self) -> Iterable[RepairTask]:
        """Yield the repairs of the configured side."""
        config = self.config
        kept = (data for data in self._repairs() if config.keeps(str(data.name)))
        for data in itertools.islice(kept, config.num_tasks):
            yield RepairTask(data, config.task)

    def _repairs(self) -> Iterator[RepairData]:
        config = self.config
        if config.source == "ledger":
            for number, bug in enumerate(BUGS):
                prompt = (
                    f"The Python project in {FOLDER} has a bug:\n\n{bug.report}\n\nFind and repair "
                    "it. `python3 -m unittest` runs its tests there; they do not find every bug."
                )
                yield self._data(bug.name, prompt, image=config.image, bug=number, workdir=FOLDER)
            return
        rows = hub_repairs(
            config.dataset, split=config.dataset_split, image_prefix=config.image_prefix
        )
        for row in rows:
            yield self._data(
                row.name, row.prompt, image=row.image, workdir=row.tests.folder, tests=row.tests
            )

    def _data(self, name: str, prompt: str, **fields: Any) -> RepairData:
        return RepairData(name=name, prompt=prompt, system_prompt=self.config.instruction, **fields)
