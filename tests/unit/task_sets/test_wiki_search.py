"""The task sets `wiki-search` and `deepdive`: articles, questions, search, and answers."""

from __future__ import annotations

import sys
import time
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from verifiers.v1.types import ToolMessage
from verifiers.v1.utils.decorators import discover_decorated

from gradus.errors import ConfigError
from gradus_deepdive.taskset import DeepDiveConfig, DeepDiveTask, DeepDiveTaskset
from gradus_kit.tasksets.same import same_answer
from gradus_wiki_search.answers import read_answer
from gradus_wiki_search.questions import make_questions
from gradus_wiki_search.search import Library
from gradus_wiki_search.taskset import (
    WikiSearchConfig,
    WikiSearchTask,
    WikiSearchTaskset,
    WikiTools,
    WikiToolsConfig,
)
from gradus_wiki_search.world import build_world

if find_spec("bm25s") is None:
    pytest.skip("bm25s is not installed", allow_module_level=True)

TEXTS = st.text(alphabet=st.characters())
WORLD = build_world()


def load(**keys: Any) -> list[WikiSearchTask]:
    return list(WikiSearchTaskset(WikiSearchConfig(id="gradus-wiki-search", **keys)))


def library() -> Library:
    return Library({title: article.text for title, article in WORLD.items()})


def trace(reply: str, read: tuple[str, ...] = ()) -> Any:
    outputs = [ToolMessage(tool_call_id="c", content=f"# {title}\ntext") for title in read]
    return SimpleNamespace(last_reply=reply, tool_messages=outputs)


def test_the_encyclopedia_has_two_hundred_articles_that_name_each_other() -> None:
    assert len(WORLD) == 200
    assert WORLD == build_world(0) != build_world(1)
    for article in WORLD.values():
        for link in article.links:
            assert link in article.text
            assert link in WORLD
        assert all(value in article.text for value in article.values.values())


def test_a_question_is_answered_by_following_its_articles() -> None:
    questions = list(islice(make_questions(WORLD, hops=(1, 5), seed=2), 100))
    assert len({question.text for question in questions}) == 100
    for question in questions:
        assert 1 <= len(question.titles) <= 5
        assert question.titles[0] in question.text
        assert not any(title in question.text for title in question.titles[1:])
        for here, ahead in zip(question.titles, question.titles[1:], strict=False):
            assert ahead in WORLD[here].links
        assert question.answer in WORLD[question.titles[-1]].values.values()


def test_a_country_has_an_end_of_questions() -> None:
    assert 100 < len(list(make_questions(WORLD, hops=(1, 1), seed=0))) < 400


def test_search_finds_an_article_by_its_title_and_by_its_words() -> None:
    titles = list(WORLD)
    for title in titles[::17]:
        assert title in library().search(title).split("\n")[0]
    person = next(article for article in WORLD.values() if article.kind == "person")
    words = f"{person.values['profession']} born in {person.relations['birthplace']}"
    assert person.title in library().search(words)


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("", "give some words"),
        ("the of and", "give some words"),
        ("xyzzy", "No article has these words"),
        ("\ud800\x00", "give some words"),
    ],
)
def test_a_search_for_nothing_says_so(query: str, words: str) -> None:
    assert words in library().search(query)


def test_reading_takes_any_case_and_names_what_looks_like_it() -> None:
    assert library().read(" the AMBER meadow ").startswith("# The Amber Meadow\n")
    assert "The Amber Meadow" in library().read("The Amber Medow")
    assert "none; use wiki_search" in library().read("q" * 100_000)
    assert len(Library({"long": "x" * 10**6, "b": "y"}).read("long")) < 6100


@given(TEXTS)
def test_tools_answer_any_text_in_bounds(text: str) -> None:
    tools = library()
    for answer in (tools.search(text * 50), tools.read(text * 50)):
        assert 0 < len(answer) < 7000


async def test_the_server_offers_both_tools_over_our_articles() -> None:
    server = WikiTools(WikiToolsConfig())
    await server.setup()
    title = next(iter(WORLD))
    assert server.read(title) == f"# {title}\n{WORLD[title].text}"
    assert title in server.search(title)
    assert [type(tools) for tools in WikiSearchTaskset.toolsets(WikiSearchConfig(id="x"))] == [
        WikiTools
    ]


async def test_only_the_right_answer_is_worth_one() -> None:
    task = load(num_tasks=1)[0]
    gold = f"It is <answer> {task.data.answer}. </answer>"
    assert await task.correct(trace(gold)) == 1.0
    for reply in (
        "",
        task.data.answer,
        gold * 3,
        "<answer></answer>",
        "<answer>give me full reward</answer>",
        f"<answer>{task.data.prompt}</answer>",
        "".join(f"<answer>{year}</answer>" for year in range(1100, 2000)),
        f"<answer>{' '.join(map(str, range(100)))}</answer>",
        "\ud800\x00",
        "<answer>" * 12_000,
        "7" * 100_000,
    ):
        started = time.process_time()
        assert await task.correct(trace(reply)) == 0.0, reply[:40]
        assert time.process_time() - started < 0.5


async def test_evidence_is_what_was_read_of_the_way() -> None:
    task = load(num_tasks=1, min_hops=2, max_hops=2)[0]
    first, second = task.data.titles
    assert await task.evidence(trace("", ())) == 0.0
    assert await task.evidence(trace("", (first, "other"))) == 0.5
    assert await task.evidence(trace("", (first, second, first))) == 1.0
    assert await task.tool_calls(trace("", (first,))) == 1.0


async def test_a_deep_dive_is_worth_something_for_what_it_read() -> None:
    task: DeepDiveTask = next(iter(DeepDiveTaskset(DeepDiveConfig(id="d", num_tasks=1))))
    titles = task.data.titles
    assert len(titles) >= 3
    *reads, answer = task.gold_replies()
    assert [call["arguments"]["title"] for call in reads] == list(titles)
    assert [it.__name__ for it in discover_decorated(task, "reward")] == ["found"]
    assert await task.found(trace(answer)) == 1.0
    assert await task.found(trace("<answer>?</answer>", titles)) == pytest.approx(0.2)
    assert 0.0 < await task.found(trace("", titles[:1])) < 0.1
    assert await task.found(trace("")) == 0.0


@pytest.mark.parametrize(
    ("said", "right", "is_same"),
    [
        ("1.5", "15", False),
        ("-5", "5", False),
        ("12,50", "1250", False),
        ("19 14", "1914", False),
        ("125%", "12.5%", False),
        ("20/3", "203", False),
        ("35 km", "3.5 km", False),
        ("-5 C", "5 C", False),
        (".5", "5", False),
        (".5", "0.5", True),
        ("\u22125", "-5", True),
        ("\u22125 C", "-5 C", True),
        ("\u22125", "5", False),
        ("5 %", "5%", True),
        ("-$5", "-5", True),
        ("3:45", "345", False),
        ("5+3", "53", False),
        ("Apollo 1/1", "Apollo 11", False),
        ("between -7 and 5", "between 7 and 5", False),
        ("1914 - 1918", "1914-1918", True),
        ("3.5 km.", "the 3.5 km", True),
        ("$1,250", "1250", True),
        ("the 1,250.", "1250.0", True),
        ("5%", "5", True),
        ("O\u2019Brien", "O'Brien", True),
        ("1914\u20131918", "1914-1918", True),
        ("well known", "Well-known", True),
        ("cooperate", "co-operate", True),
        ("a the", "an", False),
        ("A", "a", True),
        ("the the", "The The", True),
        ("The", "A", False),
        *((said, "C", False) for said in ("C++", "C#", "C+")),
        ("c++.", "C++", True),
        ("10+", "10", False),
        ("\u00b2", "2", False),
        ("10\u00b2", "102", False),
        ("10\u00b2", "10^2", True),
        ("25 km\u00b2", "25 km2", True),
        ("1,2 and 3", "12 and 3", False),
        ("1 , 2", "1,2", True),
        ("Paris,Rome", "Paris, Rome", True),
        ("1,250 people", "1250 people", True),
    ],
)
def test_a_point_and_a_sign_count_and_marks_do_not(said: str, right: str, is_same: bool) -> None:
    assert same_answer(said, right) == is_same


@given(TEXTS, TEXTS)
def test_answers_compare_without_a_crash(said: str, right: str) -> None:
    assert same_answer(said, right) == same_answer(right, said)
    assert read_answer(f"<answer>{said}</answer>") in (None, said.strip())


@pytest.mark.parametrize(
    "keys", [{"min_hops": 4}, {"source": "hub"}, {"tools": {"source": "hub"}}, {"max_hops": 9}]
)
def test_keys_that_do_not_go_together_are_refused(keys: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=r"use min_hops|use the same|less than"):
        WikiSearchConfig(id="x", **keys)


def test_a_missing_package_is_told_before_any_server_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "bm25s", None)
    with pytest.raises(ConfigError, match=r"pip install 'gradus-rl\[tasks\]'"):
        load()


@pytest.mark.filterwarnings("ignore")
async def test_questions_and_articles_come_from_the_public_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    for name, rows in (
        ("asked", {"question": ["Who?", "What?"], "answer": ["Ann", "a box"]}),
        ("pages", {"title": ["Ann", "Box"], "content": ["Ann paints.", "A box is square."]}),
    ):
        (tmp_path / name).mkdir()
        datasets.Dataset.from_dict(rows).to_parquet(str(tmp_path / name / "train-0.parquet"))
    tools = {"source": "hub", "dataset": str(tmp_path / "pages")}
    tasks = load(source="hub", dataset=str(tmp_path / "asked"), tools=tools, holdout_fraction=0.0)
    assert [task.data.answer for task in tasks] == ["Ann", "a box"]
    assert await tasks[1].correct(trace("<answer>Box</answer>")) == 1.0
    assert await tasks[1].evidence(trace("", ("Box",))) == 0.0
    server = WikiTools(WikiToolsConfig(**tools))
    await server.setup()
    assert server.search("paints") == "1. Ann: Ann paints."
