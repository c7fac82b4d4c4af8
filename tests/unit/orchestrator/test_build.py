"""Building the process: what is missing or wrong is named before anything plays."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from configs import build_algorithm_config
from scripted_peers import ScriptedPolicy

from gradus.config import ModelConfig, SamplingConfig
from gradus.config.schema.inference import InferenceConfig
from gradus.errors import (
    ConfigError,
    DeadlineError,
    EnvironmentFailure,
    FencedError,
    ProcessError,
    ProtocolError,
)
from gradus.files import write_json
from gradus.orchestrator.build import _connect_policy, _serve_first, build_reference, connect, run
from gradus.orchestrator.failures import NUM_THREADS, root_cause, run_loops
from gradus.orchestrator.groups.grading import build_grader
from gradus.orchestrator.resume.standing import Standing, TrainerProgress
from gradus.processes.secured import AUTHORITY_VARIABLE
from gradus.run.paths import RunDirectory
from gradus.testing.engine import ScriptedEngine


def test_a_run_without_inference_ends_with_what_to_start_first(build_rig: Any) -> None:
    with pytest.raises(ProcessError, match="'inference' is not ready"):
        run(build_rig().config)


def test_an_older_term_touches_nothing(build_rig: Any) -> None:
    rig = build_rig()
    write_json(RunDirectory(rig.root).lease, {"term": 2, "owner": None})
    with pytest.raises(FencedError, match="term 2"):
        run(rig.config)
    assert not RunDirectory(rig.root).journal.exists()


async def connected(root: Path, term: int = 1) -> ScriptedEngine:
    """An engine in the inference role of the run in `root`."""
    run_dir = RunDirectory(root)
    run_dir.secrets.mkdir(parents=True)
    run_dir.admin_token.write_text("admin")
    run_dir.inference_token.write_text("data")
    engine = ScriptedEngine(run_dir=root, term=term)
    await engine.start()
    write_json(run_dir.ready_file("inference"), {"base_url": engine.base_url, "pid": 1})
    return engine


@pytest.mark.shows("F05")
async def test_a_version_that_is_gone_is_published_anew_by_a_run_that_starts_again(
    build_rig: Any,
) -> None:
    config, policy = build_rig().config, ScriptedPolicy()
    policy.version = 3
    standing = Standing(TrainerProgress(0, 3, 3, 9), b"", b"", {}, [])
    with pytest.raises(ProtocolError, match="version 3 cannot be served again"):
        await _serve_first(policy, config, standing)


async def test_an_orchestrator_without_the_launcher_s_variables_trusts_whom_its_config_names(
    build_rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(AUTHORITY_VARIABLE, "to be taken back")
    monkeypatch.delenv(AUTHORITY_VARIABLE)
    rig = build_rig()
    run_dir = RunDirectory(rig.root)
    rig.root.mkdir(exist_ok=True)
    file, authority = rig.root / "servers.txt", rig.root / "authority.pem"
    file.write_text("http://127.0.0.1:1\n")
    section = InferenceConfig(addresses=str(file), authority=str(authority))
    async with AsyncExitStack() as stack:
        config = rig.config.model_copy(update={"inference": section})
        await _connect_policy(config, None, stack)
    assert "line 1: http://127.0.0.1:1 would get the run's tokens" in run_dir.notices.read_text()
    assert os.environ[AUTHORITY_VARIABLE] == str(authority)


async def test_an_environment_that_is_not_ready_in_time_is_named(
    build_rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = build_rig()
    monkeypatch.setattr(type(rig.config), "environment_restart_seconds", 0.05)
    engine = await connected(rig.root)
    with pytest.raises(ProcessError, match="'env_words' is not ready"):
        async with connect(rig.config):
            pass
    await engine.close()


async def test_echo_is_refused_where_the_renderer_marks_no_bodies(
    build_rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before its environment is asked for, which is not there."""

    async def ask_child(*_: str) -> dict[str, Any]:
        return {"marked": []}

    monkeypatch.setattr("gradus.orchestrator.play.renderer._ask_child", ask_child)
    config = build_rig().config
    source = config.sources[0].model_copy(update={"algo": build_algorithm_config("echo")})
    model = ModelConfig(name="tiny", renderer="default")
    engine = await connected(Path(config.run_dir))
    with pytest.raises(ConfigError, match="'words' learns what messages of tool say"):
        async with connect(config.model_copy(update={"sources": [source], "model": model})):
            pass
    await engine.close()


def test_a_source_without_a_temperature_is_refused(build_rig: Any) -> None:
    config = build_rig().config
    source = config.sources[0].model_copy(update={"sampling": SamplingConfig()})
    with pytest.raises(ConfigError, match=r"'words': sampling\.temperature is missing"):
        build_grader(config, source)


def test_filters_can_be_switched_off(build_rig: Any) -> None:
    config = build_rig(filters=[]).config
    assert build_grader(config, config.sources[0]).filters == []


def test_the_first_error_that_names_itself_is_the_cause() -> None:
    inner = ExceptionGroup("watch", [EnvironmentFailure("ended")])
    group = BaseExceptionGroup("run", [ValueError("noise"), inner, DeadlineError("later")])
    assert str(root_cause(group)) == "ended"


def test_without_a_named_error_the_first_of_all_is_the_cause() -> None:
    group = BaseExceptionGroup("run", [ValueError("first"), KeyError("second")])
    assert str(root_cause(group)) == "first"


async def test_a_distilled_policy_s_stop_tokens_are_read_from_its_files(
    build_rig: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = build_rig().config
    token = RunDirectory(Path(config.run_dir)).inference_token
    token.parent.mkdir(parents=True)
    token.write_text("data")
    algo = build_algorithm_config("sft")
    source = config.sources[0].model_copy(update={"algo": algo, "is_frozen": True})
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    here = config.model_copy(update={"model": ModelConfig(name=str(tmp_path))})
    away = config.model_copy(update={"model": ModelConfig(name="no-such-owner/no-such-model")})
    for whole, stops, num_warnings in ((here, {7}, 0), (away, set(), 1)):
        reference = build_reference(whole, source, ScriptedPolicy())
        assert reference is not None
        assert reference.stop_token_ids == stops
        assert caplog.text.count("says at which token it ends a turn") == num_warnings
        await reference.close()


def test_loops_start_no_thread_later_so_none_can_fail_to_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """CPython's `Thread.start` never returns for a thread that finds no memory."""

    async def work() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", lambda thread: pytest.fail("a new thread"))
            all_run = threading.Barrier(NUM_THREADS, timeout=60)
            await asyncio.gather(
                *(asyncio.to_thread(all_run.wait) for _ in range(NUM_THREADS)),
                *(asyncio.to_thread(time.time) for _ in range(NUM_THREADS)),
            )

    run_loops(work())
