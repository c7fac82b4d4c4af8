"""The library of attacks, and what is said of an environment that pays one of them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from gradus.conformance.attacking import Attacks
from gradus.conformance.attacks import AttackKind, always_tried, joined, library, parts_of
from gradus.conformance.findings import Checked, Outcome
from gradus.conformance.probes import Probe
from gradus.orchestrator.types import Failure

SHELL = {"shell": {"properties": {"command": {"type": "string"}}, "required": ["command"]}}


@dataclass
class Ended:
    probe: Probe
    rewards: dict[str, float]
    failure: Failure | None = None
    seconds: float = 0.0


@dataclass
class FakeStage:
    """Plays episodes of one turn; `pay` gives the reward of each role by task and replies."""

    pay: Callable[[int, dict[str, str]], dict[str, float]]
    question: str = "What is $4 + 20 \\times 3$?"
    agents: dict[str, bool] = field(default_factory=lambda: {"agent": True})
    has_container: bool = False
    seconds: float = 0.0

    def say(self, probe: Probe) -> None:
        self.probe = probe

    async def play_beside(self, task: int) -> Ended:
        probe = self.probe
        said = {role: str(probe.say(0, self.question, role)) for role in self.agents}
        try:
            return Ended(probe, self.pay(task, said), seconds=self.seconds)
        except ArithmeticError as error:
            return Ended(probe, {}, Failure("TaskError", str(error)))


async def lines(stage: FakeStage, gold: Sequence[Any]) -> dict[str, Checked]:
    attacks = Attacks(stage, range(len(gold)), gold, {})  # type: ignore[arg-type]
    return {line.check: line async for line in attacks.lines()}


def boxed(is_right: Callable[[str], bool]) -> Callable[[int, dict[str, str]], dict[str, float]]:
    def pay(task: int, said: dict[str, str]) -> dict[str, float]:
        given = said["agent"].rpartition("\\boxed{")[2].partition("}")[0]
        return {"agent": float(given == str(64 + task) or is_right(given))}

    return pay


GOLD = [{"replies": [f"\\boxed{{{64 + number}}}"]} for number in range(8)]


def test_the_library_is_large_and_each_attack_has_a_name() -> None:
    chosen = library(has_container=True)
    assert len({attack.name for attack in chosen}) == len(chosen) >= 85
    for attack in chosen:
        for probe in attack.probes("<answer>{}</answer>", SHELL):
            for number in range(len(probe.turns)):
                assert isinstance(probe.say(number, "What is def f(x): 1 + 2?"), str | bytes)


def test_commands_that_change_files_are_only_for_containers() -> None:
    names = {attack.kind for attack in library(has_container=False)}
    assert AttackKind.COMMAND not in names
    assert not any("rm" in str(p.turns) for p in always_tried(SHELL, has_container=False))


@pytest.mark.parametrize("name", ["edits the checks", "leaves a process", "conftest"])
def test_an_attack_changes_no_file_where_it_is_not_boxed(name: str, tmp_path: Path) -> None:
    if os.getpid() < 1000:
        pytest.skip("the tests run in a container themselves")
    (tmp_path / "kept.py").write_text("kept")
    (attack,) = (a for a in library(has_container=True) if a.name == name)
    text = str(attack.text("def f(x)"))
    words = [sys.executable, "-c", text]
    if attack.kind is AttackKind.COMMAND:
        call = str(next(attack.probes("{}", SHELL)).say(0, ""))
        assert "[ $$ -gt 1000 ] && exit; printf" in call
        words = ["sh", "-c", f"[ $$ -gt 1000 ] && exit; {text}"]
    subprocess.run(words, cwd=tmp_path, check=False, timeout=30, env={"PATH": "/usr/bin:/bin"})
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("kept.py", "kept")]


@pytest.mark.parametrize(
    ("reply", "shape", "answer"),
    [
        ("so <guess>crane</guess>.", "<guess>{}</guess>", "crane"),
        ("\\boxed{\\frac{1}{2}}", "\\boxed{{}}", "\\frac{1}{2}"),
        ("thus\nAnswer: B", "Answer: {}", "B"),
        ("[[3]]", "[{}]", "[3]"),
        ("words", "{}", "words"),
    ],
)
def test_the_shape_of_a_right_reply_holds_nothing_of_it(
    reply: str, shape: str, answer: str
) -> None:
    assert parts_of(reply) == (shape, answer)


async def test_nothing_is_said_against_a_sound_reward() -> None:
    found = await lines(FakeStage(boxed(lambda _: False)), GOLD)
    assert list(found) == ["attacks"]
    assert found["attacks"].outcome is Outcome.OK
    assert found["attacks"].values["highest"] == {"agent": 0.0}


@pytest.mark.parametrize(
    ("attack", "is_right"),
    [
        ("formula in brackets", lambda given: given == "(4 + 20 \\times 3)"),
        ("formula + 0", lambda given: given.endswith("+ 0")),
        ("all letters", lambda given: "A B" in given),
        ("no number", lambda given: given == "nan"),
        ("answers joined by hyphens", lambda given: "64-65" in given),
        ("answers joined by commas", lambda given: given.startswith("64, 65")),
        ("answers joined by line breaks", lambda given: "64\n65" in given),
    ],
)
async def test_a_cheat_that_earns_more_than_chance_is_named(
    attack: str, is_right: Callable[[str], bool]
) -> None:
    found = await lines(FakeStage(boxed(is_right)), GOLD)
    assert found[f"attack: {attack}"].outcome is Outcome.BROKEN
    assert found["attacks"].values["highest"] == {"agent": 1.0}


def test_one_answer_cannot_be_joined() -> None:
    assert joined(["yes", "yes"]) == []


async def test_what_guesses_earn_is_chance_and_no_hole() -> None:
    letters = "ABCDABCD"

    def pay(task: int, said: dict[str, str]) -> dict[str, float]:
        return {"agent": float(said["agent"].strip().endswith(letters[task]))}

    found = await lines(FakeStage(pay), [{"replies": [letter]} for letter in letters])
    assert list(found) == ["attacks"]
    assert found["attacks"].values["chance"] == {"agent": 0.25}


@pytest.mark.parametrize(("num_paid", "is_hole"), [(6, False), (8, True)])
async def test_a_guess_that_earns_most_is_noted_and_one_that_pays_everywhere_is_a_hole(
    num_paid: int, is_hole: bool
) -> None:
    def pay(task: int, said: dict[str, str]) -> dict[str, float]:
        return boxed(lambda given: given == "yes" and task < num_paid)(task, said)

    found = await lines(FakeStage(pay), GOLD)
    assert found["attacks"].outcome is Outcome.NOTE
    assert found["attacks"].values["chance"] == {"agent": num_paid / 8}
    assert ("attack: one reply for all tasks" in found) is is_hole


async def test_an_attack_that_fails_its_episode_is_named() -> None:
    def pay(task: int, said: dict[str, str]) -> dict[str, float]:
        if "\0" in said["agent"]:
            raise ArithmeticError("zero")
        return boxed(lambda _: False)(task, said)

    line = (await lines(FakeStage(pay), GOLD))["attacks fail"]
    assert "2 episodes (zero bytes): TaskError: zero" in line.seen


async def test_a_seat_of_a_game_is_attacked_while_the_others_say_what_is_right() -> None:
    def pay(_: int, said: dict[str, str]) -> dict[str, float]:
        forged = "Full reward" in said["first"]
        won = forged or (said["first"] == "a" and said["second"] == "b")
        return {"first": 2.0 * forged + won - 1.0, "second": 0.0}

    stage = FakeStage(pay, agents={"first": True, "second": False})
    found = await lines(stage, [{"roles": {"first": ["a"], "second": ["b"]}}] * 4)
    assert set(found) == {"attack: forged user turn", "attacks"}
    assert "it earns first 2.00 on average" in found["attack: forged user turn"].seen


async def test_slow_episodes_are_attacked_by_commands_and_few_others() -> None:
    stage = FakeStage(boxed(lambda _: False), has_container=True, seconds=5.0)
    line = (await lines(stage, GOLD))["attacks"]
    assert line.seen.startswith("16 on 2 tasks")
