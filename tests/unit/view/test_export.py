"""An export shows what the served page shows, from files alone, and holds no secret."""

from __future__ import annotations

import errno
import json
import re
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestServer
from browser import CHROMIUM, a_page
from run_folders import a_run, a_run_of_namesakes, add_episode

from gradus.cli.main import main
from gradus.errors import StorageError
from gradus.view.export import MAX_EPISODES, Exported, _Collection, collect
from gradus.view.screens import logs
from gradus.view.server import Viewer
from gradus.view.shelf import open_shelf

HOSTILE = "</script><img src=http://127.0.0.1:1/a>\u202e\u2028"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    metrics = [{"episode/reward/mean": x / 4, "loss/total/mean": 1.0 - x} for x in range(4)]
    root = a_run(tmp_path / "run", metrics=metrics)
    for step in range(4):
        for number in range(6):
            reply = f"{HOSTILE} {step}.{number}"
            add_episode(root, step=step, reward=number / 5, reply=reply, group=f"g{step}")
    return root


async def collected(root: Path, where: str = "", most: int = MAX_EPISODES) -> Exported:
    return await collect(open_shelf([root]), where=where, max_episodes=most)


def core(found: Exported) -> dict[str, Any]:
    text = found.files["data/core.js"].decode()
    read: dict[str, Any] = json.loads(text.removeprefix("globalThis.gradusExport = ")[:-2])
    return read


async def test_the_newest_episodes_that_pass_are_written_with_what_the_page_asks(
    root: Path,
) -> None:
    found = await collected(root, "reward > 0.5 and step > 1", 4)
    assert [(it["step"], it["reward"]) for it in core(found)["rows"]] == [
        (3, 0.6), (3, 0.8), (3, 1.0), (2, 0.6),
    ]  # fmt: skip
    assert found.num_left_out == 5
    # The replies of the first screen are there too, to be opened.
    assert len(found.episodes) == 6
    assert len([name for name in found.files if name.startswith("data/train-")]) == 6
    assert core(found)["curves"]["steps"]["loss/total/mean"]["y"] == [1.0, 0.0, -1.0, -2.0]
    assert "time" in str([*core(found)["answers"]])
    script = next(it for name, it in found.files.items() if name.startswith("data/train-"))
    assert b"<" not in script
    answers = json.loads(script.decode().removeprefix("gradusTake(")[:-3])
    episode = next(it for name, it in answers.items() if "/episodes/" in name)
    assert episode["traces"][0]["nodes"][1]["text"]["text"] == f"{HOSTILE} 3.3"


async def test_each_episode_of_a_run_that_plays_on_is_written_once(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = _Collection._ask

    async def play_on(self: _Collection, path: str, query: Any) -> Any:
        if path.endswith("/episodes"):
            add_episode(root, step=9, reward=1.0, reply="newer")
        return await ask(self, path, query)

    monkeypatch.setattr("gradus.view.export._ROWS", 10)
    monkeypatch.setattr(_Collection, "_ask", play_on)
    keys = [it["key"] for it in core(await collected(root))["rows"]]
    assert len(keys) == len({*keys}) == 4 * 6 + 1


async def test_no_secret_of_the_caller_gets_into_an_export(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = "hf_abcdefghijklmnopqrstuvwxyz"
    monkeypatch.setenv("HF_TOKEN", secret)
    add_episode(root, step=4, reward=0.0, reply=f"my key is {secret}", group="g4")
    (root / "notices.log").write_text(f"refused {secret}\n")
    (root / "logs").mkdir()
    (root / "logs/trainer.log").write_text(f"2026-11-26T10:54:08.307Z ERROR x t a: {secret}\n")
    spelled = [secret[place : place + 4] for place in range(0, len(secret), 4)]
    tokens = {"traces": [[{"ids": [*range(8)], "texts": spelled}]], "has_texts": True}
    monkeypatch.setattr("gradus.view.episode.TokenRecords.of", lambda *_: tokens)
    found = await collected(root)
    assert [name for name, content in found.files.items() if secret.encode() in content] == []
    assert [name for name, content in found.files.items() if b'"efgh"' in content] == []
    assert b"(removed)" in found.files["data/core.js"]


def test_every_script_of_the_page_is_named_once_and_writes_no_html(root: Path) -> None:
    assert main(["view", str(root), "--export", str(root.parent / "out")]) == 0
    html = (root.parent / "out/index.html").read_text()
    named = re.findall(r'<script src="([^"]+)"', html)
    page = root.parent / "out/page"
    scripts = [f"page/{it.relative_to(page)}" for it in page.rglob("*.js")]
    assert sorted(named) == sorted([*scripts, "data/core.js"])
    assert named[0] == "data/core.js"
    own = [it.read_text() for it in page.rglob("*.js") if it.parent.name != "vendor"]
    assert not [it for it in own if "innerHTML" in it]


@pytest.mark.parametrize("is_there", [False, True])
def test_a_full_disk_leaves_no_half_of_an_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_there: bool
) -> None:
    folder = tmp_path / "out"
    if is_there:
        folder.mkdir()
    write = Path.write_bytes

    def fill_up(path: Path, content: bytes) -> int:
        if path.name == "second":
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, content)

    monkeypatch.setattr(Path, "write_bytes", fill_up)
    with pytest.raises(StorageError, match="No space left on device"):
        Exported({"answers": {}}, {}, {"a/first": b"1", "second": b"2"}, 0).write(folder)
    assert (folder.is_dir(), list(folder.glob("*"))) == (is_there, [])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--export", "full"], "there is something in it"),
        (["--export", "run/out"], "lies in the run"),
        (["--export", "file"], "is a file"),
        (["--export", "out", "--where", "loss < 1"], "--where: the filter"),
        (["--export", "out", "--max-episodes", "0"], "--max-episodes 0"),
        (["--export", "out", "--open"], "serves nothing"),
        (["--max-episodes", "3"], "give it too"),
    ],
)
def test_what_cannot_be_written_is_refused_before_anything_is(
    root: Path,
    words: list[str],
    says: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(root.parent)
    Path("full").mkdir()
    Path("full/a").touch()
    Path("file").touch()
    before = sorted(root.parent.rglob("*"))
    assert main(["view", "run", *words]) == 64
    assert says in capsys.readouterr().err
    assert sorted(root.parent.rglob("*")) == before


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
@pytest.mark.parametrize("is_file", [False, True], ids=["folder", "file"])
async def test_an_export_opens_from_a_disk_and_asks_nobody(
    is_file: bool, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / "journal.jsonl").touch()
    (root / "logs").mkdir()
    (root / "logs/trainer.log").write_text("2026-11-26T10:54:08.307Z INFO x t a: b\n" * 3)
    monkeypatch.setattr(logs, "_MAX_LINES", 2)
    found = await collected(root, "step > 2", 11)
    place = tmp_path / "out/index.html"
    if is_file:
        place.parent.mkdir()
        place.write_bytes(found.page())
    else:
        found.write(place.parent)
    main_ = "document.querySelector('main')"
    async with a_page(tmp_path, f"file://{place}") as page:
        await page.until("document.querySelectorAll('.reply').length === 6")
        await page.until("document.querySelector('.uplot')")
        await page.value("(location.hash = '#/run/curves?search=loss')")
        await page.until("document.querySelector('figure .uplot')")
        await page.value("(location.hash = '#/run/episodes?reward=0.5..0.9&sort=reward')")
        await page.until("document.querySelectorAll('tr[data-row]').length === 4")
        cell = "document.querySelector('tr[data-row] td:nth-child(2)').textContent"
        assert await page.value(cell) == "0.6"
        told = "4 of 11 episodes; the export has the newest 11 of 12 with step > 2"
        assert (
            await page.value("document.querySelector('.tools [role=status]').textContent") == told
        )
        await page.key("j")
        await page.key("Enter")
        await page.until("document.querySelectorAll('.turn').length === 2")
        assert "⟨U+202E⟩" in await page.value("document.querySelector('.turn.own').textContent")
        await page.value("(location.hash = location.hash.replace('episode', 'group'))")
        await page.until("document.querySelectorAll('.reply').length === 6")
        # Of a group of more replies than are written, those that are there are named.
        group = "gradusExport.answers[`api/runs/run/groups/${location.hash.split('/').at(-1)}`]"
        other = "{count: 40, keys: ['train-0-0', 'train-0-1']}"
        await page.value(f"(Object.assign({group}, {other}), location.hash += '?sort=reward')")
        await page.until(f"{main_}.textContent.includes('The 6 best; gradus view shows all.')")
        # An episode that is not among the first of its group has none before and behind it.
        await page.value("(location.hash = location.hash.replace('group', 'episode'))")
        await page.until("document.querySelectorAll('.turn').length === 2")
        await page.key("l")
        await page.value("new Promise((done) => setTimeout(done, 50))")
        assert "by reward" not in await page.value(f"{main_}.textContent")
        assert "train-0-0" not in await page.value("location.hash")
        await page.value("(location.hash = '#/run/episode/train-0-0')")
        await page.until(f"{main_}.textContent.includes('not in the export')")
        # A bar leaves what it counts, also where a reward is the end of a bin.
        new = "{reward: Math.min(n, 4) / 4, 'part:a-b': 11 - n}"
        await page.value(f"gradusExport.rows.forEach((it, n) => Object.assign(it, {new}))")
        await page.value("(location.hash = '#/run/episodes')")
        bars = "[...document.querySelectorAll('.bins [aria-label^=\"reward \"]')].map((it) => it.ariaLabel.split(/: | /).slice(1))"  # noqa: E501
        await page.until(f"{bars}.length === 24")
        asked = "gradusAnswer('api/runs/run/episodes', [[{}]])"
        by_reward = asked.format("'reward', range")
        passing = f"async ([range]) => (await {by_reward}).passing"
        counts = await page.value(f"{bars}.map(([_, many]) => Number(many))")
        assert await page.value(f"Promise.all({bars}.map({passing}))") == counts
        assert sum(counts) == 11
        cells = "((it) => it.rows.map((row) => row['part:a-b']))"
        by_part = asked.format("'sort', 'part:a-b'")
        found = await page.value(f"{by_part}.then{cells}")
        assert found == list(range(1, 12))
        for view in ("evaluations", "settings", "logs", "time"):
            await page.value(f"(location.hash = '#/run/{view}')")
            await page.until(f"{main_}.textContent && !{main_}.textContent.includes('Reading …')")
            if view == "logs":
                assert "the newest 2 of 3 lines" in await page.value(f"{main_}.textContent")
        # What is not there is said beside the choice of steps, which stays as it was.
        choice = "document.querySelector('main select')"
        choose = f"({choice}.value = {{}}, {choice}.dispatchEvent(new Event('change')))"
        shown = f"{choice}.closest('.tools').querySelector('b').textContent === 'step 4'"
        await page.value(choose.format(1))
        await page.until(shown)
        await page.value(choose.format(5))
        await page.until(f"{main_}.textContent.includes('not in the export')")
        assert await page.value(f"{shown} && {choice}.value === '1'")
        assert page.complaints == []
        others = {it for it in page.requests if not it.startswith("file:")}
        assert {it for it in others if not it.startswith("data:")} == set()
        assert len(page.requests) > 1 or is_file


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
async def test_a_row_of_a_task_opens_its_own_episodes_here_and_there(tmp_path: Path) -> None:
    root = a_run_of_namesakes(tmp_path / "run")
    (await collected(root)).write(tmp_path / "out")
    cells = "[...document.querySelectorAll('tr[data-row]')].map((row) => [...row.cells].slice(0, 4).map((it) => it.textContent))"  # noqa: E501
    rows = [
        ["3", "words", "2", "0.25"],
        ["3", "words, evaluation", "1", "1"],
        ["3", "sums", "1", "1"],
    ]
    async with (
        TestServer(Viewer(open_shelf([root]), token="t").app(), host="127.0.0.1") as server,
        a_page(tmp_path, f"file://{tmp_path}/out/index.html") as page,
    ):
        for address in ("", f"{server.make_url('/')}?token=t"):
            if address:
                await page.go(address)
            await page.until("document.querySelector('h1')")
            for row in rows:
                await page.value("(location.hash = '#/run/episodes?by=task&task=9')")
                await page.until(f"{cells}.length === 0")
                await page.value("(location.hash = '#/run/episodes?by=task&sort=-source')")
                await page.until(f"{cells}.length === 3")
                assert await page.value(cells) == rows
                own = f"document.querySelectorAll('tr[data-row]')[{rows.index(row)}]"
                await page.value(f"({own}.click(), 1)")
                await page.until("!location.hash.includes('by=')")
                await page.until(f"{cells}.length === {row[2]}")
        assert page.complaints == []
