"""A teacher that is not there ends the run before it starts anything."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path
from typing import Any

import pytest

from gradus.config import RunConfig
from gradus.errors import ConfigError, ProcessError
from gradus.launch.endpoints import check_external_models, external_models
from gradus.launch.job import job_of
from gradus.launch.launch import launch
from gradus.testing.configs import build_run_config
from gradus.testing.engine import ScriptedEngine
from gradus.wire.inference import SERVED_MODEL_NAME

KEY = {"TEACHER_KEY": "data-token"}


def taught(base_url: str, model: str = SERVED_MODEL_NAME) -> RunConfig:
    """A run with a teacher."""
    reference = {"base_url": base_url, "model": model, "api_key_var": "TEACHER_KEY"}
    algo = {"type": "opd", "reference": reference}
    return build_run_config({"orchestrator": {"train": {"algo": algo}}})


def played(base_url: str) -> dict[str, Any]:
    """A source with an opponent behind an endpoint, whose key the config itself holds."""
    other = {"base_url": base_url, "model": SERVED_MODEL_NAME, "api_key_var": "OTHER_KEY"}
    agents = {"first": {}, "second": other}
    return {"id": "poker", "agents": agents, "env_vars": {"OTHER_KEY": "data-token"}}


async def check(config: RunConfig, environment: dict[str, str]) -> None:
    await asyncio.to_thread(check_external_models, config, environment)


async def test_a_teacher_that_serves_the_model_is_accepted() -> None:
    async with ScriptedEngine() as engine:
        await check(taught(engine.base_url), KEY)


async def test_a_teacher_that_is_not_there_is_named_with_its_source() -> None:
    async with ScriptedEngine() as engine:
        config = taught(engine.base_url)
    words = r"source 'gradus-reverse-text', algo\.reference: .* cannot be reached .*; start the end"
    with pytest.raises(ProcessError, match=words):
        await check(config, KEY)


async def test_a_wrong_name_or_key_of_the_teacher_is_named_with_its_source() -> None:
    async with ScriptedEngine() as engine:
        with pytest.raises(ConfigError, match=r"algo\.reference: .* did you mean 'policy'"):
            await check(taught(engine.base_url, "polic"), KEY)
        with pytest.raises(ConfigError, match=r"algo\.reference: .* TEACHER_KEY is not set"):
            await check(taught(engine.base_url), {})


async def test_a_player_is_asked_with_the_key_of_its_source() -> None:
    async with ScriptedEngine() as engine:
        train = {"env": [played(engine.base_url)]}
        await check(build_run_config({"orchestrator": {"train": train}}), {})


def test_players_of_evaluated_environments_are_asked_too() -> None:
    evaluated = {"env": [played("http://127.0.0.1:1")]}
    config = build_run_config({"orchestrator": {"eval": evaluated}})
    assert [it.where for it in external_models(config)] == ["source 'poker', agents.second"]


def test_a_run_of_the_policy_alone_asks_nobody() -> None:
    check_external_models(build_run_config(), {})


async def test_gradus_rl_starts_nothing_without_its_teacher(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TEACHER_KEY", "data-token")
    async with ScriptedEngine() as engine:
        config = taught(engine.base_url).model_copy(update={"output_dir": str(tmp_path)})
    with pytest.raises(ProcessError, match="cannot be reached"):
        await asyncio.to_thread(launch, job_of(config))
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_asks_nobody(tmp_path: Path) -> None:
    config = taught("http://127.0.0.1:1").model_copy(update={"output_dir": str(tmp_path)})
    assert launch(job_of(config), io.StringIO(), dry_run=True) == 0
