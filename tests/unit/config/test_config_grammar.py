"""The grammar of the command line, one rule per test."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest
from configs import RUN_TOML

from gradus.config import RunConfig, load_config, top_level_keys
from gradus.config.keys import key_path
from gradus.errors import ConfigError


@pytest.fixture
def base(tmp_path: Path) -> str:
    path = tmp_path / "base.toml"
    path.write_text(RUN_TOML)
    return str(path)


def load(base: str, *flags: str) -> RunConfig:
    return load_config(RunConfig, ["@", base, *flags])


def test_files_merge_left_to_right(base: str, tmp_path: Path) -> None:
    overlay = tmp_path / "overlay.toml"
    overlay.write_text("max_steps = 5\n[model]\nmax_length_tokens = 64\n")
    config = load(base, "@", str(overlay))
    assert (config.max_steps, config.model.name) == (5, "someone/tiny")
    assert config.model.max_length_tokens == 64
    assert load_config(RunConfig, ["@", str(overlay), "@", base]).max_steps == 20


@pytest.mark.parametrize("name", ["run.toml", "run.json"])
def test_a_byte_order_mark_and_the_line_ends_of_windows_are_read_over(
    tmp_path: Path, name: str
) -> None:
    text = RUN_TOML if name.endswith(".toml") else json.dumps(tomllib.loads(RUN_TOML), indent=1)
    path = tmp_path / name
    path.write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())
    assert load_config(RunConfig, ["@", str(path)]).model.name == "someone/tiny"


def test_a_list_of_a_later_file_replaces_the_list(base: str, tmp_path: Path) -> None:
    overlay = tmp_path / "overlay.toml"
    overlay.write_text('[[orchestrator.train.env]]\nid = "wordle"\n')
    sources = load(base, "@", str(overlay)).orchestrator.train.env
    assert [source.id for source in sources] == ["wordle"]


def test_flags_win_over_files_wherever_they_stand(base: str) -> None:
    assert load_config(RunConfig, ["--max-steps", "7", "@", base]).max_steps == 7
    assert load(base, "--max-steps", "7").max_steps == 7


def test_the_later_flag_wins(base: str) -> None:
    assert load(base, "--seed", "1", "--seed", "2").seed == 2


def test_a_file_can_be_mounted_into_a_section(base: str, tmp_path: Path) -> None:
    section = tmp_path / "optimizer.toml"
    section.write_text("lr = 0.5\n")
    for words in (["@", str(section)], [f"@{section}"]):
        assert load(base, "--trainer.optimizer", *words).trainer.optimizer.lr == 0.5


def test_an_error_in_a_mounted_file_names_its_line(base: str, tmp_path: Path) -> None:
    section = tmp_path / "optimizer.toml"
    section.write_text("\nlrr = 0.5\n")
    with pytest.raises(ConfigError, match=r"optimizer\.toml:2: trainer\.optimizer\.lrr"):
        load(base, "--trainer.optimizer", "@", str(section))


def test_a_file_can_be_json(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(
        json.dumps(
            {
                "max_steps": 3,
                "model": {"name": "someone/tiny", "tokenizer": None},
                "orchestrator": {"train": {"env": [{"id": "gradus-reverse-text"}]}},
            }
        )
    )
    config = load_config(RunConfig, [f"@{path}"])
    assert (config.max_steps, config.model.tokenizer) == (3, None)


def test_flags_are_key_paths_in_kebab_case(base: str) -> None:
    config = load(base, "--trainer.optimizer.max-grad-norm", "0.5", "--inference.port=8000")
    assert (config.trainer.optimizer.max_grad_norm, config.inference.port) == (0.5, 8000)


def test_snake_case_works_as_well(base: str) -> None:
    assert load(base, "--max_steps", "3").max_steps == 3


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--trainer.deterministic"], True),
        (["--trainer.deterministic", "true"], True),
        (["--trainer.deterministic=False"], False),
        (["--no-trainer.deterministic"], False),
        (["--trainer.no-deterministic"], False),
        (["--trainer.deterministic", "--no-trainer.deterministic"], False),
    ],
)
def test_a_boolean_is_switched_by_its_flag(base: str, flags: list[str], expected: bool) -> None:
    assert load(base, *flags).trainer.deterministic is expected


def test_none_is_the_empty_value(base: str, tmp_path: Path) -> None:
    overlay = tmp_path / "overlay.toml"
    overlay.write_text('name = "a"\n[inference]\nkv_cache_gib = "None"\n')
    config = load(base, "@", str(overlay), "--name", "None")
    assert (config.name, config.inference.kv_cache_gib) == (None, None)


def test_lists_and_tables_are_json(base: str) -> None:
    config = load(
        base,
        *("--trainer.optimizer.betas", "[0.5, 0.75]"),
        *("--inference.extra-args", '{"max_num_batched_tokens": 9}'),
        *("--orchestrator.train.env", '[{"id": "wordle"}, {"id": "zebra"}]'),
    )
    assert config.trainer.optimizer.betas == (0.5, 0.75)
    assert config.inference.extra_args == {"max_num_batched_tokens": 9}
    assert [source.id for source in config.orchestrator.train.env] == ["wordle", "zebra"]


def test_one_entry_of_a_list_is_reached_by_its_place(base: str) -> None:
    sources = load(
        base,
        *("--orchestrator.train.env.0.group-size", "4"),
        *("--orchestrator.train.env.1.id", "wordle"),
        *("--orchestrator.train.env.1.ratio", "2"),
    ).orchestrator.train.env
    assert [(source.id, source.group_size, source.ratio) for source in sources] == [
        ("gradus-reverse-text", 4, 1.0),
        ("wordle", 8, 2.0),
    ]


def test_a_config_can_come_from_flags_alone() -> None:
    words = [
        "--max-steps",
        "1",
        "--model.name",
        "someone/tiny",
        "--orchestrator.train.env.0.id",
        "x",
    ]
    assert load_config(RunConfig, words).orchestrator.train.env[0].id == "x"


def test_a_union_is_chosen_by_its_type(base: str) -> None:
    env = "--orchestrator.train.env.0.curriculum"
    source = load(base, f"{env}.easy-above", "0.5", f"{env}.type", "difficulty")
    curriculum = source.orchestrator.train.env[0].curriculum
    assert (curriculum.type, curriculum.easy_above) == ("difficulty", 0.5)


def test_another_type_drops_the_keys_of_the_earlier_variant(base: str, tmp_path: Path) -> None:
    overlay = tmp_path / "overlay.toml"
    overlay.write_text(
        '[[orchestrator.train.env]]\nid = "x"\n'
        'curriculum = {type = "difficulty", easy_above = 0.5}\n'
    )
    flag = ("--orchestrator.train.env.0.curriculum.type", "uniform")
    curriculum = load(base, "@", str(overlay), *flag).orchestrator.train.env[0].curriculum
    assert curriculum.model_dump() == {"type": "uniform"}


@pytest.mark.parametrize(
    "written", ["", 'type = "adamw"\n', 'type = "adamw"\nbetas = [0.5, 0.6]\n']
)
def test_another_type_keeps_the_keys_that_it_has_too(
    base: str, tmp_path: Path, written: str
) -> None:
    overlay = tmp_path / "overlay.toml"
    overlay.write_text(f'[trainer.optimizer]\n{written}lr = 0.5\nschedule = "cosine"\n')
    flag = ("--trainer.optimizer.type", "muon")
    optimizer = load(base, "@", str(overlay), *flag).trainer.optimizer
    assert (optimizer.type, optimizer.lr, optimizer.schedule) == ("muon", 0.5, "cosine")


def test_another_type_of_a_free_table_drops_what_files_wrote_but_no_flag(
    base: str, tmp_path: Path
) -> None:
    overlay = tmp_path / "overlay.toml"
    overlay.write_text(
        '[[orchestrator.train.env]]\nid = "x"\n[orchestrator.train.env.agent]\n'
        'runtime = {type = "subprocess", a = 1}\n'
    )
    runtime = "--orchestrator.train.env.0.agent.runtime"
    flags = (f"{runtime}.image", "i", f"{runtime}.type", "docker")
    source = load(base, "@", str(overlay), *flags).orchestrator.train.env[0]
    assert source.agent.runtime == {"image": "i", "type": "docker"}


def test_a_flag_of_another_type_is_refused_and_not_dropped(base: str) -> None:
    curriculum = "--orchestrator.train.env.0.curriculum"
    with pytest.raises(ConfigError, match="unknown key; it is an option of 'difficulty'"):
        load(base, f"{curriculum}.easy-above", "0.5", f"{curriculum}.type", "uniform")


@pytest.mark.parametrize(
    ("flags", "rank", "alpha"),
    [
        (["--trainer.lora"], 64, 65),
        (["--trainer.lora", '{"rank": 8}'], 8, 65),
        (["--trainer.lora", '{"rank": 8}', "--trainer.lora.alpha", "9"], 8, 9),
        (["--trainer.lora.alpha", "9", "--trainer.lora", '{"rank": 8}'], 8, 9),
        (["--trainer.lora.rank", "8", "--trainer.lora"], 8, 65),
        (["--no-trainer.lora", "--trainer.lora.rank", "8"], 8, 32),
        (["--no-trainer.lora", "--trainer.lora"], 16, 32),
    ],
)
def test_flags_of_one_section_hold_left_to_right_over_its_file(
    base: str, tmp_path: Path, flags: list[str], rank: int, alpha: float
) -> None:
    overlay = tmp_path / "overlay.toml"
    overlay.write_text("[trainer.lora]\nrank = 64\nalpha = 65\n")
    lora = load(base, "@", str(overlay), *flags).trainer.lora
    assert lora is not None
    assert (lora.rank, lora.alpha) == (rank, alpha)


def test_a_list_that_a_flag_gives_can_be_changed_by_the_next(base: str) -> None:
    env = "--orchestrator.train.env"
    sources = load(base, env, '[{"id": "wordle"}]', f"{env}.0.ratio", "4").orchestrator.train.env
    assert [(source.id, source.ratio) for source in sources] == [("wordle", 4.0)]


@pytest.mark.parametrize(
    ("key", "written", "below"),
    [("orchestrator.train.env", "[wordle]", "0.ratio"), ("orchestrator", "{a", "max-lag")],
)
def test_a_flag_that_is_no_json_is_refused_once(
    base: str, key: str, written: str, below: str
) -> None:
    flags = [f"--{key}", written]
    for words in (flags, [*flags, f"--{key}.{below}", "4"]):
        with pytest.raises(ConfigError, match="is not JSON") as refused:
            load(base, *words)
        assert str(refused.value).count("JSON") == 1


@pytest.mark.parametrize(
    "flags",
    [
        ["--trainer.gpus", "0,1"],
        ["--trainer", "5"],
        ["--seed", "1e3"],
        ["--trainer.env-vars", "[NaN]"],
        ["--trainer.env-vars", '{"A": 1e999}'],
    ],
)
def test_a_wrong_flag_is_told_by_its_name(base: str, flags: list[str]) -> None:
    with pytest.raises(ConfigError, match=f"^{flags[0]}: ") as refused:
        load(base, *flags)
    assert len(str(refused.value).splitlines()) == 1


def test_a_file_after_a_switch_is_not_what_the_switch_says(base: str) -> None:
    told = f"--trainer.deterministic takes a value and no file; {base} is one"
    with pytest.raises(ConfigError, match=re.escape(told)):
        load_config(RunConfig, ["--trainer.deterministic", "@", base])


def test_a_passed_through_setting_can_be_a_switch(base: str) -> None:
    env = "--orchestrator.train.env.0"
    flags = (f"{env}.sampling.extra-body.ignore-eos", f"{env}.taskset.no-hints")
    source = load(base, *flags).orchestrator.train.env[0]
    assert source.sampling.extra_body == {"ignore_eos": True}
    assert source.taskset == {"hints": False}


def test_a_text_key_takes_a_number_as_text(base: str) -> None:
    assert load(base, "--model.name", "123").model.name == "123"
    assert load(base, "--model.name", "true").model.name == "true"


@pytest.mark.parametrize(
    ("typed", "value"),
    [
        ("3", 3),
        ("0.5", 0.5),
        ("true", True),
        ("007", "007"),
        ("NaN", "NaN"),
        ("train", "train"),
        ('"3"', "3"),
        ("[1, 2]", [1, 2]),
        ('{"a": 1}', {"a": 1}),
        ("None", None),
    ],
)
def test_a_passed_through_setting_is_guessed_like_json(
    base: str, typed: str, value: object
) -> None:
    config = load(base, "--orchestrator.train.env.0.taskset.x", typed)
    assert config.orchestrator.train.env[0].taskset == {"x": value}


def test_a_setting_in_a_file_keeps_its_type(base: str, tmp_path: Path) -> None:
    overlay = tmp_path / "overlay.toml"
    overlay.write_text(
        '[[orchestrator.train.env]]\nid = "x"\ntaskset = {year = "2024", code = "007"}\n'
    )
    config = load(base, "@", str(overlay))
    assert config.orchestrator.train.env[0].taskset == {"year": "2024", "code": "007"}


def test_variables_stay_text(base: str) -> None:
    config = load(base, "--trainer.env-vars.OMP_NUM_THREADS", "1")
    assert config.trainer.env_vars == {"OMP_NUM_THREADS": "1"}


def test_a_value_may_begin_with_a_dash_or_an_at_sign(base: str) -> None:
    config = load(base, "--trainer.env-vars.A", "-1", "--output-dir=@runs", "--model.tokenizer=--x")
    assert (config.trainer.env_vars, config.output_dir) == ({"A": "-1"}, "@runs")
    assert config.model.tokenizer == "--x"


def test_a_flag_names_a_key_path() -> None:
    assert key_path("a-b.0.c-d") == ("a_b", 0, "c_d")


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


def test_sections_at_the_top_can_be_asked_for_without_validation(base: str) -> None:
    assert top_level_keys(["@", base, "--data.path", "x"]) == {
        "max_steps",
        "model",
        "orchestrator",
        "data",
    }
