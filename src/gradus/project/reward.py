"""The reward of a project: proposed or copied into its folder, and tried before it trains."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from gradus.errors import ConfigError
from gradus.plugins import REWARD_ARGUMENTS
from gradus.project.answers import are_long, rewards_for
from gradus.project.folder import fill
from gradus.project.rows import TaskRow
from gradus.rows.reward_trial import rewards_of

_TRIAL_SECONDS = 60.0
_TRIED_ROWS = 100
_RIGHT = "your answers"
_SAID = "the same in a sentence"
_IMPORT = re.compile(r"\((ModuleNotFoundError|ImportError):")
_COPY = re.compile(r"(?<![\w/\\.-])rewards\.py\b")
_ALONE = (
    "Only the file itself is copied, as rewards.py: put into it what it imports from files beside "
    "it, or install those as a package and name MODULE:FUNCTION"
)
_SAYS = {
    "last_number": "1 when the last number of the reply is the row's answer",
    "boxed_answer": "1 when the last box of the reply, or its end, is the answer in any spelling",
    "short_answer": "1 when the reply ends with the answer, but for case, marks and articles",
    "choice": "1 when the reply settles on the letter or the text of the right choice",
}
"""The rewards of the kit that `init` proposes, each with what it pays."""


@dataclass(frozen=True)
class ProjectReward:
    """The function of a project's folder."""

    module: str
    path: str
    """For a config."""
    own_name: str
    """As the user named it, or as the path."""
    proposed: str = ""
    """The kit's function that it calls; "" for one of the user's."""


def write_reward(stage: Path, reward: str | None, rows: Sequence[TaskRow]) -> ProjectReward:
    """The reward in the folder: a file of the user copied, or the one of the kit that pays most of
    the right answers."""
    if reward is None:
        proposed = _proposed(stage, rows)
        fill(stage, {"project/rewards.py": "rewards.py"}, _values(proposed))
        return ProjectReward("rewards", "rewards.py:score", "rewards.py:score", proposed)
    where, _, function = reward.rpartition(":")
    if not where or not function.isidentifier():
        raise ConfigError(f"--reward {reward!r}: write FILE.py:FUNCTION or MODULE:FUNCTION")
    if not where.endswith(".py"):
        return ProjectReward(where, reward, reward)
    file = Path(where)
    if not file.is_file():
        raise ConfigError(f"--reward {reward!r}: there is no such file (seen from {Path.cwd()})")
    shutil.copyfile(file, stage / "rewards.py")
    return ProjectReward("rewards", f"rewards.py:{function}", reward)


def _values(proposed: str) -> dict[str, str]:
    return {"proposed": proposed, "says": _SAYS[proposed]}


def _proposed(stage: Path, rows: Sequence[TaskRow]) -> str:
    if rows[0].options is not None:
        return "choice"
    names = rewards_for([row.right for row in rows if row.right is not None])
    paid = {name: _paid(stage, name, rows) for name in names[:-1]}
    return next((name for name, share in paid.items() if share == 1), names[-1])


def _paid(stage: Path, name: str, rows: Sequence[TaskRow]) -> float:
    """The share of right answers that a function of the kit pays, in the row's words and ours."""
    some = _some(rows)
    calls = [_call(row, said) for row in some for said in (row.answer, _sentence(row)) if said]
    reward = f"gradus_jsonl.answers:{name}"
    try:
        totals = rewards_of(
            reward, calls, offered=REWARD_ARGUMENTS, folder=stage, seconds=_TRIAL_SECONDS
        )
    except ConfigError:
        return 0.0
    return fmean(0.0 if isinstance(total, str) else total for total in totals or [0.0])


def try_reward(
    stage: Path, reward: ProjectReward, offered: Sequence[str], rows: Sequence[TaskRow]
) -> list[str]:
    """What answers and tricks earn, in lines; ConfigError for a function that cannot serve, under
    the user's own name for it."""
    some = _some(rows)
    replies: dict[str, list[str | None]] = {
        _RIGHT: [row.answer for row in some],
        _SAID: [_sentence(row) if reward.proposed else None for row in some],
        "an empty reply": [""] * len(some),
        "the prompt copied": [row.opening[-1]["content"] for row in some],
        "the answer of another row": [some[place - 1].answer for place in range(len(some))],
        "5,000 words": ["a " * 5000] * len(some),
    }
    tried = [
        (who, _call(row, reply))
        for who, said in replies.items()
        for row, reply in zip(some, said, strict=True)
        if reply is not None
    ]
    totals = _totals(stage, reward, [call for _, call in tried], offered)
    if totals is None:
        return ["reward: not tried, as it takes `trace`, which only an episode that is played has"]
    earned: dict[str, list[float]] = {}
    for (who, _), total in zip(tried, totals, strict=True):
        earned.setdefault(who, []).append(total)
    means = {who: fmean(values) for who, values in earned.items()}
    name = f" {reward.proposed}" if reward.proposed else ""
    paid = ", ".join(f"{who} {mean:.2g}" for who, mean in means.items())
    lines = [f"reward{name}, on {len(some)} of {len(rows)} rows: {paid}"]
    if min(totals) == max(totals):
        so = ", right answers too: nothing" if _RIGHT in means else ": if all others do, nothing"
        return [*lines, f"every reply that was tried earns {totals[0]:.2g}{so} can be learned"]
    lines += _warnings(reward, rows, some, earned)
    best = means.pop(_RIGHT, None)
    tricks = [
        who for who, mean in means.items() if best is not None and who != _SAID and mean >= best
    ]
    return [*lines, *(f"Training will find that {who} pays as well" for who in tricks[:1])]


def _warnings(
    reward: ProjectReward,
    rows: Sequence[TaskRow],
    some: Sequence[TaskRow],
    earned: Mapping[str, Sequence[float]],
) -> list[str]:
    """What a proposed reward does not pay, though it is right."""
    if not reward.proposed:
        return []
    lost = [
        row
        for who in (_RIGHT, _SAID)
        for row, total in zip(some, earned.get(who, ()), strict=False)
        if total < 1
    ]
    lines = []
    if lost:
        lines.append(
            f"it does not pay the right answer of {len({id(row) for row in lost})} of these rows, "
            f"as of {lost[0].answer!r:.60}: give a function of your own, --reward rewards.py:score"
        )
    if are_long([row.right for row in rows if row.right is not None]):
        lines.append(
            "most answers are longer than anybody says again word for word: train on them by sft, "
            "or give a function that rates a reply, --reward rewards.py:score"
        )
    return lines


def _some(rows: Sequence[TaskRow]) -> Sequence[TaskRow]:
    return rows[:: -(-len(rows) // _TRIED_ROWS)]


def _sentence(row: TaskRow) -> str | None:
    return (
        None if row.right is None else f"I have thought about it. The answer is {row.right.bare}."
    )


def _call(row: TaskRow, reply: str) -> dict[str, Any]:
    """What any task set offers to a reward."""
    messages = [*row.opening, {"role": "assistant", "content": reply}]
    program: dict[str, Any] = {"output": reply, "errors": "", "exit_code": 0, "files": {}}
    values = json.loads(row.line)
    program["prompt"] = row.opening[-1]["content"]
    return {"reply": reply, "row": values, "messages": messages, "trace": None, **program}


def _totals(
    stage: Path, reward: ProjectReward, calls: Sequence[Mapping[str, Any]], offered: Sequence[str]
) -> list[float] | None:
    """What each call earns; ConfigError for the first that fails."""
    try:
        found = rewards_of(
            reward.path,
            calls,
            offered=offered,
            folder=stage,
            seconds=_TRIAL_SECONDS,
            name=reward.own_name,
        )
    except TimeoutError as error:
        raise ConfigError(str(error)) from error
    except ConfigError as error:
        raise ConfigError(_of_the_users_file(reward, str(error))) from error
    if failed := next((one for one in found or () if isinstance(one, str)), None):
        raise ConfigError(_of_the_users_file(reward, failed))
    return None if found is None else [float(one) for one in found]


def _of_the_users_file(reward: ProjectReward, said: str) -> str:
    """A sentence about the copy as one about the user's own file."""
    if not reward.path.startswith("rewards.py:"):
        return said
    said = _COPY.sub(lambda _: reward.own_name.rpartition(":")[0], said)
    return f"{said}. {_ALONE}" if _IMPORT.search(said) else said
