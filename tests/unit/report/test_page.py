"""The page about a run: what it shows of any folder, and what no text in it can do."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
from run_folders import a_run, add_episode

from gradus.cli.main import main
from gradus.errors import ConfigError
from gradus.files import write_json
from gradus.report import episodes
from gradus.report.page.charts import Chart, Line, draw, smoothed
from gradus.report.page.render import read_run, render
from gradus.report.text import compact, number

REWARD = "episode/reward/mean"
_VOID = {"meta", "br", "input", "img", "link", "hr"}
_HOSTILE = (
    "<script>alert(1)</script>",
    "</pre></script><img src=x onerror=alert(1)>",
    '"><svg onload=alert(1)>',
    "<!--",
    "]]>",
    "\x1b[2J\x00",
    "\u202egnp.exe",
    "\ud800 half",
    "\u2028",
    "&lt;b&gt;",
    "<style>*{display:none}</style>",
)


class Page(HTMLParser):
    """Tags of a page; fails where they do not nest."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return "".join(self.words)

    def sections(self) -> Iterator[str]:
        return (str(attrs["id"]) for tag, attrs in self.tags if tag == "section")


def page_of(root: Path) -> Page:
    return Page(render(read_run(root)))


def rising(num_steps: int) -> list[dict[str, float]]:
    return [
        {REWARD: step / num_steps, "time/forward_backward_seconds": 2.0}
        for step in range(num_steps)
    ]


def test_a_page_has_the_sections_that_a_run_has_something_for(tmp_path: Path) -> None:
    root = a_run(tmp_path / "run", metrics=rising(20))
    add_episode(root, step=0, reward=0.0, reply="early words")
    add_episode(root, step=19, reward=1.0, reply="late words")
    page = page_of(root)
    expected = ["curves", "settings", "episodes", "alarms", "time", "failures", "metrics"]
    assert list(page.sections()) == expected
    assert "early words" in page.text
    assert "late words" in page.text
    assert "+1 in mean reward" in page.text


def test_the_head_tells_the_reward_of_each_agent_where_a_run_has_none_of_its_own(
    tmp_path: Path,
) -> None:
    def seats(step: int) -> dict[str, float]:
        mean = "episode/poker/agent/{}/reward/mean"
        return {mean.format("first"): step / 8, mean.format("second"): -step / 8}

    text = page_of(a_run(tmp_path / "run", metrics=[seats(step) for step in range(8)])).text
    assert "0 → 0.7500reward of first, first step and mean of the last 3" in text
    assert "-0.7500reward of second" in text
    both = [{**seats(step), REWARD: 0.5} for step in range(8)]
    assert "reward of first" not in page_of(a_run(tmp_path / "both", metrics=both)).text


def test_an_alarm_is_told_with_its_steps_and_not_its_number(tmp_path: Path) -> None:
    metrics = [
        {"alarm/words/truncated": float(step in (4, 5)), "alarm/words/truncated/value": 0.6}
        for step in range(8)
    ]
    text = page_of(a_run(tmp_path / "run", metrics=metrics)).text
    assert "words/truncated5 to 62" in text
    assert "truncated/value5" not in text
    assert "truncated/value1" not in text


def test_no_text_of_a_run_becomes_anything_but_text(tmp_path: Path) -> None:
    hostile = "".join(_HOSTILE)
    root = a_run(tmp_path / "run", metrics=[{f"episode/{hostile}/reward/mean": 1.0}])
    for step in (0, 9):
        add_episode(
            root, step=step, reward=0.5, reply=hostile, source=hostile, task={"key": hostile}
        )
    failed = {"type": hostile, "message": hostile}
    add_episode(root, step=9, reward=0.0, reply=hostile, error=failed)
    (root / "notices.log").write_text(hostile.replace("\ud800", "") + "\n")
    summary = {"kind": "rl", "term": 1, "outcome": hostile, "cause": hostile}
    (root / "summary.json").write_text(json.dumps(summary))
    text = render(read_run(root))
    page = Page(text)
    tags = {tag for tag, _ in page.tags}
    assert not tags & {"script", "img", "iframe", "object", "link", "form", "a:href", "base"}
    assert len([tag for tag, _ in page.tags if tag == "style"]) == 1
    names = {name for _, attrs in page.tags for name in attrs}
    assert not [name for name in names if name.startswith("on") or name in ("src", "style")]
    links = [attrs["href"] for tag, attrs in page.tags if tag == "a"]
    assert all(str(link).startswith("#") for link in links)
    assert "␛[2J␀" in page.text
    assert "⟨U+202E⟩" in page.text
    assert "⟨U+D800⟩" in page.text
    assert text.encode()


def test_a_page_forbids_all_that_a_browser_could_fetch_or_run(tmp_path: Path) -> None:
    page = page_of(a_run(tmp_path / "run"))
    (policy,) = [
        str(attrs["content"])
        for _, attrs in page.tags
        if attrs.get("http-equiv") == "Content-Security-Policy"
    ]
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy


@pytest.mark.parametrize("outcome", ["done", "failed", "interrupted", None])
def test_a_run_without_a_record_has_a_page(tmp_path: Path, outcome: str | None) -> None:
    text = page_of(a_run(tmp_path / "run", outcome=outcome)).text
    assert "no records" in text
    assert (outcome or "ended without a word") in text


def test_the_word_of_a_killed_process_stands_at_the_head(tmp_path: Path) -> None:
    root = a_run(tmp_path / "run", outcome=None)
    (root / "logs").mkdir()
    (root / "logs" / "trainer.log").write_text("gradus trainer: no room on the device\n")
    assert "trainer last said: no room on the device" in page_of(root).text


def test_a_summary_of_an_earlier_launch_is_not_the_end_of_this_one(tmp_path: Path) -> None:
    root = a_run(tmp_path / "run", outcome="done")
    (root / "lease.json").write_text('{"term": 2, "owner": null}')
    assert read_run(root).folder.outcome == "killed"


def test_torn_lines_and_numbers_that_are_not_finite_are_told(tmp_path: Path) -> None:
    root = a_run(tmp_path / "run", metrics=[{"loss/total/mean": float("nan"), "optimizer/lr": 1.0}])
    with (root / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 1, "time": 5.0, "optimizer/lr": 2.0}\n[1]\n\xff\xfe\n{"step": 2, "ti')
    run = read_run(root)
    assert [point.step for point in run.series.steps] == [0, 1]
    text = Page(render(run)).text
    assert "Not finite, so missing in the curves: loss/total/mean (step 1)" in text
    assert "metrics.jsonl has 2 lines that cannot be read, the first at byte" in text


def test_numbers_too_large_to_draw_are_told_like_those_that_are_not_finite(tmp_path: Path) -> None:
    metrics = [{"loss/total/mean": -1e308}, {"loss/total/mean": 1e308}]
    page = page_of(a_run(tmp_path / "run", metrics=metrics))
    assert "missing in the curves: loss/total/mean (step 1, 2)" in page.text


def test_settings_that_were_chosen_stand_apart_and_secrets_nowhere(tmp_path: Path) -> None:
    env = [{"id": "words", "taskset": {"api_key": "abc123", "url": "http://me:pw@host/x"}}]
    root = a_run(tmp_path / "run", changes={"orchestrator": {"train": {"env": env}}})
    run = read_run(root)
    assert run.folder.settings.changed["max_steps"] == 9
    assert "seed" not in run.folder.settings.changed
    assert "seed" in run.folder.settings.values
    page = render(run)
    assert "abc123" not in page
    assert "me:pw" not in page


def test_the_kind_of_algorithm_loss_and_curriculum_that_was_chosen_is_told(tmp_path: Path) -> None:
    env = [{"id": "words", "algo": {"type": "max_rl"}, "curriculum": {"type": "difficulty"}}]
    changes = {
        "orchestrator": {"train": {"env": env}, "filters": [{"type": "repetition"}]},
        "trainer": {"loss": {"type": "cispo"}},
    }
    chosen = read_run(a_run(tmp_path / "run", changes=changes)).folder.settings.changed
    types = {key: value for key, value in chosen.items() if key.endswith(".type")}
    assert types == {
        "orchestrator.train.env.words.algo.type": "max_rl",
        "orchestrator.train.env.words.curriculum.type": "difficulty",
        "orchestrator.filters.0.type": "repetition",
        "trainer.loss.type": "cispo",
    }


def test_a_run_that_was_launched_once_under_a_later_term_has_one_launch(tmp_path: Path) -> None:
    root = a_run(tmp_path / "run", metrics=rising(3))
    write_json(root / "lease.json", {"term": 5, "owner": None})
    assert "launches" not in page_of(root).text
    (root / "cuts.jsonl").write_text('{"num_bytes": 0, "step": 0}\n')
    assert "2launches (resumed)" in page_of(root).text


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not the folder of a run"):
        read_run(tmp_path)
    with pytest.raises(ConfigError, match="not a folder"):
        read_run(tmp_path / "absent")


def test_damaged_files_cost_what_they_hold_and_nothing_else(tmp_path: Path) -> None:
    root = a_run(tmp_path / "run", metrics=rising(3))
    for name in ("summary.json", "lease.json", ".gradus-run", "config/launched.json"):
        (root / name).write_bytes(b'{"half": ')
    (root / "episodes" / "step_0").mkdir(parents=True)
    (root / "episodes" / "step_0" / "train.jsonl").write_text(
        '[1]\n{"traces": 5}\n{"gradus": []}\n'
    )
    (root / "results.json").write_text('{"environments": [{}]}')
    assert "curves" in list(page_of(root).sections())


def test_a_reply_that_a_later_prompt_repeats_is_shown_once(tmp_path: Path) -> None:
    root = a_run(tmp_path / "run")
    add_episode(root, step=0, reward=0.5, reply="said once")
    path = root / "episodes" / "step_0" / "train.jsonl"
    record = json.loads(path.read_text())
    copy = {"message": {"role": "assistant", "content": "said once"}, "sampled": False}
    record["traces"][0]["nodes"].append(copy)
    path.write_text(json.dumps(record) + "\n")
    assert page_of(root).text.count("said once") == 1


def test_an_example_of_each_failure_names_its_type_and_message(tmp_path: Path) -> None:
    failures = {f"episode/error/ToolError/{word}": 3.0 for word in ("sum", "share")}
    root = a_run(tmp_path / "run", metrics=[failures])
    error = {"type": "ToolError", "message": "the tool is gone"}
    add_episode(root, step=0, reward=0.0, reply="words", error=error)
    text = page_of(root).text
    assert "episodes failedToolError3" in text
    assert "the tool is gone" in text


@pytest.mark.slow
def test_a_huge_run_gives_a_small_page_soon(tmp_path: Path) -> None:
    root = a_run(tmp_path / "run")
    line = json.dumps({"step": 1234567, "time": 1767225600.0, REWARD: 0.5, "other": "x" * 2_000})
    with (root / "metrics.jsonl").open("a") as file:
        for start in range(0, 25_000, 1_000):
            lines = (line.replace("1234567", str(start + n)) for n in range(1_000))
            file.write("\n".join(lines) + "\n")
    for step in (0, 24_999):
        for _ in range(6):
            add_episode(root, step=step, reward=0.5, reply='<">' * 200_000)
    began = time.monotonic()
    page = render(read_run(root))
    seconds = time.monotonic() - began
    assert "an even sample of its records" in page
    assert "25,000" in page
    assert len(page.encode()) < 3 << 20
    assert seconds < 30


def test_the_command_writes_the_page_where_it_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = a_run(tmp_path / "run", metrics=rising(3))
    out = tmp_path / "page.html"
    assert main(["report", str(root), "--out", str(out), "--over", "minutes"]) == 0
    assert out.read_text().startswith("<!doctype html>")
    assert str(out) in capsys.readouterr().out
    assert main(["report", str(root), "--over", "years"]) == 64
    assert main(["report", str(root), str(root)]) == 64
    assert main(["report", "--nothing", str(root)]) == 64


def test_the_bold_curve_ends_in_a_mean_and_not_in_the_last_number() -> None:
    points = [(float(x), float(x == 39)) for x in range(40)]
    assert smoothed(points)[-1] == (39.0, 0.2)
    assert smoothed(points)[0] == (0.0, 0.0)


def test_a_spike_leaves_a_smoothed_curve_when_it_is_past() -> None:
    points = [(float(x), 1e18 if x == 3 else 1.0) for x in range(40)]
    assert [y for _, y in smoothed(points)[10:]] == [1.0] * 30
    assert smoothed(points)[3][1] > 1e17


@pytest.mark.parametrize(("count", "most"), [(1, 1), (7, 7), (60, 60), (61, 31), (1_000, 60)])
def test_a_chart_tells_its_numbers_where_it_is_pointed_at(count: int, most: int) -> None:
    points = [(float(x), x / 4) for x in range(1, count + 1)]
    late = [(x, -y) for x, y in points[count // 2 :]]
    picture = draw(Chart("<b>", "", [Line("one", points), Line("late", late)]))
    told = re.findall(r"<title>([^<]*)</title>", picture)
    assert most // 2 < len(told) <= most
    assert told[0].startswith("step 1")
    if count <= 60:
        assert told[0].startswith("step 1: one 0.25")
        assert told[-1] == f"step {count}: one {number(count / 4)}; late {number(-count / 4)}"
    else:
        size = math.ceil(count / 60)
        assert told[0] == f"step 1 to {size}, mean: one {number((size + 1) / 8)}"
        assert f"to {compact(float(count))}, mean" in told[-1]
    edges = [float(it) for it in re.findall(r'class="hit" x="([\d.]+)"', picture)]
    assert edges == sorted(edges)


def test_sources_that_are_left_out_are_named_and_none_that_rang(tmp_path: Path) -> None:
    names = [f"source{number}" for number in range(9)]
    record = {f"episode/{name}/metric/moves/mean": 1.0 for name in names}
    record |= {"alarm/source8/truncated": 1.0, "alarm/source8/truncated/value": 0.6}
    run = a_run(tmp_path / "run", metrics=[record] * 3)
    for name in names:
        for step in (0, 1):
            add_episode(run, step=step, reward=0.5, reply="yes", source=name)
    page = render(read_run(run))
    assert "Measured by the environment: source8" in page
    assert "3 more, in All metrics: source5, source6, source7" in page
    assert "Not shown: source4, source5, source6, source7, source8." in page


def test_episodes_of_evaluations_are_named_by_their_version(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", metrics=[{REWARD: 0.5}])
    for version in (0, 40):
        add_episode(run, step=version, reward=0.5, reply="yes")
        path = run / "episodes" / f"step_{version}" / "train.jsonl"
        path.rename(path.with_name("eval.jsonl"))
    page = render(read_run(run))
    assert "episodes of version 0 and version 40" in page
    assert "early, version 0<" in page


def test_of_few_times_the_largest_is_not_called_their_95th_percentile(tmp_path: Path) -> None:
    times = [{"time/step_seconds": float(it)} for it in range(1, 21)]
    page = render(read_run(a_run(tmp_path / "run", metrics=times)))
    row = page[page.index("<code>time/step_seconds</code>") :][:200]
    assert ">19" in row
    assert ">20" not in row


def test_the_page_names_the_steps_that_it_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = a_run(tmp_path / "run", metrics=[{REWARD: 0.5}] * 40)
    for step in range(40):
        add_episode(run, step=step, reward=0.5, reply="yes")
    monkeypatch.setattr(episodes, "_MAX_EPISODES", 2)
    page = render(read_run(run))
    assert "episodes of steps 1 to 2 and steps 39 to 40" in page
