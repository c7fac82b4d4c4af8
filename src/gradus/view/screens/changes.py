"""What changed since the first step: one task in its beginning, middle and now, and the tokens
whose share of what was trained grew most; best, median and worst reply of the newest step."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from gradus.errors import ConfigError, CorruptStateError, ProtocolError
from gradus.monitor.statistics import over_runs
from gradus.monitor.token_record import all_records, record_folder
from gradus.run.episodes import RecordedEpisode, locate_episodes
from gradus.run.paths import Purpose, RunDirectory
from gradus.view.episode import TokenTexts
from gradus.view.groups import read_place
from gradus.view.index import EpisodeIndex

_MAX_TEXT = 2_000
_MAX_PARTS = 12
_MAX_NEWEST_BYTES = 32 << 20
_MAX_TOKENS = 1_000_000
"""Of a step, whose shares are counted."""
_CANDIDATES = 40
_SHOWN = 8
_Shares = dict[str, Counter[int]]
"""How often each token was trained, by group."""


def followed_task(index: EpisodeIndex) -> dict[str, Any]:
    """The median reply to one task in the first, the middle and the newest step that played it.

    The task is the one that most steps played, the longest apart among those. Where no task was
    played twice, the median replies of the steps themselves, whatever their tasks.
    """
    purposes = index.words("purpose", 2)
    for purpose in sorted(purposes, reverse=True):
        best = index.select(
            "task",
            {"purpose": [purpose]},
            """AND task <> '' GROUP BY task HAVING min(step) < max(step)
            ORDER BY count(DISTINCT step) DESC, max(step) - min(step) DESC, max("row") DESC
            LIMIT 1""",
        ).fetchall()
        if best:
            return _over_steps(index, {"purpose": [purpose], "task": list(best[0])})
    if not purposes:
        return {"task": "", "replies": []}
    return _over_steps(index, {"purpose": [max(purposes)]})


def _over_steps(index: EpisodeIndex, of: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    is_training = of["purpose"][0] == "train"
    found = index.select("DISTINCT step", of, "AND reward IS NOT NULL ORDER BY step").fetchall()
    played = [step for (step,) in found]
    replies: list[dict[str, Any]] = []
    places = [0, len(played) // 2, -1] if played else []
    for step in dict.fromkeys(played[it] for it in places):
        own = {**of, "step": [str(step)], "reward": ["-inf..inf"]}
        rewards = [it["reward"] for it in index.cells(own)]
        key, place = next(index.places(own, "reward", first=len(rewards) // 2))
        if (episode := read_place(place)) is not None:
            word = f"{'step' if is_training else 'version'} {step + is_training}"
            about = {"mean": fmean(rewards), "count": len(rewards)}
            replies.append(_reply(word, str(key), episode) | about)
    task = of.get("task", [""])[0]
    return {"task": task, "purpose": of["purpose"][0], "num_steps": len(played), "replies": replies}


def grown_tokens(run_dir: RunDirectory, texts: TokenTexts | None) -> dict[str, Any]:
    """The tokens that trained more often in the newest step than in the first, as shares.

    The interval of a change is over groups, for the replies of a group are alike.
    """
    steps = sorted(
        int(it.name[5:])
        for it in (run_dir.tokens.iterdir() if run_dir.tokens.is_dir() else ())
        if it.name.startswith("step_") and it.name[5:].isdecimal()
    )
    try:
        first = next((it for it in steps if _counted(run_dir, it)), None)
        last = next((it for it in reversed(steps) if _counted(run_dir, it)), None)
        if first is None or last is None or first == last:
            return {"why": "tokens/ holds no two steps that trained"}
        before, now = _counted(run_dir, first), _counted(run_dir, last)
    except (OSError, ConfigError, CorruptStateError, ProtocolError, IndexError) as error:
        return {"why": str(error)}
    return {
        "first": first + 1,
        "last": last + 1,
        "groups": [len(before), len(now)],
        "tokens": [sum(it.total() for it in side.values()) for side in (before, now)],
        "grown": list(itertools.islice(_grown(before, now, texts), _SHOWN)),
    }


def _counted(run_dir: RunDirectory, step: int) -> _Shares:
    """The tokens that trained in a step; the id of a group begins that of its samples."""
    if not record_folder(run_dir, step).is_dir():
        return {}
    counts: defaultdict[str, Counter[int]] = defaultdict(Counter)
    left = _MAX_TOKENS
    for record in all_records(run_dir, step):
        tokens: list[int] = record.token_ids[record.is_trained].tolist()
        if len(tokens):
            counts[record.sample_id.partition(".")[0]].update(tokens)
        left -= len(tokens)
        if left < 0:
            break
    return counts


def _grown(before: _Shares, now: _Shares, texts: TokenTexts | None) -> Iterator[dict[str, Any]]:
    """Those that grew most first, without what may be chance."""
    sums = [sum(side.values(), Counter[int]()) for side in (before, now)]
    shares = [{token: n / it.total() for token, n in it.items()} for it in sums]
    changes = Counter(
        {token: share - shares[0].get(token, 0) for token, share in shares[1].items()}
    )
    for token, change in changes.most_common(_CANDIDATES):
        sides = [[it[token] / it.total() for it in side.values()] for side in (before, now)]
        is_sure = over_runs(*sides).is_clear
        if change > 0 and (is_sure or min(map(len, sides)) < 2):
            yield {
                "token": token,
                "text": texts.text(token) if texts else None,
                "shares": [shares[0].get(token, 0.0), shares[1][token]],
                "is_sure": is_sure,
            }


def ranked_replies(purpose: Purpose, step: int, path: Path) -> dict[str, Any]:
    """Best, median and worst of a file; no replies where none has a reward."""
    try:
        ranked = sorted(
            (
                (line, it)
                for line, it in locate_episodes(path, stop=_MAX_NEWEST_BYTES)
                if it is not None and it.reward is not None
            ),
            key=lambda pair: pair[1].reward or 0.0,
        )
    except OSError:  # It went since the folder was listed.
        ranked = []
    places = {"best": len(ranked) - 1, "median": len(ranked) // 2, "worst": 0} if ranked else {}
    replies = [
        _reply(word, f"{purpose}-{step}-{ranked[place][0].start}", ranked[place][1])
        for word, place in places.items()
    ]
    return {"step": step, "purpose": purpose, "count": len(ranked), "replies": replies}


def _reply(word: str, key: str, episode: RecordedEpisode) -> dict[str, Any]:
    trace = episode.shown
    asked, said = trace.last_turn if trace else ("", "")
    place = next((n for n, it in enumerate(episode.traces) if it is trace), 0)
    advantages = episode.advantages
    return {
        "word": word,
        "key": key,
        "trace": place,
        "source": episode.source,
        "reward": episode.reward,
        "advantage": advantages[place] if place < len(advantages) else None,
        "parts": dict(itertools.islice(trace.rewards.items(), _MAX_PARTS)) if trace else {},
        "asked": asked[-_MAX_TEXT:],
        "said": said[:_MAX_TEXT],
        "is_cut": len(asked) > _MAX_TEXT or len(said) > _MAX_TEXT,
        "answer": episode.answer[:200],
    }
