"""A reward function of the user's, tried on made-up replies in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gradus.errors import ConfigError


def rewards_of(
    reward: str,
    calls: Sequence[Mapping[str, Any]],
    *,
    offered: Sequence[str],
    folder: Path,
    seconds: float,
    name: str = "",
) -> list[float | str] | None:
    """What a function pays for each call, or the text of its failure with the user's own line,
    imported as a run does from `folder`; None for a function that cannot be tried, as it needs a
    trace.

    ConfigError, under the user's own `name` for it, for one that cannot be imported or ends its
    process; TimeoutError where it is slow.
    """
    name = name or reward
    with tempfile.TemporaryDirectory(prefix="gradus-reward-") as own:
        result = Path(own, "totals.json")
        request = {"reward": reward, "offered": list(offered), "calls": calls}
        try:
            done = subprocess.run(
                [sys.executable, "-P", "-m", "gradus_jsonl.trial", str(result)],
                input=json.dumps(request),
                cwd=folder,
                env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": _path_here()},
                capture_output=True,
                text=True,
                timeout=seconds,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise TimeoutError(
                f"reward {name!r} did not rate {len(calls)} replies within {seconds:g} s; make it "
                "faster"
            ) from error
        if not result.exists():
            said = ["it must return a number", *done.stderr.strip().splitlines()][-1]
            raise ConfigError(f"reward {name!r} ended its process ({done.returncode}): {said}")
        answer = json.loads(result.read_text(encoding="utf-8"))
    here = f"{folder.resolve()}{os.sep}"
    if "refused" in answer:
        raise ConfigError(answer["refused"].replace(here, ""))
    if answer["rated"] is None:
        return None
    return [one.replace(here, "") if isinstance(one, str) else one for one in answer["rated"]]


def _path_here() -> str:
    """Where this process finds modules, such as those beside the caller's script."""
    return os.pathsep.join(filter(None, [*sys.path, os.environ.get("PYTHONPATH")]))
