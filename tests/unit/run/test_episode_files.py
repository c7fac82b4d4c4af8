"""Episodes of a run as a person reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gradus.run.episodes import RecordedEpisode, episode_files, read_episodes
from gradus.run.json_lines import BrokenLines
from gradus.run.paths import RunDirectory


def node(role: str, content: object, *, sampled: bool = False, **more: object) -> dict[str, Any]:
    return {"message": {"role": role, "content": content, **more}, "sampled": sampled}


def trace(*nodes: dict[str, Any], score: float | None = 1.0, **more: object) -> dict[str, Any]:
    return {"rewards": {"right": {"score": score, "weight": 2.0}}, "nodes": nodes, **more}


def read(tmp_path: Path, **record: object) -> RecordedEpisode:
    path = tmp_path / "train.jsonl"
    path.write_text(json.dumps(record) + "\n")
    (episode,) = read_episodes(path)
    return episode


def test_files_come_in_the_order_of_their_steps(tmp_path: Path) -> None:
    run_dir = RunDirectory(tmp_path)
    for name in ("step_10", "step_2", "step_x", "notes"):
        (run_dir.episodes / name).mkdir(parents=True)
        (run_dir.episodes / name / "train.jsonl").write_text("")
    (run_dir.episodes / "step_3").mkdir()
    assert [step for step, _ in episode_files(run_dir, "train")] == [2, 10]
    assert episode_files(run_dir, "eval") == []


def test_the_shown_trace_is_the_first_with_credit_then_the_first_that_trains(
    tmp_path: Path,
) -> None:
    traces = [
        trace(agent={"name": "judge", "trainable": False}),
        trace(agent={"name": "black"}, score=0.25),
        trace(agent={"name": "white"}, score=0.5),
    ]
    for advantages, agent, reward in (
        ([None, None, 0.1], "white", 1.0),
        ([None, None, None], "black", 0.5),
        ([], "black", 0.5),
    ):
        episode = read(tmp_path, traces=traces, gradus={"advantages": advantages})
        assert episode.shown is not None
        assert (episode.shown.agent, episode.reward) == (agent, reward)


def test_a_message_is_its_reasoning_its_parts_and_its_calls(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "look"}, {"type": "image_url"}]
    calls = [{"name": "run", "arguments": "{}"}, {"function": {"name": "old", "arguments": "1"}}]
    nodes = (
        node("user", parts),
        node("assistant", "done", sampled=True, reasoning_content="hm", tool_calls=calls),
        node("assistant", "done"),
        node("tool", None),
    )
    episode = read(tmp_path, traces=[trace(*nodes)])
    assert episode.shown is not None
    found = [(it.role, it.text, it.is_sampled) for it in episode.shown.messages]
    assert found == [
        ("user", "look", False),
        ("assistant", "hm\ndone\nrun({})\nold(1)", True),
        ("tool", "", False),
    ]


def test_an_episode_that_failed_has_its_error_and_no_reward(tmp_path: Path) -> None:
    error = {"type": "ToolError", "message": "the tool is gone"}
    for record in ({"gradus": {"error": error}}, {"errors": [error]}):
        episode = read(tmp_path, traces=[trace()], **record)
        assert (episode.error, episode.error_message) == ("ToolError", "the tool is gone")
        assert episode.reward is None
    assert read(tmp_path, ok=False).error == "failed"
    failed = [trace() | {"rewards": {"score": None}}]
    assert read(tmp_path, traces=failed, gradus={"error": error}).error == "ToolError"


def test_a_reward_of_the_episode_comes_before_that_of_a_trace(tmp_path: Path) -> None:
    assert read(tmp_path, traces=[trace()], gradus={"reward": 0.3}).reward == 0.3
    assert read(tmp_path, traces=[{"nodes": []}]).reward is None
    assert read(tmp_path, traces=[trace(score=None)]).reward == 0.0
    assert read(tmp_path, gradus={"reward": float("nan")}).reward is None


def test_a_task_is_its_key_or_else_its_number_and_both_may_be_zero(tmp_path: Path) -> None:
    assert read(tmp_path, gradus={"task": {"index": 3, "key": 0}}).task == "0"
    assert read(tmp_path, gradus={"task": {"index": 0, "key": None}}).task == "0"
    assert read(tmp_path, task={"key": "word"}).task == "word"
    assert read(tmp_path).task == ""


def test_records_of_another_form_cost_themselves_alone(tmp_path: Path) -> None:
    path = tmp_path / "eval.jsonl"
    wrong = [
        '{"traces": 5}',
        '{"gradus": [1]}',
        '{"traces": [5]}',
        '{"traces": [{"nodes": [3]}]}',
        '{"gradus": {"advantages": ["high"]}}',
        '{"traces": [{"rewards": {"a": {"score": "much"}}}]}',
        "[1]",
        "\udcff",
    ]
    good = json.dumps({"id": "good"})
    text = "\n".join([*wrong, good, '{"torn'])
    path.write_bytes(text.encode(errors="surrogateescape"))
    broken = BrokenLines()
    assert [it.id for it in read_episodes(path, broken=broken)] == ["good"]
    assert (broken.count, broken.first_byte) == (len(wrong), 0)
