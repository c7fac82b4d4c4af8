"""vLLM's real application, without an engine: every route that it has, and what it is told."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from gradus.config import InferenceConfig, InferenceProcessConfig, ModelConfig
from gradus.errors import ConfigError, ExitCode, ProcessError
from gradus.inference.guard import Guard, Tokens
from gradus.inference.http_server import Stop
from gradus.wire.inference import ADMIN_ROUTES, DATA_ROUTES

pytestmark = [pytest.mark.end_to_end, pytest.mark.torch]

TOKENS = Tokens.of(data="d" * 64, admin="a" * 64)


@pytest.fixture(scope="module")
def vllm_server() -> ModuleType:
    """The module that needs vLLM; importing it takes seconds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("gradus.inference.vllm_server")


def config(model: Path, **inference: Any) -> InferenceProcessConfig:
    return InferenceProcessConfig(
        run_dir="runs/demo",
        term=0,
        model=ModelConfig(name=str(model)),
        seed=0,
        inference=InferenceConfig(**({"dtype": "bfloat16"} | inference)),
    )


def routes_of(app: Any) -> set[tuple[str, str]]:
    return {
        (method, route.path)
        for route in app.routes
        for method in getattr(route, "methods", None) or {"GET"}
    }


async def status_of(app: Any, method: str, path: str, *headers: tuple[bytes, bytes]) -> int:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": method, "path": path, "headers": list(headers)}
    await Guard(app, TOKENS)(scope, None, send)  # type: ignore[arg-type]
    status: int = sent[0]["status"]
    return status


@pytest.fixture(scope="module")
def app(vllm_server: ModuleType, tiny_model: Path) -> Any:
    """Built with everything that vLLM can open, its development routes too."""
    args = vllm_server.build_arguments(config(tiny_model))
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setenv("VLLM_SERVER_DEV_MODE", "1")
        return vllm_server.build_app(args, ("generate",), None)


def test_the_routes_that_we_open_exist_in_vllm(app: Any) -> None:
    ours = {route for route in DATA_ROUTES if not route[1].startswith("/gradus")}
    assert ours <= routes_of(app)


@pytest.mark.shows("SEC1")
async def test_every_route_of_vllm_is_closed_without_a_token(app: Any) -> None:
    routes = routes_of(app)
    assert {("POST", "/collective_rpc"), ("POST", "/pause"), ("GET", "/metrics")} <= routes
    assert len(routes) > 40
    for method, path in routes:
        assert await status_of(app, method, path) == 401, path


@pytest.mark.shows("SEC1")
async def test_every_route_off_our_list_is_closed_even_for_the_admin(app: Any) -> None:
    admin = (b"authorization", b"Bearer " + b"a" * 64)
    for method, path in routes_of(app) - DATA_ROUTES - ADMIN_ROUTES:
        assert await status_of(app, method, path, admin) == 404, path


def test_an_unknown_engine_argument_is_told_by_name(
    vllm_server: ModuleType, tiny_model: Path
) -> None:
    with pytest.raises(ConfigError, match="vLLM has no argument 'max_num_seq'"):
        vllm_server.build_arguments(config(tiny_model, extra_args={"max_num_seq": 3}))


def test_every_setting_of_ours_is_an_argument_of_vllm(
    vllm_server: ModuleType, tiny_model: Path
) -> None:
    args = vllm_server.build_arguments(config(tiny_model))
    assert (args.served_model_name, args.enable_scale_out) == (["policy"], True)


def test_an_engine_that_a_signal_ends_while_it_starts_is_named_by_the_signal(
    vllm_server: ModuleType,
) -> None:
    said = "Engine core initialization failed. Failed core proc(s): {'EngineCore': -4}"
    killed = pytest.raises(ProcessError, match="engine process was killed by SIGILL: it crashed")
    with killed as raised, vllm_server.named_signal():
        raise RuntimeError(said)
    assert raised.value.exit_code == ExitCode.INTERNAL
    with pytest.raises(RuntimeError, match="another"), vllm_server.named_signal():
        raise RuntimeError("another error")


async def test_vllms_handlers_end_the_server_with_the_reason_that_the_watch_gives(
    vllm_server: ModuleType,
) -> None:
    stop = Stop()
    server = vllm_server.ServerForVllm(stop)
    assert server.should_exit is False
    server.should_exit = True
    assert "engine process ended" in str(stop.error)
    assert server.should_exit is True
