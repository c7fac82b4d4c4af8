"""What the orchestrator leaves on disk: the journal and the episodes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from verifiers.v1.episode import WireEpisode

from gradus.config import algorithms
from gradus.errors import CorruptStateError
from gradus.orchestrator.algorithms.group_relative import GroupRelative
from gradus.orchestrator.algorithms.inputs import Lent
from gradus.orchestrator.algorithms.rae import RoleAdvantageEstimation
from gradus.orchestrator.groups.filters import ActiveFilter, ZeroAdvantage
from gradus.orchestrator.groups.grading import SourceGrader, credit_context
from gradus.orchestrator.play.episode_check import (
    MAX_OTHER_INFO_BYTES,
    MAX_RECORD_BYTES,
    MAX_TEXT_CHARACTERS,
)
from gradus.orchestrator.records.episodes import EpisodeWriter, encode_record, episode_record
from gradus.orchestrator.records.journal import Journal, JournalEvent, read_journal, refuse_damaged
from gradus.orchestrator.types import (
    EpisodeFailed,
    EpisodeOutcome,
    Failure,
    Group,
    PlayedEpisode,
    Task,
    TaskPointer,
)
from gradus.testing.episodes import build_episode, build_group, build_trace
from gradus.wire.versions import VersionSpan

GRADING = SourceGrader(
    GroupRelative(algorithms.GrpoConfig()),
    [ActiveFilter(ZeroAdvantage(), True, "zero_advantage")],
    1.0,
    64,
)


def group_of(*results: WireEpisode | Failure | None) -> Group:
    """A group whose episodes ended like this; None was cancelled."""
    group = Group("g0", TaskPointer("words", 0, 3), Task({"idx": 3}, "key-3"))
    for number, result in enumerate(results):
        episode = result if isinstance(result, WireEpisode) else None
        failure = result if isinstance(result, Failure) else None
        span = VersionSpan(1, 2)
        group.played.append(PlayedEpisode(f"g0.{number}", "g0", span, episode, failure))
    return group


def test_outcomes_are_told_apart() -> None:
    group = group_of(build_episode(), Failure("A", "a"), None)
    assert [p.outcome for p in group.played] == [
        EpisodeOutcome.FINISHED,
        EpisodeOutcome.FAILED,
        EpisodeOutcome.CANCELLED,
    ]


def test_grading_compares_the_finished_and_names_the_failed() -> None:
    group = group_of(*build_group([1.0, 0.0]), Failure("ProviderError", "refused"))
    GRADING.grade(group)
    assert [sample.arrays.advantages.max() for sample in group.samples] == [0.5, 0.0]
    assert group.dropped == {"g0.2": "error:ProviderError"}


def test_credit_does_not_depend_on_which_episode_ended_first() -> None:
    group = group_of(*build_group([1.0, 0.0]))
    group.played.reverse()
    SourceGrader(RoleAdvantageEstimation(algorithms.RaeConfig(momentum=0.5)), [], 1.0, 64).grade(
        group
    )
    assert [p.id for p in group.played] == ["g0.0", "g0.1"]
    assert [sample.arrays.advantages.max() for sample in group.samples] == [0.5, 0.0]
    assert group.samples[1].arrays.advantages.min() == -0.25
    assert group.numbers == {"rae_baseline/agent": 0.25}


def test_an_algorithm_sees_the_task_and_what_failed() -> None:
    failed = build_episode([build_trace(error="ProviderError")])
    group = group_of(build_episode())
    failure = Failure("ProviderError", "refused")
    group.played.append(PlayedEpisode("g0.1", "g0", VersionSpan(0, 0), failed, failure))
    context = credit_context(group, Lent([failed, *group.finished_episodes]))
    assert (context.environment, context.task_key) == ("words", "key-3")
    assert [*context.failed] == [failed]


def test_grading_drops_equal_rewards_by_the_name_of_the_filter() -> None:
    group = group_of(*build_group([1.0, 1.0]))
    GRADING.grade(group)
    assert group.samples == []
    assert group.reasons == {"zero_advantage": 2}


def test_an_episode_cut_before_its_reply_is_counted_not_lost() -> None:
    group = group_of(*build_group([1.0, 0.0]))
    SourceGrader(GroupRelative(algorithms.GrpoConfig()), [], 1.0, max_length_tokens=3).grade(group)
    assert group.reasons == {"no_trainable_tokens": 2}


def test_giving_up_keeps_the_reason_of_failures() -> None:
    group = group_of(build_episode(), Failure("A", "a"), None)
    group.give_up("abandoned")
    assert group.dropped == {"g0.0": "abandoned", "g0.1": "error:A", "g0.2": "abandoned"}


def test_the_journal_carries_time_term_and_fields(tmp_path: Path) -> None:
    path = tmp_path / "run" / "journal.jsonl"
    ticks = itertools.count(10)
    with Journal(path, term=4, now=lambda: float(next(ticks))) as journal:
        journal.write(JournalEvent.GROUP_OPENED, group="g0", key=7)
        journal.write(JournalEvent.RUN_ENDED, step=1)
    assert read_journal(path) == [
        {"event": "group_opened", "time": 10.0, "term": 4, "group": "g0", "key": 7},
        {"event": "run_ended", "time": 11.0, "term": 4, "step": 1},
    ]


def test_a_line_is_on_disk_before_the_next_decision(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal.jsonl", term=1, now=lambda: 0.0) as journal:
        journal.write(JournalEvent.RUN_STARTED)
        assert len(read_journal(tmp_path / "journal.jsonl")) == 1


def test_a_torn_last_line_is_no_event_and_goes_when_the_journal_opens_again(
    tmp_path: Path,
) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b'{"event":"run_started"}\n{"event":"gro')
    assert len(read_journal(path)) == 1
    with Journal(path, term=2, now=lambda: 0.0) as journal:
        journal.write(JournalEvent.RUN_STARTED)
    assert [line["event"] for line in read_journal(path)] == ["run_started", "run_started"]


def test_a_torn_line_in_the_middle_is_corruption(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b'{"event":\n{}\n')
    with pytest.raises(CorruptStateError, match="line 1"):
        read_journal(path)


def test_a_record_tells_where_the_episode_stood() -> None:
    group = group_of(*build_group([1.0, 0.0]))
    GRADING.grade(group)
    group.dropped["g0.1/0/0"] = "stale"
    fields = episode_record(group.played[1], group, 5, [])["gradus"]
    assert fields == {
        "episode": "g0.1",
        "group": "g0",
        "source": "words",
        "step": 5,
        "task": {"index": 3, "key": "key-3"},
        "versions": {"oldest": 1, "newest": 2},
        "outcome": "finished",
        "advantages": [-0.5],
        "filters": {"g0.1/0/0": {"zero_advantage": "keep"}},
        "dropped": {"g0.1/0/0": "stale"},
        "error": None,
    }


def test_reasons_of_one_episode_do_not_leak_into_another_with_a_longer_number() -> None:
    group = group_of(*build_group([1.0] * 11))
    group.dropped = {"g0.10/0/0": "stale", "g0.1/0/0": "zero_advantage"}
    fields = episode_record(group.played[1], group, 0, [])["gradus"]
    assert fields["dropped"] == {"g0.1/0/0": "zero_advantage"}


def test_a_failure_without_an_episode_is_a_record_too() -> None:
    group = group_of(Failure("episode_timeout", "took too long"))
    record = episode_record(group.played[0], group, 0, [])
    assert list(record) == ["gradus"]
    assert record["gradus"]["error"] == {"type": "episode_timeout", "message": "took too long"}


def record_of(episode: WireEpisode, state_columns: Sequence[str] = ()) -> dict[str, Any]:
    group = group_of(episode)
    line = encode_record(episode_record(group.played[0], group, 0, state_columns))
    found: dict[str, Any] = msgspec.json.decode(line)
    return found


def test_info_stays_in_the_record_also_when_no_column_names_it() -> None:
    episode = build_episode()
    episode.traces[0].info = {"judge": {"votes": [1, 0]}, "box": object(), "raw": b"x"}
    record = record_of(episode)
    assert record["traces"][0]["info"]["judge"] == {"votes": [1, 0]}
    assert record["traces"][0]["info"]["box"].startswith("<object object")
    assert "cut" not in record["gradus"]


def test_info_that_is_too_large_is_cut_and_says_so_and_named_columns_come_first() -> None:
    episode = build_episode()
    large = "x" * MAX_OTHER_INFO_BYTES
    episode.traces[0].info = {"dump": large, "outcome": "won", "chosen": large}
    record = record_of(episode, ["chosen", "absent"])
    info = record["traces"][0]["info"]
    assert info["outcome"] == "won"
    assert info["chosen"] == large
    assert info["gradus_cut"]["keys"] == 1
    assert list(info["gradus_cut"]["largest"]) == ["dump"]
    assert record["gradus"]["cut"] == {"info": 1}


@pytest.mark.shows("F53")
def test_a_message_that_is_too_large_is_cut_and_says_so() -> None:
    episode = build_episode()
    episode.traces[0].nodes[0].message.content = "y" * (MAX_TEXT_CHARACTERS + 5)
    record = record_of(episode)
    content = record["traces"][0]["nodes"][0]["message"]["content"]
    assert content.endswith(f"… [gradus kept {MAX_TEXT_CHARACTERS} of 262149 characters]")
    assert record["gradus"]["cut"] == {"messages": 1}


def test_a_record_that_is_too_large_keeps_where_the_episode_stood() -> None:
    line = encode_record({"task": "z" * MAX_RECORD_BYTES, "gradus": {"episode": "g0.0"}})
    fields = msgspec.json.decode(line)["gradus"]
    assert fields["episode"] == "g0.0"
    assert fields["cut"]["record_bytes"] > MAX_RECORD_BYTES


def test_a_record_counts_tokens_instead_of_listing_them() -> None:
    reply = record_of(build_episode())["traces"][0]["nodes"][1]
    assert (reply["num_tokens"], reply["num_sampled_tokens"]) == (5, 4)
    assert not {"token_ids", "mask", "is_content", "logprobs", "advantages"} & reply.keys()


def test_a_record_has_the_sums_of_verifiers_own_record() -> None:
    episode = build_episode([build_trace(turns=2), build_trace(turns=3, seed=1)])
    names = ("num_input_tokens", "num_output_tokens", "num_total_tokens")
    expected = episode.model_dump(mode="json")
    record = episode_record(group_of(episode).played[0], group_of(episode), 0, ())
    assert {name: record[name] for name in names} == {name: expected[name] for name in names}
    assert [[t[name] for name in names] for t in record["traces"]] == [
        [t[name] for name in names] for t in expected["traces"]
    ]
    assert all(expected[name] > 0 for name in names)


async def test_credit_that_came_with_an_episode_is_checked_without_an_algorithms_own() -> None:
    episode = build_episode()
    node = next(n for n in episode.traces[0].nodes if n.sampled)
    node.advantages = [math.nan] * sum(node.mask)
    with pytest.raises(EpisodeFailed, match="advantages is nan"):
        await GRADING.score_episode(episode, group_of(episode), "g0.0")


@pytest.mark.shows("F53")
def test_text_that_is_not_unicode_and_numbers_that_are_not_finite_are_still_json() -> None:
    record = {"a\ud800": ["\udfff", {"x": math.nan}], "n": 1}
    assert msgspec.json.decode(encode_record(record)) == {"a?": ["?", {"x": None}], "n": 1}


def test_episodes_of_a_step_are_lines_of_one_file(tmp_path: Path) -> None:
    group = group_of(*build_group([1.0, 0.0]))
    writer = EpisodeWriter(tmp_path, {})
    for played in group.played:
        writer.write(played, group, step=3)
    lines = (tmp_path / "step_3" / "train.jsonl").read_bytes().splitlines()
    assert [msgspec.json.decode(line)["gradus"]["episode"] for line in lines] == ["g0.0", "g0.1"]


@pytest.mark.shows("F24")
def test_a_disk_that_takes_no_record_costs_the_record_and_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "step_0").write_text("in the way")
    group = group_of(*build_group([1.0, 0.0]))
    writer = EpisodeWriter(tmp_path, {})
    for played in group.played:
        writer.write(played, group, step=0)
    assert writer.failed == 2
    assert len(caplog.records) == 1


@pytest.mark.parametrize("event", JournalEvent)
def test_every_event_has_a_shape_that_a_damaged_line_is_compared_with(event: JournalEvent) -> None:
    with pytest.raises(CorruptStateError, match="line 1 of the journal"):
        refuse_damaged([{"event": event}])


@pytest.mark.shows("SEC14")
def test_a_journal_is_never_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "journal.jsonl").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic"):
        Journal(tmp_path / "journal.jsonl", term=1, now=lambda: 0.0)
    assert not (tmp_path / "elsewhere").exists()
