"""Keywords of a call in Python: the one key that each can mean."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from configs import build_run_values

from gradus.config import (
    EvalConfig,
    RunConfig,
    SftConfig,
    load_config,
)
from gradus.errors import ConfigError
from gradus.launch.from_python.keywords import keyword_values

ENV = ("orchestrator", "train", "env", 0)
OWN = {"orchestrator": {"train": {"env": [{"id": "jsonl", "taskset": {"path": "x"}}]}}}


@pytest.mark.parametrize(
    ("keywords", "path", "value"),
    [
        ({"max_steps": 3}, ("max_steps",), 3),
        ({"lr": 0.1}, ("trainer", "optimizer", "lr"), 0.1),
        ({"rank": 8}, ("trainer", "lora", "rank"), 8),
        ({"groups_per_batch": 4}, ("orchestrator", "groups_per_batch"), 4),
        ({"group_size": 4}, (*ENV, "group_size"), 4),
        ({"temperature": 0.5}, ("orchestrator", "train", "sampling", "temperature"), 0.5),
        ({"instruction": "Be short."}, (*ENV, "taskset", "instruction"), "Be short."),
        ({"taskset": {"num_tasks": 2}}, (*ENV, "taskset"), {"path": "x", "num_tasks": 2}),
        ({"trainer": {"seed": 1}, "lr": 0.1}, ("trainer", "seed"), 1),
        ({"trainer.loss.type": "dppo"}, ("trainer", "loss", "type"), "dppo"),
        ({"output_dir": Path("here")}, ("output_dir",), "here"),
    ],
)
def test_a_keyword_goes_to_its_key(keywords: dict[str, Any], path: Any, value: Any) -> None:
    found: Any = keyword_values(RunConfig, {}, OWN, keywords, ENV)
    for part in path:
        found = found[part]
    assert found == value


def test_a_keyword_of_sampling_goes_before_that_of_the_source() -> None:
    env = {"id": "x", "sampling": {"temperature": 0.5, "top_p": 0.9}}
    config = {"orchestrator": {"train": {"env": [env]}}}
    found = keyword_values(RunConfig, config, {}, {"temperature": 0.7}, ENV)
    (source,) = found["orchestrator"]["train"]["env"]
    assert source["sampling"] == {"temperature": 0.7, "top_p": 0.9}
    assert found["orchestrator"]["train"]["sampling"] == {"temperature": 0.7}


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [("reward_funcs", "reward"), ("train_dataset", "tasks"), ("learning_rate", "lr")],
)
def test_a_name_of_trl_is_answered_with_ours(theirs: str, ours: str) -> None:
    with pytest.raises(ConfigError, match=f"{theirs}: gradus calls it {ours}: {ours}="):
        keyword_values(RunConfig, {}, OWN, {theirs: 1}, ENV)


@pytest.mark.parametrize(
    ("slip", "words"),
    [
        ("temprature", "temprature: unknown key; did you mean temperature?"),
        ("max_step", "max_step: unknown key; did you mean max_steps?"),
        ("rewards", "rewards: unknown key; did you mean reward?"),
        ("zzzzzz", "zzzzzz: unknown key; remove it, or use one of: name, "),
    ],
)
def test_a_keyword_that_means_nothing_is_answered_with_the_nearest(slip: str, words: str) -> None:
    with pytest.raises(ConfigError) as told:
        keyword_values(RunConfig, {}, OWN, {"lr": 1.0, slip: 1}, ENV, ["tasks", "reward"])
    assert words in str(told.value)


def test_rows_of_a_supervised_run_are_called_data() -> None:
    with pytest.raises(ConfigError, match="gradus calls it data"):
        keyword_values(SftConfig, {}, {}, {"train_dataset": []}, ())


def test_a_keyword_of_several_keys_is_refused_with_two_of_them() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.gpus or inference\.gpus"):
        keyword_values(RunConfig, {}, {}, {"gpus": [0]}, ENV)


def test_keywords_go_before_the_config_that_is_their_base(tmp_path: Path) -> None:
    file = tmp_path / "sft.toml"
    file.write_text("max_steps = 2\nseed = 5\n")
    assert keyword_values(SftConfig, file, {}, {"max_steps": 3}, ()) == {"max_steps": 3, "seed": 5}


def test_a_source_takes_its_keys_in_an_evaluation_too() -> None:
    values = keyword_values(EvalConfig, {}, {"env": [{"id": "x"}]}, {"group_size": 2}, ("env", 0))
    assert values == {"env": [{"id": "x", "group_size": 2}]}


def test_what_is_wrong_is_told_under_the_name_of_the_call() -> None:
    values = keyword_values(RunConfig, build_run_values(), {}, {"lr": "much"}, ENV)
    with pytest.raises(ConfigError, match=r"^gradus.train: trainer.optimizer.lr: 'much': "):
        load_config(RunConfig, [], base=values, base_name="gradus.train")
