"""What a run keeps for its replay: entries, headers, digests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import gradus
from gradus.errors import ConfigError, CorruptStateError
from gradus.files import DurableFiles, read_json, write_json
from gradus.installed import module_digest
from gradus.run.model_files import digest_files, weights_digest
from gradus.run.paths import RunDirectory
from gradus.run.recording import (
    FORMAT,
    EpisodeLog,
    LaunchRecord,
    iter_entries,
    note_launch,
    note_launched,
    read_body,
    read_launch,
    recorded_terms,
)
from gradus.sealed import seal, stage
from gradus.weights.published import VersionLabel


def write(path: Path, *bodies: bytes) -> None:
    log = EpisodeLog(path)
    for number, body in enumerate(bodies):
        log.append(f"g000000.{number}", body)
    log.close()


def read(path: Path) -> dict[str, bytes]:
    with path.open("rb") as file:
        return {entry.id: read_body(file, entry, path) for entry in iter_entries(path)}


def test_episodes_come_back_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "term" / "episodes.bin"
    write(path, b"first", b"", bytes(range(256)))
    assert read(path) == {
        "g000000.0": b"first",
        "g000000.1": b"",
        "g000000.2": bytes(range(256)),
    }


@given(kept=st.integers(0, 200), bodies=st.lists(st.binary(max_size=20), min_size=1, max_size=4))
def test_what_a_kill_cut_off_is_no_entry(
    kept: int, bodies: list[bytes], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("torn") / "episodes.bin"
    write(path, *bodies)
    whole = list(iter_entries(path))
    kept = min(kept, path.stat().st_size)
    path.write_bytes(path.read_bytes()[:kept])
    assert list(iter_entries(path)) == [entry for entry in whole if entry.end <= kept]


def test_a_torn_entry_is_cut_off_before_the_next_is_written(tmp_path: Path) -> None:
    path = tmp_path / "episodes.bin"
    write(path, b"whole", b"torn")
    path.write_bytes(path.read_bytes()[:-2])
    log = EpisodeLog(path)
    log.append("g000001.0", b"later")
    log.close()
    assert read(path) == {"g000000.0": b"whole", "g000001.0": b"later"}


def test_a_flipped_bit_is_found_and_named(tmp_path: Path) -> None:
    path = tmp_path / "episodes.bin"
    write(path, b"first", b"second")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(CorruptStateError, match=r"episode g000000\.1 at byte \d+ is damaged"):
        list(iter_entries(path, check=True))


def test_a_launch_tells_its_config_and_its_libraries(tmp_path: Path) -> None:
    run_dir = RunDirectory(tmp_path)
    note_launch(run_dir, 3, {"max_steps": 2})
    launch = read_launch(run_dir, 3)
    assert (launch.term, launch.config) == (3, {"max_steps": 2})
    assert "numpy" in launch.libraries
    assert recorded_terms(run_dir) == [3]


@pytest.mark.shows("I9", "SEC33")
def test_who_started_what_is_in_the_audit_log_without_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SITE_API_KEY", "of-the-house")
    given = ["--inference.env_vars.SITE", "abc", "--monitor", '[{"password": "abc"}]']
    monkeypatch.setattr("sys.argv", ["gradus", "rl", *given, "x=of-the-house"])
    run_dir = RunDirectory(tmp_path)
    for term in (1, 2):
        note_launched(run_dir, "rl", {"seed": term}, term=term, environments=["reverse-text"])
    first, second = (json.loads(line) for line in run_dir.audit.read_text().splitlines())
    hidden = [given[0], "(removed)", "--monitor", '[{"password": "(removed)"}]']
    assert first["command"] == ["gradus", "rl", *hidden, "x=(removed)"]
    assert first["environments"] == second["environments"]
    assert len(first["environments"]["reverse-text"]) == 64
    assert (first["term"], second["term"], first["config"] == second["config"]) == (1, 2, False)
    assert first["user"]
    assert first["host"]
    assert first["packages"]["torch"]


def test_a_run_without_records_has_no_terms(tmp_path: Path) -> None:
    assert recorded_terms(RunDirectory(tmp_path)) == []


def test_a_launch_that_was_not_recorded_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run\.json is missing.*orchestrator\.recording"):
        read_launch(RunDirectory(tmp_path), 1)


@pytest.mark.parametrize("change", [{"gradus": "0.0.7"}, {"format": FORMAT + 1}])
def test_a_launch_of_another_gradus_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    run_dir = RunDirectory(tmp_path)
    note_launch(run_dir, 1, {})
    path = LaunchRecord(run_dir, 1).run
    write_json(path, read_json(path) | change)
    with pytest.raises(ConfigError, match=f"was written by gradus.*this is.*{gradus.__version__}"):
        read_launch(run_dir, 1)


def test_a_header_without_its_fields_is_corrupt(tmp_path: Path) -> None:
    run_dir = RunDirectory(tmp_path)
    write_json(LaunchRecord(run_dir, 1).run, {"format": FORMAT})
    with pytest.raises(CorruptStateError, match="does not describe a launch"):
        read_launch(run_dir, 1)


def test_files_are_digested_by_name(tmp_path: Path) -> None:
    for name in ("b.safetensors", "a.safetensors", "config.json", "notes.txt"):
        (tmp_path / name).write_text(name)
    digests = digest_files(tmp_path, ["*.safetensors", "config.json"])
    assert list(digests) == ["a.safetensors", "b.safetensors", "config.json"]
    assert len(set(digests.values())) == 3


def version(folder: Path, *, term: int = 1, **contents: str) -> Path:
    files = DurableFiles()
    with stage(folder, files) as staging:
        for name, content in contents.items():
            files.stage(staging / name.replace("_", "."), content.encode())
        return seal(staging, folder, VersionLabel(1, term), files=files).path


def test_the_digest_of_weights_is_that_of_their_tensors_alone(tmp_path: Path) -> None:
    first = weights_digest(version(tmp_path / "a", model_safetensors="x", config_json="c"))
    same = version(tmp_path / "b", term=2, model_safetensors="x", config_json="d")
    assert first == weights_digest(same)
    assert first != weights_digest(version(tmp_path / "c", model_safetensors="y"))


def test_a_version_without_a_manifest_has_no_digest(tmp_path: Path) -> None:
    assert weights_digest(tmp_path / "absent") is None


def test_weights_that_were_broadcast_have_no_digest(tmp_path: Path) -> None:
    assert weights_digest(version(tmp_path / "a", stream_json="{}")) is None


def test_the_link_that_an_editor_leaves_in_a_task_set_stops_no_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_tasks").mkdir()
    (tmp_path / "my_tasks/__init__.py").write_text("x = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    digest = module_digest("my-tasks")
    (tmp_path / "my_tasks/.#__init__.py").symlink_to("me@host.123:456")
    assert module_digest("my-tasks") == digest is not None
