"""Deprecated keys are translated once, with one warning each."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from configs import RUN_TOML
from hypothesis import given
from hypothesis import strategies as st

from gradus.config import EvalConfig, RunConfig, SftConfig, load_config, sections, top_level_keys
from gradus.config.problems import unknown_key
from gradus.config.read.foreign import CALLED, DEPRECATED, MOVES, translate
from gradus.config.read.renames import To
from gradus.errors import ConfigError, nearest


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (
            {"orchestrator": {"sampling": {"temperature": 0.5}}},
            {"orchestrator": {"train": {"sampling": {"temperature": 0.5}}}},
        ),
        (
            {"orchestrator": {"env": [{"id": "a"}]}},
            {"orchestrator": {"train": {"env": [{"id": "a"}]}}},
        ),
        (
            {"orchestrator": {"sampling": {"max_tokens": 9}}},
            {"orchestrator": {"train": {"sampling": {"max_completion_tokens": 9}}}},
        ),
        (
            {"orchestrator": {"env": [{"id": "a", "sampling": {"max_tokens": 9}}]}},
            {
                "orchestrator": {
                    "train": {"env": [{"id": "a", "sampling": {"max_completion_tokens": 9}}]}
                }
            },
        ),
        (
            {
                "orchestrator": {
                    "train": {"env": [{"agents": {"j": {"sampling": {"max_tokens": 9}}}}]}
                }
            },
            {
                "orchestrator": {
                    "train": {
                        "env": [{"agents": {"j": {"sampling": {"max_completion_tokens": 9}}}}]
                    }
                }
            },
        ),
        (
            {"orchestrator": {"train": {"env": [{"id": "a", "num_workers": 3}]}}},
            {
                "orchestrator": {
                    "train": {"env": [{"id": "a", "pool": {"type": "static", "num_workers": 3}}]}
                }
            },
        ),
        (
            {"launch": {"silent_process_seconds": 60}},
            {"launch": {"hang_seconds": 60}},
        ),
        (
            {"orchestrator": {"drop_zero_advantage": True}},
            {"orchestrator": {"filters": [{"type": "zero_advantage"}]}},
        ),
        ({"orchestrator": {"drop_zero_advantage": False}}, {"orchestrator": {"filters": []}}),
        (
            {"orchestrator": {"env": [{"num_workers": "auto"}]}},
            {"orchestrator": {"train": {"env": [{"pool": {"type": "elastic"}}]}}},
        ),
    ],
)
def test_deprecated_key_becomes_its_successor(old: dict[str, Any], new: dict[str, Any]) -> None:
    assert translate(old).values == new


def test_translation_leaves_its_input_alone() -> None:
    old = {"orchestrator": {"env": [{"num_workers": 3}]}}
    translate(old)
    assert old == {"orchestrator": {"env": [{"num_workers": 3}]}}


def test_an_explicit_pool_wins_over_num_workers() -> None:
    source = {"num_workers": 3, "pool": {"type": "elastic", "multiplex": 9}}
    values = translate({"orchestrator": {"train": {"env": [source]}}}).values
    assert values["orchestrator"]["train"]["env"] == [{"pool": {"type": "elastic", "multiplex": 9}}]


def test_an_explicit_value_wins_over_a_deprecated_one() -> None:
    values = translate(
        {
            "orchestrator": {
                "sampling": {"temperature": 0.1, "top_p": 0.2},
                "train": {"sampling": {"temperature": 0.9}},
            }
        }
    ).values
    assert values["orchestrator"]["train"]["sampling"] == {"temperature": 0.9, "top_p": 0.2}
    assert "sampling" not in values["orchestrator"]


def test_no_source_is_lost_when_both_lists_are_given(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(RUN_TOML + '[[orchestrator.env]]\nid = "wordle"\n')
    with pytest.raises(ConfigError, match=r"orchestrator\.env: unknown key"):
        load_config(RunConfig, ["@", str(path)])


def test_a_section_of_the_wrong_type_is_left_for_the_validator() -> None:
    values = {"orchestrator": {"train": 5, "sampling": {"top_p": 1.0}}}
    assert translate(values).values == values


def test_one_warning_for_each_deprecated_key_of_a_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "old.toml"
    path.write_text(
        'max_steps = 1\nmodel = {name = "someone/tiny"}\n'
        '[[orchestrator.env]]\nid = "a"\nnum_workers = 1\n'
        '[[orchestrator.env]]\nid = "b"\nnum_workers = "auto"\n'
    )
    with caplog.at_level(logging.WARNING):
        assert "orchestrator" in top_level_keys(["@", str(path)])
        config = load_config(RunConfig, ["@", str(path)])
    assert [record.getMessage().split(": ")[1].split(" is ")[0] for record in caplog.records] == [
        "orchestrator.env",
        "orchestrator.train.env.0.num_workers",
    ]
    assert "(2 places)" in caplog.records[1].getMessage()
    assert str(path) in caplog.records[0].getMessage()
    assert [source.pool.type for source in config.orchestrator.train.env] == ["static", "elastic"]


def test_a_deprecated_flag_works_over_a_file_with_new_keys(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(RUN_TOML + "[orchestrator.train.sampling]\ntemperature = 1.0\n")
    config = load_config(
        RunConfig,
        [
            *("@", str(path)),
            *("--orchestrator.sampling.temperature", "0.5"),
            *("--orchestrator.env.0.num-workers", "2"),
        ],
    )
    assert config.orchestrator.train.sampling.temperature == 0.5
    assert config.orchestrator.train.env[0].pool.model_dump() == {
        "type": "static",
        "num_workers": 2,
        "max_tool_servers": 8,
    }


def test_an_error_under_a_deprecated_key_names_the_line_where_it_stands(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        'max_steps = 1\nmodel = {name = "someone/tiny"}\n'
        '[[orchestrator.env]]\nid = "a"\nnum_workers = 0\n'
    )
    with pytest.raises(ConfigError, match=r"run\.toml:5: orchestrator\.train\.env\.0\.pool\.num"):
        load_config(RunConfig, ["@", str(path)])


def test_no_deprecated_key_is_the_successor_of_another() -> None:
    assert not set(DEPRECATED) & {to.key for to in DEPRECATED.values()}


KEYS = st.sampled_from(
    ["orchestrator", "train", "env", "sampling", "max_tokens", "num_workers", "pool", "type", "x"]
)
VALUES = st.recursive(
    st.one_of(st.integers(0, 3), st.just("auto"), st.none()),
    lambda inner: st.one_of(st.dictionaries(KEYS, inner, max_size=4), st.lists(inner, max_size=2)),
    max_leaves=12,
)
ORCHESTRATORS = st.fixed_dictionaries(
    {},
    optional={
        "env": st.one_of(VALUES, st.lists(st.dictionaries(KEYS, VALUES, max_size=4), max_size=3)),
        "sampling": VALUES,
        "train": st.one_of(VALUES, st.dictionaries(KEYS, VALUES, max_size=4)),
    },
)


@given(ORCHESTRATORS)
def test_translating_twice_changes_nothing(orchestrator: dict[str, Any]) -> None:
    once = translate({"orchestrator": orchestrator})
    twice = translate(once.values)
    assert twice.values == once.values
    assert twice.warnings == ()


@pytest.mark.parametrize(
    "path", [("orchestrator", "train"), ("orchestrator", "eval"), ("eval",), ()], ids=str
)
def test_sources_are_translated_wherever_they_stand(path: tuple[str, ...]) -> None:
    old: dict[str, Any] = {"env": [{"num_workers": 3, "sampling": {"max_tokens": 9}}]}
    new: dict[str, Any] = {
        "env": [
            {
                "pool": {"type": "static", "num_workers": 3},
                "sampling": {"max_completion_tokens": 9},
            }
        ]
    }
    for part in reversed(path):
        old, new = {part: old}, {part: new}
    assert translate(old).values == new


def test_a_task_set_without_an_id_above_it_is_the_source(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        'max_steps = 1\nmodel = {name = "someone/tiny"}\n'
        '[[orchestrator.train.env]]\ntaskset = {id = "a", x = 1}\n'
        '[[orchestrator.train.env]]\nid = "best-of-n"\ntaskset = {id = "a"}\n'
    )
    first, second = load_config(RunConfig, ["@", str(path)]).orchestrator.train.env
    assert (first.id, first.taskset) == ("a", {"x": 1})
    assert (second.id, second.taskset) == ("best-of-n", {"id": "a"})


@pytest.mark.parametrize(
    ("path", "words"),
    [
        (("seq_len",), "gradus calls it model.max_length_tokens"),
        (
            ("orchestrator", "batch_size"),
            "gradus calls it orchestrator.groups_per_batch; it counts groups",
        ),
        (("ckpt",), "gradus calls it checkpoint"),
        (("wandb",), 'write [[monitor]] with type = "wandb"'),
        (
            ("orchestrator", "train", "env", 0, "errors", "type"),
            "which errors are tried again is set by retry_on",
        ),
        (("trainer", "loss", "clip_ratio"), "gradus calls it trainer.loss.clip_low"),
        (("trainer", "loss", "beta"), "gradus calls it trainer.loss.reference_kl_coefficient"),
        (
            ("orchestrator", "rollouts_per_example"),
            "gradus calls it orchestrator.train.env.N.group_size",
        ),
        (
            ("orchestrator", "eval", "env", 0, "rollouts_per_example"),
            "gradus calls it orchestrator.eval.env.0.group_size",
        ),
        (
            ("orchestrator", "train", "env", 0, "args"),
            "gradus calls it orchestrator.train.env.0.taskset",
        ),
        (("inference", "parallel"), "gradus calls it inference.tensor_parallel_size"),
        (("trainer", "model"), "gradus calls it trainer.parallel"),
        (("learning_rate",), "gradus calls it trainer.optimizer.lr"),
        (("trainer", "num_procesess"), "did you mean trainer.num_processes?"),
    ],
)
def test_keys_of_the_field_are_known_before_likeness_counts(
    path: tuple[str | int, ...], words: str
) -> None:
    assert unknown_key(RunConfig, path).startswith(f"unknown key; {words}")


def test_a_suggestion_is_a_key_of_the_config_at_hand() -> None:
    assert unknown_key(SftConfig, ("batch_size",)) == (
        "unknown key; gradus calls it batch_conversations"
    )
    assert "optimizer.lr" in unknown_key(SftConfig, ("learning_rate",))


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("trainer.lr", "trainer.optimizer.lr"),
        ("warmup_steps", "trainer.optimizer.warmup_steps"),
        ("epochs", "max_steps"),
        ("lora_r", "trainer.lora.rank"),
        ("kl_coef", "trainer.loss.reference_kl_coefficient"),
        ("orchestrator.train.env.0.reward", "@vf.reward"),
        ("sed", "seed"),
        ("trainer.temperature", "orchestrator.train.sampling.temperature"),
        ("orchestrator.filter", "did you mean orchestrator.filters?"),
        ("trainer.optimizer.beta", "did you mean trainer.optimizer.betas?"),
        ("inference.gpu", "did you mean inference.gpus?"),
        ("dataset_name", 'id = "jsonl"'),
    ],
)
def test_a_key_that_others_have_leads_to_ours(key: str, words: str) -> None:
    path = tuple(int(part) if part.isdigit() else part for part in key.split("."))
    assert words in unknown_key(RunConfig, path)


@pytest.mark.parametrize("key", ["dataset", "dataset_name", "train_file"])
def test_the_data_of_a_supervised_run_have_a_path(key: str) -> None:
    assert "data.path" in unknown_key(SftConfig, (key,))


def test_a_word_that_begins_one_choice_means_it() -> None:
    assert nearest("ppo", ["dppo", "ipo", "ppo_clip"]) == "ppo_clip"
    assert nearest("dpo", ["dppo", "ppo_clip"]) == "dppo"


def test_every_key_of_the_field_leads_to_a_key_that_exists() -> None:
    known = {"taskset", "num_tasks"}
    for model in (RunConfig, SftConfig, EvalConfig):
        for section in sections(model):
            known.add(section.path)
            known |= {f"{section.path}.{key.name}".strip(".") for key in section.keys}
    moved = [to for moves in MOVES.values() for to in moves.values()]
    named = set(CALLED)
    named |= {to.key if isinstance(to, To) else to for to in moved} - {""}
    extra = {key for key in named if ".extra_body." in key or ".extra_args." in key}
    assert named - extra - known == set()
