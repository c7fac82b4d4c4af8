"""The task sets `swe-sandbox` and `general-agent`: bugs, jobs, and rewards in a real container."""

from __future__ import annotations

import asyncio
import itertools
import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import verifiers.v1 as vf
from verifiers.v1.errors import SandboxError
from verifiers.v1.runtimes import ProgramResult, provision_runtime
from verifiers.v1.runtimes.docker import PodmanConfig

from gradus.errors import ConfigError, EnvironmentFailure
from gradus_general_agent.jobs import jobs
from gradus_general_agent.taskset import ANSWER, GeneralAgentConfig, GeneralAgentTaskset
from gradus_swe_sandbox.bugs import (
    BUGS,
    CALLS,
    PASSED_UNREPAIRED,
    expected_answers,
    packed,
    repository_files,
)
from gradus_swe_sandbox.changes import Changes, Origin, is_judged
from gradus_swe_sandbox.rows import Checks, r2e_repair, read_statuses, swe_repair
from gradus_swe_sandbox.shell import RUINED, Shell, ShellHarnessConfig
from gradus_swe_sandbox.taskset import (
    LOCAL_IMAGE,
    RepairConfig,
    RepairData,
    RepairTask,
    SweSandboxConfig,
    SweSandboxTaskset,
)
from gradus_swelego.taskset import SweLegoConfig, SweLegoTaskset

ANSWERING = Path(__file__).parents[3] / "environments" / "gradus_swe_sandbox" / "answering.py"


def answers_of(folder: Path, files: dict[str, str]) -> list[str]:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    done = subprocess.run(
        [sys.executable, "-I", "-B", str(ANSWERING), str(folder)],
        input=json.dumps(CALLS),
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


def test_the_repository_has_ten_files_and_gives_every_expected_answer(tmp_path: Path) -> None:
    files = repository_files()
    assert len(files) == 10
    assert answers_of(tmp_path, files) == expected_answers()
    assert len({bug.name for bug in BUGS}) == len(BUGS) == 14


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(BUGS)), ids=lambda number: BUGS[number].name)
def test_every_bug_is_found_by_the_checks(tmp_path: Path, number: int) -> None:
    answers = answers_of(tmp_path, repository_files(BUGS[number]))
    passed = sum(map(str.__eq__, answers, expected_answers()))
    assert passed == PASSED_UNREPAIRED[number] < len(CALLS)
    assert Checks(passed, len(CALLS), passed).beyond_floor == 0.0


class Printing:
    """A container whose tests print a summary."""

    def __init__(self, output: str) -> None:
        self._output = output

    async def run(self, *_: Any) -> ProgramResult:
        return ProgramResult(0, self._output, "")

    async def write(self, *_: Any) -> None:
        return


@pytest.mark.parametrize(
    ("passed", "share"),
    [("zero", 0.0), ("zero sum", 0.5), ("zero sum less", 1.0), ("sum less", 0.0), ("", 0.0)],
)
async def test_a_part_of_a_repair_pays_only_while_nothing_else_breaks(
    passed: str, share: float
) -> None:
    tests = swe_repair(SWE_ROW, image_prefix="x").tests
    output = "\n".join(f"PASSED tests/test_add.py::test_{name}" for name in passed.split())
    checks = await tests.judge(Printing(output), Changes({}, ()), 60)
    assert checks.beyond_floor == share


def test_the_same_files_are_packed_to_the_same_bytes() -> None:
    assert packed({"b": "x", "a/c": "y"}) == packed({"a/c": "y", "b": "x"})


def test_a_task_names_its_container_and_not_its_answers() -> None:
    first, *rest = SweSandboxTaskset(SweSandboxConfig(id="gradus-swe-sandbox"))
    assert len(rest) == 13
    assert (first.data.image, first.NEEDS_CONTAINER) == (LOCAL_IMAGE, True)
    assert BUGS[0].right not in first.data.model_dump_json()


def test_jobs_are_different_and_depend_on_name_and_seed_alone() -> None:
    some = list(itertools.islice(jobs(), 40))
    assert some == list(itertools.islice(jobs(), 40)) != list(itertools.islice(jobs(seed=1), 40))
    assert len({job.question + str(job.files) for job in some}) == 40
    assert all(job.answer for job in some)


def test_the_answers_of_jobs_follow_from_their_files() -> None:
    for job in itertools.islice(jobs(), 40):
        text = "".join(job.files.values())
        words = job.question.rstrip(".?").split()
        if job.name.startswith("sales"):
            rows = [line.split(",") for line in text.splitlines() if words[8] in line]
            assert sum(int(units) * int(price) for _, units, price in rows) == int(job.answer)
        elif job.name.startswith("words"):
            assert max(set(text.split()), key=text.split().count) == job.answer
        elif job.name.startswith("log"):
            lines = text.splitlines()
            assert str(sum(f"ERROR {words[-1]} " in line for line in lines)) == job.answer


def test_a_side_without_jobs_is_refused() -> None:
    with pytest.raises(ConfigError, match="no task is on side"):
        list(
            GeneralAgentTaskset(
                GeneralAgentConfig(id="gradus-general-agent", side="held_out", holdout_fraction=0.0)
            )
        )


def test_statuses_are_read_from_the_summary_of_pytest() -> None:
    output = "\x1b[32mPASSED\x1b[0m a.py::b\nFAILED c.py::d - boom\nnothing PASSED\nXFAIL c.py::d"
    assert read_statuses(output) == {"a.py::b": "PASSED", "c.py::d": "XFAIL"}


def test_a_printed_success_does_not_hide_what_pytest_says() -> None:
    """A module under repair may print at its end what pytest prints of a test that passed."""
    found = read_statuses("FAILED a.py::b - boom\n1 failed\nPASSED a.py::b\nPASSED c.py::d")
    assert found == {"a.py::b": "FAILED", "c.py::d": "PASSED"}
    found = read_statuses("ERROR a.py - ImportError: boom\n1 error\nPASSED a.py::b")
    assert found == {"a.py": "ERROR", "a.py::b": "ERROR"}


async def test_statuses_that_fill_the_whole_output_count_for_nothing() -> None:
    tests = swe_repair(SWE_ROW, image_prefix="x").tests
    passed = "\n".join(f"PASSED {name}" for name in tests.expected)
    for padding, number in (("", len(tests.expected)), ("PASSED x\n" * 250_000, 0)):
        checks = await tests.judge(Printing(passed + "\n" + padding), Changes({}, ()), 60)
        assert checks.passed == number


def test_rows_of_public_data_name_image_and_tests() -> None:
    r2e = r2e_repair(
        {
            "docker_image": "image:1",
            "commit_hash": "abc",
            "problem_statement": "Broken.",
            "expected_output_json": '{"t.py::a": "PASSED"}',
        }
    )
    assert (r2e.image, r2e.tests.expected) == ("image:1", {"t.py::a": "PASSED"})
    row = {
        "instance_id": "owner__repo-1",
        "problem_statement": "Broken.",
        "test_patch": "+++ b/t.py\n",
        "FAIL_TO_PASS": ["t.py::a"],
        "PASS_TO_PASS": '["t.py::b"]',
    }
    swe = swe_repair(row, image_prefix="registry/eval.")
    assert swe.image == "registry/eval.owner_s_repo-1"
    assert set(swe.tests.expected) == {"t.py::a", "t.py::b"}
    with pytest.raises(ConfigError, match="image_prefix"):
        swe_repair(row, image_prefix="")


def test_a_row_of_swe_lego_names_its_image_and_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    row = {**SWE_ROW, "docker_image": "image:2", "test_cmd": "pytest -rA --cov-fail-under=99 a.py"}

    def hub_rows(_: str, *, columns: Sequence[str], **__: Any) -> Iterator[dict[str, Any]]:
        if missing := [it for it in columns if it not in row]:
            raise ConfigError(f"has no column {missing[0]!r}")
        return iter([row])

    monkeypatch.setattr("gradus_swe_sandbox.rows.hub_rows", hub_rows)
    (task,) = SweLegoTaskset(SweLegoConfig(id="gradus-swelego"))
    tests = task.data.tests
    assert tests is not None
    assert (task.data.image, task.data.workdir) == ("image:2", "/testbed")
    assert tests.command.endswith(f'/envs/testbed/bin:$PATH"; {row["test_cmd"]}')
    assert (tests.has_conda, set(tests.expected.values())) == (True, {"PASSED"})


def has_image() -> bool:
    if shutil.which("podman") is None:
        return False
    done = subprocess.run(["podman", "image", "exists", LOCAL_IMAGE], check=False)
    return done.returncode == 0


@pytest.fixture
async def container() -> AsyncIterator[vf.Runtime]:
    if not has_image():
        pytest.skip(f"podman with the image {LOCAL_IMAGE} is not installed here")
    async with provision_runtime(PodmanConfig(image=LOCAL_IMAGE)) as runtime:
        yield runtime


class Fresh:
    """A second container, one of whose commands fails."""

    def __init__(self, failing: str, error: Exception | None) -> None:
        self.config: Any = None
        self.env: dict[str, str] = {}
        self._failing, self._error = failing, error

    async def run(self, words: list[str], _: Any) -> ProgramResult:
        if self._failing not in words[-1]:
            return ProgramResult(0, "", "")
        if self._error is not None:
            raise self._error
        return ProgramResult(1, "", "failed")

    async def write(self, *_: Any) -> None:
        return


@pytest.mark.parametrize(
    ("failing", "error", "raised"),
    [
        ("git apply", None, EnvironmentFailure),
        ("git apply", SandboxError("engine"), SandboxError),
        ("pytest", SandboxError("engine"), SandboxError),
        ("xargs", None, None),
    ],
)
async def test_what_fails_in_the_second_container_is_wrong_only_by_the_agents_work(
    monkeypatch: pytest.MonkeyPatch, failing: str, error: Any, raised: Any
) -> None:
    @asynccontextmanager
    async def provision(*_: Any, **__: Any) -> AsyncIterator[Fresh]:
        yield Fresh(failing, error)

    async def nothing(*_: Any) -> Changes:
        return Changes({}, ())

    monkeypatch.setattr("gradus_swe_sandbox.taskset.provision_runtime", provision)
    monkeypatch.setattr(Changes, "of", nothing)
    monkeypatch.setattr(Origin, "of", nothing)
    data = RepairData(name="row", prompt="", tests=swe_repair(SWE_ROW, image_prefix="x").tests)
    task, runtime, trace = RepairTask(data, RepairConfig()), Fresh("-", None), FakeTrace()
    if raised is None:
        assert await task.repaired(trace, runtime) == 0.0  # type: ignore[arg-type]
        return
    with pytest.raises(raised):
        await task.repaired(trace, runtime)  # type: ignore[arg-type]


class FakeTrace(SimpleNamespace):
    """A trace that takes metrics."""

    def __init__(self) -> None:
        super().__init__(info={}, metrics={})
        self.record_metric = self.metrics.__setitem__


@pytest.mark.slow
async def test_a_repair_pays_and_a_container_in_ruins_does_not(container: vf.Runtime) -> None:
    tasks = list(SweSandboxTaskset(SweSandboxConfig(id="gradus-swe-sandbox")))
    task = next(task for task in tasks if task.data.name == "budget")
    trace: Any = FakeTrace()
    shell = Shell(container, ShellHarnessConfig(command_seconds=2.0, max_output_bytes=2000))

    async def sh(command: Any) -> str:
        return await shell.call("shell", {"command": command})

    await task.setup(trace, container)
    assert await task.repaired(trace, container) == 0.0
    assert 0.9 < trace.metrics["checks_passed"] < 1.0
    tests = "cd /app/ledger && python3 -m unittest 2>&1 | tail -1; exit 3"
    assert await sh(tests) == "FAILED (failures=1)\n[exit code 3]\n"
    repair = "sed -i 's/-cents >= budget/-cents > budget/' /app/ledger/ledger/report.py"
    assert "[exit code 0]" in await sh(repair)
    assert await task.repaired(trace, container) == 1.0
    assert await sh(tests) == "OK\n[exit code 3]\n"

    assert "[ended after 2000 bytes" in await sh("yes")
    assert "[stopped after 2 s]" in await sh("sleep 60")
    assert "error" in await shell.call("shell", {"cmd": "ls"})
    assert "error" in await sh("\0")
    assert "[exit code" in await sh("echo '\ud800' $(")
    await sh("rm -rf /app/ledger; printf '#!/bin/sh\\nyes 1' > /usr/bin/python3")
    assert await task.repaired(trace, container) == 0.0
    assert trace.info.keys() == {"repair"}

    await sh("mv /usr/bin /gone")
    assert await sh("ls") == RUINED
    assert await task.repaired(trace, container) == 0.0
    assert trace.info["ruined"]


SWE_ROW = {
    "instance_id": "owner__repo-1",
    "problem_statement": "add(1, 2) is -1.",
    "test_patch": """\
diff --git a/tests/test_add.py b/tests/test_add.py
--- a/tests/test_add.py
+++ b/tests/test_add.py
@@ -1,2 +1,4 @@
 from calc import add
 def test_zero(): assert add(0, 0) == 0
+def test_sum(): assert add(1, 2) == 3
+def test_less(): assert add(-1, -2) == -3
""",
    "FAIL_TO_PASS": ["tests/test_add.py::test_sum", "tests/test_add.py::test_less"],
    "PASS_TO_PASS": ["tests/test_add.py::test_zero"],
}
R2E_ROW = {
    "docker_image": "localhost/gradus-test-swe:1",
    "commit_hash": "abc",
    "problem_statement": "add(1, 2) is -1.",
    "expected_output_json": json.dumps({"tests/test_add.py::test_zero": "PASSED", "sum": "PASSED"}),
}
REPOSITORY = """
set -e
ln -s /usr/bin/python3 /usr/local/bin/python
mkdir -p /testbed/tests && cd /testbed && git init -q .
git config user.email a@b && git config user.name a
printf 'def add(a, b):\\n    return a - b\\n' > calc.py
printf 'from calc import add\\ndef test_zero(): assert add(0, 0) == 0\\n' > tests/test_add.py
echo 'from calc import add; print("PASSED sum" if add(1, 2) == 3 else "FAILED sum")' > sum.py
echo 'python -m pytest -rA -q tests; python sum.py' > run_tests.sh
touch old.py && git add -A && git commit -qm base
"""


@pytest.fixture(scope="module")
def swe_image() -> Iterator[str]:
    """An image as those of the public rows: a repository in /testbed, and pytest."""
    if not has_image():
        pytest.skip(f"podman with the image {LOCAL_IMAGE} is not installed here")
    name = "localhost/gradus-test-swe:1"
    words = ["podman", "run", "--detach", "--network=none", LOCAL_IMAGE, "sleep", "infinity"]
    number = subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()
    try:
        packages = Path(pytest.__file__).parents[1]
        for package in (
            "pytest",
            "_pytest",
            "py.py",
            "pluggy",
            "iniconfig",
            "packaging",
            "pygments",
        ):
            target = f"{number}:/usr/lib/python3/dist-packages/{package}"
            subprocess.run(["podman", "cp", str(packages / package), target], check=True)
        subprocess.run(["podman", "exec", number, "sh", "-c", REPOSITORY], check=True)
        commit = ["podman", "commit", "-q", "--change=STOPSIGNAL SIGKILL", number, name]
        subprocess.run(commit, check=True, capture_output=True)
        yield name
    finally:
        for words in (["rm", "-ft0", number], ["rmi", "-f", name]):
            subprocess.run(["podman", *words], check=True, capture_output=True)


CONFTEST = """\
import pytest
@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    (yield).get_result().outcome = "passed"
"""
FORGED = "echo PASSED tests/test_add.py::test_zero; echo PASSED sum"


@pytest.mark.shows("SEC30")
@pytest.mark.slow
async def test_rows_are_judged_where_the_agent_never_was(swe_image: str) -> None:
    """What edits tests, their settings or their runner is in vain."""
    swe = swe_repair(SWE_ROW, image_prefix="x").tests
    r2e = r2e_repair(R2E_ROW).tests
    repair = "printf 'def add(a, b):\\n    return a + b\\n' > calc.py; rm old.py"
    forge = f"echo {shlex.quote(FORGED)} > run_tests.sh"
    cheat = f"printf %s {shlex.quote(CONFTEST)} > conftest.py"
    fake = f"printf %s {shlex.quote(f'import os; os.system({FORGED!r}); os._exit(0)')}"
    wanted = [
        (swe, f"{cheat}; git add -A && git commit -qm mine", 0.0),
        (swe, f"{fake} > pytest.py; {fake} > /usr/lib/python3/dist-packages/pytest.py", 0.0),
        (r2e, f"{forge}; {fake} > json.py", 0.0),
        (swe, f"{repair}; {cheat}", 1.0),
        (r2e, f"{repair}; git commit -qam mine", 1.0),
        (swe, "rm -rf /testbed/* /usr/bin/git", 0.0),
    ]
    config = PodmanConfig(image=swe_image, workdir="/testbed")

    async def earned(tests: Any, command: str) -> float:
        data = RepairData(name="row", prompt="", tests=tests)
        task, trace = RepairTask(data, RepairConfig(seconds=60)), FakeTrace()
        async with provision_runtime(config) as runtime:
            await runtime.run(["sh", "-c", f"cd /testbed; {command}"], {})
            return await task.repaired(trace, runtime)  # type: ignore[arg-type]

    rewards = await asyncio.gather(*(earned(tests, command) for tests, command, _ in wanted))
    assert rewards == [reward for *_, reward in wanted]


@pytest.mark.shows("SEC30")
@pytest.mark.parametrize(
    ("path", "judged"),
    [
        ("src/a.py", True),
        ("docs/new.md", True),
        ("src/conftest.py", False),
        ("tests/helper.py", False),
        ("src/tests/deep/case.py", False),
        ("src/Tests/x.py", True),
        ("src/test/client.py", True),
        ("src/test_a.py", True),
        ("tests.py", True),
        ("r2e_tests/test_1.py", False),
        ("setup.cfg", False),
        ("run_tests.sh", False),
        ("named.py", False),
        ("json.py", False),
        ("pytest/__init__.py", False),
        ("json/decoder.py", True),
        ("../up.py", False),
        ("/etc/passwd", False),
        (".git/hooks/pre-commit", False),
        ("", False),
    ],
)
def test_tests_and_what_configures_them_are_no_part_of_a_repair(path: str, judged: bool) -> None:
    tests = {"named.py", "tests/web/test_get.py", "src/tests/test_a.py", "TestAdd.test_one", ""}
    assert is_judged(path, {"src/a.py", "json/encoder.py"}, tests) is judged


async def test_the_files_of_an_image_are_known_by_their_own_names(tmp_path: Path) -> None:
    """Git writes an umlaut as escapes in quotes, unless it separates names by a zero byte."""
    name = "gr\u00fc\u00dfe und\ttab.py"
    (tmp_path / name).write_text("x = 1\n")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@localhost"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *words], check=True)

    class Here:
        async def run(self, argv: list[str], _: dict[str, str]) -> ProgramResult:
            done = subprocess.run(argv, capture_output=True, text=True, check=False)
            return ProgramResult(exit_code=done.returncode, stdout=done.stdout, stderr=done.stderr)

    origin = await Origin.of(Here(), str(tmp_path))
    assert origin.tracked == {name}
    assert len(origin.commit) == 40


class LostRuntime:
    """A container that the engine does not know any more, or that it never answers for."""

    def __init__(self, answer: ProgramResult | None) -> None:
        self._answer = answer

    async def run(self, *_: Any) -> ProgramResult:
        if self._answer is None:
            raise SandboxError("no engine")
        return self._answer

    async def write(self, *_: Any) -> None:
        raise SandboxError("no such container")

    async def read(self, *_: Any, **__: Any) -> bytes:
        raise SandboxError("no such container")

    async def alive(self) -> bool:
        return False


ENDS_PROCESS_1 = """
import ctypes, os
call = ctypes.CDLL(None).ptrace
call.argtypes = [ctypes.c_long] * 4
call(16, 1, 0, 0)
os.waitpid(1, 0x40000000)
for line in open("/proc/1/maps"):
    places, rights = line.split()[:2]
    if "x" in rights and "[v" not in line:
        start, end = (int(place, 16) for place in places.split("-"))
        with open("/proc/1/mem", "r+b", 0) as memory:
            memory.seek(start)
            memory.write(b"\\xcc" * (end - start))
call(17, 1, 0, 0)
"""


@pytest.mark.slow
async def test_an_agent_that_ends_its_container_earns_nothing(container: vf.Runtime) -> None:
    task = next(iter(SweSandboxTaskset(SweSandboxConfig(id="gradus-swe-sandbox"))))
    trace: Any = FakeTrace()
    shell = Shell(container, ShellHarnessConfig())
    await task.setup(trace, container)
    # Without the wait the command may have told of its end before the container has gone.
    command = f"python3 -c {shlex.quote(ENDS_PROCESS_1)}; sleep 20"
    assert await shell.call("shell", {"command": command}) == RUINED
    assert await task.repaired(trace, container) == 0.0
    assert "ruined" in trace.info


@pytest.mark.slow
async def test_a_container_that_was_killed_from_outside_fails_the_episode(
    container: vf.Runtime,
) -> None:
    task = next(iter(SweSandboxTaskset(SweSandboxConfig(id="gradus-swe-sandbox"))))
    trace: Any = FakeTrace()
    await task.setup(trace, container)
    subprocess.run(["podman", "kill", str(container.info.id)], check=True, capture_output=True)
    with pytest.raises(SandboxError):
        await task.repaired(trace, container)


class StuckRuntime:
    """A container in which a command that does something never ends."""

    async def run(self, words: list[str], _: Any) -> ProgramResult:
        if words != ["true"]:
            await asyncio.Event().wait()
        return ProgramResult(0, "", "")

    async def write(self, *_: Any) -> None:
        return

    async def read(self, *_: Any, **__: Any) -> bytes:
        return await asyncio.Event().wait() and b""


async def test_a_container_in_which_nothing_ends_earns_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in ("gradus_swe_sandbox.shell", "gradus_swe_sandbox.taskset"):
        monkeypatch.setattr(f"{module}.GRACE_SECONDS", -0.99)
    monkeypatch.setattr("gradus_general_agent.taskset.GRACE_SECONDS", 0.01)
    runtime: Any = StuckRuntime()
    keys: Any = {"id": "gradus-swe-sandbox", "task": {"seconds": 1}}
    repair = next(iter(SweSandboxTaskset(SweSandboxConfig(**keys))))
    job = next(iter(GeneralAgentTaskset(GeneralAgentConfig(id="gradus-general-agent"))))
    trace: Any = FakeTrace()
    shell = Shell(runtime, ShellHarnessConfig(command_seconds=1.0))
    assert "no answer after" in await shell.call("shell", {"command": "ls"})
    assert await repair.repaired(trace, runtime) == 0.0
    assert trace.info["ruined"] == "the checks did not end"
    assert await job.answered(trace, runtime) == 0.0


@pytest.mark.parametrize("answer", [None, ProgramResult(125, "", "no such container")])
async def test_a_container_that_the_engine_lost_fails_the_episode(
    answer: ProgramResult | None,
) -> None:
    runtime: Any = LostRuntime(answer)
    task = next(iter(SweSandboxTaskset(SweSandboxConfig(id="gradus-swe-sandbox"))))
    trace: Any = FakeTrace()
    with pytest.raises(SandboxError):
        await task.repaired(trace, runtime)
    job = next(iter(GeneralAgentTaskset(GeneralAgentConfig(id="gradus-general-agent"))))
    with pytest.raises(SandboxError):
        await job.answered(trace, runtime)
    with pytest.raises((EnvironmentFailure, SandboxError)):
        await Shell(runtime, ShellHarnessConfig()).call("shell", {"command": "ls"})


@pytest.mark.slow
async def test_an_answer_in_the_file_pays(container: vf.Runtime) -> None:
    task = next(iter(GeneralAgentTaskset(GeneralAgentConfig(id="gradus-general-agent"))))
    trace: Any = FakeTrace()
    await task.setup(trace, container)
    rewards = []
    for content in (None, "", f"{task.data.answer}\n", f"It is {task.data.answer}.", "x" * 10**5):
        if content is not None:
            await container.write(ANSWER, content.encode())
        rewards.append(await task.answered(trace, container))
    assert rewards == [0.0, 0.0, 1.0, 0.0, 0.0]


@pytest.mark.slow
async def test_no_container_is_left_when_an_episode_is_cancelled() -> None:
    if not has_image():
        pytest.skip(f"podman with the image {LOCAL_IMAGE} is not installed here")
    names: list[str] = []

    async def episode() -> None:
        async with provision_runtime(PodmanConfig(image=LOCAL_IMAGE)) as runtime:
            names.append(str(runtime.info.id))
            await runtime.run(["sleep", "1000"], {})

    task = asyncio.create_task(episode())
    while not names:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    listed = subprocess.run(
        ["podman", "ps", "-a", "--format", "{{.ID}}"], capture_output=True, text=True, check=True
    )
    assert names[0] not in listed.stdout.split()
