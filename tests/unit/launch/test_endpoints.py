"""A model that others serve and that is not there ends a launch before it starts anything."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path
from typing import Any

import pytest
from configs import build_run_config

from gradus.config import EvalConfig, RunConfig
from gradus.errors import ConfigError, ProcessError
from gradus.launch.job import job_of
from gradus.launch.launch import launch
from gradus.plan.endpoints import check_endpoint, check_external_models, external_models
from gradus.testing.engine import ScriptedEngine
from gradus.testing.engine_script import Status
from gradus.wire.inference import SERVED_MODEL_NAME

KEY = {"TEACHER_KEY": "data-token"}
SERVICE = {"SERVICE_KEY": "data-token"}


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


@pytest.mark.shows("F68")
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


async def test_no_proxy_of_the_shell_is_asked_for_an_endpoint_on_this_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("urllib.request._opener", None)  # it remembers the proxies of before
    async with ScriptedEngine() as engine:
        await check(taught(engine.base_url), KEY)


def test_players_of_evaluated_environments_are_asked_too() -> None:
    evaluated = {"env": [played("http://127.0.0.1:1")]}
    config = build_run_config({"orchestrator": {"eval": evaluated}})
    assert [it.where for it in external_models(config)] == ["source 'poker', agents.second"]


def test_an_evaluation_asks_for_its_model_and_for_who_else_plays() -> None:
    played_by_two = played("http://127.0.0.1:1")
    values = {"model": {"name": "big"}, "base_url": "http://127.0.0.1:2", "env": [played_by_two]}
    found = external_models(EvalConfig.model_validate(values))
    assert [(it.where, it.model, it.base_url) for it in found] == [
        ("", "big", "http://127.0.0.1:2"),
        ("source 'poker', agents.second", SERVED_MODEL_NAME, "http://127.0.0.1:1"),
    ]


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


async def ask(engine: ScriptedEngine, model: str = SERVED_MODEL_NAME, **changes: Any) -> None:
    values = {"api_key_var": "SERVICE_KEY", "environment": SERVICE} | changes
    await asyncio.to_thread(check_endpoint, f"{engine.base_url}/v1", model, **values)


async def test_an_endpoint_that_serves_the_model_is_accepted() -> None:
    async with ScriptedEngine() as engine:
        await ask(engine)


@pytest.mark.shows("F68")
async def test_a_wrong_model_name_is_refused_with_the_nearest() -> None:
    async with ScriptedEngine() as engine:
        with pytest.raises(ConfigError, match="does not serve 'polic'; did you mean 'policy'"):
            await ask(engine, "polic")


async def test_a_wrong_key_is_refused_by_the_name_of_its_variable() -> None:
    async with ScriptedEngine() as engine:
        with pytest.raises(ConfigError, match="refuses the key in SERVICE_KEY") as caught:
            await ask(engine, environment={"SERVICE_KEY": "canary"})
        assert "canary" not in str(caught.value)


async def test_a_key_that_is_not_set_is_named() -> None:
    async with ScriptedEngine() as engine:
        with pytest.raises(ConfigError, match="SERVICE_KEY is not set"):
            await ask(engine, environment={})


async def test_a_request_without_a_key_where_one_is_needed_is_named() -> None:
    async with ScriptedEngine() as engine:
        with pytest.raises(ConfigError, match="refuses a request without a key"):
            await ask(engine, api_key_var=None)


async def test_an_endpoint_that_is_broken_or_gone_is_named() -> None:
    async with ScriptedEngine() as engine:
        engine.inject(Status(503), path="/v1/models")
        with pytest.raises(ProcessError, match="answered 503"):
            await ask(engine)
    with pytest.raises(ProcessError, match="cannot be reached"):
        await ask(engine)


async def test_an_endpoint_without_a_list_of_models_is_believed() -> None:
    async with ScriptedEngine() as engine:
        engine.inject(Status(404), path="/v1/models")
        await ask(engine, "anything")
