"""Containers of an environment process carry its name, and none outlives it for long."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from gradus.environments.containers import (
    LABEL,
    close_without_containers,
    engines_of,
    is_orphaned,
    owner_label,
    refuse_silent,
    remove_containers,
    remove_left_over,
)
from gradus.errors import ConfigError

IMAGE = "localhost/gradus-sandbox:1"
"""Of the task sets with a container; any image with `sleep` would do."""
ENGINE = """#!/bin/sh
# Answers as an engine does, from a folder with one file for each container, its label in it.
cd "$(dirname "$0")/containers"
echo "$@" >> ../asked
case "$1" in
ps) ls ;;
inspect) shift 5; for id in "$@"; do echo "$id $(cat $id)"; done; rm -f going ;;
kill) ;;
rm) shift 2; for id in "$@"; do [ -e "$id" ] || exit 125; done; rm "$@" ;;
esac
"""


@pytest.fixture
def containers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of an engine named podman."""
    engine = tmp_path / "podman"
    engine.write_text(ENGINE)
    engine.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (tmp_path / "containers").mkdir()
    return tmp_path / "containers"


@pytest.fixture
def real_containers() -> Iterator[dict[str, str]]:
    """Containers of Podman: one of a process that was killed, and one of this process."""
    if shutil.which("podman") is None or podman("image", "exists", IMAGE) is None:
        pytest.skip(f"podman with the image {IMAGE} is not installed here")
    own = owner_label("real")
    started: dict[str, str] = {}
    try:
        for name, label in (("left", gone(own)), ("mine", own)):
            words = ("--detach", "--network=none", f"--label={LABEL}={label}")
            number = podman("run", *words, IMAGE, "sleep", "infinity")
            assert number, f"podman run gave no container {name}"
            started[name] = number
        yield started
    finally:
        podman("rm", "--force", "--ignore", "--time=0", *started.values())


def podman(*words: str) -> str | None:
    """What Podman says; None when it fails."""
    done = subprocess.run(["podman", *words], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def gone(label: str) -> str:
    """The label of a process that had the same pid at another time."""
    return f"{label.rpartition('.')[0]}.1"


def test_a_label_names_run_machine_and_process() -> None:
    prefix, run, _, pid, _ = owner_label("words").split(".")
    assert (prefix, run, pid) == ("gradus", "words", str(os.getpid()))


def test_only_a_process_of_this_machine_that_has_ended_leaves_orphans() -> None:
    own = owner_label("a.run.with.dots")
    machine = own.rsplit(".", 3)[1]
    assert is_orphaned(gone(own))
    assert not is_orphaned(own)
    assert not is_orphaned(gone(own).replace(machine, "0123456789ab"))


@pytest.mark.parametrize("label", ["", "gradus", "f00ba4", "gradus.a.b.c.d", "....", "x.y.z.1.1"])
def test_a_label_of_somebody_else_is_nobody_s_orphan(label: str) -> None:
    assert not is_orphaned(label)


async def test_what_a_killed_process_left_is_removed_and_nothing_else(containers: Path) -> None:
    own = owner_label("words")
    (containers / "left").write_text(gone(own))
    (containers / "mine").write_text(own)
    (containers / "other").write_text("f00ba4")
    assert await remove_left_over(["podman"]) == 1
    assert sorted(os.listdir(containers)) == ["mine", "other"]
    assert await remove_containers(["podman"], own.__eq__) == 1
    assert os.listdir(containers) == ["other"]


async def test_one_that_goes_by_itself_meanwhile_keeps_no_other(containers: Path) -> None:
    label = owner_label("words")
    for name in ("first", "going", "last"):
        (containers / name).write_text(label)
    assert await remove_containers(["podman"], label.__eq__) == 3
    assert list(containers.iterdir()) == []


@pytest.mark.slow
async def test_podman_loses_what_a_killed_process_left_and_then_one_s_own(
    real_containers: dict[str, str],
) -> None:
    def left() -> set[str]:
        listed = podman("ps", "--all", "--no-trunc", "--quiet")
        assert listed is not None
        return {name for name, number in real_containers.items() if number in listed.split()}

    assert left() == {"left", "mine"}
    await remove_left_over(["podman"])
    assert left() == {"mine"}
    assert await remove_containers(["podman"], owner_label("real").__eq__) == 1
    assert left() == set()


async def test_containers_go_before_those_who_would_wait_for_them(containers: Path) -> None:
    label = owner_label("words")
    (containers / "mine").write_text(label)
    seen: list[list[str]] = []

    async def close() -> None:
        seen.append(os.listdir(containers))
        (containers / "late").write_text(label)

    await close_without_containers(close, ["podman"], label)
    assert seen == [[]]
    assert os.listdir(containers) == []


async def test_an_engine_without_containers_is_asked_once(containers: Path) -> None:
    assert await remove_left_over(["podman"]) == 0
    assert len((containers.parent / "asked").read_text().splitlines()) == 1


async def test_an_engine_that_is_not_installed_has_no_containers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert await remove_left_over(["docker", "podman"]) == 0


def test_engines_are_those_of_the_seats() -> None:
    config = {
        "taskset": {"id": "words"},
        "agent": {"runtime": {"type": "podman", "image": "x"}},
        "judge": {"runtime": {"type": "subprocess"}},
        "timeout": {},
    }
    assert engines_of(config) == ["podman"]


def test_a_container_engine_that_does_not_answer_is_refused_with_one_that_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for engine, line in (("docker", "echo no daemon >&2; exit 1"), ("podman", "exit 0")):
        (tmp_path / engine).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / engine).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    refuse_silent(["podman"])
    with pytest.raises(ConfigError, match="'docker' does not answer: no daemon; start it") as told:
        refuse_silent(["podman", "docker"])
    assert 'write agent.runtime = {type = "podman"}' in str(told.value)
