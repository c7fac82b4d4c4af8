"""The task set `wikispeedia`: pages, walks by tools, and what a walk is worth."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mcp.server.mcpserver import MCPServer
from pydantic import ValidationError

from gradus.errors import ConfigError
from gradus_wikispeedia.demonstrations import demonstrations
from gradus_wikispeedia.graph import Page, distances, page_text, snap_graph, world_graph
from gradus_wikispeedia.taskset import (
    PagesConfig,
    WalkState,
    WalkTools,
    WikispeediaConfig,
    WikispeediaTask,
    WikispeediaTaskset,
)
from gradus_wikispeedia.walk import link_on, refused, worth

GRAPH = world_graph()
PAGES = Path(__file__).parents[3] / "examples" / "recipes" / "wikispeedia_tiny" / "pages"
TEXTS = st.text(alphabet=st.characters())


def load(**keys: Any) -> list[WikispeediaTask]:
    return list(WikispeediaTaskset(WikispeediaConfig(id="gradus-wikispeedia", **keys)))


async def served(task: WikispeediaTask, **pages: Any) -> tuple[WalkTools, Any]:
    """The tools with the state of one episode, and its trace."""
    server = WalkTools(PagesConfig(**pages))
    await server.setup()
    trace = SimpleNamespace(state=server.state)
    await task.setup(trace, None)
    return server, trace


def way(task: WikispeediaTask) -> list[str]:
    """The links of a shortest way."""
    calls: list[Any] = task.gold_replies()
    assert {call["tool"] for call in calls} == {"click_link"}
    return [call["arguments"]["title"] for call in calls]


def test_our_pages_link_in_both_directions_and_all_reach_each_other() -> None:
    assert len(GRAPH) == 300
    assert all(link in GRAPH for page in GRAPH.values() for link in page.links)
    for target in list(GRAPH)[::29]:
        assert len(distances(GRAPH, target)) == 300


def test_walks_have_the_asked_length_and_none_comes_twice() -> None:
    tasks = load(num_tasks=100, min_clicks=3, max_clicks=4)
    assert len({(task.data.start, task.data.target) for task in tasks}) == 100
    for task in tasks:
        assert task.data.shortest == distances(GRAPH, task.data.target)[task.data.start]
        assert 3 <= task.data.shortest <= 4
        assert task.data.prompt.startswith(f"Target: {task.data.target}\nPage: {task.data.start}\n")


def test_the_sides_share_no_walk_and_the_seed_chooses_them() -> None:
    def walks(**keys: Any) -> set[tuple[str, str]]:
        return {(task.data.start, task.data.target) for task in load(num_tasks=60, **keys)}

    assert not walks() & walks(side="held_out")
    assert walks() == walks() != walks(seed=1)


async def test_the_shortest_way_is_worth_one_and_ends_the_episode() -> None:
    task = load(num_tasks=1)[0]
    server, trace = await served(task)
    for number, link in enumerate(way(task)):
        assert not await task.arrived(trace)
        said = server.click_link(link.upper() if number else link)
    assert said == f"You have arrived at {task.data.target}."
    assert await task.arrived(trace) is True
    assert await task.walked(trace) == 1.0
    assert await task.moves(trace) == task.data.shortest


async def test_a_detour_costs_and_coming_closer_is_worth_a_little() -> None:
    task = load(num_tasks=1, min_clicks=3)[0]
    links = way(task)
    server, trace = await served(task)
    assert await task.walked(trace) == 0.0
    server.click_link(links[0])
    assert await task.walked(trace) == pytest.approx(0.2 / task.data.shortest)
    assert f"Page: {task.data.start}" in server.go_back()
    for link in links:
        server.click_link(link)
    assert 0.5 < await task.walked(trace) < 1.0


async def test_links_that_are_not_there_move_nobody() -> None:
    task = load(num_tasks=1)[0]
    server, trace = await served(task)
    for asked in ("", task.data.target, "\ud800\x00", "x" * 100_000, "Give me full reward"):
        assert len(server.click_link(asked)) < 600
    assert "none before it" in server.go_back()
    assert (trace.state.path, trace.state.moves) == ([task.data.start], 0)
    assert await task.refused(trace) == 6.0
    assert await task.walked(trace) == await task.has_arrived(trace) == 0.0


async def test_an_episode_that_never_began_is_worth_nothing() -> None:
    task = load(num_tasks=1)[0]
    trace = SimpleNamespace(state=WalkState())
    assert await task.arrived(trace) is False
    assert await task.walked(trace) == 0.0


@given(TEXTS, st.lists(TEXTS, max_size=5))
def test_any_link_is_followed_or_refused(asked: str, links: list[str]) -> None:
    page = Page("here", "", tuple(links))
    assert link_on(page, asked) in (None, *links)
    assert "You are still on it." in refused(page, asked)


@given(st.integers(0, 50), st.integers(1, 20), st.one_of(st.none(), st.integers(0, 30)))
def test_a_walk_is_worth_a_share(moves: int, shortest: int, left: int | None) -> None:
    value = worth(moves, shortest=shortest, left=left)
    assert 0.0 <= value <= 1.0
    assert (value >= 0.5) == (left == 0)


def test_the_graph_of_snap_is_read_from_its_files(tmp_path: Path) -> None:
    lines = "# a comment\n\n%C3%85land\tBaltic_Sea\nBaltic_Sea\tEarth\nEarth\t%C3%85land\n"
    (tmp_path / "links.tsv").write_text(lines, encoding="utf-8")
    (tmp_path / "plaintext_articles").mkdir()
    (tmp_path / "plaintext_articles" / "Baltic_Sea.txt").write_text("A  sea.\n" * 9999)
    graph = snap_graph(tmp_path)
    assert graph["Åland"].links == ("Baltic Sea",)
    assert page_text(graph["Baltic Sea"], tmp_path).startswith("A sea. A sea.")
    assert len(page_text(graph["Baltic Sea"], tmp_path)) < 1600
    assert page_text(graph["Earth"], tmp_path) == ""
    pages = {"source": "snap", "path": tmp_path}
    tasks = load(pages=pages, min_clicks=2, max_clicks=2, holdout_fraction=0.0)
    assert len(tasks) == 3
    sent = type(tasks[0].data).model_validate(tasks[0].data.model_dump(mode="json"))
    assert sent == tasks[0].data


def test_a_relative_path_means_the_same_to_the_server_in_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    pages = PagesConfig.model_validate({"source": "snap", "path": "pages"})
    assert pages.path == tmp_path / "pages"
    assert PagesConfig.model_validate_json(pages.model_dump_json()) == pages


@pytest.mark.parametrize(
    ("text", "words"),
    [("a\tb\nc d\n", "line 2: 'c d' is not two names"), ("# only\n", "holds no links")],
)
def test_files_that_are_not_snaps_are_told(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "links.tsv").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=words):
        snap_graph(tmp_path)


def test_a_folder_without_the_files_says_what_to_fetch(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"Unpack wikispeedia_paths-and-graph\.tar\.gz"):
        snap_graph(tmp_path / "none")


@pytest.mark.parametrize(
    "keys",
    [{"min_clicks": 5}, {"pages": {"source": "snap"}}, {"pages": {"path": "somewhere"}}],
)
def test_keys_that_do_not_go_together_are_refused(keys: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=r"use min_clicks|go together"):
        WikispeediaConfig(id="x", **keys)


async def test_demonstrations_declare_the_tools_of_the_server_and_click_on_links_of_the_page() -> (
    None
):
    server = WalkTools(PagesConfig())
    await server.setup()
    mcp = MCPServer("walk")
    server.register(mcp)
    offered = {tool.name: (tool.description, tool.input_schema) for tool in await mcp.list_tools()}
    pages = snap_graph(PAGES)
    rows = demonstrations(300, graph=pages, seed=0, instruction="Walk.")
    assert rows == demonstrations(300, graph=pages, seed=0, instruction="Walk.")
    declared = [tool["function"] for tool in rows[0]["tools"]]
    assert {it["name"]: (it["description"], it["parameters"]) for it in declared} == offered
    num_right = 0
    for row in rows:
        _, user, reply = row["messages"]
        target, page = (line.partition(": ")[2] for line in user["content"].splitlines()[:2])
        title = reply["tool_calls"][0]["function"]["arguments"]["title"]
        assert {target, title} <= set(pages[page].links)
        num_right += title == target
    assert 60 < num_right < 140
