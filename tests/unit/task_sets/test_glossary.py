"""The task sets `glossary` and `deepwiki`: what their tools answer leads to the right answer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from gradus.errors import ConfigError
from gradus_deepwiki.taskset import (
    WIKIS,
    DeepWikiConfig,
    DeepWikiTaskset,
    DeepWikiTools,
    DeepWikiToolsConfig,
)
from gradus_glossary.entries import build_glossary
from gradus_glossary.taskset import (
    GlossaryConfig,
    GlossaryTaskset,
    GlossaryTools,
    GlossaryToolsConfig,
)
from gradus_wiki_search.taskset import WikiSearchConfig, WikiSearchTaskset

SETS: dict[str, Any] = {
    "glossary": (GlossaryTaskset, GlossaryConfig, GlossaryTools(GlossaryToolsConfig())),
    "deepwiki": (DeepWikiTaskset, DeepWikiConfig, DeepWikiTools(DeepWikiToolsConfig())),
}
OTHERS: dict[str, Any] = {"wiki-search": (WikiSearchTaskset, WikiSearchConfig)}


def load(name: str, **keys: Any) -> list[Any]:
    pytest.importorskip("bm25s")
    taskset, config, *_ = (SETS | OTHERS)[name]
    return list(taskset(config(id=f"gradus-{name}", **keys)))


async def tools_of(name: str) -> Any:
    pytest.importorskip("bm25s")
    server = SETS[name][2]
    await server.setup()
    return server


def saying(reply: str) -> Any:
    return SimpleNamespace(last_reply=reply)


@pytest.mark.parametrize("name", SETS)
async def test_the_gold_calls_lead_to_the_answer_that_is_right(name: str) -> None:
    server = await tools_of(name)
    tasks = load(name)
    assert len({task.data.prompt for task in tasks}) == len(tasks) == 400
    for task in tasks[:40]:
        *calls, gold = task.gold_replies()
        tools = [call["tool"].removeprefix("glossary_") for call in calls]
        outputs = [
            getattr(server, tool)(**call["arguments"])
            for tool, call in zip(tools, calls, strict=True)
        ]
        assert task.data.answer in outputs[-1]
        assert await task.correct(saying(gold)) == 1.0
        everything = "".join(f"<answer>{one.data.answer}</answer>" for one in tasks)
        for reply in ("", task.data.answer, everything, str(task.data.prompt), "\ud800"):
            assert await task.correct(saying(reply)) == 0.0


@pytest.mark.parametrize("name", SETS)
def test_the_same_seed_asks_the_same_and_both_sides_are_apart(name: str) -> None:
    assert [t.data for t in load(name)] == [t.data for t in load(name)]
    assert load(name)[0].data.prompt != load(name, seed=1)[0].data.prompt
    sides = [load(name, holdout_fraction=0.3, side=side) for side in ("train", "held_out")]
    train, held_out = ({task.data.prompt for task in side} for side in sides)
    assert train
    assert held_out
    assert not train & held_out


def test_no_question_to_train_on_leads_to_a_held_out_word() -> None:
    """Whichever of its words that is: the last one has the answer."""
    train, held_out = (
        [set(task.data.words) for task in load("glossary", side=side, num_tasks=10_000)]
        for side in ("train", "held_out")
    )
    kept = set().union(*train)
    words = set(build_glossary()) - kept
    assert 0 < len(words) < len(kept)
    assert all(asked & words for asked in held_out)


@pytest.mark.parametrize("name", [*SETS, "wiki-search"])
def test_a_side_that_no_question_can_be_on_is_refused(name: str) -> None:
    keys = {"holdout_fraction": 0.0, "side": "held_out"}
    with pytest.raises(ConfigError, match="no task is on side"):
        load(name, **keys)


async def test_the_glossary_names_words_that_look_alike_and_finds_by_text() -> None:
    server = await tools_of("glossary")
    word = next(iter(build_glossary()))
    assert server.look_up(f" {word.upper()}").startswith(f"{word}: a tool of")
    assert word in server.look_up(word + "x")
    assert server.find("") == "No entry has all of these words."
    # Whole words: every entry has "tool", and none has "too".
    assert server.find("TOOL of").endswith("more")
    assert server.find("too") == "No entry has all of these words."
    assert server.find("nothing like it") == "No entry has all of these words."
    entry = build_glossary()[word]
    assert word in server.find(f"{entry.material} {entry.purpose} {entry.part_word}")


async def test_deepwiki_lists_reads_and_asks_one_wiki() -> None:
    server = await tools_of("deepwiki")
    title = next(iter(server.pages["country/town"]))
    assert f"- {title}" in server.read_wiki_structure("country/town")
    assert server.read_wiki_contents("country/town", title).startswith(f"# {title}\n")
    assert title in server.ask_question("country/town", f"Who is the mayor of {title}?")
    rivers = server.ask_question("country/river", f"Who is the mayor of {title}?")
    found = [line[2:] for line in rivers.splitlines() if line.startswith("# ")]
    assert found
    assert set(found) <= set(server.pages["country/river"])
    assert server.ask_question("country/river", "the") == "No page has these words."
    for tool in (server.read_wiki_structure, server.read_wiki_contents):
        assert "There is no wiki 'mine'" in tool("mine")
    assert all(len(server.read_wiki_contents(name)) < 6100 for name in WIKIS)
    # Only tools that deepwiki has are recommended.
    unknown = server.read_wiki_contents("country/town", "q" * 90)
    assert unknown.endswith("use read_wiki_structure")


@pytest.mark.parametrize(
    ("config", "keys"),
    [(GlossaryConfig, {"min_steps": 3}), (DeepWikiConfig, {"min_hops": 5, "max_hops": 2})],
)
def test_keys_that_do_not_go_together_are_refused(config: Any, keys: dict[str, int]) -> None:
    with pytest.raises(ValidationError, match="use min_"):
        config(id="x", **keys)
