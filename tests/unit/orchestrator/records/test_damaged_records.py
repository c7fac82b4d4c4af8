"""A recorded run with any damage is refused in words, or is read as it was; never a traceback."""

from __future__ import annotations

import asyncio
import contextlib
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scripted_peers import ScriptedEnvironment

from gradus.config import ModelConfig
from gradus.errors import GradusError
from gradus.orchestrator.records.recording import EpisodeRecording
from gradus.run.lease import MARKER_NAME, mark_run
from gradus.run.paths import RunDirectory
from gradus.run.recording import LaunchRecord, note_launch
from gradus.testing.episodes import build_episode
from gradus_lab.replay.batches import BatchMaker
from gradus_lab.replay.recording import RecordedEpisodes, open_recorded_run, read_learned

STEPS = 3
FILES = (
    "journal.jsonl",
    MARKER_NAME,
    "metrics.jsonl",
    "replay/term_00000001/run.json",
    "replay/term_00000001/model.json",
    "replay/term_00000001/episodes.bin",
)


@pytest.fixture
async def rig(build_rig: Any, tmp_path: Path) -> Any:
    """A finished run of three steps with everything that a replay reads."""
    environment = ScriptedEnvironment(
        play=lambda number: build_episode(reward=random.Random(number).random(), seed=number)
    )
    rig = build_rig(environment=environment, max_steps=STEPS, max_lag=2, group_size=3)
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"initial")
    record = LaunchRecord(RunDirectory(rig.root), term=1)
    recording = EpisodeRecording(record, ModelConfig(name=str(model)))
    rig.recording = recording
    mark_run(RunDirectory(rig.root), "rl", run_id="run")
    note_launch(record.run_dir, 1, {"max_steps": STEPS})
    await rig.play()
    recording.finish()
    recording.close()
    (rig.root / "metrics.jsonl").write_text(
        '{"step": 0, "time": 1, "loss/policy/mean": 0.5}\n' * STEPS
    )
    return rig


VALUES = st.sampled_from([b"null", b"-1", b"7", b"[]", b"{}", b'"x"', b"1e400", b"true", b"[1]"])


@st.composite
def damages(draw: st.DrawFn) -> Any:
    """A function from the bytes of a file to damaged ones."""
    kind = draw(st.sampled_from(["flip", "cut", "drop", "repeat", "swap", "value", "key"]))
    place, other = draw(st.floats(0, 1)), draw(st.floats(0, 1))
    bit, value = draw(st.integers(0, 7)), draw(VALUES)

    def damage(content: bytes) -> bytes:
        at = min(int(place * len(content)), len(content) - 1)
        lines = content.split(b"\n")
        i, j = (min(int(p * len(lines)), len(lines) - 1) for p in (place, other))
        if kind == "flip":
            return content[:at] + bytes([content[at] ^ (1 << bit)]) + content[at + 1 :]
        if kind == "cut":
            return content[:at]
        if kind == "drop":
            return b"\n".join(lines[:i] + lines[i + 1 :])
        if kind == "repeat":
            return b"\n".join([*lines[: i + 1], *lines[i:]])
        if kind == "swap":
            lines[i], lines[j] = lines[j], lines[i]
            return b"\n".join(lines)
        parts = lines[i].split(b",")
        k = min(int(other * len(parts)), len(parts) - 1)
        name, colon, rest = parts[k].partition(b":")
        tail = rest[len(rest.rstrip(b"}]")) :]
        parts[k] = name + colon + value + tail if kind == "value" else b'"other"' + colon + rest
        lines[i] = b",".join(parts)
        return b"\n".join(lines)

    return damage


async def read_all(rig: Any, root: Path) -> None:
    """Everything that a replay reads before and while it cuts batches."""
    recorded = open_recorded_run(root)
    steps = recorded.check_steps(None)
    recorded.check_model(str(rig.root.parent / "model"))
    recorded.check_episodes(steps)
    recorded.changed_libraries()
    read_learned(root / "metrics.jsonl")
    with RecordedEpisodes(recorded.run_dir, recorded.decisions.terms) as episodes:
        maker = BatchMaker(rig.config, episodes)
        async for _ in maker.make(recorded.decisions.first(steps)):
            pass


async def test_an_undamaged_run_is_read(rig: Any) -> None:
    await read_all(rig, rig.root)


@pytest.mark.shows("SEC39")
@pytest.mark.parametrize("name", FILES)
def test_damaged_records_are_refused_in_words(rig: Any, tmp_path: Path, name: str) -> None:
    @given(damage=damages())
    @settings(
        max_examples=settings.default.max_examples * (6 if name == "journal.jsonl" else 1) // 4,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    def check(damage: Any) -> None:
        root = tmp_path / "damaged"
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(rig.root, root)
        (root / name).write_bytes(damage((root / name).read_bytes()))
        with contextlib.suppress(GradusError):
            asyncio.run(read_all(rig, root))

    check()
