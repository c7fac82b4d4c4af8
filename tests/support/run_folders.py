"""Folders of runs as the processes of a run leave them, with what tests ask for."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from gradus.config import RunConfig
from gradus.files import write_json
from gradus.monitor import JsonlMonitor
from gradus.monitor.token_record import TokenRecord, pack_records, record_file
from gradus.run.paths import RunDirectory
from gradus.run.recording import EpisodeLog, LaunchRecord


def a_run(
    root: Path,
    *,
    metrics: Sequence[Mapping[str, float]] = (),
    outcome: str | None = "done",
    changes: Mapping[str, Any] | None = None,
) -> Path:
    """An RL run: `metrics` of one record for each step; None for one that wrote no summary."""
    config = {"model": {"name": "tiny"}, "max_steps": 9, **(changes or {})}
    config.setdefault("orchestrator", {"train": {"env": [{"id": "words"}]}})
    dumped = RunConfig.model_validate(config).model_dump(mode="json")
    root.mkdir(parents=True, exist_ok=True)
    write_json(root / ".gradus-run", {"run_id": root.name, "kind": "rl", "format": 3})
    write_json(root / "lease.json", {"term": 1, "owner": None})
    (root / "config").mkdir(exist_ok=True)
    launched = {"kind": "rl", "code_version": "gradus 0.1.0", "packages": {"torch": "2.13.0"}}
    write_json(root / "config" / "launched.json", launched | {"config": dumped})
    monitor = JsonlMonitor(root / "metrics.jsonl")
    for step, values in enumerate(metrics):
        monitor.record(values, step=step)
    monitor.close()
    if outcome is not None:
        summary = {"kind": "rl", "term": 1, "outcome": outcome, "cause": None, "max_steps": 9}
        write_json(root / "summary.json", summary)
    return root


def add_episode(
    root: Path, *, step: int, reward: float, reply: str, asked: Any = "ask", **own: Any
) -> None:
    """One more line of `episodes/step_N/train.jsonl`."""
    nodes = [
        {"message": {"role": "user", "content": asked}, "sampled": False},
        {"message": {"role": "assistant", "content": reply}, "sampled": True},
    ]
    trace = {
        "agent": {"name": "agent", "trainable": True},
        "rewards": {"right": {"score": reward, "weight": 1.0}},
        "nodes": nodes,
        "num_output_tokens": 3,
    }
    gradus = {"source": "words", "task": {"key": "k1"}, "dropped": {}, "error": None, **own}
    record = {"task": {"data": {"name": "one"}}, "ok": True, "traces": [trace], "gradus": gradus}
    path = root / "episodes" / f"step_{step}" / "train.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")


def showing(*names: str) -> list[dict[str, Any]]:
    """A message with images of these names, and a question."""
    shown = [{"type": "image_url", "image_url": {"url": name}} for name in names]
    return [*shown, {"type": "text", "text": "how many?"}]


def a_run_of_namesakes(root: Path) -> Path:
    """Task 3 of `words` in an evaluation and in training, where `sums` has a task 3 of its own."""
    add_episode(a_run(root), step=0, reward=1.0, reply="a", task={"key": "3"})
    path = root / "episodes" / "step_0" / "train.jsonl"
    path.rename(path.with_name("eval.jsonl"))
    for source, reward in (("words", 0.0), ("words", 0.5), ("sums", 1.0)):
        add_episode(root, step=0, reward=reward, reply="a", source=source, task={"key": "3"})
    return root


def write_trained(root: Path, *records: TokenRecord, step: int = 0) -> None:
    path = record_file(RunDirectory(root), step, 0)
    path.parent.mkdir(parents=True)
    path.write_bytes(pack_records(records))


def trained(sample_id: str, tokens: list[int], places: list[int], start: float) -> TokenRecord:
    """Numbers from `start` on for the tokens at these places; the reference's are 0.5 lower."""
    some = np.arange(start, start + len(places), dtype=np.float32)
    return TokenRecord(
        *(sample_id, 1, [], np.array(tokens, np.int32), np.isin(np.arange(len(tokens)), places)),
        *(some, some, some, some),
        *({"rl": some, "ce": some}, some, some - 0.5),
    )


def a_branching_episode(root: Path) -> Path:
    """A question, a first reply, and two continuations of it, in the second of two traces."""
    nodes = [
        {"token_ids": [1, 2], "mask": [False, False], "logprobs": []},
        {"parent": 0, "token_ids": [3, 4], "mask": [False, True], "logprobs": [-1.0]},
        {"parent": 1, "token_ids": [5, 6], "mask": [True, True], "logprobs": [-1.0, -2.0]},
        {"parent": 1, "token_ids": [7], "mask": [True], "logprobs": [-3.0]},
    ]
    noted = {"1": [[8, 1]], "2": [[8, 1], [9, 1]], "3": [[9, 7]]}
    traces = [{"nodes": []}, {"nodes": nodes, "info": {"policy_versions": noted}}]
    log = EpisodeLog(LaunchRecord(RunDirectory(root), 1).episodes)
    episode = msgspec.msgpack.encode({"id": "first", "traces": traces})
    log.append("g0.0", msgspec.msgpack.encode({"id": "g0.0", "episode": episode}))
    log.close()
    return root
