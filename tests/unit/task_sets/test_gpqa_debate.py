"""The items of gpqa in a debate and in a consultancy, played by scripted members."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import verifiers.v1 as vf
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from gradus_debate import DebateEnv, DebateTask
from gradus_gpqa.items import generate_items
from gradus_gpqa.tasks import GpqaConfig
from gradus_gpqa_consultancy.assignment import assign_letters
from gradus_gpqa_consultancy.taskset import GpqaConsultancyEnv
from gradus_gpqa_debate.taskset import SEATS, GpqaDebateTaskset
from gradus_kit.multiagent.seats import RULES

Says = Callable[[str], str]
DEBATE, CONSULTANCY = "gradus-gpqa-debate", "gradus-gpqa-consultancy"


class Member:
    """An agent that answers by a function of what it hears."""

    def __init__(self, name: str, says: Says) -> None:
        self.trainable = True
        self.heard: list[str] = []
        self.rewards: dict[str, float] = {}
        self.metrics: dict[str, float] = {}
        self._says = says
        self.trace: Any = SimpleNamespace(
            agent=SimpleNamespace(name=name, trainable=name != "judge"),
            info={},
            errors=[],
            calls=[],
            stop_condition=None,
            num_turns=0,
            ok=True,
            record_reward=self.rewards.__setitem__,
            record_metrics=self.metrics.update,
        )

    @asynccontextmanager
    async def interaction(self, task: Any, *, on_trace: Callable[[Any], None]) -> Any:
        self.heard.append(task.data.system_prompt)
        on_trace(self.trace)
        yield self

    async def turn(self, text: str) -> Any:
        self.heard.append(text)
        self.trace.num_turns += 1
        reply = vf.AssistantMessage(content=self._says(text))
        return SimpleNamespace(terminated=False, messages=[reply])


async def play(
    taskset: dict[str, Any], number: int = 0, **says: Says
) -> tuple[DebateTask, dict[str, Member]]:
    """One episode of a task set, scored."""
    environment: Any = vf.load_environment(vf.resolve_env_config({"taskset": taskset}))
    task = list(environment.taskset)[number]
    members = {name: Member(name, say) for name, say in says.items()}
    agents: Any = SimpleNamespace(**members)
    await environment.run(task, agents)
    traces = [member.trace for member in members.values() if member.heard]
    await environment.finalize(task, SimpleNamespace(traces=traces))
    return task, members


def answers(letter: str) -> Says:
    return lambda _: f"<answer>{letter}</answer>"


async def test_two_debaters_are_rewarded_by_the_judge_and_sum_to_zero() -> None:
    (item,) = generate_items(1)
    wrong = item.letters.replace(item.answer, "")[0]
    _, members = await play(
        {"id": DEBATE, "num_items": 1},
        debater_a=answers(item.answer),
        debater_b=answers(wrong),
        judge=lambda _: "<decision>debater_a</decision>",
    )
    assert [m.rewards for m in members.values()] == [
        {"debate": 1.0},
        {"debate": -1.0},
        {"debate": 0.0},
    ]
    assert members["debater_a"].metrics["final_correct"] == 1.0
    assert members["debater_b"].metrics["final_correct"] == 0.0
    assert members["judge"].metrics["episode/judge_selected_correct"] == 1.0
    told = "\n".join(members["debater_b"].heard)
    assert item.question in told
    assert f"{item.answer}) {item.options[item.letters.index(item.answer)]}" in told


@pytest.mark.parametrize("rule", [*RULES, *SEATS])
def test_the_learning_seat_is_drawn_per_item_and_stays_when_items_are_added(rule: str) -> None:
    def seats(num: int) -> dict[str, str | None]:
        config = vf.resolve_env_config(
            {"taskset": {"id": DEBATE, "num_items": num, "learner_seat": rule}}
        )
        tasks = GpqaDebateTaskset(config.taskset)  # type: ignore[arg-type]
        return {str(task.data.name): task.data.learner_seat for task in tasks}

    few, many = seats(50), seats(100)
    assert few.items() <= many.items()
    assert set(many.values()) == ({rule} if rule in SEATS else set(SEATS))


async def test_only_the_learning_seat_may_train() -> None:
    _, members = await play(
        {"id": DEBATE, "num_items": 1, "learner_seat": "debater_b"},
        debater_a=answers("A"),
        debater_b=answers("B"),
        judge=lambda _: "<decision>tie</decision>",
    )
    assert [m.trainable for m in members.values()] == [False, True, False]


def test_a_seat_that_nobody_has_is_refused() -> None:
    with pytest.raises(ValidationError, match="neither a rule"):
        vf.resolve_env_config({"taskset": {"id": DEBATE, "learner_seat": "consultant"}})
    with pytest.raises(ValidationError, match="learner_seat"):
        vf.resolve_env_config({"taskset": {"id": CONSULTANCY, "learner_seat": "hash"}})


@pytest.mark.parametrize("number", range(4))
async def test_a_consultant_is_rewarded_when_the_judge_picks_the_assigned_answer(
    number: int,
) -> None:
    task, members = await play(
        {"id": CONSULTANCY, "num_items": 4},
        number,
        consultant=lambda _: "Believe me.",
        judge=answers("A"),
    )
    assigned = task.data.assigned_answers["consultant"]
    assert f"the answer is {assigned}" in members["consultant"].heard[0]
    assert members["consultant"].rewards == {"debate": float(assigned == "A")}
    assert not any("the answer is" in text for text in members["judge"].heard)


@given(st.integers(0, 60), st.integers(0, 5))
@settings(max_examples=15)
def test_the_assigned_answer_is_right_for_exactly_half(num: int, seed: int) -> None:
    items = generate_items(num, seed=1)
    letters = assign_letters(items, seed=seed)
    right = sum(letter == item.answer for letter, item in zip(letters, items, strict=True))
    assert right == len(items) // 2
    assert all(letter in item.letters for letter, item in zip(letters, items, strict=True))
    again = dict(zip(items[::-1], assign_letters(items[::-1], seed=seed), strict=True))
    assert [again[item] for item in items] == letters


def test_all_three_task_sets_ask_the_same_questions() -> None:
    config = {"num_items": 30, "seed": 4, "holdout_fraction": 0.2}
    asked = []
    for name in ("gradus-gpqa-rlvr", DEBATE, CONSULTANCY):
        environment = vf.load_environment(
            vf.resolve_env_config({"taskset": {"id": name, **config}})
        )
        asked.append([(task.data.name, task.data.answer) for task in environment.taskset])
    assert asked[0] == asked[1] == asked[2]
    assert 15 <= len(asked[0]) < 30


def test_the_consultancy_brings_its_own_pack() -> None:
    config: Any = vf.resolve_env_config({"taskset": {"id": CONSULTANCY}})
    environment = vf.load_environment(config)
    assert isinstance(environment, GpqaConsultancyEnv)
    assert isinstance(environment, DebateEnv)
    assert config.pack == "consultancy"
    assert len(GpqaConfig(id=CONSULTANCY).kinds) == 12
