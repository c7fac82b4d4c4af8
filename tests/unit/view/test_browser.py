"""The page in a real browser: by keys alone, with hostile texts, asking nobody else."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest
from aiohttp.test_utils import TestServer
from browser import CHROMIUM, a_page
from run_folders import a_branching_episode, a_run, add_episode, trained, write_trained

from gradus.files import write_json
from gradus.monitor import JsonlMonitor
from gradus.run.lease import Owner
from gradus.view.server import Viewer
from gradus.view.shelf import open_shelf

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed"),
]
HOSTILE = "<script>document.title='ran'</script><img src=http://127.0.0.1:1/a>\u202e\x1b"
ENTER = {"type": "keyDown", "key": "Enter", "text": "\r", "windowsVirtualKeyCode": 13}


LOG = "2026-11-26T10:54:08.307Z ERROR x t a: failed\n  | Traceback\n"


async def test_by_keys_alone_from_a_run_to_the_text_of_an_episode(tmp_path: Path) -> None:
    root = a_run(tmp_path / "run", metrics=[{"episode/reward/mean": x / 9} for x in range(9)])
    (root / "journal.jsonl").touch()
    log = root / "logs/trainer.log"
    log.parent.mkdir()
    log.write_text(LOG)
    (root / "audit.jsonl").write_text('{"event": "began", "by": "me"}\n')
    for step in range(9):
        for number in range(30):
            add_episode(root, step=step, reward=number / 29, reply=f"{HOSTILE} {step}.{number}")
    async with TestServer(Viewer(open_shelf([root]), token="t").app(), host="127.0.0.1") as server:
        own = f"http://127.0.0.1:{server.port}/"
        async with a_page(tmp_path, f"{own}?token=t") as page:
            await page.until("document.querySelectorAll('.reply').length === 6")
            assert "One task over 9 steps" in await page.value("document.body.textContent")
            await page.until("document.querySelector('.uplot')")
            for key in "gc":
                await page.key(key)
            await page.until("document.querySelectorAll('figure .uplot').length")
            for letter, title in {
                "v": "Evaluations",
                "t": "Time",
                "s": "Settings",
                "o": "Logs",
            }.items():
                await page.key("g")
                await page.key(letter)
                await page.until(
                    f"document.querySelector('[aria-current]').textContent === '{title}'"
                )
                if letter == "o":
                    # What is unfolded and has the focus stays so when there are more lines.
                    await page.until("document.querySelector('.log details')")
                    await page.value("(row = document.querySelector('.log li'), row.focus(), 1)")
                    await page.value("(row.firstChild.open = true)")
                    log.write_text(LOG.replace("ERROR", "INFO") + LOG)
                    await page.value(
                        "document.querySelector('select').dispatchEvent(new Event('change'))"
                    )
                    await page.until("document.querySelectorAll('.log li').length === 2")
                    assert await page.value("document.activeElement === row && row.firstChild.open")
                    assert "times are UTC" in await page.value("document.body.textContent")
                if letter == "s":
                    await page.until("document.querySelector('.notices')")
                    told = await page.value("document.querySelector('.notices').textContent")
                    assert told == "began by me"
            for key in "ge":
                await page.key(key)
            await page.until("document.querySelectorAll('tr[data-row]').length > 9")
            # Rows come and go while the table is scrolled; all 270 are there.
            await page.value("(document.querySelector('.rows').scrollTop = 1e6)")
            await page.until("document.querySelector('tr[data-row=\"270\"]')")
            await page.value("(document.querySelector('.rows').scrollTop = 0)")
            await page.until("document.querySelector('tr[data-row=\"1\"]')")
            await page.key("j")
            await page.key("j")
            focused = "document.activeElement.dataset.row"
            assert await page.value(focused) == "2"
            await page.key("Enter")
            await page.until("document.querySelectorAll('.turn').length === 2")
            said = await page.value("document.querySelector('.turn.own pre').textContent")
            assert said == f"{HOSTILE} 8.1".replace("\u202e", "⟨U+202E⟩").replace("\x1b", "␛")
            await page.key("Escape")
            await page.until("document.querySelector('.rows')")
            await page.key("?")
            assert await page.value("document.querySelector('dialog').open")
            assert "ran" not in await page.value("document.title")
        assert page.complaints == []
        assert {it for it in page.requests if not it.startswith(own)} == set()


async def test_a_system_prompt_of_the_template_stands_under_its_own_role(tmp_path: Path) -> None:
    root = a_run(tmp_path / "run")
    add_episode(root, step=0, reward=1.0, reply="ab")
    texts = ["<s>", "system", "\n", "Be good.", "<e>", "<s>", "user", "\n", "system", "<e>"]
    first = {"ids": [*range(10)], "texts": texts, "sampled": [False] * 10, "logprobs": [None] * 10}
    found = json.dumps({"traces": [[first]], "missing": {}, "has_texts": True})
    async with (
        TestServer(Viewer(open_shelf([root]), token="t").app(), host="127.0.0.1") as server,
        a_page(tmp_path, f"{server.make_url('/')}?token=t") as page,
    ):
        await page.until("document.querySelector('h1')")
        await page.value(
            f"(plain = fetch, answer = {json.dumps(found)}, fetch = (path) => "
            "path.endsWith('/tokens') ? Promise.resolve(new Response(answer)) : plain(path), 1)"
        )
        await page.value("(location.hash = '#/run/episode/train-0-0', 1)")
        await page.until("document.querySelector('.tokens')")
        turns = "[...document.querySelectorAll('.turn')].slice(0, 2)"
        roles = await page.value(f"{turns}.map((it) => it.querySelector('b').textContent)")
        said = await page.value(f"{turns}.map((it) => it.querySelectorAll('.token').length)")
    assert (roles, said) == (["system", "user"], [5, 5])


async def test_a_key_colours_tokens_and_what_is_missing_is_not_offered(tmp_path: Path) -> None:
    root = a_run(tmp_path / "run")
    add_episode(root, step=0, reward=1.0, reply="ab", episode="g0.0")
    path = root / "episodes/step_0/train.jsonl"
    record = json.loads(path.read_text())
    record |= {
        "id": "first",
        "traces": [{"nodes": []}, {"nodes": [*record["traces"][0]["nodes"], {"sampled": True}]}],
    }
    record["gradus"]["step"] = 0
    path.write_text(json.dumps(record) + "\n")
    a_branching_episode(root)
    view = "#/run/episode/train-0-0"
    chosen = "document.querySelector('[aria-pressed=true][data-colour]')?.dataset.colour"
    async with TestServer(Viewer(open_shelf([root]), token="t").app(), host="127.0.0.1") as server:
        async with a_page(tmp_path, f"http://127.0.0.1:{server.port}/?token=t{view}") as page:
            await page.until("document.querySelector('[data-colour=difference]')?.disabled")
            await page.key("3")
            assert await page.value(chosen) == "engine"
            # So it is if the key came before the tokens.
            await page.key("Escape")
            await page.until("document.querySelector('.rows tr[data-row]')")
            await page.value(
                "(plain = fetch, fetch = (path) => (path.endsWith('/tokens')"
                " ? new Promise((done) => { go_on = done; }) : Promise.resolve())"
                ".then(() => plain(path)), 1)"
            )
            await page.value(f"(location.hash = '{view}')")
            await page.until("globalThis.go_on && document.querySelector('.turn')")
            await page.key("3")
            await page.value("(fetch = plain, go_on())")
            await page.until(f"{chosen} === 'engine'")
            await page.key("7")
            await page.until(f"{chosen} === 'version'")
            write_trained(root, trained("g0.0/1/0", [1, 2, 3, 4, 5, 6], [3, 4, 5], -2.0))
            await page.key("Escape")
            await page.until("document.querySelector('.rows tr[data-row]')")
            await page.value(f"(location.hash = '{view}')")
            await page.until(
                "document.querySelector('[data-colour=difference]')?.disabled === false"
            )
            await page.key("3")
            await page.until(f"{chosen} === 'difference'")
            own = "[...document.querySelectorAll('.turn .token:not(.given)')]"
            shades = await page.value(f"{own}.map((it) => it.className)")
            assert shades == ["token dn3", "token lp0", "token up3"]
            assert "trainer logprob -2" in await page.value(f"{own}[0].title")
            assert "ratio 0.3679" in await page.value(f"{own}[0].title")
            await page.key("N")
            assert await page.value("document.activeElement.className") == "token up3"
            none = "[[{ ids: [1], advantage: [0], weight: [1] }]]"
            steps = f"scaleOf('advantage', {none}).steps"
            assert await page.value(steps) == [["0", "lp0"]]
            words = "[7185, 258800].map(duration)"
            assert await page.value(words) == ["2 h 0 min", "3 d 0 h"]
            await page.key("9")
            await page.until(f"{chosen} === 'ratio'")
            assert await page.value(f"{own}.map((it) => it.className)") == shades
            await page.key("0")
            await page.until(f"{chosen} === 'drift'")
            assert await page.value(f"{own}.map((it) => it.className)") == ["token up1"] * 3
        assert page.complaints == []


async def test_episodes_are_searched_kept_by_name_and_written_as_markdown(tmp_path: Path) -> None:
    root = a_run(tmp_path / "run")
    for number in range(8):
        add_episode(root, step=0, reward=number / 8, reply=f"```\nreply {number}")
    path = root / "episodes/step_0/train.jsonl"
    *others, last = (json.loads(line) for line in path.read_text().splitlines())
    one, two = last["traces"][0], json.loads(json.dumps(last["traces"][0]))
    one["calls"] = [{"node": 1, "time": {"start": 20.0, "end": 21.0}}]
    judge = {"name": "judge", "trainable": False}
    two |= {"agent": judge, "calls": [{"node": 1, "time": {"start": 5.0, "end": 6.0}}]}
    debate = {"winner": "pro", "answer/pro": "B"}
    two["rewards"] = {}
    two["info"] = {"debate": debate, "judge_again": {"flipped": True}}
    last["traces"] = [one, two]
    path.write_text("".join(f"{json.dumps(it)}\n" for it in [*others, last]))
    count = "document.querySelector('p[role=status].soft')?.textContent"
    rows = "document.querySelectorAll('tr[data-row]').length"
    viewer = Viewer(open_shelf([root]), token="t")
    async with TestServer(viewer.app(), host="127.0.0.1") as server:
        async with a_page(tmp_path, f"http://127.0.0.1:{server.port}/?token=t") as page:
            await page.value("(location.hash = '#/run/episodes?where=reward > 0.4&text=reply 7')")
            await page.until(f"{count} === '1 found in 4 of 4 episodes'")
            await page.until(f"{rows} === 1")
            await page.value("(location.hash = '#/run/episodes?where=reward > 0.4&sort=reward')")
            await page.until(f"{rows} === 4")
            # Enter sends the filter and the text, each as it is written now.
            inputs = "document.querySelectorAll('form.tools input')"
            await page.value(f"({inputs}[0].value = 'reward > 0.3')")
            await page.value(f"({inputs}[1].value = 'reply', {inputs}[1].focus())")
            await page.send("Input.dispatchKeyEvent", **ENTER)
            await page.until(f"{count} === '5 found in 5 of 5 episodes'")
            await page.value("document.querySelectorAll('tr[data-row]')[4].click()")
            await page.until("document.querySelector('.turn.own')")
            await page.key("Escape")
            await page.until(f"{count} === '5 found in 5 of 5 episodes'")
            assert "sort=reward" in await page.value("location.hash")
            await page.value("(location.hash = '#/run/episodes?where=reward > 0.4&sort=reward')")
            await page.until(f"{rows} === 4")
            await page.value("[...document.querySelectorAll('form button')].at(-1).click()")
            await page.value("(document.activeElement.value = 'good')")
            await page.key("Enter")
            await page.value("(location.hash = '#/run/episodes')")
            await page.until(f"{rows} === 8")
            await page.value(
                "(kept = document.querySelector('[aria-label=\"Kept filters\"]'),"
                " kept.value = '=good', kept.dispatchEvent(new Event('change')))"
            )
            await page.until(f"{rows} === 4")
            assert "sort=reward" in await page.value("location.hash")
            await page.value(
                "document.querySelector('[aria-label=\"Kept filters\"]')"
                ".dispatchEvent(new Event('change'))"
            )
            assert "sort=reward" in await page.value("location.hash")
            await page.value("document.querySelectorAll('tr[data-row]')[3].click()")
            await page.until("document.querySelectorAll('.round').length === 2")
            order = "[...document.querySelectorAll('.round b')].map((it) => it.textContent)"
            assert await page.value(order) == ["judge", "agent"]
            seats = await page.value("document.querySelector('.chips .seat').parentNode.innerText")
            assert "agent: reward 0.875" in seats
            assert "judge: no reward" in seats
            decided = await page.value("document.querySelector('.verdict').textContent")
            assert decided.startswith("pro winspro: B")
            assert "the verdict flips" in decided
            await page.value("(URL.createObjectURL = (blob) => { kept = blob; return 'blob:x'; })")
            await page.value("(HTMLAnchorElement.prototype.click = () => {})")
            await page.key("e")
            text = await page.value("kept.text()")
            assert "````text\n```\nreply 7\n````" in text
            assert text.count("### assistant, sampled") == 2
        assert page.complaints == []


async def test_columns_are_kept_rows_are_summed_and_the_run_is_followed(tmp_path: Path) -> None:
    root = a_run(tmp_path / "run")
    heads = "[...document.querySelectorAll('th button')].map((it) => it.textContent)"
    rows = "[...document.querySelectorAll('tr[data-row]')].map((it) => it.dataset.row)"
    first = "document.querySelector('tr[data-row] td')?.textContent"
    status = "document.querySelector('.tools p[role=status]')?.textContent"
    viewer = Viewer(open_shelf([root]), token="t")
    # As in a table of so many rows that those far from the reader are not known.
    table = viewer._page["views/rows.js"].replace(b"KEPT = 20", b"KEPT = 0")
    viewer._page["views/rows.js"] = table.replace(b"AHEAD = 5", b"AHEAD = 0")
    async with TestServer(viewer.app(), host="127.0.0.1") as server:
        async with a_page(tmp_path, f"http://127.0.0.1:{server.port}/?token=t") as page:
            await page.until("document.querySelector('h1')")
            await page.value("(location.hash = '#/run/episodes')")
            await page.until(f"{status}?.startsWith('0 episodes')")
            assert "group" not in await page.value(heads)
            for number in range(900):
                own = {"group": f"g{number // 4}", "task": {"key": f"t{number // 4 % 3}"}}
                own |= {"reply": "odd", "dropped": {"s": "odd"}} if number % 2 else {"reply": "a"}
                add_episode(root, step=number // 100, reward=number / 900, **own)
            await page.until(f"{status} === '900 episodes' && {rows}.length > 9")
            assert {"group", "dropped"} <= set(await page.value(heads))
            await page.until("document.querySelector('.bins')")
            # Every place that is scrolled to has its rows, each once and in their order.
            for place in (200, 640, 100, 900):
                await page.value(f"(document.querySelector('.rows').scrollTop = {30 * place})")
                await page.until(f"{rows}.includes('{place}')")
                await page.until("!document.querySelector('.waits')")
                found = [int(it) for it in await page.value(rows)]
                assert found == list(range(found[0], found[0] + len(found)))
            await page.value("(location.hash = '#/run/episodes?text=odd')")
            await page.until(f"{status} === '450 found in 900 of 900 episodes'")
            for place in (440, 1):
                await page.value(f"(document.querySelector('.rows').scrollTop = {30 * place - 30})")
                await page.until(f"{rows}.includes('{place}') && !document.querySelector('.waits')")
            shown = "[...document.querySelectorAll('tr[data-row]')].map((it) => it.textContent)"
            assert await page.value(f"{shown}.every((it) => it.includes('odd'))")
            await page.value("(location.hash = '#/run/episodes')")
            await page.until(f"{status} === '900 episodes'")
            box = "document.querySelector('.columns input[value=staleness]')"
            await page.value(f"({box}.click(), 1)")
            assert "staleness" not in await page.value(heads)
            assert await page.value("document.querySelectorAll('tr[data-row]').length") > 9
            await page.value("(location.hash = '#/run/episodes?by=group&sort=-reward')")
            await page.until(f"{heads}.at(0) === 'group'")
            assert await page.value(status) == "225 groups of 900 episodes"
            assert await page.value(first) == "g224"
            await page.value("(document.querySelector('tr[data-row]').click(), 1)")
            await page.until("document.querySelectorAll('.reply').length === 4")
            await page.key("Escape")
            await page.until(f"{heads}.at(0) === 'group'")
            await page.value("(location.hash = '#/run/episodes?by=task')")
            await page.until(f"{heads}.at(0) === 'task'")
            await page.value("(document.querySelector('tr[data-row]').click(), 1)")
            await page.until(f"{heads}.at(0)?.startsWith('step') && {rows}.length > 9")
            assert await page.value(status) == "300 of 900 episodes"
            assert "staleness" not in await page.value(heads)
            await page.value("(location.hash = '#/run/episodes?step=2..4')")
            await page.until("document.querySelector('.chips')?.textContent === 'step = 3..5 ✕'")
            await page.value("(location.hash = '#/run/episodes')")
            await page.until(f"{status} === '900 episodes'")
            # Who reads below keeps the place; who follows the run does not.
            await page.value("(document.querySelector('.rows').scrollTop = 9000)")
            await page.until(f"{rows}.includes('310')")
            add_episode(root, step=20, reward=1.0, reply="b")
            await page.until("document.querySelector('.new')?.hidden === false")
            # What comes at the top moves no row that is below.
            await page.value("(document.querySelector('.rows').scrollTop = 30 * 640)")
            await page.until(f"{rows}.includes('640')")
            reward = "document.querySelector('tr[data-row=\"640\"] td:nth-child(2)').textContent"
            assert await page.value(reward) == f"{239 / 900:.4g}"
            await page.key(".")
            await page.until(f"{first} === '21'")
            add_episode(root, step=30, reward=1.0, reply="b")
            await page.until(f"{first} === '31'")
        assert page.complaints == []


async def test_words_that_differ_from_the_best_reply_are_marked(tmp_path: Path) -> None:
    root = a_run(tmp_path / "run")
    said = {1.0: "so the answer is 42.", 0.5: "the best answer is 41!", 0.0: "\U0001f600 <b>"}
    for reward, reply in said.items():
        add_episode(root, step=0, reward=reward, reply=reply, group="g0")
    shutil.copy(root / "episodes/step_0/train.jsonl", root / "episodes/step_0/eval.jsonl")
    marks = "[...document.querySelectorAll('.reply')].map((it) => [...it.querySelectorAll('mark')].map((one) => one.textContent))"  # noqa: E501
    async with TestServer(Viewer(open_shelf([root]), token="t").app(), host="127.0.0.1") as server:
        async with a_page(tmp_path, f"http://127.0.0.1:{server.port}/?token=t") as page:
            await page.until("document.querySelector('h1')")
            await page.value("(location.hash = '#/run/group/train-0-0?sort=reward')")
            await page.until("document.querySelectorAll('.reply .said').length === 3")
            # Who marks a text with the mouse stays there.
            await page.value("getSelection().selectAllChildren(document.querySelector('.said'))")
            clicked = "new MouseEvent('click', {detail: 1, bubbles: true})"
            await page.value(f"document.querySelector('.said').dispatchEvent({clicked})")
            assert "/group/" in await page.value("location.hash")
            assert await page.value(marks) == [[], [], []]
            await page.key("t")
            await page.until("document.querySelector('mark')")
            assert await page.value(marks) == [
                ["\U0001f600", "<", "b", ">"],
                ["best", "41", "!"],
                [],
            ]
            # A version that is evaluated has no tokens to colour.
            await page.value("(location.hash = '#/run/group/eval-0-0')")
            chosen = "[...document.querySelectorAll('.tools select')].at(-1)?.value"
            await page.until(f"{chosen} === 'words' && document.querySelector('mark')")
            table = await page.value("document.querySelectorAll('main p a')[1].hash")
            assert table == "#/run/episodes?group=g0&purpose=eval&step=0"
            await page.key("t")
            await page.until("!document.querySelector('mark')")
            assert await page.value(chosen) == "none"
            await page.value("(location.hash = '#/run/episodes?purpose=eval&step=..3&by=group')")
            filters = "document.querySelector('.chips')?.textContent"
            await page.until(f"{filters} === 'purpose eval ✕step = ..3 ✕'")
        assert page.complaints == []


async def test_runs_are_laid_over_each_other_as_differences_and_as_groups(tmp_path: Path) -> None:
    roots = [
        a_run(
            tmp_path / name,
            metrics=[
                {"odd/m": first + 2.0 * x, "alarm/entropy": float(name == "b" and x > 2)}
                | {'lost"': math.nan if x == 5 else 1.0}
                for x in range(steps)
            ],
        )
        for name, first, steps in (("a", 0.0, 4), ("b", 1.0, 6), ("<c>", 5.0, 4))
    ]
    write_json(roots[1] / "lease.json", {"term": 1, "owner": asdict(Owner.current())})
    kept = "(document.querySelector('[aria-label=\"odd/m as a {}\"]').click(), kept.text())"
    async with TestServer(Viewer(open_shelf(roots), token="t").app(), host="127.0.0.1") as server:
        async with a_page(tmp_path, f"http://127.0.0.1:{server.port}/?token=t") as page:
            await page.until("document.querySelector('tbody a')")
            # A click on a link with Ctrl opens a tab, and the row stays.
            await page.value("addEventListener('click', (e) => e.preventDefault(), {once: true})")
            await page.value("document.querySelector('tbody a').click()")
            assert await page.value("location.hash") == ""
            await page.value("(URL.createObjectURL = (blob) => { kept = blob; return 'blob:x'; })")
            await page.value("(HTMLAnchorElement.prototype.click = () => {})")
            view = "#/a/curves?with=b&with=_c_&search=odd&smooth=0.5&log=1"
            await page.value(f"(location.hash = '{view}')")
            await page.until("document.querySelector('figure .uplot')")
            caption = await page.value("document.querySelector('figcaption').textContent")
            assert "at step 4: a 6 · b 7 (+1) · _c_ 11 (+5)" in caption
            assert "an alarm began to ring" in await page.value("document.body.textContent")
            await page.value(
                "(show = [...document.querySelectorAll('.tools select')][1],"
                " show.value = 'difference', show.dispatchEvent(new Event('change')))"
            )
            await page.until("document.querySelectorAll('figure .u-series').length === 3")
            rows = (await page.value(kept.format("table"))).splitlines()
            assert rows[0] == 'steps,"odd/m of b - a","odd/m of _c_ - a"'
            assert rows[1:] == ["1,1,5", "2,1,5", "3,1,5", "4,1,5", "5,,", "6,,"]
            await page.value("document.querySelector('[aria-label=\"group of b\"]').click()")
            await page.until("document.querySelectorAll('figure .u-series').length === 7")
            assert "in=ABA" in await page.value("location.hash")
            rows = (await page.value(kept.format("table"))).splitlines()
            assert rows[0].startswith('steps,"odd/m of A mean of 2","odd/m of A least"')
            assert rows[1:] == [
                *(f"{x + 1},{2 * x + 2.5:g},{2 * x},{2 * x + 5},{2 * x + 1},{2 * x + 1},{2 * x + 1}"
                  for x in range(4)),
                "5,,,,9,9,9",
                "6,,,,11,11,11",
            ]  # fmt: skip
            drawn = await page.value(kept.format("drawing"))
            assert drawn.startswith("<svg")
            assert drawn.count("<polyline") == 2
            read = (
                "new DOMParser().parseFromString({}, 'image/svg+xml').querySelector('parsererror')"
            )
            assert await page.value(f"{read.format(json.dumps(drawn))} === null")
            # Of a drawing by itself: gaps, a number alone, one number for all, powers of ten.
            of = "drawing('m', 'x', {})"
            drawn = await page.value(
                of.format("{xs: [1, 2, 3, 4], lines: [{values: [.5, null, .5, .5]}]}")
            )
            assert (drawn.count("<polyline"), drawn.count("<circle")) == (1, 1)
            assert ">0.5<" in drawn
            drawn = await page.value(
                of.format("{xs: [1, 2, 3], lines: [{spans: true, values: [1, null, 1000]}]}, true")
            )
            assert ('points="64.0,276.0 626.0,34.0"' in drawn, ">100<" in drawn) == (True, True)
            # A run is taken away, or laid over, and the curves stay as they are.
            await page.value(
                "document.querySelector('[aria-label=\"take b away\"]')"
                ".dispatchEvent(new MouseEvent('click'))"
            )
            kept_words = "search=odd&smooth=0.5&log=1&show=groups&in=AA"
            await page.until(f"location.hash === '#/a/curves?with=_c_&{kept_words}'")
            await page.until("document.querySelectorAll('.legend span').length === 2")
            await page.value(
                "(over = [...document.querySelectorAll('.tools select')].at(-1),"
                " over.value = 'b', over.dispatchEvent(new Event('change')))"
            )
            await page.until(f"location.hash === '#/a/curves?with=_c_&with=b&{kept_words}'")
            await page.until("document.querySelectorAll('.legend span').length === 3")
            # What is pinned stands first, also after the page was opened again.
            await page.until("document.querySelector('[aria-label=\"pin odd/m\"]')")
            await page.value("document.querySelector('[aria-label=\"pin odd/m\"]').click()")
            await page.value("(location.hash = '#/b/curves')")
            await page.until("document.querySelector('summary')?.textContent === 'pinned 1'")
            # A run that is laid over tells nothing by itself: it is looked at again.
            await page.value("(setInterval = (look) => { again = look; })")
            await page.value("(location.hash = '#/a/curves?with=b&search=lost')")
            caption = "document.querySelector('figcaption')?.textContent"
            await page.until(f"{caption}?.includes('not finite in step 6')")
            monitor = JsonlMonitor(roots[1] / "metrics.jsonl")
            monitor.record({'lost"': 7.0}, step=6)
            monitor.close()
            buttons = "[...document.querySelectorAll('.saves button')]"
            csv = f"{buttons}.find((it) => it.textContent === 'csv')"
            table = f"({csv}.click(), kept.text())"
            await page.until("(again(), document.querySelector('.u-over'))")
            ends = "it.endsWith('\\n7,,7\\n') ? done() : (again(), setTimeout(look, 20))"
            look = f"const look = () => {table}.then((it) => {ends}); look();"
            await page.value(f"new Promise((done) => {{ {look} }})")
            assert (await page.value(table)).startswith('steps,"lost"" of a","lost"" of b"\n')
        assert page.complaints == []


async def test_no_view_is_wider_than_a_telephone(tmp_path: Path) -> None:
    numbers = {"episode/reward/mean": 0.5, "time/receive_seconds": 1.0, "time/step_seconds": 2.0}
    root = a_run(tmp_path / "run", metrics=[numbers] * 9)
    add_episode(root, step=0, reward=1.0, reply="w" * 3_000, group="g" * 90)
    views = {
        "run": ".reply",
        "curves": ".uplot",
        "episodes": "tr[data-row]",
        "episode/train-0-0": ".turn",
        "evaluations": "tr[data-row]",
        "time": ".span",
        "settings": "td",
        "logs": ".log li",
    }
    (root / "logs").mkdir()
    (root / "logs/trainer.log").write_text(f"2026-11-26T10:54:08.307Z ERROR x t a: {'w' * 900}\n")
    (root / "journal.jsonl").write_text("")
    shutil.copy(root / "episodes/step_0/train.jsonl", root / "episodes/step_0/eval.jsonl")
    async with TestServer(Viewer(open_shelf([root]), token="t").app(), host="127.0.0.1") as server:
        async with a_page(tmp_path, f"http://127.0.0.1:{server.port}/?token=t") as page:
            await page.resize(390, 800, theme="dark")
            await page.until("document.querySelector('h1')")
            for view, ready in views.items():
                await page.value(f"(location.hash = '#/run/{view}')")
                await page.until(f"document.querySelector('main {ready}')")
                assert await page.value("document.documentElement.scrollWidth") <= 390, view
        assert page.complaints == []


async def test_what_is_new_moves_nothing_that_the_reader_looks_at(tmp_path: Path) -> None:
    records = [{f"odd/m{name}": x / 9 for name in range(20)} for x in range(60)]
    root = a_run(tmp_path / "run", metrics=records)
    async with TestServer(Viewer(open_shelf([root]), token="t").app(), host="127.0.0.1") as server:
        async with a_page(tmp_path, f"http://127.0.0.1:{server.port}/?token=t") as page:
            await page.until("document.querySelector('h1')")
            await page.value("(location.hash = '#/run/curves?search=odd')")
            await page.until("document.querySelectorAll('.u-over').length === 20")
            await page.value(
                "(over = document.querySelectorAll('.u-over')[12], over.scrollIntoView(),"
                " scrollBy(0, -100), before = scrollY)"
            )
            assert await page.value("before") > 500
            # A drag shows a part, and picks no step.
            box = "over.getBoundingClientRect()"
            x, y, width = await page.value(f"[{box}.x, {box}.y + 40, {box}.width]")
            await page.mouse("mousePressed", x + 0.3 * width, y)
            await page.mouse("mouseMoved", x + 0.5 * width, y)
            await page.mouse("mouseReleased", x + 0.5 * width, y)
            last = "+[...over.parentNode.parentNode.querySelectorAll('.u-value')].length"
            assert await page.value(last) > 0
            # New marks are drawn with the new points.
            await page.value(
                "(dashes = new Set(), canvas = CanvasRenderingContext2D.prototype,"
                " dash = canvas.setLineDash, canvas.setLineDash ="
                " function (it) { dashes.add(String(it)); dash.call(this, it); }, 1)"
            )
            event = {"event": "evaluation_ended", "time": 1.0, "version": 24}
            (root / "journal.jsonl").write_text(json.dumps(event) + "\n")
            monitor = JsonlMonitor(root / "metrics.jsonl")
            monitor.record({f"odd/m{name}": 77.0 for name in range(20)}, step=60)
            monitor.close()
            shown = "over.closest('figure').querySelector('.last').textContent"
            await page.until(f"{shown} === '77' && dashes.has('1,2')")
            assert await page.value("over.isConnected && scrollY === before")
            # A double click shows the whole again, and picks no step either.
            for count in (1, 2):
                await page.mouse("mousePressed", x + 0.4 * width, y, count)
                await page.mouse("mouseReleased", x + 0.4 * width, y, count)
            await page.value("new Promise((done) => setTimeout(done, 400))")
            assert "curves" in await page.value("location.hash")
            await page.mouse("mousePressed", x + 0.4 * width, y)
            await page.mouse("mouseReleased", x + 0.4 * width, y)
            await page.until("location.hash.includes('/episodes?step=')")
            # The first record after a view was opened is new to it.
            await page.value("(location.hash = '#/run/curves?search=odd/m7')")
            await page.until("document.querySelectorAll('.u-over').length === 1")
            monitor = JsonlMonitor(root / "metrics.jsonl")
            monitor.record({"odd/m7": 78.0}, step=61)
            monitor.close()
            await page.until("document.querySelector('.last').textContent === '78'")
        assert page.complaints == []


async def test_an_evaluation_begins_with_what_it_found(tmp_path: Path) -> None:
    root = a_run(tmp_path / "run")
    for path in (root / ".gradus-run", root / "config/launched.json", root / "summary.json"):
        path.write_text(path.read_text().replace('"rl"', '"eval"'))
    for number in range(8):
        add_episode(root, step=0, reward=number % 2, reply="a", task={"key": f"t{number // 2}"})
    path = (root / "episodes/step_0/train.jsonl").rename(root / "episodes/step_0/eval.jsonl")
    write_json(root / "lease.json", {"term": 1, "owner": asdict(Owner.current())})
    shown = "[...document.querySelectorAll({!r})].map((it) => it.textContent)"
    async with TestServer(Viewer(open_shelf([root]), token="t").app(), host="127.0.0.1") as server:
        async with a_page(tmp_path, f"http://127.0.0.1:{server.port}/?token=t") as page:
            await page.until("document.querySelector('main tr[data-row]')")
            assert (await page.value(shown.format(".facts div")))[:2] == ["8episodes", "4tasks"]
            titles = await page.value(shown.format("h2"))
            assert "words" in titles
            assert not {"Reward", "Who waits for whom"} & set(titles)
            # It has no record before its end: what is new are its episodes, or nothing at all.
            path.write_text(path.read_text() + path.read_text().splitlines()[0] + "\n")
            await page.until(f"{shown.format('.facts div')}[0] === '9episodes'")
            # Curves, which are left at once, have a clock of their own.
            # Of two screens of the run that are asked for at once, either may come last.
            await page.value(
                "(clocks = [], again = () => clocks.forEach((it) => it()),"
                " setInterval = (it) => { if (`${it}`.includes('overview')) clocks.push(it); })"
            )
            for key in "gcgr":
                await page.key(key)
            await page.until("clocks.length && document.querySelector('main tr[data-row]')")
            (root / "alive").mkdir()
            write_json(root / "alive/evaluator.json", {"last": "played"})
            assert "evaluator" not in await page.value("document.body.textContent")
            await page.until("(again(), document.body.textContent.includes('evaluator'))")
            await page.value("(document.querySelector('main tr[data-row]').click(), 1)")
            await page.until("document.querySelectorAll('.rows tr[data-row]').length === 9")
            await page.value("(document.querySelector('.rows tr[data-row]').click(), 1)")
            await page.until("document.body.textContent.includes('No tokens: replay/')")
            assert await page.value("document.querySelector('.scale').offsetParent") is None
            # A filter names the version as the rows do, also of sums.
            for step, words in (("..4", "&by=task"), ("1", "&by=group"), ("0", "")):
                await page.value(
                    f"(location.hash = '#/run/episodes?purpose=eval&step={step}{words}')"
                )
                await page.until(f"{shown.format('.chips button')}[1] === 'step = {step} ✕'")
        assert page.complaints == []


async def test_a_link_on_another_site_opens_the_page(tmp_path: Path) -> None:
    root = a_run(tmp_path / "run", metrics=[{"episode/reward/mean": 0.5}])
    viewer = Viewer(open_shelf([root]), token="t")
    async with TestServer(viewer.app(), host="127.0.0.1") as server:
        own = f"http://127.0.0.1:{server.port}/"
        async with a_page(tmp_path, f"data:text/html,<a href='{own}?token=t'>open") as page:
            await page.follow("document.querySelector('a')")
            await page.until("document.querySelector('h1')?.textContent.startsWith('run')")
