"""The rules that judge, pick and oppose in the small debate, and what its warm-up shows."""

from __future__ import annotations

import json
import sys
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from gradus.cli.main import main
from gradus_debate.environment import case_of
from gradus_debate.settings import DebateEnvConfig, rules_of
from gradus_debate.taskset import DebateTaskset, DebateTasksetConfig
from gradus_kit.multiagent.channels import Channel, Said
from gradus_kit.multiagent.kernel import DialogueState
from gradus_kit.multiagent.prompts import Prompter

pytestmark = pytest.mark.torch

REPOSITORY = Path(__file__).parents[3]
FOLDER = REPOSITORY / "examples" / "recipes" / "debate_tiny"
QUESTION = "max\n\nA) 3\nB) 8"
A, B = "<answer>A</answer>", "<answer>B</answer>"
HIDDEN = "The reply could not be read."


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    for name in ("models", "learn"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import learn
    import models

    yield {"learn": learn, "models": models}
    for name in ("models", "learn"):
        sys.modules.pop(name, None)


def debate(first: str, second: str) -> str:
    return f"{QUESTION}\n[debater_a, propose]\n{first}\n[debater_b, propose] {second}\nWho won?"


@pytest.mark.parametrize(
    ("first", "second", "winner"),
    [(A, B, "debater_b"), (B, A, "debater_a"), (B, HIDDEN, "debater_a"), (A, A, "tie")],
)
def test_the_judge_prefers_the_right_letter(
    modules: Any, first: str, second: str, winner: str
) -> None:
    assert modules["models"].judged(debate(first, second)) == f"<decision>{winner}</decision>"


def test_the_judge_takes_one_of_two_that_are_right(modules: Any) -> None:
    assert "debater" in modules["models"].judged(debate(B, B))


def test_the_models_answer_over_http_and_leave_the_port(modules: Any) -> None:
    with modules["models"].served_models() as url:
        body = {"model": "opponent", "messages": [{"role": "user", "content": QUESTION}]}
        request = urllib.request.Request(
            f"{url}/chat/completions", json.dumps(body).encode(), {"Content-Type": "text/plain"}
        )
        with urllib.request.urlopen(request, timeout=10) as reply:
            answer = json.load(reply)
    assert answer["choices"][0]["message"]["content"] in (A, B)
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(url, timeout=10)


def test_the_warm_up_shows_replies_that_cannot_be_read_and_wrong_letters(modules: Any) -> None:
    shown = modules["learn"].demonstrations(2_000, seed=0)
    replies = [row["messages"][-1]["content"] for row in shown]
    errors = [Channel().split(Said(reply)).parse_error for reply in replies]
    kinds = Counter("none" if error is None else error for error in errors)
    assert kinds["<thinking> is never closed"] / 2_000 == pytest.approx(0.35, abs=0.05)
    assert len(kinds) == 2


@pytest.mark.parametrize("name", ["selfplay", "opponent", "consultancy", "rlvr"])
def test_each_run_passes_the_fast_check(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    files = [f"examples/recipes/debate_tiny/{part}.toml" for part in ("base", name)]
    words = ["@", files[0], "@", files[1], "--model.name", "someone/tiny"]
    assert main(["check", "rl", "--level", "config", *words]) == 0


@pytest.mark.parametrize("name", ["debate", "consultancy", "rlvr"])
def test_each_pack_plays(name: str) -> None:
    rules = rules_of(DebateEnvConfig(id="gradus-debate", pack=str(FOLDER / f"{name}.yaml")))
    assert rules.scorer.contestants == (
        ("debater_a", "debater_b") if name == "debate" else ("consultant",)
    )


@pytest.mark.parametrize("name", ["debate", "consultancy", "rlvr"])
def test_the_warm_up_shows_what_the_environment_asks(name: str, modules: Any) -> None:
    rules = rules_of(DebateEnvConfig(id="gradus-debate", pack=str(FOLDER / f"{name}.yaml")))
    config = DebateTasksetConfig(
        id="gradus-debate", kinds=["digits"], num_tasks=90, assign_sides=name == "consultancy"
    )
    shown = {
        (row["messages"][0]["content"], row["messages"][1]["content"])
        for row in modules["learn"].demonstrations(4_000, seed=0)
    }
    for task in DebateTaskset(config):
        prompter, state = Prompter(rules.pack, rules.schedule, case_of(task.data)), DialogueState()
        slot = rules.schedule.program.current_slot(state)
        assert slot is not None
        member = slot.members[0]
        assert (prompter.system(member), prompter.delta(state, member, slot)) in shown
