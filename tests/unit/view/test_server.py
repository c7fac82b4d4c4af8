"""What the server of the page answers, whom it refuses, and what it leaves alone."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import os
import re
import shutil
import sys
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from importlib import import_module
from importlib.resources import files
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from run_folders import a_run, add_episode, trained, write_trained

from gradus.errors import ConfigError
from gradus.files import write_json
from gradus.monitor import JsonlMonitor
from gradus.monitor.live import write_live
from gradus.report.series import AXES
from gradus.run.paths import RunDirectory
from gradus.run.recording import EpisodeLog, LaunchRecord
from gradus.view.opened import OpenRun
from gradus.view.server import Viewer, _Followed
from gradus.view.shelf import open_shelf

TOKEN = "a-token"
HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>\u202e\x1b[2J\x00 </script>"
SECONDS = 60.0
"""Bounds a failure."""


@asynccontextmanager
async def served(*paths: Path, opens: bool = True) -> AsyncIterator[TestClient[Any, Any]]:
    """A client of the page of some runs, which has its cookie where it `opens` the address."""
    server = TestServer(Viewer(open_shelf(paths), token=TOKEN).app(), host="127.0.0.1")
    client = TestClient(server, cookie_jar=_any_host())
    async with client:
        if opens:
            assert (await client.get(f"/?token={TOKEN}")).status == 200
        yield client


def _any_host() -> Any:
    from aiohttp import CookieJar

    return CookieJar(unsafe=True)


async def ask(client: TestClient[Any, Any], path: str, status: int = 200) -> Any:
    answer = await client.get(path)
    assert answer.status == status, await answer.text()
    return await answer.json()


def a_whole_run(root: Path) -> Path:
    metrics: list[dict[str, float]] = [
        {
            "episode/words/reward/mean": x / 4,
            "loss/total/mean": 1.0 - x,
            "alarm/entropy": 1.0,
            "batch/tokens/sum": 100.0 + x,
            "episode/ended/sum": 8.0 + x,
        }
        for x in range(4)
    ]
    metrics[2]["loss/total/mean"] = math.nan
    a_run(root, metrics=metrics)
    for step in range(4):
        for number in range(3):
            add_episode(root, step=step, reward=number / 2, reply=f"reply {step}.{number}",
                        episode=f"g{step}.{number}", advantages=[0.5])  # fmt: skip
    write_live(root / "live.json", {"live/version": 3.0}, term=1)
    (root / "notices.log").write_text("alarm entropy at step 3: 0.1, threshold 0.2\n")
    return root


def routes(key: str) -> list[str]:
    """Every route of a run."""
    run = "/api/runs/run"
    return [
        *("/", "/api/runs", run, f"{run}/metrics", f"{run}/curves?name=loss/total/mean"),
        *(f"{run}/changes", f"{run}/evaluations", f"{run}/marks", f"{run}/logs", f"{run}/settings"),
        *(f"{run}/episodes", f"{run}/episodes?sort=-reward&reward=..1", f"{run}/histograms"),
        *(f"{run}/episodes?by=task", f"{run}/samples?version=9"),
        *(f"{run}/episodes/{key}", f"{run}/episodes/{key}/tokens"),
        *(f"{run}/episodes/{key}/text?trace=0&node=1", f"{run}/groups/{key}"),
    ]


@pytest.mark.parametrize("path", [*routes("train-0-0"), "/page/main.js", "/api/runs/run/events"])
async def test_nobody_without_the_cookie_reads_anything(tmp_path: Path, path: str) -> None:
    async with served(a_whole_run(tmp_path / "run"), opens=False) as client:
        for address in (path, f"{path}{'&' if '?' in path else '?'}token=wrong"):
            answer = await client.get(address, headers={"Cookie": "gradus_view_0=a-token"})
            assert answer.status == 403
            assert "holds a token" in (await answer.json())["error"]


async def test_the_token_buys_a_cookie_that_scripts_and_other_sites_do_not_get(
    tmp_path: Path,
) -> None:
    async with served(a_whole_run(tmp_path / "run"), opens=False) as client:
        answer = await client.get(f"/?token={TOKEN}", allow_redirects=False)
        assert (answer.status, answer.headers["Location"]) == (303, "/")
        cookie = answer.headers["Set-Cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=Lax" in cookie
        assert TOKEN not in cookie


async def test_a_page_of_another_port_cannot_make_a_model_talk(tmp_path: Path) -> None:
    async with served(a_whole_run(tmp_path / "run")) as client:
        for site, status in (("same-site", 403), ("cross-site", 403), ("same-origin", 409)):
            answer = await client.post("/api/talk", headers={"Sec-Fetch-Site": site}, data=b"{}")
            assert (site, answer.status == 403) == (site, status == 403)


async def test_another_name_of_this_host_is_refused(tmp_path: Path) -> None:
    async with served(a_whole_run(tmp_path / "run")) as client:
        others = ("evil.example", "evil.example:80", "127.0.0.1.evil.example", "[::ffff:1]", "[1")
        for host in others:
            assert (await client.get("/api/runs", headers={"Host": host})).status == 403
        for host in ("localhost:8000", "127.0.0.1", "[::1]:9"):
            assert (await client.get("/api/runs", headers={"Host": host})).status == 200


@pytest.mark.parametrize("path", ["/", "/api/runs", "/page/main.js", "/page/none.js", "/x"])
async def test_every_answer_carries_a_policy_that_loads_nothing_from_elsewhere(
    tmp_path: Path, path: str
) -> None:
    async with served(a_whole_run(tmp_path / "run")) as client:
        headers = (await client.get(path)).headers
        assert headers["Content-Security-Policy"].startswith("default-src 'none'")
        assert "unsafe" not in headers["Content-Security-Policy"]
        assert headers["X-Content-Type-Options"] == "nosniff"


@pytest.mark.parametrize(
    "path",
    [
        *("/page/../server.py", "/page/%2e%2e/server.py", "/page//etc/passwd", "/page/vendor"),
        *("/api/runs/..", "/api/runs/%2Fetc", "/api/runs/run/episodes/train-0-1"),
        *("/api/runs/run/episodes/train-..-0", "/api/runs/run/episodes/eval-0-0"),
        *("/api/runs/run/episodes/train-0-0/text?node=9", "/api/runs/run/curves?over=years"),
        *("/api/runs/run/episodes?from=-1", "/api/runs/run/episodes?reward=x"),
        *("/api/runs/run/episodes?sort=file", "/api/runs/run/episodes?by=file"),
        "/api/runs/run/samples?version=-1",
    ],
)
async def test_an_address_of_nothing_is_refused_in_a_sentence(tmp_path: Path, path: str) -> None:
    async with served(a_whole_run(tmp_path / "run")) as client:
        answer = await client.get(path)
        assert answer.status == 404
        assert (await answer.json())["error"]


async def test_only_reading_is_possible(tmp_path: Path) -> None:
    async with served(a_whole_run(tmp_path / "run")) as client:
        for method in ("POST", "PUT", "DELETE", "PATCH"):
            assert (await client.request(method, "/api/runs/run")).status == 405


async def test_nothing_is_written_into_the_folder(tmp_path: Path) -> None:
    root = a_whole_run(tmp_path / "run")

    def state() -> dict[str, tuple[int, int, int]]:
        found = {str(path): path.stat() for path in [root, *root.rglob("*")]}
        return {name: (it.st_mtime_ns, it.st_size, it.st_mode) for name, it in found.items()}

    for path in [*root.rglob("*"), root]:
        path.chmod(path.stat().st_mode & ~0o222)
    before = state()
    async with served(root) as client:
        for path in routes("train-0-0"):
            await client.get(path)
    assert state() == before
    for path in [root, *root.rglob("*")]:
        path.chmod(0o700)


async def test_the_first_screen_says_what_the_files_say(tmp_path: Path) -> None:
    root = a_whole_run(tmp_path / "run")
    monitor = JsonlMonitor(root / "metrics.jsonl")
    monitor.record({"eval/version": 4.0, "eval/avg@2": 0.625, "eval/odd": math.inf}, step=4)
    monitor.close()
    async with served(root) as client:
        found = await ask(client, "/api/runs/run")
        (row,) = (await ask(client, "/api/runs"))["runs"]
        lost = {it["name"]: it["lost"] for it in await ask(client, "/api/runs/run/metrics")}
    assert (lost["loss/total/mean"], lost["eval/odd"]) == ([3], [4])
    assert (found["steps"], found["planned"], found["outcome"]) == (4, 9, "done")
    assert found["rewards"]["mean"] == [0.0, 0.25, 0.5, 0.75]
    assert found["rewards"]["parts"] == {}
    assert found["evaluations"] == [[4, 0.625]]
    assert (row["steps"], row["reward"], row["alarms"]) == (4, 0.75, ["entropy"])
    assert found["alarms"][0]["told"].endswith("threshold 0.2")
    replies = {it["word"]: (it["reward"], it["said"]) for it in found["newest_replies"]["replies"]}
    assert replies == {
        "best": (1.0, "reply 3.2"), "median": (0.5, "reply 3.1"), "worst": (0.0, "reply 3.0"),
    }  # fmt: skip
    assert found["live"]["numbers"] == {"live/version": 3.0}
    assert any("loss/total/mean" in it for it in found["problems"])


@pytest.mark.parametrize("over", AXES)
async def test_every_curve_is_that_of_the_records(tmp_path: Path, over: str) -> None:
    root = a_whole_run(tmp_path / "run")
    lines = [json.loads(line) for line in (root / "metrics.jsonl").read_text().splitlines()]
    async with served(root) as client:
        known = {it["name"]: it for it in await ask(client, "/api/runs/run/metrics")}
        assert set(known) == {name for line in lines for name in line} - {
            "step", "time", "non_finite",
        }  # fmt: skip
        assert known["loss/total/mean"]["lost"] == [3]
        assert known["loss/total/mean"]["unit"] == "nats"
        for name in known:
            curve = (await ask(client, f"/api/runs/run/curves?over={over}&name={name}"))[name]
            plain = [it for it in lines if isinstance(it.get(name), float)]
            assert curve["y"] == [it[name] for it in plain]
            assert (
                curve["x"]
                == {
                    "steps": [it["step"] + 1 for it in plain],
                    "minutes": [(it["time"] - lines[0]["time"]) / 60 for it in plain],
                    "tokens": [[100, 201, 303, 406][it["step"]] for it in plain],
                    "episodes": [[8, 17, 27, 38][it["step"]] for it in plain],
                }[over]
            )


async def test_hostile_texts_arrive_as_they_are_and_bounded(tmp_path: Path) -> None:
    root = a_run(tmp_path / "run")
    add_episode(root, step=0, reward=1.0, reply=HOSTILE)
    add_episode(root, step=0, reward=0.5, reply="x" * 3_000_000)
    async with served(root) as client:
        first, second = (await ask(client, "/api/runs/run/episodes"))["rows"]
        node = (await ask(client, f"/api/runs/run/episodes/{first['key']}"))["traces"][0]["nodes"][
            1
        ]
        assert node["text"]["text"] == HOSTILE
        address = f"/api/runs/run/episodes/{second['key']}"
        text = (await ask(client, address))["traces"][0]["nodes"][1]["text"]
        assert (len(text["text"]), text["length"]) == (20_000, 3_000_000)
        assert len((await ask(client, f"{address}/text?trace=0&node=1"))["text"]) == 3_000_000
        assert (
            len((await ask(client, "/api/runs/run"))["newest_replies"]["replies"][2]["said"])
            < 3_000
        )


async def test_ten_thousand_turns_come_in_parts(tmp_path: Path) -> None:
    root = a_run(tmp_path / "run")
    add_episode(root, step=0, reward=1.0, reply="last")
    path = root / "episodes" / "step_0" / "train.jsonl"
    record = json.loads(path.read_text())
    record["traces"][0]["nodes"] *= 5_000
    path.write_text(json.dumps(record) + "\n")
    async with served(root) as client:
        for first, count in ((0, 200), (9_900, 100), (20_000, 0)):
            address = f"/api/runs/run/episodes/train-0-0?from={first}"
            trace = (await ask(client, address))["traces"][0]
            assert (trace["num_nodes"], len(trace["nodes"])) == (10_000, count)


async def test_a_group_has_its_replies_in_order_and_the_task_over_the_run(tmp_path: Path) -> None:
    root = a_run(tmp_path / "run")
    for step, group, reward in ((0, "a/é", 0.25), (0, "a/é", 0.75), (0, "b", 1.0), (1, "c", 0.5)):
        add_episode(root, step=step, reward=reward, reply=f"{HOSTILE} {reward}", group=group)
    add_episode(root, step=0, reward=0.5, reply="x" * 9_000, group="a/é", error={"type": "Broken"})
    async with served(root) as client:
        found = await ask(client, "/api/runs/run/groups/train-0-0")
        asked = await ask(client, "/api/runs/run/groups/train-0-0?sort=reward&keys=1")
        for path in ("train-0-1", "train-0-0?sort=nothing", "..", "train-0-0?from=x"):
            assert (await client.get(f"/api/runs/run/groups/{path}")).status == 404
    assert found["asked"] == "ask"
    assert [(it["reward"], it["said"]) for it in found["replies"]] == [
        (0.75, [f"{HOSTILE} 0.75"]),
        (0.25, [f"{HOSTILE} 0.25"]),
        (None, ["x" * 6_000]),
    ]
    assert (found["mean"], found["spread"], found["ranges"]["reward"]) == (0.5, 0.25, [0.25, 0.75])
    assert found["replies"][2]["is_cut"]
    assert [(it["step"], it["mean"], it["high"], it["count"]) for it in found["over_run"]] == [
        (0, pytest.approx(2 / 3), 1.0, 4),
        (1, 0.5, 0.5, 1),
    ]
    first, second, failed = found["keys"]
    assert asked["keys"] == [second, first, failed]
    assert asked["replies"] == []


def _emptied(root: Path) -> None:
    for path in root.rglob("*.jsonl"):
        path.write_text("")


def _torn(root: Path) -> None:
    for path in [*root.rglob("*.jsonl"), *root.rglob("*.json"), root / "notices.log"]:
        path.write_bytes(path.read_bytes()[:-9])


def _without_episodes(root: Path) -> None:
    import shutil

    shutil.rmtree(root / "episodes")


def _odd_numbers(root: Path) -> None:
    with (root / "metrics.jsonl").open("a") as file:
        for value in ("NaN", "1e999", "-Infinity", '"x"', "null", "[]"):
            file.write(f'{{"step": 4, "time": 1.0, "loss/total/mean": {value}}}\n')


def _of_other_forms(root: Path) -> None:
    odd: list[Any] = [
        *([], 3, "x", None, {"traces": 3}, {"gradus": []}, {"traces": [None]}),
        {"traces": [{"nodes": [{"message": {"content": [1, {"text": 2}], "tool_calls": [3]}}]}]},
        {"gradus": {"task": 1, "advantages": 2, "dropped": 3, "filters": 4, "versions": 5}},
        {"traces": [{"rewards": {"a": None}, "metrics": 3, "timing": 4, "calls": [{}, 1]}]},
        {"id": 10**30, "traces": [{"nodes": [{}], "calls": [{"node": []}]}]},
        {"traces": [{"num_output_tokens": 10**12}]},
        {"gradus": {"reward": 10**30, "versions": {"oldest": 10**50, "newest": 10**50}}},
        {"traces": [{"nodes": [{"message": {"content": "half a \ud83d"}}]}]},
    ]
    with (root / "episodes" / "step_3" / "train.jsonl").open("a") as file:
        file.writelines(json.dumps(it) + "\n" for it in odd)


def _odd_journal_and_tokens(root: Path) -> None:
    odd: list[Any] = [
        *([], 3, {"event": 3}, {"event": "group_opened", "group": [1]}),
        {"event": "group_opened", "group": "g", "size": -1},
        {"event": "episode_started", "episode": "g.0", "version": -5},
        {"event": "episode_started", "episode": "g.1", "version": 10**30},
        {"event": "batch_cut", "step": -9, "groups": ["g", "h"]},
        {"event": "policy_applied", "version": -20},
    ]
    (root / "journal.jsonl").write_text("".join(f"{json.dumps(it)}\n" for it in odd))
    one = trained("g0.0/0/0", [1, 2, 3], [1], -1.0)
    short = msgspec.structs.replace(one, is_trained=np.array([True] * 9))
    write_trained(root, one, step=0)
    write_trained(root, short, step=3)
    for name in ("step_x", "step_99999999999999999999", "step_\u0663"):
        (root / "tokens" / name).mkdir()


@pytest.mark.parametrize(
    "damage",
    [_emptied, _torn, _without_episodes, _odd_numbers, _of_other_forms, _odd_journal_and_tokens],
)
async def test_a_damaged_run_is_shown_as_far_as_it_can_be_read(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    root = a_whole_run(tmp_path / "run")
    damage(root)
    async with served(root) as client:
        rows = (await ask(client, "/api/runs/run/episodes"))["rows"]
        for key in [it["key"] for it in rows] or ["train-0-0"]:
            for path in routes(key):
                answer = await client.get(path)
                is_gone = not rows or "/text" in path
                assert answer.status == 200 or (is_gone and answer.status == 404), path
                assert not path.startswith("/api") or await answer.json() is not None
        assert (await ask(client, "/api/runs/run"))["problems"] or rows


async def test_a_record_that_goes_away_is_said_to_be_gone(tmp_path: Path) -> None:
    root = a_whole_run(tmp_path / "run")
    async with served(root) as client, client.get("/api/runs/run/events") as events:
        await events.content.readline()  # Now others look, and a request does not.
        await ask(client, "/api/runs/run/episodes/train-0-0")
        (root / "episodes" / "step_0" / "train.jsonl").unlink()
        assert (await client.get("/api/runs/run/episodes/train-0-0")).status == 404


async def test_a_new_record_and_a_new_episode_are_told(tmp_path: Path) -> None:
    root = a_whole_run(tmp_path / "run")

    async def until(events: Any, is_told: Callable[[dict[str, Any]], bool]) -> None:
        async with asyncio.timeout(SECONDS):
            async for line in events.content:
                if line.startswith(b"data: ") and is_told(json.loads(line[6:])):
                    return
            raise AssertionError("the events ended")

    async with served(root) as client, client.get("/api/runs/run/events") as events:
        await until(events, lambda it: it["records"] == 4 and it["episodes"] == 12)
        with_five = JsonlMonitor(root / "metrics.jsonl")
        with_five.record({"loss/total/mean": 0.5}, step=4)
        with_five.close()
        await until(events, lambda it: it["records"] == 5)
        add_episode(root, step=4, reward=0.9, reply="new")
        await until(events, lambda it: it["episodes"] == 13)
        assert (await ask(client, "/api/runs/run/episodes"))["rows"][0]["reward"] == 0.9
        # A resume goes back to the first two records.
        lines = (root / "metrics.jsonl").read_bytes().splitlines(keepends=True)
        (root / "metrics.jsonl").write_bytes(b"".join(lines[:2]))
        cut = {"num_bytes": len(b"".join(lines[:2])), "step": 2}
        (root / "cuts.jsonl").write_text(json.dumps(cut) + "\n")
        await until(events, lambda it: it["records"] == 2)


@pytest.mark.parametrize("by", ["", "&by=group"])
async def test_the_next_rows_of_a_table_stand_as_its_first_ones_did(
    tmp_path: Path, by: str
) -> None:
    root = a_run(tmp_path / "run")
    for number in range(6):
        add_episode(root, step=number, reward=0.0, reply="a", group=f"g{number}")
    address = f"/api/runs/run/episodes?rows=3{by}"
    async with served(root) as client:
        first = await ask(client, address)
        add_episode(root, step=9, reward=1.0, reply="newer", group="g9")
        add_episode(root, step=1, reward=1.0, reply="newer", group="g1")
        second = await ask(client, f"{address}&from=3&all={first['all']}")
        assert (await client.get(f"{address}&all=few")).status == 404
    groups = [it["group"] for it in [*first["rows"], *second["rows"]]]
    assert groups == [f"g{number}" for number in reversed(range(6))]
    assert (first["passing"], second["passing"], second["all"]) == (6, 6, 8)
    assert {it["reward"] for it in second["rows"]} == {0.0}


async def test_the_end_of_a_run_is_told_and_shown(tmp_path: Path) -> None:
    root = a_whole_run(tmp_path / "run")
    (root / "summary.json").rename(root / "later.json")
    async with served(root) as client, client.get("/api/runs/run/events") as events:
        assert json.loads((await events.content.readline())[6:])["outcome"] == "killed"
        assert (await ask(client, "/api/runs/run"))["outcome"] == "killed"
        (root / "later.json").rename(root / "summary.json")
        async with asyncio.timeout(SECONDS):
            while b'"outcome":"done"' not in await events.content.readline():
                pass
        assert (await ask(client, "/api/runs/run"))["outcome"] == "done"


async def test_who_goes_away_while_files_are_read_leaves_no_second_reader(tmp_path: Path) -> None:
    run = _Followed(OpenRun(RunDirectory(a_run(tmp_path / "run"))))
    began, may_end = threading.Event(), threading.Event()

    def read(_: OpenRun) -> None:
        began.set()
        assert may_end.wait(SECONDS)
        readings.append("first")

    readings: list[str] = []
    asking = asyncio.create_task(run.ask(read))
    assert await asyncio.to_thread(began.wait, SECONDS)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    next_one = asyncio.create_task(run.ask(lambda _: readings.append("second")))
    await asyncio.sleep(0)
    may_end.set()
    await next_one
    assert readings == ["first", "second"]


async def test_news_that_come_while_others_are_told_are_told_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = a_whole_run(tmp_path / "run")
    viewer = Viewer(open_shelf([root]), token=TOKEN)
    write, told = web.StreamResponse.write, []

    async def write_slowly(answer: web.StreamResponse, data: Any) -> None:
        if data.startswith(b"data: "):
            told.append(json.loads(data[6:])["episodes"])
            if len(told) == 1:  # While this is on its way, a new episode is seen.
                add_episode(root, step=4, reward=0.9, reply="new")
                async with asyncio.timeout(SECONDS):
                    while viewer._opened["run"].seen["episodes"] == told[0]:
                        await asyncio.sleep(0)
        await write(answer, data)

    monkeypatch.setattr(web.StreamResponse, "write", write_slowly)
    server = TestServer(viewer.app(), host="127.0.0.1")
    async with TestClient(server, cookie_jar=_any_host()) as client:
        await client.get(f"/?token={TOKEN}")
        async with client.get("/api/runs/run/events") as events:
            lines = [await events.content.readline() for _ in range(3)]
    assert [line[:6] for line in lines] == [b"data: ", b"\n", b"data: "]  # No pause between them.


async def test_a_record_is_told_at_once_and_more_episodes_only_now_and_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = a_whole_run(tmp_path / "run")
    followed = _Followed(OpenRun(RunDirectory(root)))
    monkeypatch.setattr("gradus.view.server._CALM_LOOKS", 1e9)
    while (await followed.look()).has_more:
        pass
    before = followed.seen["episodes"]
    add_episode(root, step=4, reward=0.9, reply="new")
    await followed.look()
    assert followed.seen["episodes"] == before
    monitor = JsonlMonitor(root / "metrics.jsonl")
    monitor.record({"loss/total/mean": 1.0}, step=90)
    monitor.close()
    await followed.look()
    assert followed.seen["episodes"] == before + 1
    add_episode(root, step=4, reward=0.9, reply="newer")
    monkeypatch.setattr("gradus.view.server._CALM_LOOKS", 0)
    await followed.look()
    assert followed.seen["episodes"] == before + 2


async def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    root = a_whole_run(tmp_path / "run")
    (root / "summary.json").unlink()  # As of a run that was killed, whose logs are looked at.
    (root / "logs").mkdir()
    (root / "alive").mkdir()
    names = ("live.json", "notices.log", "logs/trainer.log", "alive/trainer.json", "cuts.jsonl")
    for name in (*names, "lease.json", "config/launched.json"):
        (root / name).unlink(missing_ok=True)
        os.mkfifo(root / name)
    async with served(root) as client, asyncio.timeout(SECONDS):
        for path in routes("train-0-0"):
            assert (await client.get(path)).status == 200, path


async def test_launches_whose_steps_overlap_make_one_line(tmp_path: Path) -> None:
    root = a_whole_run(tmp_path / "run")
    monitor = JsonlMonitor(root / "metrics.jsonl")
    for step in (2, 3, 4):
        monitor.record({"episode/words/reward/mean": 0.125 * step}, step=step)
    monitor.close()
    async with served(root) as client:
        found = (await ask(client, "/api/runs/run"))["rewards"]
    assert found["steps"] == [1, 2, 3, 4, 5]
    assert found["mean"] == [0.0, 0.25, 0.25, 0.375, 0.5]


async def test_of_agents_that_play_each_other_each_has_its_reward(tmp_path: Path) -> None:
    pro, con = (f"episode/debate/agent/{name}/reward/mean" for name in ("pro", "con"))
    part = "episode/debate/agent/pro/reward/won/mean"
    root = a_run(tmp_path / "run", metrics=[{pro: x / 4, con: -x / 4, part: 1.0} for x in (0, 1)])
    async with served(root) as client:
        found = (await ask(client, "/api/runs/run"))["rewards"]
    assert found["mean"] == [None, None]
    assert found["parts"] == {pro: [0.0, 0.25], con: [0.0, -0.25]}


async def test_the_first_screen_of_a_supervised_run_has_its_losses(tmp_path: Path) -> None:
    root = a_whole_run(tmp_path / "run")
    for name in ("summary.json", "config/launched.json"):
        path = root / name
        path.write_text(path.read_text().replace('"kind": "rl"', '"kind": "sft"'))
    (root / "checkpoints" / "step_4").mkdir(parents=True)
    shutil.rmtree(root / "episodes")
    async with served(root) as client:
        found = await ask(client, "/api/runs/run")
        settings = await ask(client, "/api/runs/run/settings")
    assert found["kind"] == "sft"
    # It plays no episodes, so that none are missing, and none are behind a checkpoint.
    assert not any("episodes" in it for it in found["problems"])
    assert settings["checkpoints"] == []
    assert found["losses"]["loss/total/mean"] == {
        "x": [1, 2, 4], "y": [1.0, 0.0, -2.0], "count": 3,
    }  # fmt: skip


async def test_a_folder_that_nobody_may_read_is_one_line_among_the_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_whole_run(tmp_path / "mine")
    (tmp_path / "theirs").mkdir()

    def stat(path: Path, **options: Any) -> Any:
        if path.parent.name == "theirs":
            raise PermissionError(13, "Permission denied", str(path))
        return found(path, **options)

    found = Path.stat
    monkeypatch.setattr(Path, "stat", stat)
    async with served(tmp_path) as client:
        rows = {it["id"]: it for it in (await ask(client, "/api/runs"))["runs"]}
    assert rows["mine"]["outcome"] == "done"
    assert "Permission denied" in rows["theirs"]["problem"]


async def test_tokens_are_those_of_the_replay_with_the_same_record(tmp_path: Path) -> None:
    import msgspec

    root = a_run(tmp_path / "run")
    add_episode(root, step=0, reward=1.0, reply="ab", episode="g0.0")
    path = root / "episodes" / "step_0" / "train.jsonl"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"id": "second"}) + "\n")
    for term, name in ((1, "first"), (2, "second"), (3, "third")):
        nodes = [{"token_ids": [7, term], "mask": [False, True], "logprobs": [-0.5 * term]}]
        episode = msgspec.msgpack.encode({"id": name, "traces": [{"nodes": nodes, "more": 1}]})
        log = EpisodeLog(LaunchRecord(RunDirectory(root), term).episodes)
        log.append("g0.0", msgspec.msgpack.encode({"id": "g0.0", "episode": episode, "seconds": 1}))
        log.close()
    async with served(root) as client:
        found = await ask(client, "/api/runs/run/episodes/train-0-0/tokens")
    known = {"ids": [7, 2], "texts": None, "logprobs": [None, -1.0], "sampled": [False, True]}
    assert found["traces"] == [[known | {"versions": [], "read_otherwise": []}]]
    assert "trainer.recorded_share" in found["missing"]["trainer"]
    assert found["missing"].keys() == {"trainer", "versions", "reference"}


async def test_without_replay_the_page_says_why_no_token_is_coloured(tmp_path: Path) -> None:
    async with served(a_whole_run(tmp_path / "run")) as client:
        found = await ask(client, "/api/runs/run/episodes/train-0-0/tokens")
        assert "recorded no tokens" in found["why"]


def test_what_is_no_run_is_refused_with_what_to_name(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    for name, said in (("none", "no folder"), ("file", "no folder"), ("empty", "no folder in it")):
        with pytest.raises(ConfigError, match=said):
            open_shelf([tmp_path / name])


async def test_a_run_of_another_version_is_refused_by_name_and_listed_among_others(
    tmp_path: Path,
) -> None:
    a_whole_run(tmp_path / "old")
    newer = a_whole_run(tmp_path / "newer")
    write_json(newer / ".gradus-run", {"run_id": "newer", "kind": "rl", "format": 99})
    with pytest.raises(ConfigError, match="format 99"):
        open_shelf([newer])
    async with served(tmp_path) as client:
        rows = {it["id"]: it for it in (await ask(client, "/api/runs"))["runs"]}
    assert rows["old"]["outcome"] == "done"
    assert (rows["newer"]["outcome"], "format 99" in rows["newer"]["problem"]) == (
        "unreadable",
        True,
    )


def test_names_that_no_address_could_hold_and_equal_names_get_ids(tmp_path: Path) -> None:
    paths = [a_run(tmp_path / folder / name) for folder in "ab" for name in ("x y/é?#", "same")]
    shelf = open_shelf(paths)
    assert len(shelf.runs) == 4
    assert all(re.fullmatch(r"[\w.~-]+", run_id) for run_id in shelf.runs)


def test_the_page_makes_no_html_of_texts_and_loads_what_is_listed() -> None:
    page = files("gradus.view").joinpath("page")
    for it in [*page.iterdir(), *page.joinpath("views").iterdir()]:
        if it.name.endswith((".js", ".html")):
            text = it.read_text()
            assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write", text)
            assert not re.search(r"\beval\(|new Function|https?://(?!www\.w3\.org/2000/svg)", text)
            assert not re.search(r"\sstyle=|\son\w+=\"|<script>", text)
    vendor = page.joinpath("vendor")
    listed = [it.split() for it in vendor.joinpath("SHA256SUMS").read_text().splitlines()[1:]]
    for digest, name in listed:
        assert hashlib.sha256(vendor.joinpath(name).read_bytes()).hexdigest() == digest
    kept = {it.name for it in vendor.iterdir()}
    assert kept == {"SHA256SUMS", *(name for _, name in listed)}


async def test_a_table_that_is_written_keeps_nobody_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end = threading.Event()
    writing = asyncio.Event()
    loop = asyncio.get_running_loop()

    def write(columns: Mapping[str, Any]) -> bytes:
        loop.call_soon_threadsafe(writing.set)
        assert may_end.wait(20)
        return ",".join(columns).encode()

    monkeypatch.setattr("gradus.view.opened._parquet", write)
    async with served(a_whole_run(tmp_path / "run")) as client:
        table = asyncio.create_task(client.get("/api/runs/run/episodes.parquet"))
        await writing.wait()
        try:
            async with asyncio.timeout(10):
                assert (await ask(client, "/api/runs/run/episodes?rows=1"))["rows"]
        finally:
            may_end.set()
        assert (await (await table).text()).startswith("step,reward")


async def test_numbers_of_a_view_come_as_parquet_where_pyarrow_is_and_with_a_sentence_where_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = a_whole_run(tmp_path / "run")
    async with served(root) as client:
        run = "/api/runs/run"
        rows = (await ask(client, f"{run}/episodes?sort=-reward&rows=500"))["rows"]
        curve = (await ask(client, f"{run}/curves?name=loss/total/mean"))["loss/total/mean"]
        if written := find_spec("pyarrow") and import_module("pyarrow.parquet"):
            found = await (await client.get(f"{run}/episodes.parquet?sort=-reward")).read()
            table = written.read_table(BytesIO(found)).to_pylist()
            assert table == rows
            found = await (await client.get(f"{run}/curves.parquet?name=loss/total/mean")).read()
            table = written.read_table(BytesIO(found)).to_pylist()
            assert [[it["steps"], it["value"]] for it in table] == [
                list(it) for it in zip(curve["x"], curve["y"], strict=True)
            ]
        monkeypatch.setitem(sys.modules, "pyarrow", None)
        refused = await client.get(f"{run}/episodes.parquet")
        assert refused.status == 404
        assert "pip install pyarrow" in (await refused.json())["error"]
