"""One line per episode, once, whatever a kill left behind."""

from __future__ import annotations

from pathlib import Path

import pytest
from evaluated import read_gradus_fields
from hypothesis import given, settings
from hypothesis import strategies as st
from verifiers.v1.episode import WireEpisode

from gradus.errors import CorruptStateError
from gradus.orchestrator.evaluation.episodes import EpisodeKey, EvaluatedEpisode
from gradus.orchestrator.evaluation.file import EvaluationFile
from gradus.orchestrator.evaluation.results import evaluate, metrics
from gradus.orchestrator.types import PlayedEpisode
from gradus.testing.episodes import build_episode
from gradus.wire.versions import VersionSpan

KEYS = [EpisodeKey("words", task, replica) for task in range(3) for replica in range(2)]


def ended(key: EpisodeKey, *, error: str | None = None) -> EvaluatedEpisode:
    if error is not None:
        return key.failed(0, error, "scripted")
    return finished(key, build_episode(reward=1.0))


def finished(key: EpisodeKey, episode: WireEpisode) -> EvaluatedEpisode:
    played = PlayedEpisode(str(key), key.group_id, VersionSpan(0, 0), episode)
    return EvaluatedEpisode(key, played, attempts=1, task_key="key")


def names(path: Path) -> list[str]:
    return [fields["episode"] for fields in read_gradus_fields(path)]


def test_a_line_is_on_disk_when_append_returns(tmp_path: Path) -> None:
    path = tmp_path / "step_0" / "eval.jsonl"
    with EvaluationFile.create(path) as file:
        for number, key in enumerate(KEYS, start=1):
            file.append(ended(key), ())
            assert len(read_gradus_fields(path)) == number


def test_finished_episodes_are_kept_and_failed_ones_leave(tmp_path: Path) -> None:
    path = tmp_path / "eval.jsonl"
    with EvaluationFile.create(path) as file:
        file.append(ended(KEYS[0]), ())
        file.append(ended(KEYS[1], error="ProviderError"), ())
    with EvaluationFile.reopen(path, KEYS) as file:
        assert list(file.finished) == [KEYS[0]]
        assert file.finished[KEYS[0]].reward == 1.0
        file.append(ended(KEYS[1]), ())
    assert names(path) == ["words/0/0", "words/0/1"]


def test_what_the_environment_measured_is_there_again_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "eval.jsonl"
    episode = build_episode(reward=1.0)
    episode.traces[0].metrics = {"num_calls": 3.0, "huge": 1e308}
    played = finished(KEYS[0], episode)
    with EvaluationFile.create(path) as file:
        file.append(played, ())
    with EvaluationFile.reopen(path, KEYS) as file:
        assert file.finished[KEYS[0]] == played.score()
        result = evaluate([file.finished[KEYS[0]], played.score()], group_size=1)
    found = metrics(result, "eval/words")
    assert found["eval/words/metric/num_calls/mean"] == 3.0
    assert found["eval/words/reward/reward/mean"] == 1.0
    assert "eval/words/metric/huge/mean" not in found, "the sum is beyond what a float holds"


def test_episodes_that_are_not_asked_for_this_time_stay(tmp_path: Path) -> None:
    path = tmp_path / "eval.jsonl"
    with EvaluationFile.create(path) as file:
        for key in KEYS[:-1]:
            file.append(ended(key), ())
        file.append(ended(KEYS[-1], error="ProviderError"), ())
    before = path.read_bytes()
    with EvaluationFile.reopen(path, KEYS[:2]) as file:
        assert list(file.finished) == KEYS[:2]
    assert path.read_bytes() == before


def test_an_episode_that_stands_there_twice_counts_once(tmp_path: Path) -> None:
    path = tmp_path / "eval.jsonl"
    with EvaluationFile.create(path) as file:
        file.append(ended(KEYS[0]), ())
        file.append(ended(KEYS[0]), ())
    with EvaluationFile.reopen(path, KEYS):
        pass
    assert names(path) == ["words/0/0"]


def test_a_file_that_is_not_there_yet_is_begun(tmp_path: Path) -> None:
    with EvaluationFile.reopen(tmp_path / "deep" / "eval.jsonl", KEYS) as file:
        assert file.finished == {}


@pytest.mark.parametrize(
    "line", [b'{"something": "else"}', b'{"gradus": "\xff"}', b"[]", b"\0", b"[" * 9000]
)
def test_a_line_in_the_middle_that_is_no_record_is_refused(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "eval.jsonl"
    path.write_bytes(line + b"\n")
    with pytest.raises(CorruptStateError, match=r"eval\.jsonl line 1 is not a record"):
        EvaluationFile.reopen(path, KEYS)
    assert path.read_bytes() == line + b"\n"
    assert list(tmp_path.iterdir()) == [path]


@given(cut=st.integers(0, 10_000), failed=st.sets(st.integers(0, 5)))
@settings(max_examples=40, deadline=None)
def test_cut_at_any_byte_and_resumed_every_episode_is_there_once(
    tmp_path_factory: pytest.TempPathFactory, cut: int, failed: set[int]
) -> None:
    path = tmp_path_factory.mktemp("cut") / "eval.jsonl"
    with EvaluationFile.create(path) as file:
        for number, key in enumerate(KEYS):
            file.append(ended(key, error="ProviderError" if number in failed else None), ())
    content = path.read_bytes()
    path.write_bytes(content[: cut % (len(content) + 1)])
    with EvaluationFile.reopen(path, KEYS) as file:
        for key in KEYS:
            if key not in file.finished:
                file.append(ended(key), ())
    assert sorted(names(path)) == sorted(map(str, KEYS))
    assert all(fields["error"] is None for fields in read_gradus_fields(path))
