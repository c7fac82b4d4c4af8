"""`gradus eval` as a user meets it: the endpoint's check and the table."""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path
from typing import Any

import pytest

from gradus.errors import ConfigError, ProcessError
from gradus.launch.endpoints import check_endpoint
from gradus.launch.episodes import LiveTable, error_lines, is_complete, progress_line, table
from gradus.testing.engine import ScriptedEngine
from gradus.testing.engine_script import Status
from gradus.wire.inference import SERVED_MODEL_NAME

KEY = {"SERVICE_KEY": "data-token"}
ROW: dict[str, Any] = {
    "name": "words",
    "planned_episodes": 8,
    "num_episodes": 4,
    "group_size": 4,
    "avg": 0.5,
    "pass_at": {"1": 0.5, "4": 0.75},
    "pass_all": {"1": 0.5, "4": 0.25},
    "errors": {"ProviderError": 1},
    "truncated_share": 0.25,
    "mean_length_tokens": 12.4,
}
PROGRESS = {
    "environments": [ROW],
    "overall": ROW | {"name": "overall"},
    "error_messages": {"ProviderError": "upstream 500:\x1b[2J scripted"},
}


async def check(engine: ScriptedEngine, model: str = SERVED_MODEL_NAME, **changes: Any) -> None:
    values = {"api_key_var": "SERVICE_KEY", "environment": KEY} | changes
    await asyncio.to_thread(check_endpoint, f"{engine.base_url}/v1", model, **values)


async def test_an_endpoint_that_serves_the_model_is_accepted() -> None:
    async with ScriptedEngine() as engine:
        await check(engine)


async def test_a_wrong_model_name_is_refused_with_the_nearest() -> None:
    async with ScriptedEngine() as engine:
        with pytest.raises(ConfigError, match="does not serve 'polic'; did you mean 'policy'"):
            await check(engine, "polic")


async def test_a_wrong_key_is_refused_by_the_name_of_its_variable() -> None:
    async with ScriptedEngine() as engine:
        with pytest.raises(ConfigError, match="refuses the key in SERVICE_KEY") as caught:
            await check(engine, environment={"SERVICE_KEY": "canary"})
        assert "canary" not in str(caught.value)


async def test_a_key_that_is_not_set_is_named() -> None:
    async with ScriptedEngine() as engine:
        with pytest.raises(ConfigError, match="SERVICE_KEY is not set"):
            await check(engine, environment={})


async def test_a_request_without_a_key_where_one_is_needed_is_named() -> None:
    async with ScriptedEngine() as engine:
        with pytest.raises(ConfigError, match="refuses a request without a key"):
            await check(engine, api_key_var=None)


async def test_an_endpoint_that_is_broken_or_gone_is_named() -> None:
    async with ScriptedEngine() as engine:
        engine.inject(Status(503), path="/v1/models")
        with pytest.raises(ProcessError, match="answered 503"):
            await check(engine)
    with pytest.raises(ProcessError, match="cannot be reached"):
        await check(engine)


async def test_an_endpoint_without_a_list_of_models_is_believed() -> None:
    async with ScriptedEngine() as engine:
        engine.inject(Status(404), path="/v1/models")
        await check(engine, "anything")


def test_the_table_has_a_column_for_each_number() -> None:
    head, row = table(PROGRESS)
    assert head.split() == [
        *("environment", "episodes", "avg", "pass@1", "pass@4", "pass^4"),
        *("errors", "truncated", "length"),
    ]
    assert row.split() == [
        *("words", "4/8", "0.500", "(@4)", "0.500", "0.750", "0.250", "1", "0.250", "12")
    ]


def test_several_environments_have_a_line_over_all() -> None:
    both = PROGRESS | {"environments": [ROW, ROW | {"name": "sums", "avg": None}]}
    assert [line.split()[0] for line in table(both)] == ["environment", "words", "sums", "overall"]


def test_an_average_over_different_group_sizes_shows_no_k() -> None:
    _, row = table({"environments": [ROW | {"group_size": None}]})
    assert row.split()[2:4] == ["0.500", "0.500"]


def test_errors_are_counted_by_kind_and_cannot_move_the_cursor() -> None:
    assert error_lines(PROGRESS) == ["error       1 x ProviderError: upstream 500: [2J scripted"]


def test_an_evaluation_with_errors_or_holes_is_not_complete() -> None:
    whole = ROW | {"num_episodes": 8, "errors": {}}
    assert is_complete({"overall": whole})
    assert not is_complete({"overall": whole | {"num_episodes": 7}})
    assert not is_complete({"overall": whole | {"errors": {"TaskError": 1}}})


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_the_table_and_a_file_gets_lines(tmp_path: Path) -> None:
    path = tmp_path / "progress.json"
    terminal, file = Terminal(), io.StringIO()
    for stream in (terminal, file):
        live = LiveTable(stream)
        live.show(path)
        path.write_text(json.dumps(PROGRESS))
        live.show(path)
        live.clear()
    assert terminal.getvalue().startswith(table(PROGRESS)[0])
    assert "\x1b[2A" in terminal.getvalue()
    assert file.getvalue() == f"{progress_line(PROGRESS)}\n"
