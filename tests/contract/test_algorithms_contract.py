"""What every registered algorithm promises, and one of a user's own too."""

from __future__ import annotations

import asyncio
import json
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from configs import build_algorithm_config
from verifiers.v1.episode import WireEpisode

from gradus.config import ErrorPolicyConfig
from gradus.config.schema.algorithms import AlgorithmConfig
from gradus.orchestrator.algorithms import build_algorithm
from gradus.orchestrator.algorithms.base import Algorithm, CreditContext, assign_advantage
from gradus.orchestrator.algorithms.distill import (
    FrozenSampler,
    OnPolicyDistillation,
    SelfDistillation,
)
from gradus.orchestrator.failures import ErrorPolicy
from gradus.orchestrator.groups.grading import (
    SourceGrader,
)
from gradus.orchestrator.groups.samples import SampleOrigin, build_samples
from gradus.orchestrator.records.episodes import encode_record, episode_record
from gradus.orchestrator.records.recording import save_played
from gradus.orchestrator.traces import trainable_traces
from gradus.orchestrator.types import Group, PlayedEpisode, Task, TaskPointer
from gradus.testing.episodes import build_episode, build_trace
from gradus.wire.versions import VersionSpan


class RewardAsAdvantage:
    """An algorithm as a user writes it: no base class, no registration."""

    def __init__(self, *, scale: float = 1.0) -> None:
        self._scale = scale

    async def score_episode(self, episode: WireEpisode, context: CreditContext) -> None:
        for trace in episode.traces:
            if trace.ok and trace.agent.trainable:
                assign_advantage(trace, self._scale * trace.reward)

    def score_group(self, episodes: Any, context: CreditContext) -> None:
        context.record("episodes", len(episodes))

    def state(self) -> dict[str, Any]:
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Nothing to restore."""


class EvenScorer:
    """A reference model for which every token is as likely."""

    stop_token_ids = frozenset[int]()

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        return [-1.0] * len(token_ids)

    async def tokenize(self, messages: Any, **_: Any) -> list[int]:
        return [1] * len(messages)


ROOT = Path(__file__).resolve().parents[2]
DISTILLING = (OnPolicyDistillation, SelfDistillation, FrozenSampler)
OPTIONS = {"opsd": {"demonstration": "prompt"}}
"""What an algorithm needs to score the tasks of `build_games`."""

ORIGIN = SampleOrigin("words", "g0", "g0.0", VersionSpan(0, 0), 1.0, max_length_tokens=100)


@pytest.fixture(params=[*sorted(AlgorithmConfig.registered()), "own"])
def algorithm(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Algorithm:
    if request.param != "own":
        options = OPTIONS.get(request.param, {})
        return build_algorithm(build_algorithm_config(request.param, **options), EvenScorer())
    module = type("module", (), {"RewardAsAdvantage": RewardAsAdvantage})
    monkeypatch.setitem(sys.modules, "my_algorithms", module)
    return build_algorithm(
        build_algorithm_config("my_algorithms:RewardAsAdvantage", options={"scale": 2.0})
    )


def build_games() -> list[WireEpisode]:
    """Two agents that train, a judge that does not, in three episodes."""
    return [
        build_episode(
            [
                build_trace(reward=reward, agent="white", seed=number),
                build_trace(reward=-reward, agent="black", seed=10 + number),
                build_trace(reward=99.0, agent="judge", trainable=False),
            ]
        )
        for number, reward in enumerate([1.0, 0.0, 0.5])
    ]


def credit_of(episode: WireEpisode) -> list[Any]:
    return [(n.advantages, n.loss_weights) for trace in episode.traces for n in trace.nodes]


async def score(algorithm: Algorithm, episodes: list[WireEpisode]) -> CreditContext:
    context = CreditContext("words", task_key="a")
    for episode in episodes:
        await algorithm.score_episode(episode, context)
    algorithm.score_group(episodes, context)
    return context


async def test_credit_is_finite_and_on_trainable_traces_only(algorithm: Algorithm) -> None:
    games = build_games()
    await score(algorithm, games)
    for episode in games:
        *players, judge = episode.traces
        replies = [trace.nodes[1] for trace in players]
        assert all(math.isfinite(a) for node in replies for a in node.advantages or ())
        assert all(node.advantages is not None or node.loss_weights for node in replies)
        assert all(node.advantages is None and not node.loss_weights for node in judge.nodes)


async def test_credited_episodes_become_valid_samples(algorithm: Algorithm) -> None:
    games = build_games()
    await score(algorithm, games)
    samples = [sample for episode in games for sample in build_samples(episode, ORIGIN)]
    assert len(samples) == 6
    for sample in samples:
        sample.check()


async def test_better_than_its_role_means_more_credit_unless_it_distils(
    algorithm: Algorithm,
) -> None:
    games = build_games()
    await score(algorithm, games)
    if isinstance(algorithm, DISTILLING):
        assert credit_of(games[0]) == credit_of(games[1])
        return
    best, worst, _ = (episode.traces[0].nodes[1].advantages[0] for episode in games)
    assert best > worst or best == worst == 0.0


async def test_the_credit_of_a_group_is_the_same_every_time(algorithm: Algorithm) -> None:
    state = json.loads(json.dumps(algorithm.state()))
    first, second = build_games(), build_games()
    await score(algorithm, first)
    algorithm.load_state(state)
    await score(algorithm, second)
    assert [credit_of(e) for e in first] == [credit_of(e) for e in second]


async def test_state_survives_json_and_a_restart(algorithm: Algorithm) -> None:
    await score(algorithm, build_games())
    state = json.loads(json.dumps(algorithm.state()))
    algorithm.load_state(state)
    assert algorithm.state() == state


async def test_a_group_without_finished_episodes_is_no_error(algorithm: Algorithm) -> None:
    await score(algorithm, [])


async def test_numbers_about_a_group_are_finite(algorithm: Algorithm) -> None:
    context = await score(algorithm, build_games())
    assert all(math.isfinite(value) for value in context.numbers.values())


DOCUMENTED = re.findall(
    r"```python\n(.*?)```", (ROOT / "docs" / "algorithms.md").read_text(), flags=re.DOTALL
)


@pytest.mark.parametrize("snippet", DOCUMENTED)
async def test_the_algorithms_of_the_documentation_give_valid_credit(
    snippet: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "documented.py").write_text(snippet)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "documented", raising=False)
    name = re.findall(r"^class (\w+)", snippet, flags=re.MULTILINE)[0]
    algorithm = build_algorithm(build_algorithm_config(f"documented:{name}"))
    games = build_games()
    await score(algorithm, games)
    assert algorithm.state() == {}
    assert any(node.advantages for trace in games[0].traces for node in trace.nodes)
    assert build_samples(games[0], ORIGIN)


def test_the_documentation_shows_credit_per_turn_and_per_token() -> None:
    assert len(DOCUMENTED) >= 2


class Hostile(Algorithm):
    """Writes `credit` past the accessor on the reply of every trace, or raises it."""

    def __init__(self, credit: Any) -> None:
        self._credit = credit

    def score_group(self, episodes: Sequence[WireEpisode], context: CreditContext) -> None:
        if isinstance(self._credit, Exception):
            raise self._credit
        for trace in trainable_traces(episodes):
            for name, value in self._credit.items():
                setattr(trace.nodes[1], name, value)


class HostileAndAsync(Hostile):
    """The same after a wait."""

    async def score_group(self, episodes: Sequence[WireEpisode], context: CreditContext) -> None:
        await asyncio.sleep(0)
        super().score_group(episodes, context)


NAN = math.nan
HOSTILE = [
    ({"advantages": [1.0]}, "invalid_credit"),
    ({"advantages": [1.0] * 5}, "invalid_credit"),
    ({"advantages": [1.0, NAN, 1.0, 1.0]}, "invalid_credit"),
    ({"advantages": [1.0, None, 1.0, 1.0]}, "invalid_credit"),
    ({"advantages": 1.0}, "invalid_credit"),
    ({"reference_logprobs": [-1.0]}, "invalid_credit"),
    ({"reference_logprobs": [0.5] * 4}, "invalid_credit"),
    ({"loss_weights": {"ce": [1.0]}}, "invalid_credit"),
    ({"loss_weights": {"mine": [1.0] * 5}}, "invalid_credit"),
    ({"loss_weights": {"rl": [1.0] * 5}}, "invalid_credit"),
    ({"loss_weights": {"ref_kl": [0.0, 1.0, 1.0, 1.0, 1.0]}}, "invalid_credit"),
    (KeyError("grade"), "algorithm_failed"),
    (ValueError("\udcff"), "algorithm_failed"),
    ({"advantages": np.full(4, 0.5)}, None),
    ({"advantages": [np.float64(0.5)] * 4}, None),
    ({"advantages": np.full(4, 0.5, np.float32), "loss_weights": {"ce": np.ones(5)}}, None),
]


@pytest.mark.parametrize("kind", [Hostile, HostileAndAsync])
@pytest.mark.parametrize(("credit", "failure"), HOSTILE)
async def test_what_an_algorithm_does_wrong_fails_its_group_and_nothing_else(
    kind: type[Hostile], credit: Any, failure: str | None
) -> None:
    group = Group("g0", TaskPointer("words", 0, 0), Task({}, "a"))
    for number, episode in enumerate(build_games()):
        group.played.append(PlayedEpisode(f"g0.{number}", "g0", VersionSpan(0, 0), episode))
    grading = SourceGrader(kind(credit), [], temperature=1.0, max_length_tokens=100)
    if grading.awaits_groups:
        await grading.grade_awaited(group, ErrorPolicy(ErrorPolicyConfig()))
    else:
        grading.grade(group)
    assert (group.failure.kind if group.failure else None) == failure
    assert len(group.samples) == (0 if failure else 6)
    if group.failure:
        where = f"test_algorithms_contract:{kind.__name__}, source 'words', group g0"
        assert where in group.failure.message
    # Whatever happened, the episodes can be recorded and saved.
    assert all(save_played(played).episode for played in group.played)
    assert all(encode_record(episode_record(p, group, 0, ())) for p in group.played)
