"""Which task of a source is played next."""

from __future__ import annotations

from gradus.config.curriculum import CurriculumConfig
from gradus.errors import ConfigError
from gradus.orchestrator.curriculum.base import Curriculum
from gradus.orchestrator.curriculum.difficulty import Difficulty
from gradus.orchestrator.curriculum.uniform import Uniform
from gradus.plugins import building, find_plugin, refuse_async

CURRICULA: dict[str, type] = {"difficulty": Difficulty, "uniform": Uniform}
"""Registered names; anything else is "package.module:Class"."""


def build_curriculum(
    config: CurriculumConfig, *, source: str, num_tasks: int | None, seed: int
) -> Curriculum:
    """The curriculum of one source; refuses unknown names and options."""
    kind = find_plugin("curriculum", config.type, CURRICULA)
    name = f"source {source!r}: curriculum {config.type!r}"
    refuse_async(name, kind, "next_task", "record", "state", "load_state")
    try:
        with building(f"curriculum {config.type!r}", config.options):
            curriculum: Curriculum = kind(num_tasks, seed=f"{seed}/{source}", **config.options)
    except ConfigError as error:
        raise ConfigError(f"source {source!r}: {error}") from error
    return curriculum
