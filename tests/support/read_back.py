"""What trackers show of a run, read with their own files and clients: name → step → values."""

from __future__ import annotations

import json
import struct
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from gradus.tracking.mlflow import RUN_ID_TAG, name_of_metric

Points = Mapping[str, Mapping[int, list[float]]]
"""Values of a metric at a step, in the order in which they were sent."""
_BLOCK_BYTES = 32768
_HEADER_BYTES = 7


def wandb_records(folder: Path) -> Iterator[Any]:
    """The records of the files that Weights & Biases wrote offline, in order.

    A file is a log of LevelDB: blocks of 32 KiB, records in parts with a header of seven bytes.
    """
    messages = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        content, at, whole = path.read_bytes(), _HEADER_BYTES, b""
        while at + _HEADER_BYTES <= len(content):
            left = _BLOCK_BYTES - at % _BLOCK_BYTES
            if left < _HEADER_BYTES:
                at += left
                continue
            _, size, part = struct.unpack("<IHB", content[at : at + _HEADER_BYTES])
            at += _HEADER_BYTES + size
            whole += content[at - size : at]
            if part in (1, 4):
                yield messages.Record.FromString(whole)
                whole = b""


def wandb_lines(folder: Path) -> list[dict[str, Any]]:
    """What was logged; a line that was sent twice, under one number, once."""
    lines = {}
    for record in wandb_records(folder):
        if record.HasField("history"):
            names = {"/".join(item.nested_key) or item.key: item for item in record.history.item}
            line = {name: json.loads(item.value_json) for name, item in names.items()}
            del line["_runtime"]
            lines[line["_step"]] = line
    return [lines[number] for number in sorted(lines)]


def wandb_points(folder: Path) -> Points:
    """The numbers in the offline files below the folder of a run."""
    found: dict[str, dict[int, list[float]]] = defaultdict(dict)
    for line in wandb_lines(folder):
        for name, value in line.items():
            if name not in ("step", "_step", "_timestamp") and not name.startswith("episodes/"):
                found[name].setdefault(line["step"], []).append(float(value))
    return found


def mlflow_points(uri: str, run_id: str) -> Points:
    """The numbers of the run in a store of MLflow."""
    client = pytest.importorskip("mlflow").MlflowClient(tracking_uri=uri)
    experiments = [it.experiment_id for it in client.search_experiments()]
    (run,) = client.search_runs(experiments, f"tags.`{RUN_ID_TAG}` = '{run_id}'")
    found: dict[str, dict[int, list[float]]] = defaultdict(dict)
    for name in run.data.metrics:
        history = client.get_metric_history(run.info.run_id, name)
        for point in sorted(history, key=lambda point: point.timestamp):
            found[name_of_metric(name)].setdefault(point.step, []).append(point.value)
    return found


def trackio_points(project: str, run_name: str, run_id: str) -> Points:
    """The numbers of the run in the store of Trackio that this process uses."""
    storage = pytest.importorskip("trackio.sqlite_storage").SQLiteStorage
    found: dict[str, dict[int, list[float]]] = defaultdict(dict)
    for line in storage.get_logs(project, run=run_name, run_id=run_id):
        for name, value in line.items():
            if isinstance(value, float | int) and name != "step":
                found[name].setdefault(line["step"], []).append(float(value))
    return found
