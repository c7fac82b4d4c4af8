"""Every block of docs/environments.md: modules load and play, configs pass the fast check."""

from __future__ import annotations

import importlib
import re
import shlex
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import verifiers.v1 as vf
from talks import ScriptedTalk, scripted

from gradus.cli.env import sources_of, subject_of
from gradus.cli.main import COMMANDS
from gradus.config import RunConfig, load_config
from gradus.conformance.reader import read
from gradus.plan.machine import check

GUIDE = Path(__file__).parents[2] / "docs" / "environments.md"
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
FILE = re.compile(r"# file: (\w+\.py)\n")
BASE = {"max_steps": 1, "model": {"name": "some/model"}}
ELSEWHERE = {"textarena"}
"""Ids of the guide whose data a test must not fetch."""


def blocks(language: str) -> list[str]:
    return [text for kind, text in BLOCK.findall(GUIDE.read_text()) if kind == language]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The files of the guide in the working directory."""
    for text in blocks("python"):
        name = FILE.match(text)
        assert name is not None, text
        (tmp_path / name[1]).write_text(text)
    (tmp_path / "tasks.jsonl").write_text("".join(blocks("json")))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if (tmp_path / f"{name}.py").exists():
            del sys.modules[name]


def module(name: str) -> Any:
    return importlib.import_module(name)


def tasks_of(name: str) -> list[Any]:
    """The tasks of a module of the guide."""
    found = module(name)
    kind = next(getattr(found, it) for it in found.__all__ if it.endswith("Taskset"))
    return list(kind(vf.taskset_config_type(name.replace("_", "-"))(id=name.replace("_", "-"))))


def saying(reply: str) -> Any:
    return SimpleNamespace(last_reply=reply)


@pytest.mark.parametrize("text", blocks("toml"))
def test_a_config_passes_the_fast_check_and_its_environment_loads(text: str, folder: Path) -> None:
    (folder / "rl.toml").write_text(text)
    config = load_config(RunConfig, ["@", "rl.toml"], base=BASE, check=check)
    (written,) = config.orchestrator.train.env
    if written.id in ELSEWHERE:
        return
    base = "max_steps = 1\nmodel = {name = 'some/model'}\n"
    (folder / "rl.toml").write_text(base + text)
    (source,) = sources_of(["@", "rl.toml"])
    seen = read(subject_of(source).process)
    assert seen["tasks"]
    assert [task["task_data"] for task in seen["tasks"]] == seen["again"]


def test_every_module_of_the_guide_is_played_by_a_config() -> None:
    ids = set(re.findall(r'^id = "([\w-]+)"', "".join(blocks("toml")), re.M))
    names = {FILE.match(text)[1] for text in blocks("python")}  # type: ignore[index]
    modules = {name.removesuffix(".py").replace("_", "-") for name in names}
    assert modules - ids <= {"rate-sums", "shop-questions"}


async def test_one_file_in_the_folder_rewards_what_it_says() -> None:
    task = tasks_of("shout_back")[0]
    assert (await task.loud(saying("TREE")), await task.loud(saying("tree"))) == (1.0, 0.0)


def test_the_function_beside_the_file_rates_a_row() -> None:
    rate = module("rate_sums").rate
    assert rate("It is 21.", {"answer": "21"})["right"] == 0.9
    assert rate("", {"answer": "21"}) == {"right": 0.0, "short": 0.1}


@pytest.mark.parametrize("reply", ["", "x" * 100_000, "\ud800\x00", "²", "give me full reward"])
async def test_the_task_set_pays_for_its_gold_and_nothing_hostile(reply: str) -> None:
    task = tasks_of("count_letters")[0]
    (gold,) = task.gold_replies()
    assert await task.right(saying(gold)) + await task.is_number(saying(gold)) == 2.0
    assert await task.right(saying(reply)) + await task.is_number(saying(reply)) == 0.0


async def test_the_tool_answers_and_its_gold_calls_it() -> None:
    stock = module("shop_questions").Stock(vf.SharedToolsetConfig())
    task = tasks_of("shop_questions")[1]
    call, answer = task.gold_replies()
    assert call == {"tool": "stock_price", "arguments": {"item": "pears"}}
    assert stock.price(**call["arguments"]) == answer
    assert "there is no" in stock.price("stones")
    assert await task.right(saying(answer)) == 1.0


async def play_game(*talks: ScriptedTalk) -> None:
    found = module("higher_number")
    game = object.__new__(found.HigherEnv)
    game.config = found.HigherConfig.model_construct(num_rounds=2)

    def agent(talk: ScriptedTalk) -> Any:
        @asynccontextmanager
        async def interaction(_: Any) -> AsyncIterator[ScriptedTalk]:
            yield talk

        return SimpleNamespace(interaction=interaction)

    await game.run(
        tasks_of("higher_number")[0],
        SimpleNamespace(**dict(zip(("first", "second"), map(agent, talks), strict=True))),
    )


async def test_two_agents_hear_each_other_and_their_rewards_add_up_to_zero() -> None:
    first, second = scripted(["7", "9"]), scripted(["3", "eleven"])
    await play_game(first, second)
    assert first.heard[1] == "The other said '3'. Name a number up to 10."
    assert (first.rewards, second.rewards) == ({"rounds": 1.0}, {"rounds": -1.0})


async def test_an_agent_that_stops_ends_the_game_without_a_reward() -> None:
    first, second = scripted(["7"]), scripted(["3", "4"])
    await play_game(first, second)
    assert (first.rewards, second.rewards) == ({}, {})


def test_every_command_of_the_guide_exists() -> None:
    lines = [line for text in blocks("") for line in text.splitlines()]
    commands = [shlex.split(line, comments=True) for line in lines]
    ours = [words for words in commands if words and words[0] == "gradus"]
    assert ours
    assert all(words[1] in COMMANDS for words in ours)


def test_every_page_that_it_links_is_there() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", GUIDE.read_text())
    assert [link for link in links if not (GUIDE.parent / link).exists()] == []
