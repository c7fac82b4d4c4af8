"""What is asked of a server of the run on another node is read by nobody else."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
import verifiers.v1 as vf
from secured_servers import ANOTHER, TOKEN, certify

from gradus.config.schema.algorithms import ReferenceConfig
from gradus.environments.policy.router import Router
from gradus.environments.verifiers.engine_client import EngineClient
from gradus.errors import ProcessError
from gradus.files import write_json
from gradus.orchestrator.algorithms.teacher import ReferenceModel
from gradus.orchestrator.failures import EpisodeFailed
from gradus.orchestrator.play.inference_client import InferenceClient
from gradus.run.paths import RunDirectory
from gradus.testing.engine import ScriptedEngine
from gradus.wire.inference import INFERENCE_TOKEN_VARIABLE
from gradus_cluster.certificates import authority_certificate

DATA = "the-data-token"
BODY = {"model": "policy", "token_ids": [1, 2], "sampling_params": {"max_tokens": 4, "logprobs": 1}}


@contextlib.asynccontextmanager
async def server(**settings: Any) -> AsyncIterator[ScriptedEngine]:
    engine = ScriptedEngine(data_token=DATA, **settings)
    await engine.start(listener=socket.create_server(("127.0.0.1", 0)))
    try:
        yield engine
    finally:
        await engine.close()


@contextlib.asynccontextmanager
async def client_of(
    engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch, **settings: Any
) -> AsyncIterator[EngineClient]:
    values = {"base_url": engine.base_url, "api_key_var": "THE_TOKEN", **settings}
    monkeypatch.setenv(values["api_key_var"], DATA)
    client = EngineClient(vf.TrainClientConfig(**values))
    try:
        yield client
    finally:
        await client.close()


@pytest.mark.shows("SEC7")
async def test_a_server_with_a_certificate_of_the_run_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by way of a proxy, which reaches no other node."""
    certify(tmp_path, monkeypatch)
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    of_run = {"api_key_var": INFERENCE_TOKEN_VARIABLE}
    async with server() as engine, client_of(engine, monkeypatch, **of_run) as client:
        assert engine.base_url.startswith("https://")
        await client.post(f"{engine.base_url}/inference/v1/generate", body=BODY)
        assert len(engine.calls) == 1


@pytest.mark.shows("SEC7")
@pytest.mark.parametrize(
    "wrong",
    [{"trusted": ANOTHER}, {"address": "127.0.0.2"}],
    ids=["of another run", "for another address"],
)
async def test_another_server_at_the_address_gets_no_token(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    wrong: dict[str, Any],
) -> None:
    certify(tmp_path, monkeypatch, **wrong)
    async with server() as engine, client_of(engine, monkeypatch) as client:
        with pytest.raises(openai.APIConnectionError, match="certificate verify failed"):
            await client.post(f"{engine.base_url}/inference/v1/generate", body=BODY)
        router = Router([engine.base_url], token=DATA)
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await router._is_there(engine.base_url, True)
        await router.close()
        assert engine.calls == []


async def test_whom_the_system_trusts_is_believed_of_servers_of_others_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certify(tmp_path, monkeypatch, trusted=ANOTHER)
    system = tmp_path / "system.pem"
    system.write_bytes(authority_certificate(TOKEN))
    monkeypatch.setenv("SSL_CERT_FILE", str(system))
    async with server() as engine, client_of(engine, monkeypatch, headers={"X": "1"}) as client:
        url = f"{engine.base_url}/inference/v1/generate"
        await client.post(url, body=BODY)
        of_run = {"api_key_var": INFERENCE_TOKEN_VARIABLE}
        async with client_of(engine, monkeypatch, **of_run) as own:
            with pytest.raises(aiohttp.ClientConnectorCertificateError):
                await own._is_there(engine.base_url, True)
        assert len(engine.calls) == 1


async def test_the_orchestrator_asks_no_server_of_another_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = RunDirectory(tmp_path / "run")
    for folder in (run_dir.ready, run_dir.secrets):
        folder.mkdir(parents=True)
    for token in (run_dir.inference_token, run_dir.admin_token):
        token.write_text(DATA)
    certify(tmp_path, monkeypatch, trusted=ANOTHER)
    async with server(run_dir=run_dir.root) as engine:
        write_json(run_dir.ready_file("inference"), {"base_url": engine.base_url, "pid": 0})
        with pytest.raises(ProcessError, match="certificate verify failed"):
            await InferenceClient.connect(run_dir, term=0)


async def test_a_reference_model_that_the_run_serves_on_another_node_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certify(tmp_path, monkeypatch)
    async with server() as engine:
        config = ReferenceConfig(base_url=engine.base_url, model="policy")
        async with ReferenceModel(config, token=DATA, retry_delays_seconds=()) as model:
            with pytest.raises(EpisodeFailed, match="is not scripted"):
                await model.score([1, 2])
