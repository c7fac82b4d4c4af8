"""Mathematics problems with their answers: from templates of ours, or rows of the public data."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from gradus.errors import ConfigError
from gradus_hendrycks_math import continuous, discrete
from gradus_kit.tasksets.hub import hub_rows
from gradus_kit.tasksets.marked import last_boxed

HUB_DATASET = "EleutherAI/hendrycks_math"
LEVELS = (1, 2, 3, 4, 5)
SUBJECTS: dict[str, Callable[[random.Random, int], tuple[str, str]]] = {
    "prealgebra": continuous.prealgebra,
    "algebra": continuous.algebra,
    "intermediate_algebra": continuous.intermediate_algebra,
    "precalculus": continuous.precalculus,
    "geometry": continuous.geometry,
    "counting_and_probability": discrete.counting_and_probability,
    "number_theory": discrete.number_theory,
}
_MAX_DRAWS = 200
_NUM_FIRST = 400
"""Templates that hold the 300 which `hendrycks-math` trains by default."""


@dataclass(frozen=True)
class MathProblem:
    """One problem, with the answer that belongs into the box."""

    name: str
    """Subject, level and number."""
    text: str
    answer: str
    subject: str
    level: int


def template_problems(
    subjects: Iterable[str], levels: Iterable[int], *, seed: int | str = 0
) -> Iterator[MathProblem]:
    """Problems without end, subject by subject and level by level in turn, none of them twice.

    A problem depends on its name and the seed alone, so more of them change none. A kind that has
    no further problem is left out; where no kind has one, the problems end.
    """
    kinds = list(itertools.product(levels, subjects))
    seen: set[str] = set()
    for number in itertools.count():
        found = [_draw(subject, level, number, seed, seen) for level, subject in kinds]
        kinds = [kind for kind, problem in zip(kinds, found, strict=True) if problem is not None]
        yield from (problem for problem in found if problem is not None)
        if not kinds:
            return


def unseen_problems(
    subjects: Iterable[str], levels: Iterable[int], *, seed: str
) -> Iterator[MathProblem]:
    """Problems to compare models with: none of those that `hendrycks-math` trains by default."""
    trained = {it.text for it in itertools.islice(template_problems(SUBJECTS, LEVELS), _NUM_FIRST)}
    return (it for it in template_problems(subjects, levels, seed=seed) if it.text not in trained)


def _draw(
    subject: str, level: int, number: int, seed: int | str, seen: set[str]
) -> MathProblem | None:
    name = f"{subject}-{level}-{number:04d}"
    for attempt in range(_MAX_DRAWS):
        rng = random.Random(f"hendrycks-math {seed} {name} {attempt}")
        text, answer = SUBJECTS[subject](rng, level)
        if text not in seen:
            seen.add(text)
            return MathProblem(name, text, answer, subject, level)
    return None


def hub_problems(
    dataset: str, *, split: str, subjects: Iterable[str], levels: Iterable[int]
) -> Iterator[MathProblem]:
    """Problems of the public data, subject by subject; those without an answer are left out."""
    wanted = set(levels)
    for subject in subjects:
        columns = ("problem", "level", "solution")
        rows = hub_rows(dataset, split=split, columns=columns, subset=subject)
        for number, row in enumerate(rows):
            digits = str(row["level"]).rpartition(" ")[2]
            level = int(digits) if digits.isdigit() else 0
            answer = last_boxed(str(row["solution"]))
            if level in wanted and answer:
                name = f"{subject}-{level}-{number:04d}"
                yield MathProblem(name, str(row["problem"]), answer, subject, level)


def read_solve_rates(path: Path) -> dict[str, float]:
    """The share of replies that solved each problem, by name; ConfigError for any other number."""
    rates: dict[str, float] = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"solve_rates {path} cannot be read ({error})") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            name, rate = row["name"], float(row["solve_rate"])
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(
                f'{path}, line {number} is not like {{"name": "algebra-3-0001", "solve_rate": 0.5}}'
            ) from error
        if not isinstance(name, str) or not 0.0 <= rate <= 1.0:
            raise ConfigError(f"{path}, line {number}: a solve rate lies between 0 and 1")
        rates[name] = rate
    return rates
