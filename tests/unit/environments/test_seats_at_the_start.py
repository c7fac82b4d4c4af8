"""An environment process refuses an algorithm that cannot learn from its agents, at its start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from configs import build_algorithm_config
from echo_tasksets import EchoConfig, EchoTaskset

from gradus.config import EnvironmentProcessConfig
from gradus.environments.process import check_seats
from gradus.environments.tasks import TaskIndex
from gradus.errors import ConfigError

ONE = {"agent": True}
TWO = {"first": True, "second": True}


def config_of(algorithm: str | None, **changes: Any) -> EnvironmentProcessConfig:
    return EnvironmentProcessConfig(
        run_dir=str(Path("run")),
        term=1,
        name="game",
        verifiers={},
        algo=None if algorithm is None else build_algorithm_config(algorithm),
        **changes,
    )


def tasks_of(agents: dict[str, bool], *, num_tasks: int | None = 2) -> TaskIndex:
    return TaskIndex(EchoTaskset(EchoConfig(id="echo", num_tasks=num_tasks)), agents)


class SeatedTasks(TaskIndex):
    """Tasks that name their learner."""

    async def task(self, index: int) -> dict[str, Any]:
        """The task with a seat."""
        record = await super().task(index)
        return {**record, "task_data": {**record["task_data"], "learner_seat": "first"}}


@pytest.mark.parametrize("num_tasks", [2, None])
async def test_rae_for_one_agent_ends_the_process_before_a_model_is_loaded(
    num_tasks: int | None,
) -> None:
    with pytest.raises(ConfigError, match=r"source 'game': rae compares .* use grpo"):
        await check_seats(config_of("rae"), tasks_of(ONE, num_tasks=num_tasks))
    await check_seats(config_of("rae"), tasks_of(TWO, num_tasks=num_tasks))


async def test_grpo_over_two_agents_is_refused_unless_one_trains_or_tasks_name_it() -> None:
    with pytest.raises(ConfigError, match="agents first, second all train"):
        await check_seats(config_of("grpo"), tasks_of(TWO))
    await check_seats(config_of("grpo", untrained_agents=["second"]), tasks_of(TWO))
    named = SeatedTasks(EchoTaskset(EchoConfig(id="echo", num_tasks=1)), TWO)
    await check_seats(config_of("grpo"), named)


async def test_an_environment_in_which_nobody_trains_is_refused() -> None:
    with pytest.raises(ConfigError, match="no agent trains"):
        await check_seats(config_of("rae", untrained_agents=["first", "second"]), tasks_of(TWO))


async def test_an_evaluated_environment_may_have_any_agents() -> None:
    await check_seats(config_of(None), tasks_of(TWO))
