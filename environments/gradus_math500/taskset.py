r"""The taskset `math500`: problems of all subjects and levels, rated as `hendrycks-math` does."""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf
from pydantic import Field

from gradus_hendrycks_math.problems import MathProblem, unseen_problems
from gradus_hendrycks_math.taskset import HendrycksMathConfig, HendrycksMathTaskset, MathTask
from gradus_kit.tasksets.hub import hub_rows

HUB_DATASET = "HuggingFaceH4/MATH-500"


class Math500Config(HendrycksMathConfig):
    """As `hendrycks-math`, with all problems on one side: they are there to compare models."""

    dataset: str = HUB_DATASET
    """Data set on the Hugging Face hub, or a local folder with its columns."""
    dataset_split: str = "test"
    """Split of that data set."""
    num_tasks: int | None = Field(500, ge=1)
    """Number of problems."""
    holdout_fraction: float = Field(0.0, ge=0.0, le=1.0)
    """Share of the problems that is held out, by the hash of each."""


class Math500Taskset(HendrycksMathTaskset, vf.Taskset[MathTask, Math500Config]):
    """The problems in the order of their source."""

    def _problems(self) -> Iterator[MathProblem]:
        config = self.config
        if config.source == "templates":
            return unseen_problems(config.subjects, config.levels, seed=f"math500 {config.seed}")
        return (
            problem
            for problem in hub_problems(config.dataset, split=config.dataset_split)
            if problem.subject in config.subjects and problem.level in config.levels
        )


def hub_problems(dataset: str, *, split: str) -> Iterator[MathProblem]:
    """The public problems, with their subjects by the names of `hendrycks-math`."""
    columns = ("problem", "answer", "subject", "level")
    for number, row in enumerate(hub_rows(dataset, split=split, columns=columns)):
        subject = str(row["subject"]).lower().replace("&", "and").replace(" ", "_")
        level = int(row["level"])
        name = f"{subject}-{level}-{number:04d}"
        yield MathProblem(name, str(row["problem"]), str(row["answer"]), subject, level)
