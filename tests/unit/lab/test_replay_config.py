"""What of a recorded config a replay may change, and the processes that it becomes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from configs import build_run_config

from gradus.config import ReplayConfig, resolve
from gradus.errors import ConfigError
from gradus.run.settings import check_one_config, differences
from gradus_lab.replay.job import load_replay


def recorded(changes: dict[str, Any] | None = None) -> dict[str, Any]:
    """A config as `run.json` holds it."""
    value: dict[str, Any] = json.loads(json.dumps(build_run_config(changes).without_secrets()))
    return value


def test_no_environment_variable_is_written_down() -> None:
    secret = {"env_vars": {"TOKEN": "canary"}}
    env = [{"id": "reverse-text", **secret}]
    config = build_run_config(
        {"trainer": secret, "inference": secret, "orchestrator": {"train": {"env": env}, **secret}}
    )
    assert "canary" in config.model_dump_json()
    assert "canary" not in json.dumps(config.without_secrets())


def test_a_recorded_config_comes_back_unchanged() -> None:
    values = recorded({"trainer": {"optimizer": {"lr": 1e-3, "schedule": "linear"}}})
    choice = load_replay(values, [])
    assert choice.config.without_secrets() == values
    assert (choice.max_steps, choice.changes) == (None, ())


def test_the_trainer_may_be_changed_and_every_change_is_told() -> None:
    words = ["--trainer.optimizer.lr", "1e-4", "--trainer.loss.type", "cispo"]
    choice = load_replay(recorded({"trainer": {"optimizer": {"lr": 1e-3}}}), words)
    assert choice.config.trainer.loss.type == "cispo"
    assert {
        "trainer.loss.type was 'dppo' and is 'cispo'",
        "trainer.loss.threshold was 0.2 and is None",
        "trainer.optimizer.lr was 0.001 and is 0.0001",
    } <= set(choice.changes)


@pytest.mark.parametrize(
    "words",
    [
        ["--trainer.env-vars.OMP_NUM_THREADS", "2"],
        ["--trainer.peak-teraflops", "9"],
        ["--trainer.weight-transfer", "broadcast"],
        ["--trainer.optimizer.lr", "1e-3"],
    ],
)
def test_what_leaves_the_weights_alone_is_no_change(words: list[str]) -> None:
    assert load_replay(recorded({"trainer": {"optimizer": {"lr": 1e-3}}}), words).changes == ()


def test_fewer_steps_leave_the_schedule_alone() -> None:
    choice = load_replay(recorded({"max_steps": 20}), ["--max-steps", "5"])
    assert (choice.max_steps, choice.config.max_steps, choice.changes) == (5, 20, ())


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["--orchestrator.max-lag", "0"], "orchestrator.max_lag"),
        (["--seed", "3"], "seed"),
        (["--model.name", "other"], "model.name"),
        (["--name", "again"], "name"),
    ],
)
def test_keys_that_decided_what_was_played_are_refused(words: list[str], key: str) -> None:
    with pytest.raises(ConfigError, match=f"^{key}: decided what the run played"):
        load_replay(recorded(), [*words, "--trainer.deterministic"])


def test_a_recorded_config_of_another_schema_is_refused_with_its_place() -> None:
    values = recorded()
    values["trainer"]["warp_factor"] = 9
    with pytest.raises(ConfigError, match=r"the recorded config: trainer\.warp_factor"):
        load_replay(values, [])


def test_a_key_that_is_newer_than_the_record_is_no_change() -> None:
    values = recorded()
    del values["trainer"]["router_bias_rate"]
    assert load_replay(values, []).changes == ()


def test_a_value_of_the_wrong_kind_names_its_flag() -> None:
    with pytest.raises(ConfigError, match=r"--trainer\.optimizer\.lr"):
        load_replay(recorded(), ["--trainer.optimizer.lr", "fast"])


@pytest.mark.parametrize(
    "changes",
    [
        {"launch": {"stop_timeout_seconds": 3.0}},
        {"orchestrator": {"max_lag": 3, "max_in_flight_episodes": 9}},
        {"checkpoint": {"interval_steps": 5}},
        {"max_steps": 40},
        {"trainer": {"gpus": [1]}},
        {"orchestrator": {"train": {"algo": {"scoring_timeout_seconds": 7.0}}}},
    ],
)
def test_launches_may_differ_in_what_a_replay_does_not_use(changes: dict[str, Any]) -> None:
    check_one_config([recorded(), recorded(changes)])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"trainer": {"optimizer": {"lr": 0.5}}},
            r"trainer\.optimizer\.lr was .* and became 0\.5",
        ),
        ({"orchestrator": {"max_staleness": 2}}, r"orchestrator\.max_staleness was 8"),
        ({"orchestrator": {"filters": []}}, r"orchestrator\.filters"),
        ({"orchestrator": {"normalize": "batch"}}, r"orchestrator\.normalize was 'off'"),
        (
            {"orchestrator": {"train": {"sampling": {"temperature": 0.5}}}},
            r"sampling\.temperature was",
        ),
        (
            {"orchestrator": {"train": {"env": [{"id": "reverse-text", "group_size": 3}]}}},
            r"env\.reverse-text\.group_size was",
        ),
    ],
)
def test_a_run_that_changed_on_the_way_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=f"resumed with other settings(.|\n)*{said}"):
        check_one_config([recorded(), recorded(changes)])


def test_more_steps_change_a_schedule_that_counts_them() -> None:
    linear = {"trainer": {"optimizer": {"schedule": "linear"}}}
    with pytest.raises(ConfigError, match="max_steps was 20 and became 40"):
        check_one_config([recorded(linear), recorded({**linear, "max_steps": 40})])


def test_a_replay_is_the_trainer_and_one_more_process(tmp_path: Path) -> None:
    config = build_run_config({"checkpoint": {"interval_steps": 2}})
    replayed = ReplayConfig(config, recorded=Path("/runs/demo"), num_steps=7)
    configs = resolve(replayed, run_dir=tmp_path, term=4)
    assert list(configs.by_process()) == ["trainer", "replayer"]
    assert (configs.launched.end_step, configs.launched.max_steps) == (7, 20)
    assert configs.launched.checkpoint.interval_steps is None
    assert configs.launched.resume_step is None
    assert (configs.launched.recorded, configs.launched.term) == ("/runs/demo", 4)


def test_a_replay_writes_weights_that_the_run_broadcast(tmp_path: Path) -> None:
    config = build_run_config({"trainer": {"weight_transfer": "broadcast"}})
    configs = resolve(ReplayConfig(config, tmp_path, num_steps=2), run_dir=tmp_path, term=1)
    assert configs.launched.trainer.weight_transfer == "filesystem"


def test_training_ends_with_the_run_unless_told_otherwise(tmp_path: Path) -> None:
    replayed = ReplayConfig(build_run_config(), tmp_path, num_steps=20)
    configs = resolve(replayed, run_dir=tmp_path, term=1)
    assert configs.launched.model_copy(update={"num_steps": None}).end_step == 20


def test_differences_of_equal_configs_are_none() -> None:
    assert list(differences(recorded(), recorded())) == []
