"""The options of registered plug-ins: what is refused, and where they appear."""

from __future__ import annotations

import json
from typing import Any

import pytest
from configs import (
    RUN_TOML,
    build_algorithm_config,
    build_loss_config,
    build_run_config,
    build_run_values,
    contradictions_of,
)

from gradus.config import (
    CurriculumConfig,
    FilterConfig,
    MonitorConfig,
    RunConfig,
    algorithms,
    command_help,
    load_config,
)
from gradus.config.reference import help_text, reference
from gradus.config.schema.algorithms import AlgorithmConfig
from gradus.config.schema.base import PluginConfig, description_of
from gradus.config.schema.learning import LossConfig
from gradus.errors import ConfigError
from gradus.orchestrator.algorithms import build_algorithm
from gradus.orchestrator.algorithms.rae import RoleAdvantageEstimation

KINDS: list[type[PluginConfig]] = [
    *(AlgorithmConfig, CurriculumConfig, FilterConfig, LossConfig, MonitorConfig)
]
REGISTERED = [plugin for kind in KINDS for plugin in kind.registered().values()]
PLACES = {
    "algo": "orchestrator.train.algo",
    "own algo": "orchestrator.train.env.0.algo",
    "curriculum": "orchestrator.train.env.0.curriculum",
    "filter": "orchestrator.filters.0",
    "loss": "trainer.loss",
}


def refusal(tmp_path: Any, place: str, name: str, **options: Any) -> str:
    """What a run with one plug-in is refused with."""
    table = {"type": name, **options}
    values: dict[str, Any] = {"trainer": {"loss": table}}
    if place != "loss":
        key = place.removeprefix("own ")
        train: dict[str, Any] = {"env": [{"id": "words"}]}
        values = {"orchestrator": {"train": train}}
        if place == "filter":
            values["orchestrator"]["filters"] = [table]
        else:
            (train if place == "algo" else train["env"][0])[key] = table
    file = tmp_path / "run.json"
    file.write_text(json.dumps(build_run_values(values)))
    with pytest.raises(ConfigError) as caught:
        load_config(RunConfig, ["@", str(file)], check=contradictions_of)
    return str(caught.value)


@pytest.mark.parametrize("plugin", REGISTERED)
def test_every_plug_in_names_a_class_and_has_a_meaning(plugin: type[PluginConfig]) -> None:
    assert plugin.implementation.startswith("gradus.")
    silent = [name for name in plugin.model_fields if not description_of(plugin, name)]
    assert silent == []
    assert plugin.__doc__


def test_the_arguments_of_a_plug_in_are_its_options_and_nothing_shared() -> None:
    config = build_algorithm_config("rae", momentum=0.5, scoring_timeout_seconds=9.0)
    assert config.arguments() == {
        "key": "environment/task/agent",
        "momentum": 0.5,
        "order": "update_first",
    }


def test_the_arguments_of_ones_own_class_are_what_is_written() -> None:
    config = build_loss_config("mine.losses:Mine", options={"anything": "goes"})
    assert (config.target, config.arguments()) == ("mine.losses:Mine", {"anything": "goes"})


class Gently(RoleAdvantageEstimation):
    """A class of the user's that inherits the options of `rae`, and has one more."""

    def __init__(self, config: algorithms.RaeConfig, *, factor: float = 1.0) -> None:
        super().__init__(config)
        self.config, self.factor = config, factor


GENTLY = f"{__name__}:Gently"


def test_a_class_gets_the_options_of_the_config_that_it_takes_in_one() -> None:
    registered = build_algorithm_config("rae", momentum=0.5)
    assert registered.arguments_for(RoleAdvantageEstimation) == {"config": registered}


def test_a_class_that_inherits_from_a_registered_one_has_its_options_too() -> None:
    config = build_algorithm_config(GENTLY, options={"momentum": 0.5, "factor": 2.0})
    built = build_algorithm(config)
    assert isinstance(built, Gently)
    assert (built.config, built.factor) == (algorithms.RaeConfig(momentum=0.5), 2.0)


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        (GENTLY, {"momentum": 1.0}, "less than 1"),
        (GENTLY, {"momentun": 0.5}, "unexpected keyword argument 'momentun'"),
        (
            "gradus.orchestrator.algorithms.group_relative:GroupRelative",
            {"overlong_cache_tokens": 5},
            "overlong_limit_tokens",
        ),
    ],
)
def test_inherited_options_are_checked_as_those_of_the_registered_class(
    kind: str, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        build_algorithm(build_algorithm_config(kind, options=options))


def test_the_constructor_of_the_users_own_is_built_with_names_alone() -> None:
    config = build_loss_config("mine:Mine", options={"config": "a text", "scale": 2})
    assert config.arguments_for(Exception) == {"config": "a text", "scale": 2}


@pytest.mark.parametrize(
    ("place", "name", "options", "words"),
    [
        ("algo", "rae", {"momentun": 0.5}, "algo.momentun: unknown key; did you mean"),
        ("algo", "rae", {"zzz": 1}, "unknown key; remove it, or use one of: type"),
        ("algo", "max_rl", {"scale_by_std": True}, "option of 'grpo' or 'echo', not of 'max_rl'"),
        ("algo", "rae", {"momentum": 1.0}, ".momentum: "),
        ("algo", "rae", {"momentum": "0.9"}, ".momentum: "),
        ("algo", "rae", {"key": "environment"}, "did you mean 'environment/agent'?"),
        ("algo", "rae", {"order": "update"}, "did you mean 'update_first'?"),
        ("algo", "grpo", {"leave_one_out": 1}, ".leave_one_out: "),
        ("algo", "grpo", {"length_weights": {"turn": 1.0}}, "did you mean 'turns'?"),
        ("algo", "grpo", {"length_weights": {"turns": -0.1}}, ".turns: "),
        ("algo", "grpo", {"overlong_limit_tokens": 0}, ".overlong_limit_tokens: "),
        ("algo", "grpo", {"overlong_cache_tokens": 5}, "overlong_limit_tokens"),
        ("own algo", "hierarchical_grpo", {"episode_agents": "solver"}, ".episode_agents: "),
        ("own algo", "echo", {"roles": {"tools": 0.1}}, "did you mean 'tool'?"),
        ("own algo", "echo", {"roles": {"tool": -1.0}}, ".tool: "),
        ("own algo", "echo", {"roles": {}}, ".roles: "),
        ("own algo", "echo", {"normalize": "mine"}, ".normalize: "),
        ("own algo", "echo", {"tool_names": "search"}, ".tool_names: "),
        ("own algo", "echo", {"filter": "only_a_module"}, ".filter: "),
        ("own algo", "opsd", {"hint": "Look:"}, ".hint: "),
        ("own algo", "sft", {"min_reward": "1"}, ".min_reward: "),
        ("algo", "grp", {}, "did you mean 'grpo'?"),
        (
            "algo",
            "rae",
            {"options": {"key": 1}},
            "orchestrator.train.algo.options: unknown key; ",
        ),
        ("algo", "a.b:C", {"momentum": 0.5}, "write orchestrator.train.algo.options.momentum for"),
        ("loss", "dppo", {"options": {}}, "trainer.loss.options: unknown key; "),
        ("loss", "dppo", {"clip_ratio": 0.2}, "trainer.loss.clip_ratio: unknown key; "),
        ("loss", "dapo", {"clip_hi": 0.2}, "did you mean trainer.loss.clip_high?"),
        ("loss", "gspo", {"threshold": 0.1}, "an option of 'dppo' or 'ipo', not of 'gspo'"),
        ("loss", "gspo", {"clip_low": 2.0}, ".clip_low: "),
        ("loss", "dppo", {"importance_sampling": "truncate"}, "did you mean 'truncated'?"),
        ("loss", "dppo", {"importance_cap": 1.0}, ".importance_cap: "),
        ("loss", "ppo2", {}, "trainer.loss.type: "),
        ("loss", "my.module.Loss", {}, "trainer.loss.type: "),
        ("filter", "repetition", {"token": 5}, "did you mean orchestrator.filters.0.tokens?"),
        ("filter", "repetition", {"tokens": 5.5}, ".tokens: "),
        ("filter", "gibberish", {"vocabulary_size": 0}, ".vocabulary_size: "),
        ("filter", "dull", {}, "orchestrator.filters.0.type: "),
        ("curriculum", "uniform", {"seed": 5}, "curriculum.seed: unknown key"),
        ("curriculum", "difficulty", {"hard_share": -0.1}, ".hard_share: "),
        (
            "curriculum",
            "difficulty",
            {"hard_below": 0.95},
            "curriculum.hard_below: hard_below = 0.95 must be less than easy_above = 0.9",
        ),
        (
            "curriculum",
            "difficulty",
            {"easy_share": 0.95},
            "curriculum.easy_share: easy_share = 0.95 and hard_share = 0.1 must not be more than 1",
        ),
        ("curriculum", "difficulty", {"reward_range": [1, 0]}, "must begin with the smaller"),
        ("curriculum", "difficulty", {"reward_range": [1, 1]}, "must begin with the smaller"),
    ],
)
def test_an_option_that_cannot_be_used_is_refused_at_its_key(
    tmp_path: Any, place: str, name: str, options: dict[str, Any], words: str
) -> None:
    message = refusal(tmp_path, place, name, **options)
    assert words in message
    assert PLACES[place] in message
    assert message.count("\n") == 0


def test_a_filter_needs_a_type() -> None:
    with pytest.raises(ValueError, match="Unable to extract tag"):
        build_run_config({"orchestrator": {"filters": [{"enforce": False}]}})


def test_a_filter_without_a_type_is_told_which_there_are(tmp_path: Any) -> None:
    file = tmp_path / "run.toml"
    file.write_text(RUN_TOML + "[[orchestrator.filters]]\nenforce = false\n")
    with pytest.raises(ConfigError, match=r"filters\.0\.type: .*zero_advantage"):
        load_config(RunConfig, ["@", str(file)])


def test_a_filter_that_is_no_table_is_refused_at_its_place(tmp_path: Any) -> None:
    words = ["--orchestrator.filters", '["zero_advantage"]']
    file = tmp_path / "run.toml"
    file.write_text(RUN_TOML)
    with pytest.raises(ConfigError, match=r"filters\.0: 'zero_advantage'"):
        load_config(RunConfig, ["@", str(file), *words])


def test_a_key_of_another_update_rule_is_said_to_be_one(tmp_path: Any) -> None:
    file = tmp_path / "run.toml"
    file.write_text(RUN_TOML)
    words = ["--trainer.optimizer.type", "sgd", "--trainer.optimizer.betas", "[0.9, 0.99]"]
    with pytest.raises(ConfigError, match="option of 'adamw' or 'muon', not of 'sgd'"):
        load_config(RunConfig, ["@", str(file), *words])


def test_the_default_filters_are_shown_as_one_writes_them() -> None:
    (line,) = (
        line
        for line in command_help(RunConfig, "rl", "orchestrator.filters", width=100).splitlines()
        if "--orchestrator.filters " in line
    )
    shown = json.loads(line.partition("default: ")[2])
    values = {"orchestrator": {"filters": shown}}
    assert build_run_config(values) == build_run_config({})


def test_the_help_of_one_option_says_which_default_belongs_to_which_plug_in() -> None:
    lines = command_help(RunConfig, "rl", "trainer.loss.clip_low", width=100).splitlines()
    flag = "  --trainer.loss.clip-low  float above 0 and at most 1, default:"
    assert [line for line in lines if "`type = " in line or line.startswith(flag)] == [
        '[trainer.loss] With `type = "ppo_clip"`: Clips the ratio of probabilities.',
        f"{flag} 0.2",
        '[trainer.loss] With `type = "dapo"`: `ppo_clip` with more room upwards.',
        f"{flag} 0.2",
        '[trainer.loss] With `type = "gspo"`: `ppo_clip` on the ratio of the whole sequence.',
        f"{flag} 0.0003",
    ]


def test_another_type_on_the_command_line_drops_the_options_of_the_first(tmp_path: Any) -> None:
    file = tmp_path / "run.toml"
    file.write_text(RUN_TOML + '[trainer.loss]\ntype = "gspo"\nclip_low = 0.1\n')
    config = load_config(RunConfig, ["@", str(file), "--trainer.loss.type", "dppo"])
    assert config.trainer.loss == build_loss_config("dppo")


@pytest.mark.parametrize("plugin", REGISTERED)
def test_every_option_stands_in_the_help_and_in_the_reference(plugin: type[PluginConfig]) -> None:
    text, page = help_text(RunConfig, width=100), reference()
    for name in plugin.model_fields.keys() - {"reference"}:
        assert f"{name}  ".replace("_", "-") in text
        assert f"| `{name}` |" in page


def test_the_help_of_a_section_lists_the_options_of_every_plug_in() -> None:
    text = command_help(RunConfig, "rl", "trainer.loss", width=100)
    assert "--trainer.loss.clip-low  float above 0 and at most 1, default: 0.0003" in text
    assert 'With `type = "gspo"`' in text
    assert 'With `type = "package.module:Class"`' in text
