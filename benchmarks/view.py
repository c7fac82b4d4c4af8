"""What `gradus view` costs on a run with many episodes: index, memory, answers, first paint.

    python benchmarks/view.py --episodes 1000 100000 --output benchmarks/results/view.json
    python benchmarks/view.py --episodes --repeat 50 --output benchmarks/results/view.json

The run is made up: 500 steps, records of the form and size of the demo's (3.6 kB). Answers are
timed over HTTP on loopback, medians of eleven that no memory of an earlier answer serves. With
Chromium installed, the time from the start of the navigation to the first paint, and to the first
row of the table, of a browser that starts cold; frames without a row while the table is scrolled by
eight rows a frame; seconds until a new record stands in a curve and a new episode in the table.
Processor time of the server while a run writes eight episodes a second and a record each fifth,
with as many followers as a run has open tabs. Results of other numbers of episodes in the file
stay.
`--tokens RUN` says what the record of tokens of a run takes of the disk, and of the processor.
`--repeat` takes the index of 20,000 episodes so many times, each with groups of its own: what a
million rows hold and cost, without the minutes that writing and reading them takes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import ClientSession, ClientTimeout, CookieJar, web

from gradus.files import write_json
from gradus.monitor import JsonlMonitor
from gradus.monitor.token_record import all_records, pack_records
from gradus.run.paths import RunDirectory
from gradus.run.records import read_records
from gradus.view.groups import summed_rows
from gradus.view.index import EpisodeIndex
from gradus.view.server import HOST, Viewer
from gradus.view.shelf import open_shelf

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))
from browser import CHROMIUM, Page, a_page

NUM_STEPS = 500
_TIMES = 11
_FOLLOWED_SECONDS = 20
BARS = ("reward", "tokens", "staleness")
_PADDING = "x" * 2_400
"""What the demo's records hold of settings."""


def make_run(root: Path, num_episodes: int) -> None:
    """A run whose episodes differ in everything that the table shows."""
    numbers = random.Random(0)
    root.mkdir()
    (root / ".gradus-run").write_text(json.dumps({"run_id": "run", "kind": "rl", "format": 3}))
    monitor = JsonlMonitor(root / "metrics.jsonl")
    each = max(1, num_episodes // NUM_STEPS)
    for step in range(min(NUM_STEPS, num_episodes)):
        monitor.record({f"loss/m{n}/mean": numbers.random() for n in range(60)}, step=step)
        path = root / "episodes" / f"step_{step}" / "train.jsonl"
        path.parent.mkdir(parents=True)
        rows = (_record(step, number, numbers) for number in range(each))
        path.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    monitor.close()


def _record(step: int, number: int, numbers: random.Random) -> dict[str, Any]:
    score, length = numbers.random(), numbers.randrange(1, 400)
    said = " ".join(map(str, numbers.choices(range(1000), k=40)))
    nodes = [
        {"message": {"role": "user", "content": said[:60]}, "sampled": False, "num_tokens": 24},
        {"message": {"role": "assistant", "content": said}, "sampled": True, "num_tokens": length},
    ]
    trace = {
        "agent": {"name": "agent", "trainable": True, "config": {"padding": _PADDING}},
        "rewards": {"right": {"score": score, "weight": 1.0}},
        "nodes": nodes,
        "num_output_tokens": length,
    }
    own = {
        "episode": f"g{step:06d}.{number}",
        "group": f"g{step:06d}.{number // 8}",
        "source": "words",
        "task": {"key": f"task {numbers.randrange(5_000)}"},
        "versions": {"oldest": max(0, step - number % 4), "newest": step},
        "outcome": "finished",
        "advantages": [score - 0.5],
        "dropped": {"s": "zero_advantage"} if number % 9 == 0 else {},
    }
    return {"id": own["episode"], "ok": True, "traces": [trace], "gradus": own}


def memory_mib() -> float:
    """What this process holds."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def measure_index(run_dir: RunDirectory) -> dict[str, float]:
    before, start, cpu = memory_mib(), time.perf_counter(), time.process_time()
    index = EpisodeIndex(run_dir)
    while index.advance(max_rows=2_000):
        pass
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    idle = time.process_time()
    for _ in range(_TIMES):
        index.advance(max_rows=2_000)
    idle = (time.process_time() - idle) / _TIMES
    return {
        "seconds": round(seconds, 3),
        "microseconds_per_row": round(1e6 * seconds / index.num_rows, 1),
        "cpu_microseconds_per_row": round(1e6 * cpu / index.num_rows, 1),
        "idle_look_cpu_milliseconds": round(1e3 * idle, 2),
        "mib": round(memory_mib() - before, 1),
    }


def measure_repeated(run_dir: RunDirectory, times: int) -> dict[str, Any]:
    """Memory of an index of many rows, and milliseconds of processor of what is asked of it."""
    before, small = memory_mib(), EpisodeIndex(run_dir)
    while small.advance(max_rows=2_000):
        pass
    rows = small.num_rows
    small._table.execute(f"""INSERT INTO episodes SELECT * EXCLUDE (n)
        REPLACE ("row" + {rows} * n AS "row", "group" || n AS "group", random() AS reward)
        FROM episodes, range(1, {times}) AS r(n)""")
    small._count()
    index = small
    found = {"rows": index.num_rows, "load": os.getloadavg()[0]}
    found["mib"] = round(memory_mib() - before)
    asked: dict[str, Callable[[int], object]] = {
        "filter_and_sort": lambda n: index.cells({"reward": [f"0.{n}1.."]}, "-tokens", count=100),
        "histograms": lambda n: [index.histogram(it, {"tokens": [f"..{300 + n}"]}) for it in BARS],
        "window": lambda n: index.cells({}, first=n * 1000, count=200),
        "by_group": lambda n: summed_rows(
            index, "group", {"reward": [f"..0.9{n}"]}, "-reward", known=index.num_rows, count=100
        ),
    }
    for name, question in asked.items():
        spent = []
        for n in range(_TIMES):
            start = time.process_time()
            question(n)
            spent.append(1e3 * (time.process_time() - start))
        found[f"{name}_cpu_milliseconds"] = round(statistics.median(spent), 1)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10 - before
    return found | {"mib_at_most": round(peak)}


def measure_tokens(run_dir: RunDirectory) -> dict[str, Any]:
    """Bytes a token and milliseconds of processor a step, packing and writing, of what is kept."""
    found, tokens, trained, size = [], 0, 0, 0
    for folder in run_dir.tokens.glob("step_*"):
        records = list(all_records(run_dir, int(folder.name.removeprefix("step_"))))
        trained += sum(int(it.is_trained.sum()) for it in records)
        tokens += sum(len(it.token_ids) for it in records)
        with tempfile.TemporaryFile() as file:
            start = time.process_time()
            file.write(pack_records(records))
            os.fsync(file.fileno())
            found.append(1e3 * (time.process_time() - start))
            size += file.tell()
    lines = [it.numbers for it in read_records(run_dir.metrics)]
    seconds = [it["time/step_seconds"] for it in lines if "time/step_seconds" in it]
    return {
        "steps": len(found),
        "tokens": tokens,
        "trained_tokens": trained,
        "bytes_a_token": round(size / tokens, 1),
        "cpu_milliseconds_a_step": round(statistics.median(found), 1),
        "milliseconds_a_step": round(1e3 * statistics.median(seconds)),
    }


async def measure_answers(address: str, token: str) -> dict[str, float]:
    """Milliseconds of each kind of answer, once the index is whole."""
    run = f"{address}api/runs/run"
    async with ClientSession(cookie_jar=CookieJar(unsafe=True)) as session:

        async def ask(path: str) -> Any:
            async with session.get(path) as answer:
                assert answer.status == 200, await answer.text()
                return await answer.json()

        async with session.get(f"{address}?token={token}"):
            pass
        async with session.get(f"{run}/events") as events:
            async for line in events.content:
                if line.startswith(b"data: ") and not json.loads(line[6:])["has_more"]:
                    break
            key = (await ask(f"{run}/episodes?rows=1"))["rows"][0]["key"]
            found = {}
            for name, path in {
                "filter_and_sort": "episodes?reward=0.{n}1..&tokens=..30{n}&sort=-advantage",
                "window": "episodes?from=0&rows=100",
                "histograms": "histograms?reward=..0.9{n}",
                "open": f"episodes/{key}",
                "first_screen": "",
            }.items():
                times = []
                for n in range(_TIMES):
                    start = time.perf_counter()
                    await ask(f"{run}/{path.format(n=n)}".rstrip("/"))
                    times.append(1e3 * (time.perf_counter() - start))
                # One answer serves all who ask for the first screen at once.
                fold = max if name == "first_screen" else statistics.median
                found[name] = round(fold(times), 1)
    return found


async def measure_browser(root: Path, address: str, token: str) -> dict[str, float]:
    """Milliseconds until a cold browser paints, and until it shows the first row."""
    with tempfile.TemporaryDirectory() as folder:
        async with a_page(Path(folder), f"{address}?token={token}") as page:
            await page.until("performance.getEntriesByName('first-contentful-paint').length")
            paint = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
            first = await page.value(paint)
            rows = "document.querySelector('tr[data-row]')"
            start = await page.value("(location.hash = '#/run/episodes', performance.now())")
            shown = await page.value(
                f"new Promise((done) => {{ const look = () => {rows} ? done(performance.now()) "
                ": requestAnimationFrame(look); look(); })"
            )
            found = {"first_paint": round(first, 1), "first_row": round(shown - start, 1)}
            while not await page.value("document.getElementById('state')?.textContent === ''"):
                await asyncio.sleep(0.5)
            return found | await _scrolled(page) | await _delays(page, root)


async def _scrolled(page: Page) -> dict[str, float]:
    """Frames in which the middle of the table had no row, of those that were drawn."""
    # What grew while it was read is shown when it is asked for.
    await page.value("(location.hash = '#/run/settings', 1)")
    await page.until("document.querySelector('h1')?.textContent === 'Settings'")
    await page.value("(location.hash = '#/run/episodes?sort=reward', 1)")
    await page.until("document.querySelector('.rows tr[data-row]')")
    await page.until("document.querySelectorAll('.histogram').length")  # They move the table.
    look = """new Promise((done) => {
      const rows = document.querySelector('.rows');
      let blank = 0, frames = 0;
      const next = () => {
        const box = rows.getBoundingClientRect();
        const y = Math.min(box.y + box.height / 2, innerHeight - 40);
        const at = document.elementFromPoint(box.x + 60, y);
        if (!at?.closest('tr[data-row]')) blank += 1;
        frames += 1;
        if (frames === 240) done([blank, frames]);
        else { rows.scrollTop += 240; requestAnimationFrame(next); }
      };
      requestAnimationFrame(next);
    })"""
    blank, frames = await page.value(look)
    return {"blank_frames": blank, "frames": frames}


async def _delays(page: Page, root: Path) -> dict[str, float]:
    """Milliseconds until a new record, and a new episode, can be seen."""
    await page.value("(location.hash = '#/run/curves?search=loss/m1/mean', 1)")
    await page.until("document.querySelector('figure .uplot')")
    await asyncio.sleep(2.0)
    grow(root, NUM_STEPS)
    start = time.perf_counter()
    await page.until("document.querySelector('.last').textContent === '77'")
    record = time.perf_counter() - start
    await page.value("(location.hash = '#/run/episodes', 1)")
    await page.until("document.querySelector('tr[data-row]')")
    step = "document.querySelector('tr[data-row] td').textContent"
    await asyncio.sleep(2.0)
    grow(root, NUM_STEPS + 1)
    start = time.perf_counter()
    await page.until(f"{step} === '{NUM_STEPS + 2}'")
    episode = time.perf_counter() - start
    return {"record_seen": round(1e3 * record), "episode_seen": round(1e3 * episode)}


def grow(root: Path, step: int, *, with_record: bool = True) -> None:
    """Eight more episodes, and the record of their step."""
    numbers = random.Random(step)
    if with_record:
        monitor = JsonlMonitor(root / "metrics.jsonl")
        monitor.record({f"loss/m{n}/mean": 77.0 for n in range(60)}, step=step)
        monitor.close()
    path = root / "episodes" / f"step_{step}" / "train.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(_record(step, number, numbers)) for number in range(8)]
    path.write_text("".join(f"{line}\n" for line in lines))


async def measure_followers(root: Path) -> dict[str, float]:
    """The server's share of a core while the run writes eight episodes and the state of its queues
    each second, and a record each fifth, by the number of tabs."""
    found = {}
    step = NUM_STEPS + 10
    for count in (0, 1, 10):
        command = [sys.executable, "-m", "gradus.cli.main", "view", str(root)]
        server = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        assert server.stdout is not None
        address = (await server.stdout.readline()).decode().split()[-1]
        tabs = [asyncio.create_task(_follow(address)) for _ in range(count)]
        try:
            if count:  # Until the index is read, if there is one to read.
                await _follow(address, until_read=True)
            before, start = _cpu_seconds(server.pid), time.perf_counter()
            for second in range(_FOLLOWED_SECONDS):
                step += 1
                grow(root, step, with_record=second % 5 == 0)
                write_json(root / "live.json", {"time": time.time(), "numbers": {}})
                await asyncio.sleep(1.0)
            used = _cpu_seconds(server.pid) - before
            found[f"tabs_{count}"] = round(used / (time.perf_counter() - start), 4)
        finally:
            for tab in tabs:
                tab.cancel()
            server.terminate()
            await server.wait()
    return found


async def _follow(address: str, *, until_read: bool = False) -> None:
    """As a tab does on the first screen: ask for all of it whenever there is something new."""
    base, _, token = address.partition("?token=")
    async with ClientSession(base, cookie_jar=CookieJar(unsafe=True)) as session:
        async with session.get(f"/?token={token}"):
            pass
        async with session.get("/api/runs/run/events", timeout=ClientTimeout(None)) as events:
            async for line in events.content:
                if not line.startswith(b"data: "):
                    continue
                if until_read and not json.loads(line[6:])["has_more"]:
                    return
                async with session.get("/api/runs/run") as answer:
                    await answer.read()


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def measure(root: Path) -> dict[str, Any]:
    runner = web.AppRunner(Viewer(open_shelf([root]), token="t").app(), shutdown_timeout=0.5)
    await runner.setup()
    await web.TCPSite(runner, HOST, 0).start()
    address = f"http://{HOST}:{runner.addresses[0][1]}/"
    try:
        # The browser comes first, while nothing is indexed.
        shown = await measure_browser(root, address, "t") if CHROMIUM else {}
        return {"milliseconds": {**await measure_answers(address, "t"), **shown}}
    finally:
        await runner.cleanup()


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--episodes", type=int, nargs="*", default=[1_000, 100_000])
    parser.add_argument("--repeat", type=int, help="times that an index of 20,000 is taken")
    parser.add_argument("--tokens", type=Path, help="a run whose record of tokens is measured")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(words)
    kept: dict[str, Any] = {"results": []}
    if options.output and options.output.exists():
        kept = json.loads(options.output.read_text())
    results = [it for it in kept["results"] if it["episodes"] not in options.episodes]
    for count in options.episodes:
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder) / "run"
            make_run(root, count)
            size = sum(path.stat().st_size for path in root.rglob("*.jsonl")) / 2**20
            result = {"episodes": count, "records_mib": round(size), "load": os.getloadavg()[0]}
            result["index"] = measure_index(RunDirectory(root))
            result |= asyncio.run(measure(root))
            results.append(result | {"share_of_a_core": asyncio.run(measure_followers(root))})
            print(json.dumps(results[-1]), flush=True)
    if options.repeat:
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder) / "run"
            make_run(root, 20_000)
            kept["repeated"] = measure_repeated(RunDirectory(root), options.repeat)
            print(json.dumps(kept["repeated"]), flush=True)
    if options.tokens:
        kept["token_record"] = measure_tokens(RunDirectory(options.tokens))
        print(json.dumps(kept["token_record"]), flush=True)
    results.sort(key=lambda it: int(it["episodes"]))
    if options.output:
        options.output.write_text(
            json.dumps(kept | {"cores": os.cpu_count(), "results": results}, indent=2)
        )


if __name__ == "__main__":
    main()
