"""A config survives load, dump and load, whatever valid values it holds."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from configs import build_run_config, build_run_values, build_sft_config
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gradus.config import (
    AdamWConfig,
    RunConfig,
    SftConfig,
    SftProcessConfig,
    learning,
    load_config,
    resolve,
)
from gradus.config.owned import OWNED_SAMPLING

ROOT = Path(__file__).parents[3]
EVALUATION = '{"env": [{"id": "reverse-text"}], "max_retries": 5}'
NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True)
TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)
POSITIVE = st.floats(min_value=1e-9, max_value=1e9, allow_nan=False)
COUNTS = st.integers(1, 10_000)
SCALARS = st.one_of(
    st.booleans(),
    st.integers(-(2**53), 2**53),
    st.floats(allow_nan=False, allow_infinity=False),
    TEXTS.filter(lambda text: text != "None"),
)
SETTINGS = st.dictionaries(
    TEXTS,
    st.recursive(
        SCALARS,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    ),
    max_size=3,
)
OWNED = set(OWNED_SAMPLING)
SAMPLING = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.floats(0.01, 1e9),  # Colder ones no engine samples.
        "top_p": st.just(1.0),  # Less is no distribution that trains.
        "max_completion_tokens": st.integers(1, 100),
        "extra_body": SETTINGS.filter(lambda body: not OWNED & body.keys()),
    },
)
SOURCES = st.fixed_dictionaries(
    {"id": NAMES, "name": NAMES},
    optional={
        "taskset": SETTINGS.filter(lambda taskset: "id" not in taskset),
        "sampling": SAMPLING,
        "num_workers": st.integers(1, 9),
        "agent": st.fixed_dictionaries(
            {},
            optional={
                "max_turns": COUNTS,
                "harness": st.fixed_dictionaries({"id": NAMES}),
                "timeout": st.fixed_dictionaries({"rollout": POSITIVE}),
            },
        ),
        "group_size": st.integers(2, 16),
        "ratio": POSITIVE,
        "state_columns": st.lists(TEXTS.filter(lambda text: text != "None"), max_size=3),
        "agents": st.dictionaries(
            NAMES, st.fixed_dictionaries({}, optional={"max_turns": COUNTS}), max_size=2
        ),
        "env_vars": st.dictionaries(st.from_regex(r"[A-Z]{5}", fullmatch=True), TEXTS, max_size=2),
    },
)
RUNS = st.fixed_dictionaries(
    {
        "max_steps": st.integers(100, 1000),
        "orchestrator": st.fixed_dictionaries(
            {
                "train": st.fixed_dictionaries(
                    {
                        "env": st.lists(
                            SOURCES,
                            min_size=1,
                            max_size=3,
                            unique_by=lambda source: str(source["name"]).lower(),
                        )
                    },
                    optional={"sampling": SAMPLING},
                )
            },
            optional={"max_lag": st.integers(0, 8)},
        ),
    },
    optional={
        "name": NAMES,
        "seed": st.integers(0, 2**32 - 1),
        "trainer": st.fixed_dictionaries(
            {},
            optional={
                "optimizer": st.fixed_dictionaries(
                    {"lr": POSITIVE},
                    optional={"betas": st.tuples(*[st.floats(0, 0.99)] * 2).map(list)},
                ),
                "deterministic": st.booleans(),
            },
        ),
        "inference": st.fixed_dictionaries(
            {"kv_cache_gib": POSITIVE}, optional={"enforce_eager": st.booleans()}
        ),
    },
)

quick = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def load_file(name: str, content: str) -> RunConfig:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_text(content, encoding="utf-8")
        return load_config(RunConfig, ["@", str(path)])


def loaded(values: dict[str, Any]) -> RunConfig:
    return load_file("run.json", json.dumps(values))


@quick
@given(RUNS)
def test_run_config_survives_dump_and_load_as_json(changes: dict[str, Any]) -> None:
    config = loaded(build_run_values(changes))
    assert load_file("run.json", config.model_dump_json()) == config


def test_tables_that_were_made_as_objects_keep_their_kind() -> None:
    trainer = {"loss": learning.PpoClipConfig(), "optimizer": learning.SgdConfig(lr=0.1)}
    config = RunConfig.model_validate(build_run_values({"trainer": trainer}))
    again = RunConfig.model_validate(config.without_secrets(only_written=True))
    assert again.trainer == config.trainer


@quick
@given(RUNS)
def test_run_config_survives_dump_and_load_as_toml(changes: dict[str, Any]) -> None:
    config = loaded(build_run_values(changes))
    values = config.model_dump(mode="json", exclude_none=True)
    assert load_file("run.toml", tomli_w.dumps(values)) == config


@pytest.mark.parametrize(
    "words",
    [
        ["@", str(path), *further]
        for path in sorted((ROOT / "examples").glob("*/*rl*.toml"))
        for further in ([], ["--orchestrator.eval", EVALUATION])
    ],
    ids=lambda words: "-".join([Path(words[1]).stem, str(len(words))]),
)
def test_what_a_run_records_makes_the_same_processes_again(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some defaults depend on whether a key was written."""
    monkeypatch.chdir(Path(words[1]).parent)
    config = load_config(RunConfig, words)
    written = json.loads(json.dumps(config.without_secrets(only_written=True)))
    again = load_config(RunConfig, [], base=written)
    assert again.without_secrets() == config.without_secrets()
    assert again.without_secrets(only_written=True) == written
    before, after = (resolve(it, run_dir=Path("runs/x"), term=1) for it in (config, again))
    assert before.by_process() == after.by_process()


@quick
@given(RUNS)
def test_process_configs_survive_dump_and_load(changes: dict[str, Any]) -> None:
    config = loaded(build_run_values(changes))
    configs = resolve(config, run_dir=Path("runs/x"), term=1)
    with tempfile.TemporaryDirectory() as folder:
        for name, process in configs.by_process().items():
            path = Path(folder) / f"{name}.json"
            path.write_text(process.model_dump_json())
            assert type(process).model_validate_json(path.read_bytes()) == process


def test_supervised_config_survives_dump_and_load(tmp_path: Path) -> None:
    config = build_sft_config({"optimizer": {"lr": 3e-3, "betas": [0.5, 0.6]}})
    path = tmp_path / "sft.json"
    path.write_text(config.model_dump_json())
    assert load_config(SftConfig, ["@", str(path)]) == config
    process = resolve(config, run_dir=tmp_path, term=1).launched
    path.write_text(process.model_dump_json())
    assert load_config(SftProcessConfig, ["@", str(path)]) == process


@pytest.mark.parametrize("kind", ["adamw", "muon", "sgd"])
def test_each_optimizer_survives_the_round_trip(kind: str) -> None:
    config = build_run_config({"trainer": {"optimizer": {"type": kind, "lr": 3e-3}}})
    again = RunConfig.model_validate(config.model_dump())
    assert again == config
    assert again.trainer.optimizer.type == kind


def test_an_optimizer_without_a_type_is_adamw() -> None:
    config = build_run_config({"trainer": {"optimizer": {"lr": 3e-3}}})
    assert config.trainer.optimizer == AdamWConfig(lr=3e-3)
