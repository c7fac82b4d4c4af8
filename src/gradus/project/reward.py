"""The reward of a project: copied into its folder, and tried before anything is trained."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from gradus.errors import ConfigError
from gradus.project.folder import fill
from gradus.project.rows import TaskRow

_TRIAL_SECONDS = 60.0
_TRIED_ROWS = 40
_RIGHT = "your answers"
_IMPORT = re.compile(r"\((ModuleNotFoundError|ImportError):")
_COPY = re.compile(r"(?<![\w/\\.-])rewards\.py\b")
_ALONE = (
    "Only the file itself is copied, as rewards.py: put into it what it imports from files beside "
    "it, or install those as a package and name MODULE:FUNCTION"
)


def write_reward(stage: Path, reward: str | None) -> tuple[str, str]:
    """The module of the reward and its path for a config; a file of the user is copied."""
    if reward is None:
        fill(stage, {"project/rewards.py": "rewards.py"}, {})
        return "rewards", "rewards.py:score"
    where, _, function = reward.rpartition(":")
    if not where or not function.isidentifier():
        raise ConfigError(f"--reward {reward!r}: write FILE.py:FUNCTION or MODULE:FUNCTION")
    if not where.endswith(".py"):
        return where, reward
    file = Path(where)
    if not file.is_file():
        raise ConfigError(f"--reward {reward!r}: there is no such file (seen from {Path.cwd()})")
    shutil.copyfile(file, stage / "rewards.py")
    return "rewards", f"rewards.py:{function}"


def try_reward(
    stage: Path, reward: str, own_name: str, offered: Sequence[str], rows: Sequence[TaskRow]
) -> list[str]:
    """What answers and tricks earn, in lines; ConfigError for a function that cannot serve, under
    the user's own name for it."""
    some = rows[:: -(-len(rows) // _TRIED_ROWS)]
    replies: dict[str, list[str | None]] = {
        _RIGHT: [row.answer for row in some],
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
    calls = [call for _, call in tried]
    request = {"reward": reward, "offered": list(offered), "calls": calls}
    totals = _totals(stage, own_name, request)
    if totals is None:
        return ["reward: not tried, as it takes `trace`, which only an episode that is played has"]
    earned: dict[str, list[float]] = {}
    for (who, _), total in zip(tried, totals, strict=True):
        earned.setdefault(who, []).append(total)
    means = {who: fmean(values) for who, values in earned.items()}
    text = f"reward: {', '.join(f'{who} {mean:.2g}' for who, mean in means.items())}"
    if min(totals) == max(totals):
        so = ", right answers too: nothing" if _RIGHT in means else ": if all others do, nothing"
        return [text, f"every reply that was tried earns {totals[0]:.2g}{so} can be learned"]
    best = means.pop(_RIGHT, None)
    tricks = [who for who, mean in means.items() if best is not None and mean >= best]
    return [f"{text}. Training will find that {tricks[0]} pays as well" if tricks else text]


def _call(row: TaskRow, reply: str) -> dict[str, Any]:
    """What any task set offers to a reward."""
    messages = [*row.opening, {"role": "assistant", "content": reply}]
    program: dict[str, Any] = {"output": reply, "errors": "", "exit_code": 0, "files": {}}
    values = json.loads(row.line)
    program["prompt"] = row.opening[-1]["content"]
    return {"reply": reply, "row": values, "messages": messages, "trace": None, **program}


def _totals(stage: Path, own_name: str, request: Mapping[str, Any]) -> list[float] | None:
    """Computed by a child in the folder, which imports the function as a run does; None for a
    function that cannot be tried."""
    result = stage.parent / "rewards.json"
    try:
        done = subprocess.run(
            [sys.executable, "-m", "gradus_jsonl.trial", str(result)],
            input=json.dumps(request),
            cwd=stage,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
            timeout=_TRIAL_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"reward {own_name!r} did not rate {len(request['calls'])} replies within "
            f"{_TRIAL_SECONDS:g} s; make it faster"
        ) from error
    if not result.exists():
        said = ["it must return a number", *done.stderr.strip().splitlines()][-1]
        raise ConfigError(f"reward {own_name!r} ended its process ({done.returncode}): {said}")
    answer = json.loads(result.read_text(encoding="utf-8"))
    if "refused" in answer:
        said = answer["refused"].replace(f"{stage.resolve()}{os.sep}", "")
        is_copy = request["reward"].startswith("rewards.py:")
        said = _COPY.sub(lambda _: own_name.rpartition(":")[0], said) if is_copy else said
        is_lone = is_copy and _IMPORT.search(said)
        raise ConfigError(f"{said}. {_ALONE}" if is_lone else said)
    totals: list[float] | None = answer["totals"]
    return totals
